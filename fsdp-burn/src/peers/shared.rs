//! Ranks that are threads and share one device: each reads the tensors of the others where they lie.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Backend, Cube, TensorMetadata};
use burn::tensor::{DType, FloatDType};
use fsdp_core::{AbortCause, CommError, Issued, OpKind, OpTag};

use super::{CubeFloat, Group, Peers, Ticket, part};

/// How often a rank that waits looks whether the run has ended.
const LOOK: Duration = Duration::from_millis(20);

/// Where all ranks of a process post their tensors.
pub(crate) struct Board {
    posts: Mutex<BTreeMap<Key, Post>>,
    changed: Condvar,
    timeout: Duration,
}

/// The order of operations, and the number in it.
type Key = (Arc<str>, u64);

/// One operation.
struct Post {
    /// By rank.
    tensors: Vec<Option<Arc<Posted>>>,
    /// Ranks that have taken what is there.
    num_taken: usize,
}

struct Posted {
    kind: OpKind,
    tag: OpTag,
    flats: Vec<CubeFloat>,
}

impl Board {
    pub(crate) fn new(timeout: Duration) -> Arc<Self> {
        Arc::new(Self { posts: Mutex::default(), changed: Condvar::new(), timeout })
    }

    /// The end of one rank of the order `name`, which all ranks of the group name alike, and no others.
    pub(crate) fn join(self: &Arc<Self>, name: &str, group: Group) -> impl Peers + use<> {
        Shared { board: self.clone(), name: name.into(), group, next: AtomicU64::new(0) }
    }
}

impl fmt::Debug for Board {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Board")
    }
}

struct Shared {
    board: Arc<Board>,
    name: Arc<str>,
    group: Group,
    next: AtomicU64,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Shared({}, rank {})", self.name, self.group.world.rank())
    }
}

impl Peers for Shared {
    fn start(&self, kind: OpKind, tag: OpTag, flats: Vec<CubeFloat>) -> Result<Ticket, CommError> {
        // CubeCL lets a stream wait for another's allocation of a tensor, and not for what was written into it in place since.
        // So what others are to read is complete when they learn of it.
        if let Some(flat) = flats.first() {
            Cube::sync(&flat.device()).map_err(|error| self.failed(&format!("{error:?}")))?;
        }
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let mut posts = self.board.posts.lock().unwrap_or_else(PoisonError::into_inner);
        let empty = || Post { tensors: vec![None; self.group.ranks.len()], num_taken: 0 };
        let post = posts.entry((self.name.clone(), number)).or_insert_with(empty);
        post.tensors[self.group.own.rank()] = Some(Arc::new(Posted { kind, tag, flats }));
        self.board.changed.notify_all();
        Ok(Ticket { number })
    }

    fn finish(&self, ticket: Ticket) -> Result<Vec<CubeFloat>, CommError> {
        let posted = self.take(ticket.number)?;
        let rank = self.group.own.rank();
        let own = &posted[rank];
        let of_part = |index: usize| {
            let flats = posted.iter().map(|posted| posted.flats[index].clone());
            match own.kind {
                OpKind::AllGather => Cube::float_cat(flats.collect(), 0),
                OpKind::ReduceScatter => {
                    let len = own.flats[index].shape().num_elements() / posted.len();
                    sum(flats.map(|flat| part(flat, rank * len..(rank + 1) * len)))
                }
                _ => sum(flats),
            }
        };
        Ok((0..own.flats.len()).map(of_part).collect())
    }
}

impl Shared {
    /// The device of this rank has failed, and the run with it.
    fn failed(&self, error: &str) -> CommError {
        let rank = self.group.world.rank();
        let cause = AbortCause::RankFailed { rank, message: format!("the device has failed: {error}") };
        self.group.world.abort(cause.clone());
        CommError::Aborted { rank, cause }
    }

    /// What all ranks have posted, once they have.
    fn take(&self, number: u64) -> Result<Vec<Arc<Posted>>, CommError> {
        let (rank, key) = (self.group.world.rank(), (self.name.clone(), number));
        let begun = Instant::now();
        let mut posts = self.board.posts.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let Some(post) = posts.get_mut(&key) else { unreachable!("this rank has posted, and takes once") };
            if let Some(posted) = post.tensors.iter().cloned().collect::<Option<Vec<_>>>() {
                post.num_taken += 1;
                if post.num_taken == posted.len() {
                    posts.remove(&key);
                }
                drop(posts);
                return self.check(posted);
            }
            if let Some(cause) = self.group.world.aborted() {
                return Err(CommError::Aborted { rank, cause });
            }
            if begun.elapsed() > self.board.timeout {
                let of_rank = |(&rank, posted): (&usize, &Option<Arc<Posted>>)| posted.is_none().then_some(rank);
                let missing = self.group.ranks.iter().zip(&post.tensors).filter_map(of_rank).collect();
                let Some(own) = &post.tensors[self.group.own.rank()] else { unreachable!("this rank has posted") };
                let (kind, tag) = (own.kind, own.tag.clone());
                return Err(CommError::Timeout { rank, kind, tag, waited: begun.elapsed(), missing });
            }
            let waited = self.board.changed.wait_timeout(posts, LOOK);
            posts = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// All ranks must have posted the same operation.
    fn check(&self, posted: Vec<Arc<Posted>>) -> Result<Vec<Arc<Posted>>, CommError> {
        let shapes = |posted: &Posted| posted.flats.iter().map(|flat| flat.shape()).collect::<Vec<_>>();
        let issued = |rank: usize, posted: &Posted| {
            let detail = format!("shapes {:?}", shapes(posted));
            Box::new(Issued { rank, kind: posted.kind, tag: posted.tag.clone(), detail })
        };
        for (&rank, other) in self.group.ranks.iter().zip(&posted).skip(1) {
            let first = &posted[0];
            let what = match () {
                () if first.kind != other.kind => "kind",
                () if first.tag != other.tag => "tag",
                () if shapes(first) != shapes(other) => "sizes",
                () => continue,
            };
            return Err(CommError::Mismatch {
                what,
                first: issued(self.group.ranks[0], first),
                second: issued(rank, other),
            });
        }
        Ok(posted)
    }
}

/// The sum in the order of ranks; of elements of two bytes, in float32.
fn sum(mut tensors: impl Iterator<Item = CubeFloat>) -> CubeFloat {
    let wide = |tensor: CubeFloat| match tensor.dtype() {
        DType::BF16 | DType::F16 => Cube::float_cast(tensor, FloatDType::F32),
        _ => tensor,
    };
    let Some(first) = tensors.next() else { unreachable!("there is at least one rank") };
    tensors.fold(wide(first), |sum, tensor| Cube::float_add(sum, wide(tensor)))
}
