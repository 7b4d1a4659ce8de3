//! One rank's engine: executes what the schedule says, with buffers and communicators.
//!
//! The life of a parameter at stage 3: `stored` holds this rank's block. `val()` in forward asks [`Engine::gather`],
//! which gathers the whole unit, lends the model a view, and lets go of it when forward moves on. Backward gathers it
//! once more. Its gradient comes to [`Engine::capture`] as a whole tensor; when the unit's gradients are complete they
//! are reduced on another thread to this rank's block of the mean, which the optimizer turns into a new `stored`.
//! At lower stages `stored` is the whole parameter and nothing is gathered; the rest of the way is the same.
//!
//! [Note: A missing gradient is minus zero]
//! A parameter may get a gradient on some ranks only. The others must join the reduction all the same, and all must
//! agree whether anyone had one, since an optimizer does not touch a parameter without gradient. A rank without one
//! contributes -0.0: it is the true neutral element of addition (x + -0.0 is x for every x, +0.0 included), and a sum
//! is -0.0 only if every term is. So a block that is -0.0 throughout had no gradient anywhere, and telling so costs no
//! message.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use burn::backend::flex::FlexTensor;
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Backend, Flex, TensorMetadata};
use burn::tensor::TensorData;
use bytes::Bytes;
use fsdp_core::{
    AbortCause, Accumulate, Action, CommError, Dtype, GatherPart, GradientReduction, OpTag, Pending, Phase, Plan,
    PlannedParam, PrefetchDepth, Reduce, ReducePart, Schedule, ShardLayout, UnitIndex,
};

use crate::Error;
use crate::gather_op::{Ladder, Use};
use crate::host;
use crate::links::Links;

/// What the configuration says about gradients.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub(crate) depth: PrefetchDepth,
    pub(crate) reduction: GradientReduction,
    pub(crate) accumulate: Accumulate,
    /// Backwards per optimizer step.
    pub(crate) accumulation: usize,
}

/// What an engine has done since its start, or since a snapshot was taken.
#[derive(Clone, Copy, Debug, Default)]
pub struct EngineStats {
    /// Time that forward and backward stood still for a gather.
    pub gather_wait: Duration,
    /// Time that backward and the optimizer stood still for a reduction.
    pub reduce_wait: Duration,
    /// Time that the optimizer stood still for updated parameters of other ranks (stages 1 and 2).
    pub publish_wait: Duration,
    /// Time that the communication threads were busy, waiting for peers included.
    pub communication: Duration,
    /// Largest size of the parameters held, in bytes: blocks at stage 3, whole tensors below.
    pub peak_parameter_bytes: usize,
    /// Largest size of gathered units held at once, in bytes. Ranks of one process share each gathered unit.
    pub peak_gathered_bytes: usize,
    /// Largest size of gradients held at once, in bytes, before and after reduction.
    pub peak_gradient_bytes: usize,
}

impl EngineStats {
    /// Time that the model stood still for communication.
    pub fn exposed(&self) -> Duration {
        self.gather_wait + self.reduce_wait + self.publish_wait
    }
}

/// See the module's documentation.
pub(crate) struct Engine {
    plan: Plan,
    /// Position on the shard axis.
    shard_index: usize,
    dtypes: Vec<Dtype>,
    held: Vec<bool>,
    links: Links,
    settings: Settings,
    state: Mutex<State>,
    ladder: Mutex<Option<Box<dyn Any + Send>>>,
}

struct State {
    schedule: Schedule,
    /// By parameter: this rank's block, or the whole parameter where that is resident.
    stored: Vec<Bytes>,
    /// By parameter: the whole gradient of this rank, not reduced yet.
    local: Vec<Option<FlexTensor>>,
    /// By parameter: the reduced gradient, a block or whole like the optimizer's view of the parameter.
    reduced: Vec<Option<Bytes>>,
    units: Vec<UnitBuffers>,
    /// Units that forward has entered since the last backward. See [Note: Order of backward steps].
    entered: usize,
    last_entered: Option<UnitIndex>,
    in_backward: bool,
    /// Optimizer steps done.
    step: u64,
    /// Backwards since the last step.
    backwards: usize,
    stats: EngineStats,
}

