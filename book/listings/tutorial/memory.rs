//! Chapter 1: what a parameter costs on one device.

use burn::module::Module;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::Device;

use crate::model::{NUM_BLOCKS, Net, ROWS, loss, samples};
use crate::show::{about, grouped};
use crate::{ALLOCATOR, Outcome};

/// Bytes that the process holds, for each parameter of a model.
struct Held {
    num_params: usize,
    weights: f64,
    with_gradients: f64,
    with_moments: f64,
    peak: f64,
}

// ANCHOR: measure
/// One step of plain Burn on one device, with a look at the allocator after each part of it.
fn measure(width: usize) -> Held {
    let device = Device::flex().autodiff();
    let (input, target) = samples(0, 0..ROWS, &device);
    let mut optimizer = AdamWConfig::new().init();
    let empty = ALLOCATOR.current_usage();

    let model = Net::init(width, NUM_BLOCKS, &device);
    let num_params = model.num_params();
    let held = || (ALLOCATOR.current_usage() - empty) as f64 / num_params as f64;
    drop(model.forward(input.clone())); // Burn makes a weight when it is first read
    let weights = held();

    ALLOCATOR.reset_peak_usage();
    let gradients = loss(model.forward(input), target).backward();
    let gradients = GradientsParams::from_grads(gradients, &model);
    let with_gradients = held();

    let model = optimizer.step(1e-3, model, gradients);
    let with_moments = held();
    let peak = (ALLOCATOR.peak_usage() - empty) as f64 / num_params as f64;
    drop((model, optimizer));
    Held { num_params, weights, with_gradients, with_moments, peak }
}
// ANCHOR_END: measure

/// Bytes that the system could still give, where it says so.
fn available_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("MemAvailable:"))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib * 1024)
}

pub(crate) fn run() -> Outcome {
    println!("Bytes for each parameter: after init, after backward, after the step, and at most\n");
    println!("{:>12} {:>8} {:>12} {:>12} {:>8}", "parameters", "weights", "+ gradients", "+ moments", "peak");
    for width in [128, 256, 512] {
        let held = measure(width);
        println!(
            "{:>12} {:>8} {:>12} {:>12} {:>8}",
            grouped(held.num_params),
            about(format!("{:.1}", held.weights)),
            about(format!("{:.1}", held.with_gradients)),
            about(format!("{:.1}", held.with_moments)),
            about(format!("{:.1}", held.peak)),
        );
    }

    println!("\nRoom for parameters at 16 bytes each\n");
    if let Some(bytes) = available_bytes() {
        let (giga, parameters) = (bytes as f64 / 1e9, bytes as f64 / 16e9);
        println!(
            "{:<14} {:>8} {:>8} billion",
            "this machine",
            about(format!("{giga:.1} GB")),
            about(format!("{parameters:.2}"))
        );
    }
    for device in fsdp_core::Device::ALL {
        let giga = device.memory_bytes / 1_000_000_000;
        println!("{:<14} {:>8} {:>8.2} billion", device.name, format!("{giga} GB"), device.memory_bytes as f64 / 16e9);
    }
    Ok(())
}
