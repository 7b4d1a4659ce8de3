//! `fsdp bench`: what communication and memory of this machine can do.

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use fsdp_core::{MeasuredStep, Profile, ProfileOptions, Table, TierRate, human_bytes};

use crate::number::up_to;
use crate::output::{put, putln};
use crate::rate::{rate, seconds};
use crate::size::parse_size;

/// Measure latency and bandwidth of the collectives on this machine, of its memory and of a disk
///
/// Ranks are threads of one process. T = α + β·S for the S bytes that a rank reads: its own block in a gather, the whole
/// tensor in a reduction. `fsdp plan --profile` and `fsdp simulate --profile` read what --out writes.
#[derive(Args)]
pub(crate) struct Bench {
    /// Ranks, each a thread
    #[arg(long, value_name = "N", default_value = "2", value_parser = up_to(1024))]
    ranks: usize,
    /// Largest tensor
    #[arg(long, value_name = "SIZE", default_value = "64MiB", value_parser = parse_size)]
    max_size: u64,
    /// Measurements of each size, of which the median counts
    #[arg(long, value_name = "N", default_value = "15", value_parser = up_to(10_000))]
    repetitions: usize,
    /// Measure the disk of this directory too, for what is offloaded to one
    #[arg(long, value_name = "DIR")]
    nvme_path: Option<PathBuf>,
    /// Take the step of one rank from the report of a run (`train --ranks 1 --report FILE`)
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Write the profile
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Print the profile as JSON
    #[arg(long)]
    json: bool,
}

/// What a disk is measured with, in bytes: enough to keep it busy, and not all that it has.
const SMALLEST_SLOT: usize = 1 << 20;
const LARGEST_SLOT: usize = 256 << 20;

/// Refuses what does not fit into memory, since a process that asks for too much is ended without a word.
fn check_memory(num_ranks: usize, max_bytes: u64) -> Result<(), String> {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let available = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    // Where the system does not say, half of what can be addressed.
    let available = available.map_or(u64::MAX / 2, |kib| kib.saturating_mul(1024));
    let needed = max_bytes.saturating_mul(4).saturating_mul(num_ranks as u64);
    match needed > available {
        true => Err(format!(
            "--ranks {num_ranks} with --max-size {} take {} of memory, and {} are there; make one of them smaller",
            human_bytes(max_bytes),
            human_bytes(needed),
            human_bytes(available)
        )),
        false => Ok(()),
    }
}

impl Bench {
    pub(crate) fn run(self) -> Result<ExitCode, Box<dyn Error>> {
        let max_bytes = usize::try_from(self.max_size)?;
        let options = ProfileOptions { num_ranks: self.ranks, max_bytes, repetitions: self.repetitions };
        check_memory(self.ranks, self.max_size)?;
        // What is read comes first: measuring takes longer.
        let step = self.report.as_deref().map(MeasuredStep::read_report).transpose()?;
        let mut profile = Profile::measure(&options)?;
        profile.step = step;
        if let Some(dir) = &self.nvme_path {
            profile.measure_disk(&dir.join("fsdp-bench"), max_bytes.clamp(SMALLEST_SLOT, LARGEST_SLOT))?;
        }
        if let Some(file) = &self.out {
            profile.write(file)?;
        }
        if self.json {
            put!("{}", profile.to_json());
            return Ok(ExitCode::SUCCESS);
        }
        let links = profile.collectives;
        let mut table = Table::new(["", "α", "1/β"]);
        for (name, link) in [
            ("all-gather", links.all_gather),
            ("reduce-scatter", links.reduce_scatter),
            ("all-reduce", links.all_reduce),
        ] {
            table.row([name.to_owned(), seconds(link.alpha_s), rate(1.0 / link.beta_s_per_byte, "B")]);
        }
        putln!("{} ranks, each a thread; medians of {}\n\n{table}", self.ranks, self.repetitions);
        putln!("memory, copied by all ranks at once: {} for each", rate(profile.memory_bytes_per_s, "B"));
        if let Some(TierRate { read_bytes_per_s, write_bytes_per_s }) = profile.nvme {
            let (read, written) = (rate(read_bytes_per_s, "B"), rate(write_bytes_per_s, "B"));
            putln!("disk, used by all ranks at once: {read} read and {written} written, for each");
        }
        if let Some(step) = &profile.step {
            let (pass, optimizer) = (seconds(step.pass.wall_s), seconds(step.optimizer.wall_s));
            putln!("step of one rank: {pass} a micro-batch of {} tokens, {optimizer} the optimizer", step.num_tokens);
        }
        Ok(ExitCode::SUCCESS)
    }
}
