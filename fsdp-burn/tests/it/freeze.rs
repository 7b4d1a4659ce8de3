//! Parameters that are frozen and trained again while training goes on.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex};

use burn::module::{Module, ModuleMapper, Param, ParamGroup};
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};
use fsdp_burn::{
    Config, Error, OpKind, SaveOptions, Sharded, ShardedModel, ShardedOptimizer, Stage, TierShares, launch,
};

use crate::common::files::Scratch;
use crate::common::models::{Gpt, Trial, distance, rows};
use crate::common::run::{
    BATCH, Optimizer, Outcome, Tolerance, assert_parity, config, on_ranks, plain_model, plain_weights, scalar, share,
    start, weights,
};
use crate::offload::offloaded;

/// Two layers alike, of which the first is frozen when the model is sharded.
#[derive(Module, Debug, Sharded)]
struct Thawing {
    #[shard(unit)]
    first: Linear,
    #[shard(unit)]
    second: Linear,
}

impl Trial for Thawing {
    fn build(device: &Device) -> Self {
        let linear = || LinearConfig::new(7, 7).init(device);
        Self { first: linear().no_grad(), second: linear() }
    }

    fn loss(&self, batch: usize, samples: Range<usize>, device: &Device) -> Tensor<1> {
        let x = relu(self.first.forward(rows(batch + 1, samples.clone(), 7, device)));
        distance(self.second.forward(x), batch, samples, device)
    }
}

/// Trains the second layer, and then both, before and after the save of a checkpoint: losses and weights, and what rank 0 has
/// written to its disk in the first five steps, and in the last ten.
fn thawed(config: &Config, root: &Path) -> (Outcome, [u64; 2]) {
    let written = Arc::new(Mutex::new([0; 2]));
    let (of_main, root) = (written.clone(), root.to_owned());
    let outcome = on_ranks(config, move |rank| {
        let mut outcome = Outcome::default();
        let mut train = |model: &mut ShardedModel<Thawing>, optim: &mut ShardedOptimizer, batches: Range<usize>| {
            let written = || rank.tier_stats().map_or(0, |stats| stats.written_bytes);
            let before = written();
            for batch in batches {
                let loss = model.loss(batch, share(&rank), &rank.device());
                outcome.losses.push(rank.mean(scalar(&loss))?);
                let gradients = model.backward(loss)?;
                optim.step(Optimizer::AdamW.lr(), model, gradients)?;
            }
            Ok::<_, Error>(written() - before)
        };
        let (mut model, mut optim) = (start::<Thawing>(&rank)?, rank.optimizer(Optimizer::AdamW.build())?);
        let frozen = train(&mut model, &mut optim, 0..5)?;
        model.unfreeze(&ParamGroup::all())?;
        train(&mut model, &mut optim, 5..10)?;
        model.save(&root, &optim, BTreeMap::new(), &SaveOptions::default())?;
        // Where it is frozen again, its state is found all the same.
        drop((model, optim));
        let (mut model, mut optim) = (start::<Thawing>(&rank)?, rank.optimizer(Optimizer::AdamW.build())?);
        model.load(&root, &mut optim)?;
        model.unfreeze(&ParamGroup::all())?;
        let both = train(&mut model, &mut optim, 10..20)?;
        outcome.weights = weights(&model)?;
        if rank.is_main() {
            *of_main.lock().unwrap() = [frozen, both];
        }
        Ok(outcome)
    });
    let written = *written.lock().unwrap();
    (outcome, written)
}

#[test]
fn what_was_frozen_when_it_was_sharded_is_offloaded_once_it_is_trained() {
    let scratch = Scratch::new("thawed");
    let (nvme, root) = (scratch.path().join("nvme"), scratch.path().join("checkpoints"));
    let all_of_state = [TierShares::NVME, TierShares::NVME, TierShares::DEVICE];
    for stage in Stage::ALL {
        let (expected, nothing) = thawed(&config(stage, 2), &root.join(stage.number().to_string()));
        assert_eq!(nothing, [0, 0]);
        let offloaded = offloaded(&nvme, &config(stage, 2), all_of_state);
        let (got, [frozen, both]) = thawed(&offloaded, &root.join(format!("{}-nvme", stage.number())));
        assert_parity(&format!("{stage}"), &expected, &got, Tolerance::EXACT);
        // Twice as much in twice as many steps; the last of it may still be on its way when it is counted.
        assert!(both > 3 * frozen && frozen > 0, "{stage}: {frozen} bytes of one layer, {both} of both");
        let moved = got.weights.iter().zip(plain_weights(&plain_model::<Thawing>().0));
        for ((path, after), (_, before)) in moved {
            assert_ne!(after, &before, "{stage}: {path}");
        }
    }
}

