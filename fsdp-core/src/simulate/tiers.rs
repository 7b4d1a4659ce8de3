//! Tiers in the simulator: what is read ahead of its use and written behind it, as the engine does it.
//!
//! A disk has one queue, the way to host memory one for each direction. What is under way is the program's matter, so it is
//! the same for all ranks; when it is done is each rank's own.

use crate::simulate::run::{Run, UnderWay, Waited};
use crate::simulate::workload::{Placed, TierWork};
use crate::{SpanKind, TraceStream, UnitIndex, UnitTiers};

/// Bytes that a rank moves in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierTraffic {
    /// To and from host memory.
    pub host: Moved,
    /// To and from disks.
    pub nvme: Moved,
}

/// Bytes that are moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Towards the device.
    pub read_bytes: u64,
    /// Away from it.
    pub written_bytes: u64,
}

impl TierTraffic {
    /// All of it.
    pub fn total_bytes(&self) -> u64 {
        let parts = [self.host.read_bytes, self.host.written_bytes, self.nvme.read_bytes, self.nvme.written_bytes];
        parts.into_iter().fold(0, u64::saturating_add)
    }

    pub(super) fn divided(mut self, by: u64) -> Self {
        for moved in [&mut self.host, &mut self.nvme] {
            *moved = Moved { read_bytes: moved.read_bytes / by, written_bytes: moved.written_bytes / by };
        }
        self
    }
}

/// What is under way or away, by unit.
#[derive(Clone, Debug, Default)]
pub(super) struct UnitState {
    tiers: UnitTiers,
    work: TierWork,
    reading_blocks: bool,
    reading_gradients: bool,
    reading_state: bool,
    writing_back: bool,
    writing_gradients: bool,
    /// The blocks that a step has changed, until they are written.
    has_blocks: bool,
    has_gradients_away: bool,
}

impl UnitState {
    pub(super) fn new(tiers: UnitTiers, work: TierWork) -> Self {
        Self { tiers, work, ..Self::default() }
    }
}

/// The queues of a rank: when each is done with what was given to it.
pub(super) type Queues = [f64; 3];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Read,
    Write,
}

/// The queue of a place: 0 is host memory, 1 the disk.
fn queue(place: usize, direction: Direction) -> usize {
    match (place, direction) {
        (0, Direction::Read) => 0,
        (0, Direction::Write) => 1,
        _ => 2,
    }
}

