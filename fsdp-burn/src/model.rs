//! A model whose parameters are sharded, and that is otherwise used like the model it was.

use std::ops::Deref;
use std::sync::Arc;

use burn::module::Module;
use burn::tensor::{Device, FloatDType, GradientCheckpointingStrategy, Gradients, Tensor, TensorData};
use fsdp_core::{
    Activations, Axis, Buffers, Communicator, Config, Dtype, MemoryEstimate, OpTag, OptimizerKind, Phase, Plan,
    PlanMemory, PlannedParam, PrefetchDepth, Reduce, ReducePart, ShardLayout, Stage, TierShares, UnitOverrides,
};

use crate::block::Home;
use crate::buffers::{self, Buffer};
use crate::device::{check_dtypes, check_loading};
use crate::distribute::{Restored, Source, Stored, attach, distribute, let_go, managed, planned, refresh, restore};
use crate::engine::{Engine, EngineFailed, EngineStats, Settings};
use crate::links::Links;
use crate::offload::{Offload, unit_on_disk};
use crate::precision::Dtypes;
use crate::scaled_loss::scaled;
use crate::survey::{Entry, survey};
use crate::{Error, Rank, Sharded, constants, host};

/// A sharded model. It derefs to the model, whose `forward` is called as ever.
///
/// At stage 3 each parameter field stores this rank's block only, so `model.head.weight.shape()` is the shape of the
/// block; [`ShardedModel::shape`] and [`ShardedModel::num_params`] tell the logical ones. Weights change through the
/// optimizer alone: there is no mutable access, because the engine would not see it.
///
/// All ranks must call `forward`, [`backward`](ShardedModel::backward) and the other methods marked *collective* in the
/// same order. A rank that does not makes every rank fail with the operation's name.
#[derive(Debug)]
pub struct ShardedModel<M> {
    module: M,
    /// For each float parameter that Burn visits, its index among the plan's parameters; tied ones have one together.
    managed: Arc<[Option<usize>]>,
    /// All that Burn visits, in its order.
    entries: Arc<[Entry]>,
    /// With what is trained at the moment.
    plan: Plan,
    /// The plan's parameters as Burn knows them.
    planned: Arc<[Entry]>,
    /// Of each adapter, by the entry of its base.
    scales: Vec<Option<f64>>,
    config: Arc<Config>,
    engine: Arc<Engine>,
}

impl<M> Deref for ShardedModel<M> {
    type Target = M;

    fn deref(&self) -> &M {
        &self.module
    }
}

/// Proof that backward has run, to be given to the optimizer. The gradients themselves are in the engine, reduced.
#[must_use = "give the gradients to the optimizer's step"]
pub struct ShardedGradients {
    unmanaged: Gradients,
    engine: Arc<Engine>,
}

impl ShardedGradients {
    pub(crate) fn are_of(&self, engine: &Arc<Engine>) -> bool {
        Arc::ptr_eq(&self.engine, engine)
    }

    /// Gradients of parameters that are not managed (`#[shard(ignore)]`): local to this rank, as Burn computed them. With a
    /// loss scale they are as many times too large as [`ShardedModel::loss_scale`] was in backward, and may have overflowed.
    pub fn unmanaged(&mut self) -> &mut Gradients {
        &mut self.unmanaged
    }
}

