//! The sum of the squares of a block's elements, in double precision and an order that the block alone decides: whether it is
//! added up at once or while it comes into being, the bits are the same.

use fsdp_core::Dtype;
use half::{bf16, f16};
use multiversion::multiversion;

/// Sums side by side, which vectorises. Element `i` of a block is added to sum `i` modulo this.
const LANES: usize = 16;

/// The squares of the elements of a block that have been seen so far.
#[derive(Clone, Debug)]
pub(crate) struct Squares {
    dtype: Dtype,
    lanes: [f64; LANES],
    /// The lane of the next element.
    next: usize,
}

impl Squares {
    /// Of a block in which nothing has been seen.
    pub(crate) fn new(dtype: Dtype) -> Self {
        Self { dtype, lanes: [0.0; LANES], next: 0 }
    }

    /// Sees the next elements of the block.
    pub(crate) fn see(&mut self, bytes: &[u8]) {
        // A piece seldom begins within a round.
        let ahead = (LANES - self.next) % LANES * self.dtype.size_bytes();
        let (ahead, bytes) = bytes.split_at(ahead.min(bytes.len()));
        add_squares(ahead, self.dtype, &mut self.lanes[self.next..]);
        add_squares(bytes, self.dtype, &mut self.lanes);
        self.next = (self.next + (ahead.len() + bytes.len()) / self.dtype.size_bytes()) % LANES;
    }

    /// Their sum. NaN if any element is.
    pub(crate) fn sum(&self) -> f64 {
        self.lanes.iter().sum()
    }
}

/// Of a whole block.
pub(crate) fn sum_of_squares(block: &[u8], dtype: Dtype) -> f64 {
    let mut squares = Squares::new(dtype);
    squares.see(block);
    squares.sum()
}

/// Adds the squares to the lanes, beginning with the first; at most as many where there are fewer than [`LANES`].
#[multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2"))]
fn add_squares(bytes: &[u8], dtype: Dtype, lanes: &mut [f64]) {
    match dtype {
        Dtype::F32 => add_all(bytes.as_chunks::<4>().0, lanes, |chunk| f64::from(f32::from_ne_bytes(chunk))),
        Dtype::Bf16 => add_all(bytes.as_chunks::<2>().0, lanes, |chunk| bf16::from_ne_bytes(chunk).to_f64()),
        Dtype::F16 => add_all(bytes.as_chunks::<2>().0, lanes, |chunk| f16::from_ne_bytes(chunk).to_f64()),
        Dtype::F64 => add_all(bytes.as_chunks::<8>().0, lanes, f64::from_ne_bytes),
    }
}

/// Inlined, so that it is compiled for each of the caller's instruction sets.
#[inline(always)]
fn add_all<const N: usize>(elements: &[[u8; N]], lanes: &mut [f64], value: impl Fn([u8; N]) -> f64) {
    let add = |lanes: &mut [f64], elements: &[[u8; N]]| {
        for (lane, &element) in lanes.iter_mut().zip(elements) {
            let value = value(element);
            *lane += value * value;
        }
    };
    let (rounds, rest) = elements.as_chunks::<LANES>();
    // In registers, as a reference that may be shorter would not be.
    if let Some(all) = lanes.first_chunk_mut::<LANES>() {
        let mut sums = *all;
        rounds.iter().for_each(|round| add(&mut sums, round));
        *all = sums;
    }
    add(lanes, rest);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(values: impl IntoIterator<Item = f32>) -> Vec<u8> {
        values.into_iter().flat_map(f32::to_ne_bytes).collect()
    }

    #[test]
    fn squares_of_all_elements_are_added() {
        assert_eq!(sum_of_squares(&bytes([1.0, 2.0, 3.0, 4.0, 5.0]), Dtype::F32), 55.0);
        assert_eq!(sum_of_squares(&[], Dtype::F64), 0.0);
        assert!(sum_of_squares(&bytes([1.0, f32::NAN]), Dtype::F32).is_nan());
    }

    #[test]
    fn a_block_has_one_sum_however_it_is_cut_into_pieces() {
        let block = bytes((0..1000).map(|i| (i as f32 * 0.37).sin()));
        for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16, Dtype::F64] {
            let expected = sum_of_squares(&block, dtype);
            for piece_len in [1, 3, 7, 15, 16, 17, 100, 128, 999] {
                let mut squares = Squares::new(dtype);
                block.chunks(piece_len * dtype.size_bytes()).for_each(|piece| squares.see(piece));
                let sum = squares.sum();
                assert!(
                    sum.to_bits() == expected.to_bits(),
                    "{dtype:?} in pieces of {piece_len}: {sum}, not {expected}"
                );
            }
        }
    }
}
