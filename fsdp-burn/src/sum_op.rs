//! An op that adds a small tensor up over all ranks, inside forward, with its gradient.

use std::sync::Arc;

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, Flex, backend_extension};
use burn::tensor::Tensor;

use crate::engine::Engine;

/// The sum of `x` over all ranks of the model, on each of them. *Collective*, in forward and in backward.
///
/// A rank whose gradients count for nothing, as under Burn's learner one without a batch, adds nothing.
pub(crate) fn sum_over_ranks<const D: usize>(x: Tensor<D>, engine: &Arc<Engine>) -> Tensor<D> {
    Tensor::from_dispatch(<Dispatch as SumOps>::sum_over_ranks(x.into_dispatch(), Site(engine.clone())))
}

/// The engine that knows the other ranks.
#[derive(Clone, Debug)]
pub(crate) struct Site(Arc<Engine>);

impl Site {
    pub(crate) fn engine(&self) -> &Engine {
        &self.0
    }
}

#[backend_extension(Flex, Cube: cfg(any(feature = "cuda", feature = "cpu")), Autodiff)]
pub(crate) trait SumOps: Backend {
    /// The sum over all ranks.
    fn sum_over_ranks(x: FloatTensor<Self>, site: Site) -> FloatTensor<Self>;
    /// The gradient of `x` with respect to the losses of all ranks, from that of the sum with respect to this rank's.
    fn sum_over_ranks_backward(gradient: FloatTensor<Self>, site: Site) -> FloatTensor<Self>;
}

impl SumOps for Flex {
    fn sum_over_ranks(x: FlexTensor, site: Site) -> FlexTensor {
        site.engine().sum_in_forward(x)
    }

    fn sum_over_ranks_backward(gradient: FlexTensor, site: Site) -> FlexTensor {
        site.engine().sum_in_backward(gradient)
    }
}

impl<B: SumOps, C: CheckpointStrategy> SumOps for Autodiff<B, C> {
    fn sum_over_ranks(x: FloatTensor<Self>, site: Site) -> FloatTensor<Self> {
        let sum = B::sum_over_ranks(x.primitive().clone(), site.clone());
        // Computing it again in backward would be a message more.
        match SumOverRanks.prepare::<C>([x.node()]).compute_bound().stateful() {
            OpsKind::Tracked(op) => op.finish(site, sum),
            OpsKind::UnTracked(op) => op.finish(sum),
        }
    }

    fn sum_over_ranks_backward(gradient: FloatTensor<Self>, site: Site) -> FloatTensor<Self> {
        FloatTensor::<Self>::new(B::sum_over_ranks_backward(gradient.into_primitive(), site))
    }
}

#[derive(Debug)]
struct SumOverRanks;

impl<B: SumOps> Backward<B, 1> for SumOverRanks {
    type State = Site;

    fn backward(self, ops: Ops<Site, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        // Also without a parent that wants it: the other ranks wait.
        let gradient = B::sum_over_ranks_backward(gradient, ops.state);
        if let Some(parent) = &ops.parents[0] {
            grads.register::<B>(parent.id, gradient);
        }
    }
}
