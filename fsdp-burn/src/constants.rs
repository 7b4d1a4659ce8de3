//! Parameters of integers and booleans: tables of positions, masks. Nothing trains them and nothing is saved of them, since a
//! program builds them anew; but all ranks must compute with the same ones, and so with rank 0's.

use burn::module::{Module, ModuleMapper, Param, Parameter};
use burn::tensor::kind::Basic;
use burn::tensor::{Bool, Int, Tensor, TensorData};
use bytes::Bytes;
use fsdp_core::{Communicator, OpTag, Phase, WrapPolicy};

use crate::{Error, host};

/// The model with rank 0's parameters of integers and booleans, but for what `policy` ignores. *Collective.*
///
/// # Errors
/// If a collective fails, or this rank has built one of another shape or type than rank 0.
pub(crate) fn share<M: Module>(model: M, policy: &WrapPolicy, control: &dyn Communicator) -> Result<M, Error> {
    let mut sharer = Sharer { policy, control, path: Vec::new(), failure: None };
    let model = model.map(&mut sharer);
    match sharer.failure {
        Some(error) => Err(error),
        None => Ok(model),
    }
}

struct Sharer<'a> {
    policy: &'a WrapPolicy,
    control: &'a dyn Communicator,
    path: Vec<String>,
    failure: Option<Error>,
}

impl Sharer<'_> {
    /// Whether the parameter that is visited is to be rank 0's.
    fn is_shared(&self) -> bool {
        self.failure.is_none() && self.control.world_size() > 1 && !self.policy.ignores(&self.path)
    }

    /// The parameter that is visited with rank 0's value.
    fn map<const D: usize, K: Basic>(&mut self, param: Param<Tensor<D, K>>) -> Param<Tensor<D, K>>
    where
        Tensor<D, K>: Parameter,
    {
        if !self.is_shared() {
            return param;
        }
        param.map(|tensor| {
            let data = self.shared(tensor.to_data());
            let dtype = data.dtype();
            Tensor::from_data(data, (&tensor.device(), dtype))
        })
    }

    /// Rank 0's data in place of `own`. A module's map must return a parameter, also after a failure.
    fn shared(&mut self, own: TensorData) -> TensorData {
        let shared = self.try_share(&own);
        shared.unwrap_or_else(|error| {
            self.failure = Some(error);
            own
        })
    }

    fn try_share(&self, own: &TensorData) -> Result<TensorData, Error> {
        let is_root = self.control.rank() == 0;
        let parameter = self.path.join(".");
        let tag = OpTag::new(0, Phase::Init, parameter.as_str());
        let form = format!("{:?} of {:?}", own.shape().to_vec(), own.dtype());
        let roots = self.control.broadcast(&tag, 0, is_root.then(|| Bytes::from(form.clone())))?;
        let bytes = self.control.broadcast(&tag, 0, is_root.then(|| host::elements(own.clone())))?;
        if roots != form.as_bytes() {
            return Err(Error::Parameter {
                parameter,
                problem: format!("it is {form}, and on rank 0 {}", String::from_utf8_lossy(&roots)),
                remedy: "build the same model on all ranks, or mark the field with `#[shard(ignore)]`",
            });
        }
        Ok(host::data_of(bytes, &own.shape().to_vec(), own.dtype()))
    }
}

impl ModuleMapper for Sharer<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        self.map(param)
    }

    fn map_bool<const D: usize>(&mut self, param: Param<Tensor<D, Bool>>) -> Param<Tensor<D, Bool>> {
        self.map(param)
    }
}
