//! Tensors in memory of a host: filled in blocks by its ranks and from other hosts, then read in place by all.

use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use super::super::CommError;
use super::super::shared::{PIECE_BYTES, pieces};
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
        for piece in pieces(self.tensors.iter().cloned(), rank, PIECE_BYTES) {
            let held = &self.held[piece.tensor];
            assert!(piece.first_byte + piece.num_bytes <= held.len(), "a run lies in its tensor");
            // SAFETY: Blocks of different ranks are disjoint, each is filled by its own rank, once, and nobody reads before
            // all have told that they are done.
            let target = unsafe { held.arena().bytes_mut(held.offset() + piece.first_byte, piece.num_bytes) };
            // SAFETY: Initialised bytes may be written as if they were not, and `fill` returns them initialised.
            let target = unsafe { &mut *(std::ptr::from_mut(target) as *mut [MaybeUninit<u8>]) };
            fill(piece.tensor, piece.elements, target)?;
        }
        Ok(())
    }

    /// Copies the blocks of `rank`, each given element after element, as long runs as there are: so it is the system's copy that
    /// decides whether they pass the cache by.
    pub(super) fn copy<'b>(&self, rank: usize, blocks: impl Iterator<Item = &'b [u8]>) {
        for (((layout, elem_bytes), held), block) in self.tensors.iter().zip(&self.held).zip(blocks) {
            let mut rest = block;
            for run in layout.runs(rank) {
                let (offset, len) = (run.start * elem_bytes, run.len() * elem_bytes);
                assert!(offset + len <= held.len(), "a run lies in its tensor");
                // SAFETY: As in `fill`.
                let target = unsafe { held.arena().bytes_mut(held.offset() + offset, len) };
                let (block, after) = rest.split_at(len);
                target.copy_from_slice(block);
                rest = after;
            }
        }
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

/// # Safety
/// The block is complete, and nobody writes it while it is held.
pub(super) unsafe fn view(held: Arc<Held>) -> Bytes {
    struct View(Arc<Held>);
    impl AsRef<[u8]> for View {
        fn as_ref(&self) -> &[u8] {
            // SAFETY: Vouched for by whoever made the view.
            unsafe { self.0.arena().bytes(self.0.offset(), self.0.len()) }
        }
    }
    Bytes::from_owner(View(held))
}
