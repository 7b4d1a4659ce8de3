//! A saved run goes on to the last bit, on its own world and from any other.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use burn::nn::DropoutConfig;
use fsdp_burn::nn::Dropout;
use fsdp_burn::{
    Accumulate, Config, Error, RandomState, SaveOptions, ShardedModel, ShardedOptimizer, Stage, TrainingConfig, launch,
};
use fsdp_core::checkpoint::{Checkpoint, Verify};
use serde_json::{Value, json};

use crate::common::files::Scratch;
use crate::common::models::{Branches, ConvNet, Gpt, Mlp, Trial};
use crate::common::run::{Optimizer, Weights, config, scalar, share, start, weights};

fn save<M: Trial>(root: &Path, model: &ShardedModel<M>, optim: &ShardedOptimizer, batch: usize) -> Result<(), Error> {
    let sections = BTreeMap::from([("batch".to_owned(), json!(batch))]);
    model.save(root, optim, sections, &SaveOptions::default()).map(drop)
}

/// Losses of each batch, the weights at the end, and the random state.
type Run = (Vec<f64>, Weights, RandomState);

/// Trains batches up to `until`: from the start, or from what is under `root`. Saves there before batch `save_at`.
fn run<M: Trial>(
    config: &Config,
    optimizer: Optimizer,
    root: &Path,
    resume_at: Option<usize>,
    until: usize,
    save_at: Option<usize>,
) -> Run {
    let root = root.to_owned();
    let runs = launch(config, move |rank| {
        let mut model = start::<M>(&rank)?;
        let mut optim = rank.optimizer(optimizer.build())?;
        if resume_at.is_some() {
            model.load(&root, &mut optim)?;
        }
        let dropout = Dropout::from(DropoutConfig::new(0.3));
        let mut losses = Vec::new();
        for batch in resume_at.unwrap_or(0)..until {
            if save_at == Some(batch) {
                save(&root, &model, &optim, batch)?;
            }
            // Dropping parts of the loss stands for a layer that draws.
            let loss = model.loss(batch, share(&rank), &rank.device());
            let loss = dropout.forward(loss.repeat(&[8])).mean();
            losses.push(rank.mean(scalar(&loss))?);
            let gradients = model.backward(loss)?;
            optim.step(optimizer.lr(), &mut model, gradients)?;
        }
        Ok((losses, weights(&model)?, RandomState::current()))
    });
    runs.unwrap().swap_remove(0)
}

#[test]
fn saved_and_resumed_equals_straight_on_at_every_stage_with_accumulation_clipping_and_dropout() {
    for stage in Stage::ALL {
        for (optimizer, accumulate) in [(Optimizer::AdamW, Accumulate::Reduced), (Optimizer::Sgd, Accumulate::Local)] {
            let training = TrainingConfig {
                gradient_accumulation: 2,
                accumulate,
                gradient_clip_norm: Some(0.1),
                ..TrainingConfig::default()
            };
            let config = Config { training, ..config(stage, 2) };
            let scratch = Scratch::new("straight");
            let straight = run::<Gpt>(&config, optimizer, &scratch.path(), None, 8, Some(4));
            let resumed = run::<Gpt>(&config, optimizer, &scratch.path(), Some(4), 8, None);
            assert_eq!(straight.0[4..], resumed.0, "losses at {stage}");
            assert_eq!((straight.1, straight.2), (resumed.1, resumed.2), "{stage}");
        }
    }
}

/// What a run was is in its checkpoint, also where the program says nothing of its own.
#[test]
fn a_checkpoint_tells_the_configuration_and_the_plan_of_its_run() {
    let scratch = Scratch::new("told");
    let (root, config) = (scratch.path(), config(Stage::Parameters, 2));
    let (saved_to, expected) = (root.clone(), config.clone());
    let plans = launch(&config, move |rank| {
        let model = start::<Mlp>(&rank)?;
        let optim = rank.optimizer(Optimizer::Sgd.build())?;
        let sections = BTreeMap::from([("plan".to_owned(), json!("my own"))]);
        for (name, sections) in [("none", BTreeMap::new()), ("own", sections)] {
            model.save(saved_to.join(name), &optim, sections, &SaveOptions::default())?;
        }
        Ok(model.summary())
    });
    let sections = |name| {
        let checkpoint = Checkpoint::newest(root.join(name), Verify::Checksums).unwrap();
        checkpoint.manifest().sections.clone()
    };
    let none = sections("none");
    assert_eq!(Config::from_toml(none["config"].as_str().unwrap(), "config").unwrap(), expected);
    assert_eq!(none["plan"], json!(plans.unwrap()[0]));
    assert_eq!(sections("own")["plan"], json!("my own"));
}

#[test]
fn two_halves_are_the_whole() {
    for stage in Stage::ALL {
        let config = config(stage, 3);
        let straight = Scratch::new("whole");
        let halves = Scratch::new("halves");
        for optimizer in [Optimizer::AdamW, Optimizer::Sgd, Optimizer::Groups] {
            let expected = trained::<Mlp>(&config, optimizer, &straight.path(), false, 6);
            trained::<Mlp>(&config, optimizer, &halves.path(), false, 3);
            let got = trained::<Mlp>(&config, optimizer, &halves.path(), true, 6);
            assert_eq!(expected.0[3..], got.0, "losses at {stage}, {optimizer:?}");
            assert_eq!(expected.1, got.1, "weights at {stage}, {optimizer:?}");
        }
    }
}

