//! Training with state on a disk: the process's peak of resident memory beside the prediction, and what the disk costs.
//!
//! `cargo bench --bench offload -- --width 768 --layers 36 --sequence 32 --batch 1 --dir nvme-bench`

use std::time::Instant;

use burn::optim::AdamWConfig;
use clap::Parser;
use fsdp_benches::GptShape;
use fsdp_burn::{Config, Error, FusedAdamW, OffloadConfig, OptimizerKind, Rank, TierShares, human_bytes, launch};

/// Gives memory back to the system soon after it is freed, and faults less than the system's own.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

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
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args = Args::parse();
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

/// The largest resident set of the process so far, in bytes, as the system counts it.
fn resident_peak() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? * 1024)
}
