//! Burn's own training loop, sharded: what it gives, when it ends, and what it saves.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::{Dataset, DatasetError, InMemDataset};
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::lr_scheduler::LrSchedulerRecord;
use burn::tensor::Device;
use burn::train::metric::LossMetric;
use burn::train::metric::store::{Aggregate, Direction, Split};
use burn::train::{
    ClassificationOutput, InferenceStep, Interrupter, MetricEarlyStoppingStrategy, StoppingCondition, TrainOutput,
    TrainStep, TrainingError,
};
use fsdp_burn::{
    Accumulate, Buffers, Config, Dtype, Error, FsdpStrategy, LossScale, Sharded, Stage, TrainingConfig, scale_loss,
};

use crate::common::learner::{
    BurnNormedClassifier, Classifier, Classify, HalfClassifier, Item, Lesson, Lessons, NormedClassifier, Samples,
    Stack, build, items, on_one_device, on_ranks, scheduler, training,
};
use crate::common::process::{child, run_to_end, told};
use crate::common::run::{Optimizer, Outcome, Tolerance, assert_parity, config, plain_weights};

/// 21 steps in three epochs, on one rank as on five: a rank's batches are smaller, the more there are.
fn even(world_size: usize) -> Lesson {
    Lesson::new(420, 60, 60 / world_size, 3)
}

/// The losses of a run as those of one device: batches of ranks become means.
fn by_step(lessons: &Lessons, world_size: usize) -> Outcome {
    let mean = |of_ranks: &[f64]| of_ranks.iter().sum::<f64>() / of_ranks.len() as f64;
    let rounds = lessons.losses.chunks(world_size).chain(lessons.valid_losses.chunks(world_size));
    let losses = rounds.map(mean).collect();
    Outcome { losses, norms: Vec::new(), weights: lessons.weights.clone() }
}

#[test]
fn a_learner_trains_as_on_one_device_with_one_changed_line_and_every_stage_gives_the_same_bits() {
    for world_size in [1, 2, 3, 5] {
        let lesson = even(world_size);
        let plain = on_one_device::<Classifier>(world_size, &lesson);
        assert_eq!((plain.losses.len(), plain.accuracies.len()), (21, 3));
        assert!(plain.accuracies[2] > 0.6, "it learns: {:?}", plain.accuracies);
        let mut first: Option<Lessons> = None;
        for stage in Stage::ALL {
            let got = on_ranks::<Classifier>(&config(stage, world_size), &lesson).unwrap();
            let what = format!("{stage} on {world_size}");
            assert_eq!(got.losses.len(), 21 * world_size, "{what}: metrics are of all ranks");
            assert_eq!(got.accuracies, plain.accuracies, "{what}");
            assert!(
                got.rates
                    .chunks(world_size)
                    .zip(&plain.rates)
                    .all(|(of_ranks, rate)| of_ranks.iter().all(|r| r == rate))
            );
            let (plain, sharded) = (by_step(&plain, 1), by_step(&got, world_size));
            assert_parity(&what, &plain, &sharded, Tolerance { losses: 1e-5, ..Optimizer::AdamW.tolerance() });
            assert_eq!(first.get_or_insert_with(|| got.clone()), &got, "{what}: another bit than stage 0");
        }
    }
}

#[test]
fn batches_of_unequal_size_and_ranks_without_one_train_as_the_mean_over_all_items() {
    // Parts of 11, 11 and 12 samples in batches of 4; of 8, 8 and 9, so that one rank has a batch more; fewer than ranks.
    for (num_train, num_valid) in [(34, 13), (25, 2), (2, 7)] {
        let lesson = Lesson::new(num_train, num_valid, 4, 3);
        let plain = on_one_device::<Classifier>(3, &lesson);
        let mut first: Option<Lessons> = None;
        for stage in Stage::ALL {
            let got = on_ranks::<Classifier>(&config(stage, 3), &lesson).unwrap();
            let what = format!("{stage}, {num_train} and {num_valid} samples");
            let weights = |lessons: &Lessons| Outcome { weights: lessons.weights.clone(), ..Outcome::default() };
            assert_parity(&what, &weights(&plain), &weights(&got), Optimizer::AdamW.tolerance());
            for (plain, got) in plain.accuracies.iter().zip(&got.accuracies) {
                assert!((plain - got).abs() < 1e-9, "{what}: accuracy {got}, expected {plain}");
            }
            assert_eq!(first.get_or_insert_with(|| got.clone()), &got, "{what}: another bit than stage 0");
        }
    }
}

