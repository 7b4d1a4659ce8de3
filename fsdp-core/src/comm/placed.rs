//! Blocks that lie where the ranks of a host read the whole tensor.
//!
//! [Note: Gathers without a copy]
//! Ranks that share memory hold each block of a tensor once between them. Where these blocks lie side by side, in one buffer,
//! the blocks of all ranks *are* the whole tensor, and to gather it is to know that every rank has written its own. So a
//! rank *places* a new block once, by a copy, and all gathers until the next change cost no copy and no memory. Between
//! threads they cost no wait either: who comes first compares nothing, and who comes later compares what it asks for with
//! what the first has asked for, so that ranks out of step are told, though a rank that is late holds up nobody. As in other
//! gathers, memory is written once and then only read: a changed block is placed in a new buffer, and the old one lives as
//! long as somebody reads it. That parameters may be shared memory of the ranks of a node is an old idea of data-parallel
//! programs on MPI's shared windows; sharded training makes it exact, since here each rank changes its own block only.

use std::ops::Range;

use bytes::Bytes;

use super::GatherPart;
#[cfg(target_os = "linux")]
use super::hosts::PlacedInProcesses;
use super::local::PlacedInThreads;
use crate::ShardLayout;

/// A rank's block of a tensor, in memory where all ranks read the whole. See [Note: Gathers without a copy].
///
/// Made by [`Communicator::place`](super::Communicator::place), read by
/// [`Communicator::gather_placed`](super::Communicator::gather_placed). Memory: each rank's block, as long as any rank holds
/// its part or a view of the whole.
#[derive(Clone, Debug)]
pub struct PlacedPart {
    shard: Bytes,
    layout: ShardLayout,
    elem_bytes: usize,
    whole: Whole,
}

#[derive(Clone, Debug)]
pub(crate) enum Whole {
    Threads(PlacedInThreads),
    #[cfg(target_os = "linux")]
    Processes(PlacedInProcesses),
}

impl PlacedPart {
    /// What `part` is when it is placed.
    pub(crate) fn new(shard: Bytes, part: &GatherPart, whole: Whole) -> Self {
        Self { shard, layout: part.layout.clone(), elem_bytes: part.elem_bytes, whole }
    }

    /// This rank's block: flat, row-major. A view of the shared memory.
    pub fn shard(&self) -> &Bytes {
        &self.shard
    }

    /// Whether a gather of it need not wait, neither for a rank's block nor for a rank.
    pub(crate) fn is_ready(&self) -> bool {
        match &self.whole {
            Whole::Threads(placed) => placed.is_complete(),
            #[cfg(target_os = "linux")]
            Whole::Processes(_) => false,
        }
    }

    /// How the tensor is cut, and the size of an element.
    pub(crate) fn tensor(&self) -> (&ShardLayout, usize) {
        (&self.layout, self.elem_bytes)
    }

    pub(crate) fn whole(&self) -> &Whole {
        &self.whole
    }

    /// Whether each rank's block of a tensor is one range of it, so that it can be a view.
    pub(crate) fn can_hold(part: &GatherPart) -> bool {
        (0..part.layout.num_shards()).all(|rank| part.layout.runs(rank).nth(1).is_none())
    }
}

/// Where the block of `rank` lies in the bytes of a whole tensor.
///
/// # Panics
/// If it is not one range.
pub(crate) fn block_bytes(layout: &ShardLayout, rank: usize, elem_bytes: usize) -> Range<usize> {
    let mut runs = layout.runs(rank);
    let run = runs.next().unwrap_or(0..0);
    assert!(runs.next().is_none(), "a block is one range of its tensor");
    run.start * elem_bytes..run.end * elem_bytes
}
