//! Half precision: what is computed in it, what stays in float32, and what an overflow does.

use std::ops::Range;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{DType, Device, FloatDType, Gradients, Tensor};
use fsdp_burn::{
    Accumulate, Axis, Config, Dtype, Error, FieldRule, LossScale, Mesh, NonFinite, OpKind, PrecisionConfig, Sharded,
    Stage, StepOutcome, TrainingConfig, WrapPolicy, cast_input, cast_output, launch,
};
use fsdp_core::checkpoint::{Manifest, TensorKind};

use crate::common::models::{Gpt, RecomputedGpt, Trial, rows};
use crate::common::run::{
    BATCH, Optimizer, Outcome, SEED, STEPS, Tolerance, assert_parity, config, plain_model, plain_weights, scalar,
    seeded, sharded, share, start, weights,
};

fn half(stage: Stage, world_size: usize, parameters: Dtype) -> Config {
    // No scale that changes, so that plain training can do the same.
    let loss_scale = (parameters == Dtype::F16).then_some(LossScale::Fixed(256.0));
    let precision = PrecisionConfig { parameters, loss_scale, ..PrecisionConfig::default() };
    Config { precision, ..config(stage, world_size) }
}

/// Rounds the parameters of a model.
struct Round(FloatDType);

impl ModuleMapper for Round {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, value) = (param.id, param.val());
        let rounded = Tensor::from_data(value.to_data(), (&value.device(), self.0.into()));
        Param::initialized(id, rounded.require_grad())
    }
}

/// The gradients of a model in float32, multiplied by a factor.
struct Widen<'a> {
    gradients: &'a Gradients,
    factor: f64,
    all: GradientsParams,
}

impl ModuleVisitor for Widen<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(gradient) = param.val().grad(self.gradients) {
            self.all.register(param.id, gradient.cast(FloatDType::F32).mul_scalar(self.factor));
        }
    }
}

/// Mixed precision by hand, on one device: float32 masters, rounded for each forward.
fn plain<M: Trial>(dtype: FloatDType, scale: f64, optimizer: Optimizer) -> Outcome {
    let (mut model, device) = plain_model::<M>();
    let mut optim = optimizer.build();
    let mut outcome = Outcome::default();
    for batch in 0..STEPS {
        let rounded = model.clone().map(&mut Round(dtype));
        let loss = rounded.loss(batch, 0..BATCH, &device);
        outcome.losses.push(scalar(&loss));
        let gradients = loss.mul_scalar(scale).backward();
        let mut widen = Widen { gradients: &gradients, factor: 1.0 / scale, all: GradientsParams::new() };
        rounded.visit(&mut widen);
        model = optim.step(optimizer.lr(), model, widen.all);
    }
    outcome.weights = plain_weights(&model);
    outcome
}

#[test]
fn on_one_rank_every_stage_is_mixed_precision_on_one_device_bit_for_bit() {
    for (dtype, float, scale) in [(Dtype::Bf16, FloatDType::BF16, 1.0), (Dtype::F16, FloatDType::F16, 256.0)] {
        let mut expected = plain::<Gpt>(float, scale, Optimizer::AdamW);
        expected.norms.clear();
        for stage in Stage::ALL {
            let got = sharded::<Gpt>(&half(stage, 1, dtype), Optimizer::AdamW);
            assert_parity(&format!("{dtype} at {stage}"), &expected, &got, Tolerance::EXACT);
        }
    }
}

#[test]
fn more_ranks_are_as_close_to_float32_as_one_device_in_the_same_precision() {
    let exact = plain::<Gpt>(FloatDType::F32, 1.0, Optimizer::AdamW).losses;
    let worst = |losses: &[f64]| {
        let differences = losses.iter().zip(&exact).map(|(a, b)| (a - b).abs() / b);
        differences.fold(0.0, f64::max)
    };
    for (dtype, float, scale) in [(Dtype::Bf16, FloatDType::BF16, 1.0), (Dtype::F16, FloatDType::F16, 256.0)] {
        let alone = worst(&plain::<Gpt>(float, scale, Optimizer::AdamW).losses);
        assert!(alone > 0.0, "half precision rounds");
        for world_size in [2, 3] {
            let together = worst(&sharded::<Gpt>(&half(Stage::Parameters, world_size, dtype), Optimizer::AdamW).losses);
            assert!(together <= 2.0 * alone, "{dtype} on {world_size}: {together:e}, on one device {alone:e}");
        }
    }
}

