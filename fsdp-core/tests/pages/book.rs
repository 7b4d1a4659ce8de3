//! Where the built book lies, and its interactive pages.

use std::path::PathBuf;

use crate::browser::Browser;

/// The interactive pages, by the names of their files and of what they hold.
pub(crate) const PAGES: [&str; 3] = ["memory", "step", "mesh"];

/// The folder of the built book: `FSDP_BOOK`, else where `.ci/run` builds it.
pub(crate) fn folder() -> PathBuf {
    let named = std::env::var_os("FSDP_BOOK").map(PathBuf::from);
    let folder = named.unwrap_or_else(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("../book"));
    let found = folder.canonicalize();
    found.unwrap_or_else(|error| {
        panic!("{}: {error}; build the book there: mdbook build book --dest-dir {0}", folder.display())
    })
}

/// All pages of the book, as paths below its folder without `.html`.
pub(crate) fn pages() -> Vec<String> {
    let (mut found, mut open) = (Vec::new(), vec![folder()]);
    while let Some(at) = open.pop() {
        for entry in std::fs::read_dir(at).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                open.push(path);
            } else if path.extension().is_some_and(|extension| extension == "html") {
                let name = path.strip_prefix(folder()).unwrap().with_extension("").to_str().unwrap().to_owned();
                found.push(name);
            }
        }
    }
    // All of the book at once, the list of pages in a frame, and what a server shows in place of a page.
    found.retain(|name| !["print", "toc", "404"].contains(&name.as_str()));
    found.sort();
    assert!(found.len() > 30, "the pages are not found: {found:?}");
    found
}

/// The address of an interactive page.
pub(crate) fn address(page: &str) -> String {
    let file = folder().join(format!("interactive/{page}.html"));
    assert!(file.exists(), "{}: the book has no such page", file.display());
    format!("file://{}", file.display())
}

/// A browser that shows an interactive page, 1280 pixels wide, on light ground.
pub(crate) fn opened(page: &str) -> Browser {
    let mut browser = Browser::start();
    browser.resize(1280);
    browser.emulate("light", "");
    browser.open(&address(page));
    browser
}
