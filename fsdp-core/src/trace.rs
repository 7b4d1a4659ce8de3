//! Where every millisecond of a run went: spans by rank and stream, written in the Chrome trace format.
//!
//! The file opens in Perfetto or in a browser's tracing page: one process per rank, one row per [`TraceStream`].

use std::io::{self, Write};
use std::ops::Range;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use serde::Serialize;

/// What a span happened on: a row of the picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TraceStream {
    /// The rank's own thread: computation, and waits for communication.
    Compute,
    /// All-gathers.
    Gather,
    /// Reductions.
    Reduce,
    /// Reads and writes of offloaded state.
    Tier,
}

impl TraceStream {
    /// All rows, from the top.
    pub const ALL: [TraceStream; 4] =
        [TraceStream::Compute, TraceStream::Gather, TraceStream::Reduce, TraceStream::Tier];

    /// Name of the row.
    pub fn name(self) -> &'static str {
        match self {
            TraceStream::Compute => "compute",
            TraceStream::Gather => "gather",
            TraceStream::Reduce => "reduce",
            TraceStream::Tier => "tier",
        }
    }
}

/// What a span was spent on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SpanKind {
    /// A unit computes in forward.
    Forward,
    /// A unit computes in backward.
    Backward,
    /// A unit's parameters are stepped.
    Step,
    /// A unit's parameters are gathered.
    Gather,
    /// A unit's gradients are reduced.
    Reduce,
    /// The updated parameters of a unit are gathered (stages 1 and 2).
    Publish,
    /// Computation stands still for communication, or for a tier.
    Wait,
    /// Offloaded state of a unit is read from its tier.
    Read,
    /// Offloaded state of a unit is written to its tier.
    Write,
}

impl SpanKind {
    /// All kinds.
    pub const ALL: [SpanKind; 9] = [
        SpanKind::Forward,
        SpanKind::Backward,
        SpanKind::Step,
        SpanKind::Gather,
        SpanKind::Reduce,
        SpanKind::Publish,
        SpanKind::Wait,
        SpanKind::Read,
        SpanKind::Write,
    ];

    /// Name of the kind.
    pub fn name(self) -> &'static str {
        match self {
            SpanKind::Forward => "forward",
            SpanKind::Backward => "backward",
            SpanKind::Step => "step",
            SpanKind::Gather => "gather",
            SpanKind::Reduce => "reduce",
            SpanKind::Publish => "publish",
            SpanKind::Wait => "wait",
            SpanKind::Read => "read",
            SpanKind::Write => "write",
        }
    }
}

/// One span.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// The rank.
    pub rank: usize,
    /// The row.
    pub stream: TraceStream,
    /// What it was spent on.
    pub kind: SpanKind,
    /// The unit.
    pub unit: String,
    /// The optimizer step, from 0.
    pub step: u64,
    /// Bytes of the whole unit that moved; 0 for computation.
    pub bytes: u64,
    /// When it began.
    pub start: Instant,
    /// When it ended.
    pub end: Instant,
}

/// Collects the spans of all ranks of a process.
///
/// Cost: about 100 bytes and one short lock per span; a step makes a few spans per unit.
///
/// ```
/// use std::time::{Duration, Instant};
/// use fsdp_core::{Span, SpanKind, Trace, TraceStream};
///
/// let trace = Trace::new();
/// let start = Instant::now();
/// let end = start + Duration::from_micros(250);
/// let (stream, kind) = (TraceStream::Gather, SpanKind::Gather);
/// trace.add(Span { rank: 0, stream, kind, unit: "blocks.0".into(), step: 3, bytes: 1024, start, end });
///
/// let mut json = Vec::new();
/// trace.write_to(&mut json)?;
/// let json: serde_json::Value = serde_json::from_slice(&json)?;
/// let span = json["traceEvents"].as_array().and_then(|events| events.last()).expect("the span");
/// assert_eq!((&span["name"], &span["dur"]), (&"gather blocks.0".into(), &250.0.into()));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Trace {
    origin: Instant,
    steps: Range<u64>,
    spans: Mutex<Vec<Span>>,
}

impl Default for Trace {
    fn default() -> Self {
        Self::new()
    }
}

impl Trace {
    /// An empty trace of all steps that begins now.
    pub fn new() -> Self {
        Self::of_steps(0..u64::MAX)
    }

    /// An empty trace that leaves out the spans of other optimizer steps, so that a long run makes a small file.
    pub fn of_steps(steps: Range<u64>) -> Self {
        Self { origin: Instant::now(), steps, spans: Mutex::default() }
    }

    /// An empty trace of all steps whose times count from `origin`.
    pub(crate) fn beginning_at(origin: Instant) -> Self {
        Self { origin, ..Self::new() }
    }

    /// Adds a span, if its step is among those that are traced.
    pub fn add(&self, span: Span) {
        if !self.steps.contains(&span.step) {
            return;
        }
        self.spans.lock().unwrap_or_else(PoisonError::into_inner).push(span);
    }

