//! Checkpoints for the rest of the world: plain `safetensors`, and the command `fsdp`.

#![allow(clippy::unwrap_used, reason = "all of this is a test, its helpers too")]

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use fsdp_core::checkpoint::{
    BlockData, Checkpoint, ConsolidateOptions, PRODUCER, Safetensors, SaveOptions, Snapshot, StoredDtype, TensorBlock,
    TensorKind, TiedWeights, Verify, consolidate, save,
};
use fsdp_core::{Mesh, ShardLayout};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};

use crate::checkpoint_state::{each_rank, save_on, snapshot, tensors};
use crate::command::fsdp;

fn saved(dir: &Path) -> Checkpoint {
    let saved = save_on(dir, 4, &Mesh::one_dim(3), SaveOptions::default());
    Checkpoint::open(saved.dir, Verify::Checksums).unwrap()
}

/// Every tensor of a file, by name, with its bytes.
fn contents(file: &Path) -> BTreeMap<String, Vec<u8>> {
    let bytes = fs::read(file).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    tensors.iter().map(|(name, view)| (name.to_owned(), view.data().to_vec())).collect()
}

fn expected(with: impl Fn(TensorKind) -> bool) -> BTreeMap<String, Vec<u8>> {
    tensors().iter().filter(|t| with(t.kind)).map(|t| (t.name.to_owned(), t.whole(4))).collect()
}

#[test]
fn one_file_has_the_whole_model_and_names_its_ties() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out/weights.safetensors");
    let checkpoint = saved(dir.path());
    let written = consolidate(&checkpoint, &out, &ConsolidateOptions::default()).unwrap();
    assert_eq!((written.files.as_slice(), written.num_tensors), (&[out.clone()][..], 9));
    assert_eq!(contents(&out), expected(|kind| kind == TensorKind::Model));
    let bytes = fs::read(&out).unwrap();
    let (header_len, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    let notes = metadata.metadata().clone().unwrap();
    assert_eq!((notes["head.weight"].as_str(), notes["format"].as_str()), ("tokens.weight", "pt"));
    for tensor in tensors().iter().filter(|tensor| tensor.kind == TensorKind::Model) {
        let info = metadata.info(tensor.name).unwrap();
        assert_eq!((info.dtype.to_string(), &info.shape), (tensor.dtype.to_string(), &tensor.shape));
        assert!((8 + header_len + info.data_offsets.0).is_multiple_of(tensor.dtype.size_bytes()), "aligned");
    }
    assert_eq!(fs::read_dir(out.parent().unwrap()).unwrap().count(), 1, "nothing else is left");

    let error = consolidate(&checkpoint, &out, &ConsolidateOptions::default()).unwrap_err().to_string();
    assert!(error.ends_with("weights.safetensors exists; remove it or name another place"), "{error}");
}

#[test]
fn a_set_of_files_has_an_index_that_names_every_tensor() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("hub");
    let options = ConsolidateOptions { shard_bytes: Some(400), include_optimizer: true, tied: TiedWeights::Copies };
    let written = consolidate(&saved(dir.path()), &out, &options).unwrap();
    let index = fs::read_to_string(out.join("model.safetensors.index.json")).unwrap();
    let index: serde_json::Value = serde_json::from_str(&index).unwrap();
    let map = index["weight_map"].as_object().unwrap();
    let mut all = BTreeMap::new();
    let (index_path, files) = written.files.split_last().unwrap();
    assert!(index_path.ends_with("model.safetensors.index.json"));
    for (number, file) in files.iter().enumerate() {
        let name = format!("model-{:05}-of-{:05}.safetensors", number + 1, files.len());
        assert!(file.ends_with(&name), "{file:?}");
        let content = contents(file);
        let bytes: usize = content.values().map(Vec::len).sum();
        assert!(bytes <= 400 || content.len() == 1, "{name} holds {bytes} bytes");
        assert!(content.keys().all(|tensor| map[tensor] == name.as_str()));
        all.extend(content);
    }
    let mut model = expected(|_| true);
    model.insert("head.weight".into(), model["tokens.weight"].clone());
    assert_eq!(all, model);
    assert_eq!(map.len(), model.len());
    let total: usize = model.values().map(Vec::len).sum();
    assert_eq!((index["metadata"]["total_size"].as_u64(), written.tensor_bytes), (Some(total as u64), total as u64));
}

