//! One allocation that several ranks fill at once, each its own blocks, without a lock.
//!
//! Invariants, on which every `unsafe` here rests:
//! 1. the runs of different ranks of one [`ShardLayout`] are disjoint, and together cover the tensor once (tested there);
//! 2. each rank fills at most once, enforced by its flag, and a block has one rank only;
//! 3. nothing reads before every rank has filled, enforced by the count.

use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use bytes::Bytes;

use super::pool::{ALIGN, Block, Pool};
use crate::ShardLayout;

/// Largest piece that is filled at once: it stays in the first-level cache while the ranks' values are added.
pub(crate) const PIECE_BYTES: usize = 8 * 1024;

/// Tensors side by side in one allocation, written by all ranks, then read by all.
#[derive(Debug)]
pub(crate) struct SharedTensors {
    memory: Block,
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
    bytes: Range<usize>,
}

impl SharedTensors {
    /// Allocates whole tensors, which `num_ranks` ranks fill. Each is given by its layout, of `num_ranks` blocks, and
    /// the size of an element.
    pub(crate) fn whole(
        pool: &Arc<Pool>,
        num_ranks: usize,
        tensors: impl IntoIterator<Item = (ShardLayout, usize)>,
    ) -> Self {
        Self::new(pool, num_ranks, None, tensors)
    }

    /// Allocates the blocks of one rank, which it fills alone.
    pub(crate) fn block(
        pool: &Arc<Pool>,
        rank: usize,
        tensors: impl IntoIterator<Item = (ShardLayout, usize)>,
    ) -> Self {
        Self::new(pool, rank + 1, Some(rank), tensors)
    }

    fn new(
        pool: &Arc<Pool>,
        num_flags: usize,
        owner: Option<usize>,
        tensors: impl IntoIterator<Item = (ShardLayout, usize)>,
    ) -> Self {
        let mut end = 0;
        let tensors: Vec<Tensor> = tensors
            .into_iter()
            .map(|(layout, elem_bytes)| {
                let start = end;
                let len = match owner {
                    Some(rank) => layout.shard_len(rank),
                    None => {
                        assert_eq!(layout.num_shards(), num_flags, "callers check layouts against the world size");
                        layout.full_len()
                    }
                };
                let bytes = len.checked_mul(elem_bytes).expect("a tensor's bytes are counted in a usize");
                end = start + bytes.next_multiple_of(ALIGN);
                Tensor { layout, elem_bytes, bytes: start..start + bytes }
            })
            .collect();
        let begun = (0..num_flags).map(|_| AtomicBool::new(false)).collect();
        Self { memory: pool.take(end), tensors, owner, begun, filled: AtomicUsize::new(0) }
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
        assert!(self.owner.is_none_or(|owner| owner == rank), "a block is filled by its rank");
        assert!(!self.begun[rank].swap(true, Ordering::Relaxed), "a rank fills its blocks once");
        for (index, tensor) in self.tensors.iter().enumerate() {
            let piece_len = (PIECE_BYTES / tensor.elem_bytes.max(1)).max(1);
            let mut num_filled = 0;
            for run in tensor.layout.runs(rank) {
                for start in run.clone().step_by(piece_len) {
                    let piece = start..(start + piece_len).min(run.end);
                    let first = if self.owner.is_some() { num_filled } else { piece.start };
                    num_filled += piece.len();
                    let offset = tensor.bytes.start + first * tensor.elem_bytes;
                    let len = piece.len() * tensor.elem_bytes;
                    assert!(offset + len <= tensor.bytes.end, "a run lies in its tensor");
                    // SAFETY: The piece lies in the tensor, and the tensor in the allocation. No other reference to
                    // these bytes exists: other ranks own other runs, this rank is here once, and views are made
                    // only after all ranks have filled (invariants 1 to 3).
                    let target = unsafe {
                        std::slice::from_raw_parts_mut(
                            self.memory.start().as_ptr().add(offset).cast::<MaybeUninit<u8>>(),
                            len,
                        )
                    };
                    let written = fill(index, piece, target);
                    let expected = self.memory.start().as_ptr().wrapping_add(offset).cast_const();
                    assert!(written.len() == len && written.as_ptr() == expected, "`fill` returns what it was given");
                }
            }
        }
        self.filled.fetch_add(1, Ordering::Release);
    }

