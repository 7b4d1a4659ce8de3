//! Reading from a checkpoint: any block of any layout, from whatever pieces it was saved in, and only the bytes of it.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::disk::Checksum;
use super::manifest::{Manifest, TensorEntry};
use super::pieces::PieceFiles;
use super::{CheckpointError, Rejected};
use crate::ShardLayout;

/// An open checkpoint. Opening reads the manifest; files are opened when something of them is read, from any thread.
///
/// See [`save`](super::save()) for an example.
#[derive(Debug)]
pub struct Checkpoint {
    pub(super) dir: PathBuf,
    pub(super) manifest: Manifest,
    pub(super) rejected: Vec<Rejected>,
    /// Names and aliases, with the index of their tensor.
    names: HashMap<String, usize>,
    pub(super) files: PieceFiles,
}

impl Checkpoint {
    pub(super) fn of_manifest(dir: PathBuf, manifest: Manifest) -> Self {
        let names_of = |(index, tensor): (usize, &TensorEntry)| {
            let names: Vec<_> = [&tensor.name].into_iter().chain(&tensor.aliases).cloned().collect();
            names.into_iter().map(move |name| (name, index))
        };
        let names = manifest.tensors.iter().enumerate().flat_map(names_of).collect();
        let files = PieceFiles::new(manifest.files.iter().map(|file| dir.join(&file.name)));
        Self { dir, manifest, rejected: Vec::new(), names, files }
    }

    /// The step directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// What it holds.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Checkpoints that were passed over in favour of this one, because they are damaged.
    pub fn rejected(&self) -> &[Rejected] {
        &self.rejected
    }

    /// The tensor of this name or alias.
    pub fn tensor(&self, name: &str) -> Option<&TensorEntry> {
        self.names.get(name).map(|&index| &self.manifest.tensors[index])
    }

    /// The same on all ranks that have opened the same checkpoint.
    pub(super) fn identity(&self) -> Checksum {
        let text = serde_json::to_vec(&self.manifest).expect("the manifest was read from JSON");
        Checksum::of(&text)
    }

    /// Reads one block of a tensor, which need not be cut as it was saved: flat, row-major, little-endian, in the stored
    /// element type.
    ///
    /// Allocates the block, and reads the byte ranges that belong to it; short ranges are read with what lies between
    /// them, through a buffer of 1 MiB. [`Verify::Checksums`](super::Verify) looks at content when a checkpoint is opened;
    /// reading does not look again.
    ///
    /// # Errors
    /// If there is no such tensor, the layout has another shape, or a file cannot be read.
    ///
    /// # Panics
    /// If the layout has no block `shard_index`.
    pub fn read(&self, name: &str, layout: &ShardLayout, shard_index: usize) -> Result<Vec<u8>, CheckpointError> {
        let tensor = self.find(name, layout)?;
        let mut block = vec![0; layout.shard_len(shard_index) * tensor.dtype.size_bytes()];
        self.files.read_block(tensor, layout, shard_index, &mut block)?;
        Ok(block)
    }

    /// Like [`Checkpoint::read`], into a buffer of the caller, which must have the size of the block.
    ///
    /// # Errors
    /// As [`Checkpoint::read`], and if the buffer has another size. The buffer's content is unspecified then.
    ///
    /// # Panics
    /// If the layout has no block `shard_index`.
    pub fn read_into(
        &self,
        name: &str,
        layout: &ShardLayout,
        shard_index: usize,
        block: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let tensor = self.find(name, layout)?;
        let expected_bytes = layout.shard_len(shard_index) * tensor.dtype.size_bytes();
        if block.len() != expected_bytes {
            let (tensor, got_bytes) = (name.to_owned(), block.len());
            return Err(CheckpointError::BlockSize { tensor, expected_bytes, got_bytes });
        }
        self.files.read_block(tensor, layout, shard_index, block)
    }

    fn find(&self, name: &str, layout: &ShardLayout) -> Result<&TensorEntry, CheckpointError> {
        let tensor = self.tensor(name).ok_or_else(|| {
            let (dir, tensor) = (self.dir.clone(), name.to_owned());
            CheckpointError::UnknownTensor { dir, tensor }
        })?;
        if tensor.shape == layout.shape() {
            return Ok(tensor);
        }
        let (tensor, stored, asked) = (name.to_owned(), tensor.shape.clone(), layout.shape().to_vec());
        Err(CheckpointError::Shape { tensor, stored, asked })
    }
}
