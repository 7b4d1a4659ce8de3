//! Ranks that are processes, connected by sockets: every rank to every other.
//!
//! An operation is one exchange: each rank sends every other what that one needs of it, with a description of the operation,
//! and waits for theirs. Sums are then added in the order of ranks, so the bits are those of threads. An all-reduce is two
//! exchanges. What a rank sends is what the operation needs by its nature, each byte once to each receiver. It is the
//! communicator for hosts without MPI, and for tests; it knows nothing of shared memory. Inside: `wire`, `mailbox`, `link`, and
//! here the collectives.

mod link;
mod mailbox;
mod wire;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use xxhash_rust::xxh3::xxh3_64;

use crate::comm::call::{Call, CallPart};
use crate::comm::check::Member;
use crate::comm::shared::SharedTensors;
use crate::comm::sum::write_sum;
use crate::{
    AbortCause, CommError, Communicator, Control, ControlChannel, GatherPart, Issued, OpKind, OpTag, Reduce,
    ReducePart, RendezvousError, ShardLayout,
};
use link::Links;
use mailbox::{Letter, Place};

/// How often a rank that waits looks whether the run has ended.
const LOOK: Duration = Duration::from_millis(10);

/// A world of processes, connected by sockets.
#[derive(Debug)]
pub struct SocketWorld {
    control: Arc<ControlChannel>,
    timeout: Duration,
    links: Links,
}

impl SocketWorld {
    /// Connects this rank to every other one of `control`. All ranks make the call. `timeout` bounds every single wait.
    ///
    /// # Errors
    /// If a rank does not come in time, or cannot be reached.
    ///
    /// ```
    /// use std::thread;
    /// use std::time::Duration;
    /// use fsdp_core::{ControlChannel, Entrance, Member, OpTag, Phase, RendezvousError, Secret, SocketWorld};
    ///
    /// let timeout = Duration::from_secs(30);
    /// let secret = Secret::random()?;
    /// let member = |rank| Member { rank, world_size: 2, secret: secret.clone(), timeout, start_limit: timeout };
    /// let entrance = Entrance::open("127.0.0.1", 0)?;
    /// let (address, other) = (entrance.address().to_string(), member(1)); // of another process, usually
    /// let other = thread::spawn(move || {
    ///     let comm = SocketWorld::connect(ControlChannel::join(&address, &other)?, timeout)?;
    ///     Ok::<_, RendezvousError>(comm.broadcast(&OpTag::new(0, Phase::Init, "seed"), 0, None).unwrap())
    /// });
    /// let comm = SocketWorld::connect(ControlChannel::host(entrance, &member(0))?, timeout)?;
    /// comm.broadcast(&OpTag::new(0, Phase::Init, "seed"), 0, Some(vec![42].into())).unwrap();
    /// assert_eq!(other.join().unwrap()?[..], [42]);
    /// # Ok::<(), RendezvousError>(())
    /// ```
    pub fn connect(control: Arc<ControlChannel>, timeout: Duration) -> Result<Arc<dyn Communicator>, RendezvousError> {
        let links = Links::connect(&control)?;
        let (rank, ranks) = (control.rank(), (0..control.world_size()).collect());
        let world = Arc::new(Self { control, timeout, links });
        Ok(SocketRank::create(&world, 0, ranks, rank))
    }

    fn check_alive(&self) -> Result<(), CommError> {
        self.control.aborted().map_or(Ok(()), |cause| {
            // Nobody reads any more what has not been sent.
            self.links.close();
            Err(CommError::ended(self.control.rank(), &cause))
        })
    }

    /// Ends the run with an error of this rank, and returns what the ranks are told: it, or what had come first.
    fn fail(&self, error: CommError) -> CommError {
        let ours = AbortCause::Collective(Box::new(error.clone()));
        self.control.abort(ours.clone());
        self.links.close();
        match self.control.aborted() {
            Some(cause) if cause != ours => CommError::ended(self.control.rank(), &cause),
            _ => error,
        }
    }
}

