//! LoRA under sharding: one slot of a parameter for two things.
//!
//! [Note: One slot for the gather and the adapter]
//! Burn keeps an adapter where sharding keeps the gather, and a parameter has one such slot. So the adapter is taken out and
//! put back inside of the gather: the weight becomes `base + scale * (a @ b)` with all three gathered. As an op of its own it
//! is computed again in backward from blocks, while Burn's own sum would hold the whole weight, since its base is frozen and
//! autodiff cannot ask a frozen tensor for its value again.
//!
//! Whatever maps a module cannot see a slot, only what is in it, and puts it back afterwards. Merging adapters
//! (`materialize`) is what empties it. Done on bases of one zero and factors of one 1, it costs nothing and leaves the scale as
//! the value, which no traversal would show otherwise.

use std::marker::PhantomData;

use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::retro_forward::RetroForward;
use burn::backend::autodiff::checkpoint::state::BackwardStates;
use burn::backend::autodiff::checkpoint::strategy::{BalancedCheckpointing, CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, Flex, backend_extension};
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{DType, Tensor};

use crate::gather_op::{GatherSite, ShardOps, Use};
use crate::recompute::Pass;
use crate::survey::{Entry, LoraPart, replaced};

/// What Burn calls the slot's content.
pub(crate) const LORA: &str = "lora";

/// The factors of one parameter, each gathered on use.
#[derive(Module, Debug)]
pub(crate) struct Adapter {
    pub(crate) a: Param<Tensor<2>>,
    pub(crate) b: Param<Tensor<2>>,
    pub(crate) scale: f64,
}

impl Adapter {
    /// `base + scale * (a @ b)`, from this rank's blocks.
    pub(crate) fn apply<const D: usize>(&self, base: Tensor<D>, site: &GatherSite) -> Tensor<D> {
        let [a, b] = [&self.a, &self.b].map(|factor| factor.val().into_dispatch());
        let site = AdaptedSite { base: site.clone(), scale: self.scale };
        Tensor::from_dispatch(<Dispatch as AdaptOps>::gather_adapted(base.into_dispatch(), a, b, site))
    }
}

/// Takes the adapters out of a model whose values are not needed any more; returns the scale of each, by the index of its
/// base. See [Note: One slot for the gather and the adapter].
pub(crate) fn take_adapters<M: Module>(model: M, entries: &[Entry]) -> (M, Vec<Option<f64>>) {
    let mut scales = vec![None; entries.len()];
    if entries.iter().all(|entry| entry.lora.is_none()) {
        return (model, scales);
    }
    let model = model.map(&mut Ones { entries, next: 0 }).materialize();
    model.visit(&mut Scales { entries, next: 0, scales: &mut scales });
    (model, scales)
}

struct Ones<'a> {
    entries: &'a [Entry],
    next: usize,
}

impl ModuleMapper for Ones<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let part = self.entries[self.next].lora;
        self.next += 1;
        match part {
            None => param,
            Some(LoraPart::Base) => replaced(param, |device| Tensor::zeros([1; D], (device, DType::F64))),
            Some(LoraPart::Factor) => replaced(param, |device| Tensor::ones([1; D], (device, DType::F64))),
        }
    }
}

struct Scales<'a> {
    entries: &'a [Entry],
    next: usize,
    scales: &'a mut [Option<f64>],
}

impl ModuleVisitor for Scales<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        while self.entries[self.next].lora == Some(LoraPart::Factor) {
            self.next += 1;
        }
        if self.entries[self.next].lora == Some(LoraPart::Base) {
            let value = param.val().into_data().try_to_vec::<f64>();
            self.scales[self.next] = value.ok().and_then(|value| value.first().copied());
        }
        self.next += 1;
    }
}

/// One adapted parameter of one engine, asked for in one way.
#[derive(Clone, Debug)]
pub(crate) struct AdaptedSite {
    base: GatherSite,
    scale: f64,
}

impl AdaptedSite {
    fn with(&self, usage: Use) -> Self {
        Self { base: self.base.with(usage), scale: self.scale }
    }
}

