//! What is saved, as one rank holds it, and which rank writes what several hold.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use bytes::Bytes;
use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64;

use super::{CheckpointError, StoredDtype, TensorKind};
use crate::{Axis, Mesh, ShardLayout, Stage};

/// The state of a training run after a step, as one rank holds it.
///
/// Every rank makes one of the same step, mesh and stage. It lists the tensors that it holds at least a row of; ranks
/// that own nothing of a tensor may list it or not.
#[derive(Debug)]
pub struct Snapshot<'a> {
    /// The training step after which it is taken.
    pub step: u64,
    /// The mesh of the run.
    pub mesh: Mesh,
    /// The stage of the run.
    pub stage: Stage,
    /// Parameters, buffers and optimizer state.
    pub tensors: Vec<TensorBlock<'a>>,
    /// Scalars of optimizer state by name, such as a count of steps. A name that several ranks give must have one value.
    /// JSON has no infinity and no NaN: write a number that may be one as its bits.
    pub scalars: BTreeMap<String, Value>,
    /// Free-form sections by name; those of rank 0 are stored.
    pub sections: BTreeMap<String, Value>,
    /// What this rank wants to find again, such as its random state; [`Value::Null`] for nothing.
    pub rank_state: Value,
    /// Whether retention leaves this checkpoint alone, as if a file `pinned` was put into its directory by hand.
    pub pinned: bool,
}

/// This rank's block of one tensor.
#[derive(Debug)]
pub struct TensorBlock<'a> {
    /// Its name, unique among all tensors of the snapshot.
    pub name: String,
    /// Further names of the same tensor.
    pub aliases: Vec<String>,
    /// What it belongs to.
    pub kind: TensorKind,
    /// Its element type.
    pub dtype: StoredDtype,
    /// How it is cut: into one block, which every rank holds; over the shard axis of the mesh, so that ranks along the
    /// replicate axis hold equal blocks; or over all ranks.
    pub layout: ShardLayout,
    /// The elements of this rank's block: flat, row-major, little-endian, without padding.
    pub data: BlockData<'a>,
}

/// The bytes of a block, or how to get them. What is produced is dropped once it is written, so a rank that produces its
/// blocks never holds more than one.
pub enum BlockData<'a> {
    /// Here they are. Costs nothing where the buffer is shared.
    Ready(Bytes),
    /// Called when the block's turn has come, and not at all where another rank writes it.
    Lazy(Box<dyn FnOnce() -> Result<Bytes, Box<dyn std::error::Error + Send + Sync>> + Send + 'a>),
}

impl fmt::Debug for BlockData<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BlockData::Ready(bytes) => write!(f, "Ready({} bytes)", bytes.len()),
            BlockData::Lazy(_) => f.write_str("Lazy"),
        }
    }
}

impl TensorBlock<'_> {
    /// The block's index in the layout, and the ranks that hold it.
    fn holders(&self, mesh: &Mesh, rank: usize) -> Result<(usize, Vec<usize>), CheckpointError> {
        match self.layout.num_shards() {
            1 => Ok((0, (0..mesh.world_size()).collect())),
            n if n == mesh.size(Axis::Shard) => {
                Ok((mesh.coordinate(Axis::Shard, rank), mesh.group(Axis::Replicate, rank)))
            }
            n if n == mesh.world_size() => Ok((rank, vec![rank])),
            num_shards => {
                Err(CheckpointError::BlockCount { tensor: self.name.clone(), num_shards, mesh: mesh.clone() })
            }
        }
    }

    /// The index of the block that `rank` writes; `None` where it owns nothing, or another rank writes the block.
    ///
    /// A hash of the name chooses among those that hold the block, so that the work is spread, and no rank needs to know
    /// what others have.
    pub(super) fn written_block(&self, mesh: &Mesh, rank: usize) -> Result<Option<usize>, CheckpointError> {
        let (shard_index, holders) = self.holders(mesh, rank)?;
        let writer = holders[(xxh3_64(self.name.as_bytes()) % holders.len() as u64) as usize];
        Ok((writer == rank && self.layout.shard_len(shard_index) > 0).then_some(shard_index))
    }

    /// Bytes of a block.
    pub(super) fn block_bytes(&self, shard_index: usize) -> usize {
        self.layout.shard_len(shard_index) * self.dtype.size_bytes()
    }
}

