//! Seconds per training step of a GPT at every stage, beside the same ranks without communication, interleaved.
//!
//! `cargo bench --bench step -- --rounds 3 --steps 10`

use std::time::Instant;

use burn::module::Module;
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::Device;
use clap::Parser;
use fsdp_benches::{GptShape, Spread, load_average, median};
use fsdp_burn::{Config, Error, FusedAdamW, PrefetchConfig, Rank, Stage, launch};
use fsdp_examples::Gpt;
use serde::Serialize;

// Burn maps and unmaps memory for every large tensor with the system's allocator, on all ranks at once, and each unmapping
// interrupts the other core. An allocator that keeps memory gives every mode below its own speed.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

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
    /// Modes to run: plain (ranks without communication, as Burn alone trains), plain-fused (the same with the optimizer
    /// in one pass), and the stages 0, 1, 2, 3.
    #[arg(long, value_delimiter = ',', default_value = "plain,plain-fused,0,1,2,3")]
    modes: Vec<String>,
    /// Burn's own AdamW at all stages too, in place of the one in one pass.
    #[arg(long)]
    op_by_op: bool,
    /// Units gathered ahead.
    #[arg(long, default_value_t = 1)]
    prefetch: usize,
    /// Writes all results to this file.
    #[arg(long)]
    json: Option<std::path::PathBuf>,
    /// Without Burn's balanced gradient checkpointing.
    #[arg(long)]
    hold: bool,
    /// Set by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

/// What the steps of a mode took, each by its slowest rank.
#[derive(Clone, Debug, Default, Serialize)]
struct Times {
    step: Vec<f64>,
    forward: Vec<f64>,
    backward: Vec<f64>,
    optimizer: Vec<f64>,
    exposed: Vec<f64>,
    /// Seconds of all cores, per step and rank: one value for each run.
    cpu: Vec<f64>,
    last_loss: f64,
}

/// What the ranks of a mode do.
#[derive(Clone, Copy, Debug)]
enum Mode {
    Plain { fused: bool },
    Sharded(Stage),
}

