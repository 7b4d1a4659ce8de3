//! Checkpoints that were damaged: refused with a reason, passed over for the last good one, and never read wrongly.

#![allow(clippy::unwrap_used, reason = "all of this is a test, its helpers too")]

use std::fs::{self, OpenOptions};
use std::path::Path;

use fsdp_core::checkpoint::{Checkpoint, CheckpointError, SaveOptions, Verify, inspect};
use fsdp_core::{Mesh, ShardLayout};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use crate::checkpoint_state::{assert_whole, each_rank, save_on, tensors};

/// A root with good checkpoints of steps 1 and 2, saved by two ranks.
fn two_steps() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for step in [1, 2] {
        save_on(dir.path(), step, &Mesh::one_dim(2), SaveOptions::default());
    }
    dir
}

fn flip_bit(file: &Path, from_end: usize) {
    let mut bytes = fs::read(file).unwrap();
    let at = bytes.len() - 1 - from_end;
    bytes[at] ^= 0x10;
    fs::write(file, bytes).unwrap();
}

fn truncate(file: &Path) {
    let len = fs::metadata(file).unwrap().len();
    OpenOptions::new().write(true).open(file).unwrap().set_len(len - 1).unwrap();
}

/// Damages step 2, and expects this reason from opening it, and step 1 from looking for the newest, on all ranks.
fn assert_falls_back(damage: impl Fn(&Path), verify: Verify, reason: &str) {
    let dir = two_steps();
    let step = dir.path().join("step-2");
    damage(&step);
    let error = Checkpoint::open(&step, verify).unwrap_err().to_string();
    assert!(error.contains(reason), "{error}");

    let checkpoint = Checkpoint::newest(dir.path(), verify).unwrap();
    assert_whole(&checkpoint, 1);
    assert_eq!(checkpoint.rejected().len(), 1);
    assert_eq!(checkpoint.rejected()[0].dir, step);

    let root = dir.path().to_owned();
    let found = each_rank(3, move |comm| {
        let checkpoint = Checkpoint::newest_on(comm, &root, verify)?;
        Ok((checkpoint.manifest().step, checkpoint.rejected().to_vec()))
    });
    let found: Vec<_> = found.into_iter().map(|found| found.unwrap()).collect();
    for (step, rejected) in &found {
        assert_eq!((*step, rejected), (1, &found[0].1), "all ranks choose the same, for the same reason");
        assert!(rejected[0].reason.contains(reason), "{}", rejected[0]);
    }
}

#[test]
fn a_truncated_file_falls_back_even_without_checksums() {
    let damage = |step: &Path| truncate(&step.join("rank-00001.safetensors"));
    assert_falls_back(damage, Verify::Sizes, "were saved: it was cut off or written over; use another checkpoint");
}

#[test]
fn a_missing_file_falls_back_even_without_checksums() {
    let damage = |step: &Path| fs::remove_file(step.join("rank-00000.safetensors")).unwrap();
    assert_falls_back(damage, Verify::Sizes, "rank-00000.safetensors is missing; restore it");
}

#[test]
fn a_flipped_bit_in_a_tensor_falls_back() {
    let damage = |step: &Path| flip_bit(&step.join("rank-00001.safetensors"), 3);
    assert_falls_back(damage, Verify::Checksums, "was saved: its content has changed; use another checkpoint");
}

#[test]
fn a_missing_manifest_falls_back() {
    let damage = |step: &Path| fs::remove_file(step.join("manifest.json")).unwrap();
    assert_falls_back(damage, Verify::Sizes, "has no manifest.json, so it is no checkpoint");
}

#[test]
fn a_flipped_bit_in_the_manifest_falls_back() {
    let damage = |step: &Path| flip_bit(&step.join("manifest.json"), 100);
    assert_falls_back(damage, Verify::Sizes, "manifest.json");
}

#[test]
fn a_truncated_manifest_falls_back() {
    let damage = |step: &Path| {
        let file = step.join("manifest.json");
        let text = fs::read(&file).unwrap();
        fs::write(&file, &text[..text.len() / 2]).unwrap();
    };
    assert_falls_back(damage, Verify::Sizes, "the manifest is damaged: EOF while parsing");
}

#[test]
fn a_manifest_of_a_newer_program_says_so() {
    let damage = |step: &Path| {
        let file = step.join("manifest.json");
        let text = fs::read_to_string(&file).unwrap();
        fs::write(&file, text.replacen("\"format_version\":1", "\"format_version\":2,\"new\":0", 1)).unwrap();
    };
    assert_falls_back(
        damage,
        Verify::Sizes,
        "format version 2 is unknown, this program reads version 1; use the program",
    );
}

