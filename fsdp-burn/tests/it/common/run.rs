//! Runs a trial on one device and sharded, and compares.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::grad_clipping::{GradientClipping, GradientClippingConfig};
use burn::module::{Module, ModuleVisitor, Param, ParamGroup};
use burn::optim::lr_scheduler::module_lr_scheduler::{ModuleLearningRate, ModuleLrScheduler};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer, SgdConfig, momentum::MomentumConfig};
use burn::tensor::{DType, Device, Gradients, Tensor};
use fsdp_burn::{
    Config, Error, FusedAdamW, LaunchOptions, Link, Rank, Sharded, ShardedModel, Stage, StepOutcome, launch,
};

use super::models::Trial;

/// What a run leaves behind: the loss of each micro-batch, the norm of each clipped step, and the final weights.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) losses: Vec<f64>,
    pub(crate) norms: Vec<f64>,
    pub(crate) weights: Weights,
}

/// For ranks that share no memory: a link between them, which costs nothing.
pub(crate) fn apart() -> LaunchOptions {
    LaunchOptions { link: Some(Link { alpha_s: 0.0, beta_s_per_byte: 0.0 }), ..LaunchOptions::default() }
}

/// Every parameter in whole, by its path.
pub(crate) type Weights = Vec<(String, Vec<f32>)>;

#[derive(Clone, Copy, Debug)]
pub(crate) enum Optimizer {
    Sgd,
    AdamW,
    /// SGD that clips each element of a gradient.
    ValueClipping,
    /// [`Optimizer::AdamW`] in one pass.
    Fused,
    /// SGD, and AdamW at a rate of its own for paths with `hidden`.
    Groups,
}

/// See [`Tolerance::weights`].
const ADAMW_EPSILON: f64 = 1e-3;

impl Optimizer {
    pub(crate) const ALL: [Optimizer; 2] = [Optimizer::Sgd, Optimizer::AdamW];

    pub(crate) fn build(self) -> ModuleOptimizer {
        match self {
            Optimizer::Sgd => SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init(),
            // Bites: gradients of the trials are of order 0.1.
            Optimizer::ValueClipping => {
                let clipping = GradientClippingConfig::Value(0.005);
                SgdConfig::new().with_gradient_clipping(Some(clipping)).init()
            }
            Optimizer::Groups => {
                let adamw = AdamWConfig::new().with_epsilon(ADAMW_EPSILON as f32).build();
                Optimizer::Sgd.build().with_group(ParamGroup::from_predicate("hidden"), adamw, None)
            }
            Optimizer::AdamW => adamw().init(),
            Optimizer::Fused => FusedAdamW::new(&adamw()).unwrap().into(),
        }
    }

    pub(crate) fn lr(self) -> ModuleLearningRate {
        match self {
            Optimizer::Sgd | Optimizer::ValueClipping => 0.05.into(),
            Optimizer::AdamW | Optimizer::Fused => 0.01.into(),
            Optimizer::Groups => {
                ModuleLrScheduler::new(0.05).with_group(ParamGroup::from_predicate("hidden"), 0.01).step()
            }
        }
    }

    /// How far a sharded run may be from the oracle after [`STEPS`] steps.
    pub(crate) fn tolerance(self) -> Tolerance {
        match self {
            Optimizer::Sgd | Optimizer::ValueClipping => {
                Tolerance { losses: 1e-5, weights: 1e-5, absolute: SGD_ABSOLUTE }
            }
            Optimizer::AdamW | Optimizer::Fused | Optimizer::Groups => {
                Tolerance { losses: 1e-5, weights: 1e-5, absolute: ADAMW_ABSOLUTE }
            }
        }
    }
}

fn adamw() -> AdamWConfig {
    AdamWConfig::new().with_weight_decay(0.01).with_epsilon(ADAMW_EPSILON as f32)
}

/// Rounding of one gradient: its terms are of order 1 and added in another order, which costs a few units in the last
/// place of the largest partial sum, here taken as eight of 2^-24.
const GRADIENT_ROUNDING: f64 = 8.0 / (1 << 24) as f64;

/// A step moves a weight by the rate times a velocity, which sums at most [`STEPS`] gradients. So the rounding errors
/// of all gradients reach a weight at most `STEPS` times each, in `STEPS` steps. This floor matters only where all of a
/// tensor is small, as a bias that started at zero is.
const SGD_ABSOLUTE: f64 = 0.05 * GRADIENT_ROUNDING * (STEPS * STEPS) as f64;

/// `AdamW` moves a weight by `lr * m / (sqrt(v) + epsilon)`. While the gradient is large that is `lr`, whatever the
/// gradient; near zero its slope is `lr / epsilon`, and with a vanishing epsilon a gradient whose sign is a matter of
/// rounding would move the weight by up to `2 * lr` in each step, which no useful bound survives. With
/// [`ADAMW_EPSILON`] each step adds at most `lr / epsilon` times the rounding of a gradient.
const ADAMW_ABSOLUTE: f64 = 0.01 / ADAMW_EPSILON * GRADIENT_ROUNDING * STEPS as f64;

