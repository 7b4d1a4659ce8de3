//! One binary for all integration tests, since each one links Burn.

// Helpers of tests fail by panicking, as tests do; clippy knows only functions marked `#[test]`.
#![allow(clippy::unwrap_used)]

mod checkpoint;
mod common;
mod control_flow;
mod embedding;
mod failure;
mod lora;
mod numbers;
mod offload;
mod optimizers;
mod parity;
mod precision;
mod recompute;
mod recovery;
mod shapes;
mod tied;
mod trace;
mod traffic;