#[derive(Default)]
struct UnitBuffers {
    gathered: Gathered,
    reducing: Option<Pending<Vec<Bytes>>>,
    reducing_bytes: usize,
    publishing: Option<Pending<Vec<Bytes>>>,
}

#[derive(Default)]
enum Gathered {
    #[default]
    No,
    UnderWay(Pending<Vec<Bytes>>),
    /// By position in the unit's cut parameters.
    Yes(Vec<Bytes>),
}

/// What a rank unwinds with, to the caller of `backward` or to the launcher, where an op cannot return an error.
pub(crate) struct EngineFailed(pub(crate) Error);

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Engine({}, rank {})", self.plan.stage(), self.links.control.rank())
    }
}

impl Engine {
    /// An engine over the parameters in `stored`, each as [`Plan::is_resident`] says: whole or this rank's block.
    pub(crate) fn new(plan: Plan, shard_index: usize, dtypes: Vec<Dtype>, links: Links, settings: Settings) -> Self {
        let schedule = Schedule::new(plan.stage(), &plan.unit_traits(), settings.depth);
        let num_params = plan.params().len();
        let state = State {
            schedule,
            stored: vec![Bytes::new(); num_params],
            local: vec![None; num_params],
            reduced: vec![None; num_params],
            units: plan.units().iter().map(|_| UnitBuffers::default()).collect(),
            entered: 0,
            last_entered: None,
            in_backward: false,
            step: 0,
            backwards: 0,
            stats: EngineStats::default(),
        };
        let held = plan.params().iter().map(|param| plan.is_held(param)).collect();
        Self { plan, shard_index, dtypes, held, links, settings, state: Mutex::new(state), ladder: Mutex::new(None) }
    }

    pub(crate) fn plan(&self) -> &Plan {
        &self.plan
    }

    pub(crate) fn shard_index(&self) -> usize {
        self.shard_index
    }

    pub(crate) fn links(&self) -> &Links {
        &self.links
    }

    pub(crate) fn dtype(&self, param: usize) -> Dtype {
        self.dtypes[param]
    }

    pub(crate) fn accumulation(&self) -> usize {
        self.settings.accumulation
    }

    pub(crate) fn accumulate(&self) -> Accumulate {
        self.settings.accumulate
    }

    pub(crate) fn prefetch(&self) -> PrefetchDepth {
        self.settings.depth
    }

    /// Gradients are means over ranks and micro-batches; otherwise sums.
    pub(crate) fn reduces_to_mean(&self) -> bool {
        self.settings.reduction == GradientReduction::Mean
    }

    /// Optimizer steps done, backwards since the last one.
    pub(crate) fn progress(&self) -> (u64, usize) {
        let state = self.lock();
        (state.step, state.backwards)
    }

    pub(crate) fn stats(&self) -> EngineStats {
        self.lock().stats
    }

    pub(crate) fn reset_stats(&self) {
        self.lock().stats = EngineStats::default();
    }

    /// What is stored of a parameter.
    pub(crate) fn stored(&self, param: usize) -> Bytes {
        self.lock().stored[param].clone()
    }

    pub(crate) fn set_stored(&self, param: usize, bytes: Bytes) {
        self.lock().stored[param] = bytes;
    }

    /// The parameter of the model, for one use of it.
    ///
    /// # Panics
    /// Unwinds with the error when a collective fails: `val()` has no other way to say so.
    pub(crate) fn gather(&self, param: usize, stored: FlexTensor, usage: Use) -> FlexTensor {
        match self.try_gather(param, stored, usage) {
            Ok(full) => full,
            Err(error) => self.fail(error),
        }
    }

    /// Takes the whole gradient of one use of a parameter.
    ///
    /// # Panics
    /// As [`Engine::gather`].
    pub(crate) fn capture(&self, param: usize, gradient: FlexTensor) {
        if let Err(error) = self.try_capture(param, gradient) {
            self.fail(error);
        }
    }

    /// Whether autodiff holds the parameter between forward and backward. See [Note: Recompute, do not hold].
    pub(crate) fn holds(&self, param: usize) -> bool {
        self.held[param]
    }

