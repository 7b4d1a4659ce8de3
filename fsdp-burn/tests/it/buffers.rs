//! Running statistics of batch normalisation: whose they are, and that they are saved once.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Tensor, TensorData};
use fsdp_burn::{Buffers, Config, Dtype, OpKind, SaveOptions, Stage, TrainingConfig, launch};

use crate::common::models::{JointlyNormed, Mlp, Normed, Trial};
use crate::common::run::{
    BATCH, Optimizer, Outcome, STEPS, Tolerance, assert_parity, config, plain_model, plain_weights, scalar, share,
    start, weights,
};

fn with(buffers: Buffers, config: Config) -> Config {
    Config { training: TrainingConfig { buffers, ..config.training.clone() }, ..config }
}

/// The running statistics of a model, by path.
fn statistics<M: Module>(model: &M) -> Vec<(String, Vec<f32>)> {
    plain_weights(&model.valid()).into_iter().filter(|(path, _)| path.contains("running_")).collect()
}

fn values(statistics: &[(String, Vec<f32>)]) -> Vec<f32> {
    statistics.iter().flat_map(|(_, values)| values.iter().copied()).collect()
}

/// Gives a model other running statistics.
fn set_statistics<M: Module>(model: M, values: &[f32]) -> M {
    struct Setter<'a> {
        path: Vec<String>,
        values: &'a [f32],
    }
    impl ModuleMapper for Setter<'_> {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.path.push(name.to_owned());
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.path.pop();
        }
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            if !self.path.iter().any(|name| name.starts_with("running_")) {
                return param;
            }
            param.map(|tensor| {
                let (mine, rest) = self.values.split_at(tensor.shape().num_elements());
                self.values = rest;
                Tensor::from_data(TensorData::new(mine.to_vec(), tensor.shape()), &tensor.device())
            })
        }
    }
    model.map(&mut Setter { path: Vec::new(), values })
}

/// One device that normalises the parts of the batch each by itself, as ranks do. Returns losses and weights, and after
/// each step what `agree` makes of the statistics of all parts.
fn oracle(num_ranks: usize, agree: fn(Vec<Vec<f32>>) -> Vec<Vec<f32>>) -> (Outcome, Vec<Vec<f32>>) {
    let (mut model, device) = plain_model::<Normed>();
    let mut optim = Optimizer::Sgd.build();
    let mut outcome = Outcome::default();
    let mut of_parts = vec![values(&statistics(&model)); num_ranks];
    let len = BATCH / num_ranks;
    for step in 0..STEPS {
        let mut losses = Vec::new();
        for (part, own) in of_parts.iter_mut().enumerate() {
            model = set_statistics(model, own);
            losses.push(model.loss(step, part * len..(part + 1) * len, &device));
            *own = values(&statistics(&model));
        }
        let loss = Tensor::cat(losses, 0).mean();
        outcome.losses.push(scalar(&loss));
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(Optimizer::Sgd.lr(), model, gradients);
        of_parts = agree(of_parts);
    }
    outcome.weights = plain_weights(&model).into_iter().filter(|(path, _)| !path.contains("running_")).collect();
    (outcome, of_parts)
}

/// The same on ranks, with the statistics that each has in the end.
fn on_ranks<M: Trial>(config: &Config) -> (Outcome, Vec<Vec<f32>>) {
    let ranks = launch(config, |rank| {
        let mut model = start::<M>(&rank)?;
        let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
        let mut outcome = Outcome::default();
        for step in 0..STEPS {
            let loss = model.loss(step, share(&rank), &rank.device());
            outcome.losses.push(rank.mean(scalar(&loss))?);
            let gradients = model.backward(loss)?;
            optim.step(Optimizer::Sgd.lr(), &mut model, gradients)?;
        }
        outcome.weights = weights(&model)?;
        Ok((outcome, values(&statistics(&*model))))
    });
    let ranks = ranks.unwrap();
    (ranks[0].0.clone(), ranks.into_iter().map(|(_, statistics)| statistics).collect())
}

