//! A sharded perceptron learns to multiply two numbers, on two ranks.

use burn::module::Module;
use burn::nn::loss::{MseLoss, Reduction};
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Distribution, Tensor, activation::tanh};
use fsdp_burn::{Config, Error, Rank, Sharded, launch};

#[derive(Module, Debug, Sharded)]
struct Mlp {
    #[shard(units)] // every element is a unit: gathered, used, freed
    layers: Vec<Linear>,
    output: Linear, // no attribute: part of the root unit, which stays gathered
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

/// What every rank runs. Returns the trained model.
fn train(rank: &Rank) -> Result<Mlp, Error> {
    let device = rank.device();
    let mut model = rank.shard(Mlp::init(&device))?;
    let mut optimizer = rank.optimizer(AdamWConfig::new().init())?;
    if rank.is_main() {
        println!("{}", model.summary());
    }
    for step in 0..=500 {
        // Each rank draws samples of its own.
        let input = Tensor::<2>::random([64, 2], Distribution::Uniform(-1.0, 1.0), &device);
        let target = input.clone().prod_dim(1);
        let loss = MseLoss::new().forward(model.forward(input), target, Reduction::Mean);
        let mean = rank.mean(loss.clone().into_scalar::<f32>().into())?;
        if rank.is_main() && step % 100 == 0 {
            println!("step {step:>3}  loss {mean:.5}");
        }
        let gradients = model.backward(loss)?;
        optimizer.step(3e-3, &mut model, gradients)?;
    }
    model.whole() // a plain Burn model again
}

fn main() -> Result<(), Error> {
    let config = Config { world_size: 2, ..Config::default() }; // stage 3 is the default
    let models = launch(&config, |rank| train(&rank))?;
    let question = Tensor::<2>::from_data([[0.5, -0.6]], &Device::flex());
    let answer: f32 = models[0].forward(question).into_scalar();
    println!("0.5 times -0.6 is {answer:.3}");
    Ok(())
}