#[test]
fn the_stages_agree_bit_for_bit_in_half_precision_too() {
    for dtype in [Dtype::Bf16, Dtype::F16] {
        for reduce in [Dtype::F32, dtype] {
            for accumulate in [Accumulate::Reduced, Accumulate::Local] {
                let run = |stage| {
                    let mut config = half(stage, 3, dtype);
                    config.precision.reduce = reduce;
                    let clipped = TrainingConfig { gradient_clip_norm: Some(0.5), ..config.training };
                    config.training = TrainingConfig { gradient_accumulation: 2, accumulate, ..clipped };
                    sharded::<Gpt>(&config, Optimizer::Fused)
                };
                let expected = run(Stage::Ddp);
                for stage in [Stage::OptimizerState, Stage::Gradients, Stage::Parameters] {
                    let what = format!("{dtype}, reduced in {reduce}, {accumulate}, {stage}");
                    assert_parity(&what, &expected, &run(stage), Tolerance::EXACT);
                }
            }
        }
    }
}

#[test]
fn recomputation_changes_no_bit_in_half_precision() {
    let config = half(Stage::Parameters, 2, Dtype::Bf16);
    let mut got = sharded::<RecomputedGpt>(&config, Optimizer::AdamW);
    got.weights.iter_mut().for_each(|(path, _)| *path = path.trim_start_matches("gpt.").to_owned());
    assert_parity("recomputed", &sharded::<Gpt>(&config, Optimizer::AdamW), &got, Tolerance::EXACT);
}

/// A bf16 weight of 1 does not feel a change below 1/256, and a float32 master does.
#[test]
fn a_small_learning_rate_moves_the_weights_under_half_precision() {
    for stage in Stage::ALL {
        let moved = launch(&half(stage, 2, Dtype::Bf16), |rank| {
            let mut model = start::<Gpt>(&rank)?;
            let mut optim = rank.optimizer(Optimizer::AdamW.build())?;
            let before = weights(&model)?;
            let gradients = model.backward(model.loss(0, share(&rank), &rank.device()))?;
            optim.step(6e-6, &mut model, gradients)?;
            let changed = |(before, after): (&Vec<f32>, &Vec<f32>)| before.iter().zip(after).any(|(a, b)| a != b);
            let after = weights(&model)?;
            let pairs = before.iter().zip(&after).map(|((_, before), (_, after))| (before, after));
            Ok((pairs.filter(|pair| changed(*pair)).count(), before.len()))
        });
        for (num_moved, num_params) in moved.unwrap() {
            assert!(num_moved >= num_params - 1, "{num_moved} of {num_params} at {stage}");
        }
    }
}

#[test]
fn half_precision_sends_half_the_bytes() {
    let sent = |stage, parameters, reduce| {
        let mut config = half(stage, 2, parameters);
        (config.precision.reduce, config.precision.loss_scale) = (reduce, None);
        config.training.non_finite = NonFinite::Propagate;
        let bytes = launch(&config, |rank| {
            let mut model = start::<Gpt>(&rank)?;
            let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
            for batch in 0..3 {
                model.synchronize()?;
                rank.traffic().reset();
                let gradients = model.backward(model.loss(batch, share(&rank), &rank.device()))?;
                optim.step(0.01, &mut model, gradients)?;
            }
            model.synchronize()?;
            let of = |kind| rank.traffic().of(kind).sent_bytes;
            Ok((of(OpKind::AllGather), of(OpKind::ReduceScatter) + of(OpKind::AllReduce)))
        });
        let bytes = bytes.unwrap();
        bytes.iter().fold((0, 0), |sum, rank| (sum.0 + rank.0, sum.1 + rank.1))
    };
    for stage in [Stage::OptimizerState, Stage::Gradients, Stage::Parameters] {
        let (gathered, reduced) = sent(stage, Dtype::F32, Dtype::F32);
        assert_eq!(sent(stage, Dtype::Bf16, Dtype::F32), (gathered / 2, reduced), "{stage}");
        assert_eq!(sent(stage, Dtype::Bf16, Dtype::Bf16), (gathered / 2, reduced / 2), "{stage}");
    }
    let (_, reduced) = sent(Stage::Ddp, Dtype::F32, Dtype::F32);
    assert_eq!(sent(Stage::Ddp, Dtype::Bf16, Dtype::Bf16).1, reduced / 2);
}

