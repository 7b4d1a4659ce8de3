//! Ranks that die, err or hang: the others end soon, and are told who it was.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use fsdp_core::testing::{RankFailure, run_ranks, run_ranks_on};
use fsdp_core::{
    AbortCause, CommError, Communicator, Dtype, Fault, FaultPlan, Faulty, GatherPart, Link, LocalWorld, OpTag, Phase,
    Recorder, Reduce, ReducePart, ShardLayout,
};

const LONG: Duration = Duration::from_secs(30);

fn tag(step: u64) -> OpTag {
    OpTag::new(step, Phase::Forward, "blocks.0")
}

/// A small training loop: gather, reduce, on two channels.
fn train(comm: &dyn Communicator) -> Result<(), CommError> {
    let layout = ShardLayout::new(&[5], 0, comm.world_size());
    let (gathers, reduces) = (comm.channel("gather")?, comm.channel("reduce")?);
    for step in 0..4 {
        let shard = vec![0; 4 * layout.shard_len(comm.rank())].into();
        let gathered =
            gathers.all_gather(&tag(step), &[GatherPart { shard, layout: layout.clone(), elem_bytes: 4 }])?;
        let part = ReducePart { full: gathered[0].clone(), layout: layout.clone(), dtype: Dtype::F32 };
        reduces.reduce_scatter(&tag(step), &[part], Reduce::mean(comm.world_size()))?;
    }
    Ok(())
}

/// Trains 3 ranks; rank 1 fails at its operation `at`. Operation 5 is the reduction of step 2.
fn train_with(at: u64, fault: Fault, timeout: Duration) -> Vec<Result<(), RankFailure<CommError>>> {
    let faulty = |comm: Arc<dyn Communicator>| -> Arc<dyn Communicator> {
        let fault = (comm.rank() == 1).then_some((at, fault));
        Arc::new(Faulty::new(comm, FaultPlan { fault, ..FaultPlan::default() }))
    };
    run_ranks_on(LocalWorld::connect(3, timeout).into_iter().map(faulty).collect(), LONG, |comm| train(&*comm))
}

#[test]
fn a_panic_reaches_every_rank_with_its_message() {
    let start = Instant::now();
    let results = train_with(5, Fault::Panic, 4 * LONG);
    let message = "injected panic at operation 5 (step 2, forward, unit `blocks.0`)".to_owned();
    assert_eq!(results[1], Err(RankFailure::Panicked(message.clone())));
    for rank in [0, 2] {
        let cause = AbortCause::RankPanicked { rank: 1, message: message.clone() };
        assert_eq!(results[rank], Err(RankFailure::Failed(CommError::Aborted { rank, cause })));
    }
    assert!(start.elapsed() < LONG, "nobody waits for a timeout");
}

#[test]
fn an_error_reaches_every_rank_with_its_message() {
    let results = train_with(5, Fault::Error, 4 * LONG);
    let Err(RankFailure::Failed(error @ CommError::Engine { rank: 1, .. })) = &results[1] else {
        panic!("{results:?}");
    };
    assert_eq!(
        error.to_string(),
        "rank 1, step 2, forward, unit `blocks.0`: the engine failed: injected error at operation 5"
    );
    for rank in [0, 2] {
        let cause = AbortCause::RankFailed { rank: 1, message: error.to_string() };
        assert_eq!(results[rank], Err(RankFailure::Failed(CommError::Aborted { rank, cause })));
    }
}

#[test]
fn a_rank_that_leaves_through_wrappers_is_named_at_once() {
    let wrapped = LocalWorld::connect(2, LONG).into_iter().map(|comm| -> Arc<dyn Communicator> {
        let comm = Arc::new(Recorder::new(comm, Arc::default()));
        Arc::new(Faulty::new(comm, FaultPlan::default()))
    });
    let start = Instant::now();
    let results = run_ranks_on(wrapped.collect(), 2 * LONG, |comm| match comm.rank() {
        0 => comm.barrier(&tag(0)),
        _ => {
            comm.leave();
            Ok(())
        }
    });
    assert!(
        matches!(&results[0], Err(RankFailure::Failed(CommError::Left { left, .. })) if *left == [1]),
        "{results:?}"
    );
    assert!(start.elapsed() < LONG, "nobody waits for a timeout");
}

