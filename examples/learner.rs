//! Burn's own training loop, sharded: a convolution net learns to read digits.
//!
//!     cargo run --release --example learner
//!     cargo run --release --example learner -- --one-device
//!
//! Both print the same accuracy: the second is Burn alone, with the same pictures in each step.

use std::path::PathBuf;
use std::process::ExitCode;

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataset::InMemDataset;
use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig, PaddingConfig2d};
use burn::optim::AdamWConfig;
use burn::optim::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::tensor::{Device, Tensor, activation::relu};
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::{
    ClassificationOutput, InferenceStep, Learner, LearningResult, SupervisedTraining, TrainOutput, TrainStep,
};
use clap::Parser;
use fsdp_burn::{Config, Error, FsdpStrategy, Sharded, Stage};
use fsdp_examples::{DigitBatcher, Digits, EpochLines, SIDE, draw, in_steps};

const NUM_TRAIN: usize = 6000;
const NUM_VALID: usize = 1200;
const SEED: u64 = 1;

/// Trains a convolution net to read digits, under Burn's SupervisedTraining.
#[derive(Debug, Parser)]
#[command(name = "learner", about)]
struct Args {
    /// Burn alone, without ranks
    #[arg(long)]
    one_device: bool,
    /// Number of ranks, each a thread
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=6))]
    ranks: u8,
    /// What is sharded: 0 nothing to 3 everything
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u8).range(0..=3))]
    stage: u8,
    /// Pictures in each step, of all ranks together
    #[arg(long, value_name = "N", default_value_t = 60)]
    batch: usize,
    /// Rounds over all pictures
    #[arg(long, value_name = "N", default_value_t = 4)]
    epochs: usize,
    /// Save a checkpoint after each epoch here
    #[arg(long, value_name = "DIR")]
    checkpoints: Option<PathBuf>,
    /// Go on after this epoch, from a checkpoint of ranks or of one device
    #[arg(long, value_name = "EPOCH", requires = "checkpoints")]
    resume: Option<usize>,
}

#[derive(Module, Debug, Sharded)]
struct Reader {
    #[shard(units)] // each layer is gathered when it is used, and freed after
    convs: Vec<Conv2d>,
    #[shard(unit)]
    hidden: Linear,
    output: Linear,
}

impl Reader {
    fn new(device: &Device) -> Self {
        let conv = |from, to| {
            Conv2dConfig::new([from, to], [3, 3])
                .with_stride([2, 2])
                .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1))
        };
        let convs = [(1, 16), (16, 32)].map(|(from, to)| conv(from, to).init(device)).into();
        let hidden = LinearConfig::new(32 * SIDE / 4 * SIDE / 4, 64).init(device);
        Self { convs, hidden, output: LinearConfig::new(64, 10).init(device) }
    }

    fn read(&self, digits: Digits) -> ClassificationOutput {
        let pictures = self.convs.iter().fold(digits.pictures, |x, conv| relu(conv.forward(x)));
        let features: Tensor<2> = pictures.flatten(1, 3);
        let logits = self.output.forward(relu(self.hidden.forward(features)));
        let loss = CrossEntropyLossConfig::new().init(&logits.device());
        ClassificationOutput::new(loss.forward(logits.clone(), digits.classes.clone()), logits, digits.classes)
    }
}

impl TrainStep for Reader {
    type Input = Digits;
    type Output = ClassificationOutput;

