//! One binary for all integration tests, since each one links Burn.

// Helpers of tests fail by panicking, as tests do; clippy knows only functions marked `#[test]`.
#![allow(clippy::unwrap_used)]

mod buffers;
mod checkpoint;
mod common;
mod consolidated;
mod control_flow;
mod devices;
mod embedding;
mod every_key;
mod failure;
mod freeze;
mod full_disk;
mod in_place;
mod kill;
mod learner;
mod lora;
mod numbers;
mod offload;
#[cfg(feature = "cpu")]
mod on_device;
#[cfg(feature = "cpu")]
mod on_device_state;
mod optimizers;
#[cfg(feature = "mpi")]
mod over_hosts;
#[cfg(feature = "mpi")]
mod over_mpi;
mod pace;
mod parity;
mod precision;
mod processes;
mod processes_settings;
mod recompute;
mod recovery;
mod reshard;
mod resume;
mod saver;
mod shapes;
mod tied;
mod trace;
mod traffic;
mod weights;
mod whole;
mod worlds;
