//! What is cut how: odd shapes, meshes, attributes, the plan's warnings, and initial weights.

use std::sync::{Arc, Mutex};

use burn::module::{Module, Param, ParamId};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Bool, Device, Int, Shape, Tensor, TensorData};
use fsdp_burn::{
    Axis, Config, Error, FieldRule, Mesh, PlanWarning, Sharded, Stage, TrainingConfig, WrapPolicy, launch,
};

use crate::common::models::{Gpt, Layouts, Mlp, Tiny};
use crate::common::run::{
    Optimizer, Outcome, SEED, Tolerance, assert_parity, config, on_ranks, plain, plain_model, plain_weights, seeded,
    sharded, start, weights,
};
use crate::parity::assert_all_stages;

#[test]
fn ranks_that_own_nothing_and_parameters_without_elements_train_as_on_one_device() {
    for optimizer in Optimizer::ALL {
        for gradient_clip_norm in [None, Some(0.05)] {
            let training = TrainingConfig { gradient_clip_norm, ..TrainingConfig::default() };
            assert_all_stages::<Tiny>(&training, optimizer, &[1, 4, 8]);
        }
    }
}

#[test]
fn shapes_and_counts_are_the_logical_ones_and_local_counts_add_up() {
    let locals = launch(&config(Stage::Parameters, 3), |rank| {
        let model = start::<Mlp>(&rank)?;
        let (plain, _) = plain_model::<Mlp>();
        assert_eq!(model.num_params(), plain.num_params());
        assert_eq!(model.shape("input.weight"), Some(&[7, 13][..]));
        assert_eq!(model.shape("input.wieght"), None);
        assert_eq!(model.input.weight.base().dims(), [[3, 13], [3, 13], [1, 13]][rank.rank()]);
        assert_eq!(model.input.weight.val().dims(), [7, 13], "a use of the weight sees it in whole");
        assert!(model.summary().contains(&format!("{}", model.num_local_params())), "{}", model.summary());
        Ok((model.num_local_params(), model.num_params()))
    })
    .unwrap();
    let (sum, total) = (locals.iter().map(|(local, _)| local).sum::<usize>(), locals[0].1);
    assert_eq!(sum, total);
}

fn on_mesh(stage: Stage, axes: [(Axis, usize); 2]) -> Outcome {
    let mesh = Mesh::new(axes).unwrap();
    sharded::<Mlp>(&Config { mesh: Some(mesh.clone()), ..config(stage, mesh.world_size()) }, Optimizer::AdamW)
}

#[test]
fn a_mesh_with_one_axis_of_size_1_is_the_mesh_without_it_bit_for_bit() {
    for world_size in [1, 3] {
        let ddp = sharded::<Mlp>(&config(Stage::Ddp, world_size), Optimizer::AdamW);
        for stage in Stage::ALL {
            for axes in [
                [(Axis::Replicate, world_size), (Axis::Shard, 1)],
                [(Axis::Shard, 1), (Axis::Replicate, world_size)],
                [(Axis::Replicate, 1), (Axis::Shard, world_size)],
                [(Axis::Shard, world_size), (Axis::Replicate, 1)],
            ] {
                let got = on_mesh(stage, axes);
                assert_parity(&format!("{stage} on {axes:?}"), &ddp, &got, Tolerance::EXACT);
            }
        }
    }
}

#[test]
fn hybrid_sharding_trains_as_on_one_device_and_its_replicas_stay_equal() {
    let oracle = plain::<Mlp>(&config(Stage::Ddp, 1), Optimizer::AdamW);
    for axes in [
        [(Axis::Replicate, 2), (Axis::Shard, 2)],
        [(Axis::Shard, 2), (Axis::Replicate, 2)],
        [(Axis::Replicate, 2), (Axis::Shard, 3)],
    ] {
        let first = on_mesh(Stage::OptimizerState, axes);
        assert_parity(&format!("{axes:?}"), &oracle, &first, Optimizer::AdamW.tolerance());
        for stage in [Stage::Gradients, Stage::Parameters] {
            // `sharded` has compared the ranks, and each replica has gathered its own copy.
            assert_parity(&format!("{stage} on {axes:?}"), &first, &on_mesh(stage, axes), Tolerance::EXACT);
        }
    }
}

