//! Training with state on a disk: the process's peak of resident memory beside the prediction, and what the disk costs. And
//! with state in host memory: what that costs beside none offloaded.
//!
//! `cargo bench --bench offload -- --width 768 --layers 36 --heads 12 --sequence 32 --batch 1 --dir nvme-bench`
//! `cargo bench --bench offload -- --host-rounds 6`

use std::time::Instant;

use burn::optim::AdamWConfig;
use clap::Parser;
use fsdp_benches::{GptShape, load_average, median};
use fsdp_burn::{Config, Error, FusedAdamW, OffloadConfig, OptimizerKind, Rank, TierShares, human_bytes, launch};
use fsdp_examples::{give_memory_back, resident_peak};

#[derive(Clone, Debug, Parser)]
struct Args {
    #[command(flatten)]
    shape: GptShape,
    #[arg(long, default_value_t = 2)]
    ranks: usize,
    /// Share of optimizer state, gradients and parameters on the disk.
    #[arg(long, value_delimiter = ',', default_value = "1,1,1")]
    shares: Vec<f64>,
    /// The run's directory on the disk; removed at the end.
    #[arg(long, default_value = "nvme-bench")]
    dir: String,
    #[arg(long, default_value_t = 3)]
    steps: usize,
    /// In place of the disk: so many rounds with all state in host memory, in turns with as many without offload.
    #[arg(long, default_value_t = 0)]
    host_rounds: usize,
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args = Args::parse();
    if args.host_rounds > 0 {
        return host(&args);
    }
    give_memory_back();
    let placement = |index: usize| TierShares { cpu: 0.0, nvme: args.shares.get(index).copied().unwrap_or(0.0) };
    let offload = OffloadConfig {
        optimizer: placement(0),
        gradients: placement(1),
        parameters: placement(2),
        nvme_path: Some(args.dir.clone()),
        ..OffloadConfig::default()
    };
    let config = Config { world_size: args.ranks, offload, ..Config::default() };
    let before = resident_peak().unwrap_or(0);
    println!("before the model: {} resident", human_bytes(before));
    launch(&config, move |rank| run(&args, &rank, before))?;
    Ok(())
}

fn run(args: &Args, rank: &Rank, before: u64) -> Result<(), Error> {
    let device = rank.device();
    let mut model = rank.shard(args.shape.init(&device))?;
    rank.barrier()?;
    // What a rank's forward keeps is small here, and is left to the measurement.
    let predicted = model.memory_estimate(OptimizerKind::Adam, Some(0.into())).peak_bytes().unwrap_or(0);
    let predicted = rank.sum(predicted as f64)? as u64;
    if rank.is_main() {
        let states = 16 * model.num_params() as u64;
        println!("{} parameters, {} of states", model.num_params(), human_bytes(states));
        println!("sharded: {} resident at most", human_bytes(resident_peak().unwrap_or(0)));
    }
    let mut optim = rank.optimizer(FusedAdamW::new(&AdamWConfig::new().with_weight_decay(0.1))?)?;
    for step in 0..args.steps {
        let (begun, moved) = (Instant::now(), rank.tier_stats().unwrap_or_default());
        let (inputs, targets) = args.shape.batch(step, rank.rank(), &device);
        let loss = model.loss(inputs, targets);
        let value = rank.mean(f64::from(loss.clone().into_scalar::<f32>()))?;
        let gradients = model.backward(loss)?;
        optim.step(3e-4, &mut model, gradients)?;
        model.synchronize()?;
        rank.barrier()?;
        let (now, stats) = (rank.tier_stats().unwrap_or_default(), model.stats());
        if rank.is_main() {
            println!(
                "step {step}: loss {value:.4}, {:.1} s, of which rank 0 stood still {:.1} s for its disk; it read {} and wrote {}, \
                 {}/s while it was busy; {} resident at most",
                begun.elapsed().as_secs_f64(),
                stats.tier_wait.as_secs_f64(),
                human_bytes(now.read_bytes - moved.read_bytes),
                human_bytes(now.written_bytes - moved.written_bytes),
                human_bytes(now.bandwidth().unwrap_or(0.0) as u64),
                human_bytes(resident_peak().unwrap_or(0)),
            );
        }
        model.reset_stats();
    }
    if rank.is_main() {
        let peak = resident_peak().unwrap_or(0);
        let own = peak.saturating_sub(before);
        println!(
            "predicted {} without activations; {} more than before the model: {:+.1}% of the prediction",
            human_bytes(predicted),
            human_bytes(own),
            100.0 * (own as f64 / predicted as f64 - 1.0)
        );
    }
    Ok(())
}

/// What an optimizer step, and all of a step, takes with state in host memory, beside none offloaded.
fn host(args: &Args) -> Result<(), Box<dyn std::error::Error>> {
    let all = TierShares::CPU;
    let offload = OffloadConfig { optimizer: all, gradients: all, parameters: all, ..OffloadConfig::default() };
    let without = Config { world_size: args.ranks, ..Config::default() };
    let with = Config { offload, ..without.clone() };
    println!("load average {}", load_average());
    println!("{:>5} {:>14} {:>14} {:>10} {:>10}", "round", "without, step", "with, step", "optimizer", "whole step");
    let mut ratios: [Vec<f64>; 2] = Default::default();
    for round in 0..args.host_rounds {
        let time = |config: &Config| -> Result<[f64; 2], Error> {
            let args = args.clone();
            Ok(launch(config, move |rank| timed(&args, &rank))?.swap_remove(0))
        };
        // Each of the two is first in every second round.
        let (none, cpu) = match round % 2 {
            0 => (time(&without)?, time(&with)?),
            _ => {
                let cpu = time(&with)?;
                (time(&without)?, cpu)
            }
        };
        let [optimizer, whole] = [cpu[0] / none[0], cpu[1] / none[1]];
        println!("{round:>5} {:>12.2}ms {:>12.2}ms {optimizer:>10.3} {whole:>10.3}", 1e3 * none[0], 1e3 * cpu[0]);
        ratios[0].push(optimizer);
        ratios[1].push(whole);
    }
    println!(
        "median: an optimizer step {:.3} times one without, a whole step {:.3}",
        median(&ratios[0]),
        median(&ratios[1])
    );
    Ok(())
}

/// Medians of the seconds of an optimizer step and of a whole step.
fn timed(args: &Args, rank: &Rank) -> Result<[f64; 2], Error> {
    let device = rank.device();
    let mut model = rank.shard(args.shape.init(&device))?;
    let mut optim = rank.optimizer(FusedAdamW::new(&AdamWConfig::new().with_weight_decay(0.1))?)?;
    let mut seconds: [Vec<f64>; 2] = Default::default();
    // The first two make the state, and warm up what uses it.
    for step in 0..args.steps + 2 {
        let (inputs, targets) = args.shape.batch(step, rank.rank(), &device);
        let begun = Instant::now();
        let gradients = model.backward(model.loss(inputs, targets))?;
        rank.barrier()?;
        let stepping = Instant::now();
        optim.step(3e-4, &mut model, gradients)?;
        model.synchronize()?;
        rank.barrier()?;
        if step >= 2 {
            seconds[0].push(stepping.elapsed().as_secs_f64());
            seconds[1].push(begun.elapsed().as_secs_f64());
        }
    }
    Ok(seconds.map(|seconds| median(&seconds)))
}
