//! What a rank is given by the launcher: its number, its peers, its configuration.

use std::path::PathBuf;
use std::sync::atomic::AtomicUsize;
#[cfg(any(feature = "cuda", feature = "cpu"))]
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn::tensor::Device;
use bytes::Bytes;
use fsdp_core::checkpoint::SaveOptions;
use fsdp_core::{
    Communicator, Config, ControlChannel, OpTag, Phase, Recorder, Reduce, Stragglers, Tier, TierOptions, TierStats,
    Trace, Traffic,
};

use crate::device::{Board, DeviceMemory};
use crate::links::Streams;
use crate::model::{reduce_number, reduce_numbers};
use crate::{Error, Saver, Sharded, ShardedModel, ShardedOptimizer};

/// One rank of a run.
#[derive(Clone, Debug)]
pub struct Rank {
    config: Arc<Config>,
    /// Without autodiff.
    device: Device,
    /// Of the ranks that are threads of this process and share a device.
    #[cfg_attr(not(any(feature = "cuda", feature = "cpu")), expect(dead_code))]
    board: Option<Arc<Board>>,
    /// Models that this rank has sharded.
    #[cfg_attr(not(any(feature = "cuda", feature = "cpu")), expect(dead_code))]
    num_models: Arc<AtomicUsize>,
    recorder: Arc<dyn Communicator>,
    traffic: Arc<Traffic>,
    control: Arc<dyn Communicator>,
    trace: Option<Arc<Trace>>,
    streams: Streams,
    /// Once anything is offloaded to a disk.
    tier: Arc<OnceLock<Arc<Tier>>>,
    /// Where ranks are processes.
    channel: Option<Arc<ControlChannel>>,
}

impl Rank {
    pub(crate) fn new(
        config: Arc<Config>,
        device: Device,
        communicator: Arc<dyn Communicator>,
        trace: Option<Arc<Trace>>,
    ) -> Result<Self, Error> {
        let traffic = Arc::new(Traffic::default());
        let recorder: Arc<dyn Communicator> = Arc::new(Recorder::new(communicator, traffic.clone()));
        let control = recorder.channel("program")?;
        let (num_models, streams, tier) = (Arc::default(), Streams::default(), Arc::default());
        let rank = Self {
            config,
            device,
            board: None,
            num_models,
            recorder,
            traffic,
            control,
            trace,
            streams,
            tier,
            channel: None,
        };
        // At once, so that a directory that cannot be used is known before anything is computed.
        if let Some(key) = rank.config.offload.nvme_key() {
            rank.open_tier(key)?;
        }
        Ok(rank)
    }

    /// As a process of several.
    pub(crate) fn with_channel(self, channel: Arc<ControlChannel>) -> Self {
        Self { channel: Some(channel), ..self }
    }

    /// As a thread of several.
    pub(crate) fn with_board(self, board: Option<Arc<Board>>) -> Self {
        Self { board, ..self }
    }

    #[cfg(any(feature = "cuda", feature = "cpu"))]
    pub(crate) fn board(&self) -> Option<&Arc<Board>> {
        self.board.as_ref()
    }

    /// A number for one more model, the same on all ranks.
    #[cfg(any(feature = "cuda", feature = "cpu"))]
    pub(crate) fn next_model(&self) -> usize {
        self.num_models.fetch_add(1, Ordering::Relaxed)
    }

    /// This rank's number, from 0.
    pub fn rank(&self) -> usize {
        self.control.rank()
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.control.world_size()
    }

    /// Whether this is rank 0, which prints.
    pub fn is_main(&self) -> bool {
        self.rank() == 0
    }

    /// The configuration of the run.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The device to build the model and its inputs on, which the configuration's `device` says: with autodiff, and with
    /// Burn's balanced gradient checkpointing.
    ///
    /// Checkpointing is what lets gathered weights go after forward where a layer uses a view of them, as a linear
    /// layer on three dimensions does. It also keeps fewer activations, and gives the same bits.
    ///
    /// What is moved here, by `Module::fork` or `Tensor::to_device`, keeps the checkpointing of where it was made, and Burn
    /// panics where it meets what was made here ("checkpointing strategy mismatch"). So make it on a device with
    /// `.autodiff().gradient_checkpointing()`.
    pub fn device(&self) -> Device {
        self.device.clone().autodiff().gradient_checkpointing()
    }

