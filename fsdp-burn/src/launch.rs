//! Starts the ranks of a run, and ends all of them when one fails.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use burn::tensor::Device;
use fsdp_core::{AbortCause, Communicator, Config, FaultPlan, Faulty, Link, LocalWorld, Trace};

use crate::engine::EngineFailed;
use crate::random::random_seed;
use crate::{Error, RandomState, Rank};

/// Runs `program` on every rank, each a thread of this process with its own share of the cores, and returns their
/// results in rank order.
///
/// When a rank returns an error or panics, the others end at their next collective, and the error of the rank that
/// failed first is returned. A rank that does not end within the configured time limit after that is left behind.
///
/// # Errors
/// If the configuration is refused, or a rank fails.
///
/// ```
/// use fsdp_burn::{Config, launch};
///
/// let config = Config { world_size: 3, ..Config::default() };
/// let sums = launch(&config, |rank| rank.sum(rank.rank() as f64))?;
/// assert_eq!(sums, [3.0, 3.0, 3.0]);
/// # Ok::<(), fsdp_burn::Error>(())
/// ```
pub fn launch<T, F>(config: &Config, program: F) -> Result<Vec<T>, Error>
where
    T: Send + 'static,
    F: Fn(Rank) -> Result<T, Error> + Send + Sync + 'static,
{
    launch_with(config, LaunchOptions::default(), program)
}

/// How a run is started, beyond its configuration.
#[derive(Clone, Debug, Default)]
pub struct LaunchOptions {
    /// Collects what every rank spends its time on.
    pub trace: Option<Arc<Trace>>,
    /// A network to imitate between the ranks, to see how a run behaves on one.
    pub link: Option<Link>,
}

/// As [`launch`], with options.
///
/// # Errors
/// As [`launch`].
pub fn launch_with<T, F>(config: &Config, options: LaunchOptions, program: F) -> Result<Vec<T>, Error>
where
    T: Send + 'static,
    F: Fn(Rank) -> Result<T, Error> + Send + Sync + 'static,
{
    config.validate()?;
    let timeout = config.timeout();
    let world = LocalWorld::connect(config.world_size, timeout);
    if let Some(seed) = config.seed {
        Device::flex().seed(seed as u64);
    }
    let seed = config.seed.map_or_else(random_seed, |seed| seed as u64);
    let config = Arc::new(config.clone());
    let program = Arc::new(program);
    let num_cores = thread::available_parallelism().map_or(1, usize::from);
    let (results, arrivals) = channel();
    let connect = |communicator: &Arc<dyn Communicator>| {
        let linked: Arc<dyn Communicator> = match options.link {
            Some(link) => {
                Arc::new(Faulty::new(communicator.clone(), FaultPlan { link: Some(link), ..FaultPlan::default() }))
            }
            None => communicator.clone(),
        };
        Rank::new(config.clone(), linked, options.trace.clone())
    };
    // All ranks exist before the first one runs, and possibly fails.
    let ranks = world.iter().map(connect).collect::<Result<Vec<_>, _>>()?;
    for (number, (rank, communicator)) in ranks.into_iter().zip(&world).enumerate() {
        let (communicator, sender, program) = (communicator.clone(), results.clone(), program.clone());
        let num_threads = config.compute_threads(num_cores);
        let tier = rank.tier_place();
        let run = move || {
            let random = RandomState::new(seed, number as u64);
            let result = run_rank(number, num_threads, || {
                random.install();
                program(rank)
            });
            // A forward that has failed may leave parts of its graph behind, which hold on to it.
            if let Some(tier) = tier.get() {
                tier.close();
            }
            let cause = result.as_ref().err().map(|error| cause_of(number, error));
            // First the result, so that this failure arrives before those that follow from it. The launcher may have
            // given up on this rank.
            let _ = sender.send((number, result));
            match cause {
                Some(cause) => communicator.abort(cause),
                None => communicator.leave(),
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
    collect(config.world_size, timeout, &arrivals)
}

/// Runs inside a thread pool of the rank's own: Burn's Flex backend takes its threads from the current pool, and ranks
/// that shared one would wait for each other's work.
fn run_rank<T: Send>(
    number: usize,
    num_threads: usize,
    program: impl FnOnce() -> Result<T, Error> + Send,
) -> Result<T, Error> {
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(num_threads)
        .stack_size(16 << 20)
        .thread_name(move |index| format!("rank {number} thread {index}"))
        .build()
        .map_err(|error| Error::Io {
            what: format!("cannot start the threads of rank {number}"),
            source: std::io::Error::other(error),
        })?;
    match catch_unwind(AssertUnwindSafe(|| pool.install(program))) {
        Ok(result) => result,
        Err(payload) => match payload.downcast::<EngineFailed>() {
            Ok(failed) => Err(failed.0),
            Err(payload) => match AbortCause::panicked(number, payload.as_ref()) {
                AbortCause::RankPanicked { rank, message } => Err(Error::RankPanicked { rank, message }),
                other => Err(Error::program(other)),
            },
        },
    }
}

fn cause_of(rank: usize, error: &Error) -> AbortCause {
    match error {
        Error::RankPanicked { rank, message } => AbortCause::RankPanicked { rank: *rank, message: message.clone() },
        error => AbortCause::RankFailed { rank, message: error.to_string() },
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
