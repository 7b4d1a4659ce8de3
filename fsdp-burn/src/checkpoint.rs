//! A sharded model and its optimizer as a checkpoint, and back, on any world.
//!
//! Tensors go by the paths of the model: `blocks.0.up.weight` is a parameter, `optimizer.blocks.0.up.weight.momentum.moment_1`
//! a tensor of its optimizer state. Burn knows that state by the id of a parameter, which differs from run to run, so ids
//! become paths on the way out and paths become ids on the way in. State of an elementwise optimizer has the shape of its
//! parameter, so it is cut like it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn::module::Module;
use burn::optim::{ModuleOptimizer, OptimizerRecord};
use burn_pack::{Scalar, Writer};
use bytes::Bytes;
use fsdp_core::checkpoint::{
    BlockData, Checkpoint, CheckpointError, ExpectedTensor, Rejected, SaveOptions, Saved, Snapshot, StoredDtype,
    TensorBlock, TensorEntry, TensorKind, Verify, save,
};
use fsdp_core::{Dtype, OpTag, Phase, PlannedParam, Reduce, ShardLayout};
use serde_json::{Value, json};

use crate::buffers::{self, Buffer};
use crate::device::check_loading;
use crate::engine::Engine;
use crate::flat_state::{FlatState, FlatTensor};
use crate::model::reduce_number;
use crate::offload::RecordReader;
use crate::survey::Entry;
use crate::{Error, RandomState, ShardedModel, ShardedOptimizer, host};

/// What optimizer state is called in a checkpoint, in front of its parameter.
const OPTIMIZER: &str = "optimizer.";

/// What [`ShardedModel::load`] found.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// Directory of the checkpoint.
    pub dir: PathBuf,
    /// Optimizer steps done when it was saved.
    pub step: u64,
    /// What the program had stored beside model and optimizer; and `config` and `plan`, see [`ShardedModel::save`].
    pub sections: BTreeMap<String, Value>,
    /// Newer checkpoints that were passed over because they are damaged.
    pub rejected: Vec<Rejected>,
}

impl<M: Module> ShardedModel<M> {
    /// Saves model, optimizer and random numbers as `root/step-N`, N being the optimizer steps done, and lets
    /// `root/latest` name it. *Collective*; not between a backward and its step.
    ///
    /// Running statistics are stored once, rank 0's. What is marked `#[shard(ignore)]` is not saved: it is the program's own.
    /// Neither are parameters of integers or booleans, which nothing changes. The configured `timeout_s` must allow for the
    /// slowest disk.
    ///
    /// `sections` are values of the program's own, such as the position in the data or the state of a scheduler; rank 0's are
    /// stored. Unless the program has sections of these names, `config` and `plan` are beside them, for whoever looks into the
    /// checkpoint: the configuration as TOML, and [`ShardedModel::summary`].
    ///
    /// Each rank writes its blocks, once; when this returns, all is on the disk. A kill at any moment leaves the checkpoints
    /// that were there, and this one whole or not at all.
    ///
    /// Memory: a copy of this rank's optimizer state, or none with [`FusedAdamW`](crate::FusedAdamW). Time: that of the disk;
    /// [`Saver`](crate::Saver) saves while training goes on.
    ///
    /// # Errors
    /// On every rank alike: if a disk is full or refuses, gradients wait for a step, or the optimizer's state does not have
    /// the shape of its parameters.
    pub fn save(
        &self,
        root: impl AsRef<Path>,
        optimizer: &ShardedOptimizer,
        sections: BTreeMap<String, Value>,
        options: &SaveOptions,
    ) -> Result<Saved, Error> {
        let noted = self.note(optimizer, sections)?;
        let snapshot = self.agree("save optimizer state", noted.into_snapshot())?;
        Ok(save(self.engine().links().control.as_ref(), root, snapshot, options)?)
    }

