//! The order in which units are gathered, freed, reduced and stepped: a pure state machine.
//!
//! It is told what the model does ("unit 3 is needed in forward") and answers with a list of [`Action`]s. The engine
//! executes them, a simulator can price them, a trace shows them: what is planned is what runs. It knows no tensors, no
//! clock and no peers, so that every rank that is told the same answers the same.

mod gradients;
mod window;

use gradients::{bytes_beside, room};
use window::before;

use crate::{Action, PrefetchDepth, Stage, UnitIndex, UnitState, UnitTiers, UnitTraits};

/// What the model is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pass {
    /// Nothing since the last backward or step.
    Idle,
    /// A forward that will have a backward.
    Forward {
        cursor: usize,
    },
    /// A forward without one.
    Evaluate {
        cursor: usize,
    },
    Backward {
        cursor: usize,
    },
}

#[derive(Clone, Debug)]
struct Unit {
    traits: UnitTraits,
    /// The first part of what it is a part of; itself where it is a whole.
    whole: UnitIndex,
    state: UnitState,
    /// Uses recorded in forward whose gradients have not arrived.
    pending_gradients: usize,
    /// All gradients of this backward are here; the reduction waits for its turn.
    gradients_ready: bool,
    tiers: UnitTiers,
    /// The blocks are here, or on their way from their tier, for the next gather.
    fetched: bool,
}

/// The state machine. See the module's documentation.
///
/// ```
/// use fsdp_core::{Action::*, PrefetchDepth, Schedule, Stage, UnitTraits};
///
/// let unit = UnitTraits { gathered_on_use: true, trainable: true, gathered_bytes: 4096, ..UnitTraits::default() };
/// let depth = PrefetchDepth { forward: 1, backward: 1, max_bytes: None };
/// let mut schedule = Schedule::new(Stage::Parameters, &[unit; 3], depth);
///
/// // The first forward learns the order, so nothing is prefetched yet.
/// assert_eq!(schedule.forward(0), [Gather(0), WaitGather(0)]);
/// assert_eq!(schedule.forward(1), [Free(0), Gather(1), WaitGather(1)]);
/// assert_eq!(schedule.forward(2), [Free(1), Gather(2), WaitGather(2)]);
///
/// // Backward knows it: the last unit is still here, the one before it is gathered ahead.
/// schedule.begin_backward(true);
/// assert_eq!(schedule.backward(2), [Gather(1)]);
/// ```
#[derive(Clone, Debug)]
pub struct Schedule {
    stage: Stage,
    units: Vec<Unit>,
    depth: PrefetchDepth,
    /// What forward lets go of stays cut over a smaller group until backward.
    reshards: bool,
    pass: Pass,
    current: Option<UnitIndex>,
    /// Order of use, learned in the last complete pass of each kind and checked in every later one.
    forward_order: Vec<UnitIndex>,
    backward_order: Vec<UnitIndex>,
    /// Order of use in the pass that is going on.
    recording: Vec<UnitIndex>,
    /// The order of reductions, the same on every rank. Empty until the first backward.
    reduce_order: Vec<UnitIndex>,
    next_reduce: usize,
    reduce_in_backward: bool,
    /// Bytes of whole gradients that may exist at once. See [Note: Two units of whole gradients].
    gradient_room: usize,
    /// Reductions that the next one in backward may have to wait for, oldest first.
    reduces_in_flight: Vec<UnitIndex>,
    /// Reductions started since the last step and not waited for.
    reduces_pending: Vec<UnitIndex>,
    /// The units of the forward that is going on, by first use.
    first_uses: Vec<UnitIndex>,
    /// What the next forward is expected to start with, the same on every rank. Empty until the first backward.
    expected_uses: Vec<UnitIndex>,
    /// The unit that is being written back since the last step.
    writing_back: Option<UnitIndex>,
}

