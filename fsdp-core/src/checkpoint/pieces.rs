//! Blocks of tensors from pieces in `safetensors` files: only the bytes of the block, wherever they lie.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use super::CheckpointError;
use super::header::Header;
use super::manifest::{Piece, TensorEntry};
use super::reshard::{Cut, Run, runs};
use crate::ShardLayout;

/// Runs of at least so many bytes are read straight to where they belong.
const LONG_RUN_BYTES: usize = 256 << 10;

/// Shorter runs are read together with the gaps between them, at most so many bytes at a time.
const SPAN_BYTES: usize = 1 << 20;

/// A gap that is cheaper to read than to leave out.
const MAX_GAP_BYTES: usize = 16 << 10;

/// The files in which pieces lie. Their headers are read when something of them is read, from any thread.
#[derive(Debug)]
pub(super) struct PieceFiles {
    files: Vec<PieceFile>,
}

#[derive(Debug)]
struct PieceFile {
    path: PathBuf,
    header: OnceLock<Header>,
}

impl PieceFiles {
    /// `paths` by the number that pieces call them by.
    pub(super) fn new(paths: impl IntoIterator<Item = PathBuf>) -> Self {
        let file = |path| PieceFile { path, header: OnceLock::new() };
        Self { files: paths.into_iter().map(file).collect() }
    }

    pub(super) fn path(&self, file: usize) -> &Path {
        &self.files[file].path
    }

    /// Fills `block` with the block `shard_index` of the layout.
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
        let path = self.path(piece.file);
        let file = File::open(path).map_err(CheckpointError::io("open", path))?;
        let start = self.place(tensor, piece, &file)?;
        let read = |bytes: &mut [u8], offset: usize| {
            file.read_exact_at(bytes, start + offset as u64).map_err(CheckpointError::io("read", path))
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
    pub(super) fn place(&self, tensor: &TensorEntry, piece: &Piece, file: &File) -> Result<u64, CheckpointError> {
        let path = self.path(piece.file);
        let known = &self.files[piece.file].header;
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
