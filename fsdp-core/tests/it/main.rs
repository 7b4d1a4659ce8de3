//! Tests of the crate from outside, in one binary.

mod checkpoint;
mod checkpoint_damage;
mod checkpoint_failure;
mod checkpoint_full;
mod checkpoint_kill;
#[cfg(feature = "cli")]
mod checkpoint_out;
mod checkpoint_state;
#[cfg(feature = "cli")]
mod command;
mod conformance;
mod failure;
mod fuzz;
#[cfg(feature = "cli")]
mod numbers;
mod rendezvous;
mod schedule;
mod schedule_property;
mod schedule_tiers;
mod simulate;
mod sockets;
mod stream;
mod streamed;
mod tier;
mod tier_kill;
mod traffic;
