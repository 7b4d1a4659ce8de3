//! A step sends what the table says, no byte more: operations and bytes, counted on every rank.

use fsdp_burn::{Config, NonFinite, OpKind, Plan, Stage, TrainingConfig, launch};
use fsdp_core::{Accumulate, TrafficModel, UnitTraffic};

use crate::common::models::{ConvNet, Gpt, Layouts, Mlp, Trial};
use crate::common::run::{Optimizer, config, share, start_on};

/// Operations by rank, and bytes over all ranks, of one step after the order of units is known.
pub(crate) struct Counted {
    pub(crate) all_reduce: u64,
    pub(crate) all_gather: u64,
    pub(crate) reduce_scatter: u64,
    pub(crate) sent_bytes: u64,
    /// Bytes of reduce-scatters alone.
    pub(crate) reduced_bytes: u64,
}

/// The kinds of collectives that a step may use at all.
const KINDS: [OpKind; 3] = [OpKind::AllReduce, OpKind::AllGather, OpKind::ReduceScatter];

/// Counts one step of `M`; `recompute` builds it on a device that checkpoints.
pub(crate) fn count<M: Trial>(config: &Config, recompute: bool) -> (Counted, Plan) {
    // Nobody asks for the gradient norm, which would be one message more.
    let training = TrainingConfig { non_finite: NonFinite::Propagate, ..config.training.clone() };
    let config = Config { training, ..config.clone() };
    let ranks = launch(&config, move |rank| {
        let device = if recompute { rank.device().gradient_checkpointing() } else { rank.device() };
        let mut model = start_on::<M>(&rank, device.clone())?;
        let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
        let num_batches = rank.config().training.gradient_accumulation;
        // The first step learns the order of forward and agrees on it, the second is the first to prefetch.
        for step in 0..3 {
            if step == 2 {
                model.synchronize()?;
                rank.traffic().reset();
            }
            for batch in 0..num_batches {
                let loss = model.loss(batch, share(&rank), &device);
                let gradients = model.backward(loss)?;
                optim.step(0.01, &mut model, gradients)?;
            }
        }
        model.synchronize()?;
        let [all_reduce, all_gather, reduce_scatter] = KINDS.map(|kind| rank.traffic().of(kind));
        let total = rank.traffic().total();
        assert_eq!(total.num_ops, all_reduce.num_ops + all_gather.num_ops + reduce_scatter.num_ops, "control messages");
        let ops = [all_reduce.num_ops, all_gather.num_ops, reduce_scatter.num_ops];
        Ok((ops, [total.sent_bytes, reduce_scatter.sent_bytes], model.plan().clone()))
    })
    .unwrap();
    let (ops, _, plan) = ranks[0].clone();
    assert!(ranks.iter().all(|(other, _, _)| *other == ops), "ranks differ in operations");
    let [sent_bytes, reduced_bytes] = [0, 1].map(|kind| ranks.iter().map(|(_, bytes, _)| bytes[kind]).sum());
    let [all_reduce, all_gather, reduce_scatter] = ops;
    (Counted { all_reduce, all_gather, reduce_scatter, sent_bytes, reduced_bytes }, plan)
}

/// The units in the order in which forward first uses them, given by name. A name in brackets is a unit whose weights
/// backward does not ask for, because nothing in front of it needs a gradient; it is gathered once, like a kept one.
fn units(plan: &Plan, order: &[&str], num_ranks: u64) -> Vec<UnitTraffic> {
    assert_eq!(order.len(), plan.units().len(), "{}", plan.table(0));
    let unit = |name: &&str| {
        let bare_name = name.trim_matches(['[', ']']);
        let index = plan.units().iter().position(|unit| unit.name == bare_name).unwrap();
        let full_len = plan.unit_len(index) as u64;
        // Without padding the ranks together send (N - 1) times the unit in each pass, however it is cut. That is what
        // one rank would send of a unit N times as large.
        let unit = UnitTraffic::even(full_len * num_ranks, num_ranks);
        if plan.units()[index].keep || bare_name != *name { unit.keep() } else { unit }
    };
    order.iter().map(unit).collect()
}

