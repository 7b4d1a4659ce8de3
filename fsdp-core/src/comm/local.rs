//! Ranks that are threads of one process: collectives over shared memory.
//!
//! The n-th operation of each rank meets in one [`Slot`]. Ranks arrive under the slot's lock, which is held for
//! bookkeeping only; data is copied and added outside any lock, each rank its own blocks, straight from the other
//! ranks' buffers. Waiting ranks stay awake for a moment, where each has a core, and then sleep.

mod slot;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;

use self::slot::{Slot, SlotState};
use super::awake::stay_awake;
use super::call::{Call, CallPart};
use super::check::Member;
use super::placed::{PlacedPart, Whole};
use super::pool::Pool;
use super::shared::SharedTensors;
use super::sum::write_sum;
use super::{AbortCause, CommError, Communicator, GatherPart, OpKind, OpTag, Reduce, ReducePart, not_placed};
use crate::ShardLayout;

/// A world of ranks in one process.
#[derive(Debug)]
pub struct LocalWorld {
    timeout: Duration,
    /// How long a rank waits before it sleeps.
    awake: Duration,
    cause: OnceLock<AbortCause>,
    /// Ranks that will make no further call.
    left: Mutex<Vec<usize>>,
    /// Ranks that have ended a channel or a group in which others, who gather in place and do not wait, have gone further; and
    /// the errors of those.
    unmet: Mutex<Vec<(usize, CommError)>>,
    /// Every channel and group that still exists, for an abort to find the ranks that wait.
    domains: Mutex<Vec<Weak<Domain>>>,
    pool: Arc<Pool>,
}

impl LocalWorld {
    /// Connects `world_size` ranks and returns one communicator for each, in the order of ranks.
    ///
    /// `timeout` bounds every single wait, not a step: it must exceed the longest time by which one rank may be ahead
    /// of another.
    ///
    /// ```
    /// use std::thread;
    /// use std::time::Duration;
    /// use fsdp_core::{Communicator, GatherPart, LocalWorld, OpTag, Phase, ShardLayout};
    ///
    /// let layout = ShardLayout::new(&[3], 0, 2); // rank 0 owns two rows, rank 1 owns one
    /// let ranks = LocalWorld::connect(2, Duration::from_secs(10)).into_iter().map(|comm| {
    ///     let layout = layout.clone();
    ///     thread::spawn(move || {
    ///         let shard = vec![comm.rank() as u8; layout.shard_len(comm.rank())].into();
    ///         let tag = OpTag::new(0, Phase::Forward, "head");
    ///         comm.all_gather(&tag, &[GatherPart { shard, layout, elem_bytes: 1 }])
    ///     })
    /// });
    /// for rank in ranks.collect::<Vec<_>>() {
    ///     assert_eq!(rank.join().unwrap()?[0][..], [0, 0, 1]);
    /// }
    /// # Ok::<(), fsdp_core::CommError>(())
    /// ```
    pub fn connect(world_size: usize, timeout: Duration) -> Vec<Arc<dyn Communicator>> {
        let num_cores = thread::available_parallelism().map_or(1, usize::from);
        let domain = Domain::create(&Self::create(world_size, num_cores, timeout), (0..world_size).collect());
        (0..world_size).map(|rank| LocalRank::create(&domain, rank)).collect()
    }

    fn create(world_size: usize, num_cores: usize, timeout: Duration) -> Arc<Self> {
        Arc::new(Self {
            timeout,
            awake: stay_awake(world_size, num_cores),
            cause: OnceLock::new(),
            left: Mutex::default(),
            unmet: Mutex::default(),
            domains: Mutex::default(),
            pool: Arc::default(),
        })
    }

    /// Returns the cause that won, which is `cause` unless the world had been aborted before.
    fn abort(&self, cause: AbortCause) -> &AbortCause {
        if self.cause.set(cause).is_ok() {
            self.wake_all();
        }
        self.cause.get().expect("the cause was set above, or by another rank before")
    }