impl Schedule {
    /// A schedule for units in plan order.
    pub fn new(stage: Stage, units: &[UnitTraits], depth: PrefetchDepth) -> Self {
        let mut whole = 0;
        let unit = |(index, &traits): (UnitIndex, &UnitTraits)| Unit {
            traits,
            whole: {
                whole = if traits.follows { whole } else { index };
                whole
            },
            state: UnitState::Sharded,
            pending_gradients: 0,
            gradients_ready: false,
            tiers: UnitTiers::default(),
            fetched: false,
        };
        Self {
            stage,
            units: units.iter().enumerate().map(unit).collect(),
            depth,
            reshards: false,
            pass: Pass::Idle,
            current: None,
            forward_order: Vec::new(),
            backward_order: Vec::new(),
            recording: Vec::new(),
            reduce_order: Vec::new(),
            next_reduce: 0,
            reduce_in_backward: true,
            gradient_room: 0,
            reduces_in_flight: Vec::new(),
            reduces_pending: Vec::new(),
            first_uses: Vec::new(),
            expected_uses: Vec::new(),
            writing_back: None,
        }
    }

    /// Says what lies in tiers, unit by unit. Blocks are then fetched one unit ahead of their gather, which is why a tier
    /// needs memory for the blocks of one more unit than are gathered; in a step, the next unit is read and the last one
    /// written while one steps.
    ///
    /// ```
    /// use fsdp_core::{Action::*, PrefetchDepth, Schedule, Stage, UnitTiers, UnitTraits};
    ///
    /// let unit = UnitTraits { trainable: true, ..UnitTraits::default() };
    /// let mut schedule = Schedule::new(Stage::Gradients, &[unit; 2], PrefetchDepth::default());
    /// schedule.set_tiers(&[UnitTiers { state: true, ..UnitTiers::default() }; 2]);
    /// schedule.set_reduce_order(vec![1, 0]);
    /// let actions = schedule.step();
    /// assert_eq!(actions[..4], [FetchState(1), FetchState(0), Step(1), WriteBack(1)]);
    /// ```
    pub fn set_tiers(&mut self, tiers: &[UnitTiers]) {
        for (unit, &tiers) in self.units.iter_mut().zip(tiers) {
            unit.tiers = tiers;
        }
    }

    /// Says whether a unit that forward is done with stays cut over a smaller group of ranks, from which backward gathers
    /// it again. Default: it is freed, and gathered from all.
    pub fn set_reshards(&mut self, reshards: bool) {
        self.reshards = reshards;
    }

    /// Where the parameters of `unit` are.
    pub fn state(&self, unit: UnitIndex) -> UnitState {
        self.units[unit].state
    }

    /// A parameter of `unit` is needed in a forward that will have a backward.
    pub fn forward(&mut self, unit: UnitIndex) -> Vec<Action> {
        let cursor = match self.pass {
            Pass::Forward { cursor } => cursor,
            // An evaluation in the middle of a forward changes nothing about it.
            Pass::Evaluate { .. } => {
                self.current = None;
                0
            }
            Pass::Idle | Pass::Backward { .. } => {
                self.recording.clear();
                self.first_uses.clear();
                self.current = None;
                0
            }
        };
        if self.current != Some(unit) {
            self.recording.push(unit);
        }
        if !self.first_uses.contains(&unit) {
            self.first_uses.push(unit);
        }
        let cursor = find_next(&self.forward_order, cursor, unit);
        self.pass = Pass::Forward { cursor };
        let (window, next) = self.forward_window(unit, cursor);
        self.demand(unit, &window, next)
    }

    /// A parameter of `unit` is needed in a forward without a backward. The learned order is used but not changed.
    pub fn evaluate(&mut self, unit: UnitIndex) -> Vec<Action> {
        let cursor = match self.pass {
            Pass::Evaluate { cursor } => cursor,
            _ => 0,
        };
        let cursor = find_next(&self.forward_order, cursor, unit);
        self.pass = Pass::Evaluate { cursor };
        let (window, next) = self.forward_window(unit, cursor);
        self.demand(unit, &window, next)
    }

    /// One more use of a trainable parameter of `unit` was recorded for backward.
    pub fn gradient_expected(&mut self, unit: UnitIndex) {
        self.units[unit].pending_gradients += 1;
    }

