//! Blocks of parameters and reduced gradients that lie on the disk between their uses.
//!
//! ```text
//!              write_back                      fetch_blocks, fetch_state
//!   in memory -----------> on the disk -----------------------------------> under way
//!       ^                                                                        |
//!       +---------------------- the optimizer's step, a gather ------------------+
//! ```
//!
//! Whoever needs a block or a gradient takes it, from memory, from a read that is under way, or from a read that begins
//! now. So what the schedule asks for ahead of time decides how long that takes, and never what is read.

use bytes::Bytes;
use fsdp_core::{OpTag, Phase, Slot, SpanKind, Tier, TierError, Transfer, UnitIndex};

use super::missing::is_missing;
use super::{Engine, State};
use crate::Error;
use crate::block::Block;

/// A reduced gradient that waits for the step.
pub(super) enum Reduced {
    /// In memory: the host's or the device's.
    Here {
        gradient: Block,
        /// The sum of its squares, where that is known.
        squares: Option<f64>,
    },
    Away {
        /// No rank had one, which is known without reading it.
        is_missing: bool,
    },
}

/// What is on the disk and on its way.
pub(super) struct Tiers {
    /// By parameter, where it has been written once.
    block_slots: Vec<Option<Slot>>,
    gradient_slots: Vec<Option<Slot>>,
    reading_blocks: Vec<Option<Transfer<Bytes>>>,
    reading_gradients: Vec<Option<Transfer<Bytes>>>,
    /// By unit, with the bytes of each.
    writing: Vec<Vec<(Transfer<()>, u64)>>,
    /// The unit whose gradients were written last.
    writing_gradients: Option<UnitIndex>,
}

impl Tiers {
    pub(super) fn new(num_params: usize, num_units: usize) -> Self {
        fn none<T>(len: usize) -> Vec<Option<T>> {
            (0..len).map(|_| None).collect()
        }
        Self {
            block_slots: none(num_params),
            gradient_slots: none(num_params),
            reading_blocks: none(num_params),
            reading_gradients: none(num_params),
            writing: (0..num_units).map(|_| Vec::new()).collect(),
            writing_gradients: None,
        }
    }

    /// Gives up reads of gradients that nobody wants any more.
    pub(super) fn forget_gradients(&mut self) {
        self.reading_gradients.iter_mut().for_each(|reading| *reading = None);
    }
}

impl Engine {
    /// What is stored of a parameter, wherever it lies.
    pub(super) fn take_stored(&self, state: &mut State, param: usize) -> Result<Block, Error> {
        let stored = &state.stored[param];
        let (true, true, Some(slot)) =
            (stored.is_empty(), self.offload.has_parameter(param), state.tiers.block_slots[param])
        else {
            return Ok(stored.clone());
        };
        let transfer = match state.tiers.reading_blocks[param].take() {
            Some(transfer) => transfer,
            None => self.tier()?.read(slot),
        };
        let unit = self.plan.params()[param].unit;
        self.wait_tier(state, SpanKind::Read, unit, slot.len_bytes() as u64, transfer).map(Block::Host)
    }

    /// The parameter as the optimizer sees it: this rank's block of a cut one, whole otherwise.
    pub(crate) fn block(&self, param: usize) -> Result<Block, Error> {
        let spec = &self.plan.params()[param];
        let mut state = self.lock();
        if let Some(master) = &state.masters[param] {
            return Ok(master.clone());
        }
        let stored = self.take_stored(&mut state, param)?;
        if spec.is_split() && self.plan.is_resident(spec) {
            Ok(stored.cut(&spec.layout, self.shard_index, self.dtypes.master[param]))
        } else {
            Ok(stored)
        }
    }

    /// Gathers one parameter outside of forward and backward, in whole and in the optimizer's type. All ranks of the shard
    /// axis make the call.
    pub(crate) fn gather_one(&self, param: usize) -> Result<Bytes, Error> {
        let spec = &self.plan.params()[param];
        if !spec.is_split() || (self.plan.is_resident(spec) && !self.has_master(param)) {
            let whole = if self.has_master(param) { self.block(param)? } else { self.stored(param) };
            return self.home().to_host(whole);
        }
        let tag = OpTag::new(self.progress().0, Phase::Checkpoint, spec.path.as_str());
        let part = self.gather_part(param, self.home().to_host(self.block(param)?)?, self.dtypes.master[param]);
        let mut full = self.links.control_shard.all_gather(&tag, &[part])?;
        full.pop().ok_or_else(|| self.misuse("a gather of one part returned none", "report this as a bug"))
    }

