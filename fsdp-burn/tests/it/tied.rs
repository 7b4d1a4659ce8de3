//! Tied weights: one parameter in several fields trains as one parameter that is used several times.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use burn::module::{Module, Param, ParamId};
use burn::nn::{EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};
use fsdp_burn::nn::Embedding;
use fsdp_burn::{
    Accumulate, Config, FieldRule, PrefetchConfig, Sharded, Stage, TrainingConfig, WrapPolicy, launch, recompute,
};

use crate::common::models::{Trial, classes, distance, rows};
use crate::common::run::{
    BATCH, Optimizer, Outcome, STEPS, Tolerance, assert_parity, config, on_ranks, plain_for, plain_model,
    plain_weights, scalar, sharded_for, share, start, weights,
};
use crate::shapes::watched;
use crate::traffic::count;

const VOCABULARY: usize = 11;
const CONTEXT: usize = 3;
const WIDTH: usize = 6;

/// A table in a unit that is the weight of a head in the root unit too, and a scale in two places.
#[derive(Module, Debug, Sharded)]
pub(crate) struct Tied {
    #[shard(unit)]
    tokens: Embedding,
    #[shard(unit)]
    block: Block,
    norm: LayerNorm,
    scale: Param<Tensor<1>>,
    head: Embedding,
}

#[derive(Module, Debug)]
struct Block {
    layer: Linear,
    scale: Param<Tensor<1>>,
}

/// What a tie means: each parameter is in one field, and forward uses it twice.
#[derive(Module, Debug, Sharded)]
struct Once {
    tokens: Embedding,
    block: Block,
    norm: LayerNorm,
}

impl Trial for Once {
    fn build(device: &Device) -> Self {
        let layer = LinearConfig::new(WIDTH, WIDTH).init(device);
        let scale = Param::from_tensor(rows(90, 0..1, WIDTH, device).reshape([WIDTH]));
        Self {
            tokens: EmbeddingConfig::new(VOCABULARY, WIDTH).init(device).into(),
            block: Block { layer, scale },
            norm: LayerNormConfig::new(WIDTH).init(device),
        }
    }

    fn loss(&self, batch: usize, samples: Range<usize>, device: &Device) -> Tensor<1> {
        let twice = Tied {
            tokens: self.tokens.clone(),
            block: self.block.clone(),
            norm: self.norm.clone(),
            scale: self.block.scale.clone(),
            head: self.tokens.clone(),
        };
        twice.loss(batch, samples, device)
    }
}

impl Trial for Tied {
    fn build(device: &Device) -> Self {
        let Once { tokens, block, norm } = Once::build(device);
        Self { scale: block.scale.clone(), head: tokens.clone(), tokens, block, norm }
    }

    /// Both uses in one batch, only the first in the next, only the last in the third, and in the fourth the last for
    /// half of the samples, so that some ranks ask for the head and do not use it.
    fn loss(&self, batch: usize, samples: Range<usize>, device: &Device) -> Tensor<1> {
        let num_rows = samples.len() * CONTEXT;
        let x = match batch % 4 {
            2 => rows(batch + 1, samples.clone(), CONTEXT * WIDTH, device).reshape([num_rows, WIDTH]),
            _ => {
                let ids = classes(batch + 1, samples.clone(), CONTEXT, VOCABULARY, device);
                self.tokens.forward(ids).reshape([num_rows, WIDTH])
            }
        };
        let x = x.clone() + relu(self.block.layer.forward(x) * self.block.scale.val().unsqueeze());
        let x = self.norm.forward(x) * self.scale.val().unsqueeze();
        let num_with_head = match batch % 4 {
            1 => 0,
            3 => (BATCH / 2).clamp(samples.start, samples.end) - samples.start,
            _ => samples.len(),
        };
        // All ranks ask for it, as all ranks must for a unit.
        let head = (batch % 4 != 1).then(|| self.head.weight.val().transpose());
        let (first, num_first) = (x.clone(), num_with_head * CONTEXT);
        let mut parts = Vec::new();
        parts.extend(head.filter(|_| num_first > 0).map(|head| first.slice(0..num_first).matmul(head)));
        if num_first < num_rows {
            parts.push(x.slice(num_first..num_rows).matmul(rows(91, 0..WIDTH, VOCABULARY, device)));
        }
        let output = Tensor::cat(parts, 0).reshape([samples.len(), CONTEXT * VOCABULARY]);
        distance(output, batch, samples, device)
    }
}