#[test]
fn running_statistics_are_the_mean_of_all_ranks_or_rank_0s_or_each_ranks_own() {
    let mean = |parts: Vec<Vec<f32>>| {
        let sum = |index: usize| parts.iter().map(|part| part[index]).sum::<f32>() / parts.len() as f32;
        vec![(0..parts[0].len()).map(sum).collect(); parts.len()]
    };
    let rank_0 = |parts: Vec<Vec<f32>>| vec![parts[0].clone(); parts.len()];
    type Agree = fn(Vec<Vec<f32>>) -> Vec<Vec<f32>>;
    let policies: [(Buffers, Agree); 3] =
        [(Buffers::Sync, mean), (Buffers::Rank0, rank_0), (Buffers::Local, |own| own)];
    for num_ranks in [2, 3] {
        for (policy, agree) in policies {
            let (plain, expected) = oracle(num_ranks, agree);
            let mut first = None;
            for stage in Stage::ALL {
                let (outcome, got) = on_ranks::<Normed>(&with(policy, config(stage, num_ranks)));
                let what = format!("{policy} at {stage} on {num_ranks}");
                assert_parity(&what, &plain, &outcome, Tolerance { absolute: 1e-4, ..Optimizer::Sgd.tolerance() });
                for (rank, (expected, got)) in expected.iter().zip(&got).enumerate() {
                    for (a, b) in expected.iter().zip(got) {
                        assert!(
                            (a - b).abs() <= 1e-4 * a.abs().max(1.0),
                            "{what}: rank {rank} has {got:?}, not {expected:?}"
                        );
                    }
                }
                let equal = got.iter().all(|statistics| *statistics == got[0]);
                assert_eq!(equal, policy != Buffers::Local, "{what}: the same bits on all ranks");
                assert_eq!(first.get_or_insert_with(|| got.clone()), &got, "{what}: another bit than stage 0");
            }
        }
    }
}

#[test]
fn batch_norm_over_all_ranks_trains_as_on_one_device_and_notes_the_same_statistics() {
    let (mut model, device) = plain_model::<JointlyNormed>();
    let mut optim = Optimizer::Sgd.build();
    let mut plain = Outcome::default();
    for step in 0..STEPS {
        let loss = model.loss(step, 0..BATCH, &device);
        plain.losses.push(scalar(&loss));
        model = optim.step(Optimizer::Sgd.lr(), model.clone(), GradientsParams::from_grads(loss.backward(), &model));
    }
    let expected = values(&statistics(&model));
    plain.weights = plain_weights(&model).into_iter().filter(|(path, _)| !path.contains("running_")).collect();
    for num_ranks in [1, 2, 3, 5] {
        for policy in [Buffers::Sync, Buffers::Local] {
            let mut first: Option<(Outcome, Vec<Vec<f32>>)> = None;
            for stage in Stage::ALL {
                let (outcome, got) = on_ranks::<JointlyNormed>(&with(policy, config(stage, num_ranks)));
                let what = format!("{policy} at {stage} on {num_ranks}");
                assert_parity(&what, &plain, &outcome, Tolerance { absolute: 1e-4, ..Optimizer::Sgd.tolerance() });
                for (rank, got) in got.iter().enumerate() {
                    let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-4 * a.abs().max(1.0);
                    assert!(expected.iter().zip(got).all(close), "{what}: rank {rank} has {got:?}, not {expected:?}");
                }
                let (first, statistics) = first.get_or_insert_with(|| (outcome.clone(), got.clone()));
                assert_parity(&what, first, &outcome, Tolerance::EXACT);
                assert_eq!(*statistics, got, "{what}: another bit than stage 0");
                assert!(got.iter().all(|own| *own == got[0]), "{what}: ranks differ");
            }
        }
    }
}

#[test]
fn statistics_are_float32_under_half_precision_and_close_to_those_of_full_precision() {
    for stage in Stage::ALL {
        let (_, exact) = on_ranks::<JointlyNormed>(&config(stage, 2));
        let mut half = config(stage, 2);
        half.precision.parameters = Dtype::Bf16;
        let (_, got) = on_ranks::<JointlyNormed>(&half);
        assert_eq!(got[0], got[1], "{stage}: ranks differ");
        for (a, b) in exact[0].iter().zip(&got[0]) {
            assert!((a - b).abs() <= 0.05 * a.abs().max(1.0), "{stage}: {b}, in full precision {a}");
        }
        let is_rounded = |value: &&f32| value.to_bits() & 0xFFFF == 0;
        let num_rounded = got[0].iter().filter(is_rounded).count();
        assert!(num_rounded * 4 < got[0].len(), "{stage}: {num_rounded} of {} are bf16", got[0].len());
    }
}

#[test]
fn statistics_of_burns_own_layers_in_half_precision_are_refused_by_name() {
    let mut half = config(Stage::Parameters, 2);
    half.precision.parameters = Dtype::Bf16;
    let error = launch(&half, |rank| start::<Normed>(&rank).map(drop)).unwrap_err().to_string();
    for part in ["`inner.running_mean`", "computes in bf16", "fsdp_burn::nn::BatchNorm"] {
        assert!(error.contains(part), "{error:?} lacks {part:?}");
    }
}

