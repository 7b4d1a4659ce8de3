//! Burn's own training loop, sharded: [`FsdpStrategy`].
//!
//! Burn's learner owns everything that is not sharding: metrics, dashboard, checkpoints, early stopping. It hands a
//! strategy the model, the data and these parts, and expects the trained model back. Ours starts the ranks; each trains
//! its share of the data (`epochs`, with the data of `share`), and rank 0 speaks for all of them to the parts of the
//! learner (`report`).

mod epochs;
mod records;
mod report;
mod scale;
mod share;

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex, PoisonError};

use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::optim::{ModuleOptimizer, OptimizerRecord};
use burn_train::{
    Learner, LearnerModel, LearningResult, SupervisedLearningStrategy, SupervisedTraining,
    SupervisedTrainingEventProcessor, TrainLoader, TrainingComponents, TrainingStrategy, ValidLoader,
};
use fsdp_core::{Config, Started};

use crate::launch::{LaunchOptions, launch_with};
use crate::{Error, Rank, Sharded, ShardedModel};
use epochs::Worker;
use report::{Reporter, Shared};
use scale::NotedScale;
use share::Share;

/// Trains with Burn's [`SupervisedTraining`], sharded as a [`Config`] says.
///
/// One line changes: where [`Learner`] took the model, the optimizer and the learning rate, this does.
///
/// ```
/// # use burn::data::{dataloader::{DataLoaderBuilder, batcher::Batcher}, dataset::InMemDataset};
/// # use burn::{module::Module, nn::{Linear, LinearConfig, loss::MseLoss, loss::Reduction}};
/// # use burn::{optim::AdamWConfig, tensor::{Device, Tensor}};
/// # use burn::train::{InferenceStep, RegressionOutput, SupervisedTraining, TrainOutput, TrainStep, metric::LossMetric};
/// # use burn::train::logger::InMemoryMetricLogger;
/// use fsdp_burn::{Config, FsdpStrategy, Sharded};
///
/// #[derive(Module, Debug, Sharded)]
/// struct Model {
///     #[shard(unit)]
///     linear: Linear,
/// }
/// # impl Model {
/// #     fn run(&self, [x, y]: [Tensor<2>; 2]) -> RegressionOutput {
/// #         let output = self.linear.forward(x);
/// #         let loss = MseLoss::new().forward(output.clone(), y.clone(), Reduction::Mean);
/// #         RegressionOutput::new(loss, output, y)
/// #     }
/// # }
/// # impl TrainStep for Model {
/// #     type Input = [Tensor<2>; 2];
/// #     type Output = RegressionOutput;
/// #     fn step(&self, batch: Self::Input) -> TrainOutput<RegressionOutput> {
/// #         let output = self.run(batch);
/// #         TrainOutput::new(self, output.loss.backward(), output)
/// #     }
/// # }
/// # impl InferenceStep for Model {
/// #     type Input = [Tensor<2>; 2];
/// #     type Output = RegressionOutput;
/// #     fn step(&self, batch: Self::Input) -> RegressionOutput {
/// #         self.run(batch)
/// #     }
/// # }
/// # #[derive(Clone)]
/// # struct Lines;
/// # impl Batcher<f32, [Tensor<2>; 2]> for Lines {
/// #     fn batch(&self, xs: Vec<f32>, device: &Device) -> [Tensor<2>; 2] {
/// #         let x = Tensor::<1>::from_floats(xs.as_slice(), device).unsqueeze_dim(1);
/// #         [x.clone(), x * 2.0]
/// #     }
/// # }
/// # let data = |batch_size| {
/// #     let items = InMemDataset::new((0..8).map(|x| x as f32 / 8.0).collect());
/// #     DataLoaderBuilder::new(Lines).batch_size(batch_size).build(items)
/// # };
/// # let folder = std::env::temp_dir().join(format!("fsdp-burn-learner-doc-{}", std::process::id()));
///
/// let device = Device::flex().autodiff().gradient_checkpointing();
/// let model = Model { linear: LinearConfig::new(1, 1).init(&device) };
/// let training = SupervisedTraining::new(&folder, data(2), data(2)).metrics((LossMetric::new(),)).num_epochs(2);
/// # let training = training.with_metric_logger(InMemoryMetricLogger::default());
///
/// // On one device: let result = training.launch(Learner::new(model, AdamWConfig::new().init(), 0.01));
/// let config = Config { world_size: 2, ..Config::default() };
/// let result = FsdpStrategy::new(&config).launch(training, model, AdamWConfig::new().init(), 0.01)?;
///
/// assert_eq!(result.model.linear.weight.dims(), [1, 1]); // the whole model
/// # std::fs::remove_dir_all(&folder).ok();
/// # Ok::<(), fsdp_burn::Error>(())
/// ```
///
/// # What happens
///
/// - **Data.** Each rank has a slice of both data sets, and a batch is a rank's: a step is over `world_size` batches. The
///   gradient of a step is that of the mean over its items, also where batches differ in size or a rank has none left.
///   Losses must be means over their batch.
/// - **Metrics** are of all ranks, in the order of ranks, in training and in validation, which every rank runs.
/// - **Learning rates** come from the scheduler once per optimizer step, the same on every rank.
/// - **Early stopping, interruption and errors of the data** are decided together, and end all ranks in one round.
/// - **Checkpoints** are Burn's own: whole models and whole optimizer states, in the files that a training on one device
///   writes. Either continues from the other's, and so does any other world size and stage. They do not hold random
///   numbers. Between epochs rank 0 holds the whole model and state for that; a model too large for it is trained with
///   [`launch`](crate::launch) and saved with [`ShardedModel::save`](crate::ShardedModel::save).
/// - **At the end** the result has the whole model.
///
/// # What is different from one device
///
/// - Gradient accumulation is the configuration's `gradient_accumulation`, a mean over micro-batches;
///   `grads_accumulation` of the training, a sum, is refused.
/// - With parameters in "bf16" or "f16" the model's `forward` casts by itself: [`cast_input`](crate::cast_input()) and
///   [`cast_output`](crate::cast_output()). With a loss scale, and so with "f16", its `TrainStep::step` calls
///   `scale_loss(loss).backward()` ([`scale_loss`](crate::scale_loss())); a step that does not is an error. A step that
///   overflows is skipped on all ranks, and the scheduler goes on. Checkpoints hold the scale, in the scheduler's record.
/// - `TrainStep::optimize` is not called: parameters are stepped where they are sharded. `TrainStep::step` must call
///   `backward` once, on this model's loss, as Burn's examples do.
/// - The output of a step is synchronized ([`ItemLazy::sync`](burn_train::ItemLazy::sync)) on its rank and must leave
///   autodiff by that, as all of Burn's do.
/// - Build the model on `Device::flex().autodiff().gradient_checkpointing()`, so that stage 3 can let go of all gathered
///   weights; see [`Rank::device`](crate::Rank::device). Batches are made on the model's device.
#[derive(Clone, Debug)]
pub struct FsdpStrategy {
    config: Config,
    options: LaunchOptions,
}

