//! `fsdp plan`: memory, traffic and time of every stage, before a run.

use std::error::Error;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use fsdp_core::{ComputePrecision, Forecast, Moved, SimReport, StageForecast, Table, TierBytes, grouped, human_bytes};
use serde_json::json;

use crate::machine::{MachineArgs, Setting};
use crate::model::ModelArgs;
use crate::output::{put, putln};
use crate::page;
use crate::rate::seconds;

/// Show what each stage needs and takes, and which to take
///
/// Memory is that of the first rank, whose blocks are the largest; times come from a simulated step of the schedule that
/// the engine runs. Left out: what an allocator rounds up, and buffers of a network library.
#[derive(Args)]
pub(crate) struct Plan {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    machine: MachineArgs,
    /// Print sizes in powers of 1000 (GB), as papers do, and not of 1024 (GiB)
    #[arg(long, help_heading = "Output")]
    decimal: bool,
    /// Print JSON
    #[arg(long, help_heading = "Output")]
    json: bool,
    /// Write a page with the picture, one file for any browser
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    html: Option<PathBuf>,
}

impl Plan {
    pub(crate) fn run(self) -> Result<ExitCode, Box<dyn Error>> {
        let setting = self.machine.setting(&self.model)?;
        let forecast = Forecast::new(&setting.job, setting.device_bytes);
        if let Some(file) = &self.html {
            fs::write(file, page::html(&setting, &forecast))
                .map_err(|error| format!("--html: {}: {error}; name a file in a folder that exists", file.display()))?;
        }
        if self.json {
            putln!("{}", serde_json::to_string_pretty(&as_json(&setting, &forecast))?);
        } else {
            put!("{}", text(&setting, &forecast, self.decimal));
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// A size in one unit for the whole table, so that columns can be compared.
fn sizer(largest: u64, decimal: bool) -> (String, impl Fn(u64) -> String) {
    let base: f64 = if decimal { 1000.0 } else { 1024.0 };
    let names = ["B", "KB", "MB", "GB", "TB", "PB"];
    let mut power = 0;
    while power + 1 < names.len() && largest as f64 >= base.powi(power as i32 + 1) {
        power += 1;
    }
    let name = if decimal || power == 0 { names[power].to_owned() } else { names[power].replace('B', "iB") };
    (name, move |bytes: u64| match power {
        0 => bytes.to_string(),
        _ => format!("{:.1}", bytes as f64 / base.powi(power as i32)),
    })
}

fn text(setting: &Setting, forecast: &Forecast, decimal: bool) -> String {
    let mut text = String::new();
    for (word, told) in &setting.told {
        text += &format!("{word:<10} {told}\n");
    }
    let peaks = forecast.stages.iter().map(|of| of.memory.peak_or_known_bytes());
    let (unit, size) = sizer(peaks.max().unwrap_or(0), decimal);
    // Columns of what lies elsewhere are there where anything does.
    let offloads = is_offloading(forecast);
    let mut header = vec![
        "stage",
        "parameters",
        "gradients",
        "optimizer",
        "state",
        "gathered",
        "reducing",
        "activations",
        "peak",
        "fits",
        "N_min",
    ];
    if offloads {
        header.splice(8..8, ["passing"]);
        header.extend(["host", "disk"]);
    }
    let mut memory = Table::new(header);
    for of in &forecast.stages {
        let held = of.memory;
        let fits = of.fits.map_or("?", |fits| if fits { "yes" } else { "no" });
        let mut cells = vec![
            of.stage.number().to_string(),
            size(held.parameter_bytes),
            size(held.gradient_bytes),
            size(held.optimizer_bytes),
            size(held.state_bytes()),
            size(held.gathered_bytes),
            size(held.in_flight_bytes),
            held.activation_bytes.map_or("?".into(), &size),
            size(held.peak_or_known_bytes()),
            fits.to_owned(),
            of.min_ranks.map_or("-".into(), |ranks| ranks.to_string()),
        ];
        if offloads {
            cells.splice(8..8, [size(held.tier_bytes)]);
            cells.extend([of.tiers.host, of.tiers.nvme].map(&size));
        }
        memory.row(cells);
    }
    text += &format!("\nMemory of a rank, {unit}");
    if let Some(bytes) = forecast.device_bytes {
        text += &format!("; a device has {}", size(bytes));
    }
    text += &format!("\n\n{memory}\nA step\n\n");
    let mut header = vec!["stage", "sent", "messages", "computes", "exposed", "hidden", "step", "tokens/s"];
    if offloads {
        header.splice(6..6, ["moved", "waits"]);
    }
    let mut step = Table::new(header);
    for of in &forecast.stages {
        let hidden = of.report.overlap().map_or("-".into(), |share| format!("{:.0}%", 100.0 * share));
        let mut cells = vec![
            of.stage.number().to_string(),
            human(of.report.sent_bytes, decimal),
            grouped(of.report.traffic.num_messages),
            seconds(of.report.compute_s),
            seconds(of.report.exposed_s),
            hidden,
            seconds(of.report.step_s),
            grouped(tokens_per_s(setting, of) as u64),
        ];
        if offloads {
            let moved = human(of.report.moved.total_bytes(), decimal);
            cells.splice(6..6, [moved, seconds(of.report.tier_wait_s)]);
        }
        step.row(cells);
    }
    text += &step.to_string();
    text += &format!("\n{}\n", sentence(&forecast.advice.to_string()));
    if setting.job.activation_bytes.is_none() {
        text += "Activations are not known, and not in the peak; give --activations SIZE, or --layers and --width.\n";
    }
    text
}

/// Whether anything lies below the devices' memory.
pub(crate) fn is_offloading(forecast: &Forecast) -> bool {
    forecast.stages.iter().any(|of| of.tiers != TierBytes::default())
}

/// What goes to and from each place in a step.
pub(crate) fn moved_json(report: &SimReport) -> serde_json::Value {
    let part = |moved: Moved| json!({ "read_bytes": moved.read_bytes, "written_bytes": moved.written_bytes });
    json!({ "host": part(report.moved.host), "nvme": part(report.moved.nvme) })
}

fn human(bytes: u64, decimal: bool) -> String {
    if !decimal {
        return human_bytes(bytes);
    }
    let (unit, size) = sizer(bytes, true);
    format!("{} {unit}", size(bytes))
}

/// With a capital letter and a full stop.
pub(crate) fn sentence(text: &str) -> String {
    let mut characters = text.chars();
    let first = characters.next().map(|first| first.to_uppercase().to_string()).unwrap_or_default();
    format!("{first}{}.", characters.as_str())
}

pub(crate) fn tokens_per_s(setting: &Setting, of: &StageForecast) -> f64 {
    let job = &setting.job;
    let ranks = job.num_micro_batches as f64 * job.mesh.world_size() as f64;
    job.num_tokens as f64 * ranks / of.report.step_s
}

fn as_json(setting: &Setting, forecast: &Forecast) -> serde_json::Value {
    let job = &setting.job;
    let stage = |of: &StageForecast| {
        json!({
            "stage": of.stage.number(),
            "memory": {
                "parameter_bytes": of.memory.parameter_bytes,
                "gradient_bytes": of.memory.gradient_bytes,
                "optimizer_bytes": of.memory.optimizer_bytes,
                "state_bytes": of.memory.state_bytes(),
                "gathered_bytes": of.memory.gathered_bytes,
                "reducing_bytes": of.memory.in_flight_bytes,
                "activation_bytes": of.memory.activation_bytes,
                "tier_bytes": of.memory.tier_bytes,
                "peak_bytes": of.memory.peak_or_known_bytes(),
                "host_bytes": of.tiers.host,
                "nvme_bytes": of.tiers.nvme,
            },
            "fits": of.fits,
            "min_ranks": of.min_ranks,
            "step": {
                "sent_bytes": of.report.sent_bytes,
                "num_messages": of.report.traffic.num_messages,
                "num_collectives": of.report.traffic.num_collectives(),
                "step_s": of.report.step_s,
                "compute_s": of.report.compute_s,
                "exposed_s": of.report.exposed_s,
                "communication_s": of.report.communication_s,
                "overlap": of.report.overlap(),
                "tier_wait_s": of.report.tier_wait_s,
                "moved": moved_json(&of.report),
                "tokens_per_s": tokens_per_s(setting, of),
            },
        })
    };
    json!({
        "setting": setting.told.iter().map(|(word, told)| json!([word, told])).collect::<Vec<_>>(),
        "parameters": job.shape.parameter_len(),
        "ranks": job.mesh.world_size(),
        "mixed_precision": job.precision == ComputePrecision::Mixed16,
        "device_bytes": forecast.device_bytes,
        "stages": forecast.stages.iter().map(stage).collect::<Vec<_>>(),
        "advice": {
            "stage": forecast.advice.stage.map(fsdp_core::Stage::number),
            "sharding_is_worth_it": forecast.advice.is_worth_it,
            "reason": forecast.advice.reason,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_one_unit_for_all_its_sizes() {
        let (unit, size) = sizer(104 << 30, false);
        assert_eq!((unit.as_str(), size(13 << 30), size(1 << 20)), ("GiB", "13.0".into(), "0.0".into()));
        let (unit, size) = sizer(120_000_000_000, true);
        assert_eq!((unit.as_str(), size(1_875_000_000)), ("GB", "1.9".into()));
        let (unit, size) = sizer(999, true);
        assert_eq!((unit.as_str(), size(12)), ("B", "12".into()));
    }
}