#[test]
fn ranks_that_clone_one_model_have_statistics_of_their_own() {
    let (model, device) = plain_model::<Normed>();
    let model = Arc::new(Mutex::new(model));
    let expected = on_ranks::<Normed>(&with(Buffers::Local, config(Stage::Ddp, 2))).1;
    let shared = model.clone();
    let got = launch(&with(Buffers::Local, config(Stage::Ddp, 2)), move |rank| {
        let clone = shared.lock().unwrap().clone();
        let mut model = rank.shard(clone)?;
        let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
        for step in 0..STEPS {
            let gradients = model.backward(model.loss(step, share(&rank), &device))?;
            optim.step(Optimizer::Sgd.lr(), &mut model, gradients)?;
        }
        Ok(values(&statistics(&*model)))
    });
    assert_eq!(got.unwrap(), expected);
    // And nobody has touched those of the model itself.
    let untouched = values(&statistics(&*model.lock().unwrap()));
    assert!(untouched.iter().all(|value| [0.0, 1.0].contains(value)), "{untouched:?}");
}

#[test]
fn statistics_cost_one_small_message_per_step_where_there_are_some() {
    fn sent<M: Trial>(buffers: Buffers, kind: OpKind) -> (u64, u64) {
        let ranks = launch(&with(buffers, config(Stage::Parameters, 2)), move |rank| {
            let mut model = start::<M>(&rank)?;
            let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
            for step in 0..3 {
                if step == 2 {
                    rank.traffic().reset();
                }
                let gradients = model.backward(model.loss(step, share(&rank), &rank.device()))?;
                optim.step(Optimizer::Sgd.lr(), &mut model, gradients)?;
            }
            rank.barrier()?;
            let count = rank.traffic().of(kind);
            Ok((count.num_ops, count.sent_bytes))
        });
        ranks.unwrap()[0]
    }
    // Means and variances of 5 and 7 channels, in four bytes each: rank 0 sends half in a reduction and all in a broadcast.
    let bytes = 2 * (5 + 7) * 4;
    let (local, sync) =
        (sent::<Normed>(Buffers::Local, OpKind::AllReduce), sent::<Normed>(Buffers::Sync, OpKind::AllReduce));
    assert_eq!((sync.0 - local.0, sync.1 - local.1), (1, bytes));
    let local = sent::<Normed>(Buffers::Local, OpKind::Broadcast);
    let root = sent::<Normed>(Buffers::Rank0, OpKind::Broadcast);
    assert_eq!((root.0 - local.0, root.1 - local.1), (1, bytes));
    for &policy in Buffers::ALL {
        for kind in [OpKind::AllReduce, OpKind::Broadcast] {
            assert_eq!(
                sent::<Mlp>(policy, kind),
                sent::<Mlp>(Buffers::Local, kind),
                "{policy}: a model without statistics"
            );
        }
    }
}

#[test]
fn statistics_are_saved_once_and_loaded_on_any_number_of_ranks() {
    let root = std::env::temp_dir().join(format!("fsdp-burn-buffers-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&root);
    for &policy in Buffers::ALL {
        let dir = root.join(policy.name().replace(' ', "-"));
        let saved_to = dir.clone();
        let saved = launch(&with(policy, config(Stage::Parameters, 3)), move |rank| {
            let mut model = start::<Normed>(&rank)?;
            let mut optim = rank.optimizer(Optimizer::AdamW.build())?;
            for step in 0..3 {
                let gradients = model.backward(model.loss(step, share(&rank), &rank.device()))?;
                optim.step(Optimizer::AdamW.lr(), &mut model, gradients)?;
            }
            model.save(&saved_to, &optim, BTreeMap::new(), &SaveOptions::default())?;
            Ok(values(&statistics(&*model)))
        });
        let saved = saved.unwrap();
        let manifest = std::fs::read_to_string(dir.join("step-3/manifest.json")).unwrap();
        assert_eq!(manifest.matches("inner.running_mean").count(), 1, "{policy}");
        for world_size in [1, 2] {
            let dir = dir.clone();
            let loaded = launch(&with(policy, config(Stage::Gradients, world_size)), move |rank| {
                let mut model = start::<Normed>(&rank)?;
                let mut optim = rank.optimizer(Optimizer::AdamW.build())?;
                model.load(&dir, &mut optim)?;
                Ok(values(&statistics(&*model)))
            });
            assert!(loaded.unwrap().iter().all(|loaded| *loaded == saved[0]), "{policy} on {world_size}");
        }
    }
    std::fs::remove_dir_all(&root).unwrap();
}

/// Reads without entering validation, which would collect what threads have left.
#[test]
fn statistics_are_in_the_model_that_forward_uses() {
    #[derive(Default)]
    struct Raw(Vec<f32>);
    impl ModuleVisitor for Raw {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.extend(param.base().into_data().try_to_vec::<f32>().unwrap());
        }
    }
    let same = launch(&config(Stage::Ddp, 2), |rank| {
        let mut model = start::<Normed>(&rank)?;
        let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
        let gradients = model.backward(model.loss(0, share(&rank), &rank.device()))?;
        optim.step(Optimizer::Sgd.lr(), &mut model, gradients)?;
        let mut raw = Raw::default();
        model.visit(&mut raw);
        Ok(raw.0)
    });
    let same = same.unwrap();
    assert_eq!(same[0], same[1]);
}
