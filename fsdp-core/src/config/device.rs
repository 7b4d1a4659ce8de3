//! The setting of what ranks compute on.

use std::fmt;

/// What ranks compute on: key `device` of the configuration.
///
/// ```
/// use fsdp_core::DeviceChoice;
///
/// assert_eq!(DeviceChoice::named("cuda"), Some(DeviceChoice::Cuda));
/// assert_eq!(DeviceChoice::named("cuda:1"), Some(DeviceChoice::CudaAt(1)));
/// // The third rank of a host takes its third GPU, unless all share one.
/// assert_eq!(DeviceChoice::Cuda.gpu(Some(2)), Some(2));
/// assert_eq!(DeviceChoice::CudaAt(1).gpu(Some(2)), Some(1));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DeviceChoice {
    /// The processor, with Burn's Flex backend.
    #[default]
    Flex,
    /// The processor, with the kernels that GPUs run, compiled for it.
    Cpu,
    /// An NVIDIA GPU for each rank of a host, by the rank's number on it.
    Cuda,
    /// The NVIDIA GPU of this number, for all ranks of a host.
    CudaAt(u16),
}

impl DeviceChoice {
    /// What the choices are called; any other number may stand in the last.
    pub const NAMES: &'static [&'static str] = &["flex", "cpu", "cuda", "cuda:0"];

    /// The choice of this name.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "flex" => Some(Self::Flex),
            "cpu" => Some(Self::Cpu),
            "cuda" => Some(Self::Cuda),
            _ => {
                // Digits only: a sign would be a number too.
                let number = name.strip_prefix("cuda:")?;
                let number = number.bytes().all(|byte| byte.is_ascii_digit()).then(|| number.parse().ok())?;
                number.map(Self::CudaAt)
            }
        }
    }

    /// The number of the GPU, for the rank that is the `local_rank`-th of its host, where that is known.
    pub fn gpu(self, local_rank: Option<usize>) -> Option<usize> {
        match self {
            Self::Flex | Self::Cpu => None,
            Self::Cuda => local_rank,
            Self::CudaAt(number) => Some(number.into()),
        }
    }

    /// Whether `num_ranks` ranks of a host compute on one device.
    pub fn is_shared(self, num_ranks: usize) -> bool {
        self != Self::Cuda || num_ranks == 1
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flex => f.write_str("flex"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda => f.write_str("cuda"),
            Self::CudaAt(number) => write!(f, "cuda:{number}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_is_named_as_it_prints_and_nothing_else_is_one() {
        for &name in DeviceChoice::NAMES {
            assert_eq!(DeviceChoice::named(name).unwrap().to_string(), name);
        }
        assert_eq!(DeviceChoice::named("cuda:65535"), Some(DeviceChoice::CudaAt(u16::MAX)));
        for name in ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:+1", "cuda:65536", "cuda: 0", "CUDA"] {
            assert_eq!(DeviceChoice::named(name), None, "{name}");
        }
    }

    #[test]
    fn ranks_of_a_host_share_a_device_unless_each_takes_a_gpu() {
        use DeviceChoice::{Cpu, Cuda, CudaAt, Flex};
        assert!([Flex, Cpu, CudaAt(0)].iter().all(|choice| choice.is_shared(3)));
        assert!(Cuda.is_shared(1) && !Cuda.is_shared(2));
        assert_eq!([Flex, Cpu, Cuda, CudaAt(4)].map(|choice| choice.gpu(None)), [None, None, None, Some(4)]);
    }
}
