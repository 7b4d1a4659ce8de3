//! The connections of a rank to every other: a thread that writes and one that reads for each.
//!
//! So a rank that sends never waits for one that does not read, and two that send each other much do not block each other.

use std::collections::BTreeMap;
use std::io::{self, BufReader};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use bytes::Bytes;

use super::mailbox::{Mailbox, Place};
use super::wire::{self, Received};
use crate::comm::call::Call;
use crate::net::{JoinLimits, join};
use crate::{AbortCause, Control, ControlChannel, Entrance, RendezvousError};

/// What the connections are for, in the handshake.
const PURPOSE: &str = "data";

/// A header, and what follows it.
type Message = (Vec<u8>, Vec<Bytes>);

/// All connections of one rank.
#[derive(Debug)]
pub(super) struct Links {
    mailbox: Arc<Mailbox>,
    /// By the other's number in the world.
    links: BTreeMap<usize, Link>,
}

#[derive(Debug)]
struct Link {
    /// Taken when the link is dropped, which ends the writer once it has written all.
    queue: Option<Mutex<Sender<Message>>>,
    stream: TcpStream,
    writer: Option<JoinHandle<()>>,
}

impl Links {
    /// Listens for the ranks above this one, and joins those below.
    pub(super) fn connect(control: &Arc<ControlChannel>) -> Result<Self, RendezvousError> {
        let (rank, world_size, limit) = (control.rank(), control.world_size(), control.timeout());
        let (ip, known_as) = control.local_address();
        let entrance = Entrance::open(&ip.to_string(), 0)?;
        let address = entrance.address();
        // Rank 0 is known by the name under which it was found.
        let told = if known_as.is_some() { format!(":{}", address.port()) } else { address.to_string() };
        control.put(&key(rank), told.as_bytes())?;
        let terms = &control.terms(PURPOSE);
        let streams = thread::scope(|scope| {
            let above = scope.spawn(move || entrance.admit(rank, terms, rank + 1..world_size, limit));
            let below = join_all(control, limit);
            let above = above.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            let mut streams = below?;
            streams.extend(above?);
            Ok::<_, RendezvousError>(streams)
        })?;
        let mailbox = Arc::<Mailbox>::default();
        let failed = |source| RendezvousError::Io { rank, what: "cannot start a connection's threads", source };
        let start = |(other, stream)| Ok((other, Link::start(other, stream, &mailbox, control).map_err(failed)?));
        let links = streams.into_iter().map(start).collect::<Result<_, _>>()?;
        Ok(Self { mailbox, links })
    }

    pub(super) fn mailbox(&self) -> &Mailbox {
        &self.mailbox
    }

    /// Does not wait. What cannot be sent is missed by the receiver, whose end the control channel tells of.
    pub(super) fn send(&self, to: usize, place: Place, call: &Call, payload: Vec<Bytes>) {
        let len = payload.iter().map(Bytes::len).sum();
        self.queue(to, (wire::letter_header(place, call, len), payload));
    }

    /// Tells every other rank that nothing follows.
    pub(super) fn leave(&self) {
        for &other in self.links.keys() {
            self.queue(other, (wire::leave_header(), Vec::new()));
        }
    }

    fn queue(&self, to: usize, message: Message) {
        let queue = self.links.get(&to).and_then(|link| link.queue.as_ref());
        if let Some(queue) = queue {
            // The writer has ended with its connection.
            let _ = queue.lock().unwrap_or_else(PoisonError::into_inner).send(message);
        }
    }

    /// Ends all connections, whatever has not been sent.
    pub(super) fn close(&self) {
        for link in self.links.values() {
            let _ = link.stream.shutdown(Shutdown::Both);
        }
    }
}

impl Link {
    fn start(
        other: usize,
        stream: TcpStream,
        mailbox: &Arc<Mailbox>,
        control: &Arc<ControlChannel>,
    ) -> io::Result<Self> {
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        let rank = control.rank();
        let (queue, messages) = channel();
        let (output, input) = (stream.try_clone()?, stream.try_clone()?);
        let named = |what: &str| thread::Builder::new().name(format!("{what}-{rank}-{other}"));
        let writer = named("send").spawn(move || write_all(output, &messages))?;
        let (mailbox, control) = (mailbox.clone(), Arc::downgrade(control));
        // Ends with the connection.
        named("receive").spawn(move || {
            let error = read_all(input, other, &mailbox);
            if error.kind() == io::ErrorKind::InvalidData
                && let Some(control) = control.upgrade()
            {
                let message = format!("rank {other} sent what is no message ({error})");
                control.abort(AbortCause::RankFailed { rank, message });
            }
        })?;
        Ok(Self { queue: Some(Mutex::new(queue)), stream, writer: Some(writer) })
    }
}

impl Drop for Link {
    /// What was sent last arrives, unless the run was aborted.
    fn drop(&mut self) {
        self.queue = None;
        let _ = self.stream.set_write_timeout(Some(Duration::from_secs(1)));
        if let Some(writer) = self.writer.take() {
            let _ = writer.join();
        }
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

fn key(rank: usize) -> String {
    format!("data address of rank {rank}")
}

fn join_all(control: &ControlChannel, limit: Duration) -> Result<BTreeMap<usize, TcpStream>, RendezvousError> {
    let rank = control.rank();
    let one = |other: usize| {
        let told = String::from_utf8_lossy(&control.get(&key(other), limit)?).into_owned();
        let address = match told.parse::<SocketAddr>() {
            Ok(address) => address.to_string(),
            Err(_) => format!("{}{told}", control.host_of_rank_0()),
        };
        let limits = JoinLimits { all: limit, refused: limit };
        Ok((other, join(&address, [rank, other], &control.terms(PURPOSE), limits)?))
    };
    (0..rank).map(one).collect()
}

fn write_all(mut stream: TcpStream, messages: &Receiver<Message>) {
    for (header, payload) in messages {
        if wire::write(&mut stream, &header, &payload).is_err() {
            return;
        }
    }
}

/// Until the connection ends; returns how.
fn read_all(stream: TcpStream, from: usize, mailbox: &Mailbox) -> io::Error {
    let mut stream = BufReader::with_capacity(64 << 10, stream);
    loop {
        match wire::read(&mut stream) {
            Ok(Received::Letter(place, letter)) => mailbox.put(place, from, letter),
            Ok(Received::Leave) => mailbox.leave(from),
            Err(error) => return error,
        }
    }
}
