//! Blocks that lie where ranks gather them, against gathers that copy.

use fsdp_burn::{Config, Rank, Stage, launch_with};

use crate::common::models::{Branches, Gpt, Mlp, Trial};
use crate::common::run::{Optimizer, Weights, apart, config, share, start, weights};

/// Some steps, an evaluation between them, and the weights after each.
fn trained<M: Trial>(rank: &Rank, optimizer: Optimizer) -> Result<Vec<(f64, Weights)>, fsdp_burn::Error> {
    let mut model = start::<M>(rank)?;
    let mut optim = rank.optimizer(optimizer.build())?;
    let device = rank.device();
    let step = |step| {
        let loss = model.loss(step, share(rank), &device);
        let gradients = model.backward(loss)?;
        optim.step(optimizer.lr(), &mut model, gradients)?;
        let valid = model.valid().loss(step, share(rank), &device.clone().inner());
        Ok((f64::from(valid.into_scalar::<f32>()), weights(&model)?))
    };
    (0..4).map(step).collect()
}

fn assert_same_bits<M: Trial>(config: &Config, optimizer: Optimizer) {
    let run = |options| launch_with(config, options, move |rank| trained::<M>(&rank, optimizer)).unwrap();
    assert!(run(apart()) == run(Default::default()), "{} ranks, {optimizer:?}", config.world_size);
}

#[test]
fn gathers_in_place_give_the_bits_of_gathers_that_copy() {
    for world_size in [2, 3, 5] {
        let config = config(Stage::Parameters, world_size);
        for optimizer in [Optimizer::AdamW, Optimizer::Fused, Optimizer::Groups] {
            assert_same_bits::<Mlp>(&config, optimizer);
        }
        assert_same_bits::<Gpt>(&config, Optimizer::Fused);
        // Units that only some ranks use, and parameters of which not every rank has a part.
        assert_same_bits::<Branches>(&config, Optimizer::AdamW);
    }
}