#[test]
fn a_header_that_was_written_over_is_noticed_when_it_is_read() {
    let dir = two_steps();
    let step = dir.path().join("step-2");
    let file = step.join("rank-00001.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    bytes[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    fs::write(&file, &bytes).unwrap();
    // Sizes say nothing of content, so it opens; reading does not trust the header.
    let checkpoint = Checkpoint::open(&step, Verify::Sizes).unwrap();
    let error = checkpoint.read("tokens.weight", &ShardLayout::new(&[13, 6], 0, 1), 0).unwrap_err();
    assert!(matches!(&error, CheckpointError::Header { file: found, .. } if *found == file), "{error}");
    assert!(error.to_string().contains("the header is damaged: it claims 18446744073709551615 bytes in a file of"));
}

#[test]
fn files_of_two_checkpoints_do_not_mix() {
    let dir = two_steps();
    let file = |step: u64| dir.path().join(format!("step-{step}/rank-00000.safetensors"));
    fs::copy(file(1), file(2)).unwrap();
    assert!(Checkpoint::open(dir.path().join("step-2"), Verify::Sizes).is_ok(), "sizes are equal");
    let error = Checkpoint::open(dir.path().join("step-2"), Verify::Checksums).unwrap_err();
    assert!(matches!(error, CheckpointError::Checksum { .. }), "{error}");
}

#[test]
fn a_pointer_to_nothing_does_not_matter() {
    for pointer in ["step-99\n", "", "\0\u{fffd}"] {
        let dir = two_steps();
        fs::write(dir.path().join("latest"), pointer).unwrap();
        assert_whole(&Checkpoint::newest(dir.path(), Verify::Checksums).unwrap(), 2);
    }
    let dir = two_steps();
    fs::remove_file(dir.path().join("latest")).unwrap();
    assert_whole(&Checkpoint::newest(dir.path(), Verify::Checksums).unwrap(), 2);
}

#[test]
fn where_nothing_is_good_every_reason_is_told_on_every_rank() {
    let dir = two_steps();
    fs::remove_file(dir.path().join("step-1/rank-00000.safetensors")).unwrap();
    truncate(&dir.path().join("step-2/rank-00000.safetensors"));
    let root = dir.path().to_owned();
    for result in each_rank(2, move |comm| Checkpoint::newest_on(comm, &root, Verify::Sizes)) {
        let error = result.unwrap_err();
        let CheckpointError::NothingGood { rejected, .. } = &error else { panic!("{error}") };
        assert_eq!(rejected.len(), 2);
        let text = error.to_string();
        assert!(text.contains("was cut off") && text.contains("is missing"), "{text}");
    }
    let empty = tempfile::tempdir().unwrap();
    let error = Checkpoint::newest(empty.path(), Verify::Sizes).unwrap_err().to_string();
    assert!(error.ends_with("there are none; check the path, or start without resuming"), "{error}");
}

#[test]
fn inspecting_names_everything_that_is_damaged() {
    let dir = two_steps();
    let step = dir.path().join("step-2");
    assert!(inspect(&step, Verify::Checksums).is_good());
    flip_bit(&step.join("rank-00000.safetensors"), 0);
    truncate(&step.join("rank-00001.safetensors"));
    let found = inspect(&step, Verify::Checksums);
    assert_eq!(found.damage.len(), 2);
    let text = found.to_string();
    assert!(text.contains("DAMAGED in 2 files") && text.contains("its content has changed"), "{text}");
    assert!(text.contains("rank-00001.safetensors has") && text.contains("tokens.weight = head.weight"), "{text}");
    assert_eq!(inspect(&step, Verify::Sizes).damage.len(), 1);
}

#[test]
fn whatever_bytes_change_nothing_is_read_wrongly() {
    let dir = tempfile::tempdir().unwrap();
    let saved = save_on(dir.path(), 1, &Mesh::one_dim(2), SaveOptions::default());
    let names = ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"];
    let change = (any::<prop::sample::Index>(), any::<u8>());
    let cases = (
        prop::sample::select(names.to_vec()),
        prop::collection::vec(change, 1..8),
        prop::option::weighted(0.2, any::<prop::sample::Index>()),
    );
    let config = ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() };
    let run = TestRunner::new(config).run(&cases, |(name, changes, cut)| {
        let file = saved.dir.join(name);
        let original = fs::read(&file).unwrap();
        let mut bytes = original.clone();
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        fs::write(&file, bytes).unwrap();
        if let Ok(checkpoint) = Checkpoint::open(&saved.dir, Verify::Checksums) {
            assert_whole(&checkpoint, 1);
        }
        // Without checksums data may be wrong, but nothing may panic or allocate what is not there.
        if let Ok(checkpoint) = Checkpoint::open(&saved.dir, Verify::Sizes) {
            for tensor in tensors() {
                let _ = checkpoint.read(tensor.name, &ShardLayout::new(&tensor.shape, 0, 2), 1);
            }
        }
        fs::write(&file, original).unwrap();
        Ok(())
    });
    run.unwrap();
}
