//! AdamW in one pass over a block: Burn's arithmetic, without its intermediate tensors.
//!
//! Op by op, a step of AdamW reads and writes a dozen tensors as large as the parameter. Here each element of the
//! parameter, its gradient and its two moments is read once, and all that follows from it is computed in registers. The
//! idea is that of DeepSpeed's CPUAdam (Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", USENIX
//! ATC 2021) and of the fused optimizers of PyTorch; unlike those it rounds where op-by-op rounds, so bits are equal.

use std::sync::Arc;

use burn::optim::{
    AdamW, AdamWConfig, AdamWState, AdaptiveMomentumState, LearningRate, Optimizer, RecordState, StateSink,
    StateSource, join_path,
};
use burn::tensor::{DType, Device, Tensor, TensorData};
use bytes::Bytes;
use multiversion::multiversion;
use rayon::prelude::*;
use serde::Deserialize;

use crate::{Error, flat_state, host};

/// Elements that a thread computes at a time: few enough that five arrays of them stay in the second-level cache.
const PIECE_LEN: usize = 16 * 1024;

/// Burn's AdamW, computed in one pass over each parameter in place of about fifteen.
///
/// The result has the same bits as Burn's [`AdamW`], and the state the same record, so either continues what the other
/// began. It is a Burn [`Optimizer`], in sharded training and in plain.
///
/// Memory: 4 bytes per element of the parameter in work, for its new value; where a save in the background still holds the
/// moments, 8 more, which replace them. Traffic to memory: 28 bytes per element.
/// The first step of a parameter, tensors that are not float32 on the CPU, AMSGrad and cautious weight decay are left to
/// Burn's own.
///
/// ```
/// use burn::{module::Module, nn::{Linear, LinearConfig}, optim::AdamWConfig, tensor::Tensor};
/// use fsdp_burn::{Config, Error, FusedAdamW, Sharded, launch};
///
/// #[derive(Module, Debug, Sharded)]
/// struct Model {
///     layer: Linear,
/// }
///
/// launch(&Config { world_size: 2, ..Config::default() }, |rank| {
///     let layer = LinearConfig::new(4, 4).init(&rank.device());
///     let mut model = rank.shard(Model { layer })?;
///     let mut optimizer = rank.optimizer(FusedAdamW::new(&AdamWConfig::new().with_weight_decay(0.1))?)?;
///     let loss = model.layer.forward(Tensor::<2>::ones([8, 4], &rank.device())).mean();
///     let gradients = model.backward(loss)?;
///     optimizer.step(1e-3, &mut model, gradients)
/// })?;
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone)]
pub struct FusedAdamW {
    op_by_op: AdamW,
    settings: Settings,
}

/// The fields of an [`AdamWConfig`], which shows them to serde only.
#[derive(Clone, Deserialize)]
struct Settings {
    beta_1: f32,
    beta_2: f32,
    epsilon: f32,
    weight_decay: f32,
    cautious_weight_decay: bool,
    amsgrad: bool,
    grad_clipping: Option<serde::de::IgnoredAny>,
}

impl FusedAdamW {
    /// The optimizer of this configuration.
    ///
    /// # Errors
    /// If the configuration clips gradients: Burn does that outside of the optimizer of one tensor.
    pub fn new(config: &AdamWConfig) -> Result<Self, Error> {
        let misuse = |problem: String, remedy| Error::Misuse { problem, remedy };
        let settings: Settings = serde_json::to_value(config).and_then(serde_json::from_value).map_err(|error| {
            misuse(
                format!("the configuration of AdamW cannot be read: {error}"),
                "use Burn in the version that this crate names",
            )
        })?;
        match settings.grad_clipping {
            None => Ok(Self { op_by_op: config.build(), settings }),
            Some(_) => Err(misuse(
                "the configuration of AdamW clips gradients, which a fused optimizer does not".into(),
                "set `gradient_clip_norm` in the configuration of the run, or clip with \
                 `ModuleOptimizer::from(FusedAdamW::new(...)?).with_grad_clipping(...)`",
            )),
        }
    }
}

/// The state of [`FusedAdamW`] for one parameter: that of Burn's [`AdamW`], by its record.
///
/// A copy shares the moments, and a step that finds them shared leaves them as they are and goes on with a copy.
#[derive(Clone)]
pub struct FusedAdamWState<const D: usize> {
    moments: Moments<D>,
}

