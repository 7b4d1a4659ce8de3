//! A port that lets in the ranks that are waited for, and nobody else; whatever else comes changes nothing.
//!
//! One thread looks after all connections, none of which it ever waits for. Each may send as many bytes as a rank would
//! ([`JOIN_BYTES`]) within [`PATIENCE`]; of more than [`MAX_PENDING`] at once the oldest goes. A rank that was crowded out tries
//! again. The port is closed as soon as all have come.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use mio::net::{TcpListener, TcpStream as Connection};
use mio::{Events, Interest, Poll, Token};

use super::handshake::{self, CLAIM_BYTES, HELLO_BYTES, JOIN_BYTES, Terms};
use super::{Refusal, RendezvousError};

/// Connections that have not proved anything yet.
const MAX_PENDING: usize = 128;
/// How long one may take for that.
const PATIENCE: Duration = Duration::from_secs(5);
/// Connections that are taken from the system's queue before those that are there get their turn.
const MAX_ACCEPTED: usize = 32;
/// How many of those that were sent away an error lists.
const MAX_LISTED: usize = 4;

const LISTENER: Token = Token(usize::MAX);

/// A port on which nobody has been let in yet.
#[derive(Debug)]
pub struct Entrance {
    listener: std::net::TcpListener,
    address: SocketAddr,
}

impl Entrance {
    /// Listens at a port of `host`; port 0 takes a free one. Where the host's address is not one of this machine, as behind
    /// an address translation, on all of its addresses.
    ///
    /// # Errors
    /// [`RendezvousError::Listen`] if the host is unknown or the port is taken.
    pub fn open(host: &str, port: u16) -> Result<Self, RendezvousError> {
        let refused = |source| RendezvousError::Listen { address: format!("{host}:{port}"), source };
        let addresses: Vec<SocketAddr> = (host, port).to_socket_addrs().map_err(refused)?.collect();
        // Many systems know their own name as a loopback address, at which no other host comes.
        let is_name = host.parse::<IpAddr>().is_err() && host != "localhost";
        let is_hidden = is_name && addresses.iter().all(|address| address.ip().is_loopback());
        let addresses = if is_hidden { vec![SocketAddr::from((Ipv4Addr::UNSPECIFIED, port))] } else { addresses };
        let listener = std::net::TcpListener::bind(&addresses[..]).or_else(|error| match error.kind() {
            io::ErrorKind::AddrNotAvailable => std::net::TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)),
            _ => Err(error),
        });
        let listener = listener.map_err(refused)?;
        listener.set_nonblocking(true).map_err(refused)?;
        let address = listener.local_addr().map_err(refused)?;
        Ok(Self { listener, address })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the connections of `expected`, by rank, when all have come.
    pub(crate) fn admit(
        self,
        rank: usize,
        terms: &Terms,
        expected: impl IntoIterator<Item = usize>,
        limit: Duration,
    ) -> Result<BTreeMap<usize, TcpStream>, RendezvousError> {
        let failed = |source| RendezvousError::Io { rank, what: "cannot wait for connections", source };
        let mut crowd = Crowd {
            terms,
            listener: TcpListener::from_std(self.listener),
            poll: Poll::new().map_err(failed)?,
            pending: BTreeMap::new(),
            next: 0,
            missing: expected.into_iter().collect(),
            admitted: BTreeMap::new(),
            refused: Vec::new(),
        };
        crowd.poll.registry().register(&mut crowd.listener, LISTENER, Interest::READABLE).map_err(failed)?;
        let started = Instant::now();
        let mut events = Events::with_capacity(MAX_PENDING);
        // Whether the system's queue may hold more.
        let mut more = false;
        while !crowd.missing.is_empty() {
            let Some(left) = limit.checked_sub(started.elapsed()) else {
                let missing = crowd.missing.into_iter().collect();
                let address = self.address.to_string();
                return Err(RendezvousError::Missing { rank, address, waited: limit, missing, refused: crowd.refused });
            };
            let nap = if more { Duration::ZERO } else { left.min(Duration::from_millis(100)) };
            match crowd.poll.poll(&mut events, Some(nap)) {
                Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(failed(error)),
                _ => {}
            }
            for event in &events {
                match event.token() {
                    LISTENER => more = true,
                    Token(number) => crowd.hear(number),
                }
            }
            if more {
                more = crowd.accept();
            }
            crowd.end_patience();
        }
        Ok(crowd.admitted)
    }
}

/// Everybody at the door.
struct Crowd<'a> {
    terms: &'a Terms<'a>,
    listener: TcpListener,
    poll: Poll,
    /// In the order of arrival.
    pending: BTreeMap<usize, Pending>,
    next: usize,
    missing: BTreeSet<usize>,
    admitted: BTreeMap<usize, TcpStream>,
    refused: Vec<String>,
}