#[test]
fn specs_replicated_ignored_and_frozen_parameters_train_as_on_one_device() {
    for optimizer in Optimizer::ALL {
        for gradient_clip_norm in [None, Some(0.01)] {
            let training = TrainingConfig { gradient_clip_norm, ..TrainingConfig::default() };
            let with = |stage, world_size| Config { training: training.clone(), ..config(stage, world_size) };
            let mut oracle = plain::<Layouts>(&with(Stage::Ddp, 1), optimizer);
            // Ignored, so not a parameter of the sharded model.
            oracle.weights.retain(|(path, _)| !path.starts_with("teacher"));
            for world_size in [1, 2, 3, 5] {
                let ddp = sharded::<Layouts>(&with(Stage::Ddp, world_size), optimizer);
                assert_parity(&format!("stage 0 on {world_size}"), &oracle, &ddp, optimizer.tolerance());
                for stage in Stage::ALL {
                    let got = sharded::<Layouts>(&with(stage, world_size), optimizer);
                    assert_parity(&format!("{stage} on {world_size}"), &ddp, &got, Tolerance::EXACT);
                }
            }
        }
    }
}

#[test]
fn frozen_parameters_stay_as_they_are_and_all_others_change() {
    let initial = plain_weights(&plain_model::<Layouts>().0);
    let trained = sharded::<Layouts>(&config(Stage::Parameters, 2), Optimizer::AdamW).weights;
    for (path, values) in trained {
        let (_, before) = initial.iter().find(|(other, _)| *other == path).unwrap();
        assert_eq!(before == &values, path.contains("frozen"), "{path}");
    }
}

/// Gives a type with one matrix a policy that was not derived.
macro_rules! matrix {
    ($($name:ident: $rule:expr;)+) => {$(
        #[derive(Module, Debug)]
        struct $name {
            weight: Param<Tensor<2>>,
        }

        impl Sharded for $name {
            fn wrap_policy() -> WrapPolicy {
                WrapPolicy::new().field("weight", $rule)
            }
        }

        impl From<Param<Tensor<2>>> for $name {
            fn from(weight: Param<Tensor<2>>) -> Self {
                Self { weight }
            }
        }
    )+};
}
matrix! {
    Plain: FieldRule::unit();
    TooLong: FieldRule::unit().spec([None, None, Some("shard")]);
    UnknownAxis: FieldRule::unit().spec([None, Some("tensor")]);
    ReplicateAxis: FieldRule::unit().spec([Some("replicate")]);
    RepeatedAxis: FieldRule::unit().spec([Some("shard"), Some("shard")]);
    NothingCut: FieldRule::unit().spec([None]);
}

/// A parameter that says which rank initialised it.
pub(crate) fn watched(rank: usize, device: &Device, log: &Arc<Mutex<Vec<usize>>>) -> Param<Tensor<2>> {
    let log = log.clone();
    let init = move |device: &Device, require_grad: bool| {
        log.lock().unwrap().push(rank);
        Tensor::ones([4, 6], device).set_require_grad(require_grad)
    };
    Param::uninitialized(ParamId::new(), init, device.clone(), true, Shape::new([4, 6]))
}

fn refusal<M: Module + Sharded + From<Param<Tensor<2>>> + 'static>() -> String {
    let log = Arc::new(Mutex::new(Vec::new()));
    let seen = log.clone();
    let error = launch(&config(Stage::Parameters, 2), move |rank| {
        rank.shard(M::from(watched(rank.rank(), &rank.device(), &seen))).map(|_| ())
    });
    assert_eq!(*log.lock().unwrap(), [0; 0], "the parameter was initialised before its spec was checked");
    error.unwrap_err().to_string()
}

