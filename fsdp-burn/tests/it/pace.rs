//! Ranks with unequal numbers of batches, unequal lengths, and decisions of their own: they keep pace, or are told.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use burn::module::Module;
use burn::optim::GradientsParams;
use fsdp_burn::{Axis, Config, Mesh, Rank, SaveOptions, Stage, launch};

use crate::common::models::{Gpt, Mlp, Trial};
use crate::common::run::{
    Optimizer, Outcome, STEPS, Tolerance, assert_parity, config, on_ranks, plain_model, plain_weights, scalar, start,
    weights,
};

/// Batches of each rank: of eight samples, and not equally many.
const NUM_BATCHES: [usize; 3] = [24, STEPS, 22];
const SAMPLES: usize = 8;

fn samples(rank: usize) -> std::ops::Range<usize> {
    rank * SAMPLES..(rank + 1) * SAMPLES
}

/// Plain training on one device: each step is over the samples of the ranks that `take_part` in it.
fn oracle(num_steps: usize, takes_part: fn(usize, usize) -> bool) -> Outcome {
    let (mut model, device) = plain_model::<Mlp>();
    let mut optim = Optimizer::Sgd.build();
    let mut outcome = Outcome::default();
    for step in 0..num_steps {
        let ranks = (0..NUM_BATCHES.len()).filter(|&rank| takes_part(rank, step));
        let losses: Vec<_> = ranks.map(|rank| model.loss(step, samples(rank), &device)).collect();
        let loss = burn::tensor::Tensor::cat(losses, 0).mean();
        outcome.losses.push(scalar(&loss));
        model = optim.step(0.05, model.clone(), GradientsParams::from_grads(loss.backward(), &model));
    }
    outcome.weights = plain_weights(&model);
    outcome
}

#[test]
fn ranks_with_unequal_numbers_of_batches_stop_together_or_go_on_without_weight() {
    // All stop with the shortest, or the longest goes on alone.
    let together = oracle(STEPS, |_, _| true);
    let to_the_end = oracle(24, |rank, step| step < NUM_BATCHES[rank]);
    for stage in Stage::ALL {
        let got = on_ranks(&config(stage, 3), |rank| {
            let mut model = start::<Mlp>(&rank)?;
            let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
            let mut outcome = Outcome::default();
            for batch in rank.while_all(0..NUM_BATCHES[rank.rank()]) {
                let loss = model.loss(batch?, samples(rank.rank()), &rank.device());
                outcome.losses.push(rank.mean(scalar(&loss))?);
                let gradients = model.backward(loss)?;
                optim.step(0.05, &mut model, gradients)?;
            }
            outcome.weights = weights(&model)?;
            Ok(outcome)
        });
        assert_parity(&format!("together at {stage}"), &together, &got, Optimizer::Sgd.tolerance());
        let got = on_ranks(&config(stage, 3), |rank| {
            let mut model = start::<Mlp>(&rank)?;
            let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
            let mut outcome = Outcome::default();
            for batch in rank.while_any(0..NUM_BATCHES[rank.rank()]) {
                let batch = batch?;
                let weight = if batch.is_some() { SAMPLES as f64 } else { 0.0 };
                let loss = model.loss(batch.unwrap_or(0), samples(rank.rank()), &rank.device());
                let (sum, total) = (rank.sum(scalar(&loss) * weight)?, rank.sum(weight)?);
                outcome.losses.push(sum / total);
                let gradients = model.backward_weighted(loss, weight)?;
                optim.step(0.05, &mut model, gradients)?;
            }
            outcome.weights = weights(&model)?;
            Ok(outcome)
        });
        assert_parity(&format!("to the end at {stage}"), &to_the_end, &got, Optimizer::Sgd.tolerance());
    }
}

#[test]
fn validation_over_unequal_numbers_of_batches_is_the_mean_over_all_samples() {
    let (model, device) = plain_model::<Gpt>();
    let (model, device) = (model.valid(), device.inner());
    let loss = |rank: usize, batch| scalar(&model.loss(batch, samples(rank), &device));
    let all: Vec<f64> = (0..3)
        .flat_map(|rank| (0..NUM_BATCHES[rank]).map(move |batch| (rank, batch)))
        .map(|(rank, batch)| loss(rank, batch))
        .collect();
    let expected = Outcome { losses: vec![all.iter().sum::<f64>() / all.len() as f64], ..Outcome::default() };
    for stage in Stage::ALL {
        let got = on_ranks(&config(stage, 3), |rank| {
            let model = start::<Gpt>(&rank)?;
            let (valid, device) = (model.valid(), rank.device().inner());
            let (mut sum, mut num) = (0.0, 0.0);
            for batch in rank.while_any(0..NUM_BATCHES[rank.rank()]) {
                let batch = batch?;
                let loss = scalar(&valid.loss(batch.unwrap_or(0), samples(rank.rank()), &device));
                sum += if batch.is_some() { loss } else { 0.0 };
                num += f64::from(u8::from(batch.is_some()));
            }
            Ok(Outcome { losses: vec![rank.sum(sum)? / rank.sum(num)?], ..Outcome::default() })
        });
        assert_parity(&stage.to_string(), &expected, &got, Tolerance { losses: 1e-6, ..Tolerance::EXACT });
    }
}

