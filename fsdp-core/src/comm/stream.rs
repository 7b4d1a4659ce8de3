//! Communication in the background: one thread that runs collectives in the order of submission.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::error::panic_message;
use super::{CommError, Communicator, GatherPart, OpTag, PlacedPart, Reduce, ReducePart};

type Job = Box<dyn FnOnce(&dyn Communicator) + Send>;

/// Runs the operations of one communicator on a thread of its own, which sleeps while there is nothing to do.
///
/// All ranks submit the same operations in the same order. Use one stream per [`Communicator::channel`]: gathers on one
/// then run ahead while reductions on another are under way.
///
/// Dropping a stream waits for its queue, which ends at the latest with the communicator's timeout; after an abort, jobs
/// fail at once. While its thread unwinds from a panic the stream does not wait, so that whoever catches the panic
/// can abort the world.
///
/// ```
/// use std::time::Duration;
/// use fsdp_core::{CommStream, GatherPart, LocalWorld, OpTag, Phase, ShardLayout};
///
/// let comm = LocalWorld::connect(1, Duration::from_secs(10)).remove(0);
/// let gathers = CommStream::new(comm.channel("gather")?, "gather")?;
/// let part = GatherPart { shard: vec![7, 8].into(), layout: ShardLayout::new(&[2], 0, 1), elem_bytes: 1 };
/// let pending = gathers.all_gather(OpTag::new(0, Phase::Forward, "head"), vec![part]);
/// // ... compute here, then:
/// assert_eq!(pending.wait()?[0][..], [7, 8]);
/// # Ok::<(), fsdp_core::CommError>(())
/// ```
#[derive(Debug)]
pub struct CommStream {
    comm: Arc<dyn Communicator>,
    name: Arc<str>,
    /// Taken when the stream is dropped, which ends the worker.
    jobs: Option<Sender<Job>>,
    /// Those that have not ended.
    num_jobs: Arc<AtomicUsize>,
    worker: Option<JoinHandle<()>>,
}

impl CommStream {
    /// Starts the thread, named after the stream and the rank.
    ///
    /// # Errors
    /// [`CommError::Stream`] if the operating system refuses a thread.
    pub fn new(comm: Arc<dyn Communicator>, name: &str) -> Result<Self, CommError> {
        let (jobs, queue) = mpsc::channel::<Job>();
        let num_jobs = Arc::new(AtomicUsize::new(0));
        let worker = thread::Builder::new().name(format!("{name}-{}", comm.rank())).spawn({
            let comm = comm.clone();
            move || queue.into_iter().for_each(|job| job(&*comm))
        });
        let worker = worker.map_err(|error| CommError::Stream {
            rank: comm.rank(),
            stream: name.to_owned(),
            message: error.to_string(),
        })?;
        Ok(Self { comm, name: name.into(), jobs: Some(jobs), num_jobs, worker: Some(worker) })
    }

    /// Submits [`Communicator::all_gather`].
    pub fn all_gather(&self, tag: OpTag, parts: Vec<GatherPart>) -> Pending<Vec<Bytes>> {
        self.submit(move |comm| comm.all_gather(&tag, &parts))
    }

    /// [`Communicator::gather_placed`]: at once where every rank has placed, else submitted like the others.
    pub fn gather_placed(&self, tag: OpTag, parts: Vec<PlacedPart>) -> Pending<Vec<Bytes>> {
        // Jobs that are under way come first, in the order of the communicator.
        if self.num_jobs.load(Ordering::Acquire) == 0 && parts.iter().all(PlacedPart::is_ready) {
            let now = Instant::now();
            let gathered = self.comm.gather_placed(&tag, &parts);
            let timing = Timing { submitted: now, started: now, finished: Instant::now(), blocked: Duration::ZERO };
            let promise = Promise { outcome: Mutex::new(Some((gathered, timing))), ready: Condvar::new() };
            return Pending { promise: Arc::new(promise) };
        }
        self.submit(move |comm| comm.gather_placed(&tag, &parts))
    }

    /// Submits [`Communicator::reduce_scatter`].
    pub fn reduce_scatter(&self, tag: OpTag, parts: Vec<ReducePart>, reduce: Reduce) -> Pending<Vec<Bytes>> {
        self.submit(move |comm| comm.reduce_scatter(&tag, &parts, reduce))
    }

