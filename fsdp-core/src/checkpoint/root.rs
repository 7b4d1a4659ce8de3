//! A root directory: its step directories, the `latest` pointer, what a killed run left, and what retention removes.
//!
//! ```text
//! root/
//!   latest                    the name of the newest step directory
//!   step-100/                 a checkpoint
//!     manifest.json           written last
//!     rank-00000.safetensors  what rank 0 wrote
//!     pinned                  optional, and may be empty: retention leaves the directory alone
//!   .saving-step-200/         under way, or left by a killed run
//!   .removing-step-50/        the same
//! ```

use std::cmp::Reverse;
use std::fs;
use std::io;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use super::CheckpointError;
use super::disk::{ASIDE, create_dir, exchange, remove_dir, rename, sync_dir, write_atomic};

const LATEST_FILE: &str = "latest";
const STEP: &str = "step-";
const SAVING: &str = ".saving-";
const REMOVING: &str = ".removing-";

/// Name of the file that pins a checkpoint.
pub(super) const PINNED_FILE: &str = "pinned";

/// A directory that holds the checkpoints of one run.
#[derive(Clone, Debug)]
pub(super) struct Root(PathBuf);

impl Root {
    pub(super) fn new(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    pub(super) fn step_dir(&self, step: u64) -> PathBuf {
        self.0.join(format!("{STEP}{step}"))
    }

    pub(super) fn saving_dir(&self, step: u64) -> PathBuf {
        self.0.join(format!("{SAVING}{STEP}{step}"))
    }

    /// The steps that have a directory, newest first. None where the root does not exist.
    pub(super) fn steps(&self) -> Result<Vec<u64>, CheckpointError> {
        let step = |name: &str| name.strip_prefix(STEP)?.parse().ok().filter(|step| name == format!("{STEP}{step}"));
        let mut steps: Vec<u64> = self.names()?.iter().filter_map(|name| step(name)).collect();
        steps.sort_unstable_by_key(|&step| Reverse(step));
        Ok(steps)
    }

    /// The steps in the order in which loading tries them: what `latest` names, then older ones, and last those that are
    /// newer, which a run that went back to an older step has left behind.
    pub(super) fn candidates(&self) -> Result<Vec<u64>, CheckpointError> {
        self.put_back()?;
        let mut steps = self.steps()?;
        if let Some(latest) = self.latest() {
            steps.sort_by_key(|&step| step > latest);
        }
        Ok(steps)
    }

    /// The step that the pointer names; `None` where there is no pointer, or it cannot be read.
    fn latest(&self) -> Option<u64> {
        let name = fs::read_to_string(self.0.join(LATEST_FILE)).ok()?;
        name.trim_end().strip_prefix(STEP)?.parse().ok()
    }

    /// Puts back checkpoints that were moved aside to make way for a new one of their step, by a run that was killed before
    /// the new one was there. See [`exchange`].
    fn put_back(&self) -> Result<(), CheckpointError> {
        let names = if self.0.exists() { self.names()? } else { Vec::new() };
        for name in names {
            let step =
                name.strip_prefix(SAVING).and_then(|rest| rest.strip_prefix(STEP)?.strip_suffix(ASIDE)?.parse().ok());
            let Some(dir) = step.map(|step| self.step_dir(step)).filter(|dir| !dir.exists()) else { continue };
            rename(&self.0.join(&name), &dir)?;
        }
        Ok(())
    }

    /// Creates the root, removes what killed runs have left, and makes an empty directory to save `step` in.
    pub(super) fn begin(&self, step: u64) -> Result<(), CheckpointError> {
        create_dir(&self.0)?;
        self.put_back()?;
        for name in self.names()?.iter().filter(|name| name.starts_with(SAVING) || name.starts_with(REMOVING)) {
            remove_dir(&self.0.join(name))?;
        }
        create_dir(&self.saving_dir(step))
    }

    /// Makes a complete directory the checkpoint of `step`, in place of one that is there. See [Note: Commit of a checkpoint].
    pub(super) fn commit(&self, step: u64) -> Result<(), CheckpointError> {
        let (new, dir) = (self.saving_dir(step), self.step_dir(step));
        sync_dir(&new)?;
        if dir.exists() {
            exchange(&new, &dir)?;
            remove_dir(&new)?;
        } else {
            rename(&new, &dir)?;
        }
        sync_dir(&self.0)?;
        write_atomic(&self.0.join(LATEST_FILE), format!("{STEP}{step}\n").as_bytes())?;
        sync_dir(&self.0)
    }

    /// Removes what was written for a step that failed. An error of it would hide the one that matters.
    pub(super) fn discard(&self, step: u64) {
        let _ = fs::remove_dir_all(self.saving_dir(step));
    }

    /// Keeps the newest `keep_last` checkpoints up to `saved`, which is among them, and those that are pinned. Returns
    /// what was removed, and what could not be. Newer steps belong to a run that was abandoned; they are left alone.
    pub(super) fn retain(&self, saved: u64, keep_last: NonZeroUsize) -> (Vec<PathBuf>, Vec<CheckpointError>) {
        let steps = match self.steps() {
            Ok(steps) => steps,
            Err(error) => return (Vec::new(), vec![error]),
        };
        let up_to_saved = steps.into_iter().filter(|&step| step <= saved);
        let old = up_to_saved.filter(|&step| !self.step_dir(step).join(PINNED_FILE).exists()).skip(keep_last.get());
        let (mut removed, mut failed) = (Vec::new(), Vec::new());
        for step in old {
            match self.remove(step) {
                Ok(()) => removed.push(self.step_dir(step)),
                Err(error) => failed.push(error),
            }
        }
        (removed, failed)
    }

    /// Renames first, so that a kill in between leaves no checkpoint with missing files.
    fn remove(&self, step: u64) -> Result<(), CheckpointError> {
        let dir = self.0.join(format!("{REMOVING}{STEP}{step}"));
        rename(&self.step_dir(step), &dir)?;
        remove_dir(&dir)
    }

    /// Names in the root, of whatever kind; names that are no text are nobody's business here.
    fn names(&self) -> Result<Vec<String>, CheckpointError> {
        let list = || fs::read_dir(&self.0)?.map(|entry| Ok(entry?.file_name())).collect::<io::Result<Vec<_>>>();
        match list() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            names => {
                let names = names.map_err(CheckpointError::io("list", &self.0))?;
                Ok(names.into_iter().filter_map(|name| name.into_string().ok()).collect())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root_with(steps: &[u64]) -> (tempfile::TempDir, Root) {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::new(dir.path());
        for &step in steps {
            root.begin(step).unwrap();
            root.commit(step).unwrap();
        }
        (dir, root)
    }

    #[test]
    fn candidates_begin_with_latest_then_older_then_newer() {
        let (_dir, root) = root_with(&[30, 9, 100, 20]);
        assert_eq!(root.steps().unwrap(), [100, 30, 20, 9]);
        assert_eq!(root.candidates().unwrap(), [20, 9, 100, 30]);
        fs::write(root.path().join(LATEST_FILE), "step-").unwrap();
        assert_eq!(root.candidates().unwrap(), [100, 30, 20, 9], "a pointer that names nothing is ignored");
    }

    #[test]
    fn other_names_in_the_root_are_no_checkpoints() {
        let (dir, root) = root_with(&[1]);
        for name in ["step-", "step-+2", "step-03", "step-x", ".saving-step-4", "best"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        assert_eq!(root.steps().unwrap(), [1]);
        assert_eq!(Root::new(dir.path().join("absent")).steps().unwrap(), [0; 0]);
    }

    #[test]
    fn retention_keeps_the_last_the_pinned_and_what_is_newer() {
        let (dir, root) = root_with(&[1, 2, 3, 4, 90, 5]);
        fs::write(dir.path().join("step-2").join(PINNED_FILE), "").unwrap();
        let (removed, failed) = root.retain(5, NonZeroUsize::new(2).unwrap());
        assert_eq!(root.steps().unwrap(), [90, 5, 4, 2]);
        assert_eq!(removed, [dir.path().join("step-3"), dir.path().join("step-1")]);
        assert!(failed.is_empty());
    }

    #[test]
    fn a_checkpoint_that_was_moved_aside_and_not_replaced_is_put_back() {
        let (dir, root) = root_with(&[1, 3]);
        for step in [2, 3] {
            fs::create_dir_all(dir.path().join(format!(".saving-step-{step}.aside/of-{step}"))).unwrap();
        }
        assert_eq!(root.candidates().unwrap(), [3, 2, 1]);
        root.begin(2).unwrap();
        assert!(root.step_dir(2).join("of-2").exists());
        assert!(!dir.path().join(".saving-step-3.aside").exists(), "step 3 was replaced");
    }

    #[test]
    fn beginning_removes_what_a_killed_run_has_left() {
        let (dir, root) = root_with(&[1]);
        fs::create_dir_all(dir.path().join(".saving-step-2/deep")).unwrap();
        fs::create_dir_all(dir.path().join(".removing-step-0")).unwrap();
        root.begin(2).unwrap();
        assert_eq!(fs::read_dir(root.saving_dir(2)).unwrap().count(), 0);
        assert!(!dir.path().join(".removing-step-0").exists());
    }

    #[test]
    fn a_step_that_is_saved_again_is_replaced() {
        let (dir, root) = root_with(&[1]);
        fs::write(dir.path().join("step-1/old"), "").unwrap();
        root.begin(1).unwrap();
        fs::write(root.saving_dir(1).join("new"), "").unwrap();
        root.commit(1).unwrap();
        let names: Vec<_> = fs::read_dir(dir.path().join("step-1")).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names, ["new"]);
        assert!(!root.saving_dir(1).exists());
    }
}
