//! One order of operations over some ranks, as one of them sees it: who its members are, and how it waits for them.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use xxhash_rust::xxh3::xxh3_64;

use super::super::check::Member;
use super::super::wire;
use super::super::{CommError, Issued, OpKind, OpTag, Phase};
use super::arena::Arena;
use super::heap::Held;
use super::network::{Frame, Key, Payload, Receipt};
use super::table::{Cell, Seat};
use super::world::World;

/// How often a rank that waits looks whether the run has been aborted.
const LOOK: Duration = Duration::from_millis(5);

/// A channel or a group, at one rank.
#[derive(Debug)]
pub(super) struct Domain {
    pub(super) world: Arc<World>,
    /// By which the ranks find it: the names that led to it.
    pub(super) path: String,
    key: u64,
    /// Members by their number in the world.
    pub(super) ranks: Vec<usize>,
    /// This rank's number in the domain.
    pub(super) rank: usize,
    /// Members on this host, by their number in the domain. The first one leads.
    pub(super) locals: Vec<usize>,
    /// This rank's number among them.
    pub(super) local: usize,
    /// Members on each other host, likewise.
    pub(super) others: Vec<Vec<usize>>,
    pub(super) seat: Seat,
}

/// An operation under way.
#[derive(Debug)]
pub(super) struct Op {
    pub(super) kind: OpKind,
    pub(super) tag: OpTag,
    pub(super) number: u64,
    /// The call, as other ranks see it.
    pub(super) call: Vec<u8>,
}

/// Messages of an operation between ranks of different hosts.
#[derive(Clone, Copy, Debug)]
pub(super) enum Stage {
    /// What the leaders of hosts agree about.
    Call,
    /// Blocks of a whole host, between leaders; or of one rank for another.
    Data,
}

impl Domain {
    pub(super) fn create(world: Arc<World>, path: String, ranks: Vec<usize>) -> Result<Arc<Self>, CommError> {
        let key = xxh3_64(path.as_bytes()).max(1);
        let host_of = |rank: usize| world.hosts[ranks[rank]];
        let here = world.hosts[world.rank];
        let members: Vec<usize> = (0..ranks.len()).collect();
        let (locals, elsewhere): (Vec<usize>, Vec<usize>) =
            members.into_iter().partition(|&rank| host_of(rank) == here);
        let mut others: Vec<Vec<usize>> = Vec::new();
        for rank in elsewhere {
            match others.iter_mut().find(|host| host_of(host[0]) == host_of(rank)) {
                Some(host) => host.push(rank),
                None => others.push(vec![rank]),
            }
        }
        let local = locals.iter().position(|&rank| ranks[rank] == world.rank);
        let local = local.expect("a domain is made by its members");
        let Some(seat) = world.table.sit(key, locals.len(), world.timeout) else {
            let tag = OpTag::new(0, Phase::Init, path.as_str());
            let message = "too many channels and groups exist at once on this host".to_owned();
            return Err(CommError::Engine { rank: world.rank, tag, message });
        };
        let rank = locals[local];
        Ok(Arc::new(Self { world, path, key, ranks, rank, locals, local, others, seat }))
    }

    pub(super) fn member(&self) -> Member {
        Member { rank: self.rank, world_size: self.ranks.len(), world_rank: self.world.rank }
    }

    pub(super) fn leads(&self) -> bool {
        self.local == 0
    }

    pub(super) fn my_cell(&self) -> &Cell {
        self.seat.cell(self.local)
    }

    /// The arena of a member of this host.
    pub(super) fn arena(&self, local: usize) -> &Arc<Arena> {
        let world_rank = self.ranks[self.locals[local]];
        let place = self.world.local.iter().position(|&rank| rank == world_rank);
        &self.world.arenas[place.expect("members of this host are ranks of this host")]
    }

    /// Waits until `ready` holds for the cells of all members of this host.
    pub(super) fn wait_for_cells(&self, op: &Op, ready: impl Fn(&Cell) -> bool) -> Result<(), CommError> {
        let missing =
            || (0..self.locals.len()).filter(|&local| !ready(self.seat.cell(local))).map(|local| self.locals[local]);
        self.wait(op, Duration::ZERO, || missing().next().is_none(), || missing().collect())
    }

