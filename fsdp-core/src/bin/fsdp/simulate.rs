//! `fsdp simulate`: a step of the engine's own schedule on many ranks, before any of them exists.

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use fsdp_core::{
    Config, Job, Moved, Recorded, Search, SearchLimits, SimOptions, SimReport, SpanKind, Stage, Table, TierShares,
    TraceStream, grouped, human_bytes, sensitivity, simulate, timeline,
};
use serde_json::json;

use crate::machine::{MachineArgs, Setting};
use crate::model::ModelArgs;
use crate::number::{MOST, between, up_to};
use crate::output::{put, putln};
use crate::plan::sentence;
use crate::rate::seconds;

/// Run a step in a simulator, and find what makes it faster
///
/// Every rank runs the schedule that the engine runs; computation and collectives take the time that the options say.
/// Without stragglers and jitter all ranks are alike, and one is enough.
#[derive(Args)]
pub(crate) struct Simulate {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    machine: MachineArgs,
    /// Stage, in place of the configuration's
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(0..=3), help_heading = "Simulation")]
    stage: Option<u8>,
    /// Steps to simulate
    #[arg(long, value_name = "N", default_value = "1", value_parser = up_to(MOST), help_heading = "Simulation")]
    steps: usize,
    /// Ranks that compute slower, with the factor of their times, such as 3:1.5
    #[arg(long, value_name = "RANK:FACTOR", value_parser = parse_straggler, value_delimiter = ',',
          help_heading = "Simulation")]
    straggler: Vec<(usize, f64)>,
    /// Spread of computation times: each is multiplied with exp(jitter x normal)
    #[arg(long, value_name = "SPREAD", default_value = "0", value_parser = between(0.0, 10.0),
          help_heading = "Simulation")]
    jitter: f64,
    /// Seed of the jitter
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Simulation")]
    seed: u64,
    /// Show how much prefetch depth, unit size, batch and links matter
    #[arg(long, help_heading = "Simulation")]
    sensitivity: bool,
    /// Find the best prefetch depth and unit size, and print a configuration
    #[arg(long, help_heading = "Simulation")]
    tune: bool,
    /// Run the times of a recorded trace (`train --trace FILE`) through the simulator, and compare
    #[arg(long, value_name = "FILE", help_heading = "Simulation")]
    replay: Option<PathBuf>,
    /// Rank of the recorded trace
    #[arg(long, value_name = "N", default_value_t = 0, requires = "replay", help_heading = "Simulation")]
    replay_rank: usize,
    /// Step of the recorded trace [default: its last but one]
    #[arg(long, value_name = "N", requires = "replay", help_heading = "Simulation")]
    replay_step: Option<u64>,
    /// Write a trace for Perfetto or a browser's tracing page
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    trace: Option<PathBuf>,
    /// Ranks in the trace
    #[arg(
        long,
        value_name = "RANK",
        value_delimiter = ',',
        default_value = "0",
        requires = "trace",
        help_heading = "Output"
    )]
    trace_ranks: Vec<usize>,
    /// Print JSON
    #[arg(long, help_heading = "Output")]
    json: bool,
}

/// A rank and the factor of its times.
fn parse_straggler(text: &str) -> Result<(usize, f64), String> {
    let parts = text.split_once(':').and_then(|(rank, factor)| Some((rank.parse().ok()?, factor.parse().ok()?)));
    let good = parts.filter(|(_, factor): &(usize, f64)| (1e-6..=1e6).contains(factor));
    good.ok_or_else(|| {
        format!(
            "`{text}` is no straggler; write rank and factor, such as 3:1.5, with a factor from 0.000001 to 1000000"
        )
    })
}

impl Simulate {
    pub(crate) fn run(self) -> Result<ExitCode, Box<dyn Error>> {
        let setting = self.machine.setting(&self.model)?;
        let stage = match self.stage {
            Some(number) => Stage::try_from(number)?,
            None => setting.config.stage,
        };
        let world_size = setting.config.world_size;
        let ranks = self.straggler.iter().map(|(rank, _)| rank).chain(&self.trace_ranks);
        if let Some(rank) = ranks.copied().find(|&rank| rank >= world_size) {
            return Err(format!("there is no rank {rank} among {world_size}; ranks count from 0").into());
        }
        if let Some(file) = &self.replay {
            return self.replay(file, &setting, stage);
        }
        let options = SimOptions {
            num_steps: self.steps,
            stragglers: self.straggler.clone(),
            jitter: self.jitter,
            seed: self.seed,
            traced: if self.trace.is_some() { self.trace_ranks.clone() } else { Vec::new() },
        };
        let workload = setting.job.workload(stage);
        self.check_work(&setting, workload.units.len())?;
        let report = simulate(&workload, &options);
        if let Some(file) = &self.trace {
            timeline(&workload, &report).write(file).map_err(|error| {
                format!("--trace: {}: {error}; name a file in a folder that exists", file.display())
            })?;
        }
        let limits = SearchLimits { device_bytes: setting.device_bytes, ..SearchLimits::default() };
        let search = self.tune.then(|| Search::run(&setting.job, stage, &limits));
        if self.json {
            putln!("{}", serde_json::to_string_pretty(&self.as_json(&setting, stage, &report, search.as_ref()))?);
        } else {
            put!("{}", self.text(&setting, stage, &report, search.as_ref()));
        }
        Ok(ExitCode::SUCCESS)
    }