/// One rank's end of a world, a channel or a group.
#[derive(Debug)]
struct SocketRank {
    world: Arc<SocketWorld>,
    /// The same on every member, and different for every order of operations.
    domain: u64,
    /// Members by their number in the world.
    ranks: Vec<usize>,
    /// Number among the members.
    rank: usize,
    /// Number of the next operation.
    next: AtomicU64,
    /// How many channels and groups of each name this rank has asked for.
    num_made: Mutex<HashMap<String, u64>>,
}

impl SocketRank {
    fn create(world: &Arc<SocketWorld>, domain: u64, ranks: Vec<usize>, rank: usize) -> Arc<dyn Communicator> {
        let (next, num_made) = (AtomicU64::new(0), Mutex::default());
        Arc::new(Self { world: world.clone(), domain, ranks, rank, next, num_made })
    }

    fn member(&self) -> Member {
        Member { rank: self.rank, world_size: self.ranks.len(), world_rank: self.ranks[self.rank] }
    }

    /// Begins an operation.
    fn begin(&self, call: Call) -> Result<Operation<'_>, CommError> {
        self.world.check_alive()?;
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        Ok(Operation { rank: self, number, call })
    }

    /// A channel or a group: what it is called, who is in it, and which of them this rank is.
    fn child(&self, name: String, ranks: Vec<usize>, rank: usize) -> Result<Arc<dyn Communicator>, CommError> {
        self.world.check_alive()?;
        let mut num_made = self.num_made.lock().unwrap_or_else(PoisonError::into_inner);
        let made = num_made.entry(name.clone()).or_insert(0);
        let domain = xxh3_64(format!("{:x}/{name}/{made}", self.domain).as_bytes());
        *made += 1;
        Ok(Self::create(&self.world, domain, ranks, rank))
    }

    /// This rank's block of each sum.
    fn reduce_blocks(
        &self,
        operation: &Operation,
        parts: &[ReducePart],
        reduce: Reduce,
    ) -> Result<Arc<SharedTensors>, CommError> {
        let block_for =
            |rank| parts.iter().map(move |part| packed(&part.full, &part.layout, part.dtype.size_bytes(), rank));
        let letters = operation.exchange(0, |rank| block_for(rank).collect())?;
        let sources: Vec<Vec<Bytes>> = (0..self.ranks.len())
            .map(|rank| match &letters[rank] {
                Some(letter) => operation.split(letter, |part| part.layout.shard_len(self.rank)),
                None => Ok(block_for(self.rank).collect()),
            })
            .collect::<Result<_, _>>()?;
        let block = SharedTensors::block(self.rank, operation.call.tensors());
        let mut added = (0, 0);
        block.fill(self.rank, |part, _, target| {
            let start = if added.0 == part { added.1 } else { 0 };
            added = (part, start + target.len());
            let range = start..added.1;
            write_sum(parts[part].dtype, sources.iter().map(|blocks| &blocks[part][range.clone()]), reduce, target)
        });
        Ok(Arc::new(block))
    }

    /// Whole tensors of the blocks of all ranks: this one's, and those in the letters.
    fn assemble(
        &self,
        operation: &Operation,
        own: &[Bytes],
        letters: &[Option<Letter>],
    ) -> Result<Vec<Bytes>, CommError> {
        let whole = Arc::new(SharedTensors::whole(None, self.ranks.len(), operation.call.tensors()));
        for (rank, letter) in letters.iter().enumerate() {
            let blocks = match letter {
                Some(letter) => operation.split(letter, |part| part.layout.shard_len(rank))?,
                None => own.to_vec(),
            };
            whole.copy(rank, blocks.iter().map(|block| &block[..]));
        }
        Ok(whole.views())
    }
}