#[derive(Clone)]
enum Moments<const D: usize> {
    OpByOp(Box<AdamWState<D>>),
    Fused { time: usize, first: Arc<TensorData>, second: Arc<TensorData> },
}

impl<const D: usize> Moments<D> {
    fn into_op_by_op(self, device: &Device) -> AdamWState<D> {
        match self {
            Moments::OpByOp(state) => *state,
            Moments::Fused { time, first, second } => {
                let tensor = |moment| Tensor::from_data(shared(&moment), (device, DType::F32));
                let [moment_1, moment_2] = [first, second].map(tensor);
                AdamWState { momentum: AdaptiveMomentumState { time, moment_1, moment_2, max_moment_2: None } }
            }
        }
    }
}

impl<const D: usize> RecordState for FusedAdamWState<D> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        match &self.moments {
            Moments::OpByOp(state) => state.state_flatten(prefix, out),
            Moments::Fused { time, first, second } => {
                let prefix = join_path(prefix, "momentum");
                out.push_scalar(&prefix, "time", (*time).into());
                for (leaf, moment) in [("moment_1", first), ("moment_2", second)] {
                    // See [Note: State without a copy].
                    if let Some(moment) = flat_state::lend(&prefix, leaf, shared(moment)) {
                        out.push_tensor(&prefix, leaf, moment);
                    }
                }
            }
        }
    }

    fn state_unflatten(prefix: &str, source: &mut StateSource, device: &Device) -> Option<Self> {
        AdamWState::state_unflatten(prefix, source, device)
            .map(|state| Self { moments: Moments::OpByOp(Box::new(state)) })
    }
}

impl Optimizer for FusedAdamW {
    type State<const D: usize> = FusedAdamWState<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<FusedAdamWState<D>>,
    ) -> (Tensor<D>, Option<FusedAdamWState<D>>) {
        let settings = &self.settings;
        let device = tensor.device();
        let fits = !settings.amsgrad
            && !settings.cautious_weight_decay
            && device == Device::flex()
            && [tensor.dtype(), grad.dtype()] == [DType::F32; 2];
        let fused = match state.map(|state| state.moments) {
            Some(Moments::Fused { time, first, second }) if fits => Ok((time, first, second)),
            Some(Moments::OpByOp(state)) if fits && state.momentum.moment_1.dtype() == DType::F32 => {
                let AdaptiveMomentumState { time, moment_1, moment_2, .. } = state.momentum;
                let [first, second] = [moment_1, moment_2].map(|moment| Arc::new(moment.into_data()));
                Ok((time, first, second))
            }
            other => Err(other.map(|moments| moments.into_op_by_op(&device))),
        };
        let (time, mut first, mut second) = match fused {
            Ok((time, first, second)) => (time + 1, first, second),
            Err(state) => {
                let (tensor, state) = self.op_by_op.step(lr, tensor, grad, state);
                return (tensor, state.map(|state| FusedAdamWState { moments: Moments::OpByOp(Box::new(state)) }));
            }
        };
        let shape = tensor.shape();
        let [tensor, grad] = [tensor, grad].map(Tensor::into_data);
        let (tensor, grad) = (floats(&tensor), floats(&grad));
        let update = Update::new(settings, lr, time);
        let updated = match (Arc::get_mut(&mut first), Arc::get_mut(&mut second)) {
            (Some(first), Some(second)) => update.apply(tensor, grad, [first, second].map(floats_mut), None),
            // A save in the background holds them.
            _ => {
                let mut new = [&first, &second].map(|moment| vec![0.0; moment.num_elements()]);
                let noted = [&first, &second].map(|moment| floats(moment));
                let updated = update.apply(tensor, grad, new.each_mut().map(Vec::as_mut_slice), Some(noted));
                [first, second] = new.map(|moment| Arc::new(TensorData::new(moment, shape.clone())));
                updated
            }
        };
        let moments = Moments::Fused { time, first, second };
        (Tensor::from_data(TensorData::new(updated, shape), &device), Some(FusedAdamWState { moments }))
    }

    fn to_device<const D: usize>(state: FusedAdamWState<D>, device: &Device) -> FusedAdamWState<D> {
        let moments = match state.moments {
            Moments::OpByOp(state) => Moments::OpByOp(Box::new(AdamW::to_device(*state, device))),
            fused if *device == Device::flex() => fused,
            fused => Moments::OpByOp(Box::new(fused.into_op_by_op(device))),
        };
        FusedAdamWState { moments }
    }
}

