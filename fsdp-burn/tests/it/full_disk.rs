//! Whole runs on a disk that is full: the error that each rank gets, and what is left behind.
//!
//! A limit on the size of files stands for the disk, since nobody needs a permission for that; it is one of the process, so
//! the runs have one of their own. The error of state on a disk tells the two apart; what follows is the same.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use fsdp_burn::{Config, Error, Rank, SaveOptions, ShardedModel, ShardedOptimizer, Stage, TierShares, launch};

use crate::common::files::{Scratch, content};
use crate::common::models::{Gpt, Trial};
use crate::common::process::{child_with_file_limits, limit_files, run_to_end, told};
use crate::common::run::{Optimizer, Weights, config, share, start, weights};
use crate::offload::offloaded;

const DIR: &str = "FSDP_TEST_FULL_DISK_DIR";

fn step(rank: &Rank, batch: usize, model: &mut ShardedModel<Gpt>, optim: &mut ShardedOptimizer) -> Result<(), Error> {
    let gradients = model.backward(model.loss(batch, share(rank), &rank.device()))?;
    optim.step(Optimizer::AdamW.lr(), model, gradients).map(drop)
}

/// Three steps with everything offloaded: weights, and the bytes of the rank's file.
fn offloading(rank: &Rank) -> Result<(Weights, u64), Error> {
    let mut model = start::<Gpt>(rank)?;
    let mut optim = rank.optimizer(Optimizer::AdamW.build())?;
    for batch in 0..3 {
        step(rank, batch, &mut model, &mut optim)?;
    }
    model.synchronize()?;
    Ok((weights(&model)?, rank.tier_stats().map_or(0, |stats| stats.file_bytes)))
}

/// The error that ended the run, and those that ranks returned. Ranks that fail inside of forward unwind past the program.
fn ends(config: &Config) -> (String, Vec<String>) {
    let errors: Arc<Mutex<Vec<String>>> = Arc::default();
    let noted = errors.clone();
    let result = launch(config, move |rank| {
        let result = offloading(&rank);
        if let Err(error) = &result {
            noted.lock().unwrap().push(error.to_string());
        }
        result
    });
    let errors = errors.lock().unwrap().clone();
    (result.unwrap_err().to_string(), errors)
}

#[test]
fn child_offloads_to_a_full_disk() {
    let Some(dir) = told(DIR) else { return };
    let nvme = dir.join("nvme");
    let config = offloaded(&nvme, &config(Stage::Parameters, 3), [TierShares::NVME; 3]);
    let (expected, _) = launch(&config, |rank| offloading(&rank)).unwrap().swap_remove(0);
    let sizes = launch(&config, |rank| Ok(offloading(&rank)?.1)).unwrap();
    let largest = sizes.into_iter().max().unwrap();
    // As the model is sharded, as gradients are first put away, and as the optimizer's state is.
    for part in [1, 4, 7] {
        limit_files(Some(largest * part / 8 / 4096 * 4096));
        let (error, errors) = ends(&config);
        limit_files(None);
        for error in errors.iter().chain([&error]) {
            for word in ["rank-", ".tier: the file may not grow by ", "at offset ", "`ulimit -f`", "`nvme_path`"] {
                assert!(error.contains(word), "{part}/8: `{word}` is not in: {error}");
            }
        }
        assert!(!nvme.exists(), "{part}/8: nothing is left on the disk");
        println!("{part}/8: {} ranks returned it: {error}", errors.len());
    }
    let (got, _) = launch(&config, |rank| offloading(&rank)).unwrap().swap_remove(0);
    assert!(got == expected, "with room again the run trains");
    assert!(!nvme.exists());
}

#[test]
fn a_disk_that_is_full_ends_an_offloading_run_with_the_place_and_leaves_nothing() {
    let scratch = Scratch::new("full-tier");
    run_to_end(child_with_file_limits("full_disk::child_offloads_to_a_full_disk").env(DIR, scratch.path()));
    assert!(!scratch.path().join("nvme").exists());
}

/// Six steps with a save after each second one, the second of which finds the disk full. Weights at the end.
fn saving(rank: &Rank, root: &Path, in_background: bool, fills: bool) -> Result<Weights, Error> {
    let mut model = start::<Gpt>(rank)?;
    let mut optim = rank.optimizer(Optimizer::AdamW.build())?;
    let options = SaveOptions::default();
    let mut saver = rank.saver(root, options)?;
    let limit = |bytes| -> Result<(), Error> {
        rank.barrier()?;
        if rank.is_main() {
            limit_files(bytes);
        }
        rank.barrier()
    };
    for batch in 0..6 {
        step(rank, batch, &mut model, &mut optim)?;
        if batch % 2 == 0 {
            continue;
        }
        let is_full = fills && batch == 3;
        if is_full {
            limit(Some(4096))?;
        }
        let saved = match in_background {
            true => saver.save(&model, &optim, BTreeMap::new()).and_then(|_| saver.finish()).map(drop),
            false => model.save(root, &optim, BTreeMap::new(), &options).map(drop),
        };
        if is_full {
            limit(None)?;
            let error = saved.unwrap_err().to_string();
            for word in ["saving: rank ", ".safetensors: File too large", "limit on the size of files"] {
                assert!(error.contains(word), "`{word}` is not in: {error}");
            }
            println!("rank {}: {error}", rank.rank());
        } else {
            saved?;
        }
    }
    weights(&model)
}

#[test]
fn child_saves_to_a_full_disk() {
    let Some(dir) = told(DIR) else { return };
    for in_background in [false, true] {
        let [empty, full] = ["empty", "full"].map(|name| dir.join(format!("{name}-{in_background}")));
        let runs = [(&empty, false), (&full, true)].map(|(root, fills)| {
            let root = root.clone();
            let run = launch(&config(Stage::Parameters, 3), move |rank| saving(&rank, &root, in_background, fills));
            run.unwrap().swap_remove(0)
        });
        assert!(runs[0] == runs[1], "training goes on as if nothing was");
        assert!(!full.join("step-4").exists() && !full.join(".saving-step-4").exists(), "nothing is left of it");
        for step in ["step-2", "step-6"] {
            assert!(content(&empty.join(step)) == content(&full.join(step)), "{step}");
        }
    }
}

#[test]
fn a_disk_that_is_full_is_every_ranks_error_of_a_save_and_training_goes_on() {
    let scratch = Scratch::new("full-checkpoint");
    let text = run_to_end(child_with_file_limits("full_disk::child_saves_to_a_full_disk").env(DIR, scratch.path()));
    assert_eq!(text.matches("safetensors: File too large").count(), 2 * 3, "{text}");
}
