//! Parts of forward that run again in backward give the same bits, gather no more, and draw the same numbers.

use std::ops::Range;

use burn::module::Module;
use burn::nn::{DropoutConfig, Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};
use fsdp_burn::nn::Dropout;
use fsdp_burn::{Config, OpKind, PrefetchConfig, RandomState, Sharded, Stage, TrainingConfig, launch, recompute};

use crate::common::models::{Gpt, RecomputedGpt, Trial, rows};
use crate::common::run::{Optimizer, SEED, Tolerance, assert_parity, config, scalar, seeded, sharded, start, weights};
use crate::parity::assert_all_stages;

#[test]
fn a_recomputed_gpt_trains_as_on_one_device_at_every_stage_and_prefetch_depth() {
    for optimizer in Optimizer::ALL {
        assert_all_stages::<RecomputedGpt>(&TrainingConfig::default(), optimizer, &[1, 2, 3]);
    }
    let training = TrainingConfig { gradient_accumulation: 2, ..TrainingConfig::default() };
    assert_all_stages::<RecomputedGpt>(&training, Optimizer::Sgd, &[2]);
}

#[test]
fn recomputation_changes_no_bit() {
    for stage in Stage::ALL {
        let config = config(stage, 2);
        let expected = sharded::<Gpt>(&config, Optimizer::AdamW);
        let mut got = sharded::<RecomputedGpt>(&config, Optimizer::AdamW);
        for (path, _) in &mut got.weights {
            *path = path.trim_start_matches("gpt.").to_owned();
        }
        assert_parity(&format!("{stage}"), &expected, &got, Tolerance::EXACT);
    }
}

/// Gathers, and bytes sent, in the third step.
fn traffic<M: Trial>(depth: usize) -> (u64, u64) {
    let prefetch = PrefetchConfig { forward: depth, backward: depth, max_bytes: None };
    let counts = launch(&Config { prefetch, ..config(Stage::Parameters, 2) }, |rank| {
        let mut model = start::<M>(&rank)?;
        let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
        for step in 0..3 {
            model.synchronize()?;
            rank.traffic().reset();
            let loss = model.loss(step, 0..4, &rank.device());
            let gradients = model.backward(loss)?;
            optim.step(0.1, &mut model, gradients)?;
        }
        model.synchronize()?;
        let gathers = rank.traffic().of(OpKind::AllGather);
        Ok((gathers.num_ops, gathers.sent_bytes + rank.traffic().of(OpKind::ReduceScatter).sent_bytes))
    });
    counts.unwrap()[0]
}

#[test]
fn a_recomputed_unit_is_gathered_once_for_its_second_forward_and_its_backward() {
    for depth in [0, 1, 2] {
        assert_eq!(traffic::<RecomputedGpt>(depth), traffic::<Gpt>(depth), "prefetch {depth}");
    }
}

/// One layer that is used outside of the recomputed parts too, before and after them, and a part inside a part.
#[derive(Module, Debug, Sharded)]
struct Reused {
    #[shard(unit)]
    shared: Linear,
    #[shard(unit)]
    own: Linear,
}

impl Trial for Reused {
    fn build(device: &Device) -> Self {
        let linear = || LinearConfig::new(6, 6).init(device);
        Self { shared: linear(), own: linear() }
    }

    fn loss(&self, batch: usize, samples: Range<usize>, device: &Device) -> Tensor<1> {
        let x = self.shared.forward(rows(batch, samples, 6, device));
        let x = recompute(&self.shared, x, |shared, x| relu(shared.forward(x)));
        let x = recompute(&self.own, x, |own, x| {
            let x = recompute(own, x, |own, x| relu(own.forward(x)));
            own.forward(x)
        });
        let x = recompute(&self.shared, x, |shared, x| relu(shared.forward(x)));
        self.shared.forward(x).powi_scalar(2).mean()
    }
}

#[test]
fn a_unit_used_inside_and_outside_of_recomputed_parts_is_reduced_once() {
    assert_all_stages::<Reused>(&TrainingConfig::default(), Optimizer::Sgd, &[1, 2, 3]);
}

/// The first part has an input that nothing in front of it needs a gradient of.
#[derive(Module, Debug, Sharded)]
struct Dropping {
    #[shard(units)]
    layers: Vec<Linear>,
    dropout: Dropout,
}

