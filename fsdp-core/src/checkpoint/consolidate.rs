//! From the pieces of many ranks to plain `safetensors` for the rest of the world.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fs;
use std::iter;
use std::path::{Path, PathBuf};

use super::disk::{NewFile, Via, create_dir, free_bytes, rename, sync_dir, write_atomic};
use super::header::{FileTensor, header_bytes};
use super::manifest::{TensorEntry, TensorKind};
use super::{Checkpoint, CheckpointError};
use crate::ShardLayout;

/// Of a tensor, so much is in memory at a time, or one row if that is more.
const BLOCK_BYTES: usize = 32 << 20;

/// The name that model hubs expect, without numbers and extension.
const MODEL: &str = "model";

/// What the metadata of a file says under `producer`: weights are laid out as the program that saved them has them.
pub const PRODUCER: &str = "fsdp";

/// What [`consolidate`] writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConsolidateOptions {
    /// Begin a new file before one holds more bytes of tensors; a larger tensor has a file of its own. `None`: one file.
    pub shard_bytes: Option<u64>,
    /// Optimizer state as well; two to three times the bytes for Adam.
    pub include_optimizer: bool,
    /// What becomes of tied weights.
    pub tied: TiedWeights,
}

/// How a tensor with several names is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TiedWeights {
    /// Once, under its first name. The metadata of the file names that one for each other name, as Python's
    /// `safetensors.torch.save_model` does.
    #[default]
    Once,
    /// A copy for each name, for readers that know nothing of ties; costs the bytes of the copies.
    Copies,
}

/// What was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Consolidated {
    /// The files, the index last, if there is one.
    pub files: Vec<PathBuf>,
    /// Tensors, copies included.
    pub num_tensors: usize,
    /// Bytes of the tensors.
    pub tensor_bytes: u64,
}

/// A name that is written, and its tensor.
type Named<'a> = (&'a str, &'a TensorEntry);

/// Writes the whole tensors of `checkpoint` to plain `safetensors`, with their names and element types.
///
/// Where `out` ends in `.safetensors`, it is the file. Otherwise it is a directory, which then holds `model.safetensors`,
/// or, where [`ConsolidateOptions::shard_bytes`] asks for several, `model-00001-of-00003.safetensors` and so on with
/// `model.safetensors.index.json`, as model hubs lay it out.
///
/// For one process alone. Reads and writes each byte once, holds about 32 MiB, and never more than one tensor. Files have
/// their final names only when all are complete.
///
/// # Errors
/// If something of that name exists, there is no room, or a file cannot be read or written.
pub fn consolidate(
    checkpoint: &Checkpoint,
    out: impl AsRef<Path>,
    options: &ConsolidateOptions,
) -> Result<Consolidated, CheckpointError> {
    let out = out.as_ref();
    let of_kind = |tensor: &&TensorEntry| tensor.kind == TensorKind::Model || options.include_optimizer;
    let tensors = checkpoint.manifest.tensors.iter().filter(of_kind);
    let tensors: Vec<Named<'_>> = tensors.flat_map(|tensor| names(tensor, options.tied)).collect();
    let tensor_bytes = tensors.iter().map(|(_, tensor)| tensor.full_bytes()).sum();

    let is_file = out.extension().is_some_and(|extension| extension == "safetensors");
    if is_file && options.shard_bytes.is_some() {
        let problem = "several files go into a directory; name one without the extension `.safetensors`";
        return Err(CheckpointError::Output { path: out.to_owned(), problem });
    }
    let dir = if is_file { out.parent().unwrap_or(Path::new("")) } else { out };
    let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
    create_dir(dir)?;
    let files = split(tensors, options.shard_bytes);
    let num_files = files.len();
    let name = |index: usize| match num_files {
        1 => format!("{MODEL}.safetensors"),
        _ => format!("{MODEL}-{:05}-of-{num_files:05}.safetensors", index + 1),
    };
    let path = |index| if is_file { out.to_owned() } else { dir.join(name(index)) };
    let index_path = (num_files > 1).then(|| dir.join(format!("{MODEL}.safetensors.index.json")));
    let paths: Vec<PathBuf> = (0..num_files).map(path).chain(index_path.clone()).collect();
    if let Some(path) = paths.iter().find(|path| path.exists()) {
        return Err(CheckpointError::OutputExists { path: path.clone() });
    }
    let free_bytes = free_bytes(dir)?;
    if tensor_bytes > free_bytes {
        return Err(CheckpointError::NoSpace { path: dir.to_owned(), needed_bytes: tensor_bytes, free_bytes });
    }

    let partial: Vec<PathBuf> = paths.iter().take(num_files).map(|path| partial(path)).collect();
    let written = partial.iter().zip(&files).try_for_each(|(path, tensors)| write_file(checkpoint, path, tensors));
    if let Err(error) = written {
        partial.iter().for_each(|path| drop(fs::remove_file(path)));
        return Err(error);
    }
    partial.iter().zip(&paths).try_for_each(|(partial, path)| rename(partial, path))?;
    let num_tensors = files.iter().map(Vec::len).sum();
    if let Some(path) = index_path {
        write_index(&path, &files, &name, tensor_bytes)?;
    }
    sync_dir(dir)?;
    Ok(Consolidated { files: paths, num_tensors, tensor_bytes })
}

