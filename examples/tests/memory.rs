//! What a step holds at its peak is what the estimate says: counted at the allocator, for a whole process.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use burn::module::{Lora, Module};
use burn::nn::{Embedding as BurnEmbedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, SgdConfig};
use burn::tensor::{Device, Int, Tensor, TensorData};
use fsdp_burn::{
    Config, Dtype, Error, LaunchOptions, Link, MemoryEstimate, OptimizerKind, PrefetchConfig, Rank, Sharded, Stage,
    launch, launch_with, nn::Embedding, recompute,
};
use fsdp_examples::{Gpt, GptConfig, activations, packing_bytes};
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

const BATCH: usize = 4;
const STEPS: usize = 3;
const MODEL: GptConfig = GptConfig { layers: 6, width: 256, heads: 4, sequence: 64, vocabulary: 256, recompute: false };

/// The allocator counts for the whole process, so tests take turns.
fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// For ranks that share no memory: a link between them, which costs nothing.
fn apart() -> LaunchOptions {
    LaunchOptions { link: Some(Link { alpha_s: 0.0, beta_s_per_byte: 0.0 }), ..LaunchOptions::default() }
}

#[test]
fn a_step_holds_what_the_estimate_says_at_every_stage_and_world_size() {
    let _turn = alone();
    let plain = plain();
    for stage in Stage::ALL {
        for world_size in [1, 2, 4] {
            let config = Config { stage, world_size, timeout_s: 60.0, ..Config::default() };
            let before = settled();
            let outcomes = launch(&config, move |rank| sharded(&rank, MODEL, plain)).unwrap();
            let measured = (outcomes[0].peak - before) as f64;
            let [least, most] =
                [0, 1].map(|end| outcomes.iter().map(|outcome| outcome.predicted[end]).sum::<u64>() as f64);
            println!("{stage} on {world_size}: predicted {least:.3e} to {most:.3e} bytes, measured {measured:.3e}");
            assert!(
                measured > 0.95 * least && measured < 1.05 * most,
                "{stage} on {world_size}: {least} to {most} bytes predicted, {measured} measured"
            );
            if stage == Stage::Parameters && world_size > 1 {
                check_after_forward(&outcomes, plain, before);
                check_recomputation(&config, plain);
            }
        }
    }
}

/// With recomputation, a step is at its peak when the first block is the last to run again: all gradients are there, and on
/// each rank one block of activations, which may or may not coincide with those of the others.
fn check_recomputation(config: &Config, plain: Plain) {
    let model = GptConfig { recompute: true, ..MODEL };
    let before = settled();
    let outcomes = launch(config, move |rank| sharded(&rank, model.clone(), plain)).expect("recomputed training runs");
    let measured = (outcomes[0].peak - before) as f64;
    let [least, most] = [0, 1].map(|end| outcomes.iter().map(|outcome| outcome.recomputed[end]).sum::<u64>() as f64);
    println!("recomputed on {}: {least:.3e} to {most:.3e} bytes predicted, {measured:.3e} measured", config.world_size);
    assert!(
        measured > 0.95 * least && measured < 1.05 * most,
        "{least} to {most} bytes predicted, {measured} measured"
    );
}

/// At stage 3, what lives after forward, less activations, is the shards and the optimizer state, and a buffer for the next
/// blocks. It is never the whole model for each rank.
fn check_after_forward(outcomes: &[Outcome], plain: Plain, before: usize) {
    let world_size = outcomes.len() as u64;
    let live = (outcomes[0].after_forward - before) as u64 - world_size * plain.after_forward;
    let expected: u64 = outcomes.iter().map(|outcome| outcome.resident).sum();
    let reused: u64 = outcomes.iter().map(|outcome| outcome.gathered).sum();
    let tolerance = expected / 20;
    assert!(
        live + tolerance > expected && live < expected + reused + tolerance,
        "on {world_size}: {live} bytes live after forward, {expected} expected, and at most {reused} to be used again"
    );
}

/// Waits until the threads of the last run have given back their memory, and returns what is left.
fn settled() -> usize {
    let mut usage = ALLOCATOR.current_usage();
    for _ in 0..50 {
        std::thread::sleep(Duration::from_millis(20));
        let now = ALLOCATOR.current_usage();
        if now == usage {
            break;
        }
        usage = now;
    }
    usage
}

