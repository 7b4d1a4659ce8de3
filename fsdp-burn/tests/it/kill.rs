//! A training run that is killed again and again ends with the weights of one that was not; one that offloads leaves nothing
//! that the next one would take for state.
//!
//! `FSDP_KILLS` sets the number of kills.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::num::NonZeroUsize;
use std::path::Path;
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use burn::nn::DropoutConfig;
use fsdp_burn::nn::Dropout;
use fsdp_burn::{
    Accumulate, CheckpointError, Config, Error, Rank, SaveOptions, Stage, TierShares, TrainingConfig, launch,
};
use serde_json::json;

use crate::common::files::Scratch;
use crate::common::models::{Gpt, Trial};
use crate::common::process::{self, LIMIT, told};
use crate::common::run::{Optimizer, Weights, config, share, start, weights};
use crate::offload::offloaded;

/// Micro-batches of a run, two for each optimizer step.
const NUM_BATCHES: usize = 60;

/// The part of the tests that runs in a child: trains from the newest checkpoint, if there is one, and saves after each step.
#[test]
fn child_trains_to_the_end() {
    let Some(dir) = told("FSDP_TEST_TRAIN_DIR") else { return };
    let number = |name: &str| std::env::var(name).unwrap().parse::<u8>().unwrap();
    let (stage, in_background) =
        (Stage::try_from(number("FSDP_TEST_STAGE")).unwrap(), number("FSDP_TEST_BACKGROUND") == 1);
    let training = TrainingConfig {
        gradient_accumulation: 2,
        accumulate: Accumulate::Reduced,
        gradient_clip_norm: Some(0.1),
        ..TrainingConfig::default()
    };
    let config = Config { training, seed: Some(5), ..config(stage, 3) };
    let optimizer = Optimizer::AdamW;
    let (root, end) = (dir.join("run"), dir.join("end"));
    let results = launch(&config, move |rank| {
        let mut model = start::<Gpt>(&rank)?;
        let mut optim = rank.optimizer(optimizer.build())?;
        let first = match model.load(&root, &mut optim) {
            Ok(loaded) => {
                assert!(loaded.rejected.is_empty(), "{:?}", loaded.rejected);
                loaded.sections["batch"].as_u64().unwrap() as usize
            }
            Err(Error::Checkpoint(error)) => match *error {
                CheckpointError::NothingGood { rejected, .. } if rejected.is_empty() => 0,
                error => return Err(error.into()),
            },
            Err(error) => return Err(error),
        };
        let options = SaveOptions { keep_last: NonZeroUsize::new(2) };
        let mut saver = rank.saver(&root, options)?;
        let dropout = Dropout::from(DropoutConfig::new(0.3));
        for batch in first..NUM_BATCHES {
            let loss = model.loss(batch, share(&rank), &rank.device());
            let loss = dropout.forward(loss.repeat(&[8])).mean();
            let gradients = model.backward(loss)?;
            optim.step(optimizer.lr(), &mut model, gradients)?;
            if batch % 2 == 1 {
                let sections = BTreeMap::from([("batch".to_owned(), json!(batch + 1))]);
                match in_background {
                    true => drop(saver.save(&model, &optim, sections)?),
                    false => drop(model.save(&root, &optim, sections, &options)?),
                }
            }
        }
        saver.finish()?;
        weights(&model)
    });
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits().to_string()).collect::<Vec<_>>().join(" ");
    let weights = results.unwrap().swap_remove(0);
    let text: String = weights.iter().map(|(path, values)| format!("{path} {}\n", bits(values))).collect();
    fs::write(end.with_extension("new"), text).unwrap();
    fs::rename(end.with_extension("new"), end).unwrap();
}

fn child(dir: &Path, stage: Stage, in_background: bool) -> Child {
    let mut command = process::child("kill::child_trains_to_the_end");
    command.env("FSDP_TEST_TRAIN_DIR", dir);
    command.env("FSDP_TEST_STAGE", stage.number().to_string());
    command.env("FSDP_TEST_BACKGROUND", u8::from(in_background).to_string());
    command.stdout(Stdio::null()).spawn().unwrap()
}

/// Trains without being killed: the weights, as text, and how long it took.
fn undisturbed(stage: Stage) -> (String, Duration) {
    let (scratch, started) = (Scratch::new("undisturbed"), Instant::now());
    assert!(child(&scratch.path(), stage, false).wait().unwrap().success());
    (fs::read_to_string(scratch.path().join("end")).unwrap(), started.elapsed())
}

