//! Plain `safetensors`, as the rest of the world writes it: one file, or a set with its index, read a block at a time.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use safetensors::tensor::Metadata;
use serde::Deserialize;

use super::header::Header;
use super::manifest::{Piece, TensorEntry, TensorKind};
use super::pieces::PieceFiles;
use super::{CheckpointError, StoredDtype};
use crate::ShardLayout;

/// What a directory of weights is searched for: as model hubs and [`consolidate`](super::consolidate()) lay it out.
const IN_DIRECTORY: [&str; 2] = ["model.safetensors.index.json", "model.safetensors"];

/// A larger file is no index.
const MAX_INDEX_BYTES: u64 = 100_000_000;

/// The tensors of plain `safetensors` files. Each is whole in its file; any block of any layout is read from it.
///
/// ```
/// use fsdp_core::ShardLayout;
/// use fsdp_core::checkpoint::Safetensors;
/// use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
///
/// # let dir = tempfile::tempdir()?;
/// # let file = dir.path().join("model.safetensors");
/// let weight = TensorView::new(Dtype::U8, vec![2, 3], &[1, 2, 3, 4, 5, 6])?;
/// serialize_to_file([("head.weight", weight)], None, &file)?;
///
/// let opened = Safetensors::open(&file)?;
/// assert_eq!(opened.tensors()[0].shape, [2, 3]);
/// // What the second of two ranks holds, where columns are cut.
/// assert_eq!(opened.read("head.weight", &ShardLayout::new(&[2, 3], 1, 2), 1)?, [3, 6]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Safetensors {
    path: PathBuf,
    tensors: Vec<TensorEntry>,
    names: HashMap<String, usize>,
    metadata: BTreeMap<String, String>,
    files: PieceFiles,
}

/// The index of a set of files.
#[derive(Deserialize)]
pub(super) struct Index {
    pub(super) weight_map: BTreeMap<String, String>,
}

impl Safetensors {
    /// Opens `path`: a file, the index of a set (`model.safetensors.index.json`), or a directory that holds either under the
    /// name that model hubs use. Reads the headers, and no tensor.
    ///
    /// A name that a file's metadata gives to one of its tensors, as Python's `save_model` does for tied weights, is an
    /// alias of that tensor.
    ///
    /// # Errors
    /// If a file is not there or damaged, the index and the files contradict each other, or a tensor has an element type
    /// that [`StoredDtype`] does not have.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, CheckpointError> {
        let path = match path.as_ref() {
            dir if dir.is_dir() => in_directory(dir)?,
            file => file.to_owned(),
        };
        let is_index = path.extension().is_some_and(|extension| extension == "json");
        let (files, weight_map) = if is_index { files_of_index(&path)? } else { (vec![path.clone()], BTreeMap::new()) };
        let mut opened = Self {
            path,
            tensors: Vec::new(),
            names: HashMap::new(),
            metadata: BTreeMap::new(),
            files: PieceFiles::new(files.iter().cloned()),
        };
        for (number, path) in files.iter().enumerate() {
            let file = File::open(path).map_err(CheckpointError::io("open", path))?;
            opened.add(number, path, Header::read(&file, path)?.metadata())?;
        }
        opened.check_index(&weight_map)?;
        Ok(opened)
    }

    /// The file, or the index of the set.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All tensors, in the order of the files and of the places in them.
    pub fn tensors(&self) -> &[TensorEntry] {
        &self.tensors
    }

    /// The tensor of this name or alias.
    pub fn tensor(&self, name: &str) -> Option<&TensorEntry> {
        self.names.get(name).map(|&index| &self.tensors[index])
    }

    /// What the files say beside tensors; of several files with one key, the last counts.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Reads one block of a tensor: flat, row-major, little-endian, in the element type of the file.
    ///
    /// Allocates the block, and reads the byte ranges that belong to it; short ranges are read with what lies between
    /// them, through a buffer of 1 MiB.
    ///
    /// # Errors
    /// If there is no such tensor, the layout has another shape, or the file cannot be read.
    ///
    /// # Panics
    /// If the layout has no block `shard_index`.
    pub fn read(&self, name: &str, layout: &ShardLayout, shard_index: usize) -> Result<Vec<u8>, CheckpointError> {
        let tensor = self.tensor(name).ok_or_else(|| self.unusable(format!("it has no tensor `{name}`")))?;
        if tensor.shape != layout.shape() {
            let (tensor, stored, asked) = (name.to_owned(), tensor.shape.clone(), layout.shape().to_vec());
            return Err(CheckpointError::Shape { tensor, stored, asked });
        }
        let mut block = vec![0; layout.shard_len(shard_index) * tensor.dtype.size_bytes()];
        self.files.read_block(tensor, layout, shard_index, &mut block)?;
        Ok(block)
    }

    /// Adds the tensors of one file.
    fn add(&mut self, number: usize, path: &Path, header: &Metadata) -> Result<(), CheckpointError> {
        let unusable = |problem| CheckpointError::Weights { path: path.to_owned(), problem };
        let notes: BTreeMap<_, _> = header.metadata().clone().unwrap_or_default().into_iter().collect();
        for name in header.offset_keys() {
            let Some(info) = header.info(&name) else { continue };
            let Some(dtype) = StoredDtype::of_safetensors(info.dtype) else {
                let problem =
                    format!("`{name}` has the element type {}, which cannot be loaded; convert it", info.dtype);
                return Err(unusable(problem));
            };
            let shape = info.shape.clone();
            let rows = if shape.contains(&0) { 0 } else { shape.first().copied().unwrap_or(1) };
            let pieces = (rows > 0).then_some(Piece { file: number, start: 0, end: rows }).into_iter().collect();
            let is_alias = |(alias, of): &(&String, &String)| **of == name && header.info(alias).is_none();
            let aliases: Vec<_> = notes.iter().filter(is_alias).map(|(alias, _)| alias.clone()).collect();
            for name in [&name].into_iter().chain(&aliases) {
                if self.names.insert(name.clone(), self.tensors.len()).is_some() {
                    return Err(unusable(format!(
                        "`{name}` comes twice in the set of files; leave out the one that is not the model's"
                    )));
                }
            }
            self.tensors.push(TensorEntry { name, aliases, kind: TensorKind::Model, dtype, shape, dim: 0, pieces });
        }
        self.metadata.extend(notes);
        Ok(())
    }

    /// Whether each tensor lies in the file that the index says.
    fn check_index(&self, weight_map: &BTreeMap<String, String>) -> Result<(), CheckpointError> {
        for (name, file) in weight_map {
            let Some(tensor) = self.tensor(name) else {
                return Err(self.unusable(format!(
                    "it names `{name}`, which `{file}` does not have; get index and files from one place"
                )));
            };
            let lies_in = tensor.pieces.first().and_then(|piece| self.files.path(piece.file).file_name());
            if lies_in.is_some_and(|lies_in| lies_in != file.as_str()) {
                return Err(self.unusable(format!(
                    "`{name}` lies in {lies_in:?}, and not in `{file}` as it says; get index and files from one place"
                )));
            }
        }
        Ok(())
    }

    fn unusable(&self, problem: String) -> CheckpointError {
        CheckpointError::Weights { path: self.path.clone(), problem }
    }
}

