//! Stores that go past the caches, for results that no cache would hold until they are read.
//!
//! An ordinary store of a line that is not in a cache reads it first. Where a sum of two ranks is written, that is a quarter
//! of all traffic to memory: sums of 64 MiB and more are a seventh faster without.

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
const STREAMED_BYTES: usize = 32 << 20;

impl Store {
    /// What suits an operation over `num_bytes` of each rank.
    pub(crate) fn of(num_bytes: usize) -> Self {
        if num_bytes < STREAMED_BYTES { Self::Cached } else { Self::Streamed }
    }

    /// Copies `source` to `target`, which is as long, and returns it.
    pub(crate) fn copy<'a>(self, source: &[u8], target: &'a mut [MaybeUninit<u8>]) -> &'a mut [u8] {
        assert_eq!(source.len(), target.len(), "a copy is as long as what is copied");
        match self {
            Self::Streamed => streamed(source, target),
            Self::Cached => target.write_copy_of_slice(source),
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

#[cfg(all(target_arch = "x86_64", not(miri)))]
fn streamed<'a>(source: &[u8], target: &'a mut [MaybeUninit<u8>]) -> &'a mut [u8] {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};

    const LINE: usize = size_of::<__m128i>();
    let (sources, rest) = source.as_chunks::<LINE>();
    if !rest.is_empty() || !target.as_ptr().cast::<__m128i>().is_aligned() {
        return target.write_copy_of_slice(source);
    }
    for (source, target) in sources.iter().zip(target.as_chunks_mut::<LINE>().0) {
        // SAFETY: Both are as long as the register, the load needs no alignment, and the target has it: its first chunk is
        // aligned, and all are as long as their alignment. The instructions belong to every processor of this architecture.
        unsafe { _mm_stream_si128(target.as_mut_ptr().cast(), _mm_loadu_si128(source.as_ptr().cast())) }
    }
    // SAFETY: All chunks are written, and there is no rest.
    unsafe { target.assume_init_mut() }
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
fn streamed<'a>(source: &[u8], target: &'a mut [MaybeUninit<u8>]) -> &'a mut [u8] {
    target.write_copy_of_slice(source)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_streamed_copy_is_a_copy_at_any_alignment_and_length() {
        let source: Vec<u8> = (0..=255).collect();
        for offset in [0, 1, 8, 16, 48] {
            for len in [0, 1, 15, 16, 17, 64, 160] {
                let mut target = [MaybeUninit::new(7u8); 256];
                assert_eq!(Store::Streamed.copy(&source[..len], &mut target[offset..offset + len]), &source[..len]);
                fence();
                // SAFETY: Initialised from the beginning.
                let all = target.map(|byte| unsafe { byte.assume_init() });
                assert!(all[..offset].iter().chain(&all[offset + len..]).all(|&byte| byte == 7));
            }
        }
    }
}
