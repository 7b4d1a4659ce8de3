//! Ranks that are threads of this process.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use fsdp_core::{AbortCause, Config, LocalWorld};

use super::LaunchOptions;
use super::program::{Program, cause_of};
use crate::{Error, Rank, device};

/// Runs `program` on threads, one for each rank.
pub(super) fn launch<T, F>(config: Config, options: LaunchOptions, program: F) -> Result<Vec<T>, Error>
where
    T: Send + 'static,
    F: Fn(Rank) -> Result<T, Error> + Send + Sync + 'static,
{
    let (timeout, world_size) = (config.timeout(), config.world_size);
    let world = LocalWorld::connect(world_size, timeout);
    let num_cores = thread::available_parallelism().map_or(1, usize::from);
    let board = device::board(&config);
    let program = Arc::new(Program::new(config, options, num_cores, program));
    let (results, arrivals) = channel();
    // All ranks exist before the first one runs, and possibly fails.
    let ranks = world.iter().enumerate();
    let ranks = ranks
        .map(|(number, communicator)| Ok(program.rank(communicator.clone(), Some(number))?.with_board(board.clone())));
    let ranks = ranks.collect::<Result<Vec<_>, Error>>()?;
    for (number, (rank, communicator)) in ranks.into_iter().zip(&world).enumerate() {
        let (communicator, sender, program) = (communicator.clone(), results.clone(), program.clone());
        let run = move || {
            let result = program.run(rank);
            let cause = result.as_ref().err().map(|error| cause_of(number, error));
            if cause.is_none() {
                communicator.leave();
            }
            // First the result, so that this failure arrives before those that follow from it. The launcher may have
            // given up on this rank.
            let _ = sender.send((number, result));
            if let Some(cause) = cause {
                communicator.abort(cause);
            }
        };
        let spawned = thread::Builder::new().name(format!("rank {number}")).spawn(run);
        if let Err(source) = spawned {
            let error = Error::Io { what: format!("cannot start the thread of rank {number}"), source };
            let cause = cause_of(number, &error);
            let _ = results.send((number, Err(error)));
            world[0].abort(cause);
        }
    }
    drop(results);
    let results = collect(world_size, timeout, &arrivals)?;
    // Ranks that did not wait for each other may have ended well all the same.
    match world[0].aborted() {
        Some(AbortCause::Collective(error)) => Err(Error::Comm(error)),
        _ => Ok(results),
    }
}

/// All results, or the first failure that is not a consequence of another.
fn collect<T>(
    world_size: usize,
    timeout: Duration,
    arrivals: &Receiver<(usize, Result<T, Error>)>,
) -> Result<Vec<T>, Error> {
    let mut results: Vec<Option<T>> = (0..world_size).map(|_| None).collect();
    let mut ended = vec![false; world_size];
    let mut failures: Vec<(usize, Error)> = Vec::new();
    let mut deadline: Option<Instant> = None;
    while ended.contains(&false) {
        let arrival = match deadline {
            None => arrivals.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(deadline) => arrivals.recv_timeout(deadline.saturating_duration_since(Instant::now())),
        };
        match arrival {
            Ok((rank, result)) => {
                ended[rank] = true;
                match result {
                    Ok(value) => results[rank] = Some(value),
                    Err(error) => failures.push((rank, error)),
                }
                if !failures.is_empty() {
                    deadline.get_or_insert_with(|| Instant::now() + timeout);
                }
            }
            Err(_) => break,
        }
    }
    for (rank, error) in &failures {
        tracing::error!(rank, "{error}");
    }
    let root = failures.iter().position(|(_, error)| !error.is_consequence()).unwrap_or(0);
    if let Some(rank) = ended.iter().position(|ended| !ended) {
        let cause = failures.get(root).map_or_else(|| "they were lost".to_owned(), |(_, error)| error.to_string());
        return Err(Error::RankStuck { rank, waited_s: timeout.as_secs_f64(), cause });
    }
    if failures.is_empty() {
        return Ok(results.into_iter().flatten().collect());
    }
    match failures.swap_remove(root) {
        (_, error @ Error::RankPanicked { .. }) => Err(error),
        (rank, source) => Err(Error::RankFailed { rank, source: Box::new(source) }),
    }
}
