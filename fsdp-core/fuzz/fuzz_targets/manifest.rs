//! The manifest of a checkpoint, from any bytes.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fsdp_core::testing::fuzz::manifest(bytes));
