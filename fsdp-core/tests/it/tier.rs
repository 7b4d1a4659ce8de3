//! A rank's store on a disk: what is written is read, what is damaged is noticed, and nothing stays behind.

#![allow(clippy::unwrap_used, reason = "all of this is a test, its helpers too")]

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use fsdp_core::{Slot, Tier, TierEngine, TierError, TierOptions};

const ENGINES: [TierEngine; 2] = [TierEngine::IoUring, TierEngine::Threads];
const BLOCK: usize = 64 << 10;

fn options(dir: &Path, engine: TierEngine) -> TierOptions {
    let timeout = Duration::from_secs(60);
    TierOptions {
        block_bytes: BLOCK,
        buffer_bytes: 8 * BLOCK,
        timeout,
        engine,
        ..TierOptions::new(dir.join("run"), 0, 1)
    }
}

/// Bytes that differ from place to place and from seed to seed.
fn data(seed: usize, len: usize) -> Bytes {
    let mut state = seed as u64 * 2 + 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u8
    };
    (0..len).map(|_| next()).collect::<Vec<_>>().into()
}

#[test]
fn what_is_written_is_read_back_whatever_its_size() {
    let dir = tempfile::tempdir().unwrap();
    for engine in ENGINES {
        let tier = Tier::open(&options(dir.path(), engine)).unwrap();
        let sizes = [0, 1, 4095, 4096, 4097, BLOCK, BLOCK + 1, 20 * BLOCK + 5];
        let slots = sizes.map(|len| tier.reserve(len).unwrap());
        assert!(slots.iter().all(|slot| slot.offset() % 4096 == 0));
        let writes: Vec<_> = slots.iter().zip(sizes).map(|(slot, len)| tier.write(*slot, data(len, len))).collect();
        let reads: Vec<_> = slots.iter().map(|slot| tier.read(*slot)).collect();
        writes.into_iter().for_each(|write| write.wait().unwrap());
        for (read, len) in reads.into_iter().zip(sizes) {
            assert!(read.wait().unwrap() == data(len, len), "{len} bytes by {engine}");
        }
        let (moved, stats) = (sizes.iter().sum::<usize>() as u64, tier.stats());
        assert_eq!((stats.read_bytes, stats.written_bytes), (moved, moved));
        assert!(stats.bandwidth().unwrap() > 0.0 && stats.file_bytes >= moved);
    }
}

#[test]
fn transfers_of_one_slot_keep_their_order_among_those_of_others() {
    let dir = tempfile::tempdir().unwrap();
    for engine in ENGINES {
        let tier = Tier::open(&options(dir.path(), engine)).unwrap();
        let slots: Vec<Slot> = (0..5).map(|_| tier.reserve(3 * BLOCK).unwrap()).collect();
        let mut expected: Vec<Option<(usize, usize)>> = vec![None; slots.len()];
        let mut reads = Vec::new();
        for round in 0..200 {
            let slot = round * 7919 % 11 % slots.len();
            if expected[slot].is_none() || round % 3 == 0 {
                let len = round * 4231 % (3 * BLOCK);
                expected[slot] = Some((round, len));
                drop(tier.write(slots[slot], data(round, len)));
            } else {
                reads.push((tier.read(slots[slot]), expected[slot].unwrap()));
            }
        }
        assert!(reads.len() > 50);
        for (read, (seed, len)) in reads {
            assert!(read.wait().unwrap() == data(seed, len), "what round {seed} has written, by {engine}");
        }
    }
}

#[test]
fn a_transfer_runs_in_the_background_and_tells_its_times() {
    let dir = tempfile::tempdir().unwrap();
    let tier = Tier::open(&options(dir.path(), TierEngine::IoUring)).unwrap();
    let slot = tier.reserve(50 * BLOCK).unwrap();
    let (result, timing) = tier.write(slot, data(1, 50 * BLOCK)).wait_timed();
    result.unwrap();
    assert!(timing.submitted <= timing.started && timing.started <= timing.finished);
    let mut read = tier.read(slot);
    while !read.is_ready() {
        std::thread::sleep(Duration::from_millis(1));
    }
    let (result, timing) = read.wait_timed();
    assert_eq!((result.unwrap().len(), timing.blocked), (50 * BLOCK, Duration::ZERO));
}

