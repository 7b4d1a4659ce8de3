//! What every communicator promises, as checks that each rank runs on its own communicator.
//!
//! A check knows what every rank brings, so each rank compares with a sequential reference of its own, bit for bit. An
//! engine of processes runs [`CHECKS`] in each process; an engine of threads calls [`check_all`].

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use bytes::Bytes;
use half::{bf16, f16};

use super::run_ranks_on;
use crate::{
    AbortCause, CommError, Communicator, Dtype, GatherPart, OpKind, OpTag, Phase, Reduce, ReducePart, ShardLayout,
};

/// The world sizes under which [`check_all`] runs: alone, even, odd, and with ranks that own nothing.
pub const WORLD_SIZES: [usize; 4] = [1, 2, 3, 5];

/// The time of one check. Shorter than the timeout of most, so that a check that needs a timeout to end does not pass.
const LIMIT: Duration = Duration::from_secs(25);

/// One promise. A new world for each check, since some end it.
#[derive(Clone, Copy, Debug)]
pub struct Check {
    /// The promise, as a name.
    pub name: &'static str,
    /// The timeout that the world needs: short where the check waits for it to pass.
    pub timeout: Duration,
    /// Run on every rank; panics where the promise is broken.
    pub run: fn(&Arc<dyn Communicator>) -> Result<(), CommError>,
}

/// Every promise of the [`Communicator`] trait.
pub const CHECKS: &[Check] = &[
    check("gathers_every_cut_of_every_shape", gathers_every_cut_of_every_shape),
    check("what_is_placed_is_gathered_by_every_rank", what_is_placed_is_gathered_by_every_rank),
    check("a_rank_may_place_ahead_of_the_others", a_rank_may_place_ahead_of_the_others),
    check("adds_in_the_order_of_ranks", adds_in_the_order_of_ranks),
    check("broadcasts_and_scatters_from_every_root", broadcasts_and_scatters_from_every_root),
    check("a_channel_does_not_wait_for_another", a_channel_does_not_wait_for_another),
    check("groups_are_renumbered_and_do_not_meet", groups_are_renumbered_and_do_not_meet),
    check("many_operations_in_a_row_agree_with_the_reference", many_operations_in_a_row_agree_with_the_reference),
    check("a_wrong_argument_is_an_error_and_nothing_is_sent", a_wrong_argument_is_an_error_and_nothing_is_sent),
    check("another_tag_is_a_mismatch_on_every_rank", another_tag_is_a_mismatch_on_every_rank),
    check("another_kind_is_a_mismatch_on_every_rank", another_kind_is_a_mismatch_on_every_rank),
    check("another_shape_is_a_mismatch_on_every_rank", another_shape_is_a_mismatch_on_every_rank),
    check("an_abort_ends_every_wait_with_the_first_cause", an_abort_ends_every_wait_with_the_first_cause),
    Check {
        name: "a_timeout_names_the_rank_that_is_missing",
        timeout: Duration::from_millis(300),
        run: a_timeout_names_the_rank_that_is_missing,
    },
];

const fn check(name: &'static str, run: fn(&Arc<dyn Communicator>) -> Result<(), CommError>) -> Check {
    Check { name, timeout: Duration::from_secs(30), run }
}

/// Runs all checks under all world sizes, on threads.
///
/// `connect` makes a new world of a given size and timeout.
///
/// # Panics
/// If a promise is broken, naming it, the world size and the rank.
///
/// ```
/// use fsdp_core::LocalWorld;
///
/// fsdp_core::testing::conformance::check_all(LocalWorld::connect);
/// ```
pub fn check_all(connect: impl Fn(usize, Duration) -> Vec<Arc<dyn Communicator>>) {
    for check in CHECKS {
        for world_size in WORLD_SIZES {
            let ranks = connect(world_size, check.timeout);
            let results = run_ranks_on(ranks, LIMIT, |comm| (check.run)(&comm));
            for (rank, result) in results.into_iter().enumerate() {
                if let Err(failure) = result {
                    panic!("{}: rank {rank} of {world_size} {failure}", check.name);
                }
            }
        }
    }
}

