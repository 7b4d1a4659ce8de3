//! What the chapter on misconceptions measures in training: bytes that ranks send, losses to the last bit, gathered units, and a
//! checkpoint read by another world.

use std::collections::BTreeMap;
use std::path::PathBuf;

use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Tensor, TensorData, activation::tanh};
use fsdp_burn::{
    Accumulate, Config, Error, NonFinite, PrefetchConfig, Rank, SaveOptions, Sharded, ShardedModel, Stage,
    TrainingConfig, launch,
};

use crate::output::assert_shown;

const WIDTH: usize = 32;
const NUM_UNITS: usize = 8;

/// Eight equal units, each a linear layer.
#[derive(Module, Debug, Sharded)]
struct Stack {
    #[shard(units)]
    layers: Vec<Linear>,
}

/// Values that depend on nothing but where they are.
fn values(len: usize, seed: usize) -> Vec<f32> {
    (0..len).map(|index| ((index * 37 + seed * 101) as f32).sin() / 5.0).collect()
}

impl Stack {
    fn build(device: &Device) -> Self {
        let tensor =
            |seed| Tensor::<2>::from_data(TensorData::new(values(WIDTH * WIDTH, seed), [WIDTH, WIDTH]), device);
        let layer = |seed| Linear { weight: Param::from_tensor(tensor(seed)), bias: None };
        Self { layers: (0..NUM_UNITS).map(layer).collect() }
    }

    fn loss(&self, rank: usize, device: &Device) -> Tensor<1> {
        let samples = TensorData::new(values(4 * WIDTH, 50 + rank), [4, WIDTH]);
        let output = self
            .layers
            .iter()
            .fold(Tensor::<2>::from_data(samples, device), |x, layer| x.clone() + tanh(layer.forward(x)));
        output.powf_scalar(2.0).mean()
    }
}

/// What a run of a few steps shows on rank 0.
struct Seen {
    /// Losses of rank 0.
    losses: Vec<f32>,
    /// Bytes that the rank sent in the last step.
    sent_bytes: u64,
    /// The most that was gathered, and of whole and reduced gradients.
    gathered_bytes: usize,
    gradient_bytes: usize,
}

const NUM_STEPS: usize = 4;

fn train(rank: &Rank, model: &mut ShardedModel<Stack>) -> Result<Seen, Error> {
    let device = rank.device();
    let mut optimizer = rank.optimizer(AdamWConfig::new().init())?;
    let mut losses = Vec::new();
    for step in 0..NUM_STEPS {
        if step == NUM_STEPS - 1 {
            model.synchronize()?;
            rank.traffic().reset();
        }
        for _ in 0..rank.config().training.gradient_accumulation {
            let loss = model.loss(rank.rank(), &device);
            losses.push(loss.clone().into_scalar::<f32>());
            let gradients = model.backward(loss)?;
            optimizer.step(1e-3, model, gradients)?;
        }
    }
    model.synchronize()?;
    let stats = model.stats();
    Ok(Seen {
        losses,
        sent_bytes: rank.traffic().total().sent_bytes,
        gathered_bytes: stats.peak_gathered_bytes,
        gradient_bytes: stats.peak_gradient_bytes,
    })
}

fn run(config: Config) -> Seen {
    // Nobody asks for the gradients' norm, which would be one message more.
    let training = TrainingConfig { non_finite: NonFinite::Propagate, ..config.training.clone() };
    let seen = launch(&Config { training, ..config }, |rank| {
        let mut model = rank.shard(Stack::build(&rank.device()))?;
        train(&rank, &mut model)
    });
    seen.unwrap().swap_remove(0)
}

fn config(stage: Stage, world_size: usize) -> Config {
    Config { stage, world_size, timeout_s: 60.0, ..Config::default() }
}

const NUM_BYTES: u64 = (4 * WIDTH * WIDTH * NUM_UNITS) as u64;

#[test]
fn stages_differ_in_what_they_send_and_in_no_bit_of_the_loss() {
    let seen = Stage::ALL.map(|stage| run(config(stage, 4)));
    let mut traffic = format!("{:<10}{:>14}{:>14}{:>14}\n", "stage", "bytes sent", "passes", "of stage 0");
    let mut losses = format!("{:<10}{:>12}{:>14}{:>14}\n", "stage", "step 0", "step 3", "its bits");
    for (stage, of) in Stage::ALL.into_iter().zip(&seen) {
        // One pass is P(N-1)/N.
        let passes = of.sent_bytes as f64 / (NUM_BYTES as f64 * 3.0 / 4.0);
        let ratio = of.sent_bytes as f64 / seen[0].sent_bytes as f64;
        traffic += &format!("{:<10}{:>14}{passes:>14.3}{ratio:>14.3}\n", stage.number(), of.sent_bytes);
        let last = of.losses[NUM_STEPS - 1];
        let bits = format!("{:08x}", last.to_bits());
        losses += &format!("{:<10}{:>12.6}{last:>14.6}{bits:>14}\n", stage.number(), of.losses[0]);
        assert_eq!(of.losses, seen[0].losses, "{stage}");
    }
    // Three passes over eight units, but for the second gathers of the last and of the first one.
    assert_eq!(seen[3].sent_bytes * 16, seen[0].sent_bytes * 22);
    assert_shown("listings/output/guides/measured-traffic.txt", &traffic);
    assert_shown("listings/output/guides/measured-losses.txt", &losses);
}

