//! Models with dimensions that do not divide, each with a loss over its own data.

use std::ops::Range;

use burn::module::{Lora, Module, ModuleDisplay, ModuleMapper, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::{CrossEntropyLossConfig, MseLoss, Reduction};
use burn::nn::pool::{AvgPool2d, AvgPool2dConfig};
use burn::nn::{
    BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, GroupNorm, GroupNormConfig, LayerNorm, LayerNormConfig,
    Linear, LinearConfig, PaddingConfig2d, RmsNorm, RmsNormConfig,
};
use burn::tensor::activation::{gelu, relu};
use burn::tensor::module::attention;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use fsdp_burn::{Sharded, cast_input, cast_output, recompute};

use super::run::BATCH;

/// A model with data of its own, so that one test fits all models.
pub(crate) trait Trial: Module + ModuleDisplay + Sharded + 'static {
    /// Whether building it draws random numbers at once, on every rank.
    const DRAWS_AT_ONCE: bool = false;
    /// Builds the model, lazily initialised.
    fn build(device: &Device) -> Self;
    /// The mean loss over some samples of a batch.
    fn loss(&self, batch: usize, samples: Range<usize>, device: &Device) -> Tensor<1>;
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

/// Some rows of a matrix of noise.
pub(crate) fn rows(seed: usize, rows: Range<usize>, width: usize, device: &Device) -> Tensor<2> {
    let values = noise(seed as u64, rows.end * width)[rows.start * width..].to_vec();
    Tensor::from_data(TensorData::new(values, [rows.len(), width]), device)
}

/// Some rows of a matrix of random whole numbers below `limit`.
pub(crate) fn classes(seed: usize, rows: Range<usize>, width: usize, limit: usize, device: &Device) -> Tensor<2, Int> {
    let class = |value: &f32| (((value + 1.0) / 2.0 * limit as f32) as i64).min(limit as i64 - 1);
    let values: Vec<i64> = noise(seed as u64, rows.end * width)[rows.start * width..].iter().map(class).collect();
    Tensor::from_data(TensorData::new(values, [rows.len(), width]), device)
}

/// The mean squared difference from noise of the same shape.
pub(crate) fn distance(output: Tensor<2>, seed: usize, samples: Range<usize>, device: &Device) -> Tensor<1> {
    let width = output.dims()[1];
    MseLoss::new().forward(output, rows(seed + 1000, samples, width, device), Reduction::Mean)
}

/// Layers of 7, 13 and 5, none of which divides by 2, 3 or 5 at once.
#[derive(Module, Debug, Sharded)]
pub(crate) struct Mlp {
    #[shard(unit)]
    pub(crate) input: Linear,
    #[shard(units)]
    pub(crate) hidden: Vec<Linear>,
    pub(crate) output: Linear,
}

impl Trial for Mlp {
    fn build(device: &Device) -> Self {
        Self {
            input: LinearConfig::new(7, 13).init(device),
            hidden: (0..3).map(|_| LinearConfig::new(13, 13).init(device)).collect(),
            output: LinearConfig::new(13, 5).init(device),
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

/// A convolution net with group normalisation. Its last unit of forward is not marked `keep`.
#[derive(Module, Debug, Sharded)]
pub(crate) struct ConvNet {
    #[shard(unit)]
    stem: Conv2d,
    #[shard(nested)]
    body: Body,
    pool: AvgPool2d,
    #[shard(unit)]
    head: Linear,
}

/// Each convolution is a unit; the normalisation belongs to the root.
#[derive(Module, Debug, Sharded)]
struct Body {
    #[shard(units)]
    convs: Vec<Conv2d>,
    norm: GroupNorm,
}

impl Trial for ConvNet {
    fn build(device: &Device) -> Self {
        let conv = |channels| {
            Conv2dConfig::new(channels, [3, 3]).with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1)).init(device)
        };
        Self {
            stem: conv([2, 6]),
            body: Body { convs: vec![conv([6, 6]), conv([6, 6])], norm: GroupNormConfig::new(2, 6).init(device) },
            pool: AvgPool2dConfig::new([2, 2]).init(),
            head: LinearConfig::new(6 * 4, 3).init(device),
        }
    }

    fn loss(&self, batch: usize, samples: Range<usize>, device: &Device) -> Tensor<1> {
        let images = rows(batch + 1, samples.clone(), 2 * 16, device).reshape([samples.len(), 2, 4, 4]);
        let mut x = self.body.norm.forward(self.stem.forward(images));
        for conv in &self.body.convs {
            x = x.clone() + gelu(conv.forward(x));
        }
        let x = self.pool.forward(x).reshape([samples.len(), 24]);
        distance(self.head.forward(x), batch, samples, device)
    }
}

/// A small GPT: pre-norm blocks with causal attention, and a head of its own.
#[derive(Module, Debug, Sharded)]
pub(crate) struct Gpt {
    #[shard(unit)]
    tokens: Embedding,
    positions: Embedding,
    #[shard(units, nested)]
    blocks: Vec<Block>,
    norm: LayerNorm,
    #[shard(unit, keep)]
    head: Linear,
}

/// A unit, with a further unit inside.
#[derive(Module, Debug, Sharded)]
struct Block {
    norm_1: LayerNorm,
    qkv: Linear,
    projection: Linear,
    norm_2: LayerNorm,
    #[shard(unit)]
    feed: Feed,
}

#[derive(Module, Debug)]
pub(crate) struct Feed {
    pub(crate) up: Linear,
    pub(crate) down: Linear,
}

const VOCABULARY: usize = 11;
const CONTEXT: usize = 5;
const WIDTH: usize = 6;
const HEADS: usize = 2;

impl Block {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let [batch, len, width] = x.dims();
        let qkv = self.qkv.forward(self.norm_1.forward(x.clone()));
        let split = |part: usize| {
            let part = qkv.clone().slice([0..batch, 0..len, part * width..(part + 1) * width]);
            part.reshape([batch, len, HEADS, width / HEADS]).swap_dims(1, 2)
        };
        let options = AttentionModuleOptions { is_causal: true, ..Default::default() };
        let attended = attention(split(0), split(1), split(2), None, None, options);
        let x = x + self.projection.forward(attended.swap_dims(1, 2).reshape([batch, len, width]));
        let fed = self.feed.down.forward(gelu(self.feed.up.forward(self.norm_2.forward(x.clone()))));
        x + fed
    }
}

impl Trial for Gpt {
    fn build(device: &Device) -> Self {
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        let block = || Block {
            norm_1: LayerNormConfig::new(WIDTH).init(device),
            qkv: linear(WIDTH, 3 * WIDTH),
            projection: linear(WIDTH, WIDTH),
            norm_2: LayerNormConfig::new(WIDTH).init(device),
            feed: Feed { up: linear(WIDTH, 4 * WIDTH), down: linear(4 * WIDTH, WIDTH) },
        };
        Self {
            tokens: EmbeddingConfig::new(VOCABULARY, WIDTH).init(device),
            positions: EmbeddingConfig::new(CONTEXT, WIDTH).init(device),
            blocks: (0..2).map(|_| block()).collect(),
            norm: LayerNormConfig::new(WIDTH).init(device),
            head: linear(WIDTH, VOCABULARY),
        }
    }

    fn loss(&self, batch: usize, samples: Range<usize>, device: &Device) -> Tensor<1> {
        self.loss_with(batch, samples, device, Block::forward)
    }
}

impl Gpt {
    fn loss_with(
        &self,
        batch: usize,
        samples: Range<usize>,
        device: &Device,
        forward: impl Fn(&Block, Tensor<3>) -> Tensor<3>,
    ) -> Tensor<1> {
        let num_samples = samples.len();
        let text = classes(batch + 1, samples, CONTEXT + 1, VOCABULARY, device);
        let ids = text.clone().slice([0..num_samples, 0..CONTEXT]);
        let targets = text.slice([0..num_samples, 1..CONTEXT + 1]).reshape([num_samples * CONTEXT]);
        let positions = Tensor::arange(0..CONTEXT as i64, device).reshape([1, CONTEXT]);
        let mut x = self.tokens.forward(ids) + self.positions.forward(positions);
        for block in &self.blocks {
            x = forward(block, x);
        }
        let logits = self.head.forward(self.norm.forward(x)).reshape([num_samples * CONTEXT, VOCABULARY]);
        // The loss is in full precision whatever the model computes in.
        CrossEntropyLossConfig::new().init(device).forward(logits.cast(FloatDType::F32), targets)
    }
}

/// [`Gpt`] that computes its blocks again in backward.
#[derive(Module, Debug, Sharded)]
pub(crate) struct RecomputedGpt {
    #[shard(nested)]
    gpt: Gpt,
}

impl Trial for RecomputedGpt {
    fn build(device: &Device) -> Self {
        Self { gpt: Gpt::build(device) }
    }

    fn loss(&self, batch: usize, samples: Range<usize>, device: &Device) -> Tensor<1> {
        self.gpt.loss_with(batch, samples, device, |block, x| recompute(block, x, Block::forward))
    }
}

/// Parameters smaller than the number of ranks, parameters without elements, and a vector of five.
#[derive(Module, Debug, Sharded)]
pub(crate) struct Tiny {
    #[shard(unit)]
    first: Small,
    /// Its last parameter has no elements.
    #[shard(unit)]
    second: Small,
}

#[derive(Module, Debug)]
struct Small {
    two: Param<Tensor<2>>,
    five: Param<Tensor<1>>,
    nothing: Param<Tensor<2>>,
}

impl Small {
    fn build(seed: usize, device: &Device) -> Self {
        Self {
            two: Param::from_tensor(rows(seed, 0..2, 5, device)),
            five: Param::from_tensor(rows(seed + 1, 0..1, 5, device).reshape([5])),
            nothing: Param::from_tensor(Tensor::zeros([0, 5], device)),
        }
    }

    /// From two columns to two, by way of five; the empty rows add nothing, but take part.
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let wide = x.matmul(self.two.val()) * self.five.val().unsqueeze();
        let weights = Tensor::cat(vec![self.two.val(), self.nothing.val()], 0);
        wide.matmul(weights.transpose())
    }
}

