//! A classifier under Burn's learner: its data, what its metrics have seen, and one device to compare with.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder, DataLoaderIterator, Progress};
use burn::data::dataset::{DatasetError, InMemDataset};
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{BatchNorm as BurnBatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::tensor::activation::tanh;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn::train::logger::{EvaluationProgressLogger, InMemoryMetricLogger, MetricLogger, TrainingProgressLogger};
use burn::train::metric::store::{EpochSummary, MetricsUpdate, Split};
use burn::train::metric::{AccuracyMetric, LearningRateMetric, LossMetric, MetricDefinition, MetricId, NumericEntry};
use burn::train::renderer::{
    EvaluationName, MetricState, MetricsRenderer, MetricsRendererEvaluation, MetricsRendererTraining,
};
use burn::train::{
    ClassificationOutput, InferenceStep, Learner, LearnerModel, SupervisedTraining, TrainOutput, TrainStep,
};
use fsdp_burn::nn::BatchNorm;
use fsdp_burn::{Config, Error, FsdpStrategy, Sharded, cast_input, cast_output, scale_loss};

use super::run::{Optimizer, SEED, Weights, plain_weights, seeded};

const WIDTH: usize = 7;
const NUM_CLASSES: usize = 3;

/// One sample: what is seen, and its class.
pub(crate) type Item = (Vec<f32>, i64);

/// Samples that a small network can learn.
pub(crate) fn items(range: std::ops::Range<usize>) -> Vec<Item> {
    let item = |index: usize| {
        let x: Vec<f32> = (0..WIDTH).map(|column| (index as f32 * 1.7 + column as f32 * 2.9).sin()).collect();
        let class = if x[0] > 0.5 { 0 } else { 1 + i64::from(x[1] + x[2] > 0.0) };
        (x, class)
    };
    range.map(item).collect()
}

/// Makes a batch of samples.
#[derive(Clone)]
pub(crate) struct Stack;

#[derive(Clone, Debug)]
pub(crate) struct Samples {
    pub(crate) x: Tensor<2>,
    pub(crate) classes: Tensor<1, Int>,
}

impl Batcher<Item, Samples> for Stack {
    fn batch(&self, items: Vec<Item>, device: &Device) -> Samples {
        let (xs, classes): (Vec<_>, Vec<_>) = items.into_iter().unzip();
        let (len, xs) = (xs.len(), xs.concat());
        let x = Tensor::from_data(TensorData::new(xs, [len, WIDTH]), device);
        Samples { x, classes: Tensor::from_data(TensorData::new(classes, [len]), device) }
    }
}

/// What the trials of the learner train.
pub(crate) trait Classify: LearnerModel + Sharded {
    fn build(device: &Device) -> Self;
}

#[derive(Module, Debug, Sharded)]
pub(crate) struct Classifier {
    #[shard(units)]
    hidden: Vec<Linear>,
    #[shard(unit)]
    output: Linear,
}

impl Classifier {
    pub(crate) fn classify(&self, samples: Samples) -> ClassificationOutput {
        let x = cast_input(&self.hidden[0].weight, samples.x);
        let x = self.hidden.iter().fold(x, |x, layer| tanh(layer.forward(x)));
        let logits = cast_output(&self.output.weight, self.output.forward(x));
        let loss =
            CrossEntropyLossConfig::new().init(&logits.device()).forward(logits.clone(), samples.classes.clone());
        ClassificationOutput::new(loss, logits, samples.classes)
    }
}

impl Classifier {
    pub(crate) fn hidden_shape(&self) -> [usize; 2] {
        self.hidden[0].weight.dims()
    }
}

impl Classify for Classifier {
    fn build(device: &Device) -> Self {
        let hidden = (0..3).map(|_| LinearConfig::new(WIDTH, WIDTH).init(device)).collect();
        Self { hidden, output: LinearConfig::new(WIDTH, NUM_CLASSES).init(device) }
    }
}

impl TrainStep for Classifier {
    type Input = Samples;
    type Output = ClassificationOutput;

    fn step(&self, samples: Samples) -> TrainOutput<ClassificationOutput> {
        let output = self.classify(samples);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Classifier {
    type Input = Samples;
    type Output = ClassificationOutput;

    fn step(&self, samples: Samples) -> ClassificationOutput {
        self.classify(samples)
    }
}

/// [`Classifier`] whose loss may be scaled.
#[derive(Module, Debug, Sharded)]
pub(crate) struct HalfClassifier {
    #[shard(nested)]
    inner: Classifier,
}

impl Classify for HalfClassifier {
    fn build(device: &Device) -> Self {
        Self { inner: Classifier::build(device) }
    }
}

impl TrainStep for HalfClassifier {
    type Input = Samples;
    type Output = ClassificationOutput;

    fn step(&self, samples: Samples) -> TrainOutput<ClassificationOutput> {
        let output = self.inner.classify(samples);
        TrainOutput::new(self, scale_loss(output.loss.clone()).backward(), output)
    }
}

impl InferenceStep for HalfClassifier {
    type Input = Samples;
    type Output = ClassificationOutput;

    fn step(&self, samples: Samples) -> ClassificationOutput {
        self.inner.classify(samples)
    }
}

/// Gives a [`Classifier`] behind a batch normalisation.
macro_rules! normed {
    ($($(#[$doc:meta])* $name:ident: $norm:ty;)+) => {$(
        $(#[$doc])*
        #[derive(Module, Debug, Sharded)]
        pub(crate) struct $name {
            norm: $norm,
            #[shard(nested)]
            inner: Classifier,
        }

        impl Classify for $name {
            fn build(device: &Device) -> Self {
                Self { norm: BatchNormConfig::new(WIDTH).init(device).into(), inner: Classifier::build(device) }
            }
        }

        impl $name {
            fn classify(&self, samples: Samples) -> ClassificationOutput {
                self.inner.classify(Samples { x: self.norm.forward(samples.x), ..samples })
            }
        }

        impl TrainStep for $name {
            type Input = Samples;
            type Output = ClassificationOutput;

            fn step(&self, samples: Samples) -> TrainOutput<ClassificationOutput> {
                let output = self.classify(samples);
                TrainOutput::new(self, output.loss.backward(), output)
            }
        }

        impl InferenceStep for $name {
            type Input = Samples;
            type Output = ClassificationOutput;

            fn step(&self, samples: Samples) -> ClassificationOutput {
                self.classify(samples)
            }
        }
    )+};
}
normed! {
    /// Over the batches of all ranks.
    NormedClassifier: BatchNorm;
    /// Each rank over its own batches.
    BurnNormedClassifier: BurnBatchNorm;
}

/// A training: data, sizes, and where its checkpoints are.
#[derive(Clone)]
pub(crate) struct Lesson {
    pub(crate) train: Vec<Item>,
    pub(crate) valid: Vec<Item>,
    /// Samples of a rank's batch.
    pub(crate) batch_size: usize,
    pub(crate) num_epochs: usize,
    /// Where checkpoints are saved, if they are, and the epoch to go on after.
    pub(crate) folder: Option<PathBuf>,
    pub(crate) resume_after: Option<usize>,
}

impl Lesson {
    pub(crate) fn new(num_train: usize, num_valid: usize, batch_size: usize, num_epochs: usize) -> Self {
        let (train, valid) = (items(0..num_train), items(1000..1000 + num_valid));
        Self { train, valid, batch_size, num_epochs, folder: None, resume_after: None }
    }
}

/// What metrics have seen, and what was learned.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Lessons {
    /// By batch of a rank, in order.
    pub(crate) losses: Vec<f64>,
    pub(crate) valid_losses: Vec<f64>,
    pub(crate) rates: Vec<f64>,
    /// By epoch.
    pub(crate) accuracies: Vec<f64>,
    pub(crate) weights: Weights,
}

type Loader = Arc<dyn DataLoader<Samples>>;

/// Trains on the ranks of `config`.
pub(crate) fn on_ranks<M>(config: &Config, lesson: &Lesson) -> Result<Lessons, Error>
where
    M: Classify + TrainStep<Input = Samples, Output = ClassificationOutput>,
    M: InferenceStep<Input = Samples, Output = ClassificationOutput>,
{
    let loader = |items: &[Item]| {
        DataLoaderBuilder::new(Stack).batch_size(lesson.batch_size).build(InMemDataset::new(items.to_vec()))
    };
    let (training, log) = training::<M>(lesson, loader(&lesson.train), loader(&lesson.valid));
    let result = FsdpStrategy::new(config).launch(training, build::<M>(), Optimizer::AdamW.build(), scheduler())?;
    Ok(log.lessons(plain_weights(&result.model)))
}

/// Trains with Burn alone, on one device: each batch is the batches of `num_ranks` ranks in one.
pub(crate) fn on_one_device<M>(num_ranks: usize, lesson: &Lesson) -> Lessons
where
    M: Classify + TrainStep<Input = Samples, Output = ClassificationOutput>,
    M: InferenceStep<Input = Samples, Output = ClassificationOutput>,
{
    let loader = |items: &[Item]| Unions::loader(items, num_ranks, lesson.batch_size);
    let (training, log) = training::<M>(lesson, loader(&lesson.train), loader(&lesson.valid));
    let result = training.launch(Learner::new(build::<M>(), Optimizer::AdamW.build(), scheduler()));
    log.lessons(plain_weights(&result.model))
}

/// A training with its metrics, and what they will have seen.
pub(crate) fn training<M>(lesson: &Lesson, train: Loader, valid: Loader) -> (SupervisedTraining<M>, Log)
where
    M: TrainStep<Input = Samples, Output = ClassificationOutput>,
    M: InferenceStep<Input = Samples, Output = ClassificationOutput> + LearnerModel,
{
    let log = Log::default();
    let folder = lesson.folder.clone().unwrap_or_else(std::env::temp_dir);
    let mut training = SupervisedTraining::<M>::new(folder, train, valid)
        .metrics((LossMetric::new(), AccuracyMetric::new()))
        .metric_train_numeric(LearningRateMetric::new())
        .with_metric_logger(log.clone())
        .with_application_logger(None)
        .renderer(Box::new(Silent))
        .num_epochs(lesson.num_epochs);
    if lesson.folder.is_some() {
        training = training.with_default_checkpointers();
    }
    if let Some(epoch) = lesson.resume_after {
        training = training.checkpoint(epoch);
    }
    (training, log)
}

/// The model at its start, with all values drawn in one order.
pub(crate) fn build<M: Classify>() -> M {
    let device = Device::flex().autodiff().gradient_checkpointing();
    let _turn = seeded(&device, SEED);
    let model = M::build(&device);
    plain_weights(&model);
    model
}

/// A rate that changes with every step.
pub(crate) fn scheduler() -> ModuleLrScheduler {
    LinearLrSchedulerConfig::new(0.02, 0.005, 30).init().unwrap()
}

/// Batches that are the batches of several ranks in one: of consecutive parts of the data.
struct Unions {
    batches: Arc<Vec<Vec<Item>>>,
    device: Device,
}

impl Unions {
    fn loader(items: &[Item], num_ranks: usize, batch_size: usize) -> Loader {
        let part = |rank: usize| &items[rank * items.len() / num_ranks..(rank + 1) * items.len() / num_ranks];
        let parts: Vec<Vec<&[Item]>> = (0..num_ranks).map(|rank| part(rank).chunks(batch_size).collect()).collect();
        let rounds = parts.iter().map(Vec::len).max().unwrap_or(0);
        let union =
            |round: usize| parts.iter().filter_map(|part| part.get(round)).copied().flatten().cloned().collect();
        Arc::new(Self { batches: Arc::new((0..rounds).map(union).collect()), device: Device::flex() })
    }
}

impl DataLoader<Samples> for Unions {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<Samples> + 'a> {
        Box::new(UnionsIterator { unions: self, next: 0 })
    }

    fn num_items(&self) -> usize {
        self.batches.iter().map(Vec::len).sum()
    }

    fn to_device(&self, device: &Device) -> Loader {
        Arc::new(Self { batches: self.batches.clone(), device: device.clone() })
    }

    fn slice(&self, _: usize, _: usize) -> Loader {
        unreachable!("one device has all of the data")
    }
}

struct UnionsIterator<'a> {
    unions: &'a Unions,
    next: usize,
}

impl Iterator for UnionsIterator<'_> {
    type Item = Result<Samples, DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        let batch = self.unions.batches.get(self.next)?.clone();
        self.next += 1;
        Some(Ok(Stack.batch(batch, &self.unions.device)))
    }
}

