//! Tensors in memory of a host: filled in blocks by its ranks and from other hosts, then read in place by all.

use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use super::super::CommError;
use super::super::placed::block_bytes;
use super::super::shared::{PIECE_BYTES, Piece, WHOLE_RUNS, from_blocks, pieces};
use super::heap::Held;
use super::network::{Payload, Span};
use crate::ShardLayout;

/// Tensors in memory of this host, as one rank fills and reads them.
pub(super) struct Output {
    pub(super) tensors: Vec<(ShardLayout, usize)>,
    pub(super) held: Vec<Arc<Held>>,
}

/// Writes some elements of a part: see [`SharedTensors::fill`](super::super::shared::SharedTensors::fill).
pub(super) type Fill<'f> =
    dyn for<'a> FnMut(usize, Range<usize>, &'a mut [MaybeUninit<u8>]) -> Result<&'a mut [u8], CommError> + 'f;

impl Output {
    /// Fills the blocks of `rank`, a number of the domain.
    pub(super) fn fill(&self, rank: usize, fill: &mut Fill<'_>) -> Result<(), CommError> {
        for (piece, target) in self.targets(rank, PIECE_BYTES) {
            fill(piece.tensor, piece.elements, target)?;
        }
        Ok(())
    }

    /// Copies the blocks of `rank`, each given element after element: see
    /// [`SharedTensors::copy`](super::super::shared::SharedTensors::copy).
    pub(super) fn copy<'b>(&self, rank: usize, blocks: impl IntoIterator<Item = &'b [u8]>) {
        let mut next = from_blocks(blocks);
        for (piece, target) in self.targets(rank, WHOLE_RUNS) {
            next(piece.tensor, target);
        }
    }

    /// Where the blocks of `rank` belong, which is this one: piece by piece, once.
    fn targets(&self, rank: usize, most_bytes: usize) -> impl Iterator<Item = (Piece, &mut [MaybeUninit<u8>])> {
        pieces(self.tensors.iter().cloned(), rank, most_bytes).map(|piece| {
            let held = &self.held[piece.tensor];
            assert!(piece.first_byte + piece.num_bytes <= held.len(), "a run lies in its tensor");
            // SAFETY: Blocks of different ranks are disjoint, each is filled by its own rank, once, with initialised bytes,
            // and nobody reads before all have told that they are done.
            let target = unsafe { held.arena().uninit_mut(held.offset() + piece.first_byte, piece.num_bytes) };
            (piece, target)
        })
    }

    /// The blocks of some ranks, to be sent or received.
    pub(super) fn payload(&self, ranks: &[usize]) -> Payload {
        let spans = self.tensors.iter().zip(&self.held).flat_map(|((layout, elem_bytes), held)| {
            let span = move |run: Range<usize>| Span {
                start: held.arena().at(held.offset() + run.start * elem_bytes, run.len() * elem_bytes).as_ptr(),
                len: run.len() * elem_bytes,
            };
            ranks.iter().flat_map(|&rank| layout.runs(rank)).map(span)
        });
        // SAFETY: The blocks are held. They are sent once they are filled, and received before anybody reads them.
        unsafe { Payload::new(spans, self.held.clone()) }
    }
}

/// One tensor in memory of this host, in which each rank places its block.
#[derive(Clone, Debug)]
pub(crate) struct PlacedInProcesses {
    layout: ShardLayout,
    elem_bytes: usize,
    held: Arc<Held>,
}

impl PlacedInProcesses {
    /// Each tensor by itself.
    pub(super) fn of(output: Output) -> impl Iterator<Item = Self> {
        let tensors = output.tensors.into_iter().zip(output.held);
        tensors.map(|((layout, elem_bytes), held)| Self { layout, elem_bytes, held })
    }

    /// The block of `rank`.
    ///
    /// # Safety
    /// The rank has filled it.
    pub(super) unsafe fn block(&self, rank: usize) -> Bytes {
        // SAFETY: The same promise.
        unsafe { view_of(self.held.clone(), block_bytes(&self.layout, rank, self.elem_bytes)) }
    }

    /// The whole tensor.
    ///
    /// # Safety
    /// All ranks have filled their blocks.
    pub(super) unsafe fn whole(&self) -> Bytes {
        // SAFETY: The same promise.
        unsafe { view(self.held.clone()) }
    }
}

/// # Safety
/// The block is complete, and nobody writes it while it is held.
pub(super) unsafe fn view(held: Arc<Held>) -> Bytes {
    let bytes = 0..held.len();
    // SAFETY: The same promise.
    unsafe { view_of(held, bytes) }
}

/// # Safety
/// These bytes of the block are complete, and nobody writes them while it is held.
unsafe fn view_of(held: Arc<Held>, bytes: Range<usize>) -> Bytes {
    struct View(Arc<Held>, Range<usize>);
    impl AsRef<[u8]> for View {
        fn as_ref(&self) -> &[u8] {
            let Self(held, bytes) = self;
            // SAFETY: Vouched for by whoever made the view.
            unsafe { held.arena().bytes(held.offset() + bytes.start, bytes.len()) }
        }
    }
    Bytes::from_owner(View(held, bytes))
}
