//! A process that is one rank of several.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use fsdp_core::{
    AbortCause, CommError, Communicator, Config, Control, ControlChannel, Entrance, Member, ProcessPlace, ProcessRank,
    Secret, SocketWorld, Tier,
};

#[cfg(feature = "mpi")]
use fsdp_core::{Launcher, MpiWorld};

use super::LaunchOptions;
use super::program::{Program, cause_of};
use crate::{Error, Rank};

/// The variable of the secret by which processes know each other.
const SECRET: &str = "FSDP_SECRET";

/// How long rank 0 may prepare before it listens, where it was started together with this rank: this, or a fifth of the time
/// limit where that is longer.
const START_LIMIT: Duration = Duration::from_secs(60);

/// How often the launcher looks whether the run has ended elsewhere.
const LOOK: Duration = Duration::from_millis(20);

/// Runs `program` as the rank that this process is, and waits for the end of all.
pub(super) fn launch<T, F>(
    config: Config,
    process: &ProcessRank,
    options: LaunchOptions,
    program: F,
) -> Result<Vec<T>, Error>
where
    T: Send + 'static,
    F: Fn(Rank) -> Result<T, Error> + Send + Sync + 'static,
{
    let timeout = config.timeout();
    let offload_dir = config.offload.nvme_path.clone();
    let (control, communicator) = connect(process, timeout)?;
    let number = process.rank;
    let num_cores = cores_of_all(&control, process, timeout)?;
    let program = Program::new(config, options, num_cores, program);
    let (sender, arrivals) = channel();
    let rank = program.rank(communicator.clone(), process.local_rank);
    let rank = rank.inspect_err(|error| control.abort(cause_of(number, error)))?.with_channel(control.clone());
    let run = move || {
        let result = program.run(rank);
        // The launcher may have given up on this rank.
        let _ = sender.send(result);
    };
    thread::Builder::new().name(format!("rank {number}")).spawn(run).map_err(|source| {
        let error = Error::Io { what: format!("cannot start the thread of rank {number}"), source };
        control.abort(cause_of(number, &error));
        error
    })?;
    let result = match wait(&*control, number, timeout, &arrivals) {
        Ok(value) => {
            communicator.leave();
            control.finish().map(|()| vec![value]).map_err(|cause| {
                // Nobody waits any more for what cannot be sent.
                communicator.abort(cause.clone());
                told(number, cause)
            })
        }
        Err(error) => Err(fail(&*communicator, number, error)),
    };
    if let (Err(error), Some(dir)) = (&result, offload_dir) {
        tracing::error!(rank = number, "{error}");
        // What a rank could not remove any more, since its process was killed.
        Tier::remove_abandoned(dir.as_ref());
    }
    result
}

/// The control channel, and what the rank communicates by.
fn connect(process: &ProcessRank, timeout: Duration) -> Result<(Arc<ControlChannel>, Arc<dyn Communicator>), Error> {
    let ProcessRank { rank, world_size, .. } = *process;
    #[cfg(feature = "mpi")]
    if process.launcher == Launcher::Mpirun {
        return connect_by_mpi(process, timeout);
    }
    let Some((host, port)) = &process.rendezvous else {
        return Err(Error::Misuse {
            problem: format!("this process is {process}, but the program was built without MPI"),
            remedy: "build it with the feature `mpi`, or set MASTER_ADDR and MASTER_PORT for all ranks (`mpirun -x`), \
                     and they talk over sockets",
        });
    };
    let secret = Secret::of_variable(std::env::var(SECRET).ok().as_deref())?;
    let start_limit = if process.is_beside_rank_0() { start_limit(timeout) } else { timeout };
    let member = Member { rank, world_size, secret, timeout, start_limit };
    let control = match rank {
        0 => ControlChannel::host(Entrance::open(host, *port)?, &member)?,
        // An address of IPv6 stands in brackets.
        _ if host.contains(':') => ControlChannel::join(&format!("[{host}]:{port}"), &member)?,
        _ => ControlChannel::join(&format!("{host}:{port}"), &member)?,
    };
    let communicator = SocketWorld::connect(control.clone(), timeout)?;
    Ok((control, communicator))
}

