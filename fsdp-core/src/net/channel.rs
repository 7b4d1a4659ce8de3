//! The control channel of a run over processes, as a rank holds it.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Read};
use std::net::{IpAddr, Ipv4Addr, TcpStream};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use mio::Waker;

use super::handshake::Terms;
use super::node::{Command, Node, Pace};
use super::shared::{Shared, Waited};
use super::wire::{Inbox, Message, WireCause};
use super::{Entrance, JoinLimits, RendezvousError, Secret, Standing, Stragglers, join};
use crate::{AbortCause, Control, Issued};

/// How long an abort waits for rank 0 to say whose cause was first.
const AGREE: Duration = Duration::from_secs(1);
/// The least time without a heartbeat after which a rank is lost: a busy machine may keep a thread from running.
const MIN_SILENCE: Duration = Duration::from_secs(2);
/// Sizes of what is put: these are for identifiers and addresses.
const MAX_KEY_BYTES: usize = 1 << 10;
const MAX_VALUE_BYTES: usize = 16 << 10;

/// Who takes part in a control channel, and how it is let in.
#[derive(Clone, Debug)]
pub struct Member {
    /// This rank.
    pub rank: usize,
    /// Ranks of the run.
    pub world_size: usize,
    /// What only the ranks of this run know.
    pub secret: Secret,
    /// After so long a rank that has not joined, or is not heard from, is given up.
    pub timeout: Duration,
    /// After so long in which nobody listens where rank 0 is to, it is given up. Shorter than `timeout` where rank 0 must have
    /// been started with this rank.
    pub start_limit: Duration,
}

/// One connection from every rank to rank 0, for what must arrive when collectives do not: why the run ends.
///
/// - A rank whose process ends, is stopped, or cannot be reached ends the run for all others, with its name: at once where
///   the connection ends, else when nothing was heard of it for three quarters of the timeout (2 s at the least).
/// - The first cause wins, on all ranks the same one.
/// - Small values by name, for what ranks must know before they can communicate otherwise.
///
/// It costs a thread and a message of a few hundred bytes per rank and second.
///
/// ```
/// use std::thread;
/// use std::time::Duration;
/// use fsdp_core::{AbortCause, Control, ControlChannel, Entrance, Member, Secret};
///
/// let secret = Secret::random()?;
/// let limit = Duration::from_secs(30);
/// let member = |rank| Member { rank, world_size: 2, secret: secret.clone(), timeout: limit, start_limit: limit };
/// let entrance = Entrance::open("127.0.0.1", 0)?;
/// let (address, other) = (entrance.address().to_string(), member(1)); // of another process, usually
/// let other = thread::spawn(move || ControlChannel::join(&address, &other));
/// let control = ControlChannel::host(entrance, &member(0))?;
/// let other = other.join().unwrap()?;
///
/// control.put("id", b"42")?;
/// assert_eq!(other.get("id", limit)?, b"42");
/// let cause = AbortCause::RankFailed { rank: 1, message: "no data".into() };
/// other.abort(cause.clone());
/// assert_eq!(control.finish(), Err(cause));
/// # Ok::<(), fsdp_core::RendezvousError>(())
/// ```
pub struct ControlChannel {
    shared: Arc<Shared>,
    member: Member,
    commands: Mutex<Sender<Command>>,
    waker: Waker,
    thread: Option<JoinHandle<()>>,
    /// This machine's address towards the others.
    local: IpAddr,
    /// The host of rank 0.
    host: String,
}

impl ControlChannel {
    /// As rank 0: waits at `entrance` until all ranks have joined.
    ///
    /// # Errors
    /// [`RendezvousError::Missing`] names the ranks that did not come in time.
    ///
    /// # Panics
    /// If `member` is not rank 0.
    pub fn host(entrance: Entrance, member: &Member) -> Result<Arc<Self>, RendezvousError> {
        assert_eq!(member.rank, 0, "rank 0 is the host");
        let address = entrance.address();
        let admitted = entrance.admit(0, &member.terms("control"), 1..member.world_size, member.timeout);
        let mut streams = admitted?;
        for stream in streams.values_mut() {
            // The first bytes of a connection: they fit its buffer.
            let failed = |source| RendezvousError::Io { rank: 0, what: "cannot prepare a connection", source };
            stream.set_nonblocking(false).map_err(failed)?;
            // One that has gone already is told of by the thread.
            let _ = io::Write::write_all(stream, &Message::Start.frame());
        }
        Self::start(member, streams, address.ip(), address.ip().to_string())
    }

