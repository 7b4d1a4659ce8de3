//! `fsdp consolidate`: plain `safetensors` from a checkpoint.

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use fsdp_core::checkpoint::{Checkpoint, ConsolidateOptions, Consolidated, TiedWeights, Verify, consolidate};
use fsdp_core::human_bytes;

use crate::output::putln;
use crate::size::parse_size;

/// Write the whole tensors of a checkpoint to plain safetensors files.
#[derive(Args)]
pub(crate) struct Consolidate {
    /// A step directory; or the directory above, whose newest good checkpoint is taken then.
    dir: PathBuf,
    /// A file that ends in .safetensors; or a directory, for model.safetensors or a set of files with an index.
    out: PathBuf,
    /// Begin a new file before one holds more than this, such as 5GB or 512MiB.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    shard_size: Option<u64>,
    /// Write optimizer state as well.
    #[arg(long)]
    optimizer: bool,
    /// Write a copy for each name of tied weights, for readers that know nothing of ties.
    #[arg(long)]
    copy_tied: bool,
    /// Do not read the checksums first: half of the reading, and damage may go unseen.
    #[arg(long)]
    no_verify: bool,
}

impl Consolidate {
    pub(crate) fn run(self) -> Result<ExitCode, Box<dyn Error>> {
        let verify = if self.no_verify { Verify::Sizes } else { Verify::Checksums };
        let is_step = self.dir.join("manifest.json").exists();
        let checkpoint =
            if is_step { Checkpoint::open(&self.dir, verify) } else { Checkpoint::newest(&self.dir, verify) }?;
        for rejected in checkpoint.rejected() {
            eprintln!("passed over {rejected}");
        }
        let options = ConsolidateOptions {
            shard_bytes: self.shard_size,
            include_optimizer: self.optimizer,
            tied: if self.copy_tied { TiedWeights::Copies } else { TiedWeights::Once },
        };
        let Consolidated { files, num_tensors, tensor_bytes } = consolidate(&checkpoint, &self.out, &options)?;
        putln!("{}: {num_tensors} tensors, {}", checkpoint.dir().display(), human_bytes(tensor_bytes));
        files.iter().for_each(|file| putln!("  {}", file.display()));
        Ok(ExitCode::SUCCESS)
    }
}
