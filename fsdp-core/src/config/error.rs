//! What is wrong with a configuration, where, and what to write instead.

use std::fmt;
use std::path::PathBuf;

use crate::{Mesh, MeshError};

/// A place in a text; both count from 1, and columns count characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The line.
    pub line: u32,
    /// The column.
    pub column: u32,
}

impl Place {
    /// The place of the byte at `offset` of `text`.
    pub(super) fn at(text: &str, offset: usize) -> Self {
        let before = &text.as_bytes()[..offset.min(text.len())];
        let line_start = before.iter().rposition(|&byte| byte == b'\n').map_or(0, |newline| newline + 1);
        let num_lines = before.iter().filter(|&&byte| byte == b'\n').count();
        // Bytes that continue a UTF-8 character have the upper bits 10.
        let is_char_start = |&&byte: &&u8| byte & 0b1100_0000 != 0b1000_0000;
        Self::from_zero(num_lines, before[line_start..].iter().filter(is_char_start).count())
    }

    /// From numbers that count from 0. A text beyond the range of u32 has its last place.
    pub(super) fn from_zero(line: usize, column: usize) -> Self {
        let from_one = |number| u32::try_from(number).unwrap_or(u32::MAX).saturating_add(1);
        Self { line: from_one(line), column: from_one(column) }
    }
}

/// Where a mistake is: the file, or what the caller named the text, and the place where it is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Location {
    /// The file name, or what the caller named the text.
    pub origin: String,
    /// The place in it.
    pub place: Option<Place>,
}

/// As compilers print it: `zero3.toml:3:1`.
impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.origin)?;
        self.place.map_or(Ok(()), |Place { line, column }| write!(f, ":{line}:{column}"))
    }
}

/// The first mistake in a configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error(
        "cannot read the configuration {}: {source}; pass the path of a TOML or JSON file (an empty .toml file means \
         all defaults)",
        file.display()
    )]
    Read {
        /// The file.
        file: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file's name does not say what it holds.
    #[error("{}: a configuration is TOML or JSON; let the name of the file end in .toml or .json", file.display())]
    UnknownFormat {
        /// The file.
        file: PathBuf,
    },
    /// The text is not TOML, or not JSON.
    #[error("{at}: not valid {format}: {message}")]
    Syntax {
        /// Where.
        at: Location,
        /// "TOML" or "JSON".
        format: &'static str,
        /// What the parser said.
        message: String,
    },
    /// A key that does not exist anywhere.
    #[error("{at}: unknown key `{}`; {}", key.escape_debug(), suggest_key(*nearest, *nearest_table, known))]
    UnknownKey {
        /// Where.
        at: Location,
        /// The full path of the key.
        key: String,
        /// The name of the existing key that was most likely meant.
        nearest: Option<&'static str>,
        /// The table of that key, if it is another than this; empty for the top.
        nearest_table: Option<&'static str>,
        /// The names of all keys of this table.
        known: Vec<&'static str>,
    },
    /// A key that exists, but in another table.
    #[error("{at}: `{}` belongs {}; move it there", key.escape_debug(), place_of(table))]
    MisplacedKey {
        /// Where.
        at: Location,
        /// The key, without a table.
        key: String,
        /// The table in which it belongs; empty for the top.
        table: &'static str,
    },
    /// A value of another type.
    #[error("{at}: `{}` is {got}; it must be {expected}", key.escape_debug())]
    WrongType {
        /// Where.
        at: Location,
        /// The full path of the key.
        key: String,
        /// What is allowed.
        expected: String,
        /// The type and value given.
        got: String,
    },
    /// A number outside its range.
    #[error("{at}: `{key}` is {got}; it must be {allowed}")]
    OutOfRange {
        /// Where.
        at: Location,
        /// The full path of the key.
        key: String,
        /// What is allowed.
        allowed: String,
        /// The number given.
        got: String,
    },
    /// A name that is none of the choices.
    #[error("{at}: `{key}` is \"{}\", which does not exist; {}", got.escape_debug(), suggest_name(*nearest, allowed))]
    UnknownName {
        /// Where.
        at: Location,
        /// The full path of the key.
        key: String,
        /// The name given.
        got: String,
        /// The existing name that was most likely meant.
        nearest: Option<&'static str>,
        /// All names.
        allowed: &'static [&'static str],
    },
    /// Two keys that do not go together.
    #[error("{at}: `{}` and `{}` are both set, but {why}; leave one of them out", keys[0], keys[1])]
    Conflict {
        /// Where.
        at: Location,
        /// The full paths of the keys.
        keys: [&'static str; 2],
        /// Why they exclude each other.
        why: &'static str,
    },
    /// A setting that means nothing without another one.
    #[error("{at}: `{key}` {needs}; {remedy}")]
    Needs {
        /// Where.
        at: Location,
        /// The full path of the key.
        key: String,
        /// What it needs, and why.
        needs: String,
        /// What to do.
        remedy: &'static str,
    },
    /// Sizes that make no mesh.
    #[error("{at}: {source}")]
    InvalidMesh {
        /// Where.
        at: Location,
        /// Why.
        source: MeshError,
    },
    /// A mesh for another number of ranks.
    #[error(
        "{at}: `mesh` {mesh} has {} ranks, but `world_size` is {world_size}; make the product of the mesh's sizes and \
         the world size equal",
        mesh.world_size()
    )]
    MeshProduct {
        /// Where the mesh is.
        at: Location,
        /// The mesh.
        mesh: Mesh,
        /// The world size.
        world_size: usize,
    },
}

/// The remedy for a misspelt key: the nearest one, or all where none is near.
fn suggest_key(nearest: Option<&str>, nearest_table: Option<&str>, known: &[&str]) -> String {
    match (nearest, nearest_table) {
        (Some(name), Some(table)) => format!("did you mean `{name}` {}?", place_of(table)),
        (Some(name), None) => format!("did you mean `{name}`?"),
        (None, _) => format!("keys here are `{}`", known.join("`, `")),
    }
}

/// Where keys of `table` belong.
fn place_of(table: &str) -> String {
    if table.is_empty() { "at the top, before the first [table]".to_owned() } else { format!("under [{table}]") }
}

/// The remedy for a misspelt choice.
fn suggest_name(nearest: Option<&str>, allowed: &[&str]) -> String {
    match nearest {
        Some(name) => format!("did you mean \"{name}\"?"),
        None => format!("it must be \"{}\"", allowed.join("\" or \"")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_count_characters_and_not_bytes() {
        let text = "a = 1\n\"é\" = 2";
        assert_eq!(Place::at(text, 0), Place { line: 1, column: 1 });
        assert_eq!(Place::at(text, text.find("= 2").unwrap()), Place { line: 2, column: 5 });
        assert_eq!(Place::at(text, 1000), Place { line: 2, column: 8 });
        assert_eq!(Place::at("", 0), Place { line: 1, column: 1 });
    }
}