    /// Shards a model that this rank has just built. All ranks get rank 0's initial weights, running statistics, and
    /// parameters of integers and booleans; what is marked `#[shard(ignore)]` stays as each rank has built it. *Collective.*
    ///
    /// Memory: at stage 3, the largest single parameter on rank 0 and this rank's blocks; below, the whole model.
    ///
    /// # Errors
    /// If a partition spec does not fit, a parameter cannot be sharded, or a collective fails.
    pub fn shard<M: Module + Sharded>(&self, model: M) -> Result<ShardedModel<M>, Error> {
        ShardedModel::new(model, self)
    }

    /// An optimizer for sharded models, over any elementwise Burn optimizer; parameter groups are kept.
    ///
    /// # Errors
    /// If it clips by the norm of each tensor, which blocks of a tensor do not have. An optimizer that needs whole
    /// tensors is refused at its first step, where it meets the parameters.
    ///
    /// Burn's L-BFGS, which steps a whole model by itself, is no such optimizer:
    ///
    /// ```compile_fail,E0277
    /// use fsdp_burn::{Config, launch};
    ///
    /// launch(&Config::default(), |rank| rank.optimizer(burn::optim::LBFGSConfig::new().init()).map(drop));
    /// ```
    pub fn optimizer<O: Into<ModuleOptimizer>>(&self, optimizer: O) -> Result<ShardedOptimizer, Error> {
        ShardedOptimizer::new(optimizer, &self.config)
    }

    /// A saver in the background, for checkpoints under `root`. *Collective*, but waits for nobody.
    ///
    /// # Errors
    /// If the system refuses a thread.
    pub fn saver(&self, root: impl Into<PathBuf>, options: SaveOptions) -> Result<Saver, Error> {
        Saver::new(self.recorder.as_ref(), root.into(), options)
    }

    /// This rank's share of `items`, dealt out in turn. An incomplete last round is left out, so that all ranks take
    /// the same number of steps.
    ///
    /// ```
    /// use fsdp_burn::{Config, launch};
    ///
    /// let config = Config { world_size: 2, ..Config::default() };
    /// let shares = launch(&config, |rank| Ok(rank.batches(0..5).collect::<Vec<_>>()))?;
    /// assert_eq!(shares, [[0, 2], [1, 3]]);
    /// # Ok::<(), fsdp_burn::Error>(())
    /// ```
    pub fn batches<I: IntoIterator>(&self, items: I) -> impl Iterator<Item = I::Item> + use<I> {
        let (rank, world_size) = (self.rank(), self.world_size());
        let mut items = items.into_iter();
        std::iter::from_fn(move || {
            let mut mine = None;
            for turn in 0..world_size {
                let item = items.next()?;
                if turn == rank {
                    mine = Some(item);
                }
            }
            mine
        })
    }

    /// The mean of `value` over all ranks, the same on each. *Collective.*
    ///
    /// # Errors
    /// If a collective fails.
    pub fn mean(&self, value: f64) -> Result<f64, Error> {
        self.reduce("mean of a value", value, Reduce::mean(self.world_size()))
    }

    /// The sum of `value` over all ranks, the same on each. *Collective.*
    ///
    /// # Errors
    /// If a collective fails.
    pub fn sum(&self, value: f64) -> Result<f64, Error> {
        self.reduce("sum of a value", value, Reduce::SUM)
    }

    /// Whether `flag` is set on any rank, the same on each. *Collective.*
    ///
    /// What all ranks must do together, such as saving, stopping early or skipping, is decided by this and not by a value
    /// of one rank.
    ///
    /// # Errors
    /// If a collective fails.
    pub fn any(&self, flag: bool) -> Result<bool, Error> {
        Ok(self.reduce("whether any rank says so", f64::from(u8::from(flag)), Reduce::SUM)? > 0.0)
    }

