//! How fast a tier reads and writes at the same time, beside `fio` on the same directory in the same run.
//!
//! ```sh
//! cargo bench --bench tier -- --dir tier-bandwidth
//! ```
//!
//! Slots are read and written in turns, several transfers at a time, as an optimizer step does it. `fio` then moves blocks of
//! the same size, as many at a time, half of them reads; both take turns round by round, and medians are compared. `of fio`
//! is the figure to look at; 0.8 is what is promised. Without `fio` on the machine the second half is left out.

use std::collections::VecDeque;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use bytes::Bytes;
use clap::Parser;
use fsdp_core::{Slot, Tier, TierEngine, TierOptions, Transfer};

/// Measures a tier beside `fio`.
#[derive(Parser)]
struct Args {
    /// A directory on the disk; it must not exist.
    #[arg(long, default_value = "tier-bandwidth")]
    dir: PathBuf,
    /// KiB of a block.
    #[arg(long, default_value_t = 1024)]
    block_kib: usize,
    /// Blocks under way at a time.
    #[arg(long, default_value_t = 16)]
    depth: usize,
    /// MiB of a slot: the state of a unit.
    #[arg(long, default_value_t = 32)]
    slot_mib: usize,
    /// Slots; with their size, how much of the disk is used.
    #[arg(long, default_value_t = 32)]
    slots: usize,
    /// Seconds of each round.
    #[arg(long, default_value_t = 4.0)]
    seconds: f64,
    /// Rounds.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Leaves checksums out.
    #[arg(long)]
    no_checksums: bool,
    /// Uses threads in place of io_uring.
    #[arg(long)]
    threads: bool,
    #[arg(long, hide = true)]
    bench: bool,
}

/// MiB per second, read and written.
type Speed = [f64; 2];

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    let rounds =
        (0..args.rounds).map(|_| Ok((tier(&args)?, fio(&args)?))).collect::<Result<Vec<_>, Box<dyn Error>>>()?;
    let speeds =
        |of: fn(&(Speed, Option<Speed>)) -> Option<Speed>| -> Vec<Speed> { rounds.iter().filter_map(of).collect() };
    let (ours, theirs) = (speeds(|round| Some(round.0)), speeds(|round| round.1));
    println!("{:>8} {:>12} {:>12} {:>12}", "", "read MiB/s", "write MiB/s", "both MiB/s");
    for (name, speeds) in [("tier", &ours), ("fio", &theirs)].into_iter().filter(|(_, speeds)| !speeds.is_empty()) {
        let [read, write] = [0, 1].map(|index| median(speeds.iter().map(|speed| speed[index]).collect()));
        println!("{name:>8} {read:>12.0} {write:>12.0} {:>12.0}", median(speeds.iter().map(total).collect()));
    }
    if theirs.is_empty() {
        println!("`fio` is not on this machine: nothing to compare with");
    } else {
        println!("of fio: {:.2}", median(ours.iter().zip(&theirs).map(|(a, b)| total(a) / total(b)).collect()));
    }
    Ok(())
}

fn total(speed: &Speed) -> f64 {
    speed[0] + speed[1]
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Each slot is read, and a moment later written, two of each at a time.
fn tier(args: &Args) -> Result<Speed, Box<dyn Error>> {
    let (block_bytes, slot_bytes) = (args.block_kib << 10, args.slot_mib << 20);
    let tier = Tier::open(&TierOptions {
        block_bytes,
        buffer_bytes: args.depth * block_bytes,
        checksums: !args.no_checksums,
        engine: if args.threads { TierEngine::Threads } else { TierEngine::IoUring },
        ..TierOptions::new(&args.dir, 0, 1)
    })?;
    let data = Bytes::from((0..slot_bytes).map(|index| (index % 251) as u8).collect::<Vec<_>>());
    let slots = (0..args.slots).map(|_| tier.reserve(slot_bytes)).collect::<Result<Vec<Slot>, _>>()?;
    for slot in &slots {
        tier.write(*slot, data.clone()).wait()?;
    }
    let (before, begun) = (tier.stats(), Instant::now());
    let mut reads: VecDeque<(Slot, Transfer<Bytes>)> = VecDeque::new();
    let mut writes: VecDeque<Transfer<()>> = VecDeque::new();
    for slot in slots.iter().cycle() {
        reads.push_back((*slot, tier.read(*slot)));
        if reads.len() > 2
            && let Some((slot, read)) = reads.pop_front()
        {
            writes.push_back(tier.write(slot, read.wait()?));
        }
        if writes.len() > 2
            && let Some(write) = writes.pop_front()
        {
            write.wait()?;
        }
        if begun.elapsed() > Duration::from_secs_f64(args.seconds) {
            break;
        }
    }
    let (seconds, after) = (begun.elapsed().as_secs_f64(), tier.stats());
    let moved = [after.read_bytes - before.read_bytes, after.written_bytes - before.written_bytes];
    Ok(moved.map(|bytes| bytes as f64 / seconds / f64::from(1 << 20)))
}

/// `None` where there is no `fio`.
fn fio(args: &Args) -> Result<Option<Speed>, Box<dyn Error>> {
    let dir: &Path = &args.dir;
    fs::create_dir_all(dir)?;
    let engine = if args.threads { "psync" } else { "io_uring" };
    let depth = if args.threads { 1 } else { args.depth };
    let output = Command::new("fio")
        .arg(format!("--directory={}", dir.display()))
        .args(["--name=tier", "--direct=1", "--rw=rw", "--rwmixread=50", "--time_based", "--minimal"])
        .arg(format!("--ioengine={engine}"))
        .arg(format!("--numjobs={}", if args.threads { args.depth.min(8) } else { 1 }))
        .arg("--group_reporting")
        .arg(format!("--bs={}k", args.block_kib))
        .arg(format!("--iodepth={depth}"))
        .arg(format!("--size={}m", args.slot_mib * args.slots))
        .arg(format!("--runtime={}", args.seconds))
        .output();
    fs::remove_dir_all(dir)?;
    let Ok(output) = output else { return Ok(None) };
    let text = String::from_utf8_lossy(&output.stdout);
    let fields: Vec<&str> =
        text.lines().find(|line| line.matches(';').count() > 50).unwrap_or_default().split(';').collect();
    // KiB per second of reads and writes, in fio's terse format.
    let field = |index: usize| fields.get(index).and_then(|field| field.parse::<f64>().ok()).map(|kib| kib / 1024.0);
    match (field(6), field(47)) {
        (Some(read), Some(write)) => Ok(Some([read, write])),
        _ => Err(format!("fio failed: {text}{}", String::from_utf8_lossy(&output.stderr)).into()),
    }
}
