//! Runs one closure per rank, each on a named thread, and returns within a time limit whatever they do.

use std::fmt::{self, Debug, Display};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use crate::comm::error::panic_message;
use crate::{AbortCause, Communicator, LocalWorld};

/// After this time [`run_ranks`] gives up on ranks that still run. Long, since it only ends what would hang.
const LIMIT: Duration = Duration::from_secs(120);

/// Why a rank did not return a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RankFailure<E> {
    /// It returned this error.
    Failed(E),
    /// It panicked with this message.
    Panicked(String),
    /// It still ran when the limit had passed. Its thread was left behind.
    Hung,
}

impl<E: Display> Display for RankFailure<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RankFailure::Failed(error) => write!(f, "failed: {error}"),
            RankFailure::Panicked(message) => write!(f, "panicked: {message}"),
            RankFailure::Hung => f.write_str("still ran when the time limit had passed"),
        }
    }
}

/// Runs `f` on every rank of a new [`LocalWorld`] with this timeout, and returns what each rank returned, in order.
///
/// A rank that fails or panics aborts the world, so the others end at once with its failure as the cause.
///
/// ```
/// use std::time::Duration;
/// use fsdp_core::testing::run_ranks;
/// use fsdp_core::{CommError, OpTag, Phase};
///
/// let results = run_ranks(3, Duration::from_secs(30), |comm| {
///     let data = (comm.rank() == 2).then(|| vec![42].into());
///     Ok::<_, CommError>(comm.broadcast(&OpTag::new(0, Phase::Init, "seed"), 2, data)?[0])
/// });
/// assert_eq!(results, [Ok(42), Ok(42), Ok(42)]);
/// ```
pub fn run_ranks<T, E, F>(world_size: usize, timeout: Duration, f: F) -> Vec<Result<T, RankFailure<E>>>
where
    T: Send + 'static,
    E: Display + Send + 'static,
    F: Fn(Arc<dyn Communicator>) -> Result<T, E> + Send + Sync + 'static,
{
    run_ranks_on(LocalWorld::connect(world_size, timeout), LIMIT, f)
}

/// Like [`run_ranks`], on given communicators and with a given limit for the whole.
pub fn run_ranks_on<T, E, F>(ranks: Vec<Arc<dyn Communicator>>, limit: Duration, f: F) -> Vec<Result<T, RankFailure<E>>>
where
    T: Send + 'static,
    E: Display + Send + 'static,
    F: Fn(Arc<dyn Communicator>) -> Result<T, E> + Send + Sync + 'static,
{
    let (report, reports) = mpsc::channel();
    let f = Arc::new(f);
    let mut results: Vec<_> = ranks.iter().map(|_| Err(RankFailure::Hung)).collect();
    for (rank, comm) in ranks.iter().cloned().enumerate() {
        let (report, f) = (report.clone(), f.clone());
        let run = move || {
            let result = catch_unwind(AssertUnwindSafe(|| f(comm.clone())));
            let result = match result {
                Ok(Ok(value)) => Ok(value),
                Ok(Err(error)) => {
                    comm.abort(AbortCause::RankFailed { rank, message: error.to_string() });
                    Err(RankFailure::Failed(error))
                }
                Err(panic) => {
                    comm.abort(AbortCause::panicked(rank, &*panic));
                    Err(RankFailure::Panicked(panic_message(&*panic)))
                }
            };
            // Nobody listens any more once the limit has passed.
            let _ = report.send((rank, result));
        };
        // The thread is not joined: one that hangs must not take the test with it.
        thread::Builder::new().name(format!("rank-{rank}")).spawn(run).expect("a test may start a thread per rank");
    }
    drop(report);
    let start = Instant::now();
    loop {
        match reports.recv_timeout(limit.saturating_sub(start.elapsed())) {
            Ok((rank, result)) => results[rank] = result,
            Err(RecvTimeoutError::Disconnected) => return results,
            Err(RecvTimeoutError::Timeout) => {
                let hung = results.iter().position(|result| matches!(result, Err(RankFailure::Hung)));
                if let Some(rank) = hung {
                    let message = format!("still ran after {limit:?}");
                    ranks[rank].abort(AbortCause::RankFailed { rank, message });
                }
                return results;
            }
        }
    }
}