/// Cores of all ranks, if all had what this one has: the configuration shares them out evenly. A launcher may have bound each rank
/// to some cores of its host.
fn cores_of_all(control: &ControlChannel, process: &ProcessRank, timeout: Duration) -> Result<usize, Error> {
    let ProcessRank { rank, world_size, local_size, .. } = *process;
    let key = |rank: usize| format!("place of rank {rank}");
    let own = ProcessPlace::own();
    control.put(&key(rank), own.to_string().as_bytes())?;
    let place = |rank| -> Result<ProcessPlace, Error> {
        Ok(ProcessPlace::read(&String::from_utf8_lossy(&control.get(&key(rank), timeout)?)))
    };
    let all = (0..world_size).map(place).collect::<Result<Vec<_>, Error>>()?;
    // What this process may use by its limits, too.
    let most = thread::available_parallelism().map_or(1, usize::from);
    let (num_cores, num_sharing) = match own.share(&all) {
        (0, _) => (most, local_size.unwrap_or(world_size)),
        (num_cores, num_sharing) => (num_cores.min(most), num_sharing),
    };
    tracing::info!(rank, "may use {num_cores} cores, which {num_sharing} ranks share");
    Ok(num_cores * world_size / num_sharing.max(1))
}

fn start_limit(timeout: Duration) -> Duration {
    START_LIMIT.max(timeout / 5).min(timeout)
}

/// MPI tells all where rank 0 listens, and the secret.
#[cfg(feature = "mpi")]
fn connect_by_mpi(
    process: &ProcessRank,
    timeout: Duration,
) -> Result<(Arc<ControlChannel>, Arc<dyn Communicator>), Error> {
    let control = MpiWorld::control(timeout)?;
    if (control.rank(), control.world_size()) != (process.rank, process.world_size) {
        let (rank, world_size) = (control.rank(), control.world_size());
        return Err(Error::Misuse {
            problem: format!("this process is {process}, but for the program's MPI it is rank {rank} of {world_size}"),
            remedy: "start it with the `mpirun` of the MPI that the program was built with",
        });
    }
    let communicator = MpiWorld::connect(control.clone(), timeout)?;
    Ok((control, communicator))
}

/// The rank's result; or that it goes on for longer than the limit, although the run has ended elsewhere.
fn wait<T>(
    control: &dyn Control,
    rank: usize,
    timeout: Duration,
    arrivals: &Receiver<Result<T, Error>>,
) -> Result<T, Error> {
    let mut ended: Option<Instant> = None;
    loop {
        match arrivals.recv_timeout(LOOK) {
            Ok(result) => return result,
            Err(RecvTimeoutError::Disconnected) => {
                let message = "its thread ended without a result".to_owned();
                return Err(Error::RankPanicked { rank, message });
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
        let Some(cause) = control.aborted() else { continue };
        if ended.get_or_insert_with(Instant::now).elapsed() > timeout {
            return Err(Error::RankStuck { rank, waited_s: timeout.as_secs_f64(), cause: cause.to_string() });
        }
    }
}

/// Tells the others of this rank's error, and returns what all processes return: the failure that was first.
fn fail(communicator: &dyn Communicator, rank: usize, error: Error) -> Error {
    if matches!(error, Error::RankStuck { .. }) {
        return error;
    }
    let ours = cause_of(rank, &error);
    communicator.abort(ours.clone());
    match communicator.aborted() {
        Some(cause) if cause != ours && !is_of(&cause, &error) => told(rank, cause),
        _ => match error {
            Error::RankPanicked { .. } => error,
            source => Error::RankFailed { rank, source: Box::new(source) },
        },
    }
}

/// Whether `error` is that of the collective which has ended the run.
fn is_of(cause: &AbortCause, error: &Error) -> bool {
    matches!((cause, error), (AbortCause::Collective(cause), Error::Comm(error)) if cause == error)
}

/// The error of a run that has ended elsewhere.
fn told(rank: usize, cause: AbortCause) -> Error {
    match cause {
        AbortCause::RankPanicked { rank, message } => Error::RankPanicked { rank, message },
        AbortCause::RankFailed { rank, message } => {
            Error::RankFailed { rank, source: Box::new(Error::program(message)) }
        }
        cause => CommError::Aborted { rank, cause }.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rank_0_has_a_minute_to_listen_or_a_fifth_of_a_long_limit_and_never_more_than_the_limit() {
        let limits = [30, 60, 300, 3600].map(|timeout_s| start_limit(Duration::from_secs(timeout_s)).as_secs());
        assert_eq!(limits, [30, 60, 60, 720]);
    }
}
