//! The other side of an [`Entrance`](super::Entrance): a rank that joins, and tries again until its time is up.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

use super::handshake::{self, HELLO_BYTES, Terms, VERDICT_BYTES};
use super::{Refusal, RendezvousError};

/// For one try.
const TRY: Duration = Duration::from_secs(5);
/// Between tries.
const PAUSE: Duration = Duration::from_millis(50);
/// After so long without anybody who listens, a warning says so.
const WARN: Duration = Duration::from_secs(5);

/// For how long a rank tries.
#[derive(Clone, Copy, Debug)]
pub(crate) struct JoinLimits {
    /// In all.
    pub(crate) all: Duration,
    /// While nobody listens there.
    pub(crate) refused: Duration,
}

/// Why one try has failed.
enum Failed {
    /// Another one may succeed.
    Io(io::Error),
    Refused(Refusal),
}

impl From<io::Error> for Failed {
    fn from(error: io::Error) -> Self {
        Failed::Io(error)
    }
}

/// Returns a connection from rank `rank` to rank `wanted`, which listens at `address`, a host with a port.
pub(crate) fn join(
    address: &str,
    [rank, wanted]: [usize; 2],
    terms: &Terms,
    limits: JoinLimits,
) -> Result<TcpStream, RendezvousError> {
    let started = Instant::now();
    let no_answer =
        |waited, reason| RendezvousError::NoAnswer { rank, wanted, address: address.to_owned(), waited, reason };
    let mut reason = "there was no time".to_owned();
    // Since when nobody listens, and whether that has been told.
    let mut refused: Option<(Instant, bool)> = None;
    loop {
        let Some(left) = limits.all.checked_sub(started.elapsed()) else {
            return Err(no_answer(limits.all, reason));
        };
        match join_once(address, rank, terms, left.min(TRY)) {
            Ok(stream) => return Ok(stream),
            Err(Failed::Refused(refusal)) => {
                return Err(RendezvousError::Refused { rank, address: address.to_owned(), refusal });
            }
            Err(Failed::Io(error)) => {
                let is_refused = error.kind() == io::ErrorKind::ConnectionRefused;
                refused = is_refused.then(|| refused.unwrap_or((Instant::now(), false)));
                reason = error.to_string();
            }
        }
        if let Some((since, is_told)) = &mut refused {
            if since.elapsed() > limits.refused {
                return Err(no_answer(limits.refused, reason));
            }
            if since.elapsed() > WARN && !std::mem::replace(is_told, true) {
                tracing::warn!(rank, "nobody listens at {address} yet; does the rank that is to listen there run?");
            }
        }
        thread::sleep(PAUSE.min(left));
    }
}

fn join_once(address: &str, rank: usize, terms: &Terms, limit: Duration) -> Result<TcpStream, Failed> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
    for address in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, limit.max(Duration::from_millis(1))) {
            Ok(stream) => return shake_hands(stream, rank, terms, limit),
            Err(error) => last = error,
        }
    }
    Err(last.into())
}

fn shake_hands(mut stream: TcpStream, rank: usize, terms: &Terms, limit: Duration) -> Result<TcpStream, Failed> {
    stream.set_nodelay(true)?;
    stream.set_write_timeout(Some(limit.max(Duration::from_millis(1))))?;
    stream.set_read_timeout(Some(limit.max(Duration::from_millis(1))))?;
    let ours = handshake::nonce()?;
    stream.write_all(&handshake::hello(&ours))?;
    let mut hello = [0; HELLO_BYTES];
    // As soon as it is clear that this is somebody else, who may say no more.
    let mut received = 0;
    let theirs = loop {
        match stream.read(&mut hello[received..])? {
            0 => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
            len => received += len,
        }
        if let Some(nonce) = handshake::read_hello(&hello[..received]).map_err(Failed::Refused)? {
            break nonce;
        }
    };
    stream.write_all(&terms.claim(rank, &ours, &theirs))?;
    let mut verdict = [0; VERDICT_BYTES];
    stream.read_exact(&mut verdict)?;
    terms.read_verdict(&verdict, &ours, &theirs).map_err(Failed::Refused)?;
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(None)?;
    Ok(stream)
}
