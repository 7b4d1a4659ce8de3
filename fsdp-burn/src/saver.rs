//! Saving in the background: training goes on while a thread of each rank writes.

use std::collections::BTreeMap;
use std::path::PathBuf;

use burn::module::Module;
use fsdp_core::Communicator;
use fsdp_core::checkpoint::{self, SaveOptions, Saved};
use serde_json::Value;

use crate::{Error, ShardedModel, ShardedOptimizer};

/// Saves a model again and again while it trains on. Made by [`Rank::saver`](crate::Rank::saver); every rank has one, and
/// all make the same calls in the same order.
///
/// [`Saver::save`] returns when the state is noted; a thread with low priority writes it, past the system's page cache where
/// that can be. One save is under way at a time: the next one waits for it. A save that fails is an error of the next
/// [`poll`](Saver::poll), [`save`](Saver::save) or [`finish`](Saver::finish), on **every** rank, and names the rank that
/// failed; training may go on, and the saver be used again.
///
/// Memory while a save is under way: this rank's optimizer state and parameters once more, as far as steps have replaced them
/// and they are not written yet. Where the optimizer is none of this crate's, Burn's record of its state is a copy, made at once.
/// Time of training: the first step after it makes new optimizer state in place of changing what is there, and the
/// thread takes some of the processors.
///
/// The configured `timeout_s` must allow for the slowest disk. Dropping a saver waits for the save under way and loses its
/// error: call [`finish`](Saver::finish) at the end.
///
/// ```
/// use std::collections::BTreeMap;
/// use burn::{module::Module, nn::{Linear, LinearConfig}, optim::SgdConfig, tensor::Tensor};
/// use fsdp_burn::{Config, Error, SaveOptions, Sharded, launch};
///
/// #[derive(Module, Debug, Sharded)]
/// struct Model {
///     layer: Linear,
/// }
///
/// # let path = std::env::temp_dir().join(format!("fsdp-burn-doc-saver-{}", std::process::id()));
/// # let root = path.clone();
/// let saved = launch(&Config { world_size: 2, ..Config::default() }, move |rank| {
///     let device = rank.device();
///     let mut model = rank.shard(Model { layer: LinearConfig::new(4, 4).init(&device) })?;
///     let mut optimizer = rank.optimizer(SgdConfig::new().init())?;
///     let mut saver = rank.saver(&root, SaveOptions::default())?;
///     for step in 1..=4 {
///         let gradients = model.backward(model.layer.forward(Tensor::<2>::ones([8, 4], &device)).mean())?;
///         optimizer.step(0.1, &mut model, gradients)?;
///         if step % 2 == 0 {
///             saver.save(&model, &optimizer, BTreeMap::new())?;
///         }
///         saver.poll()?; // tells of a save that has failed
///     }
///     saver.finish()
/// })?;
/// assert!(saved[0].as_ref().is_some_and(|saved| saved.dir.ends_with("step-4")));
/// # std::fs::remove_dir_all(path).map_err(Error::program)?;
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug)]
pub struct Saver {
    inner: checkpoint::Saver,
}

impl Saver {
    pub(crate) fn new(comm: &dyn Communicator, root: PathBuf, options: SaveOptions) -> Result<Self, Error> {
        Ok(Self { inner: checkpoint::Saver::new(comm, root, options)? })
    }

    /// Notes the state of model and optimizer, begins to save it as [`ShardedModel::save`] does, and returns. Waits first
    /// for a save that is under way, and returns what that one has saved. *Collective*; not between a backward and its step.
    ///
    /// State that is offloaded to a disk is read into memory for that, all of it.
    ///
    /// # Errors
    /// On every rank: what made the earlier save fail, in which case the new one is not begun; or what [`ShardedModel::save`]
    /// refuses.
    pub fn save<M: Module>(
        &mut self,
        model: &ShardedModel<M>,
        optimizer: &ShardedOptimizer,
        sections: BTreeMap<String, Value>,
    ) -> Result<Option<Saved>, Error> {
        // First the wait, so that there are never two copies of the state.
        let earlier = self.inner.finish()?;
        let noted = model.note(optimizer, sections)?;
        // A later step would write over what is read later.
        let noted = match model.engine().offload().tier() {
            Some(_) => model.agree("read offloaded state", noted.at_once())?,
            None => noted,
        };
        self.inner.save_with(noted.step(), move || Ok(noted.into_snapshot()?))?;
        Ok(earlier)
    }

