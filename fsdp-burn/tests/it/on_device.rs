//! What GPUs run trains as the CPU backend does, and every stage gives the same bits: the same kernels, compiled for the
//! processor (`device = "cpu"`). They are slow there, so models and runs are small.

use std::fs;
use std::ops::Range;
use std::path::Path;
use std::time::Instant;

use burn::module::Module;
use burn::tensor::{Device, Tensor};
use fsdp_burn::{
    Accumulate, Axis, Config, DeviceChoice, Dtype, Error, Exchange, LossScale, Mesh, OffloadConfig, OpKind, Rank,
    Sharded, ShardedModel, Stage, TierShares, TrainingConfig, launch,
};

use crate::common::broadcast::{Broadcast, BroadcastMlp};
use crate::common::files::Scratch;
use crate::common::models::{
    Adapted, Branches, Gpt, JointlyNormed, Layouts, Mlp, Normed, RecomputedGpt, Tiny, Trial, distance, rows,
};
use crate::common::process::{child, run_to_end};
use crate::common::processes::{Processes, said};
use crate::common::run::{
    Optimizer, Outcome, Tolerance, assert_parity, config, on_ranks, plain_model_on, plain_weights, scalar, share,
    weights,
};
use crate::on_device_state::placed;
use crate::processes::LIMIT;
use crate::tied::Tied;

const STEPS: usize = 2;

pub(crate) const ENDS: [Stage; 2] = [Stage::Ddp, Stage::Parameters];

/// Enough for kernels that are compiled while other tests run.
const TIMEOUT_S: f64 = 120.0;

const CHILD: &str = "on_device::child_is_a_rank_on_a_device";

pub(crate) fn on(device: DeviceChoice, stage: Stage, world_size: usize) -> Config {
    Config { device, timeout_s: TIMEOUT_S, ..config(stage, world_size) }
}

/// A sharded model with the weights of every other run, whatever random numbers the rank's device would draw. A tensor that
/// moves keeps its way of gradient checkpointing, so it begins with that of the rank's device.
pub(crate) fn start<M: Trial>(rank: &Rank) -> Result<ShardedModel<M>, Error> {
    rank.shard(plain_model_on::<M>(&Device::flex().autodiff().gradient_checkpointing()).fork(&rank.device()))
}

fn train<M: Trial>(rank: &Rank, optimizer: Optimizer) -> Result<Outcome, Error> {
    let mut model = start::<M>(rank)?;
    let mut optim = rank.optimizer(optimizer.build())?;
    let mut outcome = Outcome::default();
    for step in 0..STEPS {
        let loss = model.loss(step, share(rank), &rank.device());
        outcome.losses.push(rank.mean(scalar(&loss))?);
        let gradients = model.backward(loss)?;
        optim.step(optimizer.lr(), &mut model, gradients)?;
    }
    outcome.weights = weights(&model)?;
    Ok(outcome)
}

fn trained<M: Trial>(config: &Config, optimizer: Optimizer) -> Outcome {
    on_ranks(config, move |rank| train::<M>(&rank, optimizer))
}

/// All stages against the first bit for bit, and that one against the CPU backend.
fn assert_stages<M: Trial>(optimizer: Optimizer, stages: &[Stage], world_sizes: &[usize]) {
    for &world_size in world_sizes {
        let [first, others @ ..] = stages else { panic!("no stage") };
        let expected = trained::<M>(&on(DeviceChoice::Flex, *first, world_size), optimizer);
        let got = trained::<M>(&on(DeviceChoice::Cpu, *first, world_size), optimizer);
        assert_parity(&format!("{first} on {world_size}, against flex"), &expected, &got, optimizer.tolerance());
        for &stage in others {
            let other = trained::<M>(&on(DeviceChoice::Cpu, stage, world_size), optimizer);
            assert_parity(&format!("{stage} on {world_size}, against {first}"), &got, &other, Tolerance::EXACT);
        }
    }
}

