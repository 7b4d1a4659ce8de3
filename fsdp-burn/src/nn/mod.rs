//! Layers and functions in place of Burn's, where Burn's do not fit sharded training or are slow on the CPU. Records are
//! those of Burn's.

mod batch_norm;
mod dropout;
mod embedding;
mod gelu;

pub use batch_norm::BatchNorm;
pub(crate) use batch_norm::OVER_ALL_RANKS;
pub use dropout::Dropout;
pub use embedding::Embedding;
pub(crate) use embedding::HOLDS_INDICES_ONLY;
#[cfg(any(feature = "cuda", feature = "cpu"))]
pub(crate) use gelu::GeluOps;
pub use gelu::gelu;
