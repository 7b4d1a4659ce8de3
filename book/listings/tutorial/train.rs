//! The loop of every chapter from the second on. What changes is the configuration.

use std::time::Instant;

use burn::optim::AdamWConfig;
use fsdp_burn::{Config, Error, NonFinite, OpKind, Rank, ShardedOptimizer, Stage};

use crate::ALLOCATOR;
use crate::model::{NUM_BLOCKS, Net, ROWS, WIDTH, loss, samples};

/// Steps that are run before anything is measured: the first one learns the order of the units.
const NUM_WARMUP: usize = 2;
/// Steps that are measured.
const NUM_STEPS: usize = 4;

/// What one rank has seen.
pub(crate) struct Seen {
    /// Loss of each step, of this rank's samples.
    pub(crate) losses: Vec<f64>,
    /// Bytes of parameters between their uses.
    pub(crate) parameters: usize,
    /// Bytes of gradients, at most.
    pub(crate) gradients: usize,
    /// Bytes of optimizer state, measured.
    pub(crate) optimizer: usize,
    /// Bytes of gathered units, at most.
    pub(crate) gathered: usize,
    /// Bytes that the rank sends in a step: all, and in all-gathers, reduce-scatters and all-reduces.
    pub(crate) sent: u64,
    pub(crate) sent_by_kind: [u64; 3],
    /// Seconds of a step, and those in which the rank stood still for communication.
    pub(crate) step_s: f64,
    pub(crate) exposed_s: f64,
    /// Share of the communication that was hidden, 0 to 1.
    pub(crate) overlap: Option<f64>,
    /// Sum of the bits of all weights: equal weights have equal sums.
    pub(crate) digest: u64,
}

// ANCHOR: config
/// What all chapters start from.
pub(crate) fn config(stage: Stage, world_size: usize) -> Config {
    let mut config = Config { stage, world_size, seed: Some(7), ..Config::default() };
    config.timeout_s = 60.0;
    // No norm of the gradients is asked for, so what is sent is the model's and nothing else.
    config.training.non_finite = NonFinite::Propagate;
    config
}
// ANCHOR_END: config

/// What every rank runs, each on [`ROWS`] samples of its own in each step.
pub(crate) fn train(rank: &Rank) -> Result<Seen, Error> {
    train_on(rank, ROWS)
}

// ANCHOR: train
/// What every rank runs, each on samples of its own.
pub(crate) fn train_on(rank: &Rank, num_rows: usize) -> Result<Seen, Error> {
    let device = rank.device();
    let mut model = rank.shard(Net::init(WIDTH, NUM_BLOCKS, &device))?;
    let mut optimizer = rank.optimizer(AdamWConfig::new().init())?;
    let mut losses = Vec::new();
    let mut started = Instant::now();
    for step in 0..NUM_WARMUP + NUM_STEPS {
        if step == NUM_WARMUP {
            model.synchronize()?; // nothing is under way when counting begins
            rank.barrier()?;
            model.reset_stats();
            rank.traffic().reset();
            started = Instant::now();
        }
        let first = rank.rank() * num_rows;
        let (input, target) = samples(step, first..first + num_rows, &device);
        let output = model.forward(model.cast_input(input)); // in float32 the casts do nothing
        let loss = loss(model.cast_output(output), target);
        losses.push(loss.clone().into_scalar::<f32>().into());
        let gradients = model.backward(loss)?;
        optimizer.step(1e-3, &mut model, gradients)?;
    }
    model.synchronize()?;
    // ANCHOR_END: train
    let step_s = started.elapsed().as_secs_f64() / NUM_STEPS as f64;
    let (stats, sent) = (model.stats(), rank.traffic().total().sent_bytes / NUM_STEPS as u64);
    let sent_by_kind = [OpKind::AllGather, OpKind::ReduceScatter, OpKind::AllReduce]
        .map(|kind| rank.traffic().of(kind).sent_bytes / NUM_STEPS as u64);
    let optimizer = size_of_optimizer(rank, optimizer)?;
    let mut digest = 0_u64;
    model.each_parameter(|_, weights| {
        digest =
            weights.iter::<f32>().fold(digest, |digest, weight| digest.rotate_left(1) ^ u64::from(weight.to_bits()));
    })?;
    Ok(Seen {
        losses,
        parameters: stats.peak_parameter_bytes,
        gradients: stats.peak_gradient_bytes,
        optimizer,
        gathered: stats.peak_gathered_bytes,
        sent,
        sent_by_kind,
        step_s,
        exposed_s: stats.exposed().as_secs_f64() / NUM_STEPS as f64,
        overlap: stats.overlap(),
        digest,
    })
}

// ANCHOR: optimizer
/// Bytes that a rank's optimizer holds, found by dropping it: what all ranks give back, by rank.
fn size_of_optimizer(rank: &Rank, optimizer: ShardedOptimizer) -> Result<usize, Error> {
    rank.barrier()?;
    let before = ALLOCATOR.current_usage();
    rank.barrier()?;
    drop(optimizer);
    rank.barrier()?;
    let after = ALLOCATOR.current_usage();
    rank.barrier()?;
    Ok(before.saturating_sub(after) / rank.world_size())
}
// ANCHOR_END: optimizer

/// The loss of a step over the samples of all ranks.
pub(crate) fn mean_loss(ranks: &[Seen], step: usize) -> f64 {
    ranks.iter().map(|seen| seen.losses[step]).sum::<f64>() / ranks.len() as f64
}

/// Number of the last step.
pub(crate) const LAST: usize = NUM_WARMUP + NUM_STEPS - 1;
