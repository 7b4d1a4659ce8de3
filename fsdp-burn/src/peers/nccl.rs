//! Ranks with a GPU each: NCCL, on a CUDA stream of its own beside that of Burn's kernels.
//!
//! All that knows of CUDA's pointers, streams and events is here, and all of it runs on the thread that CubeCL has for the GPU,
//! in the order of its kernels, where the GPU's context is current. An operation is put on NCCL's stream behind an event of the
//! kernels before it; what comes after it waits for its own event when it is finished, and no host thread waits for either.
//!
//! Until then it holds handles of its tensors, so that no kernel writes into them in place, and their resources, so that
//! CubeCL neither gives their memory to others nor moves it.
//!
//! A thread looks after operations that take longer than the run's time limit, or whose run has ended elsewhere: it aborts the
//! communicator, since the GPU would wait for ever, and ends the run with that cause.

use std::collections::BTreeMap;
use std::fmt;
use std::iter;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use burn::backend::TensorMetadata;
use burn::tensor::{DType, Shape, StreamId};
use burn_cubecl::cubecl::cuda::CudaRuntime;
use burn_cubecl::cubecl::device_handle::DeviceHandle;
use burn_cubecl::cubecl::server::{Handle, Server as _, ServerError};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use bytes::Bytes;
use cubecl_runtime::server::ServerStorage;
use cubecl_runtime::storage::{ComputeStorage, ManagedResource};
use cubecl_server::runtime::Runtime;
use cubecl_server::stream::{FailureStore, WriteScoped};
use cudarc::driver::result as cuda;
use cudarc::driver::sys::{CUcontext, CUevent, CUevent_flags, CUevent_wait_flags, CUstream};
use cudarc::nccl::result as nccl;
use cudarc::nccl::sys::{ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclUniqueId};
use fsdp_core::{AbortCause, CommError, Communicator, Config, DeviceChoice, Exchange, OpKind, OpTag, Phase};

use super::{CubeDevice, CubeFloat, Group, Peers, Ticket, as_cube, of_cube};
use crate::Error;

/// CubeCL's side of a GPU, which has no public name of its own.
type Server = <CudaRuntime as Runtime>::Server;
type Gpu = <<Server as ServerStorage>::Storage as ComputeStorage>::Resource;

/// How often the watching thread looks.
const LOOK: Duration = Duration::from_millis(50);

/// The first version with bfloat16: 2.10.0.
const LEAST_VERSION: i32 = 2_10_00;

/// One rank's end of a communicator of NCCL.
pub(crate) struct Nccl {
    gpu: DeviceHandle<Server>,
    link: Arc<Link>,
    next: AtomicU64,
    /// Of operations that are not finished.
    results: Mutex<BTreeMap<u64, Vec<CubeFloat>>>,
}

/// What the GPU's thread and the watching one know of it.
struct Link {
    raw: Raw,
    name: String,
    world: Arc<dyn Communicator>,
    /// Of the communicator.
    num_ranks: usize,
    timeout: Duration,
    /// Operations are put on the stream of the kernels.
    is_inline: bool,
    in_flight: Mutex<BTreeMap<u64, InFlight>>,
    failure: Mutex<Option<String>>,
    /// The communicator must not be used any more.
    is_over: AtomicBool,
}

/// Handles of the driver's and NCCL's.
#[derive(Clone, Copy)]
struct Raw {
    context: CUcontext,
    stream: CUstream,
    communicator: ncclComm_t,
}

// SAFETY: these are names of objects that the driver and NCCL lock by themselves. Operations are put on the stream by the GPU's
// thread only, and aborting a communicator is allowed to any thread.
unsafe impl Send for Raw {}
// SAFETY: as above.
unsafe impl Sync for Raw {}

/// An event of the driver's, destroyed with it.
struct Event(CUevent);

// SAFETY: events may be used by any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    fn new() -> Result<Self, String> {
        cuda::event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING).map(Self).map_err(said)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the event was created with this value, which nobody else has. The driver keeps it until it was reached.
        let _ = unsafe { cuda::event::destroy(self.0) };
    }
}

