//! Tensors that several ranks fill at once, each its own blocks, without a lock.
//!
//! Each tensor is an allocation of its own, though they travel together: whoever keeps a view of a small one, such as
//! an op that remembers a bias for backward, does not keep the large ones beside it.
//!
//! Invariants, on which every `unsafe` here rests:
//! 1. the runs of different ranks of one [`ShardLayout`] are disjoint, and together cover the tensor once (tested there);
//! 2. each rank fills at most once, enforced by its flag, and a block has one rank only;
//! 3. nothing reads another rank's blocks before every rank has filled, enforced by the count.

use std::convert::Infallible;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use bytes::Bytes;

use super::placed::block_bytes;
use super::pool::{Block, Pool};
use crate::ShardLayout;

/// Largest piece of a sum that is filled at once: it stays in the first-level cache while the ranks' values are added.
pub(crate) const PIECE_BYTES: usize = 8 * 1024;

/// Most bytes of a piece that is copied: all that lie side by side. The C library then chooses how to copy by the size.
pub(crate) const WHOLE_RUNS: usize = usize::MAX;

/// The tensors of one operation, written by all ranks, then read by all.
#[derive(Debug)]
pub(crate) struct SharedTensors {
    tensors: Vec<Tensor>,
    /// `None` for whole tensors, which all ranks fill; else the one rank whose blocks these are.
    owner: Option<usize>,
    /// Which ranks have begun to fill.
    begun: Box<[AtomicBool]>,
    /// How many ranks have filled everything.
    filled: AtomicUsize,
}

#[derive(Debug)]
struct Tensor {
    layout: ShardLayout,
    elem_bytes: usize,
    memory: Arc<Block>,
    len_bytes: usize,
}

impl SharedTensors {
    /// Allocates whole tensors, which `num_ranks` ranks fill. Each is given by its layout, of `num_ranks` blocks, and
    /// the size of an element. Without a pool, memory comes from the allocator and returns to it.
    pub(crate) fn whole(
        pool: Option<&Arc<Pool>>,
        num_ranks: usize,
        tensors: impl IntoIterator<Item = (ShardLayout, usize)>,
    ) -> Self {
        Self::new(pool, num_ranks, None, tensors)
    }

    /// Allocates the blocks of one rank, which it fills alone.
    pub(crate) fn block(rank: usize, tensors: impl IntoIterator<Item = (ShardLayout, usize)>) -> Self {
        Self::new(None, rank + 1, Some(rank), tensors)
    }

    fn new(
        pool: Option<&Arc<Pool>>,
        num_flags: usize,
        owner: Option<usize>,
        tensors: impl IntoIterator<Item = (ShardLayout, usize)>,
    ) -> Self {
        let tensor = |(layout, elem_bytes): (ShardLayout, usize)| {
            let len = match owner {
                Some(rank) => layout.shard_len(rank),
                None => {
                    assert_eq!(layout.num_shards(), num_flags, "callers check layouts against the world size");
                    layout.full_len()
                }
            };
            let len_bytes = len.checked_mul(elem_bytes).expect("a tensor's bytes are counted in a usize");
            let memory = pool.map_or_else(|| Block::new(len_bytes), |pool| pool.take(len_bytes));
            Tensor { layout, elem_bytes, memory: Arc::new(memory), len_bytes }
        };
        let begun = (0..num_flags).map(|_| AtomicBool::new(false)).collect();
        Self { tensors: tensors.into_iter().map(tensor).collect(), owner, begun, filled: AtomicUsize::new(0) }
    }

