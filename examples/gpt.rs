//! A GPT in plain Burn. The derive `Sharded` with its attributes, and the embedding and `gelu` of `fsdp_burn::nn`, are the only
//! trace of this project.

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{EmbeddingConfig, Initializer, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Device, FloatDType, Int, Tensor, module::attention};
use fsdp_burn::nn::{Embedding, gelu};
use fsdp_burn::{Activations, ComputePrecision, Sharded, Transformer, recompute};
use serde::{Deserialize, Serialize};

/// Sizes of the model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GptConfig {
    /// Number of blocks.
    pub layers: usize,
    /// Length of the vector of one position.
    pub width: usize,
    /// Attention heads; they share the width evenly.
    pub heads: usize,
    /// Longest context, in tokens.
    pub sequence: usize,
    /// Number of tokens. Bytes need 256.
    pub vocabulary: usize,
    /// Whether blocks keep their input only, and run again in backward.
    pub recompute: bool,
}

/// Pre-norm transformer with learned positions and a head of its own.
#[derive(Module, Debug, Sharded)]
pub struct Gpt {
    // Burn's own embedding would hold its table until backward.
    #[shard(unit)]
    tokens: Embedding,
    positions: Embedding,
    #[shard(units)]
    blocks: Vec<Block>,
    norm: LayerNorm,
    // Backward starts with the head.
    #[shard(unit, keep)]
    head: Linear,
    recompute: bool,
}

/// Attention, then a perceptron, each on the normalised input and added to it.
#[derive(Module, Debug)]
pub(crate) struct Block {
    attention_norm: LayerNorm,
    query: Linear,
    key: Linear,
    value: Linear,
    project: Linear,
    perceptron_norm: LayerNorm,
    up: Linear,
    down: Linear,
    heads: usize,
}

impl GptConfig {
    /// A model with random weights.
    pub fn init(&self, device: &Device) -> Gpt {
        let initializer = Initializer::Normal { mean: 0.0, std: 0.02 };
        let embedding =
            |rows| EmbeddingConfig::new(rows, self.width).with_initializer(initializer.clone()).init(device).into();
        let linear = |from, to| LinearConfig::new(from, to).with_initializer(initializer.clone()).init(device);
        let norm = || LayerNormConfig::new(self.width).init(device);
        let block = |_| Block {
            attention_norm: norm(),
            query: linear(self.width, self.width),
            key: linear(self.width, self.width),
            value: linear(self.width, self.width),
            project: linear(self.width, self.width),
            perceptron_norm: norm(),
            up: linear(self.width, 4 * self.width),
            down: linear(4 * self.width, self.width),
            heads: self.heads,
        };
        Gpt {
            tokens: embedding(self.vocabulary),
            positions: embedding(self.sequence),
            blocks: (0..self.layers).map(block).collect(),
            norm: norm(),
            head: LinearConfig::new(self.width, self.vocabulary)
                .with_bias(false)
                .with_initializer(initializer.clone())
                .init(device),
            recompute: self.recompute,
        }
    }
}

impl Gpt {
    /// Logits [batch, sequence, vocabulary] of the token after each of `tokens` [batch, sequence].
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let [_, sequence] = tokens.dims();
        let positions = Tensor::arange(0..sequence as i64, &tokens.device()).reshape([1, sequence]);
        let mut x = self.tokens.forward(tokens) + self.positions.forward(positions);
        for block in &self.blocks {
            x = if self.recompute { recompute(block, x, Block::forward) } else { block.forward(x) };
        }
        at_once(&self.head, self.norm.forward(x))
    }

    /// Mean cross entropy over all positions.
    pub fn loss(&self, inputs: Tensor<2, Int>, targets: Tensor<2, Int>) -> Tensor<1> {
        let logits = self.forward(inputs);
        let [batch, sequence, vocabulary] = logits.dims();
        let loss = CrossEntropyLossConfig::new().init(&logits.device());
        // In full precision, also where the model computes in half of it.
        let logits = logits.cast(FloatDType::F32).reshape([batch * sequence, vocabulary]);
        loss.forward(logits, targets.reshape([batch * sequence]))
    }
}

impl Block {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let x = x.clone() + self.attend(self.attention_norm.forward(x));
        let hidden = gelu(at_once(&self.up, self.perceptron_norm.forward(x.clone())));
        x + at_once(&self.down, hidden)
    }

    fn attend(&self, x: Tensor<3>) -> Tensor<3> {
        let [batch, sequence, width] = x.dims();
        let [query, key, value] = [&self.query, &self.key, &self.value].map(|linear| {
            let by_head = [batch, sequence, self.heads, width / self.heads];
            at_once(linear, x.clone()).reshape(by_head).swap_dims(1, 2)
        });
        let options = AttentionModuleOptions { is_causal: true, ..Default::default() };
        let mixed = attention(query, key, value, None, None, options);
        at_once(&self.project, mixed.swap_dims(1, 2).reshape([batch, sequence, width]))
    }
}

/// A layer on all positions of all sequences in one product of matrices. In three dimensions Burn computes a product, and a
/// gradient of the weights, for each sequence.
fn at_once(linear: &Linear, x: Tensor<3>) -> Tensor<3> {
    let [batch, sequence, _] = x.dims();
    let y = linear.forward(x.flatten::<2>(0, 1));
    let [_, width] = y.dims();
    y.reshape([batch, sequence, width])
}

/// Buffers that each compute thread keeps for packing the operands of matrix products, in bytes: as much as its
/// second-level cache, which Linux tells, or 1 MiB.
pub fn packing_bytes() -> u64 {
    let told = std::fs::read_to_string("/sys/devices/system/cpu/cpu0/cache/index2/size").unwrap_or_default();
    told.trim().strip_suffix('K').and_then(|kib| kib.parse().ok()).map_or(1 << 20, |kib: u64| kib << 10)
}

/// What one rank of `num_threads` compute threads holds beside its state, for `batch` sequences in float32; see
/// [`Transformer::activations`].
pub fn activations(config: &GptConfig, batch: usize, num_threads: usize) -> Activations {
    let GptConfig { layers, width, heads, sequence, vocabulary, recompute } = *config;
    let transformer = Transformer { layers, width, heads, sequence, vocabulary, recompute };
    let packing_bytes = num_threads as u64 * packing_bytes();
    let Activations { begin_bytes, last_bytes, transient_bytes } =
        transformer.activations(batch, ComputePrecision::F32);
    Activations { begin_bytes: begin_bytes + packing_bytes, last_bytes: last_bytes + packing_bytes, transient_bytes }
}
