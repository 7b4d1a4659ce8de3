//! Activations that are not kept: a part of forward is run once more in backward.
//!
//! [Note: A graph of its own]
//! The part runs twice. In forward its parameters are gathered but not recorded, so nothing of it stays but its input. In
//! backward it runs again from that input, recorded in a graph of its own, through which backward goes at once. The
//! graph is new, with forked parameters as leaves: backward holds the lock of the graph it walks, and a node shared by
//! both would wait for it for ever. The gradients of parameters go to the engine as ever, which knows them by number
//! and not by leaf. It was told in forward how many to expect, so that no unit is reduced before the last part that
//! uses it has run again.

use std::cell::Cell;
use std::fmt;
use std::sync::Arc;

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, Flex, backend_extension};
use burn::module::{Module, ModuleVisitor, Param, Reparameterization};
use burn::tensor::{Device, Tensor};

use crate::Error;
use crate::engine::EngineFailed;
use crate::gather_op::GatherOnUse;
use crate::random::RandomState;

/// `forward(module, input)`, whose activations are dropped and computed again in backward.
///
/// Called inside the `forward` of a model, once for each block, it brings the activations of training down to those of one
/// block and the inputs of all blocks, for one more forward of compute (Chen et al., "Training Deep Nets with Sublinear
/// Memory Cost", 2016). A unit is gathered for its second forward and its backward together, so stage 3 sends no byte
/// more. It gives the same bits as a plain call.
///
/// `forward` is run twice, so it must do the same both times: dropout is [`nn::Dropout`](crate::nn::Dropout), which draws
/// the same numbers again, and running statistics would be updated twice. Gradients flow through `input` and through the
/// parameters of `module`; a captured tensor that has a gradient itself is refused, others are constants.
///
/// Where there is nothing to record, as in [`valid`](burn::module::Module::valid) or with frozen parameters behind an input
/// without gradient, and where a trainable parameter of `module` is not sharded (a plain model, `#[shard(ignore)]`), this is
/// a plain call. A part that spans several units holds all of them gathered in backward, with their whole gradients; so
/// let a part be one unit.
///
/// # Panics
/// Unwinds with an error, which the launcher returns, if `forward` captures a tensor that has a gradient.
///
/// ```
/// use burn::{module::Module, nn::{Linear, LinearConfig}, tensor::{Tensor, activation::gelu}};
/// use fsdp_burn::{Config, Error, Sharded, launch, recompute};
///
/// #[derive(Module, Debug, Sharded)]
/// struct Tower {
///     #[shard(units)]
///     layers: Vec<Linear>,
/// }
///
/// impl Tower {
///     fn forward(&self, x: Tensor<2>) -> Tensor<2> {
///         self.layers.iter().fold(x, |x, layer| recompute(layer, x, |layer, x| gelu(layer.forward(x))))
///     }
/// }
///
/// launch(&Config { world_size: 2, ..Config::default() }, |rank| {
///     let layers = (0..3).map(|_| LinearConfig::new(4, 4).init(&rank.device())).collect();
///     let model = rank.shard(Tower { layers })?;
///     let loss = model.forward(Tensor::ones([8, 4], &rank.device())).mean();
///     model.backward(loss).map(drop)
/// })?;
/// # Ok::<(), Error>(())
/// ```
pub fn recompute<M, F, const D: usize, const E: usize>(module: &M, input: Tensor<D>, forward: F) -> Tensor<E>
where
    M: Module + Sync + 'static,
    F: Fn(&M, Tensor<D>) -> Tensor<E> + Send + Sync + 'static,
{
    let device = input.device();
    if Pass::current() != Pass::Recorded || !device.is_autodiff() || !Count::of(module).allows(input.is_tracked()) {
        return forward(module, input);
    }
    // The op is recorded if its input is; its parameters need it in any case.
    let input = if input.is_tracked() { input } else { input.require_grad() };
    let part = Part::new(module.clone().fork(&device), device, forward);
    Tensor::from_dispatch(<Dispatch as RecomputeOps>::run(input.into_dispatch(), part))
}

/// How the forward that goes on is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pass {
    /// As ever.
    Recorded,
    /// Not at all: backward will run it again.
    Dropped,
    /// In backward, in a graph of its own.
    Again,
}

