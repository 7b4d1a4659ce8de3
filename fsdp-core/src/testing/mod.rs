//! For tests of whatever runs on ranks (feature `testing`): ranks as threads under a time limit, the suite that
//! every communicator must pass, and targets for a fuzzer.

pub mod conformance;
pub mod fuzz;
mod harness;

pub use harness::{RankFailure, run_ranks, run_ranks_on};
