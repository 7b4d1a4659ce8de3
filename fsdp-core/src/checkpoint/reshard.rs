//! From the pieces of one world to the blocks of another: which elements lie where. Pure arithmetic.

use std::ops::Range;

use crate::ShardLayout;

/// Some rows of one dimension of a tensor, all of the other dimensions: a stored piece, or the block of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Cut {
    pub(super) dim: usize,
    pub(super) rows: Range<usize>,
}

impl Cut {
    /// The block at `shard_index` of a layout.
    pub(super) fn block(layout: &ShardLayout, shard_index: usize) -> Self {
        Self { dim: layout.dim(), rows: layout.rows(shard_index) }
    }

    /// Which rows of dimension `dim`, of `size` rows, belong to it.
    fn along(&self, dim: usize, size: usize) -> Range<usize> {
        if dim == self.dim { self.rows.clone() } else { 0..size }
    }
}

/// Elements that lie side by side in both: where they start in the source's and the target's own row-major order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) source: usize,
    pub(super) target: usize,
    pub(super) len: usize,
}

/// All elements of a tensor of `shape` that both cuts have, as the longest possible runs, in the order of both.
///
/// A cut that does not fit the shape is the caller's mistake; sizes that overflow are refused where a manifest is read.
pub(super) fn runs(shape: &[usize], source: &Cut, target: &Cut) -> impl Iterator<Item = Run> + use<> {
    // A tensor without dimensions is one row.
    let shape = if shape.is_empty() { &[1] } else { shape };
    let along = |cut: &Cut| -> Vec<Range<usize>> { shape.iter().enumerate().map(|(d, &n)| cut.along(d, n)).collect() };
    let (source, target) = (along(source), along(target));
    let both: Vec<Range<usize>> =
        source.iter().zip(&target).map(|(s, t)| s.start.max(t.start)..s.end.min(t.end)).collect();

    // Behind `inner` all dimensions are whole in both, so rows of `inner` lie side by side.
    let is_whole = |dim: &usize| both[*dim] == source[*dim] && both[*dim] == target[*dim];
    let inner = (1..shape.len()).rev().find(|dim| !is_whole(dim)).unwrap_or(0);
    let len = both[inner..].iter().map(Range::len).product();
    let num_runs = if len == 0 { 0 } else { both[..inner].iter().map(Range::len).product() };

    let start = move |of: &[Range<usize>], index: &[usize]| {
        (0..of.len()).fold(0, |offset, dim| offset * of[dim].len() + index[dim] - of[dim].start)
    };
    (0..num_runs).map(move |number| {
        let mut index: Vec<usize> = both.iter().map(|rows| rows.start).collect();
        let mut rest = number;
        for dim in (0..inner).rev() {
            index[dim] += rest % both[dim].len();
            rest /= both[dim].len();
        }
        Run { source: start(&source, &index), target: start(&target, &index), len }
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The elements of a cut, by their number in the whole tensor.
    fn elements(layout: &ShardLayout, shard_index: usize) -> Vec<usize> {
        layout.runs(shard_index).flatten().collect()
    }

    #[test]
    fn equal_cuts_are_one_run_and_whole_rows_stay_together() {
        let layout = ShardLayout::new(&[6, 4, 2], 1, 2);
        let cut = Cut::block(&layout, 1);
        assert_eq!(runs(layout.shape(), &cut, &cut).collect::<Vec<_>>(), [Run { source: 0, target: 0, len: 24 }]);
        let whole = Cut { dim: 0, rows: 0..6 };
        let found: Vec<_> = runs(layout.shape(), &whole, &cut).collect();
        assert_eq!(found.len(), 6);
        assert_eq!(found[1], Run { source: 12, target: 4, len: 4 });
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn any_cut_is_put_together_from_any_other_bit_by_bit(
            shape in proptest::collection::vec(0..7usize, 0..4),
            (from_dim, to_dim) in (0..4usize, 0..4usize),
            (from, to) in (1..9usize, 1..9usize),
        ) {
            let num_dims = shape.len().max(1);
            let source = ShardLayout::new(&shape, from_dim % num_dims, from);
            let target = ShardLayout::new(&shape, to_dim % num_dims, to);
            for block in 0..to {
                let mut found = vec![usize::MAX; target.shard_len(block)];
                for piece in 0..from {
                    let stored = elements(&source, piece);
                    let mut last = None;
                    for run in runs(&shape, &Cut::block(&source, piece), &Cut::block(&target, block)) {
                        prop_assert!(run.len > 0);
                        prop_assert!(last.is_none_or(|last| run.source > last), "in the order of the source");
                        last = Some(run.source + run.len - 1);
                        let slot = &mut found[run.target..run.target + run.len];
                        prop_assert!(slot.iter().all(|&element| element == usize::MAX), "nothing comes twice");
                        slot.copy_from_slice(&stored[run.source..run.source + run.len]);
                    }
                }
                prop_assert_eq!(found, elements(&target, block));
            }
        }
    }
}
