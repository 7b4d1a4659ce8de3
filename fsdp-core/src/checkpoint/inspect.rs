//! What is inside a checkpoint, and what of it is damaged: all of it, not the first.

use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};

use super::manifest::{FileEntry, Manifest, TensorEntry};
use super::root::{PINNED_FILE, Root};
use super::{Checkpoint, CheckpointError, TensorKind, Verify};
use crate::{Table, grouped, human_bytes};

/// What [`inspect`] found. Prints as a report.
#[derive(Debug)]
pub struct Inspection {
    /// The step directory.
    pub dir: PathBuf,
    /// What it holds, if the manifest can be read.
    pub manifest: Option<Manifest>,
    /// How closely files were looked at.
    pub verify: Verify,
    /// Whether retention leaves it alone.
    pub pinned: bool,
    /// Everything that is wrong, each with the file it is in.
    pub damage: Vec<CheckpointError>,
}

/// Looks at the step directory `dir`: its manifest, the size and header of every file, and, where asked, the checksums,
/// which reads all of it.
pub fn inspect(dir: impl AsRef<Path>, verify: Verify) -> Inspection {
    let dir = dir.as_ref().to_owned();
    let pinned = dir.join(PINNED_FILE).exists();
    let (manifest, damage) = match Manifest::read(&dir) {
        Err(error) => (None, vec![error]),
        Ok(manifest) => {
            let checkpoint = Checkpoint::of_manifest(dir.clone(), manifest);
            let files = 0..checkpoint.manifest.files.len();
            let damage = files.filter_map(|file| checkpoint.check_file(file, verify).err()).collect();
            (Some(checkpoint.manifest), damage)
        }
    };
    Inspection { dir, manifest, verify, pinned, damage }
}

/// The step directories under a root, newest first.
///
/// # Errors
/// If the root cannot be read.
pub fn step_dirs(root: impl AsRef<Path>) -> Result<Vec<PathBuf>, CheckpointError> {
    let root = Root::new(root.as_ref());
    Ok(root.steps()?.into_iter().map(|step| root.step_dir(step)).collect())
}

impl Checkpoint {
    /// Whether a file is as the manifest says, header and content.
    fn check_file(&self, index: usize, verify: Verify) -> Result<(), CheckpointError> {
        let entry = &self.manifest.files[index];
        entry.check_size(&self.dir)?;
        if verify == Verify::Checksums {
            entry.check_content(&self.dir)?;
        }
        let path = self.dir.join(&entry.name);
        let file = File::open(&path).map_err(CheckpointError::io("open", &path))?;
        for tensor in &self.manifest.tensors {
            for piece in tensor.pieces.iter().filter(|piece| piece.file == index) {
                self.files.place(tensor, piece, &file)?;
            }
        }
        Ok(())
    }
}

impl Inspection {
    /// Whether nothing is wrong, as far as was looked.
    pub fn is_good(&self) -> bool {
        self.damage.is_empty()
    }

    /// One line: the directory, what is in it, and whether it is good.
    pub fn summary(&self) -> String {
        let content = match &self.manifest {
            None => "unreadable".into(),
            Some(manifest) => {
                let Manifest { step, stage, world_size, .. } = manifest;
                let (stage, bytes) = (stage.number(), human_bytes(manifest.data_bytes()));
                format!("step {step}, stage {stage}, world size {world_size}, {bytes}")
            }
        };
        let pinned = if self.pinned { ", pinned" } else { "" };
        format!("{}: {content}{pinned}, {}", self.dir.display(), self.verdict())
    }

    fn verdict(&self) -> String {
        match (self.damage.len(), self.verify) {
            (0, Verify::Checksums) => "good: checksums match".into(),
            (0, Verify::Sizes) => "good: sizes and headers match".into(),
            (1, _) => "DAMAGED".into(),
            (n, _) => format!("DAMAGED in {n} files"),
        }
    }
}

/// The summary, what is damaged, and tables of files and tensors.
impl fmt::Display for Inspection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.summary())?;
        for damage in &self.damage {
            writeln!(f, "  {damage}")?;
        }
        let Some(manifest) = &self.manifest else { return Ok(()) };
        writeln!(f, "\nmesh {}, {}", manifest.mesh, manifest.stage)?;
        let list = |what: &str, names: Vec<&String>| match names.as_slice() {
            [] => format!("no {what}"),
            // Optimizers have some for each parameter.
            [first, .., last] if names.len() > 8 => format!("{what}: {}, from {first} to {last}", names.len()),
            names => format!("{what}: {}", names.iter().map(|name| name.as_str()).collect::<Vec<_>>().join(", ")),
        };
        writeln!(f, "{}", list("sections", manifest.sections.keys().collect()))?;
        writeln!(f, "{}", list("scalars", manifest.scalars.keys().collect()))?;
        write!(f, "\n{}\n{}", file_table(&manifest.files), tensor_table(&manifest.tensors))
    }
}

fn file_table(files: &[FileEntry]) -> String {
    let mut table = Table::new(["file", "size", "checksum"]).with_notes();
    for file in files {
        table.row([file.name.clone(), human_bytes(file.bytes), file.checksum.to_string()]);
    }
    table.to_string()
}

fn tensor_table(tensors: &[TensorEntry]) -> String {
    let mut table = Table::new(["tensor", "type", "elements", "size", "shape, and how it is cut"]).with_notes();
    for kind in [TensorKind::Model, TensorKind::Optimizer] {
        let of_kind: Vec<_> = tensors.iter().filter(|tensor| tensor.kind == kind).collect();
        for tensor in &of_kind {
            let cut = match tensor.pieces.len() {
                0 => format!("{:?}", tensor.shape),
                1 => format!("{:?}, whole", tensor.shape),
                n => format!("{:?}, {n} pieces along dimension {}", tensor.shape, tensor.dim),
            };
            let aliases: String = tensor.aliases.iter().map(|alias| format!(" = {alias}")).collect();
            let name = format!("{}{aliases}", tensor.name);
            let size = human_bytes(tensor.full_bytes());
            table.row([name, tensor.dtype.to_string(), grouped(tensor.full_len() as u64), size, cut]);
        }
        let elements: usize = of_kind.iter().map(|tensor| tensor.full_len()).sum();
        let bytes: u64 = of_kind.iter().map(|tensor| tensor.full_bytes()).sum();
        let what = match kind {
            TensorKind::Model => "all of the model",
            TensorKind::Optimizer => "all of the optimizer",
        };
        table.row([what.into(), String::new(), grouped(elements as u64), human_bytes(bytes), String::new()]);
    }
    table.to_string()
}
