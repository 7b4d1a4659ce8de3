//! The exact GELU in one pass forward and one backward.

use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::retro_forward::RetroForward;
use burn::backend::autodiff::checkpoint::state::BackwardStates;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
use burn::backend::ops::ActivationOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, Flex, TensorMetadata, backend_extension};
use burn::tensor::{DType, Tensor, TensorData};
use multiversion::multiversion;
use rayon::prelude::*;

/// Elements that a thread computes at a time.
const PIECE_LEN: usize = 16 * 1024;

/// The Gaussian error linear unit x·Φ(x) of every element, Φ being the normal distribution's cumulative function
/// (Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016): Burn's `gelu`, to rounding, with vector instructions.
///
/// On the CPU Burn computes the error function one element at a time, and backward in several passes; in a small GPT that
/// is a tenth of a step. Values differ from Burn's by at most 5e-7 times the larger of 1 and |x|. Tensors that are not
/// float32 are left to Burn. Memory: the output, and in backward the gradient; the input is what autodiff keeps.
///
/// ```
/// use burn::tensor::{Device, Tensor, activation};
/// use fsdp_burn::nn::gelu;
///
/// let x = Tensor::<1>::from_floats([-1.0, 0.0, 2.0], &Device::flex());
/// let difference = gelu(x.clone()) - activation::gelu(x);
/// assert!(difference.abs().max().into_scalar::<f32>() < 1e-6);
/// ```
pub fn gelu<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    Tensor::from_dispatch(<Dispatch as GeluOps>::fused_gelu(x.into_dispatch()))
}

#[backend_extension(Flex, Cube: cfg(any(feature = "cuda", feature = "cpu")), Autodiff)]
pub(crate) trait GeluOps: Backend {
    /// x·Φ(x).
    fn fused_gelu(x: FloatTensor<Self>) -> FloatTensor<Self>;
    /// The gradient of `x`, from that of the output.
    fn fused_gelu_backward(x: FloatTensor<Self>, gradient: FloatTensor<Self>) -> FloatTensor<Self>;
}

impl GeluOps for Flex {
    fn fused_gelu(x: FlexTensor) -> FlexTensor {
        if x.dtype() != DType::F32 {
            return Flex::gelu(x);
        }
        let x = x.to_contiguous();
        map(&[elements(&x)], &x, |inputs, output| forward(inputs[0], output))
    }

    fn fused_gelu_backward(x: FlexTensor, gradient: FlexTensor) -> FlexTensor {
        if [x.dtype(), gradient.dtype()] != [DType::F32; 2] {
            return Flex::gelu_backward(x, gradient);
        }
        let [x, gradient] = [x.to_contiguous(), gradient.to_contiguous()];
        map(&[elements(&x), elements(&gradient)], &x, |inputs, output| backward(inputs[0], inputs[1], output))
    }
}

impl<B: GeluOps, C: CheckpointStrategy> GeluOps for Autodiff<B, C> {
    fn fused_gelu(x: FloatTensor<Self>) -> FloatTensor<Self> {
        let output = B::fused_gelu(x.primitive().clone());
        let op = Gelu.prepare::<C>([x.node()]).memory_bound().retro_forward(Again::<B>::of(x.id())).parents([&x]);
        match op.stateful() {
            OpsKind::Tracked(mut op) => {
                let state = op.checkpoint(&x);
                op.finish(state, output)
            }
            OpsKind::UnTracked(op) => op.finish(output),
        }
    }

    fn fused_gelu_backward(x: FloatTensor<Self>, gradient: FloatTensor<Self>) -> FloatTensor<Self> {
        FloatTensor::<Self>::new(B::fused_gelu_backward(x.into_primitive(), gradient.into_primitive()))
    }
}

#[derive(Debug)]
struct Gelu;

impl<B: GeluOps> Backward<B, 1> for Gelu {
    type State = NodeId;

    fn backward(self, ops: Ops<NodeId, 1>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let x = checkpointer.retrieve_node_output(ops.state);
        let gradient = grads.consume::<B>(&ops.node);
        if let Some(parent) = &ops.parents[0] {
            grads.register::<B>(parent.id, B::fused_gelu_backward(x, gradient));
        }
    }
}

#[derive(Debug)]
struct Again<B> {
    x: NodeId,
    backend: std::marker::PhantomData<B>,
}

impl<B> Again<B> {
    fn of(x: NodeId) -> Self {
        Self { x, backend: std::marker::PhantomData }
    }
}

impl<B: GeluOps> RetroForward for Again<B> {
    fn forward(&self, states: &mut BackwardStates, out: NodeId) {
        let x = states.get_state::<FloatTensor<B>>(&self.x);
        states.save(out, B::fused_gelu(x));
    }
}

/// The elements of a contiguous tensor, which may be a part of its storage.
fn elements(tensor: &FlexTensor) -> &[f32] {
    let start = tensor.layout().start_offset();
    &tensor.storage::<f32>()[start..start + tensor.layout().num_elements()]
}

/// A tensor like `like`, filled piece by piece from the same pieces of `inputs`, on all threads of the rank.
fn map<const N: usize>(
    inputs: &[&[f32]; N],
    like: &FlexTensor,
    fill: impl Fn([&[f32]; N], &mut [f32]) + Sync,
) -> FlexTensor {
    let mut output = vec![0.0; inputs[0].len()];
    output.par_chunks_mut(PIECE_LEN).enumerate().for_each(|(index, piece)| {
        let start = index * PIECE_LEN;
        fill(inputs.map(|input| &input[start..start + piece.len()]), piece);
    });
    FlexTensor::from_data(TensorData::new(output, like.shape()))
}

