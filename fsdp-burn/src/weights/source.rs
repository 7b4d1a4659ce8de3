//! Files of weights in any format, as a list of tensors whose elements are read when they are asked for.

use std::path::{Path, PathBuf};

use burn::tensor::{BoolStore, DType, TensorData};
use burn_pack::Tensor as Unread;
use burn_store::{BurnpackStore, ModuleStore, PytorchStore};
use fsdp_core::checkpoint::{Checkpoint, PRODUCER, Safetensors, StoredDtype, TensorEntry, TensorKind, Verify};
use fsdp_core::{Communicator, ShardLayout};

use super::{Convention, WeightOptions};
use crate::{Error, host};

/// What is a checkpoint of ours.
const MANIFEST: &str = "manifest.json";

/// An opened file, set of files, or checkpoint.
pub(super) struct Source {
    pub(super) path: PathBuf,
    pub(super) convention: Convention,
    pub(super) tensors: Vec<Found>,
    reader: Reader,
}

/// A tensor of a file.
pub(super) struct Found {
    /// Its name in the file.
    pub(super) name: String,
    /// Further names, of tied weights.
    pub(super) aliases: Vec<String>,
    pub(super) shape: Vec<usize>,
    pub(super) dtype: StoredDtype,
}

enum Reader {
    Checkpoint(Checkpoint),
    Safetensors(Safetensors),
    /// By the index of their tensor: formats that Burn reads, a whole tensor at a time.
    Whole(Vec<Unread>),
}

impl Source {
    /// Opens `path` on all ranks. *Collective* for a checkpoint of ours.
    ///
    /// # Errors
    /// If nothing can be read there, or the file does not say whose layout it has.
    pub(super) fn open(path: &Path, options: &WeightOptions, control: &dyn Communicator) -> Result<Self, Error> {
        let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
        if path.join(MANIFEST).exists() {
            let checkpoint = Checkpoint::open_on(control, path, Verify::Checksums)?;
            let of_model = checkpoint.manifest().tensors.iter().filter(|tensor| tensor.kind == TensorKind::Model);
            let tensors = of_model.map(found).collect();
            return Self::new(path, options, Convention::Burn, tensors, Reader::Checkpoint(checkpoint));
        }
        match extension {
            "bpk" => {
                let tensors = BurnpackStore::from_file(path).get_all_tensors().map_err(unreadable(path))?.clone();
                Self::whole(path, options, Convention::Burn, tensors.into_values().collect())
            }
            "pt" | "pth" | "bin" | "ckpt" => {
                // Renumbering layers is the user's to ask for: it would give the weights of some layers to others.
                let mut store = PytorchStore::from_file(path).map_indices_contiguous(false);
                if let Some(key) = &options.key {
                    store = store.with_top_level_key(key);
                }
                let tensors = store.get_all_tensors().map_err(unreadable(path))?.clone();
                Self::whole(path, options, Convention::PyTorch, tensors.into_values().collect())
            }
            "safetensors" | "json" => Self::safetensors(path, options),
            _ if path.is_dir() => Self::safetensors(path, options),
            _ => Err(Error::Misuse {
                problem: format!("{}: there is no format of weights with this extension", path.display()),
                remedy: "name a .safetensors file or its .safetensors.index.json, a .bpk, .pt, .pth, .bin or .ckpt file, a \
                         directory with `model.safetensors`, or a checkpoint such as `step-100`",
            }),
        }
    }

    fn safetensors(path: &Path, options: &WeightOptions) -> Result<Self, Error> {
        let opened = Safetensors::open(path)?;
        let note = |key: &str| opened.metadata().get(key).map(String::as_str);
        // Ours notes `pt` as well, for those who load whatever a hub has.
        let convention = match (note("producer"), note("format")) {
            (Some("burn" | PRODUCER), _) => Convention::Burn,
            (_, Some("pt")) => Convention::PyTorch,
            _ => Convention::Detect,
        };
        let tensors = opened.tensors().iter().map(found).collect();
        Self::new(path, options, convention, tensors, Reader::Safetensors(opened))
    }