#[test]
fn an_mlp_trains_on_a_device_as_on_the_cpu_backend_and_every_stage_gives_the_same_bits() {
    assert_stages::<Mlp>(Optimizer::Sgd, &ENDS, &[2]);
    assert_stages::<BroadcastMlp>(Optimizer::Sgd, &Stage::ALL, &[1, 2, 3]);
}

#[test]
fn a_gpt_trains_on_a_device_as_on_the_cpu_backend_and_every_stage_gives_the_same_bits() {
    assert_stages::<Gpt>(Optimizer::Fused, &ENDS, &[2]);
}

#[test]
fn parts_that_run_again_in_backward_do_so_on_a_device() {
    assert_stages::<RecomputedGpt>(Optimizer::Sgd, &ENDS, &[2]);
}

#[test]
fn adapters_tied_weights_and_attributes_train_on_a_device() {
    assert_stages::<Adapted<Mlp>>(Optimizer::Sgd, &ENDS, &[2]);
    assert_stages::<Tied>(Optimizer::Sgd, &ENDS, &[2]);
    assert_stages::<Layouts>(Optimizer::Sgd, &ENDS, &[2]);
}

#[test]
fn blocks_without_elements_are_stored_on_a_device() {
    assert_stages::<Tiny>(Optimizer::Sgd, &ENDS, &[2, 3]);
}

#[test]
fn running_statistics_and_sums_over_ranks_work_on_a_device() {
    assert_stages::<Normed>(Optimizer::Sgd, &ENDS, &[2]);
    assert_stages::<JointlyNormed>(Optimizer::Sgd, &ENDS, &[2]);
}

#[test]
fn half_precision_on_a_device_gives_the_same_bits_at_every_stage() {
    let with = |stage| {
        let mut config = on(DeviceChoice::Cpu, stage, 2);
        (config.precision.parameters, config.precision.loss_scale) = (Dtype::F16, None);
        config.precision.reduce = Dtype::F16;
        trained::<Gpt>(&config, Optimizer::Sgd)
    };
    let expected = with(Stage::Ddp);
    assert!(expected.losses.iter().all(|loss| (1.0..4.0).contains(loss)), "{:?}", expected.losses);
    for stage in [Stage::OptimizerState, Stage::Parameters] {
        assert_parity(&format!("{stage}"), &expected, &with(stage), Tolerance::EXACT);
    }
}

#[test]
fn state_on_a_disk_and_a_device_go_together() {
    let scratch = Scratch::new("device-offload");
    let expected = trained::<BroadcastMlp>(&on(DeviceChoice::Cpu, Stage::Parameters, 2), Optimizer::Sgd);
    let offload = OffloadConfig {
        optimizer: TierShares::NVME,
        gradients: TierShares::NVME,
        parameters: TierShares::NVME,
        nvme_path: Some(scratch.path().join("nvme").to_str().unwrap().to_owned()),
        ..OffloadConfig::default()
    };
    let got =
        trained::<BroadcastMlp>(&Config { offload, ..on(DeviceChoice::Cpu, Stage::Parameters, 2) }, Optimizer::Sgd);
    assert_parity("offloaded", &expected, &got, Tolerance::EXACT);
}

/// From device to device, every stage against the same through host memory, bit for bit.
fn assert_exchange<M: Trial>(optimizer: Optimizer, stages: &[Stage], world_size: usize) {
    for &stage in stages {
        let host = on(DeviceChoice::Cpu, stage, world_size);
        let device = Config { collectives: Exchange::Device, ..host.clone() };
        let [expected, got] = [host, device].map(|config| trained::<M>(&config, optimizer));
        assert_parity(&format!("{stage} on {world_size}"), &expected, &got, Tolerance::EXACT);
    }
}

#[test]
fn from_device_to_device_ranks_train_to_the_bits_of_host_memory() {
    for world_size in 1..4 {
        assert_exchange::<BroadcastMlp>(Optimizer::Fused, &Stage::ALL, world_size);
    }
}

