//! One rank's tier: slots in its file, read ahead of use and written behind it.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use bytes::Bytes;

use super::chunk::{ALIGNMENT, padded};
use super::engine::{Direction, Engine, NUM_THREADS, Threads};
use super::file::{RankFile, remove_stale};
use super::worker::{Command, Counters, Worker};
use super::{Slot, TierEngine, TierError, Transfer};

/// How a tier is made.
#[derive(Clone, Debug)]
pub struct TierOptions {
    /// The run's directory, on a local disk; made if it is not there, removed at exit.
    pub dir: PathBuf,
    /// This rank.
    pub rank: usize,
    /// How many ranks the run has.
    pub world_size: usize,
    /// Bytes that move at a time, a multiple of 4096. Default: 1 MiB. Larger ones keep slow disks busier.
    pub block_bytes: usize,
    /// Bytes of memory for blocks under way, at least two blocks. Default: 16 MiB; see [`TierOptions::fitting`].
    pub buffer_bytes: usize,
    /// Whether what is read is compared with a checksum of what was written. Default: yes. Costs 8 bytes of memory per
    /// block, and the time to read the data once in each direction (about 0.1 s/GB).
    pub checksums: bool,
    /// The longest that anyone waits for a transfer. Default: 300 s.
    pub timeout: Duration,
    /// How blocks get to the disk. Default: io_uring, where that is refused threads, which is said once.
    pub engine: TierEngine,
}

impl TierOptions {
    /// The defaults, for one of `world_size` ranks in `dir`.
    pub fn new(dir: impl Into<PathBuf>, rank: usize, world_size: usize) -> Self {
        Self {
            dir: dir.into(),
            rank,
            world_size,
            block_bytes: 1 << 20,
            buffer_bytes: 16 << 20,
            checksums: true,
            timeout: Duration::from_secs(300),
            engine: TierEngine::IoUring,
        }
    }

    /// No more buffers than a read and a write of the largest slot can fill at once.
    #[must_use]
    pub fn fitting(mut self, largest_slot_bytes: usize) -> Self {
        let useful = largest_slot_bytes.div_ceil(self.block_bytes.max(1)).max(1).saturating_mul(2);
        self.buffer_bytes = self.buffer_bytes.min(useful.saturating_mul(self.block_bytes));
        self
    }

    fn num_buffers(&self) -> Result<usize, TierError> {
        let Self { block_bytes, buffer_bytes, .. } = *self;
        if block_bytes < ALIGNMENT || block_bytes % ALIGNMENT != 0 || u32::try_from(block_bytes).is_err() {
            return Err(TierError::BlockSize { block_bytes, alignment: ALIGNMENT });
        }
        match buffer_bytes / block_bytes {
            0 | 1 => Err(TierError::Buffers { buffer_bytes, block_bytes, needed_bytes: 2 * block_bytes }),
            num_buffers => Ok(num_buffers),
        }
    }
}

/// What a tier has moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierStats {
    /// Bytes that were read.
    pub read_bytes: u64,
    /// Bytes that were written.
    pub written_bytes: u64,
    /// Time in which at least one block was under way.
    pub busy: Duration,
    /// Bytes of the file: what all slots together hold.
    pub file_bytes: u64,
}

impl TierStats {
    /// Bytes per second, both ways together, while anything was under way. `None` before that.
    pub fn bandwidth(&self) -> Option<f64> {
        (!self.busy.is_zero()).then(|| (self.read_bytes + self.written_bytes) as f64 / self.busy.as_secs_f64())
    }
}

/// One rank's store on a disk: see the module's documentation.
///
/// Memory: the buffers of [`TierOptions`]; data until it is written; what is read, until its owner drops it.
///
/// Dropping it closes it: see [`Tier::close`].
///
/// ```
/// use fsdp_core::{Tier, TierOptions};
///
/// let dir = std::env::temp_dir().join(format!("tier-example-{}", std::process::id()));
/// let tier = Tier::open(&TierOptions::new(&dir, 0, 1))?;
/// let slot = tier.reserve(5)?;
/// let written = tier.write(slot, vec![1, 2, 3, 4, 5].into());
/// // ... compute here; a read of the same slot comes after the write.
/// let read = tier.read(slot);
/// written.wait()?;
/// assert_eq!(read.wait()?[..], [1, 2, 3, 4, 5]);
/// drop(tier);
/// assert!(!dir.exists());
/// # Ok::<(), fsdp_core::TierError>(())
/// ```
pub struct Tier {
    /// Taken when the tier is closed, which ends the worker.
    commands: Mutex<Option<Sender<Command>>>,
    /// Closed by the worker's end. Locked only by whoever closes the tier.
    ended: Mutex<Receiver<()>>,
    counters: Arc<Counters>,
    file: Arc<RankFile>,
    /// Where the next slot begins.
    end: Mutex<u64>,
    engine: TierEngine,
    buffer_bytes: usize,
    timeout: Duration,
}