#[test]
fn a_lost_operation_is_a_timeout_that_names_its_rank() {
    let results = train_with(0, Fault::Hang, Duration::from_millis(300));
    let mut num_timeouts = 0;
    for result in results {
        let timeout = match result {
            Err(RankFailure::Failed(timeout @ CommError::Timeout { .. })) => {
                num_timeouts += 1;
                timeout
            }
            Err(RankFailure::Failed(CommError::Aborted { cause: AbortCause::Collective(timeout), .. })) => *timeout,
            other => panic!("{other:?}"),
        };
        let CommError::Timeout { tag: at, missing, .. } = timeout else { panic!("{timeout:?}") };
        assert!(missing.contains(&1), "{missing:?}");
        assert_eq!(at, tag(0));
    }
    assert_eq!(num_timeouts, 1, "one rank notices, the others are told");
}

#[test]
fn a_rank_that_hangs_does_not_hang_the_harness() {
    let results = run_ranks_on(LocalWorld::connect(2, LONG), Duration::from_secs(1), |comm| {
        if comm.rank() == 0 {
            thread::sleep(LONG);
        }
        Ok::<_, CommError>(comm.rank())
    });
    assert_eq!(results, [Err(RankFailure::Hung), Ok(1)]);
}

#[test]
fn a_link_takes_its_time_for_latency_and_bytes() {
    let link = Link { alpha_s: 0.02, beta_s_per_byte: 1e-6 };
    let results = run_ranks(2, LONG, move |comm| {
        let comm = Faulty::new(comm, FaultPlan { link: Some(link), ..FaultPlan::default() });
        let layout = ShardLayout::new(&[100_000], 0, 2);
        let start = Instant::now();
        let shard = vec![0; 50_000].into();
        comm.all_gather(&tag(0), &[GatherPart { shard, layout, elem_bytes: 1 }])?;
        Ok::<_, CommError>(start.elapsed())
    });
    for elapsed in results {
        assert!(elapsed.unwrap() >= Duration::from_millis(70), "20 ms, and 50 kB at 1 MB/s");
    }
}

#[test]
fn ranks_of_one_process_gather_into_one_buffer() {
    let results = run_ranks(3, LONG, |comm| {
        let layout = ShardLayout::new(&[7, 3], 0, 3);
        let shard = vec![comm.rank() as u8; layout.shard_len(comm.rank())].into();
        comm.all_gather(&tag(0), &[GatherPart { shard, layout, elem_bytes: 1 }])
    });
    let views: Vec<_> = results.into_iter().map(|result| result.unwrap().remove(0)).collect();
    assert!(views.iter().all(|view| view.as_ptr() == views[0].as_ptr()));
    assert!((views[0].as_ptr() as usize).is_multiple_of(64));
}

#[test]
fn a_scattered_block_does_not_keep_the_whole_alive() {
    /// Tells when the buffer is freed.
    struct Whole {
        bytes: Vec<u8>,
        _alive: Arc<()>,
    }
    impl AsRef<[u8]> for Whole {
        fn as_ref(&self) -> &[u8] {
            &self.bytes
        }
    }
    let alive = Arc::new(());
    let watch = Arc::downgrade(&alive);
    let alive = std::sync::Mutex::new(Some(alive));
    let results = run_ranks(2, LONG, move |comm| {
        let whole = || {
            let alive = alive.lock().unwrap().take().unwrap();
            bytes::Bytes::from_owner(Whole { bytes: vec![1; 6], _alive: alive })
        };
        let full = (comm.rank() == 0).then(whole);
        let block = comm.scatter(&tag(0), 0, full, &ShardLayout::new(&[6], 0, 2), 1)?;
        // Both ranks have left the scatter once they meet here.
        comm.barrier(&tag(1))?;
        Ok::<_, CommError>(block)
    });
    assert!(results.iter().all(|block| block.as_ref().is_ok_and(|block| block[..] == [1, 1, 1])));
    assert!(watch.upgrade().is_none(), "freed although the blocks are alive");
}