/// An operation that the GPU may be at.
struct InFlight {
    kind: OpKind,
    tag: OpTag,
    begun: Instant,
    done: Event,
    /// What it reads and writes.
    _held: Vec<[(Handle, ManagedResource<Gpu>); 2]>,
}

/// One tensor of an operation.
struct Transfer {
    source: Handle,
    target: Handle,
    /// As NCCL counts: elements of a block, or of a whole that every rank gets.
    count: usize,
    dtype: ncclDataType_t,
}

impl Nccl {
    /// Connects the ranks of `group`, each of which calls this with the same name, and its own GPU.
    ///
    /// # Errors
    /// If NCCL is missing or too old, or the ranks do not come together within the run's time limit.
    pub(crate) fn connect(config: &Config, device: &CubeDevice, name: &str, group: Group) -> Result<Self, Error> {
        let (choice, timeout) = (config.device, config.timeout());
        check_nccl(choice)?;
        let gpu = DeviceHandle::<Server>::new(device.client().service_id().device);
        let tag = OpTag::new(0, Phase::Init, format!("communicator of NCCL for {name}"));
        let id = match group.own.rank() {
            0 => {
                let id =
                    nccl::get_uniqueid().map_err(|error| refused(choice, format!("NCCL has failed: {:?}", error.0)))?;
                Some(id.internal.iter().map(|&byte| byte as u8).collect::<Bytes>())
            }
            _ => None,
        };
        let told = group.own.broadcast(&tag, 0, id)?;
        let num_ranks = group.ranks.len();
        let raw = within(timeout, &*group.world, {
            let (gpu, rank, stream) = (gpu.clone(), group.own.rank(), StreamId::current());
            move || gpu.submit_blocking(move |server| join(server, stream, &told, rank, num_ranks))
        });
        let raw = match raw {
            Ok(Some(Ok(Ok(raw)))) => raw,
            Ok(Some(Ok(Err(problem)))) => return Err(refused(choice, problem)),
            Ok(Some(Err(_))) => return Err(refused(choice, "the GPU's thread has ended".into())),
            Ok(None) => {
                let problem = format!("the ranks have not come together in NCCL within {timeout:?}");
                return Err(refused(choice, problem));
            }
            Err(error) => return Err(error.into()),
        };
        let link = Arc::new(Link {
            raw,
            name: name.to_owned(),
            world: group.world,
            num_ranks,
            timeout,
            is_inline: config.collectives == Exchange::Inline,
            in_flight: Mutex::default(),
            failure: Mutex::default(),
            is_over: AtomicBool::new(false),
        });
        let watched = Arc::downgrade(&link);
        let watch = move || {
            while let Some(link) = watched.upgrade() {
                link.look();
                drop(link);
                thread::sleep(LOOK);
            }
        };
        let watching = thread::Builder::new().name(format!("watch {name}")).spawn(watch);
        watching
            .map_err(|source| Error::Io { what: format!("cannot start the thread that watches {name}"), source })?;
        Ok(Self { gpu, link, next: AtomicU64::new(0), results: Mutex::default() })
    }
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Nccl({}, rank {})", self.link.name, self.link.world.rank())
    }
}

impl Peers for Nccl {
    fn start(&self, kind: OpKind, tag: OpTag, flats: Vec<CubeFloat>) -> Result<Ticket, CommError> {
        self.link.check()?;
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let mut transfers = Vec::new();
        let results = flats.into_iter().map(|flat| self.transfer(kind, flat, &mut transfers)).collect();
        lock(&self.results).insert(number, results);
        let (link, stream) = (self.link.clone(), StreamId::current());
        self.gpu.submit(move |server| link.launch(server, stream, number, (kind, tag), transfers));
        // What is submitted waits for more of it otherwise.
        self.gpu.flush_queue();
        Ok(Ticket { number })
    }

    fn finish(&self, ticket: Ticket) -> Result<Vec<CubeFloat>, CommError> {
        self.link.check()?;
        let (link, stream) = (self.link.clone(), StreamId::current());
        self.gpu.submit(move |server| link.finish(server, stream, ticket.number));
        self.gpu.flush_queue();
        let results = lock(&self.results).remove(&ticket.number);
        let Some(results) = results else { unreachable!("an operation is started once, and finished once") };
        Ok(results)
    }
}

