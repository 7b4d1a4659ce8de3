//! Optimizer state between one device and many: Burn records it for whole parameters, a rank has it for its blocks.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use burn::module::Module;
use burn::optim::OptimizerRecord;
use burn::optim::lr_scheduler::LrSchedulerRecord;
use burn::store::ModuleRecord;
use burn::tensor::{Bytes, DType, Shape, TensorData};
use burn_pack::{Reader, Writer};
use burn_train::checkpoint::{
    AsyncCheckpointer, Checkpoint, Checkpointer, CheckpointerError, CheckpointingAction, CheckpointingStrategy,
};
use burn_train::metric::store::EventStoreClient;
use burn_train::{Learner, LearnerModel, LearningCheckpointer};
use fsdp_core::{Dtype, GatherPart, OpTag, Phase, UnitIndex};

use crate::device::check_loading;
use crate::{Error, ShardedModel, ShardedOptimizer, host};

/// What a learner knows beside its model, and shows to checkpoints only.
pub(super) struct LearnerState {
    pub(super) optimizer: Bytes,
    pub(super) scheduler: LrSchedulerRecord,
}

/// The state of a learner that has loaded a checkpoint.
pub(super) fn state_of<M: LearnerModel>(
    learner: &Learner<M>,
    event_store: &EventStoreClient,
) -> Result<LearnerState, Error> {
    let (model, optimizer, scheduler) = (Memory::default(), Memory::default(), Memory::default());
    let (optimizer_slot, scheduler_slot) = (optimizer.slot.clone(), scheduler.slot.clone());
    let mut checkpointer = LearningCheckpointer::new(
        AsyncCheckpointer::new(Memory::<ModuleRecord>::clone(&model)),
        AsyncCheckpointer::new(optimizer),
        AsyncCheckpointer::new(scheduler),
        Box::new(Always),
    );
    checkpointer.checkpoint(learner, 0, event_store);
    // Ends the threads that save.
    drop(checkpointer);
    let optimizer: Option<OptimizerRecord> = taken(&optimizer_slot);
    match (optimizer, taken(&scheduler_slot)) {
        (Some(optimizer), Some(scheduler)) => {
            Ok(LearnerState { optimizer: optimizer.into_bytes().map_err(error)?, scheduler })
        }
        _ => Err(Error::program("the learner has not shown the state that it has loaded")),
    }
}

/// A checkpoint that stays in memory.
struct Memory<R> {
    slot: Arc<Mutex<Option<R>>>,
}

impl<R> Default for Memory<R> {
    fn default() -> Self {
        Self { slot: Arc::default() }
    }
}

impl<R> Clone for Memory<R> {
    fn clone(&self) -> Self {
        Self { slot: self.slot.clone() }
    }
}

impl<R: Checkpoint> Checkpointer<R> for Memory<R> {
    fn save(&self, _: usize, record: R) -> Result<(), CheckpointerError> {
        *self.slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(record);
        Ok(())
    }

    fn delete(&self, _: usize) -> Result<(), CheckpointerError> {
        taken(&self.slot);
        Ok(())
    }

    fn restore(&self, epoch: usize) -> Result<R, CheckpointerError> {
        taken(&self.slot).ok_or_else(|| CheckpointerError::Unknown(format!("epoch {epoch} is not in memory")))
    }
}

fn taken<R>(slot: &Mutex<Option<R>>) -> Option<R> {
    slot.lock().unwrap_or_else(PoisonError::into_inner).take()
}

struct Always;

impl CheckpointingStrategy for Always {
    fn checkpointing(&mut self, _: usize, _: &EventStoreClient) -> Vec<CheckpointingAction> {
        vec![CheckpointingAction::Save]
    }
}

/// Lets `optimizer` go on from the state of whole parameters, of which it takes this rank's blocks.
pub(super) fn load<M: Module>(
    optimizer: &mut ShardedOptimizer,
    model: &ShardedModel<M>,
    whole: &Bytes,
) -> Result<(), Error> {
    check_loading(model.config())?;
    let reader = Reader::from_bytes(whole.clone()).map_err(error)?;
    // By unit, what is in memory and what lies on the disk.
    let mut parts: BTreeMap<(UnitIndex, bool), Parts> = BTreeMap::new();
    let place = |param: usize| (model.plan().params()[param].unit, model.engine().offload().has_state(param));
    for (name, scalar) in reader.scalars() {
        if let Some((param, _)) = param_of(name, model) {
            parts.entry(place(param)).or_default().scalars.insert(name.clone(), *scalar);
        }
    }
    for (id, path) in reader.metadata() {
        if let Some((param, _)) = param_of(id, model) {
            parts.entry(place(param)).or_default().paths.insert(id.clone(), path.clone());
        }
    }
    for tensor in reader.into_tensors().map_err(error)? {
        let state = StateTensor::of(tensor, model)?;
        let spec = &model.plan().params()[state.param];
        if state.shape != spec.layout.shape() {
            return Err(wrong_shape(model, &state, spec.layout.shape()));
        }
        let elem_bytes = state.dtype.size_bytes();
        let block = match spec.is_split() {
            true => host::cut(&state.bytes, &spec.layout, model.engine().shard_index(), elem_bytes),
            false => state.bytes.clone(),
        };
        let tensor = state.with(block, &model.engine().block_shape(state.param));
        parts.entry(place(state.param)).or_default().tensors.push(tensor);
    }
    let here = (0..model.plan().units().len()).map(|unit| parts.remove(&(unit, false)).unwrap_or_default().record());
    optimizer.load_records(model.engine(), here.collect::<Result<_, _>>()?);
    for ((unit, _), parts) in parts {
        optimizer.load_away(model.engine(), unit, parts.record()?)?;
    }
    Ok(())
}