impl Snapshot<'_> {
    /// Whether the snapshot fits its world and each ready buffer its block.
    pub(super) fn check(&self, rank: usize, world_size: usize) -> Result<(), CheckpointError> {
        if self.mesh.world_size() != world_size {
            return Err(CheckpointError::MeshSize { mesh: self.mesh.clone(), world_size });
        }
        let mut names = BTreeSet::new();
        for tensor in &self.tensors {
            if let Some(name) = [&tensor.name].into_iter().chain(&tensor.aliases).find(|name| !names.insert(*name)) {
                return Err(CheckpointError::RepeatedName { tensor: name.clone() });
            }
            let (shard_index, _) = tensor.holders(&self.mesh, rank)?;
            if let BlockData::Ready(bytes) = &tensor.data {
                check_size(&tensor.name, tensor.block_bytes(shard_index), bytes)?;
            }
        }
        Ok(())
    }
}

impl BlockData<'_> {
    /// The bytes, which must be `expected_bytes`; `tensor` is for errors.
    pub(super) fn into_bytes(self, tensor: &str, expected_bytes: usize) -> Result<Bytes, CheckpointError> {
        let bytes = match self {
            BlockData::Ready(bytes) => bytes,
            BlockData::Lazy(produce) => {
                produce().map_err(|source| CheckpointError::Source { tensor: tensor.to_owned(), source })?
            }
        };
        check_size(tensor, expected_bytes, &bytes)?;
        Ok(bytes)
    }
}

fn check_size(tensor: &str, expected_bytes: usize, bytes: &Bytes) -> Result<(), CheckpointError> {
    if bytes.len() == expected_bytes {
        return Ok(());
    }
    Err(CheckpointError::BlockSize { tensor: tensor.to_owned(), expected_bytes, got_bytes: bytes.len() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(name: &str, layout: ShardLayout) -> TensorBlock<'static> {
        let data = BlockData::Ready(Bytes::new());
        let (name, kind) = (name.to_owned(), TensorKind::Model);
        TensorBlock { name, aliases: Vec::new(), kind, dtype: StoredDtype::F32, layout, data }
    }

    #[test]
    fn each_row_is_written_once_whatever_the_mesh_and_the_cut() {
        for axes in [&[(Axis::Shard, 4)][..], &[(Axis::Replicate, 2), (Axis::Shard, 3)], &[(Axis::Replicate, 3)]] {
            let mesh = Mesh::new(axes.iter().copied()).unwrap();
            for num_shards in [1, mesh.size(Axis::Shard), mesh.world_size()] {
                for name in ["a", "b", "blocks.0.weight"] {
                    let tensor = block(name, ShardLayout::new(&[2, 5], 1, num_shards));
                    let mut written = vec![0; 5];
                    for rank in 0..mesh.world_size() {
                        let block = tensor.written_block(&mesh, rank).unwrap();
                        block.into_iter().flat_map(|i| tensor.layout.rows(i)).for_each(|row| written[row] += 1);
                    }
                    assert_eq!(written, [1; 5], "{mesh}, {num_shards} blocks");
                }
            }
        }
    }

    #[test]
    fn what_several_ranks_hold_is_spread_over_them() {
        let mesh = Mesh::one_dim(4);
        let mut num_written = [0; 4];
        for index in 0..400 {
            let tensor = block(&format!("blocks.{index}.weight"), ShardLayout::new(&[3], 0, 1));
            for (rank, num_written) in num_written.iter_mut().enumerate() {
                *num_written += usize::from(tensor.written_block(&mesh, rank).unwrap().is_some());
            }
        }
        assert!(num_written.iter().all(|&n| n > 60), "{num_written:?}");
    }

    #[test]
    fn a_cut_that_the_mesh_does_not_deal_out_is_refused() {
        let mesh = Mesh::new([(Axis::Replicate, 2), (Axis::Shard, 3)]).unwrap();
        let error = block("w", ShardLayout::new(&[8], 0, 4)).written_block(&mesh, 0).unwrap_err().to_string();
        assert_eq!(
            error,
            "`w` is cut into 4 blocks, which the mesh { replicate = 2, shard = 3 } does not deal out; cut it over the \
             shard axis or over all ranks, or pass it whole (1 block)"
        );
    }
}