/// Where every rank's gradients depend on the batches of all, those of unequal size weigh as they should all the same.
#[test]
fn batch_norm_over_unequal_batches_of_a_learner_is_that_of_one_device() {
    for num_train in [34, 25] {
        let lesson = Lesson::new(num_train, 13, 4, 3);
        let plain = on_one_device::<NormedClassifier>(3, &lesson);
        for stage in Stage::ALL {
            let got = on_ranks::<NormedClassifier>(&config(stage, 3), &lesson).unwrap();
            let weights = |lessons: &Lessons| Outcome { weights: lessons.weights.clone(), ..Outcome::default() };
            let tolerance = Tolerance { weights: 1e-4, ..Optimizer::AdamW.tolerance() };
            assert_parity(&format!("{stage}, {num_train} samples"), &weights(&plain), &weights(&got), tolerance);
        }
    }
}

/// Notes the samples of every batch that is made.
#[derive(Clone, Default)]
struct Noting(Arc<Mutex<Vec<u32>>>);

impl Batcher<Item, Samples> for Noting {
    fn batch(&self, items: Vec<Item>, device: &Device) -> Samples {
        self.0.lock().unwrap().extend(items.iter().map(|(x, _)| x[0].to_bits()));
        Stack.batch(items, device)
    }
}

#[test]
fn each_sample_is_seen_once_in_an_epoch_by_one_rank_also_shuffled_and_by_several_workers() {
    let lesson = Lesson { num_epochs: 2, ..even(3) };
    let mut orders = Vec::new();
    for num_workers in [0, 2] {
        let (train, valid) = (Noting::default(), Noting::default());
        let loader = |noting: &Noting, items: &[Item]| {
            let builder = DataLoaderBuilder::new(noting.clone()).batch_size(20).shuffle(5).num_workers(num_workers);
            builder.build(InMemDataset::new(items.to_vec()))
        };
        let (training, log) =
            training::<Classifier>(&lesson, loader(&train, &lesson.train), loader(&valid, &lesson.valid));
        let strategy = FsdpStrategy::new(&config(Stage::Parameters, 3));
        strategy.launch(training, build::<Classifier>(), Optimizer::AdamW.build(), scheduler()).unwrap();
        assert_eq!(log.lessons(Vec::new()).losses.len(), 2 * 420 / 20, "{num_workers} workers");
        for (noting, items) in [(&train, &lesson.train), (&valid, &lesson.valid)] {
            let mut seen = noting.0.lock().unwrap().clone();
            orders.push(seen.clone());
            let mut expected: Vec<_> = items.iter().chain(items).map(|(x, _)| x[0].to_bits()).collect();
            seen.sort_unstable();
            expected.sort_unstable();
            assert_eq!(seen, expected, "{num_workers} workers");
        }
    }
    let in_order: Vec<_> = lesson.train.iter().map(|(x, _)| x[0].to_bits()).collect();
    assert!(!orders[0].starts_with(&in_order[..140]), "it was shuffled");
}

#[test]
fn micro_batches_of_a_learner_are_one_batch() {
    let lesson = Lesson::new(240, 60, 10, 2);
    let whole = Lesson { batch_size: 40, ..lesson.clone() };
    let weights = |lessons: Lessons| Outcome { weights: lessons.weights, ..Outcome::default() };
    // Both ranks' four micro-batches of ten, in the order of one device with batches of eighty: the mean is the same.
    let plain = weights(on_one_device::<Classifier>(2, &whole));
    for &accumulate in Accumulate::ALL {
        let training = TrainingConfig { gradient_accumulation: 4, accumulate, ..TrainingConfig::default() };
        let got =
            weights(on_ranks::<Classifier>(&Config { training, ..config(Stage::Parameters, 2) }, &lesson).unwrap());
        assert_parity(&accumulate.to_string(), &plain, &got, Optimizer::AdamW.tolerance());
    }
}

