//! Models with dimensions that do not divide, each with a loss over its own data.

use burn::module::Module;
use burn::nn::loss::{CrossEntropyLossConfig, MseLoss, Reduction};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor, TensorData};
use fsdp_burn::Sharded;

/// A model with data of its own, so that one test fits all models.
pub(crate) trait Trial: Module + Sharded + 'static {
    /// Builds the model, lazily initialised.
    fn build(device: &Device) -> Self;
    /// The mean loss over samples `from..to` of the step's batch.
    fn loss(&self, step: usize, from: usize, to: usize, device: &Device) -> Tensor<1>;
}

/// Numbers in -1..1 that depend on nothing but their arguments.
pub(crate) fn noise(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0xD1B5_4A32_D192_ED03;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

/// Rows `from..to` of a matrix of noise.
pub(crate) fn rows(seed: u64, from: usize, to: usize, width: usize, device: &Device) -> Tensor<2> {
    let values = noise(seed, to * width)[from * width..].to_vec();
    Tensor::from_data(TensorData::new(values, [to - from, width]), device)
}

/// Three layers of 7, 13 and 5, none of which divides by 2, 3 or 5 at once.
#[derive(Module, Debug, Sharded)]
pub(crate) struct Mlp {
    #[shard(unit)]
    input: Linear,
    #[shard(units)]
    hidden: Vec<Linear>,
    output: Linear,
}

impl Trial for Mlp {
    fn build(device: &Device) -> Self {
        Self {
            input: LinearConfig::new(7, 13).init(device),
            hidden: (0..3).map(|_| LinearConfig::new(13, 13).init(device)).collect(),
            output: LinearConfig::new(13, 5).init(device),
        }
    }

    fn loss(&self, step: usize, from: usize, to: usize, device: &Device) -> Tensor<1> {
        let mut x = relu(self.input.forward(rows(step as u64 + 1, from, to, 7, device)));
        for layer in &self.hidden {
            x = relu(layer.forward(x));
        }
        let target = rows(step as u64 + 1000, from, to, 5, device);
        MseLoss::new().forward(self.output.forward(x), target, Reduction::Mean)
    }
}

#[allow(unused)]
fn cross_entropy(logits: Tensor<2>, targets: Tensor<1, burn::tensor::Int>, device: &Device) -> Tensor<1> {
    CrossEntropyLossConfig::new().init(device).forward(logits, targets)
}
