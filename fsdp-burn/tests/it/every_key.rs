//! Every key of the configuration does something: one case for each, which shows what.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Duration;

use fsdp_burn::{Config, Error, OpKind, OptimizerKind, StepOutcome, launch};
use fsdp_core::config_keys;

use crate::common::models::{Gpt, Mlp, Normed, Trial};
use crate::common::run::{Optimizer, Weights, plain_weights, seeded, share, weights};

/// A key, two configurations that differ in it alone, and what is different with them.
struct Case {
    key: &'static str,
    /// TOML in front of both.
    given: &'static str,
    one: &'static str,
    other: &'static str,
    shows: fn(&Config) -> String,
}

/// A new key needs a line here. `shows` runs something under a configuration and describes what it sees.
const CASES: &[Case] = &[
    case("stage", "world_size = 2", ["stage = 0", "stage = 3"], local_parameters),
    case("world_size", "", ["world_size = 1", "world_size = 2"], local_parameters),
    case("launcher", "", ["launcher = \"threads\"", "launcher = \"srun\""], started),
    case("rendezvous_port", "", ["rendezvous_port = 4000", "rendezvous_port = 4001"], meeting),
    case("device", "", ["device = \"flex\"", "device = \"cuda:999\""], device),
    case("collectives", "device = \"cpu\"", ["", "collectives = \"device\""], exchanged),
    case("mesh", "world_size = 4", ["", "mesh = { replicate = 2, shard = 2 }"], local_parameters),
    case("reshard_after_forward", "world_size = 4", ["", "reshard_after_forward = 2"], gathered_bytes),
    case("timeout_s", "world_size = 2", ["timeout_s = 0.1", "timeout_s = 30.0"], patience),
    case("threads_per_rank", "", ["threads_per_rank = 1", "threads_per_rank = 3"], threads),
    case("seed", "", ["seed = 1", "seed = 2"], initial_weights),
    case("prefetch.forward", "world_size = 2", ["prefetch.forward = 0", "prefetch.forward = 2"], gathered_in_forward),
    case(
        "prefetch.backward",
        "world_size = 2",
        ["prefetch.backward = 0", "prefetch.backward = 2"],
        gathered_in_backward,
    ),
    case("prefetch.max_bytes", "world_size = 2", ["", "prefetch.max_bytes = 1"], gathered_in_forward),
    case("precision.parameters", "", ["", "precision.parameters = \"bf16\""], element_types),
    case("precision.reduce", "world_size = 2", ["", "precision.reduce = \"bf16\""], reduced_bytes),
    case("precision.output", "", ["", "precision.output = \"bf16\""], element_types),
    case("precision.loss_scale", "", ["", "precision.loss_scale = 128.0"], loss_scale),
    case("training.gradient_accumulation", "", ["", "training.gradient_accumulation = 3"], outcomes),
    case("training.accumulate", TWO_BATCHES, ["", "training.accumulate = \"local\""], reductions),
    case("training.gradient_reduction", "world_size = 2", ["", "training.gradient_reduction = \"sum\""], final_weights),
    case("training.gradient_clip_norm", "", ["", "training.gradient_clip_norm = 0.01"], final_weights),
    case("training.gradient_norm_order", CLIPPED, ["", "training.gradient_norm_order = \"inf\""], final_weights),
    case("training.gradient_clip_value", "", ["", "training.gradient_clip_value = 0.001"], final_weights),
    case("training.non_finite", "", ["", "training.non_finite = \"skip\""], overflow),
    case("training.non_finite", "", ["", "training.non_finite = \"propagate\""], overflow),
    case("training.buffers", "world_size = 2", ["", "training.buffers = \"rank 0\""], statistics),
    case("training.buffers", "world_size = 2", ["", "training.buffers = \"local\""], statistics),
    case("offload.optimizer", ON_DISK, ["", "offload.optimizer = \"nvme\""], moved_bytes),
    case("offload.gradients", ON_DISK, ["", "offload.gradients = \"nvme\""], moved_bytes),
    case("offload.parameters", ON_DISK, ["", "offload.parameters = \"nvme\""], moved_bytes),
    case(
        "offload.nvme_path",
        "world_size = 2\noffload.optimizer = \"nvme\"",
        ["offload.nvme_path = \"one\"", "offload.nvme_path = \"other\""],
        files,
    ),
    case("offload.nvme_buffer_bytes", OPTIMIZER_ON_DISK, ["", "offload.nvme_buffer_bytes = 2_097_152"], for_the_disk),
    // Of 16 MiB, as many whole blocks as fit.
    case("offload.nvme_block_bytes", OPTIMIZER_ON_DISK, ["", "offload.nvme_block_bytes = 3_145_728"], for_the_disk),
    case("offload.nvme_checksums", PARAMETERS_ON_DISK, ["", "offload.nvme_checksums = false"], damage),
];