    /// Waits until the leader has begun the operation.
    pub(super) fn wait_for_leaders_note(&self, op: &Op) -> Result<(), CommError> {
        let ready = || self.seat.cell(0).arrived.load(Ordering::Acquire) > op.number;
        self.wait(op, Duration::ZERO, ready, || vec![self.locals[0]])
    }

    /// Waits until the leader has stored at least `2·op + stage`.
    pub(super) fn wait_for_leader(&self, op: &Op, stage: u64) -> Result<(), CommError> {
        let ready = || self.seat.entry().led.load(Ordering::Acquire) >= 2 * op.number + stage;
        // Whoever waits for another host knows better who is missing, and speaks first.
        self.wait(op, 2 * self.grace(), ready, || vec![self.locals[0]])
    }

    /// As the leader: tells the ranks of this host how far the operation is.
    pub(super) fn lead(&self, op: &Op, stage: u64) {
        self.seat.entry().led.store(2 * op.number + stage, Ordering::Release);
        self.seat.entry().bell.ring();
    }

    /// Waits for a frame of another host. `host` are the ranks that it may wait for in turn.
    pub(super) fn wait_for_frame(
        &self,
        op: &Op,
        from: usize,
        stage: Stage,
        host: &[usize],
    ) -> Result<Frame, CommError> {
        let key = self.key(op, stage);
        let inbox = self.world.network.inbox();
        self.wait_for_network(op, host, || false, || inbox.take(self.ranks[from], key))
    }

    /// Memory for the payload of a frame from another host, which is written there as soon as it comes.
    pub(super) fn expect(&self, op: &Op, from: usize, stage: Stage, payload: Payload) -> Receipt {
        self.world.network.expect(self.ranks[from], self.key(op, stage), payload)
    }

    /// Receives what a frame of another host has announced into memory of that size.
    pub(super) fn receive(&self, from: usize, frame: Frame, payload: Payload) -> Receipt {
        let receipt = Receipt::default();
        let landing = receipt.announce(frame, payload);
        landing.into_iter().for_each(|landing| self.world.network.receive(self.ranks[from], landing));
        receipt
    }

    /// Waits until a payload is there. `host` are the ranks that its sender may wait for in turn; it is the first of them.
    pub(super) fn wait_for_receipt(&self, op: &Op, host: &[usize], receipt: &Receipt) -> Result<(), CommError> {
        let is_decided = || (receipt.is_complete() || receipt.refused().is_some()).then_some(());
        self.wait_for_network(op, host, || receipt.is_announced(), is_decided)?;
        let Some([got, expected]) = receipt.refused() else { return Ok(()) };
        let message = format!("rank {} sent {got} bytes where {expected} were due", self.ranks[host[0]]);
        Err(self.world.fail(self.engine_error(op, message)))
    }

    /// Waits until `get` finds something in what has arrived from other hosts.
    fn wait_for_network<T>(
        &self,
        op: &Op,
        host: &[usize],
        is_on_its_way: impl Fn() -> bool,
        mut get: impl FnMut() -> Option<T>,
    ) -> Result<T, CommError> {
        let inbox = self.world.network.inbox();
        let mut wait = Wait::begin(self, op, self.grace());
        loop {
            if let Some(found) = inbox.wait(LOOK, &mut get) {
                return Ok(found);
            }
            wait.is_on_its_way = is_on_its_way();
            wait.look(|| host.to_vec())?;
        }
    }

    /// Sends to a member on another host.
    pub(super) fn send(&self, op: &Op, to: usize, stage: Stage, head: Vec<u8>, payload: Option<Payload>) {
        self.world.network.send(self.ranks[to], self.key(op, stage), head, payload);
    }

    /// How much longer a rank waits that is not the first to know who is missing.
    fn grace(&self) -> Duration {
        (self.world.timeout / 4).min(Duration::from_millis(500))
    }

    fn key(&self, op: &Op, stage: Stage) -> Key {
        Key { world: self.world.number, domain: self.key, op: op.number, stage: stage as u64 }
    }

