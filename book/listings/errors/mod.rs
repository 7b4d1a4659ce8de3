//! The page of error messages: every variant of every error enum, read from the source, with a message that was provoked or
//! built. A variant without one fails the test.

mod built;
mod files;
mod launched;
mod provoked;
mod source;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::output::assert_shown;

/// Columns of a shown message.
const COLUMNS: usize = 96;

/// A message as it is printed.
#[derive(Clone)]
struct Example {
    /// Whose it is: `ConfigError::UnknownKey`.
    variant: &'static str,
    /// What led to it, where a variant has several.
    label: &'static str,
    message: String,
}

impl Example {
    fn new(variant: &'static str, label: &'static str, message: String) -> Self {
        Self { variant, label, message }
    }
}

/// Enums in the order in which users meet them, each with a title and where it comes from. Others follow by themselves.
const ORDER: [(&str, &str, &str); 15] = [
    ("Error", "A run", "What `launch`, a model or an optimizer returns."),
    ("ConfigError", "The configuration", "Each names file, line and column. Only the first mistake is told."),
    ("MeshError", "The mesh", "Inside of `ConfigError::InvalidMesh`."),
    ("PlanError", "Sharding a model", "From `rank.shard`, on every rank alike."),
    ("SpecError", "A partition spec", "From `rank.shard` too: `#[shard(spec(...))]` does not fit its parameter."),
    ("PlanWarning", "Warnings about the plan", "Not errors: they go to `tracing` when a model is sharded."),
    ("CommError", "Collectives", "Ranks are named by their number in the world."),
    (
        "AbortCause",
        "Why communication has ended",
        "The first cause, which every rank is told, in `CommError::Aborted`.",
    ),
    (
        "LauncherError",
        "Launchers",
        "From `launch`, before any rank starts: what the environment says does not fit together.",
    ),
    ("RendezvousError", "The meeting of processes", "From `launch`, where ranks are processes."),
    ("CheckpointError", "Checkpoints and weights", "On every rank alike, also where one rank's disk failed."),
    (
        "TierError",
        "State on a disk",
        "With `[offload]`. A run that has lost its file goes on from its last checkpoint.",
    ),
    ("ShapeError", "Shape files", "From `fsdp plan --shape`."),
    ("ProfileError", "Measured machines", "From `fsdp bench`, and from `--profile`."),
    ("ReplayError", "Traces", "From `fsdp simulate --replay`."),
];

/// The sources of both crates, by path.
fn sources() -> BTreeMap<PathBuf, String> {
    let mut found = BTreeMap::new();
    let mut open = ["fsdp-core/src", "fsdp-burn/src"].map(|path| root().join(path)).to_vec();
    while let Some(folder) = open.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                open.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).unwrap();
                found.insert(path, text);
            }
        }
    }
    found
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// At most [`COLUMNS`] columns, broken at blanks. Lines that a message breaks itself stay.
fn wrapped(message: &str) -> String {
    let mut lines = Vec::new();
    for line in message.lines() {
        let indent = &line[..line.len() - line.trim_start().len()];
        let mut last = indent.to_owned();
        for word in line.split_whitespace() {
            if last.len() + 1 + word.len() > COLUMNS && last.trim() != "" {
                lines.push(std::mem::replace(&mut last, indent.to_owned()));
            }
            last += if last.trim().is_empty() { "" } else { " " };
            last += word;
        }
        lines.push(last);
    }
    lines.join("\n")
}

/// Documentation as a page shows it: names of items link nowhere in a book.
fn without_links(text: &str) -> String {
    let mut shown = String::new();
    let mut left = text;
    while let Some((before, name, rest)) = left.split_once("[`").and_then(|(before, rest)| {
        let (name, rest) = rest.split_once("`]")?;
        Some((before, name, rest))
    }) {
        shown += &format!("{before}`{name}`");
        left = rest.strip_prefix('(').and_then(|rest| rest.split_once(')')).map_or(rest, |(_, rest)| rest);
    }
    shown + left
}

fn section(title: &str, name: &str, about: &str, source: &str, examples: &[Example]) -> String {
    let mut text = format!("\n## {title}: `{name}`\n\n{about}\n");
    for variant in source::variants(source, name).into_iter().filter(|variant| !variant.is_transparent) {
        let of = format!("{name}::{}", variant.name);
        let mut shown = examples.iter().filter(|example| example.variant == of).peekable();
        assert!(shown.peek().is_some(), "there is no message of `{of}`; provoke it, or build it, beside this file");
        text += &format!("\n### `{of}`\n\n{}\n", without_links(&variant.meaning));
        for Example { label, message, .. } in shown {
            let label = if label.is_empty() { String::new() } else { format!("\n{label}:\n") };
            text += &format!("{label}\n```text\n{}\n```\n", wrapped(message));
        }
    }
    text
}

/// A table of all that is refused with a sentence of its own.
fn misuses(sources: &BTreeMap<PathBuf, String>) -> String {
    let mut text = String::from(
        "\n## What a run refuses, word by word\n\n\
         The messages of `Error::Misuse` and `Error::Parameter` are a problem and a remedy. These are all of them; what stands\n\
         in angle brackets is filled in.\n\n| problem | remedy |\n|---|---|\n",
    );
    let cell = |text: &str| text.replace('|', "\\|");
    let mut shown = Vec::new();
    for source in sources.iter().filter(|(path, _)| path.starts_with(root().join("fsdp-burn"))).map(|(_, text)| text) {
        for [problem, remedy] in source::remedies(source) {
            let row = format!("| {} | {} |\n", cell(&problem), cell(&remedy));
            if !shown.contains(&row) {
                text += &row;
                shown.push(row);
            }
        }
    }
    assert!(shown.len() > 20, "the refusals are not found any more");
    text
}

const INTRO: &str = "\
# Error messages

<!-- Written from the error enums by `UPDATE_BOOK=1 cargo book-test`; do not edit. -->

Errors are enums with fields, and their messages name the place and the remedy: what to do stands after the semicolon, or in
the sentence that follows. Here are all of them, as they are printed, with lines broken to fit the page. Tests have provoked
them, or built them from their fields, so names and numbers are those of an example.

An error that `launch` returns begins with the rank that failed first, as in `rank 1: the data set is empty`. That is where to
look: what other ranks report is a consequence. Mistakes in `#[shard(...)]` are compiler errors at the word that is wrong; they
are listed with [the attributes](attributes.md#what-is-refused).
";

#[test]
fn the_page_of_error_messages_is_current() {
    let sources = sources();
    let examples = [launched::examples(), provoked::examples(), built::examples(), files::examples()].concat();
    let defines = |name: &str| {
        let head = format!("\npub enum {name} {{\n");
        sources.values().find(|text| text.contains(&head)).unwrap_or_else(|| panic!("there is no enum {name}"))
    };
    let mut page = INTRO.to_owned();
    for (name, title, about) in ORDER {
        page += &section(title, name, about, defines(name), &examples);
    }
    // Enums that a later version adds.
    for source in sources.values() {
        let names = source.lines().filter_map(|line| line.strip_prefix("pub enum ")?.strip_suffix(" {"));
        let is_new = |name: &&str| name.ends_with("Error") && ORDER.iter().all(|(known, ..)| known != name);
        for name in names.filter(is_new) {
            page += &section("More", name, "", source, &examples);
        }
    }
    page += &misuses(&sources);
    for Example { variant, .. } in &examples {
        assert!(page.contains(&format!("### `{variant}`")), "there is no {variant}");
    }
    assert_shown("src/reference/errors.md", &page);
}
