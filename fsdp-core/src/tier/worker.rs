//! The thread of a tier: cuts transfers into blocks, keeps the disk busy with them, and checks what comes back.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvError, TryRecvError};
use std::time::Instant;

use bytes::Bytes;
use xxhash_rust::xxh3::xxh3_64;

use super::TierError;
use super::chunk::{Chunk, padded};
use super::engine::{Direction, Engine, Op};
use super::file::RankFile;
use super::transfer::{Outcome, Reply, Slot};

/// What a rank asks for.
#[derive(Debug)]
pub(super) enum Command {
    Write { slot: Slot, data: Bytes, reply: Reply<()> },
    Read { slot: Slot, reply: Reply<Bytes> },
}

impl Command {
    fn slot(&self) -> Slot {
        match self {
            Command::Write { slot, .. } | Command::Read { slot, .. } => *slot,
        }
    }
}

/// What has moved so far. Shared with the rank's thread.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) read_bytes: AtomicU64,
    pub(super) written_bytes: AtomicU64,
    /// Nanoseconds in which at least one block was under way.
    pub(super) busy_ns: AtomicU64,
    /// The owner wants no more transfers.
    pub(super) closing: AtomicBool,
}

/// What lies in a slot.
#[derive(Clone, Debug)]
struct Contents {
    len: usize,
    /// By block; empty where nothing is checked.
    checksums: Arc<[u64]>,
}

/// See the module's documentation.
pub(super) struct Worker {
    file: Arc<RankFile>,
    engine: Box<dyn Engine>,
    /// Buffers that no block is in.
    idle: Vec<Chunk>,
    block_bytes: usize,
    checks: bool,
    counters: Arc<Counters>,
    contents: HashMap<u64, Contents>,
    waiting: VecDeque<Command>,
    active: Vec<Job>,
    num_jobs: u64,
    num_in_flight: usize,
    busy_since: Option<Instant>,
}

/// A transfer that has begun.
struct Job {
    id: u64,
    slot: Slot,
    len: usize,
    kind: Kind,
    next_block: usize,
    in_flight: usize,
    failed: Option<TierError>,
    started: Instant,
}

enum Kind {
    Read { target: Vec<u8>, checksums: Arc<[u64]>, reply: Reply<Bytes> },
    Write { data: Bytes, checksums: Vec<u64>, reply: Reply<()> },
}

impl Job {
    fn direction(&self) -> Direction {
        match self.kind {
            Kind::Read { .. } => Direction::Read,
            Kind::Write { .. } => Direction::Write,
        }
    }

    fn wants_buffer(&self, block_bytes: usize) -> bool {
        self.failed.is_none() && self.next_block < self.len.div_ceil(block_bytes)
    }
}

impl Worker {
    pub(super) fn new(
        file: Arc<RankFile>,
        engine: Box<dyn Engine>,
        num_buffers: usize,
        block_bytes: usize,
        checks: bool,
        counters: Arc<Counters>,
    ) -> Self {
        Self {
            file,
            engine,
            idle: (0..num_buffers).map(|_| Chunk::new(block_bytes)).collect(),
            block_bytes,
            checks,
            counters,
            contents: HashMap::new(),
            waiting: VecDeque::new(),
            active: Vec::new(),
            num_jobs: 0,
            num_in_flight: 0,
            busy_since: None,
        }
    }

    /// Serves until the queue is closed and empty, or the owner is closing.
    pub(super) fn run(mut self, queue: &Receiver<Command>) {
        while self.take_commands(queue).is_ok() && !self.counters.closing.load(Ordering::Relaxed) {
            self.start_jobs();
            self.submit_blocks();
            self.end_jobs();
            if self.num_in_flight > 0 {
                match self.engine.wait() {
                    Ok((op, result)) => self.moved(op, result),
                    Err(error) => return self.give_up(&error),
                }
                self.end_jobs();
            }
        }
    }

    /// Sleeps for a command where nothing else is to be done.
    fn take_commands(&mut self, queue: &Receiver<Command>) -> Result<(), RecvError> {
        if self.active.is_empty() && self.waiting.is_empty() {
            self.waiting.push_back(queue.recv()?);
        }
        loop {
            match queue.try_recv() {
                Ok(command) => self.waiting.push_back(command),
                Err(TryRecvError::Empty) => return Ok(()),
                Err(TryRecvError::Disconnected) if self.active.is_empty() && self.waiting.is_empty() => {
                    return Err(RecvError);
                }
                Err(TryRecvError::Disconnected) => return Ok(()),
            }
        }
    }

