//! A wrapper that counts what a rank sends: operations by kind, bytes, and on request a log.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;

use super::{AbortCause, CommError, Communicator, GatherPart, OpKind, OpTag, PlacedPart, Reduce, ReducePart};
use crate::ShardLayout;

/// Counts the completed operations of one rank.
///
/// Bytes are what this rank must send to the others by the nature of the operation, without padding, whatever the
/// engine does: its own block to each other rank in an all-gather, the other ranks' blocks in a reduce-scatter, both in
/// an all-reduce; in a broadcast and a scatter the root alone sends. A gather in place counts as the all-gather that it
/// stands for, and placing as nothing. Channels and groups made from a recorder count into the same [`Traffic`].
///
/// ```
/// use std::sync::Arc;
/// use std::time::Duration;
/// use fsdp_core::{Communicator, LocalWorld, OpKind, OpTag, Phase, Recorder, Traffic};
///
/// let comm = LocalWorld::connect(1, Duration::from_secs(10)).remove(0);
/// let traffic = Arc::new(Traffic::default());
/// let comm = Recorder::new(comm, traffic.clone());
/// comm.barrier(&OpTag::new(0, Phase::Control, "start"))?;
/// assert_eq!(traffic.of(OpKind::Barrier).num_ops, 1);
/// # Ok::<(), fsdp_core::CommError>(())
/// ```
#[derive(Debug)]
pub struct Recorder {
    inner: Arc<dyn Communicator>,
    traffic: Arc<Traffic>,
}

/// The counters of a [`Recorder`].
#[derive(Debug, Default)]
pub struct Traffic {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    counts: [OpCount; OpKind::ALL.len()],
    log: Option<Vec<LoggedOp>>,
}

/// Operations, and the bytes that this rank sent in them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpCount {
    /// Completed operations.
    pub num_ops: u64,
    /// Bytes sent by this rank, without padding.
    pub sent_bytes: u64,
}

/// One completed operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoggedOp {
    /// Its kind.
    pub kind: OpKind,
    /// Where it was issued.
    pub tag: OpTag,
    /// Bytes sent by this rank, without padding.
    pub sent_bytes: u64,
}

impl Traffic {
    /// Counters that also keep a log, in the order of completion. The log grows until it is taken.
    pub fn with_log() -> Self {
        Self { state: Mutex::new(State { log: Some(Vec::new()), ..State::default() }) }
    }

    /// The operations of one kind since the last reset.
    pub fn of(&self, kind: OpKind) -> OpCount {
        self.with(|state| state.counts[kind as usize])
    }

    /// All operations since the last reset.
    pub fn total(&self) -> OpCount {
        self.with(|state| {
            state.counts.iter().fold(OpCount::default(), |total, count| OpCount {
                num_ops: total.num_ops + count.num_ops,
                sent_bytes: total.sent_bytes + count.sent_bytes,
            })
        })
    }

    /// Sets all counters to zero. The log stays.
    pub fn reset(&self) {
        self.with(|state| state.counts = Default::default());
    }

    /// Returns the log since it was last taken; empty unless made by [`Traffic::with_log`].
    pub fn take_log(&self) -> Vec<LoggedOp> {
        self.with(|state| state.log.as_mut().map(std::mem::take).unwrap_or_default())
    }

    /// Counts an operation over whole tensors of these layouts, with the bytes of an element, as [`Recorder`] counts its own:
    /// a gather or a reduction that no communicator carries out. `rank` is this rank's index in the layouts.
    pub fn count<'a>(
        &self,
        kind: OpKind,
        tag: &OpTag,
        rank: usize,
        parts: impl IntoIterator<Item = (&'a ShardLayout, usize)>,
    ) {
        let repeats = matches!(kind, OpKind::AllGather | OpKind::AllReduce);
        let divides = matches!(kind, OpKind::ReduceScatter | OpKind::AllReduce);
        let sent_bytes = |(layout, elem_bytes): (&ShardLayout, usize)| {
            // Its block, once for each other rank; and theirs.
            let repeated_len = if repeats { layout.shard_len(rank) * (layout.num_shards() - 1) } else { 0 };
            let others_len = if divides { layout.others_len(rank) } else { 0 };
            (repeated_len + others_len) * elem_bytes
        };
        self.add(kind, tag, parts.into_iter().map(sent_bytes).sum());
    }

