//! The program that the chapter on other frameworks sets beside theirs.

// ANCHOR: program
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Tensor, activation::gelu};
use fsdp_burn::{Config, Error, Rank, Sharded, launch};

#[derive(Module, Debug, Sharded)]
struct Mlp {
    #[shard(units)] // each layer is a unit
    layers: Vec<Linear>,
    head: Linear, // the root unit
}

impl Mlp {
    fn new(device: &Device) -> Self {
        let layers = (0..8).map(|_| LinearConfig::new(64, 64).init(device)).collect();
        Self { layers, head: LinearConfig::new(64, 1).init(device) }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.head.forward(self.layers.iter().fold(x, |x, layer| x.clone() + gelu(layer.forward(x))))
    }
}

fn train(rank: &Rank) -> Result<f64, Error> {
    let device = rank.device();
    let mut model = rank.shard(Mlp::new(&device))?;
    let mut optimizer = rank.optimizer(AdamWConfig::new().init())?;
    let mut last = f64::NAN;
    for step in 0..20 {
        let (x, y) = batch(step, rank.rank(), &device);
        let loss = (model.forward(x) - y).powf_scalar(2.0).mean();
        last = rank.mean(loss.clone().into_scalar::<f32>().into())?;
        let gradients = model.backward(loss)?;
        optimizer.step(1e-3, &mut model, gradients)?; // clips, as the configuration says
    }
    Ok(last)
}

fn main() -> Result<(), Error> {
    let config = Config::from_toml(include_str!("migrate.toml"), "migrate.toml")?;
    let losses = launch(&config, |rank| train(&rank))?;
    println!("loss {:.4}", losses[0]);
    Ok(())
}
// ANCHOR_END: program

fn batch(step: usize, rank: usize, device: &Device) -> (Tensor<2>, Tensor<2>) {
    let index = (step * 8 + rank) % 4;
    let values = (0..16 * 64).map(|at| ((at * 13 + index * 7) as f32).sin()).collect::<Vec<f32>>();
    let x = Tensor::<1>::from_floats(values.as_slice(), device).reshape([16, 64]);
    (x.clone(), x.mean_dim(1))
}

#[test]
fn the_program_beside_those_of_others_runs_and_learns() {
    main().unwrap();
    let config = Config::from_toml(include_str!("migrate.toml"), "migrate.toml").unwrap();
    let losses = launch(&config, |rank| train(&rank)).unwrap();
    assert!(losses.iter().all(|loss| *loss == losses[0] && loss.is_finite()), "{losses:?}");
}
