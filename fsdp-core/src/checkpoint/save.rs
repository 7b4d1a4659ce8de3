//! Saving: all ranks write at once, and the checkpoint appears in one step or not at all.
//!
//! [Note: Commit of a checkpoint]
//! 1. Rank 0 makes an empty directory `.saving-step-N`. All ranks tell what they will write; if that is more than the
//!    file system has room for, all stop.
//! 2. Every rank writes its file there, and flushes it. All ranks tell their sizes, checksums and pieces; if one failed,
//!    all stop, and the directory is removed.
//! 3. Rank 0 puts the tables together, checks that every tensor is covered once, writes and flushes the manifest and the
//!    directory, renames it to `step-N`, and then lets `latest` name it. All ranks are told how that went.
//!
//! A kill at any moment leaves either no `step-N`, or a whole one. A directory that exists is exchanged for the new one
//! in a single step, where the file system can do that. Ranks wait for each other three times, and never for a rank that
//! failed: it takes part in the next agreement with its error.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::agree::agree;
use super::disk::{NewFile, Via, free_bytes};
use super::header::{FileTensor, header_bytes};
use super::manifest::{FileEntry, Manifest, Piece, TensorEntry};
use super::root::{PINNED_FILE, Root};
use super::snapshot::{Snapshot, TensorBlock};
use super::{CheckpointError, TensorKind};
use crate::{Communicator, OpTag, Phase};

/// How checkpoints are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SaveOptions {
    /// Remove older checkpoints than so many, pinned ones aside. `None` keeps all; each costs its size on the disk.
    pub keep_last: Option<NonZeroUsize>,
}

/// A checkpoint that was saved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Saved {
    /// Its directory.
    pub dir: PathBuf,
    /// Bytes of all its files.
    pub bytes: u64,
    /// How long it took on rank 0, waits for other ranks included.
    pub took: Duration,
    /// Older checkpoints that retention has removed.
    pub removed: Vec<PathBuf>,
    /// What retention could not do; the checkpoint itself is good.
    pub warnings: Vec<String>,
}

/// Saves `snapshot` as `root/step-N`, and lets `root/latest` name it.
///
/// Collective: every rank calls it with its own snapshot of one step, on a directory that all ranks see. When it returns
/// `Ok`, on every rank, the checkpoint is on the disk. An error reaches every rank, and leaves the checkpoints that were
/// there as they are; where only the pointer `latest` could not be written, the new one is there too. One run at a time saves in a root.
///
/// Each rank writes its blocks once, straight from the buffers it passes; copies that several ranks hold are written
/// once. Costs the write and the flush of the state, and three short agreements between ranks. A rank may wait for the
/// slowest disk: the communicator's timeout must allow that.
///
/// ```
/// use std::collections::BTreeMap;
/// use std::time::Duration;
/// use fsdp_core::checkpoint::{
///     BlockData, Checkpoint, SaveOptions, Snapshot, StoredDtype, TensorBlock, TensorKind, Verify, save,
/// };
/// use fsdp_core::{LocalWorld, Mesh, ShardLayout, Stage};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let comm = LocalWorld::connect(1, Duration::from_secs(10)).remove(0);
/// let weight = TensorBlock {
///     name: "head.weight".into(),
///     aliases: Vec::new(),
///     kind: TensorKind::Model,
///     dtype: StoredDtype::U8,
///     layout: ShardLayout::new(&[2, 3], 0, 1),
///     data: BlockData::Ready(vec![1, 2, 3, 4, 5, 6].into()),
/// };
/// let snapshot = Snapshot {
///     step: 100,
///     mesh: Mesh::one_dim(1),
///     stage: Stage::Parameters,
///     tensors: vec![weight],
///     scalars: BTreeMap::new(),
///     sections: BTreeMap::from([("scheduler".into(), serde_json::json!({ "lr": 1e-3 }))]),
///     rank_state: serde_json::Value::Null,
///     pinned: false,
/// };
/// # let root = tempfile::tempdir()?;
/// # let root = root.path();
/// let saved = save(&*comm, root, snapshot, &SaveOptions::default())?;
/// assert!(saved.dir.ends_with("step-100"));
///
/// // The second of two ranks, with the columns cut.
/// let checkpoint = Checkpoint::open(&saved.dir, Verify::Checksums)?;
/// let block = checkpoint.read("head.weight", &ShardLayout::new(&[2, 3], 1, 2), 1)?;
/// assert_eq!(block, [3, 6]);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`CheckpointError::RankFailed`] with the rank whose snapshot, disk or source failed; [`CheckpointError::NoSpace`];
/// [`CheckpointError::Comm`] where a rank did not come.
pub fn save(
    comm: &dyn Communicator,
    root: impl AsRef<Path>,
    snapshot: Snapshot<'_>,
    options: &SaveOptions,
) -> Result<Saved, CheckpointError> {
    save_via(comm, root.as_ref(), snapshot.step, Ok(snapshot), options, Via::Cache)
}

