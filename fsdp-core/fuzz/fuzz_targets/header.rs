//! The header of a `safetensors` file, from any bytes.

#![no_main]

use fsdp_core::testing::fuzz::{header, seeds};
use libfuzzer_sys::{fuzz_mutator, fuzz_target, fuzzer_mutate};

fuzz_target!(|bytes: &[u8]| header(bytes));

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    // Now and then from an input that is accepted, which no fuzzer would find soon.
    let valid = &seeds()[1];
    let from_valid = seed % 64 == 0 && valid.len() <= max_size;
    if from_valid {
        data[..valid.len()].copy_from_slice(valid);
    }
    fuzzer_mutate(data, if from_valid { valid.len() } else { size }, max_size)
});
