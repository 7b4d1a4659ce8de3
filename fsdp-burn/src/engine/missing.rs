//! Gradients that some ranks have and others do not, told apart without a message.
//!
//! [Note: A missing gradient is minus zero]
//! A parameter may get a gradient on some ranks only. The others must join the reduction all the same, and all must
//! agree whether anyone had one, since an optimizer does not touch a parameter without gradient. A rank without one
//! contributes -0.0: it is the true neutral element of addition (x + -0.0 is x for every x, +0.0 included), and a sum
//! is -0.0 only if every term is. So a block that is -0.0 throughout had no gradient anywhere, and telling so costs no
//! message. A rank whose real gradient of a block is -0.0 throughout sends +0.0. What is left is a block whose real sums are
//! all so small and negative that dividing by the number of ranks rounds them to -0.0, below 1e-45 (below 3e-8 where gradients are
//! sent in f16): it counts as missing.

use std::ops::Range;

use burn::backend::Flex;
use burn::backend::flex::FlexTensor;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::TensorData;
use bytes::Bytes;
use fsdp_core::{Dtype, ShardLayout};
use half::{bf16, f16};

use crate::host;

/// A real gradient that happens to be -0.0 throughout a block becomes +0.0, so that it does not look missing.
/// See [Note: A missing gradient is minus zero].
pub(super) fn present_gradient(gradient: FlexTensor, layout: &ShardLayout, dtype: Dtype) -> Bytes {
    let bytes = host::bytes_of(&gradient);
    let elem_bytes = dtype.size_bytes();
    let looks_missing =
        |run: Range<usize>| is_missing(&bytes.slice(run.start * elem_bytes..run.end * elem_bytes), dtype);
    let block_looks_missing = |rank| layout.shard_len(rank) > 0 && layout.runs(rank).all(looks_missing);
    if (0..layout.num_shards()).any(block_looks_missing) {
        drop(bytes);
        return host::bytes_of(&Flex::float_add_scalar(gradient, 0.0.into()));
    }
    bytes
}

/// See [Note: A missing gradient is minus zero].
pub(super) fn missing_gradient(len: usize, dtype: Dtype) -> Bytes {
    host::elements(match dtype {
        Dtype::F32 => TensorData::new(vec![-0.0_f32; len], [len]),
        Dtype::Bf16 => TensorData::new(vec![bf16::NEG_ZERO; len], [len]),
        Dtype::F16 => TensorData::new(vec![f16::NEG_ZERO; len], [len]),
        Dtype::F64 => TensorData::new(vec![-0.0_f64; len], [len]),
    })
}

/// See [Note: A missing gradient is minus zero]. The first element tells nearly always.
pub(super) fn is_missing(gradient: &Bytes, dtype: Dtype) -> bool {
    let minus_zero: &[u8] = match dtype {
        Dtype::F32 => &(-0.0_f32).to_ne_bytes(),
        Dtype::Bf16 => &bf16::NEG_ZERO.to_ne_bytes(),
        Dtype::F16 => &f16::NEG_ZERO.to_ne_bytes(),
        Dtype::F64 => &(-0.0_f64).to_ne_bytes(),
    };
    !gradient.is_empty() && gradient.chunks_exact(minus_zero.len()).all(|element| element == minus_zero)
}
