//! The options of the trainer, checked before anything is computed.

use std::path::{Path, PathBuf};

use clap::Parser;
use fsdp_burn::{Config, DeviceChoice, Error, Exchange, Stage, Translated};

use crate::{Failure, GptConfig, parse_bytes};

/// Trains a byte-level GPT on the ranks of a configuration: threads of this process, or processes of mpirun, torchrun or srun.
#[derive(Clone, Debug, Parser)]
#[command(name = "train", about, max_term_width = 100)]
pub struct Args {
    /// Configuration of the run, TOML or JSON [default: stage 3 on 4 ranks, as configs/zero3.toml]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// DeepSpeed configuration of the run, as it is, in place of --config; what it says of batch and learning rate holds
    /// in place of --batch and --lr
    #[arg(long, value_name = "FILE", conflicts_with = "config")]
    pub deepspeed: Option<PathBuf>,
    /// Stage, in place of the configuration's
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(0..=3))]
    pub stage: Option<u8>,
    /// Number of ranks, in place of the configuration's
    #[arg(long, value_name = "N")]
    pub ranks: Option<usize>,
    /// Compute threads of each rank, in place of the configuration's; 0 shares the cores evenly
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// What ranks compute on, in place of the configuration's: flex, cuda, cuda:0, cpu
    #[arg(long, value_name = "DEVICE", value_parser = device)]
    pub device: Option<DeviceChoice>,
    /// By which way ranks on devices exchange parameters and gradients: host, device, "device inline"
    #[arg(long, value_name = "WAY", value_parser = collectives)]
    pub collectives: Option<Exchange>,
    /// Text to learn [default: the documents and sources of this project]
    #[arg(long, value_name = "FILE")]
    pub data: Option<PathBuf>,
    /// Optimizer steps
    #[arg(long, value_name = "N", default_value_t = 500)]
    pub steps: usize,
    /// Sequences per rank and backward
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub batch: usize,
    /// Blocks of the model
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub layers: usize,
    /// Length of the vector of one position
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub width: usize,
    /// Attention heads; they divide the width
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub heads: usize,
    /// Bytes of context
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub sequence: usize,
    /// Rows of the token table, at least the 256 that bytes need
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub vocabulary: usize,
    /// Keep only the input of each block, and run it again in backward: more compute, less memory
    #[arg(long)]
    pub recompute: bool,
    /// Learning rate after warm-up; a cosine takes it down to a tenth
    #[arg(long, value_name = "RATE", default_value_t = 3e-3)]
    pub lr: f64,
    /// Seed of weights, batches and the sample
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Bytes of text to generate at the end
    #[arg(long, value_name = "N", default_value_t = 240)]
    pub sample: usize,
    /// How freely to generate: 0 takes the likeliest byte, 1 draws as the model says
    #[arg(long, value_name = "T", default_value_t = 0.7)]
    pub temperature: f64,
    /// Picture of the losses, an SVG [default: train-loss.svg in the system's folder for temporary files]
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
    /// Report of the run, for programs
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    /// Trace of what every rank spends its time on, for Perfetto or a browser's tracing page
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Steps in the trace, from the first
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub trace_steps: usize,
    /// Directory for checkpoints: the run is saved there every so many steps, at its end, and when it is interrupted
    #[arg(long, value_name = "DIR")]
    pub checkpoints: Option<PathBuf>,
    /// Steps between two checkpoints
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub save_every: usize,
    /// Checkpoints to keep, the newest; 0 keeps all
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub keep: usize,
    /// Save while training goes on, in place of waiting for the disk; costs a copy of the state in memory
    #[arg(long, requires = "checkpoints")]
    pub save_in_background: bool,
    /// Go on from the newest checkpoint, if there is one
    #[arg(long, requires = "checkpoints")]
    pub resume: bool,
    /// Memory that the process may have of its own, as 512MiB or 1.5GiB; a run that is predicted to need more is refused
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub memory_limit: Option<u64>,
    /// Print errors only
    #[arg(long)]
    pub quiet: bool,
}

impl Args {
    /// The options with what a DeepSpeed file says of batch and learning rate, and that file, translated.
    ///
    /// # Errors
    /// If the file is refused.
    pub fn with_deepspeed(&self) -> Result<(Self, Option<Translated>), Failure> {
        let Some(file) = &self.deepspeed else { return Ok((self.clone(), None)) };
        let translated = Config::load_deepspeed(file, self.ranks)?;
        let batch = translated.micro_batch_size.unwrap_or(self.batch);
        let lr = translated.learning_rate.unwrap_or(self.lr);
        Ok((Self { batch, lr, ..self.clone() }, Some(translated)))
    }

