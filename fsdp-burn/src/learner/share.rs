//! The data of each rank: a slice of what the learner was given.

use std::sync::Arc;

use burn::data::dataloader::{DataLoader, DataLoaderIterator};
use burn::data::dataset::DatasetError;
use burn::tensor::Device;
use burn_train::{InferenceStep, LearnerModel, TrainLoader, TrainStep, ValidLoader};

/// What one rank trains and validates on.
pub(super) struct Share<M: LearnerModel> {
    pub(super) train: Slice<<M as TrainStep>::Input>,
    pub(super) valid: Slice<<M as InferenceStep>::Input>,
}

impl<M: LearnerModel> Share<M> {
    /// The shares of all ranks, in order: consecutive parts of the data, as equal as they can be.
    pub(super) fn of_all(
        world_size: usize,
        train: &TrainLoader<M>,
        valid: &ValidLoader<M>,
        device: &Device,
    ) -> Vec<Share<M>> {
        let train = slices(world_size, train, device);
        let valid = slices(world_size, valid, &device.clone().inner());
        train.into_iter().zip(valid).map(|(train, valid)| Share { train, valid }).collect()
    }
}

/// All slices are made here, and not by the ranks: a loader that shuffles draws random numbers for each.
fn slices<O>(world_size: usize, loader: &Arc<dyn DataLoader<O>>, device: &Device) -> Vec<Slice<O>> {
    let len = loader.num_items();
    let slice = |rank: usize| {
        // One rank has the loader itself, whose order is then that of a training without ranks.
        let own = match world_size {
            1 => loader.to_device(device),
            _ => loader.slice(rank * len / world_size, (rank + 1) * len / world_size).to_device(device),
        };
        Slice { own, spare: loader.slice(0, len.min(1)).to_device(device) }
    };
    (0..world_size).map(slice).collect()
}

/// One rank's part of a data set.
pub(super) struct Slice<O> {
    own: Arc<dyn DataLoader<O>>,
    /// One item, for a round in which this rank has no batch and the others have.
    spare: Arc<dyn DataLoader<O>>,
}

impl<O> Clone for Slice<O> {
    fn clone(&self) -> Self {
        Self { own: self.own.clone(), spare: self.spare.clone() }
    }
}

impl<O> Slice<O> {
    /// The batches of an epoch.
    pub(super) fn batches(&self) -> Batches<'_, O> {
        Batches { iterator: Some(self.own.iter()), processed: 0 }
    }

    /// A batch of one item, whose result does not count.
    pub(super) fn spare(&self) -> Option<Result<O, DatasetError>> {
        self.spare.iter().next()
    }
}

/// See [`Slice::batches`].
pub(super) struct Batches<'a, O> {
    /// `None` after the last batch.
    iterator: Option<Box<dyn DataLoaderIterator<O> + 'a>>,
    processed: usize,
}

/// A batch, and the number of items in it.
pub(super) struct Batch<O> {
    pub(super) input: O,
    pub(super) num_items: usize,
}

impl<O> Iterator for Batches<'_, O> {
    type Item = Result<Batch<O>, DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        let iterator = self.iterator.as_mut()?;
        let Some(input) = iterator.next() else {
            self.iterator = None;
            return None;
        };
        let processed = iterator.progress().items_processed;
        // A loader that tells of no progress counts batches.
        let num_items = processed.saturating_sub(self.processed).max(1);
        self.processed = processed;
        Some(input.map(|input| Batch { input, num_items }))
    }
}
