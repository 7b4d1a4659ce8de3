//! One rank's engine: executes what the schedule says, with buffers and communicators.
//!
//! The life of a parameter at stage 3: `stored` holds this rank's block. `val()` in forward asks [`Engine::gather`],
//! which gathers the whole unit, lends the model a view, and lets go of it when forward moves on. Backward gathers it
//! once more. Its gradient comes to [`Engine::capture`] as a whole tensor; when the unit's gradients are complete they
//! are reduced on another thread to this rank's block of the mean, which the optimizer turns into a new `stored`.
//! At lower stages `stored` is the whole parameter and nothing is gathered; the rest of the way is the same.

mod backward;
mod execute;
mod missing;
mod observe;
#[cfg(any(feature = "cuda", feature = "cpu"))]
mod on_device;
mod place;
mod settings;
mod stored;
mod sum;
mod tiers;
mod whole;

use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::backend::Backend;
use burn::tensor::TensorData;
use bytes::Bytes;
use fsdp_core::{
    AbortCause, Accumulate, Action, Communicator, Dtype, GatherPart, GradientReduction, LossScaler, OpTag, Pending,
    Phase, PlacedPart, Plan, PlannedParam, PrecisionConfig, PrefetchDepth, Reduce, Schedule, ShardLayout, SpanKind,
    Trace, UnitIndex,
};

pub use observe::EngineStats;
#[cfg(any(feature = "cuda", feature = "cpu"))]
pub(crate) use whole::Coming;
pub(crate) use whole::Whole;

use crate::Error;
use crate::block::{Block, Home};
use crate::gather_op::{Ladder, Use};
use crate::host::{self, Identity};
use crate::links::Links;
use crate::offload::Offload;
use crate::precision::{Dtypes, Summary};
use execute::Sum;
use observe::{Computing, Held};
use tiers::{Reduced, Tiers};

/// Units that one graph may enter before depth stops to grow: forwards that never have a backward would build a ladder
/// without end. Beyond it gradients still arrive, only later. See [Note: Order of backward steps].
const MAX_RUNGS: usize = 4096;

/// What the configuration says.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) depth: PrefetchDepth,
    pub(crate) reduction: GradientReduction,
    pub(crate) accumulate: Accumulate,
    /// Backwards per optimizer step.
    pub(crate) accumulation: usize,
    pub(crate) precision: PrecisionConfig,
    /// Whether each step asks for the sum of all squares.
    pub(crate) sees_squares: bool,
}

/// See the module's documentation.
pub(crate) struct Engine {
    plan: Plan,
    /// Position on the shard axis.
    shard_index: usize,
    dtypes: Dtypes,
    held: Vec<bool>,
    /// By parameter: whether it gets gradients at the moment.
    trained: Vec<AtomicBool>,
    /// How often that has changed.
    generation: AtomicUsize,
    links: Links,
    settings: Settings,
    offload: Offload,
    trace: Option<Arc<Trace>>,
    state: Mutex<State>,
    ladder: Mutex<Option<Box<dyn Any + Send>>>,
}

struct State {
    schedule: Schedule,
    /// By parameter: this rank's block, or the whole parameter where that is resident. Empty while it lies in a tier.
    stored: Vec<Block>,
    /// By parameter: the same block, where all ranks of the host read the whole. See [Note: Gathers without a copy].
    placed: Vec<Option<PlacedPart>>,
    /// By parameter: what the optimizer steps, where that is not what is stored. See [Note: Masters and what is computed
    /// with].
    masters: Vec<Option<Block>>,
    /// By parameter: what a device calls the tensor that the model stores.
    lent: Vec<Option<Identity>>,
    /// By parameter: the whole gradient of this rank, not reduced yet.
    local: Vec<Option<Whole>>,
    /// By parameter: the reduced gradient, a block or whole like the optimizer's view of the parameter, of its type.
    reduced: Vec<Option<Reduced>>,
    /// By parameter: whether this rank has had a gradient since the last step, and from [`Engine::agree_on_gradients`] on,
    /// whether any rank has.
    has_gradient: Vec<bool>,
    units: Vec<UnitBuffers>,
    tiers: Tiers,
    /// Units that forward has entered since the last backward. See [Note: Order of backward steps].
    entered: usize,
    last_entered: Option<UnitIndex>,
    in_backward: bool,
    /// The gradients of this backward count for nothing: its loss has weight 0.
    void: bool,
    /// What the gradients of this backward are multiplied with.
    weight: f64,
    /// The first thing that backward asks for begins it, because a caller runs it together with forward.
    backward_begins_itself: bool,
    /// Optimizer steps done.
    step: u64,
    /// Backwards since the last step.
    backwards: usize,
    /// Items that their losses are means over, where that was said.
    items: Option<f64>,
    /// What weights of losses are divided by before backward: the items of the first of them, so that a weighted gradient is
    /// as large as a mean, in half precision too.
    item_unit: f64,
    scaler: Option<LossScaler>,
    held: Held,
    computing: Option<Computing>,
    stats: EngineStats,
}

