//! A model for `device = "cpu"` that is quick on few cores.
//!
//! Each product of two matrices there has eight threads that wait for each other a thousand times, in loops: a tenth of a second
//! for a few numbers, where a core has several of them. What is broadcast and added up takes microseconds.

use std::ops::Range;

use burn::module::{Module, Param};
use burn::nn::{Initializer, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};
use fsdp_burn::Sharded;

use super::models::{Trial, distance, rows};

/// What `burn::nn::Linear` computes.
#[derive(Module, Debug)]
pub(crate) struct Broadcast {
    weight: Param<Tensor<2>>,
    bias: Param<Tensor<1>>,
}

impl Broadcast {
    pub(crate) fn new(from: usize, to: usize, device: &Device) -> Self {
        let LinearConfig { initializer, .. } = LinearConfig::new(from, to);
        let weight = initializer.init_with([from, to], Some(from), Some(to), device);
        Self { weight, bias: Initializer::Zeros.init([to], device) }
    }

    pub(crate) fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let products = x.unsqueeze_dim::<3>(2) * self.weight.val().unsqueeze_dim::<3>(0);
        products.sum_dim(1).squeeze_dim(1) + self.bias.val().unsqueeze()
    }
}

/// As [`Mlp`](super::models::Mlp) is.
#[derive(Module, Debug, Sharded)]
pub(crate) struct BroadcastMlp {
    #[shard(unit)]
    pub(crate) input: Broadcast,
    #[shard(units)]
    pub(crate) hidden: Vec<Broadcast>,
    output: Broadcast,
}

impl Trial for BroadcastMlp {
    fn build(device: &Device) -> Self {
        Self {
            input: Broadcast::new(7, 13, device),
            hidden: (0..3).map(|_| Broadcast::new(13, 13, device)).collect(),
            output: Broadcast::new(13, 5, device),
        }
    }

    fn loss(&self, batch: usize, samples: Range<usize>, device: &Device) -> Tensor<1> {
        let mut x = relu(self.input.forward(rows(batch + 1, samples.clone(), 7, device)));
        for layer in &self.hidden {
            x = relu(layer.forward(x));
        }
        distance(self.output.forward(x), batch, samples, device)
    }
}
