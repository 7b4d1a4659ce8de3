//! Checks of the arguments of a collective, made before anything is sent.

use super::{CommError, GatherPart, OpTag, ReducePart};
use crate::ShardLayout;

/// Who calls: a rank of a communicator.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Member {
    /// Its number in the communicator.
    pub(crate) rank: usize,
    /// Ranks of the communicator.
    pub(crate) world_size: usize,
    /// Its number in the world, for errors.
    pub(crate) world_rank: usize,
}

impl Member {
    /// Each part is cut over the communicator's ranks, and holds this rank's block.
    pub(crate) fn check_gather(&self, tag: &OpTag, parts: &[GatherPart]) -> Result<(), CommError> {
        parts.iter().enumerate().try_for_each(|(index, part)| {
            self.check_layout(tag, index, &part.layout)?;
            self.check_size(tag, index, part.layout.shard_len(self.rank), part.elem_bytes, part.shard.len())
        })
    }

    /// Each part is cut over the communicator's ranks, and holds the whole tensor.
    pub(crate) fn check_reduce(&self, tag: &OpTag, parts: &[ReducePart]) -> Result<(), CommError> {
        parts.iter().enumerate().try_for_each(|(index, part)| {
            self.check_layout(tag, index, &part.layout)?;
            self.check_size(tag, index, part.layout.full_len(), part.dtype.size_bytes(), part.full.len())
        })
    }

    /// The tensor is cut over the communicator's ranks, and the root, and only the root, holds the whole.
    pub(crate) fn check_scatter(
        &self,
        tag: &OpTag,
        root: usize,
        full_bytes: Option<usize>,
        layout: &ShardLayout,
        elem_bytes: usize,
    ) -> Result<(), CommError> {
        self.check_root(tag, root, full_bytes.is_some())?;
        self.check_layout(tag, 0, layout)?;
        full_bytes.map_or(Ok(()), |bytes| self.check_size(tag, 0, layout.full_len(), elem_bytes, bytes))
    }

    /// The root exists, and it alone passed data.
    pub(crate) fn check_root(&self, tag: &OpTag, root: usize, has_data: bool) -> Result<(), CommError> {
        let problem = if root >= self.world_size {
            "the root is not a rank of the communicator"
        } else if root == self.rank && !has_data {
            "the root passed no data"
        } else if root != self.rank && has_data {
            "a rank that is not the root passed data"
        } else {
            return Ok(());
        };
        Err(CommError::Root { rank: self.world_rank, tag: tag.clone(), root, problem })
    }

    /// The list names ranks of the communicator, once each, this one among them. Returns its place in the list.
    pub(crate) fn check_group(&self, ranks: &[usize]) -> Result<usize, CommError> {
        let place = ranks.iter().position(|&rank| rank == self.rank);
        let problem = match place {
            _ if ranks.iter().any(|&rank| rank >= self.world_size) => "it lists a rank that does not exist",
            _ if ranks.iter().enumerate().any(|(i, rank)| ranks[..i].contains(rank)) => "it lists a rank twice",
            None => "the calling rank is not in it",
            Some(place) => return Ok(place),
        };
        Err(CommError::Group { rank: self.world_rank, ranks: ranks.to_vec(), problem })
    }

    fn check_layout(&self, tag: &OpTag, part: usize, layout: &ShardLayout) -> Result<(), CommError> {
        let (rank, world_size, num_shards) = (self.world_rank, self.world_size, layout.num_shards());
        if num_shards == world_size {
            return Ok(());
        }
        Err(CommError::Layout { rank, tag: tag.clone(), part, num_shards, world_size })
    }

    fn check_size(
        &self,
        tag: &OpTag,
        part: usize,
        len: usize,
        elem_bytes: usize,
        got_bytes: usize,
    ) -> Result<(), CommError> {
        let expected_bytes = len.saturating_mul(elem_bytes);
        if got_bytes == expected_bytes {
            return Ok(());
        }
        Err(CommError::BufferSize { rank: self.world_rank, tag: tag.clone(), part, expected_bytes, got_bytes })
    }
}
