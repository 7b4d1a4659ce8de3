//! From the key `device` to one of Burn's devices, or to what is missing for it.

use std::sync::Arc;

use burn::tensor::{Device, Tensor};
use fsdp_core::{Config, DeviceChoice, Dtype, Exchange};

use crate::Error;
use crate::host::{self, Identity};

/// The device of the rank that is the `local_rank`-th of its host; `None` where its launcher does not tell.
///
/// # Errors
/// If the program is built without the feature that the device needs, or the machine has no such device.
pub(crate) fn open(config: &Config, local_rank: Option<usize>) -> Result<Device, Error> {
    match config.device {
        DeviceChoice::Flex => Ok(Device::flex()),
        DeviceChoice::Cpu => cpu(),
        DeviceChoice::Cuda | DeviceChoice::CudaAt(_) => cuda(config, local_rank),
    }
}

/// Memory of a device that Burn has taken for tensors, of all ranks of this process that compute on it. What the driver, NCCL and
/// kernels take for themselves is not in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Bytes that tensors use.
    pub used_bytes: u64,
    /// Bytes that are held for tensors, used or not. They only grow, so at the end this is the most that was needed.
    pub reserved_bytes: u64,
}

impl DeviceMemory {
    /// Of a device that has memory of its own, or tells as if it had.
    pub(crate) fn of(device: &Device) -> Option<Self> {
        let usage = device.memory_pool_usage()?;
        Some(Self { used_bytes: usage.bytes_in_use, reserved_bytes: usage.bytes_reserved })
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
    dtypes: impl Iterator<Item = Dtype>,
) -> Result<(), Error> {
    check_supported(choice, |dtype| device.supports_dtype(host::burn_dtype(dtype)), dtypes)
}

/// [`check_dtypes`], of any device: those that Burn has on every machine compute in all types.
fn check_supported(
    choice: DeviceChoice,
    is_supported: impl Fn(Dtype) -> bool,
    mut dtypes: impl Iterator<Item = Dtype>,
) -> Result<(), Error> {
    match dtypes.find(|&dtype| !is_supported(dtype)) {
        Some(dtype) => Err(refused(
            choice,
            format!("it cannot compute in {dtype}"),
            "set another type under [precision], and in `#[shard(unit, precision = ...)]`",
        )),
        None => Ok(()),
    }
}

/// What a device's own errors become.
pub(crate) fn failed(error: impl std::fmt::Debug) -> Error {
    Error::program(format!("the device has failed: {error:?}; go on from the last checkpoint"))
}

/// What the device of `tensor` calls it, as far as it tells; host memory tells by itself.
pub(crate) fn identity<const D: usize>(tensor: &Tensor<D>) -> Option<Identity> {
    #[cfg(any(feature = "cuda", feature = "cpu"))]
    return crate::cube::identity_of(tensor);
    #[cfg(not(any(feature = "cuda", feature = "cpu")))]
    unreachable!("{:?} is a device that the program is built without", tensor.device())
}

/// Where ranks that are threads and share a device post its tensors; nothing where the program is built without devices.
#[cfg(any(feature = "cuda", feature = "cpu"))]
pub(crate) use crate::peers::Board;
#[cfg(not(any(feature = "cuda", feature = "cpu")))]
#[derive(Debug)]
pub(crate) enum Board {}

/// The board of the threads that are the ranks of `config`, if they need one.
pub(crate) fn board(config: &Config) -> Option<Arc<Board>> {
    let is_needed = config.collectives != Exchange::Host && config.device.is_shared(config.world_size);
    #[cfg(any(feature = "cuda", feature = "cpu"))]
    return is_needed.then(|| Board::new(config.timeout()));
    #[cfg(not(any(feature = "cuda", feature = "cpu")))]
    None.filter(|_| is_needed)
}

/// Burn makes optimizer state that it loads on its default device, and the next step takes it to where it belongs. In a program
/// with CUDA that is the first GPU, unless the environment names another device.
///
/// # Errors
/// If that GPU is not there, or ranks with a GPU each would all load theirs on it.
#[cfg(feature = "cuda")]
pub(crate) fn check_loading(config: &Config) -> Result<(), Error> {
    use burn::tensor::DeviceType;

    if Device::default() != Device::cuda(0) {
        return Ok(());
    }
    let why = match () {
        () if Device::enumerate(DeviceType::Cuda).into_iter().next().is_none() => "which this host does not have",
        () if !config.device.is_shared(config.world_size) => "where the state of all ranks has no room",
        () => return Ok(()),
    };
    Err(refused(
        config.device,
        format!("Burn loads optimizer state by way of its default device, the first GPU, {why}"),
        "set BURN_DEVICE=flex in the environment of the program, which makes it host memory",
    ))
}

#[cfg(not(feature = "cuda"))]
pub(crate) fn check_loading(_: &Config) -> Result<(), Error> {
    Ok(())
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
fn cuda(config: &Config, _: Option<usize>) -> Result<Device, Error> {
    Err(refused(
        config.device,
        "the program is built without it",
        "build it with the feature `cuda` of fsdp-burn, or leave the key out",
    ))
}

#[cfg(feature = "cuda")]
fn cuda(config: &Config, local_rank: Option<usize>) -> Result<Device, Error> {
    use burn::tensor::DeviceType;

    let choice = config.device;
    if config.collectives != Exchange::Host && !choice.is_shared(config.world_size) {
        crate::peers::check_nccl(choice)?;
    }
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

    #[test]
    fn an_element_type_that_the_device_lacks_is_refused_with_the_key_to_set() {
        let lacks = |lacking| move |dtype| dtype != lacking;
        let used = || [Dtype::F32, Dtype::Bf16].into_iter();
        assert!(check_supported(DeviceChoice::Cuda, lacks(Dtype::F16), used()).is_ok());
        let error = check_supported(DeviceChoice::Cuda, lacks(Dtype::Bf16), used()).unwrap_err().to_string();
        assert!(
            error.contains("device = \"cuda\": it cannot compute in bf16; set another type under [precision]"),
            "{error}"
        );
    }
}