impl<M: Module + Sharded> ShardedModel<M> {
    pub(crate) fn new(module: M, rank: &Rank) -> Result<Self, Error> {
        let config = rank.config();
        let mesh = config.resolved_mesh();
        check_device(&module, rank)?;
        let entries = survey(&module)?;
        let specs: Vec<_> = entries
            .iter()
            .filter(|entry| entry.is_param && entry.tied_to.is_none())
            .map(|entry| entry.spec.clone())
            .collect();
        let policy = M::wrap_policy();
        let plan = Plan::new(&policy, &specs, &mesh, config.stage)?;
        check_supported(&plan, &entries)?;
        for warning in plan.warnings().iter().filter(|_| rank.is_main()) {
            tracing::warn!("{warning}");
        }
        if rank.is_main() && config.stage.shards_parameters() && !checkpoints(&module) {
            tracing::warn!(
                "the model is on a device without gradient checkpointing, so layers that use a view of a weight keep it \
                 gathered until backward, and inputs that are made on `rank.device()` cannot meet it; build it there, or, \
                 where it is moved there, on a device with `.autodiff().gradient_checkpointing()`"
            );
        }
        if rank.is_main() && config.stage != Stage::Ddp && mesh.size(Axis::Shard) == 1 {
            let stage = config.stage.number();
            tracing::info!(
                "the mesh has one rank along `shard`, so nothing is sharded: stage {stage} behaves like stage 0"
            );
        }
        let module = match buffers::entries(&entries).next() {
            Some(_) => buffers::unshare(module, &entries),
            None => module,
        };
        let links = Links::new(rank.communicator().as_ref(), rank.streams(), &mesh, config.resharding())?;
        #[cfg(any(feature = "cuda", feature = "cpu"))]
        let links = links.with_devices(rank)?;
        let shard_index = mesh.coordinate(Axis::Shard, rank.rank());
        let managed = managed(&entries, &plan);
        refuse_unmanaged_adapters(&entries, &managed)?;
        let planned = planned(&entries, &managed);
        let tier = match unit_on_disk(&plan) {
            Some(unit) => Some(rank.open_tier(&unit.name)?),
            None => rank.tier(),
        };
        if config.offload.optimizer.nvme > 0.0 || unit_on_disk(&plan).is_some() {
            check_loading(config)?;
        }
        let offload = Offload::new(&config.offload, Home::of(&rank.device()), tier, &plan, shard_index);
        let module = constants::share(module, &policy, links.control.as_ref())?;
        let source = Source { entries: &entries, managed: &managed, plan: &plan, offload: &offload, shard_index };
        let (module, distributed) = distribute(module, source, links.control.as_ref())?;
        let training = &config.training;
        let settings = Settings {
            depth: PrefetchDepth::from(&config.prefetch),
            reduction: training.gradient_reduction,
            accumulate: training.accumulate,
            accumulation: training.gradient_accumulation,
            precision: config.precision.clone(),
            sees_squares: training.gradient_norm_order == 2.0 && training.needs_norm(),
        };
        let dtypes = Dtypes::new(&plan, distributed.dtypes, &config.precision);
        buffers::check_precision(&entries, &managed, &dtypes.compute)?;
        check_dtypes(config.device, &rank.device(), dtypes.compute.iter().chain(&dtypes.output).copied())?;
        let trace = rank.trace().cloned();
        let engine = Arc::new(Engine::new(plan.clone(), shard_index, dtypes, links, settings, offload, trace));
        for (param, stored) in distributed.stored.into_iter().enumerate() {
            match stored {
                Stored::Here(bytes) => engine.set_value(param, bytes),
                Stored::Away(slot) => engine.set_block_slot(param, slot),
            }
        }
        engine.place_all()?;
        if rank.is_main() {
            tracing::info!("{}", engine.precision_summary());
        }
        let (module, scales) = attach(module, &entries, &managed, &engine);
        let (config, entries) = (rank.shared_config(), entries.into());
        Ok(Self { module, managed, entries, plan, planned, scales, config, engine })
    }
}

impl<M: Module> ShardedModel<M> {
    /// Computes all gradients of `loss` and starts their reduction over the ranks. *Collective.*
    ///
    /// Gradients are the mean over ranks (unless the configuration says sum), so `loss` is this rank's mean over its own
    /// data; with unequal amounts of data use [`ShardedModel::backward_weighted`]. Call it once per forward, and then
    /// the optimizer's step; with gradient accumulation the step counts the calls.
    ///
    /// Cost: at stage 3 one gather of each unit that does not stay gathered, and one reduce-scatter of each unit.
    ///
    /// # Errors
    /// If a collective fails.
    pub fn backward(&self, loss: Tensor<1>) -> Result<ShardedGradients, Error> {
        // After weighted losses of the same step it counts as one item.
        let unit = self.engine.item_unit(1.0);
        let loss = if unit == 1.0 { loss } else { widened(loss).mul_scalar(unit.recip()) };
        self.backward_over(None, loss)
    }