    /// Fills every element that `rank` owns, piece by piece, in order.
    ///
    /// `fill` gets the number of the tensor, a range of elements of the whole tensor, and the memory of that range; it
    /// returns the memory, initialised. Ranks may call this at the same time.
    ///
    /// # Panics
    /// If the rank has filled before or has no part in it, or `fill` returns another slice than it was given.
    pub(crate) fn fill<F>(&self, rank: usize, mut fill: F)
    where
        F: for<'a> FnMut(usize, Range<usize>, &'a mut [MaybeUninit<u8>]) -> &'a mut [u8],
    {
        let done: Result<(), Infallible> =
            self.try_fill(rank, |tensor, elements, target| Ok(fill(tensor, elements, target)));
        let Ok(()) = done;
    }

    /// As [`SharedTensors::fill`], for copies: in pieces as large as can be.
    ///
    /// # Panics
    /// As [`SharedTensors::fill`].
    pub(crate) fn fill_runs<F>(&self, rank: usize, mut fill: F)
    where
        F: for<'a> FnMut(usize, Range<usize>, &'a mut [MaybeUninit<u8>]) -> &'a mut [u8],
    {
        let done: Result<(), Infallible> =
            self.fill_pieces(rank, WHOLE_RUNS, |tensor, elements, target| Ok(fill(tensor, elements, target)));
        let Ok(()) = done;
    }

    /// Fills with a block for each tensor, which is given element after element, in pieces as large as can be.
    ///
    /// # Panics
    /// As [`SharedTensors::fill`], or if a block is shorter than what the rank owns.
    pub(crate) fn copy<'b>(&self, rank: usize, blocks: impl IntoIterator<Item = &'b [u8]>) {
        let mut next = from_blocks(blocks);
        self.fill_runs(rank, |tensor, _, target| next(tensor, target));
    }

    /// As [`SharedTensors::fill`]. After an error the rank has not filled, and there will be no view.
    pub(crate) fn try_fill<E, F>(&self, rank: usize, fill: F) -> Result<(), E>
    where
        F: for<'a> FnMut(usize, Range<usize>, &'a mut [MaybeUninit<u8>]) -> Result<&'a mut [u8], E>,
    {
        self.fill_pieces(rank, PIECE_BYTES, fill)
    }

    fn fill_pieces<E, F>(&self, rank: usize, most_bytes: usize, mut fill: F) -> Result<(), E>
    where
        F: for<'a> FnMut(usize, Range<usize>, &'a mut [MaybeUninit<u8>]) -> Result<&'a mut [u8], E>,
    {
        assert!(self.owner.is_none_or(|owner| owner == rank), "a block is filled by its rank");
        assert!(!self.begun[rank].swap(true, Ordering::Relaxed), "a rank fills its blocks once");
        let (mut current, mut num_filled) = (0, 0);
        let tensors = self.tensors.iter().map(|tensor| (tensor.layout.clone(), tensor.elem_bytes));
        for piece in pieces(tensors, rank, most_bytes) {
            if piece.tensor != current {
                (current, num_filled) = (piece.tensor, 0);
            }
            let tensor = &self.tensors[piece.tensor];
            let offset = if self.owner.is_some() { num_filled } else { piece.first_byte };
            num_filled += piece.num_bytes;
            assert!(offset + piece.num_bytes <= tensor.len_bytes, "a run lies in its tensor");
            // SAFETY: The piece lies in the tensor, which is the allocation. No other reference to these bytes exists:
            // other ranks own other runs, this rank is here once, and views are made only after all ranks have filled
            // (invariants 1 to 3).
            let target = unsafe {
                std::slice::from_raw_parts_mut(
                    tensor.memory.start().as_ptr().add(offset).cast::<MaybeUninit<u8>>(),
                    piece.num_bytes,
                )
            };
            let written = fill(piece.tensor, piece.elements, target)?;
            let expected = tensor.memory.start().as_ptr().wrapping_add(offset).cast_const();
            assert!(
                written.len() == piece.num_bytes && written.as_ptr() == expected,
                "`fill` returns what it was given"
            );
        }
        self.filled.fetch_add(1, Ordering::Release);
        Ok(())
    }

    /// The tensors, each a view that keeps its own allocation alive.
    ///
    /// # Panics
    /// If a rank has not filled its blocks.
    pub(crate) fn views(&self) -> Vec<Bytes> {
        let num_writers = if self.owner.is_some() { 1 } else { self.begun.len() };
        assert_eq!(self.filled.load(Ordering::Acquire), num_writers, "all ranks fill before anyone reads");
        let view = |tensor: &Tensor| View { memory: tensor.memory.clone(), bytes: 0..tensor.len_bytes };
        self.tensors.iter().map(|tensor| Bytes::from_owner(view(tensor))).collect()
    }

    /// Fills the blocks of `rank` as [`SharedTensors::copy`] does, and returns a view of each: whole tensors in which a rank's
    /// block is one range. Other ranks may still be filling theirs.
    ///
    /// # Panics
    /// As [`SharedTensors::copy`], or if a block is not one range.
    pub(crate) fn place<'b>(&self, rank: usize, blocks: impl IntoIterator<Item = &'b [u8]>) -> Vec<Bytes> {
        assert!(self.owner.is_none(), "blocks are placed in whole tensors");
        self.copy(rank, blocks);
        let bytes = |tensor: &Tensor| block_bytes(&tensor.layout, rank, tensor.elem_bytes);
        let view = |tensor: &Tensor| View { memory: tensor.memory.clone(), bytes: bytes(tensor) };
        self.tensors.iter().map(|tensor| Bytes::from_owner(view(tensor))).collect()
    }
}