#[derive(Default)]
struct UnitBuffers {
    gathered: Gathered,
    reducing: Option<Pending<Vec<Sum>>>,
    /// The same from device to device: of split parameters, and of whole ones.
    #[cfg(any(feature = "cuda", feature = "cpu"))]
    exchanging: Option<[Option<crate::peers::Ticket>; 2]>,
    reducing_bytes: usize,
    publishing: Option<Pending<Vec<Bytes>>>,
    #[cfg(any(feature = "cuda", feature = "cpu"))]
    publishing_on_devices: Option<crate::peers::Ticket>,
}

#[derive(Default)]
enum Gathered {
    #[default]
    No,
    UnderWay(Pending<Vec<Bytes>>),
    /// By position in the unit's cut parameters.
    Yes(Vec<Bytes>),
    /// This rank's blocks of a smaller group, in the same order and in the type that is computed in.
    Resharded(Vec<Block>),
    /// As [`Gathered::UnderWay`] and [`Gathered::Yes`], from device to device.
    #[cfg(any(feature = "cuda", feature = "cpu"))]
    Exchanging {
        ticket: crate::peers::Ticket,
        /// Among the smaller group.
        again: bool,
    },
    #[cfg(any(feature = "cuda", feature = "cpu"))]
    OnDevice(Vec<crate::peers::CubeFloat>),
}

/// A whole parameter, for one use of it.
pub(crate) enum Lent {
    Host(TensorData),
    #[cfg(any(feature = "cuda", feature = "cpu"))]
    OnDevice(Box<crate::peers::CubeFloat>),
}

/// What a rank unwinds with, to the caller of `backward` or to the launcher, where an op cannot return an error.
pub(crate) struct EngineFailed(pub(crate) Error);

impl State {
    fn discard_gradients(&mut self) {
        self.reduced.iter_mut().for_each(|gradient| *gradient = None);
        self.local.iter_mut().for_each(|gradient| *gradient = None);
        self.has_gradient.fill(false);
        (self.held.reduced, self.held.local) = (0, 0);
        self.tiers.forget_gradients();
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Engine({}, rank {})", self.plan.stage(), self.links.control.rank())
    }
}

impl Engine {
    /// An engine over the parameters in `stored`, each as [`Plan::is_resident`] says: whole or this rank's block.
    pub(crate) fn new(
        plan: Plan,
        shard_index: usize,
        dtypes: Dtypes,
        links: Links,
        settings: Settings,
        offload: Offload,
        trace: Option<Arc<Trace>>,
    ) -> Self {
        let mut schedule =
            Schedule::new(plan.stage(), &plan.unit_traits(&dtypes.compute, &dtypes.reduce), settings.depth);
        schedule.set_tiers(&offload.unit_tiers(&plan));
        schedule.set_reshards(links.regather.is_some());
        let num_params = plan.params().len();
        let state = State {
            schedule,
            stored: vec![Block::nothing(); num_params],
            placed: vec![None; num_params],
            masters: vec![None; num_params],
            lent: vec![None; num_params],
            local: (0..num_params).map(|_| None).collect(),
            reduced: (0..num_params).map(|_| None).collect(),
            has_gradient: vec![false; num_params],
            units: plan.units().iter().map(|_| UnitBuffers::default()).collect(),
            tiers: Tiers::new(num_params, plan.units().len()),
            entered: 0,
            last_entered: None,
            in_backward: false,
            void: false,
            weight: 1.0,
            backward_begins_itself: false,
            step: 0,
            backwards: 0,
            items: None,
            item_unit: 1.0,
            scaler: dtypes.loss_scale(&settings.precision).map(LossScaler::new),
            held: Held::default(),
            computing: None,
            stats: EngineStats::default(),
        };
        let held = plan.params().iter().map(|param| plan.is_held(param)).collect();
        let trained = plan.params().iter().map(|param| AtomicBool::new(param.trainable)).collect();
        let (state, ladder) = (Mutex::new(state), Mutex::new(None));
        let generation = AtomicUsize::new(0);
        Self { plan, shard_index, dtypes, held, trained, generation, links, settings, offload, trace, state, ladder }
    }

    /// Units, and how parameters are cut. Which of them are trained may have changed since.
    pub(crate) fn plan(&self) -> &Plan {
        &self.plan
    }

    pub(crate) fn shard_index(&self) -> usize {
        self.shard_index
    }

    pub(crate) fn links(&self) -> &Links {
        &self.links
    }

