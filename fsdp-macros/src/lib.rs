//! `#[derive(Sharded)]`: which fields of a model become units of sharded training.
//!
//! The crate knows neither Burn nor the rest of fsdp-burn. Users reach the derive, and all that its expansion names,
//! through `fsdp_burn`. It works in stages, each of which imports only those above it:
//!
//! | module | what it does |
//! |---|---|
//! | `errors` | collects mistakes |
//! | `words` | the vocabulary, and the nearest word to a typing slip |
//! | `attr` | reads one attribute, word by word |
//! | `validate` | turns the words of a field into a rule, or says why they are none |
//! | `bounds` | the where clause |
//! | `ast` | the type as fields with rules |
//! | `crate_path` | finds `fsdp_burn`, also under another name |
//! | `expand` | writes the impl |

mod ast;
mod attr;
mod bounds;
mod crate_path;
mod errors;
mod expand;
mod validate;
mod words;

use proc_macro::TokenStream;

/// Writes down which fields of a Burn module are sharded as which units: `fsdp_burn::Sharded`.
///
/// A *unit* is what is gathered, used and freed as one. With parameters sharded (stage 3), each of N ranks holds the
/// whole unit while it is in use, and 1/N of it otherwise. So the largest unit decides how much memory is needed on
/// top of the shards, and the number of units decides how many messages a step sends. The blocks of a transformer are
/// good units: equal in size, and used one after the other.
///
/// Fields without an attribute, and everything in them, belong to the unit around them; at the top, to the root unit.
/// The derive changes nothing about the model: its `forward` stays as it is.
///
/// ```
/// # #[path = "../tests/fsdp/mod.rs"]
/// # mod fsdp;
/// # use fsdp::Sharded;
/// # use fsdp_macros::Sharded;
/// # pub struct Embedding;
/// # pub struct LayerNorm;
/// # pub struct Linear;
/// # pub struct Experts;
/// #[derive(Sharded)] // and `Module, Debug`
/// # #[shard(crate = "fsdp")]
/// pub struct Block {
///     attention: Linear,
///     #[shard(unit, offload = "cpu")]
///     experts: Experts,
/// }
///
/// #[derive(Sharded)]
/// # #[shard(crate = "fsdp")]
/// pub struct Gpt {
///     #[shard(unit)]
///     tokens: Embedding,
///     #[shard(units, nested)]
///     blocks: Vec<Block>,
///     norm: LayerNorm,
///     #[shard(unit, keep)]
///     head: Linear,
/// }
/// # fn main() {
/// # assert_eq!(
/// #     Gpt::wrap_policy().0,
/// #     ["tokens: unit", "blocks: units", "blocks.*.experts: unit offload=cpu", "head: unit keep"],
/// # );
/// # }
/// ```
///
/// # Which unit
///
/// | attribute | meaning | cost |
/// |---|---|---|
/// | `#[shard(unit)]` | The field is one unit. | In stage 3 each rank holds the unit whole while it is in use, and sends (N−1)/N of its elements three times a step: to gather it for the forward pass, to gather it again for the backward pass, and to reduce its gradients. |
/// | `#[shard(units)]` | Each element of the field is a unit: of a `Vec`, of an array, or what is in an `Option`. | As `unit`, of one element at a time: memory for the largest element in place of their sum, in more and smaller messages. |
/// | `#[shard(nested)]` | The type of the field derives `Sharded` too, and its rules hold for the field, prefixed with its name. Goes with the other words: `units, nested` makes each element a unit, and of its own marked fields further units. | None of its own. |
/// | `#[shard(ignore)]` | Not managed. The field's parameters stay plain Burn parameters, as a frozen teacher's should. | Whole on every rank, and no traffic. If such a field is trained, its values drift apart between ranks, because nothing averages its gradients. |
///
/// `nested` cannot be used on a field that holds the type itself, whose rules would never end.
///
/// # How it is laid out
///
/// These go with or without a unit.
///
/// | attribute | meaning | cost |
/// |---|---|---|
/// | `#[shard(replicate)]` | Every rank holds the parameters whole, with their gradients and optimizer state, and gradients are all-reduced. For small tensors that are used all the time. | The full size on every rank; 2(N−1)/N of the elements sent a step, and no gather to wait for. |
/// | `#[shard(spec("shard", _))]` | The mesh axis over which each dimension of the tensor is cut; `_` for a dimension that is not. At most one entry for each dimension; what is left out is not cut. Without a spec, dimension 0 is cut. | None of its own: each rank holds 1/N of the parameter, as without it, and less or nothing where the dimension is too short for N blocks. |
///
/// ```
/// # #[path = "../tests/fsdp/mod.rs"]
/// # mod fsdp;
/// # use fsdp::Sharded;
/// # use fsdp_macros::Sharded;
/// # pub struct Linear;
/// # pub struct Matrix;
/// #[derive(Sharded)]
/// # #[shard(crate = "fsdp")]
/// pub struct Router {
///     #[shard(replicate)]
///     gate: Linear,
///     #[shard(spec(_, "shard"))] // by columns
///     table: Matrix,
///     #[shard(ignore)]
///     teacher: Linear,
/// }
/// # fn main() {
/// # assert_eq!(
/// #     Router::wrap_policy().0,
/// #     ["gate: root replicate", "table: root spec(_, shard)", "teacher: ignore"],
/// # );
/// # }
/// ```
///
/// # Settings of one unit
///
/// These need `unit` or `units`. All but `keep` win over the configuration file.
///
/// | attribute | meaning | cost |
/// |---|---|---|
/// | `keep` | The unit stays gathered from the forward pass to the backward pass. For what the backward pass needs first, such as the head. | One gather less, (N−1)/N of its elements; the unit's full size in memory in between. |
/// | `prefetch = 2` | While this unit computes in forward, so many of the units after it are gathered; 0 gathers each when it is needed. | Memory for so many more gathered units; the traffic is the same, but hidden behind computation. |
/// | `precision = "bf16"` | The element type of computation and gather: `f32`, `bf16` or `f16`. | `bf16` and `f16` halve the gathered memory and the gather's bytes; a float32 master copy stays in the shards. |
/// | `reduce = "bf16"` | The element type in which the unit's gradients are sent; they are added up in float32. | `bf16` and `f16` halve what its reduction sends, and round each rank's gradient. |
/// | `output = "f32"` | The element type that `fsdp_burn::cast_output(&self.field.weight, x)` makes of the unit's output. | None. |
/// | `offload = "nvme"` | The tier that holds the unit's optimizer state and reduced gradients between their uses, and at stage 3 its shards of parameters: `none` (the device), `cpu` (host memory) or `nvme` (the disk at `nvme_path` under `[offload]`). The shares of `[offload]` are then those of the other units. | Frees the device's memory of all three; each use copies the state over the bus, or reads it from the drive. |
///
/// ```
/// # #[path = "../tests/fsdp/mod.rs"]
/// # mod fsdp;
/// # use fsdp::Sharded;
/// # use fsdp_macros::Sharded;
/// # pub struct Linear;
/// #[derive(Sharded)]
/// # #[shard(crate = "fsdp")]
/// pub struct Tail {
///     #[shard(unit, prefetch = 2, precision = "bf16", reduce = "bf16", output = "f32", offload = "cpu")]
///     big: Linear,
///     #[shard(unit, keep)]
///     head: Linear,
/// }
/// # fn main() {
/// # assert_eq!(
/// #     Tail::wrap_policy().0,
/// #     ["big: unit prefetch=2 precision=bf16 reduce=bf16 output=f32 offload=cpu", "head: unit keep"],
/// # );
/// # }
/// ```
///
/// # Enums and generics
///
/// In an enum of modules, each variant holds one module, as in `Dense(Linear)`, and the attributes stand on the
/// variant or on its module. Tuple structs and unions are refused, since they are no Burn modules.
///
/// Generics are kept. The impl requires `FieldType: Sharded` of each `nested` field whose type depends on a type
/// parameter, and nothing of other fields.
///
/// ```
/// # #[path = "../tests/fsdp/mod.rs"]
/// # mod fsdp;
/// # use fsdp::Sharded;
/// # use fsdp_macros::Sharded;
/// # pub struct Linear;
/// #[derive(Sharded)]
/// # #[shard(crate = "fsdp")]
/// pub enum Mixer<M> {
///     #[shard(unit)]
///     Dense(Linear),
///     #[shard(nested)] // where M: Sharded
///     Other(M),
/// }
/// # fn main() {
/// # #[derive(Sharded)]
/// # #[shard(crate = "fsdp")]
/// # struct Nothing;
/// # assert_eq!(Mixer::<Mixer<Nothing>>::wrap_policy().0, ["Dense: unit", "Other.Dense: unit"]);
/// # }
/// ```
///
/// # The path of the crate
///
/// The expansion finds `fsdp_burn` through the `Cargo.toml` of the crate that uses the derive, so a renamed
/// dependency works. Where it is reached in another way, as through a re-export, the type says so:
/// `#[shard(crate = "path::to::fsdp_burn")]`.
///
/// # Errors
///
/// Every mistake is reported at its word, all in one compilation: unknown words (with the nearest known one), words
/// given twice, words that contradict each other, settings without a unit, and values that do not fit.
#[proc_macro_derive(Sharded, attributes(shard))]
pub fn derive_sharded(input: TokenStream) -> TokenStream {
    expand::derive(input.into()).into()
}
