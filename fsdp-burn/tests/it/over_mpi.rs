//! Ranks that `mpirun` has started train as threads do, and end together. `.ci/mpi` runs these.
//!
//! `MPIRUN` is the command with its options; default: Open MPI's, as many processes as asked for, also for root.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::files::Scratch;
use crate::processes::{CHILD, LIMIT, TIMEOUT_S, of_threads, set, text_of};

/// A run of processes. Whatever is left of them ends with it.
struct Run {
    mpirun: Child,
}

impl Run {
    fn start(dir: &Path, world_size: usize, set: &[(&str, String)]) -> Self {
        let mpirun =
            std::env::var("MPIRUN").unwrap_or_else(|_| "mpirun --allow-run-as-root --oversubscribe".to_owned());
        let mut words = mpirun.split_whitespace();
        let mut command = Command::new(words.next().unwrap());
        command.args(words).args(["-n", &world_size.to_string()]).arg(std::env::current_exe().unwrap());
        command.args(["--exact", CHILD, "--nocapture"]).envs(set.iter().map(|(name, value)| (name, value)));
        let said = fs::File::create(dir.join("said.txt")).unwrap();
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(said);
        Self { mpirun: command.spawn().unwrap() }
    }

    /// Whether all end well, within a limit.
    fn succeeds(mut self, limit: Duration) -> bool {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.mpirun.try_wait().unwrap() {
                return status.success();
            }
            assert!(begun.elapsed() < limit, "a run goes on for more than {limit:?}");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// The processes of the ranks.
    fn ranks(&self) -> Vec<u32> {
        let exe = std::env::current_exe().unwrap();
        let is_rank = |pid: &u32| fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|of| of == exe);
        let mut found = vec![self.mpirun.id()];
        let mut next = 0;
        while let Some(parent) = found.get(next).copied() {
            next += 1;
            found.extend(processes().filter(|&(_, of)| of == parent).map(|(pid, _)| pid));
        }
        found.into_iter().filter(is_rank).collect()
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        if self.mpirun.try_wait().unwrap().is_none() {
            // Asked, it ends its processes too.
            let _ = Command::new("kill").args(["-TERM", &self.mpirun.id().to_string()]).status();
            thread::sleep(Duration::from_secs(2));
            let _ = self.mpirun.kill();
            let _ = self.mpirun.wait();
        }
    }
}

/// All processes with their parents.
fn processes() -> impl Iterator<Item = (u32, u32)> {
    let pids = fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter_map(|pid: u32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // Behind the name, which may hold anything: the state, then the parent.
        let parent = stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()?;
        Some((pid, parent))
    })
}

/// What lies in shared memory, but for the files of these tests.
fn segments() -> BTreeSet<String> {
    let names =
        fs::read_dir("/dev/shm").unwrap().flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| !name.starts_with("fsdp-burn-")).collect()
}

/// One test at a time, so that none sees what another uses.
fn turn() -> MutexGuard<'static, ()> {
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
        assert!(Run::start(&dir, world_size, &set).succeeds(LIMIT), "{place}: {}", said(&dir));
        assert!(text_of(&dir) == of_threads(stage, world_size), "{place}: other weights");
        assert!(!dir.join("nvme").exists(), "{place}: offloaded state is left");
    }
    nothing_is_left(&before);
}

#[test]
fn a_rank_that_panics_or_is_killed_ends_the_run_and_a_restart_goes_on() {
    let _turn = turn();
    let before = segments();
    for world_size in [3, 4] {
        for is_killed in [false, true] {
            let scratch = Scratch::new(&format!("mpi-failure-{world_size}"));
            fail_and_restart(&scratch.path(), world_size, is_killed);
        }
    }
    nothing_is_left(&before);
}

fn fail_and_restart(dir: &Path, world_size: usize, is_killed: bool) {
    let undisturbed = set(dir, 3, TIMEOUT_S);
    let mut environment = undisturbed.clone();
    let step = 31;
    if !is_killed {
        environment.push(("FSDP_TEST_PANIC_RANK", "1".to_owned()));
        environment.push(("FSDP_TEST_PANIC_STEP", step.to_string()));
    }
    let run = Run::start(dir, world_size, &environment);
    if is_killed {
        let begun = Instant::now();
        while fs::read_to_string(dir.join("step")).ok().and_then(|text| text.parse().ok()).unwrap_or(0) < step {
            assert!(begun.elapsed() < LIMIT, "step {step} never comes: {}", said(dir));
            thread::sleep(Duration::from_millis(2));
        }
        let unlucky = run.ranks()[1].to_string();
        assert!(Command::new("kill").args(["-KILL", &unlucky]).status().unwrap().success());
    }
    let ranks = run.ranks();
    assert!(!run.succeeds(LIMIT), "a rank has failed");
    assert!(is_killed || said(dir).contains("rank 1 panicked: out of cheese"), "{}", said(dir));
    let is_left = |pid: &&u32| processes().any(|(other, _)| other == **pid);
    let begun = Instant::now();
    while ranks.iter().any(|pid| is_left(&pid)) {
        assert!(begun.elapsed() < Duration::from_secs_f64(TIMEOUT_S), "processes are left");
        thread::sleep(Duration::from_millis(5));
    }

    assert!(Run::start(dir, world_size, &undisturbed).succeeds(LIMIT), "{}", said(dir));
    let first: usize = fs::read_to_string(dir.join("first")).unwrap().parse().unwrap();
    assert!((1..=step + 1).contains(&first), "it goes on from step {first}");
    assert!(text_of(dir) == of_threads(3, world_size), "other weights after a restart at step {first}");
}

/// What all ranks have said of errors.
fn said(dir: &Path) -> String {
    fs::read_to_string(dir.join("said.txt")).unwrap_or_default()
}
