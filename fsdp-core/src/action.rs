//! What a schedule knows of units and says of them: their traits, where their state lies, and the actions.

/// Index of a unit in the plan.
pub type UnitIndex = usize;

/// One thing for the engine to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Start the all-gather of the unit's parameters; after a step, of the updated ones.
    Gather(UnitIndex),
    /// Wait until the unit is gathered.
    WaitGather(UnitIndex),
    /// Drop the gathered copy, or what is left of it. One that is still under way is dropped when it arrives.
    Free(UnitIndex),
    /// Drop the gathered copy but for this rank's block of a smaller group of ranks.
    Reshard(UnitIndex),
    /// Start the all-gather of these blocks over the smaller group; [`Action::WaitGather`] waits for it.
    Regather(UnitIndex),
    /// Start the reduction of the unit's gradients over the ranks.
    Reduce(UnitIndex),
    /// Wait until the unit's gradients are reduced.
    WaitReduce(UnitIndex),
    /// Update the parameters that this rank steps.
    Step(UnitIndex),
    /// Start the all-gather of the updated parameters (stages 1 and 2).
    Publish(UnitIndex),
    /// Wait until the updated parameters of all ranks have arrived.
    WaitPublish(UnitIndex),
    /// Start to read this rank's blocks of the unit's parameters from their tier, for a gather.
    FetchBlocks(UnitIndex),
    /// Start to read from its tier what the unit's step needs: blocks, reduced gradients, optimizer state.
    FetchState(UnitIndex),
    /// Start to write what the unit's step has changed to its tier.
    WriteBack(UnitIndex),
    /// Wait until it is written, so that its memory is free.
    WaitWriteBack(UnitIndex),
    /// Start to write the unit's reduced gradients to their tier, where they wait for the step.
    WriteGradients(UnitIndex),
}

/// How many units are gathered ahead of the one in use.
///
/// Each costs the memory of one gathered unit and hides the time of one gather; 0 hides nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefetchDepth {
    /// In forward.
    pub forward: usize,
    /// In backward.
    pub backward: usize,
    /// No unit is gathered ahead where all that are gathered would be larger than this, in bytes. The unit in use is
    /// gathered in any case. `None`: no limit. See [Note: A limit that all ranks agree on].
    pub max_bytes: Option<usize>,
}

impl PrefetchDepth {
    /// The larger of both: what memory has to hold.
    pub fn max(self) -> usize {
        self.forward.max(self.backward)
    }
}

/// What the schedule must know of a unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UnitTraits {
    /// Its parameters are cut (stage 3) and have to be gathered before use.
    pub gathered_on_use: bool,
    /// It stays gathered from its first use in forward until backward is done with it.
    pub keep: bool,
    /// It has parameters that receive gradients.
    pub trainable: bool,
    /// Prefetch depth in forward while this unit is in use, if it differs from the configuration.
    pub prefetch: Option<usize>,
    /// Size of its gathered copy; 0 if nothing of it is gathered on use.
    pub gathered_bytes: usize,
    /// Size of its whole gradients as they are computed, and as they are sent. Where all are 0 they count as equal.
    pub gradient_bytes: usize,
    /// See `gradient_bytes`.
    pub sent_bytes: usize,
    /// It is a part of the unit before it: they count as one where units are gathered ahead and freed. See
    /// [Note: The first unit travels in parts].
    pub follows: bool,
}

/// What of a unit lies in a tier below memory, between its uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UnitTiers {
    /// Blocks of parameters, which are fetched before a gather.
    pub blocks: bool,
    /// Reduced gradients, until the step.
    pub gradients: bool,
    /// Optimizer state.
    pub state: bool,
}

impl UnitTiers {
    /// Whether a step has to fetch anything.
    pub(crate) fn any(self) -> bool {
        self.blocks || self.gradients || self.state
    }
}
