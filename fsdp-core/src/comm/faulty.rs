//! A wrapper that makes one rank slow or lets it fail, to see what the others do and what waiting costs.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::{AbortCause, CommError, Communicator, GatherPart, OpTag, PlacedPart, Reduce, ReducePart};
use crate::{Link, ShardLayout};

/// How often a rank that lost an operation looks whether the others have given up.
const POLL: Duration = Duration::from_millis(2);

/// Delays, slows down or fails the operations of one rank, as a [`FaultPlan`] says.
///
/// Channels and groups made from it follow the same plan and count into one sequence of operations.
///
/// ```
/// use std::time::Duration;
/// use fsdp_core::{CommError, Communicator, Fault, FaultPlan, Faulty, LocalWorld, OpTag, Phase};
///
/// let comm = LocalWorld::connect(1, Duration::from_secs(10)).remove(0);
/// let comm = Faulty::new(comm, FaultPlan { fault: Some((1, Fault::Error)), ..FaultPlan::default() });
/// let tag = OpTag::new(0, Phase::Control, "start");
/// assert!(comm.barrier(&tag).is_ok());
/// assert!(matches!(comm.barrier(&tag), Err(CommError::Engine { rank: 0, .. })));
/// ```
#[derive(Debug)]
pub struct Faulty {
    inner: Arc<dyn Communicator>,
    shared: Arc<Shared>,
}

/// What a [`Faulty`] rank does wrong. The default does nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct FaultPlan {
    /// Sleep before each operation.
    pub delay: Duration,
    /// A network to imitate: an operation takes at least `α + β·S`, time that it took anyway counted in. `S` is what the
    /// rank sends or receives, whichever is more; an all-reduce counts as a reduce-scatter and a gather.
    pub link: Option<Link>,
    /// What fails, and at which operation of this rank, counted from 0 over all channels and groups.
    pub fault: Option<(u64, Fault)>,
}

/// How an operation fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The rank panics.
    Panic,
    /// The operation returns [`CommError::Engine`] and never reaches the other ranks.
    Error,
    /// The operation never reaches the other ranks, and hangs until the world is aborted.
    Hang,
}

#[derive(Debug)]
struct Shared {
    plan: FaultPlan,
    /// The rank's number in the communicator that was wrapped first.
    rank: usize,
    num_ops: AtomicU64,
}

impl Faulty {
    /// Wraps `inner`, usually the whole world, as one rank sees it.
    pub fn new(inner: Arc<dyn Communicator>, plan: FaultPlan) -> Self {
        let shared = Shared { plan, rank: inner.rank(), num_ops: AtomicU64::new(0) };
        Self { inner, shared: Arc::new(shared) }
    }

    fn wrap(&self, inner: Arc<dyn Communicator>) -> Arc<dyn Communicator> {
        Arc::new(Self { inner, shared: self.shared.clone() })
    }

    /// Runs `op` as the plan allows. `moved_bytes` tells what it moved, from its result.
    fn run<T>(
        &self,
        tag: &OpTag,
        moved_bytes: impl FnOnce(&T) -> usize,
        op: impl FnOnce() -> Result<T, CommError>,
    ) -> Result<T, CommError> {
        let Shared { plan, rank, num_ops } = &*self.shared;
        let (rank, number) = (*rank, num_ops.fetch_add(1, Ordering::Relaxed));
        match plan.fault.filter(|(at, _)| *at == number) {
            Some((_, Fault::Panic)) => panic!("injected panic at operation {number} ({tag})"),
            Some((_, Fault::Error)) => {
                let message = format!("injected error at operation {number}");
                return Err(CommError::Engine { rank, tag: tag.clone(), message });
            }
            Some((_, Fault::Hang)) => loop {
                if let Some(cause) = self.inner.aborted() {
                    return Err(CommError::Aborted { rank, cause });
                }
                thread::sleep(POLL);
            },
            None => {}
        }
        thread::sleep(plan.delay);
        let start = Instant::now();
        let result = op()?;
        if let Some(link) = plan.link {
            let least = Duration::from_secs_f64(link.message_s(moved_bytes(&result) as u64));
            thread::sleep(least.saturating_sub(start.elapsed()));
        }
        Ok(result)
    }

    fn others_bytes(&self, layout: &ShardLayout, elem_bytes: usize) -> usize {
        layout.others_len(self.rank()) * elem_bytes
    }