    /// Whether the order of reductions still has to be agreed upon among the ranks; see
    /// [`Schedule::set_reduce_order`].
    pub fn needs_reduce_order(&self) -> bool {
        self.reduce_order.is_empty() && self.units.iter().any(|unit| unit.traits.trainable)
    }

    /// The order in which this rank expects its gradients to be ready: the reverse of the first uses in forward, then
    /// the units that this forward did not use.
    pub fn expected_reduce_order(&self) -> Vec<UnitIndex> {
        let mut order: Vec<UnitIndex> = self.first_uses.iter().rev().copied().collect();
        let unused = (0..self.units.len()).rev().filter(|unit| !self.first_uses.contains(unit));
        order.extend(unused);
        order.retain(|&unit| self.units[unit].traits.trainable);
        order
    }

    /// Fixes the order of reductions. All ranks must be given the same order, or their reductions would not meet; a
    /// rank on which gradients appear in another order holds them back until their turn.
    pub fn set_reduce_order(&mut self, order: Vec<UnitIndex>) {
        self.gradient_room = room(&self.units, &order);
        self.reduce_order = order;
    }

    /// The units that this rank's forward has used, in the order of their first uses.
    pub fn first_uses(&self) -> &[UnitIndex] {
        &self.first_uses
    }

    /// Says which units the forward after a step uses first, so that [`Schedule::step`] gathers them ahead. All ranks must
    /// be given the same. A forward that begins with others costs time, and nothing else.
    pub fn set_first_uses(&mut self, order: Vec<UnitIndex>) {
        self.expected_uses = order;
    }

    /// Backward begins. With `reduce`, gradients are reduced in it: as they appear, at stage 1 when it ends. Without,
    /// they stay where they are, for [`Schedule::reduce_rest`] after a later backward. What an earlier backward has left to be
    /// reduced makes room for the gradients that come.
    pub fn begin_backward(&mut self, reduce: bool) -> Vec<Action> {
        self.reduce_in_backward = reduce;
        // Empty at the second of two backwards after two forwards.
        if !self.recording.is_empty() && self.recording != self.forward_order {
            self.forward_order = self.recording.clone();
            self.backward_order = self.forward_order.iter().rev().copied().collect();
        }
        self.recording.clear();
        self.next_reduce = 0;
        // What an earlier backward left unreduced is not complete before this one has added to it.
        self.units.iter_mut().for_each(|unit| unit.gradients_ready = false);
        self.current = None;
        self.pass = Pass::Backward { cursor: 0 };
        let mut actions = Vec::new();
        if self.stage != Stage::OptimizerState {
            self.make_room(None, &mut actions);
        }
        actions
    }

    /// A parameter of `unit` is needed in backward.
    pub fn backward(&mut self, unit: UnitIndex) -> Vec<Action> {
        let Pass::Backward { cursor } = self.pass else {
            return self.evaluate(unit);
        };
        let cursor = find_next(&self.backward_order, cursor, unit);
        self.pass = Pass::Backward { cursor };
        if self.recording.last() != Some(&unit) {
            self.recording.push(unit);
        }
        // Kept units are here since forward.
        let here = |next: UnitIndex| self.units[next].traits.keep || !self.units[next].traits.gathered_on_use;
        let window = self.window(&self.backward_order, cursor, unit, self.depth.backward, here);
        let before = before(&self.backward_order, cursor, &self.units);
        let window = self.within_limit(window, before);
        let further = self.window(&self.backward_order, cursor, unit, self.depth.backward.saturating_add(1), here);
        let next = further.into_iter().find(|next| !window.contains(next));
        self.demand(unit, &window, next)
    }

