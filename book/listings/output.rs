//! Compares what is computed with what the book shows.

use std::path::Path;

/// Fails unless the file `path`, from the book's folder, holds `text`. With `UPDATE_BOOK` set it is written in place.
pub(crate) fn assert_shown(path: &str, text: &str) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    if std::env::var_os("UPDATE_BOOK").is_some() {
        std::fs::write(&file, text).unwrap();
    }
    let shown = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(
        shown == text,
        "book/{path} is out of date; look at the difference after `UPDATE_BOOK=1 cargo book-test`. It should hold:\n{text}"
    );
}