    /// Submits [`Communicator::all_reduce`].
    pub fn all_reduce(&self, tag: OpTag, parts: Vec<ReducePart>, reduce: Reduce) -> Pending<Vec<Bytes>> {
        self.submit(move |comm| comm.all_reduce(&tag, &parts, reduce))
    }

    /// Submits a job of any number of operations. A panic in it becomes [`CommError::JobPanicked`].
    ///
    /// The job runs even if the result is dropped, since the other ranks wait for this one.
    pub fn submit<T: Send + 'static>(
        &self,
        job: impl FnOnce(&dyn Communicator) -> Result<T, CommError> + Send + 'static,
    ) -> Pending<T> {
        let promise = Arc::new(Promise { outcome: Mutex::new(None), ready: Condvar::new() });
        let (fulfil, stream, submitted) = (promise.clone(), self.name.clone(), Instant::now());
        let num_jobs = self.num_jobs.clone();
        let job: Job = Box::new(move |comm| {
            let started = Instant::now();
            let result = catch_unwind(AssertUnwindSafe(|| job(comm))).unwrap_or_else(|panic| {
                let (rank, stream, message) = (comm.rank(), stream.to_string(), panic_message(&*panic));
                Err(CommError::JobPanicked { rank, stream, message })
            });
            let timing = Timing { submitted, started, finished: Instant::now(), blocked: Duration::ZERO };
            num_jobs.fetch_sub(1, Ordering::Release);
            *fulfil.outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some((result, timing));
            fulfil.ready.notify_all();
        });
        let jobs = self.jobs.as_ref().expect("the queue is open until the stream is dropped");
        self.num_jobs.fetch_add(1, Ordering::Relaxed);
        jobs.send(job).expect("the worker catches panics, so it lives as long as its queue");
        Pending { promise }
    }

    /// Waits until all that has been submitted so far has run, at the latest for the communicator's timeout. Errors are told to
    /// those who wait for the results.
    pub fn drain(&self) {
        let _ = self.submit(|_| Ok(())).wait();
    }

    /// The communicator that the stream runs on.
    pub fn communicator(&self) -> &Arc<dyn Communicator> {
        &self.comm
    }
}

impl Drop for CommStream {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(worker) = self.worker.take().filter(|_| !thread::panicking()) {
            worker.join().expect("the worker catches panics");
        }
    }
}

/// The result of a job on a [`CommStream`], now or later.
#[derive(Debug)]
#[must_use = "an operation's error is known to whoever waits for it"]
pub struct Pending<T> {
    promise: Arc<Promise<T>>,
}

#[derive(Debug)]
struct Promise<T> {
    outcome: Mutex<Option<(Result<T, CommError>, Timing)>>,
    ready: Condvar,
}

/// When a job ran, and for how long its owner stood still for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// When the job was submitted.
    pub submitted: Instant,
    /// When the stream began to run it.
    pub started: Instant,
    /// When its result was there.
    pub finished: Instant,
    /// How long the owner was blocked in [`Pending::wait`]: communication that computation did not hide.
    pub blocked: Duration,
}

impl<T> Pending<T> {
    /// Whether [`Pending::wait`] would return at once.
    pub fn is_ready(&self) -> bool {
        self.promise.outcome.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Sleeps until the job has run and returns its result.
    pub fn wait(self) -> Result<T, CommError> {
        self.wait_timed().0
    }

    /// Like [`Pending::wait`], and tells when the job ran.
    pub fn wait_timed(self) -> (Result<T, CommError>, Timing) {
        let start = Instant::now();
        let outcome = self.promise.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        let was_ready = outcome.is_some();
        let outcome = self.promise.ready.wait_while(outcome, |outcome| outcome.is_none());
        let outcome = outcome.unwrap_or_else(PoisonError::into_inner).take();
        let (result, timing) = outcome.expect("the outcome is there, and only its owner takes it");
        let blocked = if was_ready { Duration::ZERO } else { start.elapsed() };
        (result, Timing { blocked, ..timing })
    }
}