    /// Element type of the optimizer's view of a parameter.
    pub(crate) fn dtype(&self, param: usize) -> Dtype {
        self.dtypes.master[param]
    }

    /// Element type that the parameter is computed in.
    pub(crate) fn compute_dtype(&self, param: usize) -> Dtype {
        self.dtypes.compute[param]
    }

    /// Element type that outputs of the parameter's unit are cast to.
    pub(crate) fn output_dtype(&self, param: usize) -> Dtype {
        self.dtypes.output[self.plan.params()[param].unit]
    }

    /// Element types of all parameters and the loss scale, in words.
    pub(crate) fn precision_summary(&self) -> impl fmt::Display {
        Summary { dtypes: &self.dtypes, config: &self.settings.precision }
    }

    /// Element type that outputs are cast to.
    pub(crate) fn precision(&self) -> &PrecisionConfig {
        &self.settings.precision
    }

    pub(crate) fn accumulation(&self) -> usize {
        self.settings.accumulation
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
        let [copied_to_host_bytes, copied_to_device_bytes] = self.home().copied();
        EngineStats { copied_to_host_bytes, copied_to_device_bytes, ..self.lock().stats }
    }

    pub(crate) fn reset_stats(&self) {
        self.home().forget_copied();
        self.lock().stats = EngineStats::default();
    }

    /// The memories of this rank. See [Note: Blocks beside a device].
    pub(crate) fn home(&self) -> &Home {
        self.offload.home()
    }

    /// What is offloaded, and to where.
    pub(crate) fn offload(&self) -> &Offload {
        &self.offload
    }

    /// Forgets a forward that will have no backward, and lets go of what it has gathered.
    pub(crate) fn abandon_forward(&self) -> Result<(), Error> {
        let mut state = self.lock();
        (state.entered, state.last_entered) = (0, None);
        let actions = state.schedule.forget_gathered();
        self.run(&mut state, actions)
    }

    /// The model stores a tensor on a device, in place of what is stored here.
    pub(crate) fn lend(&self, param: usize, tensor: Option<Identity>) {
        self.lock().lent[param] = tensor;
    }

    /// The whole parameter, for one use of it; `None` where that is what the model stores. `given` is what it stores, as far
    /// as its backend can tell.
    ///
    /// # Panics
    /// Unwinds with the error when a collective fails: `val()` has no other way to say so.
    pub(crate) fn gather(&self, param: usize, given: Option<Identity>, usage: Use) -> Option<Lent> {
        match self.try_gather(param, given, usage) {
            Ok(full) => full,
            Err(error) => self.fail(error),
        }
    }