/// The numbers of one step of one parameter, rounded as Burn rounds them.
#[derive(Clone, Copy)]
struct Update {
    beta_1: f32,
    beta_2: f32,
    factor_1: f32,
    factor_2: f32,
    correction_1: f32,
    correction_2: f32,
    epsilon: f32,
    decay: f32,
    lr: f32,
}

impl Update {
    fn new(settings: &Settings, lr: LearningRate, time: usize) -> Self {
        let &Settings { beta_1, beta_2, epsilon, weight_decay, .. } = settings;
        Self {
            beta_1,
            beta_2,
            factor_1: 1.0 - beta_1,
            factor_2: 1.0 - beta_2,
            correction_1: 1.0 - beta_1.powi(time as i32),
            correction_2: 1.0 - beta_2.powi(time as i32),
            epsilon,
            decay: (1.0 - lr * f64::from(weight_decay)) as f32,
            lr: lr as f32,
        }
    }

    /// Steps the moments in place, on all threads of the rank, and returns the new values. Begins with the moments that are
    /// `noted` where there are such: each piece is copied when its turn has come, so that it is near when it is stepped.
    fn apply(
        self,
        tensor: &[f32],
        grad: &[f32],
        [moment_1, moment_2]: [&mut [f32]; 2],
        noted: Option<[&[f32]; 2]>,
    ) -> Vec<f32> {
        let mut updated = vec![0.0; tensor.len()];
        let inputs = tensor.par_chunks(PIECE_LEN).zip(grad.par_chunks(PIECE_LEN));
        let moments = moment_1.par_chunks_mut(PIECE_LEN).zip(moment_2.par_chunks_mut(PIECE_LEN));
        let pieces = updated.par_chunks_mut(PIECE_LEN).zip(inputs.zip(moments)).enumerate();
        pieces.for_each(|(index, (updated, ((tensor, grad), (moment_1, moment_2))))| {
            if let Some([noted_1, noted_2]) = noted {
                let start = index * PIECE_LEN;
                moment_1.copy_from_slice(&noted_1[start..start + moment_1.len()]);
                moment_2.copy_from_slice(&noted_2[start..start + moment_2.len()]);
            }
            step_piece(self, tensor, grad, moment_1, moment_2, updated);
        });
        updated
    }
}

/// One pass over slices of the same length. Each product and sum is rounded by itself, as separate ops would round it.
#[multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2"))]
fn step_piece(
    with: Update,
    tensor: &[f32],
    grad: &[f32],
    moment_1: &mut [f32],
    moment_2: &mut [f32],
    updated: &mut [f32],
) {
    let inputs = tensor.iter().zip(grad);
    let moments = moment_1.iter_mut().zip(moment_2);
    for (((&value, &grad), (moment_1, moment_2)), updated) in inputs.zip(moments).zip(updated) {
        *moment_1 = *moment_1 * with.beta_1 + grad * with.factor_1;
        *moment_2 = *moment_2 * with.beta_2 + (grad * grad) * with.factor_2;
        let corrected_1 = *moment_1 / with.correction_1;
        let corrected_2 = *moment_2 / with.correction_2;
        let delta = corrected_1 / (corrected_2.sqrt() + with.epsilon);
        *updated = value * with.decay - delta * with.lr;
    }
}

fn floats(data: &TensorData) -> &[f32] {
    data.as_slice().expect("float32 was checked")
}

fn floats_mut(data: &mut TensorData) -> &mut [f32] {
    data.as_mut_slice().expect("float32 was checked")
}

/// A moment for Burn, which shares its memory.
fn shared(moment: &Arc<TensorData>) -> TensorData {
    let bytes = Bytes::from_owner(Elements(moment.clone()));
    host::data_of(bytes, moment.shape(), moment.dtype())
}

struct Elements(Arc<TensorData>);

