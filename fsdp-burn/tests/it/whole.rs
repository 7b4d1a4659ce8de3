//! A sharded model becomes the model that it was.

use burn::module::{Lora, Module, ModuleMapper, Param};
use burn::tensor::{Device, Tensor, TensorData};
use fsdp_burn::{Dtype, Sharded, Stage, launch};

use crate::common::models::{ConvNet, Gpt, Layouts, Mlp, Trial, noise};
use crate::common::run::{Optimizer, config, plain_weights, scalar, share, start, weights};

/// Trains two steps and compares the whole model with what is sharded, on every rank.
fn check<M: Trial>(stage: Stage, parameters: Dtype) {
    let mut config = config(stage, 3);
    config.precision.parameters = parameters;
    let ranks = launch(&config, move |rank| {
        let mut model = start::<M>(&rank)?;
        let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
        if parameters == Dtype::F32 {
            for step in 0..2 {
                let gradients = model.backward(model.loss(step, share(&rank), &rank.device()))?;
                optim.step(0.05, &mut model, gradients)?;
            }
        }
        let device = rank.device().inner();
        let whole = model.whole()?;
        let mut losses = Vec::new();
        if parameters == Dtype::F32 {
            losses = vec![scalar(&model.valid().loss(5, 0..6, &device)), scalar(&whole.loss(5, 0..6, &device))];
        }
        // Nothing of the run is attached to it: a record of it is one of the plain model.
        let loaded = M::build(&rank.device()).load_record(whole.clone().into_record());
        Ok((weights(&model)?, plain_weights(&whole), plain_weights(&loaded), losses))
    });
    for (rank, (sharded, whole, loaded, losses)) in ranks.unwrap().into_iter().enumerate() {
        let what = format!("rank {rank} at {stage} in {parameters}");
        assert!(losses.first() == losses.last(), "{what}: {losses:?}");
        for (path, values) in &sharded {
            let of_whole = whole.iter().find(|(other, _)| other == path);
            assert_eq!(of_whole.map(|(_, values)| values), Some(values), "{what}: {path}");
        }
        assert_eq!(whole, loaded, "{what}");
    }
}

/// [`Mlp`] with adapters.
#[derive(Module, Debug, Sharded)]
struct Adapted {
    #[shard(nested)]
    model: Mlp,
}

/// Gives each parameter the same numbers in every run.
struct Fill(u64);

impl ModuleMapper for Fill {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.0 += 1;
        let trained = param.is_require_grad();
        param.map(|value| {
            let data = TensorData::new(noise(self.0, value.shape().num_elements()), value.shape());
            (Tensor::from_data(data, &value.device()) * 0.3).detach().set_require_grad(trained)
        })
    }
}

impl Trial for Adapted {
    const DRAWS_AT_ONCE: bool = true;

    fn build(device: &Device) -> Self {
        Self { model: Mlp::build(device).apply_lora(Lora::new(2, 3.0)).map(&mut Fill(0)) }
    }

    fn loss(&self, batch: usize, samples: std::ops::Range<usize>, device: &Device) -> Tensor<1> {
        self.model.loss(batch, samples, device)
    }
}

#[test]
fn the_whole_model_is_the_one_that_was_sharded_with_the_weights_of_now() {
    for stage in Stage::ALL {
        check::<Mlp>(stage, Dtype::F32);
        check::<ConvNet>(stage, Dtype::F32);
        check::<Gpt>(stage, Dtype::F32);
        check::<Layouts>(stage, Dtype::F32);
    }
}

#[test]
fn the_whole_model_has_masters_and_adapters_and_not_what_is_computed_with() {
    for stage in Stage::ALL {
        check::<Mlp>(stage, Dtype::Bf16);
        check::<Adapted>(stage, Dtype::F32);
        check::<Adapted>(stage, Dtype::Bf16);
    }
}