const ON_DISK: &str = "world_size = 2\noffload.nvme_path = \"moved\"";
const OPTIMIZER_ON_DISK: &str = "world_size = 2\noffload.nvme_path = \"sizes\"\noffload.optimizer = \"nvme\"";
const PARAMETERS_ON_DISK: &str = "world_size = 2\noffload.nvme_path = \"damage\"\noffload.parameters = \"nvme\"";

const TWO_BATCHES: &str = "world_size = 2\ntraining.gradient_accumulation = 2";
const CLIPPED: &str = "training.gradient_clip_norm = 0.01";

const fn case(
    key: &'static str,
    given: &'static str,
    [one, other]: [&'static str; 2],
    shows: fn(&Config) -> String,
) -> Case {
    Case { key, given, one, other, shows }
}

#[test]
fn every_key_of_the_configuration_has_an_effect() {
    for key in config_keys() {
        let path = key.path();
        assert!(CASES.iter().any(|case| case.key == path), "`{path}` needs a case that shows what it does");
    }
    for Case { key, given, one, other, shows } in CASES {
        let read = |own: &str| Config::from_toml(&format!("{given}\n{own}\n"), key).unwrap();
        let (one, other) = (read(one), read(other));
        assert_ne!(one, other, "`{key}`: both configurations are the same");
        let defaults = Config::default().to_toml();
        let differs = |(a, b): &(&str, &str)| a != b;
        let (a, b) = (one.to_toml(), other.to_toml());
        let changed: Vec<_> = a.lines().zip(b.lines()).filter(differs).collect();
        assert_eq!((changed.len(), a.lines().count()), (1, defaults.lines().count()), "`{key}`: {changed:?}");
        let (one, again, other) = (shows(&one), shows(&one), shows(&other));
        assert_eq!(one, again, "`{key}`: what it shows differs from run to run");
        assert_ne!(one, other, "`{key}` has no effect");
    }
}

fn on_ranks<T, F>(config: &Config, program: F) -> String
where
    T: std::fmt::Debug + Send + 'static,
    F: Fn(fsdp_burn::Rank) -> Result<T, Error> + Send + Sync + 'static,
{
    format!("{:?}", launch(config, program).map_err(|error| error.to_string()))
}

fn start<M: Trial>(rank: &fsdp_burn::Rank) -> Result<fsdp_burn::ShardedModel<M>, Error> {
    let device = rank.device();
    let _turn = rank.is_main().then(|| seeded(&device, 5));
    rank.shard(M::build(&device))
}

fn local_parameters(config: &Config) -> String {
    on_ranks(config, |rank| Ok(start::<Mlp>(&rank)?.num_local_params()))
}

/// Whether this process is one that the launcher has started.
fn started(config: &Config) -> String {
    on_ranks(config, |rank| Ok(rank.world_size()))
}

/// What a rank computes on, or why not.
fn device(config: &Config) -> String {
    on_ranks(config, |rank| Ok(format!("{:?}", rank.device())))
}

/// Which operations a rank has taken part in on its way through host memory, if the program is built for devices.
fn exchanged(config: &Config) -> String {
    if !cfg!(feature = "cpu") {
        return config.collectives.to_string();
    }
    on_ranks(config, |rank| {
        trained(&rank, 1)?;
        Ok(rank.traffic().of(OpKind::AllReduce).num_ops)
    })
}

/// Where the processes of a run meet.
fn meeting(config: &Config) -> String {
    let set = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "host"), ("MASTER_PORT", "29500")];
    let variables = set.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    config.started_in(&variables).unwrap().to_string()
}

