//! A recorded step through the simulator: the times of a trace that an engine wrote, in the order that the schedule says.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::simulate::{BackwardUse, Job, Move, Scope, SimReport, Uses, Wire, Workload};
use crate::{Mesh, SpanKind, Stage, StepTraffic, TraceStream};

/// The spans of a trace in Chrome's format, as [`Trace::write`](crate::Trace::write) makes it.
#[derive(Clone, Debug, PartialEq)]
pub struct Recorded {
    origin: String,
    spans: Vec<RecordedSpan>,
}

#[derive(Clone, Debug, PartialEq)]
struct RecordedSpan {
    rank: usize,
    step: u64,
    stream: TraceStream,
    kind: SpanKind,
    unit: String,
    bytes: u64,
    start_s: f64,
    end_s: f64,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct File {
    trace_events: Vec<Event>,
}

#[derive(Deserialize)]
struct Event {
    name: String,
    ph: String,
    pid: usize,
    tid: usize,
    ts: f64,
    #[serde(default)]
    dur: f64,
    #[serde(default)]
    args: Args,
}

#[derive(Default, Deserialize)]
struct Args {
    step: Option<u64>,
    #[serde(default)]
    bytes: u64,
}

/// Why a trace cannot be replayed.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The file cannot be read.
    #[error("{}: {source}; a trace is written by `train --trace FILE`, or by `Trace::write`", file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Not a trace.
    #[error("{origin}: not a trace of this project: {message}; write one with `train --trace FILE`")]
    Syntax {
        /// The file.
        origin: String,
        /// What is wrong.
        message: String,
    },
    /// No such step.
    #[error("{origin}: there is no step {step} of rank {rank}; it has steps {steps:?} of ranks {ranks:?}")]
    NoStep {
        /// The file.
        origin: String,
        /// The rank.
        rank: usize,
        /// The step.
        step: u64,
        /// Ranks that are there.
        ranks: Vec<usize>,
        /// Steps that are there.
        steps: Vec<u64>,
    },
    /// A unit that the model does not have.
    #[error("{origin}: the trace names unit `{unit}`, which the model does not have; its units are {known:?}")]
    UnknownUnit {
        /// The file.
        origin: String,
        /// The unit.
        unit: String,
        /// The model's units.
        known: Vec<String>,
    },
}

impl Recorded {
    /// Reads a file.
    ///
    /// # Errors
    /// If it cannot be read, or is no trace.
    pub fn read(file: &Path) -> Result<Self, ReplayError> {
        let text = fs::read_to_string(file).map_err(|source| ReplayError::Io { file: file.to_owned(), source })?;
        Self::from_json(&text, &file.display().to_string())
    }

    /// Reads a file's text; `origin` is its name in errors.
    ///
    /// # Errors
    /// If it is no trace of this project.
    pub fn from_json(text: &str, origin: &str) -> Result<Self, ReplayError> {
        let wrong = |message: String| ReplayError::Syntax { origin: origin.to_owned(), message };
        let file: File = serde_json::from_str(text).map_err(|error| wrong(error.to_string()))?;
        let mut spans = Vec::new();
        for event in file.trace_events.into_iter().filter(|event| event.ph == "X") {
            let known = event.name.split_once(' ').and_then(|(kind, unit)| {
                let kind = SpanKind::ALL.into_iter().find(|known| known.name() == kind)?;
                Some((kind, unit.to_owned()))
            });
            let (Some((kind, unit)), Some(step)) = (known, event.args.step) else {
                return Err(wrong(format!("the span `{}` is of no known kind, or has no step", event.name)));
            };
            let stream = TraceStream::ALL.get(event.tid).copied();
            let stream = stream.ok_or_else(|| wrong(format!("row {} does not exist", event.tid)))?;
            let (start_s, end_s) = (event.ts / 1e6, (event.ts + event.dur) / 1e6);
            let bytes = event.args.bytes;
            spans.push(RecordedSpan { rank: event.pid, step, stream, kind, unit, bytes, start_s, end_s });
        }
        spans.sort_by(|one, two| one.start_s.total_cmp(&two.start_s));
        Ok(Self { origin: origin.to_owned(), spans })
    }

