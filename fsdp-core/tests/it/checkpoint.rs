//! Checkpoints that are whole: what is saved on one world is read on any other, bit by bit.

#![allow(clippy::unwrap_used, reason = "all of this is a test, its helpers too")]

use std::collections::BTreeSet;
use std::fs;
use std::num::NonZeroUsize;
use std::path::Path;

use fsdp_core::checkpoint::{
    BlockData, Checkpoint, ExpectedTensor, Manifest, SaveOptions, StoredDtype, TensorBlock, TensorKind, Verify, save,
};
use fsdp_core::{Axis, Mesh, ShardLayout, Stage};

use crate::checkpoint_state::{assert_whole, each_rank, save_on, snapshot, tensors};

const WORLDS: [usize; 6] = [1, 2, 3, 4, 5, 8];

/// Reads every block of every tensor, cut over `world_size` ranks along each of its dimensions.
fn assert_any_cut(checkpoint: &Checkpoint, step: u64, world_size: usize) {
    for tensor in tensors() {
        for dim in 0..tensor.shape.len().max(1) {
            let layout = ShardLayout::new(&tensor.shape, dim, world_size);
            for rank in 0..world_size {
                let read = checkpoint.read(tensor.name, &layout, rank).unwrap();
                assert_eq!(read, tensor.block(step, &layout, rank), "{} along {dim}, rank {rank}", tensor.name);
            }
        }
    }
}

#[test]
fn what_any_world_saves_any_other_reads_bit_by_bit() {
    for saving in WORLDS {
        let dir = tempfile::tempdir().unwrap();
        save_on(dir.path(), 7, &Mesh::one_dim(saving), SaveOptions::default());
        let checkpoint = Checkpoint::newest(dir.path(), Verify::Checksums).unwrap();
        WORLDS.into_iter().for_each(|loading| assert_any_cut(&checkpoint, 7, loading));
    }
}

#[test]
fn a_hybrid_mesh_stores_each_block_once() {
    let mesh = Mesh::new([(Axis::Replicate, 2), (Axis::Shard, 3)]).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let saved = save_on(dir.path(), 1, &mesh, SaveOptions::default());
    let checkpoint = Checkpoint::open(&saved.dir, Verify::Checksums).unwrap();
    assert_whole(&checkpoint, 1);
    let state_bytes: usize = tensors().iter().map(|tensor| tensor.whole(1).len()).sum();
    let headers: u64 = checkpoint.manifest().files.iter().map(|file| header_bytes(&saved.dir.join(&file.name))).sum();
    assert_eq!(checkpoint.manifest().data_bytes(), headers + state_bytes as u64);
    let writers: BTreeSet<_> = checkpoint.manifest().files.iter().map(|file| &file.name).collect();
    assert!(writers.len() > 3, "both copies of the model share the work: {writers:?}");
}

fn header_bytes(file: &Path) -> u64 {
    let bytes = fs::read(file).unwrap();
    8 + u64::from_le_bytes(bytes[..8].try_into().unwrap())
}

#[test]
fn every_file_is_plain_safetensors_and_tells_where_its_pieces_belong() {
    let dir = tempfile::tempdir().unwrap();
    let saved = save_on(dir.path(), 3, &Mesh::one_dim(2), SaveOptions::default());
    let bytes = fs::read(saved.dir.join("rank-00001.safetensors")).unwrap();
    let (_, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let weight = file.tensor("tokens.weight").unwrap();
    assert_eq!((weight.dtype(), weight.shape()), (safetensors::Dtype::F32, &[6, 6][..]));
    let tokens = &tensors()[0];
    assert_eq!(weight.data(), tokens.block(3, &ShardLayout::new(&[13, 6], 0, 2), 1));
    let description = metadata.metadata().clone().unwrap();
    assert_eq!((description["step"].as_str(), description["rank"].as_str()), ("3", "1"));
    let pieces: serde_json::Value = serde_json::from_str(&description["pieces"]).unwrap();
    assert_eq!(pieces["tokens.weight"], serde_json::json!({ "shape": [13, 6], "dim": 0, "start": 7 }));
}

#[test]
fn everything_beside_tensors_comes_back_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let saved = save_on(dir.path(), 5, &Mesh::one_dim(3), SaveOptions::default());
    let Manifest { step, world_size, mesh, stage, scalars, sections, ranks, .. } = Manifest::read(&saved.dir).unwrap();
    assert_eq!((step, world_size, mesh, stage), (5, 3, Mesh::one_dim(3), Stage::Parameters));
    assert_eq!(scalars["optimizer.time"], 5);
    assert_eq!(sections["scheduler"]["lr"].as_f64().unwrap().to_bits(), (0.1f64 + 0.2).to_bits());
    let seeds: Vec<_> = ranks.iter().map(|rank| rank["seed"].as_u64().unwrap()).collect();
    assert_eq!(seeds, [u64::MAX, u64::MAX - 1, u64::MAX - 2]);
}

