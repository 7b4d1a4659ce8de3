//! Units that stay cut over a smaller group of ranks from forward to backward: the same bits, and less to send.

use fsdp_burn::{Accumulate, Axis, Config, Dtype, Mesh, OptimizerKind, PrefetchConfig, Stage, TrainingConfig, launch};

use crate::common::models::{Adapted, ConvNet, Gpt, Layouts, Mlp, RecomputedGpt, Recurrent, Trial};
use crate::common::run::{
    Optimizer, Outcome, STEPS, Tolerance, assert_parity, config, on_ranks, scalar, sharded, share, start, weights,
};
use crate::traffic::{CONV_NET, GPT, MLP, assert_counts};

/// Six ranks are three groups of two, or two groups of three; with replicas there are two of each.
fn meshes() -> Vec<(Config, usize)> {
    let replicated = Mesh::new([(Axis::Replicate, 2), (Axis::Shard, 4)]).unwrap();
    let replicated = Config { mesh: Some(replicated), ..config(Stage::Parameters, 8) };
    vec![
        (config(Stage::Parameters, 4), 2),
        (config(Stage::Parameters, 6), 2),
        (config(Stage::Parameters, 6), 3),
        (replicated, 2),
    ]
}

fn resharding(config: &Config, num_ranks: usize) -> Config {
    Config { reshard_after_forward: Some(num_ranks), ..config.clone() }
}

fn assert_same<M: Trial>(usual: &Config, num_ranks: usize, optimizer: Optimizer) {
    let expected = sharded::<M>(usual, optimizer);
    let got = sharded::<M>(&resharding(usual, num_ranks), optimizer);
    let what = format!("{num_ranks} of {:?}, {} ranks, {:?}", usual.mesh, usual.world_size, usual.prefetch);
    assert_parity(&what, &expected, &got, Tolerance::EXACT);
}

#[test]
fn a_smaller_group_for_backward_changes_no_bit_on_any_mesh() {
    for (usual, num_ranks) in meshes() {
        assert_same::<Mlp>(&usual, num_ranks, Optimizer::AdamW);
        assert_same::<Layouts>(&usual, num_ranks, Optimizer::Sgd);
    }
}

#[test]
fn a_smaller_group_changes_no_bit_at_any_prefetch_depth_or_with_units_used_again() {
    let usual = config(Stage::Parameters, 4);
    for depth in [0, 2, 20] {
        let prefetch = PrefetchConfig { forward: depth, backward: depth, max_bytes: None };
        assert_same::<Recurrent>(&Config { prefetch, ..usual.clone() }, 2, Optimizer::Sgd);
    }
    assert_same::<RecomputedGpt>(&usual, 2, Optimizer::Fused);
    assert_same::<Adapted<Gpt>>(&usual, 2, Optimizer::AdamW);
    for &accumulate in Accumulate::ALL {
        let training = TrainingConfig { gradient_accumulation: 2, accumulate, ..TrainingConfig::default() };
        assert_same::<Mlp>(&Config { training, ..usual.clone() }, 2, Optimizer::Sgd);
    }
    let mut half = usual.clone();
    half.precision.parameters = Dtype::Bf16;
    assert_same::<Gpt>(&half, 2, Optimizer::AdamW);
}

/// Evaluates between each forward and its backward, and gives up a forward now and then.
fn disturbed(config: &Config) -> Outcome {
    on_ranks(config, |rank| {
        let mut model = start::<Mlp>(&rank)?;
        let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
        let device = rank.device();
        let mut outcome = Outcome::default();
        for step in 0..STEPS {
            if step % 3 == 1 {
                drop(model.loss(step + 70, share(&rank), &device));
                model.each_parameter(|_, _| ())?;
            }
            let loss = model.loss(step, share(&rank), &device);
            let other = model.valid().loss(step + 50, share(&rank), &device.clone().inner());
            outcome.losses.extend([rank.mean(scalar(&loss))?, rank.mean(scalar(&other))?]);
            let gradients = model.backward(loss)?;
            optim.step(Optimizer::Sgd.lr(), &mut model, gradients)?;
        }
        outcome.weights = weights(&model)?;
        Ok(outcome)
    })
}

#[test]
fn evaluations_and_abandoned_forwards_leave_what_is_resharded_alone_or_drop_it() {
    let usual = config(Stage::Parameters, 4);
    assert_parity("disturbed", &disturbed(&usual), &disturbed(&resharding(&usual, 2)), Tolerance::EXACT);
}

#[test]
fn backward_sends_what_a_gather_among_the_smaller_group_sends() {
    for (world_size, num_ranks) in [(4, 2), (6, 2), (6, 3)] {
        let config = resharding(&config(Stage::Parameters, world_size), num_ranks);
        assert_counts::<Mlp>(&config, false, &MLP);
        assert_counts::<ConvNet>(&config, false, &CONV_NET);
        assert_counts::<Gpt>(&config, true, &GPT);
    }
}

#[test]
fn what_stays_between_forward_and_backward_is_what_the_estimate_and_the_summary_say() {
    for (usual, num_ranks) in meshes() {
        let config = resharding(&usual, num_ranks);
        let num_shards = config.resolved_mesh().size(Axis::Shard);
        launch(&config, move |rank| {
            let mut model = start::<Gpt>(&rank)?;
            let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
            for step in 0..3 {
                let loss = model.loss(step, share(&rank), &rank.device());
                let held = model.stats().peak_resharded_bytes as u64;
                assert!(held > 0);
                assert_eq!(
                    held,
                    model.memory_estimate(OptimizerKind::Sgd, None).resharded_bytes,
                    "rank {}",
                    rank.rank()
                );
                let gradients = model.backward(loss)?;
                // Nothing stays behind it.
                model.reset_stats();
                optim.step(0.1, &mut model, gradients)?;
                model.synchronize()?;
                assert_eq!(model.stats().peak_resharded_bytes, 0);
            }
            let said = format!("units stay cut over {num_ranks} of {num_shards} ranks");
            assert!(model.summary().contains(&said), "{}", model.summary());
            Ok(())
        })
        .unwrap();
    }
}
