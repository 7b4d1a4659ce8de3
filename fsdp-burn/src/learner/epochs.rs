//! The epochs of one rank. All ranks do the same in the same order; rank 0 reports as well.

use burn::data::dataset::DatasetError;
use burn::optim::ModuleOptimizer;
use burn::optim::lr_scheduler::module_lr_scheduler::{ModuleLearningRate, ModuleLrScheduler};
use burn_train::{InferenceStep, ItemLazy, Learner, LearnerEvent, LearnerModel, TrainStep};

use super::records;
use super::report::{EpochProgress, Note, Reporter, Shared};
use super::scale::NotedScale;
use super::share::{Batches, Share, Slice};
use crate::{Error, Rank, Sharded, ShardedModel, ShardedOptimizer};

/// One rank at work.
pub(super) struct Worker<'a, M: LearnerModel> {
    pub(super) rank: &'a Rank,
    pub(super) shared: &'a Shared<M>,
    pub(super) share: Share<M>,
    pub(super) model: &'a mut ShardedModel<M>,
    pub(super) optimizer: &'a mut ShardedOptimizer,
    /// The optimizer without state, for checkpoints.
    pub(super) fresh_optimizer: &'a ModuleOptimizer,
    pub(super) scheduler: ModuleLrScheduler,
    /// Of the last step.
    pub(super) lr: ModuleLearningRate,
    /// On rank 0.
    pub(super) reporter: Option<Reporter<M>>,
}

/// What this rank does in a round that all have agreed on.
struct Turn<O> {
    input: O,
    /// 0: the input is a spare one, and nothing that comes of it counts.
    num_items: usize,
    /// What makes the mean over ranks the mean over the items of the round.
    weight: f64,
}

