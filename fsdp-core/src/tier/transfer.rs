//! What a transfer returns: its result, now or later, and never after an endless wait.

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::time::{Duration, Instant};

use super::TierError;
use super::engine::Direction;
use crate::Timing;

/// A place in a tier's file, at an aligned offset that never changes. Made by [`Tier::reserve`](super::Tier::reserve).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    pub(super) offset: u64,
    pub(super) len_bytes: usize,
}

impl Slot {
    /// Where in the file it begins, in bytes.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// The most that it holds, in bytes.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }
}

/// A read or write under way, or done. Dropping it gives up the result, not the transfer.
#[derive(Debug)]
#[must_use = "a transfer's error is known to whoever waits for it"]
pub struct Transfer<T> {
    outcome: Receiver<Outcome<T>>,
    /// An outcome that was asked for and not taken.
    peeked: Option<Outcome<T>>,
    direction: Direction,
    path: PathBuf,
    offset: u64,
    submitted: Instant,
    limit: Duration,
}

/// A result with the times between which it came about.
#[derive(Debug)]
pub(super) struct Outcome<T> {
    pub(super) result: Result<T, TierError>,
    pub(super) started: Instant,
    pub(super) finished: Instant,
}

/// Where the result goes.
pub(super) type Reply<T> = SyncSender<Outcome<T>>;

impl<T> Transfer<T> {
    pub(super) fn new(direction: Direction, path: PathBuf, slot: Slot, limit: Duration) -> (Self, Reply<T>) {
        let (reply, outcome) = sync_channel(1);
        let (offset, submitted) = (slot.offset, Instant::now());
        (Self { outcome, peeked: None, direction, path, offset, submitted, limit }, reply)
    }

    /// Whether [`Transfer::wait`] would return at once.
    pub fn is_ready(&mut self) -> bool {
        if self.peeked.is_none() {
            match self.outcome.try_recv() {
                Ok(outcome) => self.peeked = Some(outcome),
                Err(TryRecvError::Empty) => return false,
                Err(TryRecvError::Disconnected) => {}
            }
        }
        true
    }

    /// Sleeps until the transfer has ended, at most for the tier's time limit.
    ///
    /// # Errors
    /// What went wrong with it, with file, offset and remedy; or that the time limit has passed.
    pub fn wait(self) -> Result<T, TierError> {
        self.wait_timed().0
    }

    /// Like [`Transfer::wait`], and tells when the transfer ran.
    pub fn wait_timed(mut self) -> (Result<T, TierError>, Timing) {
        let (begun, was_ready) = (Instant::now(), self.is_ready());
        let outcome = match self.peeked.take() {
            Some(outcome) => Ok(outcome),
            None => self.outcome.recv_timeout(self.limit),
        };
        let (path, offset, waited) = (self.path, self.offset, begun.elapsed());
        let blocked = if was_ready { Duration::ZERO } else { waited };
        let outcome = outcome.unwrap_or_else(|error| {
            let error = match error {
                RecvTimeoutError::Timeout => {
                    let action = self.direction.verb();
                    TierError::TimedOut { action, path, offset, waited_s: waited.as_secs_f64() }
                }
                RecvTimeoutError::Disconnected => TierError::Ended { path, offset },
            };
            Outcome { result: Err(error), started: begun, finished: Instant::now() }
        });
        let Outcome { result, started, finished } = outcome;
        (result, Timing { submitted: self.submitted, started, finished, blocked })
    }
}
