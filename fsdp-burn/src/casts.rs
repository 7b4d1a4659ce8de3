//! Casts around a part of a model whose element types are not those of the rest, for use in the model's own `forward`.

use burn::module::Param;
use burn::tensor::Tensor;

use crate::gather_op::GatherOnUse;
use crate::host;

/// `input` in the element type that `param` is computed in: that of its unit, `#[shard(unit, precision = ...)]`, or else
/// `precision.parameters` of the configuration.
///
/// Called inside the `forward` of a model, before a layer whose precision is not that of what comes before it: Burn's
/// operations do not mix types. In a plain model it returns `input`. Costs a copy where the type is another.
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
///         let x = self.body.forward(cast_input(&self.body.weight, x));
///         cast_output(&self.head.weight, self.head.forward(cast_input(&self.head.weight, x)))
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
pub fn cast_input<const P: usize, const D: usize>(param: &Param<Tensor<P>>, input: Tensor<D>) -> Tensor<D> {
    match param.reparameterization() {
        Some(GatherOnUse { site, .. }) => input.cast(host::float_dtype(site.engine.compute_dtype(site.param))),
        None => input,
    }
}

/// `output` in the element type that the unit of `param` has for what follows: `#[shard(unit, output = ...)]`, or else
/// `precision.output` of the configuration, float32 by default.
///
/// As [`cast_input`], whose example shows both.
pub fn cast_output<const P: usize, const D: usize>(param: &Param<Tensor<P>>, output: Tensor<D>) -> Tensor<D> {
    match param.reparameterization() {
        Some(GatherOnUse { site, .. }) => output.cast(host::float_dtype(site.engine.output_dtype(site.param))),
        None => output,
    }
}
