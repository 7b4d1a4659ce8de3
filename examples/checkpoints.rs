//! Saving a run every so many steps, and when it is interrupted; going on from the newest checkpoint.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fsdp_burn::{CheckpointError, Error, Rank, SaveOptions, Saver, ShardedModel, ShardedOptimizer};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

use crate::{Args, Failure, Gpt};

/// Where and when a run is saved.
#[derive(Debug)]
pub struct Checkpoints {
    root: PathBuf,
    every: usize,
    options: SaveOptions,
    in_background: bool,
    resume: bool,
    quiet: bool,
    /// Set by a signal: the run is to save and stop.
    interrupted: Arc<AtomicBool>,
}

impl Checkpoints {
    /// What the options ask for; `None` where they name no directory. From here on SIGINT and SIGTERM let the run save and
    /// stop, and a second one ends it at once.
    ///
    /// # Errors
    /// If the system does not let the program hear signals.
    pub fn new(args: &Args) -> Result<Option<Self>, Failure> {
        let Some(root) = args.checkpoints.clone() else { return Ok(None) };
        let interrupted = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM] {
            // The second one finds the flag set: 128 and its number, as a shell reports it.
            flag::register_conditional_shutdown(signal, 128 + signal, interrupted.clone())
                .and_then(|_| flag::register(signal, interrupted.clone()))
                .map_err(|source| Error::Io { what: "cannot listen for signals".into(), source })?;
        }
        let options = SaveOptions { keep_last: NonZeroUsize::new(args.keep) };
        let Args { save_every: every, save_in_background: in_background, resume, quiet, .. } = *args;
        Ok(Some(Self { root, every, options, in_background, resume, quiet, interrupted }))
    }

    /// What saves this rank's part in the background, if that was asked for.
    ///
    /// # Errors
    /// If the system refuses a thread.
    pub fn saver(&self, rank: &Rank) -> Result<Option<Saver>, Error> {
        self.in_background.then(|| rank.saver(&self.root, self.options)).transpose()
    }

    /// The steps that are done: those of the newest checkpoint, if the run is to go on from one and there is one.
    ///
    /// # Errors
    /// If there are checkpoints and none is good, or they are of another model.
    pub fn resume(
        &self,
        rank: &Rank,
        model: &mut ShardedModel<Gpt>,
        optimizer: &mut ShardedOptimizer,
    ) -> Result<usize, Error> {
        if !self.resume {
            return Ok(0);
        }
        let loaded = match model.load(&self.root, optimizer) {
            Ok(loaded) => loaded,
            Err(Error::Checkpoint(error)) if is_none_there(&error) => {
                self.tell(rank, || format!("No checkpoint in {} yet: starting at step 0", self.root.display()));
                return Ok(0);
            }
            Err(error) => return Err(error),
        };
        for rejected in &loaded.rejected {
            self.tell(rank, || format!("Passed over {}: {}", rejected.dir.display(), rejected.reason));
        }
        self.tell(rank, || format!("Going on from {}", loaded.dir.display()));
        Ok(loaded.step as usize)
    }

    /// Saves after `num_steps` steps, if it is time or `is_last` or the run is interrupted. Whether the run is to stop, the
    /// same on all ranks.
    ///
    /// # Errors
    /// If a rank cannot save, or could not in the background; or a collective fails.
    pub fn after_step(
        &self,
        rank: &Rank,
        model: &ShardedModel<Gpt>,
        optimizer: &ShardedOptimizer,
        saver: Option<&mut Saver>,
        num_steps: usize,
        is_last: bool,
    ) -> Result<bool, Error> {
        // A signal reaches the process at some moment; ranks must agree in which step it was.
        let stop = rank.any(self.interrupted.load(Ordering::Relaxed))?;
        if stop || is_last || num_steps.is_multiple_of(self.every) {
            // The samples of a step depend on its number alone.
            let sections = BTreeMap::new();
            let saved = match saver {
                None => Some(model.save(&self.root, optimizer, sections, &self.options)?),
                Some(saver) => {
                    saver.save(model, optimizer, sections)?;
                    if stop || is_last { saver.finish()? } else { None }
                }
            };
            if let (true, Some(saved)) = (stop, saved) {
                self.tell(rank, || format!("\nInterrupted after {num_steps} steps; saved {}", saved.dir.display()));
            }
        } else if let Some(saver) = saver {
            saver.poll()?;
        }
        Ok(stop)
    }

    fn tell(&self, rank: &Rank, text: impl FnOnce() -> String) {
        if rank.is_main() && !self.quiet {
            println!("{}", text());
        }
    }
}

/// Nothing was saved under the root yet, as opposed to checkpoints that are all damaged.
fn is_none_there(error: &CheckpointError) -> bool {
    matches!(error, CheckpointError::NothingGood { rejected, .. } if rejected.is_empty())
}
