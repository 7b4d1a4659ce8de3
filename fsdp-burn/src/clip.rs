//! The norm of all gradients over all ranks, and what clipping makes of it.
//!
//! [Note: One norm for every stage]
//! Each parameter is cut into the blocks of its layout even where every rank holds all of it, the powers of each block
//! are added up in double precision, and the blocks' sums are added in the order of parameters and ranks. So the norm,
//! and every clipped gradient after it, has the same bits at every stage.
//!
//! Squares are added up while a block is reduced, where it is then stored as it is and no micro-batch follows: it is in a cache
//! at that time, and would come from memory later.
//!
//! What is on a device is squared and added up there, in double precision and in an order that a block's size decides; one
//! number of each block is copied. Any other order, or a device without double precision, has the gradients copied.
//!
//! Powers of a high order overflow and underflow long before their root does: 1e-3 to the 200th is 0 in double precision.
//! So an order other than 2 first asks for the largest magnitude of all, and then sums powers of shares of it.

use std::collections::BTreeMap;

use bytes::Bytes;
use fsdp_core::{Dtype, GatherPart, OpTag, Phase, ShardLayout};
use half::{bf16, f16};

use crate::Error;
use crate::block::{Block, Home};
use crate::engine::Engine;
use crate::squares::sum_of_squares;

/// Which norm: of the order p, (Σ|g|^p)^(1/p).
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Norm {
    /// The root of the sum of squares.
    Two,
    /// The largest magnitude.
    Infinity,
    /// Any other order of at least 1.
    Order(f64),
}

/// What is added up over blocks: see [Note: One norm for every stage].
#[derive(Clone, Copy)]
enum Total {
    Squares,
    Largest,
    /// Powers of shares of `largest`, which is finite and not 0.
    Powers {
        order: f64,
        largest: f64,
    },
}

impl Norm {
    /// The norm of this order; infinity for the largest magnitude.
    pub(crate) fn of_order(order: f64) -> Self {
        match order {
            2.0 => Norm::Two,
            f64::INFINITY => Norm::Infinity,
            order => Norm::Order(order),
        }
    }

    /// The norm, from what `total` finds over all blocks.
    fn reduce_totals<E>(self, mut total: impl FnMut(Total) -> Result<f64, E>) -> Result<f64, E> {
        match self {
            Norm::Two => Ok(total(Total::Squares)?.sqrt()),
            Norm::Infinity => total(Total::Largest),
            // No power that overflows or vanishes.
            Norm::Order(1.0) => total(Total::Powers { order: 1.0, largest: 1.0 }),
            Norm::Order(order) => match total(Total::Largest)? {
                largest if largest.is_finite() && largest > 0.0 => {
                    Ok(largest * total(Total::Powers { order, largest })?.powf(order.recip()))
                }
                largest => Ok(largest),
            },
        }
    }
}

impl Total {
    /// What one block contributes. NaN if any element is.
    fn of_block(self, bytes: &[u8], dtype: Dtype) -> f64 {
        match self {
            Total::Squares => sum_of_squares(bytes, dtype),
            Total::Largest => fold(bytes, dtype, |largest, value| larger(largest, value.abs())),
            Total::Powers { order, largest } => {
                fold(bytes, dtype, |sum, value| sum + (value.abs() / largest).powf(order))
            }
        }
    }

    /// What one block contributes, wherever it is.
    fn of_placed(self, home: &Home, block: Block, dtype: Dtype) -> Result<Amount, Error> {
        #[cfg(any(feature = "cuda", feature = "cpu"))]
        if let (Block::Device(tensor), Total::Squares, true) = (&block, self, home.has_f64()) {
            return Ok(Amount::OnDevice(Box::new(crate::cube::sum_of_squares(tensor))));
        }
        Ok(Amount::Known(self.of_block(&home.to_host(block)?, dtype)))
    }

    /// Of all blocks, from what each contributes.
    fn of_all(self, blocks: impl Iterator<Item = f64>) -> f64 {
        match self {
            Total::Squares | Total::Powers { .. } => blocks.sum(),
            Total::Largest => blocks.fold(0.0, larger),
        }
    }
}

/// What a block contributes.
enum Amount {
    Known(f64),
    /// One element in double precision.
    #[cfg(any(feature = "cuda", feature = "cpu"))]
    OnDevice(Box<crate::peers::CubeFloat>),
}

/// Puts amounts where they belong, those on the device after one copy of all.
fn collect<'a>(amounts: impl Iterator<Item = (&'a mut f64, Amount)>) -> Result<(), Error> {
    #[cfg(any(feature = "cuda", feature = "cpu"))]
    let mut on_device = (Vec::new(), Vec::new());
    for (slot, amount) in amounts {
        match amount {
            Amount::Known(amount) => *slot = amount,
            #[cfg(any(feature = "cuda", feature = "cpu"))]
            Amount::OnDevice(amount) => {
                on_device.0.push(slot);
                on_device.1.push(*amount);
            }
        }
    }
    #[cfg(any(feature = "cuda", feature = "cpu"))]
    for (slot, amount) in on_device.0.into_iter().zip(crate::cube::values(on_device.1)?) {
        *slot = amount;
    }
    Ok(())
}

/// The norm of the reduced gradients of all parameters, each counted once. *Collective* over the shard axis.
pub(crate) fn global_norm(engine: &Engine, step: u64, norm: Norm) -> Result<f64, Error> {
    norm.reduce_totals(|total| global_total(engine, step, total))
}