#[test]
fn whatever_is_trained_can_be_exchanged_from_device_to_device() {
    assert_exchange::<Tiny>(Optimizer::Sgd, &Stage::ALL, 3);
    assert_exchange::<Layouts>(Optimizer::Sgd, &ENDS, 2);
    assert_exchange::<Tied>(Optimizer::Sgd, &ENDS, 2);
    assert_exchange::<Branches>(Optimizer::Sgd, &ENDS, 2);
    assert_exchange::<RecomputedGpt>(Optimizer::Sgd, &[Stage::Parameters], 2);
    assert_exchange::<Adapted<Mlp>>(Optimizer::Sgd, &[Stage::Parameters], 2);
}

#[test]
fn micro_batches_and_half_precision_are_exchanged_from_device_to_device() {
    for accumulate in Accumulate::ALL {
        let training =
            TrainingConfig { gradient_accumulation: 2, accumulate: *accumulate, ..TrainingConfig::default() };
        let mut host = Config { training, ..on(DeviceChoice::Cpu, Stage::Parameters, 2) };
        (host.precision.parameters, host.precision.reduce) = (Dtype::F16, Dtype::F16);
        host.precision.loss_scale = Some(LossScale::Fixed(64.0));
        let device = Config { collectives: Exchange::Device, ..host.clone() };
        let [expected, got] = [host, device].map(|config| trained::<Gpt>(&config, Optimizer::Sgd));
        assert_parity(&format!("{accumulate:?}"), &expected, &got, Tolerance::EXACT);
    }
}

#[test]
fn copies_along_replicate_are_added_up_from_device_to_device() {
    let mesh = Some(Mesh::new(vec![(Axis::Replicate, 2), (Axis::Shard, 2)]).unwrap());
    for (stage, reduce) in
        [(Stage::Gradients, Dtype::F32), (Stage::Parameters, Dtype::F32), (Stage::Parameters, Dtype::F16)]
    {
        let mut host = Config { mesh: mesh.clone(), ..on(DeviceChoice::Cpu, stage, 4) };
        host.precision.reduce = reduce;
        let device = Config { collectives: Exchange::Device, ..host.clone() };
        let [expected, got] = [host, device].map(|config| trained::<Layouts>(&config, Optimizer::Sgd));
        assert_parity(&format!("{stage}, {reduce}"), &expected, &got, Tolerance::EXACT);
    }
}

#[test]
fn backward_gathers_among_fewer_ranks_from_device_to_device() {
    let host = Config { reshard_after_forward: Some(2), ..on(DeviceChoice::Cpu, Stage::Parameters, 4) };
    let device = Config { collectives: Exchange::Device, ..host.clone() };
    let [expected, got] = [host, device].map(|config| trained::<Layouts>(&config, Optimizer::Sgd));
    assert_parity("stage 3", &expected, &got, Tolerance::EXACT);
}

#[test]
fn from_device_to_device_ranks_send_the_bytes_that_they_send_through_host_memory() {
    let sent = |collectives, stage| {
        let config = Config { collectives, ..on(DeviceChoice::Cpu, stage, 2) };
        let sent = launch(&config, |rank| {
            let mut model = start::<Layouts>(&rank)?;
            let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
            rank.traffic().reset();
            let gradients = model.backward(model.loss(0, share(&rank), &rank.device()))?;
            optim.step(0.01, &mut model, gradients)?;
            model.synchronize()?;
            Ok([OpKind::AllGather, OpKind::ReduceScatter, OpKind::AllReduce].map(|kind| rank.traffic().of(kind)))
        });
        sent.unwrap()
    };
    for stage in [Stage::Ddp, Stage::OptimizerState, Stage::Parameters] {
        let expected = sent(Exchange::Host, stage);
        assert!(expected.iter().flatten().any(|count| count.sent_bytes > 0));
        assert_eq!(sent(Exchange::Device, stage), expected, "{stage}");
    }
}

#[test]
fn a_rank_that_fails_ends_those_that_wait_for_its_tensors() {
    let config = Config { collectives: Exchange::Device, ..on(DeviceChoice::Cpu, Stage::Parameters, 2) };
    let begun = Instant::now();
    let error = launch(&config, |rank| {
        let model = start::<BroadcastMlp>(&rank)?;
        if !rank.is_main() {
            return Err(Error::program("out of cheese"));
        }
        model.backward(model.loss(0, share(&rank), &rank.device())).map(drop)
    });
    assert_eq!(error.unwrap_err().to_string(), "rank 1: out of cheese");
    assert!(begun.elapsed().as_secs_f64() < TIMEOUT_S / 2.0, "{:?}", begun.elapsed());
}