/// Whether a rank waits for another that is late by half a second.
fn patience(config: &Config) -> String {
    let waited = launch(config, |rank| {
        if !rank.is_main() {
            std::thread::sleep(Duration::from_millis(500));
        }
        rank.barrier()
    });
    format!("in time: {}", waited.is_ok())
}

fn threads(config: &Config) -> String {
    on_ranks(config, |_| Ok(rayon::current_num_threads()))
}

/// Not by way of [`start`], which has a seed of its own.
fn initial_weights(config: &Config) -> String {
    let device = burn::tensor::Device::flex().autodiff();
    // Nobody else draws from the device meanwhile; launching seeds it.
    let _turn = seeded(&device, 0);
    on_ranks(config, |rank| weights(&rank.shard(Mlp::build(&rank.device()))?))
}

fn gathered_in_forward(config: &Config) -> String {
    on_ranks(config, |rank| gathered(&rank).map(|[forward, _]| forward))
}

fn gathered_in_backward(config: &Config) -> String {
    on_ranks(config, |rank| gathered(&rank).map(|[_, backward]| backward))
}

/// The most bytes of gathered units, in forward and in backward, once the order of units is known.
fn gathered(rank: &fsdp_burn::Rank) -> Result<[usize; 2], Error> {
    let mut model = start::<Gpt>(rank)?;
    let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
    let mut peaks = [0; 2];
    for step in 0..3 {
        model.reset_stats();
        let loss = model.loss(step, 0..4, &rank.device());
        peaks[0] = model.stats().peak_gathered_bytes;
        model.reset_stats();
        let gradients = model.backward(loss)?;
        peaks[1] = model.stats().peak_gathered_bytes;
        optim.step(0.01, &mut model, gradients)?;
    }
    Ok(peaks)
}

fn outcomes(config: &Config) -> String {
    on_ranks(config, |rank| trained(&rank, 3).map(|(outcomes, _)| outcomes))
}

fn final_weights(config: &Config) -> String {
    on_ranks(config, |rank| trained(&rank, 2).map(|(_, weights)| weights))
}

/// What each step did, and the weights after them.
fn trained(rank: &fsdp_burn::Rank, num_batches: usize) -> Result<(Vec<StepOutcome>, Weights), Error> {
    let mut model = start::<Mlp>(rank)?;
    let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
    let mut outcomes = Vec::new();
    for batch in 0..num_batches {
        let gradients = model.backward(model.loss(batch, share(rank), &rank.device()))?;
        outcomes.push(optim.step(0.05, &mut model, gradients)?);
    }
    Ok((outcomes, weights(&model)?))
}

fn reductions(config: &Config) -> String {
    on_ranks(config, |rank| {
        trained(&rank, 4)?;
        Ok(rank.traffic().of(OpKind::ReduceScatter).num_ops)
    })
}

fn gathered_bytes(config: &Config) -> String {
    on_ranks(config, |rank| {
        let mut model = start::<Mlp>(&rank)?;
        let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
        for batch in 0..2 {
            let gradients = model.backward(model.loss(batch, share(&rank), &rank.device()))?;
            optim.step(0.05, &mut model, gradients)?;
        }
        model.synchronize()?;
        Ok(rank.traffic().of(OpKind::AllGather).sent_bytes)
    })
}

fn reduced_bytes(config: &Config) -> String {
    on_ranks(config, |rank| {
        trained(&rank, 2)?;
        Ok(rank.traffic().of(OpKind::ReduceScatter).sent_bytes)
    })
}

