//! Ranks that are processes, on one host or several: shared memory within a host, a [`Network`] between hosts.
//!
//! [Note: One copy per host]
//! The ranks of a host map each other's memory (`arena`). A gathered tensor is one buffer of the host: each rank copies
//! its blocks into it, the first rank of the group (its *leader*) sends the blocks of all ranks of the host to the leaders
//! of the other hosts and receives theirs, and all ranks read the one buffer in place. So a gather moves between
//! hosts what one rank per host would send. A reduction cannot add within a host first, since sums are added in the order
//! of ranks: ranks of one host read each other's values through small windows that stay in a cache (`rounds`), and ranks of
//! different hosts exchange blocks directly.
//!
//! What ranks of a host tell each other lies in the arena of the host's first rank (`table`): counters that only rise,
//! each written by one rank. Waiting ranks stay awake for a moment, where each has a core; then they sleep, and look every few
//! milliseconds whether the run has been aborted.
//! Channels and groups are found by name in that table, so making one sends nothing.

mod arena;
mod domain;
mod heap;
mod network;
mod output;
mod rank;
mod rounds;
mod table;
mod world;

pub use network::{Frame, Inbox, Key, Landing, Memory, Network, Payload, Receipt, Span};
pub(crate) use output::PlacedInProcesses;
pub use world::{connect, exchange};
