//! Tests of the crate from outside, in one binary.

mod conformance;
mod failure;
mod schedule;
mod stream;
mod streamed;
mod traffic;
