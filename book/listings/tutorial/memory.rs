//! Chapter 1: what a parameter costs on one device.

use burn::module::Module;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::Device;

use crate::model::{NUM_BLOCKS, Net, ROWS, loss, samples};
use crate::show::{about, grouped};
use crate::{ALLOCATOR, Outcome};

// ANCHOR: measure
/// Two steps of plain Burn on one device. What the allocator holds in between, by parameter.
fn measure(width: usize) -> (usize, [f64; 5]) {
    let device = Device::flex().autodiff();
    let (input, target) = samples(0, 0..ROWS, &device);
    let backward = |model: &Net| {
        let gradients = loss(model.forward(input.clone()), target.clone()).backward();
        GradientsParams::from_grads(gradients, model)
    };
    drop(backward(&Net::init(width, 1, &device))); // kernels keep some memory for themselves
    let empty = ALLOCATOR.current_usage();

    let mut model = Net::init(width, NUM_BLOCKS, &device);
    let mut optimizer = AdamWConfig::new().init();
    let num_params = model.num_params();
    let held = |bytes: usize| (bytes - empty) as f64 / num_params as f64;

    drop(model.forward(input.clone())); // Burn makes a weight when it is first read
    let weights = held(ALLOCATOR.current_usage());
    let gradients = backward(&model);
    let with_gradients = held(ALLOCATOR.current_usage());
    model = optimizer.step(1e-3, model, gradients); // uses up the gradients, makes the moments
    let with_moments = held(ALLOCATOR.current_usage());
    let gradients = backward(&model);
    let with_all = held(ALLOCATOR.current_usage());
    ALLOCATOR.reset_peak_usage();
    drop(optimizer.step(1e-3, model, gradients));
    let peak = held(ALLOCATOR.peak_usage());
    (num_params, [weights, with_gradients, with_moments, with_all, peak])
}
// ANCHOR_END: measure

/// Bytes that the system could still give, where it says so.
fn available_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("MemAvailable:"))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib * 1024)
}

pub(crate) fn run() -> Outcome {
    println!("Bytes held for each parameter\n");
    println!("{:>12} {:>9} {:>9} {:>9} {:>9} {:>9}", "", "weights", "backward", "step", "backward", "peak in");
    println!("{:>12} {:>9} {:>9} {:>9} {:>9} {:>9}", "parameters", "made", "1", "1", "2", "step 2");
    for width in [256, 512, 1024] {
        let (num_params, held) = measure(width);
        let cells = held.map(|bytes| format!(" {:>9}", about(format!("{bytes:.1}"))));
        println!("{:>12}{}", grouped(num_params), cells.concat());
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