/// As [`save`], with a choice of how files are written, of a snapshot of `step` that may have failed.
pub(super) fn save_via(
    comm: &dyn Communicator,
    root: &Path,
    step: u64,
    snapshot: Result<Snapshot<'_>, CheckpointError>,
    options: &SaveOptions,
    via: Via,
) -> Result<Saved, CheckpointError> {
    let root = Root::new(root);
    let result = save_in(comm, &root, step, snapshot, options, via);
    if comm.rank() == 0 && result.is_err() {
        root.discard(step);
    }
    result
}

/// What a rank has written, and what it contributes to the manifest.
#[derive(Serialize, Deserialize)]
struct Table {
    file: Option<FileEntry>,
    /// Its tensors, each with the piece in `file`, if it wrote any.
    tensors: Vec<TensorEntry>,
    scalars: BTreeMap<String, Value>,
    rank_state: Value,
}

fn save_in(
    comm: &dyn Communicator,
    root: &Root,
    step: u64,
    snapshot: Result<Snapshot<'_>, CheckpointError>,
    options: &SaveOptions,
    via: Via,
) -> Result<Saved, CheckpointError> {
    let (rank, started) = (comm.rank(), Instant::now());
    let tag = |what| OpTag::new(step, Phase::Checkpoint, what);

    let (snapshot, prepared) = match snapshot {
        Ok(snapshot) => {
            let prepared = prepare(comm, root, &snapshot);
            (Some(snapshot), prepared)
        }
        Err(error) => (None, Err(error)),
    };
    let prepared = agree(comm, &tag("save: prepare"), "preparing to save", prepared)?;
    let needed_bytes = prepared.iter().fold(0u64, |sum, &(needed, _)| sum.saturating_add(needed));
    let free_bytes = prepared[0].1;
    if needed_bytes > free_bytes {
        return Err(CheckpointError::NoSpace { path: root.path().to_owned(), needed_bytes, free_bytes });
    }

    let snapshot = snapshot.expect("a rank that has none has failed the agreement");
    let Snapshot { mesh, stage, tensors, scalars, sections, rank_state, pinned, .. } = snapshot;
    let (files, ranks, scalars_of_all) = Default::default();
    let world_size = mesh.world_size();
    let manifest = Manifest {
        step,
        world_size,
        mesh,
        stage,
        files,
        tensors: Vec::new(),
        scalars: scalars_of_all,
        sections,
        ranks,
    };
    let written = write(&root.saving_dir(step), &manifest, rank, tensors, via);
    let table = written.map(|(file, tensors)| Table { file, tensors, scalars, rank_state });
    let tables = agree(comm, &tag("save: write"), "saving", table)?;

    // Only rank 0 knows how it went; what the others say is not looked at.
    let committed = if rank == 0 { commit(root, manifest, pinned, tables, options).map(Some) } else { Ok(None) };
    let committed = committed.map(|saved| saved.map(|saved| Saved { took: started.elapsed(), ..saved }));
    let mut committed = agree(comm, &tag("save: commit"), "completing the checkpoint", committed)?;
    Ok(committed.swap_remove(0).expect("rank 0 has returned what it saved"))
}

