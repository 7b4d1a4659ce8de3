//! Ranks that are threads here, and talk as processes do: control channels and communicators over loopback.

#![allow(clippy::unwrap_used, reason = "all of this is a test, its helpers too")]

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use fsdp_core::{
    AbortCause, CommError, Communicator, Control, ControlChannel, Entrance, GatherPart, Member, OpTag, Phase,
    RendezvousError, Secret, ShardLayout, SocketWorld,
};

/// Far more than any of these needs.
pub(crate) const LONG: Duration = Duration::from_secs(60);

pub(crate) fn secret() -> Secret {
    Secret::new("the secret of these tests").unwrap()
}

pub(crate) fn member(rank: usize, world_size: usize, timeout: Duration) -> Member {
    Member { rank, world_size, secret: secret(), timeout, start_limit: timeout }
}

/// The control channels of a world, each made on a thread of its own.
pub(crate) fn controls(world_size: usize, timeout: Duration) -> Vec<Arc<ControlChannel>> {
    let entrance = Entrance::open("127.0.0.1", 0).unwrap();
    let address = entrance.address().to_string();
    let joining: Vec<_> = (1..world_size)
        .map(|rank| {
            let (address, member) = (address.clone(), member(rank, world_size, timeout));
            thread::spawn(move || ControlChannel::join(&address, &member))
        })
        .collect();
    let host = ControlChannel::host(entrance, &member(0, world_size, timeout)).unwrap();
    let others = joining.into_iter().map(|joining| joining.join().unwrap().unwrap());
    std::iter::once(host).chain(others).collect()
}

/// Communicators over them.
pub(crate) fn connect(world_size: usize, timeout: Duration) -> Vec<Arc<dyn Communicator>> {
    connect_over(&controls(world_size, LONG), timeout)
}

fn connect_over(controls: &[Arc<ControlChannel>], timeout: Duration) -> Vec<Arc<dyn Communicator>> {
    let connecting: Vec<_> = controls
        .iter()
        .map(|control| {
            let control = control.clone();
            thread::spawn(move || SocketWorld::connect(control, timeout))
        })
        .collect();
    connecting.into_iter().map(|connecting| connecting.join().unwrap().unwrap()).collect()
}

fn tag(step: u64) -> OpTag {
    OpTag::new(step, Phase::Forward, "head")
}

#[test]
fn large_messages_in_both_directions_at_once_do_not_block_each_other() {
    let layout = ShardLayout::new(&[3 << 20], 0, 3);
    let ranks: Vec<_> = connect(3, LONG)
        .into_iter()
        .map(|comm| {
            let layout = layout.clone();
            thread::spawn(move || {
                let shard = vec![comm.rank() as u8; layout.shard_len(comm.rank()) * 8].into();
                let whole = comm.all_gather(&tag(0), &[GatherPart { shard, layout, elem_bytes: 8 }]).unwrap().remove(0);
                // Others may still receive: a rank that goes without a word is one that is lost.
                comm.leave();
                whole
            })
        })
        .collect();
    for rank in ranks {
        let whole = rank.join().unwrap();
        assert!(whole.chunks(8 << 20).enumerate().all(|(rank, bytes)| bytes.iter().all(|&byte| byte == rank as u8)));
    }
}

#[test]
fn a_rank_that_left_is_named_by_those_that_wait_for_it_and_what_it_sent_before_arrives() {
    let mut ranks = connect(3, LONG);
    let last = ranks.pop().unwrap();
    let others: Vec<_> = ranks
        .into_iter()
        .map(|comm| {
            thread::spawn(move || {
                comm.barrier(&tag(0)).unwrap();
                comm.barrier(&tag(1)).unwrap_err()
            })
        })
        .collect();
    last.barrier(&tag(0)).unwrap();
    last.leave();
    let begun = Instant::now();
    for other in others {
        let error = other.join().unwrap();
        let text = error.to_string();
        assert!(text.contains("for rank 2, whose program has returned") && text.contains("step 1"), "{text}");
    }
    assert!(begun.elapsed() < LONG / 2);
}

#[test]
fn a_rank_that_is_not_found_by_another_is_named() {
    let controls = controls(3, Duration::from_secs(1));
    // Where nobody listens.
    let address = Entrance::open("127.0.0.1", 0).unwrap().address().to_string();
    controls[1].put("data address of rank 1", address.as_bytes()).unwrap();
    let (first, last) = (controls[0].clone(), controls[2].clone());
    let first = thread::spawn(move || SocketWorld::connect(first, LONG).map(drop));
    let error = SocketWorld::connect(last, LONG).unwrap_err();
    assert!(matches!(error, RendezvousError::NoAnswer { rank: 2, wanted: 1, .. }), "{error}");
    let error = error.to_string();
    assert!(error.contains(&format!("rank 2 found no rank 1 at {address}")), "{error}");
    assert!(error.contains("See whether rank 1 runs"), "{error}");
    assert!(first.join().unwrap().is_err(), "rank 1 does not come to rank 0 either");
}

