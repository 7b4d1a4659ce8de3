//! Chapter 9: state that lies on the disk between its uses.

use fsdp_burn::{Config, Error, OffloadConfig, Rank, Stage, TierShares, TierStats, launch};

use crate::Outcome;
use crate::show::{about, about_ms, scratch};
use crate::train::{Seen, config, train};

/// Of what is packed for the disk the size differs a little from run to run.
fn megabytes(bytes: u64) -> String {
    about(format!("{:.2} MB", bytes as f64 / 1e6))
}

fn with_disk(rank: &Rank) -> Result<(Seen, Option<TierStats>), Error> {
    let seen = train(rank)?;
    Ok((seen, rank.tier_stats()))
}

pub(crate) fn run() -> Outcome {
    let folder = scratch("offload")?;
    println!("Two ranks at stage 3; rank 0\n");
    println!("{:>24} {:>14} {:>13} {:>14} {:>12}", "on the disk", "optimizer", "on the disk", "read in all", "a step");
    // ANCHOR: config
    let nothing = OffloadConfig::default();
    let nvme_path = Some(folder.join("nvme").display().to_string());
    let nvme = TierShares::NVME;
    let state = OffloadConfig { optimizer: nvme, nvme_path, ..OffloadConfig::default() };
    let all = OffloadConfig { gradients: nvme, parameters: nvme, ..state.clone() };
    // ANCHOR_END: config
    let mut runs = Vec::new();
    for (name, offload) in [("nothing", nothing), ("optimizer state", state), ("all of the state", all)] {
        let config = Config { offload, ..config(Stage::Parameters, 2) };
        let ranks = launch(&config, |rank| with_disk(&rank))?;
        let (Seen { optimizer, step_s, .. }, disk) = &ranks[0];
        let (held, read) = disk.map_or((0, 0), |disk| (disk.file_bytes, disk.read_bytes));
        println!(
            "{name:>24} {:>14} {:>13} {:>14} {:>12}",
            megabytes(*optimizer as u64),
            megabytes(held),
            megabytes(read),
            about_ms(*step_s),
        );
        runs.push(ranks);
    }
    let losses = |ranks: &[(Seen, Option<TierStats>)]| {
        ranks.iter().flat_map(|(seen, _)| &seen.losses).map(|loss| loss.to_bits()).collect::<Vec<_>>()
    };
    let are_equal =
        runs.iter().all(|ranks| losses(ranks) == losses(&runs[0]) && ranks[0].0.digest == runs[0][0].0.digest);
    println!("\nlosses and weights of the three: {}", if are_equal { "equal, to the last bit" } else { "NOT equal" });
    Ok(())
}
