//! Ranks that are processes train as threads do, and none of them hangs, whatever becomes of another.
//!
//! `FSDP_FAILURES` sets the number of failures.

use std::collections::BTreeMap;
use std::fs;
use std::net::TcpListener;
use std::num::NonZeroUsize;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use fsdp_burn::{CheckpointError, Config, Error, OffloadConfig, SaveOptions, Stage, Started, TierShares, launch};
use serde_json::json;

use crate::common::files::Scratch;
use crate::common::models::{Mlp, Trial};
use crate::common::processes::{Link, Processes, said};
use crate::common::run::{Optimizer, Weights, config, share, start, weights};

pub(crate) const CHILD: &str = "processes::child_is_a_rank";

/// Steps of a run.
const NUM_STEPS: usize = 60;

/// The configured limit of runs that fail.
pub(crate) const TIMEOUT_S: f64 = 6.0;

/// Ends only what hangs.
pub(crate) const LIMIT: Duration = Duration::from_secs(120);

/// Trains from the newest checkpoint, if there is one, and saves after every other step; where `dir` is given.
fn train(config: &Config, dir: Option<&Path>, panics_at: Option<(usize, usize)>) -> Result<Vec<Weights>, Error> {
    let dir = dir.map(Path::to_owned);
    let optimizer = Optimizer::AdamW;
    launch(config, move |rank| {
        let mut model = start::<Mlp>(&rank)?;
        let mut optim = rank.optimizer(optimizer.build())?;
        let first = match &dir {
            None => 0,
            Some(dir) => match model.load(dir.join("run"), &mut optim) {
                Ok(loaded) => loaded.sections["step"].as_u64().unwrap() as usize,
                Err(Error::Checkpoint(error)) => match *error {
                    CheckpointError::NothingGood { rejected, .. } if rejected.is_empty() => 0,
                    error => return Err(error.into()),
                },
                Err(error) => return Err(error),
            },
        };
        if let Some(dir) = dir.as_ref().filter(|_| rank.is_main()) {
            fs::write(dir.join("first"), first.to_string()).unwrap();
        }
        for step in first..NUM_STEPS {
            assert!(panics_at != Some((rank.rank(), step)), "out of cheese");
            let gradients = model.backward(model.loss(step, share(&rank), &rank.device()))?;
            optim.step(optimizer.lr(), &mut model, gradients)?;
            let Some(dir) = &dir else { continue };
            if step % 2 == 1 {
                let sections = BTreeMap::from([("step".to_owned(), json!(step + 1))]);
                let options = SaveOptions { keep_last: NonZeroUsize::new(2) };
                model.save(dir.join("run"), &optim, sections, &options)?;
            }
            if rank.is_main() {
                fs::write(dir.join("step"), (step + 1).to_string()).unwrap();
            }
            // So that there is a time in which to fail.
            thread::sleep(Duration::from_millis(15));
        }
        weights(&model)
    })
}

/// The part of these tests that runs in a process of its own, as one rank.
#[test]
fn child_is_a_rank() {
    let Some(dir) = std::env::var_os("FSDP_TEST_RANK_DIR") else { return };
    let dir = Path::new(&dir).to_owned();
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<usize>().ok());
    let stage = Stage::ALL[number("FSDP_TEST_STAGE").unwrap()];
    let timeout_s = std::env::var("FSDP_TEST_TIMEOUT_S").unwrap().parse().unwrap();
    let offload = match number("FSDP_TEST_OFFLOAD") {
        Some(_) => OffloadConfig {
            optimizer: TierShares::NVME,
            nvme_path: Some(dir.join("nvme").to_str().unwrap().to_owned()),
            ..OffloadConfig::default()
        },
        None => OffloadConfig::default(),
    };
    let config = Config { timeout_s, offload, seed: Some(5), ..config(stage, 1) };
    let panics_at = number("FSDP_TEST_PANIC_RANK").zip(number("FSDP_TEST_PANIC_STEP"));
    let started = config.started().unwrap();
    match train(&config, Some(&dir), panics_at) {
        Ok(mut results) => {
            assert_eq!(results.len(), 1, "a process has one rank");
            if started.is_main() {
                fs::write(dir.join("end"), text(&results.remove(0))).unwrap();
            }
        }
        Err(error) => {
            // Without the words of the test harness, and of other processes.
            eprintln!("\nfailed: {error}");
            if let Started::Process(process) = started {
                fs::write(dir.join(format!("failed-{}", process.rank)), error.to_string()).unwrap();
            }
            std::process::exit(3);
        }
    }
}

