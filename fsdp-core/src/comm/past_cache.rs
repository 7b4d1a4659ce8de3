//! Copies that read several pages at once, and stores that go past the caches.
//!
//! An ordinary store of a line that is not in a cache reads it first. Where a sum of two ranks is written, that is a quarter
//! of all traffic to memory: sums of 64 MiB and more are a seventh faster without. In a copy it is a third.
//!
//! A core fetches ahead within a page and stops at its end. A copy that goes through several pages side by side is a quarter
//! faster than one page after the other, where what is read comes from memory.

use std::mem::MaybeUninit;

/// How results are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Store {
    /// As usual.
    Cached,
    /// Past the caches, where the processor can. Another thread may read them after a [`fence`] and whatever else orders
    /// the two threads.
    Streamed,
}

/// Sums over so many bytes are streamed. Smaller ones are soon read again, by the optimizer, and may still be in a cache.
const STREAMED_SUM_BYTES: usize = 32 << 20;

/// Gathered tensors of so many bytes are streamed: no core's own cache would hold them until they are read.
const STREAMED_GATHER_BYTES: usize = 4 << 20;

/// What a copy goes through side by side.
const NUM_PAGES: usize = 4;
const PAGE_BYTES: usize = 4096;

/// What is taken of each page in turn: two lines of a cache.
pub(super) const STRIP_BYTES: usize = 128;

impl Store {
    /// What suits a sum over `num_bytes` of each rank.
    pub(crate) fn of_sum(num_bytes: usize) -> Self {
        if num_bytes < STREAMED_SUM_BYTES { Self::Cached } else { Self::Streamed }
    }

    /// What suits a gather of `num_bytes` of all ranks.
    pub(crate) fn of_gather(num_bytes: usize) -> Self {
        if num_bytes < STREAMED_GATHER_BYTES { Self::Cached } else { Self::Streamed }
    }

    /// Copies `source` to `target`, which is as long, and returns it.
    pub(crate) fn copy<'a>(self, source: &[u8], target: &'a mut [MaybeUninit<u8>]) -> &'a mut [u8] {
        assert_eq!(source.len(), target.len(), "a copy is as long as what is copied");
        // Up to a line, where stores may be streamed.
        let head = target.as_ptr().align_offset(64).min(target.len());
        let (source_head, source_body) = source.split_at(head);
        let (target_head, target_body) = target.split_at_mut(head);
        target_head.write_copy_of_slice(source_head);
        let block_bytes = NUM_PAGES * PAGE_BYTES;
        let blocks = source_body.chunks(block_bytes).zip(target_body.chunks_mut(block_bytes));
        for (source, target) in blocks {
            match source.len() == block_bytes {
                true => self.copy_pages(source, target),
                false => self.copy_strips(source, target),
            }
        }
        // SAFETY: Head and blocks are all of it, and each was written.
        unsafe { target.assume_init_mut() }
    }

    fn copy_pages(self, source: &[u8], target: &mut [MaybeUninit<u8>]) {
        for at in (0..PAGE_BYTES).step_by(STRIP_BYTES) {
            for page in (0..NUM_PAGES * PAGE_BYTES).step_by(PAGE_BYTES) {
                let strip = page + at..page + at + STRIP_BYTES;
                self.copy_strips(&source[strip.clone()], &mut target[strip]);
            }
        }
    }

    /// One after the other. The target begins at a line.
    #[inline]
    fn copy_strips(self, source: &[u8], target: &mut [MaybeUninit<u8>]) {
        match self {
            Self::Streamed => stream(source, target),
            Self::Cached => drop(target.write_copy_of_slice(source)),
        }
    }
}

/// Streamed stores of this thread come before its later stores, for all other threads.
#[inline]
pub(crate) fn fence() {
    // SAFETY: The instruction belongs to every processor of this architecture, and changes nothing but the order of stores.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// The target begins at a line.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
fn stream(source: &[u8], target: &mut [MaybeUninit<u8>]) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};

    const LINE: usize = size_of::<__m128i>();
    let (sources, rest) = source.as_chunks::<LINE>();
    let (targets, target_rest) = target.as_chunks_mut::<LINE>();
    assert!(targets.as_ptr().cast::<__m128i>().is_aligned(), "the target begins at a line");
    for (source, target) in sources.iter().zip(targets) {
        // SAFETY: Both are as long as the register, the load needs no alignment, and the target has it: its first chunk is
        // aligned, and all are as long as their alignment. The instructions belong to every processor of this architecture.
        unsafe { _mm_stream_si128(target.as_mut_ptr().cast(), _mm_loadu_si128(source.as_ptr().cast())) }
    }
    target_rest.write_copy_of_slice(rest);
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
fn stream(source: &[u8], target: &mut [MaybeUninit<u8>]) {
    target.write_copy_of_slice(source);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_a_copy_at_any_alignment_and_length_however_it_is_stored() {
        let source: Vec<u8> = (0..70_000_u32).map(|index| (index * 7 % 251) as u8).collect();
        for store in [Store::Cached, Store::Streamed] {
            for offset in [0, 1, 8, 16, 48] {
                for len in [0, 1, 15, 16, 17, 64, 160, 16_383, 16_384 + 63, 3 * 16_384 + 5_000] {
                    let mut target = vec![MaybeUninit::new(255u8); 60_000];
                    let from = &source[offset / 2..offset / 2 + len];
                    assert_eq!(store.copy(from, &mut target[offset..offset + len]), from);
                    fence();
                    // SAFETY: Initialised from the beginning.
                    let byte = |byte: &MaybeUninit<u8>| unsafe { byte.assume_init() };
                    assert!(target[..offset].iter().chain(&target[offset + len..]).all(|other| byte(other) == 255));
                }
            }
        }
    }
}
