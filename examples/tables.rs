//! A run as text: settings, and tables with one row per rank.

use fsdp_burn::{Config, human_bytes};

use crate::{Measured, Predicted, RankRow, Report, StepMeans};

/// The configuration, every key with its value, without the explanations.
pub fn settings(config: &Config) -> String {
    let printed = config.to_toml();
    let is_setting = |line: &&str| !line.is_empty() && !line.starts_with('#');
    printed.lines().filter(is_setting).map(|line| format!("  {line}\n")).collect()
}

/// Predicted and measured memory.
pub fn memory_table(ranks: &[RankRow]) -> String {
    let header = ["rank", "", "parameters", "gradients", "gathered", "optimizer", "activations", "peak"];
    let mut rows = vec![header.map(str::to_owned)];
    for RankRow { rank, predicted, measured, .. } in ranks {
        let Predicted { parameter_bytes, gathered_bytes, optimizer_bytes, activation_bytes, peak_bytes, .. } =
            *predicted;
        let gradient_bytes = predicted.gradient_bytes + predicted.in_flight_bytes;
        let bytes = [parameter_bytes, gradient_bytes, gathered_bytes, optimizer_bytes, activation_bytes, peak_bytes];
        let [a, b, c, d, e, f] = bytes.map(human_bytes);
        rows.push([rank.to_string(), "predicted".into(), a, b, c, d, e, f]);
        let Measured { parameter_bytes, gradient_bytes, gathered_bytes } = *measured;
        let [a, b, c] = [parameter_bytes, gradient_bytes, gathered_bytes].map(human_bytes);
        rows.push([String::new(), "measured".into(), a, b, c, "-".into(), "-".into(), "-".into()]);
    }
    table(&rows)
}

/// Traffic and time.
pub fn time_table(ranks: &[RankRow]) -> String {
    let header = ["rank", "collectives", "sent", "computing", "waiting"];
    let mut rows = vec![header.map(str::to_owned)];
    for row in ranks {
        let seconds = [row.computing_s, row.waiting_s].map(|seconds| format!("{seconds:.1} s"));
        let [computing, waiting] = seconds;
        rows.push([
            row.rank.to_string(),
            row.num_collectives.to_string(),
            human_bytes(row.sent_bytes),
            computing,
            waiting,
        ]);
    }
    table(&rows)
}

/// What ranks have moved to and from their disks; `None` where none has one.
pub fn disk_table(ranks: &[RankRow]) -> Option<String> {
    let header = ["rank", "on disk", "read", "written", "per second", "waiting"];
    let mut rows = vec![header.map(str::to_owned)];
    for (rank, disk) in ranks.iter().filter_map(|row| Some((row.rank, row.disk?))) {
        let [held, read, written] = [disk.held_bytes, disk.read_bytes, disk.written_bytes].map(human_bytes);
        let per_second = human_bytes(disk.bytes_per_s as u64);
        rows.push([rank.to_string(), held, read, written, per_second, format!("{:.1} s", disk.waiting_s)]);
    }
    (rows.len() > 1).then(|| table(&rows))
}

/// Times of a mean step, and below them the largest peaks of a rank by kind, with that of the process.
pub fn step_table(report: &Report) -> String {
    let StepMeans { computing_s, optimizer_s, exposed_s, loss_s, communication_s, overlap } = report.step;
    let times = [computing_s, optimizer_s, exposed_s, loss_s, communication_s];
    let [computing, optimizer, exposed, losses, communication] =
        times.map(|seconds| format!("{:.1} ms", 1e3 * seconds));
    let overlap = overlap.map_or("-".to_owned(), |share| format!("{:.0}%", 100.0 * share));
    let time_header = ["computing", "optimizer", "exposed", "losses", "communication", "overlap"].map(str::to_owned);
    let largest = |of: fn(&Measured) -> u64| {
        human_bytes(report.ranks.iter().map(|row| of(&row.measured)).max().unwrap_or_default())
    };
    let bytes = [
        largest(|measured| measured.parameter_bytes),
        largest(|measured| measured.gathered_bytes),
        largest(|measured| measured.gradient_bytes),
        report.process.measured_bytes.map_or("-".to_owned(), human_bytes),
    ];
    let byte_header = ["parameters", "gathered", "gradients", "process"].map(str::to_owned);
    table(&[time_header, [computing, optimizer, exposed, losses, communication, overlap]])
        + "\n"
        + &table(&[byte_header, bytes])
}

/// Columns as wide as their widest cell, numbers to the right.
fn table<const N: usize>(rows: &[[String; N]]) -> String {
    let widths: [usize; N] = std::array::from_fn(|column| rows.iter().map(|row| row[column].len()).max().unwrap_or(0));
    let line = |row: &[String; N]| {
        let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:>width$}"));
        format!("  {}\n", cells.collect::<Vec<_>>().join("  "))
    };
    rows.iter().map(line).collect()
}
