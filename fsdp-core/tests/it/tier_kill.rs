//! A process that uses a tier is killed at random moments; the next run on its directory starts clean.

#![allow(clippy::unwrap_used, reason = "all of this is a test, its helpers too")]

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use fsdp_core::{Tier, TierError, TierOptions};

const LEN: usize = 3 << 20;

/// Whoever should kill the child is gone if that takes so long.
const LIMIT: Duration = Duration::from_secs(60);

/// The part of the test that runs in a child: two ranks that write until they are killed.
#[test]
fn child_writes_until_it_is_killed() {
    let Some(dir) = std::env::var_os("FSDP_TEST_TIER_DIR") else { return };
    let dir = PathBuf::from(dir);
    let tiers = [0, 1].map(|rank| Tier::open(&TierOptions::new(&dir, rank, 2)).unwrap());
    let slots = [0, 1].map(|rank| tiers[rank].reserve(LEN).unwrap());
    println!("ready");
    let started = Instant::now();
    while started.elapsed() < LIMIT {
        let writes = [0, 1].map(|rank| tiers[rank].write(slots[rank], vec![rank as u8; LEN].into()));
        writes.into_iter().for_each(|write| write.wait().unwrap());
    }
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn what_a_killed_run_has_left_is_cleaned_by_the_next() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("run");
    for round in 0..4 {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "tier_kill::child_writes_until_it_is_killed", "--nocapture"]);
        let mut child = command.env("FSDP_TEST_TIER_DIR", &dir).stdout(Stdio::piped()).spawn().unwrap();
        let ready = BufReader::new(child.stdout.take().unwrap()).lines().any(|line| line.unwrap().ends_with("ready"));
        assert!(ready);
        let refused = Tier::open(&TierOptions::new(&dir, 0, 1));
        assert!(matches!(refused, Err(TierError::InUse { .. })), "the child is alive");
        thread::sleep(Duration::from_millis(5 * round));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(names(&dir), ["rank-0.tier", "rank-1.tier"], "a killed process cannot clean");

        let tier = Tier::open(&TierOptions::new(&dir, 0, 1)).unwrap();
        assert_eq!(names(&dir), ["rank-0.tier"], "a run of one rank removes the file of the second");
        assert_eq!(fs::metadata(tier.path()).unwrap().len(), 0);
        let slot = tier.reserve(LEN).unwrap();
        assert!(matches!(tier.read(slot).wait(), Err(TierError::NotWritten { .. })), "nothing old is taken for state");
        drop(tier);
        assert!(!dir.exists());
    }
}
