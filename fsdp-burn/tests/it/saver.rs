//! Saving in the background: the run is the run without it, the files are those of a save that is waited for, and a failure
//! reaches every rank.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use fsdp_burn::{SaveOptions, ShardedModel, ShardedOptimizer, Stage, launch};
use serde_json::json;

use crate::common::files::{Scratch, content};
use crate::common::models::{Gpt, Mlp, Trial};
use crate::common::run::{Optimizer, Weights, config, scalar, share, start, weights};

/// Trains six steps and saves after each second one. Losses and weights.
fn train(root: &Path, stage: Stage, optimizer: Optimizer, in_background: bool) -> (Vec<f64>, Weights) {
    let root = root.to_owned();
    let runs = launch(&config(stage, 3), move |rank| {
        let mut model = start::<Gpt>(&rank)?;
        let mut optim = rank.optimizer(optimizer.build())?;
        let options = SaveOptions::default();
        let mut saver = rank.saver(&root, options)?;
        let mut losses = Vec::new();
        for batch in 0..6 {
            let loss = model.loss(batch, share(&rank), &rank.device());
            losses.push(rank.mean(scalar(&loss))?);
            let gradients = model.backward(loss)?;
            optim.step(optimizer.lr(), &mut model, gradients)?;
            if batch % 2 == 1 {
                let sections = BTreeMap::from([("batch".to_owned(), json!(batch))]);
                match in_background {
                    true => drop(saver.save(&model, &optim, sections)?),
                    false => drop(model.save(&root, &optim, sections, &options)?),
                }
            }
            saver.poll()?;
        }
        saver.finish()?;
        assert!(!saver.is_saving());
        Ok((losses, weights(&model)?))
    });
    runs.unwrap().swap_remove(0)
}

#[test]
fn a_run_saved_in_the_background_is_the_same_and_so_are_its_checkpoints() {
    for (stage, optimizer) in [
        (Stage::Ddp, Optimizer::AdamW),
        (Stage::OptimizerState, Optimizer::Fused),
        (Stage::Gradients, Optimizer::Sgd),
        (Stage::Parameters, Optimizer::AdamW),
        (Stage::Parameters, Optimizer::Fused),
    ] {
        let (waited, background) = (Scratch::new("waited"), Scratch::new("background"));
        let expected = train(&waited.path(), stage, optimizer, false);
        let got = train(&background.path(), stage, optimizer, true);
        assert!(expected == got, "{stage}, {optimizer:?}");
        for step in ["step-2", "step-4", "step-6"] {
            let expected = content(&waited.path().join(step));
            assert!(expected == content(&background.path().join(step)), "{step} at {stage}, {optimizer:?}");
        }
        assert_eq!(fs::read_to_string(background.path().join("latest")).unwrap(), "step-6\n");
    }
}

#[test]
fn a_save_that_fails_in_the_background_is_every_ranks_error_after_the_next_step_and_training_goes_on() {
    let scratch = Scratch::new("failing");
    let root = scratch.path().join("root");
    fs::write(&root, "a file").unwrap();
    let saved = launch(&config(Stage::Parameters, 3), move |rank| {
        let mut model = start::<Mlp>(&rank)?;
        let mut optim = rank.optimizer(Optimizer::AdamW.build())?;
        let mut saver = rank.saver(&root, SaveOptions::default())?;
        let step = |batch, model: &mut ShardedModel<Mlp>, optim: &mut ShardedOptimizer| {
            let gradients = model.backward(model.loss(batch, share(&rank), &rank.device()))?;
            optim.step(Optimizer::AdamW.lr(), model, gradients)
        };
        step(0, &mut model, &mut optim)?;
        saver.save(&model, &optim, BTreeMap::new())?;
        let mut failure = None;
        for batch in 1..10_000 {
            step(batch, &mut model, &mut optim)?;
            if let Err(error) = saver.poll() {
                failure = Some((batch, error.to_string()));
                break;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let (batch, error) = failure.expect("the save has failed");
        // All ranks are told in the same call, or they would not agree on this.
        assert_eq!(rank.sum(batch as f64)?, 3.0 * batch as f64);
        assert!(error.starts_with("preparing to save: rank 0 failed: cannot create "), "{error}");
        assert!(error.ends_with("name a directory, and not a file"), "{error}");

        rank.barrier()?;
        if rank.is_main() {
            fs::remove_file(&root).unwrap();
        }
        rank.barrier()?;
        step(0, &mut model, &mut optim)?;
        saver.save(&model, &optim, BTreeMap::new())?;
        saver.finish()
    });
    assert!(saved.unwrap().iter().all(|saved| saved.as_ref().unwrap().dir.exists()));
}