    /// As [`ShardedModel::backward`], where each rank's `loss` is a mean over `weight` items (tokens, samples): the
    /// gradient of a step is that of the mean over the items of all ranks and micro-batches. A rank without data passes
    /// a weight of 0, and its loss does not count, whatever it is. *Collective.*
    ///
    /// Cost: one message of 8 bytes more.
    ///
    /// # Errors
    /// If a weight is negative or not a number, the weights of all ranks are 0 together, or a collective fails. The
    /// forward before it is abandoned then, and training can go on with the next one.
    pub fn backward_weighted(&self, loss: Tensor<1>, weight: f64) -> Result<ShardedGradients, Error> {
        let control = &self.engine.links().control;
        // A bad weight is sent as NaN and not refused here, so that all ranks learn of it.
        let sent = if weight.is_finite() && weight >= 0.0 { weight } else { f64::NAN };
        let tag = OpTag::new(self.engine.progress().0, Phase::Control, "weight of the loss");
        let total = reduce_number(control.as_ref(), &tag, sent, Reduce::SUM)?;
        if total.is_nan() || total <= 0.0 {
            self.engine.abandon_forward()?;
            return Err(Error::Misuse {
                problem: format!("the weights of the loss sum to {total} over all ranks, with {weight} on this one"),
                remedy: "pass the number of items each loss is a mean of; at least one rank must have some",
            });
        }
        // Where reducing divides by the number of ranks, that is undone: the step divides by the number of items.
        let factor = if self.engine.reduces_to_mean() { weight * control.world_size() as f64 } else { weight };
        let factor = factor / self.engine.item_unit(total);
        self.backward_over(Some((total, weight > 0.0)), widened(loss).mul_scalar(factor))
    }

    fn backward_over(&self, items: Option<(f64, bool)>, loss: Tensor<1>) -> Result<ShardedGradients, Error> {
        let loss = match self.engine.scaler() {
            Some(scaler) => scaled(loss, scaler.scale()),
            None => loss,
        };
        let unmanaged = self.engine.backward(items, || loss.backward())?;
        Ok(ShardedGradients { unmanaged, engine: self.engine.clone() })
    }

    /// The model for evaluation: no gradients, dropout off, and the same sharded parameters. *Collective* in its use:
    /// all ranks must run the same forwards.
    ///
    /// It shows the weights of now; after an optimizer step call it again.
    pub fn valid(&self) -> M {
        self.module.valid()
    }