thread_local! {
    static PASS: Cell<Pass> = const { Cell::new(Pass::Recorded) };
}

impl Pass {
    pub(crate) fn current() -> Self {
        PASS.get()
    }

    /// Runs `call` in this pass, also where it unwinds.
    fn run<T>(self, call: impl FnOnce() -> T) -> T {
        struct Back(Pass);
        impl Drop for Back {
            fn drop(&mut self) {
                PASS.set(self.0);
            }
        }
        let _back = Back(PASS.replace(self));
        call()
    }
}

/// A tensor of one of the backends that ranks compute on, without its number of dimensions.
pub(crate) enum Erased {
    Flex(FlexTensor),
    #[cfg(any(feature = "cuda", feature = "cpu"))]
    Cube(Box<FloatTensor<burn::backend::Cube>>),
}

impl Erased {
    fn of<const D: usize>(tensor: Tensor<D>) -> Self {
        #[cfg(any(feature = "cuda", feature = "cpu"))]
        if !crate::device::is_host(&tensor.device()) {
            return match tensor.try_into_primitive::<burn::backend::Cube>() {
                Ok(tensor) => Erased::Cube(Box::new(tensor)),
                Err(error) => unreachable!("{}: {error:?}", Self::ELSEWHERE),
            };
        }
        match tensor.try_into_primitive::<Flex>() {
            Ok(tensor) => Erased::Flex(tensor),
            Err(error) => unreachable!("{}: {error:?}", Self::ELSEWHERE),
        }
    }

    fn tensor<const D: usize>(self) -> Tensor<D> {
        match self {
            Erased::Flex(tensor) => Tensor::from_primitive::<Flex>(tensor),
            #[cfg(any(feature = "cuda", feature = "cpu"))]
            Erased::Cube(tensor) => Tensor::from_primitive::<burn::backend::Cube>(*tensor),
        }
    }

    pub(crate) const ELSEWHERE: &str = "a part runs on the backend that it was given tensors of";
}

/// A part of a forward, with the types of its tensors erased: an op has none.
#[derive(Clone)]
pub(crate) struct Part {
    pub(crate) forward: Arc<dyn Fn(Erased) -> Erased + Send + Sync>,
    /// From the input and the gradient of the output to the gradient of the input.
    pub(crate) backward: Arc<dyn Fn(Erased, Erased) -> Erased + Send + Sync>,
}

impl fmt::Debug for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Part")
    }
}

impl Part {
    fn new<M, F, const D: usize, const E: usize>(module: M, device: Device, forward: F) -> Self
    where
        M: Module + Sync + 'static,
        F: Fn(&M, Tensor<D>) -> Tensor<E> + Send + Sync + 'static,
    {
        let both = Arc::new((module, forward));
        let recorded = device.clone();
        let random = RandomState::current();
        let again = both.clone();
        Self {
            forward: Arc::new(move |input| {
                let (module, forward) = &*both;
                let input = leaf::<D>(input, &device);
                let output = Pass::Dropped.run(|| forward(module, input));
                if output.is_tracked() {
                    // Neither its input nor its parameters are recorded in this pass.
                    fail(Error::Misuse {
                        problem:
                            "a recomputed part uses a tensor with a gradient that is not its input: it would lose it"
                                .into(),
                        remedy: "pass the tensor in as the input, joined with it, or `detach()` it before the part",
                    });
                }
                Erased::of(output.inner())
            }),
            backward: Arc::new(move |input, gradient| {
                let (module, forward) = &*again;
                let input = leaf::<D>(input, &recorded).require_grad();
                let output = random.during(|| Pass::Again.run(|| forward(module, input.clone())));
                if !output.is_tracked() {
                    return Erased::of(input.inner().zeros_like());
                }
                // The gradient of this sum with respect to the output is `gradient`.
                let mut gradients = (output * leaf::<E>(gradient, &recorded)).sum().backward();
                let gradient = input.grad_remove(&mut gradients);
                Erased::of(gradient.unwrap_or_else(|| input.inner().zeros_like()))
            }),
        }
    }
}