    /// One more gradient is to come in backward.
    pub(crate) fn expect_gradient(&self, param: usize) {
        self.lock().schedule.gradient_expected(self.plan.params()[param].unit);
    }

    /// Lends the ladder of depth, with the rung for the unit that forward is in.
    pub(crate) fn with_ladder<B: Backend, T>(&self, call: impl FnOnce(&mut Ladder<B>, usize) -> T) -> T {
        let index = self.lock().entered;
        let mut slot = self.ladder.lock().unwrap_or_else(PoisonError::into_inner);
        let ladder = slot.get_or_insert_with(|| Box::new(Ladder::<B>::default()));
        match ladder.downcast_mut() {
            Some(ladder) => call(ladder, index),
            None => unreachable!("a model lives on one backend"),
        }
    }

    /// Runs `backward` between the two ends that the schedule needs.
    pub(crate) fn backward<T>(&self, backward: impl FnOnce() -> T) -> Result<T, Error> {
        self.begin_backward()?;
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(backward));
        match result {
            Ok(value) => {
                let mut state = self.lock();
                state.in_backward = false;
                state.backwards += 1;
                let actions = state.schedule.end_backward();
                self.run(&mut state, actions)?;
                Ok(value)
            }
            Err(payload) => match payload.downcast::<EngineFailed>() {
                Ok(failed) => Err(failed.0),
                Err(payload) => std::panic::resume_unwind(payload),
            },
        }
    }

    /// Makes sure that all gradients since the last step are reduced, or being reduced.
    pub(crate) fn reduce_rest(&self) -> Result<(), Error> {
        let mut state = self.lock();
        let actions = state.schedule.reduce_rest();
        self.run(&mut state, actions)
    }

    /// Waits for all reductions.
    pub(crate) fn finish_reduces(&self) -> Result<(), Error> {
        let mut state = self.lock();
        let actions = state.schedule.finish_reduces();
        self.run(&mut state, actions)
    }

    /// The actions of an optimizer step.
    pub(crate) fn step_actions(&self) -> Vec<Action> {
        self.lock().schedule.step()
    }

    /// Executes actions other than [`Action::Step`].
    pub(crate) fn execute(&self, action: Action) -> Result<(), Error> {
        self.run(&mut self.lock(), vec![action])
    }

    /// Takes the reduced gradient of a parameter. `None`: no rank had one.
    pub(crate) fn take_reduced(&self, param: usize) -> Option<Bytes> {
        let gradient = self.lock().reduced[param].take()?;
        (!is_missing(&gradient, self.dtypes[param])).then_some(gradient)
    }

    /// Looks at the reduced gradient of every trainable parameter, in plan order.
    pub(crate) fn each_reduced(&self, mut look: impl FnMut(usize, &Bytes)) {
        let state = self.lock();
        for (param, gradient) in state.reduced.iter().enumerate() {
            if let Some(gradient) = gradient {
                look(param, gradient);
            }
        }
    }

    /// Drops all gradients, reduced or not.
    pub(crate) fn discard_gradients(&self) {
        let mut state = self.lock();
        state.reduced.iter_mut().for_each(|gradient| *gradient = None);
        state.local.iter_mut().for_each(|gradient| *gradient = None);
    }

    /// The step is over, whether it changed the parameters or not.
    pub(crate) fn end_step(&self) {
        let mut state = self.lock();
        state.step += 1;
        state.backwards = 0;
    }

    /// The parameter as the optimizer sees it: this rank's block of a cut one, whole otherwise.
    pub(crate) fn block(&self, param: usize) -> Bytes {
        let spec = &self.plan.params()[param];
        let stored = self.stored(param);
        if spec.is_split() && self.plan.is_resident(spec) {
            cut(&stored, &spec.layout, self.shard_index, self.dtypes[param].size_bytes())
        } else {
            stored
        }
    }

    /// Shape of the optimizer's view of a parameter.
    pub(crate) fn block_shape(&self, param: usize) -> Vec<usize> {
        let spec = &self.plan.params()[param];
        if spec.is_split() { spec.layout.shard_shape(self.shard_index) } else { spec.layout.shape().to_vec() }
    }

    /// Gathers one parameter outside of forward and backward, in whole. All ranks of the shard axis make the call.
    pub(crate) fn gather_one(&self, param: usize) -> Result<Bytes, Error> {
        let spec = &self.plan.params()[param];
        let stored = self.stored(param);
        if self.plan.is_resident(spec) {
            return Ok(stored);
        }
        let tag = OpTag::new(self.progress().0, Phase::Checkpoint, spec.path.as_str());
        let mut full = self.links.control_shard.all_gather(&tag, &[self.gather_part(param, stored)])?;
        full.pop().ok_or_else(|| self.misuse("a gather of one part returned none", "report this as a bug"))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn try_gather(&self, param: usize, given: FlexTensor, usage: Use) -> Result<FlexTensor, Error> {
        let spec = &self.plan.params()[param];
        let mut state = self.lock();
        if state.in_backward && usage == Use::Forward {
            return Err(self.misuse(
                &format!("parameter `{}` is used in a forward inside backward", spec.path),
                "finish backward first, or use the model's valid()",
            ));
        }
        self.check_given(&state, param, &given)?;
        let actions = match usage {
            Use::Forward => {
                if state.last_entered != Some(spec.unit) {
                    state.last_entered = Some(spec.unit);
                    state.entered += 1;
                }
                state.schedule.forward(spec.unit)
            }
            Use::Backward => state.schedule.backward(spec.unit),
            Use::Evaluate => state.schedule.evaluate(spec.unit),
        };
        self.run(&mut state, actions)?;
        if self.plan.is_resident(spec) {
            return Ok(given);
        }
        let position = self.cut_params(spec.unit).position(|(other, _)| other == param);
        match (&state.units[spec.unit].gathered, position) {
            (Gathered::Yes(full), Some(position)) => {
                Ok(host::flex_tensor(full[position].clone(), spec.layout.shape(), self.dtypes[param]))
            }
            _ => unreachable!("the schedule has gathered unit {} before it is used", spec.unit),
        }
    }

    /// The model must still store what the engine gathers: a replaced tensor would be silently ignored.
    fn check_given(&self, state: &State, param: usize, given: &FlexTensor) -> Result<(), Error> {
        let stored = &state.stored[param];
        if stored.is_empty() || given.bytes().as_ptr() == stored.as_ptr() {
            return Ok(());
        }
        let path = &self.plan.params()[param].path;
        Err(self.misuse(
            &format!("parameter `{path}` was replaced in a copy of the sharded model"),
            "change weights before sharding, or through the optimizer",
        ))
    }

    fn try_capture(&self, param: usize, gradient: FlexTensor) -> Result<(), Error> {
        let mut state = self.lock();
        if !state.in_backward {
            return Err(self.misuse(
                "backward was called on the loss itself, so gradients would not be reduced",
                "call `model.backward(loss)` in place of `loss.backward()`",
            ));
        }
        let sum = match state.local[param].take() {
            Some(sum) => Flex::float_add(sum, gradient),
            None => gradient,
        };
        state.local[param] = Some(sum);
        self.note_gradients(&mut state);
        let actions = state.schedule.gradient(self.plan.params()[param].unit);
        self.run(&mut state, actions)
    }

    fn begin_backward(&self) -> Result<(), Error> {
        let mut state = self.lock();
        if state.schedule.needs_reduce_order() {
            let order = self.agree_on_order(state.schedule.expected_reduce_order(), state.step)?;
            state.schedule.set_reduce_order(order);
        }
        let last = state.backwards + 1 >= self.settings.accumulation;
        state.schedule.begin_backward(self.settings.accumulate == Accumulate::Reduced || last);
        state.in_backward = true;
        state.entered = 0;
        state.last_entered = None;
        Ok(())
    }

    /// Rank 0's order of reductions, for all.
    fn agree_on_order(&self, order: Vec<UnitIndex>, step: u64) -> Result<Vec<UnitIndex>, Error> {
        let tag = OpTag::new(step, Phase::Control, "order of reductions");
        let bytes: Vec<u8> = order.iter().flat_map(|&unit| (unit as u64).to_le_bytes()).collect();
        let mine = (self.links.control.rank() == 0).then(|| Bytes::from(bytes));
        let agreed = self.links.control.broadcast(&tag, 0, mine)?;
        let unit = |chunk: &[u8; 8]| u64::from_le_bytes(*chunk) as UnitIndex;
        Ok(agreed.as_chunks::<8>().0.iter().map(unit).collect())
    }

    fn run(&self, state: &mut State, actions: Vec<Action>) -> Result<(), Error> {
        for action in actions {
            match action {
                Action::Gather(unit) => {
                    let parts: Vec<_> = self
                        .cut_params(unit)
                        .map(|(param, _)| self.gather_part(param, state.stored[param].clone()))
                        .collect();
                    let phase = if state.in_backward { Phase::Backward } else { Phase::Forward };
                    let pending = self.links.gather.all_gather(self.tag(state, phase, unit), parts);
                    state.units[unit].gathered = Gathered::UnderWay(pending);
                    self.note_gathered(state);
                }
                Action::WaitGather(unit) => {
                    if let Gathered::UnderWay(pending) = std::mem::take(&mut state.units[unit].gathered) {
                        let (full, waited, busy) = wait(pending)?;
                        state.stats.gather_wait += waited;
                        state.stats.communication += busy;
                        state.units[unit].gathered = Gathered::Yes(full);
                    }
                }
                Action::Free(unit) => state.units[unit].gathered = Gathered::No,
                Action::Reduce(unit) => self.start_reduce(state, unit),
                Action::WaitReduce(unit) => self.finish_reduce(state, unit)?,
                Action::Publish(unit) => {
                    let parts: Vec<_> = self
                        .split_trainable(unit)
                        .map(|(param, spec)| {
                            self.gather_part(param, self.to_publish(param, spec, &state.stored[param]))
                        })
                        .collect();
                    if !parts.is_empty() {
                        let tag = self.tag(state, Phase::Optimizer, unit);
                        state.units[unit].publishing = Some(self.links.gather.all_gather(tag, parts));
                    }
                }
                Action::WaitPublish(unit) => {
                    if let Some(pending) = state.units[unit].publishing.take() {
                        let (full, waited, busy) = wait(pending)?;
                        state.stats.publish_wait += waited;
                        state.stats.communication += busy;
                        let params: Vec<_> = self.split_trainable(unit).map(|(param, _)| param).collect();
                        for (param, full) in params.into_iter().zip(full) {
                            state.stored[param] = full;
                        }
                    }
                }
                Action::Step(_) => unreachable!("the optimizer executes steps"),
            }
        }
        Ok(())
    }

    /// This rank's block. A parameter without gradient was not stepped, so it is still stored in whole.
    fn to_publish(&self, param: usize, spec: &PlannedParam, stored: &Bytes) -> Bytes {
        let elem_bytes = self.dtypes[param].size_bytes();
        if stored.len() == spec.layout.full_len() * elem_bytes {
            cut(stored, &spec.layout, self.shard_index, elem_bytes)
        } else {
            stored.clone()
        }
    }

    fn start_reduce(&self, state: &mut State, unit: UnitIndex) {
        let mut split = Vec::new();
        let mut whole = Vec::new();
        let mut bytes = 0;
        let params: Vec<_> = self.trainable(unit).map(|(param, spec)| (param, spec.clone())).collect();
        for (param, spec) in params {
            let full = match state.local[param].take() {
                Some(gradient) => host::bytes_of(&gradient),
                None => missing_gradient(spec.layout.full_len(), self.dtypes[param]),
            };
            bytes += full.len();
            let part = |layout| ReducePart { full, layout, dtype: self.dtypes[param] };
            if spec.is_split() {
                split.push(part(spec.layout));
            } else {
                let world_size = self.links.reduce_world.world_size();
                whole.push(part(ShardLayout::new(spec.layout.shape(), 0, world_size)));
            }
        }
        let job = ReduceJob {
            split,
            whole,
            tag: self.tag(state, Phase::Backward, unit),
            reduce: self.reduce(),
            shard: self.links.reduce_shard.clone(),
            replicas: self.links.reduce_replicas.clone(),
        };
        state.units[unit].reducing_bytes = bytes;
        state.units[unit].reducing = Some(self.links.reduce.submit(move |world| job.run(world)));
        self.note_gradients(state);
    }

    fn finish_reduce(&self, state: &mut State, unit: UnitIndex) -> Result<(), Error> {
        let Some(pending) = state.units[unit].reducing.take() else { return Ok(()) };
        let (reduced, waited, busy) = wait(pending)?;
        state.stats.reduce_wait += waited;
        state.stats.communication += busy;
        state.units[unit].reducing_bytes = 0;
        let (split, whole): (Vec<_>, Vec<_>) = self.trainable(unit).partition(|(_, spec)| spec.is_split());
        let params: Vec<_> = split.into_iter().chain(whole).map(|(param, _)| param).collect();
        for (param, new) in params.into_iter().zip(reduced) {
            let sum = match state.reduced[param].take() {
                Some(old) => self.add(param, old, new),
                None => new,
            };
            state.reduced[param] = Some(sum);
        }
        self.note_gradients(state);
        Ok(())
    }

    fn add(&self, param: usize, a: Bytes, b: Bytes) -> Bytes {
        let dtype = self.dtypes[param];
        let flat = |bytes: Bytes| {
            let len = bytes.len() / dtype.size_bytes();
            host::flex_tensor(bytes, &[len], dtype)
        };
        host::bytes_of(&Flex::float_add(flat(a), flat(b)))
    }

    fn gather_part(&self, param: usize, shard: Bytes) -> GatherPart {
        let layout = self.plan.params()[param].layout.clone();
        GatherPart { shard, layout, elem_bytes: self.dtypes[param].size_bytes() }
    }

    fn tag(&self, state: &State, phase: Phase, unit: UnitIndex) -> OpTag {
        OpTag::new(state.step, phase, self.plan.units()[unit].name.as_str())
    }

    /// Parameters of a unit that are gathered on use.
    fn cut_params(&self, unit: UnitIndex) -> impl Iterator<Item = (usize, &PlannedParam)> {
        self.params_of(unit).filter(|(_, spec)| !self.plan.is_resident(spec))
    }

    fn trainable(&self, unit: UnitIndex) -> impl Iterator<Item = (usize, &PlannedParam)> {
        self.params_of(unit).filter(|(_, spec)| spec.trainable)
    }

    fn split_trainable(&self, unit: UnitIndex) -> impl Iterator<Item = (usize, &PlannedParam)> {
        self.trainable(unit).filter(|(_, spec)| spec.is_split())
    }

    pub(crate) fn params_of(&self, unit: UnitIndex) -> impl Iterator<Item = (usize, &PlannedParam)> {
        self.plan.units()[unit].params.iter().map(|&param| (param, &self.plan.params()[param]))
    }

    fn note_gathered(&self, state: &mut State) {
        let gathered = |unit: UnitIndex| -> usize {
            self.cut_params(unit).map(|(param, spec)| spec.layout.full_len() * self.dtypes[param].size_bytes()).sum()
        };
        let held = (0..state.units.len()).filter(|&unit| !matches!(state.units[unit].gathered, Gathered::No));
        let bytes = held.map(gathered).sum();
        state.stats.peak_gathered_bytes = state.stats.peak_gathered_bytes.max(bytes);
        let stored = state.stored.iter().map(Bytes::len).sum();
        state.stats.peak_parameter_bytes = state.stats.peak_parameter_bytes.max(stored);
    }

    fn note_gradients(&self, state: &mut State) {
        let size = |(param, gradient): (usize, &Option<FlexTensor>)| match gradient {
            Some(gradient) => gradient.shape().num_elements() * self.dtypes[param].size_bytes(),
            None => 0,
        };
        let local: usize = state.local.iter().enumerate().map(size).sum();
        let reducing: usize = state.units.iter().map(|unit| unit.reducing_bytes).sum();
        let reduced: usize = state.reduced.iter().flatten().map(Bytes::len).sum();
        state.stats.peak_gradient_bytes = state.stats.peak_gradient_bytes.max(local + reducing + reduced);
        let stored = state.stored.iter().map(Bytes::len).sum();
        state.stats.peak_parameter_bytes = state.stats.peak_parameter_bytes.max(stored);
    }

    /// What is done with each sum over ranks.
    fn reduce(&self) -> Reduce {
        if self.reduces_to_mean() { Reduce::mean(self.links.reduce_world.world_size()) } else { Reduce::SUM }
    }

    fn misuse(&self, problem: &str, remedy: &'static str) -> Error {
        Error::Misuse { problem: format!("rank {}: {problem}", self.links.control.rank()), remedy }
    }

    /// Ends the other ranks, and unwinds without a panic message.
    fn fail(&self, error: Error) -> ! {
        let rank = self.links.control.rank();
        if !matches!(error, Error::Comm(CommError::Aborted { .. })) {
            self.links.control.abort(AbortCause::RankFailed { rank, message: error.to_string() });
        }
        std::panic::resume_unwind(Box::new(EngineFailed(error)))
    }
}