fn gathers_every_cut_of_every_shape(comm: &Arc<dyn Communicator>) -> Result<(), CommError> {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let layouts = layouts(world_size);
    let together: Vec<_> = layouts.iter().map(|layout| (layout.clone(), 4)).collect();
    let alone = layouts.iter().flat_map(|layout| [1, 2, 4, 8].map(|elem_bytes| vec![(layout.clone(), elem_bytes)]));
    for (step, parts) in std::iter::once(together).chain(alone).chain([Vec::new()]).enumerate() {
        let wholes: Vec<_> = parts.iter().map(|(layout, elem_bytes)| whole(layout, *elem_bytes, step)).collect();
        let brought: Vec<_> = parts
            .iter()
            .zip(&wholes)
            .map(|((layout, elem_bytes), whole)| GatherPart {
                shard: block_of(whole, layout, *elem_bytes, rank),
                layout: layout.clone(),
                elem_bytes: *elem_bytes,
            })
            .collect();
        let gathered = comm.all_gather(&tag(step, "gather"), &brought)?;
        assert_eq!(gathered, wholes, "{parts:?}");
    }
    Ok(())
}

fn what_is_placed_is_gathered_by_every_rank(comm: &Arc<dyn Communicator>) -> Result<(), CommError> {
    let gathers = comm.channel("gather")?;
    // Rows as they come, of which each rank has one range; and columns, which cannot be placed.
    let (rows, columns): (Vec<_>, Vec<_>) =
        layouts(comm.world_size()).into_iter().partition(|layout| layout.dim() == 0);
    let part = |layout: &ShardLayout, step| {
        let shard = block_of(&whole(layout, 4, step), layout, 4, comm.rank());
        GatherPart { shard, layout: layout.clone(), elem_bytes: 4 }
    };
    let mut before: Option<(Vec<Bytes>, Vec<Bytes>)> = None;
    for step in 0..4 {
        let parts: Vec<_> = rows.iter().map(|layout| part(layout, step)).collect();
        let wholes: Vec<_> = rows.iter().map(|layout| whole(layout, 4, step)).collect();
        let Some(placed) = comm.place(&tag(step, "place"), &parts)? else { break };
        assert!(parts.iter().zip(&placed).all(|(part, placed)| part.shard == *placed.shard()));
        // As often as it is wanted, in one operation and one by one.
        assert_eq!(gathers.gather_placed(&tag(step, "all"), &placed)?, wholes);
        for (placed, whole) in placed.iter().zip(&wholes) {
            let (placed, whole) = (std::slice::from_ref(placed), std::slice::from_ref(whole));
            assert_eq!(gathers.gather_placed(&tag(step, "one"), placed)?, whole);
        }
        // What was read before stays as it was.
        assert!(before.as_ref().is_none_or(|(gathered, wholes)| gathered == wholes));
        before = Some((gathers.gather_placed(&tag(step, "again"), &placed)?, wholes));
    }
    if comm.world_size() > 1 {
        let parts: Vec<_> = columns.iter().map(|layout| part(layout, 9)).collect();
        assert!(comm.place(&tag(9, "columns"), &parts)?.is_none(), "the same on every rank");
    }
    comm.barrier(&tag(9, "all"))
}

fn a_rank_may_place_ahead_of_the_others(comm: &Arc<dyn Communicator>) -> Result<(), CommError> {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    for step in 0..100 {
        // By turns, each rank is late.
        if step % (4 * world_size) == 4 * rank {
            thread::sleep(Duration::from_millis(2));
        }
        let layout = ShardLayout::new(&[3 * world_size + step % 2, 50], 0, world_size);
        let whole = whole(&layout, 4, step);
        let shard = block_of(&whole, &layout, 4, rank);
        let placed = comm.place(&tag(step, "place"), &[GatherPart { shard, layout, elem_bytes: 4 }])?;
        if let (Some(placed), 0) = (placed, step % 5) {
            assert_eq!(comm.gather_placed(&tag(step, "gather"), &placed)?, [whole]);
        }
    }
    Ok(())
}