impl Nccl {
    const NO_FUSION: &str = "with fusion no communicator is connected";

    /// The tensor that the result will be in. Tensors without elements take no part.
    fn transfer(&self, kind: OpKind, flat: CubeFloat, transfers: &mut Vec<Transfer>) -> CubeFloat {
        let Some(flat) = as_cube(flat) else { unreachable!("{}", Self::NO_FUSION) };
        let flat = into_contiguous(flat);
        let (len, num_ranks) = (flat.shape().num_elements(), self.link.num_ranks);
        let (result_len, count) = match kind {
            OpKind::AllGather => (len * num_ranks, len),
            OpKind::ReduceScatter => (len / num_ranks, len / num_ranks),
            _ => (len, len),
        };
        let of_cube = |tensor| match of_cube(tensor) {
            Some(tensor) => tensor,
            None => unreachable!("{}", Self::NO_FUSION),
        };
        if len == 0 {
            return of_cube(flat);
        }
        let CubeTensor { client, handle: source, device, dtype, .. } = flat;
        // Of equal size in every step, so memory of its own that is used again by the next.
        let num_bytes = result_len * dtype.size();
        let target = client.memory_persistent_allocation((), |()| client.empty(num_bytes));
        transfers.push(Transfer { source, target: target.clone(), count, dtype: data_type(dtype) });
        of_cube(CubeTensor::new_contiguous(client, device, Shape::from(vec![result_len]), target, dtype))
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        let link = self.link.clone();
        // On the GPU's thread, behind all that was put on the stream. One that has ended leaves it to the process's end.
        self.gpu.submit(move |_| link.leave());
        self.gpu.flush_queue();
    }
}

impl Link {
    /// The error of an operation that has failed on the GPU's thread.
    fn check(&self) -> Result<(), CommError> {
        let rank = self.world.rank();
        let failure = lock(&self.failure).clone();
        let own = failure.map(|message| AbortCause::RankFailed { rank, message });
        match own.or_else(|| self.world.aborted()) {
            Some(cause) => Err(CommError::Aborted { rank, cause }),
            None => Ok(()),
        }
    }

    fn launch(
        &self,
        server: &mut Server,
        stream: StreamId,
        number: u64,
        (kind, tag): (OpKind, OpTag),
        transfers: Vec<Transfer>,
    ) {
        if self.is_over.load(Ordering::Acquire) {
            return;
        }
        let targets: Vec<_> = transfers.iter().map(|transfer| transfer.target.clone().binding()).collect();
        let place = format!("{kind} ({tag})");
        // A panic on this thread would only be logged, and the other ranks would wait.
        let launched =
            catch_unwind(AssertUnwindSafe(|| self.try_launch(server, stream, number, (kind, tag), transfers)));
        let problem = match launched {
            Ok(Ok(())) => return,
            Ok(Err(problem)) => problem,
            Err(_) => "a panic, whose message was printed before".to_owned(),
        };
        let reason = format!("{} of NCCL has failed in {place}: {problem}", self.name);
        let error = ServerError::Generic { reason: reason.clone(), backtrace: Default::default() };
        for target in &targets {
            // Whoever reads it gets the error in place of what was there.
            server.write_streams().taint(error.clone(), iter::once(target));
        }
        self.fail(reason);
    }

