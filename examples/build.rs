//! Gathers the text that the trainer learns from by default: the documents and sources of this project.

use std::path::{Path, PathBuf};
use std::{env, fs, io};

/// What is read of the project, from its root. What does not exist is left out.
const SOURCES: [&str; 6] =
    ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "fsdp-core/src", "fsdp-macros/src", "fsdp-burn/src"];

fn main() -> io::Result<()> {
    let root = Path::new("..");
    let mut files = Vec::new();
    for source in SOURCES.map(|source| root.join(source)) {
        if source.exists() {
            println!("cargo::rerun-if-changed={}", source.display());
            collect(source, &mut files)?;
        }
    }
    // The order of a directory differs between file systems, and the text should not.
    files.sort();
    let mut text = Vec::new();
    for file in files {
        text.extend(fs::read(file)?);
        text.push(b'\n');
    }
    let out = env::var_os("OUT_DIR").ok_or_else(|| io::Error::other("cargo sets OUT_DIR"))?;
    fs::write(Path::new(&out).join("project.txt"), text)
}

fn collect(path: PathBuf, files: &mut Vec<PathBuf>) -> io::Result<()> {
    if !path.is_dir() {
        files.push(path);
        return Ok(());
    }
    for entry in fs::read_dir(path)? {
        let path = entry?.path();
        let is_source = path.extension().is_some_and(|extension| extension == "rs");
        if path.is_dir() || is_source {
            collect(path, files)?;
        }
    }
    Ok(())
}