impl FsdpStrategy {
    /// A strategy for the ranks of `config`.
    pub fn new(config: &Config) -> Self {
        Self { config: config.clone(), options: LaunchOptions::default() }
    }

    /// Traces the ranks, or puts a link between them.
    #[must_use]
    pub fn with_options(self, options: LaunchOptions) -> Self {
        Self { options, ..self }
    }

    /// As [`SupervisedTraining::launch`] with a [`Learner`] of these three, on all ranks.
    ///
    /// What Burn calls the error of a training (a data set or a metric that failed) is in the result, as on one device.
    ///
    /// # Errors
    /// If the configuration or a setting of the training is refused, or a rank fails; the others end with it.
    pub fn launch<M: LearnerModel + Sharded>(
        self,
        training: SupervisedTraining<M>,
        model: M,
        optimizer: ModuleOptimizer,
        scheduler: impl Into<ModuleLrScheduler>,
    ) -> Result<LearningResult<M>, Error> {
        self.config.validate()?;
        let scheduler = scheduler.into();
        let scale = NotedScale::default();
        let learner = Learner::new(model, optimizer.clone(), scale.beside(scheduler.clone()));
        let strategy = OnRanks { config: self.config, options: self.options, optimizer, scheduler, scale };
        let training = training.with_training_strategy(TrainingStrategy::Custom(Arc::new(strategy)));
        catch_unwind(AssertUnwindSafe(|| training.launch(learner))).map_err(|payload| {
            match payload.downcast::<TrainingFailed>() {
                Ok(failed) => failed.0,
                Err(payload) => resume_unwind(payload),
            }
        })
    }
}

/// What `fit`, which cannot return an error, unwinds with to [`FsdpStrategy::launch`].
struct TrainingFailed(Error);

/// The strategy as Burn's learner knows it. It has its own optimizer and scheduler, because a [`Learner`] does not part
/// with those it is given.
struct OnRanks {
    config: Config,
    options: LaunchOptions,
    optimizer: ModuleOptimizer,
    scheduler: ModuleLrScheduler,
    /// What a checkpoint that the learner has loaded says of it.
    scale: NotedScale,
}

impl<M: LearnerModel + Sharded> SupervisedLearningStrategy<M> for OnRanks {
    fn fit(
        &self,
        components: TrainingComponents<M>,
        learner: Learner<M>,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        starting_epoch: usize,
    ) -> (M, SupervisedTrainingEventProcessor<M>) {
        match self.run(components, learner, train, valid, starting_epoch) {
            Ok(trained) => trained,
            Err(error) => resume_unwind(Box::new(TrainingFailed(error)) as Box<dyn Any + Send>),
        }
    }
}