fn adds_in_the_order_of_ranks(comm: &Arc<dyn Communicator>) -> Result<(), CommError> {
    let layouts = layouts(comm.world_size());
    let mut step = 0;
    let scaled = Reduce { scale: 0.3 };
    for (reduce, dtype) in
        [(Reduce::SUM, Dtype::F32), (Reduce::mean(comm.world_size()), Dtype::F32), (scaled, Dtype::F64)]
    {
        for layouts in layouts.chunks(1).chain([&layouts[..], &[]]) {
            step += 1;
            check_reductions(&**comm, step, layouts, dtype, reduce)?;
        }
    }
    Ok(())
}

fn broadcasts_and_scatters_from_every_root(comm: &Arc<dyn Communicator>) -> Result<(), CommError> {
    for root in 0..comm.world_size() {
        check_broadcast(&**comm, root, root, 0)?;
        check_broadcast(&**comm, root, root, 1000)?;
        for layout in layouts(comm.world_size()) {
            for elem_bytes in [1, 4] {
                check_scatter(&**comm, root, root, &layout, elem_bytes)?;
            }
        }
    }
    Ok(())
}

fn a_channel_does_not_wait_for_another(comm: &Arc<dyn Communicator>) -> Result<(), CommError> {
    // Ranks ask for the channels in different orders.
    let names = if comm.rank().is_multiple_of(2) { ["gather", "reduce"] } else { ["reduce", "gather"] };
    let channels = [comm.channel(names[0])?, comm.channel(names[1])?];
    let [gathers, reduces] = if comm.rank().is_multiple_of(2) { [0, 1] } else { [1, 0] }.map(|i| &channels[i]);
    let reduce_all = || {
        layouts(reduces.world_size()).iter().enumerate().try_for_each(|(step, layout)| {
            check_reductions(&**reduces, step, std::slice::from_ref(layout), Dtype::F32, Reduce::SUM)
        })
    };
    thread::scope(|scope| {
        if comm.rank() == 0 {
            // The others already wait in the gather when this rank joins the reductions.
            reduce_all()?;
            return check_broadcast(&**gathers, 0, 0, 10);
        }
        let gather = scope.spawn(|| check_broadcast(&**gathers, 0, 0, 10));
        reduce_all()?;
        gather.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })?;
    // A second channel of the same name is another one, and the first goes on.
    let again = comm.channel("gather")?;
    check_broadcast(&*again, 1, 0, 5)?;
    check_broadcast(&**gathers, 2, 0, 5)
}

fn groups_are_renumbered_and_do_not_meet(comm: &Arc<dyn Communicator>) -> Result<(), CommError> {
    // Even and odd ranks, each in descending order. The groups run different numbers of operations.
    let parity = comm.rank() % 2;
    let ranks: Vec<usize> = (0..comm.world_size()).rev().filter(|rank| rank % 2 == parity).collect();
    let group = comm.subgroup(&ranks)?;
    assert_eq!(group.world_size(), ranks.len());
    assert_eq!(ranks[group.rank()], comm.rank());
    for step in 0..2 + 3 * parity {
        check_broadcast(&*group, step, step % ranks.len(), 3)?;
        for layout in layouts(ranks.len()) {
            check_reductions(&*group, step, &[layout], Dtype::F32, Reduce::mean(ranks.len()))?;
        }
    }
    let channel = group.channel("inner")?;
    check_broadcast(&*channel, 9, ranks.len() - 1, 8)?;
    let alone = group.subgroup(&[group.rank()])?;
    assert_eq!((alone.rank(), alone.world_size()), (0, 1));
    alone.barrier(&tag(10, "alone"))?;
    comm.barrier(&tag(11, "all"))
}