    /// Ends the world with this error of a rank, unless it has ended before; returns what the rank is to be told.
    fn fail(&self, rank: usize, error: CommError) -> CommError {
        let ours = AbortCause::Collective(Box::new(error.clone()));
        let cause = self.abort(ours.clone());
        if *cause == ours { error } else { CommError::ended(rank, cause) }
    }

    /// Lets every rank that waits look again at what has changed in the world.
    fn wake_all(&self) {
        for domain in self.domains() {
            let slots: Vec<_> = lock(&domain.slots).values().cloned().collect();
            for slot in slots {
                // A waiter looks and falls asleep under this lock, so it either has seen the change or is asleep by now
                // and hears the notification.
                drop(lock(&slot.state));
                slot.changed.notify_all();
            }
        }
    }

    /// Those that still exist.
    fn domains(&self) -> Vec<Arc<Domain>> {
        lock(&self.domains).iter().filter_map(Weak::upgrade).collect()
    }

    fn check_alive(&self, rank: usize) -> Result<(), CommError> {
        self.cause.get().map_or(Ok(()), |cause| Err(CommError::ended(rank, cause)))
    }
}

/// One order of operations over some ranks: the world itself, a channel, or a group.
#[derive(Debug)]
struct Domain {
    world: Arc<LocalWorld>,
    /// Members by their number in the world.
    ranks: Vec<usize>,
    /// Operations under way, by their number in this domain.
    slots: Mutex<HashMap<u64, Arc<Slot>>>,
    /// Domains that some but not all members have asked for yet, by name and number of the call.
    children: Mutex<HashMap<(ChildName, u64), Child>>,
}

#[derive(Debug)]
struct Child {
    domain: Arc<Domain>,
    /// Members that have asked for it.
    num_asked: usize,
}

/// What a channel or a group is asked for by.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum ChildName {
    Channel(String),
    Group(Vec<usize>),
}

impl Domain {
    fn create(world: &Arc<LocalWorld>, ranks: Vec<usize>) -> Arc<Self> {
        let domain =
            Arc::new(Self { world: world.clone(), ranks, slots: Mutex::default(), children: Mutex::default() });
        let mut domains = lock(&world.domains);
        domains.retain(|domain| domain.strong_count() > 0);
        domains.push(Arc::downgrade(&domain));
        drop(domains);
        domain
    }