    /// One gradient of `unit` has been computed. When it is the last one expected, the unit is freed and its reduction
    /// starts as soon as it is its turn.
    ///
    /// A gradient that no forward announced is accepted: it is reduced when backward ends.
    pub fn gradient(&mut self, unit: UnitIndex) -> Vec<Action> {
        let pending = &mut self.units[unit].pending_gradients;
        if *pending == 0 {
            return Vec::new();
        }
        *pending -= 1;
        if *pending > 0 {
            return Vec::new();
        }
        self.units[unit].gradients_ready = true;
        let mut actions = Vec::new();
        self.free(unit, &mut actions);
        if self.reduce_in_backward && self.stage != Stage::OptimizerState {
            while let Some(&next) = self.reduce_order.get(self.next_reduce) {
                if !self.units[next].gradients_ready {
                    break;
                }
                self.reduce(next, true, &mut actions);
            }
        }
        actions
    }

    /// Backward has returned: drops what is still gathered and starts the reductions that were not due yet.
    pub fn end_backward(&mut self) -> Vec<Action> {
        let mut actions = Vec::new();
        for unit in 0..self.units.len() {
            self.units[unit].pending_gradients = 0;
            self.free(unit, &mut actions);
        }
        if self.reduce_in_backward {
            actions.extend(self.reduce_rest());
        }
        if !self.recording.is_empty() {
            self.backward_order = std::mem::take(&mut self.recording);
        }
        self.pass = Pass::Idle;
        self.current = None;
        actions
    }

    /// Starts all reductions that this backward has not started, in their order. A unit that had no gradient on this
    /// rank is among them: its peers may have one.
    ///
    /// None waits for another: all their gradients exist by now, and the step waits unit by unit.
    pub fn reduce_rest(&mut self) -> Vec<Action> {
        let mut actions = Vec::new();
        while let Some(&next) = self.reduce_order.get(self.next_reduce) {
            self.reduce(next, false, &mut actions);
        }
        for unit in &mut self.units {
            unit.gradients_ready = false;
        }
        actions
    }

    /// Waits for the reductions that are still under way: before a norm over all gradients, or another backward.
    pub fn finish_reduces(&mut self) -> Vec<Action> {
        self.reduces_in_flight.clear();
        let mut actions = Vec::new();
        for unit in std::mem::take(&mut self.reduces_pending) {
            self.wait_reduce(unit, &mut actions);
        }
        actions
    }

    /// Waits for a reduction before the step; its gradients go to their tier until then.
    fn wait_reduce(&self, unit: UnitIndex, actions: &mut Vec<Action>) {
        actions.push(Action::WaitReduce(unit));
        if self.units[unit].tiers.gradients {
            actions.push(Action::WriteGradients(unit));
        }
    }

    /// Waits for the gathers that are still under way, so that nothing moves any more until the model is used again.
    pub fn finish_gathers(&mut self) -> Vec<Action> {
        let units = self.units.iter_mut().enumerate();
        units
            .filter_map(|(unit, Unit { state, .. })| state.arrived().is_ok().then_some(Action::WaitGather(unit)))
            .collect()
    }

    /// Waits for what the last step has left to be written.
    pub fn finish_write_back(&mut self) -> Vec<Action> {
        self.writing_back.take().map(Action::WaitWriteBack).into_iter().collect()
    }

