//! How fast the collectives between processes are, beside those of the MPI library that carries them.
//!
//! `cargo bench --features fsdp-benches/mpi --bench mpi --no-run`, then `mpirun -n 2 target/release/deps/mpi-...`
//!
//! The same ranks gather and reduce the same tensors of float32 by turns: with `MPI_Allgather` and with ours, with
//! `MPI_Reduce_scatter_block` and with ours. What is read takes turns through so many tensors that a cache does not hold
//! them, as in a training step; what is written goes to a buffer that is used again. The library writes the gathered tensor
//! once per rank; ours is one buffer of the host, which all ranks may read. Before the clock starts, both must give the same
//! bytes. Blocks that are gathered in place are copied once, when they are placed: a training step of stage 3 gathers each twice,
//! for forward and for backward, so half of one placing and two gathers counts as one. A time is that of the slowest rank, and
//! the median of all repetitions counts. Bandwidth is the size of the whole tensor by that time.

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use clap::Parser;
use fsdp_benches::{Sizes, load_average, median};
use fsdp_core::{
    CommError, Communicator, Dtype, GatherPart, Mpi, MpiWorld, OpTag, Phase, Reduce, ReducePart, ShardLayout,
};
use mpi::collective::SystemOperation;
use mpi::topology::SimpleCommunicator;
use mpi::traits::CommunicatorCollectives;
use serde::Serialize;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const TIMEOUT: Duration = Duration::from_secs(120);

#[derive(Clone, Debug, Parser)]
#[command(mut_arg("min_kib", |arg| arg.default_value("1024")), mut_arg("max_kib", |arg| arg.default_value("65536")))]
struct Args {
    #[command(flatten)]
    sizes: Sizes,
    /// Fails if a collective of ours is not so many times as fast as the library's.
    #[arg(long)]
    at_least: Option<f64>,
}

/// What is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
enum Work {
    Allgather,
    AllGather,
    /// Places a block and gathers twice, for each gather; between hosts blocks cannot be placed.
    InPlace,
    ReduceScatterBlock,
    ReduceScatter,
}

impl Work {
    const ALL: [Work; 5] =
        [Work::Allgather, Work::AllGather, Work::InPlace, Work::ReduceScatterBlock, Work::ReduceScatter];
    /// The library's, and ours.
    const PAIRS: [[Work; 2]; 3] = [
        [Work::Allgather, Work::AllGather],
        [Work::Allgather, Work::InPlace],
        [Work::ReduceScatterBlock, Work::ReduceScatter],
    ];

    fn name(self) -> &'static str {
        match self {
            Work::Allgather => "MPI_Allgather",
            Work::AllGather => "all-gather",
            Work::InPlace => "in place",
            Work::ReduceScatterBlock => "MPI_Reduce_scatter_block",
            Work::ReduceScatter => "reduce-scatter",
        }
    }
}

/// Medians of one size.
#[derive(Clone, Debug, Serialize)]
struct Row {
    work: Work,
    /// Bytes of the whole tensor.
    tensor_bytes: usize,
    seconds: f64,
    library_seconds: f64,
    /// How many times as fast as the library.
    ratio: f64,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args = Args::parse();
    keep_freed_memory()?;
    let mpi = Mpi::start()?;
    let control = MpiWorld::control(TIMEOUT)?;
    let comm = MpiWorld::connect(control.clone(), TIMEOUT)?;
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let library = mpi.call(mpi::environment::library_version).and_then(Result::ok).unwrap_or_default();
    let library = library.lines().next().unwrap_or_default().trim().to_owned();
    if rank == 0 {
        println!(
            "{world_size} ranks, {library}, medians of {}, load average {}",
            args.sizes.repetitions,
            load_average()
        );
        println!("{:>25} {:>11} {:>11} {:>9} {:>12} {:>7}", "", "tensor KiB", "µs", "GB/s", "library GB/s", "ratio");
    }
    let mut rows = Vec::new();
    for kib in args.sizes.kib() {
        for row in measure(&args, &mpi, &comm, kib << 10)? {
            let rate = |seconds: f64| row.tensor_bytes as f64 / seconds / 1e9;
            if rank == 0 {
                println!(
                    "{:>25} {kib:>11} {:>11.1} {:>9.2} {:>12.2} {:>6.1}x",
                    row.work.name(),
                    row.seconds * 1e6,
                    rate(row.seconds),
                    rate(row.library_seconds),
                    row.ratio,
                );
            }
            rows.push(row);
        }
    }
    comm.leave();
    control.finish()?;
    if rank == 0 {
        args.sizes.write(&serde_json::json!({ "ranks": world_size, "library": library, "rows": rows }))?;
    }
    let slowest = rows.iter().map(|row| row.ratio).fold(f64::INFINITY, f64::min);
    if rows.is_empty() {
        return Err("no size was measured; see --min-kib and --max-kib".into());
    }
    match args.at_least {
        Some(least) if slowest < least => Err(format!("{slowest:.2} times as fast, less than {least}").into()),
        _ => Ok(()),
    }
}

