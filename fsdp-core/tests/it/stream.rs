//! Communication in the background.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use fsdp_core::testing::run_ranks;
use fsdp_core::{AbortCause, CommError, CommStream, Communicator, GatherPart, LocalWorld, OpTag, Phase, ShardLayout};

const LONG: Duration = Duration::from_secs(30);

fn tag(step: u64) -> OpTag {
    OpTag::new(step, Phase::Forward, "blocks.0")
}

fn single_rank() -> std::sync::Arc<dyn Communicator> {
    LocalWorld::connect(1, LONG).remove(0)
}

#[test]
fn jobs_run_in_the_background_and_in_order() {
    let stream = CommStream::new(single_rank(), "test").unwrap();
    let (open, gate) = mpsc::channel::<()>();
    let (report, order) = mpsc::channel();
    let report_too = report.clone();
    let first = stream.submit(move |_| {
        gate.recv().unwrap();
        report.send(1).unwrap();
        Ok("first")
    });
    let second = stream.submit(move |_| {
        report_too.send(2).unwrap();
        Ok("second")
    });
    assert!(!first.is_ready() && !second.is_ready(), "the caller runs on while the first job waits");
    open.send(()).unwrap();
    let (result, timing) = second.wait_timed();
    assert_eq!(result, Ok("second"));
    assert!(timing.submitted <= timing.started && timing.started <= timing.finished);
    assert!(first.is_ready());
    let (result, timing) = first.wait_timed();
    assert_eq!((result, timing.blocked), (Ok("first"), Duration::ZERO));
    assert_eq!(order.iter().collect::<Vec<_>>(), [1, 2]);
}

#[test]
fn time_in_wait_is_reported_as_blocked() {
    let stream = CommStream::new(single_rank(), "test").unwrap();
    let was_blocked = || {
        let pending = stream.submit(|_| {
            thread::sleep(Duration::from_millis(20));
            Ok(())
        });
        let (result, timing) = pending.wait_timed();
        assert_eq!(result, Ok(()));
        assert!(timing.finished - timing.started >= Duration::from_millis(20));
        timing.blocked > Duration::ZERO
    };
    // On a busy machine the job may be done before this thread asks, but not every time.
    assert!((0..100).any(|_| was_blocked()));
}

#[test]
fn a_panic_in_a_job_is_an_error_and_the_stream_goes_on() {
    let stream = CommStream::new(single_rank(), "reduce").unwrap();
    let pending = stream.submit(|_| -> Result<(), CommError> { panic!("boom") });
    let error = CommError::JobPanicked { rank: 0, stream: "reduce".into(), message: "boom".into() };
    assert_eq!(pending.wait(), Err(error));
    assert_eq!(stream.submit(|comm| comm.barrier(&tag(0))).wait(), Ok(()));
}

#[test]
fn dropping_a_stream_finishes_its_queue() {
    let results = run_ranks(3, LONG, |comm| {
        let stream = CommStream::new(comm.channel("gather")?, "gather")?;
        let layout = ShardLayout::new(&[5], 0, 3);
        let gather = |step| {
            let shard = vec![0; layout.shard_len(comm.rank())].into();
            stream.all_gather(tag(step), vec![GatherPart { shard, layout: layout.clone(), elem_bytes: 1 }])
        };
        let pending: Vec<_> = (0..20).map(gather).collect();
        drop(stream);
        assert!(pending.iter().all(|pending| pending.is_ready()));
        pending.into_iter().try_for_each(|pending| pending.wait().map(drop))
    });
    assert_eq!(results, [Ok(()), Ok(()), Ok(())]);
}

#[test]
fn after_an_abort_the_queue_fails_at_once_and_the_stream_can_be_dropped() {
    let mut ranks = LocalWorld::connect(2, 4 * LONG);
    let stream = CommStream::new(ranks.remove(0), "gather").unwrap();
    // Rank 1 never joins.
    let pending: Vec<_> = (0..5).map(|step| stream.submit(move |comm| comm.barrier(&tag(step)))).collect();
    let cause = AbortCause::RankFailed { rank: 1, message: "gone".into() };
    ranks[0].abort(cause.clone());
    drop(stream);
    for pending in pending {
        assert_eq!(pending.wait(), Err(CommError::Aborted { rank: 0, cause: cause.clone() }));
    }
}

#[test]
fn a_panic_of_the_owner_does_not_wait_for_the_queue() {
    let mut ranks = LocalWorld::connect(2, 4 * LONG);
    let rank = ranks.remove(0);
    let unwound = catch_unwind(AssertUnwindSafe(|| {
        let stream = CommStream::new(rank.channel("gather").unwrap(), "gather").unwrap();
        // Rank 1 never joins, and only whoever catches the panic can abort.
        let _pending = stream.submit(|comm| comm.barrier(&tag(0)));
        panic!("boom");
    }));
    let cause = AbortCause::panicked(0, &*unwound.unwrap_err());
    rank.abort(cause);
    assert_eq!(rank.aborted(), Some(AbortCause::RankPanicked { rank: 0, message: "boom".into() }));
}
