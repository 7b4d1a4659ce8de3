//! What connects hosts: messages between any two ranks, found by a key, without a fixed order.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt::Debug;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// What a message belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    /// Which world, counted in the process.
    pub world: u64,
    /// Which channel or group.
    pub domain: u64,
    /// Which operation there.
    pub op: u64,
    /// Which message of the operation.
    pub stage: u64,
}

/// Messages between the ranks of a world.
///
/// Nothing here blocks: an engine sends and receives on a thread of its own, and tells by its [`Inbox`].
pub trait Network: Send + Sync + Debug {
    /// This rank's number in the world.
    fn rank(&self) -> usize;

    /// Ranks of the world.
    fn world_size(&self) -> usize;

    /// Names the host: ranks with equal names can share memory.
    fn host(&self) -> String;

    /// Sends a frame, and after it the payload, whose memory the engine reads until it lets go of it.
    fn send(&self, to: usize, key: Key, head: Vec<u8>, payload: Option<Payload>);

    /// Writes the payload that a frame from `from` has announced into `payload`, which has that many bytes, and tells the receipt.
    fn receive(&self, from: usize, landing: Landing);

    /// Writes the payload that a frame from `from` with this key will announce, or has announced, into `payload`: as soon as it
    /// comes, on the engine's thread, without waking anybody before it is there. The frame is delivered to nobody else.
    fn expect(&self, from: usize, key: Key, payload: Payload) -> Receipt {
        let receipt = Receipt::default();
        if let Some(landing) = self.inbox().expect(from, key, payload, receipt.clone()) {
            self.receive(from, landing);
        }
        receipt
    }

    /// Tells another rank that this one makes no further call in this world.
    fn leave(&self, to: usize, world: u64);

    /// What has arrived.
    fn inbox(&self) -> &Inbox;
}

/// A piece of memory.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    /// The first byte.
    pub start: *mut u8,
    /// How many.
    pub len: usize,
}

/// Keeps memory alive.
pub trait Memory: Send {}

impl<T: Send> Memory for T {}

/// Memory that is sent or received, piece by piece.
pub struct Payload {
    spans: Vec<Span>,
    /// Alive until the engine is done.
    _keep: Box<dyn Memory>,
}

// SAFETY: The spans point into what is kept, which may move between threads.
unsafe impl Send for Payload {}

impl Payload {
    /// Memory that belongs to `keep`. Pieces that touch become one.
    ///
    /// # Safety
    /// As long as `keep` lives, the spans are valid. Nobody writes them; and if the payload is received into, nobody reads
    /// them until it is complete.
    pub unsafe fn new(spans: impl IntoIterator<Item = Span>, keep: impl Memory + 'static) -> Self {
        let mut joined: Vec<Span> = Vec::new();
        for span in spans.into_iter().filter(|span| span.len > 0) {
            match joined.last_mut() {
                Some(last) if last.start.wrapping_add(last.len) == span.start => last.len += span.len,
                _ => joined.push(span),
            }
        }
        Self { spans: joined, _keep: Box::new(keep) }
    }

    /// The pieces.
    pub fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// Bytes of all pieces.
    pub fn len(&self) -> usize {
        self.spans.iter().map(|span| span.len).sum()
    }

    /// Whether there is nothing to send.
    pub fn is_empty(&self) -> bool {
        self.spans.is_empty()
    }
}

impl Debug for Payload {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Payload of {} bytes in {} pieces", self.len(), self.spans.len())
    }
}

/// A message as it arrives: what is small, and the announcement of what is not.
#[derive(Debug)]
pub struct Frame {
    /// What was sent with it.
    pub head: Vec<u8>,
    /// Bytes of the payload that follows.
    pub payload_bytes: usize,
    /// By which the engine finds the payload.
    pub tag: u64,
}

/// A payload that has been announced, and where it belongs.
#[derive(Debug)]
pub struct Landing {
    /// What has announced it.
    pub frame: Frame,
    /// Where to.
    pub payload: Payload,
    /// Whom to tell.
    pub receipt: Receipt,
}

/// Told when a payload is complete.
#[derive(Clone, Debug, Default)]
pub struct Receipt(Arc<Arrival>);

#[derive(Debug, Default)]
struct Arrival {
    is_announced: AtomicBool,
    is_complete: AtomicBool,
    /// How many bytes were announced, where others were due, and how many these were.
    refused: OnceLock<[usize; 2]>,
}

impl Receipt {
    fn complete(&self) {
        self.0.is_complete.store(true, Ordering::Release);
    }

    /// Whether its sender has done its part.
    pub fn is_announced(&self) -> bool {
        self.0.is_announced.load(Ordering::Acquire)
    }

    /// Whether the payload is there.
    pub fn is_complete(&self) -> bool {
        self.0.is_complete.load(Ordering::Acquire)
    }

    /// How many bytes were announced, where others were due, and how many these were.
    pub fn refused(&self) -> Option<[usize; 2]> {
        self.0.refused.get().copied()
    }