/// Starts this program again with an allocator that keeps what is freed, as cargo starts it: results of reductions are new
/// memory each time, and `mpirun` hands over no more of the surroundings than it is told to.
fn keep_freed_memory() -> std::io::Result<()> {
    const VARIABLE: &str = "MIMALLOC_PURGE_DELAY";
    if std::env::var_os(VARIABLE).is_some() {
        return Ok(());
    }
    let mut again = Command::new(std::env::current_exe()?);
    Err(again.args(std::env::args_os().skip(1)).env(VARIABLE, "-1").exec())
}

/// All kinds of work take turns, so that whatever else the machine does slows all of them alike.
fn measure(
    args: &Args,
    mpi: &Arc<Mpi>,
    comm: &Arc<dyn Communicator>,
    tensor_bytes: usize,
) -> Result<Vec<Row>, Box<dyn std::error::Error>> {
    let mut work = RankWork::new(mpi.clone(), comm.clone(), tensor_bytes);
    work.check()?;
    let batch = Sizes::num_batched(tensor_bytes, 64);
    let shares_memory = comm.num_sharing() == comm.world_size();
    let is_run = |work: Work| work != Work::InPlace || shares_memory;
    let mut seconds: Vec<[f64; 5]> = Vec::new();
    // The first round is not counted.
    for repetition in 0..=args.sizes.repetitions {
        let mut of_repetition = [0.0; 5];
        for (kind, seconds) in Work::ALL.into_iter().zip(&mut of_repetition).filter(|(kind, _)| is_run(*kind)) {
            comm.barrier(&tag())?;
            let start = Instant::now();
            work.run(kind, batch)?;
            *seconds = start.elapsed().as_secs_f64() / batch as f64;
        }
        if repetition > 0 {
            seconds.push(slowest(&**comm, of_repetition)?);
        }
    }
    let of = |work: Work| {
        let place = Work::ALL.iter().position(|&other| other == work).unwrap_or_default();
        median(&seconds.iter().map(|seconds| seconds[place]).collect::<Vec<_>>())
    };
    let row = |[library, work]: [Work; 2]| {
        let num_gathers = if work == Work::InPlace { 2.0 } else { 1.0 };
        let (library_seconds, seconds) = (of(library), of(work) / num_gathers);
        Row { work, tensor_bytes, seconds, library_seconds, ratio: library_seconds / seconds }
    };
    Ok(Work::PAIRS.into_iter().filter(|[_, ours]| is_run(*ours)).map(row).collect())
}

/// Of each kind of work, the time of the rank that took longest.
fn slowest(comm: &dyn Communicator, seconds: [f64; 5]) -> Result<[f64; 5], CommError> {
    let layout = ShardLayout::new(&[comm.world_size() * 5], 0, comm.world_size());
    let shard = seconds.iter().flat_map(|seconds| seconds.to_ne_bytes()).collect();
    let all = comm.all_gather(&tag(), &[GatherPart { shard, layout, elem_bytes: 8 }])?.remove(0);
    let mut slowest = [0.0_f64; 5];
    for (place, bytes) in all.as_chunks::<8>().0.iter().enumerate() {
        slowest[place % 5] = slowest[place % 5].max(f64::from_ne_bytes(*bytes));
    }
    Ok(slowest)
}

fn tag() -> OpTag {
    OpTag::new(0, Phase::Control, "bench")
}

/// One rank with its data: as many tensors as take turns, side by side.
struct RankWork {
    mpi: Arc<Mpi>,
    comm: Arc<dyn Communicator>,
    layout: ShardLayout,
    tensor_bytes: usize,
    num_tensors: usize,
    /// Whose turn it is.
    next: usize,
    tensors: Bytes,
    values: Arc<Vec<f32>>,
    target: Arc<Mutex<Vec<f32>>>,
}

