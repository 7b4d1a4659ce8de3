//! Weights from outside: a file that another program wrote, taken into a sharded model block by block.

mod names;
mod source;

use std::collections::HashMap;
use std::path::Path;

use burn::module::Module;
use burn::tensor::{Device, Tensor, TensorData};
use burn_store::KeyRemapper;
use bytes::Bytes;
use fsdp_core::checkpoint::{Comparison, ExpectedTensor, StoredDtype, WrongTensor};
use fsdp_core::{Dtype, OpTag, Phase, ShardLayout};

use crate::buffers::Buffer;
use crate::distribute::deal_out;
use crate::{Error, ShardedModel, host};
use names::{Place, places};
use source::{Found, Source};

/// What `PyTorch`'s normalisations count and Burn's do not.
const UNUSED_COUNTER: &str = "num_batches_tracked";

/// How weights of a file are taken into a model.
///
/// ```
/// use fsdp_burn::{Convention, Fit, WeightOptions};
///
/// // A Python program saved a whole trainer; the model's blocks are called `h.0`, `h.1`, ... there.
/// let options = WeightOptions {
///     convention: Convention::PyTorch,
///     key: Some("model_state_dict".into()),
///     rename: vec![(r"^transformer\.h\.(\d+)\.".into(), "blocks.$1.".into())],
///     fit: Fit::MoreInFile,
/// };
/// # let _ = options;
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WeightOptions {
    /// Whose names and layout the file has.
    pub convention: Convention,
    /// In a PyTorch file, the key of the dictionary under which the weights lie, such as `state_dict`. `None`: at the top.
    pub key: Option<String>,
    /// From names of the file to names of the model: regular expressions and what replaces their matches (`$1` is the first
    /// group), applied one after the other.
    pub rename: Vec<(String, String)>,
    /// How far file and model may differ.
    pub fit: Fit,
}

/// Names and layout of weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Convention {
    /// As the file says: Burn's for burnpack and checkpoints, PyTorch's for its own files, and the `safetensors` that name
    /// their producer or format. A file that says nothing is refused.
    #[default]
    Detect,
    /// Burn's: a linear weight is `[inputs, outputs]`, normalisations have `gamma` and `beta`.
    Burn,
    /// PyTorch's: a linear weight is `[outputs, inputs]`, normalisations have `weight` and `bias`, and names leave out the
    /// variants of enums. Layers are known by the names of Burn's types, such as `Linear` and `LayerNorm`.
    PyTorch,
}

/// How far a file of weights and a model may differ. A wrong shape is always an error.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fit {
    /// Each has every tensor of the other.
    #[default]
    Exact,
    /// The file has every tensor of the model, and may have others.
    MoreInFile,
    /// What the file does not have stays as it was; at least one tensor must be in both.
    Partial,
}

/// What [`ShardedModel::load_weights`] has done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadedWeights {
    /// Tensors of the model that have their values from the file, by their paths.
    pub loaded: Vec<String>,
    /// Tensors of the model that the file does not have.
    pub missing: Vec<String>,
    /// Tensors of the file that the model does not have, by their names in the file.
    pub extra: Vec<String>,
}

/// Where the values of a parameter come from; with tied weights, of all its fields.
struct Take {
    /// Index of the first field's entry.
    entry: usize,
    tensor: usize,
    is_transposed: bool,
    /// The file has it under other names too, which must not say anything else.
    copies: Vec<(usize, bool)>,
}

