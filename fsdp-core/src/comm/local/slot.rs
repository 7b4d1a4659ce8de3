//! One operation of threads under way: who has come, with what, and what they fill together.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use bytes::Bytes;

use super::super::call::Call;
use super::super::shared::SharedTensors;

/// One operation under way.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) state: Mutex<SlotState>,
    pub(super) changed: Condvar,
    /// Who is awake sees here, without the lock, that all have arrived, and that all have filled their blocks.
    pub(super) all_arrived: AtomicBool,
    pub(super) all_filled: AtomicBool,
}

#[derive(Debug, Default)]
pub(super) struct SlotState {
    /// What the first rank to arrive asked for, and its number in the world.
    pub(super) first: Option<(usize, Call)>,
    /// What each rank brought; `Some` means that it has arrived.
    pub(super) inputs: Vec<Option<Arc<[Bytes]>>>,
    /// Whole tensors that all ranks fill together; those that are placed, each by itself.
    pub(super) outputs: Vec<Arc<SharedTensors>>,
    /// Which ranks have filled their blocks of the output.
    pub(super) filled: Vec<bool>,
    pub(super) num_asleep: usize,
    pub(super) num_left: usize,
}

impl SlotState {
    /// Ranks that have not arrived.
    pub(super) fn missing(&self) -> Vec<usize> {
        (0..self.inputs.len()).filter(|&rank| self.inputs[rank].is_none()).collect()
    }
}

impl Slot {
    pub(super) fn new(world_size: usize) -> Self {
        let (inputs, filled) = (vec![None; world_size], vec![false; world_size]);
        Self {
            state: Mutex::new(SlotState { inputs, filled, ..SlotState::default() }),
            changed: Condvar::new(),
            all_arrived: AtomicBool::new(false),
            all_filled: AtomicBool::new(false),
        }
    }

    /// Tells whoever waits that something holds for all ranks from now on.
    pub(super) fn tell(&self, state: &SlotState, all: &AtomicBool) {
        all.store(true, Ordering::Release);
        if state.num_asleep > 0 {
            self.changed.notify_all();
        }
    }
}