    /// The ranks, in order.
    pub fn ranks(&self) -> Vec<usize> {
        sorted(self.spans.iter().map(|span| span.rank))
    }

    /// The steps, in order.
    pub fn steps(&self) -> Vec<u64> {
        sorted(self.spans.iter().map(|span| span.step))
    }

    /// One rank's step as work for [`simulate`](crate::simulate()), with the times that were recorded: computations until
    /// the next span begins, waits left out; collectives as long as this rank saw them, peers included. The model, the
    /// rules and what the schedule knows of the units come from `job`. The workload has one rank: this.
    ///
    /// # Errors
    /// If the trace has no such step, or names a unit that the job's model does not have.
    pub fn workload(&self, job: &Job, stage: Stage, rank: usize, step: u64) -> Result<Workload, ReplayError> {
        let spans = self.of(rank, step)?;
        let mut workload = job.workload(stage);
        let mut index = HashMap::new();
        // What is waited for may be no unit's, as a norm.
        for span in spans.iter().filter(|span| span.kind != SpanKind::Wait) {
            let unit = workload.units.iter().position(|unit| unit.name == span.unit);
            let Some(unit) = unit else {
                let known = workload.units.iter().map(|unit| unit.name.clone()).collect();
                let (origin, unit) = (self.origin.clone(), span.unit.clone());
                return Err(ReplayError::UnknownUnit { origin, unit, known });
            };
            index.insert(span.unit.clone(), unit);
        }
        let on_row: Vec<_> = spans.iter().filter(|span| span.stream == TraceStream::Compute).collect();
        let uses = |kind: SpanKind| {
            let mut uses: Vec<usize> = Vec::new();
            uses.extend(on_row.iter().filter(|span| span.kind == kind).map(|span| index[&span.unit]));
            uses.dedup();
            uses
        };
        let (forward, backward) = (uses(SpanKind::Forward), uses(SpanKind::Backward));
        let num_gathers = |unit: usize| {
            spans.iter().filter(|span| span.kind == SpanKind::Gather && index[&span.unit] == unit).count()
        };
        // The last unit of forward that is not kept is still there.
        let stays = forward.iter().rev().find(|&&unit| !workload.traits[unit].keep).copied();
        let reads = |unit: usize| workload.traits[unit].keep || stays == Some(unit) || num_gathers(unit) > 1;
        let backward_uses = backward.iter().map(|&unit| BackwardUse { unit, reads: reads(unit) }).collect();
        workload.uses = Uses { forward: forward.clone(), backward: backward_uses };
        workload.mesh = Mesh::one_dim(1);
        let computed = computations(&on_row);
        let took = |kind: SpanKind, unit: usize| {
            let of_unit =
                on_row.iter().zip(&computed).filter(|(span, _)| span.kind == kind && index[&span.unit] == unit);
            of_unit.map(|(_, seconds)| seconds).sum::<f64>()
        };
        let times = |uses: &[usize], unit: usize| uses.iter().filter(|&&used| used == unit).count().max(1) as f64;
        for (unit, work) in workload.units.iter_mut().enumerate() {
            work.forward_s = took(SpanKind::Forward, unit) / times(&forward, unit);
            work.backward_s = took(SpanKind::Backward, unit) / times(&backward, unit);
            work.step_s = took(SpanKind::Step, unit);
            let moves = |kind: SpanKind| {
                let moved = |span: &&&RecordedSpan| span.kind == kind && span.stream != TraceStream::Compute;
                let of_unit = spans.iter().filter(moved).filter(|span| index[&span.unit] == unit);
                of_unit.map(|span| alone(span.end_s - span.start_s)).collect::<Vec<_>>()
            };
            let gathers = moves(SpanKind::Gather);
            work.gathers = [gathers.first().copied(), gathers.last().copied()];
            work.reduce = moves(SpanKind::Reduce);
            work.publish = moves(SpanKind::Publish).first().copied();
        }
        for (unit, work) in workload.tier_work.iter_mut().enumerate() {
            let seconds_per_byte = |kind: SpanKind| {
                let of_unit = spans.iter().filter(|span| span.kind == kind && index[&span.unit] == unit);
                let (bytes, seconds) = of_unit
                    .fold((0, 0.0), |(bytes, seconds), span| (bytes + span.bytes, seconds + span.end_s - span.start_s));
                seconds / bytes.max(1) as f64
            };
            let [read, write] = [SpanKind::Read, SpanKind::Write].map(seconds_per_byte);
            for placed in [&mut work.blocks, &mut work.stepped_blocks, &mut work.gradients, &mut work.state] {
                for part in placed {
                    (part.read_s, part.write_s) = (read * part.bytes as f64, write * part.bytes as f64);
                }
            }
        }
        workload.norm = alone(0.0);
        Ok(workload)
    }

