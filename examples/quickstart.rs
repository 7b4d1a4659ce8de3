//! The smallest sharded training: a perceptron on two ranks, each a thread of this process.
//!
//!     cargo run --release --example quickstart

use burn::module::Module;
use burn::nn::loss::{MseLoss, Reduction};
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamConfig;
use burn::tensor::{Distribution, Tensor, activation::tanh};
use fsdp_burn::{Config, Error, Sharded, launch};

#[derive(Module, Debug, Sharded)]
struct Mlp {
    #[shard(units)] // each layer is gathered when it is used, and freed after
    layers: Vec<Linear>,
    output: Linear,
}

impl Mlp {
    fn forward(&self, input: Tensor<2>) -> Tensor<2> {
        self.output.forward(self.layers.iter().fold(input, |x, layer| tanh(layer.forward(x))))
    }
}

fn main() -> Result<(), Error> {
    let config = Config { world_size: 2, ..Config::default() }; // stage 3 is the default
    launch(&config, |rank| {
        let device = rank.device();
        let layers = [(2, 64), (64, 64)].map(|(from, to)| LinearConfig::new(from, to).init(&device)).into();
        let mut model = rank.shard(Mlp { layers, output: LinearConfig::new(64, 1).init(&device) })?;
        let mut optimizer = rank.optimizer(AdamConfig::new().init())?;
        for step in 0..=300 {
            let input = Tensor::<2>::random([64, 2], Distribution::Uniform(-1.0, 1.0), &device);
            let target = input.clone().prod_dim(1); // learn to multiply two numbers
            let loss = MseLoss::new().forward(model.forward(input), target, Reduction::Mean);
            let mean = rank.mean(loss.clone().into_scalar::<f32>().into())?;
            let gradients = model.backward(loss)?;
            optimizer.step(3e-3, &mut model, gradients)?;
            if rank.is_main() && step % 50 == 0 {
                println!("step {step:>3}  loss {mean:.6}");
            }
        }
        if rank.is_main() {
            println!("\n{}", model.summary());
        }
        Ok(())
    })?;
    Ok(())
}

#[cfg(test)]
#[test]
fn it_runs() {
    main().unwrap();
}
