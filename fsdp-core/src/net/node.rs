//! The thread of a control channel: it alone reads and writes the connections, and waits for none of them.
//!
//! Rank 0 is connected to every other rank, and passes on what one of them tells; every other rank is connected to rank 0. So
//! all causes pass through rank 0, and the one that is there first is everybody's.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use mio::net::TcpStream as Connection;
use mio::{Events, Interest, Poll, Token, Waker};

use super::shared::{MAX_WAITS, Shared, Told};
use super::wire::{Inbox, Message, WireCause};
use super::{Standing, Stragglers};
use crate::{AbortCause, Issued};

/// What may wait for a rank that does not read. Heartbeats alone fill it in an hour.
const MAX_OUTBOX_BYTES: usize = 1 << 20;
/// How long the end of a run waits for what has not been sent.
const FLUSH: Duration = Duration::from_secs(1);

const WAKER: Token = Token(usize::MAX);

/// What the program asks of the thread.
pub(super) enum Command {
    Tell(Message),
    Close,
}

/// How often, and how long.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    /// Between heartbeats.
    pub(super) interval: Duration,
    /// After so long without one a rank is lost.
    pub(super) silence: Duration,
    /// After so long a wait is told of.
    pub(super) patience: Duration,
}

pub(super) struct Node {
    shared: Arc<Shared>,
    pace: Pace,
    poll: Poll,
    /// By rank.
    peers: BTreeMap<usize, Peer>,
    commands: Receiver<Command>,
    /// The last wait that was told of.
    told: Option<Issued>,
}

struct Peer {
    stream: Connection,
    inbox: Inbox,
    outbox: Vec<u8>,
}

/// Why a connection is of no more use.
enum Gone {
    Ended,
    Failed(io::Error),
    Garbage,
    DoesNotRead,
}

impl Gone {
    fn told(self) -> String {
        match self {
            Gone::Ended => "its process has ended, or its connection was closed".to_owned(),
            Gone::Failed(error) => format!("its connection has failed ({error})"),
            Gone::Garbage => "it sent what is no message".to_owned(),
            Gone::DoesNotRead => "it does not read what it is sent".to_owned(),
        }
    }
}

impl Node {
    pub(super) fn new(
        shared: Arc<Shared>,
        pace: Pace,
        streams: BTreeMap<usize, TcpStream>,
        commands: Receiver<Command>,
    ) -> io::Result<(Self, Waker)> {
        let poll = Poll::new()?;
        let waker = Waker::new(poll.registry(), WAKER)?;
        let mut peers = BTreeMap::new();
        for (rank, stream) in streams {
            stream.set_nonblocking(true)?;
            stream.set_nodelay(true)?;
            let mut stream = Connection::from_std(stream);
            poll.registry().register(&mut stream, Token(rank), Interest::READABLE | Interest::WRITABLE)?;
            peers.insert(rank, Peer { stream, inbox: Inbox::default(), outbox: Vec::new() });
        }
        Ok((Self { shared, pace, poll, peers, commands, told: None }, waker))
    }

    fn is_hub(&self) -> bool {
        self.shared.rank == 0
    }

    /// Until the program closes it.
    pub(super) fn run(mut self) {
        let mut events = Events::with_capacity(256);
        let mut next_beat = Instant::now();
        loop {
            let nap = next_beat.saturating_duration_since(Instant::now());
            let polled = self.poll.poll(&mut events, Some(nap));
            if let Err(error) = polled
                && error.kind() != io::ErrorKind::Interrupted
            {
                self.shared.end(lost(self.shared.rank, format!("it cannot wait for messages ({error})"), None));
                return;
            }
            let ready = events.iter().map(|event| event.token()).filter(|&token| token != WAKER);
            for Token(rank) in ready.collect::<Vec<_>>() {
                self.listen(rank);
                self.write(rank);
            }
            loop {
                match self.commands.try_recv() {
                    Ok(Command::Tell(message)) => self.deliver(None, message),
                    Ok(Command::Close) | Err(TryRecvError::Disconnected) => return self.close(),
                    Err(TryRecvError::Empty) => break,
                }
            }
            if Instant::now() >= next_beat {
                next_beat = Instant::now() + self.pace.interval;
                self.beat();
            }
        }
    }

