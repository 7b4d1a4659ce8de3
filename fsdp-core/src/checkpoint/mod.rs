//! Checkpoints: what is in one, how it is saved so that a kill cannot spoil it, and how any other world reads it.
//!
//! A checkpoint is a directory with one `safetensors` file for each rank that had something to write, and a manifest
//! that says which rows of which tensor lie in which file. The manifest knows nothing of ranks and stages but for the
//! record: a reader asks for the block of any layout, and gets it from whatever pieces there are.
//!
//! | do | with |
//! |---|---|
//! | save | [`save`], or a [`Saver`] in the background |
//! | find and open | [`Checkpoint::newest_on`], [`Checkpoint::open_on`] |
//! | look for differences | [`Checkpoint::compare`] |
//! | read | [`Checkpoint::read`], [`Checkpoint::read_into`] |
//! | give to others | [`consolidate`] |
//! | take from others | [`Safetensors`] |
//! | look inside | [`inspect`] |
//!
//! Files in the order of their imports: `dtype`, `error`, `disk`, `manifest`, `header`, `reshard`, `pieces`, `root`,
//! `agree`, `snapshot`, `save`, `load`, `find`, `compare`, `saver`, `plain`, `consolidate`, `inspect`, and
//! `fuzz`, which is for tests. Only `error` looks ahead, to what it
//! reports.

mod agree;
mod compare;
mod consolidate;
mod disk;
mod dtype;
mod error;
mod find;
#[cfg(feature = "testing")]
pub(crate) mod fuzz;
mod header;
mod inspect;
mod load;
mod manifest;
mod pieces;
mod plain;
mod reshard;
mod root;
mod save;
mod saver;
mod snapshot;

pub use compare::{Comparison, ExpectedTensor, WrongTensor};
pub use consolidate::{ConsolidateOptions, Consolidated, PRODUCER, TiedWeights, consolidate};
pub use disk::Checksum;
pub use dtype::StoredDtype;
pub use error::CheckpointError;
pub use find::{Rejected, Verify};
pub use inspect::{Inspection, inspect, step_dirs};
pub use load::Checkpoint;
pub use manifest::{FileEntry, Manifest, Piece, TensorEntry, TensorKind};
pub use plain::Safetensors;
pub use save::{SaveOptions, Saved, save};
pub use saver::Saver;
pub use snapshot::{BlockData, Snapshot, TensorBlock};