    fn try_launch(
        &self,
        server: &mut Server,
        stream: StreamId,
        number: u64,
        (kind, tag): (OpKind, OpTag),
        transfers: Vec<Transfer>,
    ) -> Result<(), String> {
        let mut held = Vec::new();
        for Transfer { source, target, .. } in &transfers {
            let mut resource = |handle: &Handle| {
                // Makes the context current, and the stream wait for whatever writes the tensor elsewhere.
                let resource = ServerStorage::get_resource(server, handle.clone().binding(), stream).map_err(said)?;
                Ok::<_, String>((handle.clone(), resource))
            };
            held.push([resource(source)?, resource(target)?]);
        }
        let compute = compute_stream(server, stream)?;
        let (ready, done) = (Event::new()?, Event::new()?);
        let Raw { stream: own, communicator, .. } = self.raw;
        let own = if self.is_inline { compute } else { own };
        // SAFETY: streams, events and communicator are alive, and the context that they belong to is current. The pointers are
        // of memory that `held` keeps where it is until the operation is over, and as long as `count` says: a source and a
        // target were made for it by `Nccl::transfer`.
        unsafe {
            cuda::event::record(ready.0, compute).map_err(said)?;
            cuda::stream::wait_event(own, ready.0, CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT).map_err(said)?;
            nccl::group_start().map_err(code)?;
            for (transfer, [(_, source), (_, target)]) in transfers.iter().zip(&held) {
                let (from, to) = (source.resource().ptr as *const _, target.resource().ptr as *mut _);
                let (count, dtype, sum) = (transfer.count, transfer.dtype, ncclRedOp_t::ncclSum);
                let put = match kind {
                    OpKind::AllGather => nccl::all_gather(from, to, count, dtype, communicator, own as _),
                    OpKind::ReduceScatter => nccl::reduce_scatter(from, to, count, dtype, sum, communicator, own as _),
                    _ => nccl::all_reduce(from, to, count, dtype, sum, communicator, own as _),
                };
                put.map_err(code)?;
            }
            nccl::group_end().map_err(code)?;
            cuda::event::record(done.0, own).map_err(said)?;
        }
        lock(&self.in_flight).insert(number, InFlight { kind, tag, begun: Instant::now(), done, _held: held });
        Ok(())
    }

    /// Lets what comes next wait for the operation, and then lets go of what it has used.
    fn finish(&self, server: &mut Server, stream: StreamId, number: u64) {
        let Some(operation) = lock(&self.in_flight).remove(&number) else { return };
        let waits = compute_stream(server, stream).and_then(|compute| {
            // SAFETY: both are alive, and of the context that is current.
            let waits = unsafe {
                cuda::stream::wait_event(compute, operation.done.0, CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT)
            };
            waits.map_err(said)
        });
        if let Err(problem) = waits {
            self.fail(format!("{} cannot wait for {} ({}): {problem}", self.name, operation.kind, operation.tag));
        }
    }

    /// Ends what waits in vain.
    fn look(&self) {
        if self.is_over.load(Ordering::Acquire) {
            return;
        }
        let has_ended = self.world.aborted().is_some();
        let late = {
            let in_flight = lock(&self.in_flight);
            // The first is the first to end.
            let Some(first) = in_flight.values().next() else { return };
            if !has_ended && first.begun.elapsed() <= self.timeout {
                return;
            }
            // SAFETY: the context is that of the GPU, which lives as long as the process; the event is alive.
            let is_reached =
                unsafe { cuda::ctx::set_current(self.raw.context).is_ok() && cuda::event::query(first.done.0).is_ok() };
            if is_reached {
                return;
            }
            format!("{} ({}) takes longer than {:?} in NCCL", first.kind, first.tag, self.timeout)
        };
        self.fail(if has_ended { "the run has ended elsewhere".to_owned() } else { late });
    }

    /// The communicator is over, and the run with it.
    fn fail(&self, reason: String) {
        if self.is_over.swap(true, Ordering::AcqRel) {
            return;
        }
        *lock(&self.failure) = Some(reason.clone());
        // SAFETY: it is alive, and `is_over` lets this happen once. NCCL allows it beside other calls, which return then.
        let _ = unsafe { nccl::comm_abort(self.raw.communicator) };
        self.world.abort(AbortCause::RankFailed { rank: self.world.rank(), message: reason });
    }

    /// Gives everything back, after the last operation.
    fn leave(&self) {
        if self.is_over.swap(true, Ordering::AcqRel) {
            return;
        }
        // SAFETY: nothing uses the two any more: this thread is the one that does. Where others have failed, ending the
        // communicator in order would wait for them.
        unsafe {
            let _ = match self.world.aborted() {
                Some(_) => nccl::comm_abort(self.raw.communicator),
                None => nccl::comm_destroy(self.raw.communicator),
            };
            let _ = cuda::stream::destroy(self.raw.stream);
        }
    }
}

/// The CUDA stream of the kernels that a thread launches.
fn compute_stream(server: &mut Server, stream: StreamId) -> Result<CUstream, String> {
    let mut resolved = server.write_streams().resolve(stream, iter::empty()).map_err(said)?;
    Ok(resolved.current().sys)
}

