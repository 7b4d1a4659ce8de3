//! What can go wrong with a tier, in which file, where in it, and what to do about it.

use std::io;
use std::path::PathBuf;

use crate::human_bytes;

/// Why state could not be put into a tier, or not be had back from it.
#[derive(Debug, thiserror::Error)]
pub enum TierError {
    /// The directory or its file could not be made.
    #[error(
        "cannot {action} {}: {source}; point `nvme_path` under [offload] to a directory on a local disk that this user \
         may write to", path.display()
    )]
    Unusable {
        /// What was tried, such as `create`.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Another run works in the directory.
    #[error(
        "{} is locked by another run; give each run an `nvme_path` of its own under [offload], or end the other run",
        path.display()
    )]
    InUse {
        /// The locked file.
        path: PathBuf,
    },
    /// The buffers hold less than two blocks.
    #[error(
        "{buffer_bytes} bytes of buffers for the disk are too few: reading one block of {block_bytes} bytes while another \
         is written takes {needed_bytes}; set `nvme_buffer_bytes` under [offload] to at least that"
    )]
    Buffers {
        /// What was given.
        buffer_bytes: usize,
        /// Bytes of one block.
        block_bytes: usize,
        /// The least that works.
        needed_bytes: usize,
    },
    /// A block's size that direct transfers do not accept.
    #[error(
        "a block of {block_bytes} bytes does not fit the disk; set `nvme_block_bytes` under [offload] to a multiple of {alignment}"
    )]
    BlockSize {
        /// What was given.
        block_bytes: usize,
        /// What it must be a multiple of.
        alignment: usize,
    },
    /// The disk has no room.
    #[error(
        "{}: no room for {} at offset {offset}, {} are free; free space on that disk, point `nvme_path` under [offload] \
         to a larger one, or offload less", path.display(), human_bytes(*bytes), human_bytes(*free_bytes)
    )]
    Full {
        /// The file.
        path: PathBuf,
        /// Where in it.
        offset: u64,
        /// Bytes that were to be placed there.
        bytes: u64,
        /// Bytes that the file system would give.
        free_bytes: u64,
    },
    /// The file may not grow that far.
    #[error(
        "{}: the file may not grow by {} at offset {offset}: {source}; raise the limit on the size of files (`ulimit -f`), point \
         `nvme_path` under [offload] to a file system that has larger ones, or offload less", path.display(), human_bytes(*bytes)
    )]
    Limited {
        /// The file.
        path: PathBuf,
        /// Where in it.
        offset: u64,
        /// Bytes that were to be placed there.
        bytes: u64,
        /// What the system said.
        source: io::Error,
    },
    /// The file was removed while the run used it.
    #[error(
        "{} was removed while the run used it (at offset {offset}, {bytes} bytes); what it held is lost. Leave the \
         directory alone while a run uses it, and resume from the last checkpoint", path.display()
    )]
    Gone {
        /// The file.
        path: PathBuf,
        /// Where in it the transfer was.
        offset: u64,
        /// Its bytes.
        bytes: u64,
    },
    /// The file is shorter than what was written to it.
    #[error(
        "{} ends {missing_bytes} bytes too early: {bytes} were to be read at offset {offset}. Something cut the file; \
         leave it alone while a run uses it, and resume from the last checkpoint", path.display()
    )]
    ShortRead {
        /// The file.
        path: PathBuf,
        /// Where the block begins.
        offset: u64,
        /// Bytes of the block.
        bytes: u64,
        /// How many of them are not there.
        missing_bytes: u64,
    },
    /// What was read is not what was written.
    #[error(
        "{}: the {bytes} bytes at offset {offset} are damaged: their checksum is {found:016x}, and was {expected:016x} \
         when they were written. Check the disk (`smartctl -a`, the kernel's log), and resume from the last checkpoint",
        path.display()
    )]
    Corrupted {
        /// The file.
        path: PathBuf,
        /// Where the block begins.
        offset: u64,
        /// Bytes of the block.
        bytes: u64,
        /// The checksum when it was written.
        expected: u64,
        /// The checksum of what was read.
        found: u64,
    },
    /// The system refused a transfer.
    #[error(
        "cannot {action} {bytes} bytes at offset {offset} of {}: {source}; check the disk and the kernel's log, and \
         resume from the last checkpoint", path.display()
    )]
    Io {
        /// `read` or `write`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Where in it.
        offset: u64,
        /// How many bytes.
        bytes: u64,
        /// What the system said.
        source: io::Error,
    },
    /// A slot was read before anything was wholly written to it.
    #[error(
        "{}: nothing was wholly written at offset {offset} yet, so there is nothing to read; look for the write's own \
         error", path.display()
    )]
    NotWritten {
        /// The file.
        path: PathBuf,
        /// Where the slot begins.
        offset: u64,
    },
    /// More was to be written to a slot than it holds.
    #[error("{}: {bytes} bytes do not fit the slot of {slot_bytes} at offset {offset}; reserve a larger slot", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Where the slot begins.
        offset: u64,
        /// Bytes of the slot.
        slot_bytes: u64,
        /// Bytes to be written.
        bytes: u64,
    },
    /// A transfer did not end within the time limit.
    #[error(
        "the {action} at offset {offset} of {} did not end within {waited_s} s; check the disk, or raise `timeout_s`",
        path.display()
    )]
    TimedOut {
        /// `read` or `write`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Where in it.
        offset: u64,
        /// Seconds waited.
        waited_s: f64,
    },
    /// The tier is closed, or its thread has ended.
    #[error(
        "{} is closed, so offset {offset} cannot be reached: its run has ended, or an error has ended its thread. Use a model \
         only inside of its run", path.display()
    )]
    Ended {
        /// The file.
        path: PathBuf,
        /// Where in it.
        offset: u64,
    },
}
