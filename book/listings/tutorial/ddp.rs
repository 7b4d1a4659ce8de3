//! Chapter 2: data parallel, and what every rank holds again.

use fsdp_burn::{Stage, launch};

use crate::Outcome;
use crate::model::ROWS;
use crate::show::{about, grouped};
use crate::train::{LAST, Seen, config, mean_loss, train, train_on};

pub(crate) fn run() -> Outcome {
    println!("Stage 0, {ROWS} samples on each rank; bytes\n");
    println!(
        "{:>5} {:>12} {:>12} {:>12} {:>14} {:>12}",
        "ranks", "parameters", "gradients", "optimizer", "sent in a step", "all ranks"
    );
    let held = |seen: &Seen| seen.parameters + seen.gradients + seen.optimizer;
    let mut copies = Vec::new();
    for world_size in [1, 2, 4] {
        // ANCHOR: launch
        let ranks = launch(&config(Stage::Ddp, world_size), |rank| train(&rank))?;
        // ANCHOR_END: launch
        let first = &ranks[0];
        let optimizer = first.optimizer as f64 / 1e6;
        println!(
            "{world_size:>5} {:>12} {:>12} {:>12} {:>14} {:>12}",
            grouped(first.parameters),
            grouped(first.gradients),
            about(format!("{optimizer:.1} MB")),
            grouped(first.sent),
            about(format!("{:.0} MB", ranks.iter().map(held).sum::<usize>() as f64 / 1e6)),
        );
        copies = ranks;
    }
    let num_equal = copies.iter().filter(|seen| seen.digest == copies[0].digest).count();
    println!("\nWeights after training on 4 ranks: the same on {num_equal} of them, to the last bit");

    // ANCHOR: alone
    let alone = launch(&config(Stage::Ddp, 1), |rank| train_on(&rank, 4 * ROWS))?;
    let [of_four, of_one] = [mean_loss(&copies, LAST), mean_loss(&alone, LAST)];
    // ANCHOR_END: alone
    let is_near = (of_four - of_one).abs() < 1e-4 * of_one;
    let how = if is_near { "equal but for rounding" } else { "NOT equal" };
    println!("Loss of 4 ranks with {ROWS} samples each, and of one with {}: {how}", 4 * ROWS);
    Ok(())
}
