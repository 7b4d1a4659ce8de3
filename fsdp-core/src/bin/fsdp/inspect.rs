//! `fsdp inspect`: what is in a checkpoint, and whether it is good.

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use fsdp_core::checkpoint::{CheckpointError, Inspection, Verify, inspect, step_dirs};

use crate::output::{put, putln};

/// Show what is in a checkpoint and what is damaged; exits with 1 if anything is.
#[derive(Args)]
pub(crate) struct Inspect {
    /// A step directory; or the directory above, for one line about each checkpoint.
    dir: PathBuf,
    /// Read all files and compare their checksums.
    #[arg(long)]
    verify: bool,
}

impl Inspect {
    pub(crate) fn run(self) -> Result<ExitCode, Box<dyn Error>> {
        let verify = if self.verify { Verify::Checksums } else { Verify::Sizes };
        let steps = if self.dir.join("manifest.json").exists() { Vec::new() } else { step_dirs(&self.dir)? };
        let is_root = !steps.is_empty();
        let dirs = if is_root { steps } else { vec![self.dir.clone()] };
        let inspections: Vec<Inspection> = dirs.iter().map(|dir| inspect(dir, verify)).collect();
        for inspection in &inspections {
            if let [error @ CheckpointError::NoManifest { .. }] = &inspection.damage[..] {
                eprintln!("error: {error}");
            } else if is_root {
                putln!("{}", inspection.summary());
                inspection.damage.iter().for_each(|damage| putln!("  {damage}"));
            } else {
                put!("{inspection}");
            }
        }
        let is_good = inspections.iter().all(Inspection::is_good);
        Ok(if is_good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}