fn many_operations_in_a_row_agree_with_the_reference(comm: &Arc<dyn Communicator>) -> Result<(), CommError> {
    let world_size = comm.world_size();
    let mut random = Random(7);
    for step in 0..200 {
        let shape: Vec<usize> = (0..random.below(4)).map(|_| random.below(7)).collect();
        let layout = ShardLayout::new(&shape, random.below(shape.len().max(1)), world_size);
        let root = random.below(world_size);
        let dtype = Dtype::ALL[random.below(Dtype::ALL.len())];
        match random.below(5) {
            0 => check_broadcast(&**comm, step, root, random.below(50))?,
            1 => check_scatter(&**comm, step, root, &layout, 1 + random.below(8))?,
            2 => comm.barrier(&tag(step, "random"))?,
            3 => {
                let whole = whole(&layout, 4, step);
                let shard = block_of(&whole, &layout, 4, comm.rank());
                let gathered = comm.all_gather(&tag(step, "random"), &[GatherPart { shard, layout, elem_bytes: 4 }])?;
                assert_eq!(gathered, [whole]);
            }
            _ => check_reductions(&**comm, step, &[layout.clone(), layout], dtype, Reduce::mean(world_size))?,
        }
    }
    Ok(())
}

fn a_wrong_argument_is_an_error_and_nothing_is_sent(comm: &Arc<dyn Communicator>) -> Result<(), CommError> {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let tag = tag(0, "wrong");
    let wide = ShardLayout::new(&[4], 0, world_size + 1);
    let part = GatherPart { shard: vec![0; wide.shard_len(rank)].into(), layout: wide.clone(), elem_bytes: 1 };
    let expected = CommError::Layout { rank, tag: tag.clone(), part: 0, num_shards: world_size + 1, world_size };
    assert_eq!(comm.all_gather(&tag, &[part]), Err(expected));
    let data = (rank == 0).then(|| vec![0; 4].into());
    assert!(matches!(comm.scatter(&tag, 0, data, &wide, 1), Err(CommError::Layout { .. })));

    let layout = ShardLayout::new(&[4], 0, world_size);
    let part = ReducePart { full: vec![0; 4].into(), layout: layout.clone(), dtype: Dtype::F32 };
    let expected = CommError::BufferSize { rank, tag: tag.clone(), part: 0, expected_bytes: 16, got_bytes: 4 };
    assert_eq!(comm.reduce_scatter(&tag, std::slice::from_ref(&part), Reduce::SUM), Err(expected.clone()));
    assert_eq!(comm.all_reduce(&tag, &[part], Reduce::SUM), Err(expected));
    let part = GatherPart { shard: vec![0; 9].into(), layout, elem_bytes: 1 };
    assert!(matches!(comm.all_gather(&tag, &[part]), Err(CommError::BufferSize { got_bytes: 9, .. })));

    let is_root = |result: Result<Bytes, CommError>| matches!(result, Err(CommError::Root { .. }));
    assert!(is_root(comm.broadcast(&tag, world_size, None)), "no such root");
    assert!(is_root(comm.broadcast(&tag, rank, None)), "a root without data");
    if world_size > 1 {
        assert!(is_root(comm.broadcast(&tag, (rank + 1) % world_size, Some(Bytes::new()))), "data of another rank");
    }

    let is_group = |ranks: &[usize]| matches!(comm.subgroup(ranks), Err(CommError::Group { .. }));
    assert!(is_group(&[]) && is_group(&[rank, rank]) && is_group(&[rank, world_size]));
    if world_size > 1 {
        assert!(is_group(&[(rank + 1) % world_size]), "the caller is not a member");
    }

    // The world is as it was.
    assert_eq!(comm.aborted(), None);
    check_broadcast(&**comm, 1, 0, 4)
}

fn another_tag_is_a_mismatch_on_every_rank(comm: &Arc<dyn Communicator>) -> Result<(), CommError> {
    let culprit = comm.world_size() - 1;
    let unit = if comm.rank() == culprit { "b" } else { "a" };
    let tags = ["unit `a`", "unit `b`"];
    check_mismatch(comm, "tag", OpKind::Barrier, OpKind::Barrier, tags, comm.barrier(&tag(4, unit)))
}

