//! What can go wrong in a sharded run, with the place and the remedy.

use std::fmt;
use std::path::PathBuf;

use fsdp_core::checkpoint::CheckpointError;
use fsdp_core::{CommError, ConfigError, DeviceChoice, LauncherError, PlanError, RendezvousError, TierError};

/// An error of a sharded run. `{:?}` writes its message too, since that is how a `main` that returns it prints it.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The configuration.
    #[error(transparent)]
    Config(Box<ConfigError>),
    /// The variables that a launcher has set.
    #[error(transparent)]
    Launcher(Box<LauncherError>),
    /// The processes of the run do not find each other.
    #[error(transparent)]
    Rendezvous(Box<RendezvousError>),
    /// The model does not fit the mesh.
    #[error(transparent)]
    Plan(Box<PlanError>),
    /// A collective failed.
    #[error(transparent)]
    Comm(Box<CommError>),
    /// A checkpoint could not be saved or loaded.
    #[error(transparent)]
    Checkpoint(Box<CheckpointError>),
    /// Offloaded state could not be written or read.
    #[error(transparent)]
    Tier(Box<TierError>),
    /// The device that the configuration names cannot be used.
    #[error("device = \"{device}\": {problem}; {remedy}")]
    Device {
        /// What the configuration says.
        device: DeviceChoice,
        /// What is missing.
        problem: String,
        /// What to do.
        remedy: &'static str,
    },
    /// A parameter that cannot be sharded.
    #[error("parameter `{parameter}`: {problem}; {remedy}")]
    Parameter {
        /// Path of the parameter.
        parameter: String,
        /// What is wrong.
        problem: String,
        /// What to do.
        remedy: &'static str,
    },
    /// An optimizer that must see whole tensors.
    #[error(
        "{optimizer} needs whole tensors, and `{parameter}` is split over {num_shards} ranks: updating it block by \
         block gives another result than updating it whole. Use an elementwise optimizer (SGD, Adam, AdamW, RMSProp, \
         Lion, ...) for it, keep it whole with #[shard(replicate)], or train at stage 0"
    )]
    WholeTensorOptimizer {
        /// The optimizer.
        optimizer: String,
        /// Path of a parameter it would step.
        parameter: String,
        /// Ranks that hold a block of it.
        num_shards: usize,
    },
    /// Burn's own clipping by norm.
    #[error(
        "the optimizer clips by the norm of each tensor (GradientClipping::Norm), which on blocks of a tensor is another \
         norm on each rank. Remove it and set `gradient_clip_norm = {threshold}` under [training]: one norm over all \
         parameters and ranks"
    )]
    NormClipping {
        /// The threshold that was set.
        threshold: f32,
    },
    /// The gradient norm is infinite or not a number, and the configuration says that is an error.
    #[error(
        "step {step}: the global gradient norm is {norm}. Weights and optimizer state are as before this step. Lower \
         the learning rate, look for overflow in the loss, or set `non_finite = \"skip\"` under [training]"
    )]
    NonFinite {
        /// The optimizer step.
        step: u64,
        /// The norm.
        norm: f64,
    },
    /// A call that does not fit the state of the model.
    #[error("{problem}; {remedy}")]
    Misuse {
        /// What was called, and when.
        problem: String,
        /// What to do.
        remedy: &'static str,
    },
    /// A rank panicked.
    #[error("rank {rank} panicked: {message}")]
    RankPanicked {
        /// The rank.
        rank: usize,
        /// The panic's message.
        message: String,
    },
    /// A rank returned an error.
    #[error("rank {rank}: {source}")]
    RankFailed {
        /// The rank.
        rank: usize,
        /// Its error.
        source: Box<Error>,
    },
    /// A rank neither returned nor failed within the time limit after another one had failed.
    #[error(
        "rank {rank} did not end within {waited_s} s after another rank had failed ({cause}); it is probably in an endless \
         loop or waits for something outside this run. It is left behind; end the process"
    )]
    RankStuck {
        /// The rank.
        rank: usize,
        /// Seconds waited for it.
        waited_s: f64,
        /// Why the others ended.
        cause: String,
    },
    /// The operating system refused something.
    #[error("{what}: {source}{}", remedy(source))]
    Io {
        /// What was attempted, with its file.
        what: String,
        /// The system's answer.
        source: std::io::Error,
    },
    /// An error of the program that was launched.
    #[error("{0}")]
    Program(Box<dyn std::error::Error + Send + Sync>),
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

