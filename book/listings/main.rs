//! The book's code, as tests in one binary: what a page shows is compiled, run, and compared with what is stored.

#![allow(clippy::unwrap_used, reason = "all of this is a test, its helpers too")]

mod chapters;
mod errors;
mod figures;
mod learner;
mod model;
mod output;
mod pages;
mod pictures;
mod start;
mod svg;
mod timelines;