    /// Begins what waits, in order, up to one that must wait for an earlier transfer of the same slot.
    fn start_jobs(&mut self) {
        while let Some(command) = self.waiting.front() {
            let is_used = self.active.iter().any(|job| job.slot.offset == command.slot().offset);
            if is_used {
                return;
            }
            if let Some(command) = self.waiting.pop_front() {
                self.start(command);
            }
        }
    }

    fn start(&mut self, command: Command) {
        let (started, path) = (Instant::now(), self.file.path.clone());
        self.num_jobs += 1;
        let job = |len, slot, kind| {
            let (id, next_block, in_flight, failed) = (self.num_jobs, 0, 0, None);
            Job { id, slot, len, kind, next_block, in_flight, failed, started }
        };
        let job = match command {
            Command::Write { slot, data, reply } if data.len() > slot.len_bytes => {
                let (bytes, slot_bytes) = (data.len() as u64, slot.len_bytes as u64);
                answer(&reply, started, Err(TierError::TooLarge { path, offset: slot.offset, slot_bytes, bytes }));
                return;
            }
            Command::Write { slot, data, reply } => {
                // From here on until it has all been written, the slot holds nothing that could be taken for state.
                self.contents.remove(&slot.offset);
                let num_checksums = if self.checks { data.len().div_ceil(self.block_bytes) } else { 0 };
                job(data.len(), slot, Kind::Write { data, checksums: vec![0; num_checksums], reply })
            }
            Command::Read { slot, reply } => match self.contents.get(&slot.offset) {
                Some(Contents { len, checksums }) => {
                    let target = vec![0; *len];
                    job(*len, slot, Kind::Read { target, checksums: checksums.clone(), reply })
                }
                None => {
                    answer(&reply, started, Err(TierError::NotWritten { path, offset: slot.offset }));
                    return;
                }
            },
        };
        self.active.push(job);
    }

    /// Hands idle buffers to the jobs by turns, so that reads and writes go side by side.
    fn submit_blocks(&mut self) {
        let mut turn = 0;
        while self.active.iter().any(|job| job.wants_buffer(self.block_bytes)) {
            let job = turn % self.active.len();
            turn += 1;
            if !self.active[job].wants_buffer(self.block_bytes) {
                continue;
            }
            let Some(chunk) = self.idle.pop() else { return };
            self.submit_next(job, chunk);
        }
    }

    fn submit_next(&mut self, job: usize, mut chunk: Chunk) {
        let job = &mut self.active[job];
        let block = job.next_block;
        let range = block_range(block, self.block_bytes, job.len);
        let part = 0..padded(range.len());
        if let Kind::Write { data, checksums, .. } = &mut job.kind {
            let (filled, rest) = chunk.bytes_mut()[part.clone()].split_at_mut(range.len());
            filled.copy_from_slice(&data[range.clone()]);
            rest.fill(0);
            if let Some(checksum) = checksums.get_mut(block) {
                *checksum = xxh3_64(filled);
            }
        }
        job.next_block += 1;
        job.in_flight += 1;
        let offset = job.slot.offset + range.start as u64;
        let (direction, id) = (job.direction(), job.id);
        self.num_in_flight += 1;
        self.busy_since.get_or_insert_with(Instant::now);
        let (file, direct) = (self.file.file.clone(), self.file.is_direct());
        self.engine.submit(Op { direction, file, offset, chunk, direct, part, job: id, block });
    }

    /// The system has answered for one block, or for a part of it.
    fn moved(&mut self, mut op: Op, result: io::Result<usize>) {
        let Some(index) = self.active.iter().position(|job| job.id == op.job) else {
            unreachable!("a job is active until none of its blocks is in flight")
        };
        let (bytes, offset) = (op.part.len() as u64, op.offset);
        let failed = match result {
            Ok(0) if op.direction == Direction::Read => Some(self.short_read(&self.active[index], &op)),
            Ok(0) => {
                let source = io::ErrorKind::WriteZero.into();
                Some(self.file.error("write", offset, bytes, source))
            }
            Ok(num_bytes) if num_bytes < op.part.len() => {
                op.part.start += num_bytes;
                op.offset += num_bytes as u64;
                return self.engine.submit(op);
            }
            Ok(_) => self.arrived(index, &op).err(),
            Err(error) if is_passing(&error) => return self.engine.submit(op),
            Err(error) if error.kind() == io::ErrorKind::InvalidInput && op.direct => {
                // The disk asks for more than was known when the file was opened. Others may be in flight like this one.
                op.direct = false;
                match if self.file.is_direct() { self.file.give_up_direct() } else { Ok(()) } {
                    Ok(()) => return self.engine.submit(op),
                    Err(error) => Some(self.file.error(op.direction.verb(), offset, bytes, error)),
                }
            }
            Err(error) => Some(self.file.error(op.direction.verb(), offset, bytes, error)),
        };
        let job = &mut self.active[index];
        job.in_flight -= 1;
        job.failed = job.failed.take().or(failed);
        self.idle.push(op.chunk);
        self.num_in_flight -= 1;
        if self.num_in_flight == 0
            && let Some(since) = self.busy_since.take()
        {
            self.counters.busy_ns.fetch_add(since.elapsed().as_nanos() as u64, Ordering::Relaxed);
        }
    }

