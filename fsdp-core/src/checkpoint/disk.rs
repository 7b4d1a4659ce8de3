//! What a checkpoint asks of a file system: durable files, atomic renames, free space, checksums.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
#[cfg(target_os = "linux")]
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3Default;

use super::CheckpointError;

/// How much is written at a time: enough to keep a disk busy, little beside the state.
const CHUNK_BYTES: usize = 8 << 20;

/// How much is read at a time for a checksum: fits the cache.
const HASHED_BYTES: usize = 1 << 20;

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
        let mut chunk = vec![0; HASHED_BYTES];
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

/// A new file that is hashed while it is written. What is written before [`NewFile::finish`] may be lost in a crash.
///
/// Past the page cache, where the file system can: state is written once and not read soon, and the copies that the system
/// would make and write later cost a training run more than the writing itself.
pub(super) struct NewFile<'a> {
    path: &'a Path,
    file: File,
    hasher: Xxh3Default,
    num_bytes: u64,
    /// What waits until a chunk is full, from `start`, an aligned address.
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl<'a> NewFile<'a> {
    pub(super) fn create(path: &'a Path) -> Result<Self, CheckpointError> {
        let mut options = File::options();
        options.write(true).create_new(true);
        #[cfg(target_os = "linux")]
        let direct = options.clone().custom_flags(rustix::fs::OFlags::DIRECT.bits() as i32).open(path);
        #[cfg(not(target_os = "linux"))]
        let direct: io::Result<File> = Err(io::ErrorKind::InvalidInput.into());
        let file = match direct {
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                // Some systems create the file before they refuse the flag.
                let _ = fs::remove_file(path);
                options.open(path)
            }
            file => file,
        };
        let file = file.map_err(CheckpointError::io("create", path))?;
        let memory = vec![0; CHUNK_BYTES + ALIGNMENT];
        let start = memory.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
        Ok(Self { path, file, hasher: Xxh3Default::new(), num_bytes: 0, memory, start, len: 0 })
    }

    pub(super) fn write(&mut self, mut bytes: &[u8]) -> Result<(), CheckpointError> {
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(CHUNK_BYTES - self.len));
            let at = self.start + self.len;
            self.memory[at..at + now.len()].copy_from_slice(now);
            self.len += now.len();
            bytes = later;
            if self.len == CHUNK_BYTES {
                self.write_chunk()?;
            }
        }
        Ok(())
    }

    /// Writes what waits, with zeros up to an aligned size.
    fn write_chunk(&mut self) -> Result<(), CheckpointError> {
        let chunk = &mut self.memory[self.start..];
        self.hasher.update(&chunk[..self.len]);
        let padded = self.len.next_multiple_of(ALIGNMENT);
        chunk[self.len..padded].fill(0);
        let mut written = self.file.write_all_at(&chunk[..padded], self.num_bytes);
        if written.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::InvalidInput) {
            // The disk asks for more than was known when the file was made: go through the page cache.
            written = rustix::fs::fcntl_setfl(&self.file, rustix::fs::OFlags::empty()).map_err(io::Error::from);
            written = written.and_then(|()| self.file.write_all_at(&chunk[..padded], self.num_bytes));
        }
        written.map_err(CheckpointError::io("write", self.path))?;
        self.num_bytes += self.len as u64;
        self.len = 0;
        Ok(())
    }

    /// Returns when all is on the disk: the size in bytes, and the checksum.
    pub(super) fn finish(mut self) -> Result<(u64, Checksum), CheckpointError> {
        self.write_chunk()?;
        self.file.set_len(self.num_bytes).map_err(CheckpointError::io("cut the padding of", self.path))?;
        self.file.sync_all().map_err(CheckpointError::io("flush", self.path))?;
        Ok((self.num_bytes, Checksum(self.hasher.digest())))
    }
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

/// Puts the directory `new` where `old` is, and the other way round, in one step where the system can.
pub(super) fn exchange(new: &Path, old: &Path) -> Result<(), CheckpointError> {
    #[cfg(target_os = "linux")]
    {
        use rustix::fs::{CWD, RenameFlags, renameat_with};
        if renameat_with(CWD, new, CWD, old, RenameFlags::EXCHANGE).is_ok() {
            return Ok(());
        }
    }
    let aside = new.with_extension("aside");
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
    let mut file = NewFile::create(&temporary)?;
    file.write(bytes)?;
    file.finish()?;
    rename(&temporary, path)
}
