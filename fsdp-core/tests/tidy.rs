//! Rules of the repository, as tests: what a reviewer would have to look for in every file.
//!
//! Each rule collects all that break it, as `file:line: what is wrong`, and fails with the whole list.

#![allow(clippy::unwrap_used, reason = "all of this is a test, its helpers too")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The folders that belong to the project. Whatever else lies in a checkout is nobody's business here.
const FOLDERS: [&str; 8] = [".cargo", ".ci", "benches", "book", "examples", "fsdp-burn", "fsdp-core", "fsdp-macros"];

/// Folders of tools, at any depth.
const SKIPPED: [&str; 2] = ["target", "wip"];

/// Lines that a source file may have, its tests module left out.
const MAX_LINES: usize = 600;

/// Where a rule is broken.
#[derive(Default)]
struct Broken(Vec<String>);

impl Broken {
    fn add(&mut self, file: &File, line: usize, what: impl AsRef<str>) {
        self.0.push(format!("{}:{line}: {}", file.path, what.as_ref()));
    }

    fn assert_none(self) {
        assert!(self.0.is_empty(), "\n{}\n", self.0.join("\n"));
    }
}

/// A text file of the project.
struct File {
    /// From the root, with forward slashes.
    path: String,
    text: String,
}

impl File {
    fn extension(&self) -> &str {
        self.path.rsplit_once('.').map_or("", |(_, extension)| extension)
    }

