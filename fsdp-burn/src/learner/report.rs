//! What ranks tell each other and the learner: the outputs of all ranks go to rank 0, and from there to the metrics.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use burn::data::dataloader::Progress;
use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn_train::metric::store::EventStoreClient;
use burn_train::{
    CloneEarlyStoppingStrategy, EventProcessorTraining, InferenceStep, Interrupter, Learner, LearnerEvent,
    LearnerModel, LearningCheckpointer, SupervisedTrainingEventProcessor, TrainStep, TrainingComponents, TrainingItem,
};

/// What all ranks see of the training.
pub(super) struct Shared<M: LearnerModel> {
    pub(super) epochs: std::ops::RangeInclusive<usize>,
    pub(super) interrupter: Interrupter,
    pub(super) saves: bool,
    pub(super) stops_early: bool,
    /// Items of the whole data sets.
    pub(super) num_train: usize,
    pub(super) num_valid: usize,
    pub(super) trained: Mailbox<<M as TrainStep>::Output>,
    pub(super) validated: Mailbox<<M as InferenceStep>::Output>,
}

impl<M: LearnerModel> Shared<M> {
    pub(super) fn new(
        world_size: usize,
        components: &TrainingComponents<M>,
        (num_train, num_valid): (usize, usize),
        starting_epoch: usize,
    ) -> Self {
        Self {
            epochs: starting_epoch..=components.num_epochs,
            interrupter: components.interrupter.clone(),
            saves: components.checkpointer.is_some(),
            stops_early: components.early_stopping.is_some(),
            num_train,
            num_valid,
            trained: Mailbox::new(world_size),
            validated: Mailbox::new(world_size),
        }
    }
}

/// What one rank has to tell of one round.
pub(super) struct Note<T> {
    pub(super) output: T,
    pub(super) num_items: usize,
    pub(super) lr: Option<ModuleLearningRate>,
}

/// Notes on their way to rank 0. Every rank leaves one thing per round, and the agreement on the next round is what tells
/// rank 0 that all have.
pub(super) struct Mailbox<T> {
    by_rank: Vec<Mutex<VecDeque<Option<Note<T>>>>>,
}

impl<T> Mailbox<T> {
    fn new(world_size: usize) -> Self {
        Self { by_rank: (0..world_size).map(|_| Mutex::default()).collect() }
    }

    /// `None`: this rank had no batch in this round.
    pub(super) fn leave(&self, rank: usize, note: Option<Note<T>>) {
        self.by_rank[rank].lock().unwrap_or_else(PoisonError::into_inner).push_back(note);
    }

    /// The notes of one round, in the order of ranks.
    fn take(&self) -> impl Iterator<Item = Note<T>> {
        self.by_rank
            .iter()
            .filter_map(|notes| notes.lock().unwrap_or_else(PoisonError::into_inner).pop_front().flatten())
    }
}

/// How far an epoch has come.
#[derive(Default)]
pub(super) struct EpochProgress {
    /// A round has been agreed on, so the next agreement is the end of one.
    has_begun: bool,
    rounds: usize,
    num_items: usize,
}

/// The learner's parts, on rank 0.
pub(super) struct Reporter<M: LearnerModel> {
    processor: SupervisedTrainingEventProcessor<M>,
    checkpointer: Option<LearningCheckpointer<M>>,
    early_stopping: Option<Box<dyn CloneEarlyStoppingStrategy>>,
    event_store: Arc<EventStoreClient>,
    interrupter: Interrupter,
}

impl<M: LearnerModel> Reporter<M> {
    pub(super) fn new(components: TrainingComponents<M>) -> Self {
        Self {
            processor: components.event_processor,
            checkpointer: components.checkpointer,
            early_stopping: components.early_stopping,
            event_store: components.event_store,
            interrupter: components.interrupter,
        }
    }

    pub(super) fn into_processor(self) -> SupervisedTrainingEventProcessor<M> {
        self.processor
    }

    pub(super) fn train(&mut self, event: LearnerEvent<<M as TrainStep>::Output>) {
        self.interrupter.fail_on_error(self.processor.process_train(event));
    }

    pub(super) fn valid(&mut self, event: LearnerEvent<<M as InferenceStep>::Output>) {
        self.interrupter.fail_on_error(self.processor.process_valid(event));
    }

    /// Passes on what all ranks have left in the last round of training.
    pub(super) fn trained(&mut self, shared: &Shared<M>, progress: &mut EpochProgress) {
        for note in progress.round(&shared.trained) {
            self.train(progress.event(note, shared.num_train));
        }
    }

    /// Passes on what all ranks have left in the last round of validation.
    pub(super) fn validated(&mut self, shared: &Shared<M>, progress: &mut EpochProgress) {
        for note in progress.round(&shared.validated) {
            self.valid(progress.event(note, shared.num_valid));
        }
    }

    /// Waits until all metrics of the epoch are computed.
    pub(super) fn flush(&mut self) {
        self.interrupter.fail_on_error(self.processor.flush());
    }

    pub(super) fn save(&mut self, learner: &Learner<M>, epoch: usize) {
        if let Some(checkpointer) = &mut self.checkpointer {
            checkpointer.checkpoint(learner, epoch, &self.event_store);
        }
    }

    pub(super) fn should_stop_early(&mut self, epoch: usize) -> bool {
        self.early_stopping.as_mut().is_some_and(|strategy| strategy.should_stop(epoch, &self.event_store))
    }
}

impl EpochProgress {
    fn round<T>(&mut self, mailbox: &Mailbox<T>) -> Vec<Note<T>> {
        if !std::mem::replace(&mut self.has_begun, true) {
            // Other ranks may have left notes of the first round already.
            return Vec::new();
        }
        self.rounds += 1;
        mailbox.take().collect()
    }

    fn event<T>(&mut self, note: Note<T>, total: usize) -> LearnerEvent<T> {
        self.num_items += note.num_items;
        let progress = Progress::new(self.num_items, total, Some("items".to_owned()));
        LearnerEvent::ProcessedItem(TrainingItem::new(note.output, progress, Some(self.rounds), note.lr))
    }
}