/// The parameter whose state `name` is, and its id.
fn param_of<M: Module>(name: &str, model: &ShardedModel<M>) -> Option<(usize, u64)> {
    let id = name.split('.').next()?.parse().ok()?;
    let param = model.planned_entries().iter().position(|entry| entry.id.val() == id)?;
    Some((param, id))
}

/// The state of whole parameters, on every rank that has rank 0's replica. *Collective.*
pub(super) fn whole<M: Module>(
    optimizer: &ShardedOptimizer,
    model: &ShardedModel<M>,
) -> Result<OptimizerRecord, Error> {
    let links = model.engine().links();
    let (mut parts, mut own) = (Parts::default(), BTreeMap::new());
    let in_memory = optimizer.record_bytes().map(|bytes| bytes.map_err(error));
    for bytes in in_memory.chain(optimizer.away_records(model.engine())) {
        let reader = Reader::from_bytes(bytes?).map_err(error)?;
        parts.scalars.extend(reader.scalars().clone());
        parts.paths.extend(reader.metadata().clone());
        for tensor in reader.into_tensors().map_err(error)? {
            let state = StateTensor::of(tensor, model)?;
            let block_shape = model.engine().block_shape(state.param);
            if state.shape != block_shape {
                return Err(wrong_shape(model, &state, &block_shape));
            }
            own.insert(state.name.clone(), state);
        }
    }
    // A rank without elements has stepped them even where there was no gradient. Rank 0 has some, if anyone has.
    let tag = |what: &str| OpTag::new(model.engine().progress().0, Phase::Checkpoint, what);
    let names = serde_json::to_vec(&own.keys().collect::<Vec<_>>()).map_err(error)?;
    let names = (links.control.rank() == 0).then(|| names.into());
    let names = links.control.broadcast(&tag("names of optimizer state"), 0, names)?;
    let names: Vec<String> = serde_json::from_slice(&names).map_err(error)?;
    for name in names {
        let Some(state) = own.remove(&name) else {
            return Err(Error::program(format!("this rank has no optimizer state `{name}`, which rank 0 has")));
        };
        let spec = &model.plan().params()[state.param];
        let full = if spec.is_split() {
            let (shard, layout, elem_bytes) = (state.bytes.clone(), spec.layout.clone(), state.dtype.size_bytes());
            let part = GatherPart { shard, layout, elem_bytes };
            let mut full = links.control_shard.all_gather(&tag(&name), &[part])?;
            full.pop().ok_or_else(|| Error::program("a gather of one part returned none"))?
        } else {
            state.bytes.clone()
        };
        parts.tensors.push(state.with(full, spec.layout.shape()));
    }
    parts.record()
}

/// One tensor of optimizer state, of this rank's block or of the whole.
struct StateTensor {
    /// As Burn calls it: the parameter's id, and a field.
    name: String,
    id: u64,
    /// Index among the plan's parameters.
    param: usize,
    shape: Vec<usize>,
    dtype: Dtype,
    bytes: bytes::Bytes,
}

impl StateTensor {
    fn of<M: Module>(tensor: burn_pack::Tensor, model: &ShardedModel<M>) -> Result<Self, Error> {
        let (name, dtype, shape, _, bytes) = tensor.into_parts().map_err(error)?;
        match (param_of(&name, model), host::dtype_of(dtype)) {
            (Some((param, id)), Some(dtype_here)) => {
                let data = TensorData::from_bytes(bytes, shape.clone(), dtype);
                let shape = shape.to_vec();
                Ok(Self { name, id, param, shape, dtype: dtype_here, bytes: host::elements(data) })
            }
            _ => Err(Error::program(format!(
                "the optimizer state `{name}` of {dtype:?} belongs to no parameter of the model. Continue with the \
                 model and the optimizer that were saved"
            ))),
        }
    }

    fn with(&self, bytes: bytes::Bytes, shape: &[usize]) -> burn_pack::Tensor {
        let data = host::tensor_data(bytes, shape, self.dtype);
        let (bytes, shape, dtype): (Bytes, Shape, DType) = data.into_parts();
        burn_pack::Tensor::new(self.name.clone(), dtype, shape, Some(self.id), bytes)
    }
}

/// What a record consists of.
#[derive(Default)]
struct Parts {
    tensors: Vec<burn_pack::Tensor>,
    scalars: BTreeMap<String, burn_pack::Scalar>,
    /// By the id of a parameter.
    paths: BTreeMap<String, String>,
}

impl Parts {
    fn record(self) -> Result<OptimizerRecord, Error> {
        let mut writer = Writer::new(self.tensors);
        for (name, scalar) in self.scalars {
            writer = writer.with_scalar(&name, scalar);
        }
        for (id, path) in self.paths {
            writer = writer.with_metadata(&id, &path);
        }
        OptimizerRecord::from_bytes(writer.into_bytes().map_err(error)?).map_err(error)
    }
}

fn wrong_shape<M: Module>(model: &ShardedModel<M>, state: &StateTensor, expected: &[usize]) -> Error {
    Error::Parameter {
        parameter: model.plan().params()[state.param].path.clone(),
        problem: format!("its optimizer state `{}` has the shape {:?}, and not {expected:?}", state.name, state.shape),
        remedy: "use an optimizer whose state has the shape of its parameter, such as SGD or AdamW",
    }
}

pub(super) fn error(error: impl std::fmt::Display) -> Error {
    Error::program(format!("the optimizer's state cannot be converted: {error}"))
}
