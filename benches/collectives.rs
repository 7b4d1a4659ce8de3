//! How fast the collectives between ranks of one process are, beside plain copies by the same number of threads.
//!
//! `cargo bench --bench collectives -- --ranks 2`
//!
//! What counts, for a tensor of S bytes on N ranks:
//!
//! - In an all-gather each rank copies its own block, S/N bytes, into a buffer that all ranks fill. Its reference copies
//!   S/N bytes per thread.
//! - Gathers in place copy a block once, when it is placed, and then nothing. A training step of stage 3 gathers each block
//!   twice, for forward and for backward, so half of one placing and two gathers counts, beside the same reference.
//! - In a reduction each rank reads its block from the tensors of all N ranks, S bytes, and writes one block, S/N bytes,
//!   to memory that the allocator has just given. Its reference copies S bytes per thread. A copy also writes what it
//!   reads, so the last column compares with a copy of as much traffic to memory, (S + S/N)/2 bytes.
//!
//! As in a training step, what is read comes from memory and not from a cache: operations take turns through so many
//! tensors that a cache does not hold them (`--hot`: always the same). What is written goes to a buffer that is used
//! again, in references too.

use std::hint::black_box;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use clap::Parser;
use fsdp_benches::{Sizes, load_average, median};
use fsdp_core::{
    CommError, Communicator, Dtype, GatherPart, Link, LocalWorld, OpTag, Phase, Reduce, ReducePart, ShardLayout,
};
use serde::Serialize;

// Results of reductions are as large as the tensors here: the system's allocator would map and clear pages for each.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[derive(Clone, Debug, Parser)]
struct Args {
    /// Ranks, each a thread.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..))]
    ranks: u16,
    #[command(flatten)]
    sizes: Sizes,
    /// Reads the same tensors again and again, so that small ones stay in a cache.
    #[arg(long)]
    hot: bool,
}

/// What is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
enum Work {
    AllGather,
    /// Places a block and gathers twice, for each gather.
    InPlace,
    ReduceScatter,
    AllReduce,
    /// Copies one block per thread.
    CopyBlock,
    /// Copies as much as the whole tensor per thread.
    CopyWhole,
}

impl Work {
    const ALL: [Work; 6] =
        [Work::CopyBlock, Work::AllGather, Work::InPlace, Work::CopyWhole, Work::ReduceScatter, Work::AllReduce];
    const COLLECTIVES: [Work; 4] = [Work::AllGather, Work::InPlace, Work::ReduceScatter, Work::AllReduce];

    fn is_gather(self) -> bool {
        matches!(self, Work::AllGather | Work::InPlace)
    }

    fn name(self) -> &'static str {
        match self {
            Work::AllGather => "all-gather",
            Work::InPlace => "in place",
            Work::ReduceScatter => "reduce-scatter",
            Work::AllReduce => "all-reduce",
            Work::CopyBlock => "copy of a block",
            Work::CopyWhole => "copy of the whole",
        }
    }

    /// The copy that a collective is compared with.
    fn reference(self) -> Work {
        if self.is_gather() { Work::CopyBlock } else { Work::CopyWhole }
    }
}

/// Medians of one size.
#[derive(Clone, Debug, Serialize)]
struct Row {
    work: Work,
    /// Bytes of the whole tensor.
    tensor_bytes: usize,
    /// Bytes that each rank reads.
    moved_bytes: usize,
    seconds: f64,
    copy_seconds: f64,
    /// The share of the copy's speed.
    ratio: f64,
    /// The same against a copy of as much traffic to memory.
    traffic_ratio: f64,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args = Args::parse();
    let ranks = usize::from(args.ranks);
    println!("{ranks} ranks, medians of {}, load average {}", args.sizes.repetitions, load_average());
    println!(
        "{:>15} {:>11} {:>11} {:>9} {:>10} {:>10} {:>9}",
        "", "tensor KiB", "µs", "GB/s", "copy GB/s", "of copy", "of traffic"
    );
    let mut rows = Vec::new();
    for kib in args.sizes.kib() {
        for row in measure(&args, kib << 10)? {
            let rate = |seconds: f64| row.moved_bytes as f64 / seconds / 1e9;
            println!(
                "{:>15} {kib:>11} {:>11.1} {:>9.2} {:>10.2} {:>9.0}% {:>9.0}%",
                row.work.name(),
                row.seconds * 1e6,
                rate(row.seconds),
                rate(row.copy_seconds),
                100.0 * row.ratio,
                100.0 * row.traffic_ratio,
            );
            rows.push(row);
        }
    }
    println!("\nT = α + β·S, S being the bytes that a rank reads; load average {}", load_average());
    let mut links = serde_json::Map::new();
    for work in Work::COLLECTIVES {
        let of_work = rows.iter().filter(|row| row.work == work);
        let points: Vec<_> = of_work.map(|row| (row.moved_bytes as f64, row.seconds)).collect();
        if let Some(Link { alpha_s, beta_s_per_byte }) = Link::fit(&points) {
            println!("{:>15}   α {:>7.1} µs   1/β {:>6.2} GB/s", work.name(), alpha_s * 1e6, 1e-9 / beta_s_per_byte);
            let link = serde_json::json!({ "alpha_s": alpha_s, "beta_s_per_byte": beta_s_per_byte });
            links.insert(work.name().to_owned(), link);
        }
    }
    args.sizes.write(&serde_json::json!({ "ranks": ranks, "rows": rows, "fits": links }))?;
    Ok(())
}