#[test]
fn what_computes_in_bf16_trains_float32_masters_and_returns_and_saves_those() {
    let scratch = Scratch::new("bf16");
    let lesson = Lesson { folder: Some(scratch.0.clone()), num_epochs: 2, ..even(2) };
    let mut first: Option<Lessons> = None;
    for stage in Stage::ALL {
        let mut half = config(stage, 2);
        half.precision.parameters = Dtype::Bf16;
        let got = on_ranks::<HalfClassifier>(&half, &lesson).unwrap();
        assert!(got.losses[27] < 0.8 * got.losses[0], "{stage}: it learns: {:?}", got.losses);
        let is_rounded = |&value: &f32| value.to_bits() & 0xFFFF == 0;
        let rounded = got.weights.iter().flat_map(|(_, values)| values).filter(|&value| is_rounded(value)).count();
        assert!(rounded < 10, "{stage}: {rounded} weights are bf16");
        assert_eq!(first.get_or_insert_with(|| got.clone()), &got, "{stage}: another bit than stage 0");
        // One device loads the masters, and has nothing left to train.
        let on = Lesson { resume_after: Some(2), num_epochs: 2, ..lesson.clone() };
        assert_eq!(on_one_device::<HalfClassifier>(2, &on).weights, got.weights, "{stage}: what was saved");
    }
}

#[test]
fn a_learner_in_f16_scales_its_loss_skips_overflows_together_and_learns_what_float32_does() {
    let lesson = Lesson { num_epochs: 4, ..even(2) };
    let exact = on_ranks::<HalfClassifier>(&config(Stage::Ddp, 2), &lesson).unwrap();
    let mut first: Option<Lessons> = None;
    for stage in Stage::ALL {
        let mut half = config(stage, 2);
        half.precision.parameters = Dtype::F16;
        let got = on_ranks::<HalfClassifier>(&half, &lesson).unwrap();
        assert_eq!(got.rates, exact.rates, "{stage}: the scheduler goes on where a step is skipped");
        let last = got.losses.len() - 1;
        let difference = (got.losses[last] - exact.losses[last]).abs();
        assert!(difference < 0.1 * exact.losses[last], "{stage}: {:?}, not {:?}", got.losses, exact.losses);
        assert!(got.losses.iter().all(|loss| loss.is_finite()), "{stage}");
        assert_eq!(first.get_or_insert_with(|| got.clone()), &got, "{stage}: another bit than stage 0");
    }
    // In float32 a scale changes no bit.
    let mut fixed = config(Stage::Parameters, 2);
    fixed.precision.loss_scale = Some(LossScale::Fixed(1024.0));
    let got = on_ranks::<HalfClassifier>(&fixed, &lesson).unwrap();
    let weights = |lessons: Lessons| Outcome { weights: lessons.weights, ..Outcome::default() };
    assert_parity("a scale is divided out", &weights(exact), &weights(got), Tolerance::EXACT);
}

