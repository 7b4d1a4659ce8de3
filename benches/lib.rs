//! What the benchmarks share: the GPT of the examples with its batches, and what is made of the numbers.

mod fit;
mod shape;
mod spread;

pub use fit::fit;
pub use shape::GptShape;
pub use spread::{Spread, load_average, median};