#[test]
fn prefetching_holds_a_unit_more_for_each_step_of_depth() {
    let mut text = format!("{:<12}{:>18}{:>16}\n", "prefetch", "gathered at once", "of the model");
    for depth in [0, 1, 2, 3] {
        let prefetch = PrefetchConfig { forward: depth, backward: depth, ..PrefetchConfig::default() };
        let seen = run(Config { prefetch, ..config(Stage::Parameters, 2) });
        let share = 100.0 * seen.gathered_bytes as f64 / NUM_BYTES as f64;
        assert_eq!(seen.gathered_bytes as u64, (1 + depth as u64) * NUM_BYTES / NUM_UNITS as u64);
        text += &format!("{depth:<12}{:>16} B{:>16}\n", seen.gathered_bytes, format!("{share:.1}%"));
    }
    assert_shown("listings/output/guides/measured-prefetch.txt", &text);
}

#[test]
fn accumulation_gathers_for_every_micro_batch() {
    let mut text = format!("{:<26}{:>14}{:>10}{:>18}\n", "stage 3, 4 ranks", "bytes sent", "passes", "gradients held");
    for (name, num_batches, accumulate) in [
        ("1 micro-batch", 1, Accumulate::Reduced),
        ("4, each reduced", 4, Accumulate::Reduced),
        ("4, reduced once", 4, Accumulate::Local),
    ] {
        let training = TrainingConfig { gradient_accumulation: num_batches, accumulate, ..TrainingConfig::default() };
        let seen = run(Config { training, ..config(Stage::Parameters, 4) });
        let passes = seen.sent_bytes as f64 / (NUM_BYTES as f64 * 3.0 / 4.0);
        text += &format!("{name:<26}{:>14}{passes:>10.2}{:>16} B\n", seen.sent_bytes, seen.gradient_bytes);
    }
    assert_shown("listings/output/guides/measured-accumulation.txt", &text);
}

/// A folder that is removed in the end.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// All parameters of the model, as bits.
fn bits(model: &ShardedModel<Stack>) -> Result<BTreeMap<String, Vec<u32>>, Error> {
    let mut all = BTreeMap::new();
    model.each_parameter(|path, data| {
        let values = data.try_to_vec::<f32>().unwrap();
        all.insert(path.to_owned(), values.into_iter().map(f32::to_bits).collect());
    })?;
    Ok(all)
}

#[test]
fn a_checkpoint_of_two_ranks_is_read_by_any_number_to_the_last_bit() {
    let scratch = Scratch(std::env::temp_dir().join(format!("fsdp-book-worlds-{}", std::process::id())));
    let root = scratch.0.clone();
    let saved = launch(&config(Stage::Parameters, 2), {
        let root = root.clone();
        move |rank| {
            let mut model = rank.shard(Stack::build(&rank.device()))?;
            let mut optimizer = rank.optimizer(AdamWConfig::new().init())?;
            let loss = model.loss(rank.rank(), &rank.device());
            let gradients = model.backward(loss)?;
            optimizer.step(1e-3, &mut model, gradients)?;
            model.save(&root, &optimizer, BTreeMap::new(), &SaveOptions::default())?;
            bits(&model)
        }
    });
    let saved = saved.unwrap().swap_remove(0);
    let mut text = format!("{:<26}{:>12}{:>22}\n", "saved on 2 ranks, stage 3", "parameters", "differ in a bit");
    for (stage, world_size) in
        [(Stage::Parameters, 2), (Stage::Parameters, 3), (Stage::OptimizerState, 4), (Stage::Ddp, 1)]
    {
        let root = root.clone();
        let loaded = launch(&config(stage, world_size), move |rank| {
            let mut model = rank.shard(Stack::build(&rank.device()))?;
            let mut optimizer = rank.optimizer(AdamWConfig::new().init())?;
            model.load(&root, &mut optimizer)?;
            bits(&model)
        });
        let loaded = loaded.unwrap().swap_remove(0);
        let differ = |path: &String| saved[path].iter().zip(&loaded[path]).filter(|(one, other)| one != other).count();
        let num_differ: usize = saved.keys().map(differ).sum();
        let num_values: usize = loaded.values().map(Vec::len).sum();
        assert_eq!(num_differ, 0);
        let name = format!("loaded on {world_size}, stage {}", stage.number());
        text += &format!("{name:<26}{num_values:>12}{num_differ:>22}\n");
    }
    assert_shown("listings/output/guides/measured-worlds.txt", &text);
}
