//! A tier below memory: one file per rank on a fast disk, for state that is needed once in a step.
//!
//! ```text
//!   rank's thread              thread of the store                  disk
//!   write(slot, data) --+--->  blocks --> aligned buffers  <---->  DIR/rank-N.tier
//!   read(slot)        --+          ^          |   (io_uring, or positioned I/O on threads)
//!        Transfer <----------------+--- checksums
//! ```
//!
//! Transfers run beside the computation: [`Tier::read`] ahead of use and [`Tier::write`] behind it return a [`Transfer`],
//! and every wait on one has a limit. Data goes past the page cache through a fixed pool of aligned buffers, so a tier
//! costs memory for its pool and for what is under way, and nothing for what lies in it.
//!
//! [Note: A directory of its own]
//! A run's directory holds one file per rank, which the rank locks as long as it lives. The system drops the lock with
//! the process, however it ends. So a second run in the directory is refused, and what a killed run has left is
//! overwritten by the next one, or removed by its rank 0 where that has fewer ranks. At exit each rank removes its file,
//! and the last one the directory.
//!
//! After ZeRO-Infinity (Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep
//! Learning", SC 2021), whose engine also cuts transfers into blocks that overlap each other.
//!
//! Files in the order of their imports: `error`, `chunk`, `engine`, `uring`, `transfer`, `file`, `worker`, `store`.

mod chunk;
mod engine;
mod error;
mod file;
mod store;
mod transfer;
#[cfg(target_os = "linux")]
mod uring;
mod worker;

pub use engine::TierEngine;
pub use error::TierError;
pub use store::{Tier, TierOptions, TierStats};
pub use transfer::{Slot, Transfer};
