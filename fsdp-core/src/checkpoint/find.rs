//! Which checkpoint to load: the newest good one, the same on all ranks, and why newer ones were passed over.

use std::fmt;
use std::path::{Path, PathBuf};

use super::agree::agree;
use super::manifest::MANIFEST_FILE;
use super::root::Root;
use super::{Checkpoint, CheckpointError, Manifest};
use crate::{Communicator, OpTag, Phase};

/// How closely files are looked at before they are used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verify {
    /// The manifest's checksum, and the size of every file. Costs next to nothing; finds truncated and missing files.
    Sizes,
    /// Also the checksum of every file, which reads all of it once: finds any change. Ranks share the work.
    #[default]
    Checksums,
}

/// A checkpoint that was passed over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejected {
    /// Its directory.
    pub dir: PathBuf,
    /// Why.
    pub reason: String,
}

impl fmt::Display for Rejected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.dir.display(), self.reason)
    }
}

impl Checkpoint {
    /// Opens the checkpoint in the step directory `dir`, and looks at its files. For one process alone; all ranks of a
    /// run use [`Checkpoint::open_on`].
    ///
    /// # Errors
    /// If there is none, or it is damaged as far as `verify` looks.
    pub fn open(dir: impl AsRef<Path>, verify: Verify) -> Result<Self, CheckpointError> {
        Self::open_share(dir.as_ref(), verify, 0, 1)
    }

    /// Opens the newest good checkpoint under `root`. For one process alone; all ranks of a run use
    /// [`Checkpoint::newest_on`].
    ///
    /// # Errors
    /// [`CheckpointError::NothingGood`] with the reasons, if there is none.
    pub fn newest(root: impl AsRef<Path>, verify: Verify) -> Result<Self, CheckpointError> {
        let root = Root::new(root.as_ref());
        let candidates = root.candidates()?;
        first_good(&root, candidates, |dir| Self::open(dir, verify))
    }

    /// Opens the checkpoint in the step directory `dir` on all ranks.
    ///
    /// Collective. Ranks share the work of reading checksums.
    ///
    /// # Errors
    /// [`CheckpointError::RankFailed`] on all ranks with the first that finds it damaged; [`CheckpointError::Disagree`]
    /// where a rank finds another checkpoint there.
    pub fn open_on(comm: &dyn Communicator, dir: impl AsRef<Path>, verify: Verify) -> Result<Self, CheckpointError> {
        let (opened, told) = match Self::open_share(dir.as_ref(), verify, comm.rank(), comm.world_size()) {
            Ok(checkpoint) => {
                let identity = checkpoint.identity();
                (Some(checkpoint), Ok(identity))
            }
            Err(error) => (None, Err(error)),
        };
        let tag = OpTag::new(0, Phase::Checkpoint, "load: open");
        let identities = agree(comm, &tag, "opening the checkpoint", told)?;
        if let Some(rank) = identities.iter().position(|identity| *identity != identities[0]) {
            let what = format!("the content of {}", dir.as_ref().join(MANIFEST_FILE).display());
            let [first, got] = [0, rank].map(|rank| format!("checksum {}", identities[rank]));
            return Err(CheckpointError::Disagree { what, first_rank: 0, first, rank, got });
        }
        Ok(opened.expect("a rank that could not open it has failed the agreement"))
    }

    /// Opens the newest checkpoint under `root` that is good on all ranks, and the same one on all of them. What was
    /// passed over, and why, is in [`Checkpoint::rejected`].
    ///
    /// Collective. Begins with what the `latest` pointer names, goes on to older ones, and last to newer ones, which a run
    /// that went back to an older step has left.
    ///
    /// # Errors
    /// [`CheckpointError::NothingGood`] on all ranks with the reasons, if there is none.
    pub fn newest_on(comm: &dyn Communicator, root: impl AsRef<Path>, verify: Verify) -> Result<Self, CheckpointError> {
        let root = Root::new(root.as_ref());
        let listed = if comm.rank() == 0 { root.candidates() } else { Ok(Vec::new()) };
        let tag = OpTag::new(0, Phase::Checkpoint, "load: list");
        let candidates = agree(comm, &tag, "looking for checkpoints", listed)?.swap_remove(0);
        first_good(&root, candidates, |dir| Self::open_on(comm, dir, verify))
    }

    /// Looks at the manifest and all sizes, and where checksums are asked for, at every `num_shares`-th file.
    fn open_share(dir: &Path, verify: Verify, share: usize, num_shares: usize) -> Result<Self, CheckpointError> {
        let manifest = Manifest::read(dir)?;
        manifest.files.iter().try_for_each(|file| file.check_size(dir))?;
        if verify == Verify::Checksums {
            manifest.files.iter().skip(share).step_by(num_shares).try_for_each(|file| file.check_content(dir))?;
        }
        Ok(Self::of_manifest(dir.to_owned(), manifest))
    }
}

/// Tries the steps in their order. All ranks go through the same list, and fail at the same places.
fn first_good(
    root: &Root,
    candidates: Vec<u64>,
    open: impl Fn(&Path) -> Result<Checkpoint, CheckpointError>,
) -> Result<Checkpoint, CheckpointError> {
    let mut rejected = Vec::new();
    for dir in candidates.into_iter().map(|step| root.step_dir(step)) {
        match open(&dir) {
            Ok(mut checkpoint) => {
                checkpoint.rejected = rejected;
                return Ok(checkpoint);
            }
            Err(error @ CheckpointError::Comm(_)) => return Err(error),
            Err(error) => {
                tracing::warn!("passing over a checkpoint: {error}");
                rejected.push(Rejected { dir, reason: error.to_string() });
            }
        }
    }
    Err(CheckpointError::NothingGood { root: root.path().to_owned(), rejected })
}