pub(crate) fn assert_counts<M: Trial>(config: &Config, recompute: bool, order: &[&str]) {
    let (counted, plan) = count::<M>(config, recompute);
    let num_ranks = config.world_size as u64;
    let model = TrafficModel {
        num_micro_batches: config.training.gradient_accumulation as u64,
        accumulate: config.training.accumulate,
        reshard: config.resharding().map(|num_ranks| num_ranks as u64),
        ..TrafficModel::new(config.stage, num_ranks)
    };
    let expected = model.step(&units(&plan, order, num_ranks));
    let what = format!("{} on {num_ranks}, {:?}", config.stage, config.training);
    assert_eq!(counted.sent_bytes, expected.sent_bytes(4), "bytes of {what}");
    if num_ranks > 1 {
        let ops = (counted.all_reduce, counted.all_gather, counted.reduce_scatter);
        assert_eq!(ops, (expected.num_all_reduce, expected.num_all_gather, expected.num_reduce_scatter), "{what}");
    }
}

pub(crate) const MLP: [&str; 5] = ["[input]", "hidden.0", "hidden.1", "hidden.2", "root"];
pub(crate) const CONV_NET: [&str; 5] = ["stem", "root", "body.convs.0", "body.convs.1", "head"];
pub(crate) const GPT: [&str; 7] =
    ["[tokens]", "root", "blocks.0", "blocks.0.feed", "blocks.1", "blocks.1.feed", "head"];

#[test]
fn a_step_sends_what_the_traffic_model_says_at_every_stage_and_world_size() {
    for stage in Stage::ALL {
        for world_size in [1, 2, 3, 5] {
            assert_counts::<Mlp>(&config(stage, world_size), false, &MLP);
            assert_counts::<ConvNet>(&config(stage, world_size), false, &CONV_NET);
            assert_counts::<Gpt>(&config(stage, world_size), true, &GPT);
        }
    }
}

#[test]
fn prefetching_moves_gathers_and_adds_none() {
    for depth in [0, 1, 2, 20] {
        let mut config = config(Stage::Parameters, 2);
        (config.prefetch.forward, config.prefetch.backward) = (depth, depth);
        assert_counts::<Mlp>(&config, false, &MLP);
        assert_counts::<ConvNet>(&config, false, &CONV_NET);
        assert_counts::<Gpt>(&config, true, &GPT);
    }
}

#[test]
fn micro_batches_are_reduced_as_often_as_the_mode_says() {
    for &accumulate in Accumulate::ALL {
        for stage in Stage::ALL {
            let training = TrainingConfig { gradient_accumulation: 3, accumulate, ..TrainingConfig::default() };
            assert_counts::<Mlp>(&Config { training, ..config(stage, 2) }, false, &MLP);
        }
    }
}

/// The table, in P and N: 2P(N−1) at stages 0 to 2 and 3P(N−1) at stage 3 over all ranks, less a gather of what stays.
#[test]
fn stage_3_sends_one_and_a_half_times_what_the_others_send_less_what_stays_gathered() {
    for world_size in [2, 3, 5] {
        let others = world_size as u64 - 1;
        for stage in Stage::ALL {
            let (counted, plan) = count::<ConvNet>(&config(stage, world_size), false);
            let num_params = plan.num_params() as u64;
            let len = |name: &str| {
                let unit = plan.units().iter().position(|unit| unit.name == name).unwrap();
                plan.unit_len(unit) as u64
            };
            let passes =
                if stage == Stage::Parameters { 3 * num_params - len("root") - len("head") } else { 2 * num_params };
            assert_eq!(counted.sent_bytes, 4 * passes * others, "{stage} on {world_size}");
        }
    }
}

#[test]
fn frozen_parameters_are_gathered_and_never_reduced() {
    for stage in [Stage::OptimizerState, Stage::Gradients, Stage::Parameters] {
        let (counted, plan) = count::<Layouts>(&config(stage, 3), false);
        let reduced = plan.params().iter().filter(|param| param.trainable && param.is_split());
        let reduced_len: usize = reduced.map(|param| param.layout.full_len()).sum();
        assert_eq!(counted.reduced_bytes, 4 * reduced_len as u64 * 2, "{stage}");
        assert_eq!(counted.all_reduce, 1, "only the replicated parameter is all-reduced");
        assert_eq!(counted.reduce_scatter, 3, "the unit that is frozen in whole is left out");
    }
}