#[test]
fn all_ranks_open_the_same_newest_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    for step in [10, 20] {
        save_on(dir.path(), step, &Mesh::one_dim(2), SaveOptions::default());
    }
    let root = dir.path().to_owned();
    let steps = each_rank(5, move |comm| {
        let checkpoint = Checkpoint::newest_on(comm, &root, Verify::Checksums)?;
        let layout = ShardLayout::new(&[13, 6], 1, 5);
        let block = checkpoint.read("tokens.weight", &layout, comm.rank())?;
        assert_eq!(block, tensors()[0].block(20, &layout, comm.rank()));
        assert!(checkpoint.rejected().is_empty());
        Ok(checkpoint.manifest().step)
    });
    assert!(steps.into_iter().all(|step| step.unwrap() == 20));
}

#[test]
fn a_tied_tensor_is_stored_once_and_read_by_either_name() {
    let dir = tempfile::tempdir().unwrap();
    save_on(dir.path(), 1, &Mesh::one_dim(2), SaveOptions::default());
    let checkpoint = Checkpoint::newest(dir.path(), Verify::Sizes).unwrap();
    let layout = ShardLayout::new(&[13, 6], 0, 3);
    let by_name = |name| checkpoint.read(name, &layout, 1).unwrap();
    assert_eq!(by_name("tokens.weight"), by_name("head.weight"));
    assert!(checkpoint.manifest().tensors.iter().all(|tensor| tensor.name != "head.weight"));
}

#[test]
fn a_caller_reads_into_its_own_buffer_of_the_right_size() {
    let dir = tempfile::tempdir().unwrap();
    save_on(dir.path(), 1, &Mesh::one_dim(2), SaveOptions::default());
    let checkpoint = Checkpoint::newest(dir.path(), Verify::Sizes).unwrap();
    let layout = ShardLayout::new(&[9], 0, 2);
    let mut block = [0; 40];
    checkpoint.read_into("optimizer.ids", &layout, 0, &mut block).unwrap();
    assert_eq!(block[..], tensors()[10].block(1, &layout, 0));
    let error = checkpoint.read_into("optimizer.ids", &layout, 0, &mut block[1..]).unwrap_err();
    assert_eq!(error.to_string(), "`optimizer.ids`: the buffer has 39 bytes, but this rank's block needs 40");
    let error = checkpoint.read("optimizer.ids", &ShardLayout::new(&[10], 0, 2), 0).unwrap_err();
    assert_eq!(error.to_string(), "`optimizer.ids` has shape [9] in the checkpoint and [10] in the model");
    let error = checkpoint.read("optimizer.id", &layout, 0).unwrap_err().to_string();
    assert!(error.ends_with("step-1 has no tensor `optimizer.id`; `fsdp inspect` lists what it has"), "{error}");
}

/// Bytes that this thread has read from files.
#[cfg(target_os = "linux")]
fn read_bytes() -> usize {
    let io = fs::read_to_string("/proc/thread-self/io").unwrap();
    io.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap().parse().unwrap()
}

/// A block of a large tensor from the files of another world. Where it is cut along another dimension, small gaps are read too.
#[test]
#[cfg(target_os = "linux")]
fn a_rank_reads_the_bytes_of_its_blocks_and_no_others() {
    const ROWS: usize = 1 << 10;
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().to_owned();
    let saved = each_rank(2, move |comm| {
        let mut snapshot = snapshot(1, &Mesh::one_dim(2), comm.rank());
        snapshot.tensors.push(TensorBlock {
            name: "large".into(),
            aliases: Vec::new(),
            kind: TensorKind::Model,
            dtype: StoredDtype::U8,
            layout: ShardLayout::new(&[ROWS, ROWS], 0, 2),
            data: BlockData::Ready(vec![7; ROWS * ROWS / 2].into()),
        });
        save(comm, &root, snapshot, &SaveOptions::default())
    });
    assert!(saved.iter().all(Result::is_ok), "{saved:?}");
    let checkpoint = Checkpoint::newest(dir.path(), Verify::Sizes).unwrap();
    // Headers are read once, and kept.
    checkpoint.read("large", &ShardLayout::new(&[ROWS, ROWS], 0, ROWS), 0).unwrap();
    for rank in [2, 7] {
        let before = read_bytes();
        let block = checkpoint.read("large", &ShardLayout::new(&[ROWS, ROWS], 0, 8), rank).unwrap();
        let read = read_bytes() - before;
        assert_eq!(block.len(), ROWS * ROWS / 8);
        assert!((block.len()..block.len() + (32 << 10)).contains(&read), "rank {rank}: {read} bytes");
    }
}

