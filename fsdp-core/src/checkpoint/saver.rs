//! Saving in the background, while training goes on with the next step.

use std::path::PathBuf;
use std::sync::Arc;

use super::agree::agree;
use super::disk::Via;
use super::save::save_via;
use super::{CheckpointError, SaveOptions, Saved, Snapshot};
use crate::{CommStream, Communicator, OpTag, Pending, Phase};

/// Saves snapshots on a thread of its own, one at a time, over channels of its own.
///
/// Every rank has one, and all make the same calls in the same order. A snapshot must hold copies: training changes the
/// originals meanwhile. So a save in the background costs its size once more in host memory while it lasts. It writes past
/// the system's page cache, where it can, and its thread has a low priority (both on Linux), to leave the processors to
/// training; so it takes longer where training leaves little of them.
///
/// A save that fails is an error of the next call on **every** rank, which names the rank that failed; the saver can be
/// used again. Dropping a saver waits for the save under way and loses its error: call [`Saver::finish`] at the end.
///
/// ```
/// # use std::collections::BTreeMap;
/// # use std::time::Duration;
/// # use fsdp_core::checkpoint::{SaveOptions, Saver, Snapshot};
/// # use fsdp_core::{LocalWorld, Mesh, Stage};
/// # let snapshot = |step| Snapshot {
/// #     step, mesh: Mesh::one_dim(1), stage: Stage::Parameters, tensors: Vec::new(), scalars: BTreeMap::new(),
/// #     sections: BTreeMap::new(), rank_state: serde_json::Value::Null, pinned: false,
/// # };
/// # let root = tempfile::tempdir().unwrap();
/// # let root = root.path();
/// let comm = LocalWorld::connect(1, Duration::from_secs(10)).remove(0);
/// let mut saver = Saver::new(&*comm, root, SaveOptions::default())?;
/// for step in 1..=4 {
///     // ... train here, then every second step:
///     if step % 2 == 0 {
///         saver.save(snapshot(step))?;
///     }
///     saver.poll()?;
/// }
/// saver.finish()?;
/// assert!(root.join("step-4").exists());
/// # Ok::<(), fsdp_core::checkpoint::CheckpointError>(())
/// ```
#[derive(Debug)]
pub struct Saver {
    root: PathBuf,
    options: SaveOptions,
    stream: CommStream,
    /// Ranks ask each other here whether all are done.
    control: Arc<dyn Communicator>,
    under_way: Option<UnderWay>,
}

#[derive(Debug)]
struct UnderWay {
    step: u64,
    outcome: Pending<Result<Saved, CheckpointError>>,
}

impl Saver {
    /// A saver for the run of `comm`, whose checkpoints lie in `root`.
    ///
    /// Collective, but waits for nobody.
    ///
    /// # Errors
    /// If a channel or the thread cannot be made.
    pub fn new(
        comm: &dyn Communicator,
        root: impl Into<PathBuf>,
        options: SaveOptions,
    ) -> Result<Self, CheckpointError> {
        let stream = CommStream::new(comm.channel("save")?, "save")?;
        Ok(Self { root: root.into(), options, stream, control: comm.channel("save: control")?, under_way: None })
    }

    /// Begins to save `snapshot`, and returns at once. Where an earlier save is still under way, waits for it first, and
    /// returns what it saved.
    ///
    /// Collective.
    ///
    /// # Errors
    /// What made the earlier save fail, on every rank; the new one is not begun then.
    pub fn save(&mut self, snapshot: Snapshot<'static>) -> Result<Option<Saved>, CheckpointError> {
        self.save_with(snapshot.step, || Ok(snapshot))
    }

    /// As [`Saver::save`], where `make` makes the snapshot of `step` on the saver's thread. What it holds must be copies already.
    ///
    /// Collective.
    ///
    /// # Errors
    /// As [`Saver::save`]; an error of `make` is one of the save.
    pub fn save_with(
        &mut self,
        step: u64,
        make: impl FnOnce() -> Result<Snapshot<'static>, Box<dyn std::error::Error + Send + Sync>> + Send + 'static,
    ) -> Result<Option<Saved>, CheckpointError> {
        let earlier = self.finish()?;
        let (root, options) = (self.root.clone(), self.options);
        let outcome = self.stream.submit(move |comm| {
            give_way();
            let snapshot = make().map_err(|source| CheckpointError::Snapshot { source });
            Ok(save_via(comm, &root, step, snapshot, &options, Via::Direct))
        });
        self.under_way = Some(UnderWay { step, outcome });
        Ok(earlier)
    }

    /// Whether a save is under way, or its outcome has not been asked for.
    pub fn is_saving(&self) -> bool {
        self.under_way.is_some()
    }

    /// What was saved, once all ranks are done with it; `None` before, or where no save is under way.
    ///
    /// Collective. Costs a short agreement between ranks while a save is under way, and nothing otherwise.
    ///
    /// # Errors
    /// What made the save fail, on every rank in the same call.
    pub fn poll(&mut self) -> Result<Option<Saved>, CheckpointError> {
        let Some(UnderWay { step, outcome }) = &self.under_way else { return Ok(None) };
        let tag = OpTag::new(*step, Phase::Checkpoint, "save: poll");
        let done = agree(&*self.control, &tag, "asking whether the checkpoint is saved", Ok(outcome.is_ready()))?;
        if done.into_iter().all(|done| done) { self.finish() } else { Ok(None) }
    }

    /// Waits for the save under way, and returns what it saved; `None` where there is none.
    ///
    /// # Errors
    /// What made the save fail, on every rank.
    pub fn finish(&mut self) -> Result<Option<Saved>, CheckpointError> {
        match self.under_way.take() {
            Some(UnderWay { outcome, .. }) => outcome.wait()?.map(Some),
            None => Ok(None),
        }
    }
}

/// Of two threads that want one processor, the one that computes at the usual priority gets 28 times as much of it as one
/// of this niceness. It is not the highest, so that a save comes to its end beside whatever training.
#[cfg(target_os = "linux")]
const NICENESS: i32 = 15;

/// Lowers the priority of this thread. Where that is refused the save is only more in the way.
fn give_way() {
    // On Linux the call is about a thread, elsewhere about the process.
    #[cfg(target_os = "linux")]
    let _ = rustix::process::setpriority_process(None, NICENESS);
}
