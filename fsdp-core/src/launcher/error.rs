//! What is wrong with an environment that a launcher has set: which variable, its value, and the remedy.

use thiserror::Error;

use super::Launcher;

/// Why it is not known which rank this process is.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum LauncherError {
    /// A variable that must be a number is none.
    #[error(
        "{variable}={value:?} is not a number from 0. Unset it if it is none of a launcher's, or set \
         `launcher = \"threads\"` in the configuration"
    )]
    NotANumber {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
    },
    /// `MASTER_PORT` is no port.
    #[error("MASTER_PORT={value:?} is not a port. Set a number from 1 to 65535 that is free on the host of rank 0")]
    NotAPort {
        /// Its value.
        value: String,
    },
    /// One of two variables that belong together is missing.
    #[error(
        "{set} is set, but {missing} is not, so this is half of what {launcher} sets. Start with {launcher}, set both, or \
         unset it; `launcher = \"threads\"` in the configuration ignores it"
    )]
    Half {
        /// Whose variables they are.
        launcher: Launcher,
        /// What is there, `RANK=1`.
        set: String,
        /// What is not.
        missing: &'static str,
    },
    /// A rank beyond the world.
    #[error("{rank}, but {world_size}: ranks are counted from 0. Correct the variables, or let the launcher set them")]
    NoSuchRank {
        /// The rank, `RANK=4`.
        rank: String,
        /// The world size, `WORLD_SIZE=4`.
        world_size: String,
    },
    /// Two launchers tell different things.
    #[error(
        "{first} says {told}, but {second} says {second_told}. Unset the variables of one of them, or say which counts: \
         `launcher = \"{first}\"` in the configuration"
    )]
    Disagree {
        /// The one that is looked for first.
        first: Launcher,
        /// What it says.
        told: String,
        /// The other.
        second: Launcher,
        /// What that says.
        second_told: String,
    },
    /// Each of several processes is told that it is alone.
    #[error(
        "{inner} says {told}, but {outer} has started several processes ({outer_told}): each would train alone. Start with \
         one of the two only; under `srun`, with an MPI that knows SLURM: `srun --mpi=pmi2` or `--mpi=pmix`"
    )]
    Alone {
        /// The one that knows of one process.
        inner: Launcher,
        /// What it says.
        told: String,
        /// The one that has started several.
        outer: Launcher,
        /// What that says.
        outer_told: String,
    },
    /// The launcher has started another number of processes than the configuration says.
    #[error(
        "`world_size` is {configured}, but {launcher} says {told}. Start {configured} processes, or leave `world_size` out: \
         then the launcher decides"
    )]
    WorldSize {
        /// The configuration's.
        configured: usize,
        /// Who started the processes.
        launcher: Launcher,
        /// What it says, `WORLD_SIZE=4`.
        told: String,
    },
    /// The configured launcher has not started this process.
    #[error("`launcher` is \"{launcher}\", but its variables are not set. Start with {launcher}, or leave the key out")]
    NotThere {
        /// The one that is configured.
        launcher: Launcher,
    },
    /// It is not known where rank 0 can be reached.
    #[error(
        "{launcher} has started this process, but {missing} is not set, so rank 0 cannot be found. Set MASTER_ADDR to the host \
         of rank 0 and MASTER_PORT to a free port there, the same for all ranks"
    )]
    NoAddress {
        /// Who started the process.
        launcher: Launcher,
        /// The variable that would tell.
        missing: &'static str,
    },
}