/// Checks the snapshot; on rank 0, makes the directory. Returns the bytes that this rank will write, and on rank 0 those
/// that are free.
fn prepare(comm: &dyn Communicator, root: &Root, snapshot: &Snapshot<'_>) -> Result<(u64, u64), CheckpointError> {
    let rank = comm.rank();
    snapshot.check(rank, comm.world_size())?;
    let mut needed: u64 = 0;
    for tensor in &snapshot.tensors {
        let block = tensor.written_block(&snapshot.mesh, rank)?;
        needed = needed.saturating_add(block.map_or(0, |block| tensor.block_bytes(block) as u64));
    }
    if rank > 0 {
        return Ok((needed, 0));
    }
    root.begin(snapshot.step)?;
    Ok((needed, free_bytes(root.path())?))
}

/// Writes this rank's file, if it has anything to write. Returns its entry, and all tensors of this rank.
fn write(
    dir: &Path,
    manifest: &Manifest,
    rank: usize,
    tensors: Vec<TensorBlock<'_>>,
    via: Via,
) -> Result<(Option<FileEntry>, Vec<TensorEntry>), CheckpointError> {
    let mut entries = Vec::with_capacity(tensors.len());
    let mut blocks = Vec::new();
    for tensor in tensors {
        let rows = tensor.written_block(&manifest.mesh, rank)?.map(|block| tensor.layout.rows(block));
        let TensorBlock { name, aliases, kind, dtype, layout, data } = tensor;
        let (shape, dim) = (layout.shape().to_vec(), layout.dim());
        let pieces: Vec<_> = rows.map(|rows| Piece { file: 0, start: rows.start, end: rows.end }).into_iter().collect();
        if !pieces.is_empty() {
            blocks.push((entries.len(), data));
        }
        entries.push(TensorEntry { name, aliases, kind, dtype, shape, dim, pieces });
    }
    if blocks.is_empty() {
        return Ok((None, entries));
    }
    // Larger elements first, so that every tensor is aligned to its elements. Then the optimizer's state, since a step that
    // comes meanwhile goes on with a copy of what is not written yet, where it replaces parameters in any case.
    blocks.sort_by_key(|&(entry, _)| {
        let TensorEntry { dtype, kind, .. } = &entries[entry];
        (std::cmp::Reverse(dtype.size_bytes()), *kind == TensorKind::Model)
    });
    let name = format!("rank-{rank:05}.safetensors");
    let path = dir.join(&name);
    let in_file: Vec<FileTensor<'_>> =
        blocks.iter().map(|&(entry, _)| entries[entry].piece_in_file(&entries[entry].pieces[0])).collect();
    let description = self_description(manifest.step, rank, &entries);
    let mut file = NewFile::create(&path, via)?;
    file.write(&header_bytes(&in_file, &description, &path)?)?;
    for ((_, data), tensor) in blocks.into_iter().zip(&in_file) {
        file.write(&data.into_bytes(tensor.name, tensor.num_bytes())?)?;
    }
    let (bytes, checksum) = file.finish()?;
    Ok((Some(FileEntry { name, bytes, checksum }), entries))
}

/// What the file says of itself to a reader without the manifest: for each tensor its logical shape, and the first row
/// of which dimension its piece begins with.
fn self_description(step: u64, rank: usize, entries: &[TensorEntry]) -> BTreeMap<String, String> {
    let described = |entry: &TensorEntry| {
        let piece = entry.pieces.first()?;
        let place = serde_json::json!({ "shape": entry.shape, "dim": entry.dim, "start": piece.start });
        Some((entry.name.clone(), place))
    };
    let pieces: serde_json::Map<String, Value> = entries.iter().filter_map(described).collect();
    BTreeMap::from([
        ("format".to_owned(), "fsdp-shard".to_owned()),
        ("step".to_owned(), step.to_string()),
        ("rank".to_owned(), rank.to_string()),
        ("pieces".to_owned(), Value::from(pieces).to_string()),
    ])
}