/// The names under which a tensor is written.
fn names(tensor: &TensorEntry, tied: TiedWeights) -> impl Iterator<Item = Named<'_>> {
    let aliases = tensor.aliases.iter().filter(move |_| tied == TiedWeights::Copies);
    iter::once(&tensor.name).chain(aliases).map(move |name| (name.as_str(), tensor))
}

/// Deals tensors out to files, in their order; at least one file.
fn split(tensors: Vec<Named<'_>>, shard_bytes: Option<u64>) -> Vec<Vec<Named<'_>>> {
    let mut files = vec![Vec::new()];
    let mut bytes = 0;
    for named in tensors {
        let more = named.1.full_bytes();
        let is_full = shard_bytes.is_some_and(|limit| bytes + more > limit);
        if is_full && files.last().is_some_and(|file| !file.is_empty()) {
            files.push(Vec::new());
            bytes = 0;
        }
        bytes += more;
        files.last_mut().expect("there is always a last file").push(named);
    }
    files
}

/// The name of a file that is not complete.
fn partial(path: &Path) -> PathBuf {
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(".partial");
    path.with_file_name(name)
}

fn write_file(checkpoint: &Checkpoint, path: &Path, tensors: &[Named<'_>]) -> Result<(), CheckpointError> {
    // Larger elements first, so that every tensor is aligned to its elements.
    let mut tensors = tensors.to_vec();
    tensors.sort_by_key(|(_, tensor)| Reverse(tensor.dtype.size_bytes()));
    let in_file: Vec<_> = tensors
        .iter()
        .map(|&(name, tensor)| FileTensor { name, dtype: tensor.dtype, shape: tensor.shape.clone() })
        .collect();
    let written = |name: &String| in_file.iter().any(|tensor| tensor.name == name);
    // What loads models from hubs asks for the format that the tensors were meant for.
    let mut metadata =
        BTreeMap::from([("format".to_owned(), "pt".to_owned()), ("producer".to_owned(), PRODUCER.to_owned())]);
    for (_, tensor) in &tensors {
        let aliases = tensor.aliases.iter().filter(|alias| !written(alias));
        metadata.extend(aliases.map(|alias| (alias.clone(), tensor.name.clone())));
    }
    metadata.insert("step".into(), checkpoint.manifest.step.to_string());

    // Left by a run that was killed here.
    let _ = fs::remove_file(path);
    let mut file = NewFile::create(path, Via::Cache)?;
    file.write(&header_bytes(&in_file, &metadata, path)?)?;
    let mut block = Vec::new();
    for (_, tensor) in &tensors {
        let rows = tensor.shape.first().copied().unwrap_or(1).max(1);
        let rows_per_block = (BLOCK_BYTES / (tensor.full_bytes() as usize / rows).max(1)).max(1);
        let layout = ShardLayout::new(&tensor.shape, 0, rows.div_ceil(rows_per_block));
        for index in 0..layout.num_shards() {
            block.resize(layout.shard_len(index) * tensor.dtype.size_bytes(), 0);
            checkpoint.files.read_block(tensor, &layout, index, &mut block)?;
            file.write(&block)?;
        }
    }
    file.finish().map(drop)
}

fn write_index(
    path: &Path,
    files: &[Vec<Named<'_>>],
    name: &dyn Fn(usize) -> String,
    total_size: u64,
) -> Result<(), CheckpointError> {
    let entries = |(index, tensors): (usize, &Vec<Named<'_>>)| -> Vec<(String, serde_json::Value)> {
        tensors.iter().map(|(tensor, _)| ((*tensor).to_owned(), name(index).into())).collect()
    };
    let weight_map: serde_json::Map<_, _> = files.iter().enumerate().flat_map(entries).collect();
    let index = serde_json::json!({ "metadata": { "total_size": total_size }, "weight_map": weight_map });
    write_atomic(path, format!("{index:#}\n").as_bytes())
}