/// Parts of 8, 8 and 9 samples in batches of 4: two ranks have no batch in the third round of an epoch.
#[test]
fn a_round_without_a_batch_counts_in_no_running_statistics_of_a_rank() {
    let lesson = Lesson::new(25, 13, 4, 3);
    let (mut mean, mut var) = (vec![0.0; 7], vec![1.0; 7]);
    for _ in 0..lesson.num_epochs {
        for batch in lesson.train[..8].chunks(4) {
            for column in 0..7 {
                let values: Vec<f64> = batch.iter().map(|(x, _)| f64::from(x[column])).collect();
                let batch_mean = values.iter().sum::<f64>() / 4.0;
                let batch_var = values.iter().map(|value| (value - batch_mean).powi(2)).sum::<f64>() / 4.0;
                mean[column] = 0.9 * mean[column] + 0.1 * batch_mean;
                var[column] = 0.9 * var[column] + 0.1 * batch_var;
            }
        }
    }
    for stage in Stage::ALL {
        let training = TrainingConfig { buffers: Buffers::Local, ..TrainingConfig::default() };
        let config = Config { training, ..config(stage, 3) };
        let got = on_ranks::<BurnNormedClassifier>(&config, &lesson).unwrap().weights;
        for (name, expected) in [("running_mean", &mean), ("running_var", &var)] {
            let (_, got) = got.iter().find(|(path, _)| path.contains(name)).unwrap();
            for (expected, got) in expected.iter().zip(got) {
                assert!((expected - f64::from(*got)).abs() < 1e-5, "{stage}, {name}: {got}, not {expected}");
            }
        }
    }
}

/// Removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("fsdp-burn-learner-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        Self(folder)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn checkpoints_of_a_learner_continue_on_any_number_of_ranks_at_any_stage_and_on_one_device() {
    let two = config(Stage::Parameters, 2);
    let straight = Lesson { num_epochs: 4, ..even(2) };
    let expected = on_ranks::<Classifier>(&two, &straight).unwrap();
    let second_half = |mut lessons: Lessons| {
        let keep = |values: &mut Vec<f64>| drop(values.drain(..values.len() / 2));
        keep(&mut lessons.losses);
        keep(&mut lessons.valid_losses);
        keep(&mut lessons.rates);
        keep(&mut lessons.accuracies);
        lessons
    };
    let expected = second_half(expected);
    let scratch = Scratch::new("ranks");
    let folder = Some(scratch.0.clone());
    on_ranks::<Classifier>(&two, &Lesson { num_epochs: 2, folder: folder.clone(), ..straight.clone() }).unwrap();
    let on = |world_size| Lesson { folder: folder.clone(), resume_after: Some(2), num_epochs: 4, ..even(world_size) };
    // The same world: to the last bit, also at another stage.
    for stage in [Stage::Parameters, Stage::OptimizerState] {
        let got = on_ranks::<Classifier>(&config(stage, 2), &on(2)).unwrap();
        assert_eq!(got, expected, "{stage}");
    }
    // Elsewhere the batches are others, but all are equally large, so what an epoch learns is close.
    let parity = |what: &str, num_ranks: usize, got: &Lessons| {
        let plain = on_one_device::<Classifier>(num_ranks, &on(num_ranks));
        let tolerance = Optimizer::AdamW.tolerance();
        assert_parity(what, &by_step(&plain, 1), &by_step(got, num_ranks), tolerance);
    };
    for world_size in [1, 3] {
        let got = on_ranks::<Classifier>(&config(Stage::Gradients, world_size), &on(world_size)).unwrap();
        parity(&format!("from 2 ranks to {world_size}, and to one device"), world_size, &got);
    }

    // And what one device has saved.
    let scratch = Scratch::new("device");
    let lesson = Lesson { folder: Some(scratch.0.clone()), num_epochs: 2, ..even(2) };
    on_one_device::<Classifier>(2, &lesson);
    let lesson = Lesson { resume_after: Some(2), num_epochs: 4, ..lesson };
    let plain = on_one_device::<Classifier>(2, &lesson);
    let got = on_ranks::<Classifier>(&two, &lesson).unwrap();
    assert_parity("from one device", &by_step(&plain, 1), &by_step(&got, 2), Optimizer::AdamW.tolerance());
}

/// A loss so large that a dynamic scale has to come down to it.
#[derive(Module, Debug, Sharded)]
struct Steep {
    #[shard(nested)]
    inner: Classifier,
}

impl Classify for Steep {
    fn build(device: &Device) -> Self {
        Self { inner: Classifier::build(device) }
    }
}

impl TrainStep for Steep {
    type Input = Samples;
    type Output = ClassificationOutput;