/// One unit's reduction, as it runs on the communication thread.
struct ReduceJob {
    split: Vec<ReducePart>,
    whole: Vec<ReducePart>,
    tag: OpTag,
    reduce: Reduce,
    shard: Arc<dyn fsdp_core::Communicator>,
    replicas: Option<Arc<dyn fsdp_core::Communicator>>,
}

impl ReduceJob {
    /// Blocks of the split parameters, then the whole ones. The factor is applied once, after the last sum.
    fn run(self, world: &dyn fsdp_core::Communicator) -> Result<Vec<Bytes>, CommError> {
        let mut reduced = Vec::new();
        if !self.split.is_empty() {
            reduced = match &self.replicas {
                None => self.shard.reduce_scatter(&self.tag, &self.split, self.reduce)?,
                Some(replicas) => {
                    let blocks = self.shard.reduce_scatter(&self.tag, &self.split, Reduce::SUM)?;
                    let part = |(block, part): (Bytes, &ReducePart)| {
                        let len = block.len() / part.dtype.size_bytes();
                        let layout = ShardLayout::new(&[len], 0, replicas.world_size());
                        ReducePart { full: block, layout, dtype: part.dtype }
                    };
                    let parts: Vec<_> = blocks.into_iter().zip(&self.split).map(part).collect();
                    replicas.all_reduce(&self.tag, &parts, self.reduce)?
                }
            };
        }
        if !self.whole.is_empty() {
            reduced.extend(world.all_reduce(&self.tag, &self.whole, self.reduce)?);
        }
        Ok(reduced)
    }
}

