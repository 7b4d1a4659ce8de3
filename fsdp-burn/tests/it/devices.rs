//! A device that cannot be used is an error before anything is computed, with what to build, to install or to change.

#[cfg(feature = "cuda")]
use std::collections::BTreeMap;

use fsdp_burn::{Config, DeviceChoice, Exchange, launch};
#[cfg(feature = "cuda")]
use fsdp_burn::{SaveOptions, Stage};

#[cfg(feature = "cuda")]
use crate::common::files::Scratch;
#[cfg(feature = "cuda")]
use crate::common::models::{Mlp, Trial};
#[cfg(feature = "cuda")]
use crate::common::process::{child, run_to_end};
#[cfg(feature = "cuda")]
use crate::common::run::{Optimizer, config, start};

fn refusal(device: DeviceChoice, collectives: Exchange, world_size: usize) -> String {
    let config = Config { device, collectives, world_size, ..Config::default() };
    launch(&config, |_| Ok(())).unwrap_err().to_string()
}

#[cfg(not(feature = "cuda"))]
#[test]
fn a_gpu_that_the_program_is_not_built_for_is_refused_with_the_feature_to_build_it_with() {
    let refused = refusal(DeviceChoice::CudaAt(3), Exchange::Host, 2);
    assert!(refused.starts_with("device = \"cuda:3\": ") && refused.contains("the feature `cuda`"), "{refused}");
}

#[cfg(not(feature = "cpu"))]
#[test]
fn kernels_that_the_program_is_not_built_with_are_refused_with_the_feature_to_build_it_with() {
    let refused = refusal(DeviceChoice::Cpu, Exchange::Device, 1);
    assert!(refused.starts_with("device = \"cpu\": ") && refused.contains("the feature `cpu`"), "{refused}");
}

#[test]
fn processors_exchange_nothing_from_device_to_device() {
    let refused = refusal(DeviceChoice::Flex, Exchange::Device, 2);
    assert!(refused.contains("`collectives`") && refused.contains("device = \"cuda\""), "{refused}");
}

#[cfg(feature = "cuda")]
#[test]
fn a_gpu_that_is_not_there_is_refused_with_what_to_install_or_to_change() {
    use burn::tensor::{Device, DeviceType};

    let num_gpus = Device::enumerate(DeviceType::Cuda).into_iter().count();
    let too_many = refusal(DeviceChoice::Cuda, Exchange::Host, num_gpus + 1);
    for refused in [too_many, refusal(DeviceChoice::CudaAt(999), Exchange::Host, 1)] {
        match num_gpus {
            0 => assert!(refused.contains("libcuda.so.1") && refused.contains("nvidia-smi"), "{refused}"),
            _ => assert!(refused.contains(&format!("this host has {num_gpus}")), "{refused}"),
        }
    }
}

/// It is looked for before GPUs are, since it is what most machines lack.
#[cfg(feature = "cuda")]
#[test]
fn a_missing_nccl_is_refused_with_what_to_install() {
    let refused = refusal(DeviceChoice::Cuda, Exchange::Device, 64);
    match refused.contains("NCCL") {
        true => assert!(refused.contains("libnccl.so") && refused.contains("libnccl-dev"), "{refused}"),
        // It is there, and 64 GPUs are not.
        false => assert!(refused.contains("this host has"), "{refused}"),
    }
}

/// Runs in a process of its own, whose environment does not say by way of which device state is loaded.
#[cfg(feature = "cuda")]
#[test]
fn child_loads_state_by_way_of_a_gpu() {
    use burn::tensor::{Device, DeviceType};

    if std::env::var_os("FSDP_TEST_LOADS").is_none() {
        return;
    }
    let scratch = Scratch::new("device-loads");
    let root = scratch.path();
    let loaded = launch(&config(Stage::Parameters, 1), move |rank| {
        let mut model = start::<Mlp>(&rank)?;
        let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
        let gradients = model.backward(model.loss(0, 0..4, &rank.device()))?;
        optim.step(0.1, &mut model, gradients)?;
        model.save(&root, &optim, BTreeMap::new(), &SaveOptions::default())?;
        model.load(&root, &mut optim).map(drop)
    });
    let has_gpu = Device::enumerate(DeviceType::Cuda).into_iter().next().is_some();
    match loaded {
        Ok(_) => assert!(has_gpu),
        Err(error) => {
            let error = error.to_string();
            assert!(!has_gpu && error.contains("default device") && error.contains("BURN_DEVICE=flex"), "{error}");
        }
    }
}

#[cfg(feature = "cuda")]
#[test]
fn state_that_would_be_loaded_by_way_of_a_gpu_that_is_not_there_is_refused() {
    let mut child = child("devices::child_loads_state_by_way_of_a_gpu");
    run_to_end(child.env("FSDP_TEST_LOADS", "1").env_remove("BURN_DEVICE"));
}
