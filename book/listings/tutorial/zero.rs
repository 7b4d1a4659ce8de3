//! Chapter 3: the same model at four stages.

use fsdp_burn::{Stage, launch};

use crate::Outcome;
use crate::show::{about, bar, grouped};
use crate::train::{Seen, config, train};

const NUM_RANKS: usize = 4;

pub(crate) fn run() -> Outcome {
    println!("{NUM_RANKS} ranks; bytes of rank 0\n");
    println!(
        "{:>5} {:>12} {:>12} {:>12} {:>12} {:>14}",
        "stage", "parameters", "gradients", "optimizer", "gathered", "sent in a step"
    );
    let mut by_stage: Vec<Vec<Seen>> = Vec::new();
    // ANCHOR: stages
    for stage in Stage::ALL {
        let ranks = launch(&config(stage, NUM_RANKS), |rank| train(&rank))?;
        // ANCHOR_END: stages
        let Seen { parameters, gradients, optimizer, gathered, sent, .. } = ranks[0];
        println!(
            "{:>5} {:>12} {:>12} {:>12} {:>12} {:>14}",
            stage.number(),
            grouped(parameters),
            grouped(gradients),
            about(format!("{:.2} MB", optimizer as f64 / 1e6)),
            grouped(gathered),
            grouped(sent),
        );
        by_stage.push(ranks);
    }

    println!("\np parameters, g gradients, o optimizer state, u gathered units: one character for 1 MB\n");
    for (stage, ranks) in Stage::ALL.iter().zip(&by_stage) {
        let Seen { parameters, gradients, optimizer, gathered, .. } = ranks[0];
        let parts = [(parameters, 'p'), (gradients, 'g'), (optimizer, 'o'), (gathered, 'u')];
        println!("{} {}", stage.number(), parts.map(|(bytes, character)| bar(bytes, 1_000_000, character)).concat());
    }

    let losses =
        |ranks: &[Seen]| ranks.iter().flat_map(|seen| &seen.losses).map(|loss| loss.to_bits()).collect::<Vec<_>>();
    let are_equal =
        by_stage.iter().all(|ranks| losses(ranks) == losses(&by_stage[0]) && ranks[0].digest == by_stage[0][0].digest);
    let equal = if are_equal { "equal, to the last bit" } else { "NOT equal" };
    println!("\nlosses of all steps and weights after them, at the four stages: {equal}");
    Ok(())
}