    /// Refuses what would take hours.
    fn check_work(&self, setting: &Setting, num_units: usize) -> Result<(), String> {
        const MOST_MOVES: usize = 300_000_000;
        // Each rank has a clock of its own where none are alike.
        // A straggler sets apart its groups along both axes.
        let kinds = (1 + self.straggler.len()).saturating_mul(1 + self.straggler.len());
        let world_size = setting.config.world_size;
        let clocks = if self.jitter > 0.0 { world_size } else { kinds.min(world_size) };
        let micro_batches = setting.config.training.gradient_accumulation;
        let of_step = clocks.saturating_mul(num_units).saturating_mul(micro_batches).saturating_mul(12);
        if of_step.saturating_mul(self.steps + 1) > MOST_MOVES {
            return Err(format!(
                "{} steps move the clocks of {} ranks and {} units too often; give fewer --steps, or no --jitter",
                grouped(self.steps as u64),
                grouped(clocks as u64),
                grouped(num_units as u64)
            ));
        }
        Ok(())
    }

    fn text(&self, setting: &Setting, stage: Stage, report: &SimReport, search: Option<&Search>) -> String {
        let mut text = String::new();
        for (word, told) in &setting.told {
            text += &format!("{word:<10} {told}\n");
        }
        text += &format!("\n{}\n\n", sentence(&stage.to_string()));
        let overlap = report.overlap().map_or("nothing".into(), |share| format!("{:.1}%", 100.0 * share));
        let lines = [
            ("step", seconds(report.step_s)),
            ("computes", seconds(report.compute_s)),
            ("stands still", format!("{} ({overlap} of the communication is hidden)", seconds(report.exposed_s))),
            ("communicates", seconds(report.communication_s)),
            (
                "sends",
                format!("{} in {} messages", human_bytes(report.sent_bytes), grouped(report.traffic.num_messages)),
            ),
            ("moves", moved(report)),
            ("waits", format!("{} for what lies below memory", seconds(report.tier_wait_s))),
            ("gathered", format!("{} at most", human_bytes(report.peak_gathered_bytes))),
            ("tokens/s", grouped((tokens(&setting.job) as f64 / report.step_s) as u64)),
            ("simulated", told_classes(report, setting.config.world_size)),
        ];
        let moves = report.moved.total_bytes() > 0;
        let lines = lines.iter().filter(|(word, _)| moves || !["moves", "waits"].contains(word));
        lines.for_each(|(word, told)| text += &format!("{word:<13} {told}\n"));
        if self.sensitivity {
            text += &format!("\n{}", sensitivities(&setting.job, stage));
        }
        if let Some(search) = search {
            text += &format!("\n{}", tuned(setting, stage, search));
        }
        text
    }

    fn as_json(
        &self,
        setting: &Setting,
        stage: Stage,
        report: &SimReport,
        search: Option<&Search>,
    ) -> serde_json::Value {
        let tried = |tried: &fsdp_core::Tried| {
            json!({
                "group": tried.group, "prefetch": tried.depth, "step_s": tried.step_s, "exposed_s": tried.exposed_s,
                "peak_bytes": tried.peak_bytes, "fits": tried.fits,
            })
        };
        let varied: Vec<_> = match self.sensitivity {
            true => sensitivity(&setting.job, stage),
            false => Vec::new(),
        };
        json!({
            "stage": stage.number(),
            "ranks": setting.config.world_size,
            "step_s": report.step_s,
            "compute_s": report.compute_s,
            "exposed_s": report.exposed_s,
            "communication_s": report.communication_s,
            "overlap": report.overlap(),
            "sent_bytes": report.sent_bytes,
            "tier_wait_s": report.tier_wait_s,
            "moved": crate::plan::moved_json(report),
            "peak_gathered_bytes": report.peak_gathered_bytes,
            "classes": report.num_classes,
            "updates": report.num_updates,
            "sensitivity": varied.iter().map(|variation| json!({
                "what": variation.what,
                "step_s": variation.report.step_s,
                "exposed_s": variation.report.exposed_s,
                "tokens_per_s": variation.tokens_per_s,
            })).collect::<Vec<_>>(),
            "tried": search.map(|search| search.tried.iter().map(tried).collect::<Vec<_>>()),
            "best": search.and_then(|search| search.best.as_ref().map(tried)),
        })
    }

