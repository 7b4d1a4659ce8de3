//! What a checkpoint asks of a file system: durable files, atomic renames, free space, checksums.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3Default;

use super::CheckpointError;

/// How much is hashed and written, or read, at a time: fits the cache.
const CHUNK_BYTES: usize = 1 << 20;

/// How much is written at a time past the page cache: what is copied for it stays in the processor's own cache, so that
/// whoever computes meanwhile keeps the bandwidth of the memory. Larger writes end sooner, and are more in the way.
const DIRECT_BYTES: usize = 1 << 20;

/// How much is copied for a direct write and hashed at a time: what was copied is still near when it is hashed, so that
/// memory is read once.
const COPY_BYTES: usize = 64 << 10;

/// What direct writes must be a multiple of, in memory, in the file and in size: the pages of any disk in use.
const ALIGNMENT: usize = 4096;

/// XXH3 with 64 bits over a file: finds damage, not malice. As text, 16 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Checksum(u64);

impl Checksum {
    pub(super) fn of(bytes: &[u8]) -> Self {
        Self(xxhash_rust::xxh3::xxh3_64(bytes))
    }

    /// Reads the whole file, a chunk at a time.
    pub(super) fn of_file(path: &Path) -> Result<Self, CheckpointError> {
        let mut file = File::open(path).map_err(CheckpointError::io("open", path))?;
        let mut hasher = Xxh3Default::new();
        let mut chunk = vec![0; CHUNK_BYTES];
        loop {
            match file.read(&mut chunk) {
                Ok(0) => return Ok(Self(hasher.digest())),
                Ok(num_bytes) => hasher.update(&chunk[..num_bytes]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(CheckpointError::io("read", path)(error)),
            }
        }
    }
}

impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl From<Checksum> for String {
    fn from(checksum: Checksum) -> String {
        checksum.to_string()
    }
}

impl TryFrom<String> for Checksum {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl FromStr for Checksum {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_hex = text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let value = u64::from_str_radix(text, 16).ok().filter(|_| is_hex);
        value.map(Self).ok_or_else(|| format!("`{text}` is no checksum of 16 hexadecimal digits"))
    }
}

/// How a file is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Via {
    /// Through the page cache: as fast as the disk is, since the system keeps it busy; costs processors for its copies.
    Cache,
    /// Past it, where the file system can: saves the processor time of those copies, for when others compute meanwhile.
    /// Slower on disks that want many requests at once.
    Direct,
}

/// A new file that is hashed while it is written. What is written before [`NewFile::finish`] may be lost in a crash.
pub(super) struct NewFile<'a> {
    path: &'a Path,
    file: File,
    hasher: Xxh3Default,
    num_bytes: u64,
    /// What waits for a direct write; `None` where writes go through the cache.
    waiting: Option<Waiting>,
}

/// The first `len` bytes from `start`, an aligned address.
struct Waiting {
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl<'a> NewFile<'a> {
    pub(super) fn create(path: &'a Path, via: Via) -> Result<Self, CheckpointError> {
        let opened = match via {
            Via::Direct => open_direct(path),
            Via::Cache => None,
        };
        let waiting = opened.as_ref().map(|_| {
            let memory = vec![0; DIRECT_BYTES + ALIGNMENT];
            let start = memory.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
            Waiting { memory, start, len: 0 }
        });
        let file = opened.map_or_else(|| File::create_new(path), Ok).map_err(CheckpointError::io("create", path))?;
        Ok(Self { path, file, hasher: Xxh3Default::new(), num_bytes: 0, waiting })
    }

    pub(super) fn write(&mut self, mut bytes: &[u8]) -> Result<(), CheckpointError> {
        while !bytes.is_empty() {
            let room = self.waiting.as_ref().map_or(CHUNK_BYTES, |waiting| COPY_BYTES.min(DIRECT_BYTES - waiting.len));
            let (now, later) = bytes.split_at(bytes.len().min(room));
            bytes = later;
            match &mut self.waiting {
                Some(waiting) => {
                    let at = waiting.start + waiting.len;
                    let copy = &mut waiting.memory[at..at + now.len()];
                    copy.copy_from_slice(now);
                    self.hasher.update(copy);
                    waiting.len += now.len();
                    if waiting.len == DIRECT_BYTES {
                        self.write_waiting()?;
                    }
                }
                None => {
                    self.hasher.update(now);
                    self.file.write_all_at(now, self.num_bytes).map_err(CheckpointError::io("write", self.path))?;
                    self.num_bytes += now.len() as u64;
                }
            }
        }
        Ok(())
    }

    /// Writes what waits, with zeros up to an aligned size.
    fn write_waiting(&mut self) -> Result<(), CheckpointError> {
        let Some(Waiting { memory, start, len }) = &mut self.waiting else { return Ok(()) };
        let padded = len.next_multiple_of(ALIGNMENT);
        memory[*start + *len..*start + padded].fill(0);
        let chunk = &memory[*start..*start + padded];
        let mut written = self.file.write_all_at(chunk, self.num_bytes);
        if written.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::InvalidInput) {
            // The disk asks for more than was known when the file was made: go through the page cache.
            written = rustix::fs::fcntl_setfl(&self.file, rustix::fs::OFlags::empty()).map_err(io::Error::from);
            written = written.and_then(|()| self.file.write_all_at(chunk, self.num_bytes));
        }
        written.map_err(CheckpointError::io("write", self.path))?;
        self.num_bytes += *len as u64;
        *len = 0;
        Ok(())
    }