    /// Whether `flag` is set on all ranks, the same on each. *Collective.*
    ///
    /// # Errors
    /// If a collective fails.
    pub fn all(&self, flag: bool) -> Result<bool, Error> {
        Ok(!self.any(!flag)?)
    }

    /// This rank's own items, as long as every rank has one: all ranks leave the loop after the same number of rounds,
    /// and what longer ones have left over is not used. *Collective* in each round.
    ///
    /// [`Rank::batches`] deals out one sequence; this is for ranks with sequences of their own, of lengths that need not
    /// agree. Cost: one message of 8 bytes per round.
    ///
    /// # Errors
    /// An item is an error if a collective fails.
    ///
    /// ```
    /// use fsdp_burn::{Config, launch};
    ///
    /// let config = Config { world_size: 2, ..Config::default() };
    /// let lengths = launch(&config, |rank| {
    ///     let items = 0..3 + rank.rank(); // three on one rank, four on the other
    ///     rank.while_all(items).collect::<Result<Vec<_>, _>>()
    /// })?;
    /// assert_eq!(lengths, [[0, 1, 2], [0, 1, 2]]);
    /// # Ok::<(), fsdp_burn::Error>(())
    /// ```
    pub fn while_all<I: IntoIterator>(&self, items: I) -> impl Iterator<Item = Result<I::Item, Error>> {
        // In a round that all ranks agree on, each has an item.
        self.rounds(items, Self::all).filter_map(Result::transpose)
    }

    /// This rank's own items, as long as any rank has one; a rank whose items have ended gets `None`, and goes on to take
    /// part in every collective: with any batch and a weight of 0 in
    /// [`ShardedModel::backward_weighted`](crate::ShardedModel::backward_weighted). So no item is left out. *Collective*
    /// in each round.
    ///
    /// Cost: one message of 8 bytes per round.
    ///
    /// # Errors
    /// An item is an error if a collective fails.
    ///
    /// ```
    /// use fsdp_burn::{Config, launch};
    ///
    /// let config = Config { world_size: 2, ..Config::default() };
    /// let seen = launch(&config, |rank| {
    ///     rank.while_any(0..1 + rank.rank()).collect::<Result<Vec<_>, _>>()
    /// })?;
    /// assert_eq!(seen, [[Some(0), None], [Some(0), Some(1)]]);
    /// # Ok::<(), fsdp_burn::Error>(())
    /// ```
    pub fn while_any<I: IntoIterator>(&self, items: I) -> impl Iterator<Item = Result<Option<I::Item>, Error>> {
        self.rounds(items, Self::any)
    }

    /// This rank's item of each round, as long as `agree`, told whether it has one, says that there is a round.
    fn rounds<I: IntoIterator>(
        &self,
        items: I,
        agree: fn(&Self, bool) -> Result<bool, Error>,
    ) -> impl Iterator<Item = Result<Option<I::Item>, Error>> {
        let mut items = items.into_iter().fuse();
        let mut ended = false;
        std::iter::from_fn(move || {
            if ended {
                return None;
            }
            let item = items.next();
            let go_on = agree(self, item.is_some());
            ended = !matches!(go_on, Ok(true));
            match go_on {
                Ok(true) => Some(Ok(item)),
                Ok(false) => None,
                Err(error) => Some(Err(error)),
            }
        })
    }

