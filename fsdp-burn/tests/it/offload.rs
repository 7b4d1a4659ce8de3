//! State on a disk between its uses: the same bits, less memory, and errors that name the place.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};
use fsdp_burn::{
    Config, Error, LaunchOptions, NonFinite, OffloadConfig, PrefetchConfig, Rank, SaveOptions, Sharded, Stage,
    StepOutcome, TierShares, TierStats, Trace, TrainingConfig, launch, launch_with,
};
use fsdp_core::{SpanKind, Tier, TierOptions, TraceStream};

use crate::common::models::{Branches, ConvNet, Gpt, Mlp, Trial, distance, rows};
use crate::common::run::{
    Optimizer, Outcome, Tolerance, assert_parity, config, on_ranks, scalar, share, start, weights,
};

const STEPS: usize = 20;
const HALF: TierShares = TierShares { cpu: 0.0, nvme: 0.5 };
const MIXED: TierShares = TierShares { cpu: 0.3, nvme: 0.4 };

/// The configuration with optimizer state, gradients and parameters placed like this.
pub(crate) fn offloaded(nvme: &Path, config: &Config, [optimizer, gradients, parameters]: [TierShares; 3]) -> Config {
    let offload = OffloadConfig {
        optimizer,
        gradients,
        parameters,
        nvme_path: Some(nvme.to_str().unwrap().to_owned()),
        nvme_block_bytes: 16 << 10,
        nvme_buffer_bytes: 64 << 10,
        ..OffloadConfig::default()
    };
    Config { offload, ..config.clone() }
}

