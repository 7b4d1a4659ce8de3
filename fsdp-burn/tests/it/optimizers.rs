//! Optimizers that look at whole tensors are refused where a tensor is split, and only there.

use burn::grad_clipping::{GradientClipping, GradientClippingConfig};
use burn::module::{Module, Param, ParamGroup};
use burn::optim::{AdafactorConfig, LambConfig, ModuleOptimizer, MuonConfig, SgdConfig};
use burn::tensor::{Device, Tensor};
use fsdp_burn::{Error, Rank, Sharded, ShardedOptimizer, Stage, launch};

use crate::common::models::rows;
use crate::common::run::config;

#[derive(Module, Debug, Sharded)]
struct Cut {
    #[shard(unit)]
    first: Param<Tensor<2>>,
    #[shard(unit)]
    second: Param<Tensor<2>>,
}

#[derive(Module, Debug, Sharded)]
struct Whole {
    #[shard(unit, replicate)]
    first: Param<Tensor<2>>,
    #[shard(unit, replicate)]
    second: Param<Tensor<2>>,
}

trait Matrices: Module + Sharded + 'static {
    fn build(first: Param<Tensor<2>>, second: Param<Tensor<2>>) -> Self;
    fn forward(&self, x: Tensor<2>) -> Tensor<2>;
}

macro_rules! matrices {
    ($($name:ident),+) => {$(
        impl Matrices for $name {
            fn build(first: Param<Tensor<2>>, second: Param<Tensor<2>>) -> Self {
                Self { first, second }
            }

            fn forward(&self, x: Tensor<2>) -> Tensor<2> {
                x.matmul(self.first.val()).matmul(self.second.val())
            }
        }
    )+};
}
matrices!(Cut, Whole);

/// The result of one step.
fn step<M: Matrices>(
    stage: Stage,
    world_size: usize,
    optimizer: impl Fn(&Rank) -> Result<ShardedOptimizer, Error> + Send + Sync + 'static,
) -> Result<(), String> {
    let result = launch(&config(stage, world_size), move |rank| {
        let matrix = |seed: usize, device: &Device| Param::from_tensor(rows(seed, 0..4, 4, device));
        let mut model = rank.shard(M::build(matrix(1, &rank.device()), matrix(2, &rank.device())))?;
        let mut optim = optimizer(&rank)?;
        let loss = model.forward(rows(3, 0..2, 4, &rank.device())).powi_scalar(2).mean();
        let gradients = model.backward(loss)?;
        optim.step(0.01, &mut model, gradients)?;
        Ok(())
    });
    result.map(|_| ()).map_err(|error| error.to_string())
}

fn assert_refused<F>(name: &str, parameter: &str, optimizer: F)
where
    F: Fn(&Rank) -> Result<ShardedOptimizer, Error> + Clone + Send + Sync + 'static,
{
    for stage in [Stage::OptimizerState, Stage::Gradients, Stage::Parameters] {
        let error = step::<Cut>(stage, 2, optimizer.clone()).unwrap_err();
        for part in [name, &format!("`{parameter}` is split over 2 ranks"), "#[shard(replicate)]", "stage 0"] {
            assert!(error.contains(part), "{name} at {stage}: {error:?} lacks {part:?}");
        }
        assert_eq!(step::<Whole>(stage, 2, optimizer.clone()), Ok(()), "{name} on whole parameters at {stage}");
        assert_eq!(step::<Cut>(stage, 1, optimizer.clone()), Ok(()), "{name} on one rank at {stage}");
    }
    assert_eq!(step::<Cut>(Stage::Ddp, 2, optimizer), Ok(()), "{name} at stage 0");
}

#[test]
fn lamb_is_refused_where_a_tensor_is_split() {
    assert_refused("LAMB", "first", |rank| rank.optimizer(LambConfig::new().build()));
    assert_refused("LAMB", "first", |rank| rank.optimizer(LambConfig::new().init()));
}

#[test]
fn muon_is_refused_where_a_tensor_is_split() {
    assert_refused("Muon", "first", |rank| rank.optimizer(MuonConfig::new().build()));
    assert_refused("Muon", "first", |rank| rank.optimizer(MuonConfig::new().init()));
}

#[test]
fn adafactor_is_refused_where_a_tensor_is_split() {
    assert_refused("Adafactor", "first", |rank| rank.optimizer(AdafactorConfig::new().build()));
    assert_refused("Adafactor", "first", |rank| rank.optimizer(AdafactorConfig::new().init()));
}

#[test]
fn the_parameter_of_a_group_with_such_an_optimizer_is_named() {
    assert_refused("Muon", "second", |rank| {
        let muon = MuonConfig::new().build();
        rank.optimizer(SgdConfig::new().init().with_group(ParamGroup::from_path("second"), muon, None))
    });
}

#[test]
fn clipping_by_the_norm_of_a_tensor_is_refused_with_the_key_to_set_instead() {
    let clipped = || SgdConfig::new().with_gradient_clipping(Some(GradientClippingConfig::Norm(0.5))).init();
    for stage in [Stage::OptimizerState, Stage::Gradients, Stage::Parameters] {
        let error = step::<Cut>(stage, 2, move |rank| rank.optimizer(clipped())).unwrap_err();
        assert!(error.contains("`gradient_clip_norm = 0.5`"), "{stage}: {error}");
        assert_eq!(step::<Cut>(stage, 1, move |rank| rank.optimizer(clipped())), Ok(()), "one rank at {stage}");
    }
    assert_eq!(step::<Cut>(Stage::Ddp, 2, move |rank| rank.optimizer(clipped())), Ok(()));
}

#[test]
fn clipping_by_norm_in_a_parameter_group_is_refused_with_the_name_of_the_parameter() {
    let grouped = || -> ModuleOptimizer {
        let (group, sgd) = (ParamGroup::from_path("second"), SgdConfig::new().build());
        SgdConfig::new().init().with_group(group, sgd, Some(GradientClipping::Norm(0.5)))
    };
    for stage in [Stage::OptimizerState, Stage::Gradients, Stage::Parameters] {
        let error = step::<Cut>(stage, 2, move |rank| rank.optimizer(grouped())).unwrap_err();
        assert!(error.contains("`second`"), "{stage}: {error}");
        assert!(error.contains("clipping by the norm"), "{stage}: {error}");
    }
    assert_eq!(step::<Cut>(Stage::Ddp, 2, move |rank| rank.optimizer(grouped())), Ok(()));
}
