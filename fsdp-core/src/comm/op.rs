//! What a collective is called with: its tag, its parts, and how values are combined.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;

use crate::{Dtype, ShardLayout};

/// Where in the training program an operation was issued. Every rank issues the same tags in the same order, and
/// every error names the tag, so that a mismatch reads as a line of the program and not as a sequence number.
///
/// ```
/// use fsdp_core::{OpTag, Phase};
///
/// let tag = OpTag::new(3, Phase::Backward, "blocks.2");
/// assert_eq!(tag.to_string(), "step 3, backward, unit `blocks.2`");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OpTag {
    /// The training step, counted by the caller.
    pub step: u64,
    /// The part of the step.
    pub phase: Phase,
    /// The unit that communicates, or a short name of what does.
    pub unit: Arc<str>,
}

impl OpTag {
    /// A tag for `unit` in `phase` of `step`.
    pub fn new(step: u64, phase: Phase, unit: impl Into<Arc<str>>) -> Self {
        Self { step, phase, unit: unit.into() }
    }
}

impl fmt::Display for OpTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step {}, {}, unit `{}`", self.step, self.phase, self.unit)
    }
}

/// The part of a training step in which an operation is issued.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Before the first step: distributing the model.
    Init,
    /// The forward pass of training.
    Forward,
    /// The backward pass.
    Backward,
    /// Clipping and the optimizer's step.
    Optimizer,
    /// Forward without backward.
    Evaluate,
    /// Saving and loading.
    Checkpoint,
    /// Decisions that all ranks share: stop, save, skip.
    Control,
}

impl Phase {
    /// All phases, in the order of declaration.
    pub const ALL: [Phase; 7] = [
        Phase::Init,
        Phase::Forward,
        Phase::Backward,
        Phase::Optimizer,
        Phase::Evaluate,
        Phase::Checkpoint,
        Phase::Control,
    ];
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Phase::Init => "init",
            Phase::Forward => "forward",
            Phase::Backward => "backward",
            Phase::Optimizer => "optimizer",
            Phase::Evaluate => "evaluate",
            Phase::Checkpoint => "checkpoint",
            Phase::Control => "control",
        })
    }
}

/// The kinds of operation a [`Communicator`](crate::Communicator) offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OpKind {
    /// Every rank receives every block.
    AllGather,
    /// Every rank receives its own block of the sum.
    ReduceScatter,
    /// Every rank receives the whole sum.
    AllReduce,
    /// Every rank receives the root's buffer.
    Broadcast,
    /// Every rank receives its own block of the root's tensor.
    Scatter,
    /// No data: every rank waits for every other.
    Barrier,
    /// Every rank puts its block to where the others read it, and waits for none.
    Place,
    /// A rank receives every block of what all have placed; nothing is copied.
    GatherPlaced,
}

impl OpKind {
    /// All kinds, in the order of declaration.
    pub const ALL: [OpKind; 8] = [
        OpKind::AllGather,
        OpKind::ReduceScatter,
        OpKind::AllReduce,
        OpKind::Broadcast,
        OpKind::Scatter,
        OpKind::Barrier,
        OpKind::Place,
        OpKind::GatherPlaced,
    ];
}

impl fmt::Display for OpKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            OpKind::AllGather => "all-gather",
            OpKind::ReduceScatter => "reduce-scatter",
            OpKind::AllReduce => "all-reduce",
            OpKind::Broadcast => "broadcast",
            OpKind::Scatter => "scatter",
            OpKind::Barrier => "barrier",
            OpKind::Place => "place",
            OpKind::GatherPlaced => "all-gather in place",
        })
    }
}

/// One tensor of an all-gather, as this rank holds it.
#[derive(Clone, Debug)]
pub struct GatherPart {
    /// This rank's block: flat, row-major, without padding.
    pub shard: Bytes,
    /// How the whole tensor is cut; `layout.num_shards()` is the world size of the communicator.
    pub layout: ShardLayout,
    /// Size of one element. A gather moves bytes and does not look at values, so any element type will do.
    pub elem_bytes: usize,
}

/// One tensor of a reduction, as this rank holds it.
#[derive(Clone, Debug)]
pub struct ReducePart {
    /// This rank's values of the whole tensor: flat, row-major. Need not be aligned.
    pub full: Bytes,
    /// How the result is cut; `layout.num_shards()` is the world size of the communicator.
    pub layout: ShardLayout,
    /// The element type that is added.
    pub dtype: Dtype,
}

/// How a reduction combines the values of all ranks: their sum, times a factor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reduce {
    /// Multiplies each sum, rounded to the element type first.
    pub scale: f64,
}

impl Reduce {
    /// The plain sum.
    pub const SUM: Reduce = Reduce { scale: 1.0 };

    /// The mean over `count` contributions: the sum, times `1 / count`.
    pub fn mean(count: usize) -> Self {
        Self { scale: 1.0 / count as f64 }
    }
}
