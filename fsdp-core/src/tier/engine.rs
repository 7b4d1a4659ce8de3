//! Moving blocks between buffers and a file: what an engine does, and the one that works everywhere, threads.

use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use super::chunk::Chunk;

/// How blocks get to the disk and back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TierEngine {
    /// The kernel's queues: no thread waits for a block.
    IoUring,
    /// Positioned reads and writes, each on a thread.
    Threads,
}

impl fmt::Display for TierEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TierEngine::IoUring => "io_uring",
            TierEngine::Threads => "positioned I/O on threads",
        })
    }
}

/// Which way a block goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Read,
    Write,
}

impl Direction {
    pub(super) fn verb(self) -> &'static str {
        match self {
            Direction::Read => "read",
            Direction::Write => "write",
        }
    }
}

/// One block under way. It owns its buffer, so that nothing else can touch what a disk writes to.
#[derive(Debug)]
pub(super) struct Op {
    pub(super) direction: Direction,
    pub(super) file: Arc<File>,
    /// Where in the file the part begins.
    pub(super) offset: u64,
    pub(super) chunk: Chunk,
    /// Past the page cache, which the disk may refuse.
    pub(super) direct: bool,
    /// What is still to be moved, of the buffer.
    pub(super) part: Range<usize>,
    /// The job it belongs to, and its number there.
    pub(super) job: u64,
    pub(super) block: usize,
}

/// A block with how many bytes of its part have moved.
pub(super) type Done = (Op, io::Result<usize>);

/// Moves blocks, in any order.
pub(super) trait Engine: Send {
    /// Starts to move a block.
    fn submit(&mut self, op: Op);

    /// Sleeps until a block has been moved, or the system has refused to. Called only while one is under way.
    ///
    /// # Errors
    /// If the engine itself is broken; its blocks are lost then.
    fn wait(&mut self) -> io::Result<Done>;
}

/// Blocks at a time where each takes a thread: as many as keep a disk busy.
pub(super) const NUM_THREADS: usize = 8;

/// Positioned reads and writes on threads, which end with it.
pub(super) struct Threads {
    ops: Sender<Op>,
    done: Receiver<Done>,
}

impl Threads {
    pub(super) fn new(num_threads: usize, name: &str) -> io::Result<Self> {
        let (ops, queue) = mpsc::channel::<Op>();
        let (sender, done) = mpsc::channel();
        let queue = Arc::new(Mutex::new(queue));
        for index in 0..num_threads.clamp(1, NUM_THREADS) {
            let (queue, sender) = (queue.clone(), sender.clone());
            thread::Builder::new().name(format!("{name}-{index}")).spawn(move || {
                loop {
                    let next = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
                    let Ok(mut op) = next else { return };
                    let result = transfer(&mut op);
                    if sender.send((op, result)).is_err() {
                        return;
                    }
                }
            })?;
        }
        Ok(Self { ops, done })
    }
}

impl Engine for Threads {
    fn submit(&mut self, op: Op) {
        // Without threads there is nobody to wait for either: `wait` then says so.
        let _ = self.ops.send(op);
    }

    fn wait(&mut self) -> io::Result<Done> {
        self.done.recv().map_err(|_| io::Error::other("the threads for reading and writing have ended"))
    }
}

fn transfer(op: &mut Op) -> io::Result<usize> {
    match op.direction {
        Direction::Read => op.file.read_at(&mut op.chunk.bytes_mut()[op.part.clone()], op.offset),
        Direction::Write => op.file.write_at(&op.chunk.bytes()[op.part.clone()], op.offset),
    }
}
