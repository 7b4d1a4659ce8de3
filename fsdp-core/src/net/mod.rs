//! How processes find each other, and how each learns at once that another has failed.
//!
//! Rank 0 listens ([`Entrance`]), the others join, both sides prove that they know the run's secret (`handshake`), and when all
//! are there the port is closed. What stays is one connection from each rank to rank 0, the [`ControlChannel`]: heartbeats,
//! the cause of an abort, who has left, and small values by name. Inside: `error`, `handshake`, `entrance`, `join`, `wire`,
//! `standing`, `shared`, `node`, `channel`.

mod channel;
mod entrance;
mod error;
mod handshake;
mod join;
mod node;
mod shared;
mod standing;
mod wire;

pub use channel::{ControlChannel, Member};
pub use entrance::Entrance;
pub use error::{Refusal, RendezvousError, Secret};
pub(crate) use join::{JoinLimits, join};
pub use standing::{Standing, Stragglers};
