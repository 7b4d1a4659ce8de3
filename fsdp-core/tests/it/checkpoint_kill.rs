//! A process that saves all the time is killed at random moments, and always leaves a good checkpoint.

#![allow(clippy::unwrap_used, reason = "all of this is a test, its helpers too")]

use std::io::{BufRead, BufReader};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use fsdp_core::Mesh;
use fsdp_core::checkpoint::{Checkpoint, CheckpointError, SaveOptions, Saver, Verify, save};

use crate::checkpoint_state::{assert_whole, each_rank, snapshot};

/// Rounds of the test; each restarts a process.
const NUM_KILLS: u64 = 100;

/// The part of the test that runs in a child: resumes, and saves step after step until it is killed. Every second round
/// saves in the background. Every fifth step is saved twice, so that kills also hit a checkpoint that is replaced.
#[test]
fn child_saves_until_it_is_killed() {
    let Some(root) = std::env::var_os("FSDP_TEST_KILL_ROOT") else { return };
    let root = PathBuf::from(root);
    let results = each_rank(3, move |comm| -> Result<(), CheckpointError> {
        let mesh = Mesh::one_dim(3);
        let options = SaveOptions { keep_last: NonZeroUsize::new(2) };
        let resumed = Checkpoint::newest_on(comm, &root, Verify::Checksums);
        let mut step = resumed.map_or(0, |checkpoint| checkpoint.manifest().step);
        let in_background = std::env::var_os("FSDP_TEST_BACKGROUND").is_some();
        let mut saver = Saver::new(comm, &root, options)?;
        if comm.rank() == 0 {
            println!("ready");
        }
        loop {
            step += 1;
            for _ in 0..if step.is_multiple_of(5) { 2 } else { 1 } {
                let snapshot = snapshot(step, &mesh, comm.rank());
                if in_background {
                    saver.save(snapshot)?;
                } else {
                    save(comm, &root, snapshot, &options)?;
                }
            }
        }
    });
    panic!("the child must save until it is killed: {results:?}");
}

fn start(root: &Path, in_background: bool) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "checkpoint_kill::child_saves_until_it_is_killed", "--nocapture"]);
    command.env("FSDP_TEST_KILL_ROOT", root).stdout(Stdio::piped());
    if in_background {
        command.env("FSDP_TEST_BACKGROUND", "1");
    }
    command.spawn().unwrap()
}

#[test]
fn a_kill_at_any_moment_leaves_a_good_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let mut last = None;
    for round in 0..NUM_KILLS {
        let mut child = start(dir.path(), round % 2 == 1);
        let ready = BufReader::new(child.stdout.take().unwrap()).lines().any(|line| line.unwrap().ends_with("ready"));
        assert!(ready, "the child has resumed");
        // The first kill waits for a checkpoint; afterwards there must be one at any moment.
        while last.is_none() && !dir.path().join("latest").exists() {
            thread::sleep(Duration::from_millis(1));
        }
        let noise = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().subsec_nanos();
        thread::sleep(Duration::from_micros(u64::from(noise) * 7919 % 25_000));
        child.kill().unwrap();
        child.wait().unwrap();

        let newest = Checkpoint::newest(dir.path(), Verify::Checksums).unwrap();
        assert!(newest.rejected().is_empty(), "{:?}", newest.rejected());
        let step = newest.manifest().step;
        assert!(last.is_none_or(|last| step >= last), "step {step} after {last:?}");
        assert_whole(&newest, step);
        last = Some(step);
    }
    // However little a busy machine lets a child do before it is killed, the run goes on from there.
    let mut child = start(dir.path(), false);
    let deadline = Instant::now() + Duration::from_secs(60);
    let step = || Checkpoint::newest(dir.path(), Verify::Sizes).map_or(0, |newest| newest.manifest().step);
    while Some(step()) <= last && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(Some(step()) > last, "the run makes progress after {last:?}");
}
