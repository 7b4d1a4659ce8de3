//! Saves that fail: every rank is told which rank it was and why, nothing hangs, and what was saved before stays.

#![allow(clippy::unwrap_used, reason = "all of this is a test, its helpers too")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fsdp_core::checkpoint::{
    BlockData, Checkpoint, CheckpointError, SaveOptions, Saver, Snapshot, StoredDtype, TensorBlock, TensorKind, Verify,
    save,
};
use fsdp_core::testing::run_ranks_on;
use fsdp_core::{Communicator, Fault, FaultPlan, Faulty, LocalWorld, Mesh, ShardLayout};

use crate::checkpoint_state::{TIMEOUT, assert_whole, each_rank, save_on, snapshot};

/// Saves step 2 on three ranks where step 1 is saved, with a snapshot that `spoil` has changed; returns each rank's error.
/// Afterwards step 1 must be the newest, nothing may be left, and step 2 can be saved.
fn failed_saves(spoil: impl Fn(usize, &mut Snapshot<'static>) + Send + Sync + 'static) -> Vec<CheckpointError> {
    let dir = tempfile::tempdir().unwrap();
    save_on(dir.path(), 1, &Mesh::one_dim(3), SaveOptions::default());
    let root = dir.path().to_owned();
    let results = each_rank(3, move |comm| {
        let mut snapshot = snapshot(2, &Mesh::one_dim(3), comm.rank());
        spoil(comm.rank(), &mut snapshot);
        save(comm, &root, snapshot, &SaveOptions::default())
    });
    assert_whole(&Checkpoint::newest(dir.path(), Verify::Checksums).unwrap(), 1);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "only `latest` and `step-1`");
    save_on(dir.path(), 2, &Mesh::one_dim(3), SaveOptions::default());
    assert_whole(&Checkpoint::newest(dir.path(), Verify::Checksums).unwrap(), 2);
    results.into_iter().map(|result| result.unwrap_err()).collect()
}

fn texts(errors: &[CheckpointError]) -> Vec<String> {
    errors.iter().map(ToString::to_string).collect()
}

#[test]
fn a_source_that_fails_on_one_rank_is_named_on_all() {
    let errors = failed_saves(|rank, snapshot| {
        if rank == 1 {
            snapshot.tensors[0].data = BlockData::Lazy(Box::new(|| Err("the device is gone".into())));
        }
    });
    let text = "saving: rank 1 failed: `tokens.weight` could not be read from the model: the device is gone";
    assert_eq!(texts(&errors), [text; 3]);
    let own = |error: &CheckpointError| matches!(error, CheckpointError::RankFailed { source: Some(_), rank: 1, .. });
    assert_eq!(errors.iter().map(own).collect::<Vec<_>>(), [false, true, false]);
}

#[test]
fn a_buffer_of_the_wrong_size_is_refused_before_anything_is_written() {
    let errors = failed_saves(|rank, snapshot| {
        if rank > 0 {
            snapshot.tensors[0].data = BlockData::Ready(vec![0; 7].into());
        }
    });
    let text = "preparing to save: rank 1 failed (and rank 2): `tokens.weight`: the buffer has 7 bytes, but this rank's \
                block needs 120";
    assert_eq!(texts(&errors), [text; 3]);
}

#[test]
fn a_name_that_comes_twice_is_refused() {
    let errors = failed_saves(|_, snapshot| snapshot.tensors[1].aliases.push("head.weight".into()));
    assert!(errors[2].to_string().contains("two tensors are called `head.weight`"), "{}", errors[2]);
}

#[test]
fn a_block_that_nobody_wrote_is_an_error_and_no_checkpoint() {
    let errors = failed_saves(|rank, snapshot| {
        if rank == 1 {
            snapshot.tensors.remove(0);
        }
    });
    let text = errors[2].to_string();
    assert!(text.starts_with("completing the checkpoint: rank 0 failed: "), "{text}");
    assert!(text.contains("`tokens.weight`: rows 10 to 13 come where row 5 is due"), "{text}");
}

