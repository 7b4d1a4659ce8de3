//! Which sizes a benchmark of collectives goes through, how often, and where it writes the results.

use std::io;
use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

/// Operations are repeated back to back until they have moved about this much, so that the clock sees enough.
const BATCH_BYTES: usize = 64 << 20;

/// Tensors that together are so large are not in a cache when their turn comes again.
const COLD_BYTES: usize = 256 << 20;

/// Sizes of tensors, repetitions, and the file for the results.
#[derive(Clone, Debug, Args)]
pub struct Sizes {
    /// Smallest tensor, in KiB.
    #[arg(long, default_value_t = 1)]
    min_kib: usize,
    /// Largest tensor, in KiB. Sizes are powers of four times the smallest.
    #[arg(long, default_value_t = 256 << 10)]
    max_kib: usize,
    /// Measurements of each size, of which the median counts.
    #[arg(long, default_value_t = 15)]
    pub repetitions: usize,
    /// Writes all results to this file.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Set by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

impl Sizes {
    /// All sizes, in KiB.
    pub fn kib(&self) -> impl Iterator<Item = usize> + use<> {
        let max_kib = self.max_kib;
        std::iter::successors(Some(self.min_kib.max(1)), |kib| kib.checked_mul(4))
            .take_while(move |&kib| kib <= max_kib)
    }

    /// Tensors of this size that take turns.
    pub fn num_cold(tensor_bytes: usize) -> usize {
        (COLD_BYTES / tensor_bytes).max(1)
    }

    /// Operations on tensors of this size that are timed together, at most so many.
    pub fn num_batched(tensor_bytes: usize, at_most: usize) -> usize {
        (BATCH_BYTES / tensor_bytes).clamp(1, at_most)
    }

    /// Writes the results, if a file was given.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write(&self, results: &impl Serialize) -> io::Result<()> {
        let Some(file) = &self.json else { return Ok(()) };
        std::fs::write(file, serde_json::to_string_pretty(results)?)
    }
}