    /// Every rank's bytes, in rank order, on all ranks. The lengths may differ. *Collective.*
    ///
    /// # Errors
    /// If a collective fails.
    pub fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        let mut all = Vec::with_capacity(self.world_size());
        for root in 0..self.world_size() {
            let mine = (root == self.rank()).then(|| Bytes::copy_from_slice(bytes));
            all.push(self.control.broadcast(&self.tag("bytes of each rank"), root, mine)?.to_vec());
        }
        Ok(all)
    }

    /// Returns when every rank has called it. *Collective.*
    ///
    /// # Errors
    /// If a rank fails, or does not come within the time limit.
    pub fn barrier(&self) -> Result<(), Error> {
        Ok(self.control.barrier(&self.tag("barrier"))?)
    }

    /// What this rank has sent: operations and bytes, by kind, since the start or since [`Traffic::reset`].
    pub fn traffic(&self) -> &Traffic {
        &self.traffic
    }

    /// The same, for what sends by another way than a communicator.
    #[cfg(any(feature = "cuda", feature = "cpu"))]
    pub(crate) fn shared_traffic(&self) -> Arc<Traffic> {
        self.traffic.clone()
    }

    /// What this rank has written to its disk and read from it; `None` where nothing is offloaded to one.
    pub fn tier_stats(&self) -> Option<TierStats> {
        self.tier.get().map(|tier| tier.stats())
    }

    /// What this rank's device holds for tensors at the moment; `None` where that is the memory of the process. Waits for what
    /// the device has to do.
    ///
    /// ```
    /// use fsdp_burn::{Config, launch};
    ///
    /// let memory = launch(&Config::default(), |rank| Ok(rank.device_memory()))?;
    /// assert_eq!(memory, [None]); // the processor
    /// # Ok::<(), fsdp_burn::Error>(())
    /// ```
    pub fn device_memory(&self) -> Option<DeviceMemory> {
        DeviceMemory::of(&self.device)
    }

    /// Who lets other ranks wait for longer than `patience`, in which operation; `None` if nobody does. Where ranks are
    /// processes, rank 0 knows it, from what the others told a second ago: ask it on a thread of its own, since its program may
    /// wait too. A warning says the same after a quarter of the time limit, or 30 s. Threads of one process are not looked at.
    pub fn stragglers(&self, patience: Duration) -> Option<Stragglers> {
        self.channel.as_ref()?.stragglers(patience)
    }

    /// The configuration, for what outlives the rank.
    pub(crate) fn shared_config(&self) -> Arc<Config> {
        self.config.clone()
    }

    pub(crate) fn tier(&self) -> Option<Arc<Tier>> {
        self.tier.get().cloned()
    }

    /// Where the disk is once it is opened, for whoever outlives the rank.
    pub(crate) fn tier_place(&self) -> Arc<OnceLock<Arc<Tier>>> {
        self.tier.clone()
    }

    /// This rank's disk, for what asks for one: a key of the configuration, or a unit. Opened at the first call.
    pub(crate) fn open_tier(&self, wanted_by: &str) -> Result<Arc<Tier>, Error> {
        let offload = &self.config.offload;
        let Some(dir) = &offload.nvme_path else {
            return Err(Error::Parameter {
                parameter: wanted_by.to_owned(),
                problem: "it is placed on NVMe, which needs a directory on a disk".into(),
                remedy: "set `nvme_path` under [offload]",
            });
        };
        if let Some(tier) = self.tier.get() {
            return Ok(tier.clone());
        }
        let tier = Tier::open(&TierOptions {
            block_bytes: offload.nvme_block_bytes,
            buffer_bytes: offload.nvme_buffer_bytes,
            checksums: offload.nvme_checksums,
            timeout: self.config.timeout(),
            ..TierOptions::new(dir, self.rank(), self.world_size())
        })?;
        Ok(self.tier.get_or_init(|| Arc::new(tier)).clone())
    }

    pub(crate) fn streams(&self) -> &Streams {
        &self.streams
    }

    pub(crate) fn trace(&self) -> Option<&Arc<Trace>> {
        self.trace.as_ref()
    }

    pub(crate) fn communicator(&self) -> Arc<dyn Communicator> {
        self.recorder.clone()
    }

    /// The sums of some numbers over all ranks, in one message. *Collective.*
    #[cfg_attr(not(feature = "learner"), expect(dead_code))]
    pub(crate) fn sums<const N: usize>(&self, what: &str, values: [f64; N]) -> Result<[f64; N], Error> {
        reduce_numbers(self.control.as_ref(), &self.tag(what), values, Reduce::SUM)
    }

    fn reduce(&self, what: &str, value: f64, reduce: Reduce) -> Result<f64, Error> {
        reduce_number(self.control.as_ref(), &self.tag(what), value, reduce)
    }

    fn tag(&self, what: &str) -> OpTag {
        OpTag::new(0, Phase::Control, what)
    }
}