    /// Lets `rank`, a number of this domain, wait until `ready` holds for all ranks, or the world has ended, or the timeout has
    /// passed. `all` tells the same as `ready` for all ranks; errors name the operation, by its kind and tag.
    fn wait<'s>(
        &self,
        rank: usize,
        slot: &'s Slot,
        (kind, tag): (OpKind, &OpTag),
        all: &AtomicBool,
        ready: impl Fn(&SlotState, usize) -> bool,
    ) -> Result<MutexGuard<'s, SlotState>, CommError> {
        let Domain { world, ranks, .. } = self;
        let start = Instant::now();
        while !all.load(Ordering::Acquire) && start.elapsed() < world.awake {
            std::hint::spin_loop();
        }
        let mut state = lock(&slot.state);
        loop {
            let missing: Vec<usize> = (0..ranks.len()).filter(|&rank| !ready(&state, rank)).collect();
            if missing.is_empty() {
                return Ok(state);
            }
            world.check_alive(ranks[rank])?;
            let left = self.left(rank, (kind, tag), &missing);
            let missing = missing.into_iter().map(|rank| ranks[rank]).collect();
            let error = match (left, world.timeout.checked_sub(start.elapsed())) {
                (Some(error), _) => error,
                (None, None) => {
                    CommError::Timeout { rank: ranks[rank], kind, tag: tag.clone(), waited: world.timeout, missing }
                }
                (None, Some(remaining)) => {
                    state.num_asleep += 1;
                    let woken = slot.changed.wait_timeout(state, remaining);
                    state = woken.unwrap_or_else(PoisonError::into_inner).0;
                    state.num_asleep -= 1;
                    continue;
                }
            };
            drop(state);
            return Err(world.fail(ranks[rank], error));
        }
    }

    /// As [`Domain::wait`], for all ranks to fill their blocks.
    fn wait_for_filled<'s>(
        &self,
        rank: usize,
        slot: &'s Slot,
        operation: (OpKind, &OpTag),
    ) -> Result<MutexGuard<'s, SlotState>, CommError> {
        self.wait(rank, slot, operation, &slot.all_filled, |state, rank| state.filled[rank])
    }

    /// The error of `rank`, which cannot wait for one of these that has left. Both are numbers of this domain.
    fn left(&self, rank: usize, (kind, tag): (OpKind, &OpTag), missing: &[usize]) -> Option<CommError> {
        let missing = missing.iter().map(|&rank| self.ranks[rank]);
        let has_left = lock(&self.world.left);
        let left: Vec<usize> = missing.filter(|rank| has_left.contains(rank)).collect();
        (!left.is_empty()).then(|| CommError::Left { rank: self.ranks[rank], kind, tag: tag.clone(), left })
    }

    /// The error of a rank that has gathered in place what this one, a number of the world that ends here, has not asked for.
    fn unmet_by(&self, world_rank: usize) -> Option<CommError> {
        let rank = self.ranks.iter().position(|&rank| rank == world_rank)?;
        let slots = lock(&self.slots);
        let mut slots: Vec<_> = slots.iter().collect();
        slots.sort_unstable_by_key(|(number, _)| **number);
        slots.into_iter().find_map(|(_, slot)| {
            let state = lock(&slot.state);
            let (first, call) = state.first.as_ref().filter(|(_, call)| call.kind == OpKind::GatherPlaced)?;
            let (kind, tag, left) = (call.kind, call.tag.clone(), vec![world_rank]);
            state.inputs[rank].is_none().then_some(CommError::Left { rank: *first, kind, tag, left })
        })
    }
}

/// A tensor in which threads place their blocks, as one of them knows it.
#[derive(Clone, Debug)]
pub(crate) struct PlacedInThreads {
    domain: Arc<Domain>,
    /// Number in the domain.
    rank: usize,
    slot: Arc<Slot>,
    tensor: Arc<SharedTensors>,
}

impl PlacedInThreads {
    pub(super) fn is_complete(&self) -> bool {
        self.slot.all_filled.load(Ordering::Acquire)
    }

    /// The whole tensor, once all ranks have placed their blocks.
    fn wait(&self, tag: &OpTag) -> Result<Bytes, CommError> {
        let Self { domain, rank, slot, tensor } = self;
        drop(domain.wait_for_filled(*rank, slot, (OpKind::GatherPlaced, tag))?);
        Ok(tensor.views().remove(0))
    }
}

/// One rank's end of a domain.
#[derive(Debug)]
struct LocalRank {
    domain: Arc<Domain>,
    /// Number in the domain.
    rank: usize,
    /// Number of the next operation.
    next: AtomicU64,
    /// How many channels and groups of each name this rank has asked for.
    num_made: Mutex<HashMap<ChildName, u64>>,
    /// Where it has placed last.
    placed: Mutex<Option<Arc<Slot>>>,
}

impl LocalRank {
    fn create(domain: &Arc<Domain>, rank: usize) -> Arc<dyn Communicator> {
        let (next, num_made, placed) = (AtomicU64::new(0), Mutex::default(), Mutex::default());
        Arc::new(Self { domain: domain.clone(), rank, next, num_made, placed })
    }

    fn member(&self) -> Member {
        Member { rank: self.rank, world_size: self.domain.ranks.len(), world_rank: self.domain.ranks[self.rank] }
    }

