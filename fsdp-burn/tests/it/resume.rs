//! A run that is saved, and goes on in a new process, is the one that was never interrupted: its losses, weights, optimizer
//! state, counters, loss scale and random numbers, bit for bit.

use std::collections::BTreeMap;
use std::path::Path;

use burn::nn::DropoutConfig;
use fsdp_burn::nn::Dropout;
use fsdp_burn::{Accumulate, Config, Dtype, PrecisionConfig, SaveOptions, Stage, TrainingConfig, launch};
use fsdp_core::checkpoint::{Checkpoint, Verify};
use serde_json::json;

use crate::common::files::{Scratch, content};
use crate::common::models::{Gpt, Trial};
use crate::common::process::{child, run_to_end, told};
use crate::common::run::{Optimizer, config, scalar, share, start};

/// Micro-batches before the save, and after it; two for each optimizer step.
const HALF: usize = 6;

#[derive(Clone, Copy, Debug)]
struct Case {
    stage: Stage,
    optimizer: Optimizer,
    accumulate: Accumulate,
    parameters: Dtype,
}

fn cases() -> Vec<Case> {
    let of_stage = |stage| {
        [
            (Optimizer::AdamW, Accumulate::Reduced, Dtype::F32),
            (Optimizer::Fused, Accumulate::Local, Dtype::Bf16),
            (Optimizer::Sgd, Accumulate::Reduced, Dtype::Bf16),
            // With a loss scale that changes from step to step.
            (Optimizer::Fused, Accumulate::Reduced, Dtype::F16),
        ]
        .map(|(optimizer, accumulate, parameters)| Case { stage, optimizer, accumulate, parameters })
    };
    Stage::ALL.into_iter().flat_map(of_stage).collect()
}

/// Trains all of it, saving in the middle, or the second half from what was saved; saves at the end, with the losses of the
/// second half.
fn train(case: Case, dir: &Path, is_second_half: bool) {
    let training = TrainingConfig {
        gradient_accumulation: 2,
        accumulate: case.accumulate,
        gradient_clip_norm: Some(0.1),
        ..TrainingConfig::default()
    };
    let precision = PrecisionConfig { parameters: case.parameters, ..PrecisionConfig::default() };
    let config = Config { training, precision, ..config(case.stage, 3) };
    let (middle, end) = (dir.join("middle"), dir.join(if is_second_half { "resumed" } else { "straight" }));
    launch(&config, move |rank| {
        let mut model = start::<Gpt>(&rank)?;
        let mut optim = rank.optimizer(case.optimizer.build())?;
        let first = match is_second_half {
            true => model.load(&middle, &mut optim)?.sections["batch"].as_u64().unwrap() as usize,
            false => 0,
        };
        let dropout = Dropout::from(DropoutConfig::new(0.3));
        let mut losses = Vec::new();
        for batch in first..2 * HALF {
            if batch == HALF && !is_second_half {
                let sections = BTreeMap::from([("batch".to_owned(), json!(batch))]);
                model.save(&middle, &optim, sections, &SaveOptions::default())?;
                losses.clear();
            }
            // Dropping parts of the loss stands for a layer that draws.
            let loss = model.loss(batch, share(&rank), &rank.device());
            let loss = dropout.forward(loss.repeat(&[8])).mean();
            losses.push(rank.mean(scalar(&loss))?.to_bits());
            let gradients = model.backward(loss)?;
            optim.step(case.optimizer.lr(), &mut model, gradients)?;
        }
        assert_eq!(losses.len(), HALF);
        let sections = BTreeMap::from([("losses".to_owned(), json!(losses))]);
        model.save(&end, &optim, sections, &SaveOptions::default()).map(drop)
    })
    .unwrap();
}

/// The part of the test that runs in a new process.
#[test]
fn child_trains_the_second_half() {
    let (Some(dir), Some(number)) = (told("FSDP_TEST_RESUME_DIR"), told("FSDP_TEST_RESUME_CASE")) else { return };
    train(cases()[number.to_str().unwrap().parse::<usize>().unwrap()], &dir, true);
}

#[test]
fn a_run_that_goes_on_in_a_new_process_is_bit_for_bit_the_one_that_was_not_interrupted() {
    for (number, case) in cases().into_iter().enumerate() {
        let scratch = Scratch::new("new-process");
        train(case, &scratch.path(), false);
        let mut command = child("resume::child_trains_the_second_half");
        command.env("FSDP_TEST_RESUME_DIR", scratch.path()).env("FSDP_TEST_RESUME_CASE", number.to_string());
        run_to_end(&mut command);
        let step = format!("step-{HALF}");
        let [straight, resumed] = ["straight", "resumed"].map(|end| scratch.path().join(end).join(&step));
        let (expected, got) = (content(&straight), content(&resumed));
        assert!(expected.0.keys().any(|name| name.contains("optimizer.")), "the optimizer's state is there");
        assert_eq!(expected.1, got.1, "counters and losses, {case:?}");
        assert!(expected.0 == got.0, "weights and optimizer state, {case:?}");
        let random = |dir| Checkpoint::open(dir, Verify::Sizes).unwrap().manifest().ranks.clone();
        assert_eq!(random(&straight), random(&resumed), "random numbers, {case:?}");
    }
}
