//! What can go wrong with a checkpoint, where, and what to do about it.

use std::io;
use std::path::PathBuf;

use super::compare::Comparison;
use super::find::Rejected;
use crate::{CommError, Mesh, human_bytes};

/// Why a checkpoint could not be saved, read or converted.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The system refused something.
    #[error("cannot {action} {}: {source}; {}", path.display(), io_remedy(source))]
    Io {
        /// What was tried, such as `create`.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file system has no room for what all ranks want to write. Nothing was written.
    #[error(
        "{}: the checkpoint needs {} on all ranks together, but {} are free; free some space, save elsewhere, or keep \
         fewer checkpoints",
        path.display(), human_bytes(*needed_bytes), human_bytes(*free_bytes)
    )]
    NoSpace {
        /// Where it was to be saved.
        path: PathBuf,
        /// Bytes of all ranks together.
        needed_bytes: u64,
        /// Bytes that the file system would give.
        free_bytes: u64,
    },
    /// One or more ranks failed; every rank gets this error.
    #[error("{doing}: rank {rank} failed{}: {message}", also_failed(also))]
    RankFailed {
        /// What all ranks were doing together.
        doing: &'static str,
        /// The first rank that failed.
        rank: usize,
        /// Its error.
        message: String,
        /// Further ranks that failed.
        also: Vec<usize>,
        /// This rank's own error, if it failed.
        source: Option<Box<CheckpointError>>,
    },
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The mesh of a snapshot has another size than the world that saves it.
    #[error(
        "the snapshot's mesh {mesh} has {} ranks, but {world_size} save it; pass the mesh of the run",
        mesh.world_size()
    )]
    MeshSize {
        /// The mesh.
        mesh: Mesh,
        /// Ranks of the communicator.
        world_size: usize,
    },
    /// Two tensors of a snapshot have one name.
    #[error("two tensors are called `{tensor}`; parameters and optimizer state share one set of names: add a prefix")]
    RepeatedName {
        /// The name.
        tensor: String,
    },
    /// A tensor is cut into a number of blocks that the mesh does not explain.
    #[error(
        "`{tensor}` is cut into {num_shards} blocks, which the mesh {mesh} does not deal out; cut it over the shard axis \
         or over all ranks, or pass it whole (1 block)"
    )]
    BlockCount {
        /// The tensor.
        tensor: String,
        /// Blocks of its layout.
        num_shards: usize,
        /// The mesh.
        mesh: Mesh,
    },
    /// A buffer has another size than its block.
    #[error("`{tensor}`: the buffer has {got_bytes} bytes, but this rank's block needs {expected_bytes}")]
    BlockSize {
        /// The tensor.
        tensor: String,
        /// Bytes of the block.
        expected_bytes: usize,
        /// Bytes of the buffer.
        got_bytes: usize,
    },
    /// A tensor that was to be produced when its turn came could not be.
    #[error("`{tensor}` could not be read from the model: {source}")]
    Source {
        /// The tensor.
        tensor: String,
        /// What its source said.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A snapshot that was to be made in the background could not be.
    #[error("the state could not be read from the model: {source}")]
    Snapshot {
        /// What its maker said.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Two ranks say different things of what should be one.
    #[error("ranks disagree about {what}: rank {first_rank} has {first}, rank {rank} has {got}")]
    Disagree {
        /// The tensor or value, and which property of it.
        what: String,
        /// A rank.
        first_rank: usize,
        /// Its side.
        first: String,
        /// Another rank.
        rank: usize,
        /// Its side.
        got: String,
    },
    /// A directory without a manifest.
    #[error(
        "{} has no manifest.json, so it is no checkpoint, or one whose saving was interrupted; name a directory such as \
         `step-100`",
        dir.display()
    )]
    NoManifest {
        /// The directory.
        dir: PathBuf,
    },
    /// A manifest that cannot be read, or that contradicts itself.
    #[error("{}: the manifest is damaged: {problem}; use another checkpoint", file.display())]
    Manifest {
        /// The manifest.
        file: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// A manifest of another format version.
    #[error(
        "{}: format version {got} is unknown, this program reads version {supported}; use the program that saved it, or \
         one that is as new",
        file.display()
    )]
    Version {
        /// The manifest.
        file: PathBuf,
        /// Its version.
        got: u64,
        /// The version that can be read.
        supported: u64,
    },
    /// A file that the manifest lists is not there.
    #[error("{} is missing; restore it, or use another checkpoint", file.display())]
    MissingFile {
        /// The file.
        file: PathBuf,
    },
    /// A file has another size than when it was saved.
    #[error(
        "{} has {got} bytes, but {expected} were saved: it was cut off or written over; use another checkpoint",
        file.display()
    )]
    FileSize {
        /// The file.
        file: PathBuf,
        /// Bytes that were saved.
        expected: u64,
        /// Bytes that are there.
        got: u64,
    },
    /// A file has other content than when it was saved.
    #[error("{} has checksum {got}, but {expected} was saved: its content has changed; use another checkpoint", file.display())]
    Checksum {
        /// The file.
        file: PathBuf,
        /// The checksum that was saved.
        expected: String,
        /// The checksum of what is there.
        got: String,
    },
    /// A file's header is damaged, or does not hold what the manifest says.
    #[error("{}: the header is damaged: {problem}; use another checkpoint", file.display())]
    Header {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// No checkpoint under a root can be used.
    #[error("{} holds no checkpoint that can be used{}", root.display(), rejections(rejected))]
    NothingGood {
        /// The root.
        root: PathBuf,
        /// What was tried.
        rejected: Vec<Rejected>,
    },
    /// A tensor that the checkpoint does not have.
    #[error("{} has no tensor `{tensor}`; `fsdp inspect` lists what it has", dir.display())]
    UnknownTensor {
        /// The checkpoint.
        dir: PathBuf,
        /// The name asked for.
        tensor: String,
    },
    /// A tensor is read with a layout of another shape.
    #[error("`{tensor}` has shape {stored:?} in the checkpoint and {asked:?} in the model")]
    Shape {
        /// The tensor.
        tensor: String,
        /// Its shape in the checkpoint.
        stored: Vec<usize>,
        /// The shape asked for.
        asked: Vec<usize>,
    },
    /// Weights of another program that cannot be used.
    #[error("{}: {problem}", path.display())]
    Weights {
        /// The file, index or directory.
        path: PathBuf,
        /// What is wrong, and what to do.
        problem: String,
    },
    /// The checkpoint does not hold what the model needs.
    #[error("{0}")]
    Mismatch(Box<Comparison>),
    /// A conversion would write over something.
    #[error("{} exists; remove it or name another place", path.display())]
    OutputExists {
        /// What exists.
        path: PathBuf,
    },
    /// The place of a conversion does not fit what is to be written.
    #[error("{}: {problem}", path.display())]
    Output {
        /// The place named.
        path: PathBuf,
        /// What is wrong, and what to name instead.
        problem: &'static str,
    },
}