#[test]
fn a_second_run_in_the_directory_is_refused_and_the_first_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(dir.path(), TierEngine::IoUring);
    let tier = Tier::open(&options).unwrap();
    let slot = tier.reserve(100).unwrap();
    tier.write(slot, data(1, 100)).wait().unwrap();
    let error = Tier::open(&options).unwrap_err();
    assert!(matches!(&error, TierError::InUse { path } if path == tier.path()), "{error}");
    assert!(error.to_string().contains("`nvme_path` of its own"), "{error}");
    // A run of another size meets the first one at rank 0.
    assert!(matches!(Tier::open(&TierOptions { world_size: 4, ..options.clone() }), Err(TierError::InUse { .. })));
    assert_eq!(tier.read(slot).wait().unwrap(), data(1, 100));
    drop(tier);
    drop(Tier::open(&options).unwrap());
}

#[test]
fn nothing_is_left_after_exit_and_after_a_panic() {
    let dir = tempfile::tempdir().unwrap();
    for engine in ENGINES {
        let open = |rank| {
            let options = TierOptions { rank, world_size: 2, ..options(dir.path(), engine) };
            Tier::open(&options).unwrap()
        };
        let (first, second) = (open(0), open(1));
        drop(first.write(first.reserve(40 * BLOCK).unwrap(), data(1, 40 * BLOCK)));
        drop(first);
        assert!(second.path().exists(), "the others' files stay");
        let unwound = catch_unwind(AssertUnwindSafe(|| {
            let second = second;
            drop(second.write(second.reserve(40 * BLOCK).unwrap(), data(2, 40 * BLOCK)));
            std::panic::resume_unwind(Box::new("a rank fails"));
        }));
        assert!(unwound.is_err());
        assert!(!dir.path().join("run").exists());
    }
}

#[test]
fn a_directory_that_cannot_be_used_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("run"), "a file").unwrap();
    let error = Tier::open(&options(dir.path(), TierEngine::IoUring)).unwrap_err();
    assert!(matches!(error, TierError::Unusable { .. }));
    assert!(error.to_string().contains("nvme_path") && error.to_string().contains("run"), "{error}");
}

#[test]
fn foreign_files_in_the_directory_are_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    fs::create_dir(&run).unwrap();
    for name in ["rank-7.tier", "rank-x.tier", "notes.txt"] {
        fs::write(run.join(name), "from before").unwrap();
    }
    drop(Tier::open(&options(dir.path(), TierEngine::IoUring)).unwrap());
    let mut left: Vec<_> = fs::read_dir(&run).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["notes.txt", "rank-x.tier"], "only what a killed run of more ranks has left is removed");
}

/// A tier with one slot of ten blocks, and its file as another program sees it.
fn written(dir: &Path, checksums: bool) -> (Tier, Slot, File) {
    let tier = Tier::open(&TierOptions { checksums, ..options(dir, TierEngine::IoUring) }).unwrap();
    tier.reserve(1).unwrap();
    let slot = tier.reserve(10 * BLOCK).unwrap();
    tier.write(slot, data(3, 10 * BLOCK)).wait().unwrap();
    let file = File::options().read(true).write(true).open(tier.path()).unwrap();
    (tier, slot, file)
}

