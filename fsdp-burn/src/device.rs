//! From the key `device` to one of Burn's devices, or to what is missing for it.

use burn::tensor::{Device, Tensor};
use fsdp_core::{DeviceChoice, Dtype};

use crate::Error;
use crate::host::{self, Identity};

/// The device of the rank that is the `local_rank`-th of its host; `None` where its launcher does not tell.
///
/// # Errors
/// If the program is built without the feature that the device needs, or the machine has no such device.
pub(crate) fn open(choice: DeviceChoice, local_rank: Option<usize>) -> Result<Device, Error> {
    match choice {
        DeviceChoice::Flex => Ok(Device::flex()),
        DeviceChoice::Cpu => cpu(),
        DeviceChoice::Cuda | DeviceChoice::CudaAt(_) => cuda(choice, local_rank),
    }
}

/// Whether tensors on `device` are host memory.
pub(crate) fn is_host(device: &Device) -> bool {
    device.clone().without_autodiff() == Device::flex()
}

/// Refuses element types that `device` cannot compute in.
pub(crate) fn check_dtypes(
    choice: DeviceChoice,
    device: &Device,
    mut dtypes: impl Iterator<Item = Dtype>,
) -> Result<(), Error> {
    match dtypes.find(|&dtype| !device.supports_dtype(host::burn_dtype(dtype))) {
        Some(dtype) => Err(refused(
            choice,
            format!("it cannot compute in {dtype}"),
            "set another type under [precision], and in `#[shard(unit, precision = ...)]`",
        )),
        None => Ok(()),
    }
}

/// What the device of `tensor` calls it, as far as it tells; host memory tells by itself.
pub(crate) fn identity<const D: usize>(tensor: &Tensor<D>) -> Option<Identity> {
    #[cfg(any(feature = "cuda", feature = "cpu"))]
    return crate::cube::identity_of(tensor);
    #[cfg(not(any(feature = "cuda", feature = "cpu")))]
    unreachable!("{:?} is a device that the program is built without", tensor.device())
}

fn refused(choice: DeviceChoice, problem: impl Into<String>, remedy: &'static str) -> Error {
    Error::Device { device: choice, problem: problem.into(), remedy }
}

#[cfg(feature = "cpu")]
fn cpu() -> Result<Device, Error> {
    Ok(Device::cpu())
}

#[cfg(not(feature = "cpu"))]
fn cpu() -> Result<Device, Error> {
    Err(refused(
        DeviceChoice::Cpu,
        "the program is built without it",
        "build it with the feature `cpu` of fsdp-burn, or leave the key out",
    ))
}

#[cfg(not(feature = "cuda"))]
fn cuda(choice: DeviceChoice, _: Option<usize>) -> Result<Device, Error> {
    Err(refused(
        choice,
        "the program is built without it",
        "build it with the feature `cuda` of fsdp-burn, or leave the key out",
    ))
}

#[cfg(feature = "cuda")]
fn cuda(choice: DeviceChoice, local_rank: Option<usize>) -> Result<Device, Error> {
    use burn::tensor::DeviceType;

    let Some(number) = choice.gpu(local_rank) else {
        return Err(refused(
            choice,
            "the launcher does not say which of its host's ranks this process is",
            "write the number of the GPU, as in `device = \"cuda:0\"`, or start it so that LOCAL_RANK is set",
        ));
    };
    let num_gpus = Device::enumerate(DeviceType::Cuda).into_iter().count();
    if num_gpus == 0 {
        return Err(refused(
            choice,
            "this host has no NVIDIA GPU that the program can see",
            "install NVIDIA's driver, with its library libcuda.so.1, until `nvidia-smi` lists a GPU; CUDA_VISIBLE_DEVICES \
             must not hide it",
        ));
    }
    if number >= num_gpus {
        return Err(refused(
            choice,
            format!("GPU {number} is asked for, and this host has {num_gpus}, numbered from 0"),
            "start as many ranks as GPUs on each host, let them share one with `device = \"cuda:0\"`, or see what \
             CUDA_VISIBLE_DEVICES hides",
        ));
    }
    let device = Device::cuda(number);
    try_out(choice, &device)?;
    Ok(device)
}

/// Opens the device, before anything is trained: a driver that is too old is known by then.
#[cfg(feature = "cuda")]
fn try_out(choice: DeviceChoice, device: &Device) -> Result<(), Error> {
    let opened = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| device.sync()));
    let problem = match opened {
        Ok(Ok(())) => return Ok(()),
        Ok(Err(error)) => format!("it cannot be opened: {error:?}"),
        Err(_) => "it cannot be opened; the panic before this message says why".to_owned(),
    };
    Err(refused(
        choice,
        problem,
        "update NVIDIA's driver, and see with `nvidia-smi` whether the GPU is free and healthy",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(choice: DeviceChoice, local_rank: Option<usize>) -> String {
        open(choice, local_rank).unwrap_err().to_string()
    }

    #[test]
    fn the_processor_is_always_there() {
        let device = open(DeviceChoice::Flex, None).unwrap();
        assert!(is_host(&device) && is_host(&device.autodiff().gradient_checkpointing()));
    }

    #[cfg(not(feature = "cuda"))]
    #[test]
    fn a_gpu_that_the_program_is_not_built_for_is_refused_with_the_feature_to_build_it_with() {
        let refused = refusal(DeviceChoice::CudaAt(3), Some(0));
        assert!(refused.starts_with("device = \"cuda:3\": ") && refused.contains("the feature `cuda`"), "{refused}");
    }

    #[cfg(not(feature = "cpu"))]
    #[test]
    fn kernels_that_the_program_is_not_built_with_are_refused_with_the_feature_to_build_it_with() {
        let refused = refusal(DeviceChoice::Cpu, Some(0));
        assert!(refused.starts_with("device = \"cpu\": ") && refused.contains("the feature `cpu`"), "{refused}");
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn a_gpu_that_is_not_there_is_refused_with_what_to_install_or_to_change() {
        let untold = refusal(DeviceChoice::Cuda, None);
        assert!(untold.contains("LOCAL_RANK") && untold.contains("cuda:0"), "{untold}");
        let num_gpus = Device::enumerate(burn::tensor::DeviceType::Cuda).into_iter().count();
        let refused = [refusal(DeviceChoice::Cuda, Some(num_gpus)), refusal(DeviceChoice::CudaAt(999), None)];
        for refused in refused {
            match num_gpus {
                0 => assert!(refused.contains("libcuda.so.1") && refused.contains("nvidia-smi"), "{refused}"),
                _ => assert!(refused.contains(&format!("this host has {num_gpus}")), "{refused}"),
            }
        }
    }

    #[cfg(feature = "cpu")]
    #[test]
    fn an_element_type_that_a_device_cannot_compute_in_is_refused_by_name() {
        let device = open(DeviceChoice::Cpu, None).unwrap();
        assert!(!is_host(&device));
        check_dtypes(DeviceChoice::Cpu, &device, [Dtype::F32, Dtype::F64].into_iter()).unwrap();
        let refused = check_dtypes(DeviceChoice::Cpu, &device, [Dtype::F32, Dtype::Bf16].into_iter());
        let refused = refused.unwrap_err().to_string();
        assert!(refused.starts_with("device = \"cpu\": it cannot compute in bf16"), "{refused}");
    }
}