/// Ends the rank with an error, from where no `Result` can be returned.
fn fail(error: Error) -> ! {
    std::panic::resume_unwind(Box::new(EngineFailed(error)))
}

/// A tensor on `device`, which records and checkpoints as it says, without a history.
fn leaf<const D: usize>(tensor: Erased, device: &Device) -> Tensor<D> {
    let tensor = Tensor::from_inner(tensor.tensor());
    match device.gradient_checkpointing_strategy() {
        Some(strategy) => tensor.with_gradient_checkpointing_strategy(strategy),
        None => tensor,
    }
}

/// Parameters of a part, by where their gradients go.
#[derive(Default)]
struct Count {
    /// Sharded ones, frozen or not.
    sharded: usize,
    /// Sharded ones that are trained: an engine takes their gradients.
    trained: usize,
    /// Others that are trained: their gradients would be lost.
    foreign: usize,
    /// What the last visit has added to `foreign`.
    last: usize,
}

impl Count {
    fn of<M: Module>(module: &M) -> Self {
        let mut count = Count::default();
        module.visit(&mut count);
        count
    }

    /// Whether the part can run again, and backward has a use for it.
    fn allows(&self, input_is_tracked: bool) -> bool {
        self.sharded > 0 && self.foreign == 0 && (self.trained > 0 || input_is_tracked)
    }
}

impl ModuleVisitor for Count {
    fn enter_module(&mut self, name: &str, container: &str) {
        if container == "Reparameterization" && name == GatherOnUse::NAME {
            // Burn visits a parameter first, and then what is attached to it.
            let trained = std::mem::take(&mut self.last);
            self.sharded += 1;
            self.trained += trained;
            self.foreign -= trained;
        }
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.last = usize::from(param.is_require_grad());
        self.foreign += self.last;
    }
}

#[backend_extension(Flex, Cube: cfg(any(feature = "cuda", feature = "cpu")), Autodiff)]
pub(crate) trait RecomputeOps: Backend {
    /// The output of the part.
    fn run(input: FloatTensor<Self>, part: Part) -> FloatTensor<Self>;
    /// The gradient of its input; its parameters' go to the engine.
    fn run_again(input: FloatTensor<Self>, gradient: FloatTensor<Self>, part: Part) -> FloatTensor<Self>;
}

impl RecomputeOps for Flex {
    fn run(input: FloatTensor<Self>, part: Part) -> FloatTensor<Self> {
        flex((part.forward)(Erased::Flex(input)))
    }

    fn run_again(input: FloatTensor<Self>, gradient: FloatTensor<Self>, part: Part) -> FloatTensor<Self> {
        flex((part.backward)(Erased::Flex(input), Erased::Flex(gradient)))
    }
}

fn flex(tensor: Erased) -> FlexTensor {
    match tensor {
        Erased::Flex(tensor) => tensor,
        #[cfg(any(feature = "cuda", feature = "cpu"))]
        Erased::Cube(_) => unreachable!("{}", Erased::ELSEWHERE),
    }
}

impl<B: RecomputeOps, C: CheckpointStrategy> RecomputeOps for Autodiff<B, C> {
    fn run(input: FloatTensor<Self>, part: Part) -> FloatTensor<Self> {
        let output = B::run(input.primitive().clone(), part.clone());
        match Recomputed.prepare::<C>([input.node()]).compute_bound().stateful() {
            OpsKind::Tracked(op) => op.finish((input.into_primitive(), part), output),
            OpsKind::UnTracked(op) => op.finish(output),
        }
    }

    fn run_again(input: FloatTensor<Self>, gradient: FloatTensor<Self>, part: Part) -> FloatTensor<Self> {
        FloatTensor::<Self>::new(B::run_again(input.into_primitive(), gradient.into_primitive(), part))
    }
}

#[derive(Debug)]
struct Recomputed;

impl<B: RecomputeOps> Backward<B, 1> for Recomputed {
    type State = (FloatTensor<B>, Part);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let (input, part) = ops.state;
        let of_input = B::run_again(input, gradient, part);
        if let Some(parent) = &ops.parents[0] {
            grads.register::<B>(parent.id, of_input);
        }
    }
}