    /// Reads what a rank has sent, and acts on it.
    fn listen(&mut self, rank: usize) {
        loop {
            let Some(peer) = self.peers.get_mut(&rank) else { return };
            let mut buffer = [0; 16 << 10];
            let gone = match peer.stream.read(&mut buffer) {
                Ok(0) => Some(Gone::Ended),
                Ok(len) => {
                    peer.inbox.push(&buffer[..len]);
                    None
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Some(Gone::Ended),
                Err(error) => Some(Gone::Failed(error)),
            };
            if let Some(gone) = gone {
                return self.lose(rank, gone);
            }
            while let Some(peer) = self.peers.get_mut(&rank) {
                match peer.inbox.pop() {
                    Ok(Some(message)) => self.deliver(Some(rank), message),
                    Ok(None) => break,
                    Err(_) => return self.lose(rank, Gone::Garbage),
                }
            }
        }
    }

    /// Acts on a message, from a rank or from this rank's program.
    fn deliver(&mut self, from: Option<usize>, message: Message) {
        if let Some(rank) = from {
            let heard = |told: &mut Told| told.heard = Instant::now();
            self.shared.change(|state| state.others.get_mut(&rank).map(heard));
        }
        match message {
            Message::Start => {}
            Message::Heartbeat { waits, last } => {
                let Some(rank) = from else { return };
                let now = Instant::now();
                let begun = |millis| now.checked_sub(Duration::from_millis(millis)).unwrap_or(now);
                let waits = waits.into_iter().take(MAX_WAITS);
                let waits = waits.map(|wait| (wait.issued.into(), begun(wait.millis))).collect();
                let told = Told { heard: now, waits, last: last.map(Issued::from) };
                self.shared.change(|state| state.others.insert(rank, told));
            }
            Message::Abort(cause) => self.abort(from, cause),
            Message::Leave { rank } => {
                // First the others, since this process may end as soon as its program knows that all have left.
                self.pass_on(from, &Message::Leave { rank });
                self.shared.change(|state| state.left.insert(rank));
            }
            Message::Put { key, value } => {
                self.shared.change(|state| state.values.insert(key.clone(), value.clone()));
                self.pass_on(from, &Message::Put { key, value });
            }
        }
    }

    /// Rank 0 decides which cause was first; while it can be asked, nobody else does.
    fn abort(&mut self, from: Option<usize>, cause: WireCause) {
        if from.is_none() && !self.is_hub() && self.peers.contains_key(&0) {
            return self.tell(0, &Message::Abort(cause));
        }
        if self.shared.cause.get().is_some() {
            return;
        }
        // First the others, since this process may end as soon as its program knows.
        if self.is_hub() {
            self.pass_on(None, &Message::Abort(cause.clone()));
        }
        self.shared.end(cause.into());
    }

    /// To everyone but the one it comes from. Only rank 0 has several to tell.
    fn pass_on(&mut self, from: Option<usize>, message: &Message) {
        if from.is_some() && !self.is_hub() {
            return;
        }
        for rank in self.peers.keys().copied().filter(|&rank| Some(rank) != from).collect::<Vec<_>>() {
            self.tell(rank, message);
        }
    }

    fn tell(&mut self, rank: usize, message: &Message) {
        let Some(peer) = self.peers.get_mut(&rank) else { return };
        let frame = message.frame();
        if peer.outbox.len() + frame.len() > MAX_OUTBOX_BYTES {
            return self.lose(rank, Gone::DoesNotRead);
        }
        peer.outbox.extend_from_slice(&frame);
        self.write(rank);
    }

    fn write(&mut self, rank: usize) {
        let Some(peer) = self.peers.get_mut(&rank) else { return };
        while !peer.outbox.is_empty() {
            match peer.stream.write(&peer.outbox) {
                Ok(len) => drop(peer.outbox.drain(..len)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    let is_end = matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset);
                    if is_end {
                        // What it has said before its end comes first: it may have left.
                        self.listen(rank);
                    }
                    return self.lose(rank, if is_end { Gone::Ended } else { Gone::Failed(error) });
                }
            }
        }
    }

