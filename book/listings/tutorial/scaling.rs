//! Chapter 11: a step on more and more GPUs, simulated.

use std::error::Error;

use fsdp_burn::{Axis, Config, Dtype, Mesh, Stage};
use fsdp_core::{Device, Job, Machine, ModelShape, NamedLink, Network, SimOptions, Speed, simulate};

use crate::Outcome;

const GPUS_PER_NODE: usize = 8;
/// Share of a GPU's arithmetic that is reached: an assumption.
const REACHED: f64 = 0.4;

// ANCHOR: job
/// 7 billion parameters in 32 units, 4096 tokens on each GPU, in bf16.
fn job(num_gpus: usize, mesh: Option<Mesh>, between: &str) -> Result<Job, Box<dyn Error>> {
    let link = |name: &str| NamedLink::find(name).map(|named| named.link).ok_or("no such link");
    let gpu = Device::find("H100").ok_or("no such device")?;
    let ranks_per_node = GPUS_PER_NODE as u64;
    let network = Network { in_node: link(gpu.link)?, between: link(between)?, ranks_per_node };
    let (flops_per_s, memory_bytes_per_s) = (REACHED * gpu.flops_16, gpu.memory_bytes_per_s);
    let speed = Speed::Rate { flops_per_s, memory_bytes_per_s };
    let mut config = Config { world_size: num_gpus, mesh, ..Config::default() };
    (config.precision.parameters, config.precision.reduce) = (Dtype::Bf16, Dtype::Bf16);
    let machine = Machine { network: network.into(), speed };
    let shape = ModelShape::even(7_000_000_000, 32);
    Ok(Job { num_tokens: 4096, ..Job::configured(shape, &config, machine) })
}
// ANCHOR_END: job

/// The share of a step in which a GPU computes.
fn busy(job: &Job) -> f64 {
    let report = simulate(&job.workload(Stage::Parameters), &SimOptions::default());
    100.0 * report.compute_s / report.step_s
}

pub(crate) fn run() -> Outcome {
    println!(
        "Share of a step in which GPUs compute, at stage 3; one copy of the model over all GPUs, or one in each node\n"
    );
    println!("{:>6} {:>26} {:>26}", "", "InfiniBand, 400 Gbit/s", "Ethernet, 100 Gbit/s");
    println!("{:>6} {:>13} {:>12} {:>13} {:>12}", "GPUs", "one copy", "by node", "one copy", "by node");
    for num_gpus in [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096] {
        // ANCHOR: hybrid
        let nodes = num_gpus / GPUS_PER_NODE;
        let hybrid = || Mesh::new([(Axis::Replicate, nodes), (Axis::Shard, GPUS_PER_NODE)]);
        // ANCHOR_END: hybrid
        let mut cells = String::new();
        for between in ["ib-ndr", "eth-100g"] {
            let one_copy = busy(&job(num_gpus, None, between)?);
            let by_node = busy(&job(num_gpus, Some(hybrid()?), between)?);
            cells += &format!(" {one_copy:>12.1}% {by_node:>11.1}%");
        }
        println!("{num_gpus:>6}{cells}");
    }
    Ok(())
}
