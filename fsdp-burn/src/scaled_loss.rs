//! The loss, multiplied with the loss scale: by `ShardedModel::backward`, or by a program that calls Burn's own.

use std::cell::Cell;

use burn::tensor::{DType, FloatDType, Tensor};

thread_local! {
    /// The scale that a program has to use, until it does.
    static DUE: Cell<Option<f64>> = const { Cell::new(None) };
}

/// `loss`, multiplied with the loss scale of a run in "f16", where the program calls Burn's own `backward`: in the
/// `TrainStep::step` of a model that Burn's learner trains, `scale_loss(loss).backward()`. Once for each step.
///
/// The optimizer's step divides the gradients again. [`ShardedModel::backward`](crate::ShardedModel::backward) does all of it by
/// itself. Without a loss scale, and in a program without ranks, it returns `loss`; a scaled loss is at least float32.
///
/// ```
/// use burn::tensor::{Device, Tensor};
///
/// let loss = Tensor::<1>::from_floats([3.0], &Device::flex());
/// assert_eq!(fsdp_burn::scale_loss(loss).into_scalar::<f32>(), 3.0); // no learner here
/// ```
pub fn scale_loss(loss: Tensor<1>) -> Tensor<1> {
    match DUE.take() {
        Some(scale) => scaled(loss, scale),
        None => loss,
    }
}

/// In float32 at least, since the scale may be beyond what half precision can hold.
pub(crate) fn scaled(loss: Tensor<1>, scale: f64) -> Tensor<1> {
    let loss = if loss.dtype() == DType::F64 { loss } else { loss.cast(FloatDType::F32) };
    loss.mul_scalar(scale)
}

/// Runs a step whose loss has to be multiplied with `scale`; returns whether it was, too.
pub(crate) fn with_scale_due<T>(scale: Option<f64>, step: impl FnOnce() -> T) -> (T, bool) {
    DUE.set(scale);
    let result = step();
    (result, DUE.take().is_none())
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;

    #[test]
    fn a_scale_is_used_once_and_noticed_if_it_is_not() {
        let loss = || Tensor::<1>::from_floats([3.0], &Device::flex());
        let value = |loss: Tensor<1>| loss.into_scalar::<f32>();
        let (values, is_scaled) = with_scale_due(Some(8.0), || [value(scale_loss(loss())), value(scale_loss(loss()))]);
        assert_eq!((values, is_scaled), ([24.0, 3.0], true));
        assert!(!with_scale_due(Some(8.0), || ()).1);
        assert_eq!(value(scale_loss(loss())), 3.0, "what was not used is forgotten");
        assert!(with_scale_due(None, || ()).1);
    }
}
