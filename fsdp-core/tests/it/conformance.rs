//! Every communicator of the crate against the suite.

use std::sync::Arc;
use std::time::Duration;

use fsdp_core::testing::conformance::check_all;
use fsdp_core::{Communicator, FaultPlan, Faulty, Link, LocalWorld, Recorder, Traffic};

use crate::sockets;
use crate::streamed::Streamed;

fn wrapped(
    wrap: impl Fn(Arc<dyn Communicator>) -> Arc<dyn Communicator>,
) -> impl Fn(usize, Duration) -> Vec<Arc<dyn Communicator>> {
    move |world_size, timeout| LocalWorld::connect(world_size, timeout).into_iter().map(&wrap).collect()
}

#[test]
fn threads_keep_every_promise() {
    check_all(LocalWorld::connect);
}

#[test]
fn sockets_keep_every_promise() {
    check_all(sockets::connect);
}

#[test]
fn a_recorder_keeps_every_promise() {
    check_all(wrapped(|comm| Arc::new(Recorder::new(comm, Arc::new(Traffic::with_log())))));
}

#[test]
fn a_slow_link_keeps_every_promise() {
    let link = Link { alpha_s: 20e-6, beta_s_per_byte: 1e-9 };
    let plan = |rank| FaultPlan { delay: Duration::from_micros(30 * rank), link: Some(link), fault: None };
    check_all(wrapped(move |comm| {
        let plan = plan(comm.rank() as u64);
        Arc::new(Faulty::new(comm, plan))
    }));
}

#[test]
fn a_stream_keeps_every_promise() {
    check_all(wrapped(|comm| Streamed::create(comm).unwrap()));
}

/// Ranks that share memory as processes of a host do, on hosts `host_of(rank)`.
#[cfg(target_os = "linux")]
fn on_hosts(host_of: fn(usize) -> usize) -> impl Fn(usize, Duration) -> Vec<Arc<dyn Communicator>> {
    move |world_size, timeout| {
        let hosts: Vec<_> = (0..world_size).map(|rank| ["a", "b", "c", "d", "e"][host_of(rank)]).collect();
        // Connecting takes longer on a loaded machine than the shortest timeout of a check.
        fsdp_core::testing::Loopback::connect(&hosts, timeout).into_iter().map(Result::unwrap).collect()
    }
}

#[cfg(target_os = "linux")]
#[test]
fn ranks_of_one_host_keep_every_promise() {
    check_all(on_hosts(|_| 0));
}

#[cfg(target_os = "linux")]
#[test]
fn ranks_of_as_many_hosts_keep_every_promise() {
    check_all(on_hosts(|rank| rank));
}

#[cfg(target_os = "linux")]
#[test]
fn ranks_side_by_side_on_hosts_keep_every_promise() {
    check_all(on_hosts(|rank| rank / 2));
}

#[cfg(target_os = "linux")]
#[test]
fn ranks_dealt_out_to_hosts_keep_every_promise() {
    check_all(on_hosts(|rank| rank % 2));
}

#[test]
fn ranks_know_how_many_hold_one_gathered_tensor_together() {
    let limit = Duration::from_secs(60);
    let sharing = |ranks: Vec<Arc<dyn Communicator>>| ranks.iter().map(|rank| rank.num_sharing()).collect::<Vec<_>>();
    assert_eq!(sharing(LocalWorld::connect(3, limit)), [3, 3, 3], "threads of one process");
    assert_eq!(sharing(sockets::connect(3, limit)), [1, 1, 1], "processes without shared memory");
    #[cfg(target_os = "linux")]
    assert_eq!(sharing(on_hosts(|rank| rank % 2)(3, limit)), [2, 1, 2], "processes on two hosts");
}
