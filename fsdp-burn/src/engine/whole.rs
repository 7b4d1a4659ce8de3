//! A whole gradient of this rank, which a device may still be copying to host memory.

use burn::backend::TensorMetadata;
use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Shape};

use crate::Error;

/// See the module's documentation.
pub(crate) enum Whole {
    Here(FlexTensor),
    #[cfg_attr(not(any(feature = "cuda", feature = "cpu")), expect(dead_code))]
    Coming(Coming),
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
        }
    }

    /// The gradient, waited for.
    pub(super) fn wait(self) -> Result<FlexTensor, Error> {
        match self {
            Whole::Here(tensor) => Ok(tensor),
            Whole::Coming(coming) => (coming.wait)(),
        }
    }
}