/// What [`assert_parity`] lets pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tolerance {
    /// Of losses and norms, relative.
    pub(crate) losses: f64,
    /// Of weights, relative to the largest of their tensor.
    pub(crate) weights: f64,
    /// Of weights, on top of that.
    pub(crate) absolute: f64,
}

impl Tolerance {
    /// Bit for bit.
    pub(crate) const EXACT: Tolerance = Tolerance { losses: 0.0, weights: 0.0, absolute: 0.0 };
}

/// Samples of the whole batch, divisible by every world size that is tested.
pub(crate) const BATCH: usize = 120;
pub(crate) const STEPS: usize = 20;
pub(crate) const SEED: u64 = 7;

/// A stage on a number of ranks, and a time limit that a broken test reaches soon.
pub(crate) fn config(stage: Stage, world_size: usize) -> Config {
    Config { stage, world_size, timeout_s: 20.0, ..Config::default() }
}

/// The samples of this rank, in a batch of [`BATCH`].
pub(crate) fn share(rank: &Rank) -> Range<usize> {
    let len = BATCH / rank.world_size();
    rank.rank() * len..(rank.rank() + 1) * len
}

/// Plain Burn on one device, on the whole batch, with the micro-batches and clipping of `config`.
pub(crate) fn plain<M: Trial>(config: &Config, optimizer: Optimizer) -> Outcome {
    plain_for::<M>(config, optimizer, STEPS * config.training.gradient_accumulation)
}

/// As [`plain`], for so many micro-batches; an incomplete last window is applied.
pub(crate) fn plain_for<M: Trial>(config: &Config, optimizer: Optimizer, num_batches: usize) -> Outcome {
    let (mut model, device) = plain_model::<M>();
    let mut optim = optimizer.build();
    if let Some(most) = config.training.gradient_clip_value {
        optim = optim.with_grad_clipping(GradientClipping::Value(most as f32));
    }
    let mut outcome = Outcome::default();
    let batches: Vec<usize> = (0..num_batches).collect();
    for window in batches.chunks(config.training.gradient_accumulation) {
        let losses: Vec<_> = window.iter().map(|&batch| model.loss(batch, 0..BATCH, &device)).collect();
        outcome.losses.extend(losses.iter().map(scalar));
        let mean = |losses: Vec<Tensor<1>>| Tensor::cat(losses, 0).mean();
        let mut gradients = mean(losses).backward();
        if let Some(max_norm) = config.training.gradient_clip_norm {
            let norm = gradient_norm(&model, &gradients, config.training.gradient_norm_order);
            outcome.norms.push(norm);
            let losses = window.iter().map(|&batch| model.loss(batch, 0..BATCH, &device)).collect();
            gradients = mean(losses).mul_scalar((max_norm / norm).min(1.0)).backward();
        }
        let gradients = GradientsParams::from_grads(gradients, &model);
        model = optim.step(optimizer.lr(), model, gradients);
    }
    outcome.weights = plain_weights(&model);
    outcome
}

/// A model on one device with the weights that [`start`] shards.
pub(crate) fn plain_model<M: Trial>() -> (M, Device) {
    let device = Device::flex().autodiff();
    (plain_model_on(&device), device)
}

/// The same on a device of the CPU backend.
pub(crate) fn plain_model_on<M: Trial>(device: &Device) -> M {
    let _turn = seeded(device, SEED);
    let model = M::build(device);
    plain_weights(&model);
    model
}

/// The same on the ranks of `config`, each on its share of the batch. All ranks must agree.
pub(crate) fn sharded<M: Trial>(config: &Config, optimizer: Optimizer) -> Outcome {
    sharded_for::<M>(config, optimizer, STEPS * config.training.gradient_accumulation)
}

/// As [`sharded`], for so many micro-batches; an incomplete last window is flushed.
pub(crate) fn sharded_for<M: Trial>(config: &Config, optimizer: Optimizer, num_batches: usize) -> Outcome {
    on_ranks(config, move |rank| {
        let mut model = start::<M>(&rank)?;
        let mut optim = rank.optimizer(optimizer.build())?;
        let mut outcome = Outcome::default();
        let mut note = |stepped| match stepped {
            StepOutcome::Stepped { gradient_norm } => outcome.norms.extend(gradient_norm),
            StepOutcome::Accumulated => {}
            StepOutcome::Skipped { gradient_norm } => panic!("a norm of {gradient_norm}"),
        };
        for batch in 0..num_batches {
            let loss = model.loss(batch, share(&rank), &rank.device());
            outcome.losses.push(rank.mean(scalar(&loss))?);
            let gradients = model.backward(loss)?;
            note(optim.step(optimizer.lr(), &mut model, gradients)?);
        }
        note(optim.flush(optimizer.lr(), &mut model)?);
        outcome.weights = weights(&model)?;
        Ok(outcome)
    })
}

