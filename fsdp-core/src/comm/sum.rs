//! Adds the ranks' values of one range of elements, in the order of ranks. See [Note: Order of a sum].

use std::mem::MaybeUninit;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use multiversion::multiversion;

use crate::Dtype;

use super::Reduce;
use super::shared::PIECE_BYTES;

/// Writes `scale * ((s0 + s1) + s2 ...)` over `target` and returns it, initialised. Two-byte types are added and scaled in
/// float32, and rounded once.
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
        Dtype::Bf16 => write_half_sum_of::<bf16>(sources, reduce.scale as f32, target),
        Dtype::F16 => write_half_sum_of::<f16>(sources, reduce.scale as f32, target),
        Dtype::F32 | Dtype::F64 => write_full_sum(dtype, sources, reduce.scale, target),
    }
}

/// An element type of `BYTES` bytes that can be added.
trait Element<const BYTES: usize> {
    fn from_bytes(bytes: [u8; BYTES]) -> Self;
    fn to_bytes(self) -> [u8; BYTES];
}

impl Element<4> for f32 {
    #[inline(always)]
    fn from_bytes(bytes: [u8; 4]) -> Self {
        f32::from_ne_bytes(bytes)
    }
    #[inline(always)]
    fn to_bytes(self) -> [u8; 4] {
        self.to_ne_bytes()
    }
}

impl Element<8> for f64 {
    #[inline(always)]
    fn from_bytes(bytes: [u8; 8]) -> Self {
        f64::from_ne_bytes(bytes)
    }
    #[inline(always)]
    fn to_bytes(self) -> [u8; 8] {
        self.to_ne_bytes()
    }
}

/// The first two sources are added into the target in one pass, so that a sum of two ranks goes through memory once; the
/// running sum of more stays in the first-level cache. The last addition and the scaling are one pass.
fn write_full_sum<'a, 's>(
    dtype: Dtype,
    mut sources: impl Iterator<Item = &'s [u8]>,
    scale: f64,
    target: &'a mut [MaybeUninit<u8>],
) -> &'a mut [u8] {
    let len_bytes = target.len();
    let mut next = || {
        let source = sources.next()?;
        assert_eq!(source.len(), len_bytes, "every rank's range has the same length");
        Some(source)
    };
    let first = next().expect("a sum has at least one rank");
    let Some(second) = next() else {
        let sums = target.write_copy_of_slice(first);
        scale_all(dtype, scale, sums);
        return sums;
    };
    let mut following = next();
    let sums = write_sum_of_two(dtype, [first, second], if following.is_none() { scale } else { 1.0 }, target);
    while let Some(source) = following {
        following = next();
        add(dtype, source, if following.is_none() { scale } else { 1.0 }, sums);
    }
    sums
}

/// Writes `scale * (first + second)`.
#[multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2"))]
fn write_sum_of_two<'a>(
    dtype: Dtype,
    sources: [&[u8]; 2],
    scale: f64,
    target: &'a mut [MaybeUninit<u8>],
) -> &'a mut [u8] {
    match dtype {
        Dtype::F64 => write_each(sources, target, |first: f64, second| (first + second) * scale),
        _ => write_each(sources, target, |first: f32, second| (first + second) * scale as f32),
    }
}

/// Inlined, so that it is compiled for each of the caller's instruction sets.
#[inline(always)]
fn write_each<'a, T: Element<BYTES>, const BYTES: usize>(
    [first, second]: [&[u8]; 2],
    target: &'a mut [MaybeUninit<u8>],
    of: impl Fn(T, T) -> T,
) -> &'a mut [u8] {
    assert!(
        target.len().is_multiple_of(BYTES) && [first.len(), second.len()] == [target.len(); 2],
        "a range has whole elements, and every rank's has the same length"
    );
    let sources = first.as_chunks().0.iter().zip(second.as_chunks().0);
    for (target, (&first, &second)) in target.as_chunks_mut::<BYTES>().0.iter_mut().zip(sources) {
        *target = of(T::from_bytes(first), T::from_bytes(second)).to_bytes().map(MaybeUninit::new);
    }
    // SAFETY: The target and the sources have whole elements, as many each, and all of them were written. A copy of one source
    // first, to which the other is added, needs no such promise and takes a third more time.
    unsafe { target.assume_init_mut() }
}

/// Makes each `sum` of `sums` to `scale * (sum + value)`.
#[multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2"))]
fn add(dtype: Dtype, source: &[u8], scale: f64, sums: &mut [u8]) {
    match dtype {
        Dtype::F64 => each(source, sums, |sum: f64, value| (sum + value) * scale),
        _ => each(source, sums, |sum: f32, value| (sum + value) * scale as f32),
    }
}

/// As [`write_each`].
#[inline(always)]
fn each<T: Element<BYTES>, const BYTES: usize>(source: &[u8], sums: &mut [u8], of: impl Fn(T, T) -> T) {
    for (sum, &value) in sums.as_chunks_mut::<BYTES>().0.iter_mut().zip(source.as_chunks().0) {
        *sum = of(T::from_bytes(*sum), T::from_bytes(value)).to_bytes();
    }
}

/// Makes each `sum` of `sums` to `scale * sum`.
fn scale_all(dtype: Dtype, scale: f64, sums: &mut [u8]) {
    match dtype {
        Dtype::F64 => {
            sums.as_chunks_mut().0.iter_mut().for_each(|sum| *sum = (f64::from_bytes(*sum) * scale).to_bytes())
        }
        _ => {
            sums.as_chunks_mut().0.iter_mut().for_each(|sum| *sum = (f32::from_bytes(*sum) * scale as f32).to_bytes());
        }
    }
}