    fn whole(
        path: &Path,
        options: &WeightOptions,
        convention: Convention,
        tensors: Vec<Unread>,
    ) -> Result<Self, Error> {
        let found = |tensor: &Unread| {
            let (name, shape) = (tensor.name.clone(), tensor.shape.to_vec());
            let dtype = DTYPES.iter().find(|(_, dtype)| *dtype == tensor.dtype).map(|&(stored, _)| stored);
            let dtype = dtype.ok_or_else(|| {
                unreadable(path)(format!("`{name}` has the element type {:?}; convert it to floats", tensor.dtype))
            })?;
            Ok(Found { name, aliases: Vec::new(), shape, dtype })
        };
        let found = tensors.iter().map(found).collect::<Result<_, Error>>()?;
        Self::new(path, options, convention, found, Reader::Whole(tensors))
    }

    fn new(
        path: &Path,
        options: &WeightOptions,
        detected: Convention,
        tensors: Vec<Found>,
        reader: Reader,
    ) -> Result<Self, Error> {
        let convention = if options.convention == Convention::Detect { detected } else { options.convention };
        if convention == Convention::Detect {
            return Err(Error::Misuse {
                problem: format!(
                    "{} does not say whether it has Burn's names and layout or PyTorch's, whose linear weights are transposed",
                    path.display()
                ),
                remedy: "set `convention` to Convention::Burn or Convention::PyTorch",
            });
        }
        Ok(Self { path: path.to_owned(), convention, tensors, reader })
    }

    /// Whether a rank can read its block alone. Otherwise one rank reads the whole, and deals it out.
    pub(super) fn reads_blocks(&self) -> bool {
        !matches!(self.reader, Reader::Whole(_))
    }

    /// A block of a tensor, or the whole, in the file's element type and layout.
    ///
    /// # Errors
    /// If the file cannot be read.
    ///
    /// # Panics
    /// If it is not the whole, of a format that has no blocks.
    pub(super) fn read(&self, tensor: usize, layout: &ShardLayout, shard_index: usize) -> Result<TensorData, Error> {
        let Found { name, dtype, .. } = &self.tensors[tensor];
        let bytes = match &self.reader {
            Reader::Checkpoint(checkpoint) => checkpoint.read(name, layout, shard_index)?.into(),
            Reader::Safetensors(opened) => opened.read(name, layout, shard_index)?.into(),
            Reader::Whole(tensors) => {
                assert_eq!(layout.num_shards(), 1, "formats without blocks are read whole");
                host::shared(tensors[tensor].to_bytes().map_err(unreadable(&self.path))?)
            }
        };
        let dtype = DTYPES.iter().find(|(stored, _)| stored == dtype).map_or(DType::F32, |&(_, dtype)| dtype);
        Ok(host::data_of(bytes, &layout.shard_shape(shard_index), dtype))
    }
}

fn found(tensor: &TensorEntry) -> Found {
    let TensorEntry { name, aliases, shape, dtype, .. } = tensor;
    Found { name: name.clone(), aliases: aliases.clone(), shape: shape.clone(), dtype: *dtype }
}

/// Element types as a checkpoint and as Burn calls them.
const DTYPES: [(StoredDtype, DType); StoredDtype::ALL.len()] = [
    (StoredDtype::F64, DType::F64),
    (StoredDtype::F32, DType::F32),
    (StoredDtype::F16, DType::F16),
    (StoredDtype::Bf16, DType::BF16),
    (StoredDtype::I64, DType::I64),
    (StoredDtype::I32, DType::I32),
    (StoredDtype::I16, DType::I16),
    (StoredDtype::I8, DType::I8),
    (StoredDtype::U64, DType::U64),
    (StoredDtype::U32, DType::U32),
    (StoredDtype::U16, DType::U16),
    (StoredDtype::U8, DType::U8),
    (StoredDtype::Bool, DType::Bool(BoolStore::Native)),
];

fn unreadable<E: std::fmt::Display>(path: &Path) -> impl FnOnce(E) -> Error {
    move |error| Error::program(format!("{} cannot be read: {error}", path.display()))
}
