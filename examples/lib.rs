//! What the examples share: a small GPT, text, digits, and ways to show a run.
//!
//! The examples themselves are `quickstart.rs`, `learner.rs` and `train.rs`; README.md tells in which order to read them.

mod args;
mod checkpoints;
mod clock;
mod data;
mod digits;
mod epochs;
mod failure;
mod gpt;
mod memory;
mod plot;
mod progress;
mod random;
mod report;
mod sample;
mod tables;

pub use args::Args;
pub use checkpoints::Checkpoints;
pub use clock::{Reading, StepClock, TypicalStep};
pub use data::{Batch, Text};
pub use digits::{Digit, DigitBatcher, Digits, SIDE, draw, in_steps};
pub use epochs::EpochLines;
pub use failure::Failure;
pub use gpt::{Gpt, GptConfig, activations, packing_bytes};
pub use memory::{give_memory_back, give_memory_back_if_scarce, limit_memory, parse_bytes, resident_peak};
pub use plot::plot_losses;
pub use progress::{Progress, StepNews};
pub use random::Random;
pub use report::{DiskRow, Measured, Predicted, ProcessMemory, RankRow, Report, StepMeans, WallTimes, num_cores};
pub use sample::Sampler;
pub use tables::{disk_table, memory_table, settings, step_table, time_table};
