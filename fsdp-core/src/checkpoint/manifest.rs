//! `manifest.json`: everything a checkpoint says about itself. It is written last, so a directory without one is no
//! checkpoint.
//!
//! The file is an envelope around the manifest's own text, with its version and the checksum of that text:
//! `{"format_version": 1, "checksum": "...", "manifest": {...}}`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;

use super::disk::{Checksum, NewFile, Via};
use super::{CheckpointError, StoredDtype};
use crate::{Mesh, Stage};

/// Name of the manifest in a step directory.
pub(super) const MANIFEST_FILE: &str = "manifest.json";

/// The version that is written, and the only one that is read.
pub(super) const FORMAT_VERSION: u64 = 1;

/// A larger file is no manifest.
const MAX_BYTES: u64 = 1 << 30;

/// What one checkpoint holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// The training step after which it was saved.
    pub step: u64,
    /// Ranks that saved it.
    pub world_size: usize,
    /// Their mesh.
    pub mesh: Mesh,
    /// Their stage.
    pub stage: Stage,
    /// Files beside the manifest.
    pub files: Vec<FileEntry>,
    /// All tensors, in the order in which rank 0 named them.
    pub tensors: Vec<TensorEntry>,
    /// Scalars of optimizer state, by name.
    pub scalars: BTreeMap<String, Value>,
    /// Free-form sections by name, such as `config`, `plan`, `scheduler`, `scaler`, `data position`.
    pub sections: BTreeMap<String, Value>,
    /// What each rank wanted to find again, such as its random state; one value per rank.
    pub ranks: Vec<Value>,
}

/// A file of tensors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Its name in the step directory.
    pub name: String,
    /// Its size, in bytes.
    pub bytes: u64,
    /// The checksum of all of it.
    pub checksum: Checksum,
}

/// What a tensor belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TensorKind {
    /// The model: parameters and buffers.
    Model,
    /// The optimizer: moments and master weights.
    Optimizer,
}

/// One tensor: logical, over all ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// Its name, unique in the checkpoint.
    pub name: String,
    /// Further names of the same tensor: tied weights.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub aliases: Vec<String>,
    /// What it belongs to.
    pub kind: TensorKind,
    /// Its element type.
    pub dtype: StoredDtype,
    /// Its logical shape, in elements.
    pub shape: Vec<usize>,
    /// The dimension along which it is cut into pieces.
    pub dim: usize,
    /// Its pieces, in the order of their rows; they cover the dimension once. None where there are no elements.
    pub pieces: Vec<Piece>,
}

/// Where some rows of a tensor lie: in the file, under the tensor's name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Piece {
    /// Index into [`Manifest::files`].
    pub file: usize,
    /// The first row, of the dimension that is cut.
    pub start: usize,
    /// The row behind the last.
    pub end: usize,
}

impl TensorEntry {
    /// Elements of the whole tensor.
    pub fn full_len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Bytes of the whole tensor.
    pub fn full_bytes(&self) -> u64 {
        self.full_len() as u64 * self.dtype.size_bytes() as u64
    }

    /// The shape of a piece.
    pub(super) fn piece_shape(&self, piece: &Piece) -> Vec<usize> {
        let mut shape = self.shape.clone();
        if let Some(rows) = shape.get_mut(self.dim) {
            *rows = piece.end - piece.start;
        }
        shape
    }