    /// The tensors, each a view that keeps the allocation alive.
    ///
    /// # Panics
    /// If a rank has not filled its blocks.
    pub(crate) fn views(self: &Arc<Self>) -> Vec<Bytes> {
        let num_writers = if self.owner.is_some() { 1 } else { self.begun.len() };
        assert_eq!(self.filled.load(Ordering::Acquire), num_writers, "all ranks fill before anyone reads");
        (0..self.tensors.len()).map(|tensor| Bytes::from_owner(View { shared: self.clone(), tensor })).collect()
    }
}

/// Exists only once all ranks have filled: see [`SharedTensors::views`].
struct View {
    shared: Arc<SharedTensors>,
    tensor: usize,
}

impl AsRef<[u8]> for View {
    fn as_ref(&self) -> &[u8] {
        let bytes = &self.shared.tensors[self.tensor].bytes;
        // SAFETY: Every byte of the tensor is initialised, since its blocks cover it (invariant 1) and all were
        // filled before this view was made; nothing writes any more (invariants 2 and 3).
        unsafe { std::slice::from_raw_parts(self.shared.memory.start().as_ptr().add(bytes.start), bytes.len()) }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    fn write_rank(shared: &SharedTensors, rank: usize) {
        shared.fill(rank, |tensor, piece, target| {
            let value = 16 * rank as u8 + tensor as u8;
            assert_eq!(target.len() % piece.len(), 0);
            target.write_copy_of_slice(&vec![value; target.len()])
        });
    }

    #[test]
    fn ranks_fill_disjoint_blocks_of_one_allocation_at_the_same_time() {
        let layouts = [
            (ShardLayout::new(&[7, 3], 0, 3), 4),
            (ShardLayout::new(&[2, 5, 2], 1, 3), 2),
            (ShardLayout::new(&[0, 3], 0, 3), 4),
            (ShardLayout::new(&[], 0, 3), 8),
            (ShardLayout::new(&[9000], 0, 3), 4),
        ];
        let shared = Arc::new(SharedTensors::whole(&Arc::default(), 3, layouts.clone()));
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
        let block = Arc::new(SharedTensors::block(&Arc::default(), 1, [(layout, 1)]));
        block.fill(1, |_, elements, target| {
            target.write_copy_of_slice(&elements.map(|element| element as u8).collect::<Vec<u8>>())
        });
        assert_eq!(block.views()[0][..], [3, 4, 8, 9]);
    }

    #[test]
    fn the_allocation_lives_until_its_last_view_is_dropped() {
        let shared = Arc::new(SharedTensors::whole(
            &Arc::default(),
            1,
            [(ShardLayout::new(&[3], 0, 1), 1), (ShardLayout::new(&[2], 0, 1), 1)],
        ));
        write_rank(&shared, 0);
        let mut views = shared.views();
        let weak = Arc::downgrade(&shared);
        drop(shared);
        let slice = views.remove(1).slice(1..);
        drop(views);
        assert_eq!(slice[..], [1]);
        assert!(weak.upgrade().is_some());
        drop(slice);
        assert!(weak.upgrade().is_none(), "freed with the last view");
    }

    #[test]
    #[should_panic(expected = "all ranks fill before anyone reads")]
    fn a_view_before_the_last_fill_is_refused() {
        let shared = Arc::new(SharedTensors::whole(&Arc::default(), 2, [(ShardLayout::new(&[4], 0, 2), 4)]));
        write_rank(&shared, 0);
        shared.views();
    }

    #[test]
    #[should_panic(expected = "a rank fills its blocks once")]
    fn a_second_fill_is_refused() {
        let shared = SharedTensors::whole(&Arc::default(), 2, [(ShardLayout::new(&[4], 0, 2), 4)]);
        write_rank(&shared, 0);
        write_rank(&shared, 0);
    }
}