#[test]
fn ranks_that_disagree_about_a_tensor_or_a_scalar_are_named() {
    let errors = failed_saves(|rank, snapshot| {
        if rank == 2 {
            snapshot.tensors[5].aliases.push("other".into());
        }
    });
    let text = errors[1].to_string();
    assert!(text.contains("ranks disagree about `norm.gamma`: rank 0 has F32 [6] of the model, cut"), "{text}");
    assert!(text.contains("also called [], rank 2 has"), "{text}");
    let errors = failed_saves(|rank, snapshot| {
        snapshot.scalars.insert("optimizer.time".into(), (rank / 2).into());
    });
    let text = errors[1].to_string();
    assert!(text.ends_with("ranks disagree about scalar `optimizer.time`: rank 0 has 0, rank 2 has 1"), "{text}");
}

#[test]
fn a_state_larger_than_the_disk_is_refused_before_it_is_produced() {
    let errors = failed_saves(|_, snapshot| {
        snapshot.tensors.push(TensorBlock {
            name: "huge".into(),
            aliases: Vec::new(),
            kind: TensorKind::Model,
            dtype: StoredDtype::F64,
            layout: ShardLayout::new(&[3 << 50], 0, 3),
            data: BlockData::Lazy(Box::new(|| panic!("nobody has so much memory"))),
        });
    });
    for error in errors {
        assert!(matches!(error, CheckpointError::NoSpace { needed_bytes, .. } if needed_bytes > 24 << 50), "{error}");
        assert!(error.to_string().contains("the checkpoint needs 24.0 PiB on all ranks together"), "{error}");
    }
}

/// A directory in which nobody may write, not even an administrator.
fn unwritable(dir: &Path) -> PathBuf {
    let mut permissions = fs::metadata(dir).unwrap().permissions();
    permissions.set_readonly(true);
    fs::set_permissions(dir, permissions).unwrap();
    let denied = fs::create_dir(dir.join("probe")).is_err();
    if denied { dir.to_owned() } else { "/proc".into() }
}

#[test]
fn a_directory_that_may_not_be_written_is_every_ranks_error() {
    let dir = tempfile::tempdir().unwrap();
    let root = unwritable(dir.path()).join("run");
    let shown = root.display().to_string();
    for result in each_rank(2, move |comm| {
        save(comm, &root, snapshot(1, &Mesh::one_dim(2), comm.rank()), &SaveOptions::default())
    }) {
        let error = result.unwrap_err().to_string();
        assert!(error.starts_with("preparing to save: rank 0 failed: cannot create "), "{error}");
        assert!(error.contains(&shown), "{error}");
    }
}

#[test]
fn a_root_that_is_a_file_is_every_ranks_error() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let root = file.path().to_owned();
    for result in each_rank(2, move |comm| {
        save(comm, &root, snapshot(1, &Mesh::one_dim(2), comm.rank()), &SaveOptions::default())
    }) {
        let error = result.unwrap_err().to_string();
        assert!(error.ends_with("name a directory, and not a file"), "{error}");
    }
}