#[test]
fn a_rank_that_ends_without_a_word_ends_the_others_with_its_name_and_the_operation() {
    for lost in 0..3 {
        let controls = controls(3, LONG);
        let ranks = connect_over(&controls, LONG);
        let others: Vec<_> = ranks
            .iter()
            .filter(|comm| comm.rank() != lost)
            .cloned()
            .map(|comm| thread::spawn(move || comm.barrier(&tag(4))))
            .collect();
        // Until all wait, as is told with heartbeats. Ranks other than 0 hear of rank 0 only.
        let knows = |control: &Arc<ControlChannel>| {
            let waits = control.standings().into_iter().filter(|standing| standing.waiting.is_some()).count();
            waits == if lost == 0 { 1 } else { 2 }
        };
        let begun = Instant::now();
        while !controls.iter().filter(|control| control.rank() != lost).all(knows) {
            assert!(begun.elapsed() < LONG, "{:?}", controls[0].standings());
            thread::sleep(Duration::from_millis(10));
        }
        // Its connections end as those of a process do that is killed.
        let (mut ranks, mut controls) = (ranks, controls);
        let begun = Instant::now();
        drop((ranks.remove(lost), controls.remove(lost)));
        for other in others {
            let Err(CommError::Aborted { cause, .. }) = other.join().unwrap() else { panic!() };
            let AbortCause::RankLost { rank, missed, .. } = &cause else { panic!("{cause}") };
            let missed = missed.as_ref().unwrap_or_else(|| panic!("{cause}"));
            assert_eq!((*rank, &missed.tag), (lost, &tag(4)), "{cause}");
            assert_ne!(missed.rank, lost);
        }
        assert!(begun.elapsed() < LONG / 4, "it is noticed at once: {:?}", begun.elapsed());
    }
}

#[test]
fn values_are_read_by_every_rank_and_a_missing_one_is_named() {
    let controls = controls(3, LONG);
    controls[2].put("id", b"of two").unwrap();
    for control in &controls {
        assert_eq!(control.get("id", LONG).unwrap(), b"of two");
    }
    let error = controls[1].get("nothing", Duration::from_millis(50)).unwrap_err();
    assert!(matches!(error, RendezvousError::NoValue { rank: 1, .. }), "{error}");
    assert!(error.to_string().contains("`nothing`"), "{error}");
    controls[1].abort(AbortCause::RankFailed { rank: 1, message: "no more".into() });
    let error = controls[2].get("nothing", LONG).unwrap_err().to_string();
    assert!(error.contains("rank 1 failed: no more"), "{error}");
}

#[test]
fn all_ranks_tell_the_same_cause_where_several_fail_at_once() {
    let controls = controls(4, LONG);
    let failing: Vec<_> = controls
        .iter()
        .cloned()
        .map(|control| {
            thread::spawn(move || {
                let (rank, message) = (control.rank(), "at once".to_owned());
                control.abort(AbortCause::RankFailed { rank, message });
                control.aborted().unwrap()
            })
        })
        .collect();
    let causes: Vec<_> = failing.into_iter().map(|rank| rank.join().unwrap()).collect();
    assert!(causes.iter().all(|cause| *cause == causes[0]), "{causes:?}");
}

#[test]
fn those_that_finish_wait_for_the_others_and_fail_with_them() {
    let mut ranks = controls(3, LONG);
    let last = ranks.pop().unwrap();
    let finishing: Vec<_> = ranks.into_iter().map(|control| thread::spawn(move || control.finish())).collect();
    let cause = AbortCause::RankPanicked { rank: 2, message: "in the last line".into() };
    last.abort(cause.clone());
    for finished in finishing {
        assert_eq!(finished.join().unwrap(), Err(cause.clone()));
    }
    let finishing: Vec<_> =
        controls(3, LONG).into_iter().map(|control| thread::spawn(move || control.finish())).collect();
    for finished in finishing {
        assert_eq!(finished.join().unwrap(), Ok(()));
    }
}

#[test]
fn who_lets_the_others_wait_is_known_on_rank_0() {
    let controls = controls(3, Duration::from_secs(20));
    let ranks = connect_over(&controls, LONG);
    let waiting: Vec<_> = ranks[..2].iter().cloned().map(|comm| thread::spawn(move || comm.barrier(&tag(3)))).collect();
    let begun = Instant::now();
    let found = loop {
        assert!(begun.elapsed() < LONG);
        match controls[0].stragglers(Duration::from_millis(50)) {
            Some(found) if found.waiting == [0, 1] => break found,
            _ => thread::sleep(Duration::from_millis(20)),
        }
    };
    assert_eq!(found.behind, [(2, None)]);
    assert!(found.to_string().contains("ranks 0, 1 wait in barrier (step 3, forward, unit `head`)"), "{found}");
    ranks[2].barrier(&tag(3)).unwrap();
    waiting.into_iter().for_each(|rank| rank.join().unwrap().unwrap());
    assert_eq!(controls[0].stragglers(LONG), None);
}
