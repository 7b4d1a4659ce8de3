//! Starts the ranks of a run, and ends all of them when one fails.
//!
//! Ranks are threads of this process (`threads`), or this process is one of several that a launcher has started (`process`).
//! What both do with one rank is in `program`.

mod memory;
mod process;
mod program;
mod threads;

use std::sync::Arc;

use fsdp_core::{Config, Link, Started, Trace};

use crate::{Error, Rank};

/// Runs `program` on every rank, and returns the results of this process's ranks in rank order: of all where they are threads
/// of this process, each with its own share of the cores; of the one that it is where a launcher (`mpirun`, `torchrun`, `srun`)
/// has started several processes. Which of them it is, [`Config::started`] finds out.
///
/// When a rank returns an error, panics, or is lost, the others end at their next collective, and the error of the rank that
/// failed first is returned, by every process. A thread that does not end within the configured time limit after that is left
/// behind.
///
/// glibc's allocator is told to keep what is freed, for the rest of the process, unless the environment has a setting for it
/// (`MALLOC_..._`, `GLIBC_TUNABLES`) or state is on a disk: a sixth of a step in a small GPT, and no more memory at its peak.
///
/// Processes talk over MPI where `mpirun` has started them and the feature `mpi` is on, else over sockets. They prove to each
/// other that they belong together by a secret, `FSDP_SECRET`, which must be the same for all; over MPI it is made by rank 0.
///
/// # Errors
/// If the configuration is refused, the environment contradicts it or itself, the processes do not find each other, or a rank
/// fails.
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
    /// Collects what every rank of this process spends its time on.
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
    let started = config.started()?;
    let config = config.for_started(&started);
    config.validate()?;
    tracing::info!("{started}");
    memory::keep_freed(&config);
    match &started {
        Started::Threads => threads::launch(config, options, program),
        Started::Process(process) => process::launch(config, process, options, program),
    }
}
