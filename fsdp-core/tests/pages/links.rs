//! Every link of the built book leads somewhere, and nothing that mdBook could not include is left in it.
//!
//! The rules of the repository check the sources (`tests/tidy.rs`); what mdBook makes of them, with the HTML that pages hold
//! themselves, is checked here.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use crate::book;

/// All files of a folder that end so.
fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path, extension));
        } else if path.extension().is_some_and(|of| of == extension) {
            found.push(path);
        }
    }
    found
}

/// The values of an attribute in a page, with the entities that addresses may hold.
fn attributes<'a>(page: &'a str, name: &str) -> impl Iterator<Item = String> + 'a {
    let start = format!(" {name}=\"");
    let values = page.match_indices(&start).map(|(at, found)| at + found.len()).collect::<Vec<_>>();
    values.into_iter().filter_map(|at| page[at..].split('"').next()).map(|value| value.replace("&amp;", "&"))
}

/// A page without what scripts and comments hold.
fn markup(page: &str) -> String {
    let mut text = page.to_owned();
    for (open, close) in [("<script>", "</script>"), ("<!--", "-->")] {
        while let Some(start) = text.find(open) {
            let len = text[start..].find(close).map_or(text.len() - start, |len| len + close.len());
            text.replace_range(start..start + len, "");
        }
    }
    text
}

/// Whether a block of code shows nothing: hidden lines stand in elements of their own.
fn is_hidden(code: &str) -> bool {
    let mut pieces = code.split("<span class=\"boring\">");
    let first = pieces.next().unwrap_or("");
    let shown = pieces.map(|piece| piece.split_once("</span>").map_or("", |(_, shown)| shown));
    std::iter::once(first).chain(shown).all(|text| text.trim().is_empty())
}

/// The bytes behind `%41`, as text.
fn decoded(address: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = address.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        let digits = after.get(..2).filter(|_| first == b'%').and_then(|digits| std::str::from_utf8(digits).ok());
        match digits.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &after[2..];
            }
            None => {
                bytes.push(first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[test]
fn every_link_and_anchor_of_the_built_book_leads_somewhere() {
    let folder = book::folder();
    let pages: BTreeMap<PathBuf, String> = files(&folder, "html")
        .into_iter()
        .map(|path| (path.clone(), markup(&fs::read_to_string(&path).unwrap())))
        .collect();
    let ids: BTreeMap<&Path, BTreeSet<String>> =
        pages.iter().map(|(path, page)| (path.as_path(), attributes(page, "id").collect())).collect();
    let mut broken = Vec::new();
    let mut num_links = 0;
    for (path, page) in &pages {
        let shown = path.strip_prefix(&folder).unwrap().display();
        let addresses = attributes(page, "href").chain(attributes(page, "src"));
        for address in addresses.filter(|address| !address.contains("://") && !address.starts_with("data:")) {
            num_links += 1;
            let (file, anchor) = address.split_once('#').unwrap_or((&address, ""));
            let file = decoded(file.split('?').next().unwrap_or(""));
            // The page of what is not found is shown at any address, so its links begin at the root.
            let beside = if path.ends_with("404.html") { folder.as_path() } else { path.parent().unwrap() };
            let target = if file.is_empty() { path.clone() } else { beside.join(file.trim_start_matches('/')) };
            let target = if target.is_dir() { target.join("index.html") } else { target };
            match target.canonicalize() {
                Err(_) => broken.push(format!("{shown}: there is no {address}")),
                Ok(target)
                    if !anchor.is_empty()
                        && !ids.get(target.as_path()).is_some_and(|ids| ids.contains(&decoded(anchor))) =>
                {
                    broken.push(format!("{shown}: nothing has the name of {address}"));
                }
                Ok(_) => {}
            }
        }
    }
    broken.sort();
    broken.dedup();
    assert!(broken.is_empty(), "\n{}\n", broken.join("\n"));
    assert!(pages.len() > 10 && num_links > 100, "{} pages with {num_links} links", pages.len());
}

#[test]
fn the_built_book_has_no_directive_that_mdbook_did_not_understand_and_no_name_twice() {
    let folder = book::folder();
    let mut broken = Vec::new();
    for path in files(&folder, "html") {
        let page = markup(&fs::read_to_string(&path).unwrap());
        let shown = path.strip_prefix(&folder).unwrap().display();
        if page.contains("{{#") {
            broken.push(format!("{shown}: a directive is left"));
        }
        let mut seen = BTreeSet::new();
        // All pages in one have the names of all, among them those of the book's own frame.
        for id in attributes(&page, "id").filter(|_| !path.ends_with("print.html")) {
            if !seen.insert(id.clone()) {
                broken.push(format!("{shown}: two elements are called {id}"));
            }
        }
        // An anchor that an included file does not have leaves an empty block, or one of hidden lines.
        let blocks = page.split("<code class=\"language-").skip(1).filter_map(|text| text.split("</code>").next());
        let num_empty = blocks.filter(|block| block.split_once('>').is_some_and(|(_, code)| is_hidden(code))).count();
        if num_empty > 0 {
            broken.push(format!("{shown}: {num_empty} blocks of code are empty"));
        }
    }
    assert!(broken.is_empty(), "\n{}\n", broken.join("\n"));
}

#[test]
fn a_block_of_hidden_lines_is_empty() {
    let line = |text: &str| format!("<span class=\"boring\">{text}</span>");
    assert!(is_hidden("\n") && is_hidden(&line("fn main() {\n")));
    assert!(is_hidden(&format!("{}{}\n{}", line("a"), line("b"), line("}"))));
    assert!(!is_hidden(&format!("{}let a = 1;\n{}", line("fn main() {\n"), line("}"))) && !is_hidden("run"));
}