    /// An optimizer step over all trainable units, in the order in which their gradients arrive; where all are here
    /// already, those first that the next forward starts with. Every gathered copy is dropped, since it would be out of
    /// date, and what forward starts with is gathered again as soon as it is updated, in the order of forward: what is needed
    /// first never comes behind the rest.
    pub fn step(&mut self) -> Vec<Action> {
        let mut actions = self.forget_gathered();
        let first_units = self.first_units();
        let mut order = self.reduce_order.clone();
        // The same on all ranks: the last reduction is pending unless all have been waited for.
        if self.reduces_pending.is_empty() {
            let place = |unit: &UnitIndex| first_units.iter().position(|first| first == unit);
            order.sort_by_key(|unit| place(unit).unwrap_or(usize::MAX));
        }
        // What is not stepped is up to date already.
        let mut updated: Vec<_> = first_units.iter().copied().filter(|unit| !order.contains(unit)).collect();
        let up_to_date = |updated: &[UnitIndex]| first_units.iter().take_while(|first| updated.contains(first)).count();
        self.gather_ahead(&first_units[..up_to_date(&updated)], &mut actions);
        let publish = matches!(self.stage, Stage::OptimizerState | Stage::Gradients);
        let mut published = None;
        for (index, &unit) in order.iter().enumerate() {
            let has_tiers = self.units[unit].tiers.any();
            if index == 0 && has_tiers {
                actions.push(Action::FetchState(unit));
            }
            if self.reduces_pending.contains(&unit) {
                actions.push(Action::WaitReduce(unit));
            }
            // The next one is read while this one steps.
            let next = order.get(index + 1).filter(|&&next| self.units[next].tiers.any());
            actions.extend(next.map(|&next| Action::FetchState(next)));
            actions.push(Action::Step(unit));
            updated.push(unit);
            if self.units[unit].tiers.blocks {
                // The new blocks are here; they have not gone back to their tier yet.
                self.units[unit].fetched = true;
                self.gather_ahead(first_units.iter().filter(|&&first| first == unit), &mut actions);
                self.units[unit].fetched = false;
            }
            self.gather_ahead(&first_units[..up_to_date(&updated)], &mut actions);
            if has_tiers {
                // At most one unit is being written: the older one's memory is free by now.
                actions.extend(self.writing_back.replace(unit).map(Action::WaitWriteBack));
                actions.push(Action::WriteBack(unit));
            }
            if publish {
                actions.push(Action::Publish(unit));
                // At most two units are published at once: the older one must have arrived.
                actions.extend(published.replace(unit).map(Action::WaitPublish));
            }
        }
        actions.extend(published.map(Action::WaitPublish));
        self.reduces_pending.clear();
        self.reduces_in_flight.clear();
        actions
    }

    /// The parameters changed, or a forward is given up: drops every gathered copy, and expects no gradient any more.
    pub fn forget_gathered(&mut self) -> Vec<Action> {
        let mut actions = Vec::new();
        for unit in 0..self.units.len() {
            self.units[unit].pending_gradients = 0;
            self.free(unit, &mut actions);
        }
        self.recording.clear();
        self.first_uses.clear();
        self.pass = Pass::Idle;
        self.current = None;
        actions
    }

    /// Makes `unit` present and the rest of `window` under way. It takes the place of the unit that was in use before it,
    /// unless it is kept: then nothing is freed. So the last unit of forward that is not kept is still there when backward
    /// asks for it. The blocks of `next` are fetched, so that they are here when it is gathered.
    fn demand(&mut self, unit: UnitIndex, window: &[UnitIndex], next: Option<UnitIndex>) -> Vec<Action> {
        let Unit { traits, state, .. } = &self.units[unit];
        if self.current == Some(unit) && (!traits.gathered_on_use || *state == UnitState::Gathered) {
            return Vec::new();
        }
        self.current = Some(unit);
        let mut actions = Vec::new();
        if traits.gathered_on_use && !traits.keep {
            let in_backward = matches!(self.pass, Pass::Backward { .. });
            for other in 0..self.units.len() {
                let Unit { traits, pending_gradients, .. } = self.units[other];
                let needed = traits.keep
                    || window.contains(&other)
                    || self.are_parts(unit, other)
                    || (in_backward && pending_gradients > 0);
                if !needed {
                    self.leave(other, &mut actions);
                }
            }
        }
        // All its parts: a rank may leave out one that others use.
        if matches!(self.units[unit].state, UnitState::Sharded | UnitState::Resharded) {
            let parts = self.parts(unit);
            self.gather_ahead(&parts, &mut actions);
        }
        self.gather_ahead(window, &mut actions);
        if let Some(next) = next.filter(|&next| self.units[next].state == UnitState::Sharded) {
            self.fetch_blocks(next, &mut actions);
        }
        if self.units[unit].state.arrived().is_ok() {
            actions.push(Action::WaitGather(unit));
        }
        actions
    }

    fn fetch_blocks(&mut self, unit: UnitIndex, actions: &mut Vec<Action>) {
        let Unit { tiers, fetched, .. } = &mut self.units[unit];
        if tiers.blocks && !std::mem::replace(fetched, true) {
            actions.push(Action::FetchBlocks(unit));
        }
    }

