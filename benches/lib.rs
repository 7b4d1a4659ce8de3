//! What the benchmarks share: the GPT of the examples with its batches, and what is made of the numbers.

mod shape;
mod sizes;
mod spread;

pub use shape::GptShape;
pub use sizes::Sizes;
pub use spread::{Spread, load_average, median};
