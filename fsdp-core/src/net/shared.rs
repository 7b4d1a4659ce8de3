//! What a rank knows of the run, between its program and the thread that talks to the others.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use super::Standing;
use super::wire::WireWait;
use crate::{AbortCause, Issued};

/// Waits of one rank that are told; a rank has a thread for gathers, one for reductions, and its own.
pub(super) const MAX_WAITS: usize = 4;

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) cause: OnceLock<AbortCause>,
    state: Mutex<State>,
    /// Whenever the state changes, or the cause is there.
    changed: Condvar,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) left: BTreeSet<usize>,
    pub(super) values: BTreeMap<String, Vec<u8>>,
    /// This rank's waits, of each of its threads.
    own: HashMap<ThreadId, (Issued, Instant)>,
    own_last: Option<Issued>,
    /// What others have told.
    pub(super) others: BTreeMap<usize, Told>,
}

/// What another rank has told of itself.
#[derive(Debug)]
pub(super) struct Told {
    pub(super) heard: Instant,
    /// Each with its begin.
    pub(super) waits: Vec<(Issued, Instant)>,
    pub(super) last: Option<Issued>,
}

impl Shared {
    pub(super) fn new(rank: usize, world_size: usize) -> Self {
        let told = || Told { heard: Instant::now(), waits: Vec::new(), last: None };
        let others = (0..world_size).filter(|&other| other != rank).map(|other| (other, told())).collect();
        let state =
            State { left: BTreeSet::new(), values: BTreeMap::new(), own: HashMap::new(), own_last: None, others };
        Self { rank, world_size, cause: OnceLock::new(), state: Mutex::new(state), changed: Condvar::new() }
    }

    /// State behind this lock is changed in single steps, so it is whole even after a panic elsewhere.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state and wakes all who wait for something.
    pub(super) fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let result = change(&mut self.lock());
        self.changed.notify_all();
        result
    }

    /// The first cause wins.
    pub(super) fn end(&self, cause: AbortCause) {
        let _ = self.cause.set(cause);
        // Under the lock, so that whoever looks and falls asleep hears it.
        self.change(|_| ());
    }

    /// Waits until `ready` gives something, the run has ended, or the time is up.
    pub(super) fn wait<T>(&self, limit: Option<Duration>, ready: impl Fn(&State) -> Option<T>) -> Waited<T> {
        let started = Instant::now();
        let mut state = self.lock();
        loop {
            if let Some(value) = ready(&state) {
                return Waited::Ready(value);
            }
            if let Some(cause) = self.cause.get() {
                return Waited::Ended(cause.clone());
            }
            // Woken now and then at the latest.
            let left = limit.map_or(Some(Duration::from_secs(1)), |limit| limit.checked_sub(started.elapsed()));
            let Some(left) = left else { return Waited::TimeIsUp };
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// What the calling thread waits in.
    pub(super) fn waiting(&self, operation: Option<Issued>) {
        let mut state = self.lock();
        match operation {
            Some(issued) => {
                state.own_last = Some(issued.clone());
                state.own.insert(thread::current().id(), (issued, Instant::now()));
            }
            None => drop(state.own.remove(&thread::current().id())),
        }
    }

    /// What this rank tells the others of itself.
    pub(super) fn own(&self) -> (Vec<WireWait>, Option<Issued>) {
        let state = self.lock();
        let waits = state.own.values().take(MAX_WAITS);
        let waits =
            waits.map(|(issued, since)| WireWait { issued: issued.into(), millis: since.elapsed().as_millis() as u64 });
        (waits.collect(), state.own_last.clone())
    }

    /// Where all ranks stand, this one included.
    pub(super) fn standings(&self) -> Vec<Standing> {
        let state = self.lock();
        let longest = |waits: &mut dyn Iterator<Item = &(Issued, Instant)>| {
            let (issued, since) = waits.min_by_key(|(_, since)| *since)?;
            Some((issued.clone(), since.elapsed()))
        };
        let standing = |rank| {
            let left = state.left.contains(&rank);
            match state.others.get(&rank) {
                Some(told) => Standing {
                    rank,
                    silent: told.heard.elapsed(),
                    waiting: longest(&mut told.waits.iter()),
                    last: told.last.clone(),
                    left,
                },
                None => Standing {
                    rank,
                    silent: Duration::ZERO,
                    waiting: longest(&mut state.own.values()),
                    last: state.own_last.clone(),
                    left,
                },
            }
        };
        (0..self.world_size).map(standing).collect()
    }
}

/// How a wait has ended.
pub(super) enum Waited<T> {
    Ready(T),
    Ended(AbortCause),
    TimeIsUp,
}