impl AsRef<[u8]> for Elements {
    fn as_ref(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

#[cfg(test)]
mod tests {
    use burn::grad_clipping::GradientClippingConfig;

    use super::*;

    /// Values of both signs and many magnitudes, zeros of both signs among them.
    fn values(seed: u32, len: usize) -> Tensor<1> {
        let value = |index: u32| {
            let mixed = (index ^ seed).wrapping_mul(0x9E37_79B9).rotate_left(13).wrapping_mul(0x85EB_CA6B);
            match mixed % 11 {
                0 => 0.0,
                1 => -0.0,
                _ => (f64::from(mixed) / f64::from(u32::MAX) - 0.5) as f32 * 10_f32.powi((mixed % 9) as i32 - 6),
            }
        };
        Tensor::from_data(TensorData::new((0..len as u32).map(value).collect::<Vec<_>>(), [len]), &Device::flex())
    }

    fn bits(tensor: &Tensor<1>) -> Vec<u32> {
        floats(&tensor.clone().into_data()).iter().map(|value| value.to_bits()).collect()
    }

    /// What a state records, by name.
    fn recorded<S: RecordState>(state: &S) -> Vec<String> {
        let mut sink = StateSink::default();
        state.state_flatten("id", &mut sink);
        let tensors = sink.tensors.into_iter().map(|(name, data)| format!("{name} {:?}", data.as_bytes()));
        tensors.chain(sink.scalars.into_iter().map(|scalar| format!("{scalar:?}"))).collect()
    }

    /// Ten steps, and the bits of the parameter and the record of the state after each. In some of them the state is shared.
    fn run<O: Optimizer>(optimizer: &O, len: usize) -> Vec<(Vec<u32>, Vec<String>)> {
        let (mut tensor, mut state) = (values(1, len), None);
        let step = |step: u32| {
            let (old, lr) = (tensor.clone(), 3e-4 * f64::from(step + 1));
            let noted = state.clone().filter(|_| step % 3 == 2);
            let before = noted.as_ref().map(recorded);
            (tensor, state) = optimizer.step(lr, old, values(2 + step, len), state.take());
            assert!(noted.as_ref().map(recorded) == before, "what is noted stays");
            (bits(&tensor), recorded(state.as_ref().unwrap()))
        };
        (0..10).map(step).collect()
    }

    #[test]
    fn it_goes_on_from_a_record_of_burns_adamw_and_the_other_way_round() {
        let config = AdamWConfig::new().with_weight_decay(0.1);
        let (fused, burn) = (FusedAdamW::new(&config).unwrap(), config.build());
        let steps = |state: &mut Option<FusedAdamWState<1>>, from: u32, until: u32, mut tensor: Tensor<1>| {
            for step in from..until {
                (tensor, *state) = fused.step(1e-3, tensor, values(2 + step, 37), state.take());
            }
            tensor
        };
        let mut straight = None;
        let expected = steps(&mut straight, 0, 4, values(1, 37));
        let (mut tensor, mut of_burn) = (values(1, 37), None);
        for step in 0..2 {
            (tensor, of_burn) = burn.step(1e-3, tensor, values(2 + step, 37), of_burn.take());
        }
        let mut sink = StateSink::default();
        of_burn.unwrap().state_flatten("id", &mut sink);
        let mut source = StateSource::new(sink.scalars.into_iter().collect());
        sink.tensors.into_iter().for_each(|(name, data)| source.insert_tensor(name, data));
        let mut state = FusedAdamWState::state_unflatten("id", &mut source, &Device::flex());
        let got = steps(&mut state, 2, 4, tensor);
        assert!(bits(&got) == bits(&expected) && recorded(&state.unwrap()) == recorded(&straight.unwrap()));
    }

    #[test]
    fn every_step_has_the_bits_of_burns_adamw() {
        let base = AdamWConfig::new();
        let configs = [
            base.clone(),
            base.clone().with_beta_1(0.8).with_beta_2(0.95).with_epsilon(1e-8).with_weight_decay(0.1),
            base.clone().with_weight_decay(0.0),
            base.clone().with_amsgrad(true),
            base.with_cautious_weight_decay(true),
        ];
        for config in configs {
            for len in [0, 1, 37, 2 * PIECE_LEN + 5] {
                let fused = FusedAdamW::new(&config).unwrap();
                assert!(run(&fused, len) == run(&config.build(), len), "{config}, {len} elements");
            }
        }
    }

    #[test]
    fn a_configuration_that_clips_is_refused() {
        let clipping = Some(GradientClippingConfig::Norm(1.0));
        let error = FusedAdamW::new(&AdamWConfig::new().with_grad_clipping(clipping)).err().unwrap().to_string();
        assert!(error.contains("clips gradients") && error.contains("gradient_clip_norm"), "{error}");
    }
}
