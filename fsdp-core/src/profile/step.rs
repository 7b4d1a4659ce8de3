//! A step of a single rank, from the report of a run, and what it becomes where several ranks share the machine.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::ProfileError;

/// What a piece of work takes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkTime {
    /// Seconds from its start to its end.
    pub wall_s: f64,
    /// Seconds of processors, all threads together.
    pub cpu_s: f64,
}

/// What a rank computes in a step, alone on a machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredStep {
    /// Parameters of the model.
    pub parameter_len: u64,
    /// Tokens of a micro-batch.
    pub num_tokens: u64,
    /// Compute threads of the rank.
    pub num_threads: u64,
    /// Processors of the machine.
    pub num_cores: u64,
    /// A micro-batch: forward, backward, and what the program does besides.
    pub pass: WorkTime,
    /// The optimizer's step.
    pub optimizer: WorkTime,
}

/// The parts of a report of the example `train` that count here.
#[derive(Deserialize)]
struct Report {
    config: ReportConfig,
    num_parameters: u64,
    tokens_per_step: u64,
    num_cores: u64,
    typical: ReportStep,
}

#[derive(Deserialize)]
struct ReportConfig {
    world_size: u64,
    threads_per_rank: u64,
    training: ReportTraining,
}

#[derive(Deserialize)]
struct ReportTraining {
    gradient_accumulation: u64,
}

#[derive(Deserialize)]
struct ReportStep {
    step: WorkTime,
    optimizer: WorkTime,
}

impl WorkTime {
    /// Seconds of it for each of `num_ranks` that do it at once, each with `num_threads` threads, on `num_cores` processors.
    ///
    /// [Note: A rank among others]
    /// It was measured with `measured_threads`, alone. What runs on one thread at a time follows from the two times: with s
    /// seconds of that, and p seconds of processors for what all threads share, T threads take s + p/T (Amdahl, 1967). And
    /// all ranks together cannot have more seconds of processors than there are.
    fn seconds(self, measured_threads: u64, num_cores: u64, num_ranks: u64, num_threads: u64) -> f64 {
        let [measured_threads, num_cores, num_ranks, num_threads] =
            [measured_threads, num_cores, num_ranks, num_threads].map(|count| count.max(1) as f64);
        let Self { wall_s, cpu_s } = self;
        let shared_s = if measured_threads > 1.0 {
            ((cpu_s - wall_s) / (1.0 - 1.0 / measured_threads)).clamp(0.0, cpu_s)
        } else {
            // One thread does not show what several could share.
            0.0
        };
        let alone_s = wall_s + shared_s * (1.0 / num_threads - 1.0 / measured_threads);
        alone_s.max(num_ranks * cpu_s / num_cores)
    }

    /// Whether anything can take that long.
    fn is_sound(self) -> bool {
        [self.wall_s, self.cpu_s].iter().all(|seconds| (0.0..=1e9).contains(seconds))
    }
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
        let Report { config, num_parameters, tokens_per_step, num_cores, typical } = report;
        if config.world_size != 1 {
            return Err(wrong(format!("it is of {} ranks, and one alone is needed", config.world_size)));
        }
        let micro_batches = config.training.gradient_accumulation.max(1);
        let of_pass = |step: f64, optimizer: f64| (step - optimizer) / micro_batches as f64;
        let ReportStep { step, optimizer } = typical;
        let measured = Self {
            parameter_len: num_parameters,
            num_tokens: tokens_per_step / micro_batches,
            num_threads: if config.threads_per_rank == 0 { num_cores } else { config.threads_per_rank },
            num_cores,
            pass: WorkTime {
                wall_s: of_pass(step.wall_s, optimizer.wall_s),
                cpu_s: of_pass(step.cpu_s, optimizer.cpu_s),
            },
            optimizer,
        };
        match measured.is_sound() {
            true => Ok(measured),
            false => Err(wrong(format!("its times make no sense: {measured:?}"))),
        }
    }

    /// Seconds of a micro-batch of as many tokens, and of the optimizer's step over all parameters, where `num_ranks` with
    /// `num_threads` compute threads each share the machine. See [Note: A rank among others].
    ///
    /// ```
    /// use fsdp_core::{MeasuredStep, WorkTime};
    ///
    /// // Two threads, which are busy for all of the pass, and for half of the optimizer's step.
    /// let (pass, optimizer) = (WorkTime { wall_s: 1.0, cpu_s: 2.0 }, WorkTime { wall_s: 0.2, cpu_s: 0.3 });
    /// let measured = MeasuredStep { parameter_len: 1, num_tokens: 1, num_threads: 2, num_cores: 2, pass, optimizer };
    /// let close = |(a, b): (f64, f64), (c, d): (f64, f64)| (a - c).abs() + (b - d).abs() < 1e-12;
    /// assert!(close(measured.among(1, 2), (1.0, 0.2)));
    /// assert!(close(measured.among(2, 1), (2.0, 0.3)));
    /// assert!(close(measured.among(4, 1), (4.0, 0.6)));
    /// ```
    pub fn among(&self, num_ranks: usize, num_threads: usize) -> (f64, f64) {
        let seconds =
            |work: WorkTime| work.seconds(self.num_threads, self.num_cores, num_ranks as u64, num_threads as u64);
        (seconds(self.pass), seconds(self.optimizer))
    }

    /// Whether a step can take that long.
    pub(super) fn is_sound(&self) -> bool {
        let counts = [self.num_tokens, self.num_threads, self.num_cores];
        counts.iter().all(|&count| count > 0)
            && self.pass.wall_s >= 1e-9
            && [self.pass, self.optimizer].into_iter().all(WorkTime::is_sound)
    }
}