impl OnRanks {
    fn run<M: LearnerModel + Sharded>(
        &self,
        components: TrainingComponents<M>,
        learner: Learner<M>,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        starting_epoch: usize,
    ) -> Result<(M, SupervisedTrainingEventProcessor<M>), Error> {
        if let Some(num_batches) = components.grad_accumulation {
            return Err(Error::Misuse {
                problem: format!("the training accumulates the gradients of {num_batches} batches into their sum"),
                remedy: "set `gradient_accumulation` under [training] in place of `grads_accumulation`: it is their mean",
            });
        }
        let is_resumed = components.checkpoint.is_some() && components.checkpointer.is_some();
        let (optimizer_state, scheduler) = if is_resumed {
            let state = records::state_of(&learner, &components.event_store)?;
            (state.optimizer, self.scheduler.clone().load_record(state.scheduler))
        } else {
            (self.optimizer.into_bytes().map_err(records::error)?, self.scheduler.clone())
        };
        let model = learner.model();
        drop(learner);
        let device = model.devices().first().cloned().unwrap_or_default();
        if !device.is_autodiff() {
            return Err(Error::Misuse {
                problem: "the model is on a device without autodiff".into(),
                remedy: "build it on `Device::flex().autodiff().gradient_checkpointing()`",
            });
        }
        if let Started::Process(process) = self.config.started()? {
            return Err(Error::Misuse {
                problem: format!(
                    "this process is {process}, and the ranks of a learner's training are threads of one process"
                ),
                remedy: "start one process, with `launcher = \"threads\"`, or write the loop with `launch`",
            });
        }
        let world_size = self.config.world_size;
        if !self.config.device.is_shared(world_size) {
            return Err(Error::Device {
                device: self.config.device,
                problem: "a learner has one model, on one device, and each rank would have another".into(),
                remedy: "let the ranks share a GPU with `device = \"cuda:0\"`, or write the loop with `launch`",
            });
        }
        let shares = Share::of_all(world_size, &train, &valid, &device);
        let shared = Shared::new(world_size, &components, (train.num_items(), valid.num_items()), starting_epoch);
        let shared = Arc::new(shared);
        let reporter = Mutex::new(Some(Reporter::new(components)));
        // Taken by the rank whose they are.
        let part = |share| Mutex::new(Some((model.clone(), share, scheduler.clone())));
        let parts: Vec<_> = shares.into_iter().map(part).collect();
        drop(model);
        let (optimizer, optimizer_state) = (self.optimizer.clone(), Arc::new(optimizer_state));
        let scale = self.scale.get().filter(|_| is_resumed);
        let program = move |rank: Rank| {
            let Some((model, share, scheduler)) = take(&parts[rank.rank()]) else {
                return Err(Error::program("a rank was started twice"));
            };
            let mut sharded = rank.shard(model)?;
            check_all_managed(&sharded)?;
            let mut stepping = rank.optimizer(optimizer.clone().load_record(OptimizerRecord::default()))?;
            records::load(&mut stepping, &sharded, &optimizer_state)?;
            if let Some((scale, good_steps)) = scale {
                sharded.engine().restore_scale(scale, good_steps);
            }
            let reporter = if rank.is_main() { take(&reporter) } else { None };
            let mut worker = Worker {
                rank: &rank,
                shared: &shared,
                share,
                model: &mut sharded,
                optimizer: &mut stepping,
                fresh_optimizer: &optimizer,
                scheduler,
                lr: 0.0.into(),
                reporter,
            };
            worker.run()?;
            let reporter = worker.reporter.take();
            let whole = sharded.whole()?;
            Ok(reporter.map(|reporter| (whole, reporter.into_processor())))
        };
        let results = launch_with(&self.config, self.options.clone(), program)?;
        results.into_iter().flatten().next().ok_or_else(|| Error::program("rank 0 has not returned the trained model"))
    }
}

/// Nobody would step what is trained and not managed.
fn check_all_managed<M: LearnerModel>(model: &ShardedModel<M>) -> Result<(), Error> {
    match model.unmanaged().find(|entry| entry.spec.trainable) {
        Some(entry) => Err(Error::Parameter {
            parameter: entry.path(),
            problem: "it is marked #[shard(ignore)] and would be trained, which a learner's training does not do"
                .into(),
            remedy: "remove the attribute, or freeze the field with `no_grad`",
        }),
        None => Ok(()),
    }
}

fn take<T>(slot: &Mutex<Option<T>>) -> Option<T> {
    slot.lock().unwrap_or_else(PoisonError::into_inner).take()
}
