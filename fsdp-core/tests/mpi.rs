//! The conformance suite and more, as a program for an MPI launcher: every process is one rank. Started by `.ci/mpi`.
//!
//! Without a launcher it runs as the only rank.

use std::os::unix::fs::MetadataExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use fsdp_core::testing::conformance::CHECKS;
use fsdp_core::{
    AbortCause, CommError, Communicator, Dtype, GatherPart, MpiWorld, OpTag, Phase, Reduce, ReducePart, ShardLayout,
};

const MIB: usize = 1 << 20;

/// Bytes of the tensor whose traffic is counted: beside it, nothing else matters.
const LARGE: usize = 64 * MIB;

/// Connecting takes longer on a loaded machine than the timeout of some checks.
const CONNECT: Duration = Duration::from_secs(60);

type Run = fn(&Arc<dyn Communicator>) -> Result<(), CommError>;

/// Beside the suite.
const MORE: [(&str, Run); 2] = [
    ("a_gathered_tensor_exists_once_per_host", exists_once_per_host),
    ("a_rank_that_has_left_is_named_by_who_waits_for_it", a_rank_leaves),
];

/// With `--interface NAME`: each host has an interface of this name, over which it reaches the others.
const BETWEEN_HOSTS: [(&str, Run); 2] = [
    ("a_gather_sends_between_hosts_what_one_rank_per_host_would", gathers_by_one_rank_per_host),
    ("a_reduction_sends_each_block_once_to_its_owner", reduces_by_exchange),
];