    /// Meets the other ranks in the slot of this operation. `shared` says whether all ranks fill one output.
    fn arrive(&self, call: Call, inputs: Vec<Bytes>, shared: bool) -> Result<Visit<'_>, CommError> {
        let Member { world_size, world_rank, .. } = self.member();
        let world = &self.domain.world;
        world.check_alive(world_rank)?;
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let slot = lock(&self.domain.slots).entry(number).or_insert_with(|| Arc::new(Slot::new(world_size))).clone();
        let visit = Visit { rank: self, slot, number, kind: call.kind, tag: call.tag.clone() };
        let mut state = lock(&visit.slot.state);
        match &state.first {
            None => {
                if shared {
                    // A gathered unit lives briefly, and the next one takes its place; so does a block that is stepped.
                    // Gradients live until the step.
                    let pool = matches!(call.kind, OpKind::AllGather | OpKind::Place).then_some(&world.pool);
                    let whole = |tensors| Arc::new(SharedTensors::whole(pool, world_size, tensors));
                    let tensors: Vec<_> = call.tensors().collect();
                    state.outputs = match call.kind {
                        OpKind::Place => tensors.into_iter().map(|tensor| whole(vec![tensor])).collect(),
                        _ => vec![whole(tensors)],
                    };
                }
                state.first = Some((world_rank, call));
            }
            Some((first_rank, first)) => {
                if let Some(error) = first.mismatch(*first_rank, &call, world_rank) {
                    drop(state);
                    let cause = world.abort(AbortCause::Collective(Box::new(error)));
                    return Err(CommError::ended(world_rank, cause));
                }
            }
        }
        state.inputs[self.rank] = Some(inputs.into());
        if state.inputs.iter().all(Option::is_some) {
            visit.slot.tell(&state, &visit.slot.all_arrived);
        }
        drop(state);
        Ok(visit)
    }

    /// Adds the parts of all ranks; blocks of this rank are returned, or filled into the shared output.
    fn reduce(
        &self,
        call: Call,
        parts: &[ReducePart],
        reduce: Reduce,
        see: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<Vec<Bytes>, CommError> {
        let shared = call.kind == OpKind::AllReduce;
        let block = (!shared).then(|| call.tensors().collect::<Vec<_>>());
        let visit = self.arrive(call, parts.iter().map(|part| part.full.clone()).collect(), shared)?;
        let inputs = visit.wait_for_inputs()?;
        let output = match block {
            Some(tensors) => Arc::new(SharedTensors::block(self.rank, tensors)),
            None => visit.output(),
        };
        output.fill(self.rank, |part, elements, target| {
            let dtype = parts[part].dtype;
            let bytes = elements.start * dtype.size_bytes()..elements.end * dtype.size_bytes();
            let sums = write_sum(dtype, inputs.iter().map(|rank| &rank[part][bytes.clone()]), reduce, target);
            see(part, sums);
            sums
        });
        if shared {
            visit.wait_for_output()?;
        }
        Ok(output.views())
    }

    fn child(&self, name: ChildName, ranks: Vec<usize>, rank: usize) -> Result<Arc<dyn Communicator>, CommError> {
        self.domain.world.check_alive(self.member().world_rank)?;
        let mut num_made = lock(&self.num_made);
        let made = num_made.entry(name.clone()).or_insert(0);
        let key = (name, *made);
        *made += 1;
        drop(num_made);
        let mut children = lock(&self.domain.children);
        let num_members = ranks.len();
        let world = &self.domain.world;
        let child =
            children.entry(key.clone()).or_insert_with(|| Child { domain: Domain::create(world, ranks), num_asked: 0 });
        child.num_asked += 1;
        let (domain, complete) = (child.domain.clone(), child.num_asked == num_members);
        if complete {
            children.remove(&key);
        }
        Ok(Self::create(&domain, rank))
    }
}

