//! Runs a trial on one device and sharded, and compares.

use burn::module::{ModuleVisitor, Param};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer, SgdConfig, momentum::MomentumConfig};
use burn::tensor::{Device, Tensor};
use fsdp_burn::{Config, Rank, launch};

use super::models::Trial;

/// The losses of each step and the final weights.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) losses: Vec<f64>,
    pub(crate) weights: Vec<(String, Vec<f32>)>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Optimizer {
    Sgd,
    AdamW,
}

impl Optimizer {
    pub(crate) fn build(self) -> ModuleOptimizer {
        match self {
            Optimizer::Sgd => SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init(),
            Optimizer::AdamW => AdamWConfig::new().with_weight_decay(0.01).init(),
        }
    }

    pub(crate) fn lr(self) -> f64 {
        match self {
            Optimizer::Sgd => 0.05,
            Optimizer::AdamW => 0.01,
        }
    }
}

/// Samples of the whole batch, divisible by every world size that is tested.
pub(crate) const BATCH: usize = 30;
pub(crate) const STEPS: usize = 5;
pub(crate) const SEED: u64 = 7;

/// Plain Burn on one device, on the whole batch.
pub(crate) fn plain<M: Trial>(optimizer: Optimizer) -> Outcome {
    let device = Device::flex().autodiff();
    device.seed(SEED);
    let mut model = M::build(&device);
    model.visit(&mut Weights::default());
    let mut optim = optimizer.build();
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let loss = model.loss(step, 0, BATCH, &device);
        losses.push(f64::from(loss.clone().into_scalar::<f32>()));
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(optimizer.lr(), model, gradients);
    }
    let mut weights = Weights::default();
    model.visit(&mut weights);
    Outcome { losses, weights: weights.found }
}

/// The same on the ranks of `config`, each on its share of the batch. All ranks must agree.
pub(crate) fn sharded<M: Trial>(config: &Config, optimizer: Optimizer) -> Outcome {
    let _turn = seeded();
    let mut outcomes = launch(config, move |rank| train::<M>(&rank, optimizer)).unwrap();
    let first = outcomes.remove(0);
    for (rank, other) in outcomes.iter().enumerate() {
        assert_eq!(&first, other, "rank {} differs from rank 0", rank + 1);
    }
    first
}

fn train<M: Trial>(rank: &Rank, optimizer: Optimizer) -> Result<Outcome, fsdp_burn::Error> {
    let device = rank.device();
    if rank.is_main() {
        device.seed(SEED);
    }
    rank.barrier()?;
    let mut model = rank.shard(M::build(&device))?;
    let mut optim = rank.optimizer(optimizer.build())?;
    let share = BATCH / rank.world_size();
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let loss = model.loss(step, rank.rank() * share, (rank.rank() + 1) * share, &device);
        losses.push(rank.mean(f64::from(loss.clone().into_scalar::<f32>()))?);
        let gradients = model.backward(loss)?;
        optim.step(optimizer.lr(), &mut model, gradients)?;
    }
    let mut weights = Vec::new();
    model.each_parameter(|path, data| weights.push((path.to_owned(), data.try_to_vec::<f32>().unwrap())))?;
    Ok(Outcome { losses, weights })
}

/// The random state of a device belongs to the process, so runs that draw from it take turns.
pub(crate) fn seeded() -> std::sync::MutexGuard<'static, ()> {
    static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());
    TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Asserts that two runs agree: losses within `loss_tolerance` relative, weights within `weight_tolerance` absolute.
pub(crate) fn assert_parity(what: &str, expected: &Outcome, got: &Outcome, loss_tolerance: f64, weight_tolerance: f32) {
    for (step, (a, b)) in expected.losses.iter().zip(&got.losses).enumerate() {
        assert!((a - b).abs() <= loss_tolerance * a.abs(), "{what}, step {step}: loss {b}, expected {a}");
    }
    assert_eq!(expected.weights.len(), got.weights.len(), "{what}: other parameters");
    for ((path, a), (got_path, b)) in expected.weights.iter().zip(&got.weights) {
        assert_eq!((path, a.len()), (got_path, b.len()), "{what}");
        let off = a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(off <= weight_tolerance, "{what}: `{path}` is off by {off}");
    }
}

#[derive(Default)]
pub(crate) struct Weights {
    path: Vec<String>,
    pub(crate) found: Vec<(String, Vec<f32>)>,
}

impl ModuleVisitor for Weights {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.found.push((self.path.join("."), param.val().into_data().try_to_vec::<f32>().unwrap()));
    }
}