/// As [`run`], without dropout, saving at the end.
fn trained<M: Trial>(
    config: &Config,
    optimizer: Optimizer,
    root: &Path,
    resume: bool,
    until: usize,
) -> (Vec<f64>, Weights) {
    let root = root.to_owned();
    let runs = launch(config, move |rank| {
        let mut model = start::<M>(&rank)?;
        let mut optim = rank.optimizer(optimizer.build())?;
        let mut first = 0;
        if resume {
            let loaded = model.load(&root, &mut optim)?;
            assert_eq!(Value::from(loaded.step), loaded.sections["batch"]);
            first = loaded.step as usize;
        }
        let mut losses = Vec::new();
        for batch in first..until {
            let loss = model.loss(batch, share(&rank), &rank.device());
            losses.push(rank.mean(scalar(&loss))?);
            let gradients = model.backward(loss)?;
            optim.step(optimizer.lr(), &mut model, gradients)?;
        }
        save(&root, &model, &optim, until)?;
        Ok((losses, weights(&model)?))
    });
    runs.unwrap().swap_remove(0)
}

/// What a world of another size and stage finds: the same weights, and moments that make the same next step.
#[test]
fn a_checkpoint_loads_on_every_other_world_and_stage() {
    let scratch = Scratch::new("worlds");
    let saved = trained::<ConvNet>(&config(Stage::Parameters, 3), Optimizer::AdamW, &scratch.path(), false, 3).1;
    let step = |stage, world_size: usize| {
        let root = scratch.path();
        let expected = saved.clone();
        launch(&config(stage, world_size), move |rank| {
            let mut model = start::<ConvNet>(&rank)?;
            let mut optim = rank.optimizer(Optimizer::AdamW.build())?;
            model.load(&root, &mut optim)?;
            assert!(weights(&model)? == expected, "{stage} on {world_size}");
            // All ranks train on the same samples, so that the mean over ranks is the same for any number of them, to rounding.
            let loss = model.loss(3, 0..4, &rank.device());
            let gradients = model.backward(loss)?;
            optim.step(Optimizer::AdamW.lr(), &mut model, gradients)?;
            weights(&model)
        })
        .unwrap()
        .swap_remove(0)
    };
    for world_size in [1, 2, 4, 5, 8] {
        let expected = step(Stage::Ddp, world_size);
        for stage in [Stage::OptimizerState, Stage::Gradients, Stage::Parameters] {
            assert!(step(stage, world_size) == expected, "the step after it at {stage} on {world_size}");
        }
        // Sums of another number of ranks round differently.
        let one = step(Stage::Ddp, 1);
        let close = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-6;
        let all_close = one.iter().zip(&expected).all(|((_, a), (_, b))| a.iter().zip(b).all(close));
        assert!(all_close, "the step after it on {world_size}, beside one rank");
    }
}

#[test]
fn a_checkpoint_of_another_model_is_refused_with_a_list_and_a_missing_one_by_name() {
    let scratch = Scratch::new("other");
    trained::<Mlp>(&config(Stage::Gradients, 2), Optimizer::Sgd, &scratch.path(), false, 1);
    let load = |root: PathBuf| {
        launch(&config(Stage::Parameters, 2), move |rank| {
            let mut model = start::<Gpt>(&rank)?;
            let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
            model.load(&root, &mut optim).map(drop)
        })
        .unwrap_err()
        .to_string()
    };
    let error = load(scratch.path());
    assert!(error.contains("blocks.0.qkv.weight") && error.contains("hidden.0"), "{error}");
    let error = load(scratch.path().join("nothing"));
    assert!(error.contains("nothing"), "{error}");
}

/// A unit that no rank uses, whose parameters are too small for all ranks to own a part.
#[test]
fn parameters_without_state_and_ranks_without_elements_are_saved_and_found_again() {
    let scratch = Scratch::new("unused");
    for stage in Stage::ALL {
        let root = scratch.path();
        launch(&config(stage, 5), move |rank| {
            let mut model = start::<Branches>(&rank)?;
            let mut optim = rank.optimizer(Optimizer::AdamW.build())?;
            let step = |batch, model: &mut ShardedModel<Branches>, optim: &mut ShardedOptimizer| {
                let gradients = model.backward(model.loss(batch, share(&rank), &rank.device()))?;
                optim.step(Optimizer::AdamW.lr(), model, gradients).map(drop)
            };
            step(0, &mut model, &mut optim)?;
            save(&root, &model, &optim, 1)?;
            step(1, &mut model, &mut optim)?;
            let expected = weights(&model)?;
            let mut again = start::<Branches>(&rank)?;
            let mut optim = rank.optimizer(Optimizer::AdamW.build())?;
            again.load(&root, &mut optim)?;
            step(1, &mut again, &mut optim)?;
            assert!(weights(&again)? == expected, "{stage}");
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn state_of_another_optimizer_is_refused_and_not_forgotten() {
    let scratch = Scratch::new("optimizer");
    trained::<Mlp>(&config(Stage::Parameters, 2), Optimizer::AdamW, &scratch.path(), false, 1);
    let root = scratch.path();
    let error = launch(&config(Stage::Parameters, 2), move |rank| {
        let mut model = start::<Mlp>(&rank)?;
        let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
        model.load(&root, &mut optim).map(drop)
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("moment_1") && error.contains("optimizer"), "{error}");
}

#[test]
fn saving_between_a_backward_and_its_step_is_refused() {
    let scratch = Scratch::new("between");
    let root = scratch.path();
    let error = launch(&config(Stage::Parameters, 2), move |rank| {
        let model = start::<Mlp>(&rank)?;
        let optim = rank.optimizer(Optimizer::Sgd.build())?;
        let _gradients = model.backward(model.loss(0, 0..4, &rank.device()))?;
        save(&root, &model, &optim, 0)
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("gradients wait for a step") && error.contains("flush"), "{error}");
}
