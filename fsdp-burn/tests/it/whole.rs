//! A sharded model becomes the model that it was.

use fsdp_burn::{Dtype, Stage, launch};

use crate::common::models::{Adapted, ConvNet, Gpt, Layouts, Mlp, Trial};
use crate::common::run::{Optimizer, SEED, config, plain_weights, scalar, seeded, share, start, weights};

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
        let turn = seeded(&rank.device(), SEED);
        let loaded = M::build(&rank.device()).load_record(whole.clone().into_record());
        drop(turn);
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
        check::<Adapted<Mlp>>(stage, Dtype::F32);
        check::<Adapted<Mlp>>(stage, Dtype::Bf16);
    }
}