/// Writes one piece of a tensor after the other, given its number, from blocks in which elements lie side by side.
pub(crate) fn from_blocks<'b>(
    blocks: impl IntoIterator<Item = &'b [u8]>,
) -> impl for<'a> FnMut(usize, &'a mut [MaybeUninit<u8>]) -> &'a mut [u8] {
    let mut blocks: Vec<&[u8]> = blocks.into_iter().collect();
    move |tensor, target| {
        let (piece, rest) = blocks[tensor].split_at(target.len());
        blocks[tensor] = rest;
        target.write_copy_of_slice(piece)
    }
}

/// A few elements of one tensor that lie side by side.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    pub(crate) tensor: usize,
    /// Of the whole tensor.
    pub(crate) elements: Range<usize>,
    /// Where they begin in the whole tensor.
    pub(crate) first_byte: usize,
    pub(crate) num_bytes: usize,
}

/// What `rank` owns of tensors that are given by layout and element size, tensor by tensor, in the order of its blocks, in
/// pieces of at most so many bytes.
pub(crate) fn pieces<T>(tensors: T, rank: usize, most_bytes: usize) -> impl Iterator<Item = Piece> + use<T>
where
    T: IntoIterator<Item = (ShardLayout, usize)>,
{
    tensors.into_iter().enumerate().flat_map(move |(tensor, (layout, elem_bytes))| {
        let piece_len = (most_bytes / elem_bytes.max(1)).max(1);
        layout.runs(rank).flat_map(move |run| {
            run.clone().step_by(piece_len).map(move |start| {
                let elements = start..start + piece_len.min(run.end - start);
                let num_bytes = elements.len() * elem_bytes;
                Piece { tensor, first_byte: start * elem_bytes, num_bytes, elements }
            })
        })
    })
}

/// Exists only once its bytes are filled: see [`SharedTensors::views`] and [`SharedTensors::place`].
struct View {
    memory: Arc<Block>,
    bytes: Range<usize>,
}

impl AsRef<[u8]> for View {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: Every byte is initialised: of a whole tensor, since its blocks cover it (invariant 1) and all were filled
        // before this view was made; of a block, since its rank has filled it. Nothing writes there any more (invariant 2).
        unsafe { std::slice::from_raw_parts(self.memory.start().as_ptr().add(self.bytes.start), self.bytes.len()) }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::super::pool::ALIGN;
    use super::*;

    fn write_rank(shared: &SharedTensors, rank: usize) {
        shared.fill(rank, |tensor, piece, target| {
            let value = 16 * rank as u8 + tensor as u8;
            assert_eq!(target.len() % piece.len(), 0);
            target.write_copy_of_slice(&vec![value; target.len()])
        });
    }

