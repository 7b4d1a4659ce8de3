//! A checkpoint given to the rest of the world is the gathered model: names, shapes and values, in Rust and in Python.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use burn::tensor::Tensor;
use fsdp_burn::{SaveOptions, Stage, launch};
use fsdp_core::checkpoint::{Checkpoint, ConsolidateOptions, Verify, consolidate};
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;
use serde_json::json;

use crate::common::files::Scratch;
use crate::common::models::Trial;
use crate::common::run::{Optimizer, config, share, start};
use crate::weights::Net;

/// Shape and elements by name.
type Gathered = BTreeMap<String, (Vec<usize>, Vec<u8>)>;

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Trains two steps, saves, and returns what the model is: its parameters gathered, and rank 0's running statistics.
fn saved(root: &Path, stage: Stage) -> Gathered {
    let root = root.to_owned();
    let gathered = launch(&config(stage, 3), move |rank| {
        let mut model = start::<Net>(&rank)?;
        let mut optim = rank.optimizer(Optimizer::AdamW.build())?;
        for batch in 0..2 {
            let gradients = model.backward(model.loss(batch, share(&rank), &rank.device()))?;
            optim.step(Optimizer::AdamW.lr(), &mut model, gradients)?;
        }
        model.save(&root, &optim, BTreeMap::new(), &SaveOptions::default())?;
        let mut gathered = Gathered::new();
        model.each_parameter(|path, data| {
            let shape = data.shape().to_vec();
            gathered.insert(path.to_owned(), (shape, bytes(&data.try_to_vec::<f32>().unwrap())));
        })?;
        let statistics = model.valid().statistics;
        let read =
            |tensor: Tensor<1>| (tensor.dims().to_vec(), bytes(&tensor.into_data().try_to_vec::<f32>().unwrap()));
        gathered.insert("statistics.running_mean".into(), read(statistics.running_mean.value_sync()));
        gathered.insert("statistics.running_var".into(), read(statistics.running_var.value_sync()));
        Ok(gathered)
    });
    gathered.unwrap().swap_remove(0)
}

#[test]
fn a_consolidated_checkpoint_is_the_gathered_model_in_rust_and_in_python() {
    let has_python = Command::new("python3").args(["-c", "import safetensors.numpy"]).output();
    let has_python = has_python.is_ok_and(|output| output.status.success());
    if !has_python {
        println!("not run in Python: there is no `python3` with the packages `safetensors` and `numpy`");
    }
    for stage in [Stage::OptimizerState, Stage::Parameters] {
        let scratch = Scratch::new("consolidated");
        let expected = saved(&scratch.path(), stage);
        let (out, list) = (scratch.path().join("model.safetensors"), scratch.path().join("expected.json"));
        let checkpoint = Checkpoint::newest(scratch.path(), Verify::Checksums).unwrap();
        consolidate(&checkpoint, &out, &ConsolidateOptions::default()).unwrap();

        let file = fs::read(&out).unwrap();
        let tensors = SafeTensors::deserialize(&file).unwrap();
        assert!(tensors.iter().all(|(_, view)| view.dtype() == Dtype::F32));
        let got = tensors.iter().map(|(name, view)| (name.to_owned(), (view.shape().to_vec(), view.data().to_vec())));
        assert!(got.collect::<Gathered>() == expected, "{stage}");

        if has_python {
            let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
            let entry =
                |(shape, bytes): &(Vec<usize>, Vec<u8>)| json!({ "dtype": "F32", "shape": shape, "hex": hex(bytes) });
            let tensors: serde_json::Map<_, _> =
                expected.iter().map(|(name, tensor)| (name.clone(), entry(tensor))).collect();
            let ties = json!({ "head.weight": "table.weight" });
            fs::write(&list, json!({ "tensors": tensors, "ties": ties }).to_string()).unwrap();
            let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../fsdp-core/tests/read_safetensors.py");
            let output = Command::new("python3").arg(script).args([&out, &list]).output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            assert_eq!(String::from_utf8_lossy(&output.stdout), "13 tensors are as expected\n");
        }
    }
}
