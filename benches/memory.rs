//! Bytes that a training step holds, by phase, counted at the allocator: beside the prediction.
//!
//! `cargo bench --bench memory -- --ranks 2`

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use burn::module::Module;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::Device;
use clap::Parser;
use fsdp_benches::GptShape;
use fsdp_burn::{Config, Error, Rank, Stage, launch};

struct Counter;
static CURRENT: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

fn grown(size: usize) {
    let now = CURRENT.fetch_add(size, Relaxed) + size;
    PEAK.fetch_max(now, Relaxed);
}

// SAFETY: Every call is passed on to the system allocator unchanged; counting touches no memory of the caller.
unsafe impl GlobalAlloc for Counter {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grown(layout.size());
        // SAFETY: The caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        CURRENT.fetch_sub(layout.size(), Relaxed);
        // SAFETY: The caller's promises are passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTER: Counter = Counter;

#[derive(Clone, Debug, Parser)]
struct Args {
    #[command(flatten)]
    shape: GptShape,
    #[arg(long, default_value_t = 2)]
    ranks: usize,
    #[arg(long, value_delimiter = ',', default_value = "plain,0,1,2,3")]
    modes: Vec<String>,
    /// Without Burn's balanced gradient checkpointing.
    #[arg(long)]
    hold: bool,
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args = Args::parse();
    println!(
        "{:>6} {:>5} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}   MB of the whole process",
        "mode", "step", "start", "fwd peak", "forward", "bwd peak", "backward", "opt peak", "end"
    );
    for mode in &args.modes {
        let stage = mode.parse::<u8>().ok().map(Stage::try_from).transpose()?;
        let config = Config { stage: stage.unwrap_or(Stage::Ddp), world_size: args.ranks, ..Config::default() };
        let (program, mode) = (args.clone(), mode.clone());
        launch(&config, move |rank| match stage {
            Some(_) => sharded(&program, &rank, &mode),
            None => plain(&program, &rank),
        })?;
    }
    Ok(())
}

fn mark(rank: &Rank, row: &mut Vec<usize>, with_peak: bool) -> Result<(), Error> {
    rank.barrier()?;
    if rank.is_main() {
        if with_peak {
            row.push(PEAK.load(Relaxed));
        }
        row.push(CURRENT.load(Relaxed));
        PEAK.store(CURRENT.load(Relaxed), Relaxed);
    }
    rank.barrier()
}

fn print(rank: &Rank, mode: &str, step: usize, row: &[usize]) {
    if rank.is_main() {
        let cells: Vec<String> = row.iter().map(|bytes| format!("{:>9.2}", *bytes as f64 / 1e6)).collect();
        println!("{mode:>6} {step:>5} {}", cells.join(" "));
    }
}

fn sharded(args: &Args, rank: &Rank, mode: &str) -> Result<(), Error> {
    let device = if args.hold { Device::flex().autodiff() } else { rank.device() };
    let mut model = rank.shard(args.shape.init(&device))?;
    if rank.is_main() {
        let lens: Vec<_> = (0..model.plan().units().len()).map(|unit| 4 * model.plan().unit_len(unit)).collect();
        println!("P {:.2} MB, units {:?}", 4.0 * model.num_params() as f64 / 1e6, &lens[..lens.len().min(4)]);
    }
    let mut optim = rank.optimizer(AdamWConfig::new().with_weight_decay(0.1).init())?;
    for step in 0..3 {
        let mut row = Vec::new();
        mark(rank, &mut row, false)?;
        let (inputs, targets) = args.shape.batch(step, rank.rank(), &device);
        let loss = model.loss(inputs, targets);
        mark(rank, &mut row, true)?;
        let gradients = model.backward(loss)?;
        mark(rank, &mut row, true)?;
        optim.step(3e-4, &mut model, gradients)?;
        mark(rank, &mut row, true)?;
        print(rank, mode, step, &row);
    }
    if rank.is_main() {
        println!("{:?}", model.stats());
    }
    Ok(())
}

fn plain(args: &Args, rank: &Rank) -> Result<(), Error> {
    let device = if args.hold { Device::flex().autodiff() } else { rank.device() };
    let mut model = args.shape.init(&device).fork(&device);
    let mut optim = AdamWConfig::new().with_weight_decay(0.1).init();
    for step in 0..3 {
        let mut row = Vec::new();
        mark(rank, &mut row, false)?;
        let (inputs, targets) = args.shape.batch(step, rank.rank(), &device);
        let loss = model.loss(inputs, targets);
        mark(rank, &mut row, true)?;
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        mark(rank, &mut row, true)?;
        model = optim.step(3e-4, model, gradients);
        mark(rank, &mut row, true)?;
        print(rank, "plain", step, &row);
    }
    Ok(())
}