/// What one rank's plain step holds above parameters and optimizer state, in bytes: activations, temporaries of
/// backward, and the workspace of its kernels.
#[derive(Clone, Copy)]
struct Plain {
    peak: u64,
    after_forward: u64,
}

fn plain() -> Plain {
    let before = settled();
    let config = Config { world_size: 1, ..Config::default() };
    let outcome = launch(&config, move |rank| {
        let device = rank.device();
        let mut model = MODEL.init(&device);
        let mut optimizer = AdamWConfig::new().init();
        let states = before + 12 * model.num_params();
        let mut outcome = Plain { peak: 0, after_forward: 0 };
        for _ in 0..STEPS {
            ALLOCATOR.reset_peak_usage();
            let loss = loss(&model, &device);
            outcome.after_forward = (ALLOCATOR.current_usage().saturating_sub(states)) as u64;
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            outcome.peak = (ALLOCATOR.peak_usage().saturating_sub(states)) as u64;
            model = optimizer.step(1e-3, model, gradients);
        }
        Ok(outcome)
    });
    outcome.expect("plain training runs")[0]
}

struct Outcome {
    /// Bytes of this rank's part of the process at the peak: the least and the most.
    predicted: [u64; 2],
    /// The same with recomputation.
    recomputed: [u64; 2],
    peak: usize,
    after_forward: usize,
    /// Parameters and optimizer state.
    resident: u64,
    /// This rank's part of the spare buffer of a unit.
    gathered: u64,
}

fn sharded(rank: &Rank, model: GptConfig, plain: Plain) -> Result<Outcome, Error> {
    let device = rank.device();
    let mut model = rank.shard(model.init(&device))?;
    let mut optimizer = rank.optimizer(AdamWConfig::new().init())?;
    let (mut peak, mut after_forward) = (0, 0);
    for _ in 0..STEPS {
        rank.barrier()?;
        if rank.is_main() {
            ALLOCATOR.reset_peak_usage();
        }
        rank.barrier()?;
        let loss = loss(&model, &device);
        rank.barrier()?;
        after_forward = ALLOCATOR.current_usage();
        rank.barrier()?;
        let gradients = model.backward(loss)?;
        optimizer.step(1e-3, &mut model, gradients)?;
        rank.barrier()?;
        peak = ALLOCATOR.peak_usage();
    }
    // All ranks hold their activations at once. One at least is at the peak of its temporaries then; how many others are,
    // the scheduler decides.
    let temporaries = plain.peak - plain.after_forward;
    let least = plain.after_forward + temporaries / rank.world_size() as u64;
    let estimates = [least, plain.peak].map(|bytes| model.memory_estimate(OptimizerKind::Adam, Some(bytes.into())));
    let estimate = estimates[0];
    let without_activations =
        model.memory_estimate(OptimizerKind::Adam, Some(0.into())).peak_bytes().unwrap_or_default();
    let one_block = activations(&GptConfig { layers: 1, ..MODEL }, BATCH, 1).begin_bytes;
    Ok(Outcome {
        predicted: estimates.map(|estimate| estimate.peak_bytes().unwrap_or_default()),
        recomputed: [without_activations, without_activations + one_block],
        peak,
        after_forward,
        resident: estimate.parameter_bytes + estimate.optimizer_bytes,
        gathered: estimate.gathered_bytes,
    })
}

fn loss(model: &Gpt, device: &Device) -> Tensor<1> {
    loss_of(BATCH, model, device)
}

fn loss_of(batch: usize, model: &Gpt, device: &Device) -> Tensor<1> {
    let tokens = |factor: i64| {
        let values: Vec<i64> = (0..(batch * MODEL.sequence) as i64).map(|index| index * factor % 256).collect();
        Tensor::<2, Int>::from_data(TensorData::new(values, [batch, MODEL.sequence]), device)
    };
    model.loss(tokens(7), tokens(11))
}

/// Samples of a batch whose activations are far larger than the model.
const LARGE_BATCH: usize = 24;
const SMALL_WIDTH: usize = 64;