impl DataLoaderIterator<Samples> for UnionsIterator<'_> {
    fn progress(&self) -> Progress {
        let len = |batches: &[Vec<Item>]| batches.iter().map(Vec::len).sum();
        Progress::new(len(&self.unions.batches[..self.next]), len(&self.unions.batches), None)
    }
}

/// Keeps all metrics.
#[derive(Clone, Default)]
pub(crate) struct Log {
    inner: Arc<Mutex<LogInner>>,
}

#[derive(Default)]
struct LogInner {
    names: Vec<(MetricId, String)>,
    entries: Vec<(String, Split, NumericEntry)>,
    /// What the learner asks for metrics again.
    memory: InMemoryMetricLogger,
}

impl Log {
    pub(crate) fn lessons(&self, weights: Weights) -> Lessons {
        let inner = self.inner.lock().unwrap();
        let values = |name: &str, split: &Split, is_final: bool| {
            let entries = inner.entries.iter().filter(|(other, of, entry)| {
                other == name && of == split && matches!(entry, NumericEntry::Final(_)) == is_final
            });
            entries.map(|(_, _, entry)| entry.current()).collect()
        };
        Lessons {
            losses: values("Loss", &Split::Train, false),
            valid_losses: values("Loss", &Split::Valid, false),
            rates: values("Learning Rate", &Split::Train, false),
            accuracies: values("Accuracy", &Split::Valid, true),
            weights,
        }
    }
}