    /// The model as it was before it was sharded, with the weights of now, for evaluation: every parameter in whole, and
    /// nothing attached to it but its own adapters. *Collective*; not between a forward and its backward.
    ///
    /// Cost: one gather of each unit, and one more of what is adapted, or computed in another type than it is trained in.
    /// Memory: the whole model, of which the ranks of one process share one copy.
    ///
    /// # Errors
    /// If a collective fails.
    ///
    /// ```
    /// use burn::{module::Module, nn::LinearConfig};
    /// use fsdp_burn::{Config, launch};
    /// # use burn::nn::Linear;
    /// # #[derive(Module, Debug, fsdp_burn::Sharded)]
    /// # struct Model { #[shard(unit)] linear: Linear }
    ///
    /// let config = Config { world_size: 2, ..Config::default() };
    /// let shapes = launch(&config, |rank| {
    ///     let model = rank.shard(Model { linear: LinearConfig::new(6, 4).init(&rank.device()) })?;
    ///     Ok([model.linear.weight.dims(), model.whole()?.linear.weight.dims()])
    /// })?;
    /// assert_eq!(shapes, [[[3, 4], [6, 4]]; 2]);
    /// # Ok::<(), fsdp_burn::Error>(())
    /// ```
    pub fn whole(&self) -> Result<M, Error> {
        self.engine.abandon_forward()?;
        let mut whole = catching(|| self.module.valid().materialize())?;
        self.engine.abandon_forward()?;
        // What is computed with is a rounding of what is trained, and what is adapted is merged.
        let is_other = |param: usize| self.engine.compute_dtype(param) != self.engine.dtype(param);
        let adapted = self.entries.iter().zip(self.managed.iter()).filter(|(entry, _)| entry.lora.is_some());
        let adapted: Vec<usize> = adapted.filter_map(|(_, managed)| *managed).collect();
        let mut values = vec![None; self.plan().params().len()];
        for (param, value) in values.iter_mut().enumerate() {
            if is_other(param) || adapted.contains(&param) {
                let (full, dtype) = (self.engine.gather_one(param)?, self.engine.dtype(param));
                *value = Some(host::tensor_data(full, self.plan().params()[param].layout.shape(), dtype));
            }
        }
        if values.iter().any(Option::is_some) {
            let (entries, managed) = (&self.entries, &self.managed);
            whole = restore(whole, &Restored { entries, managed, values: &values, scales: &self.scales });
        }
        Ok(whole)
    }

