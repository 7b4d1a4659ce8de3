//! The index of a set of `safetensors` files, from any bytes.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fsdp_core::testing::fuzz::index(bytes));