impl RankWork {
    fn new(mpi: Arc<Mpi>, comm: Arc<dyn Communicator>, tensor_bytes: usize) -> Self {
        let num_tensors = Sizes::num_cold(tensor_bytes);
        let world_size = comm.world_size();
        // The library's collectives want equal blocks.
        let len = tensor_bytes / 4 / world_size * world_size;
        // Small whole numbers, other ones on each rank: their sums are exact in any order.
        let values: Vec<f32> = (0..num_tensors * len).map(|index| (index % 1021 + 7 * comm.rank()) as f32).collect();
        Self {
            mpi,
            layout: ShardLayout::new(&[len], 0, world_size),
            tensors: values.iter().flat_map(|value| value.to_ne_bytes()).collect(),
            values: Arc::new(values),
            target: Arc::new(Mutex::new(vec![2.0; len])),
            next: 0,
            num_tensors,
            tensor_bytes: 4 * len,
            comm,
        }
    }

    /// Where the tensor whose turn it is begins.
    fn turn(&mut self) -> usize {
        let start = self.next * self.tensor_bytes;
        self.next = (self.next + 1) % self.num_tensors;
        start
    }

    fn run(&mut self, work: Work, times: usize) -> Result<(), Box<dyn std::error::Error>> {
        let starts: Vec<usize> = (0..times).map(|_| self.turn()).collect();
        match work {
            Work::AllGather | Work::InPlace | Work::ReduceScatter => {
                starts.into_iter().try_for_each(|start| self.once(work, start).map(drop))?;
            }
            Work::Allgather | Work::ReduceScatterBlock => {
                let (values, target) = (self.values.clone(), self.target.clone());
                let len = self.tensor_bytes / 4;
                let block_len = len / self.comm.world_size();
                let run = move || {
                    let world = SimpleCommunicator::world();
                    let mut target = target.lock().unwrap_or_else(PoisonError::into_inner);
                    for start in starts {
                        let tensor = &values[start / 4..start / 4 + len];
                        match work {
                            Work::Allgather => world.all_gather_into(&tensor[..block_len], &mut target[..]),
                            _ => {
                                let block = &mut target[..block_len];
                                world.reduce_scatter_block_into(tensor, block, SystemOperation::sum());
                            }
                        }
                    }
                };
                self.mpi.call(run).ok_or("a collective of the library panicked")?;
            }
        }
        Ok(())
    }

    /// Fails unless the library and ours give the same bytes.
    fn check(&mut self) -> Result<(), Box<dyn std::error::Error>> {
        let shares_memory = self.comm.num_sharing() == self.comm.world_size();
        for [library, ours] in Work::PAIRS.into_iter().filter(|[_, ours]| *ours != Work::InPlace || shares_memory) {
            self.next = 0;
            self.run(library, 1)?;
            let bytes = self.once(ours, 0)?;
            let target = self.target.lock().unwrap_or_else(PoisonError::into_inner);
            let expected = target.iter().flat_map(|value| value.to_ne_bytes());
            if !expected.take(bytes.len()).eq(bytes.iter().copied()) {
                return Err(format!("{} and {} give different bytes", library.name(), ours.name()).into());
            }
        }
        Ok(())
    }

    fn once(&self, work: Work, start: usize) -> Result<Bytes, CommError> {
        let layout = self.layout.clone();
        let block_bytes = layout.shard_len(self.comm.rank()) * 4;
        let block = || self.tensors.slice(start..start + block_bytes);
        match work {
            Work::AllGather => {
                let part = GatherPart { shard: block(), layout, elem_bytes: 4 };
                return Ok(self.comm.all_gather(&tag(), &[part])?.remove(0));
            }
            Work::InPlace => {
                let part = GatherPart { shard: block(), layout, elem_bytes: 4 };
                let placed = self.comm.place(&tag(), &[part])?.unwrap_or_default();
                drop(self.comm.gather_placed(&tag(), &placed)?);
                return Ok(self.comm.gather_placed(&tag(), &placed)?.remove(0));
            }
            _ => {}
        }
        let full = self.tensors.slice(start..start + self.tensor_bytes);
        let part = ReducePart { full, layout, dtype: Dtype::F32 };
        Ok(self.comm.reduce_scatter(&tag(), &[part], Reduce::SUM)?.remove(0))
    }
}
