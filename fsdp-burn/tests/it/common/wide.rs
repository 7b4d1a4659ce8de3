//! Models with a unit that is large enough to travel in parts.

use std::ops::Range;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};
use fsdp_burn::{Sharded, recompute};

use super::models::{Feed, Trial, Trunk, distance, rows};

/// A first unit that is large enough to travel in parts, used in forward and computed again in backward.
#[derive(Module, Debug, Sharded)]
pub(crate) struct Wide {
    #[shard(unit)]
    first: Feed,
    #[shard(unit)]
    second: Linear,
    head: Linear,
}

const WIDE: usize = 1024;

impl Trial for Wide {
    fn build(device: &Device) -> Self {
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        Self {
            first: Feed { up: linear(WIDE / 2, WIDE), down: linear(WIDE, WIDE / 2) },
            second: linear(WIDE / 2, 8),
            head: linear(8, 3),
        }
    }

    fn loss(&self, batch: usize, samples: Range<usize>, device: &Device) -> Tensor<1> {
        let feed = |feed: &Feed, x| feed.down.forward(relu(feed.up.forward(x)));
        let x = feed(&self.first, rows(batch + 1, samples.clone(), WIDE / 2, device));
        let x = recompute(&self.first, x, feed);
        distance(self.head.forward(relu(self.second.forward(x))), batch, samples, device)
    }
}

/// [`Branches`] with a trunk that is large enough to travel in parts, of which some ranks leave one out.
#[derive(Module, Debug, Sharded)]
pub(crate) struct WideBranches {
    // Has the trunk's parameters needed in backward on all ranks.
    #[shard(unit)]
    input: Linear,
    #[shard(unit)]
    trunk: Trunk,
    #[shard(unit)]
    output: Linear,
}

const TRUNK: usize = 768;

impl Trial for WideBranches {
    fn build(device: &Device) -> Self {
        let linear = |to| LinearConfig::new(TRUNK, to).init(device);
        let input = LinearConfig::new(7, TRUNK).init(device);
        Self { input, trunk: Trunk { main: linear(TRUNK), side: linear(TRUNK) }, output: linear(3) }
    }

    fn loss(&self, batch: usize, samples: Range<usize>, device: &Device) -> Tensor<1> {
        let x = self.input.forward(rows(batch + 1, samples.clone(), 7, device));
        let x = self.trunk.forward(x, samples.clone());
        distance(self.output.forward(x), batch, samples, device)
    }
}