impl Communicator for SocketRank {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.ranks.len()
    }

    fn num_sharing(&self) -> usize {
        1
    }

    fn all_gather(&self, tag: &OpTag, parts: &[GatherPart]) -> Result<Vec<Bytes>, CommError> {
        self.member().check_gather(tag, parts)?;
        let operation = self.begin(Call::new(OpKind::AllGather, tag).gather(parts))?;
        let own: Vec<Bytes> = parts.iter().map(|part| part.shard.clone()).collect();
        let letters = operation.exchange(0, |_| own.clone())?;
        self.assemble(&operation, &own, &letters)
    }

    fn reduce_scatter(&self, tag: &OpTag, parts: &[ReducePart], reduce: Reduce) -> Result<Vec<Bytes>, CommError> {
        self.member().check_reduce(tag, parts)?;
        let operation = self.begin(Call::new(OpKind::ReduceScatter, tag).reduce(parts, reduce))?;
        Ok(self.reduce_blocks(&operation, parts, reduce)?.views())
    }

    fn all_reduce(&self, tag: &OpTag, parts: &[ReducePart], reduce: Reduce) -> Result<Vec<Bytes>, CommError> {
        self.member().check_reduce(tag, parts)?;
        let operation = self.begin(Call::new(OpKind::AllReduce, tag).reduce(parts, reduce))?;
        let own = self.reduce_blocks(&operation, parts, reduce)?.views();
        let letters = operation.exchange(1, |_| own.clone())?;
        self.assemble(&operation, &own, &letters)
    }

    fn broadcast(&self, tag: &OpTag, root: usize, data: Option<Bytes>) -> Result<Bytes, CommError> {
        self.member().check_root(tag, root, data.is_some())?;
        let call = Call { root: Some(self.ranks[root]), ..Call::new(OpKind::Broadcast, tag) };
        let letters = self.begin(call)?.exchange(0, |_| data.iter().cloned().collect())?;
        Ok(letters.into_iter().nth(root).flatten().map(|letter| letter.payload).or(data).unwrap_or_default())
    }

    fn scatter(
        &self,
        tag: &OpTag,
        root: usize,
        full: Option<Bytes>,
        layout: &ShardLayout,
        elem_bytes: usize,
    ) -> Result<Bytes, CommError> {
        self.member().check_scatter(tag, root, full.as_ref().map(Bytes::len), layout, elem_bytes)?;
        let parts = vec![CallPart { layout: layout.clone(), elem_bytes, dtype: None }];
        let call = Call { root: Some(self.ranks[root]), parts, ..Call::new(OpKind::Scatter, tag) };
        let operation = self.begin(call)?;
        let block_for = |rank| full.iter().map(|full| packed(full, layout, elem_bytes, rank)).collect::<Vec<_>>();
        let letters = operation.exchange(0, block_for)?;
        let block = match &letters[root] {
            Some(letter) => operation.split(letter, |part| part.layout.shard_len(self.rank))?,
            None => block_for(self.rank),
        };
        // In a buffer of its own, so that the whole may be dropped.
        Ok(block.first().map(|block| Bytes::copy_from_slice(block)).unwrap_or_default())
    }

    fn barrier(&self, tag: &OpTag) -> Result<(), CommError> {
        self.begin(Call::new(OpKind::Barrier, tag))?.exchange(0, |_| Vec::new()).map(drop)
    }

    fn channel(&self, name: &str) -> Result<Arc<dyn Communicator>, CommError> {
        self.child(format!("channel {name}"), self.ranks.clone(), self.rank)
    }

    fn subgroup(&self, ranks: &[usize]) -> Result<Arc<dyn Communicator>, CommError> {
        let rank = self.member().check_group(ranks)?;
        let world_ranks = ranks.iter().map(|&rank| self.ranks[rank]).collect();
        self.child(format!("group {ranks:?}"), world_ranks, rank)
    }

    fn abort(&self, cause: AbortCause) {
        self.world.control.abort(cause);
        self.world.links.close();
    }

    fn aborted(&self) -> Option<AbortCause> {
        self.world.control.aborted()
    }

    fn leave(&self) {
        self.world.links.leave();
        self.world.control.leave();
    }
}

/// One operation of one rank.
struct Operation<'a> {
    rank: &'a SocketRank,
    number: u64,
    call: Call,
}