    /// Which parameters form which unit, and how they are cut.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// An input in the element type that parameters are computed in (`precision.parameters`), as FSDP2 casts the inputs of
    /// its root. Burn's operations do not mix types. [`cast_input`](crate::cast_input()) does it inside a model, for one unit
    /// of it.
    ///
    /// Inputs of integers need no cast: an embedding's output has the type of its table. Costs nothing where the type is the
    /// same.
    pub fn cast_input<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        input.cast(host::float_dtype(self.engine.precision().parameters))
    }

    /// An output in `precision.output`, float32 unless the configuration says otherwise: what a loss wants.
    ///
    /// ```
    /// use burn::{module::Module, nn::{Linear, LinearConfig}, tensor::{DType, Tensor}};
    /// use fsdp_burn::{Config, Dtype, Sharded, launch};
    ///
    /// #[derive(Module, Debug, Sharded)]
    /// struct Head {
    ///     linear: Linear,
    /// }
    ///
    /// let mut config = Config { world_size: 2, ..Config::default() };
    /// config.precision.parameters = Dtype::Bf16;
    /// let dtypes = launch(&config, |rank| {
    ///     let device = rank.device();
    ///     let model = rank.shard(Head { linear: LinearConfig::new(4, 2).init(&device) })?;
    ///     let output = model.linear.forward(model.cast_input(Tensor::<2>::ones([3, 4], &device)));
    ///     Ok((output.dtype(), model.cast_output(output).dtype()))
    /// })?;
    /// assert_eq!(dtypes, [(DType::BF16, DType::F32); 2]);
    /// # Ok::<(), fsdp_burn::Error>(())
    /// ```
    pub fn cast_output<const D: usize>(&self, output: Tensor<D>) -> Tensor<D> {
        output.cast(host::float_dtype(self.engine.precision().output))
    }

    /// What the loss is multiplied with at the moment; 1 without a loss scale.
    pub fn loss_scale(&self) -> f64 {
        self.engine.scaler().map_or(1.0, |scaler| scaler.scale())
    }

    /// Logical number of parameters: what the model had before it was sharded, ignored ones left out.
    pub fn num_params(&self) -> usize {
        self.plan().num_params()
    }

    /// Parameters that this rank stores between steps.
    pub fn num_local_params(&self) -> usize {
        let plan = self.plan();
        plan.params().iter().map(|param| plan.local_len(param, self.engine.shard_index())).sum()
    }

    /// Logical shape of a parameter, by its path (`blocks.0.up.weight`); any of its paths, if it is tied.
    pub fn shape(&self, path: &str) -> Option<&[usize]> {
        let has_path = |param: &&PlannedParam| param.path == path || param.also.iter().any(|also| also == path);
        self.plan().params().iter().find(has_path).map(|param| param.layout.shape())
    }

    /// The unit table, with this rank's local sizes, the element types of everything, and what stays after forward.
    pub fn summary(&self) -> String {
        let table = self.plan().table(self.engine.shard_index());
        let mut text = format!("{}\n{:#}\n", table.trim_end(), self.engine.precision_summary());
        if let Some(group) = &self.engine.links().regather {
            let (num_ranks, num_shards) = (group.world_size(), self.plan.mesh().size(Axis::Shard));
            text += &format!("after forward, units stay cut over {num_ranks} of {num_shards} ranks, for backward\n");
        }
        text
    }

    /// Shows every parameter in whole, one at a time and in plan order. *Collective*, also where only one rank looks.
    /// Not between a forward and its backward.
    ///
    /// Cost: one gather of each parameter, and the memory of the largest one.
    ///
    /// # Errors
    /// If a collective fails.
    pub fn each_parameter(&self, mut look: impl FnMut(&str, TensorData)) -> Result<(), Error> {
        // An evaluation may have left units gathered.
        self.engine.abandon_forward()?;
        for (index, param) in self.plan().params().iter().enumerate() {
            let full = self.engine.gather_one(index)?;
            look(&param.path, host::tensor_data(full, param.layout.shape(), self.engine.dtype(index)));
        }
        Ok(())
    }

    /// Memory that this rank will need: its part of the process, whose ranks share what they hold alike. With the element types
    /// of everything, and without gradients and state of what is frozen at the moment.
    ///
    /// `activations` is what one rank's forward keeps for backward, with temporaries, which the model and the batch decide: a
    /// number of bytes by `into()`, or what [`Transformer::activations`](crate::Transformer::activations) says; `None` leaves
    /// it out.
    pub fn memory_estimate(&self, optimizer: OptimizerKind, activations: Option<Activations>) -> MemoryEstimate {
        let memory = PlanMemory { optimizer, activations, ..self.engine.memory(&self.plan) };
        memory.estimate(&self.plan)
    }

    /// Waits, after a step, for the units that it has begun to gather for the next forward, and for what it writes to a disk;
    /// then nothing is under way. Training needs no such call; measurements do, before they read
    /// [`Rank::traffic`](crate::Rank::traffic), [`ShardedModel::stats`] or a clock.
    ///
    /// # Errors
    /// If a collective fails.
    pub fn synchronize(&self) -> Result<(), Error> {
        self.engine.finish_gathers()?;
        self.engine.finish_write_back()
    }

    /// What communication has cost since the start, or since [`ShardedModel::reset_stats`].
    pub fn stats(&self) -> EngineStats {
        self.engine.stats()
    }

    /// Starts counting anew.
    pub fn reset_stats(&self) {
        self.engine.reset_stats();
    }

    /// The configuration of the run.
    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// All that Burn visits like a float parameter, in its order.
    pub(crate) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Index among the plan's parameters of an entry that is managed.
    pub(crate) fn managed(&self, entry: usize) -> Option<usize> {
        self.managed[entry]
    }

    /// Parameters that are not managed.
    #[cfg_attr(not(feature = "learner"), expect(dead_code))]
    pub(crate) fn unmanaged(&self) -> impl Iterator<Item = &Entry> {
        let is_unmanaged = |(entry, managed): &(&Entry, &Option<usize>)| entry.is_param && managed.is_none();
        self.entries.iter().zip(self.managed.iter()).filter(is_unmanaged).map(|(entry, _)| entry)
    }

    /// Running statistics, as they are on this rank.
    pub(crate) fn buffers(&self) -> Vec<Buffer> {
        match buffers::entries(&self.entries).next() {
            Some(_) => buffers::read(&self.module, &self.entries),
            None => Vec::new(),
        }
    }

    /// Puts running statistics back.
    pub(crate) fn set_buffers(&mut self, buffers: Vec<Buffer>) {
        if !buffers.is_empty() {
            self.module = buffers::write(self.module.clone(), &self.entries, buffers);
        }
    }

    /// Puts back the running statistics of before a forward that is not to count. What all ranks have noted together stays,
    /// since this rank has added nothing to it.
    #[cfg_attr(not(feature = "learner"), expect(dead_code))]
    pub(crate) fn restore_buffers(&mut self, before: Vec<Buffer>) {
        // Reading them is also what takes what forward has noted out of its queue, from where it would come later.
        let now = self.buffers();
        let over_all_ranks = buffers::entries(&self.entries).map(|entry| entry.over_all_ranks);
        let buffers = before.into_iter().zip(now).zip(over_all_ranks);
        let buffers = buffers.map(|((before, now), over_all_ranks)| if over_all_ranks { now } else { before });
        self.set_buffers(buffers.collect());
    }

    pub(crate) fn module(&self) -> &M {
        &self.module
    }

    /// Takes another choice of what is trained, and the module that `change` makes of it.
    pub(crate) fn replace_trained(&mut self, plan: Plan, change: impl FnOnce(M, &mut [Entry], &[Option<usize>]) -> M) {
        let mut entries = self.entries.to_vec();
        self.module = change(self.module.clone(), &mut entries, &self.managed);
        self.planned = planned(&entries, &self.managed);
        self.entries = entries.into();
        self.plan = plan;
    }

    /// Takes a module of other buffers, and gives it the parameters that the engine stores.
    pub(crate) fn replace_module(&mut self, module: M) {
        self.module = refresh(module, &self.managed, &self.engine);
    }

    /// Lets all ranks go on with equal running statistics, if there are some and the configuration says so.
    pub(crate) fn agree_on_buffers(&mut self) -> Result<(), Error> {
        let control = self.engine.links().control.clone();
        let policy = self.config.training.buffers;
        if policy == Buffers::Local || control.world_size() == 1 {
            return Ok(());
        }
        let own = self.buffers();
        if !own.is_empty() {
            let tag = OpTag::new(self.engine.progress().0, Phase::Optimizer, "running statistics");
            let agreed = buffers::agree(policy, control.as_ref(), &tag, own)?;
            self.set_buffers(agreed);
        }
        Ok(())
    }

    /// The entries of the plan's parameters, in plan order.
    pub(crate) fn planned_entries(&self) -> Arc<[Entry]> {
        self.planned.clone()
    }

    /// Runs an optimizer step while the model holds no parameters, and gives it the engine's afterwards. After an error
    /// the run is over, and the engine may be in the middle of a unit.
    pub(crate) fn while_let_go(&mut self, step: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
        // A module is mapped by value; the clones share all tensors and are dropped right away.
        self.module = let_go(self.module.clone(), &self.managed);
        step()?;
        self.module = refresh(self.module.clone(), &self.managed, &self.engine);
        Ok(())
    }
}

