//! What a model does itself where tensors pass from one element type to another: casts around one of its modules, and the
//! scale of its loss. In a plain model each of these functions returns what it is given.

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;

use crate::gather_op::{GatherOnUse, GatherSite};
use crate::host;

/// `input` in the element type that `module` computes in: that of the unit of its first parameter, which is
/// `#[shard(unit, precision = ...)]` or else `precision.parameters` of the configuration.
///
/// Called inside the `forward` of a model, before a module whose precision is not that of what comes before it: Burn's
/// operations do not mix types. In a plain model, and where the type is the same, it returns `input`. Costs one copy
/// otherwise.
///
/// ```
/// use burn::{module::Module, nn::{Linear, LinearConfig}, tensor::{DType, Tensor}};
/// use fsdp_burn::{Config, Dtype, Error, Sharded, cast_input, cast_output, launch};
///
/// #[derive(Module, Debug, Sharded)]
/// struct Model {
///     #[shard(unit)]
///     body: Linear,
///     #[shard(unit, precision = "f32", output = "bf16")]
///     head: Linear,
/// }
///
/// impl Model {
///     fn forward(&self, x: Tensor<2>) -> Tensor<2> {
///         let x = self.body.forward(cast_input(&self.body, x));
///         cast_output(&self.head, self.head.forward(cast_input(&self.head, x)))
///     }
/// }
///
/// let mut config = Config { world_size: 2, ..Config::default() };
/// config.precision.parameters = Dtype::Bf16;
/// let dtypes = launch(&config, |rank| {
///     let linear = || LinearConfig::new(4, 4).init(&rank.device());
///     let model = rank.shard(Model { body: linear(), head: linear() })?;
///     Ok(model.forward(Tensor::ones([3, 4], &rank.device())).dtype())
/// })?;
/// assert_eq!(dtypes, [DType::BF16; 2]);
/// # Ok::<(), Error>(())
/// ```
pub fn cast_input<M: Module, const D: usize>(module: &M, input: Tensor<D>) -> Tensor<D> {
    match site(module) {
        Some(site) => input.cast(host::float_dtype(site.engine.compute_dtype(site.param))),
        None => input,
    }
}

/// `output` in the element type that the output of `module` has for what follows: that of the unit of its first parameter,
/// which is `#[shard(unit, output = ...)]` or else `precision.output` of the configuration, float32 by default.
///
/// As [`cast_input`], whose example shows both.
pub fn cast_output<M: Module, const D: usize>(module: &M, output: Tensor<D>) -> Tensor<D> {
    match site(module) {
        Some(site) => output.cast(host::float_dtype(site.engine.output_dtype(site.param))),
        None => output,
    }
}

/// `loss`, multiplied with the loss scale of a run in "f16", where the program calls Burn's own `backward`: in the
/// `TrainStep::step` of a model that Burn's learner trains, `scale_loss(self, loss).backward()`.
///
/// The step divides the gradients again. [`ShardedModel::backward`](crate::ShardedModel::backward) does all of it by itself.
/// In a plain model, and without a loss scale, it returns `loss`; with one, a scaled loss is float32.
pub fn scale_loss<M: Module>(module: &M, loss: Tensor<1>) -> Tensor<1> {
    match site(module) {
        Some(site) => site.engine.scale_loss(loss),
        None => loss,
    }
}

/// Where the first sharded parameter of a module is gathered.
fn site<M: Module>(module: &M) -> Option<GatherSite> {
    let mut first = First(None);
    module.visit(&mut first);
    first.0
}

struct First(Option<GatherSite>);

impl ModuleVisitor for First {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.0.is_none() {
            self.0 = param.reparameterization().map(|GatherOnUse { site, .. }| site.clone());
        }
    }
}