fn main() -> ExitCode {
    let suite = CHECKS.iter().map(|check| (check.name, check.timeout, check.run));
    let more = MORE.iter().chain(BETWEEN_HOSTS.iter().filter(|_| interface().is_some()));
    let all = suite.chain(more.map(|&(name, run)| (name, CONNECT, run)));
    let failed = all.filter(|&(name, timeout, check)| !run(name, timeout, check)).count();
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The argument after `--interface`.
fn interface() -> Option<String> {
    std::env::args().skip_while(|argument| argument != "--interface").nth(1)
}

/// Runs one check in a world of its own; tells whether its promise is kept.
fn run(name: &str, timeout: Duration, check: Run) -> bool {
    let control = match MpiWorld::control(CONNECT) {
        Ok(control) => control,
        Err(error) => {
            eprintln!("{name}: no control channel: {error}");
            return false;
        }
    };
    let comm = match MpiWorld::connect(control.clone(), timeout) {
        Ok(comm) => comm,
        Err(error) => {
            eprintln!("{name}: not connected: {error}");
            return false;
        }
    };
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let result = catch_unwind(AssertUnwindSafe(|| check(&comm)));
    let told = match result {
        Ok(Ok(())) => None,
        Ok(Err(error)) => {
            comm.abort(AbortCause::RankFailed { rank, message: error.to_string() });
            Some(error.to_string())
        }
        Err(panic) => {
            comm.abort(AbortCause::panicked(rank, &*panic));
            Some("panicked".to_owned())
        }
    };
    comm.leave();
    // Some checks end by an abort.
    let _ = control.finish();
    match &told {
        None if rank == 0 => println!("{name}: {world_size} ranks: ok"),
        None => {}
        Some(error) => eprintln!("{name}: rank {rank} of {world_size}: {error}"),
    }
    told.is_none()
}

/// The memory that ranks of a host share grows by one copy of what is gathered, however many of its ranks read it.
fn exists_once_per_host(comm: &Arc<dyn Communicator>) -> Result<(), CommError> {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let tag = OpTag::new(0, Phase::Forward, "large");
    let layout = ShardLayout::new(&[LARGE], 0, world_size);
    let shard: Bytes = vec![rank as u8; layout.shard_len(rank)].into();
    comm.barrier(&tag)?;
    let before = shared_bytes();
    comm.barrier(&tag)?;
    let whole = comm.all_gather(&tag, &[GatherPart { shard, layout: layout.clone(), elem_bytes: 1 }])?.remove(0);
    comm.barrier(&tag)?;
    for owner in 0..world_size {
        assert!(layout.runs(owner).flatten().all(|element| whole[element] == owner as u8));
    }
    let grown = shared_bytes() - before;
    assert!((LARGE..LARGE + LARGE / 4).contains(&grown), "shared memory of the host grew by {grown} bytes");
    comm.barrier(&tag)
}

/// Memory behind the files without a name that this process has mapped: what the ranks of its host share.
fn shared_bytes() -> usize {
    let files = std::fs::read_dir("/proc/self/fd").expect("Linux lists open files").flatten();
    let of_file = |file: std::fs::DirEntry| {
        let name = std::fs::read_link(file.path()).unwrap_or_default();
        let is_ours = name.to_string_lossy().starts_with("/memfd:fsdp");
        if is_ours { std::fs::metadata(file.path()).map_or(0, |file| file.blocks() as usize * 512) } else { 0 }
    };
    files.map(of_file).sum()
}

/// Whoever waits for a rank whose program has returned is told so at once.
fn a_rank_leaves(comm: &Arc<dyn Communicator>) -> Result<(), CommError> {
    let last = comm.world_size() - 1;
    if last == 0 || comm.rank() == last {
        return Ok(());
    }
    match comm.barrier(&OpTag::new(0, Phase::Control, "one more")) {
        Err(CommError::Left { left, .. }) => assert_eq!(left, [last]),
        Err(CommError::Aborted { cause: AbortCause::Collective(error), .. }) => {
            assert!(matches!(*error, CommError::Left { .. }), "{error}");
        }
        other => panic!("expected that rank {last} has left, got {other:?}"),
    }
    Ok(())
}

/// Bytes that this host must send for its own blocks to reach each other host once.
fn gathers_by_one_rank_per_host(comm: &Arc<dyn Communicator>) -> Result<(), CommError> {
    let layout = ShardLayout::new(&[LARGE], 0, comm.world_size());
    let hosts = host_names(&**comm)?;
    let here: usize = on(&hosts, &hosts[comm.rank()]).map(|rank| layout.shard_len(rank)).sum();
    let mut others: Vec<_> = hosts.iter().filter(|host| **host != hosts[comm.rank()]).collect();
    others.dedup();
    let shard: Bytes = vec![comm.rank() as u8; layout.shard_len(comm.rank())].into();
    let part = GatherPart { shard, layout, elem_bytes: 1 };
    check_sent(comm, here * others.len(), |tag| comm.all_gather(tag, std::slice::from_ref(&part)).map(drop))
}

/// Bytes of this host's values for all blocks of other hosts.
fn reduces_by_exchange(comm: &Arc<dyn Communicator>) -> Result<(), CommError> {
    let layout = ShardLayout::new(&[LARGE / 4], 0, comm.world_size());
    let hosts = host_names(&**comm)?;
    let here: Vec<usize> = on(&hosts, &hosts[comm.rank()]).collect();
    let owned: usize = here.iter().map(|&rank| 4 * layout.shard_len(rank)).sum();
    let part = ReducePart { full: vec![0; LARGE].into(), layout, dtype: Dtype::F32 };
    let sent = here.len() * (LARGE - owned);
    check_sent(comm, sent, |tag| comm.reduce_scatter(tag, std::slice::from_ref(&part), Reduce::SUM).map(drop))
}

fn on<'a>(hosts: &'a [String], name: &'a str) -> impl Iterator<Item = usize> + 'a {
    (0..hosts.len()).filter(move |&rank| hosts[rank] == name)
}

/// Compares what leaves this host with what is expected, to a twentieth: packets have headers.
fn check_sent(
    comm: &Arc<dyn Communicator>,
    expected: usize,
    op: impl Fn(&OpTag) -> Result<(), CommError>,
) -> Result<(), CommError> {
    let tag = OpTag::new(0, Phase::Control, "count");
    comm.barrier(&tag)?;
    let before = interface_bytes();
    comm.barrier(&tag)?;
    op(&tag)?;
    comm.barrier(&tag)?;
    let sent = interface_bytes() - before;
    let ratio = sent as f64 / expected as f64;
    println!("rank {}: its host sent {sent} bytes, {ratio:.3} times {expected}", comm.rank());
    assert!((1.0..1.05).contains(&ratio), "its host sent {sent} bytes, {ratio:.3} times {expected}");
    comm.barrier(&tag)
}

fn host_names(comm: &dyn Communicator) -> Result<Vec<String>, CommError> {
    const LEN: usize = 64;
    let tag = OpTag::new(0, Phase::Control, "hosts");
    let mut name = std::fs::read("/proc/sys/kernel/hostname").expect("Linux names its host");
    name.resize(LEN, b' ');
    let layout = ShardLayout::new(&[LEN * comm.world_size()], 0, comm.world_size());
    let names = comm.all_gather(&tag, &[GatherPart { shard: name.into(), layout, elem_bytes: 1 }])?.remove(0);
    Ok(names.chunks(LEN).map(|name| String::from_utf8_lossy(name).trim().to_owned()).collect())
}

fn interface_bytes() -> usize {
    let name = interface().unwrap_or_default();
    let interfaces = std::fs::read_to_string("/proc/net/dev").expect("Linux counts what is sent");
    let line = interfaces.lines().find_map(|line| line.trim().strip_prefix(&format!("{name}:")));
    let sent = line.and_then(|line| line.split_whitespace().nth(8)).and_then(|bytes| bytes.parse().ok());
    sent.unwrap_or_else(|| panic!("there is no interface {name:?}"))
}
