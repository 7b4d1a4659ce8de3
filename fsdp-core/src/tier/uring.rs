//! Blocks through io_uring: the kernel reads and writes the buffers while no thread waits.
//!
//! Invariants, on which every `unsafe` here rests:
//! 1. an operation that the kernel may still touch lies in `in_flight`: its buffer is neither moved, read, written nor freed
//!    and its file not closed until the kernel has reported its end;
//! 2. what is in flight when the queue breaks or is dropped and cannot be waited for is leaked, not freed.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd;

use io_uring::{IoUring, Probe, opcode, types};

use super::engine::{Direction, Done, Engine, Op};

/// A queue of the kernel, with what is in it.
pub(super) struct Uring {
    ring: IoUring,
    /// By the number that the kernel reports an end with.
    in_flight: Vec<Option<Op>>,
    /// Refused before the kernel saw them.
    refused: VecDeque<Done>,
}

impl Uring {
    /// A queue for `depth` blocks at a time.
    ///
    /// # Errors
    /// If the kernel has no io_uring, or does not let this process use it.
    pub(super) fn new(depth: usize) -> io::Result<Self> {
        let entries = u32::try_from(depth.max(1)).map_err(io::Error::other)?;
        let ring = IoUring::new(entries)?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        if !(probe.is_supported(opcode::Read::CODE) && probe.is_supported(opcode::Write::CODE)) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        Ok(Self { ring, in_flight: (0..depth.max(1)).map(|_| None).collect(), refused: VecDeque::new() })
    }

    fn refuse(&mut self, index: usize, reason: &str) {
        if let Some(op) = self.in_flight[index].take() {
            self.refused.push_back((op, Err(io::Error::other(reason.to_owned()))));
        }
    }
}

impl Engine for Uring {
    fn submit(&mut self, op: Op) {
        let Some(index) = self.in_flight.iter().position(Option::is_none) else {
            self.refused.push_back((op, Err(io::Error::other("more blocks than the queue was made for"))));
            return;
        };
        let op = self.in_flight[index].insert(op);
        let fd = types::Fd(op.file.as_raw_fd());
        let part = &mut op.chunk.bytes_mut()[op.part.clone()];
        let Ok(len) = u32::try_from(part.len()) else {
            return self.refuse(index, "a block of 4 GiB or more");
        };
        let entry = match op.direction {
            Direction::Read => opcode::Read::new(fd, part.as_mut_ptr(), len).offset(op.offset).build(),
            Direction::Write => opcode::Write::new(fd, part.as_ptr(), len).offset(op.offset).build(),
        };
        // SAFETY: The pointer and the length are those of a part of the operation's own buffer, and the descriptor is
        // that of a file that it keeps open. Both stay as they are until its end is reported (invariant 1).
        let pushed = unsafe { self.ring.submission().push(&entry.user_data(index as u64)) };
        if pushed.is_err() {
            return self.refuse(index, "the queue of the kernel is full");
        }
        // What the kernel does not take now, it takes when it is waited for.
        let _ = self.ring.submit();
    }

    fn wait(&mut self) -> io::Result<Done> {
        if let Some(done) = self.refused.pop_front() {
            return Ok(done);
        }
        loop {
            if let Some(entry) = self.ring.completion().next() {
                let op =
                    usize::try_from(entry.user_data()).ok().and_then(|index| self.in_flight.get_mut(index)?.take());
                let Some(op) = op else { return Err(io::Error::other("the kernel reported an unknown operation")) };
                let result = usize::try_from(entry.result());
                return Ok((op, result.map_err(|_| io::Error::from_raw_os_error(-entry.result()))));
            }
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if is_passing(&error) => {}
                Err(error) => return Err(error),
            }
        }
    }
}

/// Whether the same call may succeed later.
fn is_passing(error: &io::Error) -> bool {
    use io::ErrorKind::{Interrupted, ResourceBusy, WouldBlock};
    matches!(error.kind(), Interrupted | WouldBlock | ResourceBusy)
}

impl Drop for Uring {
    fn drop(&mut self) {
        self.refused.clear();
        while self.in_flight.iter().any(Option::is_some) {
            if self.wait().is_err() {
                // Invariant 2: the kernel may still write to these.
                self.in_flight.drain(..).flatten().for_each(std::mem::forget);
            }
        }
    }
}