/// To the last bit.
fn text(weights: &Weights) -> String {
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits().to_string()).collect::<Vec<_>>().join(" ");
    weights.iter().map(|(path, values)| format!("{path} {}\n", bits(values))).collect()
}

pub(crate) fn set(dir: &Path, stage: usize, timeout_s: f64) -> Vec<(&'static str, String)> {
    vec![
        ("FSDP_TEST_RANK_DIR", dir.to_str().unwrap().to_owned()),
        ("FSDP_TEST_STAGE", stage.to_string()),
        ("FSDP_TEST_TIMEOUT_S", timeout_s.to_string()),
    ]
}

/// Runs to the end: the step it began with, and the weights.
fn to_the_end(dir: &Path, world_size: usize, set: &[(&'static str, String)]) -> (usize, String) {
    Processes::start(CHILD, dir, world_size, set, |_, port| port).succeed(dir, LIMIT);
    (first_step(dir), text_of(dir))
}

/// The weights that a run has ended with.
pub(crate) fn text_of(dir: &Path) -> String {
    fs::read_to_string(dir.join("end")).unwrap()
}

/// The weights of threads, without a checkpoint.
pub(crate) fn of_threads(stage: usize, world_size: usize) -> String {
    let config = Config { seed: Some(5), ..config(Stage::ALL[stage], world_size) };
    text(&train(&config, None, None).unwrap()[0])
}

#[test]
fn processes_train_to_the_bits_of_threads_at_every_stage() {
    for (stage, world_size) in [(0, 2), (1, 3), (2, 2), (3, 3), (3, 2)] {
        let scratch = Scratch::new(&format!("processes-{stage}-{world_size}"));
        let (_, end) = to_the_end(&scratch.path(), world_size, &set(&scratch.path(), stage, 60.0));
        assert!(end == of_threads(stage, world_size), "stage {stage} on {world_size} processes");
    }
}

/// The step that a run has begun with.
pub(crate) fn first_step(dir: &Path) -> usize {
    fs::read_to_string(dir.join("first")).unwrap().parse().unwrap()
}

/// What each rank has failed with, as far as it came to say so.
#[cfg(feature = "mpi")]
pub(crate) fn failures_of(dir: &Path) -> Vec<(usize, String)> {
    let of_rank = |rank| Some((rank, fs::read_to_string(dir.join(format!("failed-{rank}"))).ok()?));
    (0..8).filter_map(of_rank).collect()
}

/// Until so many steps are done.
pub(crate) fn wait_for_step(dir: &Path, step: usize, place: &str) {
    let begun = Instant::now();
    while fs::read_to_string(dir.join("step")).ok().and_then(|text| text.parse().ok()).unwrap_or(0) < step {
        assert!(begun.elapsed() < LIMIT, "{place}: step {step} never comes");
        thread::sleep(Duration::from_millis(2));
    }
}

/// What becomes of a rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Fate {
    Killed,
    Stopped,
    Panics,
    CutOff,
}

const FATES: [Fate; 4] = [Fate::Killed, Fate::Stopped, Fate::Panics, Fate::CutOff];

/// SplitMix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        (z ^ (z >> 27)) % bound
    }
}

/// How many failures are tried.
pub(crate) fn num_failures() -> usize {
    std::env::var("FSDP_FAILURES").ok().and_then(|text| text.parse().ok()).unwrap_or(6)
}

#[test]
fn whatever_becomes_of_a_rank_all_end_in_time_with_its_name_and_a_restart_goes_on() {
    let world_size = 3;
    let mut random = Random(11);
    let expected = of_threads(3, world_size);
    for number in 0..num_failures() {
        // Each fate meets each rank in turn.
        let (fate, unlucky) = (FATES[number % 4], (number + number / 4) % world_size);
        let scratch = Scratch::new(&format!("failure-{number}"));
        fail_and_restart(&scratch.path(), fate, unlucky, &mut random, &expected);
    }
}

