//! What a run has done, as data: printed as tables, and written as JSON.

use std::path::Path;

use fsdp_burn::{Activations, Config, EngineStats, MemoryEstimate, TierStats};
use serde::{Deserialize, Serialize};

use crate::{Failure, GptConfig, TypicalStep};

/// A run. README.md describes the file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Every key of the configuration, by its name in the file.
    pub config: serde_json::Value,
    /// Sizes of the model.
    pub model: GptConfig,
    /// Parameters of the model.
    pub num_parameters: usize,
    /// The text.
    pub data: String,
    /// Seed of weights, batches and the sample.
    pub seed: u64,
    /// Tokens of all ranks in one optimizer step.
    pub tokens_per_step: usize,
    /// By step, the mean over all ranks.
    pub losses: Vec<f64>,
    /// Of all ranks, over all steps.
    pub tokens_per_second: f64,
    /// By rank.
    pub ranks: Vec<RankRow>,
    /// All ranks together, since they are threads of one process.
    pub process: ProcessMemory,
    /// Where a step's time went.
    pub step: StepMeans,
    /// Processors that the ranks could run on.
    pub num_cores: usize,
    /// What a step of rank 0 took, as a rule; `fsdp bench --report` takes it from here.
    pub typical: TypicalStep,
    /// Where the time went.
    pub wall: WallTimes,
    /// Generated text; bytes that are no UTF-8 are replaced.
    pub sample: String,
}

/// One rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankRow {
    /// Its number.
    pub rank: usize,
    /// Parameters it stores between steps.
    pub num_local_parameters: usize,
    /// Memory, before the run.
    pub predicted: Predicted,
    /// Memory, in the run.
    pub measured: Measured,
    /// Bytes it sent to other ranks.
    pub sent_bytes: u64,
    /// Collectives it took part in.
    pub num_collectives: u64,
    /// Seconds of the training loop in which it computed.
    pub computing_s: f64,
    /// Seconds of `computing_s` that the optimizer took.
    pub optimizer_s: f64,
    /// Seconds of the training loop in which it stood still for communication.
    pub waiting_s: f64,
    /// Seconds in which its communication threads were busy, most of them beside the computation; several may be at once.
    pub communication_s: f64,
    /// Seconds of `waiting_s` in which the model stood still for its parameters, gradients or optimizer state. The rest is
    /// the mean of the losses.
    pub exposed_s: f64,
    /// Share of the communication that was hidden behind computation, 0 to 1; `None` without communication.
    pub overlap: Option<f64>,
    /// What it has moved to and from its disk; `None` where nothing is offloaded to one.
    pub disk: Option<DiskRow>,
}

/// A rank's disk.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct DiskRow {
    /// Bytes that lie there.
    pub held_bytes: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Bytes per second, both ways, while anything was under way.
    pub bytes_per_s: f64,
    /// Seconds of the training loop in which the rank stood still for it; a part of `exposed_s`.
    pub waiting_s: f64,
}

impl DiskRow {
    /// From what the tier counted and how long the model stood still.
    pub fn new(tier: &TierStats, waiting_s: f64) -> Self {
        Self {
            held_bytes: tier.file_bytes,
            read_bytes: tier.read_bytes,
            written_bytes: tier.written_bytes,
            bytes_per_s: tier.bandwidth().unwrap_or(0.0),
            waiting_s,
        }
    }
}

/// Predicted memory of a rank, in bytes: its part of the process, whose ranks share what they hold alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Predicted {
    /// Parameters between their uses.
    pub parameter_bytes: u64,
    /// Gradients.
    pub gradient_bytes: u64,
    /// Gathered units, held at once.
    pub gathered_bytes: u64,
    /// Optimizer state.
    pub optimizer_bytes: u64,
    /// Whole gradients that are being reduced.
    pub in_flight_bytes: u64,
    /// What lies on a disk and passes through memory in a step.
    pub tier_bytes: u64,
    /// What is held up to the backward of the last unit.
    pub activation_bytes: u64,
    /// The most at once, which is less than the sum.
    pub peak_bytes: u64,
}

/// Measured peaks of a rank, in bytes; each on its own, not at one moment, and with what it shares with other ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Measured {
    /// Parameters between their uses.
    pub parameter_bytes: u64,
    /// Gradients, before and after their reduction.
    pub gradient_bytes: u64,
    /// Gathered units.
    pub gathered_bytes: u64,
}