    /// Takes the whole gradient of one use of a parameter.
    ///
    /// # Panics
    /// As [`Engine::gather`].
    pub(crate) fn capture(&self, param: usize, gradient: Whole) {
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

    /// Makes sure that all gradients since the last step are reduced, or being reduced.
    pub(crate) fn reduce_rest(&self) -> Result<(), Error> {
        let mut state = self.lock();
        let actions = state.schedule.reduce_rest();
        self.run(&mut state, actions)
    }

    /// Waits for the gathers that a step has started for the forward after it.
    pub(crate) fn finish_gathers(&self) -> Result<(), Error> {
        let mut state = self.lock();
        let actions = state.schedule.finish_gathers();
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

    /// Drops all gradients, reduced or not.
    pub(crate) fn discard_gradients(&self) {
        self.lock().discard_gradients();
    }

    /// So many optimizer steps are done.
    pub(crate) fn resume_at(&self, step: u64) {
        let mut state = self.lock();
        state.step = step;
        (state.backwards, state.items) = (0, None);
    }

    /// The step is over, whether it changed the parameters or not.
    pub(crate) fn end_step(&self) {
        let mut state = self.lock();
        state.step += 1;
        (state.backwards, state.items) = (0, None);
        state.has_gradient.fill(false);
    }

    /// Shape of the optimizer's view of a parameter.
    pub(crate) fn block_shape(&self, param: usize) -> Vec<usize> {
        let spec = &self.plan.params()[param];
        if spec.is_split() { spec.layout.shard_shape(self.shard_index) } else { spec.layout.shape().to_vec() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn try_gather(&self, param: usize, given: Option<Identity>, usage: Use) -> Result<Option<Lent>, Error> {
        let spec = &self.plan.params()[param];
        let mut state = self.lock();
        if usage == Use::Backward && state.backward_begins_itself {
            self.backward_has_begun(&mut state)?;
        }
        if state.in_backward && usage == Use::Forward {
            return Err(self.misuse(
                &format!("parameter `{}` is used in a forward inside backward", spec.path),
                "finish backward first, or use the model's valid()",
            ));
        }
        self.check_given(&state, param, given)?;
        let actions = match usage {
            Use::Forward => {
                if state.last_entered != Some(spec.unit) {
                    state.last_entered = Some(spec.unit);
                    state.entered = (state.entered + 1).min(MAX_RUNGS);
                }
                state.schedule.forward(spec.unit)
            }
            Use::Backward => state.schedule.backward(spec.unit),
            Use::Evaluate => state.schedule.evaluate(spec.unit),
        };
        if !actions.is_empty() {
            self.rests(&mut state);
        }
        self.run(&mut state, actions)?;
        let kind = if usage == Use::Backward { SpanKind::Backward } else { SpanKind::Forward };
        self.computes(&mut state, kind, spec.unit);
        if self.plan.is_resident(spec) {
            return Ok(None);
        }
        let position = self.cut_params(spec.unit).position(|(other, _)| other == param);
        match (&state.units[spec.unit].gathered, position) {
            (Gathered::Yes(full), Some(position)) => {
                let full = full[position].clone();
                Ok(Some(Lent::Host(host::tensor_data(full, spec.layout.shape(), self.dtypes.compute[param]))))
            }
            #[cfg(any(feature = "cuda", feature = "cpu"))]
            (Gathered::OnDevice(full), Some(position)) => Ok(Some(Lent::OnDevice(Box::new(full[position].clone())))),
            _ => unreachable!("the schedule has gathered unit {} before it is used", spec.unit),
        }
    }

    /// The model must still store what the engine gathers: a replaced tensor would be silently ignored.
    fn check_given(&self, state: &State, param: usize, given: Option<Identity>) -> Result<(), Error> {
        let expected = state.lent[param].or_else(|| state.stored[param].identity());
        if expected.is_none() || given.is_none() || given == expected {
            return Ok(());
        }
        let path = &self.plan.params()[param].path;
        Err(self.misuse(
            &format!(
                "parameter `{path}` is not the one the engine holds: this copy of the model is older than the last \
                      step, or its weights were replaced"
            ),
            "call `valid()` again after a step, and change weights before sharding or through the optimizer",
        ))
    }

    /// How a parameter is cut over the ranks of [`Links::regather`], and this rank's index among them.
    fn regather_layout(&self, param: usize, group: &dyn Communicator) -> (ShardLayout, usize) {
        let layout = &self.plan.params()[param].layout;
        (ShardLayout::new(layout.shape(), layout.dim(), group.world_size()), group.rank())
    }

    fn gather_part(&self, param: usize, shard: Bytes, dtype: Dtype) -> GatherPart {
        let layout = self.plan.params()[param].layout.clone();
        GatherPart { shard, layout, elem_bytes: dtype.size_bytes() }
    }

    fn tag(&self, state: &State, phase: Phase, unit: UnitIndex) -> OpTag {
        OpTag::new(state.step, phase, self.plan.units()[unit].name.as_str())
    }

    /// Parameters of a unit that are gathered on use.
    fn cut_params(&self, unit: UnitIndex) -> impl Iterator<Item = (usize, &PlannedParam)> {
        self.params_of(unit).filter(|(_, spec)| !self.plan.is_resident(spec))
    }

    fn trainable(&self, unit: UnitIndex) -> impl Iterator<Item = (usize, &PlannedParam)> {
        self.params_of(unit).filter(|(param, _)| self.is_trained(*param))
    }

    fn split_trainable(&self, unit: UnitIndex) -> impl Iterator<Item = (usize, &PlannedParam)> {
        self.trainable(unit).filter(|(_, spec)| spec.is_split())
    }

    #[cfg(any(feature = "cuda", feature = "cpu"))]
    fn whole_trainable(&self, unit: UnitIndex) -> impl Iterator<Item = (usize, &PlannedParam)> {
        self.trainable(unit).filter(|(_, spec)| !spec.is_split())
    }

    pub(crate) fn params_of(&self, unit: UnitIndex) -> impl Iterator<Item = (usize, &PlannedParam)> {
        self.plan.units()[unit].params.iter().map(|&param| (param, &self.plan.params()[param]))
    }

    /// What is done with each sum over ranks.
    fn reduce(&self) -> Reduce {
        if self.reduces_to_mean() { Reduce::mean(self.links.reduce_world.world_size()) } else { Reduce::SUM }
    }

    fn misuse(&self, problem: &str, remedy: &'static str) -> Error {
        Error::Misuse { problem: problem.to_owned(), remedy }
    }

    /// Ends the other ranks, and unwinds without a panic message.
    fn fail(&self, error: Error) -> ! {
        let rank = self.links.control.rank();
        if !error.is_consequence() {
            self.links.control.abort(AbortCause::RankFailed { rank, message: error.to_string() });
        }
        std::panic::resume_unwind(Box::new(EngineFailed(error)))
    }
}
