//! Error messages that take long to provoke, or another machine: built from their fields.

use std::io::{Error as IoError, ErrorKind};
use std::path::PathBuf;
use std::time::Duration;

use fsdp_burn::{DeviceChoice, Error};
use fsdp_core::checkpoint::{CheckpointError, Comparison, ExpectedTensor, Rejected};
use fsdp_core::{AbortCause, CommError, Issued, Mesh, OpKind, OpTag, Phase, TierError};

use super::Example;

fn of(variant: &'static str, error: impl std::fmt::Display) -> Example {
    Example::new(variant, "", error.to_string())
}

fn tag(unit: &str) -> OpTag {
    OpTag::new(12, Phase::Forward, unit)
}

fn ranks() -> Vec<Example> {
    let panicked = "index out of bounds".to_owned();
    let stuck = Error::RankStuck { rank: 2, waited_s: 300.0, cause: format!("rank 1 panicked: {panicked}") };
    let source = Box::new(Error::program("the data set is empty"));
    let device = Error::Device {
        device: DeviceChoice::Cuda,
        problem: "GPU 2 is asked for, and this host has 2, numbered from 0".into(),
        remedy: "start as many ranks as GPUs on each host, let them share one with `device = \"cuda:0\"`, or see what \
                 CUDA_VISIBLE_DEVICES hides",
    };
    vec![
        of("Error::Device", device),
        of("Error::NonFinite", Error::NonFinite { step: 12, norm: f64::INFINITY }),
        of("Error::RankPanicked", Error::RankPanicked { rank: 1, message: panicked }),
        of("Error::RankFailed", Error::RankFailed { rank: 1, source }),
        of("Error::RankStuck", stuck),
    ]
}

fn collectives() -> Vec<Example> {
    let issued = |rank, unit| Issued { rank, kind: OpKind::AllGather, tag: tag(unit), detail: String::new() };
    let timeout = CommError::Timeout {
        rank: 0,
        kind: OpKind::AllGather,
        tag: tag("blocks.3"),
        waited: Duration::from_secs(300),
        missing: vec![2],
    };
    let left = CommError::Left { rank: 0, kind: OpKind::AllGather, tag: tag("tokens"), left: vec![2] };
    let mismatch = CommError::Mismatch {
        what: "tag",
        first: Box::new(issued(0, "blocks.3")),
        second: Box::new(issued(1, "blocks.4")),
    };
    let cause = AbortCause::RankPanicked { rank: 1, message: "index out of bounds".into() };
    let failed = AbortCause::RankFailed { rank: 1, message: "the data set is empty".into() };
    vec![
        of("CommError::Timeout", timeout),
        of("CommError::Left", left),
        of("CommError::Mismatch", mismatch),
        of("CommError::Aborted", CommError::Aborted { rank: 0, cause: cause.clone() }),
        of("AbortCause::RankPanicked", cause),
        of("AbortCause::RankFailed", failed),
    ]
}

fn checkpoints() -> Vec<Example> {
    let step = || PathBuf::from("runs/gpt/step-100");
    let io = |kind: ErrorKind| CheckpointError::Io { action: "create", path: step(), source: IoError::from(kind) };
    let full = Example::new("CheckpointError::Io", "A full disk", io(ErrorKind::StorageFull).to_string());
    let refused = Example::new("CheckpointError::Io", "No permission", io(ErrorKind::PermissionDenied).to_string());
    let space =
        CheckpointError::NoSpace { path: "runs/gpt".into(), needed_bytes: 84_000_000_000, free_bytes: 20_000_000_000 };
    let file = || step().join("rank-0.safetensors");
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
    vec![
        full,
        refused,
        of("CheckpointError::NoSpace", space),
        of("CheckpointError::NoManifest", CheckpointError::NoManifest { dir: "runs/gpt".into() }),
        of("CheckpointError::MissingFile", CheckpointError::MissingFile { file: file() }),
        of("CheckpointError::FileSize", CheckpointError::FileSize { file: file(), expected: 84_213_760, got: 4096 }),
        of("CheckpointError::NothingGood", CheckpointError::NothingGood { root: "runs/gpt".into(), rejected }),
        of("CheckpointError::Shape", shape),
        of("CheckpointError::Mismatch", CheckpointError::Mismatch(Box::new(comparison))),
        of("CheckpointError::OutputExists", CheckpointError::OutputExists { path: "gpt.safetensors".into() }),
        of("CheckpointError::MeshSize", CheckpointError::MeshSize { mesh: Mesh::one_dim(8), world_size: 4 }),
    ]
}

fn tiers() -> Vec<Example> {
    let path = || PathBuf::from("/nvme/run1/rank-0.tier");
    let source = IoError::from(ErrorKind::PermissionDenied);
    let buffers = TierError::Buffers { buffer_bytes: 1 << 20, block_bytes: 1 << 20, needed_bytes: 2 << 20 };
    let full = TierError::Full { path: path(), offset: 1 << 30, bytes: 512 << 20, free_bytes: 100 << 20 };
    let timed_out = TierError::TimedOut { action: "read", path: path(), offset: 1 << 30, waited_s: 300.0 };
    let cut = TierError::ShortRead { path: path(), offset: 1 << 30, bytes: 1 << 20, missing_bytes: 4096 };
    vec![
        of("TierError::Unusable", TierError::Unusable { action: "create", path: path(), source }),
        of("TierError::InUse", TierError::InUse { path: path() }),
        of("TierError::Buffers", buffers),
        of("TierError::Full", full),
        of("TierError::TimedOut", timed_out),
        of("TierError::ShortRead", cut),
    ]
}

pub(super) fn examples() -> Vec<Example> {
    [ranks(), collectives(), checkpoints(), tiers()].concat()
}
