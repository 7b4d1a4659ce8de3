//! A small training state for tests of checkpoints: every bit of it follows from the step and the name.

#![allow(clippy::unwrap_used, reason = "all of this is for tests")]

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use fsdp_core::checkpoint::{
    BlockData, Checkpoint, CheckpointError, SaveOptions, Saved, Snapshot, StoredDtype, TensorBlock, TensorKind, save,
};
use fsdp_core::testing::{RankFailure, run_ranks};
use fsdp_core::{Communicator, Mesh, ShardLayout, Stage};

pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// A tensor, and how it is saved.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(crate) name: &'static str,
    pub(crate) alias: Option<&'static str>,
    pub(crate) kind: TensorKind,
    pub(crate) dtype: StoredDtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) dim: usize,
    /// Every rank holds all of it.
    pub(crate) is_whole: bool,
}

fn tensor(name: &'static str, dtype: StoredDtype, shape: &[usize], dim: usize) -> Tensor {
    let kind = if name.starts_with("optimizer.") { TensorKind::Optimizer } else { TensorKind::Model };
    Tensor { name, alias: None, kind, dtype, shape: shape.to_vec(), dim, is_whole: false }
}

/// Every element type, cuts along several dimensions, shapes that do not divide, a row, a scalar, and nothing at all.
pub(crate) fn tensors() -> Vec<Tensor> {
    use StoredDtype::{Bf16, F16, F32, F64, I64, U8};
    vec![
        Tensor { alias: Some("head.weight"), ..tensor("tokens.weight", F32, &[13, 6], 0) },
        tensor("blocks.0.up.weight", Bf16, &[6, 11], 1),
        tensor("blocks.0.up.bias", F16, &[11], 0),
        tensor("blocks.0.kernel", F32, &[3, 4, 5], 2),
        tensor("blocks.1.row", F64, &[1, 7], 0),
        Tensor { is_whole: true, ..tensor("norm.gamma", F32, &[6], 0) },
        Tensor { is_whole: true, ..tensor("scale", F64, &[], 0) },
        tensor("nothing", F32, &[0, 4], 0),
        tensor("optimizer.tokens.weight.moment_1", F32, &[13, 6], 0),
        tensor("optimizer.blocks.0.up.weight.moment_2", F32, &[6, 11], 1),
        tensor("optimizer.ids", I64, &[9], 0),
        tensor("mask", U8, &[5, 3], 1),
    ]
}

impl Tensor {
    /// All bytes of the whole tensor after a step.
    pub(crate) fn whole(&self, step: u64) -> Vec<u8> {
        let len = self.shape.iter().product::<usize>() * self.dtype.size_bytes();
        let seed = self.name.bytes().fold(step + 1, |seed, byte| seed.wrapping_mul(31).wrapping_add(byte.into()));
        let byte = |index: usize| (seed.wrapping_add(index as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8;
        (0..len).map(byte).collect()
    }

    /// The bytes of one block of the tensor after a step.
    pub(crate) fn block(&self, step: u64, layout: &ShardLayout, shard_index: usize) -> Vec<u8> {
        let (whole, size) = (self.whole(step), self.dtype.size_bytes());
        layout.runs(shard_index).flat_map(|run| whole[run.start * size..run.end * size].to_vec()).collect()
    }

    fn saved_layout(&self, mesh: &Mesh) -> ShardLayout {
        let num_shards = if self.is_whole { 1 } else { mesh.size(fsdp_core::Axis::Shard) };
        ShardLayout::new(&self.shape, self.dim, num_shards)
    }
}

/// What `rank` holds of the state after a step.
pub(crate) fn snapshot(step: u64, mesh: &Mesh, rank: usize) -> Snapshot<'static> {
    let shard_index = mesh.coordinate(fsdp_core::Axis::Shard, rank);
    let block = |tensor: Tensor| {
        let layout = tensor.saved_layout(mesh);
        let bytes = tensor.block(step, &layout, if tensor.is_whole { 0 } else { shard_index });
        TensorBlock {
            name: tensor.name.into(),
            aliases: tensor.alias.map(str::to_owned).into_iter().collect(),
            kind: tensor.kind,
            dtype: tensor.dtype,
            layout,
            data: BlockData::Lazy(Box::new(move || Ok(Bytes::from(bytes)))),
        }
    };
    Snapshot {
        step,
        mesh: mesh.clone(),
        stage: Stage::Parameters,
        tensors: tensors().into_iter().map(block).collect(),
        scalars: BTreeMap::from([("optimizer.time".to_owned(), step.into())]),
        sections: BTreeMap::from([("scheduler".to_owned(), serde_json::json!({ "lr": 0.1 + 0.2, "step": step }))]),
        rank_state: serde_json::json!({ "seed": u64::MAX - rank as u64 }),
        pinned: false,
    }
}

/// Saves the state after a step, on every rank of a world.
pub(crate) fn save_on(root: &Path, step: u64, mesh: &Mesh, options: SaveOptions) -> Saved {
    let (root, ranks_mesh) = (root.to_owned(), mesh.clone());
    let saved =
        each_rank(mesh.world_size(), move |comm| save(comm, &root, snapshot(step, &ranks_mesh, comm.rank()), &options));
    let mut saved: Vec<_> = saved.into_iter().map(|saved| saved.unwrap()).collect();
    assert!(saved.iter().all(|other| *other == saved[0]), "all ranks are told the same");
    saved.remove(0)
}

/// Runs `f` on every rank. A rank that fails does not abort the others: they must end by themselves.
pub(crate) fn each_rank<T: Send + 'static>(
    world_size: usize,
    f: impl Fn(&dyn Communicator) -> Result<T, CheckpointError> + Send + Sync + 'static,
) -> Vec<Result<T, CheckpointError>> {
    let results = run_ranks(world_size, TIMEOUT, move |comm| Ok::<_, CheckpointError>(f(&*comm)));
    let ended = |result: Result<_, RankFailure<CheckpointError>>| match result {
        Ok(result) => result,
        Err(failure) => panic!("a rank {failure}"),
    };
    results.into_iter().map(ended).collect()
}

/// Asserts that every tensor, read whole, has the bits of the step.
pub(crate) fn assert_whole(checkpoint: &Checkpoint, step: u64) {
    assert_eq!(checkpoint.manifest().step, step);
    for tensor in tensors() {
        let whole = checkpoint.read(tensor.name, &ShardLayout::new(&tensor.shape, 0, 1), 0).unwrap();
        assert_eq!(whole, tensor.whole(step), "{} of step {step}", tensor.name);
    }
}