impl Communicator for LocalRank {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.domain.ranks.len()
    }

    fn num_sharing(&self) -> usize {
        self.world_size()
    }

    fn all_gather(&self, tag: &OpTag, parts: &[GatherPart]) -> Result<Vec<Bytes>, CommError> {
        self.member().check_gather(tag, parts)?;
        let visit = self.arrive(Call::new(OpKind::AllGather, tag).gather(parts), Vec::new(), true)?;
        let output = visit.output();
        // A rank copies its blocks as soon as it arrives, while others may be on their way.
        output.copy(self.rank, parts.iter().map(|part| &part.shard[..]));
        visit.wait_for_output()?;
        Ok(output.views())
    }

    fn place(&self, tag: &OpTag, parts: &[GatherPart]) -> Result<Option<Vec<PlacedPart>>, CommError> {
        self.member().check_gather(tag, parts)?;
        if !parts.iter().all(PlacedPart::can_hold) {
            return Ok(None);
        }
        let before = lock(&self.placed).take();
        if let Some(slot) = before {
            drop(self.domain.wait_for_filled(self.rank, &slot, (OpKind::Place, tag))?);
        }
        let visit = self.arrive(Call::new(OpKind::Place, tag).gather(parts), Vec::new(), true)?;
        let outputs = lock(&visit.slot.state).outputs.clone();
        let place = |(tensor, part): (Arc<SharedTensors>, &GatherPart)| {
            let shard = tensor.place(self.rank, [&part.shard[..]]).remove(0);
            let (domain, rank, slot) = (self.domain.clone(), self.rank, visit.slot.clone());
            PlacedPart::new(shard, part, Whole::Threads(PlacedInThreads { domain, rank, slot, tensor }))
        };
        let placed = outputs.into_iter().zip(parts).map(place).collect();
        visit.tell_filled();
        *lock(&self.placed) = Some(visit.slot.clone());
        Ok(Some(placed))
    }

    fn gather_placed(&self, tag: &OpTag, parts: &[PlacedPart]) -> Result<Vec<Bytes>, CommError> {
        let visit = self.arrive(Call::new(OpKind::GatherPlaced, tag).gather_placed(parts), Vec::new(), false)?;
        // Under the lock: else one that is missing may come and leave before it is looked for among those that have left.
        let state = lock(&visit.slot.state);
        let left = self.domain.left(self.rank, (visit.kind, tag), &state.missing());
        drop(state);
        if let Some(error) = left {
            return Err(self.domain.world.fail(self.member().world_rank, error));
        }
        let whole = |part: &PlacedPart| match part.whole() {
            Whole::Threads(placed) => placed.wait(tag),
            #[cfg(target_os = "linux")]
            Whole::Processes(_) => Err(not_placed(self.member().world_rank, tag)),
        };
        parts.iter().map(whole).collect()
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
        self.member().check_reduce(tag, parts)?;
        self.reduce(Call::new(OpKind::ReduceScatter, tag).reduce(parts, reduce), parts, reduce, see)
    }

    fn all_reduce(&self, tag: &OpTag, parts: &[ReducePart], reduce: Reduce) -> Result<Vec<Bytes>, CommError> {
        self.member().check_reduce(tag, parts)?;
        self.reduce(Call::new(OpKind::AllReduce, tag).reduce(parts, reduce), parts, reduce, &mut |_, _| ())
    }

    fn broadcast(&self, tag: &OpTag, root: usize, data: Option<Bytes>) -> Result<Bytes, CommError> {
        self.member().check_root(tag, root, data.is_some())?;
        let call = Call { root: Some(self.domain.ranks[root]), ..Call::new(OpKind::Broadcast, tag) };
        let visit = self.arrive(call, data.into_iter().collect(), false)?;
        Ok(visit.wait_for_inputs()?[root][0].clone())
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
        let call = Call { root: Some(self.domain.ranks[root]), parts, ..Call::new(OpKind::Scatter, tag) };
        let visit = self.arrive(call, full.into_iter().collect(), false)?;
        let full = visit.wait_for_inputs()?[root][0].clone();
        let block = Arc::new(SharedTensors::block(self.rank, [(layout.clone(), elem_bytes)]));
        block.fill_runs(self.rank, |_, elements, target| {
            target.write_copy_of_slice(&full[elements.start * elem_bytes..elements.end * elem_bytes])
        });
        Ok(block.views().remove(0))
    }

    fn barrier(&self, tag: &OpTag) -> Result<(), CommError> {
        let visit = self.arrive(Call::new(OpKind::Barrier, tag), Vec::new(), false)?;
        visit.wait_for_inputs().map(drop)
    }

    fn channel(&self, name: &str) -> Result<Arc<dyn Communicator>, CommError> {
        self.child(ChildName::Channel(name.to_owned()), self.domain.ranks.clone(), self.rank)
    }

    fn subgroup(&self, ranks: &[usize]) -> Result<Arc<dyn Communicator>, CommError> {
        let rank = self.member().check_group(ranks)?;
        let world_ranks = ranks.iter().map(|&rank| self.domain.ranks[rank]).collect();
        self.child(ChildName::Group(ranks.to_vec()), world_ranks, rank)
    }

    fn abort(&self, cause: AbortCause) {
        self.domain.world.abort(cause);
    }

    fn aborted(&self) -> Option<AbortCause> {
        self.domain.world.cause.get().cloned()
    }

    fn leave(&self) {
        let (world, rank) = (&self.domain.world, self.member().world_rank);
        // First, so that whoever gathers in place from now on sees it, and who has done so before is seen below.
        lock(&world.left).push(rank);
        let in_ended = lock(&world.unmet).iter().find(|(of, _)| *of == rank).map(|(_, error)| error.clone());
        // What the rank's program has returned may still hold channels and groups.
        let in_others = || world.domains().iter().find_map(|domain| domain.unmet_by(rank));
        if let Some(error) = in_ended.or_else(in_others) {
            world.abort(AbortCause::Collective(Box::new(error)));
        }
        world.wake_all();
    }
}