    #[test]
    fn ranks_fill_disjoint_blocks_at_the_same_time() {
        let layouts = [
            (ShardLayout::new(&[7, 3], 0, 3), 4),
            (ShardLayout::new(&[2, 5, 2], 1, 3), 2),
            (ShardLayout::new(&[0, 3], 0, 3), 4),
            (ShardLayout::new(&[], 0, 3), 8),
            (ShardLayout::new(&[9000], 0, 3), 4),
        ];
        let shared = Arc::new(SharedTensors::whole(None, 3, layouts.clone()));
        thread::scope(|scope| {
            for rank in 0..3 {
                let shared = &shared;
                scope.spawn(move || write_rank(shared, rank));
            }
        });
        let views = shared.views();
        drop(shared);
        for (tensor, (view, (layout, elem_bytes))) in views.iter().zip(&layouts).enumerate() {
            assert_eq!(view.len(), layout.full_len() * elem_bytes);
            assert_eq!(view.as_ptr() as usize % ALIGN, 0, "every tensor starts on a cache line");
            for rank in 0..3 {
                for element in layout.runs(rank).flatten() {
                    let bytes = &view[element * elem_bytes..(element + 1) * elem_bytes];
                    assert!(bytes.iter().all(|&byte| byte == 16 * rank as u8 + tensor as u8));
                }
            }
        }
    }

    #[test]
    fn a_block_is_packed_in_the_order_of_its_elements() {
        let layout = ShardLayout::new(&[2, 5], 1, 2);
        let block = Arc::new(SharedTensors::block(1, [(layout, 1)]));
        block.fill(1, |_, elements, target| {
            target.write_copy_of_slice(&elements.map(|element| element as u8).collect::<Vec<u8>>())
        });
        assert_eq!(block.views()[0][..], [3, 4, 8, 9]);
    }

    #[test]
    fn blocks_are_copied_run_by_run_to_where_their_elements_belong() {
        let tensors = [(ShardLayout::new(&[2, 5], 1, 2), 1), (ShardLayout::new(&[3], 0, 2), 2)];
        let shared = SharedTensors::whole(None, 2, tensors);
        shared.copy(1, [&[3, 4, 8, 9][..], &[14, 15]]);
        shared.copy(0, [&[0, 1, 2, 5, 6, 7][..], &[10, 11, 12, 13]]);
        let views = shared.views();
        assert_eq!(views[0][..], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
        assert_eq!(views[1][..], [10, 11, 12, 13, 14, 15]);
    }

    #[test]
    fn a_tensor_lives_until_its_last_view_is_dropped_and_no_longer() {
        let layouts = [(ShardLayout::new(&[3], 0, 1), 1), (ShardLayout::new(&[2], 0, 1), 1)];
        let shared = SharedTensors::whole(None, 1, layouts);
        write_rank(&shared, 0);
        let mut views = shared.views();
        let memory: Vec<_> = shared.tensors.iter().map(|tensor| Arc::downgrade(&tensor.memory)).collect();
        drop(shared);
        let slice = views.remove(1).slice(1..);
        drop(views);
        assert_eq!(slice[..], [1]);
        assert!(memory[0].upgrade().is_none(), "its neighbour does not keep it");
        assert!(memory[1].upgrade().is_some());
        drop(slice);
        assert!(memory[1].upgrade().is_none(), "freed with the last view");
    }

    #[test]
    #[should_panic(expected = "all ranks fill before anyone reads")]
    fn a_view_before_the_last_fill_is_refused() {
        let shared = Arc::new(SharedTensors::whole(None, 2, [(ShardLayout::new(&[4], 0, 2), 4)]));
        write_rank(&shared, 0);
        shared.views();
    }

    #[test]
    #[should_panic(expected = "a rank fills its blocks once")]
    fn a_second_fill_is_refused() {
        let shared = SharedTensors::whole(None, 2, [(ShardLayout::new(&[4], 0, 2), 4)]);
        write_rank(&shared, 0);
        write_rank(&shared, 0);
    }
}
