//! Chapter 5: what collectives do, and what they cost on this machine.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use fsdp_core::{
    CommError, Communicator, Dtype, GatherPart, Link, LocalWorld, OpTag, Phase, Reduce, ReducePart, ShardLayout,
};

use crate::Outcome;
use crate::show::{about, grouped};

type Comm = Arc<dyn Communicator>;

// ANCHOR: ranks
/// Runs `program` on `num_ranks` ranks, each a thread, and returns the results in rank order.
fn on_ranks<T: Send + 'static>(
    num_ranks: usize,
    program: fn(&Comm) -> Result<T, CommError>,
) -> Result<Vec<T>, CommError> {
    let world = LocalWorld::connect(num_ranks, Duration::from_secs(60));
    let run = |comm: Comm| thread::spawn(move || program(&comm));
    let threads: Vec<_> = world.into_iter().map(run).collect();
    threads.into_iter().map(|thread| thread.join().expect("a rank returns")).collect()
}
// ANCHOR_END: ranks

fn to_bytes(numbers: &[f32]) -> Bytes {
    Bytes::from(numbers.iter().flat_map(|number| number.to_ne_bytes()).collect::<Vec<_>>())
}

fn to_numbers(bytes: &Bytes) -> Vec<f32> {
    bytes.chunks_exact(4).map(|bytes| f32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])).collect()
}

fn tag(what: &str) -> OpTag {
    OpTag::new(0, Phase::Control, what)
}

// ANCHOR: gather
/// Each rank has two numbers, and gets those of all.
fn gather(comm: &Comm) -> Result<[Vec<f32>; 2], CommError> {
    let mine = vec![10.0 * comm.rank() as f32, 10.0 * comm.rank() as f32 + 1.0];
    let layout = ShardLayout::new(&[2 * comm.world_size()], 0, comm.world_size());
    let part = GatherPart { shard: to_bytes(&mine), layout, elem_bytes: 4 };
    let whole = comm.all_gather(&tag("gather"), &[part])?;
    Ok([mine, to_numbers(&whole[0])])
}
// ANCHOR_END: gather

// ANCHOR: reduce
/// Each rank has a number for every element, and gets its block of the sums; and then all of them.
fn reduce(comm: &Comm) -> Result<[Vec<f32>; 3], CommError> {
    let len = 2 * comm.world_size();
    let mine: Vec<f32> = (0..len).map(|i| (10 * comm.rank() + i) as f32).collect();
    let layout = ShardLayout::new(&[len], 0, comm.world_size());
    let part = || ReducePart { full: to_bytes(&mine), layout: layout.clone(), dtype: Dtype::F32 };
    let block = comm.reduce_scatter(&tag("reduce"), &[part()], Reduce::SUM)?;
    let sums = comm.all_reduce(&tag("reduce to all"), &[part()], Reduce::SUM)?;
    Ok([mine.clone(), to_numbers(&block[0]), to_numbers(&sums[0])])
}
// ANCHOR_END: reduce

fn shown(numbers: &[f32]) -> String {
    numbers.iter().map(|number| format!("{number:>4}")).collect()
}

const SIZES: [usize; 7] = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20];

// ANCHOR: measure
/// Seconds of an all-gather and of a reduce-scatter of a tensor, by size: the median of several.
fn measure(comm: &Comm) -> Result<Vec<[f64; 2]>, CommError> {
    let mut medians = Vec::new();
    for bytes in SIZES {
        let layout = ShardLayout::new(&[bytes / 4], 0, comm.world_size());
        let full = Bytes::from(1_f32.to_ne_bytes().repeat(bytes / 4));
        let shard = full.slice(..bytes / comm.world_size());
        let gather = [GatherPart { shard, layout: layout.clone(), elem_bytes: 4 }];
        let reduce = [ReducePart { full, layout, dtype: Dtype::F32 }];
        let mut seconds = [Vec::new(), Vec::new()];
        for _ in 0..((64 << 20) / bytes).clamp(7, 201) {
            comm.barrier(&tag("start together"))?;
            let start = Instant::now();
            comm.all_gather(&tag("gather"), &gather)?;
            seconds[0].push(start.elapsed().as_secs_f64());

            comm.barrier(&tag("start together"))?;
            let start = Instant::now();
            comm.reduce_scatter(&tag("reduce"), &reduce, Reduce::SUM)?;
            seconds[1].push(start.elapsed().as_secs_f64());
        }
        medians.push(seconds.map(|mut seconds| {
            seconds.sort_by(f64::total_cmp);
            seconds[seconds.len() / 2]
        }));
    }
    Ok(medians)
}
// ANCHOR_END: measure

pub(crate) fn run() -> Outcome {
    println!("all-gather\n");
    for (rank, [mine, whole]) in on_ranks(4, gather)?.iter().enumerate() {
        println!("  rank {rank} has{}   and gets{}", shown(mine), shown(whole));
    }
    println!("\nreduce-scatter, and all-reduce\n");
    let rows = on_ranks(4, reduce)?;
    for (rank, [mine, block, _]) in rows.iter().enumerate() {
        println!("  rank {rank} has{}   and gets{}", shown(mine), shown(block));
    }
    println!("  every rank of an all-reduce gets{}", shown(&rows[0][2]));

    let ranks = on_ranks(2, measure)?;
    // ANCHOR: fit
    let points = |kind: usize| -> Vec<(f64, f64)> {
        SIZES.iter().zip(&ranks[0]).map(|(&bytes, seconds)| (bytes as f64, seconds[kind])).collect()
    };
    let fits = [0, 1].map(|kind| Link::fit(&points(kind)));
    // ANCHOR_END: fit
    let [Some(gather), Some(reduce)] = fits else { return Err("too few sizes for a line".into()) };
    println!("\ntwo ranks, each a thread; microseconds, and what α + β·S says\n");
    println!("{:>12} {:>12} {:>12} {:>15} {:>12}", "bytes", "all-gather", "line", "reduce-scatter", "line");
    for (bytes, seconds) in SIZES.iter().zip(&ranks[0]) {
        let micro = |seconds: f64| about(format!("{:.1}", seconds * 1e6));
        let line = |link: Link| micro(link.message_s(*bytes as u64));
        println!(
            "{:>12} {:>12} {:>12} {:>15} {:>12}",
            grouped(*bytes),
            micro(seconds[0]),
            line(gather),
            micro(seconds[1]),
            line(reduce)
        );
    }
    println!();
    for (name, link) in [("all-gather", gather), ("reduce-scatter", reduce)] {
        let (alpha, rate) = (link.alpha_s * 1e6, 1e-9 / link.beta_s_per_byte);
        println!("{name:<16} α {} µs   1/β {} GB/s", about(format!("{alpha:.1}")), about(format!("{rate:.2}")));
    }
    Ok(())
}