#[test]
fn tied_weights_train_as_one_parameter_that_is_used_twice_and_every_stage_gives_the_same_bits() {
    for optimizer in Optimizer::ALL {
        let default = TrainingConfig::default();
        for training in [
            TrainingConfig { gradient_clip_norm: Some(0.1), ..default.clone() },
            TrainingConfig { gradient_accumulation: 2, accumulate: Accumulate::Local, ..default.clone() },
            default,
        ] {
            let with = |stage, world_size, depth| Config {
                training: training.clone(),
                prefetch: PrefetchConfig { forward: depth, backward: depth, max_bytes: None },
                ..config(stage, world_size)
            };
            let oracle = plain_for::<Once>(&with(Stage::Ddp, 1, 1), optimizer, STEPS);
            for world_size in [1, 2, 3] {
                let run = |stage, depth| sharded_for::<Tied>(&with(stage, world_size, depth), optimizer, STEPS);
                let ddp = run(Stage::Ddp, 1);
                let what = format!("{optimizer:?} on {world_size}, {training:?}");
                assert_parity(&what, &oracle, &ddp, optimizer.tolerance());
                for (stage, depth) in [
                    (Stage::OptimizerState, 1),
                    (Stage::Gradients, 1),
                    (Stage::Parameters, 0),
                    (Stage::Parameters, 1),
                    (Stage::Parameters, 2),
                ] {
                    assert_parity(&format!("{what}, {stage}"), &ddp, &run(stage, depth), Tolerance::EXACT);
                }
            }
        }
    }
}