impl Trial for Tiny {
    fn build(device: &Device) -> Self {
        Self { first: Small::build(70, device), second: Small::build(80, device) }
    }

    fn loss(&self, batch: usize, samples: Range<usize>, device: &Device) -> Tensor<1> {
        let x = rows(batch + 1, samples.clone(), 2, device);
        distance(self.second.forward(self.first.forward(x)) * 0.3, batch, samples, device)
    }
}

/// What the attributes other than `unit` do to the layout.
#[derive(Module, Debug, Sharded)]
pub(crate) struct Layouts {
    #[shard(unit, spec(_, "shard"))]
    columns: Param<Tensor<2>>,
    #[shard(unit)]
    mixed: Mixed,
    #[shard(replicate)]
    scale: Param<Tensor<1>>,
    #[shard(ignore)]
    teacher: Linear,
    #[shard(unit)]
    frozen: Linear,
    output: Linear,
}

/// Frozen and trained parameters in one unit.
#[derive(Module, Debug)]
struct Mixed {
    frozen: Linear,
    trained: Linear,
}

impl Trial for Layouts {
    fn build(device: &Device) -> Self {
        let frozen = |seed: usize| {
            let mut linear = LinearConfig::new(7, 7).init(device);
            linear.weight = Param::from_tensor(rows(seed, 0..7, 7, device)).set_require_grad(false);
            linear.bias = linear.bias.map(|_| Param::from_tensor(Tensor::zeros([7], device)).set_require_grad(false));
            linear
        };
        Self {
            columns: Param::from_tensor(rows(50, 0..3, 7, device)),
            mixed: Mixed { frozen: frozen(51), trained: LinearConfig::new(7, 7).init(device) },
            scale: Param::from_tensor(Tensor::ones([7], device)),
            teacher: frozen(52),
            frozen: frozen(53),
            output: LinearConfig::new(7, 3).init(device),
        }
    }

