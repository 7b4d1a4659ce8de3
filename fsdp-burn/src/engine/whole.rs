//! A whole gradient of this rank, which a device may still be copying to host memory.

#[cfg(any(feature = "cuda", feature = "cpu"))]
use burn::backend::Cube;
use burn::backend::flex::FlexTensor;
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Flex, TensorMetadata};
use burn::tensor::{DType, FloatDType, Shape};

use crate::Error;
#[cfg(any(feature = "cuda", feature = "cpu"))]
use crate::peers::CubeFloat;

/// See the module's documentation.
pub(crate) enum Whole {
    Here(FlexTensor),
    #[cfg_attr(not(any(feature = "cuda", feature = "cpu")), expect(dead_code))]
    Coming(Coming),
    /// It stays on a device, where it is reduced.
    #[cfg(any(feature = "cuda", feature = "cpu"))]
    OnDevice(Box<CubeFloat>),
}

/// A copy that is under way.
pub(crate) struct Coming {
    pub(crate) shape: Shape,
    pub(crate) dtype: DType,
    /// Waits for its end; fails with the device.
    pub(crate) wait: Box<dyn FnOnce() -> Result<FlexTensor, Error> + Send>,
}

impl Whole {
    /// Size of the elements, in bytes.
    pub(super) fn size_bytes(&self) -> usize {
        match self {
            Whole::Here(tensor) => tensor.shape().num_elements() * tensor.dtype().size(),
            Whole::Coming(Coming { shape, dtype, .. }) => shape.num_elements() * dtype.size(),
            #[cfg(any(feature = "cuda", feature = "cpu"))]
            Whole::OnDevice(tensor) => tensor.shape().num_elements() * tensor.dtype().size(),
        }
    }

    /// The gradient, waited for.
    pub(super) fn wait(self) -> Result<FlexTensor, Error> {
        match self {
            Whole::Here(tensor) => Ok(tensor),
            Whole::Coming(coming) => (coming.wait)(),
            #[cfg(any(feature = "cuda", feature = "cpu"))]
            Whole::OnDevice(tensor) => crate::cube::to_host(*tensor),
        }
    }

    pub(super) fn times(self, factor: f64) -> Result<Whole, Error> {
        match self {
            #[cfg(any(feature = "cuda", feature = "cpu"))]
            Whole::OnDevice(tensor) => Ok(Whole::OnDevice(Box::new(Cube::float_mul_scalar(*tensor, factor.into())))),
            other => Ok(Whole::Here(Flex::float_mul_scalar(other.wait()?, factor.into()))),
        }
    }

    /// The sum, in `dtype`.
    pub(super) fn plus(self, other: Whole, dtype: FloatDType) -> Result<Whole, Error> {
        match (self, other) {
            #[cfg(any(feature = "cuda", feature = "cpu"))]
            (Whole::OnDevice(a), Whole::OnDevice(b)) => {
                let [a, b] = [a, b].map(|tensor| Cube::float_cast(*tensor, dtype));
                Ok(Whole::OnDevice(Box::new(Cube::float_add(a, b))))
            }
            (a, b) => {
                let [a, b] = [Flex::float_cast(a.wait()?, dtype), Flex::float_cast(b.wait()?, dtype)];
                Ok(Whole::Here(Flex::float_add(a, b)))
            }
        }
    }
}