fn in_directory(dir: &Path) -> Result<PathBuf, CheckpointError> {
    IN_DIRECTORY.iter().map(|name| dir.join(name)).find(|path| path.exists()).ok_or_else(|| {
        let problem = format!("the directory has neither `{}` nor `{}`; name a file", IN_DIRECTORY[0], IN_DIRECTORY[1]);
        CheckpointError::Weights { path: dir.to_owned(), problem }
    })
}

/// The files that an index names, and its map from tensors to files.
fn files_of_index(path: &Path) -> Result<(Vec<PathBuf>, BTreeMap<String, String>), CheckpointError> {
    let unusable = |problem| CheckpointError::Weights { path: path.to_owned(), problem };
    let size = fs::metadata(path).map_err(CheckpointError::io("open", path))?.len();
    if size > MAX_INDEX_BYTES {
        return Err(unusable(format!(
            "{size} bytes are too many for an index; name a `.safetensors` file, or the index beside it"
        )));
    }
    let text = fs::read(path).map_err(CheckpointError::io("read", path))?;
    let Index { weight_map } = parse_index(&text).map_err(unusable)?;
    let mut names: Vec<&String> = weight_map.values().collect();
    names.sort_unstable();
    names.dedup();
    Ok((names.into_iter().map(|name| path.with_file_name(name)).collect(), weight_map))
}

pub(super) fn parse_index(text: &[u8]) -> Result<Index, String> {
    let index: Index = serde_json::from_slice(text).map_err(|error| {
        format!("it is no index of weights: {error}; name a `.safetensors` file, or the index beside it")
    })?;
    // A name with a separator would lead out of the directory.
    let is_plain = |name: &&String| Path::new(name).file_name().is_some_and(|plain| plain == name.as_str());
    match index.weight_map.values().find(|name| !is_plain(name)) {
        Some(name) => Err(format!("`{name}` is no name of a file beside it; get index and files from one place")),
        None => Ok(index),
    }
}