#[test]
fn a_tied_parameter_is_counted_shown_and_stored_once_under_its_first_path() {
    for stage in Stage::ALL {
        launch(&config(stage, 2), |rank| {
            let model = start::<Tied>(&rank)?;
            let once = plain_model::<Once>().0;
            assert_eq!(model.num_params(), once.num_params());
            assert_eq!(weights(&model)?, plain_weights(&once));
            assert_eq!(model.shape("head.weight"), model.shape("tokens.weight"));
            for note in ["also used as head.weight", "also used as scale"] {
                assert!(model.summary().contains(note), "{}", model.summary());
            }
            let [first, second] = [&model.tokens, &model.head].map(|table| table.weight.base().to_data());
            assert_eq!(first, second);
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn the_gradient_of_a_tied_parameter_is_sent_once() {
    for world_size in [2, 3] {
        for stage in Stage::ALL {
            let (counted, plan) = count::<Tied>(&config(stage, world_size), true);
            let others = 4 * (world_size as u64 - 1);
            let num_params = plan.num_params() as u64;
            if stage == Stage::Parameters {
                assert_eq!(counted.reduced_bytes, others * num_params, "{stage}");
                assert_eq!((counted.reduce_scatter, counted.all_gather), (3, 4), "{stage}");
                // The table is used at both ends of forward, and with the block between them it is always the next one: it
                // stays. So only the block is gathered again, in backward.
                let block = plan.units().iter().position(|unit| unit.name == "block").unwrap();
                let gathered = num_params + plan.unit_len(block) as u64;
                assert_eq!(counted.sent_bytes, others * (num_params + gathered), "{stage}");
            } else {
                assert_eq!(counted.sent_bytes, others * 2 * num_params, "{stage}");
            }
        }
    }
}

/// Trains on the two uses of the table alone; with `again` the head runs once more in backward.
fn with_recomputed_head(stage: Stage, again: bool) -> Outcome {
    on_ranks(&config(stage, 2), move |rank| {
        let device = rank.device();
        let mut model = start::<Tied>(&rank)?;
        let mut optimizer = rank.optimizer(Optimizer::AdamW.build())?;
        let mut outcome = Outcome::default();
        for batch in 0..STEPS {
            let (samples, num_rows) = (share(&rank), share(&rank).len() * CONTEXT);
            let ids = classes(batch + 1, samples.clone(), CONTEXT, VOCABULARY, &device);
            let x = model.tokens.forward(ids).reshape([num_rows, WIDTH]);
            let head = |head: &Embedding, x: Tensor<2>| x.matmul(head.weight.val().transpose());
            let output = if again { recompute(&model.head, x, head) } else { head(&model.head, x) };
            let output = output.reshape([samples.len(), CONTEXT * VOCABULARY]);
            let loss = distance(output, batch, samples, &device);
            outcome.losses.push(rank.mean(scalar(&loss))?);
            let gradients = model.backward(loss)?;
            optimizer.step(Optimizer::AdamW.lr(), &mut model, gradients)?;
        }
        outcome.weights = weights(&model)?;
        Ok(outcome)
    })
}

#[test]
fn a_tied_field_in_a_part_that_is_recomputed_trains_to_the_same_bits() {
    for stage in Stage::ALL {
        let expected = with_recomputed_head(stage, false);
        assert_parity(&stage.to_string(), &expected, &with_recomputed_head(stage, true), Tolerance::EXACT);
    }
}

#[test]
fn burns_own_optimizer_steps_the_first_field_only() {
    let device = Device::flex().autodiff();
    let a = linear(&device);
    let pair = Pair { b: a.clone(), a };
    let x = rows(93, 0..2, 4, &device);
    let gradients = pair.b.forward(pair.a.forward(x)).sum().backward();
    let gradients = GradientsParams::from_grads(gradients, &pair);
    let stepped = plain_weights(&Optimizer::Sgd.build().step(0.1, pair.clone(), gradients));
    let before = plain_weights(&pair);
    assert_ne!(stepped[0], before[0]);
    assert_eq!(stepped[1], before[1]);
}

#[test]
fn a_tied_parameter_is_initialised_once_and_on_rank_0_only() {
    for stage in Stage::ALL {
        let log = Arc::new(Mutex::new(Vec::new()));
        let seen = log.clone();
        launch(&config(stage, 3), move |rank| {
            let weight = watched(rank.rank(), &rank.device(), &seen);
            let a = Linear { weight, ..linear(&rank.device()) };
            let model = rank.shard(Pair { b: a.clone(), a })?;
            assert_eq!([&model.a, &model.b].map(|layer| layer.weight.val().dims()), [[4, 6]; 2]);
            Ok(())
        })
        .unwrap();
        assert_eq!(*log.lock().unwrap(), [0], "{stage}");
    }
}

/// Two layers in units of their own.
#[derive(Module, Debug, Sharded)]
struct Pair {
    #[shard(unit)]
    a: Linear,
    #[shard(unit)]
    b: Linear,
}

/// A pair without attributes on the second layer, whose first is replicated.
#[derive(Module, Debug)]
struct HalfReplicated {
    a: Linear,
    b: Linear,
}

impl Sharded for HalfReplicated {
    fn wrap_policy() -> WrapPolicy {
        WrapPolicy::new().field("a", FieldRule::unit().replicate())
    }
}

fn linear(device: &Device) -> Linear {
    let linear = LinearConfig::new(4, 4).with_bias(false).init(device);
    Linear { weight: Param::initialized(linear.weight.id, rows(92, 0..4, 4, device).require_grad()), ..linear }
}

#[test]
fn a_frozen_tie_is_left_as_it_is_and_costs_no_reduction() {
    for stage in Stage::ALL {
        let reduced = launch(&config(stage, 2), |rank| {
            let device = rank.device();
            let a = linear(&device).no_grad();
            let mut model = rank.shard(FrozenPair { pair: Pair { b: a.clone(), a }, output: linear(&device) })?;
            let before = weights(&model)?;
            let mut optimizer = rank.optimizer(Optimizer::Sgd.build())?;
            let gradients = model.backward(model.loss(&device))?;
            optimizer.step(0.1, &mut model, gradients)?;
            let after = weights(&model)?;
            assert_eq!(before.len(), 2);
            assert_eq!(before[0], after[0], "{}", after[0].0);
            assert_ne!(before[1], after[1], "{}", after[1].0);
            Ok(model.plan().params().iter().filter(|param| param.trainable).count())
        });
        assert_eq!(reduced.unwrap(), [1, 1]);
    }
}

/// A tied pair, and a layer to train.
#[derive(Module, Debug, Sharded)]
struct FrozenPair {
    #[shard(nested)]
    pair: Pair,
    output: Linear,
}

impl FrozenPair {
    fn loss(&self, device: &Device) -> Tensor<1> {
        let x = self.pair.a.forward(self.output.forward(rows(93, 0..2, 4, device)));
        self.pair.b.forward(x).powi_scalar(2).mean()
    }
}

/// Another parameter of the same id, with so many rows.
fn with_id(id: ParamId, num_rows: usize) -> Param<Tensor<2>> {
    let device = Device::flex().autodiff().gradient_checkpointing();
    Param::initialized(id, rows(94, 0..num_rows, 4, &device).require_grad())
}

/// The error of sharding a model made from a layer and a changed clone of it.
fn refusal<M>(model: fn(Linear, Linear) -> M, change: fn(Param<Tensor<2>>) -> Param<Tensor<2>>) -> String
where
    M: Module + Sharded + 'static,
{
    let error = launch(&config(Stage::Parameters, 2), move |rank| {
        let a = linear(&rank.device());
        let b = Linear { weight: change(a.weight.clone()), ..a.clone() };
        rank.shard(model(a, b)).map(|_| ())
    });
    error.unwrap_err().to_string()
}

#[test]
fn fields_with_one_parameter_that_do_not_agree_are_refused_before_the_first_step() {
    let pair = |a, b| Pair { a, b };
    for (error, difference) in [
        (refusal(pair, |weight| with_id(weight.id, 2)), "with the shape [2, 4] in place of [4, 4]"),
        (refusal(pair, |weight| weight.set_require_grad(false)), "only one of the two is frozen"),
        (refusal(pair, |weight| with_id(weight.id, 4)), "with other values"),
        (refusal(|a, b| HalfReplicated { a, b }, |weight| weight), "cut along dimension 0 and the other is replicated"),
    ] {
        for part in ["`b.weight`", "`a.weight`", "tied weights", difference] {
            assert!(error.contains(part), "{error:?} lacks {part:?}");
        }
    }
}
