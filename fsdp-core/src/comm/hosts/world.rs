//! A world of processes: which ranks share a host, their memory, and what all channels and groups share.

use std::sync::Arc;
use std::time::Duration;

use super::super::awake::stay_awake;
use super::super::control::Control;
use super::super::{AbortCause, CommError, Communicator, OpKind, OpTag, Phase};
use super::arena::Arena;
use super::domain::Domain;
use super::heap::Heap;
use super::network::{Key, Network};
use super::rank::HostRank;
use super::table::Table;
use crate::ProcessPlace;

/// The first channel's place in a [`Key`] is a hash; this one is for what is sent before there are channels.
const BEFORE_CHANNELS: u64 = 0;

/// What the channels and groups of one rank share.
#[derive(Debug)]
pub(super) struct World {
    /// Counted in the process, equal on all ranks.
    pub(super) number: u64,
    /// This rank's number in the world.
    pub(super) rank: usize,
    pub(super) timeout: Duration,
    /// How long a rank waits for others of its host before it sleeps.
    pub(super) awake: Duration,
    pub(super) control: Arc<dyn Control>,
    pub(super) network: Arc<dyn Network>,
    /// The host of each rank, as the number of its first rank.
    pub(super) hosts: Vec<usize>,
    /// Ranks of this host.
    pub(super) local: Vec<usize>,
    /// Memory of each rank of this host, in the order of `local`.
    pub(super) arenas: Vec<Arc<Arena>>,
    /// This rank's own memory.
    pub(super) heap: Heap,
    pub(super) table: Table,
}

/// Connects this process with the other ranks of `network`. Every rank makes the call.
///
/// `timeout` bounds every single wait, not a step: it must exceed the longest time by which one rank may be ahead of
/// another. Ranks whose network names the same host share memory.
///
/// # Errors
/// [`CommError::Timeout`] if a rank does not come, [`CommError::Engine`] if the network fails, or memory of a rank of this
/// host cannot be mapped.
pub fn connect(
    network: Arc<dyn Network>,
    control: Arc<dyn Control>,
    timeout: Duration,
) -> Result<Arc<dyn Communicator>, CommError> {
    let number = network.inbox().next_world();
    let rank = network.rank();
    let ask = |stage, mine: &str| exchange(&*network, number, stage, mine, timeout);
    let names = ask(0, &network.host())?;
    let hosts: Vec<usize> =
        names.iter().map(|name| names.iter().position(|other| other == name).unwrap_or(rank)).collect();
    let local: Vec<usize> = (0..hosts.len()).filter(|&other| hosts[other] == hosts[rank]).collect();

    let own =
        Arena::create(arena_bytes(local.len())).map_err(|error| failed(rank, format!("no shared memory: {error}")));
    // Process, file, length, and where it runs.
    let place = own.as_ref().map_or_else(
        |_| String::new(),
        |arena| format!("{} {} {} {}", std::process::id(), arena.fd(), arena.len(), ProcessPlace::own()),
    );
    let places = ask(1, &place)?;
    let own = Arc::new(own?);
    if let Some(other) = places.iter().position(String::is_empty) {
        return Err(failed(rank, format!("rank {other} has no shared memory; its own error tells why")));
    }
    let open = |other: usize| if other == rank { Ok(own.clone()) } else { open(rank, other, &places[other]) };
    let arenas = local.iter().map(|&other| open(other)).collect::<Result<Vec<_>, _>>();
    // Nobody goes on, and possibly ends, before all have mapped its memory.
    ask(2, "")?;
    let arenas = arenas?;

    // A launcher may have bound each rank to cores of its own.
    let placed = local.iter().filter_map(|&other| places[other].splitn(4, ' ').nth(3).map(ProcessPlace::read));
    let awake = stay_awake(local.len(), ProcessPlace::num_cores_of_any(&placed.collect::<Vec<_>>()));
    let table_bytes = Table::size_bytes(local.len());
    let heap = Heap::new(own, table_bytes);
    let table = Table::new(arenas[0].clone(), local.len());
    let ranks = (0..hosts.len()).collect();
    let world = World { number, rank, timeout, awake, control, network, hosts, local, arenas, heap, table };
    Ok(HostRank::create(Domain::create(Arc::new(world), String::new(), ranks)?))
}

