//! A checkpoint of any world loads on any other: model and optimizer state, bit by bit.

use std::collections::BTreeMap;
use std::path::Path;

use fsdp_burn::{SaveOptions, Stage, launch};
use fsdp_core::ShardLayout;
use fsdp_core::checkpoint::{Checkpoint, Verify};

use crate::common::files::Scratch;
use crate::common::models::{Mlp, Trial};
use crate::common::run::{Optimizer, config, share, start, weights};

const WORLD_SIZES: [usize; 6] = [1, 2, 3, 4, 5, 8];

/// All that a run goes on from, in whole: tensors of model and optimizer, and scalars.
fn state(dir: &Path) -> (BTreeMap<String, Vec<u8>>, String) {
    let checkpoint = Checkpoint::open(dir, Verify::Sizes).unwrap();
    let whole = |shape: &[usize]| ShardLayout::new(shape, 0, 1);
    let tensors = checkpoint.manifest().tensors.iter();
    let tensors = tensors.map(|t| (t.name.clone(), checkpoint.read(&t.name, &whole(&t.shape), 0).unwrap())).collect();
    (tensors, format!("{:?}", checkpoint.manifest().scalars))
}

/// Saved again by who has loaded it, a checkpoint must be what it was: for 6 sizes of the world and 4 stages, loaded on as many.
#[test]
fn every_pair_of_worlds_and_stages_keeps_weights_and_moments_bit_by_bit() {
    let scratch = Scratch::new("pairs");
    let worlds: Vec<(Stage, usize)> =
        Stage::ALL.into_iter().flat_map(|stage| WORLD_SIZES.map(|size| (stage, size))).collect();
    let dir = |(stage, size): (Stage, usize)| scratch.path().join(format!("{}-{size}", stage.number()));
    let mut saved = Vec::new();
    for &world in &worlds {
        let root = dir(world);
        let runs = launch(&config(world.0, world.1), move |rank| {
            let mut model = start::<Mlp>(&rank)?;
            let mut optim = rank.optimizer(Optimizer::AdamW.build())?;
            for batch in 0..2 {
                let gradients = model.backward(model.loss(batch, share(&rank), &rank.device()))?;
                optim.step(Optimizer::AdamW.lr(), &mut model, gradients)?;
            }
            let saved = model.save(&root, &optim, BTreeMap::new(), &SaveOptions::default())?;
            Ok((saved.dir, weights(&model)?))
        });
        let (dir, weights) = runs.unwrap().swap_remove(0);
        let state = state(&dir);
        // 5 layers: weight and bias, each with two moments and a count of steps.
        assert_eq!(state.0.len(), 5 * 2 * 3);
        assert_eq!(state.1.matches("time").count(), 5 * 2);
        saved.push((world, dir, weights, state));
    }
    for &world in &worlds {
        let (from, again) = (saved.clone(), scratch.path().join("again"));
        launch(&config(world.0, world.1), move |rank| {
            for (saver, dir, expected, expected_state) in &from {
                let what = format!("from {saver:?} to {world:?}");
                let mut model = start::<Mlp>(&rank)?;
                let mut optim = rank.optimizer(Optimizer::AdamW.build())?;
                model.load(dir.parent().unwrap(), &mut optim)?;
                assert!(weights(&model)? == *expected, "weights {what}");
                let saved = model.save(&again, &optim, BTreeMap::new(), &SaveOptions::default())?;
                if rank.is_main() {
                    assert!(state(&saved.dir) == *expected_state, "state {what}");
                }
                rank.barrier()?;
            }
            Ok(())
        })
        .unwrap();
    }
}
