//! Why an example ends early, and with which exit code.

use std::path::PathBuf;
use std::process::ExitCode;

/// An error of an example, told in one line.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The configuration is refused.
    #[error(transparent)]
    Config(Box<fsdp_burn::ConfigError>),
    /// Options that do not fit together, or a value that makes no sense.
    #[error("{option}: {problem}")]
    Option {
        /// The option, as typed.
        option: &'static str,
        /// What is wrong with its value, and what would be right.
        problem: String,
    },
    /// The text cannot be read.
    #[error("cannot read the text {}: {source}; pass the path of a file to --data", file.display())]
    Data {
        /// The file.
        file: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// The text does not fill one sequence.
    #[error(
        "{origin} has {got} bytes, and a sequence of {sequence} needs {}; pass a longer text or a smaller --sequence",
        sequence + 1
    )]
    ShortText {
        /// The file, or what the text is called.
        origin: String,
        /// Its length in bytes.
        got: usize,
        /// Length of a sequence, in bytes.
        sequence: usize,
    },
    /// The run itself.
    #[error(transparent)]
    Run(Box<fsdp_burn::Error>),
    /// A result cannot be written.
    #[error("cannot write {}: {problem}", file.display())]
    Write {
        /// The file.
        file: PathBuf,
        /// What the system or the drawing library says.
        problem: String,
    },
}

impl Failure {
    /// 1 for a run that failed, 2 for a mistake in what was asked for.
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Failure::Run(_) | Failure::Write { .. } => ExitCode::from(1),
            Failure::Config(_) | Failure::Option { .. } | Failure::Data { .. } | Failure::ShortText { .. } => {
                ExitCode::from(2)
            }
        }
    }

    /// A result that cannot be written.
    pub fn write(file: impl Into<PathBuf>, problem: impl ToString) -> Self {
        Failure::Write { file: file.into(), problem: problem.to_string() }
    }
}

// Boxed, so that a result without an error stays small.
impl From<fsdp_burn::ConfigError> for Failure {
    fn from(error: fsdp_burn::ConfigError) -> Self {
        Failure::Config(Box::new(error))
    }
}

impl From<fsdp_burn::Error> for Failure {
    fn from(error: fsdp_burn::Error) -> Self {
        Failure::Run(Box::new(error))
    }
}
