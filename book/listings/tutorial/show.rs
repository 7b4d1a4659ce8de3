//! How the chapters print numbers: what is counted as it is, what is measured with a `≈` in front of it.

use std::fmt::Display;
use std::path::{Path, PathBuf};

/// A number that was measured. It differs from machine to machine and from run to run; all others do not.
pub(crate) fn about(number: impl Display) -> String {
    format!("≈{number}")
}

/// A time that was measured.
pub(crate) fn about_ms(seconds: f64) -> String {
    format!("≈{:.1} ms", seconds * 1e3)
}

/// A size that was counted, with a comma before each three digits.
pub(crate) fn grouped(number: impl TryInto<u64>) -> String {
    fsdp_core::grouped(number.try_into().unwrap_or(u64::MAX))
}

/// A bar of one character for each `unit`.
pub(crate) fn bar(value: usize, unit: usize, character: char) -> String {
    std::iter::repeat_n(character, (value + unit / 2) / unit).collect()
}

/// A folder for what a chapter writes, empty, below the folder that the program was started in.
pub(crate) fn scratch(name: &str) -> std::io::Result<PathBuf> {
    let folder = Path::new("target").join("tutorial").join(name);
    if folder.exists() {
        std::fs::remove_dir_all(&folder)?;
    }
    std::fs::create_dir_all(&folder)?;
    Ok(folder)
}
