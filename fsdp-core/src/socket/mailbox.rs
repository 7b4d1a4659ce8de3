//! What other ranks have sent, until the operation that it belongs to takes it.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;

use crate::comm::call::Call;

/// An exchange: the same on every member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Place {
    pub(super) domain: u64,
    pub(super) number: u64,
    pub(super) round: u8,
}

/// What one rank brings to an exchange, for one other.
#[derive(Debug)]
pub(super) struct Letter {
    pub(super) call: Call,
    pub(super) payload: Bytes,
}

/// Bounded by the ranks themselves: none of them begins an operation before the one before it on the same channel has ended.
#[derive(Debug, Default)]
pub(super) struct Mailbox {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// By the sender's number in the world.
    letters: HashMap<Place, HashMap<usize, Letter>>,
    /// Ranks that send no more.
    left: BTreeSet<usize>,
}

impl Mailbox {
    pub(super) fn put(&self, place: Place, from: usize, letter: Letter) {
        self.lock().letters.entry(place).or_default().insert(from, letter);
        self.changed.notify_all();
    }

    /// A rank sends no more. What it had sent is there.
    pub(super) fn leave(&self, rank: usize) {
        self.lock().left.insert(rank);
        self.changed.notify_all();
    }

    /// The letters of all `others`, if they are there within `limit`.
    pub(super) fn take(&self, place: Place, others: &[usize], limit: Duration) -> Option<HashMap<usize, Letter>> {
        if others.is_empty() {
            return Some(HashMap::new());
        }
        let is_short = |state: &mut State| state.letters.get(&place).is_none_or(|letters| letters.len() < others.len());
        let waited = self.changed.wait_timeout_while(self.lock(), limit, is_short);
        let (mut state, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        if waited.timed_out() && is_short(&mut state) { None } else { state.letters.remove(&place) }
    }

    /// Of `others`, those whose letters are not there.
    pub(super) fn missing(&self, place: Place, others: &[usize]) -> Vec<usize> {
        let state = self.lock();
        let is_there = |rank: &usize| state.letters.get(&place).is_some_and(|letters| letters.contains_key(rank));
        others.iter().copied().filter(|rank| !is_there(rank)).collect()
    }

    /// Of those, the ones that send no more.
    pub(super) fn left(&self, place: Place, others: &[usize]) -> Vec<usize> {
        let mut missing = self.missing(place, others);
        let state = self.lock();
        missing.retain(|rank| state.left.contains(rank));
        // It may have come between the two looks.
        missing.retain(|rank| state.letters.get(&place).is_none_or(|letters| !letters.contains_key(rank)));
        missing
    }

    /// State behind this lock is changed in single steps, so it is whole even after a panic elsewhere.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