    fn step(&self, digits: Digits) -> TrainOutput<ClassificationOutput> {
        let output = self.read(digits);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Reader {
    type Input = Digits;
    type Output = ClassificationOutput;

    fn step(&self, digits: Digits) -> ClassificationOutput {
        self.read(digits)
    }
}

/// Trains, and returns the share of the validation's digits that the trained model reads right.
fn run(args: &Args) -> Result<f64, Error> {
    let config =
        Config { stage: Stage::ALL[usize::from(args.stage)], world_size: args.ranks.into(), ..Config::default() };
    let per_rank = args.batch / config.world_size;
    let loader = |first: usize, len: usize| {
        let digits: Vec<_> = (first..first + len).map(|index| draw(SEED, index)).collect();
        // A rank has a batch of its own; one device has the batches of all ranks in one.
        let (digits, batch_size) = match args.one_device {
            true => (in_steps(digits, config.world_size, per_rank), per_rank * config.world_size),
            false => (digits, per_rank),
        };
        DataLoaderBuilder::new(DigitBatcher).batch_size(batch_size).build(InMemDataset::new(digits))
    };
    let folder = args.checkpoints.clone().unwrap_or_else(std::env::temp_dir);
    let mut training = SupervisedTraining::new(folder, loader(0, NUM_TRAIN), loader(NUM_TRAIN, NUM_VALID))
        .metrics((LossMetric::new(), AccuracyMetric::new()))
        .with_metric_logger(burn::train::logger::InMemoryMetricLogger::default())
        .with_application_logger(None)
        .renderer(Box::new(EpochLines::default()))
        .num_epochs(args.epochs);
    if args.checkpoints.is_some() {
        training = training.with_default_checkpointers();
    }
    if let Some(epoch) = args.resume {
        training = training.checkpoint(epoch);
    }

    let device = Device::flex().autodiff().gradient_checkpointing();
    device.seed(SEED);
    let model = Reader::new(&device);
    let optimizer = AdamWConfig::new().init();
    let num_steps = args.epochs * NUM_TRAIN / args.batch;
    let rate = LinearLrSchedulerConfig::new(5e-3, 1e-4, num_steps).init().map_err(Error::program)?;

    let result: LearningResult<Reader> = match args.one_device {
        true => training.launch(Learner::new(model, optimizer, rate)),
        false => FsdpStrategy::new(&config).launch(training, model, optimizer, rate)?, // the line that is different
    };
    if let Some(error) = result.error {
        return Err(Error::program(error.to_string()));
    }
    let accuracy = accuracy(&result.model);
    println!("reads {:.2}% of {NUM_VALID} digits it has not seen", 100.0 * accuracy);
    Ok(accuracy)
}

/// Of the whole model, on one device.
fn accuracy(model: &Reader) -> f64 {
    use burn::data::dataloader::batcher::Batcher;
    let digits = (NUM_TRAIN..NUM_TRAIN + NUM_VALID).map(|index| draw(SEED, index)).collect();
    let digits = DigitBatcher.batch(digits, &Device::flex());
    let output = model.read(digits);
    let right = output.output.argmax(1).squeeze_dim::<1>(1).equal(output.targets).int().sum();
    f64::from(right.into_scalar::<i32>()) / NUM_VALID as f64
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The random state of a device belongs to the process, so runs take turns.
    fn accuracy_of(more: &[&str]) -> f64 {
        static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());
        let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let options = ["learner", "--epochs=2"].into_iter().chain(more.iter().copied());
        run(&Args::try_parse_from(options).unwrap()).unwrap()
    }

    #[test]
    fn ranks_read_as_well_as_one_device_at_every_stage() {
        let plain = accuracy_of(&["--one-device"]);
        assert!(plain > 0.9, "one device reads {plain}");
        for stage in ["--stage=0", "--stage=1", "--stage=2", "--stage=3"] {
            assert_eq!(accuracy_of(&[stage]), plain, "{stage}");
        }
        assert_eq!(accuracy_of(&["--ranks=3"]), accuracy_of(&["--ranks=3", "--one-device"]));
    }

    #[test]
    fn a_checkpoint_of_ranks_goes_on_on_one_device() {
        let folder = std::env::temp_dir().join(format!("fsdp-examples-learner-{}", std::process::id()));
        let checkpoints = format!("--checkpoints={}", folder.display());
        accuracy_of(&[&checkpoints]);
        let on = [&checkpoints, "--resume=1"];
        assert_eq!(accuracy_of(&[on[0], on[1], "--one-device"]), accuracy_of(&on));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
