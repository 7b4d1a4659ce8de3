//! Parameters that are frozen and trained again while training goes on.

use burn::module::{Module, ModuleMapper, Param, ParamGroup};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use fsdp_burn::{Config, Error, OpKind, Stage, launch};

use crate::common::models::{Gpt, Trial};
use crate::common::run::{
    BATCH, Optimizer, Outcome, Tolerance, assert_parity, config, on_ranks, plain_model, plain_weights, scalar, share,
    start, weights,
};

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