fn another_kind_is_a_mismatch_on_every_rank(comm: &Arc<dyn Communicator>) -> Result<(), CommError> {
    let tag = tag(4, "a");
    let result = if comm.rank() == comm.world_size() - 1 {
        comm.barrier(&tag)
    } else {
        comm.all_reduce(&tag, &[], Reduce::SUM).map(drop)
    };
    check_mismatch(comm, "kind", OpKind::AllReduce, OpKind::Barrier, ["unit `a`"; 2], result)
}

fn another_shape_is_a_mismatch_on_every_rank(comm: &Arc<dyn Communicator>) -> Result<(), CommError> {
    let rows = if comm.rank() == comm.world_size() - 1 { 4 } else { 5 };
    let layout = ShardLayout::new(&[rows], 0, comm.world_size());
    let part = ReducePart { full: vec![0; 4 * rows].into(), layout, dtype: Dtype::F32 };
    let result = comm.reduce_scatter(&tag(4, "a"), &[part], Reduce::SUM).map(drop);
    let details = ["part 0 of shape [5], cut along dimension 0", "part 0 of shape [4], cut along dimension 0"];
    check_mismatch(comm, "layout of a part", OpKind::ReduceScatter, OpKind::ReduceScatter, details, result)
}

/// The last rank issued another operation than the others: checks what this rank was told.
fn check_mismatch(
    comm: &Arc<dyn Communicator>,
    expected_what: &str,
    kind: OpKind,
    culprit_kind: OpKind,
    texts: [&str; 2],
    result: Result<(), CommError>,
) -> Result<(), CommError> {
    if comm.world_size() == 1 {
        return result;
    }
    let Err(CommError::Mismatch { what, first, second }) = result.clone() else {
        panic!("expected a mismatch, got {result:?}");
    };
    assert_eq!(what, expected_what);
    let culprit = comm.world_size() - 1;
    let (other, last) = if second.rank == culprit { (first, second) } else { (second, first) };
    assert_eq!((last.rank, last.kind, other.kind), (culprit, culprit_kind, kind));
    assert!(other.rank < culprit);
    assert!(other.to_string().contains(texts[0]) && last.to_string().contains(texts[1]), "{other} / {last}");
    assert!(comm.barrier(&tag(5, "after")).is_err(), "the world has ended");
    assert!(matches!(comm.aborted(), Some(AbortCause::Collective(_))));
    Ok(())
}

fn an_abort_ends_every_wait_with_the_first_cause(comm: &Arc<dyn Communicator>) -> Result<(), CommError> {
    let channel = comm.channel("other")?;
    let group = comm.subgroup(&(0..comm.world_size()).rev().collect::<Vec<_>>())?;
    comm.barrier(&tag(0, "start"))?;
    let cause = AbortCause::RankFailed { rank: 0, message: "the disk is full".into() };
    let expected = CommError::Aborted { rank: comm.rank(), cause: cause.clone() };
    if comm.rank() == 0 {
        // So that the others are asleep already, most of the time.
        thread::sleep(Duration::from_millis(20));
        comm.abort(cause.clone());
        comm.abort(AbortCause::RankPanicked { rank: 0, message: "too late".into() });
    } else {
        let waiting = [comm, &channel, &group][comm.rank() % 3];
        let Err(CommError::Aborted { cause: got, .. }) = waiting.barrier(&tag(1, "wait")) else {
            panic!("a barrier without rank 0 cannot succeed");
        };
        assert_eq!(got, cause);
    }
    assert_eq!(comm.aborted(), Some(cause));
    let part = GatherPart { shard: Bytes::new(), layout: ShardLayout::new(&[0], 0, comm.world_size()), elem_bytes: 4 };
    assert_eq!(comm.all_gather(&tag(2, "after"), &[part]), Err(expected.clone()));
    assert_eq!(channel.broadcast(&tag(2, "after"), comm.rank(), Some(Bytes::new())), Err(expected.clone()));
    assert_eq!(group.barrier(&tag(2, "after")), Err(expected.clone()));
    assert_eq!(comm.channel("late").err(), Some(expected));
    Ok(())
}

