//! The chapter on your own model: attributes, the plan they make, the settings of a run, and what it will need.

use burn::module::{Module, Param};
use burn::nn::{EmbeddingConfig, Initializer, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::tensor::{Device, Int, Tensor, activation::gelu};
use fsdp_burn::{
    Config, Error, FieldRule, OptimizerKind, Rank, Sharded, Stage, StepOutcome, WrapPolicy, launch, nn::Embedding,
};

use crate::output::assert_shown;

const WIDTH: usize = 64;

// ANCHOR: model
#[derive(Module, Debug, Sharded)]
struct Block {
    norm: LayerNorm,
    up: Linear,
    #[shard(unit)] // as large as the rest of the block, so gathered by itself
    down: Linear,
}

#[derive(Module, Debug, Sharded)]
struct Classifier {
    #[shard(unit)] // of `fsdp_burn::nn`: Burn's own would hold the table until backward
    tokens: Embedding,
    #[shard(units, nested)] // each block is a unit, and so is the `down` of each
    blocks: Vec<Block>,
    norm: LayerNorm, // no attribute: the root unit
    #[shard(replicate)] // small, and whole on every rank
    gate: Linear,
    #[shard(unit, keep, spec(_, "shard"))] // backward begins here; cut by columns
    head: Param<Tensor<2>>,
}
// ANCHOR_END: model

impl Classifier {
    fn init(device: &Device) -> Self {
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        let norm = || LayerNormConfig::new(WIDTH).init(device);
        let block = |_| Block { norm: norm(), up: linear(WIDTH, 4 * WIDTH), down: linear(4 * WIDTH, WIDTH) };
        Self {
            tokens: EmbeddingConfig::new(1000, WIDTH).init(device).into(),
            blocks: (0..2).map(block).collect(),
            norm: norm(),
            gate: linear(WIDTH, 1),
            head: Initializer::Normal { mean: 0.0, std: 0.02 }.init([WIDTH, 10], device),
        }
    }

    fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<2> {
        let mut x = self.tokens.forward(tokens);
        for block in &self.blocks {
            x = x.clone() + block.down.forward(gelu(block.up.forward(block.norm.forward(x))));
        }
        let x = self.norm.forward(x);
        let weight = self.gate.forward(x.clone());
        (x * weight).mean_dim(1).squeeze_dim::<2>(1).matmul(self.head.val())
    }
}

// ANCHOR: tied
#[derive(Module, Debug, Sharded)]
struct LanguageModel {
    #[shard(unit)]
    tokens: Embedding,
    #[shard(units)]
    blocks: Vec<Linear>,
    head: Embedding, // a clone of `tokens`, so in its unit
}

impl LanguageModel {
    fn init(device: &Device) -> Self {
        let tokens = Embedding::from(EmbeddingConfig::new(1000, WIDTH).init(device));
        let blocks = (0..2).map(|_| LinearConfig::new(WIDTH, WIDTH).init(device)).collect();
        Self { head: tokens.clone(), tokens, blocks }
    }

    fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let x = self.blocks.iter().fold(self.tokens.forward(tokens), |x, block| gelu(block.forward(x)));
        x.matmul(self.head.weight.val().transpose().unsqueeze())
    }
}
// ANCHOR_END: tied

// ANCHOR: policy
/// What the derive writes for `Mlp` of the page Start.
fn policy_by_hand() -> WrapPolicy {
    WrapPolicy::new().field("layers", FieldRule::units())
}
// ANCHOR_END: policy

#[derive(Module, Debug, Sharded)]
struct Layers {
    #[shard(units)]
    layers: Vec<Linear>,
}

// ANCHOR: step
/// One optimizer step: as many backwards as the configuration accumulates.
fn step(rank: &Rank) -> Result<(StepOutcome, String), Error> {
    let device = rank.device();
    let mut model = rank.shard(Classifier::init(&device))?;
    let mut optimizer = rank.optimizer(SgdConfig::new().init())?;
    let mut outcome = StepOutcome::Accumulated;
    while outcome == StepOutcome::Accumulated {
        let tokens = Tensor::<2, Int>::zeros([2, 16], &device);
        let gradients = model.backward(model.forward(tokens).powf_scalar(2.0).mean())?;
        outcome = optimizer.step(0.1, &mut model, gradients)?;
    }
    let estimate = model.memory_estimate(OptimizerKind::Sgd, None);
    Ok((outcome, format!("{}\n{estimate}\n", model.summary())))
}
// ANCHOR_END: step

#[test]
fn the_unit_table_and_the_estimate_of_the_model_are_current() {
    let config = Config::from_toml(include_str!("run.toml"), "run.toml").unwrap();
    for (rank, (outcome, shown)) in launch(&config, |rank| step(&rank)).unwrap().into_iter().enumerate() {
        assert!(matches!(outcome, StepOutcome::Stepped { gradient_norm: Some(norm) } if norm.is_finite()));
        if rank == 0 {
            assert_shown("listings/output/model.txt", &shown);
        }
    }
}

#[test]
fn the_plan_of_tied_weights_is_current() {
    let config = Config { stage: Stage::Parameters, world_size: 4, ..Config::default() };
    let summaries = launch(&config, |rank| {
        let model = rank.shard(LanguageModel::init(&rank.device()))?;
        let logits = model.forward(Tensor::<2, Int>::zeros([2, 16], &rank.device()));
        assert_eq!(logits.dims(), [2, 16, 1000]);
        Ok(model.summary())
    });
    assert_shown("listings/output/tied.txt", &summaries.unwrap()[0]);
}

#[test]
fn a_policy_by_hand_is_what_the_derive_writes() {
    assert_eq!(policy_by_hand(), Layers::wrap_policy());
}