    /// All spans so far, in the order in which they were added.
    pub fn spans(&self) -> Vec<Span> {
        self.spans.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Writes the trace to `path`, over a file that is there.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        let mut file = io::BufWriter::new(std::fs::File::create(path)?);
        self.write_to(&mut file)?;
        file.flush()
    }

    /// Writes the trace as JSON.
    ///
    /// # Errors
    /// If `out` cannot be written to.
    pub fn write_to(&self, out: impl Write) -> io::Result<()> {
        let spans = self.spans();
        let mut ranks: Vec<usize> = spans.iter().map(|span| span.rank).collect();
        ranks.sort_unstable();
        ranks.dedup();
        let mut events: Vec<Event> = Vec::new();
        for &rank in &ranks {
            events.push(Event::name("process_name", rank, 0, format!("rank {rank}")));
            let has_tier = spans.iter().any(|span| span.rank == rank && span.stream == TraceStream::Tier);
            let rows = TraceStream::ALL.iter().enumerate();
            for (row, stream) in rows.filter(|(_, stream)| **stream != TraceStream::Tier || has_tier) {
                events.push(Event::name("thread_name", rank, row, stream.name().to_owned()));
            }
        }
        events.extend(spans.iter().map(|span| self.event(span)));
        let file = File { trace_events: events, display_time_unit: "ms" };
        serde_json::to_writer(out, &file).map_err(io::Error::from)
    }

    fn event(&self, span: &Span) -> Event {
        let micros = |at: Instant| at.saturating_duration_since(self.origin).as_nanos() as f64 / 1e3;
        let row = TraceStream::ALL.iter().position(|&stream| stream == span.stream).unwrap_or(0);
        Event {
            name: format!("{} {}", span.kind.name(), span.unit),
            cat: span.kind.name(),
            ph: "X",
            pid: span.rank,
            tid: row,
            ts: micros(span.start),
            dur: span.end.saturating_duration_since(span.start).as_nanos() as f64 / 1e3,
            args: Args { name: None, step: Some(span.step), bytes: (span.bytes > 0).then_some(span.bytes) },
        }
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct File {
    trace_events: Vec<Event>,
    display_time_unit: &'static str,
}

#[derive(Serialize)]
struct Event {
    name: String,
    cat: &'static str,
    ph: &'static str,
    pid: usize,
    tid: usize,
    ts: f64,
    dur: f64,
    args: Args,
}

#[derive(Serialize)]
struct Args {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    step: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<u64>,
}

impl Event {
    /// The name of a process or of one of its rows.
    fn name(what: &str, pid: usize, tid: usize, name: String) -> Self {
        let args = Args { name: Some(name), step: None, bytes: None };
        Self { name: what.to_owned(), cat: "__metadata", ph: "M", pid, tid, ts: 0.0, dur: 0.0, args }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn each_rank_is_a_process_with_a_named_row_for_each_stream() {
        let trace = Trace::new();
        for (rank, stream, kind) in
            [(1, TraceStream::Reduce, SpanKind::Reduce), (0, TraceStream::Compute, SpanKind::Wait)]
        {
            let start = trace.origin + Duration::from_millis(2);
            let end = start + Duration::from_millis(1);
            trace.add(Span { rank, stream, kind, unit: "head".into(), step: 5, bytes: 8, start, end });
        }
        let mut json = Vec::new();
        trace.write_to(&mut json).unwrap();
        let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
        let events = json["traceEvents"].as_array().unwrap();
        let rows: Vec<_> = events
            .iter()
            .filter(|event| event["name"] == "thread_name")
            .map(|event| (event["pid"].as_u64().unwrap(), event["args"]["name"].as_str().unwrap()))
            .collect();
        assert_eq!(rows[..4], [(0, "compute"), (0, "gather"), (0, "reduce"), (1, "compute")]);
        let reduce = events.iter().find(|event| event["name"] == "reduce head").unwrap();
        assert_eq!((reduce["pid"].as_u64(), reduce["tid"].as_u64()), (Some(1), Some(2)));
        assert_eq!((reduce["ts"].as_f64(), reduce["dur"].as_f64()), (Some(2000.0), Some(1000.0)));
        assert_eq!((reduce["args"]["step"].as_u64(), reduce["args"]["bytes"].as_u64()), (Some(5), Some(8)));
    }

    #[test]
    fn spans_of_other_steps_are_left_out() {
        let trace = Trace::of_steps(1..3);
        let (stream, kind, start) = (TraceStream::Compute, SpanKind::Step, trace.origin);
        for step in 0..5 {
            trace.add(Span { rank: 0, stream, kind, unit: "head".into(), step, bytes: 0, start, end: start });
        }
        let steps: Vec<u64> = trace.spans().iter().map(|span| span.step).collect();
        assert_eq!(steps, [1, 2]);
    }

    #[test]
    fn a_file_that_cannot_be_written_is_an_error() {
        assert!(Trace::new().write(Path::new("/no such folder/trace.json")).is_err());
    }
}