    fn loss(&self, batch: usize, samples: Range<usize>, device: &Device) -> Tensor<1> {
        let x = rows(batch + 1, samples.clone(), 3, device).matmul(self.columns.val());
        let x = self.mixed.trained.forward(relu(self.mixed.frozen.forward(x.clone()))) + self.teacher.forward(x);
        let x = self.frozen.forward(x * self.scale.val().unsqueeze());
        distance(self.output.forward(x) * 0.1, batch, samples, device)
    }
}

/// A model that uses one parameter for the first half of a batch only, and one unit never.
#[derive(Module, Debug, Sharded)]
pub(crate) struct Branches {
    #[shard(unit)]
    input: Linear,
    #[shard(unit)]
    trunk: Trunk,
    #[shard(unit)]
    spare: Linear,
    output: Linear,
}

#[derive(Module, Debug)]
pub(crate) struct Trunk {
    pub(crate) main: Linear,
    pub(crate) side: Linear,
}

impl Trial for Branches {
    fn build(device: &Device) -> Self {
        let linear = |to| LinearConfig::new(7, to).init(device);
        Self {
            input: linear(7),
            trunk: Trunk { main: linear(7), side: linear(7) },
            spare: linear(7),
            output: linear(3),
        }
    }

    fn loss(&self, batch: usize, samples: Range<usize>, device: &Device) -> Tensor<1> {
        let x = self.trunk.forward(self.input.forward(rows(batch + 1, samples.clone(), 7, device)), samples.clone());
        distance(self.output.forward(x), batch, samples, device)
    }
}

