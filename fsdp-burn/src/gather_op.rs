//! Where sharding meets autodiff: an op that gathers a parameter on use, gathers it again in backward, and hands its
//! gradient to the engine.
//!
//! [Note: Recompute, do not hold]
//! The op is always prepared with the balanced checkpointing strategy and marked memory bound, whatever strategy the
//! device has. Its consumers then record "compute it again" in place of the gathered weight, so that after forward
//! nothing gathered is alive, and backward gathers each unit once more when its first weight is asked for.
//!
//! Two things follow. A consumer that is a view (a linear layer on three dimensions reshapes its weight) is held itself
//! where the device does not checkpoint, and the weight under it; so [`Rank::device`](crate::Rank::device) does. And a
//! checkpointed sum over the residual stream is computed again from its terms, biases of all blocks among them, which
//! would gather all units at once; so vectors are held, as [`Plan::is_held`](fsdp_core::Plan::is_held) says.
//!
//! [Note: Order of backward steps]
//! Burn executes backward by depth in the graph, deepest first, and a parameter is a leaf: an op that depends on
//! nothing else has depth 1 and would run after everything else. All full gradients would pile up until the end. So
//! the op takes a second, untracked parent that only lends it depth: a rung of a ladder, one rung higher for each unit
//! that forward enters. All gradients of a unit then arrive together, right after its last consumer, and before
//! anything of the unit in front of it.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::retro_forward::RetroForward;
use burn::backend::autodiff::checkpoint::state::BackwardStates;
use burn::backend::autodiff::checkpoint::strategy::{BalancedCheckpointing, CheckpointStrategy, NoCheckpointing};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, Flex, TensorMetadata, backend_extension};
use burn::module::{Module, Reparameterization};
use burn::tensor::{FloatDType, Shape, Tensor};

use crate::engine::{Engine, Lent, Whole};
use crate::host::Identity;
use crate::lora::Adapter;
use crate::recompute::Pass;

/// Levels of the backward graph between two rungs. More than the ops of a unit in sequence (a transformer block has
/// about 50), or its gradients would be reduced later than they could; each level costs backward an empty list.
const LEVELS_PER_RUNG: usize = 128;

/// A tensor of the autodiff backend, whatever its checkpointing strategy.
type Tracked<B> = FloatTensor<Autodiff<B, NoCheckpointing>>;

/// Why a parameter is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// A forward that is recorded for backward.
    Forward,
    /// Backward computes it again.
    Backward,
    /// A forward without backward.
    Evaluate,
}

/// One parameter of one engine, asked for in one way.
#[derive(Clone)]
pub(crate) struct GatherSite {
    pub(crate) engine: Arc<Engine>,
    /// Index into the plan's parameters.
    pub(crate) param: usize,
    pub(crate) usage: Use,
}

impl GatherSite {
    pub(crate) fn with(&self, usage: Use) -> Self {
        Self { usage, ..self.clone() }
    }
}

impl fmt::Debug for GatherSite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GatherSite({}, {:?})", self.engine.plan().params()[self.param].path, self.usage)
    }
}

/// The two operations that a backend must offer to be sharded.
#[backend_extension(Flex, Cube: cfg(any(feature = "cuda", feature = "cpu")), Autodiff)]
pub(crate) trait ShardOps: Backend {
    /// The whole parameter, from the tensor that the model stores.
    fn gather(stored: FloatTensor<Self>, site: GatherSite) -> FloatTensor<Self>;
    /// Hands the whole parameter's gradient to the engine; returns an empty tensor, since an op must return one.
    fn capture(gradient: FloatTensor<Self>, site: GatherSite) -> FloatTensor<Self>;
}

impl ShardOps for Flex {
    fn gather(stored: FloatTensor<Self>, site: GatherSite) -> FloatTensor<Self> {
        match site.engine.gather(site.param, Some(Identity::of_memory(stored.bytes())), site.usage) {
            Some(Lent::Host(full)) => FlexTensor::from_data(full),
            #[cfg(any(feature = "cuda", feature = "cpu"))]
            Some(Lent::OnDevice(_)) => unreachable!("ranks on processors exchange nothing between devices"),
            None => stored,
        }
    }

    fn capture(gradient: FloatTensor<Self>, site: GatherSite) -> FloatTensor<Self> {
        let device = gradient.device();
        site.engine.capture(site.param, Whole::Here(gradient));
        Flex::float_empty(Shape::from(vec![0]), &device, FloatDType::F32)
    }
}