#[test]
fn retention_keeps_the_last_and_the_pinned() {
    let dir = tempfile::tempdir().unwrap();
    let options = SaveOptions { keep_last: NonZeroUsize::new(2) };
    save_on(dir.path(), 1, &Mesh::one_dim(2), options);
    let root = dir.path().to_owned();
    let saved = each_rank(2, move |comm| {
        let pinned = fsdp_core::checkpoint::Snapshot { pinned: true, ..snapshot(2, &Mesh::one_dim(2), comm.rank()) };
        save(comm, &root, pinned, &options)
    });
    saved.into_iter().for_each(|saved| assert!(saved.unwrap().removed.is_empty()));
    let removed: Vec<_> = (3..6).map(|step| save_on(dir.path(), step, &Mesh::one_dim(2), options).removed).collect();
    assert_eq!(removed, [vec![], vec![dir.path().join("step-1")], vec![dir.path().join("step-3")]]);
    let left = |step: u64| dir.path().join(format!("step-{step}")).exists();
    assert_eq!([1, 2, 3, 4, 5].map(left), [false, true, false, true, true]);
}

#[test]
fn a_step_that_is_saved_again_is_replaced_whatever_the_world() {
    let dir = tempfile::tempdir().unwrap();
    save_on(dir.path(), 1, &Mesh::one_dim(5), SaveOptions::default());
    // What a killed run leaves.
    fs::create_dir(dir.path().join(".saving-step-1")).unwrap();
    fs::write(dir.path().join(".saving-step-1/rank-00000.safetensors"), "half").unwrap();
    let saved = save_on(dir.path(), 1, &Mesh::one_dim(2), SaveOptions::default());
    assert_eq!(fs::read_dir(&saved.dir).unwrap().count(), 3, "two files and the manifest");
    assert_whole(&Checkpoint::newest(dir.path(), Verify::Checksums).unwrap(), 1);
    let names: BTreeSet<_> = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, BTreeSet::from(["latest".into(), "step-1".into()]));
}

#[test]
fn a_block_that_another_rank_writes_is_not_even_produced() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().to_owned();
    let counts = each_rank(4, move |comm| {
        let produced = std::sync::atomic::AtomicUsize::new(0);
        let mesh = Mesh::new([(Axis::Replicate, 4)]).unwrap();
        let mut all = snapshot(1, &mesh, comm.rank());
        for tensor in &mut all.tensors {
            let inner = std::mem::replace(&mut tensor.data, BlockData::Ready(Default::default()));
            let BlockData::Lazy(inner) = inner else { unreachable!() };
            let produced = &produced;
            tensor.data = BlockData::Lazy(Box::new(move || {
                produced.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                inner()
            }));
        }
        save(comm, &root, all, &SaveOptions::default())?;
        Ok(produced.into_inner())
    });
    let total: usize = counts.into_iter().map(|count| count.unwrap()).sum();
    assert_eq!(total, tensors().len() - 1, "each once, and the empty one not at all");
}

#[test]
fn a_comparison_lists_all_differences_with_remedies() {
    let dir = tempfile::tempdir().unwrap();
    save_on(dir.path(), 1, &Mesh::one_dim(2), SaveOptions::default());
    let checkpoint = Checkpoint::newest(dir.path(), Verify::Sizes).unwrap();
    let expect =
        |name: &str, shape: &[usize], dtype| ExpectedTensor { name: name.into(), shape: shape.to_vec(), dtype };
    let all: Vec<_> = tensors().iter().map(|tensor| expect(tensor.name, &tensor.shape, Some(tensor.dtype))).collect();
    checkpoint.compare(&all, &[TensorKind::Model, TensorKind::Optimizer]).strict().unwrap();

    let model = [
        expect("head.weight", &[13, 6], None),
        expect("blocks.0.up.weight", &[6, 12], None),
        expect("blocks.0.up.bias", &[11], Some(StoredDtype::F32)),
        expect("blocks.0.kernel", &[3, 4, 5], None),
        expect("norm.gamma", &[6], None),
        expect("scale", &[], None),
        expect("nothing", &[0, 4], None),
        expect("mask", &[5, 3], None),
        expect("blocks.1.column", &[7], None),
        expect("optimizer.ids", &[9], None),
    ];
    let comparison = checkpoint.compare(&model, &[TensorKind::Model]);
    assert_eq!(comparison.matching.len(), 6);
    let text = comparison.strict().unwrap_err().to_string();
    let (first, rest) = text.split_once('\n').unwrap();
    assert!(
        first.ends_with("step-1 does not fit the model: 6 tensors match, 2 are missing, 1 extra, 2 wrong"),
        "{first}"
    );
    assert_eq!(
        rest,
        "  missing: `blocks.1.column` [7]
  missing: `optimizer.ids` [9]
  extra:   `blocks.1.row`
  wrong:   `blocks.0.up.weight` is BF16 [6, 11], the model has [6, 12]
  wrong:   `blocks.0.up.bias` is F16 [11], the model has F32 [11]
If a layer was renamed, give it its old name to load; if tensors are meant to differ, ask for a partial load, which \
         leaves what is missing as it was initialised, and reports it
Wrong shapes mean another configuration of the model, which a checkpoint has under `config`, or another layout of its \
weights"
    );
}