    /// Notes what [`ShardedModel::save`] saves, without a copy. *Collective.* No later step changes it: blocks of parameters are
    /// replaced by a step, and so is optimizer state that is noted.
    ///
    /// # Errors
    /// As [`ShardedModel::save`], the disk aside.
    pub(crate) fn note(
        &self,
        optimizer: &ShardedOptimizer,
        mut sections: BTreeMap<String, Value>,
    ) -> Result<Noted, Error> {
        for (name, text) in [("config", self.config().to_toml()), ("plan", self.summary())] {
            sections.entry(name.to_owned()).or_insert_with(|| text.into());
        }
        let engine = self.engine();
        let (step, backwards) = engine.progress();
        if backwards > 0 {
            return Err(Error::Misuse {
                problem: format!("the model is saved after {backwards} backwards whose gradients wait for a step"),
                remedy: "save after the optimizer's step, or flush it first",
            });
        }
        let mut tensors = Vec::new();
        for (param, spec) in self.plan().params().iter().enumerate() {
            tensors.push(TensorBlock {
                name: spec.path.clone(),
                aliases: spec.also.clone(),
                kind: TensorKind::Model,
                dtype: engine.dtype(param).into(),
                layout: stepped_layout(spec),
                data: self.block_data(param)?,
            });
        }
        let control = engine.links().control.clone();
        let mut scalars = BTreeMap::new();
        if let Some(scaler) = engine.scaler() {
            scalars.insert(LOSS_SCALE.into(), scalar_to_json(Scalar::Float(scaler.scale())));
            scalars.insert(GOOD_STEPS.into(), scalar_to_json(Scalar::UInt(scaler.good_steps().into())));
        }
        for (entry, buffer) in buffers::entries(self.entries()).zip(buffers::read(self.module(), self.entries())) {
            // They may differ from rank to rank, and any rank may be the one that writes them.
            let tag = OpTag::new(step, Phase::Checkpoint, entry.path());
            let roots = control.broadcast(&tag, 0, (control.rank() == 0).then_some(buffer.bytes))?;
            tensors.push(TensorBlock {
                name: entry.path(),
                aliases: Vec::new(),
                kind: TensorKind::Model,
                dtype: buffer.dtype.into(),
                layout: ShardLayout::new(&entry.spec.shape, 0, 1),
                data: BlockData::Ready(roots),
            });
        }
        if engine.offload().tier().is_some() {
            let (mut away, away_scalars) = self.agree("save optimizer state", self.away_state(optimizer))?;
            tensors.append(&mut away);
            scalars.extend(away_scalars);
        }
        let snapshot = Snapshot {
            step,
            mesh: self.plan().mesh().clone(),
            stage: self.plan().stage(),
            tensors,
            scalars,
            sections,
            rank_state: serde_json::to_value(RandomState::current()).map_err(Error::program)?,
            pinned: false,
        };
        // The state is read by another thread, which knows nothing of what the device still has to do for this one.
        engine.home().wait()?;
        Ok(Noted { snapshot, state: optimizer.shared(), engine: engine.clone(), entries: self.planned_entries() })
    }

