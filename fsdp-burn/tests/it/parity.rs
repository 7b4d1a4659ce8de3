//! Sharded training gives what plain training on one device gives, and every stage gives the same bits.

use fsdp_burn::{Accumulate, Config, PrefetchConfig, Stage, TrainingConfig, launch};

use crate::common::models::{ConvNet, Gpt, Mlp, Recurrent, Trial};
use crate::common::run::{
    Optimizer, Outcome, STEPS, Tolerance, assert_parity, config, on_ranks, plain, plain_for, scalar, sharded,
    sharded_for, share, start_on, weights,
};
use crate::common::wide::Wide;

const WORLD_SIZES: [usize; 4] = [1, 2, 3, 5];

/// More than any trial has units.
const FAR_AHEAD: usize = 20;

/// Stage 0 against the oracle, and all other stages and prefetch depths against stage 0.
pub(crate) fn assert_all_stages<M: Trial>(training: &TrainingConfig, optimizer: Optimizer, world_sizes: &[usize]) {
    let with = |stage, world_size, depth| Config {
        training: training.clone(),
        prefetch: PrefetchConfig { forward: depth, backward: depth, max_bytes: None },
        ..config(stage, world_size)
    };
    let oracle = plain::<M>(&with(Stage::Ddp, 1, 1), optimizer);
    for &world_size in world_sizes {
        let ddp = sharded::<M>(&with(Stage::Ddp, world_size, 1), optimizer);
        assert_parity(&format!("stage 0 on {world_size}, {optimizer:?}"), &oracle, &ddp, optimizer.tolerance());
        let whole = [Stage::OptimizerState, Stage::Gradients].map(|stage| (stage, 1));
        for (stage, depth) in whole.into_iter().chain([0, 1, 2, FAR_AHEAD].map(|depth| (Stage::Parameters, depth))) {
            let got = sharded::<M>(&with(stage, world_size, depth), optimizer);
            let what = format!("{stage} against 0 on {world_size}, prefetch {depth}, {optimizer:?}");
            assert_parity(&what, &ddp, &got, Tolerance::EXACT);
        }
    }
}

fn assert_all<M: Trial>() {
    for optimizer in Optimizer::ALL {
        assert_all_stages::<M>(&TrainingConfig::default(), optimizer, &WORLD_SIZES);
    }
}

#[test]
fn an_mlp_trains_as_on_one_device_and_every_stage_and_prefetch_depth_gives_the_same_bits() {
    assert_all::<Mlp>();
}

#[test]
fn a_convolution_net_trains_as_on_one_device_and_every_stage_and_prefetch_depth_gives_the_same_bits() {
    assert_all::<ConvNet>();
}

#[test]
fn a_gpt_trains_as_on_one_device_and_every_stage_and_prefetch_depth_gives_the_same_bits() {
    assert_all::<Gpt>();
}

#[test]
fn a_first_unit_in_parts_trains_as_on_one_device_and_gives_the_same_bits() {
    let names = launch(&config(Stage::Parameters, 2), |rank| {
        let model = start_on::<Wide>(&rank, rank.device())?;
        Ok(model.plan().units().iter().map(|unit| unit.name.clone()).collect::<Vec<_>>())
    });
    assert_eq!(names.unwrap()[0], ["first part 1 of 2", "first part 2 of 2", "second", "root"]);
    let with = |stage, world_size, gradient_clip_norm| {
        let training = TrainingConfig { gradient_clip_norm, ..TrainingConfig::default() };
        sharded::<Wide>(&Config { training, ..config(stage, world_size) }, Optimizer::Sgd)
    };
    let oracle = plain::<Wide>(&config(Stage::Ddp, 1), Optimizer::Sgd);
    assert_parity("on 3", &oracle, &with(Stage::Parameters, 3, None), Optimizer::Sgd.tolerance());
    let clipped = [Stage::Ddp, Stage::Parameters].map(|stage| with(stage, 2, Some(0.1)));
    assert_parity("stage 3 against 0 on 2", &clipped[0], &clipped[1], Tolerance::EXACT);
}

#[test]
fn clipping_uses_one_global_norm_at_every_stage_and_world_size() {
    let training = TrainingConfig { gradient_clip_norm: Some(0.1), ..TrainingConfig::default() };
    assert_all_stages::<Mlp>(&training, Optimizer::Sgd, &WORLD_SIZES);
    assert_all_stages::<Gpt>(&training, Optimizer::AdamW, &[2, 3]);
    let norms = sharded::<Mlp>(&Config { training, ..config(Stage::Parameters, 3) }, Optimizer::Sgd).norms;
    assert_eq!(norms.len(), STEPS);
    assert!(norms[..5].iter().all(|&norm| norm > 0.1), "the norm before clipping is reported: {norms:?}");
}

