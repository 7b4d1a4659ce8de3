//! What goes wrong on the way leaves nothing behind: given-up forwards, losses that do not count, ranks that end early.

use std::thread;
use std::time::{Duration, Instant};

use burn::tensor::Tensor;
use fsdp_burn::{Config, Error, LaunchOptions, PrefetchConfig, Stage, TrainingConfig, launch, launch_with};
use fsdp_core::Link;

use crate::common::models::{Mlp, Trial};
use crate::common::run::{
    BATCH, Optimizer, Outcome, Tolerance, assert_parity, config, on_ranks, plain_model, plain_weights, scalar, share,
    start, weights,
};

#[test]
fn forwards_without_backward_cost_nothing_afterwards() {
    for stage in Stage::ALL {
        let peaks = |num_abandoned: usize| {
            let results = launch(&config(stage, 2), move |rank| {
                let mut model = start::<Mlp>(&rank)?;
                let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
                for step in 0..5 {
                    if step == 1 {
                        for _ in 0..num_abandoned {
                            drop(model.loss(step, share(&rank), &rank.device()));
                        }
                    }
                    let loss = model.loss(step, share(&rank), &rank.device());
                    let gradients = model.backward(loss)?;
                    optim.step(0.05, &mut model, gradients)?;
                    // The step after it still gathers ahead in the order of that long forward.
                    if step == 2 {
                        model.reset_stats();
                    }
                }
                let stats = model.stats();
                Ok(([stats.peak_gathered_bytes, stats.peak_gradient_bytes], weights(&model)?))
            });
            results.unwrap().remove(0)
        };
        let ((expected, expected_weights), (got, got_weights)) = (peaks(0), peaks(20));
        assert_eq!(expected, got, "{stage}: peak bytes of gathered units and of gradients");
        assert!(expected_weights == got_weights, "{stage}: other weights");
    }
}

#[test]
fn a_rank_of_weight_zero_does_not_count_whatever_its_loss_is() {
    for stage in Stage::ALL {
        let run = |poison: bool| {
            on_ranks(&config(stage, 2), move |rank| {
                let mut model = start::<Mlp>(&rank)?;
                let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
                for step in 0..3 {
                    let mut loss = model.loss(step, share(&rank), &rank.device());
                    if poison && rank.rank() == 1 {
                        loss = loss / Tensor::zeros([1], &rank.device());
                    }
                    let weight = if rank.rank() == 1 { 0.0 } else { 15.0 };
                    let gradients = model.backward_weighted(loss, weight)?;
                    optim.step(0.05, &mut model, gradients)?;
                }
                Ok(Outcome { weights: weights(&model)?, ..Outcome::default() })
            })
        };
        assert_parity(&format!("{stage}"), &run(false), &run(true), Tolerance::EXACT);
    }
}

#[test]
fn weights_of_losses_count_over_all_micro_batches_and_ranks() {
    // Two micro-batches on two ranks, of 12 and 3, 9 and 6 samples: as one device over all 30.
    const LENS: [[usize; 2]; 2] = [[12, 3], [9, 6]];
    let (model, device) = plain_model::<Mlp>();
    let parts: Vec<_> = LENS.iter().enumerate().flat_map(|(batch, lens)| lens.map(|len| (batch, len))).collect();
    let sum = parts.iter().map(|&(batch, len)| model.loss(batch, 0..len, &device) * (len as f32 / 30.0));
    let loss = sum.reduce(|a, b| a + b).unwrap();
    let mut outcome = Outcome { losses: vec![scalar(&loss)], ..Outcome::default() };
    let gradients = burn::optim::GradientsParams::from_grads(loss.backward(), &model);
    outcome.weights = plain_weights(&Optimizer::Sgd.build().step(0.05, model, gradients));
    for stage in Stage::ALL {
        let training = TrainingConfig { gradient_accumulation: 2, ..TrainingConfig::default() };
        let got = on_ranks(&Config { training, ..config(stage, 2) }, |rank| {
            let mut model = start::<Mlp>(&rank)?;
            let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
            let mut sum = 0.0;
            for (batch, lens) in LENS.iter().enumerate() {
                let len = lens[rank.rank()];
                let loss = model.loss(batch, 0..len, &rank.device());
                sum += scalar(&loss) * len as f64 / 30.0;
                let gradients = model.backward_weighted(loss, len as f64)?;
                optim.step(0.05, &mut model, gradients)?;
            }
            Ok(Outcome { losses: vec![rank.sum(sum)?], weights: weights(&model)?, ..Outcome::default() })
        });
        assert_parity(&format!("{stage}"), &outcome, &got, Optimizer::Sgd.tolerance());
    }
}

