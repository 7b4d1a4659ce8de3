//! How fast a training state is saved and loaded, beside `dd` on the same disk, and what a save in the background costs the
//! steps that run meanwhile.
//!
//! `cargo bench --bench checkpoint -- --dir /fast/disk`

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use burn::optim::AdamWConfig;
use clap::Parser;
use fsdp_benches::{GptShape, load_average, median};
use fsdp_burn::{Config, Error, FusedAdamW, Rank, SaveOptions, Stage, launch};
use fsdp_core::checkpoint::{
    BlockData, Checkpoint, CheckpointError, Snapshot, StoredDtype, TensorBlock, TensorKind, Verify, save,
};
use fsdp_core::{CommError, Communicator, LocalWorld, Mesh, OpTag, Phase, ShardLayout};
use serde::Serialize;

// As in training: see the benchmark `step`.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Rows of a saved tensor; `MIB / 4` floats each make a MiB.
const ROW_LEN: usize = (1 << 20) / 4;

#[derive(Clone, Debug, Parser)]
struct Args {
    #[command(flatten)]
    shape: GptShape,
    /// Directory on the disk that is measured; files are made in a folder of it, and removed.
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Ranks.
    #[arg(long, default_value_t = 2)]
    ranks: usize,
    /// MiB of state to save and load.
    #[arg(long, default_value_t = 1024)]
    mib: usize,
    /// Times that `dd`, save and load take turns.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Saves in the background beside training, each followed by as many steps alone.
    #[arg(long, default_value_t = 8)]
    saves: usize,
    /// Writes all results to this file.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Set by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

/// All that was measured.
#[derive(Clone, Debug, Default, Serialize)]
struct Results {
    /// Seconds by round, and the bytes each time.
    bytes: usize,
    dd_write_s: Vec<f64>,
    save_s: Vec<f64>,
    dd_read_s: Vec<f64>,
    load_s: Vec<f64>,
    /// By save in the background.
    background: Vec<Background>,
}

/// One save in the background.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Background {
    /// Until the call returned.
    call_s: f64,
    /// From the call until the checkpoint was complete, the wait for the thread left out.
    duration_s: f64,
    /// Steps meanwhile.
    num_steps: usize,
    /// What these steps and the call took more than as many steps alone.
    delay_s: f64,
    /// Seconds of a processor that the saving threads of all ranks took; 0 where the system does not say.
    cpu_s: f64,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args = Args::parse();
    let dir = args.dir.clone().unwrap_or_else(std::env::temp_dir).join(format!("fsdp-bench-{}", std::process::id()));
    fs::create_dir_all(&dir)?;
    let results = measure(&args, &dir);
    fs::remove_dir_all(&dir)?;
    let results = results?;
    print(&results);
    if let Some(file) = &args.json {
        fs::write(file, serde_json::to_string_pretty(&results)?)?;
    }
    Ok(())
}

fn measure(args: &Args, dir: &Path) -> Result<Results, Box<dyn std::error::Error>> {
    let mut results = Results { bytes: args.mib << 20, ..Results::default() };
    for _ in 0..args.rounds {
        results.dd_write_s.push(dd_write(dir, args.mib)?);
        let (save_s, step_dir) = save_state(args, dir)?;
        results.save_s.push(save_s);
        let no_cache = drop_caches();
        results.dd_read_s.push(dd_read(dir)?);
        drop_caches();
        results.load_s.push(load_state(args, &step_dir)?);
        if !no_cache && results.load_s.len() == 1 {
            println!("The page cache cannot be dropped here (that takes an administrator): reads come from memory");
        }
    }
    if args.saves > 0 {
        let (args, root) = (args.clone(), dir.join("background"));
        let config = Config { stage: Stage::Parameters, world_size: args.ranks, timeout_s: 300.0, ..Config::default() };
        results.background = launch(&config, move |rank| beside_training(&rank, &args, &root))?.swap_remove(0);
    }
    Ok(results)
}

/// `dd` of zeros with `fsync`, in blocks as large as a save writes past the cache.
fn dd_write(dir: &Path, mib: usize) -> Result<f64, Box<dyn std::error::Error>> {
    let file = dir.join("dd");
    let _ = fs::remove_file(&file);
    let started = Instant::now();
    dd(&["if=/dev/zero", &format!("of={}", file.display()), "bs=1M", &format!("count={mib}"), "conv=fsync"])?;
    Ok(started.elapsed().as_secs_f64())
}

fn dd_read(dir: &Path) -> Result<f64, Box<dyn std::error::Error>> {
    let started = Instant::now();
    dd(&[&format!("if={}", dir.join("dd").display()), "of=/dev/null", "bs=1M"])?;
    Ok(started.elapsed().as_secs_f64())
}

