//! Means, sums, weights of ranks, and norms that are not finite.

use std::ops::Range;

use burn::optim::GradientsParams;
use fsdp_burn::{Axis, Config, Error, GradientReduction, Mesh, NonFinite, Rank, Stage, StepOutcome, TrainingConfig};

use crate::common::models::{Gpt, Mlp, Trial};
use crate::common::run::{
    BATCH, Optimizer, Outcome, STEPS, Tolerance, assert_parity, config, on_ranks, plain, plain_model, plain_weights,
    scalar, sharded, share, start, weights,
};

/// A step of every rank, by its own rule for loss and backward; the losses are sums over ranks.
fn trained<M, F>(config: &Config, optimizer: Optimizer, step: F) -> Outcome
where
    M: Trial,
    F: Fn(&Rank, &fsdp_burn::ShardedModel<M>, usize) -> Result<(f64, fsdp_burn::ShardedGradients), Error>
        + Send
        + Sync
        + 'static,
{
    on_ranks(config, move |rank| {
        let mut model = start::<M>(&rank)?;
        let mut optim = rank.optimizer(optimizer.build())?;
        let mut outcome = Outcome::default();
        for index in 0..STEPS {
            let (loss, gradients) = step(&rank, &model, index)?;
            outcome.losses.push(rank.sum(loss)?);
            optim.step(optimizer.lr(), &mut model, gradients)?;
        }
        outcome.weights = weights(&model)?;
        Ok(outcome)
    })
}

/// Unequal parts of a batch for three ranks. The last has none.
fn uneven(rank: &Rank) -> Range<usize> {
    [0..75, 75..BATCH, BATCH..BATCH][rank.rank()].clone()
}

#[test]
fn ranks_with_unequal_numbers_of_samples_weigh_as_one_device_over_all_of_them() {
    for gradient_reduction in GradientReduction::ALL {
        let training = TrainingConfig { gradient_reduction: *gradient_reduction, ..TrainingConfig::default() };
        for optimizer in Optimizer::ALL {
            let oracle = plain::<Gpt>(&config(Stage::Ddp, 1), optimizer);
            for stage in Stage::ALL {
                let config = Config { training: training.clone(), ..config(stage, 3) };
                let got = trained::<Gpt, _>(&config, optimizer, |rank, model, step| {
                    let samples = uneven(rank);
                    let weight = samples.len() as f64;
                    // A rank without data runs the same forward over any sample, at no weight.
                    let samples = if samples.is_empty() { 0..1 } else { samples };
                    let loss = model.loss(step, samples, &rank.device());
                    let value = scalar(&loss) * weight / BATCH as f64;
                    Ok((value, model.backward_weighted(loss, weight)?))
                });
                let what = format!("{stage}, {gradient_reduction}, {optimizer:?}");
                assert_parity(&what, &oracle, &got, optimizer.tolerance());
            }
        }
    }
}

#[test]
fn weights_that_are_no_weights_are_an_error_on_every_rank() {
    for weights in [[0.0, 0.0], [1.0, -1.0], [f64::NAN, 1.0], [1.0, f64::INFINITY]] {
        let results = fsdp_burn::launch(&config(Stage::Parameters, 2), move |rank| {
            let model = start::<Mlp>(&rank)?;
            let loss = model.loss(0, share(&rank), &rank.device());
            Ok(model.backward_weighted(loss, weights[rank.rank()]).map(|_| ()).map_err(|error| error.to_string()))
        });
        for (rank, result) in results.unwrap().into_iter().enumerate() {
            let error = result.unwrap_err();
            let mine = format!("with {} on this one", weights[rank]);
            assert!(error.contains("the weights of the loss") && error.contains(&mine), "{weights:?}: {error}");
        }
    }
}

fn meshes() -> [Option<Mesh>; 4] {
    let mesh = |replicate, shard| Mesh::new([(Axis::Replicate, replicate), (Axis::Shard, shard)]).unwrap();
    [None, Some(mesh(2, 2)), Some(mesh(4, 1)), Some(mesh(1, 4))]
}

#[test]
fn gradients_are_means_over_ranks_and_sums_where_asked_on_every_mesh() {
    let oracle = plain::<Mlp>(&config(Stage::Ddp, 1), Optimizer::Sgd);
    for mesh in meshes() {
        for stage in Stage::ALL {
            let mean = Config { mesh: mesh.clone(), ..config(stage, 4) };
            let what = format!("{stage} on {mesh:?}");
            assert_parity(&what, &oracle, &sharded::<Mlp>(&mean, Optimizer::Sgd), Optimizer::Sgd.tolerance());

            let training = TrainingConfig { gradient_reduction: GradientReduction::Sum, ..TrainingConfig::default() };
            let sum = trained::<Mlp, _>(&Config { training, ..mean }, Optimizer::Sgd, |rank, model, step| {
                let loss = model.loss(step, share(rank), &rank.device()).div_scalar(rank.world_size() as f32);
                Ok((scalar(&loss), model.backward(loss)?))
            });
            assert_parity(&format!("sum, {what}"), &oracle, &sum, Optimizer::Sgd.tolerance());
        }
    }
}

