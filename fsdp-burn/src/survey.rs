//! What a model consists of, found without initialising a single parameter.

use std::collections::HashMap;

use burn::module::{Module, ModuleVisitor, Param, ParamId, Reparameterization, Reparameterizer};
use burn::tensor::{Device, Tensor, TensorData};
use fsdp_core::ParamSpec;

use crate::Error;
use crate::lora::LORA;
use crate::nn::{HOLDS_INDICES_ONLY, OVER_ALL_RANKS};

/// What Burn calls its own embedding when it is visited, and every other type of that name.
const EMBEDDING: &str = "Struct:Embedding";

/// Layers of Burn's whose forward compares the input with the shape of the parameter that the model stores. It is a vector of
/// one element for each feature.
const READ_SHAPES: [&str; 2] = ["Struct:BatchNorm", "Struct:RmsNorm"];

/// One float parameter, or something that Burn visits like one.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) spec: ParamSpec,
    pub(crate) id: ParamId,
    /// Tensor dimensions.
    pub(crate) dims: usize,
    /// Read through `Param::val()`. Running statistics are not: they are buffers, and stay whole.
    pub(crate) is_param: bool,
    /// Belongs to a norm over the batches of all ranks, so that a buffer is what all ranks have seen.
    pub(crate) over_all_ranks: bool,
    /// Index of the first entry of the same parameter, if that is another one: tied weights.
    pub(crate) tied_to: Option<usize>,
    /// Its part in a LoRA adapter. A base comes right before its two factors.
    pub(crate) lora: Option<LoraPart>,
}

/// See [Note: One slot for the gather and the adapter].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LoraPart {
    Base,
    Factor,
}

impl Entry {
    pub(crate) fn path(&self) -> String {
        self.spec.path.join(".")
    }
}

/// All float parameters, in the order in which Burn traverses the model.
///
/// # Errors
/// If a parameter is reparameterized already, other than by LoRA, since a parameter has one such slot, or if fields that
/// share one parameter differ in shape, training or value.
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
    let mut entries = surveyor.entries;
    tie(&mut entries);
    let mut values = Values { entries: &entries, next: 0, firsts: HashMap::new(), different: None };
    model.visit(&mut values);
    match values.different {
        Some(error) => Err(error),
        None => Ok(entries),
    }
}

/// Marks each parameter that has come before, and tells the first of it. Running statistics are not tied: Burn gives each
/// its own value whenever it maps a model, also where they have one id.
fn tie(entries: &mut [Entry]) {
    let mut firsts: HashMap<ParamId, usize> = HashMap::new();
    for index in (0..entries.len()).filter(|&index| entries[index].is_param).collect::<Vec<_>>() {
        let first = *firsts.entry(entries[index].id).or_insert(index);
        if first != index {
            let ParamSpec { path, held_by_op, looked_up, .. } = entries[index].spec.clone();
            entries[index].tied_to = Some(first);
            entries[first].spec.also.push(path);
            entries[first].spec.held_by_op |= held_by_op;
            // A head that is tied to the table multiplies with it.
            entries[first].spec.looked_up &= looked_up;
        }
    }
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
    /// What was entered last is a field of a layer that reads the shape of its parameters.
    in_shape_reader: bool,
    in_adapter: bool,
    entries: Vec<Entry>,
    foreign: Option<(String, String)>,
}

impl ModuleVisitor for Surveyor {
    fn enter_module(&mut self, name: &str, container: &str) {
        if container == "Reparameterization" {
            match self.entries.last_mut() {
                Some(entry) if name == Marked::NAME => entry.is_param = true,
                Some(entry) if name == LORA => {
                    // Its own slot holds the adapter, and so no mark.
                    (entry.is_param, entry.lora, entry.spec.adapted) = (true, Some(LoraPart::Base), true);
                    self.in_adapter = true;
                }
                _ => self.foreign = self.foreign.take().or(Some((self.path.join("."), name.to_owned()))),
            }
        }
        self.in_embedding = container == EMBEDDING;
        self.in_shape_reader = READ_SHAPES.contains(&container);
        if let (true, HOLDS_INDICES_ONLY, Some(entry)) = (self.in_embedding, name, self.entries.last_mut()) {
            entry.spec.held_by_op = false;
        }
        if name == OVER_ALL_RANKS {
            let of_norm = self.entries.iter_mut().rev().take_while(|entry| entry.spec.path.starts_with(&self.path));
            of_norm.for_each(|entry| entry.over_all_ranks = true);
        }
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, name: &str, container: &str) {
        self.in_adapter &= !(container == "Reparameterization" && name == LORA);
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let shape = param.lazy_shape().to_vec();
        let trainable = emptied(param.clone()).is_require_grad();
        let spec = ParamSpec {
            path: self.path.clone(),
            shape,
            trainable,
            held_by_op: self.in_embedding,
            shape_is_read: self.in_shape_reader,
            adapted: false,
            looked_up: self.in_embedding,
            also: Vec::new(),
        };
        let lora = self.in_adapter.then_some(LoraPart::Factor);
        let (is_param, over_all_ranks) = (false, false);
        self.entries.push(Entry { spec, id: param.id, dims: D, is_param, over_all_ranks, tied_to: None, lora });
    }
}

/// Looks for fields that have one id and are not one parameter.
struct Values<'a> {
    entries: &'a [Entry],
    next: usize,
    /// Of each tied parameter, the value of its first field, unless that is not initialised yet.
    firsts: HashMap<usize, Option<TensorData>>,
    different: Option<Error>,
}

impl ModuleVisitor for Values<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let (index, entry) = (self.next, &self.entries[self.next]);
        self.next += 1;
        // Clones are initialised together.
        let value = || param.is_initialized().then(|| param.to_data());
        let Some(first) = entry.tied_to else {
            if !entry.spec.also.is_empty() {
                self.firsts.insert(index, value());
            }
            return;
        };
        let (spec, other) = (&entry.spec, &self.entries[first].spec);
        let difference = match () {
            () if spec.shape != other.shape => format!("with the shape {:?} in place of {:?}", spec.shape, other.shape),
            () if spec.trainable != other.trainable => "and only one of the two is frozen".to_owned(),
            () if self.firsts.get(&first) != Some(&value()) => "with other values".to_owned(),
            () => return,
        };
        self.different.get_or_insert(Error::Parameter {
            parameter: entry.path(),
            problem: format!(
                "it is the same parameter as `{}` (tied weights), {difference}",
                self.entries[first].path()
            ),
            remedy: "give both fields clones of one parameter, or the second a parameter of its own",
        });
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