/// Forwards of each rank, one after the other, as generating token by token makes them.
fn generated(rank: &Rank, length: usize, keep_pace: bool) -> Result<Vec<f64>, fsdp_burn::Error> {
    let model = start::<Gpt>(rank)?;
    let (valid, device) = (model.valid(), rank.device().inner());
    let mut values = Vec::new();
    for step in 0.. {
        let is_going_on = step < length;
        if !(if keep_pace { rank.any(is_going_on)? } else { is_going_on }) {
            break;
        }
        let value = scalar(&valid.loss(step, samples(rank.rank()), &device));
        if is_going_on {
            values.push(value);
        }
    }
    Ok(values)
}

#[test]
fn generation_of_unequal_lengths_keeps_pace_on_every_mesh_and_gives_what_one_device_gives() {
    let (model, device) = plain_model::<Gpt>();
    let (model, device) = (model.valid(), device.inner());
    let length = |rank: usize| 2 + 2 * rank;
    let mesh = |replicate, shard| Mesh::new([(Axis::Replicate, replicate), (Axis::Shard, shard)]).unwrap();
    for mesh in [None, Some(mesh(2, 2)), Some(mesh(4, 1))] {
        let config = Config { mesh: mesh.clone(), ..config(Stage::Parameters, 4) };
        let got = launch(&config, move |rank| generated(&rank, length(rank.rank()), true)).unwrap();
        for (rank, got) in got.iter().enumerate() {
            assert_eq!(got.len(), length(rank));
            for (step, got) in got.iter().enumerate() {
                let expected = scalar(&model.loss(step, samples(rank), &device));
                assert!(
                    (got - expected).abs() <= 1e-6 * expected,
                    "{mesh:?}, rank {rank}, step {step}: {got}, not {expected}"
                );
            }
        }
    }
}

#[test]
fn generation_that_does_not_keep_pace_names_the_rank_that_has_ended() {
    let begun = Instant::now();
    let config = Config { timeout_s: 300.0, ..config(Stage::Parameters, 2) };
    let error = launch(&config, |rank| generated(&rank, 2 + 2 * rank.rank(), false).map(drop)).unwrap_err().to_string();
    assert!(error.contains("for rank 0, whose program has returned") && error.contains("forward, unit `"), "{error}");
    assert!(begun.elapsed() < Duration::from_secs(60), "it did not wait for the time limit");
}

/// Trains, and saves where `is_time` says so of this rank's own loss. Returns the steps that were saved.
fn saving(
    config: &Config,
    name: &str,
    is_time: fn(&Rank, f64) -> Result<bool, fsdp_burn::Error>,
) -> Result<Vec<Vec<usize>>, fsdp_burn::Error> {
    let root = std::env::temp_dir().join(format!("fsdp-burn-pace-{name}-{}", std::process::id()));
    let dir = root.clone();
    let saved = launch(config, move |rank| {
        let mut model = start::<Mlp>(&rank)?;
        let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
        let mut saved = Vec::new();
        for step in 0..4 {
            let loss = model.loss(step, samples(rank.rank()), &rank.device());
            let own = scalar(&loss);
            let gradients = model.backward(loss)?;
            optim.step(0.05, &mut model, gradients)?;
            if is_time(&rank, own)? {
                model.save(&dir, &optim, BTreeMap::new(), &SaveOptions::default())?;
                saved.push(step + 1);
            }
        }
        Ok(saved)
    });
    let _ = std::fs::remove_dir_all(root);
    saved
}

#[test]
fn a_save_is_decided_together_and_one_that_is_not_ends_all_ranks_with_the_operations_that_met() {
    for stage in Stage::ALL {
        // Some rank's loss is low enough in some steps: `any` lets all of them save then.
        let together = saving(&config(stage, 3), "together", |rank, loss| rank.any(rank.rank() == 1 && loss < 10.0));
        let together = together.unwrap();
        assert_eq!(together, vec![vec![1, 2, 3, 4]; 3], "{stage}");

        let begun = Instant::now();
        let impatient = Config { timeout_s: 8.0, ..config(stage, 3) };
        let alone = saving(&impatient, "alone", |rank, loss| Ok(rank.rank() == 1 && loss < 10.0));
        let error = alone.unwrap_err().to_string();
        assert!(begun.elapsed() < Duration::from_secs(40), "{stage}: {:?}", begun.elapsed());
        // Whoever gives up first: rank 1 in the save, or another in the next step.
        let is_told = error.contains("for rank 1") || error.contains("rank 1 waited") && error.contains("checkpoint");
        assert!(is_told && error.contains("step 1"), "{stage}: {error}");
    }
}