/// Whichever of the two comes first.
#[test]
fn a_loss_without_a_weight_counts_as_one_item_beside_weighted_ones() {
    for weighted_first in [true, false] {
        let weight = move |batch: usize| ((batch == 0) == weighted_first).then_some(12.0);
        let (model, device) = plain_model::<Mlp>();
        let sum =
            (0..2).map(|batch| model.loss(batch, 0..BATCH, &device) * (weight(batch).map_or(1.0, |w| 2.0 * w) / 25.0));
        let gradients = burn::optim::GradientsParams::from_grads(sum.reduce(|a, b| a + b).unwrap().backward(), &model);
        let weights_after = plain_weights(&Optimizer::Sgd.build().step(0.05, model, gradients));
        let expected = Outcome { weights: weights_after, ..Outcome::default() };
        for stage in Stage::ALL {
            let training = TrainingConfig { gradient_accumulation: 2, ..TrainingConfig::default() };
            let got = on_ranks(&Config { training, ..config(stage, 2) }, move |rank| {
                let mut model = start::<Mlp>(&rank)?;
                let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
                for batch in 0..2 {
                    let loss = model.loss(batch, share(&rank), &rank.device());
                    let gradients = match weight(batch) {
                        Some(weight) => model.backward_weighted(loss, weight)?,
                        None => model.backward(loss)?,
                    };
                    optim.step(0.05, &mut model, gradients)?;
                }
                Ok(Outcome { weights: weights(&model)?, ..Outcome::default() })
            });
            let what = format!("{stage}, the weighted one first: {weighted_first}");
            assert_parity(&what, &expected, &got, Optimizer::Sgd.tolerance());
        }
    }
}

#[test]
fn gradients_of_another_model_are_refused() {
    let results = launch(&config(Stage::Parameters, 2), |rank| {
        let one = start::<Mlp>(&rank)?;
        let mut other = start::<Mlp>(&rank)?;
        let gradients = one.backward(one.loss(0, share(&rank), &rank.device()))?;
        let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
        Ok(optim.step(0.05, &mut other, gradients).unwrap_err().to_string())
    });
    for error in results.unwrap() {
        assert!(error.contains("from another model") && error.contains("its own `backward`"), "{error}");
    }
}

#[test]
fn a_rank_that_fails_at_once_is_the_one_that_is_named() {
    for _ in 0..50 {
        let error = launch(&config(Stage::Ddp, 4), |rank| match rank.rank() {
            0 => Err(Error::program("no data")),
            // A program may turn the consequence of a failure into a failure of its own.
            _ => rank.sum(1.0).map_err(|error| Error::program(error.to_string())),
        });
        assert_eq!(error.unwrap_err().to_string(), "rank 0: no data");
    }
}

#[test]
fn a_rank_lost_before_the_step_ends_the_others_with_its_name() {
    for stage in Stage::ALL {
        let error = launch(&config(stage, 2), |rank| {
            let mut model = start::<Mlp>(&rank)?;
            let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
            for step in 0..2 {
                let gradients = model.backward(model.loss(step, share(&rank), &rank.device()))?;
                if step == 1 && rank.rank() == 1 {
                    return Err(Error::program("gone"));
                }
                optim.step(0.05, &mut model, gradients)?;
            }
            rank.barrier()
        });
        assert_eq!(error.unwrap_err().to_string(), "rank 1: gone", "{stage}");
    }
}

#[test]
fn what_a_model_has_under_way_still_runs_where_it_outlives_its_program() {
    // Each operation takes so long that most of those for the next step are still to begin when the first program returns.
    let link = Some(Link { alpha_s: 0.005, beta_s_per_byte: 0.0 });
    let options = LaunchOptions { link, ..LaunchOptions::default() };
    let prefetch = PrefetchConfig { forward: 3, ..PrefetchConfig::default() };
    let config = Config { prefetch, ..config(Stage::Parameters, 2) };
    // The rank that left may be the first or the second to begin one.
    for _ in 0..5 {
        let results = launch_with(&config, options.clone(), |rank| {
            let mut model = start::<Mlp>(&rank)?;
            let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
            for step in 0..2 {
                let gradients = model.backward(model.loss(step, share(&rank), &rank.device()))?;
                optim.step(0.05, &mut model, gradients)?;
            }
            // The other leaves meanwhile.
            thread::sleep(Duration::from_millis(100 * rank.rank() as u64));
            Ok(model)
        });
        assert_eq!(results.unwrap().len(), 2);
    }
}

#[test]
fn a_rank_that_misses_a_forward_is_named_though_its_model_outlives_its_program() {
    let error = launch(&config(Stage::Parameters, 2), |rank| {
        let model = start::<Mlp>(&rank)?;
        if rank.rank() == 1 {
            // In place, so that it waits for nobody.
            model.valid().loss(0, share(&rank), &rank.device().inner());
        }
        rank.barrier()?;
        Ok(model)
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("rank 1 waits") && error.contains("for rank 0, whose program has returned"), "{error}");
}

#[test]
fn a_rank_with_fewer_steps_is_named_at_once() {
    let begun = Instant::now();
    let error = launch(&Config { timeout_s: 300.0, ..config(Stage::Parameters, 3) }, |rank| {
        let mut model = start::<Mlp>(&rank)?;
        let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
        for step in 0..if rank.rank() == 2 { 1 } else { 2 } {
            let gradients = model.backward(model.loss(step, share(&rank), &rank.device()))?;
            optim.step(0.05, &mut model, gradients)?;
        }
        Ok(())
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("for rank 2, whose program has returned") && error.contains("step 1"), "{error}");
    assert!(begun.elapsed() < Duration::from_secs(60), "it did not wait for the time limit");
}
