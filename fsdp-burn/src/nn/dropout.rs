//! Dropout that draws from the rank's own stream.

use burn::module::{Content, DisplaySettings, Flag, Module, ModuleDisplay, Param};
use burn::nn::DropoutConfig;
use burn::tensor::{Tensor, TensorData};

use crate::random;

/// Burn's dropout, drawing from the rank's own stream of random numbers in place of the device's.
///
/// With Burn's [`Dropout`](burn::nn::Dropout) ranks that are threads draw from one stream, in an order that differs from run
/// to run. With this one every rank has a stream of its own, which the run's `seed` and the rank decide and a checkpoint
/// continues, and [`recompute`](crate::recompute) draws the same numbers again. Record, freezing and scaling are those of
/// Burn's.
///
/// ```
/// use burn::{nn::DropoutConfig, tensor::{Device, Tensor}};
/// use fsdp_burn::{RandomState, nn::Dropout};
///
/// let dropout = Dropout::from(DropoutConfig::new(0.5));
/// let input = Tensor::<2>::ones([4, 8], &Device::flex().autodiff());
/// RandomState::new(7, 0).install();
/// let first = dropout.forward(input.clone()).into_data();
/// RandomState::new(7, 0).install();
/// assert_eq!(dropout.forward(input.clone()).into_data(), first);
/// // Without autodiff, as in `model.valid()`, nothing is dropped.
/// assert_eq!(dropout.forward(input.inner()).sum().into_scalar::<f32>(), 32.0);
/// ```
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct Dropout {
    /// Probability of an element to become zero, in training.
    pub prob: f64,
    /// Whether to behave as in training; cleared where the module is frozen.
    pub training: Param<Flag>,
}

impl From<DropoutConfig> for Dropout {
    /// # Panics
    /// If the probability is not in [0, 1), as Burn's own.
    fn from(config: DropoutConfig) -> Self {
        let burn::nn::Dropout { prob, training } = config.init();
        Self { prob, training }
    }
}

impl Dropout {
    /// Drops elements of `input`, of any shape, and scales the others by `1 / (1 - prob)`.
    ///
    /// Cost: 4 bytes and one draw per element.
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        let device = input.device();
        if !self.training.is_enabled() || !device.is_autodiff() || self.prob == 0.0 {
            return input;
        }
        let shape = input.shape();
        let mask = random::dropout_mask(1.0 - self.prob, shape.num_elements());
        let mask = Tensor::from_data(TensorData::new(mask, shape), (&device, input.dtype()));
        input * mask
    }
}

impl ModuleDisplay for Dropout {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new().with_new_line_after_attribute(false).optional()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        content.add("prob", &self.prob).optional()
    }
}
