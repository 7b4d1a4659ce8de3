//! Ranks that an MPI launcher has started, on one host or several.
//!
//! [Note: One thread speaks MPI]
//! MPI is initialised, called and finalised on one thread of the process, so any level of thread support of the library
//! will do. Ranks hand it messages and wait in the [`Inbox`](crate::hosts::Inbox). Requests are all non-blocking: the thread
//! polls them while there are any, with pauses that grow to a fraction of a millisecond, since the cores are busy with
//! training; without requests and without a rank that waits for another host it sleeps. On one host it does nothing.
//!
//! All messages go through one duplicate of the world's communicator. What would be a communicator for each channel and
//! group is a [`Key`](crate::hosts::Key) in a small frame in front of each message: MPI makes communicators collectively and
//! in one order, but ranks ask for channels in any order and on any thread.
//!
//! The memory that ranks of a host share does not come from MPI: its shared windows are allocated and freed by all ranks
//! together, but a gathered tensor lives until its last reader drops it. See [Note: One copy per host].

mod addresses;
mod library;

use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use library::Mpi;
use library::Noted;

use crate::hosts::{self, Network};
use crate::{
    CommError, Communicator, Control, ControlChannel, Entrance, Member, OpTag, Phase, RendezvousError, Secret,
};

/// How long rank 0 is looked for, once it has told where it listens.
const REACH_LIMIT: Duration = Duration::from_secs(30);

/// The world of an MPI launcher: `mpirun`, `mpiexec` or `srun`.
#[derive(Debug)]
pub struct MpiWorld;

impl MpiWorld {
    /// Connects this process with all others that the launcher has started. Every process makes the call, as often as the
    /// others.
    ///
    /// Ranks of one host share memory, and one of them talks to the other hosts in gathers. `timeout` bounds every single
    /// wait, not a step: it must exceed the longest time by which one rank may be ahead of another.
    ///
    /// MPI is initialised at the first call, and finalised when the process exits. There processes wait for each other, for the
    /// longest `timeout` of a call, a minute at the least; then all are ended, with the missing ones named.
    ///
    /// # Errors
    /// [`CommError::Engine`] if MPI cannot be used, and [`CommError::Timeout`] if a process does not come.
    pub fn connect(control: Arc<dyn Control>, timeout: Duration) -> Result<Arc<dyn Communicator>, CommError> {
        let mpi = Mpi::start()?;
        mpi.allow(timeout);
        let control = Arc::new(Noted { control, mpi: mpi.clone() });
        hosts::connect(mpi, control, timeout)
    }

    /// Makes a control channel between all processes that the launcher has started: rank 0 tells the others by MPI where it
    /// listens, and the run's secret. Where all are on one host, the port is open to that host only.
    ///
    /// # Errors
    /// [`CommError::Engine`] if MPI cannot be used or a process cannot reach rank 0, [`CommError::Timeout`] if one does not
    /// come.
    pub fn control(timeout: Duration) -> Result<Arc<ControlChannel>, CommError> {
        let mpi = Mpi::start()?;
        mpi.allow(timeout);
        let (rank, world_size) = (mpi.rank(), mpi.world_size());
        let failed = |message: String| CommError::Engine { rank, tag: OpTag::new(0, Phase::Init, "control"), message };
        let refused = |error: RendezvousError| failed(error.to_string());
        let hosts = mpi.exchange(&mpi.host(), timeout)?;
        let is_near = |host: &String| *host == hosts[0];
        let mut told = String::new();
        let mut own = None;
        if rank == 0 {
            let secret = Secret::random().map_err(refused)?;
            let near_only = hosts.iter().all(is_near);
            let all = addresses::of_this_host();
            let entrance = open(near_only, &all).map_err(refused)?;
            let digits: String = secret.bytes().iter().map(|byte| format!("{byte:02x}")).collect();
            let addresses: Vec<String> = all.iter().map(ToString::to_string).collect();
            told = format!("{digits} {} {}", entrance.address().port(), addresses.join(" "));
            own = Some((secret, entrance));
        }
        let told = mpi.exchange(&told, timeout)?;
        if let Some((secret, entrance)) = own {
            let member = Member { rank, world_size, secret, timeout, start_limit: timeout };
            return ControlChannel::host(entrance, &member).map_err(refused);
        }
        let words: Vec<&str> = told[0].split_whitespace().collect();
        let [digits, port, addresses @ ..] = &words[..] else {
            return Err(failed("rank 0 has not told where it listens; its own error tells why".to_owned()));
        };
        let secret =
            (0..digits.len() / 2).filter_map(|at| u8::from_str_radix(digits.get(2 * at..2 * at + 2)?, 16).ok());
        let secret = Secret::new(secret.collect::<Vec<u8>>()).map_err(refused)?;
        let limit = timeout.min(REACH_LIMIT);
        let member = Member { rank, world_size, secret, timeout, start_limit: limit };
        let near = ["127.0.0.1"];
        let addresses = if is_near(&hosts[rank]) { &near[..] } else { addresses };
        let address = reachable(addresses, port, limit);
        let Some(address) = address else {
            let all = addresses.join(", ");
            let remedy = "See whether its process still runs, and look for a firewall";
            return Err(failed(format!(
                "rank 0 is not reached within {limit:?} at any of {all}, port {port}. {remedy}"
            )));
        };
        ControlChannel::join(&address, &member).map_err(refused)
    }
}

/// A free port, for this host only or at its addresses.
fn open(near_only: bool, addresses: &[IpAddr]) -> Result<Entrance, RendezvousError> {
    if near_only {
        return Entrance::open("127.0.0.1", 0);
    }
    let is_v6_alone = std::fs::read_to_string("/proc/sys/net/ipv6/bindv6only").is_ok_and(|text| text.trim() == "1");
    Entrance::open(addresses::to_listen_at(addresses, is_v6_alone), 0).or_else(|_| Entrance::open("0.0.0.0", 0))
}

/// The first of some addresses that answers.
fn reachable(addresses: &[&str], port: &str, limit: Duration) -> Option<String> {
    let port = port.parse().ok()?;
    let addresses: Vec<IpAddr> = addresses.iter().filter_map(|address| address.parse().ok()).collect();
    let end = Instant::now() + limit;
    while Instant::now() < end {
        for &address in &addresses {
            let socket = SocketAddr::new(address, port);
            if TcpStream::connect_timeout(&socket, Duration::from_secs(1)).is_ok() {
                return Some(socket.to_string());
            }
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    None
}