/// Tells every rank some text, and returns what each has told, before there are channels.
///
/// `stage` numbers the exchanges of world `number`; see [`Inbox::next_world`](super::Inbox::next_world).
///
/// # Errors
/// As [`connect`].
pub fn exchange(
    network: &dyn Network,
    number: u64,
    stage: u64,
    mine: &str,
    timeout: Duration,
) -> Result<Vec<String>, CommError> {
    let (rank, inbox) = (network.rank(), network.inbox());
    let key = Key { world: number, domain: BEFORE_CHANNELS, op: 0, stage };
    let others = || (0..network.world_size()).filter(|&other| other != rank);
    others().for_each(|other| network.send(other, key, mine.as_bytes().to_vec(), None));
    let mut told: Vec<Option<String>> = vec![None; network.world_size()];
    told[rank] = Some(mine.to_owned());
    let all = inbox.wait(timeout, || {
        for other in others() {
            if let Some(frame) = inbox.take(other, key) {
                told[other] = Some(String::from_utf8_lossy(&frame.head).into_owned());
            }
        }
        (inbox.failure().is_some() || told.iter().all(Option::is_some)).then_some(())
    });
    if let Some(message) = inbox.failure() {
        return Err(failed(rank, message));
    }
    if all.is_none() {
        let missing = others().filter(|&other| told[other].is_none()).collect();
        return Err(CommError::Timeout { rank, kind: OpKind::Barrier, tag: connect_tag(), waited: timeout, missing });
    }
    Ok(told.into_iter().flatten().collect())
}

fn connect_tag() -> OpTag {
    OpTag::new(0, Phase::Init, "connect")
}

fn failed(rank: usize, message: String) -> CommError {
    CommError::Engine { rank, tag: connect_tag(), message }
}

/// More than all memory of the host, since only what is used takes memory; but all arenas fit into the addresses of a process.
fn arena_bytes(num_local: usize) -> usize {
    let memory = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = memory.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kib = total.and_then(|total| total.split_whitespace().next()).and_then(|kib| kib.parse::<usize>().ok());
    let memory = kib.unwrap_or(64 << 20).saturating_mul(1 << 10);
    memory.saturating_mul(2).min((32 << 40) / num_local).next_multiple_of(1 << 21)
}

fn open(rank: usize, other: usize, place: &str) -> Result<Arc<Arena>, CommError> {
    let numbers: Vec<usize> = place.split(' ').take(3).filter_map(|number| number.parse().ok()).collect();
    let [pid, fd, len] = numbers[..] else {
        return Err(failed(rank, format!("rank {other} says of its memory: {place}")));
    };
    let opened = Arena::open(pid as u32, fd as i32, len).map(Arc::new);
    opened.map_err(|error| {
        let remedy = "Ranks of one host run as one user, and see each other in /proc";
        failed(
            rank,
            format!("the memory of rank {other}, process {pid} of this host, cannot be mapped: {error}. {remedy}"),
        )
    })
}

impl World {
    /// An error if the run has ended.
    pub(super) fn check_alive(&self) -> Result<(), CommError> {
        self.control.aborted().map_or(Ok(()), |cause| Err(CommError::ended(self.rank, &cause)))
    }

    /// Ends the run with this error; returns what this rank is told, which is another error if there was one before.
    pub(super) fn fail(&self, error: CommError) -> CommError {
        let ours = AbortCause::Collective(Box::new(error.clone()));
        self.control.abort(ours.clone());
        match self.control.aborted() {
            Some(cause) if cause != ours => CommError::ended(self.rank, &cause),
            _ => error,
        }
    }
}
