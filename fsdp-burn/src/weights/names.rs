//! Which names of a file belong to which parameter of a model, and whether the file has it transposed.

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{DType, Tensor};
use burn_pack::Tensor as Unread;
use burn_store::{ModuleAdapter, ModuleContext, PyTorchToBurnAdapter};

use fsdp_core::Dtype;

use super::Convention;
use crate::host;

/// What a file may call one float parameter, or what Burn visits like one.
pub(super) struct Place {
    /// In the order in which they are looked for.
    pub(super) names: Vec<String>,
    /// The file has a matrix of it with its dimensions exchanged.
    pub(super) is_transposed: bool,
    /// The element type of the value, where the model holds it itself.
    pub(super) dtype: Dtype,
}

/// The places of all that Burn visits, in its order.
pub(super) fn places<M: Module>(module: &M, convention: Convention) -> Vec<Place> {
    let mut visitor = Places { convention, path: Vec::new(), containers: Vec::new(), places: Vec::new() };
    module.visit(&mut visitor);
    visitor.places
}

struct Places {
    convention: Convention,
    path: Vec<String>,
    containers: Vec<String>,
    places: Vec<Place>,
}

impl Places {
    /// What `PyTorch` calls it and how it lays it out, by the rules of Burn's adapter, which knows its layers.
    fn of_pytorch(&self) -> (Vec<String>, bool) {
        // PyTorch knows no enums, so their variants are not in its names.
        let is_field = |(_, container): &(&String, &String)| !container.starts_with("Enum:");
        let path: Vec<&str> =
            self.path.iter().zip(&self.containers).filter(is_field).map(|(name, _)| name.as_str()).collect();
        let mut names = vec![path.join(".")];
        let context = ModuleContext::new(&self.containers);
        if let (Some((field, parents)), Some(module)) = (path.split_last(), context.module_type()) {
            let other = PyTorchToBurnAdapter.get_alternative_param_name(field, module);
            names.extend(other.map(|other| [parents, &[other.as_str()]].concat().join(".")));
        }
        // The adapter is asked by what it does to a matrix of one row.
        let bytes = burn::tensor::Bytes::from_elems(vec![0f32; 2]);
        let probe = Unread::new(self.path.join("."), DType::F32, [1, 2], None, bytes);
        let is_transposed = PyTorchToBurnAdapter.adapt(probe, context).shape.to_vec() == [2, 1];
        (names, is_transposed)
    }
}

impl ModuleVisitor for Places {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.push(name.to_owned());
        self.containers.push(container.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
        self.containers.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let (names, is_transposed) = match self.convention {
            Convention::PyTorch => self.of_pytorch(),
            Convention::Burn | Convention::Detect => (vec![self.path.join(".")], false),
        };
        let held = param.is_initialized().then(|| param.val().dtype()).and_then(host::dtype_of);
        self.places.push(Place { names, is_transposed: is_transposed && D == 2, dtype: held.unwrap_or(Dtype::F32) });
    }
}