impl fmt::Debug for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tier({}, {})", self.file.path.display(), self.engine)
    }
}

impl Tier {
    /// Removes what ranks of a run have left in `dir` whose processes were killed, and the directory if nothing else is in it.
    /// Files of ranks that are alive stay.
    pub fn remove_abandoned(dir: &Path) {
        remove_stale(dir, 0);
        let _ = std::fs::remove_dir(dir);
    }

    /// Makes and locks this rank's file, tries the disk, and starts the thread that serves it.
    ///
    /// # Errors
    /// If the directory cannot be used, another run uses it, or the options do not fit each other.
    pub fn open(options: &TierOptions) -> Result<Self, TierError> {
        let num_buffers = options.num_buffers()?;
        let file = Arc::new(RankFile::create(&options.dir, options.rank, options.world_size)?);
        let (kind, engine) = start_engine(options, num_buffers).map_err(|source| TierError::Unusable {
            action: "start threads for",
            path: file.path.clone(),
            source,
        })?;
        Self::serve(options, file, kind, engine)
    }

    fn serve(
        options: &TierOptions,
        file: Arc<RankFile>,
        kind: TierEngine,
        engine: Box<dyn Engine>,
    ) -> Result<Self, TierError> {
        let counters = Arc::new(Counters::default());
        let (num_buffers, checks) = (options.num_buffers()?, options.checksums);
        let worker = Worker::new(file.clone(), engine, num_buffers, options.block_bytes, checks, counters.clone());
        let (commands, queue) = mpsc::channel();
        let (alive, ended) = mpsc::channel::<()>();
        let spawned = thread::Builder::new().name(format!("tier-{}", options.rank)).spawn(move || {
            let _alive = alive;
            worker.run(&queue);
        });
        spawned.map_err(|source| TierError::Unusable {
            action: "start a thread for",
            path: file.path.clone(),
            source,
        })?;
        let (end, timeout) = (Mutex::new(0), options.timeout);
        let ended = Mutex::new(ended);
        let commands = Mutex::new(Some(commands));
        let buffer_bytes = num_buffers * options.block_bytes;
        Ok(Self { commands, ended, counters, file, end, engine: kind, buffer_bytes, timeout })
    }

    /// A new place for `len_bytes`, for which the disk has room.
    ///
    /// # Errors
    /// [`TierError::Full`] if it has not.
    pub fn reserve(&self, len_bytes: usize) -> Result<Slot, TierError> {
        let mut end = self.end.lock().unwrap_or_else(PoisonError::into_inner);
        let room = padded(len_bytes).max(ALIGNMENT) as u64;
        self.file.allocate(*end, room)?;
        let slot = Slot { offset: *end, len_bytes };
        *end += room;
        Ok(slot)
    }

    /// Starts to write all of `data` to a slot; later reads of the slot come after it. Until it has ended, and if it
    /// fails, the slot holds nothing.
    pub fn write(&self, slot: Slot, data: Bytes) -> Transfer<()> {
        let (transfer, reply) = self.transfer(Direction::Write, slot);
        self.submit(Command::Write { slot, data, reply });
        transfer
    }

    /// Starts to read what was last written to a slot. A new buffer holds it.
    pub fn read(&self, slot: Slot) -> Transfer<Bytes> {
        let (transfer, reply) = self.transfer(Direction::Read, slot);
        self.submit(Command::Read { slot, reply });
        transfer
    }

    /// The rank's file.
    pub fn path(&self) -> &Path {
        &self.file.path
    }

    /// How blocks get to the disk.
    pub fn engine(&self) -> TierEngine {
        self.engine
    }

    /// Whether they go past the page cache.
    pub fn is_direct(&self) -> bool {
        self.file.is_direct()
    }

    /// Memory of the buffers, in bytes.
    pub fn buffer_bytes(&self) -> usize {
        self.buffer_bytes
    }

    /// What was moved so far.
    pub fn stats(&self) -> TierStats {
        let load = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        TierStats {
            read_bytes: load(&self.counters.read_bytes),
            written_bytes: load(&self.counters.written_bytes),
            busy: Duration::from_nanos(load(&self.counters.busy_ns)),
            file_bytes: *self.end.lock().unwrap_or_else(PoisonError::into_inner),
        }
    }

    fn transfer<T>(&self, direction: Direction, slot: Slot) -> (Transfer<T>, super::transfer::Reply<T>) {
        Transfer::new(direction, self.file.path.clone(), slot, self.timeout)
    }