/// Joins the communicator, on the GPU's thread. Waits for all ranks.
fn join(server: &mut Server, stream: StreamId, told: &[u8], rank: usize, num_ranks: usize) -> Result<Raw, String> {
    // Makes the context current.
    server.flush(stream).map_err(said)?;
    let context = cuda::ctx::get_current().map_err(said)?.ok_or("the GPU has no context")?;
    let own = cuda::stream::create(cuda::stream::StreamKind::NonBlocking).map_err(said)?;
    let mut id = ncclUniqueId { internal: [0; 128] };
    if told.len() != id.internal.len() {
        return Err(format!("rank 0 has told {} bytes in place of {}", told.len(), id.internal.len()));
    }
    for (byte, &told) in id.internal.iter_mut().zip(told) {
        *byte = told as _;
    }
    let mut communicator: ncclComm_t = std::ptr::null_mut();
    // SAFETY: the pointer is of a variable, the identifier is rank 0's, and every rank calls this with its own number.
    unsafe { nccl::comm_init_rank(&mut communicator, num_ranks as _, id, rank as _) }.map_err(code)?;
    Ok(Raw { context, stream: own, communicator })
}

/// The result of `call`, run on a thread of its own, or `None` if it takes longer than `timeout`; then it is left behind.
fn within<T: Send + 'static>(
    timeout: Duration,
    world: &dyn Communicator,
    call: impl FnOnce() -> T + Send + 'static,
) -> Result<Option<T>, CommError> {
    let (sender, arrival) = channel();
    // Nobody may wait any more.
    let _waiting = thread::spawn(move || drop(sender.send(call())));
    let begun = Instant::now();
    loop {
        match arrival.recv_timeout(LOOK) {
            Ok(result) => return Ok(Some(result)),
            Err(RecvTimeoutError::Disconnected) => return Ok(None),
            Err(RecvTimeoutError::Timeout) if begun.elapsed() > timeout => return Ok(None),
            Err(RecvTimeoutError::Timeout) => {}
        }
        if let Some(cause) = world.aborted() {
            return Err(CommError::Aborted { rank: world.rank(), cause });
        }
    }
}

/// Looks for NCCL before anything calls it: a library that is missing would be a panic.
pub(crate) fn check_nccl(choice: DeviceChoice) -> Result<(), Error> {
    // SAFETY: loading NCCL runs nothing but its own constructors.
    if !unsafe { cudarc::nccl::sys::is_culib_present() } {
        return Err(refused(choice, "NCCL is not found: there is no libnccl.so that can be loaded".into()));
    }
    match catch_unwind(nccl::get_nccl_version) {
        Ok(Ok(version)) if version >= LEAST_VERSION => Ok(()),
        Ok(Ok(version)) => Err(refused(choice, format!("NCCL is of version {version}, and {LEAST_VERSION} is needed"))),
        Ok(Err(error)) => Err(refused(choice, format!("NCCL has failed: {:?}", error.0))),
        Err(_) => Err(refused(choice, "the libnccl.so that is found is not NCCL, or lacks functions".into())),
    }
}

fn refused(choice: DeviceChoice, problem: String) -> Error {
    Error::Device {
        device: choice,
        problem,
        remedy: "install NCCL 2.10 or newer (libnccl2 and libnccl-dev); where only libnccl.so.2 is there, link libnccl.so to it in \
                 a folder of LD_LIBRARY_PATH; NCCL_DEBUG=INFO tells more. Or set `collectives = \"host\"`",
    }
}

fn data_type(dtype: DType) -> ncclDataType_t {
    match dtype {
        DType::F32 => ncclDataType_t::ncclFloat32,
        DType::F64 => ncclDataType_t::ncclFloat64,
        DType::BF16 => ncclDataType_t::ncclBfloat16,
        DType::F16 => ncclDataType_t::ncclFloat16,
        other => unreachable!("parameters of {other:?} are refused when a model is sharded"),
    }
}

fn said(error: impl fmt::Debug) -> String {
    format!("{error:?}")
}

fn code(error: nccl::NcclError) -> String {
    format!("{:?}", error.0)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
