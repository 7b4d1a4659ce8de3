//! Models that do not use every unit once, and programs that do more than train one model.

use std::ops::Range;

use burn::module::Module;
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};
use fsdp_burn::{Config, Rank, Stage, TrainingConfig, launch};

use crate::common::models::{Branches, ConvNet, Gpt, Masked, Mlp, Recurrent, Trial, distance, rows};
use crate::common::run::{
    BATCH, Optimizer, Outcome, STEPS, Tolerance, assert_parity, config, on_ranks, plain_model, plain_weights, scalar,
    sharded, share, start, weights,
};
use crate::common::wide::WideBranches;
use crate::parity::assert_all_stages;

#[test]
fn a_parameter_with_a_gradient_on_some_ranks_only_counts_as_zero_on_the_others() {
    // On 2 ranks rank 0 alone uses the branch; on 3 ranks, ranks 0 and 1.
    for optimizer in Optimizer::ALL {
        assert_all_stages::<Branches>(&TrainingConfig::default(), optimizer, &[1, 2, 3, 5]);
    }
    let training = TrainingConfig { gradient_clip_norm: Some(0.1), ..TrainingConfig::default() };
    assert_all_stages::<Branches>(&training, Optimizer::Sgd, &[2]);
    let training = TrainingConfig { gradient_accumulation: 2, ..TrainingConfig::default() };
    assert_all_stages::<Branches>(&training, Optimizer::Sgd, &[2]);
}

#[test]
fn a_part_of_a_unit_that_some_ranks_leave_out_is_gathered_on_all() {
    for (world_size, reshard_after_forward) in [(2, None), (4, Some(2))] {
        let with = |stage: Stage, reshard_after_forward| {
            let config = Config { reshard_after_forward, ..config(stage, world_size) };
            sharded::<WideBranches>(&config, Optimizer::Sgd)
        };
        let ddp = with(Stage::Ddp, None);
        let what = format!("on {world_size}, resharded to {reshard_after_forward:?}");
        assert_parity(&what, &ddp, &with(Stage::Parameters, reshard_after_forward), Tolerance::EXACT);
    }
}

#[test]
fn a_gradient_of_minus_zero_is_a_gradient() {
    // Momentum moves the masked rows on, and weight decay shrinks them, as only parameters with a gradient are.
    for optimizer in Optimizer::ALL {
        assert_all_stages::<Masked>(&TrainingConfig::default(), optimizer, &[1, 2, 3, 5]);
    }
}

#[test]
fn a_unit_that_no_rank_uses_stays_as_it_is_while_the_others_train() {
    let initial = plain_weights(&plain_model::<Branches>().0);
    for stage in Stage::ALL {
        // Weight decay would move the weights of an unused unit, if it were stepped with a gradient of zero.
        let trained = sharded::<Branches>(&config(stage, 2), Optimizer::AdamW).weights;
        for ((path, before), (_, after)) in initial.iter().zip(&trained) {
            assert_eq!(before == after, path.starts_with("spare"), "{stage}: {path}");
        }
    }
}

/// [`Mlp`], without its second hidden layer where `skips`.
fn loss_without_a_layer(model: &Mlp, skips: bool, batch: usize, samples: Range<usize>, device: &Device) -> Tensor<1> {
    let mut x = relu(model.input.forward(rows(batch + 1, samples.clone(), 7, device)));
    for (_, layer) in model.hidden.iter().enumerate().filter(|(index, _)| !(skips && *index == 1)) {
        x = relu(layer.forward(x));
    }
    distance(model.output.forward(x), batch, samples, device)
}

