//! One binary for all integration tests, since each one links Burn.

mod common;
mod control_flow;
mod numbers;
mod parity;
mod shapes;
mod traffic;
