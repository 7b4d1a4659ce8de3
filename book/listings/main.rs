//! The book's code, as tests in one binary: what a page shows is compiled, run, and compared with what is stored.

#![allow(clippy::unwrap_used, reason = "all of this is a test, its helpers too")]

mod attributes;
mod chapters;
mod choosing;
mod configuration;
mod errors;
mod exercises;
mod figures;
mod inside;
mod interview;
mod learner;
mod measured;
mod migrate;
mod misconceptions;
mod model;
mod output;
mod pictures;
mod planned;
mod shown;
mod start;
mod svg;
mod timelines;
mod words;
