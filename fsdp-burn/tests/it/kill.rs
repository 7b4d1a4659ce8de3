//! A training run that is killed again and again ends with the weights of one that was not.
//!
//! `FSDP_KILLS` sets the number of kills.

use std::collections::BTreeMap;
use std::fs;
use std::num::NonZeroUsize;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use burn::nn::DropoutConfig;
use fsdp_burn::nn::Dropout;
use fsdp_burn::{Accumulate, CheckpointError, Config, Error, SaveOptions, Stage, TrainingConfig, launch};
use serde_json::json;

use crate::common::files::Scratch;
use crate::common::models::{Gpt, Trial};
use crate::common::run::{Optimizer, config, share, start, weights};

/// Micro-batches of a run, two for each optimizer step.
const NUM_BATCHES: usize = 60;

/// A run takes longer than this only if it hangs.
const LIMIT: Duration = Duration::from_secs(120);

/// The part of the tests that runs in a child: trains from the newest checkpoint, if there is one, and saves after each step.
#[test]
fn child_trains_to_the_end() {
    let Some(dir) = std::env::var_os("FSDP_TEST_TRAIN_DIR") else { return };
    let dir = Path::new(&dir).to_owned();
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
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "kill::child_trains_to_the_end"]).env("FSDP_TEST_TRAIN_DIR", dir);
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