#[test]
fn a_run_killed_at_random_moments_ends_with_the_weights_of_one_that_was_not() {
    let num_kills = std::env::var("FSDP_KILLS").ok().and_then(|n| n.parse().ok()).unwrap_or(16);
    let (mut killed, mut num_runs) = (0, 0);
    let mut undisturbed_runs = BTreeMap::new();
    while killed < num_kills {
        let stage = Stage::ALL[(num_runs + 3) % 4];
        let scratch = Scratch::new("killed");
        let (expected, took) = undisturbed_runs.entry(stage.number()).or_insert_with(|| undisturbed(stage));
        let started = Instant::now();
        while !scratch.path().join("end").exists() {
            assert!(started.elapsed() < LIMIT, "{killed} kills");
            let mut child = child(&scratch.path(), stage, (killed + num_runs) % 2 == 0);
            let noise = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().subsec_nanos();
            // Several kills for each run; the last one is left to come to its end.
            let part = if killed < num_kills { 0.6 } else { 1e3 };
            let moment = took.mul_f64(part * f64::from(noise % 1000) / 1000.0);
            let until = Instant::now() + moment.min(LIMIT);
            while Instant::now() < until && child.try_wait().unwrap().is_none() {
                thread::sleep(Duration::from_millis(1));
            }
            match child.try_wait().unwrap() {
                Some(status) => assert!(status.success(), "a restart fails after {killed} kills, in {scratch:?}"),
                None => {
                    child.kill().unwrap();
                    child.wait().unwrap();
                    killed += 1;
                }
            }
        }
        num_runs += 1;
        let end = fs::read_to_string(scratch.path().join("end")).unwrap();
        assert!(end == *expected, "{stage}: the weights are others after a kill");
    }
    println!("{killed} kills in {num_runs} runs");
}

/// Trains with everything on the disk while `goes_on` says so on all ranks; the weights then.
fn offloading(rank: &Rank, goes_on: impl Fn(usize) -> bool) -> Result<Weights, Error> {
    let mut model = start::<Gpt>(rank)?;
    let mut optim = rank.optimizer(Optimizer::AdamW.build())?;
    for batch in 0.. {
        if !rank.all(goes_on(batch))? {
            break;
        }
        let gradients = model.backward(model.loss(batch, share(rank), &rank.device()))?;
        optim.step(Optimizer::AdamW.lr(), &mut model, gradients)?;
        if batch == 1 && rank.is_main() {
            println!("ready");
        }
    }
    model.synchronize()?;
    weights(&model)
}

fn offloading_config(dir: &Path) -> Config {
    offloaded(&dir.join("nvme"), &config(Stage::Parameters, 3), [TierShares::NVME; 3])
}

/// The part of the test that is killed. It ends by itself if whoever should kill it is gone.
#[test]
fn child_offloads_until_it_is_killed() {
    let Some(dir) = told("FSDP_TEST_OFFLOAD_DIR") else { return };
    let until = Instant::now() + LIMIT;
    launch(&offloading_config(&dir), move |rank| offloading(&rank, |_| Instant::now() < until)).unwrap();
}

#[test]
fn what_a_killed_offloading_run_has_left_is_cleaned_by_the_next_which_trains_as_if_nothing_was() {
    let scratch = Scratch::new("killed-offload");
    let (config, nvme) = (offloading_config(&scratch.path()), scratch.path().join("nvme"));
    let train =
        |config: &Config| launch(config, |rank| offloading(&rank, |batch| batch < 4)).map(|runs| runs[0].clone());
    let expected = train(&config).unwrap();
    for round in 0..4 {
        let mut command = process::child("kill::child_offloads_until_it_is_killed");
        let mut child = command.env("FSDP_TEST_OFFLOAD_DIR", scratch.path()).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().ends_with("ready")));
        // Somewhere in a later step.
        thread::sleep(Duration::from_millis(7 * round));
        let refused = train(&config).unwrap_err().to_string();
        assert!(refused.contains("is locked by another run"), "{refused}");
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(fs::read_dir(&nvme).unwrap().count(), 3, "a killed process cannot clean");
        assert!(train(&config).unwrap() == expected, "round {round}");
        assert!(!nvme.exists(), "round {round}");
    }
}