/// What a step of a small model of `layers` blocks holds at its peak.
fn peak_of_blocks(layers: usize, recompute: bool) -> usize {
    let before = settled();
    let config = Config { stage: Stage::Parameters, world_size: 1, timeout_s: 60.0, ..Config::default() };
    let peaks = launch(&config, move |rank| {
        let device = rank.device();
        let model = GptConfig { layers, width: SMALL_WIDTH, recompute, ..MODEL };
        let mut model = rank.shard(model.init(&device))?;
        let mut optimizer = rank.optimizer(AdamWConfig::new().init())?;
        let mut peak = 0;
        for _ in 0..STEPS {
            ALLOCATOR.reset_peak_usage();
            let gradients = model.backward(loss_of(LARGE_BATCH, &model, &device))?;
            optimizer.step(1e-3, &mut model, gradients)?;
            peak = ALLOCATOR.peak_usage();
        }
        Ok(peak)
    });
    peaks.expect("training runs")[0] - before
}

#[test]
fn recomputation_holds_the_activations_of_one_block_and_the_inputs_of_all() {
    let _turn = alone();
    const LAYERS: usize = 8;
    let one = peak_of_blocks(1, false) as f64;
    let input_bytes = 4 * LARGE_BATCH * MODEL.sequence * SMALL_WIDTH;
    // Parameters, gradients and the state of AdamW, of the matrices of a block.
    let block_bytes = 16 * 12 * SMALL_WIDTH * SMALL_WIDTH;
    let expected = one + ((LAYERS - 1) * (input_bytes + block_bytes)) as f64;
    let (recomputed, kept) = (peak_of_blocks(LAYERS, true) as f64, peak_of_blocks(LAYERS, false) as f64);
    println!("one block {one:.3e}, {LAYERS} recomputed {recomputed:.3e} ({expected:.3e} expected), kept {kept:.3e}");
    assert!(recomputed < 1.1 * expected, "{recomputed} bytes of {LAYERS} blocks, {expected} expected");
    assert!(kept > 2.0 * recomputed, "{kept} bytes without recomputation, {recomputed} with");
}

/// What two ranks keep whatever the model is: packed operands of matrix products, thread pools.
fn workspace_bytes() -> f64 {
    2.0 * packing_bytes() as f64 + 1e6
}

/// Parameters, with the float32 ones beside them where they are rounded, and optimizer state.
#[test]
fn between_steps_a_rank_holds_what_the_estimate_says_in_half_precision_and_where_adapters_alone_are_trained() {
    let _turn = alone();
    for stage in Stage::ALL {
        for (parameters, is_adapted) in [(Dtype::Bf16, false), (Dtype::F32, true), (Dtype::Bf16, true)] {
            let prefetch = PrefetchConfig { forward: 0, backward: 0, max_bytes: None };
            let mut config = Config { stage, world_size: 2, timeout_s: 60.0, prefetch, ..Config::default() };
            config.precision.parameters = parameters;
            let before = settled();
            let outcomes = launch(&config, move |rank| {
                let device = rank.device();
                let model = GptConfig { layers: 2, ..MODEL }.init(&device);
                let model = if is_adapted { model.apply_lora(Lora::new(4, 8.0)) } else { model };
                let mut model = rank.shard(model)?;
                let mut optimizer = rank.optimizer(AdamWConfig::new().init())?;
                for _ in 0..2 {
                    let gradients = model.backward(loss_of(1, &model, &device))?;
                    optimizer.step(1e-3, &mut model, gradients)?;
                }
                model.synchronize()?;
                rank.barrier()?;
                let held = ALLOCATOR.current_usage();
                rank.barrier()?;
                let estimate = model.memory_estimate(OptimizerKind::Adam, None);
                Ok((held, estimate))
            });
            let outcomes = outcomes.expect("training runs");
            let held = (outcomes[0].0 - before) as f64;
            let sum =
                |of: fn(&MemoryEstimate) -> u64| outcomes.iter().map(|(_, estimate)| of(estimate)).sum::<u64>() as f64;
            let expected = sum(|estimate| estimate.parameter_bytes + estimate.optimizer_bytes);
            // The buffers of gathers are kept for the next ones.
            let reused = sum(|estimate| estimate.gathered_bytes);
            let what = format!("{stage} in {parameters}, adapted: {is_adapted}");
            println!("{what}: {held:.3e} bytes held, {expected:.3e} expected, at most {reused:.3e} to be used again");
            assert!(held > 0.95 * expected && held < 1.05 * expected + reused + workspace_bytes(), "{what}");
            if is_adapted && parameters == Dtype::F32 {
                // Adapters are a small part of the model, and so are their gradients and their state.
                let trained = sum(|estimate| estimate.gradient_bytes + estimate.optimizer_bytes);
                assert!(trained < 0.25 * sum(|estimate| estimate.parameter_bytes), "{what}: {trained}");
            }
        }
    }
}