/// The loss in float32 at least: a factor may be beyond what half precision can hold.
fn widened(loss: Tensor<1>) -> Tensor<1> {
    if loss.dtype().size() < 4 { loss.cast(FloatDType::F32) } else { loss }
}

/// Runs `call`, in which an op may unwind because a collective has failed.
pub(crate) fn catching<T>(call: impl FnOnce() -> T) -> Result<T, Error> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)).map_err(|payload| {
        match payload.downcast::<EngineFailed>() {
            Ok(failed) => failed.0,
            Err(payload) => std::panic::resume_unwind(payload),
        }
    })
}

/// One number, reduced over all ranks.
pub(crate) fn reduce_number(
    communicator: &dyn Communicator,
    tag: &OpTag,
    value: f64,
    reduce: Reduce,
) -> Result<f64, Error> {
    Ok(reduce_numbers(communicator, tag, [value], reduce)?[0])
}

/// Several numbers, each reduced over all ranks, in one operation.
pub(crate) fn reduce_numbers<const N: usize>(
    communicator: &dyn Communicator,
    tag: &OpTag,
    values: [f64; N],
    reduce: Reduce,
) -> Result<[f64; N], Error> {
    let part = ReducePart {
        full: values.iter().flat_map(|value| value.to_ne_bytes()).collect(),
        layout: ShardLayout::new(&[N], 0, communicator.world_size()),
        dtype: Dtype::F64,
    };
    let sums = communicator.all_reduce(tag, &[part], reduce)?;
    let sums = sums.first().map_or(&[][..], |bytes| bytes.as_chunks::<8>().0);
    Ok(std::array::from_fn(|index| sums.get(index).map_or(f64::NAN, |bytes| f64::from_ne_bytes(*bytes))))
}