    /// Takes a value of a parameter as [`Engine::set_value`] does, and puts it where it lies between its uses; waits for
    /// the disk.
    pub(crate) fn place_stored(&self, param: usize, bytes: Bytes) -> Result<(), Error> {
        if !self.offload.has_parameter(param) {
            self.set_value(param, bytes);
            return Ok(());
        }
        let mut state = self.lock();
        let state = &mut *state;
        state.store(param, Block::nothing());
        state.tiers.reading_blocks[param] = None;
        let tier = self.tier()?;
        let slot = reserved(&mut state.tiers.block_slots[param], tier, bytes.len())?;
        Ok(tier.write(slot, bytes).wait()?)
    }

    /// Takes over what [`crate::distribute`] has written already.
    pub(crate) fn set_block_slot(&self, param: usize, slot: Slot) {
        self.lock().tiers.block_slots[param] = Some(slot);
    }

    pub(super) fn fetch_blocks(&self, state: &mut State, unit: UnitIndex) {
        self.fetch_blocks_of(state, self.plan.units()[unit].params.iter().copied());
    }

    fn fetch_blocks_of(&self, state: &mut State, params: impl Iterator<Item = usize>) {
        let Some(tier) = self.offload.tier() else { return };
        for param in params {
            let is_away = state.stored[param].is_empty() && state.tiers.reading_blocks[param].is_none();
            if let (true, Some(slot)) = (is_away, state.tiers.block_slots[param]) {
                state.tiers.reading_blocks[param] = Some(tier.read(slot));
            }
        }
    }

    pub(super) fn fetch_gradients(&self, state: &mut State, unit: UnitIndex) {
        for &param in &self.plan.units()[unit].params {
            self.fetch_gradient(state, param);
        }
    }

    pub(super) fn fetch_state(&self, state: &mut State, unit: UnitIndex) {
        self.fetch_gradients(state, unit);
        // A frozen block is not stepped.
        self.fetch_blocks_of(state, self.trainable(unit).map(|(param, _)| param));
    }

    /// Starts to write the blocks that a step has changed.
    pub(super) fn write_back(&self, state: &mut State, unit: UnitIndex) -> Result<(), Error> {
        for &param in &self.plan.units()[unit].params {
            if !self.offload.has_parameter(param) {
                continue;
            }
            // A read from before the step is out of date.
            state.tiers.reading_blocks[param] = None;
            let bytes = self.home().to_host(state.stored[param].clone())?;
            if bytes.is_empty() {
                continue;
            }
            let tier = self.tier()?;
            let slot = reserved(&mut state.tiers.block_slots[param], tier, bytes.len())?;
            let len_bytes = bytes.len() as u64;
            state.tiers.writing[unit].push((tier.write(slot, bytes), len_bytes));
            state.store(param, Block::nothing());
        }
        Ok(())
    }

    pub(super) fn finish_writes(&self, state: &mut State, unit: UnitIndex) -> Result<(), Error> {
        for (writing, bytes) in std::mem::take(&mut state.tiers.writing[unit]) {
            self.wait_tier(state, SpanKind::Write, unit, bytes, writing)?;
        }
        Ok(())
    }

    /// Starts to write the unit's gradients, when those of the unit before are written: one unit is in memory for that.
    pub(super) fn write_gradients(&self, state: &mut State, unit: UnitIndex) -> Result<(), Error> {
        if let Some(before) = state.tiers.writing_gradients.replace(unit) {
            self.finish_writes(state, before)?;
        }
        for &param in &self.plan.units()[unit].params {
            if !self.offload.has_gradient(param) {
                continue;
            }
            let gradient = match state.reduced[param].take() {
                Some(Reduced::Here { gradient, .. }) => gradient,
                other => {
                    state.reduced[param] = other;
                    continue;
                }
            };
            state.held.reduced -= gradient.size_bytes();
            let bytes = self.home().to_host(gradient)?;
            let tier = self.tier()?;
            let slot = reserved(&mut state.tiers.gradient_slots[param], tier, bytes.len())?;
            state.tiers.reading_gradients[param] = None;
            let is_missing = is_missing(&bytes, self.dtypes.master[param]);
            state.reduced[param] = Some(Reduced::Away { is_missing });
            let len_bytes = bytes.len() as u64;
            state.tiers.writing[unit].push((tier.write(slot, bytes), len_bytes));
        }
        Ok(())
    }