    fn own_bytes(&self, layout: &ShardLayout, elem_bytes: usize) -> usize {
        layout.shard_len(self.rank()) * elem_bytes
    }

    /// Bytes that each direction of a gather or a reduce-scatter moves: all other blocks one way, and this rank's
    /// block once per other rank the other way.
    fn one_way_bytes(&self, layout: &ShardLayout, elem_bytes: usize) -> usize {
        let repeated = self.own_bytes(layout, elem_bytes) * (self.world_size() - 1);
        self.others_bytes(layout, elem_bytes).max(repeated)
    }

    fn reduce_bytes(&self, parts: &[ReducePart]) -> usize {
        parts.iter().map(|part| self.one_way_bytes(&part.layout, part.dtype.size_bytes())).sum()
    }
}

impl Communicator for Faulty {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    fn num_sharing(&self) -> usize {
        self.inner.num_sharing()
    }

    fn all_gather(&self, tag: &OpTag, parts: &[GatherPart]) -> Result<Vec<Bytes>, CommError> {
        let moved = |_: &_| parts.iter().map(|part| self.one_way_bytes(&part.layout, part.elem_bytes)).sum();
        self.run(tag, moved, || self.inner.all_gather(tag, parts))
    }

    /// Over the link that it imitates, ranks share no memory.
    fn place(&self, tag: &OpTag, parts: &[GatherPart]) -> Result<Option<Vec<PlacedPart>>, CommError> {
        match self.shared.plan.link {
            Some(_) => Ok(None),
            None => self.run(tag, |_| 0, || self.inner.place(tag, parts)),
        }
    }

    fn gather_placed(&self, tag: &OpTag, parts: &[PlacedPart]) -> Result<Vec<Bytes>, CommError> {
        self.run(tag, |_| 0, || self.inner.gather_placed(tag, parts))
    }

    fn reduce_scatter(&self, tag: &OpTag, parts: &[ReducePart], reduce: Reduce) -> Result<Vec<Bytes>, CommError> {
        self.reduce_scatter_and_see(tag, parts, reduce, &mut |_, _| ())
    }

    fn reduce_scatter_and_see(
        &self,
        tag: &OpTag,
        parts: &[ReducePart],
        reduce: Reduce,
        see: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<Vec<Bytes>, CommError> {
        let op = || self.inner.reduce_scatter_and_see(tag, parts, reduce, see);
        self.run(tag, |_| self.reduce_bytes(parts), op)
    }

    fn all_reduce(&self, tag: &OpTag, parts: &[ReducePart], reduce: Reduce) -> Result<Vec<Bytes>, CommError> {
        self.run(tag, |_| 2 * self.reduce_bytes(parts), || self.inner.all_reduce(tag, parts, reduce))
    }

    fn broadcast(&self, tag: &OpTag, root: usize, data: Option<Bytes>) -> Result<Bytes, CommError> {
        let moved = |data: &Bytes| if self.world_size() > 1 { data.len() } else { 0 };
        self.run(tag, moved, || self.inner.broadcast(tag, root, data))
    }

    fn scatter(
        &self,
        tag: &OpTag,
        root: usize,
        full: Option<Bytes>,
        layout: &ShardLayout,
        elem_bytes: usize,
    ) -> Result<Bytes, CommError> {
        let is_root = full.is_some();
        let moved = |_: &_| {
            if is_root { self.others_bytes(layout, elem_bytes) } else { self.own_bytes(layout, elem_bytes) }
        };
        self.run(tag, moved, || self.inner.scatter(tag, root, full, layout, elem_bytes))
    }

    fn barrier(&self, tag: &OpTag) -> Result<(), CommError> {
        self.run(tag, |_| 0, || self.inner.barrier(tag))
    }

    fn channel(&self, name: &str) -> Result<Arc<dyn Communicator>, CommError> {
        Ok(self.wrap(self.inner.channel(name)?))
    }

    fn subgroup(&self, ranks: &[usize]) -> Result<Arc<dyn Communicator>, CommError> {
        Ok(self.wrap(self.inner.subgroup(ranks)?))
    }

    fn leave(&self) {
        self.inner.leave();
    }

    fn abort(&self, cause: AbortCause) {
        self.inner.abort(cause);
    }

    fn aborted(&self) -> Option<AbortCause> {
        self.inner.aborted()
    }
}
