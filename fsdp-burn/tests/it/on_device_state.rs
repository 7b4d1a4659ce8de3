//! Blocks, reduced gradients and optimizer state stay on a device, or lie in host memory where `[offload]` puts them: either
//! way every stage gives the same bits, and a checkpoint of one is a checkpoint of the other.

use std::collections::BTreeMap;
use std::path::Path;

use fsdp_burn::{
    Config, DeviceChoice, Error, Exchange, NonFinite, Rank, SaveOptions, ShardedModel, ShardedOptimizer, Stage,
    StepOutcome, TierShares, launch,
};

use crate::common::broadcast::BroadcastMlp;
use crate::common::files::Scratch;
use crate::common::models::{Branches, Gpt, Layouts, Tiny, Trial};
use crate::common::run::{Optimizer, Outcome, Tolerance, assert_parity, on_ranks, scalar, share, weights};
use crate::on_device::{ENDS, on, start};

const PLACES: [TierShares; 2] = [TierShares::DEVICE, TierShares::CPU];
const EXCHANGES: [Exchange; 2] = [Exchange::Host, Exchange::Device];

/// All of the state of a model in one memory.
pub(crate) fn placed(place: TierShares, mut config: Config) -> Config {
    (config.offload.optimizer, config.offload.gradients) = (place, place);
    if config.stage.shards_parameters() {
        config.offload.parameters = place;
    }
    config
}

/// One micro-batch: its loss, and what the step made of it.
fn run<M: Trial>(
    rank: &Rank,
    (model, optim, optimizer): (&mut ShardedModel<M>, &mut ShardedOptimizer, Optimizer),
    batch: usize,
    outcome: &mut Outcome,
) -> Result<(), Error> {
    let loss = model.loss(batch, share(rank), &rank.device());
    outcome.losses.push(rank.mean(scalar(&loss))?);
    let gradients = model.backward(loss)?;
    if let StepOutcome::Stepped { gradient_norm } = optim.step(optimizer.lr(), model, gradients)? {
        outcome.norms.extend(gradient_norm);
    }
    Ok(())
}

fn trained<M: Trial>(config: &Config, optimizer: Optimizer, num_batches: usize) -> Outcome {
    on_ranks(config, move |rank| {
        let mut model = start::<M>(&rank)?;
        let mut optim = rank.optimizer(optimizer.build())?;
        let mut outcome = Outcome::default();
        for batch in 0..num_batches {
            run(&rank, (&mut model, &mut optim, optimizer), batch, &mut outcome)?;
        }
        outcome.weights = weights(&model)?;
        Ok(outcome)
    })
}

/// Clipped means of two micro-batches, that many steps.
fn assert_places<M: Trial>(optimizer: Optimizer, stages: &[Stage], num_steps: usize) {
    let with = |device, stage| {
        let mut config = on(device, stage, 2);
        (config.training.gradient_accumulation, config.training.gradient_clip_norm) = (2, Some(0.1));
        config
    };
    let plain = trained::<M>(&with(DeviceChoice::Flex, Stage::Ddp), optimizer, 2 * num_steps);
    assert_eq!(plain.norms.len(), num_steps);
    for place in PLACES {
        let mut first: Option<Outcome> = None;
        for (&stage, collectives) in stages.iter().flat_map(|stage| EXCHANGES.map(|exchange| (stage, exchange))) {
            let config = placed(place, Config { collectives, ..with(DeviceChoice::Cpu, stage) });
            let got = trained::<M>(&config, optimizer, 2 * num_steps);
            let what = format!("{place:?}, {stage}, {collectives}");
            match &first {
                None => {
                    assert_parity(&format!("{what}, against flex"), &plain, &got, optimizer.tolerance());
                    first = Some(got);
                }
                Some(first) => assert_parity(&what, first, &got, Tolerance::EXACT),
            }
        }
    }
}

#[test]
fn wherever_sgd_steps_every_stage_gives_the_same_bits() {
    assert_places::<BroadcastMlp>(Optimizer::Sgd, &Stage::ALL, 2);
}

#[test]
fn wherever_adamw_steps_every_stage_gives_the_same_bits() {
    assert_places::<Gpt>(Optimizer::Fused, &[Stage::Parameters], 1);
    assert_places::<BroadcastMlp>(Optimizer::Groups, &ENDS, 2);
}

#[test]
fn parameters_that_are_cut_otherwise_or_not_at_all_are_stepped_on_a_device() {
    assert_places::<Layouts>(Optimizer::Sgd, &[Stage::Parameters], 1);
    assert_places::<Tiny>(Optimizer::AdamW, &[Stage::Gradients, Stage::Parameters], 2);
}

#[test]
fn what_has_no_gradient_on_any_rank_is_not_stepped_on_a_device() {
    assert_places::<Branches>(Optimizer::AdamW, &[Stage::Parameters], 1);
}

#[test]
fn one_kind_of_state_may_lie_elsewhere_than_the_others() {
    let device = trained::<BroadcastMlp>(&on(DeviceChoice::Cpu, Stage::Parameters, 2), Optimizer::Sgd, 2);
    for kind in 0..3 {
        let mut config = on(DeviceChoice::Cpu, Stage::Parameters, 2);
        let offload = &mut config.offload;
        *[&mut offload.optimizer, &mut offload.gradients, &mut offload.parameters][kind] =
            TierShares { cpu: 0.5, nvme: 0.0 };
        let got = trained::<BroadcastMlp>(&config, Optimizer::Sgd, 2);
        assert_parity(&format!("kind {kind}"), &device, &got, Optimizer::Sgd.tolerance());
    }
}

