//! The embedding that holds no table: the same numbers as Burn's, the same records, and one gather per step.

use burn::module::Module;
use burn::nn::{Embedding as BurnEmbedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::tensor::{Device, Int, Tensor};
use fsdp_burn::nn::Embedding;
use fsdp_burn::{Error, OpKind, PlanWarning, Sharded, Stage, launch};

use crate::common::models::rows;
use crate::common::run::{SEED, config, plain_weights, seeded};

const ROWS: usize = 11;
const WIDTH: usize = 6;

fn indices(device: &Device) -> Tensor<2, Int> {
    // Twice the same row, and rows that are not looked up.
    Tensor::from_ints([[3, 1, 4, 1], [5, 9, 2, 6], [5, 3, 5, 8]], device)
}

/// Rows and the table's gradient, of a loss that needs the rows themselves in backward.
fn look_up(table: Tensor<2>, rows: &Tensor<3>) -> [Vec<f32>; 2] {
    let gradients = (rows.clone().powi_scalar(3) * 0.7).sum().backward();
    let gradient = table.grad(&gradients).unwrap();
    [rows.clone().into_data(), gradient.into_data()].map(|data| data.try_to_vec::<f32>().unwrap())
}

#[test]
fn rows_and_gradients_have_the_bits_of_burns_embedding_with_and_without_checkpointing() {
    let plain = Device::flex().autodiff();
    let _turn = seeded(&plain, SEED);
    for device in [plain.clone(), plain.gradient_checkpointing()] {
        let burn = EmbeddingConfig::new(ROWS, WIDTH).init(&device);
        let ours = Embedding::from(burn.clone());
        assert_eq!(ours.to_string(), burn.to_string());
        let expected = look_up(burn.weight.val(), &burn.forward(indices(&device)));
        assert_eq!(expected, look_up(ours.weight.val(), &ours.forward(indices(&device))));
        let valid = [burn.valid().forward(indices(&device)), ours.valid().forward(indices(&device))];
        let [expected, got] = valid.map(|rows| rows.into_data().try_to_vec::<f32>().unwrap());
        assert_eq!(expected, got);
    }
}

#[test]
fn records_of_burns_embedding_and_of_this_one_load_into_the_other() {
    let device = Device::flex();
    let _turn = seeded(&device, SEED);
    let [burn, other] = [(), ()].map(|()| EmbeddingConfig::new(ROWS, WIDTH).init(&device));
    let ours = Embedding::from(other.clone());
    assert_ne!(plain_weights(&burn), plain_weights(&ours));
    let loaded = ours.clone().load_record(burn.clone().into_record());
    assert_eq!(plain_weights(&loaded), plain_weights(&burn));
    let loaded = burn.load_record(ours.into_record());
    assert_eq!(plain_weights(&loaded), plain_weights(&other));
}

/// A table whose rows are normalised, so that backward asks for them.
#[derive(Module, Debug, Sharded)]
struct Lookup {
    #[shard(unit)]
    first: Linear,
    #[shard(unit)]
    table: Embedding,
    #[shard(unit)]
    last: Linear,
}

fn lookup(device: &Device) -> Lookup {
    let linear = || LinearConfig::new(WIDTH, WIDTH).init(device);
    Lookup { first: linear(), table: EmbeddingConfig::new(ROWS, WIDTH).init(device).into(), last: linear() }
}

#[test]
fn backward_gathers_no_table_again() {
    let gathers = launch(&config(Stage::Parameters, 2), |rank| {
        let device = rank.device();
        let turn = rank.is_main().then(|| seeded(&device, SEED));
        let mut model = rank.shard(lookup(&device))?;
        drop(turn);
        let mut optimizer = rank.optimizer(SgdConfig::new().init())?;
        // The first step learns which unit is the last of forward.
        for _ in 0..3 {
            model.synchronize()?;
            rank.traffic().reset();
            let x = model.first.forward(rows(1, 0..12, WIDTH, &device)).reshape([3, 4, WIDTH]);
            let x = x + model.table.forward(indices(&device)).powi_scalar(2);
            let loss = model.last.forward(x.powi_scalar(3)).mean();
            let gradients = model.backward(loss)?;
            optimizer.step(0.1, &mut model, gradients)?;
        }
        model.synchronize()?;
        Ok(rank.traffic().of(OpKind::AllGather).num_ops)
    });
    // One in forward for each unit, and one for the norm. Backward asks for `last` alone, which stays from forward.
    assert_eq!(gathers.unwrap(), [4, 4]);
}

#[derive(Module, Debug, Sharded)]
struct Tables {
    #[shard(unit)]
    burn: BurnEmbedding,
    #[shard(unit)]
    ours: Embedding,
    #[shard(unit)]
    output: Linear,
}

#[test]
fn a_large_table_of_burns_embedding_is_warned_of_and_one_of_this_is_not() {
    launch(&config(Stage::Parameters, 2), |rank| {
        let device = rank.device();
        let _turn = rank.is_main().then(|| seeded(&device, SEED));
        let table = || EmbeddingConfig::new(512, 512).init(&device);
        let model = Tables { burn: table(), ours: table().into(), output: LinearConfig::new(512, 2).init(&device) };
        let expected = [PlanWarning::HeldTable { path: "burn.weight".into(), bytes: 1 << 20 }];
        assert_eq!(rank.shard(model)?.plan().warnings(), expected);
        Ok::<_, Error>(())
    })
    .unwrap();
}
