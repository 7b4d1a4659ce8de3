//! What each instruction of a step costs: seconds of computation, and what moves.

use crate::simulate::program::{StepRules, Uses};
use crate::simulate::ranks::Scope;
use crate::{Mesh, StepTraffic, UnitTiers, UnitTraits};

/// What a collective is sent over: the part of the way that is farther. Collectives of a rank that are under way at once
/// share it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wire {
    /// Within a node.
    InNode,
    /// Between nodes.
    Between,
}

/// One collective.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Move {
    /// Who takes part.
    pub scope: Scope,
    /// Seconds from when the last of them has begun, with the wire to itself.
    pub seconds: f64,
    /// What it is sent over.
    pub wire: Wire,
    /// Seconds of these in which it fills the wire: without latency, and 0 where `seconds` was measured beside others.
    pub filled_s: f64,
    /// Seconds of these in which a rank cannot compute, since its own processors move the bytes.
    pub taken_s: f64,
    /// What each rank sends.
    pub traffic: StepTraffic,
    /// Bytes of an element on the way.
    pub element_bytes: u64,
}

/// What lies in one tier, and how long moving it takes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Placed {
    /// Bytes of one rank.
    pub bytes: u64,
    /// Seconds to read them.
    pub read_s: f64,
    /// Seconds to write them.
    pub write_s: f64,
}

/// What of a unit lies below memory: in host memory, and on disks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TierWork {
    /// Blocks of parameters.
    pub blocks: [Placed; 2],
    /// Those of them that a step changes.
    pub stepped_blocks: [Placed; 2],
    /// Reduced gradients.
    pub gradients: [Placed; 2],
    /// Optimizer state.
    pub state: [Placed; 2],
}

/// One unit.
#[derive(Clone, Debug, PartialEq)]
pub struct UnitWork {
    /// Its name.
    pub name: String,
    /// Bytes of the whole unit.
    pub bytes: u64,
    /// Seconds of its computation in forward.
    pub forward_s: f64,
    /// In backward.
    pub backward_s: f64,
    /// In the optimizer's step.
    pub step_s: f64,
    /// Its gather in forward and in backward; `None` if nothing of it is gathered.
    pub gathers: [Option<Move>; 2],
    /// Its reduction: one collective after the other.
    pub reduce: Vec<Move>,
    /// The gather of its updated parameters.
    pub publish: Option<Move>,
}

/// A step: what is run, on which ranks, at what cost.
#[derive(Clone, Debug, PartialEq)]
pub struct Workload {
    /// The ranks.
    pub mesh: Mesh,
    /// What decides the list of instructions.
    pub rules: StepRules,
    /// How the model uses its units.
    pub uses: Uses,
    /// What the schedule knows of each unit.
    pub traits: Vec<UnitTraits>,
    /// What it knows of each unit's tiers.
    pub tiers: Vec<UnitTiers>,
    /// What lies there of each unit.
    pub tier_work: Vec<TierWork>,
    /// What each unit costs.
    pub units: Vec<UnitWork>,
    /// The agreement on the gradients' norm.
    pub norm: Move,
}
