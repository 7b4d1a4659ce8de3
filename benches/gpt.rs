//! The GPT of the step benchmark: pre-norm decoder, learned positions, 4x GELU, untied head without bias.

use burn::module::{Initializer, Module};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::module::attention;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Device, Int, Tensor, activation};
use fsdp_burn::Sharded;

/// Sizes of the model and the batch.
#[derive(Clone, Copy, Debug, clap::Args, serde::Serialize)]
pub struct GptShape {
    /// Tokens of the vocabulary.
    #[arg(long, default_value_t = 2048)]
    pub vocabulary: usize,
    /// Width of the residual stream.
    #[arg(long, default_value_t = 512)]
    pub width: usize,
    /// Blocks.
    #[arg(long, default_value_t = 8)]
    pub layers: usize,
    /// Attention heads.
    #[arg(long, default_value_t = 8)]
    pub heads: usize,
    /// Tokens of a sequence.
    #[arg(long, default_value_t = 128)]
    pub sequence: usize,
    /// Sequences per rank and step.
    #[arg(long, default_value_t = 4)]
    pub batch: usize,
}

/// The model.
#[derive(Module, Debug, Sharded)]
pub struct Gpt {
    #[shard(unit, keep)]
    tokens: Embedding,
    positions: Embedding,
    #[shard(units)]
    blocks: Vec<Block>,
    norm: LayerNorm,
    #[shard(unit, keep)]
    head: Linear,
}

#[derive(Module, Debug)]
struct Block {
    norm_1: LayerNorm,
    qkv: Linear,
    proj: Linear,
    norm_2: LayerNorm,
    up: Linear,
    down: Linear,
    heads: usize,
}

impl GptShape {
    /// Builds the model, lazily initialised.
    pub fn init(&self, device: &Device) -> Gpt {
        let normal = Initializer::Normal { mean: 0.0, std: 0.02 };
        let linear = |from, to| LinearConfig::new(from, to).with_initializer(normal.clone());
        let embedding = |from| EmbeddingConfig::new(from, self.width).with_initializer(normal.clone()).init(device);
        let norm = || LayerNormConfig::new(self.width).init(device);
        let block = || Block {
            norm_1: norm(),
            qkv: linear(self.width, 3 * self.width).init(device),
            proj: linear(self.width, self.width).init(device),
            norm_2: norm(),
            up: linear(self.width, 4 * self.width).init(device),
            down: linear(4 * self.width, self.width).init(device),
            heads: self.heads,
        };
        Gpt {
            tokens: embedding(self.vocabulary),
            positions: embedding(self.sequence),
            blocks: (0..self.layers).map(|_| block()).collect(),
            norm: norm(),
            head: linear(self.width, self.vocabulary).with_bias(false).init(device),
        }
    }
}

impl Block {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let [batch, sequence, width] = x.dims();
        let qkv = self.qkv.forward(self.norm_1.forward(x.clone()));
        let part = |index: usize| {
            let part = qkv.clone().slice([0..batch, 0..sequence, index * width..(index + 1) * width]);
            part.reshape([batch, sequence, self.heads, width / self.heads]).swap_dims(1, 2)
        };
        let causal = AttentionModuleOptions { is_causal: true, ..Default::default() };
        let mixed = attention(part(0), part(1), part(2), None, None, causal);
        let x = x + self.proj.forward(mixed.swap_dims(1, 2).reshape([batch, sequence, width]));
        let hidden = activation::gelu(self.up.forward(self.norm_2.forward(x.clone())));
        x + self.down.forward(hidden)
    }
}

impl Gpt {
    /// The mean cross entropy of `targets` (shape `[batch * sequence]`) after `tokens` (shape `[batch, sequence]`).
    pub fn loss(&self, tokens: Tensor<2, Int>, targets: Tensor<1, Int>) -> Tensor<1> {
        let [batch, sequence] = tokens.dims();
        let device = tokens.device();
        let positions = Tensor::<1, Int>::arange(0..sequence as i64, &device).reshape([1, sequence]);
        let mut x = self.tokens.forward(tokens) + self.positions.forward(positions);
        for block in &self.blocks {
            x = block.forward(x);
        }
        let logits = self.head.forward(self.norm.forward(x));
        let [_, _, vocabulary] = logits.dims();
        CrossEntropyLossConfig::new().init(&device).forward(logits.reshape([batch * sequence, vocabulary]), targets)
    }
}