    /// Starts the gathers of those that are not here.
    fn gather_ahead<'a>(&mut self, units: impl IntoIterator<Item = &'a UnitIndex>, actions: &mut Vec<Action>) {
        for &unit in units {
            let Unit { traits, state, .. } = &mut self.units[unit];
            let is_resharded = *state == UnitState::Resharded;
            if traits.gathered_on_use && state.gather().is_ok() {
                if is_resharded {
                    actions.push(Action::Regather(unit));
                    continue;
                }
                self.fetch_blocks(unit, actions);
                self.units[unit].fetched = false;
                actions.push(Action::Gather(unit));
            }
        }
    }

    /// The pass goes on without `unit`.
    fn leave(&mut self, unit: UnitIndex, actions: &mut Vec<Action>) {
        let keeps_block = self.reshards && matches!(self.pass, Pass::Forward { .. });
        // A part that this rank has not used is left like one that it has.
        if keeps_block && self.parts(unit).len() > 1 && self.units[unit].state.arrived().is_ok() {
            actions.push(Action::WaitGather(unit));
        }
        if keeps_block && self.units[unit].state.reshard().is_ok() {
            actions.push(Action::Reshard(unit));
        } else if self.units[unit].state != UnitState::Resharded {
            self.free(unit, actions);
        }
    }

    /// Whether both are parts of one whole, or the same.
    fn are_parts(&self, one: UnitIndex, other: UnitIndex) -> bool {
        self.units[one].whole == self.units[other].whole
    }

    /// The parts of the whole that `unit` is a part of, in the order in which all ranks gather them.
    fn parts(&self, unit: UnitIndex) -> Vec<UnitIndex> {
        let mut parts: Vec<_> = (0..self.units.len()).filter(|&other| self.are_parts(unit, other)).collect();
        if matches!(self.pass, Pass::Backward { .. }) {
            parts.reverse();
        }
        parts
    }

    fn free(&mut self, unit: UnitIndex, actions: &mut Vec<Action>) {
        if self.units[unit].state.free().is_ok() {
            actions.push(Action::Free(unit));
        }
    }

    /// Starts a reduction; in backward, where there is room. The unit's own of an earlier backward must be done.
    fn reduce(&mut self, unit: UnitIndex, in_backward: bool, actions: &mut Vec<Action>) {
        self.next_reduce += 1;
        if self.reduces_in_flight.contains(&unit) {
            self.reduces_in_flight.retain(|&other| other != unit);
            self.wait_if_pending(unit, actions);
        }
        if in_backward {
            self.make_room(Some(unit), actions);
        }
        actions.push(Action::Reduce(unit));
        self.reduces_in_flight.push(unit);
        self.reduces_pending.push(unit);
    }

    /// Waits for the oldest reductions as [Note: Two units of whole gradients] says.
    fn make_room(&mut self, joining: Option<UnitIndex>, actions: &mut Vec<Action>) {
        let needs_room = |schedule: &Self| {
            let later = &schedule.reduce_order[schedule.next_reduce..];
            bytes_beside(&schedule.units, &schedule.reduces_in_flight, joining, later) > schedule.gradient_room
        };
        while !self.reduces_in_flight.is_empty() && needs_room(self) {
            let oldest = self.reduces_in_flight.remove(0);
            self.wait_if_pending(oldest, actions);
        }
    }

    fn wait_if_pending(&mut self, unit: UnitIndex, actions: &mut Vec<Action>) {
        if let Some(at) = self.reduces_pending.iter().position(|&pending| pending == unit) {
            self.reduces_pending.remove(at);
            self.wait_reduce(unit, actions);
        }
    }
}

/// The position of `unit` at or after `cursor`, else from the start, else `cursor`.
fn find_next(order: &[UnitIndex], cursor: usize, unit: UnitIndex) -> usize {
    let position = |from: usize| order.iter().skip(from).position(|&other| other == unit).map(|at| at + from);
    position(cursor).or_else(|| position(0)).unwrap_or(cursor)
}