fn a_timeout_names_the_rank_that_is_missing(comm: &Arc<dyn Communicator>) -> Result<(), CommError> {
    let last = comm.world_size() - 1;
    if last == 0 {
        return comm.barrier(&tag(6, "late"));
    }
    if comm.rank() == last {
        while comm.aborted().is_none() {
            thread::sleep(Duration::from_millis(2));
        }
    }
    // In a group of other numbers, so that the number in the world must be told.
    let group = comm.subgroup(&(0..comm.world_size()).rev().collect::<Vec<_>>());
    let result = group.and_then(|group| group.barrier(&tag(6, "late")));
    let (waiter, error) = match result {
        Err(error @ CommError::Timeout { .. }) => (Some(comm.rank()), error),
        Err(CommError::Aborted { rank, cause: AbortCause::Collective(error) }) => {
            assert_eq!(rank, comm.rank());
            (None, *error)
        }
        other => panic!("expected a timeout, got {other:?}"),
    };
    let CommError::Timeout { rank, kind, tag: at, missing, .. } = error else {
        panic!("expected a timeout as the cause, got {error:?}");
    };
    assert!(rank != last && waiter.is_none_or(|waiter| waiter == rank));
    assert!(missing.contains(&last) && !missing.contains(&rank), "{missing:?}");
    assert_eq!((kind, at), (OpKind::Barrier, tag(6, "late")));
    Ok(())
}

/// Reduces in both ways, and compares with a loop over the ranks.
fn check_reductions(
    comm: &dyn Communicator,
    step: usize,
    layouts: &[ShardLayout],
    dtype: Dtype,
    reduce: Reduce,
) -> Result<(), CommError> {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let parts: Vec<_> = layouts
        .iter()
        .map(|layout| ReducePart { full: values(layout.full_len(), dtype, step, rank), layout: layout.clone(), dtype })
        .collect();
    let sums: Vec<_> =
        layouts.iter().map(|layout| reference_sum(layout.full_len(), dtype, step, world_size, reduce)).collect();
    let blocks: Vec<_> =
        layouts.iter().zip(&sums).map(|(layout, sum)| block_of(sum, layout, dtype.size_bytes(), rank)).collect();
    assert_eq!(comm.reduce_scatter(&tag(step, "reduce"), &parts, reduce)?, blocks, "{layouts:?}");
    let mut seen = vec![Vec::new(); parts.len()];
    let mut see = |part: usize, bytes: &[u8]| seen[part].extend_from_slice(bytes);
    assert_eq!(comm.reduce_scatter_and_see(&tag(step, "reduce"), &parts, reduce, &mut see)?, blocks, "{layouts:?}");
    assert_eq!(seen, blocks, "what is seen of {layouts:?}");
    assert_eq!(comm.all_reduce(&tag(step, "reduce"), &parts, reduce)?, sums, "{layouts:?}");
    Ok(())
}

fn check_broadcast(comm: &dyn Communicator, step: usize, root: usize, len: usize) -> Result<(), CommError> {
    let expected = whole(&ShardLayout::new(&[len], 0, 1), 1, step + root);
    let data = (comm.rank() == root).then(|| expected.clone());
    assert_eq!(comm.broadcast(&tag(step, "broadcast"), root, data)?, expected);
    Ok(())
}

fn check_scatter(
    comm: &dyn Communicator,
    step: usize,
    root: usize,
    layout: &ShardLayout,
    elem_bytes: usize,
) -> Result<(), CommError> {
    let whole = whole(layout, elem_bytes, step);
    let full = (comm.rank() == root).then(|| whole.clone());
    let block = comm.scatter(&tag(step, "scatter"), root, full, layout, elem_bytes)?;
    assert_eq!(block, block_of(&whole, layout, elem_bytes, comm.rank()), "{layout:?}");
    Ok(())
}

