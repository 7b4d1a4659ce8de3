//! Ranks that `mpirun` has started train as threads do, and end together. `.ci/mpi` runs these.
//!
//! `FSDP_FAILURES` sets the number of failures.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::files::Scratch;
use crate::common::mpirun::{Run, exists};
use crate::processes::{
    CHILD, Fate, LIMIT, Random, TIMEOUT_S, copy, failures_of, first_step, num_failures, of_threads, set, text_of,
    wait_for_step,
};

/// What lies in shared memory, but for the files of these tests.
fn segments() -> BTreeSet<String> {
    let names =
        fs::read_dir("/dev/shm").unwrap().flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| !name.starts_with("fsdp-burn-")).collect()
}

/// One test at a time, so that none sees what another uses.
pub(crate) fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Nothing new stays in shared memory.
fn nothing_is_left(before: &BTreeSet<String>) {
    let begun = Instant::now();
    while !segments().is_subset(before) {
        assert!(begun.elapsed() < Duration::from_secs(10), "left: {:?}", segments().difference(before));
        thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn mpirun_trains_to_the_bits_of_threads_at_every_stage() {
    let _turn = turn();
    let before = segments();
    for (stage, world_size) in [(0, 2), (1, 3), (2, 4), (3, 2), (3, 3), (3, 4)] {
        let scratch = Scratch::new(&format!("mpi-{stage}-{world_size}"));
        let dir = scratch.path();
        let mut set = set(&dir, stage, 60.0);
        if world_size > 2 {
            set.push(("FSDP_TEST_OFFLOAD", "1".to_owned()));
        }
        let place = format!("stage {stage} on {world_size} processes");
        assert!(Run::here(CHILD, &dir, world_size, &[], &set).succeeds(LIMIT), "{place}: {}", said(&dir));
        assert!(text_of(&dir) == of_threads(stage, world_size), "{place}: other weights");
        assert!(!dir.join("nvme").exists(), "{place}: offloaded state is left");
    }
    nothing_is_left(&before);
}

#[test]
fn whatever_becomes_of_a_rank_of_mpirun_all_end_in_time_with_its_name_and_a_restart_goes_on() {
    let _turn = turn();
    let before = segments();
    let fates = [Fate::Killed, Fate::Stopped, Fate::Panics];
    let mut random = Random(13);
    for number in 0..num_failures() {
        // Each fate meets each rank in turn, on three ranks and on four.
        let world_size = 3 + number / 3 % 2;
        let (fate, unlucky) = (fates[number % 3], (number + number / 3) % world_size);
        let scratch = Scratch::new(&format!("mpi-failure-{number}"));
        fail_and_restart(&scratch.path(), fate, unlucky, world_size, &mut random);
    }
    nothing_is_left(&before);
}

fn fail_and_restart(dir: &Path, fate: Fate, unlucky: usize, world_size: usize, random: &mut Random) {
    let place = format!("{fate:?}, rank {unlucky} of {world_size}");
    let mut undisturbed = set(dir, 3, TIMEOUT_S);
    undisturbed.push(("FSDP_TEST_OFFLOAD", "1".to_owned()));
    let mut environment = undisturbed.clone();
    let step = 30 + random.below(20) as usize;
    if fate == Fate::Panics {
        environment.push(("FSDP_TEST_PANIC_RANK", unlucky.to_string()));
        environment.push(("FSDP_TEST_PANIC_STEP", step.to_string()));
    }
    // A launcher that ends all itself when a process is gone would not let us see that ranks do. One that is stopped is not
    // gone, and stays to the end of the launcher.
    let options: &[&str] = if fate == Fate::Stopped { &[] } else { &["--enable-recovery"] };
    let mut run = Run::here(CHILD, dir, world_size, options, &environment);
    wait_for_step(dir, step - 8, &place);
    let ranks = run.ranks();
    assert_eq!(ranks.len(), world_size, "{place}: {}", said(dir));
    if fate != Fate::Panics {
        wait_for_step(dir, step, &place);
        thread::sleep(Duration::from_millis(random.below(30)));
        Run::signal(ranks[&unlucky], if fate == Fate::Killed { "KILL" } else { "STOP" });
    }
    // Several times the limit, since this machine may be busy with other tests.
    let limit = Duration::from_secs_f64(6.0 * TIMEOUT_S);
    let begun = Instant::now();
    while ranks.values().any(|&pid| exists(pid)) {
        let left: Vec<usize> = ranks.iter().filter(|&(_, &pid)| exists(pid)).map(|(&rank, _)| rank).collect();
        assert!(begun.elapsed() < limit, "{place}: ranks {left:?} are left: {}", said(dir));
        thread::sleep(Duration::from_millis(5));
    }
    // A launcher that is to recover from failures may wait for more of them.
    run.end();
    let mut failures = failures_of(dir);
    // One that was stopped goes on when the launcher ends it, and has not heard of the others.
    failures.retain(|(rank, _)| *rank != unlucky || fate == Fate::Panics);
    for (rank, message) in &failures {
        let named = match fate {
            Fate::Panics => format!("rank {unlucky} panicked: out of cheese"),
            _ => format!("rank {unlucky} was lost: "),
        };
        assert!(message.contains(&named), "{place}: rank {rank} says {message}");
        assert!(fate == Fate::Panics || message.contains("(step "), "{place}: rank {rank} says {message}");
    }
    // When the first one ends, the launcher ends whoever is left of the others.
    let all: Vec<usize> = (0..world_size).filter(|&rank| rank != unlucky || fate == Fate::Panics).collect();
    let told: Vec<usize> = failures.into_iter().map(|(rank, _)| rank).collect();
    assert!(if fate == Fate::Stopped { !told.is_empty() } else { told == all }, "{place}: {told:?}: {}", said(dir));

    // On the same ranks it goes on to the last bit; on others it goes on.
    let other = dir.join("other");
    copy(&dir.join("run"), &other.join("run"));
    assert!(Run::here(CHILD, dir, world_size, &[], &undisturbed).succeeds(LIMIT), "{place}: {}", said(dir));
    let first = first_step(dir);
    assert!((1..=step + 2).contains(&first), "{place}: it goes on from step {first}");
    assert!(text_of(dir) == of_threads(3, world_size), "{place}: other weights after a restart at step {first}");
    let set = set(&other, 3, 60.0);
    assert!(Run::here(CHILD, &other, world_size - 1, &[], &set).succeeds(LIMIT), "{place}: {}", said(&other));
    assert!(first_step(&other) > 0, "{place}: it begins anew on other ranks");
    assert!(!dir.join("nvme").exists(), "{place}: offloaded state is left");
}

/// What all ranks have said of errors.
pub(crate) fn said(dir: &Path) -> String {
    fs::read_to_string(dir.join("said.txt")).unwrap_or_default()
}
