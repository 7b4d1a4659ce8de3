//! What an engine can tell of itself: waits, sizes, and a trace.

use std::time::{Duration, Instant};

use fsdp_core::{Pending, Plan, PlanMemory, PlannedParam, Span, SpanKind, TraceStream, Transfer, UnitIndex};

use super::{Engine, State};
use crate::Error;

/// What an engine has done since its start, or since its statistics were reset.
#[derive(Clone, Copy, Debug, Default)]
pub struct EngineStats {
    /// Time that forward and backward stood still for a gather.
    pub gather_wait: Duration,
    /// Time that backward and the optimizer stood still for a reduction.
    pub reduce_wait: Duration,
    /// Time that the optimizer stood still for updated parameters of other ranks (stages 1 and 2).
    pub publish_wait: Duration,
    /// Time that forward, backward and the optimizer stood still for offloaded state.
    pub tier_wait: Duration,
    /// Time that the communication threads were busy, waiting for peers included.
    pub communication: Duration,
    /// Largest size of the parameters held, in bytes: blocks at stage 3, whole tensors below.
    pub peak_parameter_bytes: usize,
    /// Largest size of gathered units held at once, in bytes. Ranks of one host share each gathered unit; where their blocks lie in
    /// it, it takes no memory beside them.
    pub peak_gathered_bytes: usize,
    /// Largest size of what was held of units between forward and backward, in bytes: this rank's blocks of a smaller group
    /// (`reshard_after_forward`).
    pub peak_resharded_bytes: usize,
    /// Largest size of gradients held at once, in bytes, before and after reduction.
    pub peak_gradient_bytes: usize,
    /// Bytes of parameters and gradients that were copied from the rank's device to host memory; 0 on processors.
    pub copied_to_host_bytes: u64,
    /// The same from host memory to the device.
    pub copied_to_device_bytes: u64,
}

impl EngineStats {
    /// Time that the model stood still for communication.
    pub fn exposed(&self) -> Duration {
        self.gather_wait + self.reduce_wait + self.publish_wait
    }

    /// Share of the communication that ran beside the computation, 0 to 1: 0 if the model stood still for all of it, 1 if
    /// for none. `None` if there was no communication.
    pub fn overlap(&self) -> Option<f64> {
        let exposed = self.exposed().min(self.communication).as_secs_f64();
        (!self.communication.is_zero()).then(|| 1.0 - exposed / self.communication.as_secs_f64())
    }
}

/// What the rank's own thread computes at the moment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Computing {
    kind: SpanKind,
    unit: UnitIndex,
    start: Instant,
}

impl Engine {
    /// Waits for an operation, and counts how long the caller stood still and how long the communication thread was busy.
    pub(super) fn wait<T>(
        &self,
        state: &mut State,
        kind: SpanKind,
        unit: UnitIndex,
        pending: Pending<T>,
    ) -> Result<T, Error> {
        let span = tracing::trace_span!("wait", kind = kind.name(), unit = self.plan.units()[unit].name).entered();
        let (value, timing) = pending.wait_timed();
        drop(span);
        let value = value?;
        let stats = &mut state.stats;
        let waited = match kind {
            SpanKind::Gather => &mut stats.gather_wait,
            SpanKind::Reduce => &mut stats.reduce_wait,
            _ => &mut stats.publish_wait,
        };
        *waited += timing.blocked;
        stats.communication += timing.finished.duration_since(timing.started);
        self.record(state, kind, unit, (timing.started, timing.finished), |span| {
            let dtypes = if kind == SpanKind::Reduce { &self.dtypes.reduce } else { &self.dtypes.compute };
            let elem_bytes = |param: usize| dtypes[param].size_bytes();
            let bytes = |(param, spec): (usize, &PlannedParam)| spec.layout.full_len() * elem_bytes(param);
            span.bytes = self.params_of(unit).map(bytes).sum::<usize>() as u64;
            span.stream = if kind == SpanKind::Reduce { TraceStream::Reduce } else { TraceStream::Gather };
        });
        if !timing.blocked.is_zero() {
            let now = Instant::now();
            self.record(state, SpanKind::Wait, unit, (now - timing.blocked, now), |_| ());
        }
        Ok(value)
    }

    /// This rank has stood still for its peers on devices since `begun`.
    #[cfg(any(feature = "cuda", feature = "cpu"))]
    pub(super) fn stood_still(&self, state: &mut State, kind: SpanKind, unit: UnitIndex, begun: Instant) {
        let now = Instant::now();
        let stats = &mut state.stats;
        let waited = match kind {
            SpanKind::Gather => &mut stats.gather_wait,
            SpanKind::Reduce => &mut stats.reduce_wait,
            _ => &mut stats.publish_wait,
        };
        *waited += now - begun;
        stats.communication += now - begun;
        self.record(state, SpanKind::Wait, unit, (begun, now), |_| ());
    }

