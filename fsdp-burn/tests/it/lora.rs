//! LoRA: base and adapters sharded, and only the adapters trained.

use burn::module::{Lora, Module};
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use fsdp_burn::{Dtype, OpKind, Sharded, Stage, launch};
use fsdp_core::checkpoint::{Manifest, TensorKind};

use crate::common::models::{Adapted, Gpt, Mlp, RecomputedGpt, Trial};
use crate::common::run::{
    BATCH, Optimizer, Outcome, SEED, STEPS, Tolerance, assert_parity, config, plain_model, plain_weights, scalar,
    seeded, sharded, share, start,
};

/// Plain Burn on one device.
fn plain<M: Trial>(optimizer: Optimizer) -> Outcome {
    let (mut model, device) = plain_model::<Adapted<M>>();
    let mut optim = optimizer.build();
    let mut outcome = Outcome::default();
    for batch in 0..STEPS {
        let loss = model.loss(batch, 0..BATCH, &device);
        outcome.losses.push(scalar(&loss));
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(optimizer.lr(), model, gradients);
    }
    outcome.weights = plain_weights(&model);
    outcome
}

fn assert_trains_as_on_one_device<M: Trial>() {
    for optimizer in [Optimizer::Sgd, Optimizer::Fused] {
        let expected = plain::<M>(optimizer);
        for stage in Stage::ALL {
            let alone = sharded::<Adapted<M>>(&config(stage, 1), optimizer);
            assert_parity(&format!("{stage} on one rank"), &expected, &alone, Tolerance::EXACT);
            let got = sharded::<Adapted<M>>(&config(stage, 3), optimizer);
            assert_parity(&format!("{stage}"), &expected, &got, optimizer.tolerance());
        }
        let moved = expected.weights.iter().zip(plain_weights(&plain_model::<Adapted<M>>().0));
        for ((path, after), (_, before)) in moved {
            let is_factor = path.contains(".lora.");
            assert_eq!(*after != before, is_factor, "{path}");
        }
    }
}

#[test]
fn adapters_train_as_on_one_device_at_every_stage() {
    assert_trains_as_on_one_device::<Mlp>();
    assert_trains_as_on_one_device::<Gpt>();
}

#[test]
fn recomputed_blocks_with_adapters_give_the_same_bits() {
    let expected = sharded::<Adapted<Gpt>>(&config(Stage::Parameters, 2), Optimizer::AdamW);
    let mut got = sharded::<Adapted<RecomputedGpt>>(&config(Stage::Parameters, 2), Optimizer::AdamW);
    got.weights.iter_mut().for_each(|(path, _)| *path = path.replace("gpt.", ""));
    assert_parity("recomputed", &expected, &got, Tolerance::EXACT);
}

#[test]
fn adapters_and_half_precision_go_together() {
    let with = |stage| {
        let mut config = config(stage, 2);
        config.precision.parameters = Dtype::Bf16;
        sharded::<Adapted<Gpt>>(&config, Optimizer::Fused)
    };
    let expected = with(Stage::Ddp);
    for stage in [Stage::OptimizerState, Stage::Gradients, Stage::Parameters] {
        assert_parity(&format!("{stage}"), &expected, &with(stage), Tolerance::EXACT);
    }
}

/// Bases have no gradient, no reduction and no optimizer state, and no rank holds a whole one between forward and backward.
#[test]
fn only_adapters_cost_gradients_and_optimizer_state() {
    for stage in [Stage::OptimizerState, Stage::Gradients, Stage::Parameters] {
        let ranks = launch(&config(stage, 2), move |rank| {
            let mut model = start::<Adapted<Gpt>>(&rank)?;
            let mut optim = rank.optimizer(Optimizer::AdamW.build())?;
            for batch in 0..3 {
                model.synchronize()?;
                model.reset_stats();
                rank.traffic().reset();
                let gradients = model.backward(model.loss(batch, share(&rank), &rank.device()))?;
                optim.step(0.01, &mut model, gradients)?;
            }
            model.synchronize()?;
            let trained = model.plan().params().iter().filter(|param| param.trainable);
            let trained_bytes: usize = trained.map(|param| 4 * param.layout.full_len()).sum();
            let whole: usize = model.plan().params().iter().map(|param| 4 * param.layout.full_len()).sum();
            let reduced = rank.traffic().of(OpKind::ReduceScatter).sent_bytes as usize;
            let root = std::env::temp_dir().join(format!("fsdp-burn-lora-{}-{}", stage.number(), std::process::id()));
            let saved = model.save(&root, &optim, Default::default(), &Default::default())?;
            let state = Manifest::read(&saved.dir).unwrap().tensors.into_iter();
            let state = state.filter(|tensor| tensor.kind == TensorKind::Optimizer).map(|tensor| tensor.name);
            let state: Vec<String> = state.collect();
            rank.barrier()?;
            let _ = std::fs::remove_dir_all(&root);
            Ok((reduced, trained_bytes, whole, model.stats().peak_gradient_bytes, state))
        });
        let ranks = ranks.unwrap();
        let reduced: usize = ranks.iter().map(|rank| rank.0).sum();
        for (_, trained_bytes, whole, peak_gradients, state) in ranks {
            assert!(!state.is_empty() && state.iter().all(|name| name.contains(".lora.")), "{state:?}");
            assert!(trained_bytes * 2 < whole);
            assert_eq!(reduced, trained_bytes, "each rank sends the other's half, at {stage}");
            assert!(peak_gradients <= trained_bytes, "{peak_gradients} of {trained_bytes} at {stage}");
        }
    }
}

#[test]
fn the_whole_model_is_in_full_precision_and_its_adapters_merge_as_on_one_device() {
    for parameters in [Dtype::F32, Dtype::Bf16] {
        let mut config = config(Stage::Parameters, 2);
        config.precision.parameters = parameters;
        launch(&config, move |rank| {
            let whole = start::<Adapted<Mlp>>(&rank)?.whole()?.materialize();
            let expected = plain_weights(&plain_model::<Adapted<Mlp>>().0.valid().materialize());
            let got = plain_weights(&whole);
            assert_eq!(got.len(), expected.len());
            for ((path, expected), (_, got)) in expected.iter().zip(&got) {
                assert_eq!(expected, got, "{path} in {parameters}");
            }
            Ok(())
        })
        .unwrap();
    }
}

/// One layer that stays as each rank has built it.
#[derive(Module, Debug, Sharded)]
struct Ignoring {
    #[shard(unit)]
    inside: Linear,
    #[shard(ignore)]
    outside: Linear,
}

#[test]
fn an_adapter_on_a_field_that_is_not_sharded_is_refused_by_name() {
    let error = launch(&config(Stage::Parameters, 2), |rank| {
        let device = rank.device();
        let turn = seeded(&device, SEED);
        let linear = || LinearConfig::new(4, 4).init(&device);
        let model = Ignoring { inside: linear(), outside: linear() }.apply_lora(Lora::new(2, 4.0));
        drop(turn);
        rank.shard(model).map(drop)
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("`outside.weight`") && error.contains("set_param_group"), "{error}");
}