#[test]
fn micro_batches_are_summed_where_gradients_are() {
    let training = TrainingConfig {
        gradient_accumulation: 2,
        gradient_reduction: GradientReduction::Sum,
        ..TrainingConfig::default()
    };
    let (mut model, device) = plain_model::<Mlp>();
    let mut optim = Optimizer::Sgd.build();
    for step in 0..STEPS {
        let loss = model.loss(2 * step, 0..BATCH, &device) + model.loss(2 * step + 1, 0..BATCH, &device);
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(0.02, model, gradients);
    }
    let expected = Outcome { weights: plain_weights(&model), ..Outcome::default() };
    for stage in Stage::ALL {
        let got = on_ranks(&Config { training: training.clone(), ..config(stage, 3) }, |rank| {
            let mut model = start::<Mlp>(&rank)?;
            let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
            for batch in 0..2 * STEPS {
                let loss = model.loss(batch, share(&rank), &rank.device()).div_scalar(3.0);
                let gradients = model.backward(loss)?;
                optim.step(0.02, &mut model, gradients)?;
            }
            Ok(Outcome { weights: weights(&model)?, ..Outcome::default() })
        });
        assert_parity(&stage.to_string(), &expected, &got, Optimizer::Sgd.tolerance());
    }
}

/// Trains, with a step in which rank 1 alone overflows, and says what that step did.
fn with_an_overflow(config: &Config, at: Option<usize>) -> (Outcome, Vec<String>) {
    let seen = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let log = seen.clone();
    let outcome = on_ranks(config, move |rank| {
        let mut model = start::<Mlp>(&rank)?;
        let mut optim = rank.optimizer(Optimizer::AdamW.build())?;
        let mut outcome = Outcome::default();
        for step in 0..STEPS {
            let overflows = at == Some(step);
            let mut loss = model.loss(step, share(&rank), &rank.device());
            outcome.losses.extend((!overflows).then_some(rank.mean(scalar(&loss))?));
            if overflows && rank.rank() == 1 {
                loss = loss.mul_scalar(f32::INFINITY);
            }
            let gradients = model.backward(loss)?;
            let done = match optim.step(Optimizer::AdamW.lr(), &mut model, gradients) {
                Ok(StepOutcome::Stepped { .. }) => None,
                Ok(StepOutcome::Skipped { gradient_norm }) => Some(format!("skipped {}", gradient_norm.is_finite())),
                Ok(StepOutcome::Accumulated) => Some("accumulated".to_owned()),
                Err(Error::NonFinite { step, norm }) => Some(format!("error in {step} {}", norm.is_finite())),
                Err(error) => return Err(error),
            };
            log.lock().unwrap().extend(done);
        }
        outcome.weights = weights(&model)?;
        Ok(outcome)
    });
    let seen = std::mem::take(&mut *seen.lock().unwrap());
    (outcome, seen)
}

fn clipped(stage: Stage, non_finite: NonFinite) -> Config {
    let training = TrainingConfig { gradient_clip_norm: Some(0.5), non_finite, ..TrainingConfig::default() };
    Config { training, ..config(stage, 3) }
}

/// The run that never had the step in which the other overflows.
fn without_step(left_out: usize, stage: Stage) -> Outcome {
    on_ranks(&clipped(stage, NonFinite::Error), move |rank| {
        let mut model = start::<Mlp>(&rank)?;
        let mut optim = rank.optimizer(Optimizer::AdamW.build())?;
        let mut outcome = Outcome::default();
        for step in (0..STEPS).filter(|&step| step != left_out) {
            let loss = model.loss(step, share(&rank), &rank.device());
            outcome.losses.push(rank.mean(scalar(&loss))?);
            let gradients = model.backward(loss)?;
            optim.step(Optimizer::AdamW.lr(), &mut model, gradients)?;
        }
        outcome.weights = weights(&model)?;
        Ok(outcome)
    })
}

#[test]
fn an_overflow_on_one_rank_skips_the_step_on_all_and_leaves_weights_and_optimizer_state_alone() {
    for stage in Stage::ALL {
        let expected = without_step(2, stage);
        let (got, seen) = with_an_overflow(&clipped(stage, NonFinite::Skip), Some(2));
        assert_parity(&format!("{stage}, skip"), &expected, &got, Tolerance::EXACT);
        assert_eq!(seen, ["skipped false"; 3]);
        let (got, seen) = with_an_overflow(&clipped(stage, NonFinite::Error), Some(2));
        assert_parity(&format!("{stage}, error"), &expected, &got, Tolerance::EXACT);
        assert_eq!(seen, ["error in 2 false"; 3]);
    }
}

#[test]
fn an_overflow_reaches_every_weight_where_it_is_to_propagate() {
    for stage in Stage::ALL {
        let (got, seen) = with_an_overflow(&clipped(stage, NonFinite::Propagate), Some(STEPS - 1));
        assert_eq!(seen, [""; 0]);
        for (path, values) in got.weights {
            assert!(values.iter().all(|value| value.is_nan()), "{stage}: {path}");
        }
    }
}

#[test]
fn the_reported_norm_is_the_global_one() {
    // A limit that is never reached: the norms are reported, and nothing is clipped.
    let training = TrainingConfig { gradient_clip_norm: Some(1e9), ..TrainingConfig::default() };
    let with = |stage, mesh| Config { training: training.clone(), mesh, ..config(stage, 4) };
    let oracle = plain::<Mlp>(&with(Stage::Ddp, None), Optimizer::Sgd);
    let unclipped = sharded::<Mlp>(&config(Stage::Ddp, 4), Optimizer::Sgd);
    for mesh in meshes() {
        for stage in Stage::ALL {
            let got = sharded::<Mlp>(&with(stage, mesh.clone()), Optimizer::Sgd);
            let what = format!("{stage} on {mesh:?}");
            assert_parity(&what, &oracle, &got, Optimizer::Sgd.tolerance());
            if mesh.is_none() {
                let got = Outcome { norms: Vec::new(), ..got };
                assert_parity(&what, &unclipped, &got, Tolerance::EXACT);
            }
        }
    }
}
