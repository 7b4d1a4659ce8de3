//! Error messages about files: checkpoints, state on a disk, shapes, profiles and traces. What takes another machine is built
//! from its fields.

use std::io::{Error as IoError, ErrorKind};
use std::path::{Path, PathBuf};

use fsdp_core::checkpoint::{CheckpointError, Comparison, ExpectedTensor, Rejected};
use fsdp_core::{
    Job, Link, MOST_ELEMENTS, Machine, MeasuredStep, Mesh, ModelShape, Network, ParamShape, Profile, ProfileError,
    ProfileOptions, Recorded, Speed, Stage, TierError, UnitShape,
};

use super::Example;

fn of(variant: &'static str, error: impl std::fmt::Display) -> Example {
    Example::new(variant, "", error.to_string())
}

fn step() -> PathBuf {
    PathBuf::from("runs/gpt/step-100")
}

/// A checkpoint that cannot be written.
fn saves() -> Vec<Example> {
    let io = |kind: ErrorKind| CheckpointError::Io { action: "create", path: step(), source: IoError::from(kind) };
    let full = Example::new("CheckpointError::Io", "A full disk", io(ErrorKind::StorageFull).to_string());
    let refused = Example::new("CheckpointError::Io", "No permission", io(ErrorKind::PermissionDenied).to_string());
    let space =
        CheckpointError::NoSpace { path: "runs/gpt".into(), needed_bytes: 84_000_000_000, free_bytes: 20_000_000_000 };
    let message = io(ErrorKind::StorageFull).to_string();
    let failed = CheckpointError::RankFailed { doing: "saving", rank: 2, message, also: vec![3], source: None };
    let tensor = || "head.weight".to_owned();
    let blocks = CheckpointError::BlockCount { tensor: tensor(), num_shards: 3, mesh: Mesh::one_dim(8) };
    let size = CheckpointError::BlockSize { tensor: tensor(), expected_bytes: 4096, got_bytes: 2048 };
    let source = || "the model has ended with its run".into();
    let disagree = CheckpointError::Disagree {
        what: "scalar `epoch`".into(),
        first_rank: 0,
        first: "3".into(),
        rank: 1,
        got: "4".into(),
    };
    vec![
        full,
        refused,
        of("CheckpointError::NoSpace", space),
        of("CheckpointError::RankFailed", failed),
        of("CheckpointError::MeshSize", CheckpointError::MeshSize { mesh: Mesh::one_dim(8), world_size: 4 }),
        of("CheckpointError::RepeatedName", CheckpointError::RepeatedName { tensor: tensor() }),
        of("CheckpointError::BlockCount", blocks),
        of("CheckpointError::BlockSize", size),
        of("CheckpointError::Source", CheckpointError::Source { tensor: tensor(), source: source() }),
        of("CheckpointError::Snapshot", CheckpointError::Snapshot { source: source() }),
        of("CheckpointError::Disagree", disagree),
    ]
}

/// A checkpoint that cannot be read.
fn loads() -> Vec<Example> {
    let manifest = || step().join("manifest.json");
    let file = || step().join("rank-00000.safetensors");
    let expected = ExpectedTensor { name: "head.weight".into(), shape: vec![512, 2048], dtype: None };
    let comparison = Comparison {
        path: step(),
        matching: vec!["tokens.weight".into()],
        missing: vec![expected],
        extra: vec!["output.weight".into()],
        wrong: Vec::new(),
    };
    let rejected = vec![Rejected { dir: step(), reason: "manifest.json is missing".into() }];
    let shape =
        CheckpointError::Shape { tensor: "head.weight".into(), stored: vec![512, 2048], asked: vec![512, 4096] };
    let checksum =
        CheckpointError::Checksum { file: file(), expected: "8a3d5f0c77e1b264".into(), got: "11f04cc2d6a98b3e".into() };
    let problem = "EOF while parsing an object at line 1 column 512".to_owned();
    let weights = "it has no tensor `head.weight`".to_owned();
    let output = CheckpointError::Output {
        path: "gpt.safetensors".into(),
        problem: "several files go into a directory; name one without the extension `.safetensors`",
    };
    vec![
        of("CheckpointError::NoManifest", CheckpointError::NoManifest { dir: "runs/gpt".into() }),
        of("CheckpointError::Manifest", CheckpointError::Manifest { file: manifest(), problem: problem.clone() }),
        of("CheckpointError::Version", CheckpointError::Version { file: manifest(), got: 2, supported: 1 }),
        of("CheckpointError::MissingFile", CheckpointError::MissingFile { file: file() }),
        of("CheckpointError::FileSize", CheckpointError::FileSize { file: file(), expected: 84_213_760, got: 4096 }),
        of("CheckpointError::Checksum", checksum),
        of("CheckpointError::Header", CheckpointError::Header { file: file(), problem }),
        of("CheckpointError::NothingGood", CheckpointError::NothingGood { root: "runs/gpt".into(), rejected }),
        of("CheckpointError::UnknownTensor", {
            CheckpointError::UnknownTensor { dir: step(), tensor: "head.weight".into() }
        }),
        of("CheckpointError::Shape", shape),
        of("CheckpointError::Weights", CheckpointError::Weights { path: "gpt2.safetensors".into(), problem: weights }),
        of("CheckpointError::Mismatch", CheckpointError::Mismatch(Box::new(comparison))),
        of("CheckpointError::OutputExists", CheckpointError::OutputExists { path: "gpt.safetensors".into() }),
        of("CheckpointError::Output", output),
    ]
}