    fn add(&self, kind: OpKind, tag: &OpTag, sent_bytes: usize) {
        let sent_bytes = sent_bytes as u64;
        self.with(|state| {
            let count = &mut state.counts[kind as usize];
            count.num_ops += 1;
            count.sent_bytes += sent_bytes;
            if let Some(log) = &mut state.log {
                log.push(LoggedOp { kind, tag: tag.clone(), sent_bytes });
            }
        });
    }

    fn with<T>(&self, f: impl FnOnce(&mut State) -> T) -> T {
        f(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Recorder {
    /// Wraps `inner` and counts into `traffic`.
    pub fn new(inner: Arc<dyn Communicator>, traffic: Arc<Traffic>) -> Self {
        Self { inner, traffic }
    }
}

impl Communicator for Recorder {
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
        let gathered = self.inner.all_gather(tag, parts)?;
        let parts = parts.iter().map(|part| (&part.layout, part.elem_bytes));
        self.traffic.count(OpKind::AllGather, tag, self.rank(), parts);
        Ok(gathered)
    }

    fn place(&self, tag: &OpTag, parts: &[GatherPart]) -> Result<Option<Vec<PlacedPart>>, CommError> {
        self.inner.place(tag, parts)
    }

    fn gather_placed(&self, tag: &OpTag, parts: &[PlacedPart]) -> Result<Vec<Bytes>, CommError> {
        let gathered = self.inner.gather_placed(tag, parts)?;
        self.traffic.count(OpKind::AllGather, tag, self.rank(), parts.iter().map(PlacedPart::tensor));
        Ok(gathered)
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
        let reduced = self.inner.reduce_scatter_and_see(tag, parts, reduce, see)?;
        let parts = parts.iter().map(|part| (&part.layout, part.dtype.size_bytes()));
        self.traffic.count(OpKind::ReduceScatter, tag, self.rank(), parts);
        Ok(reduced)
    }

    fn all_reduce(&self, tag: &OpTag, parts: &[ReducePart], reduce: Reduce) -> Result<Vec<Bytes>, CommError> {
        let reduced = self.inner.all_reduce(tag, parts, reduce)?;
        let parts = parts.iter().map(|part| (&part.layout, part.dtype.size_bytes()));
        self.traffic.count(OpKind::AllReduce, tag, self.rank(), parts);
        Ok(reduced)
    }

    fn broadcast(&self, tag: &OpTag, root: usize, data: Option<Bytes>) -> Result<Bytes, CommError> {
        let sent = data.as_ref().map_or(0, |data| data.len() * (self.world_size() - 1));
        let data = self.inner.broadcast(tag, root, data)?;
        self.traffic.add(OpKind::Broadcast, tag, sent);
        Ok(data)
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
        let block = self.inner.scatter(tag, root, full, layout, elem_bytes)?;
        let sent = if is_root { layout.others_len(self.rank()) * elem_bytes } else { 0 };
        self.traffic.add(OpKind::Scatter, tag, sent);
        Ok(block)
    }

    fn barrier(&self, tag: &OpTag) -> Result<(), CommError> {
        self.inner.barrier(tag)?;
        self.traffic.add(OpKind::Barrier, tag, 0);
        Ok(())
    }

    fn channel(&self, name: &str) -> Result<Arc<dyn Communicator>, CommError> {
        Ok(Arc::new(Self::new(self.inner.channel(name)?, self.traffic.clone())))
    }

    fn subgroup(&self, ranks: &[usize]) -> Result<Arc<dyn Communicator>, CommError> {
        Ok(Arc::new(Self::new(self.inner.subgroup(ranks)?, self.traffic.clone())))
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
