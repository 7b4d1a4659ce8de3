//! Sums of small tensors over all ranks, in the middle of forward and backward.

use burn::backend::Flex;
use burn::backend::TensorMetadata;
use burn::backend::flex::FlexTensor;
use burn::backend::ops::FloatTensorOps;
use fsdp_core::{OpTag, Phase, Reduce, ReducePart, ShardLayout};

use super::Engine;
use crate::model::reduce_number;
use crate::{Error, host};

impl Engine {
    /// The sum of `x` over all ranks but those whose gradients count for nothing.
    ///
    /// # Panics
    /// Unwinds with the error when a collective fails, as [`Engine::gather`].
    pub(crate) fn sum_in_forward(&self, x: FlexTensor) -> FlexTensor {
        let counts = self.lock().weight != 0.0;
        let x = if counts { x } else { zeros_like(x) };
        self.summed(x, Phase::Forward)
    }

    /// The gradient of what a rank has put into a sum: the sum of all ranks' gradients, each with the weight that its
    /// losses have. This rank's own weight is left out of it, since all of its gradients are multiplied with it later.
    ///
    /// # Panics
    /// As [`Engine::sum_in_forward`].
    pub(crate) fn sum_in_backward(&self, gradient: FlexTensor) -> FlexTensor {
        let (weight, void) = {
            let state = self.lock();
            (state.weight, state.void)
        };
        if void {
            // Whatever it is: it may not be a number.
            return zeros_like(self.summed(zeros_like(gradient), Phase::Backward));
        }
        if weight == 1.0 {
            return self.summed(gradient, Phase::Backward);
        }
        if weight == 0.0 {
            return zeros_like(self.summed(zeros_like(gradient), Phase::Backward));
        }
        let sum = self.summed(Flex::float_mul_scalar(gradient, weight.into()), Phase::Backward);
        Flex::float_mul_scalar(sum, weight.recip().into())
    }

    /// The sum of a number over all ranks but those whose gradients count for nothing.
    ///
    /// # Panics
    /// As [`Engine::sum_in_forward`].
    pub(crate) fn sum_of_number(&self, number: f64) -> f64 {
        let counts = self.lock().weight != 0.0;
        let tag = OpTag::new(self.progress().0, Phase::Forward, "number of items");
        let own = if counts { number } else { 0.0 };
        match reduce_number(self.links.control.as_ref(), &tag, own, Reduce::SUM) {
            Ok(sum) => sum,
            Err(error) => self.fail(error),
        }
    }

    fn summed(&self, x: FlexTensor, phase: Phase) -> FlexTensor {
        match self.try_sum(&x, phase) {
            Ok(sum) => sum,
            Err(error) => self.fail(error),
        }
    }

    fn try_sum(&self, x: &FlexTensor, phase: Phase) -> Result<FlexTensor, Error> {
        let shape = x.shape().to_vec();
        let Some(dtype) = host::dtype_of(x.dtype()) else {
            return Err(self.misuse(
                &format!("a tensor of {:?} cannot be added up over ranks", x.dtype()),
                "cast it to float32 first",
            ));
        };
        let layout = ShardLayout::new(&[shape.iter().product()], 0, self.links.control.world_size());
        let part = ReducePart { full: host::bytes_of(x), layout, dtype };
        let tag = OpTag::new(self.progress().0, phase, "sum over ranks");
        let mut sums = self.links.control.all_reduce(&tag, &[part], Reduce::SUM)?;
        match sums.pop() {
            Some(sum) => Ok(host::flex_tensor(sum, &shape, dtype)),
            None => Err(self.misuse("a reduction of one part returned none", "report this as a bug")),
        }
    }
}

/// Zeros in place of what is not to count, which may be infinite or no number.
fn zeros_like(x: FlexTensor) -> FlexTensor {
    Flex::float_zeros(x.shape(), &x.device(), x.dtype().into())
}
