//! A network between threads, so that a world of several hosts runs in one process.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use crate::hosts::{Frame, Inbox, Key, Landing, Network, Payload, Span, connect};
use crate::{AbortCause, CommError, Communicator, Control, Issued};

/// One rank's end of a network whose ranks are threads. It counts the bytes of payloads that leave the rank.
#[derive(Debug)]
pub struct Loopback {
    rank: usize,
    hosts: Arc<[String]>,
    wires: Arc<[Wire]>,
}

#[derive(Debug, Default)]
struct Wire {
    inbox: Inbox,
    payloads: Mutex<HashMap<u64, Vec<u8>>>,
    sent: Mutex<(u64, u64)>,
}

impl Loopback {
    /// A rank for each name of a host.
    pub fn new(hosts: &[&str]) -> Vec<Arc<Self>> {
        let wires: Arc<[Wire]> = hosts.iter().map(|_| Wire::default()).collect();
        let hosts: Arc<[String]> = hosts.iter().map(|&host| host.to_owned()).collect();
        (0..hosts.len()).map(|rank| Arc::new(Self { rank, hosts: hosts.clone(), wires: wires.clone() })).collect()
    }

    /// Connects a world in which rank `r` is on host `hosts[r]`.
    pub fn connect(hosts: &[&str], timeout: Duration) -> Vec<Result<Arc<dyn Communicator>, CommError>> {
        let control = Arc::new(ThreadControl::default());
        let join = |network: Arc<Loopback>| {
            let control = control.clone();
            std::thread::spawn(move || connect(network, control, timeout))
        };
        let threads: Vec<_> = Self::new(hosts).into_iter().map(join).collect();
        let joined = |thread: std::thread::JoinHandle<_>| thread.join().expect("connecting does not panic");
        threads.into_iter().map(joined).collect()
    }

    /// Bytes of payloads that this rank has sent.
    pub fn sent_bytes(&self) -> u64 {
        self.wire(self.rank).sent.lock().unwrap_or_else(PoisonError::into_inner).1
    }

    fn wire(&self, rank: usize) -> &Wire {
        &self.wires[rank]
    }
}

impl Network for Loopback {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.hosts.len()
    }

    fn host(&self) -> String {
        self.hosts[self.rank].clone()
    }

    fn send(&self, to: usize, key: Key, head: Vec<u8>, payload: Option<Payload>) {
        let bytes: Vec<u8> = payload.iter().flat_map(Payload::spans).flat_map(|span| read(*span)).copied().collect();
        let mut sent = self.wire(self.rank).sent.lock().unwrap_or_else(PoisonError::into_inner);
        *sent = (sent.0 + 1, sent.1 + bytes.len() as u64);
        let tag = (self.rank as u64) << 48 | sent.0;
        drop(sent);
        let wire = self.wire(to);
        let frame = Frame { head, payload_bytes: bytes.len(), tag };
        wire.payloads.lock().unwrap_or_else(PoisonError::into_inner).insert(tag, bytes);
        if let Some(landing) = wire.inbox.deliver(self.rank, key, frame) {
            wire.receive(landing);
        }
    }

    fn receive(&self, _: usize, landing: Landing) {
        self.wire(self.rank).receive(landing);
    }

    fn leave(&self, to: usize, world: u64) {
        self.wire(to).inbox.leave(world, self.rank);
    }

    fn inbox(&self) -> &Inbox {
        &self.wire(self.rank).inbox
    }
}

impl Wire {
    fn receive(&self, Landing { frame, payload, receipt }: Landing) {
        let bytes = self.payloads.lock().unwrap_or_else(PoisonError::into_inner).remove(&frame.tag).unwrap_or_default();
        let mut rest = &bytes[..];
        for span in payload.spans() {
            let (piece, after) = rest.split_at(span.len);
            // SAFETY: Whoever made the payload vouches that nobody else uses its spans.
            unsafe { std::slice::from_raw_parts_mut(span.start, span.len) }.copy_from_slice(piece);
            rest = after;
        }
        self.inbox.complete(&receipt);
    }
}

fn read<'a>(span: Span) -> &'a [u8] {
    // SAFETY: Whoever made the payload vouches that the span is valid and not written while it is sent.
    unsafe { std::slice::from_raw_parts(span.start, span.len) }
}

/// The control channel of ranks that are threads.
#[derive(Debug, Default)]
pub struct ThreadControl {
    cause: OnceLock<AbortCause>,
}

impl Control for ThreadControl {
    fn abort(&self, cause: AbortCause) {
        self.cause.get_or_init(|| cause);
    }

    fn aborted(&self) -> Option<AbortCause> {
        self.cause.get().cloned()
    }

    fn leave(&self) {}

    fn waiting(&self, _: Option<Issued>) {}
}
