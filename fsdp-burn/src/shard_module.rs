//! A module made of nothing but blocks of parameters: what an optimizer sees in place of the model.
//!
//! It answers to the same paths and ids as the model, so that parameter groups and state match, but holds this rank's
//! blocks, unit by unit, whatever the model itself stores at the stage.

use burn::module::{Devices, Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use fsdp_core::Dtype;

use crate::block::Block;

/// A parameter of any number of dimensions.
macro_rules! ranked {
    ($($variant:ident = $dim:literal),+) => {
        #[derive(Clone, Debug)]
        pub(crate) enum Ranked { $($variant(Param<Tensor<$dim>>)),+ }

        impl Ranked {
            /// The parameter `id` with as many dimensions as `block` has.
            pub(crate) fn new(id: ParamId, block: BlockTensor) -> Self {
                match block.shape.len() {
                    $($dim => Ranked::$variant(Param::initialized(id, block.tensor::<$dim>())),)+
                    dims => unreachable!("parameters with {dims} dimensions are refused when the model is sharded"),
                }
            }
        }

        macro_rules! each_rank {
            ($ranked:expr, $param:ident => $body:expr) => {
                match $ranked { $(Ranked::$variant($param) => $body),+ }
            };
            ($ranked:expr, $param:ident -> $body:expr) => {
                match $ranked { $(Ranked::$variant($param) => Ranked::$variant($body)),+ }
            };
        }
    };
}
ranked!(D1 = 1, D2 = 2, D3 = 3, D4 = 4, D5 = 5, D6 = 6, D7 = 7, D8 = 8);

impl Ranked {
    /// Makes this the gradient of the parameter with the same id.
    pub(crate) fn register(self, gradients: &mut GradientsParams) {
        each_rank!(self, param => gradients.register(param.id, param.into_value().inner()));
    }

    /// The elements, in the memory where they are.
    pub(crate) fn into_block(self) -> Block {
        each_rank!(self, param => Block::of(param.into_value()))
    }
}

/// A tensor of a number of dimensions that is known only when the program runs. It is stepped in the memory of its block.
pub(crate) struct BlockTensor<'a> {
    pub(crate) block: Block,
    pub(crate) shape: &'a [usize],
    pub(crate) dtype: Dtype,
    /// Multiplies every element.
    pub(crate) factor: f64,
    /// Cuts off every element's magnitude here, after the multiplication.
    pub(crate) clip_value: Option<f64>,
}

impl BlockTensor<'_> {
    fn tensor<const D: usize>(self) -> Tensor<D> {
        let tensor = self.block.tensor(self.shape, self.dtype, &Device::flex());
        // Multiplying by 1 changes nothing but the time it takes.
        let tensor = if self.factor == 1.0 { tensor } else { tensor.mul_scalar(self.factor) };
        let tensor = match self.clip_value {
            Some(most) => tensor.clamp(-most, most),
            None => tensor,
        };
        // Burn's optimizer takes parameters with autodiff, and steps them without.
        Tensor::from_inner(tensor)
    }
}

/// One block with the name the optimizer knows it by.
#[derive(Clone, Debug)]
pub(crate) struct NamedBlock {
    pub(crate) path: Vec<String>,
    pub(crate) param: Ranked,
}

/// See the module's documentation.
#[derive(Clone, Debug)]
pub(crate) struct ShardModule {
    pub(crate) blocks: Vec<NamedBlock>,
}

impl ShardModule {
    fn map_params(self, map: impl FnMut(NamedBlock) -> NamedBlock) -> Self {
        Self { blocks: self.blocks.into_iter().map(map).collect() }
    }
}

impl Module for ShardModule {
    fn collect_devices(&self, devices: Devices) -> Devices {
        self.blocks.iter().fold(devices, |devices, block| each_rank!(&block.param, p => p.collect_devices(devices)))
    }

    fn fork(self, device: &Device) -> Self {
        self.map_params(|block| NamedBlock { param: each_rank!(block.param, p -> p.fork(device)), ..block })
    }

    fn to_device(self, device: &Device) -> Self {
        self.map_params(|block| NamedBlock { param: each_rank!(block.param, p -> p.to_device(device)), ..block })
    }

    fn train(self) -> Self {
        self.map_params(|block| NamedBlock { param: each_rank!(block.param, p -> p.train()), ..block })
    }

    fn valid(&self) -> Self {
        self.clone().map_params(|block| NamedBlock { param: each_rank!(&block.param, p -> p.valid()), ..block })
    }

    fn materialize(self) -> Self {
        self
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        for block in &self.blocks {
            block.path.iter().for_each(|name| visitor.enter_module(name, "Struct:Shard"));
            each_rank!(&block.param, p => p.visit(visitor));
            block.path.iter().rev().for_each(|name| visitor.exit_module(name, "Struct:Shard"));
        }
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        self.map_params(|block| {
            block.path.iter().for_each(|name| mapper.enter_module(name, "Struct:Shard"));
            let param = each_rank!(block.param, p -> Module::map(p, mapper));
            block.path.iter().rev().for_each(|name| mapper.exit_module(name, "Struct:Shard"));
            NamedBlock { path: block.path, param }
        })
    }
}
