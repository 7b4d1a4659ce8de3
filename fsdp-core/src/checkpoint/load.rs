//! Reading from a checkpoint: any block of any layout, from whatever pieces it was saved in, and only the bytes of it.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use super::disk::Checksum;
use super::header::Header;
use super::manifest::{Manifest, Piece, TensorEntry};
use super::reshard::{Cut, Run, runs};
use super::{CheckpointError, Rejected};
use crate::ShardLayout;

/// Runs of at least so many bytes are read straight to where they belong.
const LONG_RUN_BYTES: usize = 256 << 10;

/// Shorter runs are read together with the gaps between them, at most so many bytes at a time.
const SPAN_BYTES: usize = 1 << 20;

/// A gap that is cheaper to read than to leave out.
const MAX_GAP_BYTES: usize = 16 << 10;

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
    /// Headers of the files that have been read from.
    headers: Vec<OnceLock<Header>>,
}

impl Checkpoint {
    pub(super) fn of_manifest(dir: PathBuf, manifest: Manifest) -> Self {
        let names_of = |(index, tensor): (usize, &TensorEntry)| {
            let names: Vec<_> = [&tensor.name].into_iter().chain(&tensor.aliases).cloned().collect();
            names.into_iter().map(move |name| (name, index))
        };
        let names = manifest.tensors.iter().enumerate().flat_map(names_of).collect();
        let headers = manifest.files.iter().map(|_| OnceLock::new()).collect();
        Self { dir, manifest, rejected: Vec::new(), names, headers }
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
        self.read_block(tensor, layout, shard_index, &mut block)?;
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
        self.read_block(tensor, layout, shard_index, block)
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

    pub(super) fn read_block(
        &self,
        tensor: &TensorEntry,
        layout: &ShardLayout,
        shard_index: usize,
        block: &mut [u8],
    ) -> Result<(), CheckpointError> {
        assert!(shard_index < layout.num_shards(), "there is no block {shard_index} of {}", layout.num_shards());
        let target = Cut::block(layout, shard_index);
        for piece in &tensor.pieces {
            let source = Cut { dim: tensor.dim, rows: piece.start..piece.end };
            let mut runs = runs(&tensor.shape, &source, &target).peekable();
            if runs.peek().is_some() {
                self.read_piece(tensor, piece, runs, block)?;
            }
        }
        Ok(())
    }

    /// Copies runs of one piece, which come in the order of the file.
    fn read_piece(
        &self,
        tensor: &TensorEntry,
        piece: &Piece,
        runs: impl Iterator<Item = Run>,
        block: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let path = self.dir.join(&self.manifest.files[piece.file].name);
        let file = File::open(&path).map_err(CheckpointError::io("open", &path))?;
        let start = self.place(tensor, piece, &file, &path)?;
        let read = |bytes: &mut [u8], offset: usize| {
            file.read_exact_at(bytes, start + offset as u64).map_err(CheckpointError::io("read", &path))
        };
        let size = tensor.dtype.size_bytes();
        let mut runs = runs
            .map(|Run { source, target, len }| Run { source: source * size, target: target * size, len: len * size })
            .peekable();
        let mut span = Vec::new();
        let mut in_span = Vec::new();
        while let Some(first) = runs.next() {
            if first.len >= LONG_RUN_BYTES {
                read(&mut block[first.target..first.target + first.len], first.source)?;
                continue;
            }
            in_span.clear();
            in_span.push(first);
            let mut end = first.source + first.len;
            let fits = |end: usize, next: &Run| {
                next.source - end <= MAX_GAP_BYTES && next.source + next.len - first.source <= SPAN_BYTES
            };
            while let Some(next) = runs.next_if(|next| fits(end, next)) {
                end = next.source + next.len;
                in_span.push(next);
            }
            span.resize(end - first.source, 0);
            read(&mut span, first.source)?;
            for Run { source, target, len } in in_span.iter().copied() {
                let from = source - first.source;
                block[target..target + len].copy_from_slice(&span[from..from + len]);
            }
        }
        Ok(())
    }

    /// Where a piece begins in its file, as the file's own header says.
    pub(super) fn place(
        &self,
        tensor: &TensorEntry,
        piece: &Piece,
        file: &File,
        path: &Path,
    ) -> Result<u64, CheckpointError> {
        let known = &self.headers[piece.file];
        let header = match known.get() {
            Some(header) => header,
            None => {
                let header = Header::read(file, path)?;
                known.get_or_init(|| header)
            }
        };
        let damaged = |problem| CheckpointError::Header { file: path.to_owned(), problem };
        header.find(&tensor.piece_in_file(piece)).map_err(damaged)
    }
}