fn dd(arguments: &[&str]) -> Result<(), Box<dyn std::error::Error>> {
    let output = Command::new("dd").args(arguments).output()?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned().into());
    }
    Ok(())
}

/// Whether the next read comes from the disk.
fn drop_caches() -> bool {
    fs::write("/proc/sys/vm/drop_caches", "1").is_ok()
}

/// Runs a program on all ranks, and returns what the slowest took for what it timed.
fn slowest<E: From<CommError> + Send>(
    args: &Args,
    program: impl Fn(&dyn Communicator) -> Result<f64, E> + Sync,
) -> Result<f64, E> {
    let ranks = LocalWorld::connect(args.ranks, Duration::from_secs(300));
    let times: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = ranks.into_iter().map(|comm| scope.spawn(|| program(&*{ comm }))).collect();
        threads.into_iter().map(|thread| thread.join().expect("ranks return their errors")).collect()
    });
    times.into_iter().try_fold(0.0, |slowest: f64, time| Ok(slowest.max(time?)))
}

/// The rows of the state's tensors, a tensor of 16 MiB after the other.
fn layouts(args: &Args) -> Vec<ShardLayout> {
    (0..args.mib.div_ceil(16)).map(|_| ShardLayout::new(&[16, ROW_LEN], 0, args.ranks)).collect()
}

/// Saves a state of noise, which no disk can compress, and returns seconds and the step directory.
fn save_state(args: &Args, dir: &Path) -> Result<(f64, PathBuf), CheckpointError> {
    let root = dir.join("saved");
    let _ = fs::remove_dir_all(&root);
    let seconds = slowest(args, |rank| {
        let mut state = rank.rank() as u64 + 1;
        let mut block = |layout: &ShardLayout| -> Vec<u8> {
            let mut next = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 16).to_le_bytes()
            };
            (0..layout.shard_len(rank.rank()) / 2).flat_map(|_| next()).collect()
        };
        let tensors = layouts(args).into_iter().enumerate().map(|(index, layout)| TensorBlock {
            name: format!("tensor.{index}"),
            aliases: Vec::new(),
            kind: TensorKind::Model,
            dtype: StoredDtype::F32,
            data: BlockData::Ready(block(&layout).into()),
            layout,
        });
        let snapshot = Snapshot {
            step: 1,
            mesh: Mesh::one_dim(rank.world_size()),
            stage: Stage::Parameters,
            tensors: tensors.collect(),
            scalars: Default::default(),
            sections: Default::default(),
            rank_state: serde_json::Value::Null,
            pinned: false,
        };
        rank.barrier(&OpTag::new(0, Phase::Control, "start"))?;
        let started = Instant::now();
        save(rank, &root, snapshot, &SaveOptions::default())?;
        Ok::<_, CheckpointError>(started.elapsed().as_secs_f64())
    })?;
    Ok((seconds, root.join("step-1")))
}

/// Opens the checkpoint with its checksums unread, as `dd` has none, and reads each rank's blocks.
fn load_state(args: &Args, step_dir: &Path) -> Result<f64, CheckpointError> {
    slowest(args, |rank| {
        let layouts = layouts(args);
        let mut blocks: Vec<_> = layouts.iter().map(|layout| vec![1u8; 4 * layout.shard_len(rank.rank())]).collect();
        rank.barrier(&OpTag::new(0, Phase::Control, "start"))?;
        let started = Instant::now();
        let checkpoint = Checkpoint::open(step_dir, Verify::Sizes)?;
        for (index, (layout, block)) in layouts.iter().zip(&mut blocks).enumerate() {
            checkpoint.read_into(&format!("tensor.{index}"), layout, rank.rank(), block)?;
        }
        Ok(started.elapsed().as_secs_f64())
    })
}