const NUM_TABLES: usize = 8;
/// Just too small for a gathered table to be kept for the next gather.
const TABLE: [usize; 2] = [1000, 256];
const TABLE_BYTES: usize = 4 * TABLE[0] * TABLE[1];

/// Gives a type with tables of one kind, each a unit, and a sum over rows of all.
macro_rules! tables {
    ($($name:ident: $embedding:ty;)+) => {$(
        #[derive(Module, Debug, Sharded)]
        struct $name {
            #[shard(units)]
            tables: Vec<$embedding>,
        }

        impl $name {
            fn loss(&self, tokens: Tensor<2, Int>) -> Tensor<1> {
                let rows = self.tables.iter().map(|table| table.forward(tokens.clone()));
                rows.reduce(|sum, rows| sum + rows.powi_scalar(2)).unwrap().powi_scalar(2).sum()
            }
        }
    )+};
}
tables! {
    BurnTables: BurnEmbedding;
    OurTables: Embedding;
}

/// Bytes that a forward at stage 3 leaves alive, above what lived before.
macro_rules! held {
    ($tables:ident, $options:expr) => {{
        // Without prefetch, so that a step leaves none for the next forward.
        let prefetch = PrefetchConfig { forward: 0, backward: 0, max_bytes: None };
        let config = Config { stage: Stage::Parameters, world_size: 2, timeout_s: 60.0, prefetch, ..Config::default() };
        let outcomes = launch_with(&config, $options, |rank| {
            let device = rank.device();
            let table = || EmbeddingConfig::new(TABLE[0], TABLE[1]).init(&device).into();
            let mut model = rank.shard($tables { tables: (0..NUM_TABLES).map(|_| table()).collect() })?;
            let mut optimizer = rank.optimizer(SgdConfig::new().init())?;
            let mut outcome = 0;
            for _ in 0..STEPS {
                rank.barrier()?;
                let before = ALLOCATOR.current_usage();
                rank.barrier()?;
                let loss = model.loss(Tensor::from_ints([[3, 1, 4, 1, 5]], &device));
                rank.barrier()?;
                outcome = ALLOCATOR.current_usage().saturating_sub(before);
                rank.barrier()?;
                let gradients = model.backward(loss)?;
                optimizer.step(0.1, &mut model, gradients)?;
            }
            Ok(outcome)
        });
        outcomes.expect("training runs")[0]
    }};
}

#[test]
fn after_forward_tables_of_burns_embedding_are_held_and_those_of_this_project_are_not() {
    let _turn = alone();
    let [burn, ours] = [held!(BurnTables, apart()), held!(OurTables, apart())];
    println!("after forward: {burn} bytes with Burn's embedding, {ours} with this project's");
    assert!(burn > NUM_TABLES * TABLE_BYTES, "{burn}");
    // The last table stays through the turn to backward.
    assert!(ours < 2 * TABLE_BYTES, "{ours}");
}

#[test]
fn what_ranks_that_share_memory_gather_takes_none_of_its_own() {
    let _turn = alone();
    let [burn, ours] = [held!(BurnTables, LaunchOptions::default()), held!(OurTables, LaunchOptions::default())];
    println!("after forward: {burn} bytes with Burn's embedding, {ours} with this project's");
    assert!(burn < TABLE_BYTES && ours < TABLE_BYTES, "{burn} and {ours} beside blocks, a table has {TABLE_BYTES}");
}

/// Gathered units and gradients of more than a megabyte, whose buffers are used again, and smaller ones.
const GROWING: GptConfig =
    GptConfig { layers: 2, width: 64, heads: 4, sequence: 8, vocabulary: 4352, recompute: false };

