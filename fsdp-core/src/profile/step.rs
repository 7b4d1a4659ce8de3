//! A step of a single rank, from the report of a run.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::ProfileError;

/// What a rank computes in a step, alone.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredStep {
    /// Parameters of the model.
    pub parameter_len: u64,
    /// Tokens of a micro-batch.
    pub num_tokens: u64,
    /// Seconds of a micro-batch: forward, backward, and what the program does besides.
    pub pass_s: f64,
    /// Seconds of the optimizer's step.
    pub optimizer_s: f64,
}

/// The parts of a report of the example `train` that count here.
#[derive(Deserialize)]
struct Report {
    config: ReportConfig,
    num_parameters: u64,
    tokens_per_step: u64,
    step: ReportStep,
}

#[derive(Deserialize)]
struct ReportConfig {
    world_size: u64,
    training: ReportTraining,
}

#[derive(Deserialize)]
struct ReportTraining {
    gradient_accumulation: u64,
}

#[derive(Deserialize)]
struct ReportStep {
    computing_s: f64,
    optimizer_s: f64,
}

impl MeasuredStep {
    /// Reads the report of a run on one rank, as the example `train` writes it with `--report`.
    ///
    /// # Errors
    /// If the file cannot be read, is no report, or is of a run on several ranks.
    pub fn read_report(file: &Path) -> Result<Self, ProfileError> {
        let text = fs::read_to_string(file).map_err(|source| ProfileError::Io { file: file.to_owned(), source })?;
        let wrong = |message: String| ProfileError::Report { origin: file.display().to_string(), message };
        let report: Report = serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
        let Report { config, num_parameters, tokens_per_step, step } = report;
        if config.world_size != 1 {
            return Err(wrong(format!("it is of {} ranks, and one alone is needed", config.world_size)));
        }
        let micro_batches = config.training.gradient_accumulation.max(1);
        let measured = Self {
            parameter_len: num_parameters,
            num_tokens: tokens_per_step / micro_batches,
            pass_s: (step.computing_s - step.optimizer_s) / micro_batches as f64,
            optimizer_s: step.optimizer_s,
        };
        match measured.is_sound() {
            true => Ok(measured),
            false => Err(wrong(format!("its times make no sense: {measured:?}"))),
        }
    }

    /// Whether a step can take that long.
    pub(super) fn is_sound(&self) -> bool {
        let positive = |seconds: f64| (1e-9..=1e9).contains(&seconds);
        self.num_tokens > 0 && positive(self.pass_s) && (0.0..=1e9).contains(&self.optimizer_s)
    }
}
