//! The fuzzer's targets on a fixed number of inputs: what follows valid files by a few changes.
//!
//! `FSDP_FUZZ_INPUTS` sets the number of inputs for each target.

use fsdp_core::testing::fuzz::{header, index, manifest, seeds};

/// Words that parsers of numbers and structure may stumble over.
const WORDS: [&[u8]; 16] = [
    b"18446744073709551615",
    b"9223372036854775808",
    b"-1",
    b"1e999",
    b"0.1",
    b"null",
    b"[[[[[[[[",
    b"{}",
    b"[]",
    b"\"\"",
    b"..",
    b"/",
    b"\\u0000",
    b"__metadata__",
    b"\xff\xfe",
    b"\"F8_E4M3\"",
];

/// Numbers that look random, and are the same in each run.
struct Numbers(u64);

impl Numbers {
    /// One below `n`, which is not 0.
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % n as u64) as usize
    }

    /// Changes the input at one place.
    fn change(&mut self, input: &mut Vec<u8>) {
        let at = self.below(input.len() + 1);
        let to = at + self.below(input.len() - at + 1).min(1 + self.below(20));
        match self.below(8) {
            0 if at < input.len() => input[at] ^= 1 << self.below(8),
            1 if at < input.len() => input[at] = self.below(256) as u8,
            // Digits stay digits, so that numbers change and the text stays valid.
            2 | 3 => {
                if let Some(offset) = input[at..].iter().position(u8::is_ascii_digit) {
                    input[at + offset] = b'0' + self.below(10) as u8;
                }
            }
            4 => input.truncate(at),
            5 => {
                let copied = input[at..to].to_vec();
                let place = self.below(input.len() + 1);
                input.splice(place..place, copied);
            }
            6 => drop(input.splice(at..to, WORDS[self.below(WORDS.len())].iter().copied())),
            _ => drop(input.drain(at..to)),
        }
    }
}

#[test]
fn parsers_hold_their_promises_for_any_bytes() {
    let num_inputs = std::env::var("FSDP_FUZZ_INPUTS").ok().and_then(|n| n.parse().ok()).unwrap_or(20_000);
    let mut numbers = Numbers(0x9e37_79b9_7f4a_7c15);
    for (target, seed) in [manifest as fn(&[u8]), header, index].into_iter().zip(seeds()) {
        target(&seed);
        for _ in 0..num_inputs {
            let mut input = seed.clone();
            for _ in 0..1 + numbers.below(6) {
                numbers.change(&mut input);
            }
            target(&input);
        }
    }
}
