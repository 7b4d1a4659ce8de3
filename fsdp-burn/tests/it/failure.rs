//! What goes wrong ends all ranks soon, with an error that names who, what and the remedy.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, Flex, backend_extension};
use burn::module::{Module, ModuleMapper, Param, Reparameterization, Reparameterizer};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use fsdp_burn::{CommError, Config, Error, FieldRule, Rank, Sharded, Stage, WrapPolicy, launch};

use crate::common::models::{Mlp, Trial, rows};
use crate::common::run::{BATCH, Optimizer, config, share, start};

/// For tests that wait for the time limit. All others keep a long one, which nobody may have to wait for.
fn impatient(stage: Stage, world_size: usize) -> Config {
    Config { timeout_s: 2.0, ..config(stage, world_size) }
}

/// Far more than any of these needs, far less than forever.
const LIMIT: Duration = Duration::from_secs(20);

/// The error of a run that must fail, and soon.
fn failure<F>(config: Config, program: F) -> Error
where
    F: Fn(Rank) -> Result<(), Error> + Send + Sync + 'static,
{
    let start = Instant::now();
    let error = launch(&config, program).unwrap_err();
    assert!(start.elapsed() < LIMIT, "took {:?}: {error}", start.elapsed());
    error
}

fn assert_contains(error: &Error, parts: &[&str]) {
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "{text:?} lacks {part:?}");
    }
}

/// Where a rank fails.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    BeforeSharding,
    BeforeForward,
    InForward,
    BeforeBackward,
    BeforeStep,
    AfterStep,
}

const PLACES: [Place; 6] = [
    Place::BeforeSharding,
    Place::BeforeForward,
    Place::InForward,
    Place::BeforeBackward,
    Place::BeforeStep,
    Place::AfterStep,
];

/// Two steps, in which `at` is called at each place.
fn two_steps(rank: &Rank, at: impl Fn(Place) -> Result<(), Error>) -> Result<(), Error> {
    at(Place::BeforeSharding)?;
    let mut model = start::<Mlp>(rank)?;
    let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
    for step in 0..2 {
        at(Place::BeforeForward)?;
        model.input.forward(rows(1, 0..2, 7, &rank.device()));
        at(Place::InForward)?;
        let loss = model.loss(step, share(rank), &rank.device());
        at(Place::BeforeBackward)?;
        let gradients = model.backward(loss)?;
        at(Place::BeforeStep)?;
        optim.step(0.1, &mut model, gradients)?;
    }
    at(Place::AfterStep)?;
    rank.barrier()
}

#[test]
fn a_rank_that_panics_anywhere_ends_all_with_its_name() {
    for stage in [Stage::Ddp, Stage::Parameters] {
        for place in PLACES {
            let error = failure(config(stage, 3), move |rank| {
                two_steps(&rank, |at| {
                    assert!(at != place || rank.rank() != 2, "out of cheese");
                    Ok(())
                })
            });
            assert!(matches!(error, Error::RankPanicked { rank: 2, .. }), "{stage}, {place:?}: {error:?}");
            assert_contains(&error, &["rank 2 panicked", "out of cheese"]);
        }
    }
}

#[test]
fn a_rank_that_returns_an_error_anywhere_ends_all_with_its_name() {
    for stage in [Stage::Ddp, Stage::Parameters] {
        for place in PLACES {
            let error = failure(config(stage, 3), move |rank| {
                two_steps(&rank, |at| match at == place && rank.rank() == 1 {
                    true => Err(Error::program("no such file")),
                    false => Ok(()),
                })
            });
            assert!(matches!(error, Error::RankFailed { rank: 1, .. }), "{stage}, {place:?}: {error:?}");
            assert_contains(&error, &["rank 1: no such file"]);
        }
    }
}

/// An identity whose backward panics.
#[backend_extension(Flex, Autodiff)]
trait Trap: Backend {
    fn trap(tensor: FloatTensor<Self>) -> FloatTensor<Self>;
}

impl Trap for Flex {
    fn trap(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        tensor
    }
}

impl<B: Trap, C: CheckpointStrategy> Trap for Autodiff<B, C> {
    fn trap(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        let op = Sprung.prepare::<C>([tensor.node()]).compute_bound();
        op.stateless(B::trap(tensor.into_primitive()))
    }
}

#[derive(Debug)]
struct Sprung;

impl<B: Backend> Backward<B, 1> for Sprung {
    type State = ();

    fn backward(self, _: Ops<(), 1>, _: &mut Gradients, _: &mut Checkpointer) {
        panic!("backward has failed");
    }
}

#[test]
fn a_panic_in_backward_ends_all_with_the_name_of_the_rank() {
    for stage in [Stage::Ddp, Stage::Parameters] {
        let error = failure(config(stage, 2), |rank| {
            let model = start::<Mlp>(&rank)?;
            let mut x = model.input.forward(rows(1, 0..2, 7, &rank.device()));
            if rank.rank() == 1 {
                x = Tensor::from_dispatch(<Dispatch as Trap>::trap(x.into_dispatch()));
            }
            model.backward(model.output.forward(x).mean()).map(|_| ())
        });
        assert!(matches!(error, Error::RankPanicked { rank: 1, .. }), "{stage}: {error:?}");
        assert_contains(&error, &["rank 1 panicked", "backward has failed"]);
    }
}

