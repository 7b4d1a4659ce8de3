//! Chapter 2: data parallel, and what every rank holds again.

use fsdp_burn::{Stage, launch};

use crate::Outcome;
use crate::model::ROWS;
use crate::show::{about, grouped};
use crate::train::{LAST, config, mean_loss, train};

pub(crate) fn run() -> Outcome {
    println!("Stage 0, {ROWS} samples on each rank; bytes\n");
    println!(
        "{:>5} {:>12} {:>12} {:>12} {:>14} {:>12} {:>10}",
        "ranks", "parameters", "gradients", "optimizer", "sent in a step", "all ranks", "loss"
    );
    let mut copies = Vec::new();
    for world_size in [1, 2, 4] {
        // ANCHOR: launch
        let ranks = launch(&config(Stage::Ddp, world_size), |rank| train(&rank))?;
        // ANCHOR_END: launch
        let first = &ranks[0];
        let optimizer = first.optimizer as f64 / 1e6;
        println!(
            "{world_size:>5} {:>12} {:>12} {:>12} {:>14} {:>12} {:>10}",
            grouped(first.parameters),
            grouped(first.gradients),
            about(format!("{optimizer:.1} MB")),
            grouped(first.sent),
            about(format!(
                "{:.0} MB",
                ranks.iter().map(|seen| seen.parameters + seen.gradients + seen.optimizer).sum::<usize>() as f64 / 1e6
            )),
            about(format!("{:.4}", mean_loss(&ranks, LAST))),
        );
        copies = ranks;
    }
    let num_equal = copies.iter().filter(|seen| seen.digest == copies[0].digest).count();
    println!(
        "\n{} parameters of {} elements in all; on {num_equal} of {} ranks the same, to the last bit",
        grouped(4 * copies[0].num_params),
        grouped(copies[0].num_params),
        copies.len()
    );
    Ok(())
}
