//! What a checkpoint asks of a file system: durable files, atomic renames, free space, checksums.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3Default;

use super::CheckpointError;

/// How much is hashed and written, or read, at a time: fits the cache, and is long enough for a disk.
pub(super) const CHUNK_BYTES: usize = 1 << 20;

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

/// A new file that is hashed while it is written. What is written before [`NewFile::finish`] may be lost in a crash.
pub(super) struct NewFile<'a> {
    path: &'a Path,
    file: File,
    hasher: Xxh3Default,
    num_bytes: u64,
}

impl<'a> NewFile<'a> {
    pub(super) fn create(path: &'a Path) -> Result<Self, CheckpointError> {
        let file = File::create_new(path).map_err(CheckpointError::io("create", path))?;
        Ok(Self { path, file, hasher: Xxh3Default::new(), num_bytes: 0 })
    }

    /// Asks for the room of the whole file, so that a full disk is known before anything is written. File systems that
    /// cannot promise room are taken as they are.
    #[cfg_attr(not(target_os = "linux"), allow(unused_variables))]
    pub(super) fn reserve(&mut self, num_bytes: u64) -> Result<(), CheckpointError> {
        #[cfg(target_os = "linux")]
        if num_bytes > 0 {
            use rustix::{fs, io::Errno};
            let promised = fs::fallocate(&self.file, fs::FallocateFlags::KEEP_SIZE, 0, num_bytes);
            if let Err(errno @ (Errno::NOSPC | Errno::DQUOT | Errno::FBIG)) = promised {
                return Err(CheckpointError::io("reserve room for", self.path)(errno.into()));
            }
        }
        Ok(())
    }

    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<(), CheckpointError> {
        for chunk in bytes.chunks(CHUNK_BYTES) {
            self.hasher.update(chunk);
            self.file.write_all(chunk).map_err(CheckpointError::io("write", self.path))?;
        }
        self.num_bytes += bytes.len() as u64;
        Ok(())
    }

    /// Returns when all is on the disk: the size in bytes, and the checksum.
    pub(super) fn finish(self) -> Result<(u64, Checksum), CheckpointError> {
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
