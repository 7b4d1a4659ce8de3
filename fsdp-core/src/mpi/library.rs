//! The thread that speaks MPI: frames and payloads between any two ranks. See [Note: One thread speaks MPI].

use std::collections::BTreeSet;
use std::ffi::{c_int, c_void};
use std::fmt::{self, Debug};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use mpi::ffi;

use crate::hosts::{self, Frame, Inbox, Key, Landing, Network, Payload, Receipt, Span};
use crate::{AbortCause, CommError, Control, Issued, OpTag, Phase};

/// Of a frame; payloads have others.
const FRAME_TAG: u64 = 1;

/// Payloads take tags by turns, as many as every MPI library has.
const PAYLOAD_TAGS: std::ops::Range<u64> = 2..32_000;

/// Most bytes of a message of a payload: few enough that the libraries send it at once. A larger one is answered first, and over
/// TCP the answer waits behind the bytes of the other direction, so that two ranks often send by turns: 8 MiB both ways on a
/// link of 2 Gbit/s then take 68 in place of 35 ms.
const PIECE_BYTES: usize = 32 * 1024;

/// Numbers in front of a frame's head: its key, the bytes of the payload, and the payload's tag.
const FRAME_NUMBERS: usize = 6;

/// The longest pause between two looks at requests.
const LONGEST_PAUSE: Duration = Duration::from_micros(200);

/// The same at the end, when nothing but the other ranks' end is due.
const LONGEST_PAUSE_AT_END: Duration = Duration::from_millis(5);

/// How long processes wait at MPI's end for each other at the least, where all is well.
const LEAST_END_LIMIT: Duration = Duration::from_secs(60);

/// How long MPI may take to end after a run was aborted, since a rank that is gone does not take part.
const END_LIMIT: Duration = Duration::from_secs(2);

/// MPI in this process: ranks, and messages between them.
#[derive(Debug)]
pub struct Mpi {
    rank: usize,
    world_size: usize,
    inbox: Inbox,
    orders: Mutex<Orders>,
    /// A world was aborted.
    aborted: AtomicBool,
    /// How long the end waits for other processes, in milliseconds.
    limit_ms: AtomicU64,
}

#[derive(Default)]
struct Orders {
    new: Vec<Order>,
    calls: Vec<Box<dyn FnOnce() + Send>>,
    next_tag: u64,
    end: bool,
    /// No call is taken any more.
    is_closed: bool,
    ended: bool,
}

impl Debug for Orders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} orders and {} calls", self.new.len(), self.calls.len())
    }
}

/// What the thread is to do.
#[derive(Debug)]
struct Order {
    peer: usize,
    tag: u64,
    bytes: Payload,
    /// `None` sends, else receives.
    receipt: Option<Receipt>,
}

static MPI: OnceLock<Result<Arc<Mpi>, String>> = OnceLock::new();

impl Mpi {
    /// Initialises MPI, or returns what is.
    ///
    /// # Errors
    /// [`CommError::Engine`] if the library refuses, or the program has initialised MPI itself.
    pub fn start() -> Result<Arc<Self>, CommError> {
        let mpi = MPI.get_or_init(|| {
            let (started, start) = channel();
            let spawned = thread::Builder::new().name("mpi".to_owned()).spawn(move || run(&started));
            spawned.map_err(|error| format!("its thread cannot be started: {error}"))?;
            let mpi = start.recv().unwrap_or_else(|_| Err("its thread has ended".to_owned()))?;
            // SAFETY: The function may be called at any time, from any thread.
            unsafe { libc::atexit(end_at_exit) };
            Ok(mpi)
        });
        mpi.as_ref().cloned().map_err(|message| {
            let tag = OpTag::new(0, Phase::Init, "connect");
            CommError::Engine { rank: 0, tag, message: format!("MPI: {message}") }
        })
    }

    /// Tells every rank some text, and returns what each rank has told. Every rank makes the call, as often as the others.
    ///
    /// # Errors
    /// [`CommError::Timeout`] if a process does not come, [`CommError::Engine`] if MPI fails.
    pub fn exchange(&self, text: &str, timeout: Duration) -> Result<Vec<String>, CommError> {
        hosts::exchange(self, self.inbox.next_world(), 0, text, timeout)
    }