// Boxed, so that a `Result` of this error stays small in every closure of the user's.
impl From<ConfigError> for Error {
    fn from(error: ConfigError) -> Self {
        Error::Config(Box::new(error))
    }
}

impl From<LauncherError> for Error {
    fn from(error: LauncherError) -> Self {
        Error::Launcher(Box::new(error))
    }
}

impl From<RendezvousError> for Error {
    fn from(error: RendezvousError) -> Self {
        Error::Rendezvous(Box::new(error))
    }
}

impl From<PlanError> for Error {
    fn from(error: PlanError) -> Self {
        Error::Plan(Box::new(error))
    }
}

impl From<CheckpointError> for Error {
    fn from(error: CheckpointError) -> Self {
        Error::Checkpoint(Box::new(error))
    }
}

impl From<TierError> for Error {
    fn from(error: TierError) -> Self {
        Error::Tier(Box::new(error))
    }
}

impl From<CommError> for Error {
    fn from(error: CommError) -> Self {
        Error::Comm(Box::new(error))
    }
}

impl Error {
    /// Wraps an error of the launched program, so that `?` ends the rank with it.
    ///
    /// ```
    /// use fsdp_burn::Error;
    ///
    /// let error = Error::program("the data set is empty");
    /// assert_eq!(error.to_string(), "the data set is empty");
    /// ```
    pub fn program(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Error::Program(error.into())
    }

    /// Whether this rank failed only because another one had.
    pub(crate) fn is_consequence(&self) -> bool {
        matches!(self, Error::Comm(error) if matches!(**error, CommError::Aborted { .. }))
    }

    /// An input or output error, with the file it happened on.
    pub fn io(what: &str, path: impl Into<PathBuf>, source: std::io::Error) -> Self {
        Error::Io { what: format!("{what} {}", path.into().display()), source }
    }
}

/// What to do about what the system refused, where that is clear.
fn remedy(error: &std::io::Error) -> &'static str {
    use std::io::ErrorKind;
    match error.kind() {
        ErrorKind::NotFound => "; check the path",
        ErrorKind::PermissionDenied => "; let this user write there, or name another path",
        ErrorKind::AlreadyExists => "; remove it, or name another path",
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => "; make room, or name another disk",
        // What a thread that cannot be started is refused with.
        ErrorKind::WouldBlock | ErrorKind::OutOfMemory => {
            "; run fewer ranks, or allow this user more threads and memory (`ulimit`)"
        }
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_system_refused_comes_with_what_to_do() {
        use std::io::ErrorKind;
        for (kind, remedy) in [
            (ErrorKind::NotFound, "check the path"),
            (ErrorKind::PermissionDenied, "name another path"),
            (ErrorKind::AlreadyExists, "remove it"),
            (ErrorKind::StorageFull, "make room"),
            (ErrorKind::WouldBlock, "run fewer ranks"),
        ] {
            let message = Error::io("cannot write", "runs/gpt", kind.into()).to_string();
            assert!(message.starts_with("cannot write runs/gpt: ") && message.contains(remedy), "{message}");
        }
    }

    #[test]
    fn a_main_that_returns_an_error_prints_its_message() {
        let error = Error::RankFailed { rank: 1, source: Box::new(Error::program("the data set is empty")) };
        assert_eq!(format!("Error: {error:?}"), "Error: rank 1: the data set is empty");
    }
}
