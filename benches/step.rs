//! Seconds per training step of a GPT at every stage, beside the same ranks without communication, interleaved.
//!
//! `cargo bench -p fsdp-benches --bench step -- --rounds 3 --steps 10`

use std::time::Instant;

use burn::module::Module;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Int, Tensor, TensorData};
use clap::Parser;
use fsdp_benches::{Gpt, GptShape};
use fsdp_burn::{Config, Error, PrefetchConfig, Rank, Stage, launch};
use serde::Serialize;

#[derive(Clone, Debug, Parser)]
struct Args {
    #[command(flatten)]
    shape: GptShape,
    /// Ranks.
    #[arg(long, default_value_t = 2)]
    ranks: usize,
    /// Times that every mode is run, one after the other.
    #[arg(long, default_value_t = 2)]
    rounds: usize,
    /// Steps before the clock starts.
    #[arg(long, default_value_t = 2)]
    warmup: usize,
    /// Timed steps of each run.
    #[arg(long, default_value_t = 6)]
    steps: usize,
    /// Modes to run: plain, 0, 1, 2, 3.
    #[arg(long, value_delimiter = ',', default_value = "plain,0,1,2,3")]
    modes: Vec<String>,
    /// Units gathered ahead.
    #[arg(long, default_value_t = 1)]
    prefetch: usize,
    /// Writes all results to this file.
    #[arg(long)]
    json: Option<std::path::PathBuf>,
    /// Set by cargo.
    /// Without Burn's balanced gradient checkpointing.
    #[arg(long)]
    hold: bool,
    #[arg(long, hide = true)]
    bench: bool,
}

/// What a mode took, medians over ranks' slowest step.
#[derive(Clone, Debug, Default, Serialize)]
struct Times {
    step: Vec<f64>,
    forward: Vec<f64>,
    backward: Vec<f64>,
    optimizer: Vec<f64>,
    exposed: Vec<f64>,
    last_loss: f64,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args = Args::parse();
    let mut results: Vec<(String, Times)> = args.modes.iter().map(|mode| (mode.clone(), Times::default())).collect();
    for _ in 0..args.rounds {
        for (mode, times) in &mut results {
            let stage = mode.parse::<u8>().ok().map(Stage::try_from).transpose()?;
            run(&args, stage, times)?;
        }
    }
    let plain = results.iter().find(|(mode, _)| mode == "plain").map(|(_, times)| median(&times.step));
    println!(
        "{:>6} {:>8} {:>8} {:>8} {:>8} {:>8} {:>9} {:>8}",
        "mode", "step s", "forward", "backward", "optim", "exposed", "tokens/s", "vs plain"
    );
    let tokens = (args.ranks * args.shape.batch * args.shape.sequence) as f64;
    for (mode, times) in &results {
        let step = median(&times.step);
        println!(
            "{mode:>6} {step:>8.3} {:>8.3} {:>8.3} {:>8.3} {:>8.3} {:>9.0} {:>8}   loss {:.4}",
            median(&times.forward),
            median(&times.backward),
            median(&times.optimizer),
            median(&times.exposed),
            tokens / step,
            plain.map_or("-".into(), |plain| format!("{:.3}", step / plain)),
            times.last_loss,
        );
    }
    if let Some(file) = &args.json {
        let modes: serde_json::Map<_, _> = results
            .iter()
            .map(|(mode, times)| Ok((mode.clone(), serde_json::to_value(times)?)))
            .collect::<Result<_, serde_json::Error>>()?;
        let all = serde_json::json!({ "shape": args.shape, "ranks": args.ranks, "modes": modes });
        std::fs::write(file, serde_json::to_string_pretty(&all)?)?;
    }
    Ok(())
}

