//! What a [`Recorder`] counts.

use std::sync::Arc;
use std::time::Duration;

use fsdp_core::testing::run_ranks;
use fsdp_core::{
    CommError, Communicator, Dtype, GatherPart, OpCount, OpKind, OpTag, Phase, Recorder, Reduce, ReducePart,
    ShardLayout, Traffic,
};

fn tag() -> OpTag {
    OpTag::new(1, Phase::Forward, "blocks.0")
}

/// Runs one operation of each kind on a tensor of 5 rows over 3 ranks: 2, 2 and 1 rows.
fn run_each_kind(comm: &dyn Communicator) -> Result<(), CommError> {
    let layout = ShardLayout::new(&[5], 0, 3);
    let shard = vec![0; 4 * layout.shard_len(comm.rank())].into();
    comm.all_gather(&tag(), &[GatherPart { shard, layout: layout.clone(), elem_bytes: 4 }])?;
    let parts = [ReducePart { full: vec![0; 20].into(), layout: layout.clone(), dtype: Dtype::F32 }];
    comm.reduce_scatter(&tag(), &parts, Reduce::SUM)?;
    comm.all_reduce(&tag(), &parts, Reduce::SUM)?;
    let data = || (comm.rank() == 1).then(|| vec![0; 20].into());
    comm.broadcast(&tag(), 1, data())?;
    comm.scatter(&tag(), 1, data(), &layout, 4)?;
    comm.barrier(&tag())
}

/// Kinds that are counted, in the order in which they run.
const KINDS: [OpKind; 6] =
    [OpKind::AllGather, OpKind::ReduceScatter, OpKind::AllReduce, OpKind::Broadcast, OpKind::Scatter, OpKind::Barrier];

#[test]
fn a_gather_in_place_counts_as_the_gather_that_it_stands_for() {
    let results = run_ranks(3, Duration::from_secs(30), |comm| {
        let traffic = Arc::new(Traffic::default());
        let comm = Recorder::new(comm, traffic.clone());
        let layout = ShardLayout::new(&[5], 0, 3);
        let shard = vec![0; 4 * layout.shard_len(comm.rank())].into();
        let placed = comm.place(&tag(), &[GatherPart { shard, layout, elem_bytes: 4 }])?;
        assert_eq!(traffic.total(), OpCount::default(), "placing sends nothing");
        comm.gather_placed(&tag(), &placed.expect("threads share memory"))?;
        assert_eq!(traffic.total(), traffic.of(OpKind::AllGather));
        Ok::<_, CommError>(traffic.of(OpKind::AllGather))
    });
    assert_eq!(results, [16, 16, 8].map(|sent_bytes| Ok(OpCount { num_ops: 1, sent_bytes })));
}

#[test]
fn bytes_are_what_the_rank_sends_without_padding() {
    let results = run_ranks(3, Duration::from_secs(30), |comm| {
        let traffic = Arc::new(Traffic::with_log());
        run_each_kind(&Recorder::new(comm, traffic.clone()))?;
        let sent = KINDS.map(|kind| {
            assert_eq!(traffic.of(kind).num_ops, 1);
            traffic.of(kind).sent_bytes
        });
        assert_eq!(traffic.total(), OpCount { num_ops: 6, sent_bytes: sent.iter().sum() });
        let log = traffic.take_log();
        assert_eq!(log.iter().map(|op| op.kind).collect::<Vec<_>>(), KINDS);
        assert!(log.iter().zip(sent).all(|(op, sent)| op.tag == tag() && op.sent_bytes == sent));
        assert_eq!(traffic.take_log(), []);
        traffic.reset();
        assert_eq!(traffic.total(), OpCount::default());
        Ok::<_, CommError>(sent)
    });
    // All-gather, reduce-scatter, all-reduce, broadcast, scatter, barrier.
    let expected = [[16, 12, 28, 0, 0, 0], [16, 12, 28, 40, 12, 0], [8, 16, 24, 0, 0, 0]];
    assert_eq!(results, expected.map(Ok));
}

#[test]
fn channels_and_groups_count_into_one_place() {
    let results = run_ranks(2, Duration::from_secs(30), |comm| {
        let traffic = Arc::new(Traffic::default());
        let comm = Recorder::new(comm, traffic.clone());
        comm.channel("gather")?.barrier(&tag())?;
        comm.subgroup(&[1, 0])?.channel("reduce")?.barrier(&tag())?;
        comm.barrier(&tag())?;
        Ok::<_, CommError>(traffic.of(OpKind::Barrier).num_ops)
    });
    assert_eq!(results, [Ok(3), Ok(3)]);
}

#[test]
fn an_operation_that_fails_is_not_counted() {
    let results = run_ranks(1, Duration::from_secs(30), |comm| {
        let traffic = Arc::new(Traffic::with_log());
        let comm = Recorder::new(comm, traffic.clone());
        assert!(comm.broadcast(&tag(), 0, None).is_err());
        Ok::<_, CommError>((traffic.total(), traffic.take_log().len()))
    });
    assert_eq!(results, [Ok((OpCount::default(), 0))]);
}