fn tiers() -> Vec<Example> {
    let path = || PathBuf::from("/nvme/run1/rank-0.tier");
    let (offset, bytes) = (1 << 30, 1 << 20);
    let source = || IoError::from(ErrorKind::PermissionDenied);
    let buffers = TierError::Buffers { buffer_bytes: 1 << 20, block_bytes: 1 << 20, needed_bytes: 2 << 20 };
    let full = TierError::Full { path: path(), offset, bytes: 512 << 20, free_bytes: 100 << 20 };
    let limited =
        TierError::Limited { path: path(), offset, bytes: 512 << 20, source: IoError::from(ErrorKind::FileTooLarge) };
    let timed_out = TierError::TimedOut { action: "read", path: path(), offset, waited_s: 300.0 };
    let cut = TierError::ShortRead { path: path(), offset, bytes, missing_bytes: 4096 };
    let (expected, found) = (0x8a3d_5f0c_77e1_b264, 0x11f0_4cc2_d6a9_8b3e);
    let corrupted = TierError::Corrupted { path: path(), offset, bytes, expected, found };
    let io = TierError::Io { action: "write", path: path(), offset, bytes, source: IoError::from_raw_os_error(5) };
    vec![
        of("TierError::Unusable", TierError::Unusable { action: "create", path: path(), source: source() }),
        of("TierError::InUse", TierError::InUse { path: path() }),
        of("TierError::Buffers", buffers),
        of("TierError::BlockSize", TierError::BlockSize { block_bytes: 5000, alignment: 4096 }),
        of("TierError::Full", full),
        of("TierError::Limited", limited),
        of("TierError::Gone", TierError::Gone { path: path(), offset, bytes }),
        of("TierError::ShortRead", cut),
        of("TierError::Corrupted", corrupted),
        of("TierError::Io", io),
        of("TierError::NotWritten", TierError::NotWritten { path: path(), offset }),
        of("TierError::TooLarge", TierError::TooLarge { path: path(), offset, slot_bytes: bytes, bytes: 2 * bytes }),
        of("TierError::TimedOut", timed_out),
        of("TierError::Ended", TierError::Ended { path: path(), offset }),
    ]
}

fn shapes() -> Vec<Example> {
    let param = |shape: &[usize], dim| {
        let (path, shape) = ("head.weight".to_owned(), shape.to_vec());
        ParamShape { path, shape, dim, replicate: false, frozen: false }
    };
    let read = |text: &str| ModelShape::from_json(text, "model.json").unwrap_err();
    let of_unit = |unit: UnitShape| read(&ModelShape::new(vec![unit]).to_json());
    let of_param = |param: ParamShape| of_unit(UnitShape::new("head", vec![param]));
    let busy =
        UnitShape { flops_per_token: Some(4 * MOST_ELEMENTS), ..UnitShape::new("head", vec![param(&[10, 4], 0)]) };
    vec![
        of("ShapeError::Io", ModelShape::read(Path::new("no-such-model.json")).unwrap_err()),
        of("ShapeError::Syntax", read("{ \"format\": 1 }")),
        of("ShapeError::Format", read("{ \"format\": \"fsdp-shape-9\", \"units\": [] }")),
        of("ShapeError::Dimension", of_param(param(&[10, 4], 2))),
        of("ShapeError::TooLarge", of_param(param(&[1 << 40, 1 << 20], 0))),
        of("ShapeError::Operations", of_unit(busy)),
        of("ShapeError::Empty", read(&ModelShape::new(Vec::new()).to_json())),
    ]
}

fn profiles() -> Vec<Example> {
    let report = std::env::temp_dir().join(format!("fsdp-book-{}-report", std::process::id()));
    std::fs::write(&report, "{}").unwrap();
    let no_report = MeasuredStep::read_report(&report).unwrap_err().to_string();
    std::fs::remove_file(&report).unwrap();
    let options = ProfileOptions { num_ranks: 0, max_bytes: 1 << 20, repetitions: 5 };
    vec![
        of("ProfileError::Io", Profile::read(Path::new("no-such-profile.json")).unwrap_err()),
        of("ProfileError::Syntax", Profile::from_json("{}", "profile.json").unwrap_err()),
        of("ProfileError::Options", Profile::measure(&options).unwrap_err()),
        of("ProfileError::Report", no_report.replace(&report.display().to_string(), "run.json")),
        of("ProfileError::Panicked", ProfileError::Panicked { rank: 1 }),
    ]
}

fn traces() -> Vec<Example> {
    let span = r#"{ "ph": "X", "name": "forward head", "pid": 0, "tid": 0, "ts": 0, "dur": 1, "args": { "step": 3 } }"#;
    let trace = Recorded::from_json(&format!(r#"{{ "traceEvents": [{span}] }}"#), "step.json").unwrap();
    let link = Link { alpha_s: 1e-6, beta_s_per_byte: 1e-9 };
    let speed = Speed::Rate { flops_per_s: 1e12, memory_bytes_per_s: 1e11 };
    let machine = Machine { network: Network::one_node(link).into(), speed };
    let job = Job::new(ModelShape::even(1000, 2), 1, machine);
    vec![
        of("ReplayError::Io", Recorded::read(Path::new("no-such-trace.json")).unwrap_err()),
        of("ReplayError::Syntax", Recorded::from_json("{}", "step.json").unwrap_err()),
        of("ReplayError::NoStep", trace.step_s(0, 4).unwrap_err()),
        of("ReplayError::UnknownUnit", trace.workload(&job, Stage::Parameters, 0, 3).unwrap_err()),
    ]
}

pub(super) fn examples() -> Vec<Example> {
    [saves(), loads(), tiers(), shapes(), profiles(), traces()].concat()
}