#[multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2"))]
fn forward(x: &[f32], output: &mut [f32]) {
    for (output, &x) in output.iter_mut().zip(x) {
        *output = x * cumulative(x);
    }
}

#[multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2"))]
fn backward(x: &[f32], gradient: &[f32], output: &mut [f32]) {
    for ((output, &x), &gradient) in output.iter_mut().zip(x).zip(gradient) {
        *output = gradient * (cumulative(x) + x * density(x));
    }
}

/// Φ(x), the probability that a normal variable is below x.
#[inline(always)]
fn cumulative(x: f32) -> f32 {
    0.5 + 0.5 * erf(x * std::f32::consts::FRAC_1_SQRT_2)
}

/// The density of a normal variable at x.
#[inline(always)]
fn density(x: f32) -> f32 {
    const FRAC_1_SQRT_TAU: f32 = 0.398_942_3;
    FRAC_1_SQRT_TAU * exp_of_negative(-0.5 * x * x)
}

/// The error function by a rational function x·P(x²)/Q(x²), beyond ±4 by its limit. Coefficients: Eigen's fast erf for
/// float32, also used by XLA.
#[inline(always)]
fn erf(x: f32) -> f32 {
    // A NaN passes through: both comparisons are false.
    let x = if x > 4.0 { 4.0 } else { x };
    let x = if x < -4.0 { -4.0 } else { x };
    let square = x * x;
    let mut above = -2.726_142_3e-10_f32;
    for coefficient in
        [2.770_681_4e-8_f32, -2.101_024e-6, -5.692_506_5e-5, -7.349_906_3e-4, -2.954_6e-3, -1.609_603_3e-2]
    {
        above = above * square + coefficient;
    }
    let mut below = -1.456_607_2e-5_f32;
    for coefficient in [-2.133_740_6e-4_f32, -1.682_827e-3, -7.373_329e-3, -1.426_473_9e-2] {
        below = below * square + coefficient;
    }
    x * above / below
}

/// e^x for x of at most 0: a power of two by its bits, times a polynomial over ±ln(2)/2. Coefficients: Cephes' expf.
#[inline(always)]
fn exp_of_negative(x: f32) -> f32 {
    // Below this the result is not a normal number; e^-87 is as good as 0.
    let x = if x < -87.0 { -87.0 } else { x };
    // Rounds to the nearest integer: in float32 this sum has no fraction left.
    const ROUNDER: f32 = 12_582_912.0;
    let shifted = x * std::f32::consts::LOG2_E + ROUNDER;
    let power = shifted - ROUNDER;
    let rest = (x - power * 0.693_359_4) - power * -2.121_944_4e-4;
    let mut series = 1.987_569_2e-4_f32;
    for coefficient in [1.398_2e-3_f32, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        series = series * rest + coefficient;
    }
    let fraction = series * rest * rest + rest + 1.0;
    // The integer stands in the low bits of `shifted`.
    let exponent = shifted.to_bits().wrapping_sub(ROUNDER.to_bits()).wrapping_add(127) << 23;
    fraction * f32::from_bits(exponent)
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, activation};

    use super::*;

    /// Many magnitudes of both signs, and what is not finite.
    fn values() -> Vec<f32> {
        let mut values: Vec<f32> = (-120_000..=120_000).map(|index| index as f32 * 1e-4).collect();
        values.extend([0.0, -0.0, 1e-30, -1e-30, 50.0, -50.0, 1e30, f32::INFINITY]);
        values
    }

    /// Values and gradients, of sums with uneven weights.
    fn run(gelu: impl Fn(Tensor<1>) -> Tensor<1>, device: &Device) -> [Vec<f32>; 2] {
        let x = Tensor::<1>::from_data(TensorData::from(&values()[..]), device).require_grad();
        let output = gelu(x.clone());
        let weights = Tensor::from_data(TensorData::from(&values()[..]), device).clamp(-2.0, 2.0);
        let gradients = (output.clone() * weights).sum().backward();
        [output.inner(), x.grad(&gradients).unwrap()].map(|tensor| tensor.into_data().try_to_vec::<f32>().unwrap())
    }

    #[test]
    fn values_and_gradients_are_burns_to_rounding_with_and_without_checkpointing() {
        for device in [Device::flex().autodiff(), Device::flex().autodiff().gradient_checkpointing()] {
            let [expected, got] = [run(activation::gelu, &device), run(super::gelu, &device)];
            for (expected, got) in expected.iter().zip(&got) {
                for ((x, expected), got) in values().iter().zip(expected).zip(got) {
                    let close = (expected - got).abs() <= 5e-7 * x.abs().max(1.0);
                    assert!(close || expected == got || x.is_infinite(), "{x}: {expected} and {got}");
                }
            }
        }
    }

    #[test]
    fn a_value_that_is_no_number_stays_none() {
        let x = Tensor::<1>::from_floats([f32::NAN, 1.0], &Device::flex());
        let output = super::gelu(x).into_data().try_to_vec::<f32>().unwrap();
        assert!(output[0].is_nan() && (output[1] - 0.841_344_7).abs() < 1e-6);
    }

    #[test]
    fn a_view_is_read_where_it_begins() {
        let device = Device::flex();
        let x = Tensor::<2>::from_floats([[0.0, 1.0, 2.0], [-1.0, -2.0, -3.0]], &device);
        let view = x.clone().narrow(0, 1, 1);
        assert_eq!(super::gelu(view.clone()).into_data(), super::gelu(view.clone() * 1.0).into_data());
        let turned = super::gelu(x.clone().swap_dims(0, 1)).swap_dims(0, 1);
        assert_eq!(turned.into_data(), super::gelu(x).into_data());
    }
}
