//! The numbers of the chapter on which one to choose: the planner's advice for models of several sizes.

use fsdp_core::{ComputePrecision, Device, Forecast, Job, Stage, Transformer, human_bytes};

use crate::output::{assert_numbers, assert_shown};
use crate::planned::{half_job, memory};

/// A transformer of about the given size in billions, by blocks and width.
const MODELS: [(&str, usize, usize); 6] = [
    ("0.1 billion", 12, 768),
    ("1.4 billion", 24, 2048),
    ("6.9 billion", 32, 4096),
    ("13 billion", 40, 5120),
    ("30 billion", 60, 6400),
    ("66 billion", 80, 8192),
];

/// Sequences of a rank.
const BATCH: usize = 8;

fn job(layers: usize, width: usize, num_ranks: usize) -> Job {
    let model = Transformer { layers, width, heads: width / 128, sequence: 2048, vocabulary: 32000, recompute: true };
    let activations = model.activation_bytes(BATCH, ComputePrecision::Mixed16);
    let num_tokens = (BATCH * model.sequence) as u64;
    Job {
        recompute: true,
        num_tokens,
        activation_bytes: Some(activations),
        ..half_job(model.shape(), num_ranks, "ib-ndr")
    }
}

fn advice() -> String {
    let device = Device::find("H100").unwrap().memory_bytes;
    let head = ["parameters", "stage 0", "stage 1", "stage 2", "stage 3"];
    let mut text = String::new();
    for num_ranks in [8, 64] {
        text += &format!("{num_ranks} H100: peak of a rank in GiB, and what the planner says\n\n");
        text += &format!("{:<14}{:>9}{:>9}{:>9}{:>9}   take\n", head[0], head[1], head[2], head[3], head[4]);
        for (name, layers, width) in MODELS {
            let forecast = Forecast::new(&job(layers, width, num_ranks), Some(device));
            let peaks = forecast.stages.iter().map(|of| {
                let peak = of.memory.peak_or_known_bytes() as f64 / f64::from(1 << 30);
                format!("{peak:>8.1}{}", if of.fits == Some(true) { ' ' } else { '!' })
            });
            let take = match forecast.advice.stage {
                Some(stage) => format!("stage {}", stage.number()),
                None => "none fits".to_owned(),
            };
            text += &format!("{name:<14}{}   {take}\n", peaks.collect::<String>());
        }
        text.push('\n');
    }
    format!("{}\n", text.trim_end())
}

#[test]
fn the_advice_for_models_of_several_sizes_is_the_planners() {
    assert_shown("listings/output/guides/choosing.txt", &advice());
    let of = |stage| human_bytes(memory(stage, 7_000_000_000, 32, 8).average().state_bytes());
    let device = human_bytes(Device::find("H100").unwrap().memory_bytes);
    assert_numbers(
        "src/guides/choosing.md",
        &[(
            "By memory",
            vec![of(Stage::Ddp), of(Stage::OptimizerState), of(Stage::Gradients), of(Stage::Parameters), device],
        )],
    );
}
