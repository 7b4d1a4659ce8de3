//! The book's code, as tests in one binary: what a page shows is compiled, run, and compared with what is stored.

mod errors;
mod model;
mod output;
mod pages;
mod pictures;
mod start;