#[test]
fn what_was_given_out_is_read_back_in_any_cut_from_a_file_a_set_or_a_directory() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = saved(dir.path());
    let (file, hub, one) = (dir.path().join("out.safetensors"), dir.path().join("hub"), dir.path().join("one"));
    let in_set = ConsolidateOptions { shard_bytes: Some(400), ..ConsolidateOptions::default() };
    consolidate(&checkpoint, &file, &ConsolidateOptions::default()).unwrap();
    consolidate(&checkpoint, &hub, &in_set).unwrap();
    consolidate(&checkpoint, &one, &ConsolidateOptions::default()).unwrap();
    for path in [file, hub.clone(), hub.join("model.safetensors.index.json"), one] {
        let opened = Safetensors::open(&path).unwrap();
        assert_eq!((opened.tensors().len(), opened.metadata()["producer"].as_str()), (9, PRODUCER), "{path:?}");
        assert_eq!(opened.tensor("head.weight").unwrap().name, "tokens.weight", "a tied name");
        for tensor in opened.tensors() {
            for (dim, num_shards) in (0..tensor.shape.len().max(1)).flat_map(|dim| [1, 2, 5].map(|n| (dim, n))) {
                let layout = ShardLayout::new(&tensor.shape, dim, num_shards);
                for index in 0..num_shards {
                    let expected = checkpoint.read(&tensor.name, &layout, index).unwrap();
                    assert_eq!(opened.read(&tensor.name, &layout, index).unwrap(), expected, "{}", tensor.name);
                }
            }
        }
    }
}

#[test]
fn weights_that_cannot_be_used_are_refused_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let hub = dir.path().join("hub");
    let refused = |path: &Path| Safetensors::open(path).unwrap_err().to_string();
    fs::create_dir(&hub).unwrap();
    let error = refused(&hub);
    assert!(error.contains("hub: the directory has neither `model.safetensors.index.json` nor"), "{error}");
    fs::remove_dir(&hub).unwrap();
    let options = ConsolidateOptions { shard_bytes: Some(400), ..ConsolidateOptions::default() };
    consolidate(&saved(dir.path()), &hub, &options).unwrap();
    let index = hub.join("model.safetensors.index.json");
    let text = fs::read_to_string(&index).unwrap();
    let tensor = tensors().iter().find(|tensor| tensor.kind == TensorKind::Model).unwrap().name.to_owned();
    let first = "model-00001-of-";
    for (from, to, expected) in [
        (text.as_str(), "{}", "it is no index of weights: missing field `weight_map`"),
        (first, "../model-00001-of-", "is no name of a file beside it"),
        (first, "absent-", "cannot open"),
        (&tensor, "other", "it names `other`, which `"),
    ] {
        fs::write(&index, text.replace(from, to)).unwrap();
        let error = refused(&index);
        assert!(error.contains(expected), "{error}");
    }
    // A file that is in the set under two names has each of its tensors twice.
    fs::write(&index, text.replacen("model-00003-", "copy-", 1)).unwrap();
    fs::copy(hub.join("model-00003-of-00003.safetensors"), hub.join("copy-of-00003.safetensors")).unwrap();
    let error = refused(&index);
    assert!(error.contains("comes twice in the set of files"), "{error}");

    let file = dir.path().join("f8.safetensors");
    let view = TensorView::new(Dtype::F8_E4M3, vec![2], &[1, 2]).unwrap();
    serialize_to_file([("scale", view)], None, &file).unwrap();
    let error = refused(&file);
    assert!(error.contains("`scale` has the element type F8_E4M3, which cannot be loaded; convert it"), "{error}");
}

#[test]
fn what_fits_one_file_needs_no_index() {
    let dir = tempfile::tempdir().unwrap();
    let options = ConsolidateOptions { shard_bytes: Some(1 << 20), ..ConsolidateOptions::default() };
    let written = consolidate(&saved(dir.path()), dir.path().join("hub"), &options).unwrap();
    assert_eq!(written.files, [dir.path().join("hub/model.safetensors")]);
}

#[test]
fn the_command_consolidates_the_newest_good_checkpoint_of_a_root() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().to_str().unwrap();
    saved(dir.path());
    save_on(dir.path(), 5, &Mesh::one_dim(2), SaveOptions::default());
    fs::remove_file(dir.path().join("step-5/rank-00001.safetensors")).unwrap();
    let out = format!("{root}/model.safetensors");
    let (code, stdout, stderr) = fsdp(&["consolidate", root, &out]);
    assert_eq!(code, 0, "{stderr}");
    assert!(stdout.contains("step-4: 9 tensors,") && stdout.contains(&out), "{stdout}");
    assert!(stderr.contains("passed over") && stderr.contains("rank-00001.safetensors is missing"), "{stderr}");
    assert_eq!(contents(Path::new(&out)), expected(|kind| kind == TensorKind::Model));

    let (code, _, stderr) = fsdp(&["consolidate", root, &out, "--shard-size", "5GB"]);
    assert_eq!(code, 1);
    assert!(stderr.contains("several files go into a directory; name one without the extension"), "{stderr}");
    let (code, _, stderr) = fsdp(&["consolidate", root, &out, "--shard-size", "5 parsec"]);
    assert_eq!(code, 2);
    assert!(stderr.contains("`5 parsec` is no size; write one like 5GB, 512MiB or 1000"), "{stderr}");
}