    /// Lines with their numbers, from 1.
    fn lines(&self) -> impl Iterator<Item = (usize, &str)> {
        self.text.lines().enumerate().map(|(index, line)| (index + 1, line))
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// All text files: those of the project's folders, and those that lie at the root.
fn files() -> Vec<File> {
    let mut paths = Vec::new();
    for folder in FOLDERS {
        collect(&root().join(folder), &mut paths);
    }
    let at_root = fs::read_dir(root()).unwrap().map(|entry| entry.unwrap().path());
    // In a second working tree of a clone, `.git` is a file.
    paths.extend(at_root.filter(|path| path.is_file() && !path.ends_with(".git")));
    paths.sort();
    let file = |path: &PathBuf| {
        let text = String::from_utf8(fs::read(path).unwrap()).ok()?;
        let path = path.strip_prefix(root()).unwrap().to_str()?.replace('\\', "/");
        Some(File { path, text })
    };
    paths.iter().filter_map(file).collect()
}

fn sources() -> Vec<File> {
    files().into_iter().filter(|file| file.extension() == "rs").collect()
}

/// The scripts of the book's pages.
fn scripts() -> Vec<File> {
    files().into_iter().filter(|file| file.extension() == "js").collect()
}

fn collect(folder: &Path, paths: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        // What mdbook builds without being told where.
        let built = path.ends_with("book/book");
        if !path.is_dir() {
            paths.push(path);
        } else if !SKIPPED.contains(&name) && !built {
            collect(&path, paths);
        }
    }
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// A word that this file must not contain itself, from its parts.
fn joined(parts: &[&str]) -> String {
    parts.concat()
}

#[test]
fn every_source_file_says_in_its_first_line_what_it_is_for() {
    let mut broken = Broken::default();
    for file in sources() {
        if !file.text.starts_with("//! ") {
            broken.add(&file, 1, "the first line must be `//! ` and what the file is for");
        }
    }
    for file in scripts() {
        if !file.text.starts_with("// ") {
            broken.add(&file, 1, "the first line must be `// ` and what the file is for");
        }
    }
    broken.assert_none();
}

#[test]
fn no_source_file_is_too_long_to_read() {
    let mut broken = Broken::default();
    for file in sources().into_iter().chain(scripts()) {
        let num_lines = file.text.lines().take_while(|line| *line != "#[cfg(test)]").count();
        if num_lines > MAX_LINES {
            let what = format!("{num_lines} lines without tests; split it, {MAX_LINES} are the limit");
            broken.add(&file, MAX_LINES + 1, what);
        }
    }
    broken.assert_none();
}

#[test]
fn exports_are_listed_by_name() {
    let mut broken = Broken::default();
    for file in sources() {
        let mut open = false;
        for (number, line) in file.lines() {
            open |= line.trim_start().starts_with("pub use ");
            if open && (line.contains("::*") || line.trim() == "*,") {
                broken.add(&file, number, "a glob export; list the names");
            }
            open &= !line.contains(';');
        }
    }
    broken.assert_none();
}

#[test]
fn nothing_is_left_for_later() {
    let words = [
        &["#[", "ignore"][..],
        &["to", "do!("],
        &["unimple", "mented!("],
        &["db", "g!("],
        &["TO", "DO"],
        &["FIX", "ME"],
    ]
    .map(joined);
    let mut broken = Broken::default();
    for file in sources() {
        for (number, line) in file.lines() {
            if let Some(word) = words.iter().find(|word| line.contains(word.as_str())) {
                broken.add(&file, number, format!("`{word}`; finish it or remove it"));
            }
        }
    }
    broken.assert_none();
}

/// Where `unsafe` is argued for, file by file: an allocator that counts; memory that ranks fill at once; buffers that the
/// kernel fills while no call waits for it.
const UNSAFE_FILES: [&str; 16] = [
    "benches/memory.rs",
    // A setting of the allocator.
    "fsdp-burn/src/launch/memory.rs",
    "fsdp-core/src/comm/pool.rs",
    "fsdp-core/src/comm/shared.rs",
    "fsdp-core/src/comm/sum.rs",
    "fsdp-core/src/tier/uring.rs",
    // Memory that several processes write and read by turns.
    "fsdp-core/src/comm/hosts/arena.rs",
    "fsdp-core/src/comm/hosts/heap.rs",
    "fsdp-core/src/comm/hosts/output.rs",
    "fsdp-core/src/comm/hosts/rank.rs",
    "fsdp-core/src/comm/hosts/rounds.rs",
    "fsdp-core/src/comm/hosts/table.rs",
    // Memory that is sent and received in place.
    "fsdp-core/src/comm/hosts/network.rs",
    "fsdp-core/src/testing/loopback.rs",
    // A library of C.
    "fsdp-core/src/mpi/library.rs",
    // CUDA's streams and events, and NCCL.
    "fsdp-burn/src/peers/nccl.rs",
];

#[test]
fn unsafe_code_stays_where_it_is_argued_for() {
    let word = joined(&["uns", "afe "]);
    let mut broken = Broken::default();
    for file in sources().iter().filter(|file| !UNSAFE_FILES.contains(&file.path.as_str())) {
        for (number, line) in file.lines().filter(|(_, line)| !line.trim_start().starts_with("//")) {
            if line.contains(&format!("{word}{{")) || line.contains(&format!("{word}impl")) {
                broken.add(file, number, "unsafe code; avoid it, or add the file to UNSAFE_FILES with a reason");
            }
        }
    }
    broken.assert_none();
}

#[test]
fn notes_that_are_cited_exist_once() {
    let (open, see) = (joined(&["[No", "te: "]), joined(&["See [No", "te: "]));
    let mut headings: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut citations = Vec::new();
    for file in files().into_iter().filter(|file| ["rs", "md"].contains(&file.extension())) {
        for (number, line) in file.lines() {
            let bare = line.trim_start().trim_start_matches(['/', '!']).trim();
            for (start, _) in line.match_indices(&open) {
                let place = format!("{}:{number}", file.path);
                let Some(len) = line[start..].find(']') else { continue };
                let name = line[start + open.len()..start + len].to_owned();
                let is_heading = file.extension() == "rs" && bare == format!("{open}{name}]");
                if name == "..." {
                    continue;
                } else if is_heading {
                    headings.entry(name).or_default().push(place);
                } else {
                    citations.push((name, place));
                }
            }
        }
    }
    let mut broken: Vec<String> = Vec::new();
    for (name, places) in headings.iter().filter(|(_, places)| places.len() > 1) {
        broken.push(format!("{}: the note `{name}` stands in several places", places.join(", ")));
    }
    for (name, place) in citations.iter().filter(|(name, _)| !headings.contains_key(name)) {
        broken.push(format!("{place}: there is no note `{name}`; it is written on a line of its own ({see}...])"));
    }
    assert!(broken.is_empty(), "\n{}\n", broken.join("\n"));
    assert!(headings.len() >= 6, "the notes are not found any more: {headings:?}");
}

#[test]
fn nothing_names_the_machine_it_was_written_on() {
    // Folders of a machine, and words of private package registries.
    let words = [
        &["/wo", "rk/"][..],
        &["/ro", "ot/"],
        &["/ho", "me/"],
        &["/Us", "ers/"],
        &["arti", "factory"],
        &["jf", "rog"],
        &["sona", "type"],
        &["replace-", "with"],
        &["regis", "try.npmjs"],
        &["index.", "crates"],
        &["files.python", "hosted"],
        &["pypi", ".org"],
        &["proxy.go", "lang"],
        &["local", "host:"],
    ]
    .map(joined);
    let mut broken = Broken::default();
    for file in files() {
        for (number, line) in file.lines() {
            if let Some(word) = words.iter().find(|word| line.contains(word.as_str())) {
                broken.add(&file, number, format!("`{word}` belongs to one machine"));
            }
        }
    }
    broken.assert_none();
}

#[test]
fn every_dependency_comes_from_the_public_registry() {
    let lock = read("Cargo.lock");
    let sources: BTreeSet<&str> = lock.lines().filter_map(|line| line.strip_prefix("source = ")).collect();
    assert_eq!(sources, BTreeSet::from(["\"registry+https://github.com/rust-lang/crates.io-index\""]));
}

#[test]
fn text_files_end_with_a_newline_and_lines_without_blanks() {
    let mut broken = Broken::default();
    for file in files() {
        let num_lines = file.text.lines().count();
        if !file.text.is_empty() && (!file.text.ends_with('\n') || file.text.ends_with("\n\n")) {
            broken.add(&file, num_lines, "the file must end with one newline");
        }
        for (number, line) in file.lines() {
            if line.ends_with([' ', '\t', '\r']) {
                broken.add(&file, number, "blanks at the end of the line");
            }
        }
    }
    broken.assert_none();
}

/// Packages of the lock file with what each depends on.
fn locked_dependencies() -> BTreeMap<String, Vec<String>> {
    let lock: toml::Table = toml::from_str(&read("Cargo.lock")).unwrap();
    let packages = lock["package"].as_array().unwrap();
    let name = |package: &toml::Value| package["name"].as_str().unwrap().to_owned();
    let dependencies = |package: &toml::Value| {
        let list = package.get("dependencies").and_then(toml::Value::as_array).cloned().unwrap_or_default();
        list.iter().map(|text| text.as_str().unwrap().split(' ').next().unwrap().to_owned()).collect()
    };
    packages.iter().map(|package| (name(package), dependencies(package))).collect()
}

#[test]
fn core_and_macros_do_not_depend_on_burn() {
    let locked = locked_dependencies();
    for package in ["fsdp-core", "fsdp-macros"] {
        let mut seen = BTreeSet::new();
        let mut open = vec![vec![package.to_owned()]];
        while let Some(way) = open.pop() {
            let last = way.last().unwrap();
            assert!(!last.starts_with("burn") && last != "fsdp-burn", "{package} depends on Burn: {}", way.join(" > "));
            for next in locked.get(last).into_iter().flatten() {
                if seen.insert(next.clone()) {
                    open.push(way.iter().chain([next]).cloned().collect());
                }
            }
        }
        assert!(seen.len() > 3, "{package}: its dependencies are not found any more");
    }
    assert!(locked["fsdp-burn"].contains(&"burn".to_owned()));
}

fn members() -> Vec<String> {
    let workspace: toml::Table = toml::from_str(&read("Cargo.toml")).unwrap();
    let members = workspace["workspace"]["members"].as_array().unwrap();
    members.iter().map(|member| member.as_str().unwrap().to_owned()).collect()
}

#[test]
fn every_member_is_licensed_linted_and_covered_by_these_rules() {
    for member in members() {
        let manifest: toml::Table = toml::from_str(&read(&format!("{member}/Cargo.toml"))).unwrap();
        for key in ["license", "edition", "rust-version", "version"] {
            let inherits = manifest["package"].get(key).and_then(|value| value.get("workspace"));
            assert_eq!(inherits, Some(&true.into()), "{member}/Cargo.toml: write `{key}.workspace = true`");
        }
        assert!(manifest["package"].get("description").is_some(), "{member}/Cargo.toml: no description");
        let lints = manifest.get("lints").and_then(|lints| lints.get("workspace"));
        assert_eq!(lints, Some(&true.into()), "{member}/Cargo.toml: write `[lints] workspace = true`");
        assert!(FOLDERS.contains(&member.as_str()), "{member} is no folder of FOLDERS in tidy.rs");
    }
    for licence in ["LICENSE-MIT", "LICENSE-APACHE"] {
        assert!(read(licence).len() > 1000, "{licence} is not the whole text");
    }
}

#[test]
fn the_changelog_has_a_place_for_the_next_change() {
    let changelog = read("CHANGELOG.md");
    let first = changelog.lines().find(|line| line.starts_with("## "));
    assert_eq!(first, Some("## [Unreleased]"), "CHANGELOG.md: the first section must be `## [Unreleased]`");
    let sections = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"];
    for line in changelog.lines().filter_map(|line| line.strip_prefix("### ")) {
        assert!(sections.contains(&line), "CHANGELOG.md: `### {line}` is none of {sections:?}");
    }
}

fn markdown() -> Vec<File> {
    files().into_iter().filter(|file| file.extension() == "md").collect()
}

fn folder_of(file: &File) -> PathBuf {
    root().join(&file.path).parent().unwrap().to_owned()
}

/// `[text](target)` on a line that is no code.
fn links(line: &str) -> Vec<&str> {
    let mut links = Vec::new();
    let code = |index: usize| line[..index].matches('`').count() % 2 == 1;
    for (index, _) in line.match_indices("](") {
        if let Some(len) = line[index..].find(')').filter(|_| !code(index)) {
            links.push(&line[index + 2..index + len]);
        }
    }
    links
}

/// A heading's anchor, as GitHub and mdBook make it.
fn anchor_of(heading: &str) -> String {
    let kept = |character: char| match character {
        ' ' => Some('-'),
        c if c.is_alphanumeric() || c == '-' || c == '_' => Some(c.to_ascii_lowercase()),
        _ => None,
    };
    heading.chars().filter_map(kept).collect()
}

/// Lines outside of fences.
fn prose(file: &File) -> Vec<(usize, &str)> {
    let mut fenced = false;
    let outside = |(_, line): &(usize, &str)| {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        !fenced && !fence
    };
    file.lines().filter(outside).collect()
}

#[test]
fn links_between_documents_lead_somewhere() {
    let mut broken = Broken::default();
    for file in markdown() {
        for (number, line) in prose(&file) {
            for link in links(line).into_iter().filter(|link| !link.starts_with("http")) {
                let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
                let target = if path.is_empty() { root().join(&file.path) } else { folder_of(&file).join(path) };
                if !target.exists() {
                    broken.add(&file, number, format!("there is no {path}"));
                } else if !anchor.is_empty() {
                    let target = File { path: link.to_owned(), text: fs::read_to_string(target).unwrap() };
                    let headings = prose(&target);
                    let mut headings = headings.iter().filter(|(_, line)| line.starts_with('#'));
                    if !headings.any(|(_, line)| anchor_of(line.trim_start_matches('#').trim()) == anchor) {
                        broken.add(&file, number, format!("there is no heading for {link}"));
                    }
                }
            }
        }
    }
    broken.assert_none();
}

/// What stands in fences of shell commands.
fn commands(file: &File) -> Vec<(usize, &str)> {
    let mut in_shell = false;
    let inside = |(_, line): &(usize, &str)| {
        if let Some(language) = line.strip_prefix("```") {
            in_shell = language == "sh";
            return false;
        }
        in_shell
    };
    file.lines().filter(inside).collect()
}

#[test]
fn commands_in_documents_name_what_exists() {
    let config = read(".cargo/config.toml");
    let config: toml::Table = toml::from_str(&config).unwrap();
    let known = ["add", "bench", "build", "doc", "new", "run", "test"];
    let mut broken = Broken::default();
    let mut num_commands = 0;
    for file in markdown() {
        for (number, line) in commands(&file) {
            let words: Vec<&str> = line.split('#').next().unwrap_or("").split_whitespace().collect();
            num_commands += words.len().min(1);
            for pair in words.windows(2) {
                let exists = match pair {
                    ["cargo", name] => known.contains(name) || config["alias"].get(name).is_some(),
                    ["--example", name] => root().join(format!("examples/{name}.rs")).exists(),
                    ["--bench", name] => root().join(format!("benches/{name}.rs")).exists(),
                    ["--config" | "bash", path] => root().join(path).exists(),
                    ["-p", package] => read("Cargo.lock").contains(&format!("name = \"{package}\"\n")),
                    _ => true,
                };
                if !exists {
                    broken.add(&file, number, format!("there is no `{}`", pair.join(" ")));
                }
            }
        }
    }
    broken.assert_none();
    assert!(num_commands > 0, "the commands are not found any more");
}

#[test]
fn every_page_of_the_book_is_in_its_summary() {
    let summary = read("book/src/SUMMARY.md");
    for file in markdown() {
        if let Some(page) = file.path.strip_prefix("book/src/").filter(|page| *page != "SUMMARY.md") {
            assert!(summary.contains(&format!("({page})")), "book/src/SUMMARY.md does not list {page}");
        }
    }
}

/// What an include directive asks for: a file and an anchor in it.
fn included(line: &str) -> Option<(&str, Option<&str>)> {
    let target = line.trim().strip_prefix("{{#")?.strip_suffix("}}")?;
    let target = target.strip_prefix("include ").or_else(|| target.strip_prefix("rustdoc_include "))?;
    Some(target.split_once(':').map_or((target, None), |(file, anchor)| (file, Some(anchor))))
}

/// mdBook leaves a missing file in the page and shows nothing for a missing anchor, and succeeds in both cases.
#[test]
fn code_in_the_book_is_included_from_files_that_are_tested() {
    let mut broken = Broken::default();
    let mut num_includes = 0;
    for file in markdown().iter().filter(|file| file.path.starts_with("book/src/")) {
        let mut fence: Option<(usize, &str, Vec<&str>)> = None;
        for (number, line) in file.lines() {
            match (&mut fence, line.strip_prefix("```")) {
                (None, Some(language)) => fence = Some((number, language, Vec::new())),
                (Some((start, language, content)), Some(_)) => {
                    let includes = content.iter().filter(|line| included(line).is_some()).count();
                    let checked = ["rust", "toml", "console"].iter().any(|name| language.starts_with(name));
                    if checked && (includes != 1 || content.len() != 1) {
                        broken.add(file, *start, format!("a {language} fence holds one include and nothing else"));
                    }
                    fence = None;
                }
                (Some((_, _, content)), None) => content.push(line),
                (None, None) => {}
            }
            if let Some((target, anchor)) = included(line) {
                num_includes += 1;
                let path = folder_of(file).join(target);
                let Ok(text) = fs::read_to_string(&path) else {
                    broken.add(file, number, format!("there is no {target}"));
                    continue;
                };
                for (word, anchor) in ["ANCHOR: ", "ANCHOR_END: "].into_iter().zip(anchor.into_iter().cycle()) {
                    let marks = text.lines().filter(|line| line.trim_end().ends_with(&format!("{word}{anchor}")));
                    if marks.count() != 1 {
                        broken.add(file, number, format!("{target} must have `{word}{anchor}` once"));
                    }
                }
            } else if line.contains("{{#") {
                broken.add(file, number, "a directive stands on a line of its own");
            }
        }
    }
    broken.assert_none();
    assert!(num_includes > 0, "the includes are not found any more");
}
