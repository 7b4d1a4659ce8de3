//! The first chapter: a sharded perceptron on two ranks.

use burn::module::Module;
use burn::nn::loss::{MseLoss, Reduction};
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Distribution, Tensor, activation::tanh};
use fsdp_burn::{Config, Error, Rank, Sharded, launch};

use crate::output::assert_shown;

// ANCHOR: model
#[derive(Module, Debug, Sharded)]
struct Mlp {
    #[shard(units)] // every element is a unit: gathered, used, freed
    layers: Vec<Linear>,
    output: Linear, // no attribute: the root unit
}

impl Mlp {
    fn init(device: &Device) -> Self {
        let layers = [(2, 64), (64, 64), (64, 64)];
        Self {
            layers: layers.map(|(from, to)| LinearConfig::new(from, to).init(device)).into(),
            output: LinearConfig::new(64, 1).init(device),
        }
    }

    fn forward(&self, input: Tensor<2>) -> Tensor<2> {
        self.output.forward(self.layers.iter().fold(input, |x, layer| tanh(layer.forward(x))))
    }
}
// ANCHOR_END: model

// ANCHOR: train
/// What every rank runs. Returns the mean loss of the first and of the last step.
fn train(rank: &Rank, num_steps: usize) -> Result<[f64; 2], Error> {
    let device = rank.device();
    let mut model = rank.shard(Mlp::init(&device))?;
    let mut optimizer = rank.optimizer(AdamWConfig::new().init())?;
    if rank.is_main() {
        println!("{}", model.summary());
    }
    let mut losses = Vec::new();
    for _ in 0..num_steps {
        // Each rank draws samples of its own, and learns to multiply two numbers.
        let input = Tensor::<2>::random([64, 2], Distribution::Uniform(-1.0, 1.0), &device);
        let target = input.clone().prod_dim(1);
        let loss = MseLoss::new().forward(model.forward(input), target, Reduction::Mean);
        losses.push(rank.mean(loss.clone().into_scalar::<f32>().into())?);
        let gradients = model.backward(loss)?;
        optimizer.step(3e-3, &mut model, gradients)?;
    }
    Ok([losses[0], losses[num_steps - 1]])
}
// ANCHOR_END: train

// ANCHOR: launch
fn run() -> Result<Vec<[f64; 2]>, Error> {
    let config = Config { world_size: 2, ..Config::default() }; // stage 3 is the default
    launch(&config, |rank| train(&rank, 150))
}
// ANCHOR_END: launch

#[test]
fn the_program_of_the_first_chapter_learns() {
    for [first, last] in run().unwrap() {
        assert!(last < 0.2 * first, "{first} to {last}");
    }
}

#[test]
fn the_unit_table_of_the_first_chapter_is_current() {
    let config = Config { world_size: 2, ..Config::default() };
    let tables = launch(&config, |rank| Ok(rank.shard(Mlp::init(&rank.device()))?.summary())).unwrap();
    assert_shown("listings/output/start.txt", &tables[0]);
}

#[test]
fn the_dependencies_of_the_first_chapter_are_those_of_the_workspace() {
    let version = |text: &str| {
        let line = text.lines().find(|line| line.starts_with("burn = ")).unwrap().to_owned();
        line.split('"').nth(1).unwrap().to_owned()
    };
    let workspace = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml")).unwrap();
    assert_eq!(version(include_str!("start.toml")), version(&workspace));
}