/// Every cut of shapes that divide, do not divide, are smaller than the world, are empty, and have no dimension.
fn layouts(world_size: usize) -> Vec<ShardLayout> {
    let shapes: [&[usize]; 8] = [&[5, 3], &[2], &[7, 2, 3], &[0, 4], &[3, 0], &[], &[1, 9], &[2, 2100]];
    let cuts = |shape: &'static [usize]| (0..shape.len().max(1)).map(move |dim| (shape, dim));
    shapes.into_iter().flat_map(cuts).map(|(shape, dim)| ShardLayout::new(shape, dim, world_size)).collect()
}

fn tag(step: usize, unit: &str) -> OpTag {
    OpTag::new(step as u64, Phase::Control, unit)
}

/// A tensor of bytes that every rank can make for itself.
fn whole(layout: &ShardLayout, elem_bytes: usize, seed: usize) -> Bytes {
    let mut random = Random(seed as u64);
    (0..layout.full_len() * elem_bytes).map(|_| random.next() as u8).collect()
}

/// The elements of `rank`, one by one from the meaning of a layout rather than by its runs.
fn block_of(whole: &[u8], layout: &ShardLayout, elem_bytes: usize, rank: usize) -> Bytes {
    let inner: usize = layout.shape().iter().skip(layout.dim() + 1).product();
    let rows = layout.shape().get(layout.dim()).copied().unwrap_or(1);
    let owned = |element: &usize| layout.rows(rank).contains(&(element / inner % rows));
    let elements = (0..layout.full_len()).filter(owned);
    elements.flat_map(|element| whole[element * elem_bytes..(element + 1) * elem_bytes].iter().copied()).collect()
}

/// What `rank` brings to a sum: numbers of very different size, so that another order of adding gives other bits.
fn values(len: usize, dtype: Dtype, step: usize, rank: usize) -> Bytes {
    numbers(len, step, rank).flat_map(|number| encode(number, dtype)).collect()
}

fn reference_sum(len: usize, dtype: Dtype, step: usize, world_size: usize, reduce: Reduce) -> Bytes {
    let mut ranks: Vec<_> = (0..world_size).map(|rank| numbers(len, step, rank)).collect();
    let mut sum = || {
        let column = ranks.iter_mut().filter_map(Iterator::next);
        match dtype {
            Dtype::F32 => {
                let sum = column.map(|number| number as f32).reduce(|sum, number| sum + number);
                f64::from(sum.unwrap_or(0.0) * reduce.scale as f32)
            }
            Dtype::F64 => column.reduce(|sum, number| sum + number).unwrap_or(0.0) * reduce.scale,
            // Added in float32.
            Dtype::Bf16 | Dtype::F16 => {
                let rounded = column.map(|number| match dtype {
                    Dtype::Bf16 => bf16::from_f32(number as f32).to_f32(),
                    _ => f16::from_f32(number as f32).to_f32(),
                });
                let sum = rounded.reduce(|sum, number| sum + number);
                f64::from(sum.unwrap_or(0.0) * reduce.scale as f32)
            }
        }
    };
    (0..len).flat_map(|_| encode(sum(), dtype)).collect()
}

fn numbers(len: usize, step: usize, rank: usize) -> impl Iterator<Item = f64> {
    let mut random = Random((step * 1000 + rank) as u64);
    (0..len).map(move |_| {
        let mantissa = random.next() as i32;
        f64::from(mantissa) * 2.0_f64.powi(random.below(12) as i32 - 30)
    })
}

fn encode(number: f64, dtype: Dtype) -> Vec<u8> {
    match dtype {
        Dtype::F32 => (number as f32).to_ne_bytes().to_vec(),
        Dtype::Bf16 => bf16::from_f32(number as f32).to_ne_bytes().to_vec(),
        Dtype::F16 => f16::from_f32(number as f32).to_ne_bytes().to_vec(),
        Dtype::F64 => number.to_ne_bytes().to_vec(),
    }
}

/// SplitMix64: the same numbers on every rank and machine.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}