/// Of what a layer computes with, and of what a loss gets.
fn element_types(config: &Config) -> String {
    on_ranks(config, |rank| {
        let model = start::<Mlp>(&rank)?;
        let weight = model.input.weight.val();
        Ok((weight.dtype(), model.cast_output(weight).dtype()))
    })
}

/// A loss that does not overflow by itself does with a scale.
fn loss_scale(config: &Config) -> String {
    on_ranks(config, |rank| {
        let mut model = start::<Mlp>(&rank)?;
        let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
        let loss = model.loss(0, share(&rank), &rank.device());
        let huge = loss.clone() * 1e38 / loss.into_scalar::<f32>();
        let gradients = model.backward(huge)?;
        Ok(format!("{:?}", optim.step(0.05, &mut model, gradients).map_err(|error| error.to_string())))
    })
}

fn overflow(config: &Config) -> String {
    on_ranks(config, |rank| {
        let mut model = start::<Mlp>(&rank)?;
        let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
        let loss = model.loss(0, share(&rank), &rank.device()) * f32::INFINITY;
        let gradients = model.backward(loss)?;
        Ok(format!("{:?}", optim.step(0.05, &mut model, gradients).map_err(|error| error.to_string())))
    })
}

fn statistics(config: &Config) -> String {
    on_ranks(config, |rank| {
        let mut model = start::<Normed>(&rank)?;
        let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
        let gradients = model.backward(model.loss(0, share(&rank), &rank.device()))?;
        optim.step(0.05, &mut model, gradients)?;
        let of_last_rank = plain_weights(&model.valid()).into_iter().filter(|(path, _)| path.contains("running_"));
        Ok((!rank.is_main()).then(|| of_last_rank.collect::<Vec<_>>()))
    })
}

/// The configuration with its directory in one of this process's own.
fn in_scratch(config: &Config) -> (Config, PathBuf) {
    let scratch = std::env::temp_dir().join(format!("fsdp-burn-every-key-{}", std::process::id()));
    let mut config = config.clone();
    let path = config.offload.nvme_path.take().unwrap_or_default();
    config.offload.nvme_path = Some(scratch.join(path).to_str().unwrap().to_owned());
    (config, scratch)
}

/// What a step moves to and from the disk.
fn moved_bytes(config: &Config) -> String {
    on_ranks(&in_scratch(config).0, |rank| {
        let mut model = start::<Mlp>(&rank)?;
        let mut optim = rank.optimizer(Optimizer::AdamW.build())?;
        for step in 0..2 {
            let gradients = model.backward(model.loss(step, share(&rank), &rank.device()))?;
            optim.step(Optimizer::AdamW.lr(), &mut model, gradients)?;
        }
        model.synchronize()?;
        Ok(rank.tier_stats().map(|stats| (stats.read_bytes, stats.written_bytes)))
    })
}

/// Which files a run has on the disk.
fn files(config: &Config) -> String {
    let (config, scratch) = in_scratch(config);
    on_ranks(&config, move |rank| {
        rank.barrier()?;
        let held = ["one", "other"].map(|dir| scratch.join(dir).join(format!("rank-{}.tier", rank.rank())).exists());
        rank.barrier()?;
        Ok(held)
    })
}

/// Memory for what passes to and from the disk.
fn for_the_disk(config: &Config) -> String {
    on_ranks(&in_scratch(config).0, |rank| {
        Ok(start::<Mlp>(&rank)?.memory_estimate(OptimizerKind::Adam, None).tier_bytes)
    })
}

/// Whether a bit that changes on the disk is noticed.
fn damage(config: &Config) -> String {
    let (config, scratch) = in_scratch(config);
    let read = launch(&config, move |rank| {
        let model = start::<Mlp>(&rank)?;
        let file = scratch.join("damage").join(format!("rank-{}.tier", rank.rank()));
        let file = File::options().read(true).write(true).open(file).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, 0).unwrap();
        file.write_all_at(&[byte[0] ^ 1], 0).unwrap();
        file.sync_all().unwrap();
        weights(&model).map(drop)
    });
    format!("read: {}", read.is_ok())
}