/// The result, how long the caller stood still for it, and how long the communication thread was busy with it.
fn wait<T>(pending: Pending<T>) -> Result<(T, Duration, Duration), CommError> {
    let (value, timing) = pending.wait_timed();
    Ok((value?, timing.blocked, timing.finished.duration_since(timing.started)))
}

/// The block of `rank` of a whole tensor: shared where it is one range, copied otherwise.
pub(crate) fn cut(full: &Bytes, layout: &ShardLayout, rank: usize, elem_bytes: usize) -> Bytes {
    let mut runs = layout.runs(rank).map(|run| run.start * elem_bytes..run.end * elem_bytes);
    match (runs.next(), runs.next()) {
        (None, _) => Bytes::new(),
        (Some(run), None) => full.slice(run),
        (Some(first), Some(second)) => {
            let mut block = Vec::with_capacity(layout.shard_len(rank) * elem_bytes);
            for run in [first, second].into_iter().chain(runs) {
                block.extend_from_slice(&full[run]);
            }
            Bytes::from(block)
        }
    }
}

/// See [Note: A missing gradient is minus zero].
fn missing_gradient(len: usize, dtype: Dtype) -> Bytes {
    host::elements(match dtype {
        Dtype::F32 => TensorData::new(vec![-0.0_f32; len], [len]),
        Dtype::F64 => TensorData::new(vec![-0.0_f64; len], [len]),
    })
}

/// See [Note: A missing gradient is minus zero]. The first element tells nearly always.
fn is_missing(gradient: &Bytes, dtype: Dtype) -> bool {
    let minus_zero: &[u8] = match dtype {
        Dtype::F32 => &(-0.0_f32).to_ne_bytes(),
        Dtype::F64 => &(-0.0_f64).to_ne_bytes(),
    };
    !gradient.is_empty() && gradient.chunks_exact(minus_zero.len()).all(|element| element == minus_zero)
}
