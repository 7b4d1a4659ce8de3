//! Chapter 8: what half precision saves, and what it would lose.

use burn::tensor::{Device, FloatDType, Tensor};
use fsdp_burn::{Config, Dtype, PrecisionConfig, Stage, launch};

use crate::Outcome;
use crate::show::{about, grouped};
use crate::train::{LAST, Seen, config, mean_loss, train};

// ANCHOR: updates
/// A weight of 1 after a thousand updates of 0.001, kept in `dtype`.
fn updated(dtype: FloatDType) -> f32 {
    let device = Device::flex();
    let mut weight = Tensor::<1>::ones([1], &device).cast(dtype);
    for _ in 0..1000 {
        weight = weight + Tensor::<1>::full([1], 0.001, &device).cast(dtype);
    }
    weight.cast(FloatDType::F32).into_scalar()
}
// ANCHOR_END: updates

pub(crate) fn run() -> Outcome {
    println!("1 + 1000 times 0.001, kept in\n");
    for (name, dtype) in [("f32", FloatDType::F32), ("f16", FloatDType::F16), ("bf16", FloatDType::BF16)] {
        println!("{name:<5} {:.4}", updated(dtype));
    }

    println!("\nTwo ranks at stage 3; bytes of rank 0\n");
    println!(
        "{:>10} {:>7} {:>11} {:>10} {:>12} {:>14} {:>10}",
        "parameters", "reduce", "parameters", "gathered", "all-gathers", "reduce-scatter", "loss"
    );
    let all = [(Dtype::F32, Dtype::F32), (Dtype::Bf16, Dtype::F32), (Dtype::Bf16, Dtype::Bf16)];
    for (parameters, reduce) in all {
        // ANCHOR: config
        let precision = PrecisionConfig { parameters, reduce, ..PrecisionConfig::default() };
        let config = Config { precision, ..config(Stage::Parameters, 2) };
        // ANCHOR_END: config
        let ranks = launch(&config, |rank| train(&rank))?;
        let Seen { parameters: stored, gathered, sent_by_kind: [gathers, scatters, _], .. } = ranks[0];
        println!(
            "{:>10} {:>7} {:>11} {:>10} {:>12} {:>14} {:>10}",
            parameters.name(),
            reduce.name(),
            grouped(stored),
            grouped(gathered),
            grouped(gathers),
            grouped(scatters),
            about(format!("{:.4}", mean_loss(&ranks, LAST))),
        );
    }
    Ok(())
}