    /// What was recorded on one stream of a rank's step, in order: kinds and units, waits left out.
    ///
    /// # Errors
    /// If the trace has no such step.
    pub fn order(&self, rank: usize, step: u64, stream: TraceStream) -> Result<Vec<(SpanKind, String)>, ReplayError> {
        let spans = self.of(rank, step)?.into_iter();
        let on_stream = spans.filter(|span| span.stream == stream && span.kind != SpanKind::Wait);
        let mut order: Vec<_> = on_stream.map(|span| (span.kind, span.unit.clone())).collect();
        order.dedup();
        Ok(order)
    }

    /// Seconds of a rank's step, from its first span to its last.
    ///
    /// # Errors
    /// If the trace has no such step.
    pub fn step_s(&self, rank: usize, step: u64) -> Result<f64, ReplayError> {
        let spans = self.of(rank, step)?;
        let on_row = spans.iter().filter(|span| span.stream == TraceStream::Compute);
        let start = on_row.clone().map(|span| span.start_s).fold(f64::INFINITY, f64::min);
        let end = on_row.map(|span| span.end_s).fold(0.0, f64::max);
        Ok((end - start).max(0.0))
    }

    fn of(&self, rank: usize, step: u64) -> Result<Vec<&RecordedSpan>, ReplayError> {
        let spans: Vec<_> = self.spans.iter().filter(|span| (span.rank, span.step) == (rank, step)).collect();
        if spans.is_empty() {
            let origin = self.origin.clone();
            return Err(ReplayError::NoStep { origin, rank, step, ranks: self.ranks(), steps: self.steps() });
        }
        Ok(spans)
    }
}

impl SimReport {
    /// What was simulated on one stream of a traced rank, in order: kinds and units, waits left out.
    pub fn order(&self, workload: &Workload, rank: usize, stream: TraceStream) -> Vec<(SpanKind, String)> {
        let of_rank = self.spans.iter().filter(|span| span.rank == rank && span.stream == stream);
        let mut spans: Vec<_> = of_rank.filter(|span| span.kind != SpanKind::Wait).collect();
        spans.sort_by(|one, two| one.start_s.total_cmp(&two.start_s));
        let named = |span: &&crate::SimSpan| Some((span.kind, workload.units[span.unit?].name.clone()));
        let mut order: Vec<_> = spans.iter().filter_map(named).collect();
        order.dedup();
        order
    }
}

/// By span of the rank's own thread, how long it computed: until the next span begins. What lies after a wait counts for
/// the computation after it; a wait itself takes nothing.
fn computations(on_row: &[&&RecordedSpan]) -> Vec<f64> {
    let mut after_waits = 0.0;
    let mut computed = Vec::new();
    for (at, span) in on_row.iter().enumerate() {
        let next = on_row.get(at + 1).map_or(span.end_s, |next| next.start_s);
        if span.kind == SpanKind::Wait {
            after_waits += next - span.end_s;
            computed.push(0.0);
        } else {
            // A trace is rounded: what takes no time may seem to take less.
            computed.push((next - span.start_s + std::mem::take(&mut after_waits)).max(0.0));
        }
    }
    computed
}

/// Nobody is met: what was recorded has shared its wire already.
fn alone(seconds: f64) -> Move {
    let (wire, traffic) = (Wire::InNode, StepTraffic::default());
    Move { scope: Scope::World, seconds, wire, filled_s: 0.0, taken_s: 0.0, traffic, element_bytes: 0 }
}

fn sorted<T: Ord>(items: impl Iterator<Item = T>) -> Vec<T> {
    let mut items: Vec<T> = items.collect();
    items.sort_unstable();
    items.dedup();
    items
}
