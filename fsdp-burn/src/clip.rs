//! The norm of all gradients over all ranks, and what clipping makes of it.
//!
//! [Note: One norm for every stage]
//! Each parameter is cut into the blocks of its layout even where every rank holds all of it, the squares of each block
//! are added up in double precision, and the blocks' sums are added in the order of parameters and ranks. So the norm,
//! and every clipped gradient after it, has the same bits at every stage.

use std::collections::BTreeMap;

use bytes::Bytes;
use fsdp_core::{Dtype, GatherPart, OpTag, Phase, ShardLayout};
use multiversion::multiversion;

use crate::Error;
use crate::engine::Engine;
use crate::host::cut;

/// The L2 norm of the reduced gradients of all parameters, each counted once. *Collective* over the shard axis.
pub(crate) fn global_norm(engine: &Engine, step: u64) -> Result<f64, Error> {
    let plan = engine.plan();
    let num_shards = engine.links().control_shard.world_size();
    // By parameter and block; each rank fills in the blocks it holds.
    let mut squares: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
    engine.each_reduced(|param, gradient| {
        let spec = &plan.params()[param];
        let dtype = engine.dtype(param);
        let blocks = squares.entry(param).or_insert_with(|| vec![0.0; num_shards]);
        if spec.is_split() {
            blocks[engine.shard_index()] = sum_of_squares(gradient, dtype);
        } else {
            for (rank, sum) in blocks.iter_mut().enumerate() {
                *sum = sum_of_squares(&cut(gradient, &spec.layout, rank, dtype.size_bytes()), dtype);
            }
        }
    });
    let split: Vec<usize> = squares.keys().copied().filter(|&param| plan.params()[param].is_split()).collect();
    if !split.is_empty() {
        let mine: Vec<u8> = split.iter().flat_map(|param| squares[param][engine.shard_index()].to_ne_bytes()).collect();
        let part = GatherPart {
            shard: Bytes::from(mine),
            layout: ShardLayout::new(&[num_shards, split.len()], 0, num_shards),
            elem_bytes: size_of::<f64>(),
        };
        let tag = OpTag::new(step, Phase::Optimizer, "gradient norm");
        let all = engine.links().control_shard.all_gather(&tag, &[part])?;
        let sums = all.iter().flat_map(|bytes| bytes.as_chunks::<8>().0).map(|chunk| f64::from_ne_bytes(*chunk));
        for (position, sum) in sums.enumerate() {
            let (rank, index) = (position / split.len(), position % split.len());
            if let Some(blocks) = squares.get_mut(&split[index]) {
                blocks[rank] = sum;
            }
        }
    }
    Ok(squares.values().flatten().sum::<f64>().sqrt())
}

/// What gradients are multiplied with so that their norm is at most `max_norm`.
pub(crate) fn coefficient(norm: f64, max_norm: f64) -> f64 {
    if norm > max_norm { max_norm / norm } else { 1.0 }
}

#[multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2"))]
fn sum_of_squares(bytes: &[u8], dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F32 => sum_of_lanes(bytes.as_chunks::<4>().0, |chunk| f64::from(f32::from_ne_bytes(chunk))),
        Dtype::F64 => sum_of_lanes(bytes.as_chunks::<8>().0, f64::from_ne_bytes),
    }
}

/// Adds the squares in sixteen sums side by side, which vectorises; the order is fixed all the same. Inlined, so that it is
/// compiled for each of the caller's instruction sets.
#[inline(always)]
fn sum_of_lanes<const N: usize>(elements: &[[u8; N]], value: impl Fn([u8; N]) -> f64) -> f64 {
    let mut lanes = [0.0; 16];
    let (rounds, rest) = elements.as_chunks::<16>();
    for elements in rounds.iter().map(<[_; 16]>::as_slice).chain([rest]) {
        for (lane, &element) in lanes.iter_mut().zip(elements) {
            let value = value(element);
            *lane += value * value;
        }
    }
    lanes.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn squares_of_all_elements_are_added() {
        let bytes: Vec<u8> = [1.0_f32, 2.0, 3.0, 4.0, 5.0].iter().flat_map(|value| value.to_ne_bytes()).collect();
        assert_eq!(sum_of_squares(&bytes, Dtype::F32), 55.0);
        assert_eq!(sum_of_squares(&[], Dtype::F64), 0.0);
    }

    #[test]
    fn a_norm_within_the_limit_is_left_alone() {
        assert_eq!(coefficient(0.5, 1.0), 1.0);
        assert_eq!(coefficient(4.0, 1.0), 0.25);
        assert_eq!(coefficient(0.0, 1.0), 1.0);
    }
}