    /// Waits until `ready`, which ranks of this host make true. `missing` are those that have not.
    fn wait(
        &self,
        op: &Op,
        grace: Duration,
        ready: impl Fn() -> bool,
        missing: impl Fn() -> Vec<usize>,
    ) -> Result<(), CommError> {
        let start = Instant::now();
        while start.elapsed() < self.world.awake {
            if ready() {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        let bell = &self.seat.entry().bell;
        let mut wait = Wait::begin(self, op, grace);
        loop {
            let heard = bell.heard();
            if ready() {
                return Ok(());
            }
            wait.look(&missing)?;
            bell.wait(heard, LOOK);
        }
    }

    /// The error of two ranks that issued different calls, if these are.
    pub(super) fn compare(&self, op: &Op, other: usize, call: &[u8]) -> Result<(), CommError> {
        if call == op.call {
            return Ok(());
        }
        let numbers = (self.world.rank, self.ranks[other]);
        let mismatch = wire::decode(&op.call).zip(wire::decode(call));
        let mismatch = mismatch.and_then(|(ours, theirs)| ours.mismatch(numbers.0, &theirs, numbers.1));
        let error =
            mismatch.unwrap_or_else(|| self.engine_error(op, format!("rank {} sent what is no call", numbers.1)));
        Err(self.world.fail(error))
    }

    /// Whether a rank of the world has told that it makes no further call.
    fn has_left(&self, world_rank: usize) -> bool {
        let world = &self.world;
        match world.local.iter().position(|&rank| rank == world_rank) {
            Some(local) => world.table.left(local).load(Ordering::Acquire) != 0,
            None => world.network.inbox().has_left(world.number, world_rank),
        }
    }

    pub(super) fn engine_error(&self, op: &Op, message: String) -> CommError {
        CommError::Engine { rank: self.world.rank, tag: op.tag.clone(), message }
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // Notes and windows of all members are held by each of them, since another may read them after their owner is done.
        for local in 0..self.locals.len() {
            let cell = self.seat.cell(local);
            let blocks = cell.notes.iter().map(|[offset, _]| offset).chain([&cell.windows]);
            for offset in blocks.map(|offset| offset.load(Ordering::Acquire)).filter(|&offset| offset != 0) {
                drop(Held::new(self.arena(local).clone(), offset as usize, 0));
            }
        }
    }
}

/// A wait that lasts: it is told to the control channel, and ends by an abort, by a rank that has left, or in time.
struct Wait<'a> {
    domain: &'a Domain,
    op: &'a Op,
    start: Instant,
    limit: Duration,
    is_told: bool,
    /// Who had left at the last look.
    left: Vec<usize>,
    /// What is missing is on its way: whoever sends it may leave meanwhile.
    is_on_its_way: bool,
}

impl<'a> Wait<'a> {
    fn begin(domain: &'a Domain, op: &'a Op, grace: Duration) -> Self {
        let limit = domain.world.timeout + grace;
        Self { domain, op, start: Instant::now(), limit, is_told: false, left: Vec::new(), is_on_its_way: false }
    }

    /// An error if the wait must end.
    fn look(&mut self, missing: impl Fn() -> Vec<usize>) -> Result<(), CommError> {
        let (domain, op) = (self.domain, self.op);
        let world = &domain.world;
        world.check_alive()?;
        let (rank, kind, tag) = (world.rank, op.kind, op.tag.clone());
        let waited = self.start.elapsed();
        // Before it sleeps, so that the others can name the operation when they lose this rank, or this one loses them.
        if !self.is_told {
            self.is_told = true;
            world.control.waiting(Some(Issued { rank, kind, tag: tag.clone(), detail: String::new() }));
        }
        if let Some(message) = world.network.inbox().failure() {
            return Err(world.fail(domain.engine_error(op, message)));
        }
        let missing: Vec<usize> = missing().into_iter().map(|rank| domain.ranks[rank]).collect();
        let left: Vec<usize> = missing.iter().copied().filter(|&rank| domain.has_left(rank)).collect();
        // What a rank did before it left has been looked at since the last look.
        let before = std::mem::replace(&mut self.left, left);
        let left: Vec<usize> = self.left.iter().copied().filter(|rank| before.contains(rank)).collect();
        if !left.is_empty() && !self.is_on_its_way {
            return Err(world.fail(CommError::Left { rank, kind, tag, left }));
        }
        if waited >= self.limit && !missing.is_empty() {
            return Err(world.fail(CommError::Timeout { rank, kind, tag, waited: world.timeout, missing }));
        }
        Ok(())
    }
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        if self.is_told {
            self.domain.world.control.waiting(None);
        }
    }
}