impl<B: ShardOps, C: CheckpointStrategy> ShardOps for Autodiff<B, C> {
    fn gather(stored: FloatTensor<Self>, site: GatherSite) -> FloatTensor<Self> {
        let pass = Pass::current();
        // Gathering comes first: it is what tells the engine that forward has entered the unit.
        let usage = if pass == Pass::Again { Use::Backward } else { Use::Forward };
        let full = B::gather(stored.primitive().clone(), site.with(usage));
        // See [Note: A graph of its own].
        if stored.is_tracked() && pass != Pass::Again {
            site.engine.expect_gradient(site.param);
        }
        if pass == Pass::Dropped {
            return Tracked::<B>::new(full);
        }
        let rung = site.engine.with_ladder(|ladder: &mut Ladder<B>, index| {
            ladder.rung(index, || B::float_empty(Shape::from(vec![0]), &stored.device(), FloatDType::F32))
        });
        let op = Gather.prepare::<BalancedCheckpointing>([stored.node(), rung.node()]);
        let op = if site.engine.holds(site.param) {
            op.compute_bound()
        } else {
            let again = GatherAgain::<B> { stored: stored.id(), site: site.with(Use::Backward), backend: PhantomData };
            op.memory_bound().retro_forward(again).parents([&stored])
        };
        match op.stateful() {
            OpsKind::Tracked(op) => op.finish(site, full),
            OpsKind::UnTracked(op) => op.finish(full),
        }
    }

    fn capture(gradient: FloatTensor<Self>, site: GatherSite) -> FloatTensor<Self> {
        Tracked::<B>::new(B::capture(gradient.into_primitive(), site))
    }
}

#[derive(Debug)]
struct Gather;

impl<B: ShardOps> Backward<B, 2> for Gather {
    type State = GatherSite;

    /// Registers no gradient: the engine keeps it, reduces it on another thread, and the optimizer collects it there.
    fn backward(self, ops: Ops<GatherSite, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        B::capture(grads.consume::<B>(&ops.node), ops.state);
    }
}

#[derive(Debug)]
struct GatherAgain<B> {
    stored: NodeId,
    site: GatherSite,
    backend: PhantomData<B>,
}

impl<B: ShardOps> RetroForward for GatherAgain<B> {
    fn forward(&self, states: &mut BackwardStates, out: NodeId) {
        let stored = states.get_state::<FloatTensor<B>>(&self.stored);
        states.save(out, B::gather(stored, self.site.clone()));
    }
}

/// Untracked tensors of growing depth. See [Note: Order of backward steps].
pub(crate) struct Ladder<B: Backend> {
    rungs: Vec<Tracked<B>>,
}

impl<B: Backend> Default for Ladder<B> {
    fn default() -> Self {
        Self { rungs: Vec::new() }
    }
}

impl<B: Backend> Ladder<B> {
    /// The rung `index`, of depth `index * LEVELS_PER_RUNG`. Rungs are built once and used by every step.
    fn rung(&mut self, index: usize, empty: impl FnOnce() -> FloatTensor<B>) -> Tracked<B> {
        if self.rungs.is_empty() {
            self.rungs.push(Tracked::<B>::new(empty()));
        }
        while self.rungs.len() <= index {
            let mut rung = self.rungs[self.rungs.len() - 1].clone();
            for _ in 0..LEVELS_PER_RUNG {
                let guard = rung.node();
                rung = Climb.prepare::<NoCheckpointing>([guard]).compute_bound().stateless(rung.into_primitive());
            }
            self.rungs.push(rung);
        }
        self.rungs[index].clone()
    }
}

#[derive(Debug)]
struct Climb;

impl<B: Backend> Backward<B, 1> for Climb {
    type State = ();

    fn backward(self, _: Ops<(), 1>, _: &mut Gradients, _: &mut Checkpointer) {
        unreachable!("a rung is untracked, so backward never reaches it");
    }
}

/// What is attached to each managed parameter: `val()` gathers.
#[derive(Module, Debug)]
pub(crate) struct GatherOnUse {
    #[module(skip)]
    pub(crate) site: GatherSite,
    /// See [Note: One slot for the gather and the adapter].
    pub(crate) adapter: Option<Adapter>,
}

impl Reparameterization for GatherOnUse {
    const NAME: &'static str = "sharded";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        match &self.adapter {
            None => Tensor::from_dispatch(<Dispatch as ShardOps>::gather(base.into_dispatch(), self.site.clone())),
            Some(adapter) => adapter.apply(base, &self.site),
        }
    }
}
