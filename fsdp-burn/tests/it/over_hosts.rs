//! Ranks on several hosts train as threads do, and end together when a link between them is cut. `.ci/mpi` runs these where
//! there can be network namespaces.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use crate::common::files::Scratch;
use crate::common::mpirun::{Run, exists};
use crate::over_mpi::{said, turn};
use crate::processes::{
    CHILD, LIMIT, Random, TIMEOUT_S, failures_of, first_step, of_threads, set, text_of, wait_for_step,
};

#[test]
fn hosts_train_to_the_bits_of_threads() {
    let _turn = turn();
    for (num_hosts, stage, world_size) in [(2, 1, 3), (2, 3, 4), (4, 3, 4)] {
        let scratch = Scratch::new(&format!("hosts-{num_hosts}-{stage}"));
        let dir = scratch.path();
        let place = format!("stage {stage} on {world_size} processes of {num_hosts} hosts");
        let mut run = Run::on_hosts(CHILD, &dir, num_hosts, world_size, &set(&dir, stage, 60.0));
        assert!(run.succeeds(LIMIT), "{place}: {}", said(&dir));
        assert!(text_of(&dir) == of_threads(stage, world_size), "{place}: other weights");
    }
}

#[test]
fn a_cut_link_ends_all_ranks_in_time_with_the_lost_one_named_and_a_restart_goes_on() {
    let _turn = turn();
    let mut random = Random(14);
    for unlucky in 0..3 {
        let scratch = Scratch::new(&format!("cut-{unlucky}"));
        cut_and_restart(&scratch.path(), unlucky, &mut random);
    }
}

/// Cuts the link of the host of a rank: each is alone on its host.
fn cut_and_restart(dir: &Path, unlucky: usize, random: &mut Random) {
    let place = format!("the link of rank {unlucky} is cut");
    let set = set(dir, 3, TIMEOUT_S);
    let mut run = Run::on_hosts(CHILD, dir, 3, 3, &set);
    let step = 30 + random.below(20) as usize;
    wait_for_step(dir, step, &place);
    thread::sleep(Duration::from_millis(random.below(30)));
    let ranks = run.ranks();
    assert_eq!(ranks.len(), 3, "{place}: {}", said(dir));
    run.set_link(unlucky + 1, "down");
    let begun = Instant::now();
    // Several times the limit, since this machine may be busy with other tests.
    let limit = Duration::from_secs_f64(6.0 * TIMEOUT_S);
    while ranks.values().any(|&pid| exists(pid)) {
        assert!(begun.elapsed() < limit, "{place}: processes are left: {}", said(dir));
        thread::sleep(Duration::from_millis(5));
    }
    let failures = failures_of(dir);
    assert_eq!(failures.len(), 3, "{place}: {failures:?}: {}", said(dir));
    for (rank, message) in failures {
        // A rank that is cut off cannot know that the others are not: to it, others are lost.
        let is_named = match rank == unlucky {
            true => message.contains(" was lost: nothing was heard of it"),
            false => message.contains(&format!("rank {unlucky} was lost: nothing was heard of it")),
        };
        assert!(is_named && message.contains("(step "), "{place}: rank {rank} says {message}");
    }
    // The launcher itself waits for the daemon that it does not reach.
    run.set_link(unlucky + 1, "up");
    run.end();

    let mut run = Run::on_hosts(CHILD, dir, 3, 3, &set);
    assert!(run.succeeds(LIMIT), "{place}: {}", said(dir));
    let first = first_step(dir);
    assert!((1..=step + 2).contains(&first), "{place}: it goes on from step {first}");
    assert!(text_of(dir) == of_threads(3, 3), "{place}: other weights after a restart at step {first}");
}
