//! What a model, a mesh or a setting does among threads it does among processes: losses, weights and running statistics of
//! every rank have the same bits.

use std::fs;
use std::time::Duration;

use fsdp_burn::{Accumulate, Axis, Buffers, Config, Dtype, Error, Mesh, Rank, Stage, StepOutcome, launch};

use crate::common::files::Scratch;
use crate::common::models::{
    Adapted, Branches, Gpt, JointlyNormed, Layouts, Mlp, Normed, RecomputedGpt, Recurrent, Trial,
};
use crate::common::process::told;
use crate::common::processes::Processes;
use crate::common::run::{Optimizer, STEPS, config, plain_weights, scalar, share, start, weights};
use crate::tied::Tied;

const DIR: &str = "FSDP_TEST_SETTING_DIR";
const NUMBER: &str = "FSDP_TEST_SETTING";

/// Ends only what hangs.
const LIMIT: Duration = Duration::from_secs(120);

struct Setting {
    name: &'static str,
    world_size: usize,
    stage: Stage,
    change: fn(&mut Config),
    run: fn(&Config) -> Result<Vec<String>, Error>,
}

const fn setting(
    name: &'static str,
    (stage, world_size): (Stage, usize),
    change: fn(&mut Config),
    run: fn(&Config) -> Result<Vec<String>, Error>,
) -> Setting {
    Setting { name, world_size, stage, change, run }
}

fn mesh(config: &mut Config, replicate: usize, shard: usize) {
    config.mesh = Some(Mesh::new([(Axis::Replicate, replicate), (Axis::Shard, shard)]).unwrap());
}

const SETTINGS: &[Setting] = &[
    setting("replicas of shards", (Stage::Parameters, 4), |config| mesh(config, 2, 2), run::<Mlp>),
    setting("replicas alone", (Stage::Parameters, 2), |config| mesh(config, 2, 1), run::<Mlp>),
    setting("shards alone", (Stage::Gradients, 2), |config| mesh(config, 1, 2), run::<Mlp>),
    setting("specs, replicated, ignored and frozen", (Stage::Parameters, 3), |_| {}, run::<Layouts>),
    setting(
        "a smaller group after forward",
        (Stage::Parameters, 4),
        |config| config.reshard_after_forward = Some(2),
        run::<Gpt>,
    ),
    setting("statistics of all", (Stage::Parameters, 2), |config| of(config, Buffers::Sync), run::<Normed>),
    setting("statistics of rank 0", (Stage::Ddp, 2), |config| of(config, Buffers::Rank0), run::<Normed>),
    setting("statistics of each", (Stage::Gradients, 3), |config| of(config, Buffers::Local), run::<Normed>),
    setting("batch norm over all ranks", (Stage::Parameters, 3), |_| {}, run::<JointlyNormed>),
    setting("tied weights", (Stage::Parameters, 2), |_| {}, run::<Tied>),
    setting("adapters", (Stage::Parameters, 2), |_| {}, run::<Adapted<Gpt>>),
    setting("recomputation in bf16", (Stage::Parameters, 2), in_bf16, run::<RecomputedGpt>),
    setting("a loss scale", (Stage::Gradients, 2), |config| config.precision.parameters = Dtype::F16, run::<Gpt>),
    setting("a branch that some ranks use", (Stage::Parameters, 3), |_| {}, run::<Branches>),
    setting("micro-batches and clipping", (Stage::OptimizerState, 2), in_micro_batches, run::<Recurrent>),
];

fn of(config: &mut Config, buffers: Buffers) {
    config.training.buffers = buffers;
}

fn in_bf16(config: &mut Config) {
    (config.precision.parameters, config.precision.reduce) = (Dtype::Bf16, Dtype::Bf16);
}

fn in_micro_batches(config: &mut Config) {
    let training = &mut config.training;
    (training.gradient_accumulation, training.accumulate) = (2, Accumulate::Local);
    (training.gradient_clip_norm, training.gradient_norm_order) = (Some(0.05), 3.0);
}

impl Setting {
    fn config(&self) -> Config {
        let mut config = Config { timeout_s: 60.0, ..config(self.stage, self.world_size) };
        (self.change)(&mut config);
        config
    }
}

/// What each rank of this process is left with, to the last bit.
fn run<M: Trial>(config: &Config) -> Result<Vec<String>, Error> {
    launch(config, |rank: Rank| {
        let mut model = start::<M>(&rank)?;
        let mut optim = rank.optimizer(Optimizer::AdamW.build())?;
        let mut text = String::new();
        for batch in 0..STEPS {
            let loss = model.loss(batch, share(&rank), &rank.device());
            text += &format!("loss {:x}", scalar(&loss).to_bits());
            let gradients = model.backward(loss)?;
            match optim.step(Optimizer::AdamW.lr(), &mut model, gradients)? {
                StepOutcome::Stepped { gradient_norm: Some(norm) } => text += &format!(" norm {:x}", norm.to_bits()),
                outcome => text += &format!(" {outcome:?}"),
            }
            text += &format!(" scale {}\n", model.loss_scale());
        }
        let statistics = plain_weights(&model.valid()).into_iter().filter(|(path, _)| path.contains("running_"));
        for (path, values) in weights(&model)?.into_iter().chain(statistics) {
            let bits: Vec<_> = values.iter().map(|value| format!("{:x}", value.to_bits())).collect();
            text += &format!("{path} {}\n", bits.join(" "));
        }
        Ok(text)
    })
}

/// The part of the test that runs in a process of its own, as one rank.
#[test]
fn child_trains_with_a_setting() {
    let (Some(dir), Some(number)) = (told(DIR), told(NUMBER)) else { return };
    let setting = &SETTINGS[number.to_str().unwrap().parse::<usize>().unwrap()];
    let config = setting.config();
    let texts = (setting.run)(&config).unwrap();
    assert_eq!(texts.len(), 1, "a process has one rank");
    let rank = std::env::var("RANK").unwrap();
    fs::write(dir.join(format!("end-{rank}")), &texts[0]).unwrap();
}

#[test]
fn every_setting_has_the_bits_of_threads_on_every_rank_that_is_a_process() {
    for (number, setting) in SETTINGS.iter().enumerate() {
        let scratch = Scratch::new(&format!("setting-{number}"));
        let dir = scratch.path();
        let set = [(DIR, dir.to_str().unwrap().to_owned()), (NUMBER, number.to_string())];
        let test = "processes_settings::child_trains_with_a_setting";
        Processes::start(test, &dir, setting.world_size, &set, |_, port| port).succeed(&dir, LIMIT);
        let threads = (setting.run)(&setting.config()).unwrap();
        assert!(threads[0].lines().count() > STEPS, "{}: {}", setting.name, threads[0]);
        for (rank, expected) in threads.iter().enumerate() {
            let got = fs::read_to_string(dir.join(format!("end-{rank}"))).unwrap();
            for (expected, got) in expected.lines().zip(got.lines()) {
                assert_eq!(expected, got, "{}, rank {rank}", setting.name);
            }
            assert_eq!(expected.len(), got.len(), "{}, rank {rank}", setting.name);
        }
    }
}