    fn step(&self, samples: Samples) -> TrainOutput<ClassificationOutput> {
        let output = self.inner.classify(samples);
        TrainOutput::new(self, scale_loss(output.loss.clone() * 1024.0).backward(), output)
    }
}

impl InferenceStep for Steep {
    type Input = Samples;
    type Output = ClassificationOutput;

    fn step(&self, samples: Samples) -> ClassificationOutput {
        self.inner.classify(samples)
    }
}

#[test]
fn a_loss_scale_goes_on_from_a_learners_checkpoint() {
    let mut half = config(Stage::Parameters, 2);
    half.precision.parameters = Dtype::F16;
    let straight = Lesson { num_epochs: 4, ..even(2) };
    let expected = on_ranks::<Steep>(&half, &straight).unwrap();
    let scratch = Scratch::new("scale");
    let lesson = Lesson { folder: Some(scratch.0.clone()), num_epochs: 2, ..straight.clone() };
    on_ranks::<Steep>(&half, &lesson).unwrap();
    let saved = LrSchedulerRecord::load(scratch.0.join("checkpoint/scheduler-2.bpk")).unwrap();
    // Behind the group of the program's own scheduler.
    let scale = saved.record("1").scalar::<f64>("fsdp_loss_scale").unwrap();
    assert!((1.0..8192.0).contains(&scale), "it has come down: {scale}");
    for stage in [Stage::Parameters, Stage::OptimizerState] {
        let resumed = Lesson { resume_after: Some(2), num_epochs: 4, ..lesson.clone() };
        let got = on_ranks::<Steep>(&Config { stage, ..half.clone() }, &resumed).unwrap();
        assert_eq!(got.losses, expected.losses[expected.losses.len() / 2..], "{stage}");
        assert_eq!(got.weights, expected.weights, "{stage}");
    }
}

#[test]
fn early_stopping_ends_all_ranks_after_the_same_epoch() {
    let lesson = Lesson { num_epochs: 50, ..even(2) };
    let loader = |items: &[Item]| DataLoaderBuilder::new(Stack).batch_size(30).build(InMemDataset::new(items.to_vec()));
    // Labels at random cannot be learned, so that the validation's loss soon rises.
    let noise: Vec<Item> =
        lesson.valid.iter().enumerate().map(|(i, (x, _))| (x.clone(), (i * i % 7 % 3) as i64)).collect();
    let (training, log) = training::<Classifier>(&lesson, loader(&lesson.train), loader(&noise));
    let condition = StoppingCondition::NoImprovementSince { n_epochs: 2 };
    let early = MetricEarlyStoppingStrategy::new(
        &LossMetric::new(),
        Aggregate::Mean,
        Direction::Lowest,
        Split::Valid,
        condition,
    );
    let training = training.early_stopping(early);
    let strategy = FsdpStrategy::new(&config(Stage::Parameters, 2));
    let result = strategy.launch(training, build::<Classifier>(), Optimizer::AdamW.build(), scheduler()).unwrap();
    let num_epochs = log.lessons(plain_weights(&result.model)).accuracies.len();
    assert!((3..50).contains(&num_epochs), "{num_epochs} epochs");
    assert!(result.interrupted.is_none() && result.error.is_none());
}

/// A classifier that does something in one of its steps, whichever rank takes it.
#[derive(Module, Debug, Sharded)]
struct Unsteady {
    #[shard(nested)]
    inner: Classifier,
    #[module(skip)]
    incident: Incident,
}

#[derive(Clone, Debug)]
struct Incident {
    steps: Arc<AtomicUsize>,
    at: usize,
    interrupter: Option<Stop>,
}

/// Without a panic where `Some`.
#[derive(Clone)]
struct Stop(Interrupter);

impl std::fmt::Debug for Stop {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Stop")
    }
}

impl TrainStep for Unsteady {
    type Input = Samples;
    type Output = ClassificationOutput;