    /// What is wrong with the entry, if anything. Whatever is right here cannot overflow later.
    fn problem(&self, num_files: usize) -> Option<String> {
        let name = &self.name;
        // Dimensions of size 0 are left out, so that products of some dimensions fit as well.
        let sizes = self.shape.iter().filter(|&&size| size > 0);
        let bytes = sizes.chain([&self.dtype.size_bytes()]).try_fold(1usize, |product, &n| product.checked_mul(n));
        if bytes.is_none_or(|bytes| bytes > isize::MAX as usize) {
            return Some(format!("`{name}` of shape {:?} is larger than any memory", self.shape));
        }
        if self.dim >= self.shape.len().max(1) {
            return Some(format!("`{name}` is cut along dimension {}, but has shape {:?}", self.dim, self.shape));
        }
        let mut at = 0;
        let mut seen = BTreeSet::new();
        for piece in &self.pieces {
            if piece.start != at || piece.end <= piece.start {
                let Piece { start, end, .. } = piece;
                return Some(format!("`{name}`: rows {start} to {end} come where row {at} is due"));
            }
            if piece.file >= num_files || !seen.insert(piece.file) {
                return Some(format!("`{name}`: file number {} does not exist, or comes twice", piece.file));
            }
            at = piece.end;
        }
        let rows = if self.full_len() == 0 { 0 } else { self.shape.get(self.dim).copied().unwrap_or(1) };
        (at != rows).then(|| format!("`{name}` has {rows} rows along dimension {}, but {at} are stored", self.dim))
    }
}

/// The outer object of the file.
#[derive(Serialize, Deserialize)]
struct Envelope<'a> {
    format_version: u64,
    checksum: Checksum,
    #[serde(borrow)]
    manifest: &'a RawValue,
}

impl Manifest {
    /// Reads and checks the manifest of a step directory: its checksum, and that it does not contradict itself. Files
    /// are not looked at.
    ///
    /// # Errors
    /// If there is none, it is damaged, or of another version.
    pub fn read(dir: impl AsRef<Path>) -> Result<Self, CheckpointError> {
        let dir = dir.as_ref();
        let path = dir.join(MANIFEST_FILE);
        let file = match File::open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(CheckpointError::NoManifest { dir: dir.to_owned() });
            }
            file => file.map_err(CheckpointError::io("open", &path))?,
        };
        let mut text = Vec::new();
        file.take(MAX_BYTES).read_to_end(&mut text).map_err(CheckpointError::io("read", &path))?;
        Self::parse(&text, &path)
    }

    /// Checks and writes it durably into `dir`, where there must be none. Returns its size in bytes.
    pub(super) fn write(&self, dir: &Path) -> Result<u64, CheckpointError> {
        let path = dir.join(MANIFEST_FILE);
        let damaged = |problem: String| CheckpointError::Manifest { file: path.clone(), problem };
        self.problem().map_or(Ok(()), |problem| Err(damaged(problem)))?;
        let text = self.to_text().map_err(|error| damaged(error.to_string()))?;
        let mut file = NewFile::create(&path, Via::Cache)?;
        file.write(text.as_bytes())?;
        Ok(file.finish()?.0)
    }

    pub(super) fn to_text(&self) -> serde_json::Result<String> {
        let manifest = serde_json::value::to_raw_value(self)?;
        let checksum = Checksum::of(manifest.get().as_bytes());
        let mut text =
            serde_json::to_string(&Envelope { format_version: FORMAT_VERSION, checksum, manifest: &manifest })?;
        text.push('\n');
        Ok(text)
    }

    /// `path` is for errors.
    pub(super) fn parse(text: &[u8], path: &Path) -> Result<Self, CheckpointError> {
        #[derive(Deserialize)]
        struct Version {
            format_version: u64,
        }
        let damaged = |problem: String| CheckpointError::Manifest { file: path.to_owned(), problem };
        let syntax = |error: serde_json::Error| damaged(error.to_string());
        let Version { format_version: got } = serde_json::from_slice(text).map_err(syntax)?;
        if got != FORMAT_VERSION {
            return Err(CheckpointError::Version { file: path.to_owned(), got, supported: FORMAT_VERSION });
        }
        let envelope: Envelope<'_> = serde_json::from_slice(text).map_err(syntax)?;
        let got = Checksum::of(envelope.manifest.get().as_bytes());
        if got != envelope.checksum {
            let (expected, got) = (envelope.checksum.to_string(), got.to_string());
            return Err(CheckpointError::Checksum { file: path.to_owned(), expected, got });
        }
        let manifest: Manifest = serde_json::from_str(envelope.manifest.get()).map_err(syntax)?;
        manifest.problem().map_or(Ok(manifest), |problem| Err(damaged(problem)))
    }

    /// What contradicts itself, if anything.
    pub(super) fn problem(&self) -> Option<String> {
        if self.world_size != self.mesh.world_size() || self.world_size != self.ranks.len() {
            let (world_size, mesh) = (self.world_size, &self.mesh);
            return Some(format!("the world size is {world_size}, the mesh {mesh}, and {} ranks", self.ranks.len()));
        }
        let mut names = BTreeSet::new();
        for file in &self.files {
            // A name with a separator would lead out of the directory.
            let is_plain = Path::new(&file.name).file_name().is_some_and(|name| name == file.name.as_str());
            if !is_plain || file.name == MANIFEST_FILE || !names.insert(&file.name) {
                return Some(format!("`{}` is no name of a file, or comes twice", file.name));
            }
        }
        let mut names = BTreeSet::new();
        for tensor in &self.tensors {
            if let Some(name) = [&tensor.name].into_iter().chain(&tensor.aliases).find(|name| !names.insert(*name)) {
                return Some(format!("the name `{name}` comes twice"));
            }
        }
        self.tensors.iter().find_map(|tensor| tensor.problem(self.files.len()))
    }

    /// Bytes of all files, the manifest left out.
    pub fn data_bytes(&self) -> u64 {
        self.files.iter().fold(0, |sum, file| sum.saturating_add(file.bytes))
    }
}

