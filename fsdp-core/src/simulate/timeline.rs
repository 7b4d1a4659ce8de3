//! A simulated run as a trace, as a real one writes it.

use std::time::{Duration, Instant};

use crate::simulate::{SimReport, Workload};
use crate::{Span, Trace, TraceStream};

/// What a trace shows at most, in seconds: three hundred years, which clocks can still count.
const LONGEST_S: f64 = 1e10;

/// The spans of the traced ranks, for Perfetto or a browser's tracing page; [`Trace::write`] makes the file.
pub fn timeline(workload: &Workload, report: &SimReport) -> Trace {
    let origin = Instant::now();
    let trace = Trace::beginning_at(origin);
    let at = |seconds: f64| origin + Duration::from_secs_f64(seconds.clamp(0.0, LONGEST_S));
    for span in &report.spans {
        let unit = span.unit.map(|unit| &workload.units[unit]);
        trace.add(Span {
            rank: span.rank,
            stream: span.stream,
            kind: span.kind,
            unit: unit.map_or("gradient norm".to_owned(), |unit| unit.name.clone()),
            step: span.step,
            bytes: unit.filter(|_| span.stream != TraceStream::Compute).map_or(0, |unit| unit.bytes),
            start: at(span.start_s),
            end: at(span.end_s),
        });
    }
    trace
}

#[cfg(test)]
mod tests {
    use crate::{Job, Machine, ModelShape, Network, SimOptions, Speed, Stage, simulate, timeline};

    #[test]
    fn a_simulated_step_is_a_trace_of_the_ranks_that_were_asked_for() {
        let network = Network::one_node(crate::Link { alpha_s: 1e-6, beta_s_per_byte: 1e-10 });
        let speed = Speed::Rate { flops_per_s: 1e12, memory_bytes_per_s: 1e11 };
        let job = Job::new(ModelShape::even(4_000_000, 4), 8, Machine { network: network.into(), speed });
        let workload = job.workload(Stage::Parameters);
        let options = SimOptions { num_steps: 2, traced: vec![3, 5], ..SimOptions::default() };
        let report = simulate(&workload, &options);
        let mut json = Vec::new();
        timeline(&workload, &report).write_to(&mut json).unwrap();
        let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
        let spans: Vec<_> = json["traceEvents"].as_array().unwrap().iter().filter(|event| event["ph"] == "X").collect();
        assert_eq!(spans.len(), report.spans.len());
        let ranks = |rank: u64| spans.iter().filter(|span| span["pid"] == rank).count();
        assert_eq!((ranks(3), ranks(5)), (spans.len() / 2, spans.len() / 2));
        let on_row = spans.iter().filter(|span| span["tid"] == 0);
        let last = on_row.map(|span| span["ts"].as_f64().unwrap() + span["dur"].as_f64().unwrap());
        let step_s = last.fold(0.0, f64::max) / 2e6;
        assert!((step_s / report.step_s - 1.0).abs() < 1e-3, "{step_s} and {}", report.step_s);
        assert!(spans.iter().any(|span| span["name"] == "wait gradient norm"));
    }
}
