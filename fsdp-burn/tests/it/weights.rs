//! Weights that other programs wrote reach every rank as they are, in every format and convention, or not at all.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use burn::module::{Module, Param};
use burn::nn::{BatchNorm, BatchNormConfig, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::{Device, Tensor, bf16, f16};
use burn_pack::{DType, Tensor as PackTensor, Writer};
use fsdp_burn::nn::Embedding;
use fsdp_burn::{
    Config, Convention, Dtype, Error, Fit, LoadedWeights, OpKind, PrecisionConfig, SaveOptions, Sharded, ShardedModel,
    Stage, WeightOptions, launch,
};
use safetensors::tensor::{Dtype as FileDtype, TensorView, serialize_to_file};

use crate::common::files::{PytorchTensor, Scratch, write_pytorch};
use crate::common::models::{Trial, distance, noise, rows};
use crate::common::run::{Optimizer, config, share, start, weights};

/// A square weight, so that a missing transposition shows in values alone; names that differ between conventions; an enum;
/// running statistics; tied, recut and unmanaged parameters.
#[derive(Module, Debug, Sharded)]
pub(crate) struct Net {
    #[shard(unit)]
    table: Embedding,
    #[shard(units)]
    layers: Vec<Layer>,
    #[shard(unit, spec(_, "shard"))]
    columns: Param<Tensor<2>>,
    #[shard(unit, spec(_, "shard"))]
    wide: Wide,
    // Burn's computes with float32 statistics, so it stays in float32 beside layers in half of it.
    #[shard(unit, replicate, precision = "f32")]
    pub(crate) statistics: BatchNorm,
    #[shard(ignore)]
    teacher: Linear,
    head: Embedding,
}

#[derive(Module, Debug)]
enum Layer {
    Square(Linear),
    Norm(LayerNorm),
}

#[derive(Module, Debug)]
struct Wide {
    linear: Linear,
}

impl Trial for Net {
    fn build(device: &Device) -> Self {
        let table: Embedding = EmbeddingConfig::new(9, 7).init(device).into();
        // Each rank initialises it when it likes, so it must not draw from the device's random numbers.
        let teacher = Linear { weight: Param::from_tensor(rows(4, 0..5, 5, device)), bias: None };
        Self {
            layers: vec![
                Layer::Square(LinearConfig::new(7, 7).init(device)),
                Layer::Norm(LayerNormConfig::new(7).init(device)),
                Layer::Square(LinearConfig::new(7, 7).init(device)),
            ],
            columns: Param::from_tensor(rows(3, 0..3, 7, device)),
            wide: Wide { linear: LinearConfig::new(7, 5).with_bias(false).init(device) },
            statistics: BatchNormConfig::new(5).init(device),
            teacher,
            head: table.clone(),
            table,
        }
    }

    fn loss(&self, batch: usize, samples: Range<usize>, device: &Device) -> Tensor<1> {
        let mut x = rows(batch + 1, samples.clone(), 3, device).matmul(self.columns.val());
        for layer in &self.layers {
            x = match layer {
                Layer::Square(linear) => linear.forward(x),
                Layer::Norm(norm) => norm.forward(x),
            };
        }
        let x = x.matmul(self.table.weight.val().transpose()).matmul(self.head.weight.val());
        let x = self.statistics.forward(self.wide.linear.forward(x).unsqueeze_dim::<3>(2)).squeeze_dim::<2>(2);
        distance(x.clone() + self.teacher.forward(x), batch, samples, device)
    }
}

/// A float tensor in Burn's layout.
#[derive(Clone)]
struct Truth {
    burn: &'static str,
    pytorch: &'static str,
    shape: Vec<usize>,
    is_linear: bool,
    values: Vec<f32>,
}

const TEACHER: &str = "teacher.weight";

/// What the files have. Values are multiples of 1/64, which all float types can hold.
fn truth() -> Vec<Truth> {
    let tensor = |(burn, pytorch, shape, is_linear): (&'static str, &'static str, &[usize], bool)| {
        let len = shape.iter().product();
        let values =
            noise(burn.len() as u64 * 31 + len as u64, len).iter().map(|x| (x * 64.0).round() / 64.0).collect();
        Truth { burn, pytorch, shape: shape.to_vec(), is_linear, values }
    };
    let tensors: [(_, _, &[usize], _); 14] = [
        ("table.weight", "table.weight", &[9, 7], false),
        ("layers.0.Square.weight", "layers.0.weight", &[7, 7], true),
        ("layers.0.Square.bias", "layers.0.bias", &[7], false),
        ("layers.1.Norm.gamma", "layers.1.weight", &[7], false),
        ("layers.1.Norm.beta", "layers.1.bias", &[7], false),
        ("layers.2.Square.weight", "layers.2.weight", &[7, 7], true),
        ("layers.2.Square.bias", "layers.2.bias", &[7], false),
        ("columns", "columns", &[3, 7], false),
        ("wide.linear.weight", "wide.linear.weight", &[7, 5], true),
        ("statistics.gamma", "statistics.weight", &[5], false),
        ("statistics.beta", "statistics.bias", &[5], false),
        ("statistics.running_mean", "statistics.running_mean", &[5], false),
        ("statistics.running_var", "statistics.running_var", &[5], false),
        (TEACHER, TEACHER, &[5, 5], true),
    ];
    let mut tensors: Vec<Truth> = tensors.map(tensor).into();
    // Variances are positive.
    tensors[12].values.iter_mut().for_each(|value| *value = value.abs() + 0.5);
    tensors
}

impl Truth {
    /// As `PyTorch` has it: the shape, and the elements in its order.
    fn in_pytorch(&self) -> (Vec<usize>, Vec<f32>) {
        if !self.is_linear {
            return (self.shape.clone(), self.values.clone());
        }
        let [inputs, outputs] = self.shape[..] else { panic!("a linear weight is a matrix") };
        let element = |index: usize| self.values[index % inputs * outputs + index / inputs];
        (vec![outputs, inputs], (0..inputs * outputs).map(element).collect())
    }
}

fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// `(name, shape, bytes)` of each tensor, as a convention has them, in an element type.
type Tensors = Vec<(String, Vec<usize>, Vec<u8>)>;

fn in_burn(truth: &[Truth], bytes: impl Fn(&[f32]) -> Vec<u8>) -> Tensors {
    truth.iter().map(|t| (t.burn.to_owned(), t.shape.clone(), bytes(&t.values))).collect()
}

fn in_pytorch(truth: &[Truth], bytes: impl Fn(&[f32]) -> Vec<u8>) -> Tensors {
    let tensor = |t: &Truth| {
        let (shape, values) = t.in_pytorch();
        (t.pytorch.to_owned(), shape, bytes(&values))
    };
    truth.iter().map(tensor).collect()
}

fn write_safetensors(path: &Path, dtype: FileDtype, tensors: &Tensors, note: Option<(&str, &str)>) {
    let views = tensors
        .iter()
        .map(|(name, shape, bytes)| (name.as_str(), TensorView::new(dtype, shape.clone(), bytes).unwrap()));
    let note = note.map(|(key, value)| [(key.to_owned(), value.to_owned())].into());
    serialize_to_file(views, note, path).unwrap();
}

/// A file or set for each format, with the name of the format.
fn files(dir: &Path) -> Vec<(&'static str, PathBuf)> {
    let truth = truth();
    let bf16_bytes = |values: &[f32]| values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect();
    let f16_bytes = |values: &[f32]| values.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect();

    let hub = dir.join("bf16.safetensors");
    write_safetensors(&hub, FileDtype::BF16, &in_pytorch(&truth, bf16_bytes), Some(("format", "pt")));

    let set = dir.join("set");
    fs::create_dir(&set).unwrap();
    let mut map = serde_json::Map::new();
    for (number, part) in truth.chunks(5).enumerate() {
        let name = format!("model-{:05}-of-00003.safetensors", number + 1);
        write_safetensors(&set.join(&name), FileDtype::F32, &in_burn(part, f32_bytes), Some(("producer", "burn")));
        map.extend(part.iter().map(|t| (t.burn.to_owned(), name.clone().into())));
    }
    let index = set.join("model.safetensors.index.json");
    fs::write(&index, serde_json::json!({ "metadata": {}, "weight_map": map }).to_string()).unwrap();

    let pack = dir.join("f16.bpk");
    let tensor = |(name, shape, bytes): (String, Vec<usize>, Vec<u8>)| {
        PackTensor::new(name, DType::F16, shape, None, burn::tensor::Bytes::from_bytes_vec(bytes))
    };
    Writer::new(in_burn(&truth, f16_bytes).into_iter().map(tensor).collect()).write_to_file(&pack).unwrap();

    let python = dir.join("f32.pt");
    let mut tensors = pytorch_tensors(&truth);
    // PyTorch ties by sharing a storage, so both names are there. Its batch normalisation counts batches.
    let (shape, values) = truth[0].in_pytorch();
    tensors.push(PytorchTensor { name: "head.weight".into(), kind: "Float", shape, bytes: f32_bytes(&values) });
    let name = "statistics.num_batches_tracked".to_owned();
    tensors.push(PytorchTensor { name, kind: "Long", shape: Vec::new(), bytes: 7i64.to_le_bytes().to_vec() });
    write_pytorch(&python, None, &tensors);
    vec![("safetensors", hub), ("a set", set), ("its index", index), ("burnpack", pack), ("PyTorch", python)]
}

fn pytorch_tensors(truth: &[Truth]) -> Vec<PytorchTensor> {
    let tensor = |(name, shape, bytes)| PytorchTensor { name, kind: "Float", shape, bytes };
    in_pytorch(truth, f32_bytes).into_iter().map(tensor).collect()
}

/// Whether the model has what the files have: gathered parameters, statistics, and the teacher.
fn assert_true(model: &ShardedModel<Net>, with_teacher: bool, what: &str) -> Result<(), Error> {
    let truth: BTreeMap<_, _> = truth().into_iter().map(|tensor| (tensor.burn, tensor.values)).collect();
    let weights = weights(model)?;
    assert_eq!(weights.len(), 11, "{what}");
    for (path, values) in weights {
        assert!(values == truth[path.as_str()], "{what}: `{path}` is {values:?}");
    }
    let valid = model.valid();
    let read = |tensor: Tensor<1>| tensor.into_data().try_to_vec::<f32>().unwrap();
    assert_eq!(read(valid.statistics.running_mean.value_sync()), truth["statistics.running_mean"], "{what}");
    assert_eq!(read(valid.statistics.running_var.value_sync()), truth["statistics.running_var"], "{what}");
    if with_teacher {
        assert_eq!(read(valid.teacher.weight.val().reshape([25])), truth[TEACHER], "{what}");
    }
    Ok(())
}

#[test]
fn weights_of_every_format_and_convention_reach_every_rank_at_every_stage() {
    let scratch = Scratch::new("formats");
    let files = files(&scratch.path());
    for world_size in [1, 2, 3] {
        for stage in Stage::ALL {
            let files = files.clone();
            launch(&config(stage, world_size), move |rank| {
                let mut model = start::<Net>(&rank)?;
                let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
                for (format, path) in &files {
                    let what = format!("{format} at {stage} on {world_size}");
                    // Away from the weights of the file before.
                    let gradients = model.backward(model.loss(0, share(&rank), &rank.device()))?;
                    optim.step(Optimizer::Sgd.lr(), &mut model, gradients)?;
                    let before =
                        rank.traffic().of(OpKind::Scatter).sent_bytes + rank.traffic().of(OpKind::Broadcast).sent_bytes;
                    let loaded = model.load_weights(path, &WeightOptions::default())?;
                    let after =
                        rank.traffic().of(OpKind::Scatter).sent_bytes + rank.traffic().of(OpKind::Broadcast).sent_bytes;
                    assert_eq!((loaded.loaded.len(), loaded.missing.len(), loaded.extra.len()), (14, 0, 0), "{what}");
                    assert_true(&model, true, &what)?;
                    // Each rank reads its own blocks; only what is not cut is sent: two statistics and the teacher.
                    let reads_alone = path.extension().is_none_or(|e| e == "safetensors" || e == "json");
                    if stage == Stage::Parameters && reads_alone && world_size > 1 {
                        assert!(
                            after - before <= (5 + 5 + 25) * 4 * world_size as u64,
                            "{what}: {} bytes sent",
                            after - before
                        );
                    }
                }
                Ok(())
            })
            .unwrap();
        }
    }
}

/// The values of the files are exact in half precision, so masters and what is computed with are equal to them.
#[test]
fn masters_take_the_weights_of_a_file() {
    let scratch = Scratch::new("masters");
    let files = files(&scratch.path());
    for stage in Stage::ALL {
        let files = files.clone();
        let precision = PrecisionConfig { parameters: Dtype::Bf16, ..PrecisionConfig::default() };
        launch(&Config { precision, ..config(stage, 2) }, move |rank| {
            for (format, path) in &files {
                let mut model = start::<Net>(&rank)?;
                model.load_weights(path, &WeightOptions::default())?;
                assert_true(&model, true, format)?;
                let columns = model.valid().columns.val().into_data();
                assert_eq!(columns.dtype(), DType::BF16);
                let columns = columns.convert_dtype(DType::F32).try_to_vec::<f32>().unwrap();
                assert_eq!(columns, truth()[7].values, "{format} at {stage}");
            }
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn a_checkpoint_gives_its_weights_to_a_model_that_begins() {
    let scratch = Scratch::new("begin");
    let (root, set) = (scratch.path().join("run"), files(&scratch.path()).swap_remove(1).1);
    launch(&config(Stage::Gradients, 3), move |rank| {
        let mut model = start::<Net>(&rank)?;
        let optim = rank.optimizer(Optimizer::AdamW.build())?;
        model.load_weights(&set, &WeightOptions::default())?;
        let saved = model.save(&root, &optim, BTreeMap::new(), &SaveOptions::default())?;
        let mut again = start::<Net>(&rank)?;
        let loaded = again.load_weights(&saved.dir, &WeightOptions::default())?;
        assert_eq!(
            (loaded.loaded.len(), loaded.missing.len(), loaded.extra.len()),
            (13, 0, 0),
            "a teacher is not saved"
        );
        assert_true(&again, false, "a checkpoint")
    })
    .unwrap();
}

/// Loads a file into a new model on two ranks; the error of each, or what was loaded.
fn load(path: &Path, options: &WeightOptions) -> Result<LoadedWeights, String> {
    let (path, options) = (path.to_owned(), options.clone());
    let results = launch(&config(Stage::Parameters, 2), move |rank| {
        let mut model = start::<Net>(&rank)?;
        let before = weights(&model)?;
        let loaded = model.load_weights(&path, &options).map_err(|error| error.to_string());
        if loaded.is_err() {
            assert!(weights(&model)? == before, "the model is as it was");
            // And goes on.
            let _ = model.backward(model.loss(0, share(&rank), &rank.device()))?;
        }
        Ok(loaded)
    });
    let mut results = results.unwrap();
    let (first, second) = (results.remove(0), results.remove(0));
    match (&first, &second) {
        // Who has not failed itself says what was done, and by whom.
        (Err(error), Err(other)) => assert!(other.ends_with(error.as_str()), "{error}\n{other}"),
        (first, second) => assert_eq!(first, second),
    }
    first
}

#[test]
fn all_differences_are_one_error_and_a_partial_load_reports_what_it_skips() {
    let scratch = Scratch::new("differences");
    let path = scratch.path().join("other.safetensors");
    let mut other = truth();
    other.retain(|tensor| tensor.burn != "columns" && tensor.burn != "statistics.beta");
    other[1].shape = vec![7, 6];
    other[1].values.truncate(42);
    let extra = Truth { burn: "new.weight", ..other[2].clone() };
    other.push(extra);
    write_safetensors(&path, FileDtype::F32, &in_burn(&other, f32_bytes), Some(("producer", "burn")));
    let exact = WeightOptions::default();
    let error = load(&path, &exact).unwrap_err();
    for line in [
        "other.safetensors does not fit the model: 11 tensors match, 2 are missing, 1 extra, 1 wrong",
        "  missing: `columns` [3, 7]",
        "  missing: `statistics.beta` [5]",
        "  extra:   `new.weight`",
        "  wrong:   `layers.0.Square.weight` is F32 [7, 6], the model has [7, 7]",
        "ask for a partial load",
    ] {
        assert!(error.contains(line), "`{line}` is not in\n{error}");
    }
    // A wrong shape is none that a partial load passes over.
    let partial = WeightOptions { fit: Fit::Partial, ..exact.clone() };
    let error = load(&path, &partial).unwrap_err();
    assert!(error.contains("1 wrong") && !error.contains("missing:"), "{error}");

    other.remove(1);
    write_safetensors(&path, FileDtype::F32, &in_burn(&other, f32_bytes), Some(("producer", "burn")));
    let loaded = load(&path, &partial).unwrap();
    assert_eq!(loaded.loaded.len(), 11);
    assert_eq!(loaded.missing, ["layers.0.Square.weight", "columns", "statistics.beta"]);
    assert_eq!(loaded.extra, ["new.weight"]);
    let more = WeightOptions { fit: Fit::MoreInFile, ..exact.clone() };
    let error = load(&path, &more).unwrap_err();
    assert!(error.contains("3 are missing, 0 extra"), "{error}");
    let integers: Tensors =
        truth().iter().map(|t| (t.burn.to_owned(), t.shape.clone(), f32_bytes(&t.values))).collect();
    write_safetensors(&path, FileDtype::I32, &integers, Some(("producer", "burn")));
    let error = load(&path, &exact).unwrap_err();
    assert!(error.contains("wrong:   `columns` is I32 [3, 7], the model has F32 [3, 7]"), "{error}");
    // Nothing in common is no partial load.
    write_safetensors(
        &path,
        FileDtype::F32,
        &vec![("a".into(), vec![1], f32_bytes(&[1.0]))],
        Some(("producer", "burn")),
    );
    let error = load(&path, &partial).unwrap_err();
    assert!(error.contains("0 tensors match, 13 are missing, 1 extra"), "{error}");
}

#[test]
fn names_are_rewritten_by_patterns_and_a_key_opens_a_dictionary() {
    let scratch = Scratch::new("names");
    let path = scratch.path().join("trainer.pth");
    let mut tensors = pytorch_tensors(&truth());
    for tensor in &mut tensors {
        tensor.name = format!("module.{}", tensor.name.replace("layers.", "stack.l"));
    }
    write_pytorch(&path, Some("state_dict"), &tensors);
    let owned = |&(from, to): &(&str, &str)| (from.to_owned(), to.to_owned());
    let rename = |pairs: &[(&str, &str)]| pairs.iter().map(owned).collect::<Vec<_>>();
    let key = Some("state_dict".to_owned());
    let good = rename(&[("^module\\.", ""), (r"^stack\.l(\d)\.", "layers.$1.")]);
    let loaded = load(&path, &WeightOptions { key: key.clone(), rename: good.clone(), ..WeightOptions::default() });
    assert_eq!(loaded.unwrap().loaded.len(), 14);

    let error = load(&path, &WeightOptions { rename: good, ..WeightOptions::default() }).unwrap_err();
    assert!(error.contains("extra:   `state_dict.module."), "{error}");
    let collide = rename(&[("^module\\.", ""), (r"^stack\.l\d\.", "layers.0.")]);
    let error = load(&path, &WeightOptions { key: key.clone(), rename: collide, ..WeightOptions::default() });
    let error = error.unwrap_err();
    assert!(error.contains("of the file are both called `layers.0.") && error.contains("`rename`"), "{error}");
    let broken = WeightOptions { key, rename: rename(&[("(", "")]), ..WeightOptions::default() };
    let error = load(&path, &broken).unwrap_err();
    assert!(error.contains("`rename` has a pattern that cannot be read"), "{error}");
}

#[test]
fn copies_of_tied_weights_must_agree_and_one_is_enough() {
    let scratch = Scratch::new("tied");
    let path = scratch.path().join("tied.safetensors");
    let write = |head: Option<f32>, with_table: bool| {
        let mut tensors = in_burn(&truth(), f32_bytes);
        let (_, shape, mut bytes) = tensors[0].clone();
        if let Some(first) = head {
            bytes[..4].copy_from_slice(&first.to_le_bytes());
            tensors.push(("head.weight".into(), shape, bytes));
        }
        if !with_table {
            tensors.remove(0);
        }
        write_safetensors(&path, FileDtype::F32, &tensors, Some(("producer", "burn")));
    };
    let same = truth()[0].values[0];
    let options = WeightOptions::default();
    for (head, with_table) in [(Some(same), true), (Some(same), false), (None, true)] {
        write(head, with_table);
        assert_eq!(load(&path, &options).unwrap().loaded.len(), 14);
    }
    write(Some(same + 1.0), true);
    let error = load(&path, &options).unwrap_err();
    let problem = "`table.weight`: it is tied, but `table.weight` and `head.weight` of the file have different values";
    assert!(error.contains(problem), "{error}");
}

#[test]
fn what_cannot_be_read_or_understood_is_refused_by_name() {
    let scratch = Scratch::new("refused");
    let dir = scratch.path();
    let silent = dir.join("silent.safetensors");
    write_safetensors(&silent, FileDtype::F32, &in_pytorch(&truth(), f32_bytes), None);
    let options = WeightOptions::default();
    let error = load(&silent, &options).unwrap_err();
    assert!(
        error.contains("silent.safetensors does not say whether it has Burn's") && error.contains("convention"),
        "{error}"
    );
    let said = WeightOptions { convention: Convention::PyTorch, ..options.clone() };
    assert_eq!(load(&silent, &said).unwrap().loaded.len(), 14);
    let wrong = WeightOptions { convention: Convention::Burn, ..options.clone() };
    let error = load(&silent, &wrong).unwrap_err();
    assert!(error.contains("wrong:   `wide.linear.weight` is F32 [5, 7], the model has [7, 5]"), "{error}");

    let error = load(&dir.join("weights.onnx"), &options).unwrap_err();
    assert!(error.contains("weights.onnx: there is no format of weights") && error.contains(".safetensors"), "{error}");
    for name in ["absent.safetensors", "absent.pt", "absent.bpk"] {
        let error = load(&dir.join(name), &options).unwrap_err();
        assert!(error.contains(name), "{error}");
    }
    for (_, path) in files(&dir).into_iter().filter(|(_, path)| path.is_file() && path.extension().unwrap() != "json") {
        let bytes = fs::read(&path).unwrap();
        fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
        let error = load(&path, &options).unwrap_err();
        assert!(error.contains(path.file_name().unwrap().to_str().unwrap()), "{error}");
    }
}

/// One file for rank 0, none for the others.
#[test]
fn a_rank_that_cannot_read_fails_all_and_is_named() {
    let scratch = Scratch::new("one-rank");
    let path = files(&scratch.path()).swap_remove(3).1;
    let config = Config { ..config(Stage::Parameters, 3) };
    let errors = launch(&config, move |rank| {
        let mut model = start::<Net>(&rank)?;
        let path = if rank.rank() == 1 { path.with_file_name("gone.bpk") } else { path.clone() };
        Ok(model.load_weights(path, &WeightOptions::default()).unwrap_err().to_string())
    });
    for (rank, error) in errors.unwrap().into_iter().enumerate() {
        assert!(error.contains("gone.bpk"), "{error}");
        assert!(rank == 1 || error.starts_with("rank 1: open weights: "), "{error}");
    }
}