impl Drop for LocalRank {
    fn drop(&mut self) {
        let rank = self.member().world_rank;
        if let Some(error) = self.domain.unmet_by(rank) {
            lock(&self.domain.world.unmet).push((rank, error));
        }
    }
}

/// A rank's stay in a slot. The last rank to leave removes the slot.
struct Visit<'a> {
    rank: &'a LocalRank,
    slot: Arc<Slot>,
    number: u64,
    kind: OpKind,
    tag: OpTag,
}

impl Visit<'_> {
    /// The tensors that all ranks fill.
    fn output(&self) -> Arc<SharedTensors> {
        lock(&self.slot.state)
            .outputs
            .first()
            .expect("the first rank to arrive allocates the output of this kind")
            .clone()
    }

    /// Waits until all ranks have arrived; returns what each brought.
    fn wait_for_inputs(&self) -> Result<Vec<Arc<[Bytes]>>, CommError> {
        let Self { rank: LocalRank { domain, rank, .. }, slot, kind, tag, .. } = self;
        let has_arrived = |state: &SlotState, rank: usize| state.inputs[rank].is_some();
        let state = domain.wait(*rank, slot, (*kind, tag), &slot.all_arrived, has_arrived)?;
        Ok(state.inputs.iter().flatten().cloned().collect())
    }

    /// Tells that this rank has filled its blocks.
    fn tell_filled(&self) {
        let mut state = lock(&self.slot.state);
        state.filled[self.rank.rank] = true;
        if state.filled.iter().all(|&filled| filled) {
            self.slot.tell(&state, &self.slot.all_filled);
        }
    }

    /// The same, and waits until all ranks have.
    fn wait_for_output(&self) -> Result<(), CommError> {
        self.tell_filled();
        let operation = (self.kind, &self.tag);
        self.rank.domain.wait_for_filled(self.rank.rank, &self.slot, operation).map(drop)
    }
}

impl Drop for Visit<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.slot.state);
        state.num_left += 1;
        let last = state.num_left == state.inputs.len();
        if last {
            // Who still needs a tensor has it, and a slot that something was placed in lives on.
            state.outputs.clear();
        }
        drop(state);
        if last {
            lock(&self.rank.domain.slots).remove(&self.number);
        }
    }
}