/// All collectives on a tensor of `tensor_bytes`, each beside its copy. All kinds of work take turns, so that whatever
/// else the machine does slows all of them alike.
fn measure(args: &Args, tensor_bytes: usize) -> Result<Vec<Row>, Box<dyn std::error::Error>> {
    let (ranks, repetitions) = (usize::from(args.ranks), args.sizes.repetitions);
    let num_tensors = if args.hot { 1 } else { Sizes::num_cold(tensor_bytes) };
    let together = Arc::new(Barrier::new(ranks));
    let world = LocalWorld::connect(ranks, Duration::from_secs(60));
    let spawn = |comm: Arc<dyn Communicator>| {
        let together = together.clone();
        thread::spawn(move || RankWork::new(comm, tensor_bytes, num_tensors).run(repetitions, &together))
    };
    let threads: Vec<_> = world.into_iter().map(spawn).collect();
    let mut spans = Vec::new();
    for thread in threads {
        spans.push(thread.join().map_err(|_| "a rank panicked")??);
    }
    // From the first rank's start to the last rank's end.
    let seconds = |work: Work| {
        let place = Work::ALL.iter().position(|&other| other == work).unwrap_or_default();
        let of_repetition = |repetition: usize| {
            let spans = spans.iter().map(|rank| rank[repetition][place]);
            let start = spans.clone().map(|(start, _)| start).min();
            let end = spans.map(|(_, end)| end).max();
            start.zip(end).map_or(f64::NAN, |(start, end)| (end - start).as_secs_f64())
        };
        let num_gathers = if work == Work::InPlace { 2 } else { 1 };
        let num_times = num_gathers * Sizes::num_batched(tensor_bytes, 512);
        median(&(0..repetitions).map(of_repetition).collect::<Vec<_>>()) / num_times as f64
    };
    let row = |work: Work| {
        let (seconds, copy_seconds) = (seconds(work), seconds(work.reference()));
        let ratio = copy_seconds / seconds;
        let (moved_bytes, traffic_ratio) = match work {
            Work::AllGather | Work::InPlace => (tensor_bytes / ranks, ratio),
            _ => (tensor_bytes, ratio * (ranks + 1) as f64 / (2 * ranks) as f64),
        };
        Row { work, tensor_bytes, moved_bytes, seconds, copy_seconds, ratio, traffic_ratio }
    };
    Ok(Work::COLLECTIVES.map(row).into())
}

/// One rank with its data: as many tensors as take turns, side by side.
struct RankWork {
    comm: Arc<dyn Communicator>,
    layout: ShardLayout,
    tensor_bytes: usize,
    num_tensors: usize,
    /// Whose turn it is.
    next: usize,
    tensors: Bytes,
    target: Vec<u8>,
}

impl RankWork {
    fn new(comm: Arc<dyn Communicator>, tensor_bytes: usize, num_tensors: usize) -> Self {
        Self {
            layout: ShardLayout::new(&[tensor_bytes / 4], 0, comm.world_size()),
            // Ones everywhere: a page of zeros that was never written would be shared by all of its readers.
            tensors: Bytes::from(1.0_f32.to_ne_bytes().repeat(num_tensors * tensor_bytes / 4)),
            target: vec![2; tensor_bytes],
            next: 0,
            num_tensors,
            tensor_bytes,
            comm,
        }
    }

    /// The first `len_bytes` of the tensor whose turn it is.
    fn turn(&mut self, len_bytes: usize) -> Bytes {
        let start = self.next * self.tensor_bytes;
        self.next = (self.next + 1) % self.num_tensors;
        self.tensors.slice(start..start + len_bytes)
    }

    /// For each repetition, when each kind of work began and ended.
    fn run(mut self, repetitions: usize, together: &Barrier) -> Result<Vec<[(Instant, Instant); 6]>, CommError> {
        for work in Work::ALL {
            self.once(work)?;
        }
        let mut spans = Vec::new();
        for _ in 0..repetitions {
            let mut of_repetition = [(Instant::now(), Instant::now()); 6];
            for (work, span) in Work::ALL.into_iter().zip(&mut of_repetition) {
                together.wait();
                let start = Instant::now();
                for _ in 0..Sizes::num_batched(self.tensor_bytes, 512) {
                    self.once(work)?;
                }
                *span = (start, Instant::now());
            }
            spans.push(of_repetition);
        }
        Ok(spans)
    }

    fn once(&mut self, work: Work) -> Result<(), CommError> {
        let tag = OpTag::new(0, Phase::Control, "bench");
        let block_bytes = self.layout.shard_len(self.comm.rank()) * size_of::<f32>();
        let read_bytes = if work.is_gather() || work == Work::CopyBlock { block_bytes } else { self.tensor_bytes };
        let read = self.turn(read_bytes);
        let layout = self.layout.clone();
        match work {
            Work::AllGather => {
                let part = GatherPart { shard: read, layout, elem_bytes: 4 };
                drop(black_box(self.comm.all_gather(&tag, &[part])?));
            }
            Work::InPlace => {
                let part = GatherPart { shard: read, layout, elem_bytes: 4 };
                let placed = self.comm.place(&tag, &[part])?.unwrap_or_default();
                drop(black_box(self.comm.gather_placed(&tag, &placed)?));
                drop(black_box(self.comm.gather_placed(&tag, &placed)?));
            }
            Work::ReduceScatter => {
                let part = ReducePart { full: read, layout, dtype: Dtype::F32 };
                drop(black_box(self.comm.reduce_scatter(&tag, &[part], Reduce::SUM)?));
            }
            Work::AllReduce => {
                let part = ReducePart { full: read, layout, dtype: Dtype::F32 };
                drop(black_box(self.comm.all_reduce(&tag, &[part], Reduce::SUM)?));
            }
            Work::CopyBlock | Work::CopyWhole => {
                black_box(&mut self.target)[..read_bytes].copy_from_slice(&black_box(read));
            }
        }
        Ok(())
    }
}