/// A type of two bytes.
trait Half: Copy {
    const ZERO: Self;
    fn from_bytes(bytes: [u8; 2]) -> Self;
    fn to_bytes(self) -> [u8; 2];
}

impl Half for bf16 {
    const ZERO: Self = bf16::ZERO;
    fn from_bytes(bytes: [u8; 2]) -> Self {
        bf16::from_ne_bytes(bytes)
    }
    fn to_bytes(self) -> [u8; 2] {
        self.to_ne_bytes()
    }
}

impl Half for f16 {
    const ZERO: Self = f16::ZERO;
    fn from_bytes(bytes: [u8; 2]) -> Self {
        f16::from_ne_bytes(bytes)
    }
    fn to_bytes(self) -> [u8; 2] {
        self.to_ne_bytes()
    }
}

const HALVES: usize = PIECE_BYTES / 2;

fn write_half_sum_of<'a, 's, T: Half>(
    mut sources: impl Iterator<Item = &'s [u8]>,
    scale: f32,
    target: &'a mut [MaybeUninit<u8>],
) -> &'a mut [u8]
where
    [T]: HalfFloatSliceExt,
{
    let len = target.len() / 2;
    let (mut halves, mut values, mut sums) = ([T::ZERO; HALVES], [0.0; HALVES], [0.0_f32; HALVES]);
    let (halves, values, sums) = (&mut halves[..len], &mut values[..len], &mut sums[..len]);
    let load = |source: &[u8], halves: &mut [T], into: &mut [f32]| {
        let bytes = elements::<2>(source, 2 * len);
        halves.iter_mut().zip(bytes).for_each(|(half, &bytes)| *half = T::from_bytes(bytes));
        halves.convert_to_f32_slice(into);
    };
    load(sources.next().expect("a sum has at least one rank"), halves, sums);
    for source in sources {
        load(source, halves, values);
        sums.iter_mut().zip(values.iter()).for_each(|(sum, value)| *sum += value);
    }
    sums.iter_mut().for_each(|sum| *sum *= scale);
    halves.convert_from_f32_slice(sums);
    let mut bytes = [[0; 2]; HALVES];
    bytes.iter_mut().zip(halves.iter()).for_each(|(bytes, half)| *bytes = half.to_bytes());
    target.write_copy_of_slice(bytes[..len].as_flattened())
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
    fn a_sum_of_any_length_has_every_element() {
        for len in [1, 33, 100, 2047, 2048] {
            let values = |rank: usize| (0..len).map(|index| (rank * 10_000 + index) as f32).collect::<Vec<_>>();
            for world_size in [1, 2, 3, 5] {
                let sources: Vec<Vec<f32>> = (0..world_size).map(values).collect();
                let expected: Vec<f32> = (0..len).map(|index| sources.iter().map(|of| of[index]).sum()).collect();
                assert_eq!(sum_f32(&sources, 1.0), expected);
            }
        }
    }

    #[test]
    fn the_scale_is_applied_to_the_sum_and_not_to_each_value() {
        let third = 1.0_f32 / 3.0;
        let expected = (0.1_f32 + 0.2 + 0.3) * third;
        assert_eq!(sum_f32(&[vec![0.1], vec![0.2], vec![0.3]], 1.0 / 3.0), [expected]);
        assert_eq!(sum_f32(&[vec![0.1], vec![0.2]], 1.0 / 3.0), [(0.1_f32 + 0.2) * third]);
        assert_eq!(sum_f32(&[vec![0.1]], 1.0 / 3.0), [0.1_f32 * third]);
        let five = [0.1_f32, 0.2, 0.3, 0.4, 0.5];
        let expected = five.into_iter().skip(1).fold(five[0], |sum, value| sum + value) * third;
        assert_eq!(sum_f32(&five.map(|value| vec![value]), 1.0 / 3.0), [expected]);
    }

    fn sum_halves<T: Half>(dtype: Dtype, sources: &[T], scale: f64) -> T {
        let bytes: Vec<[u8; 2]> = sources.iter().map(|value| value.to_bytes()).collect();
        let mut target = vec![MaybeUninit::uninit(); 2];
        let written = write_sum(dtype, bytes.iter().map(<[u8; 2]>::as_slice), Reduce { scale }, &mut target);
        T::from_bytes([written[0], written[1]])
    }

    #[test]
    fn half_precision_is_added_in_float32_and_rounded_once() {
        // In bf16 itself 256 + 1 stays 256, however often.
        let sources = [[256.0].as_slice(), &[1.0; 8]].concat();
        let halves: Vec<_> = sources.iter().map(|&value| bf16::from_f32(value)).collect();
        assert_eq!(sum_halves(Dtype::Bf16, &halves, 1.0).to_f32(), 264.0);
        // A sum beyond the range of f16 whose mean is within.
        let halves = [f16::from_f32(60000.0); 4];
        assert_eq!(sum_halves(Dtype::F16, &halves, 0.25), halves[0]);
        assert_eq!(sum_halves(Dtype::F16, &halves, 1.0), f16::INFINITY);
        assert_eq!(sum_halves(Dtype::Bf16, &[bf16::from_f32(-0.0); 3], 1.0).to_bits(), bf16::NEG_ZERO.to_bits());
    }

    #[test]
    fn not_a_number_and_negative_zero_pass_through() {
        assert_eq!(sum_f32(&[vec![-0.0], vec![-0.0]], 1.0)[0].to_bits(), (-0.0_f32).to_bits());
        assert_eq!(sum_f32(&[vec![-0.0]], 1.0)[0].to_bits(), (-0.0_f32).to_bits());
        assert!(sum_f32(&[vec![f32::NAN], vec![1.0]], 0.5)[0].is_nan());
    }
}
