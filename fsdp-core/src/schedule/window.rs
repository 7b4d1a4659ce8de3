//! What is gathered ahead: the units that follow the one in use, as far as depth and memory allow.

use super::{Schedule, Unit};
use crate::UnitIndex;

impl Schedule {
    /// What is to be gathered while `unit` is used, and the one to be gathered after that.
    pub(super) fn forward_window(&self, unit: UnitIndex, cursor: usize) -> (Vec<UnitIndex>, Option<UnitIndex>) {
        let depth = self.units[unit].traits.prefetch.unwrap_or(self.depth.forward);
        let order = &self.forward_order;
        let here = |next: UnitIndex| {
            let traits = self.units[next].traits;
            !traits.gathered_on_use || (traits.keep && order.iter().take(cursor).any(|&used| used == next))
        };
        let window = self.window(order, cursor, unit, depth, here);
        let window = self.within_limit(window, before(order, cursor, &self.units));
        let further = self.window(order, cursor, unit, depth.saturating_add(1), here);
        let next = further.into_iter().find(|next| !window.contains(next));
        (window, next)
    }

    /// What forward is going to have gathered when it uses its first unit that is not kept. None without prefetching.
    pub(super) fn first_units(&self) -> Vec<UnitIndex> {
        let order = &self.expected_uses;
        let Some(&first) = order.first() else { return Vec::new() };
        let traits = self.units[first].traits;
        let depth = match traits.prefetch.unwrap_or(self.depth.forward) {
            0 => return Vec::new(),
            depth => depth.saturating_add(usize::from(traits.keep)),
        };
        let here = |unit: UnitIndex| !self.units[unit].traits.gathered_on_use;
        self.within_limit(self.window(order, 0, first, depth, here), None)
    }

    /// `unit` and those used after it, up to `depth` of them; left out are those that are `here` by then. Kept units on
    /// the way are gathered with them and take no place, since they stay anyway; nor do further parts of a unit.
    pub(super) fn window(
        &self,
        order: &[UnitIndex],
        cursor: usize,
        unit: UnitIndex,
        depth: usize,
        here: impl Fn(UnitIndex) -> bool,
    ) -> Vec<UnitIndex> {
        let mut window = vec![unit];
        if order.get(cursor) != Some(&unit) {
            return window;
        }
        let mut places = depth;
        for &next in &order[cursor + 1..] {
            let is_part = window.iter().any(|&other| self.are_parts(other, next));
            if places == 0 && !is_part {
                break;
            }
            if !window.contains(&next) && !here(next) {
                places -= usize::from(!is_part && !self.units[next].traits.keep);
                // Not for further parts: one may be freed already, by its last gradient.
                match is_part {
                    true => window.push(next),
                    false => window.extend(self.parts(next)),
                }
            }
        }
        window
    }

    /// The start of `window` that fits [`PrefetchDepth::max_bytes`]; at least its first unit.
    ///
    /// [Note: A limit that all ranks agree on]
    /// Gathers must start in the same order on every rank, also where a rank leaves out a branch of the model and frees
    /// a unit earlier or later than its peers. So what counts against the limit is not what this rank holds now, but
    /// what all of them may hold: the kept units, gathered or not, and those of the window.
    pub(super) fn within_limit(&self, mut window: Vec<UnitIndex>, before: Option<UnitIndex>) -> Vec<UnitIndex> {
        let Some(limit) = self.depth.max_bytes else { return window };
        let kept = self.units.iter().map(|unit| unit.traits).filter(|traits| traits.keep);
        // A kept unit is used while the unit before it stays.
        let beside = before.filter(|beside| self.units[window[0]].traits.keep && !window.contains(beside));
        let beside =
            self.units.iter().filter(|unit| beside.is_some_and(|beside| self.units[beside].whole == unit.whole));
        let beside = beside.map(|unit| unit.traits);
        let mut bytes: usize = kept.chain(beside).map(|traits| traits.gathered_bytes).sum();
        let exceeds = |&unit: &UnitIndex| {
            let traits = self.units[unit].traits;
            bytes += if traits.keep { 0 } else { traits.gathered_bytes };
            bytes > limit
        };
        let fitting = window.iter().position(exceeds).unwrap_or(window.len());
        window.truncate(fitting.max(1));
        window
    }
}

/// The last unit before `cursor` that is gathered on use and not kept.
pub(super) fn before(order: &[UnitIndex], cursor: usize, units: &[Unit]) -> Option<UnitIndex> {
    let stays = |&&unit: &&UnitIndex| units[unit].traits.gathered_on_use && !units[unit].traits.keep;
    order.iter().take(cursor).rev().find(stays).copied()
}