#[test]
fn a_unit_that_one_rank_skips_has_a_gradient_of_zero_there_or_is_named() {
    let (mut model, device) = plain_model::<Mlp>();
    let mut optim = Optimizer::Sgd.build();
    let mut expected = Outcome::default();
    for step in 0..STEPS {
        let halves = [(false, 0..BATCH / 2), (true, BATCH / 2..BATCH)];
        let losses = halves.map(|(skips, samples)| loss_without_a_layer(&model, skips, step, samples, &device));
        let loss = Tensor::cat(losses.to_vec(), 0).mean();
        expected.losses.push(scalar(&loss));
        let gradients = burn::optim::GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(Optimizer::Sgd.lr(), model, gradients);
    }
    expected.weights = plain_weights(&model);
    let program = |rank: Rank| {
        let mut model = start::<Mlp>(&rank)?;
        let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
        let mut outcome = Outcome::default();
        for step in 0..STEPS {
            let loss = loss_without_a_layer(&model, rank.rank() == 1, step, share(&rank), &rank.device());
            outcome.losses.push(rank.mean(scalar(&loss))?);
            let gradients = model.backward(loss)?;
            optim.step(Optimizer::Sgd.lr(), &mut model, gradients)?;
        }
        outcome.weights = weights(&model)?;
        Ok(outcome)
    };
    for stage in [Stage::Ddp, Stage::OptimizerState, Stage::Gradients] {
        assert_parity(&stage.to_string(), &expected, &on_ranks(&config(stage, 2), program), Optimizer::Sgd.tolerance());
    }
    // Where the others gather what this rank does not, there is no gradient that could be right.
    let error = launch(&config(Stage::Parameters, 2), program).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("`hidden.1`") && error.contains("`hidden.2`"), "{error}");
}

#[test]
fn units_used_several_times_in_one_forward_sum_their_gradients_once() {
    for optimizer in Optimizer::ALL {
        assert_all_stages::<Recurrent>(&TrainingConfig::default(), optimizer, &[1, 2, 3, 5]);
    }
}

#[test]
fn several_forwards_before_one_backward_train_as_on_one_device() {
    let (mut model, device) = plain_model::<Mlp>();
    let mut expected = Outcome::default();
    let mut optim = Optimizer::Sgd.build();
    let loss_of = |a: Tensor<1>, b: Tensor<1>| a + b * 0.5;
    for step in 0..STEPS {
        let loss = loss_of(model.loss(step, 0..BATCH, &device), model.loss(step + 50, 0..BATCH, &device));
        expected.losses.push(scalar(&loss));
        let gradients = burn::optim::GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(0.05, model, gradients);
    }
    expected.weights = plain_weights(&model);
    let mut first: Option<Outcome> = None;
    for stage in Stage::ALL {
        let got = on_ranks(&config(stage, 3), move |rank| {
            let mut model = start::<Mlp>(&rank)?;
            let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
            let mut outcome = Outcome::default();
            for step in 0..STEPS {
                let one = model.loss(step, share(&rank), &rank.device());
                let loss = loss_of(one, model.loss(step + 50, share(&rank), &rank.device()));
                outcome.losses.push(rank.mean(scalar(&loss))?);
                let gradients = model.backward(loss)?;
                optim.step(0.05, &mut model, gradients)?;
            }
            outcome.weights = weights(&model)?;
            Ok(outcome)
        });
        assert_parity(&stage.to_string(), &expected, &got, Optimizer::Sgd.tolerance());
        assert_parity(&stage.to_string(), first.get_or_insert_with(|| got.clone()), &got, Tolerance::EXACT);
    }
}

/// Trains and evaluates after every step; the losses are those of the evaluations.
fn trained_and_evaluated<M: Trial>(config: &Config) -> (Outcome, Outcome) {
    let both = on_ranks(config, |rank| {
        let mut model = start::<M>(&rank)?;
        let mut optim = rank.optimizer(Optimizer::AdamW.build())?;
        let device = rank.device();
        let mut outcome = Outcome::default();
        for step in 0..STEPS {
            let loss = model.loss(step, share(&rank), &device);
            outcome.losses.push(rank.mean(scalar(&loss))?);
            let gradients = model.backward(loss)?;
            optim.step(Optimizer::AdamW.lr(), &mut model, gradients)?;
            let loss = model.valid().loss(99, share(&rank), &device.clone().inner());
            outcome.norms.push(rank.mean(scalar(&loss))?);
        }
        outcome.weights = weights(&model)?;
        Ok(outcome)
    });
    let evaluated = Outcome { losses: both.norms, ..Outcome::default() };
    (Outcome { norms: Vec::new(), ..both }, evaluated)
}