impl<M: Module> ShardedModel<M> {
    /// Takes over the weights and running statistics that `path` has, whoever wrote it. *Collective*; every rank sees the
    /// path. Optimizer state is not touched, so this is for a model that begins, as in fine-tuning.
    ///
    /// | `path` | is read |
    /// |---|---|
    /// | `.safetensors`, `.safetensors.index.json`, a directory with `model.safetensors` | each rank its own blocks |
    /// | a checkpoint such as `step-100`, verified | each rank its own blocks |
    /// | `.bpk` (burnpack) | rank 0, a tensor at a time, and dealt out |
    /// | `.pt`, `.pth`, `.bin`, `.ckpt` (PyTorch) | rank 0, a tensor at a time, and dealt out |
    ///
    /// What every rank holds in whole, at stages 0 to 2 everything, is read once, by rank 0. Floats of any size become floats
    /// of the parameter's type. Of tied weights the file may have one or all, with equal values. What is marked
    /// `#[shard(ignore)]` is taken where the file has it, and not missed; parameters of integers or booleans are not loaded.
    ///
    /// Memory: this rank's blocks a second time while it lasts, and one tensor on rank 0, or one block on each rank. Traffic:
    /// what one rank reads for others.
    ///
    /// ```
    /// use burn::{module::Module, nn::{Linear, LinearConfig}, tensor::Device};
    /// use burn_store::{BurnpackStore, ModuleSnapshot};
    /// use fsdp_burn::{Config, Error, Sharded, WeightOptions, launch};
    ///
    /// #[derive(Module, Debug, Sharded)]
    /// struct Model {
    ///     #[shard(unit)]
    ///     layer: Linear,
    /// }
    ///
    /// # let path = std::env::temp_dir().join(format!("fsdp-burn-doc-{}.bpk", std::process::id()));
    /// # let file = path.clone();
    /// let layer = LinearConfig::new(4, 4).init(&Device::flex());
    /// Model { layer }.save_into(&mut BurnpackStore::from_file(&file).overwrite(true)).map_err(Error::program)?;
    ///
    /// let loaded = launch(&Config { world_size: 2, ..Config::default() }, move |rank| {
    ///     let mut model = rank.shard(Model { layer: LinearConfig::new(4, 4).init(&rank.device()) })?;
    ///     model.load_weights(&file, &WeightOptions::default())
    /// })?;
    /// assert_eq!(loaded[0].loaded, ["layer.weight", "layer.bias"]);
    /// # std::fs::remove_file(path).map_err(Error::program)?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// On every rank: if a file cannot be read, or does not say whose layout it has; if tensors are missing, left over or of
    /// another shape, with a list of all. The model is as it was then.
    pub fn load_weights(&mut self, path: impl AsRef<Path>, options: &WeightOptions) -> Result<LoadedWeights, Error> {
        let (engine, control) = (self.engine().clone(), self.engine().links().control.clone());
        let source = self.agree("open weights", Source::open(path.as_ref(), options, &*control))?;
        let places = places(self.module(), source.convention);
        let (takes, loaded) = self.agree("compare weights", self.takes(&source, &places, options))?;

        let mut stored = Vec::new();
        let mut values: Vec<Option<Buffer>> = self.entries().iter().map(|_| None).collect();
        for take in &takes {
            match self.managed(take.entry) {
                Some(param) => {
                    stored.push((param, self.values(&source, take, Some(param), &places[take.entry])?.bytes))
                }
                None => {
                    let value = self.values(&source, take, None, &places[take.entry])?;
                    let is_of_it =
                        |index: usize| index == take.entry || self.entries()[index].tied_to == Some(take.entry);
                    (0..values.len()).filter(|&index| is_of_it(index)).for_each(|i| values[i] = Some(value.clone()));
                }
            }
        }
        engine.finish_reduces()?;
        engine.abandon_forward()?;
        engine.discard_gradients();
        let placed = stored.into_iter().try_for_each(|(param, bytes)| engine.place_stored(param, bytes));
        self.agree("put weights on the disk", placed)?;
        self.restore(values);
        Ok(loaded)
    }