#[test]
fn a_spec_that_does_not_fit_is_refused_with_parameter_dimension_axis_and_sizes_before_anything_is_allocated() {
    for (error, parts) in [
        (refusal::<TooLong>(), ["`weight`", "(None, None, shard)", "[4, 6]"]),
        (refusal::<UnknownAxis>(), ["`weight`: dimension 1 (of size 6)", "`tensor`", "shard = 2"]),
        (refusal::<ReplicateAxis>(), ["`weight`: dimension 0 (of size 4)", "`replicate`", "shard = 2"]),
        (refusal::<RepeatedAxis>(), ["`weight`: dimensions 0 and 1", "[4, 6]", "`shard`"]),
        (refusal::<NothingCut>(), ["`weight`", "[4, 6]", "`replicate`"]),
    ] {
        for part in parts {
            assert!(error.contains(part), "{error:?} lacks {part:?}");
        }
    }
}

#[test]
fn each_parameter_is_initialised_once_and_on_rank_0_only() {
    for stage in Stage::ALL {
        let log = Arc::new(Mutex::new(Vec::new()));
        let seen = log.clone();
        launch(&config(stage, 3), move |rank| {
            let model = rank.shard(Plain::from(watched(rank.rank(), &rank.device(), &seen)))?;
            assert_eq!(model.weight.val().dims(), [4, 6]);
            Ok(())
        })
        .unwrap();
        assert_eq!(*log.lock().unwrap(), [0], "{stage}");
    }
}

fn initial_weights(stage: Stage, world_size: usize) -> Outcome {
    on_ranks(&config(stage, world_size), |rank| {
        Ok(Outcome { weights: weights(&start::<Gpt>(&rank)?)?, ..Outcome::default() })
    })
}

#[test]
fn one_seed_gives_the_same_weights_at_every_stage_and_world_size() {
    let expected = Outcome { weights: plain_weights(&plain_model::<Gpt>().0), ..Outcome::default() };
    for stage in Stage::ALL {
        for world_size in [1, 2, 3, 5] {
            let got = initial_weights(stage, world_size);
            assert_parity(&format!("{stage} on {world_size}"), &expected, &got, Tolerance::EXACT);
        }
    }
}

#[test]
fn ranks_with_different_seeds_start_from_the_weights_of_rank_0() {
    let build = |rank: usize, device: &Device| {
        let _turn = seeded(device, 100 + rank as u64);
        let model = Plain::from(LinearConfig::new(7, 5).init(device).weight);
        let weights = plain_weights(&model);
        (model, weights)
    };
    let (_, expected) = build(0, &Device::flex().autodiff());
    let (_, others) = build(1, &Device::flex().autodiff());
    assert_ne!(expected, others, "the seeds do differ");
    let expected = Outcome { weights: expected, ..Outcome::default() };
    for stage in Stage::ALL {
        let got = on_ranks(&config(stage, 3), move |rank| {
            let (model, _) = build(rank.rank(), &rank.device());
            Ok(Outcome { weights: weights(&rank.shard(model)?)?, ..Outcome::default() })
        });
        assert_parity(&stage.to_string(), &expected, &got, Tolerance::EXACT);
    }
}

/// Beside what is trained, numbers and a mask that each rank builds for itself.
#[derive(Module, Debug, Sharded)]
struct Constants {
    #[shard(unit)]
    linear: Linear,
    places: Param<Tensor<2, Int>>,
    mask: Param<Tensor<1, Bool>>,
    none: Param<Tensor<2, Int>>,
    #[shard(ignore)]
    own: Param<Tensor<1, Int>>,
}