#[test]
fn clipping_by_a_norm_of_any_order_is_the_same_at_every_stage_and_world_size() {
    for (gradient_norm_order, most) in [(1.0, 0.5), (3.0, 0.05), (f64::INFINITY, 0.01)] {
        let training =
            TrainingConfig { gradient_clip_norm: Some(most), gradient_norm_order, ..TrainingConfig::default() };
        assert_all_stages::<Mlp>(&training, Optimizer::Sgd, &[1, 2, 3]);
        let norms = sharded::<Mlp>(&Config { training, ..config(Stage::Parameters, 3) }, Optimizer::Sgd).norms;
        assert!(norms[..5].iter().all(|&norm| norm > most), "clipping bites: {norms:?}");
    }
}

#[test]
fn clipping_by_value_cuts_off_the_mean_over_ranks_and_micro_batches() {
    for gradient_accumulation in [1, 3] {
        // Bites: gradients of the trials are of order 0.1.
        let training =
            TrainingConfig { gradient_clip_value: Some(0.005), gradient_accumulation, ..TrainingConfig::default() };
        assert_all_stages::<Mlp>(&training, Optimizer::Sgd, &[1, 2, 3]);
    }
}

#[test]
fn adamw_in_one_pass_gives_the_bits_of_burns_at_every_stage() {
    let training = TrainingConfig { gradient_clip_norm: Some(0.1), ..TrainingConfig::default() };
    for stage in Stage::ALL {
        for world_size in [1, 3] {
            let config = Config { training: training.clone(), ..config(stage, world_size) };
            let [burns, fused] =
                [Optimizer::AdamW, Optimizer::Fused].map(|optimizer| sharded::<Gpt>(&config, optimizer));
            assert_parity(&format!("{stage} on {world_size}"), &burns, &fused, Tolerance::EXACT);
        }
    }
}

#[test]
fn micro_batches_train_as_one_batch_at_every_stage_in_both_modes() {
    for &accumulate in Accumulate::ALL {
        for gradient_accumulation in [1, 2, 5] {
            let training = TrainingConfig { gradient_accumulation, accumulate, ..TrainingConfig::default() };
            assert_all_stages::<Mlp>(&training, Optimizer::Sgd, &[1, 3]);
            assert_all_stages::<Gpt>(&training, Optimizer::AdamW, &[2]);
            let training = TrainingConfig { gradient_clip_norm: Some(0.1), ..training };
            assert_all_stages::<Mlp>(&training, Optimizer::Sgd, &[2]);
        }
    }
}

#[test]
fn an_incomplete_last_window_is_the_mean_over_the_micro_batches_that_were_there() {
    for &accumulate in Accumulate::ALL {
        for stage in Stage::ALL {
            let training = TrainingConfig { gradient_accumulation: 3, accumulate, ..TrainingConfig::default() };
            let config = Config { training, ..config(stage, 3) };
            for num_batches in [4, 5, 6] {
                let expected = plain_for::<Mlp>(&config, Optimizer::Sgd, num_batches);
                let got = sharded_for::<Mlp>(&config, Optimizer::Sgd, num_batches);
                let what = format!("{stage}, {accumulate}, {num_batches} micro-batches");
                assert_parity(&what, &expected, &got, Optimizer::Sgd.tolerance());
            }
        }
    }
}

#[test]
fn parameter_groups_with_rates_of_their_own_and_clipping_by_value_train_as_on_one_device() {
    for optimizer in [Optimizer::Groups, Optimizer::ValueClipping] {
        assert_all_stages::<Mlp>(&TrainingConfig::default(), optimizer, &WORLD_SIZES);
    }
}

/// Recomputes activations in backward, and gathers once more what they are computed from.
fn checkpointed<M: Trial>(config: &Config) -> Outcome {
    on_ranks(config, |rank| {
        let device = rank.device().gradient_checkpointing();
        let mut model = start_on::<M>(&rank, device.clone())?;
        let mut optim = rank.optimizer(Optimizer::AdamW.build())?;
        let mut outcome = Outcome::default();
        for step in 0..STEPS {
            let loss = model.loss(step, share(&rank), &device);
            outcome.losses.push(rank.mean(scalar(&loss))?);
            let gradients = model.backward(loss)?;
            optim.step(Optimizer::AdamW.lr(), &mut model, gradients)?;
        }
        outcome.weights = weights(&model)?;
        Ok(outcome)
    })
}

#[test]
fn gradient_checkpointing_changes_no_bit() {
    fn check<M: Trial>() {
        for stage in Stage::ALL {
            for world_size in [1, 2, 3] {
                let config = config(stage, world_size);
                let expected = sharded::<M>(&config, Optimizer::AdamW);
                let what = format!("{stage} on {world_size}");
                assert_parity(&what, &expected, &checkpointed::<M>(&config), Tolerance::EXACT);
            }
        }
    }
    check::<Mlp>();
    check::<Gpt>();
    check::<Recurrent>();
}
