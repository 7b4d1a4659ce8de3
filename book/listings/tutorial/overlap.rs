//! Chapter 6: a network whose messages take 60% as long as a step without it, with and without prefetch.

use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use fsdp_burn::{Config, LaunchOptions, Link, PrefetchConfig, Stage, Trace, launch, launch_with};
use fsdp_core::{Span, SpanKind};

use crate::Outcome;
use crate::show::{about, about_ms, grouped, scratch};
use crate::train::{Seen, config, train_on};

/// Samples of a rank in a step: enough that computing takes longer than the optimizer.
const ROWS: usize = 256;
/// The step whose trace is kept.
const SHOWN: u64 = 4;

/// What the ranks have seen, the spans of rank 0, and the trace.
type Traced = (Vec<Seen>, Vec<Span>, Arc<Trace>);

/// Runs the loop of the chapters before on two ranks with a network between them.
fn over(link: Link, depth: usize) -> Result<Traced, fsdp_burn::Error> {
    // ANCHOR: launch
    let prefetch = PrefetchConfig { forward: depth, backward: depth, max_bytes: None };
    let config = Config { prefetch, ..config(Stage::Parameters, 2) };
    let trace = Arc::new(Trace::of_steps(SHOWN..SHOWN + 1));
    let options = LaunchOptions { trace: Some(trace.clone()), link: Some(link) };
    let ranks = launch_with(&config, options, |rank| train_on(&rank, ROWS))?;
    // ANCHOR_END: launch
    let spans = trace.spans().into_iter().filter(|span| span.rank == 0).collect();
    Ok((ranks, spans, trace))
}

/// One line for each span but waits, which are gaps: row, kind, unit, start and end in microseconds from the first.
fn lines(spans: &[Span]) -> String {
    let origin = spans.iter().map(|span| span.start).min().unwrap_or_else(Instant::now);
    let mut spans: Vec<&Span> = spans.iter().collect();
    spans.sort_by_key(|span| (span.stream, span.start));
    let mut text = String::new();
    for span in spans.iter().filter(|span| span.kind != SpanKind::Wait) {
        let micros = |at: Instant| about((at - origin).as_micros());
        let (row, kind) = (span.stream.name(), span.kind.name());
        let _ = writeln!(text, "{row} {kind} {} {} {}", span.unit, micros(span.start), micros(span.end));
    }
    text
}

fn keep(name: &str, folder: &Path, spans: &[Span], trace: &Trace) -> std::io::Result<()> {
    fs::write(folder.join(format!("{name}.txt")), lines(spans))?;
    trace.write(&folder.join(format!("{name}.json")))
}

pub(crate) fn run() -> Outcome {
    // ANCHOR: link
    let alone = &launch(&config(Stage::Parameters, 2), |rank| train_on(&rank, ROWS))?[0];
    // As slow as makes a step's messages take 60% of the time that a step takes without a network.
    let link = Link { alpha_s: 50e-6, beta_s_per_byte: 0.6 * alone.step_s / alone.sent as f64 };
    // ANCHOR_END: link
    println!("A step takes {} without a network, and sends {} bytes.", about_ms(alone.step_s), grouped(alone.sent));
    println!("Now over one of {} MB/s.\n", about(format!("{:.0}", 1e-6 / link.beta_s_per_byte)));
    println!("{:>9} {:>12} {:>14} {:>10}", "prefetch", "step", "stands still", "hidden");
    let folder = scratch("overlap")?;
    for depth in [0, 1, 2] {
        let (ranks, spans, trace) = over(link, depth)?;
        let Seen { step_s, exposed_s, overlap, .. } = ranks[0];
        let hidden = about(format!("{:.0}%", 100.0 * overlap.unwrap_or(0.0)));
        println!("{depth:>9} {:>12} {:>14} {hidden:>10}", about_ms(step_s), about_ms(exposed_s));
        keep(&format!("prefetch-{depth}"), &folder, &spans, &trace)?;
    }
    println!("\n{}/prefetch-0.json and the others open at https://ui.perfetto.dev", folder.display());
    Ok(())
}