fn constants(rank: usize, len: usize, device: &Device) -> Constants {
    let ints = |len: usize| (0..len as i64).map(|index| 100 * rank as i64 + index).collect::<Vec<_>>();
    let int = |len| Param::initialized(ParamId::new(), Tensor::from_data(TensorData::new(ints(len), [len]), device));
    let flags: Vec<bool> = (0..5).map(|index| index % 2 == rank).collect();
    let places = Tensor::from_data(TensorData::new(ints(2 * len), [2, len]), device);
    Constants {
        linear: LinearConfig::new(4, 4).init(device),
        places: Param::initialized(ParamId::new(), places),
        mask: Param::initialized(ParamId::new(), Tensor::from_data(TensorData::new(flags, [5]), device)),
        none: Param::initialized(ParamId::new(), Tensor::from_data(TensorData::new(Vec::<i64>::new(), [0, 3]), device)),
        own: int(3),
    }
}

#[test]
fn integers_and_booleans_are_those_of_rank_0_unless_they_are_ignored() {
    for stage in Stage::ALL {
        let seen = launch(&config(stage, 3), |rank| {
            let model = constants(rank.rank(), 4, &rank.device());
            let _turn = rank.is_main().then(|| seeded(&rank.device(), SEED));
            let model = rank.shard(model)?;
            assert_eq!(model.none.val().dims(), [0, 3]);
            let [places, own] = [model.places.val().into_data(), model.own.val().into_data()];
            let [places, own] = [places, own].map(|data| data.iter::<i64>().collect::<Vec<_>>());
            Ok((places, model.mask.val().into_data().iter::<bool>().collect::<Vec<_>>(), own[0]))
        });
        let seen = seen.unwrap();
        for (rank, (places, mask, own)) in seen.into_iter().enumerate() {
            assert_eq!(places, (0..8).collect::<Vec<_>>(), "{stage}");
            assert_eq!((mask, own), (vec![true, false, true, false, true], 100 * rank as i64), "{stage}");
        }
    }
}

#[test]
fn integers_of_another_shape_on_one_rank_are_refused_with_both_shapes() {
    let error = launch(&config(Stage::Parameters, 2), |rank| {
        let _turn = rank.is_main().then(|| seeded(&rank.device(), SEED));
        rank.shard(constants(rank.rank(), 4 + rank.rank(), &rank.device())).map(drop)
    });
    let error = error.unwrap_err().to_string();
    for part in ["rank 1", "`places`", "[2, 5]", "on rank 0 [2, 4]", "#[shard(ignore)]"] {
        assert!(error.contains(part), "{error:?} lacks {part:?}");
    }
}

#[derive(Module, Debug, Sharded)]
struct NoUnits {
    a: Linear,
    b: Linear,
}

#[derive(Module, Debug, Sharded)]
struct OneLargeUnit {
    #[shard(unit)]
    a: Linear,
    #[shard(units)]
    empty: Vec<Linear>,
    b: Linear,
}

#[test]
fn a_plan_that_saves_no_memory_warns() {
    launch(&config(Stage::Parameters, 2), |rank| {
        let device = rank.device();
        let _turn = rank.is_main().then(|| seeded(&device, SEED));
        let linear = |width| LinearConfig::new(width, width).init(&device);
        let model = rank.shard(NoUnits { a: linear(3), b: linear(3) })?;
        assert_eq!(model.plan().warnings(), [PlanWarning::NoUnits]);
        let model = rank.shard(OneLargeUnit { a: linear(9), empty: Vec::new(), b: linear(2) })?;
        let [PlanWarning::RuleMatchesNothing { path }, PlanWarning::LargeUnit { unit, share }] =
            model.plan().warnings()
        else {
            panic!("{:?}", model.plan().warnings());
        };
        assert_eq!((path.as_str(), unit.as_str()), ("empty", "a"));
        assert_eq!(*share, 90.0 / 96.0);
        assert_eq!(
            rank.shard(OneLargeUnit { a: linear(3), empty: vec![linear(3)], b: linear(3) })?.plan().warnings(),
            []
        );
        Ok::<_, Error>(())
    })
    .unwrap();
}
