//! What parsers of files promise for any bytes: each function here is a target for a fuzzer, and panics where the promise is
//! broken.
//!
//! `fsdp-core/fuzz` runs them under libFuzzer, the tests on a fixed number of inputs.

pub use crate::checkpoint::fuzz::{header, index, manifest, seeds};