    /// A block that is here, or how to read one that lies on the disk when its turn has come.
    fn block_data(&self, param: usize) -> Result<BlockData<'static>, Error> {
        let engine = self.engine().clone();
        if engine.offload().has_parameter(param) {
            return Ok(BlockData::Lazy(Box::new(move || Ok(engine.home().to_host(engine.block(param)?)?))));
        }
        Ok(BlockData::Ready(engine.home().to_host(engine.block(param)?)?))
    }

    /// Optimizer state that lies on the disk: how to read its tensors, by the paths of their parameters, and its scalars.
    fn away_state(
        &self,
        optimizer: &ShardedOptimizer,
    ) -> Result<(Vec<TensorBlock<'static>>, BTreeMap<String, Value>), Error> {
        let (mut tensors, mut scalars) = (Vec::new(), BTreeMap::new());
        let Some(tier) = self.engine().offload().tier() else { return Ok((tensors, scalars)) };
        let (engine, entries) = (self.engine(), self.planned_entries());
        let records = RecordReader::new(tier.clone());
        for away in optimizer.away(engine) {
            let Some(slot) = away.stored() else { continue };
            for (name, scalar) in &away.contents.scalars {
                if let Some((_, name)) = saved_name(engine, &entries, name) {
                    scalars.insert(name, scalar_to_json(*scalar));
                }
            }
            for (id_and_field, dtype, shape) in &away.contents.tensors {
                let (records, name) = (records.clone(), id_and_field.clone());
                let read = BlockData::Lazy(Box::new(move || Ok(records.tensor(slot, &name)?)));
                tensors.extend(state_block(engine, &entries, id_and_field, *dtype, shape, read)?);
            }
        }
        Ok((tensors, scalars))
    }

    /// The outcome, if all ranks succeeded; else every rank gets an error, its own or that of a rank that failed.
    pub(crate) fn agree<T>(&self, doing: &'static str, outcome: Result<T, Error>) -> Result<T, Error> {
        let tag = OpTag::new(self.engine().progress().0, Phase::Checkpoint, doing);
        let failed = f64::from(u8::from(outcome.is_err()));
        let control = self.engine().links().control.as_ref();
        if reduce_number(control, &tag, failed, Reduce::SUM)? == 0.0 {
            return outcome;
        }
        let message = outcome.as_ref().err().map(ToString::to_string).unwrap_or_default();
        let mut failure = None;
        for rank in 0..control.world_size() {
            let mine = (rank == control.rank()).then(|| Bytes::from(message.clone().into_bytes()));
            let message = control.broadcast(&tag, rank, mine)?;
            if !message.is_empty() {
                failure.get_or_insert_with(|| (rank, String::from_utf8_lossy(&message).into_owned()));
            }
        }
        match (outcome, failure) {
            (Ok(_), Some((rank, message))) => {
                Err(Error::RankFailed { rank, source: Box::new(Error::program(format!("{doing}: {message}"))) })
            }
            (outcome, _) => outcome,
        }
    }

    /// Continues from the newest good checkpoint under `root`: weights, running statistics, optimizer state, the count of
    /// steps and random numbers. *Collective*; right after the model is sharded and the optimizer made.
    ///
    /// The checkpoint may come from another world size, mesh, stage or cut: each rank reads the rows it needs, and no
    /// others. On the same world a run goes on to the last bit; on another one, random numbers go on from rank 0's place in
    /// each rank's own stream. Time: all files are read once more to verify them. Memory: a second
    /// copy of this rank's blocks, until the model has the new ones.
    ///
    /// # Errors
    /// On every rank alike: if there is no good checkpoint, or its tensors are not those of the model, with a list of
    /// all that are missing, left over, or of another shape.
    pub fn load(&mut self, root: impl AsRef<Path>, optimizer: &mut ShardedOptimizer) -> Result<Loaded, Error> {
        let engine = self.engine().clone();
        let control = engine.links().control.clone();
        if !optimizer.is_for(&engine) {
            return Err(Error::Misuse {
                problem: "the optimizer has stepped another model, whose state loading would replace".into(),
                remedy: "make one optimizer for each model that is loaded",
            });
        }
        check_loading(self.config())?;
        let checkpoint = Checkpoint::newest_on(control.as_ref(), root, Verify::Checksums)?;
        self.compare(&checkpoint)?;
        // All that stays in memory is read before anything changes. What lies on a disk is read after that, piece by piece: an
        // error there leaves a model that must be loaded again.
        let read = self.agree("read a checkpoint", self.read(&checkpoint))?;
        engine.finish_reduces()?;
        engine.abandon_forward()?;
        engine.discard_gradients();
        for (param, bytes) in read.stored.into_iter().enumerate() {
            if let Some(bytes) = bytes {
                engine.set_value(param, bytes);
            }
        }
        self.agree("put parameters on the disk", self.load_away_blocks(&checkpoint))?;
        engine.place_all()?;
        self.restore(read.buffers);
        optimizer.load_records(&engine, read.records);
        let restored = self.load_away_states(&checkpoint, optimizer);
        let restored = restored.and_then(|()| self.check_state(optimizer, &read.state_names));
        self.agree("restore optimizer state", restored)?;
        let manifest = checkpoint.manifest();
        engine.resume_at(manifest.step);
        let scalar = |name| manifest.scalars.get(name).and_then(scalar_from_json);
        if let (Some(Scalar::Float(scale)), Some(Scalar::UInt(good_steps))) = (scalar(LOSS_SCALE), scalar(GOOD_STEPS)) {
            engine.restore_scale(scale, u32::try_from(good_steps).unwrap_or(0));
        }
        if let Some(state) = random_state(&manifest.ranks, control.rank(), control.world_size()) {
            state.install();
        }
        Ok(Loaded {
            dir: checkpoint.dir().to_owned(),
            step: manifest.step,
            sections: manifest.sections.clone(),
            rejected: checkpoint.rejected().to_vec(),
        })
    }

    /// Takes over what the engine stores, and by entry these values, of what the model itself holds.
    pub(crate) fn restore(&mut self, values: Vec<Option<Buffer>>) {
        // What threads have collected of running statistics would be added later, and win.
        drop(self.valid());
        let module = buffers::put(self.module().clone(), self.entries(), values);
        self.replace_module(module);
    }

    fn read(&self, checkpoint: &Checkpoint) -> Result<Read, Error> {
        let engine = self.engine();
        let mut stored = Vec::new();
        for spec in self.plan().params() {
            let is_away = engine.offload().has_parameter(stored.len());
            stored.push(if is_away { None } else { Some(self.read_stored(checkpoint, spec)?) });
        }
        let mut buffers = Vec::new();
        for entry in self.entries() {
            if entry.is_param {
                buffers.push(None);
                continue;
            }
            let bytes = checkpoint.read(&entry.path(), &ShardLayout::new(&entry.spec.shape, 0, 1), 0)?;
            let dtype = checkpoint.tensor(&entry.path()).map(|tensor| tensor.dtype);
            let dtype = if dtype == Some(StoredDtype::F64) { Dtype::F64 } else { Dtype::F32 };
            buffers.push(Some(Buffer { bytes: bytes.into(), dtype }));
        }
        let state_names = self.state_names(checkpoint)?;
        let is_here =
            |unit, param: usize| self.plan().params()[param].unit == unit && !engine.offload().has_state(param);
        let record = |unit| self.optimizer_record(checkpoint, |param| is_here(unit, param));
        let records = (0..self.plan().units().len()).map(record).collect::<Result<_, _>>()?;
        Ok(Read { stored, buffers, records, state_names })
    }

    fn read_stored(&self, checkpoint: &Checkpoint, spec: &PlannedParam) -> Result<Bytes, Error> {
        let engine = self.engine();
        let (layout, index) = if engine.plan().is_resident(spec) {
            (whole(spec), 0)
        } else {
            (spec.layout.clone(), engine.shard_index())
        };
        Ok(checkpoint.read(&spec.path, &layout, index)?.into())
    }

    /// Blocks that lie on the disk, one after the other.
    fn load_away_blocks(&self, checkpoint: &Checkpoint) -> Result<(), Error> {
        let engine = self.engine();
        for (param, spec) in self.plan().params().iter().enumerate() {
            if engine.offload().has_parameter(param) {
                engine.place_stored(param, self.read_stored(checkpoint, spec)?)?;
            }
        }
        Ok(())
    }

    /// Optimizer state that lies on the disk, unit by unit.
    fn load_away_states(&self, checkpoint: &Checkpoint, optimizer: &mut ShardedOptimizer) -> Result<(), Error> {
        let engine = self.engine();
        for unit in 0..self.plan().units().len() {
            let is_of_unit =
                |param: usize| self.plan().params()[param].unit == unit && engine.offload().has_state(param);
            if (0..self.plan().params().len()).any(is_of_unit) {
                let record = self.optimizer_record(checkpoint, is_of_unit)?;
                if !record.is_empty() {
                    optimizer.load_away(engine, unit, record)?;
                }
            }
        }
        Ok(())
    }

    /// Whether the optimizer has taken all of the state, and needs no more.
    fn check_state(&self, optimizer: &ShardedOptimizer, given: &BTreeSet<String>) -> Result<(), Error> {
        let mut taken = BTreeSet::new();
        for unit in optimizer.shared() {
            let state = FlatState::of(&unit).map_err(record_error)?;
            taken.extend(state.tensors.into_iter().map(|tensor| tensor.name));
        }
        taken.extend(
            optimizer.away(self.engine()).flat_map(|away| away.contents.tensors.iter().map(|(name, ..)| name.clone())),
        );
        match given.symmetric_difference(&taken).next() {
            None => Ok(()),
            Some(name) => Err(Error::program(format!(
                "the checkpoint holds the state of another optimizer: `{name}` is on one side only. Load it with the \
                 optimizer that it was saved with"
            ))),
        }
    }

    /// Whether the checkpoint has the tensors of the model, and no others.
    fn compare(&self, checkpoint: &Checkpoint) -> Result<(), CheckpointError> {
        let params = self.plan().params().iter().enumerate().map(|(param, spec)| ExpectedTensor {
            name: spec.path.clone(),
            shape: spec.layout.shape().to_vec(),
            dtype: Some(self.engine().dtype(param).into()),
        });
        let buffers = buffers::entries(self.entries()).map(|entry| ExpectedTensor {
            name: entry.path(),
            shape: entry.spec.shape.clone(),
            dtype: None, // floats of either size
        });
        let expected: Vec<_> = params.chain(buffers).collect();
        checkpoint.compare(&expected, &[TensorKind::Model]).strict()
    }

    /// What the optimizer state of a checkpoint is called here: by parameter, with its id in place of its path.
    fn state_name(&self, name: &str) -> Option<(usize, String)> {
        let name = name.strip_prefix(OPTIMIZER)?;
        // Of `a` and `a.b` the longer path is meant.
        let fits = |(_, spec): &(usize, &PlannedParam)| {
            name.strip_prefix(spec.path.as_str()).is_some_and(|field| field.starts_with('.'))
        };
        let (param, spec) = self.plan().params().iter().enumerate().filter(fits).max_by_key(|(_, s)| s.path.len())?;
        Some((param, format!("{}{}", self.planned_entries()[param].id.val(), &name[spec.path.len()..])))
    }

    /// Names of all tensors of the optimizer's state, by the ids of their parameters.
    fn state_names(&self, checkpoint: &Checkpoint) -> Result<BTreeSet<String>, Error> {
        let tensors = checkpoint.manifest().tensors.iter().filter(|tensor| tensor.kind == TensorKind::Optimizer);
        let name = |tensor: &TensorEntry| {
            let name = self.state_name(&tensor.name).map(|(_, name)| name);
            name.ok_or_else(|| {
                let problem =
                    format!("the checkpoint has optimizer state `{}` of no parameter of the model", tensor.name);
                Error::program(problem)
            })
        };
        tensors.map(name).collect()
    }

    /// The optimizer's state for this rank's blocks of some parameters, by their ids.
    fn optimizer_record(
        &self,
        checkpoint: &Checkpoint,
        is_wanted: impl Fn(usize) -> bool,
    ) -> Result<OptimizerRecord, Error> {
        let entries = self.planned_entries();
        let manifest = checkpoint.manifest();
        let named = |name: &str| self.state_name(name).filter(|(param, _)| is_wanted(*param));
        let mut tensors = Vec::new();
        for tensor in manifest.tensors.iter().filter(|tensor| tensor.kind == TensorKind::Optimizer) {
            let Some((param, name)) = named(&tensor.name) else { continue };
            let spec = &self.plan().params()[param];
            let layout = stepped_layout(spec);
            let index = if spec.is_split() { self.engine().shard_index() } else { 0 };
            let block = checkpoint.read(&tensor.name, &layout, index)?;
            let dtype = match tensor.dtype {
                StoredDtype::F64 => Dtype::F64,
                _ => Dtype::F32,
            };
            let data = host::tensor_data(block.into(), &self.engine().block_shape(param), dtype);
            let (bytes, shape, dtype) = data.into_parts();
            tensors.push(burn_pack::Tensor::new(name, dtype, shape, Some(entries[param].id.val()), bytes));
        }
        let mut writer = Writer::new(tensors);
        for (name, value) in &manifest.scalars {
            if let Some((_, name)) = named(name) {
                let scalar = scalar_from_json(value).ok_or_else(|| {
                    Error::program(format!("the checkpoint's scalar `{name}` is {value}, and no number"))
                })?;
                writer = writer.with_scalar(&name, scalar);
            }
        }
        // The group of a parameter is found by its path.
        for entry in entries.iter() {
            writer = writer.with_metadata(&entry.id.val().to_string(), &entry.path());
        }
        let bytes = writer.into_bytes().map_err(record_error)?;
        OptimizerRecord::from_bytes(bytes).map_err(record_error)
    }
}