/// Five ranks, so that some have nothing of the smaller tensors; one of them overflows.
#[test]
fn an_overflow_on_one_rank_skips_the_step_on_all_and_halves_the_scale() {
    for stage in Stage::ALL {
        let mut config = half(stage, 5, Dtype::F16);
        config.precision.loss_scale = None;
        let ranks = launch(&config, |rank| {
            let mut model = start::<Gpt>(&rank)?;
            let mut optim = rank.optimizer(Optimizer::AdamW.build())?;
            let mut told = Vec::new();
            // Down to a scale at which nothing overflows by itself.
            while model.loss_scale() > 256.0 {
                let gradients = model.backward(model.loss(0, share(&rank), &rank.device()).mul_scalar(1e30))?;
                optim.step(0.01, &mut model, gradients)?;
            }
            for batch in 0..3 {
                let before = weights(&model)?;
                let too_large = if rank.rank() == 3 && batch == 1 { 1e30 } else { 1.0 };
                let gradients =
                    model.backward(model.loss(batch, share(&rank), &rank.device()).mul_scalar(too_large))?;
                let skipped = matches!(optim.step(0.01, &mut model, gradients)?, StepOutcome::Skipped { .. });
                told.push((skipped, model.loss_scale(), before == weights(&model)?));
            }
            Ok(told)
        });
        let expected = [(false, 256.0, false), (true, 128.0, true), (false, 128.0, false)];
        assert!(ranks.unwrap().iter().all(|told| *told == expected), "{stage}");
    }
}

/// As many items on every rank are no weights at all: the same scale, the same steps, the same bits.
#[test]
fn weights_of_losses_leave_the_loss_scale_as_it_is() {
    for gradient_accumulation in [1, 2] {
        let run = |weight: Option<f64>| {
            let mut config = half(Stage::Parameters, 2, Dtype::F16);
            config.precision.loss_scale = None;
            config.training.gradient_accumulation = gradient_accumulation;
            let runs = launch(&config, move |rank| {
                let mut model = start::<Gpt>(&rank)?;
                let mut optim = rank.optimizer(Optimizer::AdamW.build())?;
                let mut scales = Vec::new();
                for batch in 0..STEPS {
                    let loss = model.loss(batch, share(&rank), &rank.device());
                    let gradients = match weight {
                        Some(weight) => model.backward_weighted(loss, weight)?,
                        None => model.backward(loss)?,
                    };
                    optim.step(Optimizer::AdamW.lr(), &mut model, gradients)?;
                    scales.push(model.loss_scale());
                }
                Ok((scales, weights(&model)?))
            });
            runs.unwrap()
        };
        let plain = run(None);
        // Thousands of tokens, which an f16 gradient would feel.
        assert_eq!(run(Some(65536.0)), plain, "{gradient_accumulation} micro-batches");
    }
}

#[test]
fn what_is_not_finite_at_the_smallest_scale_is_no_overflow() {
    let config = half(Stage::Parameters, 2, Dtype::F16);
    let error = launch(&config, |rank| {
        let mut model = start::<Gpt>(&rank)?;
        let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
        let nothing = Tensor::<1>::zeros([1], &rank.device());
        let gradients = model.backward(model.loss(0, share(&rank), &rank.device()) / nothing)?;
        optim.step(0.01, &mut model, gradients)
    });
    let error = error.unwrap_err();
    assert!(
        matches!(&error, Error::RankFailed { source, .. } if matches!(**source, Error::NonFinite { .. })),
        "{error}"
    );
}

/// One unit in full precision, in a model that computes in half.
#[derive(Module, Debug, Sharded)]
struct TwoPrecisions {
    #[shard(unit)]
    body: Linear,
    #[shard(unit, precision = "f32")]
    head: Linear,
}

#[test]
fn a_unit_can_have_a_precision_of_its_own() {
    for stage in Stage::ALL {
        launch(&half(stage, 2, Dtype::Bf16), |rank| {
            let device = rank.device();
            let linear = || LinearConfig::new(6, 6).init(&device);
            let turn = rank.is_main().then(|| seeded(&device, SEED));
            let mut model = rank.shard(TwoPrecisions { body: linear(), head: linear() })?;
            drop(turn);
            let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
            for step in 0..2 {
                let body = model.body.forward(model.cast_input(rows(step, 0..4, 6, &device)));
                assert_eq!((body.dtype(), model.head.weight.val().dtype()), (DType::BF16, DType::F32));
                let output = model.head.forward(body.cast(FloatDType::F32));
                let gradients = model.backward(output.powi_scalar(2).mean())?;
                optim.step(0.05, &mut model, gradients)?;
            }
            let said = "parameters and optimizer state in f32, computed in f32 and bf16, gradients sent in f32";
            assert!(model.summary().contains(said), "{}", model.summary());
            Ok(())
        })
        .unwrap();
    }
}