    /// Returns when all is on the disk: the size in bytes, and the checksum.
    pub(super) fn finish(mut self) -> Result<(u64, Checksum), CheckpointError> {
        self.write_waiting()?;
        self.file.set_len(self.num_bytes).map_err(CheckpointError::io("cut the padding of", self.path))?;
        self.file.sync_all().map_err(CheckpointError::io("flush", self.path))?;
        Ok((self.num_bytes, Checksum(self.hasher.digest())))
    }
}

/// A new file past the page cache; `None` where the system has no such thing, or fails, which then shows again.
fn open_direct(path: &Path) -> Option<File> {
    #[cfg(target_os = "linux")]
    {
        use std::os::unix::fs::OpenOptionsExt;
        let flag = rustix::fs::OFlags::DIRECT.bits() as i32;
        let opened = File::options().write(true).create_new(true).custom_flags(flag).open(path);
        if opened.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::InvalidInput) {
            // Some file systems create the file before they refuse the flag.
            let _ = fs::remove_file(path);
        }
        opened.ok()
    }
    #[cfg(not(target_os = "linux"))]
    None
}

/// Makes the names in a directory durable.
pub(super) fn sync_dir(dir: &Path) -> Result<(), CheckpointError> {
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(CheckpointError::io("flush", dir))
}

pub(super) fn create_dir(dir: &Path) -> Result<(), CheckpointError> {
    fs::create_dir_all(dir).map_err(CheckpointError::io("create", dir))
}

pub(super) fn rename(from: &Path, to: &Path) -> Result<(), CheckpointError> {
    fs::rename(from, to).map_err(CheckpointError::io("rename", from))
}

pub(super) fn remove_dir(dir: &Path) -> Result<(), CheckpointError> {
    fs::remove_dir_all(dir).map_err(CheckpointError::io("remove", dir))
}

/// What follows the name of a directory that makes way for another.
pub(super) const ASIDE: &str = ".aside";

/// Puts the directory `new` where `old` is, and the other way round, in one step where the system can.
pub(super) fn exchange(new: &Path, old: &Path) -> Result<(), CheckpointError> {
    #[cfg(target_os = "linux")]
    {
        use rustix::fs::{CWD, RenameFlags, renameat_with};
        if renameat_with(CWD, new, CWD, old, RenameFlags::EXCHANGE).is_ok() {
            return Ok(());
        }
    }
    let mut aside = new.as_os_str().to_owned();
    aside.push(ASIDE);
    let aside = PathBuf::from(aside);
    rename(old, &aside)?;
    rename(new, old)?;
    rename(&aside, new)
}

/// Bytes that the file system of `dir` would give to this user.
pub(super) fn free_bytes(dir: &Path) -> Result<u64, CheckpointError> {
    let stat =
        rustix::fs::statvfs(dir).map_err(|errno| CheckpointError::io("ask for free space in", dir)(errno.into()))?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Writes a small file so that it is there in whole or not at all.
pub(super) fn write_atomic(path: &Path, bytes: &[u8]) -> Result<(), CheckpointError> {
    let temporary = path.with_extension("new");
    // Left by a run that was killed here.
    let _ = fs::remove_file(&temporary);
    let mut file = NewFile::create(&temporary, Via::Cache)?;
    file.write(bytes)?;
    file.finish()?;
    rename(&temporary, path)
}