fn fail_and_restart(dir: &Path, fate: Fate, unlucky: usize, random: &mut Random, expected: &str) {
    let world_size = 3;
    let place = format!("{fate:?}, rank {unlucky}");
    let mut environment = set(dir, 3, TIMEOUT_S);
    environment.push(("FSDP_TEST_OFFLOAD", "1".to_owned()));
    let undisturbed = environment.clone();
    let step = 30 + random.below(20) as usize;
    if fate == Fate::Panics {
        environment.push(("FSDP_TEST_PANIC_RANK", unlucky.to_string()));
        environment.push(("FSDP_TEST_PANIC_STEP", step.to_string()));
    }
    let link = Link::new();
    let is_led_over_it = |rank: usize| fate == Fate::CutOff && rank > 0 && (rank == unlucky || unlucky == 0);
    let port_of = |rank: usize, port: u16| if is_led_over_it(rank) { link.port() } else { port };
    let mut processes = Processes::start(CHILD, dir, world_size, &environment, port_of);
    link.carry_to(processes.port);

    // One that panics at a step may end before it is told that the step is done.
    wait_for_step(dir, if fate == Fate::Panics { step - 1 } else { step }, &place);
    thread::sleep(Duration::from_millis(random.below(30)));
    match fate {
        Fate::Killed => processes.signal(unlucky, "KILL"),
        Fate::Stopped => processes.signal(unlucky, "STOP"),
        Fate::CutOff => link.cut(),
        Fate::Panics => {}
    }
    let failed = Instant::now();

    // Several times the limit, since this machine may be busy with other tests.
    let limit = Duration::from_secs_f64(6.0 * TIMEOUT_S);
    for rank in (0..world_size).filter(|&rank| rank != unlucky || matches!(fate, Fate::Panics | Fate::CutOff)) {
        let status = processes.wait(rank, limit.saturating_sub(failed.elapsed()));
        let said = said(dir, rank);
        assert_eq!(status.code(), Some(3), "{place}: rank {rank} ends with {status}: {said}");
        let message =
            said.split_once("\nfailed: ").map(|(_, message)| message).unwrap_or_else(|| panic!("{place}: {said}"));
        match fate {
            Fate::Panics => {
                assert!(message.contains(&format!("rank {unlucky} panicked: out of cheese")), "{place}: {message}")
            }
            _ => {
                // A rank that is cut off cannot know that the others are not; rank 0 without links has lost all.
                let is_named = match fate {
                    Fate::CutOff if rank == unlucky => message.contains(" was lost: nothing was heard of it"),
                    _ => message.contains(&format!("rank {unlucky} was lost: ")),
                };
                assert!(is_named, "{place}: rank {rank} says {message}");
                // The operation that it has missed, or the last that it came to.
                assert!(message.contains("(step "), "{place}: rank {rank} says {message}");
            }
        }
    }
    let is_stopped = fate == Fate::Stopped;
    assert!(!is_stopped || !processes.has_ended(unlucky), "{place}: it is stopped, and its launcher ends it");
    TcpListener::bind(("127.0.0.1", processes.port)).unwrap_or_else(|error| panic!("{place}: the port: {error}"));
    drop(processes);
    // A process that is ended after all others leaves its file to the next run.
    assert!(is_stopped || !dir.join("nvme").exists(), "{place}: offloaded state is left");

    // On the same ranks it goes on to the last bit; on others it goes on.
    let other = dir.join("other");
    fs::create_dir_all(&other).unwrap();
    copy(&dir.join("run"), &other.join("run"));
    let (first, end) = to_the_end(dir, world_size, &undisturbed);
    assert!(first > 0, "{place}: it begins anew");
    assert!(end == expected, "{place}: the weights are others after a restart at step {first}");
    let (first, _) = to_the_end(&other, world_size - 1, &set(&other, 3, 60.0));
    assert!(first > 0, "{place}: it begins anew on other ranks");
    assert!(!dir.join("nvme").exists(), "{place}: offloaded state is left after a restart");
}

pub(crate) fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let target = to.join(path.file_name().unwrap());
        match path.is_dir() {
            true => copy(&path, &target),
            false => drop(fs::copy(&path, &target).unwrap()),
        }
    }
}

#[test]
fn a_process_without_its_peers_ends_in_time_and_names_them() {
    let scratch = Scratch::new("alone");
    let dir = scratch.path();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let lonely = |rank: usize, port: u16| if rank == 0 { port } else { taken.local_addr().unwrap().port() };
    // Rank 1 meets somebody who never answers.
    let mut processes = Processes::start(CHILD, &dir, 2, &set(&dir, 3, 2.0), lonely);
    for (rank, text) in [(0, "rank 0 waited 2s at 127.0.0.1:"), (1, "rank 1 found no rank 0 at 127.0.0.1:")] {
        assert_eq!(processes.wait(rank, LIMIT).code(), Some(3));
        let said = said(&dir, rank);
        assert!(said.contains(text), "{said}");
    }
    assert!(said(&dir, 0).contains("for rank 1"));
}
