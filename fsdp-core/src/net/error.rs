//! Why processes did not find each other: which rank, which address, and the remedy.

use std::fmt;
use std::io;
use std::time::Duration;

use thiserror::Error;

/// Why a rank could not join the others.
#[derive(Debug, Error)]
pub enum RendezvousError {
    /// Rank 0 cannot listen at the address.
    #[error(
        "rank 0 cannot listen at {address}: {source}. If the port is taken, by another run or another program, choose \
         another one for all ranks: MASTER_PORT, or `rendezvous_port` in the configuration"
    )]
    Listen {
        /// The address.
        address: String,
        /// What the system says.
        source: io::Error,
    },
    /// Rank 0, or another rank that was to be joined, did not answer in time.
    #[error(
        "rank {rank} found no rank {wanted} at {address} within {waited:?}: {reason}. See whether rank {wanted} runs, whether \
         that is its host, and whether a firewall lies between"
    )]
    NoAnswer {
        /// The rank that tried.
        rank: usize,
        /// The rank that was to answer.
        wanted: usize,
        /// Where it tried.
        address: String,
        /// For how long.
        waited: Duration,
        /// What went wrong last.
        reason: String,
    },
    /// Whoever listens at the address does not let this rank in.
    #[error("rank {rank} was refused by {address}: {refusal}")]
    Refused {
        /// The rank.
        rank: usize,
        /// Who refused.
        address: String,
        /// Why.
        refusal: Refusal,
    },
    /// Some ranks did not come.
    #[error(
        "rank {rank} waited {waited:?} at {address} for {}. See whether they were started, with the same address and secret, \
         and whether they can reach this host{}",
        list(missing),
        turned_away(refused)
    )]
    Missing {
        /// The rank that waited.
        rank: usize,
        /// Where.
        address: String,
        /// For how long.
        waited: Duration,
        /// Who did not come.
        missing: Vec<usize>,
        /// Who came and was sent away, and why; the last few.
        refused: Vec<String>,
    },
    /// There is no secret.
    #[error(
        "ranks in several processes prove to each other that they belong together, by a secret of at least {} bytes, and \
         {got}. Set FSDP_SECRET to the same random text for all ranks, `export FSDP_SECRET=$(openssl rand -hex 16)`",
        Secret::MIN_BYTES
    )]
    NoSecret {
        /// What is there instead.
        got: &'static str,
    },
    /// The run ended before it began.
    #[error("rank {rank}: the run has ended before it began, because {cause}")]
    Ended {
        /// The rank that was told.
        rank: usize,
        /// Why.
        cause: String,
    },
    /// Nobody has put a value in time.
    #[error(
        "rank {rank} waited {waited:?} for the value `{key}`, which no rank has put. Look for an error on the rank that does"
    )]
    NoValue {
        /// The rank that waited.
        rank: usize,
        /// The name of the value.
        key: String,
        /// For how long.
        waited: Duration,
    },
    /// The system refused something else.
    #[error("rank {rank}: {what}: {source}")]
    Io {
        /// The rank.
        rank: usize,
        /// What was attempted.
        what: &'static str,
        /// What the system says.
        source: io::Error,
    },
}

/// Why a connection is not let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// It speaks something else.
    NotOurs,
    /// It speaks another version.
    Version(u16),
    /// It does not know the secret.
    Secret,
    /// It has another world size.
    WorldSize,
    /// Its rank is not one that is waited for.
    Rank,
    /// Its rank is there already.
    Duplicate,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::NotOurs => f.write_str("it is no rank of such a run; another program may use the port"),
            Refusal::Version(version) => {
                write!(f, "it speaks version {version}; start all ranks from one build of the program")
            }
            Refusal::Secret => f.write_str("it has another secret; give all ranks the same FSDP_SECRET"),
            Refusal::WorldSize => f.write_str("it has another world size; start all ranks with the same one"),
            Refusal::Rank => f.write_str("its rank is not one that is waited for; give each process a rank of its own"),
            Refusal::Duplicate => f.write_str("its rank is there already; give each process a rank of its own"),
        }
    }
}

/// What the ranks of one run know, and nobody else.
#[derive(Clone)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// Fewer bytes are refused.
    pub const MIN_BYTES: usize = 16;

    /// A secret of at least [`Secret::MIN_BYTES`] bytes.
    ///
    /// # Errors
    /// If there are fewer.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Result<Self, RendezvousError> {
        let bytes = bytes.into();
        if bytes.len() < Self::MIN_BYTES {
            return Err(RendezvousError::NoSecret { got: "what is given is shorter" });
        }
        Ok(Self(bytes))
    }

    /// What `FSDP_SECRET` holds.
    ///
    /// # Errors
    /// If it is not set, or too short.
    pub fn of_variable(value: Option<&str>) -> Result<Self, RendezvousError> {
        Self::new(value.ok_or(RendezvousError::NoSecret { got: "FSDP_SECRET is not set" })?)
    }

    /// A random one.
    ///
    /// # Errors
    /// If the system has no random numbers.
    pub fn random() -> Result<Self, RendezvousError> {
        let mut bytes = vec![0; 32];
        getrandom::fill(&mut bytes).map_err(|error| RendezvousError::Io {
            rank: 0,
            what: "cannot draw a secret",
            source: io::Error::other(error.to_string()),
        })?;
        Ok(Self(bytes))
    }

    /// The bytes, to be sent over a way that is safe.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

fn list(ranks: &[usize]) -> String {
    let numbers: Vec<String> = ranks.iter().take(8).map(usize::to_string).collect();
    let more =
        if ranks.len() > numbers.len() { format!(" and {} more", ranks.len() - numbers.len()) } else { String::new() };
    format!("{} {}{more}", if ranks.len() == 1 { "rank" } else { "ranks" }, numbers.join(", "))
}

fn turned_away(refused: &[String]) -> String {
    if refused.is_empty() { String::new() } else { format!(". Sent away: {}", refused.join("; ")) }
}