#[test]
fn a_step_on_a_device_copies_nothing_to_host_memory() {
    let copied = |place, collectives, stage| {
        let config = placed(place, Config { collectives, ..on(DeviceChoice::Cpu, stage, 2) });
        let copied = launch(&config, |rank| {
            let (mut model, mut outcome) = (start::<BroadcastMlp>(&rank)?, Outcome::default());
            let mut optim = rank.optimizer(Optimizer::Fused.build())?;
            for batch in 0..2 {
                model.synchronize()?;
                model.reset_stats();
                run(&rank, (&mut model, &mut optim, Optimizer::Fused), batch, &mut outcome)?;
            }
            model.synchronize()?;
            assert_eq!(outcome.norms.len(), 2, "the norm is asked for");
            let stats = model.stats();
            Ok([stats.copied_to_host_bytes, stats.copied_to_device_bytes])
        });
        copied.unwrap()
    };
    for stage in Stage::ALL {
        assert_eq!(copied(TierShares::DEVICE, Exchange::Device, stage), [[0, 0]; 2], "{stage}");
    }
    for (place, collectives) in [(TierShares::CPU, Exchange::Device), (TierShares::DEVICE, Exchange::Host)] {
        let copied = copied(place, collectives, Stage::Parameters);
        assert!(copied.iter().flatten().all(|&bytes| bytes > 0), "{place:?}, {collectives}: {copied:?}");
    }
}

#[test]
fn gradients_that_are_no_numbers_are_noticed_on_a_device() {
    let mut config = on(DeviceChoice::Cpu, Stage::Parameters, 2);
    config.training.non_finite = NonFinite::Skip;
    launch(&config, |rank| {
        let mut model = start::<BroadcastMlp>(&rank)?;
        let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
        let before = weights(&model)?;
        let loss = model.loss(0, share(&rank), &rank.device());
        let loss = if rank.is_main() { loss.mul_scalar(f32::NAN) } else { loss };
        let gradients = model.backward(loss)?;
        let stepped = optim.step(0.1, &mut model, gradients)?;
        assert!(matches!(stepped, StepOutcome::Skipped { .. }), "{stepped:?}");
        assert_eq!(weights(&model)?, before);
        Ok(())
    })
    .unwrap();
}

/// Trains to the second of four micro-batches, saves, and trains to the end.
fn saved_on_the_way(config: &Config, root: &Path, in_background: bool) -> Outcome {
    let root = root.to_owned();
    on_ranks(config, move |rank| {
        let optimizer = Optimizer::Fused;
        let (mut model, mut outcome) = (start::<BroadcastMlp>(&rank)?, Outcome::default());
        let mut optim = rank.optimizer(optimizer.build())?;
        let mut saver = rank.saver(&root, SaveOptions::default())?;
        for batch in 0..4 {
            if batch == 2 && in_background {
                saver.save(&model, &optim, BTreeMap::new())?;
            } else if batch == 2 {
                model.save(&root, &optim, BTreeMap::new(), &SaveOptions::default())?;
            }
            run(&rank, (&mut model, &mut optim, optimizer), batch, &mut outcome)?;
        }
        saver.finish()?;
        outcome.weights = weights(&model)?;
        Ok(outcome)
    })
}

/// The second half, from what was saved.
fn continued(config: &Config, root: &Path) -> Outcome {
    let root = root.to_owned();
    on_ranks(config, move |rank| {
        let optimizer = Optimizer::Fused;
        let (mut model, mut outcome) = (start::<BroadcastMlp>(&rank)?, Outcome::default());
        let mut optim = rank.optimizer(optimizer.build())?;
        model.load(&root, &mut optim)?;
        for batch in 2..4 {
            run(&rank, (&mut model, &mut optim, optimizer), batch, &mut outcome)?;
        }
        outcome.weights = weights(&model)?;
        Ok(outcome)
    })
}

#[test]
fn a_checkpoint_of_state_on_a_device_goes_on_in_host_memory_and_the_other_way_round() {
    let worlds = [
        (DeviceChoice::Cpu, TierShares::DEVICE),
        (DeviceChoice::Cpu, TierShares::CPU),
        (DeviceChoice::Flex, TierShares::DEVICE),
    ];
    let world = |(device, place), stage, size| placed(place, on(device, stage, size));
    for (index, &of) in worlds.iter().enumerate() {
        let scratch = Scratch::new(&format!("device-state-{index}"));
        let straight = saved_on_the_way(&world(of, Stage::Parameters, 2), &scratch.path(), index == 0);
        let straight =
            Outcome { losses: straight.losses[2..].to_vec(), norms: straight.norms[2..].to_vec(), ..straight };
        for &by in &worlds {
            for (stage, size) in [(Stage::Parameters, 2), (Stage::OptimizerState, 2), (Stage::Parameters, 3)] {
                let got = continued(&world(by, stage, size), &scratch.path());
                let is_same = of == by && size == 2;
                let tolerance = if is_same { Tolerance::EXACT } else { Optimizer::Fused.tolerance() };
                assert_parity(&format!("{of:?} by {by:?}, {stage} on {size}"), &straight, &got, tolerance);
            }
        }
    }
}
