//! An embedding that does not hold its table until backward.

use burn::module::{Content, DisplaySettings, Module, ModuleDisplay, Param};
use burn::tensor::{GradientCheckpointingStrategy, Int, Tensor};

/// Burn's [`Embedding`](burn::nn::Embedding), whose table is let go of after its use in forward.
///
/// The gradient of a lookup depends on the indices and on the shape of the table, not on its values. Burn's op holds the
/// table all the same, so at stage 3 a gathered table stays until backward. This one holds the indices and the rows it
/// has looked up, and backward does not gather the table again. Values, gradients and records have the same bits as
/// Burn's, in plain training too.
///
/// It is made from Burn's, whose configuration and initialisation it shares; records of either load into the other.
///
/// Memory until backward: the indices, and the rows, which Burn's holds as well. Traffic at stage 3: one gather of the
/// table per step.
///
/// ```
/// use burn::{module::Module, nn::EmbeddingConfig, tensor::{Int, Tensor}};
/// use fsdp_burn::{Config, Error, Sharded, Stage, launch, nn::Embedding};
///
/// #[derive(Module, Debug, Sharded)]
/// struct Model {
///     #[shard(unit)]
///     tokens: Embedding,
/// }
///
/// let config = Config { stage: Stage::Parameters, world_size: 2, ..Config::default() };
/// let rows = launch(&config, |rank| {
///     let device = rank.device();
///     let model = rank.shard(Model { tokens: EmbeddingConfig::new(1000, 8).init(&device).into() })?;
///     Ok(model.tokens.forward(Tensor::<2, Int>::from_ints([[3, 1, 4]], &device)).dims())
/// })?;
/// assert_eq!(rows, [[1, 3, 8], [1, 3, 8]]);
/// # Ok::<(), Error>(())
/// ```
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct Embedding {
    /// The table, of shape `[n_embedding, d_model]`.
    pub weight: Param<Tensor<2>>,
    holds_indices_only: HoldsIndicesOnly,
}

/// Has no parameters. Whoever visits the module tells it by this field from Burn's, whose type has the same name.
#[derive(Module, Debug)]
struct HoldsIndicesOnly {}

/// Name of the field of [`Embedding`] that Burn's does not have; it is visited after the table.
pub(crate) const HOLDS_INDICES_ONLY: &str = "holds_indices_only";

impl From<burn::nn::Embedding> for Embedding {
    fn from(embedding: burn::nn::Embedding) -> Self {
        Self { weight: embedding.weight, holds_indices_only: HoldsIndicesOnly {} }
    }
}

impl Embedding {
    /// The rows of the table at `input` [batch, sequence], as [batch, sequence, `d_model`].
    pub fn forward(&self, input: Tensor<2, Int>) -> Tensor<3> {
        let [batch, sequence] = input.dims();
        let table = self.weight.val();
        let width = table.dims()[1];
        let indices = input.without_autodiff().reshape([batch * sequence]);
        let look_up = |table: Tensor<2>| table.select(0, indices).reshape([batch, sequence, width]);
        // Selecting holds the indices alone. But a device that checkpoints would select again in backward, and gather the
        // table for it; without checkpointing the rows are held. See [Note: Recompute, do not hold].
        match table.gradient_checkpointing_strategy() {
            Some(strategy) => {
                let table = table.with_gradient_checkpointing_strategy(GradientCheckpointingStrategy::Disabled);
                look_up(table).with_gradient_checkpointing_strategy(strategy)
            }
            None => look_up(table),
        }
    }
}

impl ModuleDisplay for Embedding {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new().with_new_line_after_attribute(false).optional()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        let [n_embedding, d_model] = self.weight.lazy_shape().dims();
        content.add("n_embedding", &n_embedding).add("d_model", &d_model).optional()
    }
}
