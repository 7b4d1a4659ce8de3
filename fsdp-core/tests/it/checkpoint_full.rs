//! A disk that is full: every rank is told, the checkpoint before stays, and with room again the next save works.
//!
//! Everywhere that is a limit on the size of files. In the gate it is a file system that is really full, too: `.ci/full-disk`
//! makes a small one and runs [`child_fills_the_disk`] on it.

#![allow(clippy::unwrap_used, reason = "all of this is a test, its helpers too")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use fsdp_core::Mesh;
use fsdp_core::checkpoint::{
    BlockData, Checkpoint, SaveOptions, Saver, Snapshot, StoredDtype, TensorBlock, TensorKind, Verify, save,
};
use fsdp_core::{Communicator, ShardLayout};

use crate::checkpoint_state::{assert_whole, each_rank, save_on, snapshot};

/// Bytes of what the second save adds to the state on each of two ranks; the file system has four times as many.
const LARGE_BYTES: usize = 1 << 20;

/// What `.ci/full-disk` runs where a small file system is mounted at the path in the environment.
#[test]
fn child_fills_the_disk() {
    let Some(dir) = std::env::var_os("FSDP_TEST_FULL_DISK") else { return };
    let dir = PathBuf::from(dir);
    save_on(&dir, 1, &Mesh::one_dim(2), SaveOptions::default());
    // So much is left that the check of free space passes, and then a file of another program takes it.
    let (root, taken) = (dir.clone(), dir.join("taken"));
    for result in each_rank(2, move |comm| save(comm, &root, large(comm, Some(taken.clone())), &SaveOptions::default()))
    {
        assert_full(&result.unwrap_err().to_string());
    }
    assert_before(&dir);
    // In the background, past the page cache where that can be, and a full disk from the start.
    let root = dir.clone();
    for result in each_rank(2, move |comm| {
        let mut saver = Saver::new(comm, &root, SaveOptions::default())?;
        saver.save(large(comm, None))?;
        saver.finish()
    }) {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("the checkpoint needs 2.0 MiB on all ranks together, but "), "{error}");
    }
    assert_before(&dir);
    fs::remove_file(dir.join("taken")).unwrap();
    let (root, taken) = (dir.clone(), dir.join("taken"));
    for result in each_rank(2, move |comm| {
        let mut saver = Saver::new(comm, &root, SaveOptions::default())?;
        saver.save(large(comm, Some(taken.clone())))?;
        saver.finish()
    }) {
        assert_full(&result.unwrap_err().to_string());
    }
    assert_before(&dir);
    fs::remove_file(dir.join("taken")).unwrap();
    let root = dir.clone();
    let saved = each_rank(2, move |comm| save(comm, &root, large(comm, None), &SaveOptions::default()));
    assert!(saved.iter().all(Result::is_ok), "{saved:?}");
    assert_eq!(Checkpoint::newest(&dir, Verify::Checksums).unwrap().manifest().step, 2);
    println!("the disk was full");
}

/// Step 2 with a large tensor; when its turn has come, rank 0 fills the disk with the file named.
fn large(comm: &dyn Communicator, taken: Option<PathBuf>) -> Snapshot<'static> {
    let mut snapshot = snapshot(2, &Mesh::one_dim(2), comm.rank());
    let is_first = comm.rank() == 0;
    let produce = move || {
        if let (true, Some(taken)) = (is_first, taken) {
            // Block by block, until there is no room for one more.
            let mut file = fs::File::create(taken)?;
            while std::io::Write::write_all(&mut file, &[1; 4096]).is_ok() {}
        }
        Ok(vec![7; LARGE_BYTES].into())
    };
    snapshot.tensors.push(TensorBlock {
        name: "large".into(),
        aliases: Vec::new(),
        kind: TensorKind::Model,
        dtype: StoredDtype::U8,
        layout: ShardLayout::new(&[2 * LARGE_BYTES], 0, 2),
        data: BlockData::Lazy(Box::new(produce)),
    });
    snapshot
}

fn assert_full(error: &str) {
    assert!(error.starts_with("saving: rank "), "{error}");
    assert!(error.contains(".safetensors: No space left on device"), "{error}");
    assert!(error.ends_with("free some space, save elsewhere, or keep fewer checkpoints"), "{error}");
}

fn assert_before(dir: &Path) {
    assert_whole(&Checkpoint::newest(dir, Verify::Checksums).unwrap(), 1);
    assert!(!dir.join(".saving-step-2").exists(), "what was written of the other is gone");
}

/// Lets no file of this process grow beyond so many bytes.
fn limit_files(bytes: Option<u64>) {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { maximum, .. } = getrlimit(Resource::Fsize);
    setrlimit(Resource::Fsize, Rlimit { current: bytes, maximum }).unwrap();
}

/// The part of the test that runs where a file that reaches its limit is an error, and no signal.
#[test]
fn child_reaches_the_limit_of_files() {
    let Some(dir) = std::env::var_os("FSDP_TEST_FILE_LIMIT") else { return };
    let dir = PathBuf::from(dir);
    save_on(&dir, 1, &Mesh::one_dim(2), SaveOptions::default());
    let save_large = |in_background: bool| {
        let root = dir.clone();
        each_rank(2, move |comm| {
            if !in_background {
                return save(comm, &root, large(comm, None), &SaveOptions::default()).map(Some);
            }
            let mut saver = Saver::new(comm, &root, SaveOptions::default())?;
            saver.save(large(comm, None))?;
            saver.finish()
        })
    };
    for in_background in [false, true] {
        limit_files(Some(LARGE_BYTES as u64 / 2));
        let results = save_large(in_background);
        limit_files(None);
        assert_eq!(results.len(), 2);
        for result in results {
            let error = result.unwrap_err().to_string();
            assert!(error.starts_with("saving: rank 0 failed (and rank 1): cannot write "), "{error}");
            assert!(error.contains(".safetensors: File too large"), "{error}");
        }
        assert_before(&dir);
    }
    assert!(save_large(true).iter().all(Result::is_ok));
    assert_eq!(Checkpoint::newest(&dir, Verify::Checksums).unwrap().manifest().step, 2);
    println!("the limit was reached");
}

#[test]
fn files_that_may_not_grow_are_every_ranks_error_and_the_checkpoint_before_stays() {
    let dir = tempfile::tempdir().unwrap();
    let line = "trap '' XFSZ; exec \"$0\" --exact checkpoint_full::child_reaches_the_limit_of_files --nocapture";
    let mut command = Command::new("sh");
    command.args(["-c", line]).arg(std::env::current_exe().unwrap()).env("FSDP_TEST_FILE_LIMIT", dir.path());
    let output = command.output().unwrap();
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(text.contains("the limit was reached") && text.contains("1 passed"), "{text}");
}