#[test]
fn ranks_on_a_device_that_issue_different_operations_are_told_which() {
    let config = Config { collectives: Exchange::Device, ..on(DeviceChoice::Cpu, Stage::Parameters, 2) };
    let error = launch(&config, |rank| {
        let model = start::<BroadcastMlp>(&rank)?;
        let layer = if rank.is_main() { &model.hidden[0] } else { &model.hidden[1] };
        layer.forward(rows(0, 0..4, 13, &rank.device()));
        Ok(())
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("unit `hidden.0`") && error.contains("unit `hidden.1`"), "{error}");
}

#[test]
fn processes_have_no_tensors_of_a_device_in_common_and_are_told_so() {
    let scratch = Scratch::new("device-apart");
    let dir = scratch.path();
    let set = [("FSDP_TEST_DEVICE_DIR", dir.to_str().unwrap().to_owned()), ("FSDP_TEST_DEVICE_PEERS", "1".into())];
    let mut processes = Processes::start(CHILD, &dir, 2, &set, |_, port| port);
    for rank in 0..2 {
        assert_eq!(processes.wait(rank, LIMIT).code(), Some(3), "{}", said(&dir, rank));
        assert!(said(&dir, rank).contains("ranks that are processes have no memory of a device in common"));
    }
}

/// The part of these tests that runs in a process of its own, as one rank.
#[test]
fn child_is_a_rank_on_a_device() {
    let Some(dir) = std::env::var_os("FSDP_TEST_DEVICE_DIR") else { return };
    let is_apart = std::env::var_os("FSDP_TEST_DEVICE_PEERS").is_some();
    let collectives = Exchange::ALL[usize::from(is_apart)];
    let config = Config { collectives, ..on(DeviceChoice::Cpu, Stage::Parameters, 1) };
    let is_main = config.started().unwrap().is_main();
    match launch(&config, |rank| train::<BroadcastMlp>(&rank, Optimizer::Sgd)) {
        Ok(outcomes) if is_main => fs::write(Path::new(&dir).join("end"), text(&outcomes[0])).unwrap(),
        Ok(_) => {}
        Err(error) => {
            eprintln!("\nfailed: {error}");
            std::process::exit(3);
        }
    }
}

/// To the last bit.
fn text(outcome: &Outcome) -> String {
    let bits = |values: &Vec<f32>| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    let weights = outcome.weights.iter().map(|(path, values)| (path, bits(values)));
    let losses = outcome.losses.iter().map(|loss| loss.to_bits());
    format!("{:?} {:?}", losses.collect::<Vec<_>>(), weights.collect::<Vec<_>>())
}

#[test]
fn processes_with_a_device_each_train_to_the_bits_of_threads_that_share_one() {
    let expected = trained::<BroadcastMlp>(&on(DeviceChoice::Cpu, Stage::Parameters, 2), Optimizer::Sgd);
    let scratch = Scratch::new("device-processes");
    let dir = scratch.path();
    let set = [("FSDP_TEST_DEVICE_DIR", dir.to_str().unwrap().to_owned())];
    Processes::start(CHILD, &dir, 2, &set, |_, port| port).succeed(&dir, LIMIT);
    assert_eq!(fs::read_to_string(dir.join("end")).unwrap(), text(&expected));
}

/// Layers that are large beside everything else.
#[derive(Module, Debug, Sharded)]
struct Deep {
    #[shard(units)]
    layers: Vec<Broadcast>,
}

const WIDTH: usize = 128;
const DEPTH: usize = 4;
const LAYER_BYTES: u64 = (4 * WIDTH * WIDTH) as u64;

impl Trial for Deep {
    fn build(device: &Device) -> Self {
        Self { layers: (0..DEPTH).map(|_| Broadcast::new(WIDTH, WIDTH, device)).collect() }
    }

    fn loss(&self, batch: usize, samples: Range<usize>, device: &Device) -> Tensor<1> {
        let input = rows(batch + 1, samples.clone(), WIDTH, device);
        let output = self.layers.iter().fold(input, |x, layer| layer.forward(x));
        distance(output, batch, samples, device)
    }
}

/// Bytes in use on the device of both ranks, after each step.
fn bytes_after_steps(place: TierShares, stage: Stage) -> Vec<u64> {
    let used = launch(&placed(place, on(DeviceChoice::Cpu, stage, 2)), |rank| {
        let mut model = start::<Deep>(&rank)?;
        let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
        let mut used = Vec::new();
        for step in 0..5 {
            let gradients = model.backward(model.loss(step, 0..4, &rank.device()))?;
            optim.step(0.01, &mut model, gradients)?;
            rank.barrier()?;
            rank.device().sync().map_err(|error| Error::program(format!("{error:?}")))?;
            used.push(rank.device_memory().unwrap().used_bytes);
            rank.barrier()?;
        }
        Ok(used)
    });
    used.unwrap().remove(0)
}

/// Runs in a process of its own, since all that computes on a device of this process counts.
#[test]
fn child_counts_the_bytes_of_a_device() {
    if std::env::var_os("FSDP_TEST_DEVICE_BYTES").is_none() {
        return;
    }
    let model_bytes = DEPTH as u64 * LAYER_BYTES;
    let holds = |place, stage, num_models: u64| {
        let used = bytes_after_steps(place, stage);
        let expected = num_models * model_bytes..num_models * model_bytes + LAYER_BYTES;
        assert!(used.iter().all(|bytes| expected.contains(bytes)), "{place:?}, {stage}: {used:?} and not {expected:?}");
    };
    // Of both ranks: parameters, and the velocity of each.
    holds(TierShares::CPU, Stage::Parameters, 0);
    holds(TierShares::CPU, Stage::Ddp, 2);
    holds(TierShares::DEVICE, Stage::Parameters, 2);
    holds(TierShares::DEVICE, Stage::Gradients, 3);
    holds(TierShares::DEVICE, Stage::Ddp, 4);
}

#[test]
fn between_steps_a_device_holds_what_the_stage_and_the_tiers_say_and_no_more() {
    let mut child = child("on_device::child_counts_the_bytes_of_a_device");
    run_to_end(child.env("FSDP_TEST_DEVICE_BYTES", "1"));
}

#[test]
fn a_copy_of_the_model_from_before_a_step_is_refused_on_a_device_too() {
    for stage in ENDS {
        let error = launch(&on(DeviceChoice::Cpu, stage, 1), |rank| {
            let mut model = start::<BroadcastMlp>(&rank)?;
            let old = model.valid();
            let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
            let gradients = model.backward(model.loss(0, 0..4, &rank.device()))?;
            optim.step(0.01, &mut model, gradients)?;
            old.loss(0, 0..4, &rank.device().without_autodiff());
            Ok(())
        });
        let error = error.unwrap_err().to_string();
        assert!(error.contains("`input.weight` is not the one the engine holds"), "{stage}: {error}");
    }
}

#[test]
fn a_whole_model_is_on_the_device_of_its_rank() {
    let devices = launch(&on(DeviceChoice::Cpu, Stage::Parameters, 2), |rank| {
        let model = start::<Gpt>(&rank)?;
        let whole = model.whole()?;
        let expected = weights(&model)?;
        assert!(plain_weights(&whole).iter().zip(&expected).all(|((_, whole), (_, expected))| whole == expected));
        Ok(whole.devices().into_iter().all(|device| device == rank.device().without_autodiff()))
    });
    assert_eq!(devices.unwrap(), [true, true]);
}

#[test]
fn a_model_that_was_built_elsewhere_is_refused_with_the_place_to_build_it() {
    let error = launch(&on(DeviceChoice::Cpu, Stage::Parameters, 1), |rank| {
        rank.shard(BroadcastMlp::build(&Device::flex().autodiff())).map(drop)
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("device = \"cpu\": ") && error.contains("`rank.device()`"), "{error}");
}
