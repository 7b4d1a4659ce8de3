//! The contract of every collective: what is sent, in which order, and how it fails.
//!
//! [Note: Order of collectives]
//! Operations carry no address. The n-th operation of a communicator on one rank meets the n-th operation of the same
//! communicator on every other rank, so all ranks must issue the same operations in the same order. A
//! [`Communicator::channel`] is a second, independent order over the same ranks: gathers on one channel do not wait
//! behind reductions on another. Calls block; a [`CommStream`] gives a channel a thread of its own.
//!
//! [Note: Order of a sum]
//! Sums are added in the order of ranks, `((r0 + r1) + r2) + ...`, then scaled, by whichever rank and in whatever
//! pieces. So an all-reduce, a reduce-scatter, and a loop over the ranks give the same bits for every world size.

mod awake;
pub(crate) mod call;
pub(crate) mod check;
mod control;
pub(crate) mod error;
mod faulty;
#[cfg(target_os = "linux")]
pub mod hosts;
mod local;
mod op;
mod placed;
mod pool;
mod recorder;
pub(crate) mod shared;
mod stream;
pub(crate) mod sum;
pub(crate) mod wire;

use std::fmt::Debug;
use std::sync::Arc;

use bytes::Bytes;

pub use control::Control;
pub use error::{AbortCause, CommError, Issued};
pub use faulty::{Fault, FaultPlan, Faulty};
pub use local::LocalWorld;
pub use op::{GatherPart, OpKind, OpTag, Phase, Reduce, ReducePart};
pub use placed::PlacedPart;
pub use recorder::{LoggedOp, OpCount, Recorder, Traffic};
pub use stream::{CommStream, Pending, Timing};

use crate::ShardLayout;

/// One rank's end of a group of ranks that communicate.
///
/// All collectives block until this rank's result is there, and fail on every rank rather than hang: by timeout, by a
/// mismatch between ranks, or by an abort. A wrong argument (a layout for another world size, a buffer of the wrong
/// length) is an error on the rank that passed it, before anything is sent; the other ranks then run into their
/// timeout unless the caller aborts.
///
/// A rank that holds no element of a tensor joins every operation like the others. With a world size of 1, nothing
/// waits. One communicator belongs to one thread of the rank at a time: calls from two threads have no defined order.
/// See [Note: Order of collectives].
pub trait Communicator: Send + Sync + Debug {
    /// This rank's number in the group, from 0.
    fn rank(&self) -> usize;

    /// Ranks of the group.
    fn world_size(&self) -> usize;

    /// Ranks of the group that hold a gathered tensor as one buffer together, this one included.
    fn num_sharing(&self) -> usize;

    /// Returns the whole tensor of each part: flat, row-major, in the order of `parts`.
    ///
    /// All parts travel in one operation. Ranks of one process may receive views of one buffer, which lives until the
    /// last view is dropped.
    fn all_gather(&self, tag: &OpTag, parts: &[GatherPart]) -> Result<Vec<Bytes>, CommError>;

    /// Puts this rank's block of each part to where all ranks can read the whole tensor. `None`, on all ranks alike, where ranks
    /// do not share memory or a block is not one range of its tensor; by default always.
    ///
    /// Waits until all ranks have placed what they had to before, and not for what they place now: no rank is ahead by more than
    /// one operation, so that memory is needed for no more than that. Cost: one copy of each block, in place of the copy in each
    /// [`Communicator::all_gather`] that follows. See [Note: Gathers without a copy].
    fn place(&self, _tag: &OpTag, _parts: &[GatherPart]) -> Result<Option<Vec<PlacedPart>>, CommError> {
        Ok(None)
    }

    /// As [`Communicator::all_gather`], of blocks that every rank has placed, here or on another channel of the same ranks.
    /// Costs no copy and no memory. Between threads it waits for blocks that are not placed yet, and not for the other ranks'
    /// calls; where these turn out to differ, or do not come before their rank leaves, the world ends with that error.
    ///
    /// # Errors
    /// [`CommError::Engine`] where the blocks were placed by a communicator of another kind, or this one places none.
    fn gather_placed(&self, tag: &OpTag, _parts: &[PlacedPart]) -> Result<Vec<Bytes>, CommError> {
        Err(not_placed(self.rank(), tag))
    }

    /// Returns this rank's block of the reduced tensor of each part. See [Note: Order of a sum].
    fn reduce_scatter(&self, tag: &OpTag, parts: &[ReducePart], reduce: Reduce) -> Result<Vec<Bytes>, CommError>;

    /// As [`Communicator::reduce_scatter`], and shows what it writes to `see`, while it is still in a cache: the number of the
    /// part, and the next few elements of this rank's block. After an error some may have been shown.
    ///
    /// By default each block is shown when all are there.
    fn reduce_scatter_and_see(
        &self,
        tag: &OpTag,
        parts: &[ReducePart],
        reduce: Reduce,
        see: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<Vec<Bytes>, CommError> {
        let blocks = self.reduce_scatter(tag, parts, reduce)?;
        blocks.iter().enumerate().for_each(|(part, block)| see(part, block));
        Ok(blocks)
    }

    /// Returns the whole reduced tensor of each part, bit for bit what a reduce-scatter and an all-gather return.
    fn all_reduce(&self, tag: &OpTag, parts: &[ReducePart], reduce: Reduce) -> Result<Vec<Bytes>, CommError>;

    /// Returns the root's bytes. `data` is `Some` on the root only; the other ranks need not know the length.
    fn broadcast(&self, tag: &OpTag, root: usize, data: Option<Bytes>) -> Result<Bytes, CommError>;

    /// Returns this rank's block of the root's tensor, in a buffer of its own: the whole may be dropped afterwards.
    ///
    /// `full` is `Some` on the root only: flat, row-major.
    fn scatter(
        &self,
        tag: &OpTag,
        root: usize,
        full: Option<Bytes>,
        layout: &ShardLayout,
        elem_bytes: usize,
    ) -> Result<Bytes, CommError>;

    /// Returns when every rank has called it.
    fn barrier(&self, tag: &OpTag) -> Result<(), CommError>;

    /// A new, independent order of operations over the same ranks.
    ///
    /// Every rank makes the call. Calls with different names may come in any order; the n-th call with one name on
    /// each rank gives the same channel.
    fn channel(&self, name: &str) -> Result<Arc<dyn Communicator>, CommError>;

    /// A group of some ranks of this one, renumbered in the order of the list.
    ///
    /// Every member makes the call, with the same list. Groups without a common rank do not disturb each other; an
    /// abort still ends all of them.
    fn subgroup(&self, ranks: &[usize]) -> Result<Arc<dyn Communicator>, CommError>;

    /// This rank's program has returned, and makes no further call on any channel or group. Whoever waits for it is told
    /// so, where the engine can; by default they run into their timeout.
    fn leave(&self) {}

    /// Ends every wait of every rank, on all channels and groups of the world, with this cause. The first cause wins.
    fn abort(&self, cause: AbortCause);

    /// Why the world was aborted, if it was. Costs no communication.
    fn aborted(&self) -> Option<AbortCause>;
}

/// The error of a gather in place where nothing was placed, or elsewhere.
fn not_placed(rank: usize, tag: &OpTag) -> CommError {
    let message = "blocks are gathered in place by another communicator than has placed them".to_owned();
    CommError::Engine { rank, tag: tag.clone(), message }
}