impl Run<'_> {
    pub(super) fn fetch_blocks(&mut self, unit: UnitIndex) {
        let state = &mut self.units[unit];
        if !state.has_blocks && !std::mem::replace(&mut state.reading_blocks, true) {
            let blocks = state.work.blocks;
            self.transfer(Waited::Blocks, unit, blocks, Direction::Read);
        }
    }

    fn fetch_gradients(&mut self, unit: UnitIndex) {
        let state = &mut self.units[unit];
        if state.has_gradients_away && !std::mem::replace(&mut state.reading_gradients, true) {
            let gradients = state.work.gradients;
            self.transfer(Waited::Gradients, unit, gradients, Direction::Read);
        }
    }

    /// What a step needs: state first, then gradients, then blocks.
    pub(super) fn fetch_state(&mut self, unit: UnitIndex) {
        let state = &mut self.units[unit];
        if state.tiers.state && !std::mem::replace(&mut state.reading_state, true) {
            let of_state = state.work.state;
            self.transfer(Waited::State, unit, of_state, Direction::Read);
        }
        self.fetch_gradients(unit);
        let state = &mut self.units[unit];
        if state.tiers.blocks && !state.has_blocks && !std::mem::replace(&mut state.reading_blocks, true) {
            let blocks = state.work.stepped_blocks;
            self.transfer(Waited::Blocks, unit, blocks, Direction::Read);
        }
    }

    /// A gather begins when the rank has its blocks.
    pub(super) fn have_blocks(&mut self, unit: UnitIndex) {
        if self.units[unit].tiers.blocks && !self.units[unit].has_blocks {
            self.fetch_blocks(unit);
            self.units[unit].reading_blocks = false;
            self.wait_tier(Waited::Blocks, unit);
        }
    }

    /// What an earlier micro-batch has left is read again, to be added to.
    pub(super) fn begin_reduce(&mut self, unit: UnitIndex) {
        self.fetch_gradients(unit);
    }

    pub(super) fn end_reduce(&mut self, unit: UnitIndex) {
        let is_reading = std::mem::take(&mut self.units[unit].reading_gradients);
        self.units[unit].has_gradients_away = false;
        if is_reading {
            self.wait_tier(Waited::Gradients, unit);
        }
    }

    /// The norm looks at every gradient, wherever it lies.
    pub(super) fn look_at_gradients(&mut self) {
        let away: Vec<UnitIndex> = (0..self.units.len()).filter(|&unit| self.units[unit].has_gradients_away).collect();
        for (index, &unit) in away.iter().enumerate() {
            away[index..].iter().take(2).for_each(|&next| self.fetch_gradients(next));
            self.units[unit].reading_gradients = false;
            self.wait_tier(Waited::Gradients, unit);
        }
    }

    /// A step begins when all that it needs is here.
    pub(super) fn begin_step(&mut self, unit: UnitIndex) {
        let state = &mut self.units[unit];
        let reading = [
            (Waited::Gradients, std::mem::take(&mut state.reading_gradients)),
            (Waited::Blocks, std::mem::take(&mut state.reading_blocks)),
            (Waited::State, std::mem::take(&mut state.reading_state)),
        ];
        state.has_blocks = state.tiers.blocks;
        state.has_gradients_away = false;
        for (waited, _) in reading.into_iter().filter(|(_, is_reading)| *is_reading) {
            self.wait_tier(waited, unit);
        }
    }

    pub(super) fn write_back(&mut self, unit: UnitIndex) {
        let state = &mut self.units[unit];
        (state.has_blocks, state.reading_blocks, state.writing_back) = (false, false, true);
        let TierWork { state, stepped_blocks, .. } = state.work;
        self.transfer(Waited::WriteBack, unit, sum(state, stepped_blocks), Direction::Write);
    }

    pub(super) fn wait_write_back(&mut self, unit: UnitIndex) {
        if std::mem::take(&mut self.units[unit].writing_back) {
            self.wait_tier(Waited::WriteBack, unit);
        }
        self.wait_gradients_written(unit);
    }

    pub(super) fn write_gradients(&mut self, unit: UnitIndex) {
        // One unit is in memory for that.
        if let Some(before) = self.writing_gradients.replace(unit) {
            self.wait_gradients_written(before);
        }
        let state = &mut self.units[unit];
        (state.has_gradients_away, state.writing_gradients) = (true, true);
        let gradients = state.work.gradients;
        self.transfer(Waited::WriteGradients, unit, gradients, Direction::Write);
    }

    fn wait_gradients_written(&mut self, unit: UnitIndex) {
        if std::mem::take(&mut self.units[unit].writing_gradients) {
            self.wait_tier(Waited::WriteGradients, unit);
        }
    }

    /// Gives a transfer to the queues of its tiers.
    fn transfer(&mut self, waited: Waited, unit: UnitIndex, placed: [Placed; 2], direction: Direction) {
        let num_classes = self.clocks.len();
        for class in 0..num_classes {
            let clock = &mut self.clocks[class];
            let (mut start_s, mut end_s) = (f64::INFINITY, clock.now);
            for (place, part) in placed.iter().enumerate().filter(|(_, part)| part.bytes > 0) {
                let free = &mut clock.queues[queue(place, direction)];
                let begun = clock.now.max(*free);
                *free = begun + if direction == Direction::Read { part.read_s } else { part.write_s };
                (start_s, end_s) = (start_s.min(begun), end_s.max(*free));
            }
            self.set_arrived(waited, unit, class, end_s);
            if start_s.is_finite() && self.is_traced(class) {
                let kind = if direction == Direction::Read { SpanKind::Read } else { SpanKind::Write };
                let row = TraceStream::Tier;
                self.under_way.push(UnderWay { class, waited, unit, row, kind, start_s, end_s });
            }
        }
        for (moved, part) in [&mut self.moved.host, &mut self.moved.nvme].into_iter().zip(placed) {
            let bytes = match direction {
                Direction::Read => &mut moved.read_bytes,
                Direction::Write => &mut moved.written_bytes,
            };
            *bytes = bytes.saturating_add(part.bytes);
        }
        self.num_updates += num_classes as u64;
    }
}

fn sum(one: [Placed; 2], two: [Placed; 2]) -> [Placed; 2] {
    std::array::from_fn(|place| Placed {
        bytes: one[place].bytes + two[place].bytes,
        read_s: one[place].read_s + two[place].read_s,
        write_s: one[place].write_s + two[place].write_s,
    })
}
