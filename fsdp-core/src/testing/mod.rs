//! For tests of whatever runs on ranks (feature `testing`): ranks as threads under a time limit, and the suite that
//! every communicator must pass.

pub mod conformance;
mod harness;

pub use harness::{RankFailure, run_ranks, run_ranks_on};