fn global_total(engine: &Engine, step: u64, total: Total) -> Result<f64, Error> {
    let plan = engine.plan();
    let num_shards = engine.links().control_shard.world_size();
    // By parameter and block; each rank fills in the blocks it holds.
    let mut parts: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
    let mut amounts: BTreeMap<(usize, usize), Amount> = BTreeMap::new();
    engine.each_reduced(|param, gradient, squares| {
        let (spec, dtype) = (&plan.params()[param], engine.dtype(param));
        let amount = |block| total.of_placed(engine.home(), block, dtype);
        parts.insert(param, vec![0.0; num_shards]);
        if spec.is_split() {
            let amount = match (total, squares) {
                (Total::Squares, Some(squares)) => Amount::Known(squares),
                _ => amount(gradient.clone())?,
            };
            amounts.insert((param, engine.shard_index()), amount);
        } else {
            for rank in 0..num_shards {
                amounts.insert((param, rank), amount(gradient.cut(&spec.layout, rank, dtype))?);
            }
        }
        Ok(())
    })?;
    let slots = parts
        .iter_mut()
        .flat_map(|(&param, blocks)| blocks.iter_mut().enumerate().map(move |(rank, slot)| ((param, rank), slot)));
    collect(slots.filter_map(|(key, slot)| Some((slot, amounts.remove(&key)?))))?;
    let split: Vec<usize> = parts.keys().copied().filter(|&param| plan.params()[param].is_split()).collect();
    if !split.is_empty() {
        let mine: Vec<u8> = split.iter().flat_map(|param| parts[param][engine.shard_index()].to_ne_bytes()).collect();
        let part = GatherPart {
            shard: Bytes::from(mine),
            layout: ShardLayout::new(&[num_shards, split.len()], 0, num_shards),
            elem_bytes: size_of::<f64>(),
        };
        let tag = OpTag::new(step, Phase::Optimizer, "gradient norm");
        let all = engine.links().control_shard.all_gather(&tag, &[part])?;
        let gathered = all.iter().flat_map(|bytes| bytes.as_chunks::<8>().0).map(|chunk| f64::from_ne_bytes(*chunk));
        for (position, part) in gathered.enumerate() {
            let (rank, index) = (position / split.len(), position % split.len());
            if let Some(blocks) = parts.get_mut(&split[index]) {
                blocks[rank] = part;
            }
        }
    }
    Ok(total.of_all(parts.into_values().flatten()))
}

/// What gradients are multiplied with so that their norm is at most `max_norm`.
pub(crate) fn coefficient(norm: f64, max_norm: f64) -> f64 {
    if norm > max_norm { max_norm / norm } else { 1.0 }
}

/// The larger of two; NaN if one is, which `f64::max` would drop.
fn larger(a: f64, b: f64) -> f64 {
    if a.is_nan() || a > b { a } else { b }
}

fn fold(bytes: &[u8], dtype: Dtype, step: impl Fn(f64, f64) -> f64) -> f64 {
    match dtype {
        Dtype::F32 => {
            let values = bytes.as_chunks().0.iter().map(|chunk| f64::from(f32::from_ne_bytes(*chunk)));
            values.fold(0.0, step)
        }
        Dtype::Bf16 => bytes.as_chunks().0.iter().map(|chunk| bf16::from_ne_bytes(*chunk).to_f64()).fold(0.0, step),
        Dtype::F16 => bytes.as_chunks().0.iter().map(|chunk| f16::from_ne_bytes(*chunk).to_f64()).fold(0.0, step),
        Dtype::F64 => bytes.as_chunks().0.iter().map(|chunk| f64::from_ne_bytes(*chunk)).fold(0.0, step),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_order_is_its_own_norm_and_none_loses_a_nan() {
        let bytes = |values: &[f64]| values.iter().flat_map(|value| value.to_ne_bytes()).collect::<Vec<u8>>();
        let norm = |order: f64, blocks: &[&[f64]]| {
            let total = |total: Total| {
                let blocks = blocks.iter().map(|block| total.of_block(&bytes(block), Dtype::F64));
                Ok::<_, std::convert::Infallible>(total.of_all(blocks))
            };
            Norm::of_order(order).reduce_totals(total).unwrap()
        };
        let blocks: [&[f64]; 3] = [&[3.0, -4.0], &[], &[0.0, -12.0]];
        assert_eq!(norm(2.0, &blocks), 13.0);
        assert_eq!(norm(1.0, &blocks), 19.0);
        assert_eq!(norm(f64::INFINITY, &blocks), 12.0);
        assert!((norm(3.0, &blocks) - (27.0_f64 + 64.0 + 1728.0).cbrt()).abs() < 1e-12);
        assert_eq!(norm(3.0, &[&[0.0], &[]]), 0.0);
        // Nothing of a high order overflows or vanishes: it nears the largest magnitude.
        for scale in [1e-30, 1e-3, 1.0, 1e30] {
            let blocks: [&[f64]; 2] = [&[3.0 * scale, -4.0 * scale], &[4.0 * scale]];
            for order in [200.0, 1e6] {
                let expected = 4.0 * scale * 2.0_f64.powf(1.0 / order);
                assert!((norm(order, &blocks) - expected).abs() < 1e-9 * expected, "{order} of {scale}");
            }
        }
        for order in [1.0, 2.0, 3.0, 1e6, f64::INFINITY] {
            for blocks in [[&[f64::NAN, 1.0], &[2.0_f64][..]], [&[1.0, 2.0], &[f64::NAN][..]]] {
                assert!(norm(order, &blocks).is_nan(), "{order}");
            }
            assert_eq!(norm(order, &[&[f64::INFINITY], &[1.0]]), f64::INFINITY, "{order}");
        }
    }

    #[test]
    fn a_norm_within_the_limit_is_left_alone() {
        assert_eq!(coefficient(0.5, 1.0), 1.0);
        assert_eq!(coefficient(4.0, 1.0), 0.25);
        assert_eq!(coefficient(0.0, 1.0), 1.0);
    }
}
