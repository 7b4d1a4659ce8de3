//! Adds the ranks' values of one range of elements, in the order of ranks. See [Note: Order of a sum].

use std::mem::MaybeUninit;

use crate::Dtype;

use super::Reduce;
use super::shared::PIECE_BYTES;

/// Writes `scale * ((s0 + s1) + s2 ...)` over `target` and returns it, initialised.
///
/// Sources and target have the same length, at most [`PIECE_BYTES`], and need not be aligned. There is at least one
/// source.
pub(crate) fn write_sum<'a, 's>(
    dtype: Dtype,
    sources: impl Iterator<Item = &'s [u8]>,
    reduce: Reduce,
    target: &'a mut [MaybeUninit<u8>],
) -> &'a mut [u8] {
    match dtype {
        Dtype::F32 => write_sum_of::<f32, 4, { PIECE_BYTES / 4 }>(sources, reduce.scale as f32, target),
        Dtype::F64 => write_sum_of::<f64, 8, { PIECE_BYTES / 8 }>(sources, reduce.scale, target),
    }
}

/// An element type of `BYTES` bytes that can be added.
trait Element<const BYTES: usize>: Copy + Default + PartialEq + std::ops::AddAssign + std::ops::MulAssign {
    const ONE: Self;
    fn from_bytes(bytes: [u8; BYTES]) -> Self;
    fn to_bytes(self) -> [u8; BYTES];
}

impl Element<4> for f32 {
    const ONE: Self = 1.0;
    fn from_bytes(bytes: [u8; 4]) -> Self {
        f32::from_ne_bytes(bytes)
    }
    fn to_bytes(self) -> [u8; 4] {
        self.to_ne_bytes()
    }
}

impl Element<8> for f64 {
    const ONE: Self = 1.0;
    fn from_bytes(bytes: [u8; 8]) -> Self {
        f64::from_ne_bytes(bytes)
    }
    fn to_bytes(self) -> [u8; 8] {
        self.to_ne_bytes()
    }
}

/// The running sum stays in the first-level cache, so each source is read once and the target written once.
fn write_sum_of<'a, 's, T: Element<BYTES>, const BYTES: usize, const PIECE_LEN: usize>(
    mut sources: impl Iterator<Item = &'s [u8]>,
    scale: T,
    target: &'a mut [MaybeUninit<u8>],
) -> &'a mut [u8] {
    let mut sums = [T::default(); PIECE_LEN];
    let sums = &mut sums[..target.len() / BYTES];
    let first = sources.next().expect("a sum has at least one rank");
    for (sum, bytes) in sums.iter_mut().zip(elements::<BYTES>(first, target.len())) {
        *sum = T::from_bytes(*bytes);
    }
    for source in sources {
        for (sum, bytes) in sums.iter_mut().zip(elements::<BYTES>(source, target.len())) {
            *sum += T::from_bytes(*bytes);
        }
    }
    if scale != T::ONE {
        sums.iter_mut().for_each(|sum| *sum *= scale);
    }
    let mut bytes = [[0; BYTES]; PIECE_LEN];
    let bytes = &mut bytes[..sums.len()];
    for (bytes, sum) in bytes.iter_mut().zip(sums.iter()) {
        *bytes = sum.to_bytes();
    }
    target.write_copy_of_slice(bytes.as_flattened())
}

fn elements<const BYTES: usize>(source: &[u8], expected_bytes: usize) -> &[[u8; BYTES]] {
    assert_eq!(source.len(), expected_bytes, "every rank's range has the same length");
    source.as_chunks().0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum_f32(sources: &[Vec<f32>], scale: f64) -> Vec<f32> {
        let bytes: Vec<Vec<u8>> =
            sources.iter().map(|values| values.iter().flat_map(|v| v.to_ne_bytes()).collect()).collect();
        let mut target = vec![MaybeUninit::uninit(); bytes[0].len()];
        let reduce = Reduce { scale };
        let written = write_sum(Dtype::F32, bytes.iter().map(Vec::as_slice), reduce, &mut target);
        written.as_chunks().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect()
    }

    #[test]
    fn values_are_added_in_the_order_of_ranks() {
        // (1e8 + 1) - 1e8 loses the 1; any order that cancels the large values first keeps it.
        assert_eq!(sum_f32(&[vec![1e8], vec![1.0], vec![-1e8]], 1.0), [0.0]);
        assert_eq!(sum_f32(&[vec![1e8], vec![-1e8], vec![1.0]], 1.0), [1.0]);
    }

    #[test]
    fn the_scale_is_applied_to_the_sum_and_not_to_each_value() {
        let third = 1.0_f32 / 3.0;
        let expected = (0.1_f32 + 0.2 + 0.3) * third;
        assert_eq!(sum_f32(&[vec![0.1], vec![0.2], vec![0.3]], 1.0 / 3.0), [expected]);
    }

    #[test]
    fn not_a_number_and_negative_zero_pass_through() {
        assert_eq!(sum_f32(&[vec![-0.0]], 1.0)[0].to_bits(), (-0.0_f32).to_bits());
        assert!(sum_f32(&[vec![f32::NAN], vec![1.0]], 0.5)[0].is_nan());
    }
}