    /// As another rank than 0: joins at `address`, a host and a port, and waits until all have.
    ///
    /// # Errors
    /// If rank 0 is not found in time, or does not let this rank in.
    pub fn join(address: &str, member: &Member) -> Result<Arc<Self>, RendezvousError> {
        let Member { rank, timeout, .. } = *member;
        let begun = Instant::now();
        let limits = JoinLimits { all: timeout, refused: member.start_limit };
        let mut stream = join(address, [rank, 0], &member.terms("control"), limits)?;
        wait_for_start(&mut stream, rank, timeout.saturating_sub(begun.elapsed()) + AGREE)?;
        let failed = |source| RendezvousError::Io { rank, what: "cannot prepare the connection to rank 0", source };
        let local = stream.local_addr().map_err(failed)?.ip();
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host).to_owned();
        Self::start(member, BTreeMap::from([(0, stream)]), local, host)
    }

    fn start(
        member: &Member,
        streams: BTreeMap<usize, TcpStream>,
        local: IpAddr,
        host: String,
    ) -> Result<Arc<Self>, RendezvousError> {
        let Member { rank, world_size, timeout, .. } = *member;
        let shared = Arc::new(Shared::new(rank, world_size));
        let pace = Pace {
            interval: (timeout / 20).clamp(Duration::from_millis(20), Duration::from_secs(1)),
            silence: (timeout * 3 / 4).max(MIN_SILENCE),
            patience: (timeout / 4).clamp(Duration::from_millis(100), Duration::from_secs(30)),
        };
        let failed = |source| RendezvousError::Io { rank, what: "cannot start the control channel", source };
        let (commands, queue) = channel();
        let (node, waker) = Node::new(shared.clone(), pace, streams, queue).map_err(failed)?;
        let thread =
            thread::Builder::new().name(format!("control-{rank}")).spawn(move || node.run()).map_err(failed)?;
        let (commands, thread) = (Mutex::new(commands), Some(thread));
        Ok(Arc::new(Self { shared, member: member.clone(), commands, waker, thread, local, host }))
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.shared.rank
    }

    /// Ranks of the run.
    pub fn world_size(&self) -> usize {
        self.shared.world_size
    }

    /// Lets every rank read `value` under `key`. A later value under the same key replaces it.
    ///
    /// # Errors
    /// If the run has ended.
    ///
    /// # Panics
    /// If the key is longer than 1 KiB or the value than 16 KiB: these are for identifiers and addresses.
    pub fn put(&self, key: &str, value: &[u8]) -> Result<(), RendezvousError> {
        assert!(key.len() <= MAX_KEY_BYTES && value.len() <= MAX_VALUE_BYTES, "`{key}` is too large for this channel");
        if let Some(cause) = self.aborted() {
            return Err(self.ended(&cause));
        }
        self.command(Command::Tell(Message::Put { key: key.to_owned(), value: value.to_owned() }));
        Ok(())
    }

    /// The value that some rank has put under `key`, when it is there.
    ///
    /// # Errors
    /// If nobody has put one within `limit`, or the run has ended.
    pub fn get(&self, key: &str, limit: Duration) -> Result<Vec<u8>, RendezvousError> {
        match self.shared.wait(Some(limit), |state| state.values.get(key).cloned()) {
            Waited::Ready(value) => Ok(value),
            Waited::Ended(cause) => Err(self.ended(&cause)),
            Waited::TimeIsUp => Err(RendezvousError::NoValue { rank: self.rank(), key: key.to_owned(), waited: limit }),
        }
    }

    /// Leaves, and waits until all ranks have, so that all end with the same outcome: a rank that fails later still fails all.
    /// As long as the others are heard of, there is no limit to this.
    ///
    /// # Errors
    /// The cause, if the run was aborted.
    pub fn finish(&self) -> Result<(), AbortCause> {
        self.leave();
        let all = self.shared.world_size;
        match self.shared.wait(None, |state| (state.left.len() == all).then_some(())) {
            Waited::Ready(()) => self.aborted().map_or(Ok(()), Err),
            Waited::Ended(cause) => Err(cause),
            Waited::TimeIsUp => unreachable!("this wait has no limit"),
        }
    }

    /// Where all ranks stand. On other ranks than 0, only what rank 0 and this rank do is known.
    pub fn standings(&self) -> Vec<Standing> {
        self.shared.standings()
    }

    /// Who lets others wait for longer than `patience`, as far as rank 0 knows: call it there. A warning says the same for waits
    /// of a quarter of the timeout, or 30 s.
    pub fn stragglers(&self, patience: Duration) -> Option<Stragglers> {
        Stragglers::among(&self.standings(), patience)
    }

    pub(crate) fn terms<'a>(&'a self, purpose: &'a str) -> Terms<'a> {
        self.member.terms(purpose)
    }

    /// An address of this machine under which others reach it, to listen at, and what they have to call it.
    pub(crate) fn local_address(&self) -> (IpAddr, Option<&str>) {
        // Over the loopback only rank 0's own host is reached: others call this one as they call that.
        let is_there = self.rank() == 0 || self.local.is_loopback();
        let name = self.host.trim_matches(['[', ']']);
        let is_name = name.parse::<IpAddr>().is_err() && name != "localhost";
        let ip = if self.local.is_loopback() && is_name { Ipv4Addr::UNSPECIFIED.into() } else { self.local };
        (ip, is_there.then_some(self.host.as_str()))
    }

    /// What this rank calls the host of rank 0.
    pub(crate) fn host_of_rank_0(&self) -> &str {
        &self.host
    }

    pub(crate) fn timeout(&self) -> Duration {
        self.member.timeout
    }

    fn ended(&self, cause: &AbortCause) -> RendezvousError {
        RendezvousError::Ended { rank: self.rank(), cause: cause.to_string() }
    }

    /// Returns whether the thread is there to hear it.
    fn command(&self, command: Command) -> bool {
        let sent = self.commands.lock().unwrap_or_else(PoisonError::into_inner).send(command).is_ok();
        sent && self.waker.wake().is_ok()
    }
}

