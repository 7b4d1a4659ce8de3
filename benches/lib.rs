//! What the benchmarks share: the GPT that the peers in other frameworks train, too.

mod gpt;

pub use gpt::{Gpt, GptShape};