    fn submit(&self, command: Command) {
        if let Some(commands) = &*self.commands.lock().unwrap_or_else(PoisonError::into_inner) {
            // If the thread has ended, the reply is dropped here, and whoever waits for the transfer is told.
            let _ = commands.send(command);
        }
    }

    /// Gives up what is not written yet, and removes the file, whoever else still holds the tier. Transfers fail from then
    /// on. Waits for blocks that the disk has begun, at most for the time limit, and not while the thread unwinds from a
    /// panic.
    pub fn close(&self) {
        self.counters.closing.store(true, Ordering::Relaxed);
        self.commands.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.file.remove();
        if !thread::panicking() {
            // Nothing is ever sent: this ends when the thread does, or when the disk has had its time.
            let _ = self.ended.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(self.timeout);
        }
    }
}

impl Drop for Tier {
    fn drop(&mut self) {
        self.close();
    }
}

/// The engine that was asked for, or threads where the system refuses it.
fn start_engine(options: &TierOptions, num_buffers: usize) -> io::Result<(TierEngine, Box<dyn Engine>)> {
    #[cfg(target_os = "linux")]
    if options.engine == TierEngine::IoUring {
        match super::uring::Uring::new(num_buffers) {
            Ok(engine) => return Ok((TierEngine::IoUring, Box::new(engine))),
            Err(error) => say_threads(&error),
        }
    }
    #[cfg(not(target_os = "linux"))]
    if options.engine == TierEngine::IoUring {
        say_threads(&io::Error::from(io::ErrorKind::Unsupported));
    }
    let engine = Threads::new(num_buffers.min(NUM_THREADS), &format!("tier-io-{}", options.rank))?;
    Ok((TierEngine::Threads, Box::new(engine)))
}

