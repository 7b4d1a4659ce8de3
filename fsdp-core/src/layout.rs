//! Which elements of one parameter each rank owns: contiguous blocks along one dimension.
//!
//! [Note: Padding of uneven shards]
//! Row `i` of a dimension of `rows` split over `n` ranks lives on rank `i / ceil(rows / n)`, as in JAX's
//! `PartitionSpec` and PyTorch's FSDP2. So every rank but the last owners holds `ceil(rows / n)` rows, one rank may hold
//! fewer, and ranks after it hold none. Nothing here stores padding: an engine that needs equal messages pads to
//! [`ShardLayout::padded_len`] on the wire, and padding never reaches a norm, an update or a checkpoint.

use std::ops::Range;

/// How one tensor is cut along one dimension. All lengths are in elements of the row-major tensor.
///
/// ```
/// use fsdp_core::ShardLayout;
///
/// // 5 rows of 3 over 4 ranks: blocks of ceil(5 / 4) = 2 rows, and the last rank owns nothing.
/// let layout = ShardLayout::new(&[5, 3], 0, 4);
/// assert_eq!(layout.shard_shape(0), vec![2, 3]);
/// assert_eq!(layout.shard_shape(2), vec![1, 3]);
/// assert_eq!(layout.shard_len(3), 0);
/// assert_eq!(layout.padded_len(), 6);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ShardLayout {
    shape: Vec<usize>,
    dim: usize,
    num_shards: usize,
}

impl ShardLayout {
    /// Cuts a tensor of `shape` along `dim` into `num_shards` blocks. A tensor without dimensions counts as one row.
    ///
    /// # Panics
    /// If `dim` is not a dimension of `shape` or `num_shards` is 0: both are checked where a user's values come in.
    pub fn new(shape: &[usize], dim: usize, num_shards: usize) -> Self {
        assert!(num_shards > 0, "a layout needs at least one shard");
        assert!(dim < shape.len().max(1), "dimension {dim} does not exist in {shape:?}");
        Self { shape: shape.to_vec(), dim, num_shards }
    }

    /// The logical shape, before sharding.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The dimension that is cut.
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// Into how many blocks the dimension is cut.
    pub fn num_shards(&self) -> usize {
        self.num_shards
    }

    /// Elements of the whole tensor.
    pub fn full_len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Rows of `rank`, as a range of the cut dimension; empty where the rank owns nothing.
    pub fn rows(&self, rank: usize) -> Range<usize> {
        let rows = self.num_rows();
        let chunk = rows.div_ceil(self.num_shards);
        (rank * chunk).min(rows)..((rank + 1) * chunk).min(rows)
    }

    /// Shape of the block of `rank`. The cut dimension may be 0.
    pub fn shard_shape(&self, rank: usize) -> Vec<usize> {
        let mut shape = self.shape.clone();
        if let Some(rows) = shape.get_mut(self.dim) {
            *rows = self.rows(rank).len();
        }
        shape
    }

    /// Elements that `rank` owns.
    pub fn shard_len(&self, rank: usize) -> usize {
        self.outer() * self.rows(rank).len() * self.inner()
    }

    /// Elements that the ranks other than `rank` own.
    pub fn others_len(&self, rank: usize) -> usize {
        self.full_len() - self.shard_len(rank)
    }

    /// Elements of the largest block: what each rank would send where messages must be equal.
    /// See [Note: Padding of uneven shards].
    pub fn padded_len(&self) -> usize {
        self.shard_len(0)
    }

    /// The elements of `rank` in the whole tensor, as contiguous ranges in the order of the block's own elements.
    ///
    /// Cut along dimension 0 there is one range; along dimension `d`, one per index of the dimensions before `d`.
    pub fn runs(&self, rank: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let rows = self.rows(rank);
        let (outer, inner, num_rows) = (self.outer(), self.inner(), self.num_rows());
        (0..outer)
            .map(move |o| (o * num_rows + rows.start) * inner..(o * num_rows + rows.end) * inner)
            .filter(|run| !run.is_empty())
    }

    fn num_rows(&self) -> usize {
        self.shape.get(self.dim).copied().unwrap_or(1)
    }

    fn outer(&self) -> usize {
        self.shape.iter().take(self.dim).product()
    }

    fn inner(&self) -> usize {
        self.shape.iter().skip(self.dim + 1).product()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_all_ranks_cover_the_tensor_once() {
        for shape in [vec![5, 3], vec![2], vec![7, 2, 3], vec![0, 4], vec![], vec![8, 1]] {
            for dim in 0..shape.len().max(1) {
                for num_shards in 1..9 {
                    let layout = ShardLayout::new(&shape, dim, num_shards);
                    let mut seen = vec![0; layout.full_len()];
                    for rank in 0..num_shards {
                        let run_len: usize = layout.runs(rank).map(|run| run.len()).sum();
                        assert_eq!(run_len, layout.shard_len(rank));
                        assert!(layout.shard_len(rank) <= layout.padded_len());
                        layout.runs(rank).flatten().for_each(|i| seen[i] += 1);
                    }
                    assert!(seen.iter().all(|&n| n == 1), "{layout:?}: {seen:?}");
                }
            }
        }
    }

    #[test]
    fn a_row_lives_on_its_block_and_not_round_robin() {
        let layout = ShardLayout::new(&[10], 0, 4);
        let owner = |row: usize| (0..4).find(|&rank| layout.rows(rank).contains(&row));
        for row in 0..10 {
            assert_eq!(owner(row), Some(row / 3));
        }
    }
}