impl Operation<'_> {
    /// Sends each other member the bytes for it, and returns what each has sent, in the order of members; `None` for this one.
    fn exchange(&self, round: u8, bytes_for: impl Fn(usize) -> Vec<Bytes>) -> Result<Vec<Option<Letter>>, CommError> {
        let SocketRank { world, domain, ranks, rank, .. } = self.rank;
        let place = Place { domain: *domain, number: self.number, round };
        for (member, &world_rank) in ranks.iter().enumerate().filter(|(member, _)| member != rank) {
            world.links.send(world_rank, place, &self.call, bytes_for(member));
        }
        let Call { kind, tag, .. } = &self.call;
        let issued = Issued { rank: ranks[*rank], kind: *kind, tag: tag.clone(), detail: String::new() };
        world.control.waiting(Some(issued));
        let letters = self.wait(place);
        world.control.waiting(None);
        let letters = letters?;
        for (letter, &world_rank) in letters.iter().zip(ranks) {
            let Some(letter) = letter else { continue };
            if let Some(error) = self.call.mismatch(ranks[*rank], &letter.call, world_rank) {
                return Err(world.fail(error));
            }
        }
        Ok(letters)
    }

    /// Sleeps until there is a letter of every other member, or the run has ended, or the time is up.
    fn wait(&self, place: Place) -> Result<Vec<Option<Letter>>, CommError> {
        let SocketRank { world, ranks, rank, .. } = self.rank;
        let mailbox = world.links.mailbox();
        let others: Vec<usize> = ranks.iter().copied().filter(|&other| other != ranks[*rank]).collect();
        let started = Instant::now();
        loop {
            let Some(left) = world.timeout.checked_sub(started.elapsed()) else {
                let missing = mailbox.missing(place, &others);
                return Err(world.fail(CommError::Timeout {
                    rank: ranks[*rank],
                    kind: self.call.kind,
                    tag: self.call.tag.clone(),
                    waited: world.timeout,
                    missing,
                }));
            };
            if let Some(mut letters) = mailbox.take(place, &others, left.min(LOOK)) {
                return Ok(ranks.iter().map(|rank| letters.remove(rank)).collect());
            }
            world.check_alive()?;
            let left = mailbox.left(place, &others);
            if !left.is_empty() {
                let (kind, tag) = (self.call.kind, self.call.tag.clone());
                return Err(world.fail(CommError::Left { rank: ranks[*rank], kind, tag, left }));
            }
        }
    }

    /// The parts of a letter, each of as many elements as `len_of` says.
    fn split(&self, letter: &Letter, len_of: impl Fn(&CallPart) -> usize) -> Result<Vec<Bytes>, CommError> {
        let lens: Vec<usize> = self.call.parts.iter().map(|part| len_of(part) * part.elem_bytes).collect();
        if lens.iter().sum::<usize>() != letter.payload.len() {
            let message =
                format!("a message of {} bytes in place of {}", letter.payload.len(), lens.iter().sum::<usize>());
            let (rank, tag) = (self.rank.member().world_rank, self.call.tag.clone());
            return Err(self.rank.world.fail(CommError::Engine { rank, tag, message }));
        }
        let mut rest = letter.payload.clone();
        Ok(lens.into_iter().map(|len| rest.split_to(len)).collect())
    }
}

/// The block of `rank`, element after element. A block of whole rows is not copied.
fn packed(full: &Bytes, layout: &ShardLayout, elem_bytes: usize, rank: usize) -> Bytes {
    let mut runs = layout.runs(rank).map(|run| run.start * elem_bytes..run.end * elem_bytes);
    match (runs.next(), runs.next()) {
        (None, _) => Bytes::new(),
        (Some(run), None) => full.slice(run),
        (Some(first), Some(second)) => {
            let mut block = Vec::with_capacity(layout.shard_len(rank) * elem_bytes);
            [first, second].into_iter().chain(runs).for_each(|run| block.extend_from_slice(&full[run]));
            block.into()
        }
    }
}