    /// The configuration, with what the other options override.
    ///
    /// # Errors
    /// If the file is refused, or an override does not fit it.
    pub fn resolve_config(&self) -> Result<Config, Failure> {
        let mut config = match (&self.config, &self.deepspeed) {
            (Some(file), _) => Config::load(file)?,
            (None, Some(file)) => Config::load_deepspeed(file, self.ranks)?.config,
            (None, None) => Config::from_toml(include_str!("configs/zero3.toml"), "the built-in zero3.toml")?,
        };
        if let Some(number) = self.stage {
            let stage = Stage::try_from(number);
            config.stage = stage.map_err(|error| Failure::Option { option: "--stage", problem: error.to_string() })?;
        }
        if let Some(threads) = self.threads {
            config.threads_per_rank = threads;
        }
        if let Some(ranks) = self.ranks {
            config.world_size = ranks;
        }
        if let Some(device) = self.device {
            config.device = device;
        }
        if let Some(collectives) = self.collectives {
            config.collectives = collectives;
        }
        config.validate()?;
        // As many ranks as a launcher has started, unless something else is asked for.
        let of_launcher = Config { world_size: 1, ..config.clone() };
        let is_asked = self.config.is_some() || self.deepspeed.is_some() || self.ranks.is_some();
        let started = if is_asked { config.started() } else { of_launcher.started() }.map_err(Error::from)?;
        Ok(config.for_started(&started))
    }

    /// The sizes of the model.
    ///
    /// # Errors
    /// If a size is 0, the heads do not divide the width, or the vocabulary cannot hold all bytes.
    pub fn model(&self) -> Result<GptConfig, Failure> {
        self.check()?;
        let Args { layers, width, heads, sequence, vocabulary, recompute, .. } = *self;
        Ok(GptConfig { layers, width, heads, sequence, vocabulary, recompute })
    }

    /// Where the picture goes.
    pub fn plot_path(&self) -> PathBuf {
        self.plot.clone().unwrap_or_else(|| std::env::temp_dir().join("train-loss.svg"))
    }

    /// The learning rate of a step: up in a line for a twentieth of the steps, then down along half a cosine.
    pub fn learning_rate(&self, step: usize) -> f64 {
        let warmup = self.steps.div_ceil(20);
        let lowest = 0.1 * self.lr;
        if step < warmup {
            return self.lr * (step + 1) as f64 / warmup as f64;
        }
        let progress = (step - warmup) as f64 / (self.steps - warmup).max(1) as f64;
        lowest + (self.lr - lowest) * 0.5 * (1.0 + (std::f64::consts::PI * progress).cos())
    }

    fn check(&self) -> Result<(), Failure> {
        let sizes = [
            ("--steps", self.steps),
            ("--batch", self.batch),
            ("--layers", self.layers),
            ("--width", self.width),
            ("--heads", self.heads),
            ("--sequence", self.sequence),
            ("--trace-steps", self.trace_steps),
            ("--save-every", self.save_every),
        ];
        let refuse = |option, problem: String| Err(Failure::Option { option, problem });
        if let Some((option, _)) = sizes.iter().find(|(_, size)| *size == 0) {
            return refuse(option, "it is 0, and must be at least 1".into());
        }
        if !self.width.is_multiple_of(self.heads) {
            return refuse("--heads", format!("{} heads do not divide a width of {}", self.heads, self.width));
        }
        if self.vocabulary < 256 {
            return refuse("--vocabulary", format!("bytes need 256 tokens, and {} are fewer", self.vocabulary));
        }
        if !(self.lr.is_finite() && self.lr > 0.0) {
            return refuse("--lr", format!("{} is not a positive number", self.lr));
        }
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            return refuse("--temperature", format!("{} is negative or not a number", self.temperature));
        }
        if self.plot_path().extension().is_none_or(|extension| extension != "svg") {
            return refuse("--plot", "the picture is an SVG; let the file's name end in .svg".into());
        }
        // A run that cannot be written down at its end should not start.
        for (option, file) in [("--plot", &self.plot), ("--report", &self.report), ("--trace", &self.trace)] {
            let folder = file.as_deref().and_then(Path::parent).filter(|folder| !folder.as_os_str().is_empty());
            if let Some(missing) = folder.filter(|folder| !folder.is_dir()) {
                return refuse(option, format!("there is no folder {}", missing.display()));
            }
        }
        Ok(())
    }
}

fn device(name: &str) -> Result<DeviceChoice, String> {
    DeviceChoice::named(name).ok_or_else(|| format!("devices are {}", DeviceChoice::NAMES.join(", ")))
}

fn collectives(name: &str) -> Result<Exchange, String> {
    let found = Exchange::ALL.iter().copied().find(|collectives| collectives.name() == name);
    found.ok_or_else(|| format!("ways are {}", Exchange::NAMES.join(", ")))
}