/// Trains; again and again some steps alone, and then steps while a save is under way.
fn beside_training(rank: &Rank, args: &Args, root: &Path) -> Result<Vec<Background>, Error> {
    let device = rank.device();
    let mut model = rank.shard(args.shape.init(&device))?;
    let mut optim = rank.optimizer(FusedAdamW::new(&AdamWConfig::new().with_weight_decay(0.1))?)?;
    if rank.is_main() {
        let mib = (model.num_params() * 12) >> 20;
        println!("Beside training: {} parameters, {mib} MiB with two moments", model.num_params());
    }
    let options = SaveOptions { keep_last: std::num::NonZeroUsize::new(1) };
    let mut saver = rank.saver(root, options)?;
    let mut number = 0;
    let mut step = |model: &mut _, optim: &mut fsdp_burn::ShardedOptimizer| -> Result<f64, Error> {
        let started = Instant::now();
        let model: &mut fsdp_burn::ShardedModel<fsdp_examples::Gpt> = model;
        let (inputs, targets) = args.shape.batch(number, rank.rank(), &device);
        number += 1;
        let gradients = model.backward(model.loss(inputs, targets))?;
        optim.step(3e-4, model, gradients)?;
        rank.barrier()?;
        Ok(started.elapsed().as_secs_f64())
    };
    for _ in 0..3 {
        step(&mut model, &mut optim)?;
    }
    let mut measured = Vec::new();
    let mut num_alone = 4;
    let mut cpu_before_s = savers_cpu_s();
    for _ in 0..args.saves {
        let mut alone = Vec::new();
        for _ in 0..num_alone {
            alone.push(step(&mut model, &mut optim)?);
        }
        rank.barrier()?;
        let started = Instant::now();
        saver.save(&model, &optim, Default::default())?;
        rank.barrier()?;
        let call_s = started.elapsed().as_secs_f64();
        let mut meanwhile = Vec::new();
        let saved = loop {
            meanwhile.push(step(&mut model, &mut optim)?);
            if let Some(saved) = saver.poll()? {
                break saved;
            }
        };
        // As many steps alone after it. Both sides' mean stands for a step alone: a median would leave out of it what a noisy
        // machine adds to the steps beside the save.
        num_alone = meanwhile.len().clamp(4, 20);
        for _ in 0..num_alone {
            alone.push(step(&mut model, &mut optim)?);
        }
        let num_steps = meanwhile.len();
        let delay_s =
            call_s + meanwhile.iter().sum::<f64>() - num_steps as f64 * alone.iter().sum::<f64>() / alone.len() as f64;
        let cpu_after_s = savers_cpu_s();
        let cpu_s = cpu_after_s - std::mem::replace(&mut cpu_before_s, cpu_after_s);
        measured.push(Background { call_s, duration_s: call_s + saved.took.as_secs_f64(), num_steps, delay_s, cpu_s });
    }
    Ok(measured)
}

/// Seconds of a processor that this process's threads for saving have taken so far.
fn savers_cpu_s() -> f64 {
    let threads = fs::read_dir("/proc/self/task").into_iter().flatten().flatten().map(|thread| thread.path());
    let savers =
        threads.filter(|thread| fs::read_to_string(thread.join("comm")).is_ok_and(|name| name.starts_with("save-")));
    let nanoseconds = savers.filter_map(|thread| {
        let times = fs::read_to_string(thread.join("schedstat")).ok()?;
        times.split_whitespace().next()?.parse::<f64>().ok()
    });
    nanoseconds.sum::<f64>() / 1e9
}

fn print(results: &Results) {
    let gib = results.bytes as f64 / (1 << 30) as f64;
    println!("{gib:.2} GiB, load average {}", load_average());
    let rows = [
        ("dd to disk", &results.dd_write_s, &results.dd_write_s),
        ("save", &results.save_s, &results.dd_write_s),
        ("dd from disk", &results.dd_read_s, &results.dd_read_s),
        ("load", &results.load_s, &results.dd_read_s),
    ];
    println!("{:<14} {:>8} {:>8} {:>8}", "median", "s", "GiB/s", "of dd");
    for (what, seconds, beside) in rows.iter().filter(|(_, seconds, _)| !seconds.is_empty()) {
        // Of each round, since the next one may find another disk.
        let shares: Vec<f64> = beside.iter().zip(seconds.iter()).map(|(dd, own)| dd / own).collect();
        let middle = median(seconds);
        println!("{what:<14} {middle:>8.2} {:>8.2} {:>7.0}%", gib / middle, 100.0 * median(&shares));
    }
    if results.background.is_empty() {
        return;
    }
    println!(
        "\n{:>8} {:>10} {:>6} {:>8} {:>12} {:>8}",
        "call s", "duration s", "steps", "delay s", "of duration", "cpu s"
    );
    for Background { call_s, duration_s, num_steps, delay_s, cpu_s } in &results.background {
        let share = 100.0 * delay_s / duration_s;
        println!("{call_s:>8.3} {duration_s:>10.2} {num_steps:>6} {delay_s:>8.3} {share:>11.1}% {cpu_s:>8.3}");
    }
    let shares: Vec<f64> = results.background.iter().map(|b| 100.0 * b.delay_s / b.duration_s).collect();
    let sum = |of: fn(&Background) -> f64| results.background.iter().map(of).sum::<f64>();
    let of_all = 100.0 * sum(|save| save.delay_s) / sum(|save| save.duration_s);
    println!("of duration: {:.1}% in the median, {of_all:.1}% of all saves together", median(&shares));
    println!(
        "cpu s: {:.3} in the median",
        median(&results.background.iter().map(|save| save.cpu_s).collect::<Vec<_>>())
    );
}
