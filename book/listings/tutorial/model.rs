//! The model of the tutorial, and what it learns.

use std::ops::Range;

use burn::module::Module;
use burn::nn::loss::{MseLoss, Reduction};
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::{Device, Tensor, TensorData, activation::relu};
use fsdp_burn::Sharded;

// ANCHOR: sizes
/// Length of the vectors between blocks.
pub(crate) const WIDTH: usize = 256;
/// Blocks, one after the other.
pub(crate) const NUM_BLOCKS: usize = 4;
/// Samples of each rank in each step.
pub(crate) const ROWS: usize = 16;
// ANCHOR_END: sizes

// ANCHOR: model
/// A perceptron with a way around it: a transformer's block without attention.
#[derive(Module, Debug)]
pub(crate) struct Block {
    norm: LayerNorm,
    up: Linear,
    down: Linear,
}

#[derive(Module, Debug, Sharded)] // `Sharded` is for later
pub(crate) struct Net {
    input: Linear,
    #[shard(units)] // and so is this
    blocks: Vec<Block>,
    output: Linear,
}

impl Net {
    pub(crate) fn init(width: usize, num_blocks: usize, device: &Device) -> Self {
        let block = |_| Block {
            norm: LayerNormConfig::new(width).init(device),
            up: LinearConfig::new(width, 4 * width).init(device),
            down: LinearConfig::new(4 * width, width).init(device),
        };
        Self {
            input: LinearConfig::new(2, width).init(device),
            blocks: (0..num_blocks).map(block).collect(),
            output: LinearConfig::new(width, 1).init(device),
        }
    }

    pub(crate) fn forward(&self, input: Tensor<2>) -> Tensor<2> {
        let mut x = self.input.forward(input);
        for block in &self.blocks {
            x = x.clone() + block.down.forward(relu(block.up.forward(block.norm.forward(x))));
        }
        self.output.forward(x)
    }
}

/// The mean of the squared differences.
pub(crate) fn loss(output: Tensor<2>, target: Tensor<2>) -> Tensor<1> {
    MseLoss::new().forward(output, target, Reduction::Mean)
}
// ANCHOR_END: model

// ANCHOR: samples
/// Samples `rows` of a step: two numbers between -1 and 1, and their product, to be found.
///
/// They depend on the step and the row alone, so they are the same whichever rank asks.
pub(crate) fn samples(step: usize, rows: Range<usize>, device: &Device) -> (Tensor<2>, Tensor<2>) {
    let number = |index: usize| {
        let mut bits = index as u32; // scrambled by the hash function lowbias32
        bits = (bits ^ (bits >> 16)).wrapping_mul(0x7feb_352d);
        bits = (bits ^ (bits >> 15)).wrapping_mul(0x846c_a68b);
        (bits ^ (bits >> 16)) as f32 / u32::MAX as f32 * 2.0 - 1.0
    };
    let first = 2 * (step * 10_000 + rows.start);
    let numbers: Vec<f32> = (first..first + 2 * rows.len()).map(number).collect();
    let input = Tensor::<2>::from_data(TensorData::new(numbers, [rows.len(), 2]), device);
    let target = input.clone().prod_dim(1);
    (input, target)
}
// ANCHOR_END: samples
