//! The built book in a browser: that the interactive pages say what the command says, can be used by everybody, and look
//! as they should; that every page fits a phone, with figures that can be read; and that no link of the book leads nowhere.
//!
//! Needs Chromium and the built book, so it is run by name: `bash .ci/pages BOOK`, which installs the one and names the
//! other in `FSDP_BOOK`. What the pages look like lies in the build folder, in `tmp/pages`, afterwards.

#![allow(clippy::unwrap_used, reason = "all of this is a test, its helpers too")]

mod book;
mod browser;
mod chapters;
mod keyboard;
mod links;
mod looks;
mod numbers;