impl<M: LearnerModel + Sharded> Worker<'_, M> {
    pub(super) fn run(&mut self) -> Result<(), Error> {
        for epoch in self.shared.epochs.clone() {
            self.train_epoch(epoch)?;
            if self.should_stop()? {
                if let Some(interruption) = self.shared.interrupter.interruption().filter(|_| self.rank.is_main()) {
                    let reason = interruption.reason.as_deref().unwrap_or("reason unknown");
                    tracing::info!("training interrupted: {reason}");
                }
                break;
            }
            self.valid_epoch(epoch)?;
            if let Some(reporter) = &mut self.reporter {
                reporter.train(LearnerEvent::EndEpoch(epoch));
                if self.shared.saves || self.shared.stops_early {
                    reporter.flush();
                }
            }
            if self.should_stop()? {
                break;
            }
            if self.shared.saves {
                self.save(epoch)?;
            }
            let stop = self.reporter.as_mut().is_some_and(|reporter| reporter.should_stop_early(epoch));
            if self.shared.stops_early && self.rank.any(stop)? {
                break;
            }
        }
        Ok(())
    }

    fn train_epoch(&mut self, epoch: usize) -> Result<(), Error> {
        let total_items = self.shared.num_train;
        if let Some(reporter) = &mut self.reporter {
            reporter.train(LearnerEvent::StartSplit { epoch_number: epoch, total_items });
        }
        let slice = self.share.train.clone();
        let (mut batches, mut progress) = (slice.batches(), EpochProgress::default());
        loop {
            let turn = self.next_turn(&slice, &mut batches)?;
            if let Some(reporter) = &mut self.reporter {
                reporter.trained(self.shared, &mut progress);
            }
            let Some(turn) = turn else { break };
            let num_items = turn.num_items;
            let output = self.train_step(turn)?;
            let note = (num_items > 0).then(|| Note { output, num_items, lr: Some(self.lr.clone()) });
            self.shared.trained.leave(self.rank.rank(), note);
        }
        if self.model.engine().progress().1 > 0 {
            // The window of micro-batches that the epoch has begun last.
            self.lr = self.scheduler.step();
            self.optimizer.flush(self.lr.clone(), self.model)?;
        }
        if let Some(reporter) = &mut self.reporter {
            reporter.train(LearnerEvent::EndSplit(epoch));
        }
        Ok(())
    }

    fn train_step(&mut self, turn: Turn<<M as TrainStep>::Input>) -> Result<<M as TrainStep>::Output, Error> {
        let engine = self.model.engine().clone();
        // A spare batch must not count in running statistics either.
        let buffers = (turn.num_items == 0).then(|| self.model.buffers());
        let model: &M = self.model;
        let output = engine.forward_and_backward(turn.weight, || TrainStep::step(model, turn.input))?;
        if let Some(buffers) = buffers {
            self.model.restore_buffers(buffers);
        }
        if engine.progress().1 >= engine.accumulation() {
            self.lr = self.scheduler.step();
            self.optimizer.flush(self.lr.clone(), self.model)?;
        }
        synchronized(output.item)
    }

    fn valid_epoch(&mut self, epoch: usize) -> Result<(), Error> {
        let total_items = self.shared.num_valid;
        if let Some(reporter) = &mut self.reporter {
            reporter.valid(LearnerEvent::StartSplit { epoch_number: epoch, total_items });
        }
        let slice = self.share.valid.clone();
        let (mut batches, mut progress) = (slice.batches(), EpochProgress::default());
        let model = self.model.valid();
        loop {
            let turn = self.next_turn(&slice, &mut batches)?;
            if let Some(reporter) = &mut self.reporter {
                reporter.validated(self.shared, &mut progress);
            }
            let Some(Turn { input, num_items, .. }) = turn else { break };
            let output = synchronized(InferenceStep::step(&model, input))?;
            let note = (num_items > 0).then_some(Note { output, num_items, lr: None });
            self.shared.validated.leave(self.rank.rank(), note);
        }
        self.model.engine().abandon_forward()?;
        if let Some(reporter) = &mut self.reporter {
            reporter.valid(LearnerEvent::EndSplit(epoch));
        }
        Ok(())
    }

    /// This rank's part in the next round, as long as any rank has a batch and none has to stop.
    fn next_turn<O>(&self, slice: &Slice<O>, batches: &mut Batches<O>) -> Result<Option<Turn<O>>, Error> {
        let batch = batches.next().and_then(|batch| self.unless_failed(batch));
        let num_items = batch.as_ref().map_or(0, |batch| batch.num_items);
        let stop = f64::from(u8::from(self.shared.interrupter.should_stop()));
        let mine = num_items as f64;
        let [total, squares, stop] = self.rank.sums("items of a round", [mine, mine * mine, stop])?;
        if total == 0.0 || stop > 0.0 {
            return Ok(None);
        }
        let world_size = self.rank.world_size() as f64;
        // All have the same number if, and only if, this is so; then the mean over ranks is the one that is wanted.
        let weight = if world_size * squares == total * total { 1.0 } else { mine * world_size / total };
        let input = match batch {
            Some(batch) => Some(batch.input),
            None => slice.spare().transpose().map_err(|error| Error::program(format!("the data set: {error}")))?,
        };
        match input {
            Some(input) => Ok(Some(Turn { input, num_items, weight })),
            None => Err(Error::program("the data loader has items, but its slice of the first one is empty")),
        }
    }

    /// As on one device, a data set that fails is no failure of the program: it ends the training.
    fn unless_failed<T>(&self, result: Result<T, DatasetError>) -> Option<T> {
        result.map_err(|error| self.shared.interrupter.fail(error)).ok()
    }

    fn should_stop(&self) -> Result<bool, Error> {
        self.rank.any(self.shared.interrupter.should_stop())
    }

    /// Burn's own checkpoint: the whole model and the whole state, as a training on one device has them.
    fn save(&mut self, epoch: usize) -> Result<(), Error> {
        let whole = self.model.whole()?;
        let record = records::whole(self.optimizer, self.model)?;
        if let Some(reporter) = &mut self.reporter {
            let optimizer = self.fresh_optimizer.clone().load_record(record);
            let scheduler = NotedScale::of(self.model.engine().scaler()).beside(self.scheduler.clone());
            reporter.save(&Learner::new(whole, optimizer, scheduler), epoch);
        }
        Ok(())
    }
}

fn synchronized<T: ItemLazy>(output: T) -> Result<T, Error> {
    output.sync().map_err(|error| Error::program(format!("the output of a step cannot be synchronized: {error}")))
}