impl Control for ControlChannel {
    /// Returns when rank 0 has said which cause was first, after a second at the latest.
    fn abort(&self, cause: AbortCause) {
        if self.aborted().is_some() {
            return;
        }
        let wire = WireCause::new(&cause, self.rank());
        if self.command(Command::Tell(Message::Abort(wire))) {
            self.shared.wait(Some(AGREE), |_| None::<()>);
        }
        self.shared.end(cause);
    }

    fn aborted(&self) -> Option<AbortCause> {
        self.shared.cause.get().cloned()
    }

    fn leave(&self) {
        self.command(Command::Tell(Message::Leave { rank: self.rank() }));
    }

    fn waiting(&self, operation: Option<Issued>) {
        self.shared.waiting(operation);
    }
}

impl Drop for ControlChannel {
    /// Waits for what has not been sent, for a second at the latest.
    fn drop(&mut self) {
        self.command(Command::Close);
        if let Some(thread) = self.thread.take() {
            // It has nothing that can panic but our own mistakes, which this one must not hide.
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for ControlChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ControlChannel").field("member", &self.member).finish_non_exhaustive()
    }
}

impl Member {
    fn terms<'a>(&'a self, purpose: &'a str) -> Terms<'a> {
        Terms { secret: &self.secret, purpose, world_size: self.world_size }
    }
}

/// Reads no further than the message, since what follows is the thread's.
fn wait_for_start(stream: &mut TcpStream, rank: usize, limit: Duration) -> Result<(), RendezvousError> {
    let ended = |cause: String| RendezvousError::Ended { rank, cause };
    let failed = |source| RendezvousError::Io { rank, what: "cannot hear rank 0", source };
    stream.set_read_timeout(Some(limit.max(Duration::from_millis(1)))).map_err(failed)?;
    let start = Message::Start.frame();
    let mut received = vec![0; start.len()];
    stream.read_exact(&mut received).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => {
            ended("rank 0 has given up before all ranks had joined; its message says why".to_owned())
        }
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            ended(format!("rank 0 did not say within {limit:?} that all ranks have joined"))
        }
        _ => failed(error),
    })?;
    let mut inbox = Inbox::default();
    inbox.push(&received);
    match inbox.pop() {
        Ok(Some(Message::Start)) => stream.set_read_timeout(None).map_err(failed),
        _ => Err(ended("rank 0 said something else than that all ranks have joined".to_owned())),
    }
}