    /// Waits for a transfer of a tier, and counts how long the caller stood still.
    pub(super) fn wait_tier<T>(
        &self,
        state: &mut State,
        kind: SpanKind,
        unit: UnitIndex,
        bytes: u64,
        transfer: Transfer<T>,
    ) -> Result<T, Error> {
        let span = tracing::trace_span!("wait", kind = kind.name(), unit = self.plan.units()[unit].name).entered();
        let (value, timing) = transfer.wait_timed();
        drop(span);
        let value = value?;
        state.stats.tier_wait += timing.blocked;
        self.record(state, kind, unit, (timing.started, timing.finished), |span| {
            (span.bytes, span.stream) = (bytes, TraceStream::Tier);
        });
        if !timing.blocked.is_zero() {
            let now = Instant::now();
            self.record(state, SpanKind::Wait, unit, (now - timing.blocked, now), |_| ());
        }
        Ok(value)
    }

    /// As [`Engine::wait_tier`], for the optimizer.
    pub(crate) fn wait_state<T>(
        &self,
        unit: UnitIndex,
        kind: SpanKind,
        bytes: u64,
        transfer: Transfer<T>,
    ) -> Result<T, Error> {
        self.wait_tier(&mut self.lock(), kind, unit, bytes, transfer)
    }

    /// What decides the memory of this rank, with what `plan` trains.
    pub(crate) fn memory(&self, plan: &Plan) -> PlanMemory<'_> {
        PlanMemory {
            shard_index: self.shard_index,
            accumulate: self.settings.accumulate,
            num_micro_batches: self.settings.accumulation,
            depth: self.settings.depth,
            reshard: self.links.regather.as_ref().map(|group| group.world_size()),
            ranks_per_process: self.links.control.num_sharing(),
            in_place: self.gathers_in_place(plan),
            tiers: self.offload.memory(plan, self.shard_index),
            ..PlanMemory::new(&self.dtypes.master, &self.dtypes.compute, &self.dtypes.reduce)
        }
    }

    /// The rank's own thread computes for `unit` from now on.
    pub(super) fn computes(&self, state: &mut State, kind: SpanKind, unit: UnitIndex) {
        if self.trace.is_some() && state.computing.is_none_or(|now| (now.kind, now.unit) != (kind, unit)) {
            self.rests(state);
            state.computing = Some(Computing { kind, unit, start: Instant::now() });
        }
    }

    /// The rank's own thread waits, or does something else.
    pub(super) fn rests(&self, state: &mut State) {
        if let Some(Computing { kind, unit, start }) = state.computing.take() {
            self.record(state, kind, unit, (start, Instant::now()), |_| ());
        }
    }

    /// Runs the optimizer's work on `unit` as a span of its own.
    pub(crate) fn stepping<T>(&self, unit: UnitIndex, step: impl FnOnce() -> T) -> T {
        let _span = tracing::trace_span!("step", unit = self.plan.units()[unit].name).entered();
        let start = Instant::now();
        let result = step();
        self.record(&self.lock(), SpanKind::Step, unit, (start, Instant::now()), |_| ());
        result
    }

    /// Adds a span of the rank's own thread to the trace, changed by `change`; does nothing without a trace.
    fn record(
        &self,
        state: &State,
        kind: SpanKind,
        unit: UnitIndex,
        (start, end): (Instant, Instant),
        change: impl FnOnce(&mut Span),
    ) {
        let Some(trace) = &self.trace else { return };
        let (rank, name) = (self.links.control.rank(), self.plan.units()[unit].name.clone());
        let stream = TraceStream::Compute;
        let mut span = Span { rank, stream, kind, unit: name, step: state.step, bytes: 0, start, end };
        change(&mut span);
        trace.add(span);
    }
}

/// Bytes that the engine holds at the moment, by kind.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Held {
    pub(super) stored: usize,
    pub(super) gathered: usize,
    /// Blocks of the smaller group.
    pub(super) resharded: usize,
    /// Whole gradients of this rank.
    pub(super) local: usize,
    /// Whole gradients on their way.
    pub(super) reducing: usize,
    pub(super) reduced: usize,
}

impl State {
    /// Keeps the largest sizes so far.
    pub(super) fn note(&mut self) {
        let Held { stored, gathered, resharded, local, reducing, reduced } = self.held;
        let stats = &mut self.stats;
        stats.peak_parameter_bytes = stats.peak_parameter_bytes.max(stored);
        stats.peak_gathered_bytes = stats.peak_gathered_bytes.max(gathered);
        stats.peak_resharded_bytes = stats.peak_resharded_bytes.max(resharded);
        stats.peak_gradient_bytes = stats.peak_gradient_bytes.max(local + reducing + reduced);
    }
}