    /// Whether a save is under way, or its outcome has not been asked for.
    pub fn is_saving(&self) -> bool {
        self.inner.is_saving()
    }

    /// What was saved, once all ranks are done with it; `None` before, and where no save is under way. *Collective.*
    ///
    /// Costs two short messages between ranks while a save is under way, and nothing otherwise: call it after each step.
    ///
    /// # Errors
    /// What made the save fail, on every rank in the same call.
    pub fn poll(&mut self) -> Result<Option<Saved>, Error> {
        Ok(self.inner.poll()?)
    }

    /// Waits for the save under way, and returns what it saved; `None` where there is none.
    ///
    /// # Errors
    /// What made the save fail, on every rank.
    pub fn finish(&mut self) -> Result<Option<Saved>, Error> {
        Ok(self.inner.finish()?)
    }
}

#[cfg(test)]
mod tests {
    use burn::nn::{Linear, LinearConfig};
    use burn::optim::{AdamWConfig, ModuleOptimizer, SgdConfig, momentum::MomentumConfig};
    use burn::tensor::Tensor;
    use fsdp_core::checkpoint::{BlockData, TensorBlock};
    use fsdp_core::{Config, Stage};

    use super::*;
    use crate::checkpoint::Noted;
    use crate::{FusedAdamW, Sharded, launch};

    #[derive(Module, Debug, Sharded)]
    struct Model {
        #[shard(units)]
        layers: Vec<Linear>,
    }

    fn optimizer(number: usize) -> ModuleOptimizer {
        match number {
            0 => SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init(),
            1 => AdamWConfig::new().init(),
            _ => FusedAdamW::new(&AdamWConfig::new()).unwrap().into(),
        }
    }

    /// Copies of all that was noted, by name.
    fn tensors(noted: Noted) -> Result<Vec<(String, Vec<u8>)>, Error> {
        let copied = |tensor: TensorBlock<'_>| match tensor.data {
            BlockData::Ready(bytes) => (tensor.name, bytes.to_vec()),
            BlockData::Lazy(_) => panic!("everything is noted at once"),
        };
        Ok(noted.into_snapshot()?.tensors.into_iter().map(copied).collect())
    }

    #[test]
    fn what_is_noted_stays_while_training_goes_on() {
        for (stage, number) in Stage::ALL.into_iter().flat_map(|stage| [0, 1, 2].map(|number| (stage, number))) {
            let config = Config { stage, world_size: 2, ..Config::default() };
            launch(&config, move |rank| {
                let device = rank.device();
                let layers = (0..2).map(|_| LinearConfig::new(4, 4).init(&device)).collect();
                let mut model = rank.shard(Model { layers })?;
                let mut optimizer = rank.optimizer(optimizer(number))?;
                let step = |model: &mut ShardedModel<Model>, optimizer: &mut ShardedOptimizer| {
                    let ones = Tensor::<2>::ones([3, 4], &device);
                    let loss = model.layers.iter().fold(ones, |x, layer| layer.forward(x)).powi_scalar(2).mean();
                    let gradients = model.backward(loss)?;
                    optimizer.step(0.1, model, gradients).map(drop)
                };
                step(&mut model, &mut optimizer)?;
                let noted = model.note(&optimizer, BTreeMap::new())?;
                let copies: Vec<_> = tensors(model.note(&optimizer, BTreeMap::new())?)?;
                for _ in 0..3 {
                    step(&mut model, &mut optimizer)?;
                }
                let later = tensors(model.note(&optimizer, BTreeMap::new())?)?;
                assert!(tensors(noted)? == copies, "{stage}, optimizer {number}");
                let mut pairs = later.iter().zip(&copies);
                assert!(pairs.all(|(later, copy)| later != copy || later.1.is_empty()), "training changes all of it");
                Ok(())
            })
            .unwrap();
        }
    }
}