    /// What is to be read, and what that leaves out.
    fn takes(
        &self,
        source: &Source,
        places: &[Place],
        options: &WeightOptions,
    ) -> Result<(Vec<Take>, LoadedWeights), Error> {
        let by_name = renamed(source, options)?;
        let entries = self.entries();
        let mut takes = Vec::new();
        let mut is_used = vec![false; source.tensors.len()];
        let (mut matching, mut missing, mut wrong) = (Vec::new(), Vec::new(), Vec::new());
        for (first, entry) in entries.iter().enumerate().filter(|(_, entry)| entry.tied_to.is_none()) {
            let fields =
                (first..entries.len()).filter(|&index| index == first || entries[index].tied_to == Some(first));
            let mut tensors: Vec<(usize, bool)> = Vec::new();
            for place in fields.map(|index| &places[index]) {
                let Some(&tensor) = place.names.iter().find_map(|name| by_name.get(name)) else { continue };
                is_used[tensor] = true;
                if !tensors.contains(&(tensor, place.is_transposed)) {
                    tensors.push((tensor, place.is_transposed));
                }
            }
            let expected = ExpectedTensor { name: entry.path(), shape: entry.spec.shape.clone(), dtype: None };
            let before = wrong.len();
            for &(tensor, is_transposed) in &tensors {
                wrong.extend(difference(&source.tensors[tensor], is_transposed, &expected));
            }
            match tensors.split_first() {
                _ if wrong.len() > before => {}
                Some((&(tensor, is_transposed), copies)) => {
                    matching.push(entry.path());
                    takes.push(Take { entry: first, tensor, is_transposed, copies: copies.to_vec() });
                }
                // What is marked `ignore` may be anything.
                None if entry.is_param && self.managed(first).is_none() => {}
                None => missing.push(expected),
            }
        }
        let is_extra = |(index, found): &(usize, &Found)| {
            let is_counter = source.convention == Convention::PyTorch && found.name.ends_with(UNUSED_COUNTER);
            !is_used[*index] && !is_counter
        };
        let extra: Vec<String> =
            source.tensors.iter().enumerate().filter(is_extra).map(|(_, found)| found.name.clone()).collect();
        let report = LoadedWeights {
            loaded: matching.clone(),
            missing: missing.iter().map(|tensor| tensor.name.clone()).collect(),
            extra: extra.clone(),
        };
        let mut comparison = Comparison { path: source.path.clone(), matching, missing, extra, wrong };
        match options.fit {
            Fit::Partial if !comparison.matching.is_empty() => {
                comparison.missing.clear();
                comparison.extra.clear();
            }
            Fit::MoreInFile => comparison.extra.clear(),
            Fit::Exact | Fit::Partial => {}
        }
        comparison.strict()?;
        Ok((takes, report))
    }

    /// What this rank is to store of a parameter, or the whole of a tensor that is none. *Collective.*
    fn values(&self, source: &Source, take: &Take, param: Option<usize>, place: &Place) -> Result<Buffer, Error> {
        let engine = self.engine();
        let entry = &self.entries()[take.entry];
        let dtype = param.map_or(place.dtype, |param| engine.dtype(param));
        let whole = ShardLayout::new(&entry.spec.shape, 0, 1);
        let spec = param.map(|param| &engine.plan().params()[param]).filter(|spec| !engine.plan().is_resident(spec));
        let (layout, shard_index) = spec.map_or((&whole, 0), |spec| (&spec.layout, engine.shard_index()));
        let control = &engine.links().control;
        let reads_alone = spec.is_some() && source.reads_blocks();
        let read = match (reads_alone, control.rank()) {
            (true, _) => self.read_equal(source, take, layout, shard_index, dtype).map(Some),
            (false, 0) => self.read_equal(source, take, &whole, 0, dtype).map(Some),
            (false, _) => Ok(None),
        };
        let read = self.agree("read weights", read)?;
        if let (true, Some(block)) = (reads_alone, &read) {
            return Ok(Buffer { bytes: block.clone(), dtype });
        }
        let tag = OpTag::new(engine.progress().0, Phase::Checkpoint, entry.path());
        let bytes = deal_out(&**control, &tag, read, layout, shard_index, dtype.size_bytes())?;
        Ok(Buffer { bytes, dtype })
    }

