//! How many whole gradients backward lets exist at once.
//!
//! [Note: Two units of whole gradients]
//! A reduction runs beside backward, which computes the gradients of the next unit meanwhile: so there is room for one unit
//! that is being reduced and one that is being computed, whichever neighbours need most. Before a reduction joins those that are
//! under way, the oldest of them are waited for, until what is under way and what is computed next fit into that room. Small
//! units are so reduced behind each other without a wait; and what backward ends with waits for nothing, since nothing is
//! computed after it, so that the optimizer steps what is there meanwhile.

use super::Unit;
use crate::UnitIndex;

/// Bytes of whole gradients that neighbours in the order of reductions need: one as it is sent, the next as it is computed.
pub(super) fn room(units: &[Unit], order: &[UnitIndex]) -> usize {
    let mut sent_before = 0;
    let of_whole = |parts: &[UnitIndex]| {
        let computed = parts.iter().map(|&part| computed_bytes(&units[part])).sum::<usize>();
        let sent = parts.iter().map(|&part| sent_bytes(&units[part])).sum::<usize>();
        computed + std::mem::replace(&mut sent_before, sent)
    };
    order.chunk_by(|&one, &other| units[one].whole == units[other].whole).map(of_whole).max().unwrap_or(0)
}

/// Bytes of whole gradients once a unit joins those in flight, until the next unit is complete; `later` is what is still to be
/// reduced. Parts of one whole count as they are computed until all are.
pub(super) fn bytes_beside(
    units: &[Unit],
    in_flight: &[UnitIndex],
    joining: Option<UnitIndex>,
    later: &[UnitIndex],
) -> usize {
    let next_whole = later.first().map(|&next| units[next].whole);
    let upcoming = later.iter().take_while(|&&next| Some(units[next].whole) == next_whole);
    let bytes = |&unit: &UnitIndex| match Some(units[unit].whole) == next_whole {
        true => computed_bytes(&units[unit]),
        false => sent_bytes(&units[unit]),
    };
    in_flight.iter().chain(&joining).chain(upcoming).map(bytes).sum()
}

/// Units whose sizes nobody has told count as equal.
fn computed_bytes(unit: &Unit) -> usize {
    unit.traits.gradient_bytes.max(1)
}

fn sent_bytes(unit: &Unit) -> usize {
    unit.traits.sent_bytes.max(1)
}