/// Each unit with types of its own.
#[derive(Module, Debug, Sharded)]
struct OwnTypes {
    #[shard(unit, reduce = "bf16")]
    body: Linear,
    #[shard(unit, precision = "f32", output = "bf16")]
    head: Linear,
}

impl Trial for OwnTypes {
    fn build(device: &Device) -> Self {
        let linear = || LinearConfig::new(6, 6).init(device);
        Self { body: linear(), head: linear() }
    }

    fn loss(&self, batch: usize, samples: Range<usize>, device: &Device) -> Tensor<1> {
        let x = self.body.forward(cast_input(&self.body.weight, rows(batch, samples, 6, device)));
        let y = cast_output(&self.head.weight, self.head.forward(cast_input(&self.head.weight, x)));
        y.cast(FloatDType::F32).powi_scalar(2).mean()
    }
}

#[test]
fn units_reduce_in_and_put_out_types_of_their_own_with_the_same_bits_at_every_stage() {
    let config = |stage| half(stage, 3, Dtype::Bf16);
    let expected = sharded::<OwnTypes>(&config(Stage::Ddp), Optimizer::AdamW);
    for stage in [Stage::OptimizerState, Stage::Gradients, Stage::Parameters] {
        let got = sharded::<OwnTypes>(&config(stage), Optimizer::AdamW);
        assert_parity(&format!("{stage}"), &expected, &got, Tolerance::EXACT);
    }
    let sent = launch(&half(Stage::Parameters, 2, Dtype::Bf16), |rank| {
        let model = start::<OwnTypes>(&rank)?;
        let x = cast_input(&model.body.weight, rows(0, 0..4, 6, &rank.device()));
        let body = cast_output(&model.body.weight, model.body.forward(x.clone()));
        let head = model.head.forward(cast_input(&model.head.weight, body.clone()));
        let dtypes = [x.dtype(), body.dtype(), head.dtype(), cast_output(&model.head.weight, head).dtype()];
        assert_eq!(dtypes, [DType::BF16, DType::F32, DType::F32, DType::BF16]);
        let said =
            "computed in f32 and bf16, gradients sent in f32 and bf16,\noutputs cast to f32 and bf16, no loss scale\n";
        assert!(model.summary().ends_with(said), "{}", model.summary());
        assert!(model.summary().lines().all(|line| line.len() <= 100), "{}", model.summary());
        rank.traffic().reset();
        let gradients = model.backward(model.loss(0, share(&rank), &rank.device()))?;
        rank.optimizer(Optimizer::Sgd.build())?.step(0.1, &mut { model }, gradients)?;
        Ok(rank.traffic().of(OpKind::ReduceScatter).sent_bytes)
    });
    // Of 42 elements of each unit every rank sends the other's half: two bytes each of the body, four of the head.
    assert_eq!(sent.unwrap().iter().sum::<u64>(), 42 * 2 + 42 * 4);
}

/// One unit in a type that needs its loss scaled, in a model in float32.
#[derive(Module, Debug, Sharded)]
struct ScaledByOneUnit {
    #[shard(unit, precision = "f16")]
    body: Linear,
    head: Linear,
}

#[test]
fn one_unit_in_f16_brings_a_dynamic_loss_scale() {
    launch(&config(Stage::Parameters, 2), |rank| {
        let device = rank.device();
        let linear = || LinearConfig::new(6, 6).init(&device);
        let turn = rank.is_main().then(|| seeded(&device, SEED));
        let mut model = rank.shard(ScaledByOneUnit { body: linear(), head: linear() })?;
        drop(turn);
        let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
        assert!(model.summary().contains("a dynamic loss scale"), "{}", model.summary());
        let mut losses = Vec::new();
        for _ in 0..STEPS {
            let x = model.body.forward(cast_input(&model.body.weight, rows(1, 0..4, 6, &device)));
            let loss = model.head.forward(cast_input(&model.head.weight, x)).powi_scalar(2).mean();
            losses.push(scalar(&loss));
            let gradients = model.backward(loss)?;
            optim.step(0.05, &mut model, gradients)?;
        }
        assert!(model.loss_scale() > 1.0 && losses[STEPS - 1] < 0.9 * losses[0], "{losses:?}");
        Ok(())
    })
    .unwrap();
}

/// A policy that is written by hand, with a type that does not exist.
#[derive(Module, Debug)]
struct Misspelt {
    linear: Linear,
}

impl Sharded for Misspelt {
    fn wrap_policy() -> WrapPolicy {
        WrapPolicy::new().field("linear", FieldRule::unit().precision("bf16").reduce("fp8"))
    }
}