    fn short_read(&self, job: &Job, op: &Op) -> TierError {
        let range = block_range(op.block, self.block_bytes, job.len);
        TierError::ShortRead {
            path: self.file.path.clone(),
            offset: job.slot.offset + range.start as u64,
            bytes: range.len() as u64,
            missing_bytes: op.part.len() as u64,
        }
    }

    /// A block is whole: one that was read is checked and put where it belongs.
    fn arrived(&mut self, index: usize, op: &Op) -> Result<(), TierError> {
        let job = &mut self.active[index];
        let range = block_range(op.block, self.block_bytes, job.len);
        let bytes = range.len() as u64;
        match &mut job.kind {
            Kind::Write { .. } => {
                self.counters.written_bytes.fetch_add(bytes, Ordering::Relaxed);
            }
            Kind::Read { target, checksums, .. } => {
                self.counters.read_bytes.fetch_add(bytes, Ordering::Relaxed);
                let block = &op.chunk.bytes()[..range.len()];
                if let Some(&expected) = checksums.get(op.block) {
                    let found = xxh3_64(block);
                    if found != expected {
                        let offset = job.slot.offset + range.start as u64;
                        let path = self.file.path.clone();
                        return Err(TierError::Corrupted { path, offset, bytes, expected, found });
                    }
                }
                target[range].copy_from_slice(block);
            }
        }
        Ok(())
    }

    /// Answers for the jobs of which nothing is under way or to come.
    fn end_jobs(&mut self) {
        let block_bytes = self.block_bytes;
        let ended = |job: &mut Job| job.in_flight == 0 && !job.wants_buffer(block_bytes);
        let ended: Vec<Job> = self.active.extract_if(.., ended).collect();
        for job in ended {
            self.end(job);
        }
    }

    fn end(&mut self, job: Job) {
        let Job { slot, len, kind, started, failed, .. } = job;
        let (path, offset) = (self.file.path.clone(), slot.offset);
        let gone = || TierError::Gone { path, offset, bytes: len as u64 };
        let failed = failed.or_else(|| (!self.file.is_there()).then(gone));
        match kind {
            Kind::Read { target, reply, .. } => {
                answer(&reply, started, failed.map_or_else(|| Ok(Bytes::from(target)), Err));
            }
            Kind::Write { checksums, reply, data } => {
                drop(data);
                if failed.is_none() {
                    self.contents.insert(offset, Contents { len, checksums: checksums.into() });
                }
                answer(&reply, started, failed.map_or(Ok(()), Err));
            }
        }
    }

    /// The engine is broken: all that is under way fails with that, and all that waits finds nobody.
    fn give_up(&mut self, error: &io::Error) {
        for job in std::mem::take(&mut self.active) {
            let source = io::Error::new(error.kind(), error.to_string());
            let failed = self.file.error(job.direction().verb(), job.slot.offset, job.len as u64, source);
            match job.kind {
                Kind::Read { reply, .. } => answer(&reply, job.started, Err(failed)),
                Kind::Write { reply, .. } => answer(&reply, job.started, Err(failed)),
            }
        }
    }
}

/// Whoever asked may have given up.
fn answer<T>(reply: &Reply<T>, started: Instant, result: Result<T, TierError>) {
    let _ = reply.try_send(Outcome { result, started, finished: Instant::now() });
}

/// Bytes of a block, of all that a slot holds.
fn block_range(block: usize, block_bytes: usize, len: usize) -> Range<usize> {
    block * block_bytes..((block + 1) * block_bytes).min(len)
}

/// Whether the same call may succeed at once.
fn is_passing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock)
}