fn say_threads(reason: &io::Error) {
    static SAID: std::sync::Once = std::sync::Once::new();
    SAID.call_once(|| {
        tracing::warn!("the system refuses io_uring ({reason}): offloaded state is read and written on threads");
    });
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender};

    use super::super::engine::{Done, Op};
    use super::*;

    fn options(dir: &Path) -> TierOptions {
        let (block_bytes, buffer_bytes) = (ALIGNMENT, 4 * ALIGNMENT);
        TierOptions { block_bytes, buffer_bytes, ..TierOptions::new(dir.join("run"), 0, 1) }
    }

    fn open(options: &TierOptions, engine: Box<dyn Engine>) -> Tier {
        let file = Arc::new(RankFile::create(&options.dir, options.rank, options.world_size).unwrap());
        Tier::serve(options, file, TierEngine::Threads, engine).unwrap()
    }

    /// What an engine answers, from the answer's number and what the threads answered.
    type Alter = dyn FnMut(usize, &mut Op, io::Result<usize>) -> io::Result<usize> + Send;

    /// Threads, with answers of another system in place of some of theirs.
    struct Altered {
        threads: Threads,
        /// Gets the number of the answer, from 0.
        alter: Box<Alter>,
        num_done: usize,
    }

    impl Altered {
        fn new(
            alter: impl FnMut(usize, &mut Op, io::Result<usize>) -> io::Result<usize> + Send + 'static,
        ) -> Box<Self> {
            Box::new(Self { threads: Threads::new(1, "altered").unwrap(), alter: Box::new(alter), num_done: 0 })
        }
    }

    impl Engine for Altered {
        fn submit(&mut self, op: Op) {
            self.threads.submit(op);
        }

        fn wait(&mut self) -> io::Result<Done> {
            let (mut op, result) = self.threads.wait()?;
            let result = (self.alter)(self.num_done, &mut op, result);
            self.num_done += 1;
            Ok((op, result))
        }
    }

    /// Never answers, as long as the other end is held.
    struct Stuck(Receiver<()>, Sender<Op>);

    impl Engine for Stuck {
        fn submit(&mut self, op: Op) {
            self.1.send(op).unwrap();
        }

        fn wait(&mut self) -> io::Result<Done> {
            self.0.recv().map_err(io::Error::other)?;
            Err(io::Error::other("let go"))
        }
    }

    fn data(len: usize) -> Bytes {
        (0..len).map(|index| (index * 31 % 251) as u8).collect::<Vec<_>>().into()
    }

    #[test]
    fn a_disk_that_fills_up_fails_the_write_and_the_slot_holds_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let full = |number, _: &mut Op, result| {
            if number == 5 { Err(io::ErrorKind::StorageFull.into()) } else { result }
        };
        let tier = open(&options(dir.path()), Altered::new(full));
        let [first, second] = [3, 4].map(|num_blocks| tier.reserve(num_blocks * ALIGNMENT).unwrap());
        tier.write(first, data(3 * ALIGNMENT)).wait().unwrap();
        let error = tier.write(second, data(4 * ALIGNMENT)).wait().unwrap_err();
        assert!(
            matches!(&error, TierError::Full { path, offset: 20480, bytes: 4096, .. } if path == tier.path()),
            "{error}"
        );
        let text = error.to_string();
        assert!(text.contains("rank-0.tier") && text.contains("free space") && text.contains("nvme_path"), "{text}");
        assert!(matches!(tier.read(second).wait(), Err(TierError::NotWritten { offset: 12288, .. })));
        assert_eq!(tier.read(first).wait().unwrap(), data(3 * ALIGNMENT), "other slots are as they were");
        tier.write(second, data(99)).wait().unwrap();
        assert_eq!(tier.read(second).wait().unwrap(), data(99));
    }

    #[test]
    fn a_file_that_may_not_grow_is_not_taken_for_a_full_disk() {
        let dir = tempfile::tempdir().unwrap();
        let limited = |_, _: &mut Op, _| Err(io::ErrorKind::FileTooLarge.into());
        let tier = open(&options(dir.path()), Altered::new(limited));
        let slot = tier.reserve(10).unwrap();
        let error = tier.write(slot, data(10)).wait().unwrap_err();
        assert!(matches!(&error, TierError::Limited { path, offset: 0, .. } if path == tier.path()), "{error}");
        let text = error.to_string();
        assert!(text.contains("rank-0.tier") && text.contains("ulimit -f") && !text.contains("are free"), "{text}");
    }

    #[test]
    fn transfers_that_stop_in_the_middle_go_on() {
        let dir = tempfile::tempdir().unwrap();
        // The file has the bytes by then, so that the rest may be moved once more.
        let partly = |number, _: &mut Op, result: io::Result<usize>| match number % 4 {
            0 => Err(io::ErrorKind::Interrupted.into()),
            1 => result.map(|len| if len > 512 { len / 2 } else { len }),
            _ => result,
        };
        let tier = open(&options(dir.path()), Altered::new(partly));
        for len in [1, ALIGNMENT, 10 * ALIGNMENT + 77] {
            let slot = tier.reserve(len).unwrap();
            tier.write(slot, data(len)).wait().unwrap();
            assert_eq!(tier.read(slot).wait().unwrap(), data(len));
        }
    }

    #[test]
    fn a_disk_that_refuses_direct_transfers_is_used_through_the_cache() {
        let dir = tempfile::tempdir().unwrap();
        // Several blocks are in flight when the first is refused.
        let refused = |_, op: &mut Op, result| if op.direct { Err(io::ErrorKind::InvalidInput.into()) } else { result };
        let tier = open(&options(dir.path()), Altered::new(refused));
        let len = 10 * ALIGNMENT + 77;
        let slot = tier.reserve(len).unwrap();
        tier.write(slot, data(len)).wait().unwrap();
        assert!(!tier.is_direct());
        assert_eq!(tier.read(slot).wait().unwrap(), data(len));
    }

    #[test]
    fn a_disk_that_never_answers_is_waited_for_up_to_the_limit() {
        let dir = tempfile::tempdir().unwrap();
        let (hold, gate) = mpsc::channel();
        let (ops, kept) = mpsc::channel();
        let options = TierOptions { timeout: Duration::from_millis(50), ..options(dir.path()) };
        let tier = open(&options, Box::new(Stuck(gate, ops)));
        let slot = tier.reserve(10).unwrap();
        let error = tier.write(slot, data(10)).wait().unwrap_err();
        assert!(matches!(error, TierError::TimedOut { action: "write", offset: 0, .. }), "{error}");
        assert!(error.to_string().contains("timeout_s"), "{error}");
        let file = tier.path().to_owned();
        drop(tier);
        assert!(!file.exists(), "the file goes even if the disk does not answer");
        drop((hold, kept));
    }

    #[test]
    fn a_broken_engine_fails_what_is_under_way_and_what_comes() {
        let dir = tempfile::tempdir().unwrap();
        let (hold, gate) = mpsc::channel();
        let (ops, kept) = mpsc::channel();
        let tier = open(&options(dir.path()), Box::new(Stuck(gate, ops)));
        let slot = tier.reserve(10).unwrap();
        let under_way = tier.write(slot, data(10));
        drop(kept.recv().unwrap());
        drop(hold);
        assert!(matches!(under_way.wait(), Err(TierError::Io { action: "write", .. })));
        assert!(matches!(tier.read(slot).wait(), Err(TierError::Ended { offset: 0, .. })));
    }
}