#[test]
fn a_damaged_block_is_named_and_noticed_only_with_checksums() {
    let dir = tempfile::tempdir().unwrap();
    for checksums in [true, false] {
        let (tier, slot, file) = written(dir.path(), checksums);
        let place = slot.offset() + 5 * BLOCK as u64 + 17;
        let mut byte = [0];
        file.read_exact_at(&mut byte, place).unwrap();
        file.write_all_at(&[byte[0] ^ 1], place).unwrap();
        file.sync_all().unwrap();
        match tier.read(slot).wait() {
            Ok(read) => assert!(!checksums && read != data(3, 10 * BLOCK)),
            Err(error) => {
                let begin = slot.offset() + 5 * BLOCK as u64;
                assert!(
                    checksums && matches!(error, TierError::Corrupted { offset, .. } if offset == begin),
                    "{error}"
                );
                let text = error.to_string();
                assert!(text.contains("rank-0.tier") && text.contains(&begin.to_string()), "{text}");
                assert!(text.contains("checkpoint"), "{text}");
            }
        }
    }
}

#[test]
fn a_file_that_was_cut_is_a_short_read_and_never_state() {
    let dir = tempfile::tempdir().unwrap();
    for len in [0, 3 * BLOCK as u64 + 4096, 9 * BLOCK as u64 + 100] {
        let (tier, slot, file) = written(dir.path(), false);
        file.set_len(len).unwrap();
        let error = tier.read(slot).wait().unwrap_err();
        assert!(matches!(error, TierError::ShortRead { offset, .. } if offset >= slot.offset()), "{error}");
        assert!(error.to_string().contains("rank-0.tier") && error.to_string().contains("resume"), "{error}");
    }
}

#[test]
fn a_directory_that_is_removed_under_a_run_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let (tier, slot, _) = written(dir.path(), true);
    fs::remove_dir_all(dir.path().join("run")).unwrap();
    for error in [tier.read(slot).wait().unwrap_err(), tier.write(slot, data(1, 1)).wait().unwrap_err()] {
        assert!(matches!(error, TierError::Gone { offset, .. } if offset == slot.offset()), "{error}");
    }
    // The next run's file has the same name, and is not this run's to remove.
    let next = Tier::open(&options(dir.path(), TierEngine::IoUring)).unwrap();
    drop(tier);
    assert!(next.path().exists());
}

#[test]
fn more_than_the_disk_holds_is_refused_with_the_numbers() {
    let dir = tempfile::tempdir().unwrap();
    let tier = Tier::open(&options(dir.path(), TierEngine::IoUring)).unwrap();
    tier.reserve(BLOCK).unwrap();
    let error = tier.reserve(1 << 43).unwrap_err();
    assert!(matches!(error, TierError::Full { offset: 65536, bytes: 0x800_0000_0000, .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("no room for 8.0 TiB at offset 65536") && text.contains("offload less"), "{text}");
    let slot = tier.reserve(BLOCK).unwrap();
    tier.write(slot, data(1, BLOCK)).wait().unwrap();
}

#[test]
fn wrong_uses_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(dir.path(), TierEngine::IoUring);
    let few = Tier::open(&TierOptions { buffer_bytes: BLOCK, ..options.clone() }).unwrap_err();
    assert!(matches!(few, TierError::Buffers { needed_bytes: 131_072, .. }), "{few}");
    assert!(few.to_string().contains("131072"), "{few}");
    for block_bytes in [0, 1000, 4097] {
        let odd = Tier::open(&TierOptions { block_bytes, ..options.clone() }).unwrap_err();
        assert!(matches!(odd, TierError::BlockSize { .. }), "{odd}");
    }
    assert_eq!(options.clone().fitting(BLOCK + 1).buffer_bytes, 4 * BLOCK);
    assert_eq!(options.clone().fitting(0).buffer_bytes, 2 * BLOCK);
    assert_eq!(options.clone().fitting(usize::MAX).buffer_bytes, 8 * BLOCK);
    let tier = Tier::open(&options).unwrap();
    let slot = tier.reserve(10).unwrap();
    assert!(matches!(tier.read(slot).wait(), Err(TierError::NotWritten { offset: 0, .. })));
    assert!(matches!(tier.write(slot, data(1, 11)).wait(), Err(TierError::TooLarge { slot_bytes: 10, bytes: 11, .. })));
    tier.write(slot, data(1, 10)).wait().unwrap();
}
