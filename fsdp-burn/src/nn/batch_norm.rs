//! Batch normalisation over the batches of all ranks.

use burn::module::{Content, DisplaySettings, Flag, Module, ModuleDisplay, Param, RunningState};
use burn::tensor::{DType, FloatDType, Tensor};

use crate::gather_op::GatherOnUse;
use crate::recompute::Pass;
use crate::sum_op::sum_over_ranks;

/// Burn's [`BatchNorm`](burn::nn::BatchNorm), whose mean and variance in training are those of the batches of all ranks: what
/// PyTorch calls `SyncBatchNorm`. Training on ranks is then training on one device with the whole batch, and running
/// statistics are equal on all ranks by themselves.
///
/// It is made from Burn's, whose configuration and records it shares. In a plain model, and in evaluation, it is Burn's.
/// Statistics are computed in float32, whatever the input is. Under [`recompute`](crate::recompute()) they are noted once.
///
/// Cost: in training three small messages per layer in forward and two in backward, for which all ranks wait, so ranks that
/// have nothing to compute must run the same forward. Their samples count, also with a weight of 0 in
/// [`backward_weighted`](crate::ShardedModel::backward_weighted), but not under Burn's learner.
///
/// ```
/// use burn::{module::Module, nn::BatchNormConfig, tensor::Tensor};
/// use fsdp_burn::{Config, Error, Sharded, launch, nn::BatchNorm};
///
/// #[derive(Module, Debug, Sharded)]
/// struct Model {
///     norm: BatchNorm,
/// }
///
/// let outputs = launch(&Config { world_size: 2, ..Config::default() }, |rank| {
///     let device = rank.device();
///     let model = rank.shard(Model { norm: BatchNormConfig::new(1).with_epsilon(1e-9).init(&device).into() })?;
///     // One sample on each rank, 0 and 2: their mean is 1, their deviation 1.
///     let input = Tensor::<2>::full([1, 1], 2 * rank.rank() as i32, &device);
///     Ok(model.norm.forward(input).into_scalar::<f32>())
/// })?;
/// assert_eq!(outputs, [-1.0, 1.0]);
/// # Ok::<(), Error>(())
/// ```
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct BatchNorm {
    /// Scale of each channel.
    pub gamma: Param<Tensor<1>>,
    /// Shift of each channel.
    pub beta: Param<Tensor<1>>,
    /// Whether to behave as in training; cleared where the module is frozen.
    pub training: Param<Flag>,
    /// Mean of what was seen, by channel.
    pub running_mean: RunningState<Tensor<1>>,
    /// Variance of what was seen, by channel.
    pub running_var: RunningState<Tensor<1>>,
    /// Share of the newest batch in the running statistics.
    pub momentum: f64,
    /// Added to the variance.
    pub epsilon: f64,
    over_all_ranks: OverAllRanks,
}

/// Has no parameters. Whoever visits the module tells it by this field from Burn's, whose type has the same name.
#[derive(Module, Debug)]
struct OverAllRanks {}

/// Name of the field of [`BatchNorm`] that Burn's does not have; it is visited after the running statistics.
pub(crate) const OVER_ALL_RANKS: &str = "over_all_ranks";

impl From<burn::nn::BatchNorm> for BatchNorm {
    fn from(norm: burn::nn::BatchNorm) -> Self {
        let burn::nn::BatchNorm { gamma, beta, training, running_mean, running_var, momentum, epsilon } = norm;
        let over_all_ranks = OverAllRanks {};
        Self { gamma, beta, training, running_mean, running_var, momentum, epsilon, over_all_ranks }
    }
}

impl BatchNorm {
    /// Normalises each channel of `input` [batch, channels, ...].
    ///
    /// # Panics
    /// If the input has fewer than two dimensions or another number of channels. Unwinds with the error where a collective
    /// fails.
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        let (gamma, beta) = (full_precision(self.gamma.val()), full_precision(self.beta.val()));
        let (dtype, x) = (input.dtype(), full_precision(input));
        let channels = gamma.dims()[0];
        assert!(D >= 2 && x.dims()[1] == channels, "an input of {:?} for {channels} channels", x.dims());
        let output = if x.device().is_autodiff() && self.training.is_enabled() {
            self.forward_train(x, gamma, beta)
        } else {
            let device = x.device();
            let [mean, var] = [&self.running_mean, &self.running_var].map(|state| state.value().to_device(&device));
            burn::tensor::module::batch_norm(x, gamma, beta, mean, var, self.epsilon)
        };
        match dtype {
            DType::BF16 => output.cast(FloatDType::BF16),
            DType::F16 => output.cast(FloatDType::F16),
            _ => output,
        }
    }

    fn forward_train<const D: usize>(&self, x: Tensor<D>, gamma: Tensor<1>, beta: Tensor<1>) -> Tensor<D> {
        let Some(GatherOnUse { site, .. }) = self.gamma.reparameterization() else {
            let result = burn::tensor::module::batch_norm_train(x, gamma, beta, self.epsilon);
            self.note(result.mean, result.variance);
            return result.output;
        };
        let channels = gamma.dims()[0];
        let num_here = x.shape().num_elements() / channels;
        let num = site.engine.sum_of_number(num_here as f64);
        let mean_over_ranks = |x: Tensor<D>| {
            let sum = x.swap_dims(0, 1).reshape([channels, num_here]).sum_dim(1).reshape([channels]);
            sum_over_ranks(sum, &site.engine).div_scalar(num)
        };
        let mut shape = [1; D];
        shape[1] = channels;
        let along_channels = |statistic: Tensor<1>| statistic.reshape(shape);
        let mean = mean_over_ranks(x.clone());
        let centered = x - along_channels(mean.clone());
        let var = mean_over_ranks(centered.clone() * centered.clone());
        let deviation = (along_channels(var.clone()) + self.epsilon).sqrt();
        self.note(mean, var);
        centered / deviation * along_channels(gamma) + along_channels(beta)
    }

    /// Notes the statistics of a batch, which belong to no graph.
    fn note(&self, mean: Tensor<1>, var: Tensor<1>) {
        if Pass::current() == Pass::Again {
            return;
        }
        for (state, new) in [(&self.running_mean, mean), (&self.running_var, var)] {
            let old = state.value_sync().without_autodiff();
            let new = old * (1.0 - self.momentum) + new.without_autodiff() * self.momentum;
            state.update(Tensor::from_inner(new));
        }
    }
}

fn full_precision<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    match x.dtype() {
        DType::BF16 | DType::F16 => x.cast(FloatDType::F32),
        _ => x,
    }
}

impl ModuleDisplay for BatchNorm {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new().with_new_line_after_attribute(false).optional()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        content.add("momentum", &self.momentum).add("epsilon", &self.epsilon).optional()
    }
}