impl FileEntry {
    /// Whether the file is there with its size.
    pub(super) fn check_size(&self, dir: &Path) -> Result<(), CheckpointError> {
        let file = dir.join(&self.name);
        match fs::metadata(&file) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(CheckpointError::MissingFile { file }),
            Err(error) => Err(CheckpointError::io("look at", file)(error)),
            Ok(found) if found.len() != self.bytes => {
                Err(CheckpointError::FileSize { file, expected: self.bytes, got: found.len() })
            }
            Ok(_) => Ok(()),
        }
    }

    /// Whether the file has its content. Reads all of it.
    pub(super) fn check_content(&self, dir: &Path) -> Result<(), CheckpointError> {
        let file = dir.join(&self.name);
        let got = Checksum::of_file(&file)?;
        if got == self.checksum {
            return Ok(());
        }
        Err(CheckpointError::Checksum { file, expected: self.checksum.to_string(), got: got.to_string() })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn manifest() -> Manifest {
        let file = |name: &str| FileEntry { name: name.into(), bytes: 64, checksum: Checksum::of(name.as_bytes()) };
        let pieces = vec![Piece { file: 0, start: 0, end: 3 }, Piece { file: 1, start: 3, end: 5 }];
        let weight = TensorEntry {
            name: "weight".into(),
            aliases: vec!["tied".into()],
            kind: TensorKind::Model,
            dtype: StoredDtype::F32,
            shape: vec![2, 5],
            dim: 1,
            pieces,
        };
        Manifest {
            step: u64::MAX,
            world_size: 2,
            mesh: Mesh::one_dim(2),
            stage: Stage::Gradients,
            files: vec![file("a"), file("b")],
            tensors: vec![weight],
            scalars: BTreeMap::from([("time".into(), 0.1.into())]),
            sections: BTreeMap::new(),
            ranks: vec![Value::Null, 7.into()],
        }
    }

    fn parse(text: &[u8]) -> Result<Manifest, CheckpointError> {
        Manifest::parse(text, Path::new("manifest.json"))
    }

    /// An envelope with the right checksum around any text.
    fn sealed(inner: &str) -> String {
        let checksum = Checksum::of(inner.as_bytes());
        format!(r#"{{"format_version":1,"checksum":"{checksum}","manifest":{inner}}}"#)
    }

    #[test]
    fn a_manifest_reads_back_equal() {
        assert_eq!(parse(manifest().to_text().unwrap().as_bytes()).unwrap(), manifest());
    }

    #[test]
    fn every_contradiction_is_found_although_the_checksum_is_right() {
        type Change = fn(&mut Manifest);
        let cases: [(Change, &str); 14] = [
            (|m| m.world_size = 3, "the world size is 3, the mesh { shard = 2 }, and 2 ranks"),
            (|m| m.ranks.clear(), "the world size is 2, the mesh { shard = 2 }, and 0 ranks"),
            (|m| m.files[1].name = "a".into(), "`a` is no name of a file, or comes twice"),
            (|m| m.files[1].name = "../a".into(), "`../a` is no name of a file, or comes twice"),
            (|m| m.files[1].name = "..".into(), "`..` is no name of a file, or comes twice"),
            (|m| m.files[1].name = "/a".into(), "`/a` is no name of a file, or comes twice"),
            (|m| m.files[0].name = "manifest.json".into(), "`manifest.json` is no name of a file, or comes twice"),
            (|m| m.tensors[0].aliases.push("weight".into()), "the name `weight` comes twice"),
            (|m| m.tensors[0].dim = 2, "`weight` is cut along dimension 2, but has shape [2, 5]"),
            (|m| m.tensors[0].pieces[1].start = 2, "`weight`: rows 2 to 5 come where row 3 is due"),
            (|m| m.tensors[0].pieces[1].end = 4, "`weight` has 5 rows along dimension 1, but 4 are stored"),
            (|m| m.tensors[0].pieces[1].file = 2, "`weight`: file number 2 does not exist, or comes twice"),
            (|m| m.tensors[0].pieces[1].file = 0, "`weight`: file number 0 does not exist, or comes twice"),
            (
                |m| m.tensors[0].shape = vec![0, usize::MAX, 2],
                "`weight` of shape [0, 18446744073709551615, 2] is larger than any memory",
            ),
        ];
        for (change, problem) in cases {
            let mut manifest = manifest();
            change(&mut manifest);
            let error = parse(manifest.to_text().unwrap().as_bytes()).unwrap_err().to_string();
            assert_eq!(error, format!("manifest.json: the manifest is damaged: {problem}; use another checkpoint"));
        }
    }

    #[test]
    fn keys_that_this_version_does_not_know_are_refused() {
        let text = serde_json::to_string(&manifest()).unwrap().replacen("\"step\"", "\"news\":1,\"step\"", 1);
        let error = parse(sealed(&text).as_bytes()).unwrap_err().to_string();
        assert!(error.contains("unknown field `news`"), "{error}");
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn no_bytes_make_the_parser_panic(text in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse(&text);
        }

        #[test]
        fn any_change_is_refused_by_the_checksum(at in any::<prop::sample::Index>(), byte in any::<u8>()) {
            let text = manifest().to_text().unwrap().into_bytes();
            let mut changed = text.clone();
            let at = at.index(text.len());
            changed[at] = byte;
            if let Ok(read) = parse(&changed) {
                prop_assert_eq!(read, manifest(), "blanks around the manifest do not matter");
            }
        }

        #[test]
        fn whatever_passes_its_checksum_cannot_overflow(
            changes in proptest::collection::vec((any::<prop::sample::Index>(), prop::sample::select(&b"0123456789[],-.eE"[..])), 1..8),
        ) {
            let mut text = serde_json::to_vec(&manifest()).unwrap();
            for (at, byte) in changes {
                let at = at.index(text.len());
                text[at] = byte;
            }
            let Ok(text) = String::from_utf8(text) else { return Ok(()) };
            if let Ok(manifest) = parse(sealed(&text).as_bytes()) {
                for tensor in &manifest.tensors {
                    let rows: usize = tensor.pieces.iter().map(|piece| piece.end - piece.start).sum();
                    prop_assert!(tensor.full_len() == 0 || rows == tensor.shape.get(tensor.dim).copied().unwrap_or(1));
                    prop_assert!(tensor.full_bytes() <= isize::MAX as u64);
                }
            }
        }
    }
}
