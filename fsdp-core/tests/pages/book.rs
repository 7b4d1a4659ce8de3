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