impl Trunk {
    /// `side` for samples of the first half of the batch only.
    pub(crate) fn forward(&self, x: Tensor<2>, samples: Range<usize>) -> Tensor<2> {
        let x = self.main.forward(x);
        let num_first = (BATCH / 2).clamp(samples.start, samples.end) - samples.start;
        let mut parts = Vec::new();
        if num_first > 0 {
            let first = x.clone().slice(0..num_first);
            parts.push(first.clone() + relu(self.side.forward(first)));
        }
        if num_first < samples.len() {
            parts.push(x.slice(num_first..samples.len()));
        }
        Tensor::cat(parts, 0)
    }
}

/// Units that are used three times over in one forward.
#[derive(Module, Debug, Sharded)]
pub(crate) struct Recurrent {
    #[shard(unit)]
    a: Linear,
    #[shard(unit)]
    b: Linear,
    output: Linear,
}

impl Trial for Recurrent {
    fn build(device: &Device) -> Self {
        let linear = |to| LinearConfig::new(7, to).init(device);
        Self { a: linear(7), b: linear(7), output: linear(3) }
    }

    fn loss(&self, batch: usize, samples: Range<usize>, device: &Device) -> Tensor<1> {
        let mut x = rows(batch + 1, samples.clone(), 7, device);
        for _ in 0..3 {
            x = relu(self.b.forward(gelu(self.a.forward(x))));
        }
        distance(self.output.forward(x), batch, samples, device)
    }
}

/// A bias that is subtracted behind a mask: where the mask is zero its gradient is -0.0, which is a gradient all the
/// same.
#[derive(Module, Debug, Sharded)]
pub(crate) struct Masked {
    #[shard(unit)]
    bias: Param<Tensor<2>>,
    output: Linear,
}

impl Trial for Masked {
    fn build(device: &Device) -> Self {
        Self { bias: Param::from_tensor(rows(60, 0..6, 7, device)), output: LinearConfig::new(7, 3).init(device) }
    }

    fn loss(&self, batch: usize, samples: Range<usize>, device: &Device) -> Tensor<1> {
        // From the second step on only the first rows of the bias have an effect.
        let used = if batch == 0 { 6 } else { 2 };
        let row = Tensor::<1, Int>::arange(0..6, device).reshape([6, 1]).repeat_dim(1, 7);
        let bias = self.bias.val().neg().mask_fill(row.greater_equal_elem(used), 0.0).sum_dim(0);
        distance(self.output.forward(rows(batch + 1, samples.clone(), 7, device) + bias), batch, samples, device)
    }
}

