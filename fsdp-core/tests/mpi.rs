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
use fsdp_core::{AbortCause, CommError, Communicator, GatherPart, MpiWorld, OpTag, Phase, ShardLayout};

/// Connecting takes longer on a loaded machine than the timeout of some checks.
const CONNECT: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    let only = std::env::args().skip(1).find(|argument| !argument.starts_with('-'));
    let is_asked = |name: &str| only.as_ref().is_none_or(|only| name.contains(only.as_str()));
    let mut failed = 0;
    for check in CHECKS.iter().filter(|check| is_asked(check.name)) {
        failed += usize::from(!run(check.name, check.timeout, check.run));
    }
    if is_asked("a_gathered_tensor_exists_once_per_host") {
        failed += usize::from(!run("a_gathered_tensor_exists_once_per_host", CONNECT, gathers_once));
    }
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs one check in a world of its own; tells whether its promise is kept.
fn run(name: &str, timeout: Duration, check: fn(&Arc<dyn Communicator>) -> Result<(), CommError>) -> bool {
    let control = match MpiWorld::control(CONNECT) {
        Ok(control) => control,
        Err(error) => {
            eprintln!("{name}: no control channel: {error}");
            return false;
        }
    };
    let comm = match MpiWorld::connect(control.clone(), timeout.max(Duration::from_millis(300))) {
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
fn gathers_once(comm: &Arc<dyn Communicator>) -> Result<(), CommError> {
    const MIB: usize = 1 << 20;
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let tag = OpTag::new(0, Phase::Forward, "large");
    let layout = ShardLayout::new(&[64 * MIB], 0, world_size);
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
    assert!((64 * MIB..80 * MIB).contains(&grown), "shared memory of the host grew by {grown} bytes");
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