    /// Whether nothing more is due from a rank. All that others say comes by rank 0, so it is needed until the last has left.
    fn is_done_with(&self, rank: usize) -> bool {
        let left = &self.shared.lock().left;
        left.contains(&rank) && (self.is_hub() || left.len() == self.shared.world_size)
    }

    /// A connection is of no more use. That is a failure, unless the rank had left or the run has ended.
    fn lose(&mut self, rank: usize, gone: Gone) {
        if self.peers.remove(&rank).is_none() {
            return;
        }
        if !self.is_done_with(rank) && self.shared.cause.get().is_none() {
            self.report_lost(rank, gone.told());
        }
    }

    fn report_lost(&mut self, rank: usize, how: String) {
        let standings = self.shared.standings();
        let longest = |standing: &Standing| standing.waiting.as_ref().map(|(_, waited)| *waited);
        let waiting =
            standings.iter().filter(|standing| standing.rank != rank).max_by_key(|standing| longest(standing));
        let missed = waiting.and_then(|standing| standing.waiting.clone()).map(|(issued, _)| issued);
        let last = standings.iter().find(|standing| standing.rank == rank).and_then(|standing| standing.last.clone());
        let how = match last {
            Some(last) => format!("{how}; it came to {} ({}) last, as far as it is known", last.kind, last.tag),
            None => how,
        };
        let cause = WireCause::new(&lost(rank, how, missed), self.shared.rank);
        self.abort(Some(rank), cause);
    }

    /// Tells that this rank is alive, and looks who else is.
    fn beat(&mut self) {
        let (waits, last) = self.shared.own();
        self.pass_on(None, &Message::Heartbeat { waits, last: last.as_ref().map(Into::into) });
        let standings = self.shared.standings();
        if self.shared.cause.get().is_some() {
            return;
        }
        for Standing { rank, silent, .. } in &standings {
            if *silent > self.pace.silence && !self.is_done_with(*rank) && self.peers.contains_key(rank) {
                self.report_lost(*rank, format!("nothing was heard of it for {:.1} s", silent.as_secs_f64()));
            }
        }
        if self.is_hub()
            && let Some(found) = Stragglers::among(&standings, self.pace.patience)
            && self.told.as_ref() != Some(&found.operation)
        {
            tracing::warn!("{found}");
            self.told = Some(found.operation);
        }
    }

    /// Sends what has not been sent, within a limit.
    fn close(mut self) {
        let deadline = Instant::now() + FLUSH;
        let mut events = Events::with_capacity(256);
        while self.peers.values().any(|peer| !peer.outbox.is_empty()) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || self.poll.poll(&mut events, Some(left)).is_err() {
                return;
            }
            for rank in self.peers.keys().copied().collect::<Vec<_>>() {
                self.write(rank);
            }
        }
    }
}

fn lost(rank: usize, how: String, missed: Option<Issued>) -> AbortCause {
    AbortCause::RankLost { rank, how, missed: missed.map(Box::new) }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::sync::mpsc::channel;
    use std::thread;

    use super::*;

    #[test]
    fn a_rank_that_has_left_and_ended_is_not_lost_even_if_it_is_told_something_before_it_is_heard() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (stream, _) = listener.accept().unwrap();
        let shared = Arc::new(Shared::new(0, 2));
        let minute = Duration::from_secs(60);
        let pace = Pace { interval: minute, silence: minute, patience: minute };
        let (_commands, asked) = channel();
        let (mut hub, _waker) = Node::new(shared.clone(), pace, BTreeMap::from([(1, stream)]), asked).unwrap();
        let heartbeat = Message::Heartbeat { waits: Vec::new(), last: None };
        // The peer ends without having read this, so that the system resets the connection.
        hub.tell(1, &heartbeat);
        peer.write_all(&Message::Leave { rank: 1 }.frame()).unwrap();
        drop(peer);
        let begun = Instant::now();
        while hub.peers.contains_key(&1) {
            assert!(begun.elapsed() < minute, "its end is not seen");
            hub.tell(1, &heartbeat);
            thread::sleep(Duration::from_millis(1));
        }
        assert!(shared.cause.get().is_none(), "{:?}", shared.cause.get());
        assert!(shared.lock().left.contains(&1));
    }
}