impl MetricLogger for Log {
    fn log(&mut self, update: MetricsUpdate, epoch: usize, split: &Split) {
        let mut inner = self.inner.lock().unwrap();
        for metric in &update.entries_numeric {
            let name = inner.names.iter().find(|(id, _)| *id == metric.entry.metric_id).unwrap().1.clone();
            if let Some(entry) = &metric.numeric_entry {
                inner.entries.push((name, split.clone(), entry.clone()));
            }
        }
        inner.memory.log(update, epoch, split);
    }

    fn read_numeric(&mut self, name: &str, epoch: usize, split: &Split) -> Result<Vec<NumericEntry>, String> {
        self.inner.lock().unwrap().memory.read_numeric(name, epoch, split)
    }

    fn log_metric_definition(&mut self, definition: MetricDefinition) {
        let mut inner = self.inner.lock().unwrap();
        inner.names.push((definition.metric_id.clone(), definition.name.to_string()));
        inner.memory.log_metric_definition(definition);
    }

    fn log_epoch_summary(&mut self, summary: EpochSummary) {
        self.inner.lock().unwrap().memory.log_epoch_summary(summary);
    }
}

/// A dashboard that shows nothing.
struct Silent;

impl MetricsRendererTraining for Silent {
    fn update_train(&mut self, _: MetricState) {}
    fn update_valid(&mut self, _: MetricState) {}
}

impl MetricsRendererEvaluation for Silent {
    fn update_test(&mut self, _: EvaluationName, _: MetricState) {}
}

impl TrainingProgressLogger for Silent {
    fn start(&mut self, _: usize, _: usize, _: Option<usize>, _: Option<&str>) {}
    fn update_epoch(&mut self, _: usize) {}
    fn start_split(&mut self, _: &str, _: usize) {}
    fn update_split(&mut self, _: usize) {}
    fn end_split(&mut self) {}
    fn end(&mut self) {}
    fn log_event_training(&mut self, _: String) {}
}

impl EvaluationProgressLogger for Silent {
    fn start_global_progress(&mut self, _: usize) {}
    fn start_test(&mut self, _: &str, _: usize) {}
    fn update_test_progress(&mut self, _: usize) {}
    fn end_test(&mut self) {}
    fn end_global_progress(&mut self) {}
    fn log_event_evaluation(&mut self, _: String) {}
}

impl MetricsRenderer for Silent {
    fn manual_close(&mut self) {}
    fn register_metric(&mut self, _: MetricDefinition) {}
}