/// A connection that has not proved anything yet.
struct Pending {
    stream: Connection,
    from: SocketAddr,
    arrived: Instant,
    nonce: [u8; 32],
    greeted: bool,
    received: Vec<u8>,
}

impl Crowd<'_> {
    /// Takes some of those that have come; returns whether there may be more.
    fn accept(&mut self) -> bool {
        for _ in 0..MAX_ACCEPTED {
            match self.listener.accept() {
                Ok((stream, from)) => self.add(stream, from),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
                // One that has gone already, or no file descriptor: there is one again when the oldest has gone.
                Err(_) => {
                    self.pending.pop_first();
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        }
        true
    }

    fn add(&mut self, mut stream: Connection, from: SocketAddr) {
        if self.pending.len() == MAX_PENDING {
            self.pending.pop_first();
        }
        let number = self.next;
        self.next += 1;
        let Ok(nonce) = handshake::nonce() else { return };
        if self.poll.registry().register(&mut stream, Token(number), Interest::READABLE).is_ok() {
            let received = Vec::with_capacity(JOIN_BYTES);
            let pending = Pending { stream, from, arrived: Instant::now(), nonce, greeted: false, received };
            self.pending.insert(number, pending);
        }
    }

    /// Reads what a connection has sent.
    fn hear(&mut self, number: usize) {
        let Some(mut pending) = self.pending.remove(&number) else { return };
        let missing = &self.missing;
        let world_size = self.terms.world_size;
        let is_expected = |rank: usize| match rank {
            rank if missing.contains(&rank) => Ok(()),
            rank if rank < world_size => Err(Refusal::Duplicate),
            _ => Err(Refusal::Rank),
        };
        match pending.hear(self.terms, is_expected) {
            Heard::Nothing => drop(self.pending.insert(number, pending)),
            Heard::Gone => {}
            Heard::Refused(refusal) => {
                tracing::warn!(from = %pending.from, "a connection was refused: {refusal}");
                if self.refused.len() < MAX_LISTED {
                    self.refused.push(format!("{}, {refusal}", pending.from));
                }
            }
            Heard::Rank(rank) => {
                if self.poll.registry().deregister(&mut pending.stream).is_ok() {
                    self.missing.remove(&rank);
                    self.admitted.insert(rank, pending.stream.into());
                }
            }
        }
    }

    fn end_patience(&mut self) {
        while self.pending.first_key_value().is_some_and(|(_, oldest)| oldest.arrived.elapsed() > PATIENCE) {
            self.pending.pop_first();
        }
    }
}

/// What came of reading.
enum Heard {
    Nothing,
    Gone,
    Refused(Refusal),
    Rank(usize),
}

impl Pending {
    fn hear(&mut self, terms: &Terms, is_expected: impl Fn(usize) -> Result<(), Refusal>) -> Heard {
        loop {
            let mut buffer = [0; JOIN_BYTES];
            let room = JOIN_BYTES - self.received.len();
            match self.stream.read(&mut buffer[..room]) {
                Ok(0) => return Heard::Gone,
                Ok(len) => self.received.extend_from_slice(&buffer[..len]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Heard::Nothing,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => return Heard::Gone,
            }
            let hello = &self.received[..self.received.len().min(HELLO_BYTES)];
            let theirs = match handshake::read_hello(hello) {
                Ok(Some(nonce)) => nonce,
                Ok(None) => continue,
                Err(refusal) => {
                    // Tells a rank of another version which one this is.
                    if matches!(refusal, Refusal::Version(_)) {
                        let _ = self.stream.write(&handshake::hello(&self.nonce));
                    }
                    return Heard::Refused(refusal);
                }
            };
            if !std::mem::replace(&mut self.greeted, true) && !self.say(&handshake::hello(&self.nonce)) {
                return Heard::Gone;
            }
            let Some(claim) = self.received[HELLO_BYTES..].first_chunk::<CLAIM_BYTES>() else { continue };
            let verdict = terms.check_claim(claim, &theirs, &self.nonce, is_expected);
            let answer = terms.verdict(verdict, &theirs, &self.nonce);
            return match (self.say(&answer), verdict) {
                (_, Err(refusal)) => Heard::Refused(refusal),
                (true, Ok(rank)) => Heard::Rank(rank),
                (false, Ok(_)) => Heard::Gone,
            };
        }
    }

    /// A few bytes, which fit the buffer of a connection that has been sent nothing else.
    fn say(&mut self, bytes: &[u8]) -> bool {
        matches!(self.stream.write(bytes), Ok(len) if len == bytes.len())
    }
}
