//! One binary for all integration tests, since each one links Burn.

mod common;
mod parity;
mod shapes;
mod traffic;