impl CheckpointError {
    /// To be used with `map_err`: an error of the system, with what was tried on what.
    pub(super) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| CheckpointError::Io { action, path, source }
    }
}

fn io_remedy(error: &io::Error) -> &'static str {
    use io::ErrorKind as Kind;
    match error.kind() {
        Kind::StorageFull | Kind::QuotaExceeded => "free some space, save elsewhere, or keep fewer checkpoints",
        Kind::PermissionDenied | Kind::ReadOnlyFilesystem => "let this user write there, or name another directory",
        Kind::FileTooLarge => "raise the limit on the size of files (`ulimit -f`), or save on more ranks",
        Kind::NotFound => "check the path, and that nothing else removes it",
        Kind::NotADirectory | Kind::AlreadyExists => "name a directory, and not a file",
        Kind::UnexpectedEof => "the file is cut off: use another checkpoint",
        _ => "check the disk and the path",
    }
}

fn also_failed(also: &[usize]) -> String {
    match also {
        [] => String::new(),
        [rank] => format!(" (and rank {rank})"),
        _ => format!(" (and ranks {})", also.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")),
    }
}

fn rejections(rejected: &[Rejected]) -> String {
    match rejected {
        [] => ": there are none; check the path, or start without resuming".into(),
        _ => rejected.iter().fold(":".into(), |text, one| format!("{text}\n  {one}")),
    }
}
