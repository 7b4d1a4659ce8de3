//! Tests of the crate from outside, in one binary.

mod conformance;
mod failure;
mod stream;
mod streamed;
mod traffic;