/// On rank 0: puts the tables together, and makes the directory a checkpoint.
fn commit(
    root: &Root,
    mut manifest: Manifest,
    pinned: bool,
    tables: Vec<Table>,
    options: &SaveOptions,
) -> Result<Saved, CheckpointError> {
    let dir = root.saving_dir(manifest.step);
    merge(&mut manifest, tables)?;
    if pinned {
        NewFile::create(&dir.join(PINNED_FILE), Via::Cache)?.finish()?;
    }
    let manifest_bytes = manifest.write(&dir)?;
    root.commit(manifest.step)?;
    let (removed, failed) = options.keep_last.map_or_else(Default::default, |n| root.retain(manifest.step, n));
    let warnings: Vec<String> = failed.iter().map(ToString::to_string).collect();
    warnings.iter().for_each(|warning| tracing::warn!("old checkpoints: {warning}"));
    let bytes = manifest.data_bytes() + manifest_bytes;
    Ok(Saved { dir: root.step_dir(manifest.step), bytes, took: Duration::ZERO, removed, warnings })
}

/// Adds what all ranks have written. Whether tensors are covered is checked when the manifest is written.
fn merge(manifest: &mut Manifest, tables: Vec<Table>) -> Result<(), CheckpointError> {
    let mut places: BTreeMap<String, (usize, usize)> = BTreeMap::new();
    let mut scalar_ranks: BTreeMap<String, usize> = BTreeMap::new();
    for (rank, table) in tables.into_iter().enumerate() {
        let file = manifest.files.len();
        manifest.files.extend(table.file);
        for mut tensor in table.tensors {
            tensor.pieces.iter_mut().for_each(|piece| piece.file = file);
            match places.get(&tensor.name) {
                None => {
                    places.insert(tensor.name.clone(), (manifest.tensors.len(), rank));
                    manifest.tensors.push(tensor);
                }
                Some(&(index, first_rank)) => {
                    let first = &mut manifest.tensors[index];
                    agree_on_tensor(first, first_rank, &tensor, rank)?;
                    first.pieces.append(&mut tensor.pieces);
                }
            }
        }
        for (name, got) in table.scalars {
            let first_rank = *scalar_ranks.entry(name.clone()).or_insert(rank);
            let first = manifest.scalars.entry(name.clone()).or_insert_with(|| got.clone());
            if *first != got {
                let (what, first, got) = (format!("scalar `{name}`"), first.to_string(), got.to_string());
                return Err(CheckpointError::Disagree { what, first_rank, first, rank, got });
            }
        }
        manifest.ranks.push(table.rank_state);
    }
    manifest.tensors.iter_mut().for_each(|tensor| tensor.pieces.sort_by_key(|piece| piece.start));
    Ok(())
}

fn agree_on_tensor(
    first: &TensorEntry,
    first_rank: usize,
    other: &TensorEntry,
    rank: usize,
) -> Result<(), CheckpointError> {
    let describe = |tensor: &TensorEntry| {
        let TensorEntry { dtype, shape, dim, aliases, kind, .. } = tensor;
        let kind = match kind {
            TensorKind::Model => "of the model",
            TensorKind::Optimizer => "of the optimizer",
        };
        format!("{dtype} {shape:?} {kind}, cut along dimension {dim}, also called {aliases:?}")
    };
    let (first, got) = (describe(first), describe(other));
    if first == got {
        return Ok(());
    }
    Err(CheckpointError::Disagree { what: format!("`{}`", other.name), first_rank, first, rank, got })
}

impl TensorEntry {
    /// One of its pieces, as the file has it.
    pub(super) fn piece_in_file(&self, piece: &Piece) -> FileTensor<'_> {
        FileTensor { name: &self.name, dtype: self.dtype, shape: self.piece_shape(piece) }
    }
}