#[test]
fn a_rank_that_stops_taking_part_is_named() {
    for stage in [Stage::Ddp, Stage::Parameters] {
        let given_up = Arc::new(AtomicBool::new(false));
        let error = failure(impatient(stage, 3), move |rank| {
            let result = two_steps(&rank, |at| {
                // It comes back when the others have given up, and ends with them.
                while at == Place::BeforeBackward && rank.rank() == 1 && !given_up.load(SeqCst) {
                    std::thread::sleep(Duration::from_millis(5));
                }
                Ok(())
            });
            given_up.store(true, SeqCst);
            result
        });
        let Error::RankFailed { source, .. } = &error else { panic!("{stage}: {error:?}") };
        let Error::Comm(source) = source.as_ref() else { panic!("{stage}: {error:?}") };
        let CommError::Timeout { missing, .. } = source.as_ref() else { panic!("{stage}: {error:?}") };
        assert_eq!(missing, &[1], "{error}");
        assert_contains(&error, &["for rank 1"]);
    }
}

#[test]
fn a_rank_that_never_comes_back_is_left_behind_and_named() {
    let error = failure(impatient(Stage::Parameters, 2), |rank| {
        two_steps(&rank, |at| {
            if at == Place::BeforeForward && rank.rank() == 1 {
                std::thread::sleep(LIMIT * 2);
            }
            Ok(())
        })
    });
    assert!(matches!(error, Error::RankStuck { rank: 1, .. }), "{error:?}");
    assert_contains(&error, &["rank 1 did not end", "rank 0 waited"]);
}

#[test]
fn ranks_that_use_units_in_another_order_are_told_the_names_of_the_units() {
    let error = failure(config(Stage::Parameters, 2), |rank| {
        let model = start::<Mlp>(&rank)?;
        let x = rows(1, 0..2, 13, &rank.device());
        let layers = if rank.is_main() { [0, 1] } else { [1, 0] };
        layers.iter().fold(x, |x, &layer| model.hidden[layer].forward(x));
        Ok(())
    });
    assert_contains(&error, &["ranks issued different operations", "`hidden.0`", "`hidden.1`", "rank 0", "rank 1"]);
}

#[test]
fn backward_on_the_loss_itself_is_refused_with_the_remedy() {
    for stage in Stage::ALL {
        for world_size in [1, 2] {
            let error = failure(config(stage, world_size), |rank| {
                let model = start::<Mlp>(&rank)?;
                let loss = model.loss(0, share(&rank), &rank.device());
                let _ = loss.backward();
                Ok(())
            });
            assert_contains(&error, &["backward reached this model without its `backward`", "model.backward(loss)"]);
        }
    }
}

struct Double;

impl ModuleMapper for Double {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| (tensor.inner() * 2.0).autodiff().require_grad())
    }
}

#[test]
fn a_copy_of_the_model_with_other_weights_is_refused() {
    for stage in Stage::ALL {
        let error = failure(config(stage, 2), |rank| {
            let model = start::<Mlp>(&rank)?;
            let copy = (*model).clone().map(&mut Double);
            copy.loss(0, share(&rank), &rank.device());
            Ok(())
        });
        assert_contains(&error, &["parameter `input.weight` is not the one the engine holds", "through the optimizer"]);
    }
}

#[derive(Module, Debug, Sharded)]
struct Pair {
    #[shard(unit)]
    a: Linear,
    #[shard(unit)]
    b: Linear,
}

fn pair(device: &Device) -> Pair {
    let linear = || LinearConfig::new(4, 4).init(device);
    Pair { a: linear(), b: linear() }
}

/// Something of the user's own in the slot.
#[derive(Module, Debug)]
struct Halved {}

impl Reparameterization for Halved {
    const NAME: &'static str = "halved";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        base * 0.5
    }
}

struct Halve;

impl Reparameterizer for Halve {
    type Reparam = Halved;

    fn reparameterize<const D: usize>(
        &mut self,
        _: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Halved>) {
        (param, Some(Halved {}))
    }
}

#[test]
fn a_model_with_another_reparameterization_than_lora_is_refused_by_name() {
    let error = failure(config(Stage::Parameters, 2), |rank| {
        rank.shard(pair(&rank.device()).apply_reparameterization(Halve)).map(|_| ())
    });
    assert_contains(&error, &["`a.weight`", "reparameterization", "shard the plain model"]);
}

#[test]
fn a_model_without_autodiff_is_refused_with_the_remedy() {
    let error = failure(config(Stage::Parameters, 2), |rank| rank.shard(pair(&Device::flex())).map(|_| ()));
    assert_contains(&error, &["no parameter of the model requires a gradient", "`rank.device()`"]);
}

#[test]
fn a_run_without_ranks_is_refused() {
    let error = failure(Config { world_size: 0, ..Config::default() }, |_| Ok(()));
    assert_contains(&error, &["`world_size` is 0"]);
}

#[derive(Module, Debug)]
struct Misplaced {
    a: Linear,
}

impl Sharded for Misplaced {
    fn wrap_policy() -> WrapPolicy {
        WrapPolicy::new().field("a", FieldRule::unit().offload("disk"))
    }
}

#[test]
fn a_policy_written_by_hand_that_names_no_tier_is_refused_by_name() {
    let a = |rank: &Rank| LinearConfig::new(4, 4).init(&rank.device());
    let error = failure(config(Stage::Parameters, 2), move |rank| rank.shard(Misplaced { a: a(&rank) }).map(|_| ()));
    assert_contains(&error, &["`a`", "`offload = \"disk\"` is no tier", "write none, cpu or nvme"]);
}

#[test]
fn a_model_is_left_usable_by_a_rank_program_that_ends_early_on_all_ranks() {
    // Forward without backward on every rank, and then nothing: nobody waits for anybody.
    launch(&config(Stage::Parameters, 3), |rank| {
        let model = start::<Mlp>(&rank)?;
        for _ in 0..2 {
            model.loss(0, 0..BATCH, &rank.device());
        }
        Ok(())
    })
    .unwrap();
}
