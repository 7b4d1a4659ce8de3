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
    check_all(|world_size, timeout| sockets::connect(world_size, timeout));
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