#[test]
fn an_element_type_that_does_not_exist_is_refused_by_word_and_unit() {
    let error = launch(&config(Stage::Parameters, 2), |rank| {
        rank.shard(Misspelt { linear: LinearConfig::new(2, 2).init(&rank.device()) }).map(drop)
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("`linear`") && error.contains("`reduce = \"fp8\"` is no element type"), "{error}");
}

#[test]
fn the_optimizers_state_is_float32_under_half_precision() {
    for stage in Stage::ALL {
        let root = std::env::temp_dir().join(format!("fsdp-burn-state-{}-{}", stage.number(), std::process::id()));
        let dir = root.clone();
        let dtypes = launch(&half(stage, 2, Dtype::Bf16), move |rank| {
            let mut model = start::<Gpt>(&rank)?;
            let mut optim = rank.optimizer(Optimizer::AdamW.build())?;
            let gradients = model.backward(model.loss(0, share(&rank), &rank.device()))?;
            optim.step(0.01, &mut model, gradients)?;
            let saved = model.save(&dir, &optim, Default::default(), &Default::default())?;
            let tensors = Manifest::read(&saved.dir).unwrap().tensors.into_iter();
            let dtypes = tensors.map(|tensor| (tensor.kind, tensor.dtype.to_string())).collect::<Vec<_>>();
            rank.barrier()?;
            Ok(dtypes)
        });
        let _ = std::fs::remove_dir_all(&root);
        let dtypes = dtypes.unwrap().concat();
        assert!(dtypes.iter().any(|(kind, _)| *kind == TensorKind::Optimizer), "{stage}");
        assert!(dtypes.iter().all(|(_, dtype)| dtype.to_lowercase() == "f32"), "{stage}: {dtypes:?}");
    }
}

/// A model whose gradient is 40000 everywhere: two of them are beyond f16.
#[derive(Module, Debug, Sharded)]
struct Steep {
    #[shard(unit)]
    slope: Param<Tensor<2>>,
}

#[test]
fn half_precision_sums_over_shards_do_not_overflow_where_the_mean_does_not() {
    for axes in [vec![(Axis::Shard, 4)], vec![(Axis::Replicate, 2), (Axis::Shard, 2)]] {
        let mut config = half(Stage::Parameters, 4, Dtype::F32);
        (config.mesh, config.precision.reduce) = (Some(Mesh::new(axes).unwrap()), Dtype::F16);
        config.precision.loss_scale = Some(LossScale::Fixed(1.0));
        launch(&config, |rank| {
            let slope = Param::from_tensor(Tensor::zeros([4, 3], &rank.device()));
            let mut model = rank.shard(Steep { slope })?;
            let mut optim = rank.optimizer(SgdConfig::new().init())?;
            let gradients = model.backward(model.slope.val().mul_scalar(40000.0).sum())?;
            optim.step(1e-5, &mut model, gradients)?;
            let weights = weights(&model)?;
            assert!(weights[0].1.iter().all(|value| (value + 0.4).abs() < 1e-3), "{weights:?}");
            Ok(())
        })
        .unwrap();
    }
}

/// In bf16 256 and 1 are 256, so eight small gradients after a large one would be lost.
#[test]
fn micro_batches_add_up_in_float32_whatever_they_are_computed_and_sent_in() {
    for stage in Stage::ALL {
        for accumulate in [Accumulate::Reduced, Accumulate::Local] {
            for reduce in [Dtype::F32, Dtype::Bf16] {
                let mut config = half(stage, 2, Dtype::Bf16);
                config.precision.reduce = reduce;
                (config.training.accumulate, config.training.gradient_accumulation) = (accumulate, 9);
                let trained = launch(&config, |rank| {
                    let slope = Param::from_tensor(Tensor::zeros([4, 3], &rank.device()));
                    let mut model = rank.shard(Steep { slope })?;
                    let mut optim = rank.optimizer(SgdConfig::new().init())?;
                    for batch in 0..9 {
                        let gradient = if batch == 0 { 256.0 } else { 1.0 };
                        let gradients = model.backward(model.slope.val().mul_scalar(gradient).sum())?;
                        optim.step(1.0, &mut model, gradients)?;
                    }
                    weights(&model)
                });
                let expected = -(256.0 + 8.0) / 9.0;
                for (_, values) in trained.unwrap().into_iter().flatten() {
                    let what = format!("{stage}, {accumulate}, sent in {reduce}: {values:?}");
                    assert!(values.iter().all(|value| (value - expected).abs() < 1e-4), "{what}");
                }
            }
        }
    }
}