#[test]
fn a_process_holds_no_more_after_a_hundred_steps() {
    let _turn = alone();
    for stage in Stage::ALL {
        let config = Config { stage, world_size: 2, timeout_s: 60.0, ..Config::default() };
        let held = launch(&config, |rank| {
            let device = rank.device();
            let mut model = rank.shard(GROWING.init(&device))?;
            let mut optimizer = rank.optimizer(AdamWConfig::new().init())?;
            let mut held = Vec::new();
            for step in 1..=110 {
                let tokens = Tensor::<2, Int>::from_ints([[1, 2, 3, 4, 5, 6, 7, step]], &device);
                let gradients = model.backward(model.loss(tokens.clone(), tokens))?;
                optimizer.step(1e-3, &mut model, gradients)?;
                if step == 10 || step == 110 {
                    model.synchronize()?;
                    rank.barrier()?;
                    held.push(ALLOCATOR.current_usage());
                    rank.barrier()?;
                }
            }
            Ok(held)
        });
        let held = held.expect("training runs").swap_remove(0);
        println!("{stage}: {} bytes after 10 steps, {} after 110", held[0], held[1]);
        assert!(held[1] < held[0] + held[0] / 100, "{stage}: {held:?}");
    }
}

const NUM_FROZEN: usize = 6;
/// Just too small for a gathered matrix to be kept for the next gather.
const FROZEN_WIDTH: usize = 500;
const FROZEN_BYTES: usize = 4 * FROZEN_WIDTH * FROZEN_WIDTH;

/// A layer that is trained, with frozen ones in front of it and behind it.
#[derive(Module, Debug, Sharded)]
struct PartlyFrozen {
    #[shard(units)]
    front: Vec<Linear>,
    #[shard(unit)]
    trained: Linear,
    #[shard(units)]
    behind: Vec<Linear>,
}

impl PartlyFrozen {
    fn init(device: &Device) -> Self {
        let linear = || LinearConfig::new(FROZEN_WIDTH, FROZEN_WIDTH).with_bias(false).init(device);
        let frozen = || (0..NUM_FROZEN).map(|_| linear().no_grad()).collect();
        Self { front: frozen(), trained: linear(), behind: frozen() }
    }

    fn loss(&self, x: Tensor<3>, again: bool) -> Tensor<1> {
        let through = |layers: &[Linear], x: Tensor<3>| {
            layers.iter().fold(x, |x, layer| match again {
                true => recompute(layer, x, |layer, x| layer.forward(x)),
                false => layer.forward(x),
            })
        };
        through(&self.behind, self.trained.forward(through(&self.front, x))).mean()
    }
}

/// What the plan says is held, in bytes, and what a forward leaves alive, above what lived before.
fn held_of_frozen(again: bool) -> (usize, usize) {
    let prefetch = PrefetchConfig { forward: 0, backward: 0, max_bytes: None };
    let config = Config { stage: Stage::Parameters, world_size: 2, timeout_s: 60.0, prefetch, ..Config::default() };
    let outcomes = launch_with(&config, apart(), move |rank| {
        let device = rank.device();
        let mut model = rank.shard(PartlyFrozen::init(&device))?;
        let mut optimizer = rank.optimizer(SgdConfig::new().init())?;
        let mut held = 0;
        for _ in 0..STEPS {
            rank.barrier()?;
            let before = ALLOCATOR.current_usage();
            rank.barrier()?;
            let loss = model.loss(Tensor::ones([1, 2, FROZEN_WIDTH], &device), again);
            rank.barrier()?;
            held = ALLOCATOR.current_usage().saturating_sub(before);
            rank.barrier()?;
            let gradients = model.backward(loss)?;
            optimizer.step(0.1, &mut model, gradients)?;
        }
        let plan = model.plan();
        let planned = (0..plan.units().len()).map(|unit| 4 * plan.held_frozen_len(unit)).sum::<usize>();
        Ok((planned, held))
    });
    outcomes.expect("training runs")[0]
}

#[test]
fn what_is_frozen_behind_something_trained_is_held_as_the_plan_says_and_not_where_it_is_recomputed() {
    let _turn = alone();
    let (planned, held) = held_of_frozen(false);
    let (_, recomputed) = held_of_frozen(true);
    println!("after forward: {planned} bytes planned, {held} held, {recomputed} where it is recomputed");
    assert_eq!(planned, NUM_FROZEN * FROZEN_BYTES);
    // The last layer of forward stays for backward in any case.
    assert!(held >= planned && held < planned + 2 * FROZEN_BYTES, "{held} of {planned}");
    assert!(recomputed < 2 * FROZEN_BYTES, "{recomputed}");
}