    /// Reads a block, and of tied weights all copies of it, which must be equal.
    fn read_equal(
        &self,
        source: &Source,
        take: &Take,
        layout: &ShardLayout,
        shard_index: usize,
        dtype: Dtype,
    ) -> Result<Bytes, Error> {
        let read = |tensor, is_transposed| read_as(source, tensor, is_transposed, layout, shard_index, dtype);
        let block = read(take.tensor, take.is_transposed)?;
        for &(copy, is_transposed) in &take.copies {
            if read(copy, is_transposed)? != block {
                let [first, other] = [take.tensor, copy].map(|tensor| source.tensors[tensor].name.as_str());
                return Err(Error::Parameter {
                    parameter: self.entries()[take.entry].path(),
                    problem: format!("it is tied, but `{first}` and `{other}` of the file have different values"),
                    remedy: "give the fields parameters of their own, or rename one of the two away",
                });
            }
        }
        Ok(block)
    }
}

/// Which tensor of the file has which name, in the names of the model.
fn renamed(source: &Source, options: &WeightOptions) -> Result<HashMap<String, usize>, Error> {
    let remapper = KeyRemapper::from_patterns(options.rename.clone()).map_err(|error| Error::Misuse {
        problem: format!("`rename` has a pattern that cannot be read: {error}"),
        remedy: "write it as a regular expression",
    })?;
    let rename = |name: &String| {
        let patterns = remapper.patterns.iter();
        patterns.fold(name.clone(), |name, (pattern, to)| pattern.replace_all(&name, to.as_str()).into_owned())
    };
    let mut by_name: HashMap<String, usize> = HashMap::new();
    for (index, found) in source.tensors.iter().enumerate() {
        for name in [&found.name].into_iter().chain(&found.aliases) {
            if let Some(other) = by_name.insert(rename(name), index).filter(|&other| other != index) {
                return Err(Error::Misuse {
                    problem: format!(
                        "`{}` and `{name}` of the file are both called `{}`",
                        source.tensors[other].name,
                        rename(name)
                    ),
                    remedy: "let `rename` keep them apart",
                });
            }
        }
    }
    Ok(by_name)
}

/// What is wrong with a tensor of the file, if anything; its shape in the layout of the model.
fn difference(found: &Found, is_transposed: bool, expected: &ExpectedTensor) -> Option<WrongTensor> {
    let shape: Vec<usize> =
        if is_transposed { found.shape.iter().rev().copied().collect() } else { found.shape.clone() };
    let dtype = found.dtype;
    let is_float = matches!(dtype, StoredDtype::F64 | StoredDtype::F32 | StoredDtype::F16 | StoredDtype::Bf16);
    if shape == expected.shape && is_float {
        return None;
    }
    let expected = ExpectedTensor { dtype: (!is_float).then_some(StoredDtype::F32), ..expected.clone() };
    Some(WrongTensor { expected, shape, dtype })
}

/// A block of the model, from the cut of the file that holds it.
fn read_as(
    source: &Source,
    tensor: usize,
    is_transposed: bool,
    layout: &ShardLayout,
    shard_index: usize,
    dtype: Dtype,
) -> Result<Bytes, Error> {
    let dtype = host::burn_dtype(dtype);
    if !is_transposed {
        return Ok(host::elements(source.read(tensor, layout, shard_index)?.convert_dtype(dtype)));
    }
    let (shape, dim) = (layout.shape(), layout.dim());
    let in_file = ShardLayout::new(&[shape[1], shape[0]], 1 - dim, layout.num_shards());
    let data = source.read(tensor, &in_file, shard_index)?.convert_dtype(dtype);
    Ok(host::elements(transposed(data)))
}

fn transposed(data: TensorData) -> TensorData {
    let dtype = data.dtype();
    Tensor::<2>::from_data(data, (&Device::flex(), dtype)).transpose().into_data()
}
