//! Error messages of ranks and of collectives that take long to provoke: built from their fields.

use std::io::{Error as IoError, ErrorKind};
use std::time::Duration;

use fsdp_burn::{DeviceChoice, Error};
use fsdp_core::{AbortCause, CommError, Issued, OpKind, OpTag, Phase};

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
    let io = Error::io("cannot create", "runs/gpt", IoError::from(ErrorKind::PermissionDenied));
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
        of("Error::Io", io),
        of("Error::Program", Error::program("the data set is empty")),
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
    let missed = Some(Box::new(issued(0, "blocks.3")));
    let lost =
        AbortCause::RankLost { rank: 2, how: "its process has ended, or its connection was closed".into(), missed };
    let layout = CommError::Layout { rank: 1, tag: tag("head"), part: 0, num_shards: 2, world_size: 4 };
    let size = CommError::BufferSize { rank: 1, tag: tag("head"), part: 0, expected_bytes: 4096, got_bytes: 2048 };
    let root =
        CommError::Root { rank: 1, tag: tag("head"), root: 0, problem: "a rank that is not the root passed data" };
    let group = CommError::Group { rank: 1, ranks: vec![0, 1, 1], problem: "it lists a rank twice" };
    let job = CommError::JobPanicked { rank: 1, stream: "reduce".into(), message: "index out of bounds".into() };
    let message = IoError::from(ErrorKind::WouldBlock).to_string();
    let stream = CommError::Stream { rank: 1, stream: "reduce".into(), message };
    let engine = CommError::Engine { rank: 1, tag: tag("head"), message: "MPI: the message was truncated".into() };
    vec![
        of("CommError::Timeout", timeout.clone()),
        of("CommError::Left", left),
        of("CommError::Mismatch", mismatch),
        of("CommError::Aborted", CommError::Aborted { rank: 0, cause: cause.clone() }),
        of("AbortCause::RankPanicked", cause),
        of("AbortCause::RankFailed", failed),
        of("AbortCause::RankLost", lost),
        of("AbortCause::Collective", AbortCause::Collective(Box::new(timeout))),
        of("CommError::Layout", layout),
        of("CommError::BufferSize", size),
        of("CommError::Root", root),
        of("CommError::Group", group),
        of("CommError::JobPanicked", job),
        of("CommError::Stream", stream),
        of("CommError::Engine", engine),
    ]
}

pub(super) fn examples() -> Vec<Example> {
    [ranks(), collectives()].concat()
}