    /// Takes the reduced gradient of a parameter, wherever it lies.
    pub(super) fn take_reduced_of(&self, state: &mut State, param: usize) -> Result<Option<Block>, Error> {
        match state.reduced[param].take() {
            None => Ok(None),
            Some(Reduced::Here { gradient, .. }) => {
                state.held.reduced -= gradient.size_bytes();
                Ok(Some(gradient))
            }
            Some(Reduced::Away { .. }) => self.read_gradient(state, param).map(Some),
        }
    }

    fn read_gradient(&self, state: &mut State, param: usize) -> Result<Block, Error> {
        let Some(slot) = state.tiers.gradient_slots[param] else {
            unreachable!("a gradient that is away has been written")
        };
        let transfer = match state.tiers.reading_gradients[param].take() {
            Some(transfer) => transfer,
            None => self.tier()?.read(slot),
        };
        let unit = self.plan.params()[param].unit;
        self.wait_tier(state, SpanKind::Read, unit, slot.len_bytes() as u64, transfer).map(Block::Host)
    }

    /// Takes the reduced gradient of a parameter. `None`: no rank had one.
    pub(crate) fn take_reduced(&self, param: usize) -> Result<Option<Block>, Error> {
        let mut state = self.lock();
        if let Some(Reduced::Away { is_missing: true }) = state.reduced[param] {
            (state.reduced[param], state.tiers.reading_gradients[param]) = (None, None);
        }
        let gradient = self.take_reduced_of(&mut state, param)?;
        Ok(gradient.filter(|gradient| match gradient {
            Block::Host(bytes) => !is_missing(bytes, self.dtypes.master[param]),
            #[cfg(any(feature = "cuda", feature = "cpu"))]
            Block::Device(_) => state.has_gradient[param],
        }))
    }

    /// Looks at the reduced gradient of every trainable parameter, in plan order, and at the sum of its squares where that is
    /// known. Those on the disk are read one ahead.
    pub(crate) fn each_reduced(
        &self,
        mut look: impl FnMut(usize, &Block, Option<f64>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut state = self.lock();
        let state = &mut *state;
        let params: Vec<usize> = (0..state.reduced.len()).filter(|&param| state.reduced[param].is_some()).collect();
        for (index, &param) in params.iter().enumerate() {
            for &next in params[index..].iter().take(2) {
                self.fetch_gradient(state, next);
            }
            match &state.reduced[param] {
                Some(Reduced::Here { gradient, squares }) => look(param, gradient, *squares)?,
                Some(Reduced::Away { .. }) => look(param, &self.read_gradient(state, param)?, None)?,
                None => {}
            }
        }
        Ok(())
    }

    fn fetch_gradient(&self, state: &mut State, param: usize) {
        let is_away = matches!(state.reduced[param], Some(Reduced::Away { .. }));
        if let (true, None, Some(slot), Some(tier)) =
            (is_away, &state.tiers.reading_gradients[param], state.tiers.gradient_slots[param], self.offload.tier())
        {
            state.tiers.reading_gradients[param] = Some(tier.read(slot));
        }
    }

    /// Waits for what a step has left to be written.
    pub(crate) fn finish_write_back(&self) -> Result<(), Error> {
        let mut state = self.lock();
        let actions = state.schedule.finish_write_back();
        self.run(&mut state, actions)
    }

    fn tier(&self) -> Result<&Tier, Error> {
        let missing =
            || self.misuse("something is offloaded to a disk that the run does not use", "report this as a bug");
        self.offload.tier().map(|tier| &**tier).ok_or_else(missing)
    }
}

/// The slot, made at its first use.
fn reserved(slot: &mut Option<Slot>, tier: &Tier, len_bytes: usize) -> Result<Slot, TierError> {
    match *slot {
        Some(slot) => Ok(slot),
        None => Ok(*slot.insert(tier.reserve(len_bytes)?)),
    }
}