/// Names of the loss scale's numbers among the scalars.
const LOSS_SCALE: &str = "loss_scale";
const GOOD_STEPS: &str = "loss_scale.good_steps";

/// What is to be saved, as one rank has noted it: all but the optimizer's state in the form of a checkpoint.
pub(crate) struct Noted {
    snapshot: Snapshot<'static>,
    /// By unit.
    state: Vec<ModuleOptimizer>,
    engine: Arc<Engine>,
    entries: Arc<[Entry]>,
}

impl Noted {
    /// Optimizer steps done.
    pub(crate) fn step(&self) -> u64 {
        self.snapshot.step
    }

    /// Adds the optimizer's state, by the paths of its parameters: as [`FlatState::of`] has it, made unit by unit. What of it
    /// is a copy lets go of what it was made from.
    ///
    /// # Errors
    /// If the state does not have the shape of its parameters.
    pub(crate) fn into_snapshot(self) -> Result<Snapshot<'static>, Error> {
        let Self { mut snapshot, state, engine, entries } = self;
        for optimizer in state {
            let state = FlatState::of(&optimizer).map_err(record_error)?;
            drop(optimizer);
            for (name, scalar) in state.scalars {
                if let Some((_, name)) = saved_name(&engine, &entries, &name) {
                    snapshot.scalars.insert(name, scalar_to_json(scalar));
                }
            }
            for FlatTensor { name, dtype, shape, bytes } in state.tensors {
                let data = BlockData::Ready(bytes);
                snapshot.tensors.extend(state_block(&engine, &entries, &name, dtype, &shape, data)?);
            }
        }
        Ok(snapshot)
    }

    /// Reads what lies on the disk, so that a later step may write over it. Memory: all of it.
    pub(crate) fn at_once(mut self) -> Result<Self, Error> {
        for tensor in &mut self.snapshot.tensors {
            let data = std::mem::replace(&mut tensor.data, BlockData::Ready(Bytes::new()));
            tensor.data = BlockData::Ready(match data {
                BlockData::Ready(bytes) => bytes,
                BlockData::Lazy(read) => read().map_err(Error::Program)?,
            });
        }
        Ok(self)
    }
}