/// Runs a program that must leave the same on every rank.
pub(crate) fn on_ranks<F>(config: &Config, program: F) -> Outcome
where
    F: Fn(Rank) -> Result<Outcome, Error> + Send + Sync + 'static,
{
    let mut outcomes = launch(config, program).unwrap();
    let first = outcomes.remove(0);
    for (rank, other) in outcomes.iter().enumerate() {
        assert_parity(&format!("rank {} against rank 0", rank + 1), &first, other, Tolerance::EXACT);
    }
    first
}

/// Builds and shards a model with the weights of [`plain_model`].
pub(crate) fn start<M: Trial>(rank: &Rank) -> Result<ShardedModel<M>, Error> {
    start_on(rank, rank.device())
}

/// As [`start`], on another device than the rank's own.
pub(crate) fn start_on<M: Trial>(rank: &Rank, device: Device) -> Result<ShardedModel<M>, Error> {
    if M::DRAWS_AT_ONCE {
        let turn = seeded(&device, SEED);
        let model = M::build(&device);
        // Rank 0 would wait for the others in what follows, and they for their turn.
        drop(turn);
        return rank.shard(model);
    }
    // Only rank 0 reads its parameters, and so draws random numbers.
    let _turn = rank.is_main().then(|| seeded(&device, SEED));
    rank.shard(M::build(&device))
}

/// The random state of a device belongs to the process, so runs that draw from it take turns.
pub(crate) fn seeded(device: &Device, seed: u64) -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    device.seed(seed);
    turn
}

pub(crate) fn scalar(loss: &Tensor<1>) -> f64 {
    f64::from(loss.clone().into_scalar::<f32>())
}

/// The weights of a sharded model. *Collective.*
pub(crate) fn weights<M: Module + Sharded>(model: &ShardedModel<M>) -> Result<Weights, Error> {
    let mut weights = Vec::new();
    model.each_parameter(|path, data| weights.push((path.to_owned(), data.try_to_vec::<f32>().unwrap())))?;
    Ok(weights)
}

/// The weights of a plain model.
pub(crate) fn plain_weights<M: Module>(model: &M) -> Weights {
    let mut reader = Reader::default();
    model.visit(&mut reader);
    reader.weights
}

/// Asserts that two runs agree. The one comparison of all tests.
pub(crate) fn assert_parity(what: &str, expected: &Outcome, got: &Outcome, tolerance: Tolerance) {
    let close = |a: f64, b: f64| a.to_bits() == b.to_bits() || (a - b).abs() <= tolerance.losses * a.abs();
    // Plain training reports norms only where it clips by them.
    let norms = match expected.norms.is_empty() || got.norms.is_empty() {
        true => (&Vec::new(), &Vec::new()),
        false => (&expected.norms, &got.norms),
    };
    for (name, expected, got) in [("loss", &expected.losses, &got.losses), ("norm", norms.0, norms.1)] {
        assert_eq!(expected.len(), got.len(), "{what}: another number of values of {name}");
        for (step, (&a, &b)) in expected.iter().zip(got).enumerate() {
            assert!(close(a, b), "{what}: {name} {step} is {b}, expected {a}");
        }
    }
    assert_eq!(expected.weights.len(), got.weights.len(), "{what}: another number of parameters");
    for ((path, a), (got_path, b)) in expected.weights.iter().zip(&got.weights) {
        assert_eq!((path, a.len()), (got_path, b.len()), "{what}");
        let largest = a.iter().fold(0.0_f64, |largest, &value| largest.max(f64::from(value).abs()));
        let limit = tolerance.weights * largest + tolerance.absolute;
        for (index, (&a, &b)) in a.iter().zip(b).enumerate() {
            let close = a.to_bits() == b.to_bits() || (f64::from(a) - f64::from(b)).abs() <= limit && limit > 0.0;
            assert!(close, "{what}: element {index} of `{path}` is {b}, expected {a} within {limit:e}");
        }
    }
}

fn gradient_norm<M: Module>(model: &M, gradients: &Gradients, order: f64) -> f64 {
    let mut magnitudes = Magnitudes { gradients, all: Vec::new() };
    model.visit(&mut magnitudes);
    let magnitudes = magnitudes.all.into_iter();
    match order {
        f64::INFINITY => magnitudes.fold(0.0, f64::max),
        order => magnitudes.map(|value| value.powf(order)).sum::<f64>().powf(order.recip()),
    }
}

struct Magnitudes<'a> {
    gradients: &'a Gradients,
    all: Vec<f64>,
}

impl ModuleVisitor for Magnitudes<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(gradient) = param.grad(self.gradients) {
            let values = gradient.into_data().try_to_vec::<f32>().unwrap();
            self.all.extend(values.iter().map(|&value| f64::from(value).abs()));
        }
    }
}

#[derive(Default)]
struct Reader {
    path: Vec<String>,
    weights: Weights,
}

impl ModuleVisitor for Reader {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        // Of a sharded model in half precision, what is whole on every rank is rounded.
        let data = param.val().into_data().convert_dtype(DType::F32);
        self.weights.push((self.path.join("."), data.try_to_vec::<f32>().unwrap()));
    }
}
