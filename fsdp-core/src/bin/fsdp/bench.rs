//! `fsdp bench`: what communication and memory of this machine can do.

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use fsdp_core::{Profile, ProfileOptions};

use crate::number::parse_positive;
use crate::size::parse_size;
use crate::table::{Table, rate, seconds};

/// Measure latency and bandwidth of the collectives on this machine, and of its memory
///
/// Ranks are threads of one process. T = α + β·S for the S bytes that a rank reads: its own block in a gather, the whole
/// tensor in a reduction. `fsdp plan --profile` and `fsdp simulate --profile` read what --out writes.
#[derive(Args)]
pub(crate) struct Bench {
    /// Ranks, each a thread
    #[arg(long, value_name = "N", default_value = "2", value_parser = parse_positive)]
    ranks: usize,
    /// Largest tensor
    #[arg(long, value_name = "SIZE", default_value = "64MiB", value_parser = parse_size)]
    max_size: u64,
    /// Measurements of each size, of which the median counts
    #[arg(long, value_name = "N", default_value = "15", value_parser = parse_positive)]
    repetitions: usize,
    /// Write the profile
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Print the profile as JSON
    #[arg(long)]
    json: bool,
}

impl Bench {
    pub(crate) fn run(self) -> Result<ExitCode, Box<dyn Error>> {
        let max_bytes = usize::try_from(self.max_size)?;
        let options = ProfileOptions { num_ranks: self.ranks, max_bytes, repetitions: self.repetitions };
        let profile = Profile::measure(&options)?;
        if let Some(file) = &self.out {
            profile.write(file)?;
        }
        if self.json {
            print!("{}", profile.to_json());
            return Ok(ExitCode::SUCCESS);
        }
        let links = profile.collectives;
        let mut table = Table::new(&["", "α", "1/β"]);
        for (name, link) in [
            ("all-gather", links.all_gather),
            ("reduce-scatter", links.reduce_scatter),
            ("all-reduce", links.all_reduce),
        ] {
            table.row([name.to_owned(), seconds(link.alpha_s), rate(1.0 / link.beta_s_per_byte, "B")]);
        }
        println!("{} ranks, each a thread; medians of {}\n\n{table}", self.ranks, self.repetitions);
        println!("memory, copied by all ranks at once: {} for each", rate(profile.memory_bytes_per_s, "B"));
        Ok(ExitCode::SUCCESS)
    }
}
