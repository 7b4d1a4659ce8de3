//! Chapter 12: a model's sizes for the command `fsdp`, and a run on GPUs that are not there.

use std::path::PathBuf;

use fsdp_burn::{
    ComputePrecision, Config, Dtype, MemoryEstimate, ModelShape, OptimizerKind, Stage, Transformer, launch,
};
use fsdp_core::{Device, Forecast, Job, Machine, NamedLink, Network, Speed};

use crate::Outcome;
use crate::model::{NUM_BLOCKS, Net, WIDTH};
use crate::show::{grouped, scratch};
use crate::train::config;

/// Share of a GPU's arithmetic that is reached: an assumption.
const REACHED: f64 = 0.4;
/// Sequences of a GPU in a step.
const BATCH: usize = 4;
/// Tokens to train on for each parameter: Hoffmann et al., 2022, arXiv:2203.15556.
const TOKENS_PER_PARAMETER: f64 = 20.0;

// ANCHOR: shape
/// Writes the sizes of this tutorial's model, and returns what rank 0 of four will hold.
fn shape(file: PathBuf) -> Result<MemoryEstimate, fsdp_burn::Error> {
    let estimates = launch(&config(Stage::Parameters, 4), move |rank| {
        let model = rank.shard(Net::init(WIDTH, NUM_BLOCKS, &rank.device()))?;
        if rank.is_main() {
            ModelShape::of(model.plan()).write(&file).map_err(fsdp_burn::Error::program)?;
        }
        Ok(model.memory_estimate(OptimizerKind::Adam, None))
    })?;
    Ok(estimates[0])
}
// ANCHOR_END: shape

// ANCHOR: job
/// A transformer on H100s, eight in a node, with InfiniBand between nodes.
fn job(model: &Transformer, num_gpus: usize) -> Result<Job, Box<dyn std::error::Error>> {
    let gpu = Device::find("H100").ok_or("no such device")?;
    let link = |name: &str| NamedLink::find(name).map(|named| named.link).ok_or("no such link");
    let network = Network { in_node: link(gpu.link)?, between: link("ib-ndr")?, ranks_per_node: 8 };
    let (flops_per_s, memory_bytes_per_s) = (REACHED * gpu.flops_16, gpu.memory_bytes_per_s);
    let speed = Speed::Rate { flops_per_s, memory_bytes_per_s };
    let mut config = Config { world_size: num_gpus, ..Config::default() };
    config.precision.parameters = Dtype::Bf16;
    let machine = Machine { network: network.into(), speed };
    Ok(Job {
        num_tokens: (BATCH * model.sequence) as u64,
        recompute: model.recompute,
        activation_bytes: Some(model.activation_bytes(BATCH, ComputePrecision::Mixed16)),
        ..Job::configured(model.shape(), &config, machine)
    })
}
// ANCHOR_END: job

pub(crate) fn run() -> Outcome {
    let file = scratch("plan")?.join("model.json");
    let estimate = shape(file.clone())?;
    println!(
        "The tutorial's model, rank 0 of four, without activations; its sizes are in {}\n\n{estimate}",
        file.display()
    );

    let model = Transformer { layers: 32, width: 4096, heads: 32, sequence: 2048, vocabulary: 50257, recompute: true };
    let gpu_bytes = Device::find("H100").map(|gpu| gpu.memory_bytes);
    let num_params = model.shape().parameter_len();
    let tokens = TOKENS_PER_PARAMETER * num_params as f64;
    println!(
        "\nA transformer of {} parameters in bf16, on {:.0} billion tokens; H100s with 80 GB\n",
        grouped(num_params),
        tokens / 1e9
    );
    println!("{:>6} {:>7} {:>10} {:>12} {:>8} {:>11}", "GPUs", "stage", "peak", "tokens/s", "days", "GPU hours");
    for num_gpus in [8, 16, 32, 64, 128, 256, 512] {
        let job = job(&model, num_gpus)?;
        // ANCHOR: forecast
        let forecast = Forecast::new(&job, gpu_bytes);
        let Some(stage) = forecast.advice.stage else {
            println!("{num_gpus:>6} {:>7}", "none");
            continue;
        };
        let advised = &forecast.stages[usize::from(stage.number())];
        // ANCHOR_END: forecast
        let tokens_per_s = (job.num_tokens * num_gpus as u64) as f64 / advised.report.step_s;
        let hours = tokens / tokens_per_s / 3600.0;
        println!(
            "{num_gpus:>6} {:>7} {:>10} {:>12} {:>8.1} {:>11}",
            stage.number(),
            format!("{:.1} GB", advised.memory.peak_or_known_bytes() as f64 / 1e9),
            grouped(tokens_per_s as u64),
            hours / 24.0,
            grouped((hours * num_gpus as f64) as u64),
        );
    }
    Ok(())
}
