//! For tests of whatever runs on ranks (feature `testing`): ranks as threads under a time limit, the suite that
//! every communicator must pass, and targets for a fuzzer.

pub mod conformance;
pub mod fuzz;
mod harness;
#[cfg(target_os = "linux")]
mod loopback;

pub use harness::{RankFailure, run_ranks, run_ranks_on};
#[cfg(target_os = "linux")]
pub use loopback::{Loopback, ThreadControl};