/// What is frozen before each batch: nothing, the blocks, then the first block alone, then nothing again.
const PHASES: [&str; 4] = ["nothing", "blocks", "blocks.0", "nothing"];
const BATCHES: usize = 5;

/// Freezes the parameters of a plain model whose path begins with a text.
struct Freeze<'a> {
    path: Vec<String>,
    frozen: &'a str,
}

impl ModuleMapper for Freeze<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let trained = !self.path.join(".").starts_with(self.frozen);
        param.set_require_grad(trained)
    }
}

fn plain(optimizer: Optimizer) -> Outcome {
    let (mut model, device) = plain_model::<Gpt>();
    let mut optim = optimizer.build();
    let mut outcome = Outcome::default();
    for (index, phase) in PHASES.iter().enumerate() {
        model = model.map(&mut Freeze { path: Vec::new(), frozen: phase });
        for batch in index * BATCHES..(index + 1) * BATCHES {
            let loss = model.loss(batch, 0..BATCH, &device);
            outcome.losses.push(scalar(&loss));
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = optim.step(optimizer.lr(), model, gradients);
        }
    }
    outcome.weights = plain_weights(&model);
    outcome
}

fn sharded(config: &Config, optimizer: Optimizer) -> Outcome {
    on_ranks(config, move |rank| {
        let mut model = start::<Gpt>(&rank)?;
        let mut optim = rank.optimizer(optimizer.build())?;
        let mut outcome = Outcome::default();
        for (index, phase) in PHASES.iter().enumerate() {
            model.unfreeze(&ParamGroup::all())?;
            model.freeze(&ParamGroup::from_predicate(*phase))?;
            for batch in index * BATCHES..(index + 1) * BATCHES {
                let loss = model.loss(batch, share(&rank), &rank.device());
                outcome.losses.push(rank.mean(scalar(&loss))?);
                let gradients = model.backward(loss)?;
                optim.step(optimizer.lr(), &mut model, gradients)?;
            }
        }
        outcome.weights = weights(&model)?;
        Ok(outcome)
    })
}

#[test]
fn freezing_and_unfreezing_between_steps_trains_as_on_one_device() {
    for optimizer in [Optimizer::Sgd, Optimizer::AdamW] {
        let expected = plain(optimizer);
        for stage in Stage::ALL {
            let alone = sharded(&config(stage, 1), optimizer);
            assert_parity(&format!("{stage} on one rank"), &expected, &alone, Tolerance::EXACT);
            let got = sharded(&config(stage, 3), optimizer);
            let slack = Tolerance { absolute: 10.0 * optimizer.tolerance().absolute, ..optimizer.tolerance() };
            assert_parity(&format!("{stage}"), &expected, &got, slack);
        }
    }
}

#[test]
fn what_is_frozen_sends_no_gradient_and_the_plan_says_so() {
    let reduced = launch(&config(Stage::Parameters, 2), |rank| {
        let mut model = start::<Gpt>(&rank)?;
        let mut optim = rank.optimizer(Optimizer::AdamW.build())?;
        let mut reduced = Vec::new();
        for phase in ["nothing", "blocks"] {
            model.freeze(&ParamGroup::from_predicate(phase))?;
            rank.traffic().reset();
            let gradients = model.backward(model.loss(0, share(&rank), &rank.device()))?;
            optim.step(0.01, &mut model, gradients)?;
            let trained = model.plan().params().iter().filter(|param| param.trainable);
            let trained: usize = trained.map(|param| param.layout.full_len()).sum();
            reduced.push((rank.traffic().of(OpKind::ReduceScatter).sent_bytes as usize, trained));
        }
        assert!(model.summary().contains("frozen"), "{}", model.summary());
        Ok(reduced)
    });
    let reduced = reduced.unwrap();
    for (rank_0, rank_1) in reduced[0].iter().zip(&reduced[1]) {
        assert_eq!(rank_0.0 + rank_1.0, 4 * rank_0.1);
    }
    assert!(reduced[0][1].1 < reduced[0][0].1);
}

#[test]
fn freezing_everything_or_between_backward_and_step_is_refused() {
    launch(&config(Stage::Gradients, 2), |rank| {
        let mut model = start::<Gpt>(&rank)?;
        let refused = model.freeze(&ParamGroup::all()).unwrap_err();
        assert!(matches!(&refused, Error::Misuse { .. }), "{refused}");
        let gradients = model.backward(model.loss(0, share(&rank), &rank.device()))?;
        let refused = model.freeze(&ParamGroup::from_predicate("blocks")).unwrap_err();
        assert!(refused.to_string().contains("gradients wait for a step"), "{refused}");
        drop(gradients);
        Ok(())
    })
    .unwrap();
}