    fn replay(&self, file: &std::path::Path, setting: &Setting, stage: Stage) -> Result<ExitCode, Box<dyn Error>> {
        let recorded = Recorded::read(file)?;
        let steps = recorded.steps();
        let step = self.replay_step.unwrap_or_else(|| steps.get(steps.len().saturating_sub(2)).copied().unwrap_or(0));
        let rank = self.replay_rank;
        let workload = recorded.workload(&setting.job, stage, rank, step)?;
        let options = SimOptions { traced: vec![0], ..SimOptions::default() };
        let report = simulate(&workload, &options);
        putln!("{}: step {step} of rank {rank}\n", file.display());
        let mut all_equal = true;
        for stream in TraceStream::ALL {
            let (was, is) = (recorded.order(rank, step, stream)?, report.order(&workload, 0, stream));
            let first = was.iter().zip(&is).position(|(was, is)| was != is);
            let first = first.or((was.len() != is.len()).then(|| was.len().min(is.len())));
            let name = |order: &[(SpanKind, String)], at: usize| {
                order.get(at).map_or("nothing".into(), |(kind, unit)| format!("{} {unit}", kind.name()))
            };
            match first {
                None => putln!("{:<8} {} spans in the same order", stream.name(), was.len()),
                Some(at) => putln!(
                    "{:<8} differs at span {at}: recorded {}, simulated {}",
                    stream.name(),
                    name(&was, at),
                    name(&is, at)
                ),
            }
            all_equal &= first.is_none();
        }
        let measured_s = recorded.step_s(rank, step)?;
        putln!("\nrecorded  {}", seconds(measured_s));
        let difference = 100.0 * (report.step_s / measured_s - 1.0);
        putln!(
            "simulated {} ({difference:+.1}%), of which {} stand still",
            seconds(report.step_s),
            seconds(report.exposed_s)
        );
        Ok(if all_equal { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

/// What goes to and from host memory and disks in a step.
fn moved(report: &SimReport) -> String {
    let part = |name: &str, moved: Moved| {
        let bytes = moved.read_bytes.saturating_add(moved.written_bytes);
        let (read, written) = (human_bytes(moved.read_bytes), human_bytes(moved.written_bytes));
        (bytes > 0).then(|| format!("{read} from and {written} to {name}"))
    };
    let parts = [part("host memory", report.moved.host), part("disk", report.moved.nvme)];
    parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

fn told_classes(report: &SimReport, world_size: usize) -> String {
    match report.num_classes {
        1 => format!("{} ranks, all alike", grouped(world_size as u64)),
        classes => format!("{} ranks of {} kinds", grouped(world_size as u64), grouped(classes as u64)),
    }
}

fn tokens(job: &Job) -> u64 {
    let ranks = job.num_micro_batches.saturating_mul(job.mesh.world_size());
    job.num_tokens.saturating_mul(ranks as u64)
}

fn sensitivities(job: &Job, stage: Stage) -> String {
    let mut table = Table::new(["what changes", "step", "exposed", "tokens/s", "difference"]);
    let variations = sensitivity(job, stage);
    let given = variations.first().map_or(1.0, |given| given.tokens_per_s);
    for variation in &variations {
        table.row([
            variation.what.clone(),
            seconds(variation.report.step_s),
            seconds(variation.report.exposed_s),
            grouped(variation.tokens_per_s as u64),
            format!("{:+.1}%", 100.0 * (variation.tokens_per_s / given - 1.0)),
        ]);
    }
    table.to_string()
}

fn tuned(setting: &Setting, stage: Stage, search: &Search) -> String {
    let mut table = Table::new(["units in one", "prefetch", "step", "exposed", "peak", "fits"]);
    for tried in &search.tried {
        table.row([
            tried.group.to_string(),
            tried.depth.to_string(),
            seconds(tried.step_s),
            seconds(tried.exposed_s),
            human_bytes(tried.peak_bytes),
            if tried.fits { "yes" } else { "no" }.to_owned(),
        ]);
    }
    let Some(best) = search.best else {
        return format!("{table}\nNone of them fits; `fsdp plan` says what would.\n");
    };
    let mut config = Config { stage, ..setting.config.clone() };
    if !stage.shards_parameters() {
        // There are no blocks of parameters that could lie elsewhere, or be cut again.
        config.offload.parameters = TierShares::DEVICE;
        config.reshard_after_forward = None;
    }
    if stage.shards_parameters() {
        (config.prefetch.forward, config.prefetch.backward) = (best.depth, best.depth);
    }
    let units = match best.group {
        1 => "units as they are".to_owned(),
        group => format!("{group} neighbouring units in one, where the model says `#[shard(units)]`"),
    };
    let what = match stage.shards_parameters() {
        true => format!("prefetch depth {} with {units}", best.depth),
        false => units,
    };
    format!("{table}\nBest: {what}. As a configuration:\n\n{}", crate::config::brief(&config))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stragglers_are_a_rank_and_a_factor() {
        assert_eq!(parse_straggler("3:1.5"), Ok((3, 1.5)));
        for text in ["3", "3:", ":2", "3:0", "3:-1", "a:2", "3:inf", "3:1e7"] {
            assert!(parse_straggler(text).unwrap_err().contains("such as 3:1.5"), "{text}");
        }
    }
}