fn run(args: &Args, stage: Option<Stage>, times: &mut Times) -> Result<(), Error> {
    let config = Config {
        stage: stage.unwrap_or(Stage::Ddp),
        world_size: args.ranks,
        prefetch: PrefetchConfig { forward: args.prefetch, backward: args.prefetch, ..PrefetchConfig::default() },
        ..Config::default()
    };
    let program = args.clone();
    let ranks = launch(&config, move |rank| match stage {
        Some(_) => sharded(&program, &rank),
        None => plain(&program, &rank),
    })?;
    let slowest = |pick: fn(&Times) -> &Vec<f64>| {
        (0..args.steps).map(|step| ranks.iter().map(|rank| pick(rank)[step]).fold(0.0, f64::max)).collect::<Vec<_>>()
    };
    times.step.extend(slowest(|times| &times.step));
    times.forward.extend(slowest(|times| &times.forward));
    times.backward.extend(slowest(|times| &times.backward));
    times.optimizer.extend(slowest(|times| &times.optimizer));
    times.exposed.extend(slowest(|times| &times.exposed));
    times.last_loss = ranks[0].last_loss;
    Ok(())
}

fn sharded(args: &Args, rank: &Rank) -> Result<Times, Error> {
    let device = if args.hold { Device::flex().autodiff() } else { rank.device() };
    let mut model = rank.shard(args.shape.init(&device))?;
    let mut optim = rank.optimizer(AdamWConfig::new().with_weight_decay(0.1).init())?;
    let mut times = Times::default();
    for step in 0..args.warmup + args.steps {
        let (tokens, targets) = batch(&args.shape, step, rank.rank(), &device);
        rank.barrier()?;
        model.reset_stats();
        let start = Instant::now();
        let loss = model.loss(tokens, targets);
        let forward = start.elapsed();
        times.last_loss = f64::from(loss.clone().into_scalar::<f32>());
        let gradients = model.backward(loss)?;
        let backward = start.elapsed() - forward;
        optim.step(3e-4, &mut model, gradients)?;
        let total = start.elapsed();
        if step >= args.warmup {
            times.step.push(total.as_secs_f64());
            times.forward.push(forward.as_secs_f64());
            times.backward.push(backward.as_secs_f64());
            times.optimizer.push((total - forward - backward).as_secs_f64());
            times.exposed.push(model.stats().exposed().as_secs_f64());
        }
    }
    Ok(times)
}

fn plain(args: &Args, rank: &Rank) -> Result<Times, Error> {
    let device = if args.hold { Device::flex().autodiff() } else { rank.device() };
    let mut model: Gpt = args.shape.init(&device);
    let mut optim = AdamWConfig::new().with_weight_decay(0.1).init();
    let mut times = Times::default();
    // Lazy parameters would share their lock, and tracked ones their graph, with nobody: each rank builds its own.
    model = model.fork(&device);
    for step in 0..args.warmup + args.steps {
        let (tokens, targets) = batch(&args.shape, step, rank.rank(), &device);
        rank.barrier()?;
        let start = Instant::now();
        let loss = model.loss(tokens, targets);
        let forward = start.elapsed();
        times.last_loss = f64::from(loss.clone().into_scalar::<f32>());
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        let backward = start.elapsed() - forward;
        model = optim.step(3e-4, model, gradients);
        let total = start.elapsed();
        if step >= args.warmup {
            times.step.push(total.as_secs_f64());
            times.forward.push(forward.as_secs_f64());
            times.backward.push(backward.as_secs_f64());
            times.optimizer.push((total - forward - backward).as_secs_f64());
            times.exposed.push(0.0);
        }
    }
    Ok(times)
}

/// Tokens that depend on the step and the rank alone, and repeat every four steps, so that the loss falls.
fn batch(shape: &GptShape, step: usize, rank: usize, device: &Device) -> (Tensor<2, Int>, Tensor<1, Int>) {
    let mut state = (1000 * (step % 4) + rank + 1) as u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % shape.vocabulary as u64) as i64
    };
    let (batch, sequence) = (shape.batch, shape.sequence);
    let text: Vec<i64> = (0..batch * (sequence + 1)).map(|_| next()).collect();
    let rows = |from: usize| -> Vec<i64> {
        text.chunks(sequence + 1).flat_map(|row| row[from..from + sequence].to_vec()).collect()
    };
    let tokens = Tensor::from_data(TensorData::new(rows(0), [batch, sequence]), device);
    let targets = Tensor::from_data(TensorData::new(rows(1), [batch * sequence]), device);
    (tokens, targets)
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}