#[test]
fn the_command_inspects_and_its_exit_code_tells_of_damage() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().to_str().unwrap();
    saved(dir.path());
    let step = format!("{root}/step-4");
    let (code, stdout, _) = fsdp(&["inspect", &step, "--verify"]);
    assert_eq!(code, 0);
    for text in ["step 4, stage 3, world size 3", "good: checksums match", "tokens.weight = head.weight", "[6, 11], 3"]
    {
        assert!(stdout.contains(text), "{text} is not in\n{stdout}");
    }
    let (code, stdout, _) = fsdp(&["inspect", root]);
    assert_eq!((code, stdout.lines().count()), (0, 1), "a line for each checkpoint: {stdout}");

    let file = dir.path().join("step-4/rank-00002.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&file, bytes).unwrap();
    assert_eq!(fsdp(&["inspect", root]).0, 0, "not seen without reading");
    let (code, stdout, _) = fsdp(&["inspect", root, "--verify"]);
    assert_eq!(code, 1);
    assert!(stdout.contains("DAMAGED") && stdout.contains("rank-00002.safetensors has checksum"), "{stdout}");

    let (code, _, stderr) = fsdp(&["inspect", &format!("{root}/absent")]);
    assert_eq!(code, 1);
    assert!(stderr.contains("absent has no manifest.json, so it is no checkpoint"), "{stderr}");
    assert_eq!(fsdp(&[]).0, 2);
}

/// The limit is on all address space, so it holds what is allocated, and whatever else.
#[test]
fn consolidating_needs_memory_for_a_part_of_a_tensor_and_not_for_the_model() {
    const TENSOR_BYTES: usize = 48 << 20;
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().to_owned();
    let results = each_rank(2, move |comm| {
        let block = |index: usize| TensorBlock {
            name: format!("blocks.{index}.weight"),
            aliases: Vec::new(),
            kind: TensorKind::Model,
            dtype: StoredDtype::F32,
            layout: ShardLayout::new(&[4, TENSOR_BYTES / 16], 1, 2),
            data: BlockData::Lazy(Box::new(move || Ok(vec![index as u8; TENSOR_BYTES / 2].into()))),
        };
        let tensors = (0..4).map(block).collect();
        save(comm, &root, Snapshot { tensors, ..snapshot(1, &Mesh::one_dim(2), comm.rank()) }, &SaveOptions::default())
    });
    assert!(results.iter().all(Result::is_ok), "{results:?}");
    let run = |limit_kib: usize, out: &str| {
        let line = format!("ulimit -v {limit_kib}; exec \"$0\" consolidate \"$1\" \"$1/{out}\"");
        Command::new("sh").args(["-c", &line, env!("CARGO_BIN_EXE_fsdp")]).arg(dir.path()).output().unwrap().status
    };
    assert!(run(TENSOR_BYTES >> 10, "out.safetensors").success(), "less than one tensor is enough for four");
    assert!(!run(16 << 10, "small.safetensors").success(), "the limit is felt");
    let out = contents(&dir.path().join("out.safetensors"));
    assert_eq!(out.len(), 4);
    assert!(
        out.values().zip(0..).all(|(bytes, index)| bytes.len() == TENSOR_BYTES && bytes.iter().all(|&b| b == index))
    );
}

#[test]
fn python_reads_a_consolidated_file_with_its_names_shapes_and_values() {
    let import = Command::new("python3").args(["-c", "import safetensors.numpy"]).output();
    if !import.is_ok_and(|output| output.status.success()) {
        println!("not run: there is no `python3` with the packages `safetensors` and `numpy`");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (out, list) = (dir.path().join("model.safetensors"), dir.path().join("expected.json"));
    consolidate(&saved(dir.path()), &out, &ConsolidateOptions::default()).unwrap();
    let model = tensors().into_iter().filter(|tensor| tensor.kind == TensorKind::Model);
    let expected: serde_json::Map<_, _> = model
        .map(|tensor| {
            let hex: String = tensor.whole(4).iter().map(|byte| format!("{byte:02x}")).collect();
            let entry = serde_json::json!({ "dtype": tensor.dtype, "shape": tensor.shape, "hex": hex });
            (tensor.name.to_owned(), entry)
        })
        .collect();
    let expected = serde_json::json!({ "tensors": expected, "ties": { "head.weight": "tokens.weight" } });
    fs::write(&list, expected.to_string()).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/read_safetensors.py");
    let output = Command::new("python3").arg(script).args([out, list]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "9 tensors are as expected\n");
}