/// What the state `id.field` of a parameter is called in a checkpoint, with the parameter. `None` where this rank's is not saved.
fn saved_name(engine: &Engine, entries: &[Entry], name: &str) -> Option<(usize, String)> {
    let (id, field) = name.split_once('.')?;
    let param = entries.iter().position(|entry| entry.id.val().to_string() == id)?;
    // A rank without elements has stepped them even where there was no gradient; who has some knows better.
    let spec = &engine.plan().params()[param];
    let is_empty_here = spec.layout.full_len() > 0 && engine.block_shape(param).contains(&0);
    (!is_empty_here).then(|| (param, format!("{OPTIMIZER}{}.{field}", spec.path)))
}

/// One tensor of optimizer state, as a checkpoint has it.
fn state_block(
    engine: &Engine,
    entries: &[Entry],
    id_and_field: &str,
    dtype: burn::tensor::DType,
    shape: &[usize],
    data: BlockData<'static>,
) -> Result<Option<TensorBlock<'static>>, Error> {
    let Some((param, name)) = saved_name(engine, entries, id_and_field) else { return Ok(None) };
    let spec = &engine.plan().params()[param];
    let (dtype, block_shape) = (host::dtype_of(dtype), engine.block_shape(param));
    let (Some(dtype), true) = (dtype, shape == block_shape) else {
        return Err(Error::Parameter {
            parameter: spec.path.clone(),
            problem: format!("its optimizer state `{id_and_field}` has the shape {shape:?}, and not {block_shape:?}"),
            remedy: "use an optimizer whose state has the shape of its parameter, such as SGD or AdamW",
        });
    };
    let (kind, layout) = (TensorKind::Optimizer, stepped_layout(spec));
    Ok(Some(TensorBlock { name, aliases: Vec::new(), kind, dtype: dtype.into(), layout, data }))
}