/// Inputs, which are made on the rank's device, must meet parameters there.
fn check_device<M: Module>(module: &M, rank: &Rank) -> Result<(), Error> {
    let expected = rank.device().without_autodiff();
    let is_other = |device: &Device| device.clone().without_autodiff() != expected;
    match module.devices().into_iter().find(is_other) {
        Some(other) => Err(Error::Device {
            device: rank.config().device,
            problem: format!("this rank computes on {expected:?}, and the model is on {other:?}"),
            remedy: "build the model and its inputs on `rank.device()`",
        }),
        None => Ok(()),
    }
}

/// Whether the model's device checkpoints. See [Note: Recompute, do not hold].
fn checkpoints<M: Module>(module: &M) -> bool {
    let balanced = Some(GradientCheckpointingStrategy::Balanced);
    module.devices().iter().all(|device| device.gradient_checkpointing_strategy() == balanced)
}

/// An adapter is put together from blocks, so its parameter has to be managed.
fn refuse_unmanaged_adapters(entries: &[Entry], managed: &[Option<usize>]) -> Result<(), Error> {
    match entries.iter().zip(managed).find(|(entry, managed)| entry.lora.is_some() && managed.is_none()) {
        Some((entry, _)) => Err(Error::Parameter {
            parameter: entry.path(),
            problem: "it has a LoRA adapter and is not sharded (`#[shard(ignore)]`)".into(),
            remedy: "leave it out of the adapters (`Lora::set_param_group`), or shard it",
        }),
        None => Ok(()),
    }
}

/// Refuses what this version cannot do, before anything is sent.
fn check_supported(plan: &Plan, entries: &[Entry]) -> Result<(), Error> {
    for unit in plan.units() {
        let UnitOverrides { precision, reduce, output, offload, .. } = &unit.overrides;
        let named = [("precision", precision), ("reduce", reduce), ("output", output)];
        let mut named = named.into_iter().filter_map(|(word, name)| Some((word, name.as_deref()?)));
        let dtype = named.find(|(_, name)| !Dtype::PRECISIONS.contains(name));
        let tier = offload.iter().find(|name| TierShares::of_attribute(name).is_none());
        let (problem, remedy) = match (dtype, tier) {
            (Some((word, name)), _) => (format!("`{word} = \"{name}\"` is no element type"), "write f32, bf16 or f16"),
            (_, Some(name)) => (format!("`offload = \"{name}\"` is no tier"), "write none, cpu or nvme"),
            (None, None) => continue,
        };
        return Err(Error::Parameter { parameter: unit.name.clone(), problem, remedy });
    }
    let trainable = entries.iter().any(|entry| entry.spec.trainable && entry.is_param);
    if !trainable {
        return Err(Error::Misuse {
            problem: "no parameter of the model requires a gradient".into(),
            remedy: "initialise the model on `rank.device()`, and do not freeze all of it",
        });
    }
    match entries.iter().find(|entry| entry.is_param && !(1..=8).contains(&entry.dims)) {
        Some(entry) => Err(Error::Parameter {
            parameter: entry.path(),
            problem: format!("it has {} dimensions", entry.dims),
            remedy: "give it 1 to 8 dimensions",
        }),
        None => Ok(()),
    }
}