    fn step(&self, samples: Samples) -> TrainOutput<ClassificationOutput> {
        if self.incident.steps.fetch_add(1, Ordering::SeqCst) == self.incident.at {
            match &self.incident.interrupter {
                Some(Stop(interrupter)) => interrupter.stop(Some("enough")),
                None => panic!("the incident"),
            }
        }
        let output = self.inner.classify(samples);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Unsteady {
    type Input = Samples;
    type Output = ClassificationOutput;

    fn step(&self, samples: Samples) -> ClassificationOutput {
        self.inner.classify(samples)
    }
}

fn unsteady(at: usize, interrupter: Option<Interrupter>) -> Unsteady {
    let incident = Incident { steps: Arc::default(), at, interrupter: interrupter.map(Stop) };
    Unsteady { inner: build(), incident }
}

#[test]
fn an_interruption_on_one_rank_ends_all_in_the_same_round_and_leaves_the_whole_model() {
    for stage in Stage::ALL {
        let lesson = Lesson { num_epochs: 50, ..even(3) };
        let loader =
            |items: &[Item]| DataLoaderBuilder::new(Stack).batch_size(20).build(InMemDataset::new(items.to_vec()));
        let (training, log) = training::<Unsteady>(&lesson, loader(&lesson.train), loader(&lesson.valid));
        let model = unsteady(10, Some(training.interrupter()));
        let strategy = FsdpStrategy::new(&config(stage, 3));
        let result = strategy.launch(training, model, Optimizer::AdamW.build(), scheduler()).unwrap();
        assert_eq!(result.interrupted.and_then(|interruption| interruption.reason).as_deref(), Some("enough"));
        let lessons = log.lessons(plain_weights(&result.model));
        // The eleventh step is one of the fourth round of three.
        assert!([12, 15].contains(&lessons.losses.len()), "{stage}: {} batches", lessons.losses.len());
        assert_eq!(result.model.inner.hidden_shape(), [7, 7], "{stage}");
    }
}

#[test]
fn a_rank_that_panics_in_a_step_ends_the_training_with_its_words() {
    for stage in [Stage::Ddp, Stage::Parameters] {
        let lesson = even(3);
        let loader =
            |items: &[Item]| DataLoaderBuilder::new(Stack).batch_size(20).build(InMemDataset::new(items.to_vec()));
        let (training, _) = training::<Unsteady>(&lesson, loader(&lesson.train), loader(&lesson.valid));
        let strategy = FsdpStrategy::new(&config(stage, 3));
        let failed = strategy.launch(training, unsteady(10, None), Optimizer::AdamW.build(), scheduler());
        let error = failed.map(|_| ()).unwrap_err();
        let Error::RankPanicked { message, .. } = &error else { panic!("{error}") };
        assert_eq!(message, "the incident");
    }
}

/// A data set with one item that cannot be read.
struct Damaged(Vec<Item>, usize);

impl Dataset<Item> for Damaged {
    fn get(&self, index: usize) -> Result<Item, DatasetError> {
        if index == self.1 {
            return Err(DatasetError::new(std::io::Error::other("the disk is gone")));
        }
        Ok(self.0[index].clone())
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

#[test]
fn a_data_set_that_fails_on_one_rank_ends_the_training_as_on_one_device() {
    let lesson = even(3);
    // In the last rank's part.
    let train = DataLoaderBuilder::new(Stack).batch_size(20).build(Damaged(lesson.train.clone(), 350));
    let valid = DataLoaderBuilder::new(Stack).batch_size(20).build(InMemDataset::new(lesson.valid.clone()));
    let (training, log) = training::<Classifier>(&lesson, train, valid);
    let strategy = FsdpStrategy::new(&config(Stage::Parameters, 3));
    let result = strategy.launch(training, build::<Classifier>(), Optimizer::AdamW.build(), scheduler()).unwrap();
    let error = result.error.unwrap();
    assert!(matches!(*error, TrainingError::Dataset(_)), "{error}");
    assert!(error.to_string().contains("the disk is gone"), "{error}");
    // The last rank has items 280 to 420; the fourth of its batches is the damaged one.
    assert_eq!(log.lessons(Vec::new()).losses.len(), 9);
}

/// The part of the test below that a launcher has started.
#[test]
fn child_is_a_process_of_a_learner() {
    if told("FSDP_TEST_LEARNER").is_none() {
        return;
    }
    let error = on_ranks::<Classifier>(&config(Stage::Parameters, 1), &even(1)).unwrap_err().to_string();
    for part in ["rank 1 of 2", "threads of one process", "`launcher = \"threads\"`", "`launch`"] {
        assert!(error.contains(part), "{error:?} lacks {part:?}");
    }
}

/// Its metrics take outputs of steps, which have no form in which they could be sent.
#[test]
fn a_process_that_is_one_rank_of_several_is_refused_by_a_learner_with_the_remedy() {
    let mut child = child("learner::child_is_a_process_of_a_learner");
    child.env("FSDP_TEST_LEARNER", "1").env("RANK", "1").env("WORLD_SIZE", "2");
    child.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", "29500");
    run_to_end(&mut child);
}

/// Trains a part that no rank manages.
#[derive(Module, Debug, Sharded)]
struct PartlyManaged {
    #[shard(nested)]
    inner: Classifier,
    #[shard(ignore)]
    outside: Linear,
}

impl TrainStep for PartlyManaged {
    type Input = Samples;
    type Output = ClassificationOutput;

    fn step(&self, mut samples: Samples) -> TrainOutput<ClassificationOutput> {
        samples.x = self.outside.forward(samples.x);
        let output = self.inner.classify(samples);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for PartlyManaged {
    type Input = Samples;
    type Output = ClassificationOutput;

    fn step(&self, samples: Samples) -> ClassificationOutput {
        self.inner.classify(samples)
    }
}

#[test]
fn what_a_sharded_learner_would_do_differently_is_refused_with_the_remedy() {
    let lesson = even(2);
    let loader = || DataLoaderBuilder::new(Stack).batch_size(30).build(InMemDataset::new(items(0..60)));
    let strategy = || FsdpStrategy::new(&config(Stage::Parameters, 2));

    let training_with_sum = training::<Classifier>(&lesson, loader(), loader()).0.grads_accumulation(4);
    let refused = strategy().launch(training_with_sum, build::<Classifier>(), Optimizer::AdamW.build(), scheduler());
    let error = refused.map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("4 batches") && error.contains("`gradient_accumulation`"), "{error}");

    let plain = Classifier::build(&Device::flex());
    let (training_here, _) = training::<Classifier>(&lesson, loader(), loader());
    let refused = strategy().launch(training_here, plain, Optimizer::AdamW.build(), scheduler());
    let error = refused.map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("without autodiff") && error.contains("Device::flex().autodiff()"), "{error}");

    let device = Device::flex().autodiff().gradient_checkpointing();
    let model = PartlyManaged { inner: build(), outside: LinearConfig::new(7, 7).init(&device) };
    let (training_here, _) = training::<PartlyManaged>(&lesson, loader(), loader());
    let refused = strategy().launch(training_here, model, Optimizer::AdamW.build(), scheduler());
    let error = refused.map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("`outside.weight`") && error.contains("#[shard(ignore)]"), "{error}");

    // Its step does not scale the loss.
    let mut half = config(Stage::Parameters, 2);
    half.precision.parameters = Dtype::F16;
    let (training_here, _) = training::<Classifier>(&lesson, loader(), loader());
    let refused = FsdpStrategy::new(&half).launch(training_here, build(), Optimizer::AdamW.build(), scheduler());
    let error = refused.map(|_: burn::train::LearningResult<Classifier>| ()).unwrap_err().to_string();
    assert!(error.contains("scales the loss") && error.contains("scale_loss(loss).backward()"), "{error}");

    let bad = Config { timeout_s: -1.0, ..config(Stage::Parameters, 2) };
    let (training_here, _) = training::<Classifier>(&lesson, loader(), loader());
    let refused = FsdpStrategy::new(&bad).launch(training_here, build(), Optimizer::AdamW.build(), scheduler());
    assert!(matches!(refused.map(|_| ()), Err(Error::Config(_))));
}