/// Peak memory of the process, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessMemory {
    /// The peaks of all ranks together, and the text.
    pub predicted_bytes: u64,
    /// What the allocator counted during training, the text included; `None` where it does not count.
    pub measured_bytes: Option<u64>,
    /// The largest resident set of the process up to the end of training, as the system counts it: with the program itself,
    /// and what the allocator keeps. `None` where the system does not tell.
    pub resident_bytes: Option<u64>,
}

/// An optimizer step: seconds, means over ranks and steps.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepMeans {
    /// A rank computes.
    pub computing_s: f64,
    /// Of that, the optimizer's step.
    pub optimizer_s: f64,
    /// The model stands still for parameters or gradients.
    pub exposed_s: f64,
    /// A rank waits for the losses of the others.
    pub loss_s: f64,
    /// Communication threads are busy.
    pub communication_s: f64,
    /// Share of the communication that is hidden behind computation, 0 to 1; `None` without communication.
    pub overlap: Option<f64>,
}

/// Seconds of rank 0.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct WallTimes {
    /// From the start of the ranks to the sharded model.
    pub setup_s: f64,
    /// The training loop.
    pub training_s: f64,
    /// Generating text.
    pub sampling_s: f64,
}

impl From<&MemoryEstimate> for Predicted {
    fn from(estimate: &MemoryEstimate) -> Self {
        Self {
            parameter_bytes: estimate.parameter_bytes,
            gradient_bytes: estimate.gradient_bytes,
            gathered_bytes: estimate.gathered_bytes,
            optimizer_bytes: estimate.optimizer_bytes,
            in_flight_bytes: estimate.in_flight_bytes,
            tier_bytes: estimate.tier_bytes,
            activation_bytes: estimate.activation_bytes.unwrap_or(0),
            peak_bytes: estimate.peak_bytes().unwrap_or(0),
        }
    }
}

impl From<&EngineStats> for Measured {
    fn from(stats: &EngineStats) -> Self {
        Self {
            parameter_bytes: stats.peak_parameter_bytes as u64,
            gradient_bytes: stats.peak_gradient_bytes as u64,
            gathered_bytes: stats.peak_gathered_bytes as u64,
        }
    }
}

/// What the process takes beside tensors and text: thread pools, the model's structure, the plan.
const PROCESS_BYTES: u64 = 300_000;

/// Processors that ranks can run on.
pub fn num_cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

impl StepMeans {
    /// From the sums of all ranks over `num_steps` steps.
    pub fn new(ranks: &[RankRow], num_steps: usize) -> Self {
        let mean = |of: fn(&RankRow) -> f64| ranks.iter().map(of).sum::<f64>() / (ranks.len() * num_steps) as f64;
        let overlaps: Vec<f64> = ranks.iter().filter_map(|row| row.overlap).collect();
        Self {
            computing_s: mean(|row| row.computing_s),
            optimizer_s: mean(|row| row.optimizer_s),
            exposed_s: mean(|row| row.exposed_s),
            loss_s: mean(|row| row.waiting_s - row.exposed_s),
            communication_s: mean(|row| row.communication_s),
            overlap: (!overlaps.is_empty()).then(|| overlaps.iter().sum::<f64>() / overlaps.len() as f64),
        }
    }
}

impl ProcessMemory {
    /// From the predictions of all ranks, the size of the text, and what the allocator and the system counted.
    ///
    /// What a rank holds only for a moment is not held by those that wait for a processor, and of those that run it happens to
    /// coincide in some: one has it, of the others half.
    pub fn new(
        ranks: &[RankRow],
        activations: Activations,
        text_bytes: u64,
        measured_bytes: Option<u64>,
        resident_bytes: Option<u64>,
    ) -> Self {
        let peaks: u64 = ranks.iter().map(|row| row.predicted.peak_bytes).sum();
        let num_running = ranks.len().min(num_cores());
        let num_without = (ranks.len() - num_running) as f64 + 0.5 * num_running.saturating_sub(1) as f64;
        let apart_bytes = (num_without * activations.transient_bytes as f64) as u64;
        let predicted_bytes = (peaks + text_bytes + PROCESS_BYTES).saturating_sub(apart_bytes);
        Self { predicted_bytes, measured_bytes, resident_bytes }
    }
}

impl Report {
    /// The configuration as the report holds it.
    ///
    /// # Panics
    /// If a printed configuration is not TOML.
    pub fn config_value(config: &Config) -> serde_json::Value {
        toml::from_str(&config.to_toml()).expect("a printed configuration reads back")
    }

    /// Writes the report as JSON.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write(&self, file: &Path) -> Result<(), Failure> {
        let text = serde_json::to_string_pretty(self).map_err(|error| Failure::write(file, error))?;
        std::fs::write(file, text + "\n").map_err(|error| Failure::write(file, error))
    }
}
