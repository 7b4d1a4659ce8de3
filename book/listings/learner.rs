//! The chapter on Burn's learner: a training on one device, and the line that changes.

use burn::data::dataloader::{DataLoaderBuilder, batcher::Batcher};
use burn::data::dataset::InMemDataset;
use burn::module::Module;
use burn::nn::loss::{MseLoss, Reduction};
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Tensor, activation::tanh};
use burn::train::logger::InMemoryMetricLogger;
use burn::train::metric::LossMetric;
use burn::train::{
    InferenceStep, Learner, LearningResult, RegressionOutput, SupervisedTraining, TrainOutput, TrainStep,
};
use fsdp_burn::{Config, Error, FsdpStrategy, Sharded};

// ANCHOR: model
#[derive(Module, Debug, Sharded)]
struct Curve {
    #[shard(units)]
    hidden: Vec<Linear>,
    output: Linear,
}

impl Curve {
    fn run(&self, [x, y]: [Tensor<2>; 2]) -> RegressionOutput {
        let hidden = self.hidden.iter().fold(x, |x, layer| tanh(layer.forward(x)));
        let output = self.output.forward(hidden);
        let loss = MseLoss::new().forward(output.clone(), y.clone(), Reduction::Mean);
        RegressionOutput::new(loss, output, y)
    }
}

impl TrainStep for Curve {
    type Input = [Tensor<2>; 2];
    type Output = RegressionOutput;

    fn step(&self, batch: Self::Input) -> TrainOutput<RegressionOutput> {
        let output = self.run(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Curve {
    type Input = [Tensor<2>; 2];
    type Output = RegressionOutput;

    fn step(&self, batch: Self::Input) -> RegressionOutput {
        self.run(batch)
    }
}
// ANCHOR_END: model

fn model() -> Curve {
    // ANCHOR: device
    let device = Device::flex().autodiff().gradient_checkpointing();
    let hidden = [(1, 8), (8, 8)].map(|(from, to)| LinearConfig::new(from, to).init(&device)).into();
    let model = Curve { hidden, output: LinearConfig::new(8, 1).init(&device) };
    // ANCHOR_END: device
    model
}

#[derive(Clone)]
struct Points;

impl Batcher<f32, [Tensor<2>; 2]> for Points {
    fn batch(&self, xs: Vec<f32>, device: &Device) -> [Tensor<2>; 2] {
        let x = Tensor::<1>::from_floats(xs.as_slice(), device).unsqueeze_dim(1);
        [x.clone(), (x * 3.0).sin()]
    }
}

fn training() -> SupervisedTraining<Curve> {
    let points = |len: usize| {
        let items = InMemDataset::new((0..len).map(|i| i as f32 * 2.0 / len as f32 - 1.0).collect());
        DataLoaderBuilder::new(Points).batch_size(4).build(items)
    };
    let (train, valid) = (points(32), points(10));
    let folder = std::env::temp_dir().join(format!("fsdp-book-learner-{}", std::process::id()));
    // ANCHOR: training
    let training = SupervisedTraining::new(&folder, train, valid).metrics((LossMetric::new(),)).num_epochs(3);
    // ANCHOR_END: training
    training.with_metric_logger(InMemoryMetricLogger::default()).with_application_logger(None)
}

fn on_one_device(training: SupervisedTraining<Curve>, model: Curve) -> LearningResult<Curve> {
    // ANCHOR: plain
    let result = training.launch(Learner::new(model, AdamWConfig::new().init(), 1e-2));
    // ANCHOR_END: plain
    result
}

fn on_ranks(training: SupervisedTraining<Curve>, model: Curve) -> Result<LearningResult<Curve>, Error> {
    // ANCHOR: sharded
    let config = Config { world_size: 2, ..Config::default() }; // or Config::load("run.toml")?
    let result = FsdpStrategy::new(&config).launch(training, model, AdamWConfig::new().init(), 1e-2)?;
    // ANCHOR_END: sharded
    Ok(result)
}

#[test]
fn a_training_is_sharded_by_one_line() {
    let result = on_ranks(training(), model()).unwrap();
    assert_eq!(result.model.hidden[1].weight.dims(), [8, 8], "the whole model comes back");
    let plain = on_one_device(training(), model());
    assert_eq!(plain.model.hidden[1].weight.dims(), [8, 8]);
}