/// Batch normalisation over the batches of all ranks: in a unit that is computed again in backward, and in the root.
#[derive(Module, Debug, Sharded)]
pub(crate) struct JointlyNormed {
    #[shard(unit)]
    input: Linear,
    #[shard(unit)]
    block: NormedBlock,
    outer: fsdp_burn::nn::BatchNorm,
    output: Linear,
}

#[derive(Module, Debug)]
struct NormedBlock {
    norm: fsdp_burn::nn::BatchNorm,
    linear: Linear,
}

impl Trial for JointlyNormed {
    fn build(device: &Device) -> Self {
        let norm = |channels| BatchNormConfig::new(channels).init(device).into();
        Self {
            input: LinearConfig::new(7, 5).init(device),
            block: NormedBlock { norm: norm(5), linear: LinearConfig::new(5, 7).init(device) },
            outer: norm(7),
            output: LinearConfig::new(7, 3).init(device),
        }
    }

    fn loss(&self, batch: usize, samples: Range<usize>, device: &Device) -> Tensor<1> {
        let x = self.input.forward(cast_input(&self.input.weight, rows(batch + 1, samples.clone(), 7, device)));
        let x = recompute(&self.block, x, |block, x| block.linear.forward(gelu(block.norm.forward(x))));
        let y = self.output.forward(gelu(self.outer.forward(x)));
        distance(cast_output(&self.output.weight, y), batch, samples, device)
    }
}

/// Layers that look at the shape of what the model stores; two have running statistics, in a unit and in the root.
#[derive(Module, Debug, Sharded)]
pub(crate) struct Normed {
    #[shard(unit)]
    input: Linear,
    #[shard(unit)]
    inner: BatchNorm,
    #[shard(unit)]
    middle: Linear,
    outer: BatchNorm,
    scaled: RmsNorm,
    output: Linear,
}

impl Trial for Normed {
    fn build(device: &Device) -> Self {
        Self {
            input: LinearConfig::new(7, 5).init(device),
            inner: BatchNormConfig::new(5).init(device),
            middle: LinearConfig::new(5, 7).init(device),
            outer: BatchNormConfig::new(7).init(device),
            scaled: RmsNormConfig::new(7).init(device),
            output: LinearConfig::new(7, 3).init(device),
        }
    }

    fn loss(&self, batch: usize, samples: Range<usize>, device: &Device) -> Tensor<1> {
        let x = self.input.forward(rows(batch + 1, samples.clone(), 7, device));
        let x = self.middle.forward(gelu(self.inner.forward(x)));
        let x = self.scaled.forward(gelu(self.outer.forward(x)));
        distance(self.output.forward(x), batch, samples, device)
    }
}

/// A trial with adapters of rank 2 on all its matrices.
#[derive(Module, Debug, Sharded)]
pub(crate) struct Adapted<M: Module + Sharded> {
    #[shard(nested)]
    pub(crate) model: M,
}

/// Gives each parameter other numbers, and the same in every run.
struct Fill(u64);

impl ModuleMapper for Fill {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.0 += 1;
        let trained = param.is_require_grad();
        param.map(|value| {
            let values = noise(self.0, value.shape().num_elements());
            let data = TensorData::new(values, value.shape());
            (Tensor::from_data(data, &value.device()) * 0.3).detach().set_require_grad(trained)
        })
    }
}

impl<M: Trial> Trial for Adapted<M> {
    const DRAWS_AT_ONCE: bool = true;

    fn build(device: &Device) -> Self {
        // Adapters initialise their bases at once and on every rank, where seeds would depend on who comes first.
        Self { model: M::build(device).apply_lora(Lora::new(2, 3.0)).map(&mut Fill(0)) }
    }

    fn loss(&self, batch: usize, samples: Range<usize>, device: &Device) -> Tensor<1> {
        self.model.loss(batch, samples, device)
    }
}
