//! Chapter 4: the units of a model, and what is gathered when.

use std::sync::Arc;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Tensor, activation::relu};
use fsdp_burn::{Config, Error, LaunchOptions, Rank, Sharded, Stage, Trace, launch, launch_with};
use fsdp_core::{Span, SpanKind, TraceStream};

use crate::Outcome;
use crate::model::{NUM_BLOCKS, Net, ROWS, WIDTH};
use crate::show::grouped;
use crate::train::{config, train};

/// The step that is shown: the first one learns the order of the units.
const SHOWN: u64 = 3;

// ANCHOR: whole
/// The same layers in a row, without an attribute: all of it is the root unit.
#[derive(Module, Debug, Sharded)]
struct OneUnit {
    layers: Vec<Linear>,
}
// ANCHOR_END: whole

// ANCHOR: units
/// The same layers, each a unit.
#[derive(Module, Debug, Sharded)]
struct ManyUnits {
    #[shard(units)]
    layers: Vec<Linear>,
}
// ANCHOR_END: units

fn layers(device: &Device) -> Vec<Linear> {
    (0..6).map(|_| LinearConfig::new(WIDTH, WIDTH).with_bias(false).init(device)).collect()
}

fn through(layers: &[Linear], device: &Device) -> Tensor<1> {
    let input = Tensor::<2>::ones([ROWS, WIDTH], device);
    layers.iter().fold(input, |x, layer| relu(layer.forward(x))).mean()
}

fn one_unit(rank: &Rank) -> Result<usize, Error> {
    let model = rank.shard(OneUnit { layers: layers(&rank.device()) })?;
    let _ = model.backward(through(&model.layers, &rank.device()))?;
    Ok(model.stats().peak_gathered_bytes)
}

fn many_units(rank: &Rank) -> Result<usize, Error> {
    let mut model = rank.shard(ManyUnits { layers: layers(&rank.device()) })?;
    let mut optimizer = rank.optimizer(AdamWConfig::new().init())?;
    for _ in 0..3 {
        let gradients = model.backward(through(&model.layers, &rank.device()))?;
        optimizer.step(1e-3, &mut model, gradients)?;
    }
    Ok(model.stats().peak_gathered_bytes)
}

/// What one row of the trace shows, in order. Waits are left out: whether a rank waits depends on the machine.
fn row(spans: &[Span], stream: TraceStream) -> Vec<String> {
    let mut row: Vec<&Span> = spans.iter().filter(|span| span.rank == 0 && span.stream == stream).collect();
    row.sort_by_key(|span| span.start);
    let shown = row.into_iter().filter(|span| span.kind != SpanKind::Wait);
    shown.map(|span| format!("{} {}", span.kind.name(), span.unit)).collect()
}

fn print_columns(rows: [(&str, Vec<String>); 3]) {
    println!("{}", rows.each_ref().map(|(name, _)| format!("{name:<22}")).concat().trim_end());
    for line in 0..rows.iter().map(|(_, row)| row.len()).max().unwrap_or(0) {
        let cell = |row: &Vec<String>| format!("{:<22}", row.get(line).cloned().unwrap_or_default());
        println!("{}", rows.each_ref().map(|(_, row)| cell(row)).concat().trim_end());
    }
}

pub(crate) fn run() -> Outcome {
    let config = config(Stage::Parameters, 2);
    // ANCHOR: summary
    let summaries = launch(&config, |rank| {
        let model = rank.shard(Net::init(WIDTH, NUM_BLOCKS, &rank.device()))?;
        Ok(model.summary())
    })?;
    println!("{}", summaries[0]);
    // ANCHOR_END: summary

    // ANCHOR: trace
    let trace = Arc::new(Trace::of_steps(SHOWN..SHOWN + 1));
    let options = LaunchOptions { trace: Some(trace.clone()), ..LaunchOptions::default() };
    launch_with(&config, options, |rank| train(&rank))?;
    let spans = trace.spans();
    // ANCHOR_END: trace
    println!("Rank 0 in one step, each row of the trace from its start; the rows run side by side\n");
    print_columns([
        ("its own thread", row(&spans, TraceStream::Compute)),
        ("gathers", row(&spans, TraceStream::Gather)),
        ("reductions", row(&spans, TraceStream::Reduce)),
    ]);

    let layer = 4 * WIDTH * WIDTH;
    println!("\nSix layers of {} bytes; gathered at once, at most\n", grouped(layer));
    let deep = |forward| Config {
        prefetch: fsdp_burn::PrefetchConfig { forward, backward: forward, max_bytes: None },
        ..config.clone()
    };
    println!("one unit, which is the model   {:>10}", grouped(launch(&config, |rank| one_unit(&rank))?[0]));
    for depth in [0, 1, 2] {
        let gathered = launch(&deep(depth), |rank| many_units(&rank))?[0];
        println!("six units, {depth} gathered ahead    {:>10}", grouped(gathered));
    }
    Ok(())
}