    /// What is to be received, unless the announced bytes are not those that are due.
    pub(super) fn announce(&self, frame: Frame, payload: Payload) -> Option<Landing> {
        let bytes = [frame.payload_bytes, payload.len()];
        if bytes[0] != bytes[1] {
            self.0.refused.get_or_init(|| bytes);
            return None;
        }
        self.0.is_announced.store(true, Ordering::Release);
        Some(Landing { frame, payload, receipt: self.clone() })
    }
}

/// Where an engine lays what has arrived, and where ranks wait for it.
#[derive(Debug, Default)]
pub struct Inbox {
    state: Mutex<Arrived>,
    changed: Condvar,
    /// Where the engine sleeps.
    engine: Condvar,
}

#[derive(Debug, Default)]
struct Arrived {
    frames: HashMap<(usize, Key), VecDeque<Frame>>,
    expected: HashMap<(usize, Key), (Payload, Receipt)>,
    left: HashSet<(u64, usize)>,
    failure: Option<String>,
    num_waiting: usize,
    engine_woken: bool,
    num_changes: u64,
    num_worlds: u64,
}

impl Arrived {
    fn take(&mut self, from: usize, key: Key) -> Option<Frame> {
        let queue = self.frames.get_mut(&(from, key))?;
        let frame = queue.pop_front();
        if queue.is_empty() {
            self.frames.remove(&(from, key));
        }
        frame
    }
}

impl Inbox {
    /// Numbers the worlds that are connected in this process, one after the other on every rank.
    pub fn next_world(&self) -> u64 {
        let mut state = self.lock();
        state.num_worlds += 1;
        state.num_worlds
    }

    /// A frame has arrived. Returns what the engine is to receive now, if that was expected.
    #[must_use = "what was expected is received by the engine"]
    pub fn deliver(&self, from: usize, key: Key, frame: Frame) -> Option<Landing> {
        let mut landing = None;
        self.change(|state| match state.expected.remove(&(from, key)) {
            Some((payload, receipt)) => landing = receipt.announce(frame, payload),
            None => state.frames.entry((from, key)).or_default().push_back(frame),
        });
        landing
    }

    /// The payload of this frame belongs to `payload`. Returns what the engine is to receive now, if the frame is there.
    fn expect(&self, from: usize, key: Key, payload: Payload, receipt: Receipt) -> Option<Landing> {
        let mut state = self.lock();
        match state.take(from, key) {
            Some(frame) => receipt.announce(frame, payload),
            None => {
                state.expected.insert((from, key), (payload, receipt));
                None
            }
        }
    }

    /// A rank has told that it makes no further call in a world.
    pub fn leave(&self, world: u64, rank: usize) {
        self.change(|state| {
            state.left.insert((world, rank));
        });
    }

    /// The engine has failed.
    pub fn fail(&self, message: String) {
        self.change(|state| {
            state.failure.get_or_insert(message);
        });
    }

    /// A payload is complete.
    pub fn complete(&self, receipt: &Receipt) {
        receipt.complete();
        self.change(|_| ());
    }

    /// Whether a rank waits for something.
    pub fn is_awaited(&self) -> bool {
        self.lock().num_waiting > 0
    }

    /// Wakes the engine: there is something to do.
    pub fn wake_engine(&self) {
        self.lock().engine_woken = true;
        self.engine.notify_all();
    }

    /// The engine sleeps until it is woken, as it also is when a rank begins to wait, or until `limit` has passed.
    pub fn sleep_engine(&self, limit: Option<Duration>) {
        let mut state = self.lock();
        if !state.engine_woken {
            state = match limit {
                Some(limit) => self.engine.wait_timeout(state, limit).unwrap_or_else(PoisonError::into_inner).0,
                None => {
                    self.engine.wait_while(state, |state| !state.engine_woken).unwrap_or_else(PoisonError::into_inner)
                }
            };
        }
        state.engine_woken = false;
    }

    /// The frame, if it is there.
    pub fn take(&self, from: usize, key: Key) -> Option<Frame> {
        self.lock().take(from, key)
    }

    /// Whether the rank has told that it makes no further call.
    pub fn has_left(&self, world: u64, rank: usize) -> bool {
        self.lock().left.contains(&(world, rank))
    }

    /// What the engine said when it failed.
    pub fn failure(&self) -> Option<String> {
        self.lock().failure.clone()
    }

    /// Looks with `get` after every change until it finds something; `None` if `limit` has passed.
    pub fn wait<T>(&self, limit: Duration, mut get: impl FnMut() -> Option<T>) -> Option<T> {
        let end = Instant::now() + limit;
        let mut state = self.lock();
        state.num_waiting += 1;
        state.engine_woken = true;
        self.engine.notify_all();
        let found = loop {
            let seen = state.num_changes;
            // Without the lock, which `get` may take.
            drop(state);
            if let Some(found) = get() {
                break Some(found);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break None;
            }
            state = self.lock();
            if state.num_changes == seen {
                state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            }
        };
        self.lock().num_waiting -= 1;
        found
    }

    fn change(&self, change: impl FnOnce(&mut Arrived)) {
        let mut state = self.lock();
        change(&mut state);
        state.num_changes += 1;
        drop(state);
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Arrived> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