/// A directory for runs, removed at the end; a run's own directory in it must be gone before that.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("fsdp-burn-offload-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).unwrap();
        Self(dir)
    }

    fn nvme(&self) -> PathBuf {
        self.0.join("nvme")
    }

    fn offloaded(&self, config: &Config, tiers: [TierShares; 3]) -> Config {
        offloaded(&self.nvme(), config, tiers)
    }

    fn assert_nothing_left(&self, what: &str) {
        assert!(!self.nvme().exists(), "{what}: {:?}", fs::read_dir(self.nvme()).map(Iterator::count));
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Losses, norms and weights of so many steps, and what rank 0 has moved.
fn run<M: Trial>(config: &Config, optimizer: Optimizer, steps: usize) -> (Outcome, Option<TierStats>) {
    let moved = Arc::new(Mutex::new(None));
    let stats = moved.clone();
    let outcome = on_ranks(config, move |rank| {
        let mut model = start::<M>(&rank)?;
        let mut optim = rank.optimizer(optimizer.build())?;
        let mut outcome = Outcome::default();
        for batch in 0..steps {
            let loss = model.loss(batch, share(&rank), &rank.device());
            outcome.losses.push(rank.mean(scalar(&loss))?);
            let gradients = model.backward(loss)?;
            if let StepOutcome::Stepped { gradient_norm } = optim.step(optimizer.lr(), &mut model, gradients)? {
                outcome.norms.extend(gradient_norm);
            }
        }
        model.synchronize()?;
        outcome.weights = weights(&model)?;
        if rank.is_main() {
            *stats.lock().unwrap() = rank.tier_stats();
        }
        Ok(outcome)
    });
    let moved = *moved.lock().unwrap();
    (outcome, moved)
}

/// All ways to place three kinds of state on the device or on a disk, but for none on a disk.
fn combinations(stage: Stage) -> Vec<[TierShares; 3]> {
    let place = |on_disk: bool| if on_disk { TierShares::NVME } else { TierShares::DEVICE };
    let all = (1..8_u8).map(|bits| [1, 2, 4].map(|bit| place(bits & bit != 0)));
    all.filter(|[.., parameters]| stage.shards_parameters() || *parameters == TierShares::DEVICE).collect()
}

fn every_combination_has_the_bits_of_none(stage: Stage, world_size: usize) {
    let scratch = Scratch::new(&format!("combinations-{}", stage.number()));
    for optimizer in [Optimizer::Sgd, Optimizer::AdamW, Optimizer::Fused] {
        let base = config(stage, world_size);
        let (expected, none) = run::<Mlp>(&base, optimizer, STEPS);
        assert_eq!(none, None);
        for tiers in combinations(stage) {
            let what = format!("{stage}, {optimizer:?}, {tiers:?}");
            let (got, moved) = run::<Mlp>(&scratch.offloaded(&base, tiers), optimizer, STEPS);
            assert_parity(&what, &expected, &got, Tolerance::EXACT);
            let moved = moved.unwrap();
            assert!(moved.read_bytes > 0 && moved.written_bytes > 0, "{what}: {moved:?}");
            scratch.assert_nothing_left(&what);
        }
    }
}

#[test]
fn every_combination_of_tiers_has_the_bits_of_none_at_stage_1() {
    every_combination_has_the_bits_of_none(Stage::OptimizerState, 2);
}

#[test]
fn every_combination_of_tiers_has_the_bits_of_none_at_stage_2() {
    every_combination_has_the_bits_of_none(Stage::Gradients, 3);
}

#[test]
fn every_combination_of_tiers_has_the_bits_of_none_at_stage_3() {
    every_combination_has_the_bits_of_none(Stage::Parameters, 3);
}

#[test]
fn shares_and_host_memory_have_the_bits_of_none_and_move_their_share() {
    let scratch = Scratch::new("shares");
    let base = config(Stage::Parameters, 2);
    let (expected, _) = run::<Mlp>(&base, Optimizer::AdamW, 5);
    let mut moved = Vec::new();
    for tiers in [[HALF; 3], [TierShares::NVME; 3], [MIXED; 3], [TierShares::CPU; 3]] {
        let (got, stats) = run::<Mlp>(&scratch.offloaded(&base, tiers), Optimizer::AdamW, 5);
        assert_parity(&format!("{tiers:?}"), &expected, &got, Tolerance::EXACT);
        moved.push(stats.map_or(0, |stats| stats.written_bytes));
    }
    let [half, all, mixed, cpu] = moved[..] else { unreachable!() };
    assert!(0 < mixed && mixed <= half && half < all, "{moved:?}");
    assert_eq!(cpu, 0, "host memory is where a CPU backend has everything");
    scratch.assert_nothing_left("shares");
}

#[test]
fn other_models_meshes_and_settings_have_the_bits_of_none() {
    let scratch = Scratch::new("others");
    let all = [TierShares::NVME; 3];
    fn compare<M: Trial>(scratch: &Scratch, what: &str, base: &Config, tiers: [TierShares; 3]) {
        let (expected, _) = run::<M>(base, Optimizer::Fused, 6);
        let (got, _) = run::<M>(&scratch.offloaded(base, tiers), Optimizer::Fused, 6);
        assert_parity(what, &expected, &got, Tolerance::EXACT);
        scratch.assert_nothing_left(what);
    }
    let base = config(Stage::Parameters, 2);
    compare::<Gpt>(&scratch, "a transformer", &base, all);
    compare::<ConvNet>(&scratch, "convolutions, on five ranks", &config(Stage::Parameters, 5), all);
    // Some parameters get no gradient, or on one rank only.
    compare::<Branches>(&scratch, "branches", &base, all);
    let training = TrainingConfig { non_finite: NonFinite::Propagate, ..TrainingConfig::default() };
    let direct = Config { training, ..base.clone() };
    compare::<Mlp>(&scratch, "stepped as soon as reduced", &direct, all);
    for depth in [0, 3] {
        let prefetch = PrefetchConfig { forward: depth, backward: depth, ..PrefetchConfig::default() };
        compare::<Gpt>(&scratch, "another prefetch depth", &Config { prefetch, ..base.clone() }, all);
    }
    let training =
        TrainingConfig { gradient_accumulation: 3, gradient_clip_norm: Some(0.01), ..TrainingConfig::default() };
    for stage in [Stage::Gradients, Stage::Parameters] {
        let base = Config { training: training.clone(), stage, ..base.clone() };
        let tiers =
            if stage.shards_parameters() { all } else { [TierShares::NVME, TierShares::NVME, TierShares::DEVICE] };
        compare::<Mlp>(&scratch, "three micro-batches and clipping", &base, tiers);
    }
    let none = [TierShares::NVME, TierShares::NVME, TierShares::DEVICE];
    compare::<Mlp>(&scratch, "stage 0", &config(Stage::Ddp, 2), none);
    compare::<Mlp>(&scratch, "one rank", &config(Stage::Parameters, 1), all);
}

/// Two linear layers of a size that tells them apart, one of which says where it lies, and a third.
macro_rules! placed {
    ($($name:ident $(= $place:tt)?;)+) => {$(
        #[derive(Module, Debug, Sharded)]
        struct $name {
            #[shard(unit $(, offload = $place)?)]
            first: Linear,
            #[shard(unit)]
            second: Linear,
            last: Linear,
        }

        impl Trial for $name {
            fn build(device: &Device) -> Self {
                let linear = |input, output| LinearConfig::new(input, output).init(device);
                Self { first: linear(7, 64), second: linear(64, 30), last: linear(30, 3) }
            }

            fn loss(&self, batch: usize, samples: Range<usize>, device: &Device) -> Tensor<1> {
                let x = rows(batch, samples.clone(), 7, device);
                let hidden = relu(self.second.forward(relu(self.first.forward(x))));
                distance(self.last.forward(hidden), batch, samples, device)
            }
        }
    )+};
}
placed! {
    Free;
    OnDisk = "nvme";
    OnDevice = "none";
    InMemory = "cpu";
}

#[test]
fn a_unit_that_says_where_it_lies_is_there_whatever_the_configuration_says_and_has_the_bits_of_none() {
    let scratch = Scratch::new("units");
    let held = |stats: Option<TierStats>| stats.map_or(0, |stats| stats.file_bytes);
    for stage in [Stage::OptimizerState, Stage::Parameters] {
        let base = config(stage, 2);
        let (expected, _) = run::<Free>(&base, Optimizer::AdamW, STEPS);
        let parameters = if stage.shards_parameters() { TierShares::NVME } else { TierShares::DEVICE };
        // Bytes on the disk, where the configuration places nothing there, and all.
        let mut bytes = Vec::new();
        for tiers in [[TierShares::DEVICE; 3], [TierShares::NVME, TierShares::NVME, parameters]] {
            let config = scratch.offloaded(&base, tiers);
            for (what, (got, stats)) in [
                ("free", run::<Free>(&config, Optimizer::AdamW, STEPS)),
                ("nvme", run::<OnDisk>(&config, Optimizer::AdamW, STEPS)),
                ("none", run::<OnDevice>(&config, Optimizer::AdamW, STEPS)),
                ("cpu", run::<InMemory>(&config, Optimizer::AdamW, STEPS)),
            ] {
                assert_parity(&format!("{what} at {stage}, {tiers:?}"), &expected, &got, Tolerance::EXACT);
                bytes.push(held(stats));
            }
            scratch.assert_nothing_left("units");
        }
        let [none, first, none_again, none_in_memory, all, all_too, rest, rest_too] = bytes[..] else { unreachable!() };
        assert_eq!([none, none_again, none_in_memory], [0; 3], "{stage}");
        assert!(0 < first && first < all && all_too == all, "{stage}: {bytes:?}");
        assert_eq!([rest, rest_too], [all - first; 2], "{stage}: what the unit does not place there");
    }
}

#[test]
fn shares_are_those_of_the_units_that_do_not_say_where_they_lie() {
    let scratch = Scratch::new("shares-of-units");
    let base = config(Stage::Parameters, 2);
    let stats = |config: &Config| run::<OnDisk>(config, Optimizer::Sgd, 2).1.unwrap().file_bytes;
    let [own, half, all] =
        [TierShares::DEVICE, HALF, TierShares::NVME].map(|shares| stats(&scratch.offloaded(&base, [shares; 3])));
    assert!(own < half && half < all, "{own}, {half}, {all}");
}

#[test]
fn a_unit_on_a_disk_needs_one_and_is_named() {
    let error = launch(&config(Stage::Parameters, 2), |rank| start::<OnDisk>(&rank).map(drop)).unwrap_err().to_string();
    assert!(
        error.contains("`first`: it is placed on NVMe") && error.contains("`nvme_path` under [offload]"),
        "{error}"
    );
}

#[test]
fn parameters_on_the_disk_are_held_only_around_their_use() {
    let scratch = Scratch::new("held");
    let peak = |config: Config| {
        let program = |rank: Rank| {
            let mut model = start::<Gpt>(&rank)?;
            let mut optim = rank.optimizer(Optimizer::AdamW.build())?;
            for batch in 0..3 {
                let gradients = model.backward(model.loss(batch, share(&rank), &rank.device()))?;
                optim.step(Optimizer::AdamW.lr(), &mut model, gradients)?;
            }
            Ok((model.stats().peak_parameter_bytes, model.num_local_params() * 4))
        };
        launch(&config, program).unwrap()[0]
    };
    let base = config(Stage::Parameters, 2);
    let (without, local) = peak(base.clone());
    let (with, _) = peak(scratch.offloaded(&base, [TierShares::DEVICE, TierShares::DEVICE, TierShares::NVME]));
    assert_eq!(without, local);
    assert!(with > 0 && with < local / 2, "{with} of {local}");
}

#[test]
fn a_checkpoint_holds_what_is_offloaded_and_loads_with_and_without_tiers() {
    let scratch = Scratch::new("checkpoint");
    let root = scratch.0.join("checkpoints");
    for (number, optimizer) in [Optimizer::AdamW, Optimizer::Sgd].into_iter().enumerate() {
        let train = |config: &Config, root: PathBuf, resume: bool, until: usize, save_at: Option<usize>| {
            on_ranks(config, move |rank| {
                let mut model = start::<Gpt>(&rank)?;
                let mut optim = rank.optimizer(optimizer.build())?;
                let from = if resume { model.load(&root, &mut optim)?.step as usize } else { 0 };
                let mut outcome = Outcome::default();
                // One of the two optimizers saves while training goes on.
                let mut saver = rank.saver(&root, SaveOptions::default())?;
                for batch in from..until {
                    if save_at == Some(batch) && matches!(optimizer, Optimizer::AdamW) {
                        model.save(&root, &optim, BTreeMap::new(), &SaveOptions::default())?;
                    } else if save_at == Some(batch) {
                        saver.save(&model, &optim, BTreeMap::new())?;
                    }
                    let loss = model.loss(batch, share(&rank), &rank.device());
                    outcome.losses.push(rank.mean(scalar(&loss))?);
                    let gradients = model.backward(loss)?;
                    optim.step(optimizer.lr(), &mut model, gradients)?;
                }
                saver.finish()?;
                outcome.weights = weights(&model)?;
                Ok(outcome)
            })
        };
        let base = config(Stage::Parameters, 2);
        let tiers = scratch.offloaded(&base, [TierShares::NVME; 3]);
        let straight = train(&base, root.clone(), false, 6, None);
        let (from_tiers, from_memory) = (root.join(format!("tiers-{number}")), root.join(format!("memory-{number}")));
        train(&tiers, from_tiers.clone(), false, 4, Some(3));
        train(&base, from_memory.clone(), false, 4, Some(3));
        let rest = Outcome { losses: straight.losses[3..].to_vec(), ..straight };
        let half = scratch.offloaded(&base, [HALF; 3]);
        for (what, config, root) in [
            ("from tiers to tiers", &tiers, &from_tiers),
            ("from tiers to memory", &base, &from_tiers),
            ("from memory to tiers", &tiers, &from_memory),
            ("from tiers to shares", &half, &from_tiers),
        ] {
            let resumed = train(config, root.clone(), true, 6, None);
            assert_parity(&format!("{what}, {optimizer:?}"), &rest, &resumed, Tolerance::EXACT);
        }
        scratch.assert_nothing_left("checkpoints");
    }
}

#[test]
fn the_trace_shows_reads_and_writes_beside_the_steps() {
    let scratch = Scratch::new("trace");
    let trace = Arc::new(Trace::new());
    let options = LaunchOptions { trace: Some(trace.clone()), ..LaunchOptions::default() };
    let config = scratch.offloaded(&config(Stage::Parameters, 2), [TierShares::NVME; 3]);
    let waits = launch_with(&config, options, |rank| {
        let mut model = start::<Gpt>(&rank)?;
        let mut optim = rank.optimizer(Optimizer::AdamW.build())?;
        for batch in 0..3 {
            let gradients = model.backward(model.loss(batch, share(&rank), &rank.device()))?;
            optim.step(Optimizer::AdamW.lr(), &mut model, gradients)?;
        }
        model.synchronize()?;
        Ok(model.stats().tier_wait)
    });
    assert_eq!(waits.unwrap().len(), 2);
    let spans = trace.spans();
    for kind in [SpanKind::Read, SpanKind::Write] {
        let of_kind: Vec<_> = spans.iter().filter(|span| span.kind == kind).collect();
        assert!(!of_kind.is_empty() && of_kind.iter().all(|span| span.stream == TraceStream::Tier && span.bytes > 0));
        assert!([0, 1].iter().all(|rank| of_kind.iter().any(|span| span.rank == *rank)));
    }
}

/// Trains until `harm`, called by rank 1 after the second step with its file, makes a rank fail; each rank's own error.
fn fails(scratch: &Scratch, tiers: [TierShares; 3], harm: fn(&Path) -> Result<(), Error>) -> (Error, Vec<String>) {
    let errors: Arc<Mutex<BTreeMap<usize, String>>> = Arc::default();
    let noted = errors.clone();
    let file = scratch.nvme().join("rank-1.tier");
    let result = launch(&scratch.offloaded(&config(Stage::Parameters, 3), tiers), move |rank| {
        let train = || -> Result<(), Error> {
            let mut model = start::<Mlp>(&rank)?;
            let mut optim = rank.optimizer(Optimizer::AdamW.build())?;
            for batch in 0..10 {
                let gradients = model.backward(model.loss(batch, share(&rank), &rank.device()))?;
                optim.step(Optimizer::AdamW.lr(), &mut model, gradients)?;
                model.synchronize()?;
                rank.barrier()?;
                if batch == 1 && rank.rank() == 1 {
                    harm(&file)?;
                }
            }
            Ok(())
        };
        let result = train();
        if let Err(error) = &result {
            noted.lock().unwrap().insert(rank.rank(), error.to_string());
        }
        result
    });
    let errors = errors.lock().unwrap().values().cloned().collect();
    (result.unwrap_err(), errors)
}

#[test]
fn damage_on_one_ranks_disk_ends_every_rank_with_the_place_and_leaves_nothing() {
    let scratch = Scratch::new("damage");
    let [on, off] = [TierShares::NVME, TierShares::DEVICE];
    type Harm = fn(&Path) -> Result<(), Error>;
    let overwrite: Harm = |file| {
        let file = File::options().write(true).open(file).unwrap();
        file.write_all_at(&vec![0x55; file.metadata().unwrap().len() as usize], 0).unwrap();
        file.sync_all().unwrap();
        Ok(())
    };
    let cut: Harm = |file| {
        File::options().write(true).open(file).unwrap().set_len(0).unwrap();
        Ok(())
    };
    let remove: Harm = |file| {
        fs::remove_dir_all(file.parent().unwrap()).unwrap();
        Ok(())
    };
    for (what, harm, tiers, words) in [
        ("damaged blocks of parameters", overwrite, [off, off, on], ["damaged", "checkpoint"]),
        ("damaged optimizer state", overwrite, [on, off, off], ["damaged", "checkpoint"]),
        ("a file that was cut", cut, [on, off, off], ["too early|damaged", "checkpoint"]),
        ("parameters that were cut", cut, [off, off, on], ["too early|damaged", "checkpoint"]),
        ("a directory that was removed", remove, [on, on, on], ["was removed", "checkpoint"]),
    ] {
        let (error, errors) = fails(&scratch, tiers, harm);
        let text = error.to_string();
        for word in words.into_iter().chain(["offset", "rank-"]) {
            // A write behind the cut makes the file long again, with a hole.
            assert!(word.split('|').any(|word| text.contains(word)), "{what}: `{word}` is not in: {text}");
        }
        // Ranks that fail inside of forward unwind past the program; the others return what ended them.
        assert!(errors.iter().all(|error| error.contains("offset")), "{what}: {errors:?}");
        scratch.assert_nothing_left(what);
    }
}

#[test]
fn a_rank_that_dies_leaves_nothing_on_the_disk() {
    let scratch = Scratch::new("death");
    let (error, _) = fails(&scratch, [TierShares::NVME; 3], |_| panic!("killed"));
    assert!(error.to_string().contains("killed"), "{error}");
    scratch.assert_nothing_left("a rank that panics");
    let (error, errors) = fails(&scratch, [TierShares::NVME; 3], |_| Err(Error::program("gives up")));
    assert!(error.to_string().contains("gives up"), "{error}");
    assert!(errors.iter().all(|error| error.contains("gives up")), "{errors:?}");
    scratch.assert_nothing_left("a rank that fails");
}

#[test]
fn a_second_run_in_the_directory_is_refused_before_it_begins() {
    let scratch = Scratch::new("second");
    let first = Tier::open(&TierOptions::new(scratch.nvme(), 0, 1)).unwrap();
    let config = scratch.offloaded(&config(Stage::Parameters, 2), [TierShares::NVME; 3]);
    let error = launch(&config, |_| Ok(())).unwrap_err().to_string();
    assert!(error.contains("rank-0.tier is locked by another run") && error.contains("nvme_path"), "{error}");
    drop(first);
    launch(&config, |_| Ok(())).unwrap();
    scratch.assert_nothing_left("the second run");
}