impl Dropping {
    fn layer(layer: &(Linear, Dropout), x: Tensor<2>) -> Tensor<2> {
        layer.1.forward(relu(layer.0.forward(x)))
    }

    fn loss(&self, recomputed: bool, device: &Device) -> Tensor<1> {
        let mut x = rows(3, 0..8, 6, device);
        for layer in &self.layers {
            let part = (layer.clone(), self.dropout.clone());
            x = if recomputed { recompute(&part, x, Self::layer) } else { Self::layer(&part, x) };
        }
        x.powi_scalar(2).mean()
    }
}

#[test]
fn dropout_draws_the_same_numbers_again_and_goes_on_behind_them() {
    let run = |recomputed| {
        let config = Config { seed: Some(5), ..config(Stage::Parameters, 2) };
        // The launcher seeds the device, which other tests share.
        let _turn = seeded(&Device::flex(), SEED);
        launch(&config, move |rank| {
            let device = rank.device();
            let layers = (0..3).map(|_| LinearConfig::new(6, 6).init(&device)).collect();
            let dropout = Dropout::from(DropoutConfig::new(0.4));
            let mut model = rank.shard(Dropping { layers, dropout })?;
            let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
            let mut losses = Vec::new();
            for _ in 0..4 {
                let loss = model.loss(recomputed, &device);
                losses.push(scalar(&loss));
                let gradients = model.backward(loss)?;
                optim.step(0.1, &mut model, gradients)?;
            }
            Ok((losses, weights(&model)?, RandomState::current()))
        })
        .unwrap()
    };
    let (expected, got) = (run(false), run(true));
    assert_eq!(expected, got);
    let [(first, ..), (second, ..)] = &expected[..] else { panic!("two ranks") };
    assert_ne!(first, second, "ranks drop different elements of the same batch");
    assert_eq!(expected[1].2, RandomState { seed: 5, stream: 1, position: 4 * 3 * 8 * 6 });
}

#[test]
fn a_captured_tensor_with_a_gradient_is_refused_in_place_of_a_gradient_lost_or_a_hang() {
    let error = launch(&config(Stage::Parameters, 2), |rank| {
        let model = start::<Reused>(&rank)?;
        let memory = model.shared.forward(rows(0, 0..4, 6, &rank.device()));
        let x = recompute(&model.own, memory.clone(), move |own, x| own.forward(x) + memory.clone());
        model.backward(x.mean()).map(drop)
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("not its input") && error.contains("detach()"), "{error}");
}

/// An adapter of the program's own in front of a frozen weight, and a head that is trained.
#[derive(Module, Debug, Sharded)]
struct Adapted {
    #[shard(unit, nested)]
    part: Part,
    head: Linear,
}

#[derive(Module, Debug, Sharded)]
struct Part {
    #[shard(ignore)]
    adapter: Linear,
    frozen: Linear,
}

#[test]
fn the_gradient_of_an_ignored_parameter_in_a_part_is_not_lost() {
    let found = launch(&config(Stage::Parameters, 2), |rank| {
        let device = rank.device();
        let linear = || LinearConfig::new(6, 6).init(&device);
        let part = Part { adapter: linear(), frozen: linear().no_grad() };
        let model = rank.shard(Adapted { part, head: linear() })?;
        let x = rows(0, 0..4, 6, &device);
        let x = recompute(&model.part, x, |part, x| part.frozen.forward(part.adapter.forward(x)));
        let mut gradients = model.backward(model.head.forward(x).mean())?;
        Ok(model.part.adapter.weight.grad(gradients.unmanaged()).is_some())
    });
    assert_eq!(found.unwrap(), [true, true]);
}

#[test]
fn an_evaluation_and_a_plain_model_run_the_part_as_it_is() {
    let losses = launch(&config(Stage::Parameters, 2), |rank| {
        let model = start::<RecomputedGpt>(&rank)?;
        let device = rank.device();
        let trained = scalar(&model.loss(0, 0..4, &device));
        Ok([trained, scalar(&model.valid().loss(0, 0..4, &device.inner()))])
    });
    let losses = losses.unwrap();
    assert!(losses.iter().all(|rank| rank[0] == rank[1]), "{losses:?}");
    let device = Device::flex().autodiff();
    let plain = Reused::build(&device);
    let gradients = plain.loss(0, 0..4, &device).backward();
    assert!(plain.own.weight.grad(&gradients).is_some() && plain.shared.weight.grad(&gradients).is_some());
}