#[test]
fn evaluation_between_steps_sees_the_new_weights_and_leaves_training_alone() {
    let (mut model, device) = plain_model::<Gpt>();
    let mut optim = Optimizer::AdamW.build();
    let mut expected = Outcome::default();
    for step in 0..STEPS {
        let loss = model.loss(step, 0..BATCH, &device);
        let gradients = burn::optim::GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(Optimizer::AdamW.lr(), model, gradients);
        expected.losses.push(scalar(&model.valid().loss(99, 0..BATCH, &device.clone().inner())));
    }
    for stage in Stage::ALL {
        let undisturbed = sharded::<Gpt>(&config(stage, 2), Optimizer::AdamW);
        let (trained, evaluated) = trained_and_evaluated::<Gpt>(&config(stage, 2));
        assert_parity(&format!("training at {stage}"), &undisturbed, &trained, Tolerance::EXACT);
        assert_parity(&format!("evaluation at {stage}"), &expected, &evaluated, Optimizer::AdamW.tolerance());
    }
}

#[test]
fn two_sharded_models_in_one_program_do_not_disturb_each_other() {
    for stage in Stage::ALL {
        let config = config(stage, 2);
        let both = on_ranks(&config, |rank| {
            let (mut a, mut b) = (start::<Mlp>(&rank)?, start::<ConvNet>(&rank)?);
            let mut optim_a = rank.optimizer(Optimizer::Sgd.build())?;
            let mut optim_b = rank.optimizer(Optimizer::AdamW.build())?;
            let mut outcome = Outcome::default();
            for step in 0..STEPS {
                let loss_a = a.loss(step, share(&rank), &rank.device());
                let loss_b = b.loss(step, share(&rank), &rank.device());
                outcome.losses.push(rank.mean(scalar(&loss_a))?);
                outcome.losses.push(rank.mean(scalar(&loss_b))?);
                let gradients = b.backward(loss_b)?;
                optim_b.step(Optimizer::AdamW.lr(), &mut b, gradients)?;
                let gradients = a.backward(loss_a)?;
                optim_a.step(Optimizer::Sgd.lr(), &mut a, gradients)?;
            }
            outcome.weights = weights(&a)?;
            outcome.weights.extend(weights(&b)?);
            Ok(outcome)
        });
        let (a, b) = (sharded::<Mlp>(&config, Optimizer::Sgd), sharded::<ConvNet>(&config, Optimizer::AdamW));
        let losses = a.losses.iter().zip(&b.losses).flat_map(|(a, b)| [*a, *b]).collect();
        let expected = Outcome { losses, norms: Vec::new(), weights: [a.weights, b.weights].concat() };
        assert_parity(&stage.to_string(), &expected, &both, Tolerance::EXACT);
    }
}

#[test]
fn an_optimizer_made_before_the_model_trains_it_all_the_same() {
    let expected = sharded::<Mlp>(&config(Stage::Parameters, 2), Optimizer::AdamW);
    let got = on_ranks(&config(Stage::Parameters, 2), |rank| {
        let mut optim = rank.optimizer(Optimizer::AdamW.build())?;
        let mut model = start::<Mlp>(&rank)?;
        let mut outcome = Outcome::default();
        for step in 0..STEPS {
            let loss = model.loss(step, share(&rank), &rank.device());
            outcome.losses.push(rank.mean(scalar(&loss))?);
            let gradients = model.backward(loss)?;
            optim.step(Optimizer::AdamW.lr(), &mut model, gradients)?;
        }
        outcome.weights = weights(&model)?;
        Ok(outcome)
    });
    assert_parity("optimizer first", &expected, &got, Tolerance::EXACT);
}