#[backend_extension(Flex, Cube: cfg(any(feature = "cuda", feature = "cpu")), Autodiff)]
pub(crate) trait AdaptOps: ShardOps {
    /// The whole weight, from this rank's block of the base and the whole factors.
    fn gather_adapted(
        stored: FloatTensor<Self>,
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        site: AdaptedSite,
    ) -> FloatTensor<Self>;
}

impl AdaptOps for Flex {
    fn gather_adapted(
        stored: FloatTensor<Self>,
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        site: AdaptedSite,
    ) -> FloatTensor<Self> {
        adapt::<Flex>(stored, a, b, &site)
    }
}

/// The arithmetic of Burn's own adapter, in its order.
pub(crate) fn adapt<B: ShardOps>(
    stored: FloatTensor<B>,
    a: FloatTensor<B>,
    b: FloatTensor<B>,
    site: &AdaptedSite,
) -> FloatTensor<B> {
    let delta = B::float_mul_scalar(B::float_matmul(a, b), site.scale.into());
    B::float_add(B::gather(stored, site.base.clone()), delta)
}

impl<B: AdaptOps, C: CheckpointStrategy> AdaptOps for Autodiff<B, C> {
    fn gather_adapted(
        stored: FloatTensor<Self>,
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        site: AdaptedSite,
    ) -> FloatTensor<Self> {
        let pass = Pass::current();
        let usage = if pass == Pass::Again { Use::Backward } else { Use::Forward };
        let [base, full_a, full_b] = [&stored, &a, &b].map(|tensor| tensor.primitive().clone());
        let weight = B::gather_adapted(base.clone(), full_a, full_b, site.with(usage));
        // See [Note: A graph of its own].
        if stored.is_tracked() && pass != Pass::Again {
            site.base.engine.expect_gradient(site.base.param);
        }
        if pass == Pass::Dropped {
            return FloatTensor::<Self>::new(weight);
        }
        let again = AdaptAgain::<B> {
            stored: base,
            factors: [a.id(), b.id()],
            site: site.with(Use::Backward),
            backend: PhantomData,
        };
        let op = Adapted.prepare::<BalancedCheckpointing>([stored.node(), a.node(), b.node()]);
        match op.memory_bound().retro_forward(again).parents([&a, &b]).stateful() {
            OpsKind::Tracked(mut op) => {
                let factors = [op.checkpoint(&a), op.checkpoint(&b)];
                op.finish((factors, site), weight)
            }
            OpsKind::UnTracked(op) => op.finish(weight),
        }
    }
}

#[derive(Debug)]
struct Adapted;

impl<B: AdaptOps> Backward<B, 3> for Adapted {
    type State = ([NodeId; 2], AdaptedSite);

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let ([a, b], site) = ops.state;
        let [base, parent_a, parent_b] = ops.parents;
        let scaled = B::float_mul_scalar(gradient.clone(), site.scale.into());
        if let Some(parent) = parent_a {
            let b = checkpointer.retrieve_node_output::<FloatTensor<B>>(b);
            grads.register::<B>(parent.id, B::float_matmul(scaled.clone(), B::float_transpose(b)));
        }
        if let Some(parent) = parent_b {
            let a = checkpointer.retrieve_node_output::<FloatTensor<B>>(a);
            grads.register::<B>(parent.id, B::float_matmul(B::float_transpose(a), scaled));
        }
        if base.is_some() {
            B::capture(gradient, site.base);
        }
    }
}

#[derive(Debug)]
struct AdaptAgain<B: Backend> {
    stored: FloatTensor<B>,
    factors: [NodeId; 2],
    site: AdaptedSite,
    backend: PhantomData<B>,
}

impl<B: AdaptOps> RetroForward for AdaptAgain<B> {
    fn forward(&self, states: &mut BackwardStates, out: NodeId) {
        let [a, b] = self.factors.map(|factor| states.get_state::<FloatTensor<B>>(&factor));
        states.save(out, B::gather_adapted(self.stored.clone(), a, b, self.site.clone()));
    }
}
