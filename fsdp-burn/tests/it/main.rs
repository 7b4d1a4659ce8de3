//! One binary for all integration tests, since each one links Burn.

mod common;
mod control_flow;
mod failure;
mod numbers;
mod optimizers;
mod parity;
mod shapes;
mod traffic;