/// State behind these locks is changed in single steps, so it is whole even after a panic elsewhere.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dtype, Phase};

    #[test]
    fn nothing_is_left_of_an_operation_once_all_ranks_have_left() {
        let world = LocalWorld::create(3, 3, Duration::from_secs(30));
        let domain = Domain::create(&world, vec![0, 1, 2]);
        thread::scope(|scope| {
            for rank in 0..3 {
                let comm = LocalRank::create(&domain, rank);
                scope.spawn(move || {
                    let tag = OpTag::new(0, Phase::Backward, "head");
                    let layout = ShardLayout::new(&[5], 0, 3);
                    let part = ReducePart { full: vec![0; 20].into(), layout, dtype: Dtype::F32 };
                    for _ in 0..10 {
                        comm.all_reduce(&tag, std::slice::from_ref(&part), Reduce::SUM).unwrap();
                        comm.barrier(&tag).unwrap();
                    }
                    comm.channel("gather").unwrap().barrier(&tag).unwrap();
                    comm.subgroup(&[2, 0, 1]).unwrap().barrier(&tag).unwrap();
                });
            }
        });
        assert!(lock(&domain.slots).is_empty());
        assert!(lock(&domain.children).is_empty());
        let num_domains = lock(&world.domains).iter().filter(|domain| domain.strong_count() > 0).count();
        assert_eq!(num_domains, 1, "the channel and the group ended with their communicators");
    }

    #[test]
    fn a_placed_tensor_does_not_keep_those_that_were_placed_with_it() {
        let world = LocalWorld::create(2, 2, Duration::from_secs(30));
        let domain = Domain::create(&world, vec![0, 1]);
        let tag = OpTag::new(0, Phase::Optimizer, "head");
        let layout = ShardLayout::new(&[4], 0, 2);
        let part = || GatherPart { shard: vec![7; 2].into(), layout: layout.clone(), elem_bytes: 1 };
        let ranks = [0, 1].map(|rank| LocalRank::create(&domain, rank));
        let mut placed = ranks.each_ref().map(|comm| comm.place(&tag, &[part(), part()]).unwrap().unwrap());
        let memory = placed.each_ref().map(|parts| {
            let Whole::Threads(placed) = parts[0].whole() else { unreachable!("ranks are threads") };
            Arc::downgrade(&placed.tensor)
        });
        placed.iter_mut().for_each(|parts| drop(parts.remove(0)));
        assert!(memory.iter().all(|memory| memory.upgrade().is_none()));
        let wholes = ranks.iter().zip(&placed).map(|(comm, parts)| comm.gather_placed(&tag, parts).unwrap());
        assert!(wholes.into_iter().all(|whole| whole[0][..] == [7; 4]));
    }

    #[test]
    fn ranks_meet_whether_they_are_awake_or_sleep() {
        for num_cores in [0, 2] {
            let world = LocalWorld::create(2, num_cores, Duration::from_secs(30));
            let domain = Domain::create(&world, vec![0, 1]);
            thread::scope(|scope| {
                for rank in 0..2 {
                    let comm = LocalRank::create(&domain, rank);
                    scope.spawn(move || {
                        let layout = ShardLayout::new(&[4], 0, 2);
                        for step in 0..200 {
                            // Some arrive while the other is awake, some when it sleeps.
                            if step % 2 == rank as u64 {
                                thread::sleep(Duration::from_micros(25 * (step % 9)));
                            }
                            let tag = OpTag::new(step, Phase::Forward, "head");
                            let shard = vec![step as u8 + rank as u8; 2].into();
                            let part = GatherPart { shard, layout: layout.clone(), elem_bytes: 1 };
                            let whole = comm.all_gather(&tag, &[part]).unwrap().remove(0);
                            assert_eq!(whole[..], [step as u8, step as u8, step as u8 + 1, step as u8 + 1]);
                        }
                    });
                }
            });
        }
    }
}
