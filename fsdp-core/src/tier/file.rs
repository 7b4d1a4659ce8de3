//! A rank's file in the run's directory: locked, cleaned at start and at exit. See [Note: A directory of its own].

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::TierError;

/// What the name of a rank's file ends with.
const SUFFIX: &str = ".tier";

/// How long a lock is waited for: the kernel ends the transfers of a process that was killed a moment after it.
const PATIENCE: Duration = Duration::from_secs(4);

/// How often it is asked for.
const PAUSE: Duration = Duration::from_millis(20);

/// A rank's locked file. Dropping it removes the file, and the directory if that was the last.
#[derive(Debug)]
pub(super) struct RankFile {
    pub(super) file: Arc<File>,
    pub(super) path: PathBuf,
    /// Reads and writes go past the page cache.
    direct: AtomicBool,
    removed: AtomicBool,
}

impl RankFile {
    /// Makes and locks the file. Rank 0 also removes what a killed run of more ranks has left.
    pub(super) fn create(dir: &Path, rank: usize, world_size: usize) -> Result<Self, TierError> {
        let path = dir.join(format!("rank-{rank}{SUFFIX}"));
        let unusable = |action, path: &Path| {
            let path = path.to_owned();
            move |source| TierError::Unusable { action, path, source }
        };
        let deadline = Instant::now() + PATIENCE;
        loop {
            fs::create_dir_all(dir).map_err(unusable("create", dir))?;
            let (file, direct) = match open(&path) {
                Ok(opened) => opened,
                // A rank of the run before has just removed the directory.
                Err(error) if error.kind() == io::ErrorKind::NotFound && Instant::now() < deadline => continue,
                Err(error) => return Err(unusable("create", &path)(error)),
            };
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => {
                    thread::sleep(PAUSE);
                    continue;
                }
                Err(TryLockError::WouldBlock) => return Err(TierError::InUse { path }),
                Err(TryLockError::Error(error)) => return Err(unusable("lock", &path)(error)),
            }
            // The one who held the lock may have removed the file in between.
            if is_linked(&file).map_err(unusable("look at", &path))? {
                file.set_len(0).map_err(unusable("empty", &path))?;
                if rank == 0 {
                    remove_stale(dir, world_size);
                }
                let (direct, removed) = (AtomicBool::new(direct), AtomicBool::new(false));
                return Ok(Self { file: Arc::new(file), path, direct, removed });
            }
        }
    }

    /// Makes room on the disk for `len` bytes at `offset`.
    pub(super) fn allocate(&self, offset: u64, len: u64) -> Result<(), TierError> {
        let failed = |source: io::Error| self.error("allocate", offset, len, source);
        // Some file systems take all there is before they find that it is not enough.
        if free_bytes(&self.path).is_some_and(|free_bytes| free_bytes < len) {
            return Err(failed(io::ErrorKind::StorageFull.into()));
        }
        #[cfg(target_os = "linux")]
        {
            use rustix::fs::{FallocateFlags, fallocate};
            match fallocate(&self.file, FallocateFlags::empty(), offset, len) {
                Ok(()) => return Ok(()),
                // Not every file system can; a write then finds the disk full.
                Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => {}
                Err(errno) => {
                    let error = failed(errno.into());
                    let _ = self.file.set_len(offset);
                    return Err(error);
                }
            }
        }
        self.file.set_len(offset + len).map_err(failed)
    }

    /// The error of a transfer that the system refused.
    pub(super) fn error(&self, action: &'static str, offset: u64, bytes: u64, source: io::Error) -> TierError {
        use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
        let path = self.path.clone();
        match source.kind() {
            FileTooLarge => TierError::Limited { path, offset, bytes, source },
            StorageFull | QuotaExceeded => {
                let free_bytes = free_bytes(&self.path).unwrap_or(0);
                TierError::Full { path, offset, bytes, free_bytes }
            }
            _ => TierError::Io { action, path, offset, bytes, source },
        }
    }

    /// Whether the file still has a name. Without one it still works, but what is in it ends with this process, and
    /// whoever removed it meant something.
    pub(super) fn is_there(&self) -> bool {
        is_linked(&self.file).unwrap_or(true)
    }

    pub(super) fn is_direct(&self) -> bool {
        self.direct.load(Ordering::Relaxed)
    }

    /// From now on through the page cache. Says so once for all ranks.
    pub(super) fn give_up_direct(&self) -> io::Result<()> {
        rustix::fs::fcntl_setfl(&self.file, rustix::fs::OFlags::empty())?;
        self.direct.store(false, Ordering::Relaxed);
        say_cached(&self.path);
        Ok(())
    }

    /// Removes the file, also while blocks of it are under way; and the directory, unless another rank has a file there.
    pub(super) fn remove(&self) {
        // Once only: the name may already be that of the next run's file.
        if self.removed.swap(true, Ordering::Relaxed) || !self.is_there() {
            return;
        }
        let _ = fs::remove_file(&self.path);
        if let Some(dir) = self.path.parent() {
            let _ = fs::remove_dir(dir);
        }
    }
}

impl Drop for RankFile {
    fn drop(&mut self) {
        self.remove();
    }
}

/// Opens past the page cache where the file system can.
fn open(path: &Path) -> io::Result<(File, bool)> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    #[cfg(target_os = "linux")]
    {
        use std::os::unix::fs::OpenOptionsExt;
        let direct = rustix::fs::OFlags::DIRECT.bits() as i32;
        match options.clone().custom_flags(direct).open(path) {
            Ok(file) => return Ok((file, true)),
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => say_cached(path),
            Err(error) => return Err(error),
        }
    }
    Ok((options.open(path)?, false))
}

fn say_cached(path: &Path) {
    static SAID: std::sync::Once = std::sync::Once::new();
    SAID.call_once(|| {
        tracing::warn!(
            "the file system of {} has no direct I/O: what is offloaded also fills the page cache",
            path.display()
        );
    });
}

fn is_linked(file: &File) -> io::Result<bool> {
    Ok(file.metadata()?.nlink() > 0)
}

/// Removes files of ranks from `first` on that nobody holds. What cannot be removed does no harm.
pub(super) fn remove_stale(dir: &Path, first: usize) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
        let rank = path.file_name().and_then(|name| name.to_str()).and_then(|name| {
            let number = name.strip_prefix("rank-")?.strip_suffix(SUFFIX)?;
            number.parse::<usize>().ok()
        });
        if rank.is_some_and(|rank| rank >= first)
            && let Ok(file) = File::open(&path)
            && is_free(&file)
        {
            let _ = fs::remove_file(&path);
        }
    }
}

/// Whether nobody holds the file, or will not any more in a moment.
fn is_free(file: &File) -> bool {
    let deadline = Instant::now() + PATIENCE;
    while file.try_lock().is_err() {
        if Instant::now() > deadline {
            return false;
        }
        thread::sleep(PAUSE);
    }
    true
}

/// Bytes that the file system would give to this user, if it says.
fn free_bytes(path: &Path) -> Option<u64> {
    let stat = rustix::fs::statvfs(path.parent()?).ok()?;
    Some(stat.f_bavail.saturating_mul(stat.f_frsize))
}