    /// Runs a function on the thread that speaks MPI, as the only one that may call the library. `None` if it panics or MPI
    /// has ended.
    ///
    /// Meanwhile the ranks' own messages wait.
    pub fn call<T: Send + 'static>(&self, function: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        let (sender, result) = channel();
        let run = move || {
            // Whoever calls waits for this.
            let _ = sender.send(function());
        };
        let mut orders = self.orders();
        if orders.is_closed {
            return None;
        }
        orders.calls.push(Box::new(run));
        drop(orders);
        self.inbox.wake_engine();
        result.recv().ok()
    }

    /// The end waits for other processes no longer than the longest of these.
    pub(super) fn allow(&self, limit: Duration) {
        self.limit_ms.fetch_max(limit.as_millis().try_into().unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    fn orders(&self) -> MutexGuard<'_, Orders> {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How a payload is received; one without bytes is there.
    fn order_of(&self, from: usize, Landing { frame, payload, receipt }: Landing) -> Option<Order> {
        if payload.is_empty() {
            self.inbox.complete(&receipt);
            return None;
        }
        Some(Order { peer: from, tag: frame.tag, bytes: payload, receipt: Some(receipt) })
    }

    fn tell_exit(&self, to: usize) {
        self.send_frame(&mut self.orders(), to, EXITS, [0, 0], &[]);
    }

    fn send_frame(&self, orders: &mut Orders, to: usize, key: Key, payload: [u64; 2], head: &[u8]) {
        let numbers = [key.world, key.domain, key.op, key.stage].into_iter().chain(payload);
        let bytes: Vec<u8> = numbers.flat_map(u64::to_le_bytes).chain(head.iter().copied()).collect();
        let span = Span { start: bytes.as_ptr().cast_mut(), len: bytes.len() };
        // SAFETY: The span is what is kept, which nobody writes.
        let bytes = unsafe { Payload::new([span], bytes) };
        orders.new.push(Order { peer: to, tag: FRAME_TAG, bytes, receipt: None });
    }
}

impl Network for Mpi {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn host(&self) -> String {
        // Ranks that see each other's processes can map each other's memory.
        let files = ["/proc/sys/kernel/hostname", "/proc/sys/kernel/random/boot_id"];
        let texts = files.map(|file| std::fs::read_to_string(file).unwrap_or_default().trim().to_owned());
        let processes = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
        format!("{} {} {}", texts[0], texts[1], processes.display())
    }

    fn send(&self, to: usize, key: Key, head: Vec<u8>, payload: Option<Payload>) {
        let mut orders = self.orders();
        let num_bytes = payload.as_ref().map_or(0, Payload::len);
        let tag = PAYLOAD_TAGS.start + orders.next_tag % (PAYLOAD_TAGS.end - PAYLOAD_TAGS.start);
        self.send_frame(&mut orders, to, key, [num_bytes as u64, tag], &head);
        if let Some(bytes) = payload.filter(|payload| !payload.is_empty()) {
            orders.next_tag += 1;
            orders.new.push(Order { peer: to, tag, bytes, receipt: None });
        }
        drop(orders);
        self.inbox.wake_engine();
    }

    fn receive(&self, from: usize, landing: Landing) {
        if let Some(order) = self.order_of(from, landing) {
            self.orders().new.push(order);
            self.inbox.wake_engine();
        }
    }

    fn leave(&self, to: usize, world: u64) {
        self.send_frame(&mut self.orders(), to, Key { world, ..LEFT }, [0, 0], &[]);
        self.inbox.wake_engine();
    }

    fn inbox(&self) -> &Inbox {
        &self.inbox
    }
}

/// The key of a frame that says that its sender makes no further call.
const LEFT: Key = Key { world: 0, domain: 0, op: u64::MAX, stage: u64::MAX };

/// The key of a frame that says that its sender's process exits; from rank 0, that all do.
const EXITS: Key = Key { stage: u64::MAX - 1, ..LEFT };

/// Notes that a run was aborted, so that the end of MPI does not wait for ranks that are gone.
#[derive(Debug)]
pub(super) struct Noted {
    pub(super) control: Arc<dyn Control>,
    pub(super) mpi: Arc<Mpi>,
}

impl Control for Noted {
    fn abort(&self, cause: AbortCause) {
        self.mpi.aborted.store(true, Ordering::Relaxed);
        self.control.abort(cause);
    }

    fn aborted(&self) -> Option<AbortCause> {
        let cause = self.control.aborted();
        if cause.is_some() {
            self.mpi.aborted.store(true, Ordering::Relaxed);
        }
        cause
    }

    fn leave(&self) {
        self.control.leave();
    }

    fn waiting(&self, operation: Option<Issued>) {
        self.control.waiting(operation);
    }
}

/// Ends MPI when the process exits. As with any MPI program, a process that is done waits here for the others, though not
/// forever; when one of them dies, the launcher ends all. After an abort nobody is waited for.
extern "C" fn end_at_exit() {
    let Some(Ok(mpi)) = MPI.get() else { return };
    mpi.orders().end = true;
    mpi.inbox.wake_engine();
    let start = Instant::now();
    while !mpi.orders().ended {
        let aborted = mpi.aborted.load(Ordering::Relaxed);
        let limit = exit_limit(aborted, Duration::from_millis(mpi.limit_ms.load(Ordering::Relaxed)));
        if start.elapsed() > limit {
            if !aborted {
                // The program has ended: nobody else would tell.
                eprintln!("rank {}: MPI has not ended within {limit:?}; this process exits without it", mpi.rank);
            }
            return;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// How long a process that exits waits for its thread of MPI. That gives up on others after a limit, and then MPI itself has
/// as long again as after an abort.
fn exit_limit(aborted: bool, limit: Duration) -> Duration {
    if aborted { 2 * END_LIMIT } else { limit + 4 * END_LIMIT }
}

/// The thread that speaks MPI.
fn run(started: &Sender<Result<Arc<Mpi>, String>>) {
    let mut engine = match Engine::init() {
        Ok(engine) => engine,
        Err(message) => {
            // Whoever started the thread waits for this.
            let _ = started.send(Err(message));
            return;
        }
    };
    let _ = started.send(Ok(engine.mpi.clone()));
    let served = engine.serve();
    let mpi = engine.mpi.clone();
    let calls = {
        let mut orders = mpi.orders();
        orders.is_closed = true;
        std::mem::take(&mut orders.calls)
    };
    // Their callers are told by that.
    drop(calls);
    if let Err(message) = served {
        mpi.inbox.fail(format!("MPI: {message}"));
    }
    // SAFETY: On the thread that has initialised MPI; after this it makes no call.
    let code = unsafe { ffi::MPI_Finalize() };
    if let Err(message) = check(code, "MPI_Finalize") {
        tracing::warn!("{message}");
    }
    mpi.orders().ended = true;
}

/// Requests under way.
struct Engine {
    mpi: Arc<Mpi>,
    comm: ffi::MPI_Comm,
    requests: Vec<ffi::MPI_Request>,
    /// What each request needs, in their order.
    flights: Vec<Flight>,
    /// Ranks that have told that they exit; on other ranks than 0, that one alone, for all.
    exiting: BTreeSet<usize>,
}

struct Flight {
    /// Done when none of its flights is left. Its bytes are alive until then.
    order: Rc<Order>,
    datatype: Option<ffi::MPI_Datatype>,
}

// Every call below is made on the thread that has initialised MPI, before it is finalised. Addresses that are handed over
// are those of variables that live during the call, or of memory that a flight keeps until its request is done.
impl Engine {
    fn init() -> Result<Self, String> {
        let (mut is_initialized, mut level, mut rank, mut world_size) = (0, 0, 0, 0);
        // SAFETY: May be called at any time.
        check(unsafe { ffi::MPI_Initialized(&mut is_initialized) }, "MPI_Initialized")?;
        if is_initialized != 0 {
            return Err("the program has initialised it; remove that, it is done here".to_owned());
        }
        let no_arguments = std::ptr::null_mut();
        // SAFETY: It was not initialised before, and arguments may be missing.
        let code =
            unsafe { ffi::MPI_Init_thread(no_arguments, no_arguments.cast(), ffi::RSMPI_THREAD_FUNNELED, &mut level) };
        check(code, "MPI_Init_thread")?;
        // SAFETY: See above.
        unsafe {
            let mut comm = ffi::RSMPI_COMM_WORLD;
            check(ffi::MPI_Comm_dup(ffi::RSMPI_COMM_WORLD, &mut comm), "MPI_Comm_dup")?;
            check(ffi::MPI_Comm_set_errhandler(comm, ffi::RSMPI_ERRORS_RETURN), "MPI_Comm_set_errhandler")?;
            check(ffi::MPI_Comm_rank(comm, &mut rank), "MPI_Comm_rank")?;
            check(ffi::MPI_Comm_size(comm, &mut world_size), "MPI_Comm_size")?;
            let mpi = Mpi {
                rank: rank as usize,
                world_size: world_size as usize,
                inbox: Inbox::default(),
                orders: Mutex::default(),
                aborted: AtomicBool::new(false),
                limit_ms: AtomicU64::new(LEAST_END_LIMIT.as_millis() as u64),
            };
            Ok(Self { mpi: Arc::new(mpi), comm, requests: Vec::new(), flights: Vec::new(), exiting: BTreeSet::new() })
        }
    }

    /// Until the process exits.
    fn serve(&mut self) -> Result<(), String> {
        let mut pause = Duration::ZERO;
        let mut end: Option<Instant> = None;
        loop {
            let (new, calls, is_end) = {
                let mut orders = self.mpi.orders();
                (std::mem::take(&mut orders.new), std::mem::take(&mut orders.calls), orders.end)
            };
            let mut has_worked = !new.is_empty() || !calls.is_empty();
            for order in new {
                self.begin(order)?;
            }
            for call in calls {
                // Its caller is told by the channel that is dropped.
                let _ = catch_unwind(AssertUnwindSafe(call));
            }
            has_worked |= self.take_frames()?;
            has_worked |= self.test()?;
            if is_end && end.is_none() {
                end = Some(Instant::now());
                if self.mpi.rank > 0 {
                    self.mpi.tell_exit(0);
                }
            }
            if let Some(end) = end
                && self.has_ended(end.elapsed())
            {
                return self.take_frames().map(drop);
            }
            let longest = if end.is_some() { LONGEST_PAUSE_AT_END } else { LONGEST_PAUSE };
            if has_worked {
                pause = Duration::ZERO;
            } else if end.is_none() && self.requests.is_empty() && !self.mpi.inbox.is_awaited() {
                self.mpi.inbox.sleep_engine(None);
            } else if pause.is_zero() {
                pause = Duration::from_micros(1);
                thread::yield_now();
            } else {
                self.mpi.inbox.sleep_engine(Some(pause));
                pause = (2 * pause).min(longest);
            }
        }
    }

    /// Whether this process, which has waited for so long, may end: all others exit too, or nobody is waited for. Rank 0
    /// knows who has come, and tells the others when all have.
    fn has_ended(&mut self, waited: Duration) -> bool {
        let (mpi, num_others) = (&*self.mpi, self.mpi.world_size - 1);
        let num_awaited = if mpi.rank == 0 { num_others } else { 1 };
        if self.exiting.len() < num_awaited {
            let limit = Duration::from_millis(mpi.limit_ms.load(Ordering::Relaxed));
            // Rank 0 knows better who is missing, and speaks first.
            let grace = if mpi.rank == 0 { Duration::ZERO } else { END_LIMIT };
            if waited > limit + grace && !mpi.aborted.load(Ordering::Relaxed) {
                self.give_up(limit);
            }
        } else if mpi.rank == 0 && self.exiting.insert(0) {
            (1..=num_others).for_each(|rank| mpi.tell_exit(rank));
            return num_others == 0;
        } else if self.requests.is_empty() && mpi.orders().new.is_empty() {
            return true;
        }
        mpi.aborted.load(Ordering::Relaxed) && waited > END_LIMIT
    }

    /// Names the ranks that have not come to the end, and ends all processes.
    fn give_up(&self, limit: Duration) {
        let has_come = |rank: &usize| self.exiting.contains(rank);
        let missing: Vec<usize> = match self.mpi.rank {
            0 => (1..self.mpi.world_size).filter(|rank| !has_come(rank)).collect(),
            _ => vec![0],
        };
        // The program has ended: nobody else would tell.
        eprintln!(
            "rank {}: this process is done, and waits at the end of MPI for ranks {missing:?} since {limit:?}; all processes are \
             ended. What follows `launch` must not take one rank longer than the others by more than `timeout_s`",
            self.mpi.rank
        );
        // SAFETY: See above. It does not return, or else the launcher ends this process.
        unsafe { ffi::MPI_Abort(self.comm, 1) };
    }

    /// In pieces, which arrive in the order in which they are sent, as MPI promises of messages with one tag.
    fn begin(&mut self, order: Order) -> Result<(), String> {
        let order = Rc::new(order);
        let (peer, tag) = (order.peer as c_int, order.tag as c_int);
        for spans in pieces(order.bytes.spans()) {
            let (start, count, datatype) = match spans[..] {
                [span] => (span.start.cast(), span.len as c_int, None),
                _ => (std::ptr::null_mut::<c_void>(), 1, Some(datatype_of(&spans)?)),
            };
            // SAFETY: See above. A datatype of absolute addresses is used with the address zero.
            unsafe {
                let mut request = ffi::RSMPI_REQUEST_NULL;
                let kind = datatype.unwrap_or(ffi::RSMPI_UINT8_T);
                let code = match order.receipt {
                    None => ffi::MPI_Isend(start, count, kind, peer, tag, self.comm, &mut request),
                    Some(_) => ffi::MPI_Irecv(start, count, kind, peer, tag, self.comm, &mut request),
                };
                check(code, if order.receipt.is_none() { "MPI_Isend" } else { "MPI_Irecv" })?;
                self.requests.push(request);
            }
            self.flights.push(Flight { order: order.clone(), datatype });
        }
        Ok(())
    }

    /// Delivers the frames that have arrived; tells whether there was one.
    fn take_frames(&mut self) -> Result<bool, String> {
        let mut any = false;
        loop {
            let (mut found, mut count) = (0, 0);
            // SAFETY: See above. A status is plain numbers.
            let (bytes, source) = unsafe {
                let mut message = ffi::RSMPI_MESSAGE_NULL;
                let mut status: ffi::MPI_Status = std::mem::zeroed();
                let tag = FRAME_TAG as c_int;
                let code =
                    ffi::MPI_Improbe(ffi::RSMPI_ANY_SOURCE, tag, self.comm, &mut found, &mut message, &mut status);
                check(code, "MPI_Improbe")?;
                if found == 0 {
                    return Ok(any);
                }
                check(ffi::MPI_Get_count(&status, ffi::RSMPI_UINT8_T, &mut count), "MPI_Get_count")?;
                let mut bytes = vec![0; count as usize];
                let ignore = ffi::RSMPI_STATUS_IGNORE;
                let code = ffi::MPI_Mrecv(bytes.as_mut_ptr().cast(), count, ffi::RSMPI_UINT8_T, &mut message, ignore);
                check(code, "MPI_Mrecv")?;
                (bytes, status.MPI_SOURCE as usize)
            };
            any = true;
            self.deliver(source, &bytes)?;
        }
    }

    fn deliver(&mut self, source: usize, bytes: &[u8]) -> Result<(), String> {
        let (numbers, head) = bytes.as_chunks::<8>().0.split_at_checked(FRAME_NUMBERS).unzip();
        let (Some(numbers), Some(_)) = (numbers, head) else {
            return Err(format!("rank {source} sent {} bytes that are no frame", bytes.len()));
        };
        let number = |index: usize| u64::from_le_bytes(numbers[index]);
        let key = Key { world: number(0), domain: number(1), op: number(2), stage: number(3) };
        if key == (Key { world: key.world, ..LEFT }) {
            self.mpi.inbox.leave(key.world, source);
            return Ok(());
        }
        if key == EXITS {
            self.exiting.insert(source);
            return Ok(());
        }
        let head = bytes[8 * FRAME_NUMBERS..].to_vec();
        let frame = Frame { head, payload_bytes: number(4) as usize, tag: number(5) };
        let landing = self.mpi.inbox.deliver(source, key, frame);
        match landing.and_then(|landing| self.mpi.order_of(source, landing)) {
            Some(order) => self.begin(order),
            None => Ok(()),
        }
    }

    /// Ends the requests that are done; tells whether there was one.
    fn test(&mut self) -> Result<bool, String> {
        if self.requests.is_empty() {
            return Ok(false);
        }
        let mut num_done = 0;
        let mut done = vec![0; self.requests.len()];
        // SAFETY: See above. The list of places has room for all requests.
        let code = unsafe {
            let (count, requests) = (self.requests.len() as c_int, self.requests.as_mut_ptr());
            ffi::MPI_Testsome(count, requests, &mut num_done, done.as_mut_ptr(), ffi::RSMPI_STATUSES_IGNORE)
        };
        check(code, "MPI_Testsome")?;
        done.truncate(usize::try_from(num_done).unwrap_or_default());
        // From the back, so that the places of the others stay.
        done.sort_unstable();
        for &place in done.iter().rev() {
            self.requests.swap_remove(place as usize);
            let flight = self.flights.swap_remove(place as usize);
            if let Some(mut datatype) = flight.datatype {
                // SAFETY: Made in `begin`, and used by this request alone.
                check(unsafe { ffi::MPI_Type_free(&mut datatype) }, "MPI_Type_free")?;
            }
            if let Some(Order { receipt: Some(receipt), .. }) = Rc::into_inner(flight.order) {
                self.mpi.inbox.complete(&receipt);
            }
        }
        Ok(!done.is_empty())
    }
}

/// Spans of at most [`PIECE_BYTES`] together, which are one message. Both ends divide alike, wherever their spans begin.
fn pieces(spans: &[Span]) -> Vec<Vec<Span>> {
    let mut pieces: Vec<Vec<Span>> = Vec::new();
    let mut room = 0;
    for &Span { mut start, mut len } in spans {
        while len > 0 {
            if room == 0 {
                pieces.push(Vec::new());
                room = PIECE_BYTES;
            }
            let taken = len.min(room);
            pieces.last_mut().expect("a piece with room is the last").push(Span { start, len: taken });
            start = start.wrapping_add(taken);
            (len, room) = (len - taken, room - taken);
        }
    }
    pieces
}

/// A datatype of bytes at absolute addresses, so that MPI sends and receives in place.
fn datatype_of(spans: &[Span]) -> Result<ffi::MPI_Datatype, String> {
    let (starts, lens): (Vec<_>, Vec<_>) =
        spans.iter().map(|span| (span.start as ffi::MPI_Aint, span.len as c_int)).unzip();
    // SAFETY: On the thread of MPI; both lists live during the call.
    unsafe {
        let mut datatype = ffi::RSMPI_DATATYPE_NULL;
        let count = starts.len() as c_int;
        let code =
            ffi::MPI_Type_create_hindexed(count, lens.as_ptr(), starts.as_ptr(), ffi::RSMPI_UINT8_T, &mut datatype);
        check(code, "MPI_Type_create_hindexed")?;
        check(ffi::MPI_Type_commit(&mut datatype), "MPI_Type_commit")?;
        Ok(datatype)
    }
}

fn check(code: c_int, call: &str) -> Result<(), String> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = [0_u8; ffi::MPI_MAX_ERROR_STRING as usize + 1];
    let mut len = 0;
    // SAFETY: The text has room for any message.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &mut len) };
    let text = text.get(..usize::try_from(len).unwrap_or_default()).unwrap_or_default();
    Err(format!("{call} failed: {}", String::from_utf8_lossy(text)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ends_divide_a_payload_alike_and_lose_nothing() {
        let span = |start: usize, len| Span { start: start as *mut u8, len };
        let lens = |spans: &[Span]| {
            let of = |piece: &Vec<Span>| piece.iter().map(|span| span.len).sum::<usize>();
            pieces(spans).iter().map(of).collect::<Vec<_>>()
        };
        let whole = [span(0, 2 * PIECE_BYTES + 7)];
        let cut = [span(9, 100), span(PIECE_BYTES, PIECE_BYTES), span(0, 0), span(5 * PIECE_BYTES, PIECE_BYTES - 93)];
        assert_eq!(lens(&whole), [PIECE_BYTES, PIECE_BYTES, 7]);
        assert_eq!(lens(&cut), lens(&whole));
        assert_eq!(lens(&[]), [0; 0]);
        let second: Vec<_> = pieces(&cut)[1].iter().map(|span| (span.start as usize, span.len)).collect();
        assert_eq!(second, [(2 * PIECE_BYTES - 100, 100), (5 * PIECE_BYTES, PIECE_BYTES - 100)]);
    }

    #[test]
    fn an_exit_outlasts_the_wait_for_other_processes_and_has_an_end() {
        let limit = LEAST_END_LIMIT;
        // Rank 0 gives up after the limit, the others a moment later.
        assert!(exit_limit(false, limit) > limit + 2 * END_LIMIT);
        assert!(exit_limit(true, limit) > END_LIMIT && exit_limit(true, limit) < limit);
    }
}