/// All that a rank needs of a checkpoint.
struct Read {
    /// By parameter; `None` where it lies on the disk.
    stored: Vec<Option<Bytes>>,
    /// By entry, of running statistics.
    buffers: Vec<Option<Buffer>>,
    /// By unit, of what is in memory.
    records: Vec<OptimizerRecord>,
    state_names: BTreeSet<String>,
}

/// How the optimizer's view of a parameter is cut.
fn stepped_layout(spec: &PlannedParam) -> ShardLayout {
    if spec.is_split() { spec.layout.clone() } else { whole(spec) }
}

fn whole(spec: &PlannedParam) -> ShardLayout {
    ShardLayout::new(spec.layout.shape(), 0, 1)
}

/// Where this rank's random numbers go on: where they were on the same world, else at rank 0's place in its own stream.
fn random_state(saved: &[Value], rank: usize, world_size: usize) -> Option<RandomState> {
    let parse = |value: &Value| serde_json::from_value::<RandomState>(value.clone()).ok();
    match saved.get(rank).filter(|_| saved.len() == world_size) {
        Some(own) => parse(own),
        None => saved.first().and_then(parse).map(|first| RandomState { stream: rank as u64, ..first }),
    }
}

/// Burn's scalars as values of JSON, which has no infinity: floats go as their bits.
fn scalar_to_json(scalar: Scalar) -> Value {
    match scalar {
        Scalar::Int(value) => json!({ "int": value }),
        Scalar::UInt(value) => json!({ "uint": value }),
        Scalar::Float(value) => json!({ "float_bits": value.to_bits() }),
        Scalar::Bool(value) => json!({ "bool": value }),
    }
}

fn scalar_from_json(value: &Value) -> Option<Scalar> {
    let (kind, value) = value.as_object()?.iter().next()?;
    Some(match kind.as_str() {
        "int" => Scalar::Int(value.as_i64()?),
        "uint" => Scalar::UInt(value.as_u64()?),
        "float_bits" => Scalar::Float(f64::from_bits(value.as_u64()?)),
        "bool" => Scalar::Bool(value.as_bool()?),
        _ => return None,
    })
}

fn record_error(error: impl std::fmt::Display) -> Error {
    Error::program(format!("the optimizer's state cannot be converted: {error}"))
}