/// Runs a test of this file in a process of its own, started by a line of shell in which `$0` is the test's program.
fn in_a_child(test: &str, shell: &str, root: &Path) -> String {
    let output = Command::new("sh")
        .args(["-c", &format!("{shell} exec \"$0\" --exact checkpoint_failure::{test} --nocapture")])
        .arg(std::env::current_exe().unwrap())
        .env("FSDP_TEST_ROOT", root)
        .output()
        .unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The part of the test below that runs in a child, where files cannot grow beyond 16 KiB.
#[test]
fn child_saves_more_than_fits() {
    let Some(root) = std::env::var_os("FSDP_TEST_ROOT") else { return };
    let root = PathBuf::from(root);
    for result in each_rank(2, move |comm| {
        let mut snapshot = snapshot(2, &Mesh::one_dim(2), comm.rank());
        snapshot.tensors.push(TensorBlock {
            name: "large".into(),
            aliases: Vec::new(),
            kind: TensorKind::Model,
            dtype: StoredDtype::U8,
            layout: ShardLayout::new(&[100_000], 0, 2),
            data: BlockData::Ready(vec![1; 50_000].into()),
        });
        save(comm, &root, snapshot, &SaveOptions::default())
    }) {
        println!("outcome: {}", result.unwrap_err());
    }
}

#[test]
fn a_disk_that_is_full_while_writing_is_every_ranks_error_and_the_old_checkpoint_stays() {
    let dir = tempfile::tempdir().unwrap();
    save_on(dir.path(), 1, &Mesh::one_dim(2), SaveOptions::default());
    let output = in_a_child("child_saves_more_than_fits", "trap '' XFSZ; ulimit -f 32;", dir.path());
    let outcomes: Vec<_> = output.lines().filter(|line| line.contains("outcome: ")).collect();
    assert_eq!(outcomes.len(), 2, "{output}");
    for outcome in outcomes {
        assert!(outcome.contains("saving: rank 0 failed (and rank 1): cannot "), "{outcome}");
        assert!(outcome.contains("rank-00000.safetensors: File too large"), "{outcome}");
        assert!(outcome.ends_with("raise the limit on the size of files (`ulimit -f`), or save on more ranks"));
    }
    assert_whole(&Checkpoint::newest(dir.path(), Verify::Checksums).unwrap(), 1);
    assert!(!dir.path().join(".saving-step-2").exists());
}

#[test]
fn a_rank_that_never_comes_ends_the_save_on_all() {
    let dir = tempfile::tempdir().unwrap();
    // Of the operations of a save: two for each of three agreements.
    for at in 0..6 {
        let hang = |comm: Arc<dyn Communicator>| -> Arc<dyn Communicator> {
            let fault = (comm.rank() == 1).then_some((at, Fault::Hang));
            Arc::new(Faulty::new(comm, FaultPlan { fault, ..FaultPlan::default() }))
        };
        let ranks = LocalWorld::connect(3, Duration::from_millis(300)).into_iter().map(hang).collect();
        let (root, start) = (dir.path().to_owned(), Instant::now());
        let results = run_ranks_on(ranks, TIMEOUT, move |comm| {
            save(&*comm, &root, snapshot(at, &Mesh::one_dim(3), comm.rank()), &SaveOptions::default())
        });
        assert!(results.iter().all(Result::is_err), "{results:?}");
        assert!(start.elapsed() < TIMEOUT, "nobody waits for more than the communicator's timeout");
    }
    save_on(dir.path(), 9, &Mesh::one_dim(3), SaveOptions::default());
    assert_whole(&Checkpoint::newest(dir.path(), Verify::Checksums).unwrap(), 9);
}

#[test]
fn a_save_in_the_background_is_there_when_all_ranks_are_told_so() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().to_owned();
    let polls = each_rank(3, move |comm| {
        let mut saver = Saver::new(comm, &root, SaveOptions::default())?;
        assert_eq!(saver.poll()?, None);
        assert_eq!(saver.save(snapshot(1, &Mesh::one_dim(3), comm.rank()))?, None);
        let first = saver.save(snapshot(2, &Mesh::one_dim(3), comm.rank()))?.unwrap();
        assert!(first.dir.ends_with("step-1") && first.dir.exists());
        let mut num_polls = 0;
        let second = loop {
            num_polls += 1;
            match saver.poll()? {
                Some(saved) => break saved,
                None => std::thread::sleep(Duration::from_micros(100 * comm.rank() as u64)),
            }
        };
        assert!(second.dir.ends_with("step-2") && !saver.is_saving());
        assert_eq!(saver.finish()?, None);
        Ok(num_polls)
    });
    let polls: Vec<u32> = polls.into_iter().map(|polls| polls.unwrap()).collect();
    assert!(polls.iter().all(|&n| n == polls[0]), "all ranks learn it in the same call: {polls:?}");
    assert_whole(&Checkpoint::newest(dir.path(), Verify::Checksums).unwrap(), 2);
}

#[test]
fn a_save_that_fails_in_the_background_is_every_ranks_error_at_the_next_call() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().to_owned();
    let steps = each_rank(3, move |comm| {
        let mut saver = Saver::new(comm, &root, SaveOptions::default())?;
        let mut broken = snapshot(1, &Mesh::one_dim(3), comm.rank());
        if comm.rank() == 2 {
            broken.tensors[0].data = BlockData::Lazy(Box::new(|| Err("lost".into())));
        }
        saver.save(broken)?;
        let error = saver.save(snapshot(2, &Mesh::one_dim(3), comm.rank())).unwrap_err().to_string();
        assert!(error.contains("rank 2 failed: `tokens.weight`"), "{error}");
        assert!(!saver.is_saving());
        saver.save(snapshot(3, &Mesh::one_dim(3), comm.rank()))?;
        saver.finish()
    });
    assert!(steps.into_iter().all(|saved| saved.unwrap().unwrap().dir.ends_with("step-3")));
}
