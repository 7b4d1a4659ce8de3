//! Chapter 10: a checkpoint that four ranks have written, read by other worlds.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use burn::optim::AdamWConfig;
use fsdp_burn::{Error, Rank, SaveOptions, Stage, launch};

use crate::Outcome;
use crate::model::{NUM_BLOCKS, Net, ROWS, WIDTH, loss, samples};
use crate::show::scratch;
use crate::train::config;

/// Samples of all ranks in a step; they are dealt out to however many there are.
const ALL_ROWS: usize = 4 * ROWS;
const SAVED_AT: usize = 3;
const NUM_STEPS: usize = 6;

/// What a run is told to do.
#[derive(Clone)]
struct Run {
    save: Option<PathBuf>,
    load: Option<PathBuf>,
}

// ANCHOR: run
/// Losses by step, over the samples of all ranks.
fn train(rank: &Rank, run: &Run) -> Result<BTreeMap<usize, f64>, Error> {
    let device = rank.device();
    let mut model = rank.shard(Net::init(WIDTH, NUM_BLOCKS, &device))?;
    let mut optimizer = rank.optimizer(AdamWConfig::new().init())?;
    let mut first = 0;
    if let Some(root) = &run.load {
        first = model.load(root, &mut optimizer)?.step as usize; // weights, optimizer state, step
    }
    let mut losses = BTreeMap::new();
    for step in first..NUM_STEPS {
        let rows = ALL_ROWS / rank.world_size();
        let (input, target) = samples(step, rank.rank() * rows..(rank.rank() + 1) * rows, &device);
        let loss = loss(model.forward(input), target);
        losses.insert(step, rank.mean(loss.clone().into_scalar::<f32>().into())?);
        let gradients = model.backward(loss)?;
        optimizer.step(1e-3, &mut model, gradients)?;
        if let (Some(root), true) = (&run.save, step + 1 == SAVED_AT) {
            model.save(root, &optimizer, BTreeMap::new(), &SaveOptions::default())?;
        }
    }
    Ok(losses)
}
// ANCHOR_END: run

fn losses(stage: Stage, world_size: usize, run: &Run) -> Result<BTreeMap<usize, f64>, Error> {
    let run = run.clone();
    Ok(launch(&config(stage, world_size), move |rank| train(&rank, &run))?.remove(0))
}

fn files(folder: &Path) -> std::io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

pub(crate) fn run() -> Outcome {
    let root = scratch("resume")?;
    let whole = losses(Stage::Parameters, 4, &Run { save: Some(root.clone()), load: None })?;
    println!("Four ranks, six steps; after the third, {}/step-{SAVED_AT} holds\n", root.display());
    for name in files(&root.join(format!("step-{SAVED_AT}")))? {
        println!("  {name}");
    }
    println!("\nThe last three steps again, from there; their losses beside those of the first run\n");
    for (stage, world_size) in [(3, 4), (3, 2), (1, 2), (0, 1)] {
        let stage = Stage::try_from(stage)?;
        let resumed = losses(stage, world_size, &Run { save: None, load: Some(root.clone()) })?;
        let distance = |(step, loss): (&usize, &f64)| (loss - whole[step]).abs() / whole[step];
        let furthest = resumed.iter().map(distance).fold(0.0, f64::max);
        let how = match world_size {
            4 if furthest == 0.0 => "equal, to the last bit",
            1 | 2 if furthest < 1e-4 => "equal but for rounding: less than 0.0001 of them apart",
            _ => "NOT equal",
        };
        println!("  stage {} on {world_size}: steps {:?}, {how}", stage.number(), resumed.keys().collect::<Vec<_>>());
    }
    println!("\ncargo fsdp inspect {}/step-{SAVED_AT}", root.display());
    Ok(())
}