impl Mode {
    fn parse(name: &str) -> Result<Self, Box<dyn std::error::Error>> {
        Ok(match name {
            "plain" => Mode::Plain { fused: false },
            "plain-fused" => Mode::Plain { fused: true },
            stage => Mode::Sharded(Stage::try_from(stage.parse::<u8>()?)?),
        })
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args = Args::parse();
    let mut results: Vec<(String, Times)> = args.modes.iter().map(|mode| (mode.clone(), Times::default())).collect();
    for _ in 0..args.rounds {
        for (mode, times) in &mut results {
            run(&args, Mode::parse(mode)?, times)?;
        }
    }
    let plain = results.iter().find(|(mode, _)| mode == "plain").map(|(_, times)| median(&times.step));
    println!("{} ranks, load average {}", args.ranks, load_average());
    println!(
        "{:>11} {:>7} {:>7} {:>7} {:>8} {:>8} {:>8} {:>8} {:>8} {:>9} {:>8} {:>8}",
        "mode",
        "step s",
        "min",
        "max",
        "forward",
        "backward",
        "optim",
        "exposed",
        "cpu s",
        "tokens/s",
        "vs plain",
        "loss"
    );
    let tokens = (args.ranks * args.shape.batch * args.shape.sequence) as f64;
    for (mode, times) in &results {
        let step = Spread::of(&times.step);
        println!(
            "{mode:>11} {step} {:>8.3} {:>8.3} {:>8.3} {:>8.3} {:>8.3} {:>9.0} {:>8} {:>8.4}",
            median(&times.forward),
            median(&times.backward),
            median(&times.optimizer),
            median(&times.exposed),
            median(&times.cpu),
            tokens / step.median,
            plain.map_or("-".into(), |plain| format!("{:.3}", step.median / plain)),
            times.last_loss,
        );
    }
    println!("most memory of the process at any time, in all modes: {}", peak_resident());
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

fn run(args: &Args, mode: Mode, times: &mut Times) -> Result<(), Error> {
    let stage = match mode {
        Mode::Plain { .. } => Stage::Ddp,
        Mode::Sharded(stage) => stage,
    };
    let config = Config {
        stage,
        world_size: args.ranks,
        prefetch: PrefetchConfig { forward: args.prefetch, backward: args.prefetch, ..PrefetchConfig::default() },
        ..Config::default()
    };
    let program = args.clone();
    let ranks = launch(&config, move |rank| match mode {
        Mode::Plain { fused } => plain(&program, fused, &rank),
        Mode::Sharded(_) => sharded(&program, &rank),
    })?;
    let slowest = |pick: fn(&Times) -> &Vec<f64>| {
        (0..args.steps).map(|step| ranks.iter().map(|rank| pick(rank)[step]).fold(0.0, f64::max)).collect::<Vec<_>>()
    };
    times.step.extend(slowest(|times| &times.step));
    times.forward.extend(slowest(|times| &times.forward));
    times.backward.extend(slowest(|times| &times.backward));
    times.optimizer.extend(slowest(|times| &times.optimizer));
    times.exposed.extend(slowest(|times| &times.exposed));
    times.cpu.extend(&ranks[0].cpu);
    times.last_loss = ranks[0].last_loss;
    Ok(())
}

fn sharded(args: &Args, rank: &Rank) -> Result<Times, Error> {
    let device = if args.hold { Device::flex().autodiff() } else { rank.device() };
    let mut model = rank.shard(args.shape.init(&device))?;
    let mut optim = rank.optimizer(optimizer(!args.op_by_op)?)?;
    let mut times = Times::default();
    let mut cpu_before = 0.0;
    for step in 0..args.warmup + args.steps {
        let (tokens, targets) = args.shape.batch(step, rank.rank(), &device);
        rank.barrier()?;
        if step == args.warmup {
            cpu_before = cpu_seconds();
        }
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
    rank.barrier()?;
    times.cpu.push((cpu_seconds() - cpu_before) / (args.steps * args.ranks) as f64);
    Ok(times)
}

fn plain(args: &Args, fused: bool, rank: &Rank) -> Result<Times, Error> {
    let device = if args.hold { Device::flex().autodiff() } else { rank.device() };
    let mut model: Gpt = args.shape.init(&device);
    let mut optim = optimizer(fused)?;
    let mut times = Times::default();
    let mut cpu_before = 0.0;
    // Lazy parameters would share their lock, and tracked ones their graph, with nobody: each rank builds its own.
    model = model.fork(&device);
    for step in 0..args.warmup + args.steps {
        let (tokens, targets) = args.shape.batch(step, rank.rank(), &device);
        rank.barrier()?;
        if step == args.warmup {
            cpu_before = cpu_seconds();
        }
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
    rank.barrier()?;
    times.cpu.push((cpu_seconds() - cpu_before) / (args.steps * args.ranks) as f64);
    Ok(times)
}

/// AdamW in one pass, or Burn's own.
fn optimizer(fused: bool) -> Result<ModuleOptimizer, Error> {
    let config = AdamWConfig::new().with_weight_decay(0.1);
    Ok(if fused { FusedAdamW::new(&config)?.into() } else { config.init() })
}

/// Seconds that all threads of this process have computed, by the system's clock of 100 ticks a second; NaN where it
/// does not tell.
fn cpu_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The name of the program comes first, in parentheses, and may contain spaces.
    let fields = text.rsplit_once(')').map_or("", |(_, fields)| fields).split_whitespace();
    let ticks: Option<Vec<f64>> = fields.skip(11).take(2).map(|ticks| ticks.parse().ok()).collect();
    ticks.filter(|ticks| ticks.len() == 2).map_or(f64::NAN, |ticks| (ticks[0] + ticks[1]) / 100.0)
}

/// The largest resident set that the process has had.
fn peak_resident() -> String {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    text.lines().find_map(|line| line.strip_prefix("VmHWM:")).map_or("unknown".into(), |size| size.trim().to_owned())
}
