//! What a model consists of, found without initialising a single parameter.

use std::collections::HashMap;

use burn::module::{Module, ModuleVisitor, Param, ParamId, Reparameterization, Reparameterizer};
use burn::tensor::{Device, Tensor};
use fsdp_core::ParamSpec;

use crate::Error;
use crate::nn::HOLDS_INDICES_ONLY;

/// What Burn calls its own embedding when it is visited, and every other type of that name.
const EMBEDDING: &str = "Struct:Embedding";

/// One float parameter, or something that Burn visits like one.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) spec: ParamSpec,
    pub(crate) id: ParamId,
    /// Tensor dimensions.
    pub(crate) dims: usize,
    /// Read through `Param::val()`. Running statistics are not: they are buffers, and stay whole.
    pub(crate) is_param: bool,
}

impl Entry {
    pub(crate) fn path(&self) -> String {
        self.spec.path.join(".")
    }
}

/// All float parameters, in the order in which Burn traverses the model.
///
/// # Errors
/// If a parameter is reparameterized already (LoRA), since a parameter has one such slot, or if two fields share one
/// parameter.
pub(crate) fn survey<M: Module>(model: &M) -> Result<Vec<Entry>, Error> {
    let mut surveyor = Surveyor::default();
    model.clone().apply_reparameterization(Mark).visit(&mut surveyor);
    if let Some((parameter, name)) = surveyor.foreign {
        return Err(Error::Parameter {
            parameter,
            problem: format!("it already has the reparameterization `{name}`"),
            remedy: "shard the plain model; a parameter has one such slot, and sharding needs it",
        });
    }
    let mut seen: HashMap<ParamId, String> = HashMap::new();
    for entry in &surveyor.entries {
        if let Some(first) = seen.insert(entry.id, entry.path()) {
            return Err(Error::Parameter {
                parameter: entry.path(),
                problem: format!("it is the same parameter as `{first}` (tied weights)"),
                remedy: "give each field a parameter of its own, or pass the one module to both uses in forward",
            });
        }
    }
    Ok(surveyor.entries)
}

/// A parameter of the same id, mappers and training state that was never initialised.
pub(crate) fn emptied<const D: usize>(param: Param<Tensor<D>>) -> Param<Tensor<D>> {
    let device = param.lazy_device();
    let id = param.id;
    param.transform_for_load(Tensor::zeros([1; D], &device), id)
}

/// `param` with another value: same id, mappers, and training state.
pub(crate) fn replaced<const D: usize>(
    emptied: Param<Tensor<D>>,
    value: impl FnOnce(&Device) -> Tensor<D>,
) -> Param<Tensor<D>> {
    let (id, old, mapper) = emptied.consume();
    let mut value = value(&old.device());
    if let Some(strategy) = old.gradient_checkpointing_strategy() {
        value = value.with_gradient_checkpointing_strategy(strategy);
    }
    Param::from_mapped_value(id, value.set_require_grad(old.is_require_grad()), mapper)
}

#[derive(Default)]
struct Surveyor {
    path: Vec<String>,
    /// What was entered last is a field of an embedding.
    in_embedding: bool,
    entries: Vec<Entry>,
    foreign: Option<(String, String)>,
}

impl ModuleVisitor for Surveyor {
    fn enter_module(&mut self, name: &str, container: &str) {
        if container == "Reparameterization" {
            match self.entries.last_mut() {
                Some(entry) if name == Marked::NAME => entry.is_param = true,
                _ => self.foreign = self.foreign.take().or(Some((self.path.join("."), name.to_owned()))),
            }
        }
        self.in_embedding = container == EMBEDDING;
        if let (true, HOLDS_INDICES_ONLY, Some(entry)) = (self.in_embedding, name, self.entries.last_mut()) {
            entry.spec.held_by_op = false;
        }
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let shape = param.lazy_shape().to_vec();
        let trainable = emptied(param.clone()).is_require_grad();
        let spec = ParamSpec { path: self.path.clone(), shape, trainable, held_by_op: self.in_embedding };
        self.entries.push(Entry { spec, id: param.id, dims: D, is_param: false });
    }
}

/// Attached and seen again only on what Burn treats as a parameter.
#[derive(Module, Debug)]
struct Marked {
    #[module(skip)]
    nothing: (),
}

impl Reparameterization for Marked {
    const NAME: &'static str = "marked for sharding";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        base
    }
}

struct Mark;

impl Reparameterizer for Mark {
    type Reparam = Marked;

    fn reparameterize<const D: usize>(
        &mut self,
        _: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Marked>) {
        (param, Some(Marked { nothing: () }))
    }
}
