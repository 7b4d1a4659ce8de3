//! What a launcher does with one rank, be it a thread or a process.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use fsdp_core::{AbortCause, Communicator, Config, FaultPlan, Faulty};

use super::LaunchOptions;
use crate::engine::EngineFailed;
use crate::random::random_seed;
use crate::{Error, RandomState, Rank, device};

/// A program with what its ranks are started with.
pub(super) struct Program<F> {
    config: Arc<Config>,
    options: LaunchOptions,
    seed: u64,
    num_threads: usize,
    run: F,
}

impl<F> Program<F> {
    /// `num_cores` are for all ranks of `config`.
    pub(super) fn new(config: Config, options: LaunchOptions, num_cores: usize, run: F) -> Self {
        let seed = config.seed.map_or_else(random_seed, |seed| seed as u64);
        let num_threads = config.compute_threads(num_cores);
        Self { config: Arc::new(config), options, seed, num_threads, run }
    }

    /// A rank that communicates by `communicator` and is the `local_rank`-th of its host, if that is known. Seeds its device.
    pub(super) fn rank(&self, communicator: Arc<dyn Communicator>, local_rank: Option<usize>) -> Result<Rank, Error> {
        let device = device::open(&self.config, local_rank)?;
        if let Some(seed) = self.config.seed {
            device.seed(seed as u64);
        }
        let linked: Arc<dyn Communicator> = match self.options.link {
            Some(link) => Arc::new(Faulty::new(communicator, FaultPlan { link: Some(link), ..FaultPlan::default() })),
            None => communicator,
        };
        Rank::new(self.config.clone(), device, linked, self.options.trace.clone())
    }

    /// Runs to its end, whatever that is.
    pub(super) fn run<T>(&self, rank: Rank) -> Result<T, Error>
    where
        T: Send,
        F: Fn(Rank) -> Result<T, Error> + Sync,
    {
        let number = rank.rank();
        let random = RandomState::new(self.seed, number as u64);
        let (streams, tier) = (rank.streams().clone(), rank.tier_place());
        let result = run_rank(number, self.num_threads, || {
            random.install();
            (self.run)(rank)
        });
        if result.is_ok() {
            streams.drain();
        }
        // A forward that has failed may leave parts of its graph behind, which hold on to it.
        if let Some(tier) = tier.get() {
            tier.close();
        }
        result
    }
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

/// Why the others end when `rank` has returned `error`.
pub(super) fn cause_of(rank: usize, error: &Error) -> AbortCause {
    match error {
        Error::RankPanicked { rank, message } => AbortCause::RankPanicked { rank: *rank, message: message.clone() },
        error => AbortCause::RankFailed { rank, message: error.to_string() },
    }
}
