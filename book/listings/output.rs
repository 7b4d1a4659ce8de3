//! Compares what is computed with what the book shows.

use std::path::{Path, PathBuf};

fn in_book(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn is_updating() -> bool {
    std::env::var_os("UPDATE_BOOK").is_some()
}

/// Fails unless the file `path`, from the book's folder, holds `text`. With `UPDATE_BOOK` set it is written in place.
pub(crate) fn assert_shown(path: &str, text: &str) {
    let file = in_book(path);
    if is_updating() {
        std::fs::write(&file, text).unwrap();
    }
    let shown = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(
        shown == text,
        "book/{path} is out of date; look at the difference after `UPDATE_BOOK=1 cargo book-test`. It should hold:\n{text}"
    );
}

/// Fails unless the bold numbers of the page `path`, from the book's folder, are `numbers`, heading by heading and in their
/// order; a number is whatever stands in bold and has a digit. With `UPDATE_BOOK` set they are written in place.
///
/// So prose can state numbers that cannot drift: each is computed, and none can be added without its computation.
pub(crate) fn assert_numbers(path: &str, numbers: &[(&str, Vec<String>)]) {
    let page = std::fs::read_to_string(in_book(path)).unwrap();
    let (mut heading, mut fenced) = ("", false);
    let mut open: Vec<(&str, std::slice::Iter<'_, String>)> = Vec::new();
    for (title, computed) in numbers {
        assert!(open.iter().all(|(known, _)| known != title), "`{title}` is given twice");
        open.push((*title, computed.iter()));
    }
    let mut text = String::new();
    let mut wrong = Vec::new();
    for line in page.lines() {
        fenced ^= line.starts_with("```");
        if line.starts_with('#') && !fenced {
            heading = line.trim_start_matches('#').trim().trim_matches(['“', '”']);
        }
        // Bold is every second piece.
        let pieces: Vec<&str> = if fenced { vec![line] } else { line.split("**").collect() };
        for (index, piece) in pieces.iter().enumerate() {
            text += if index == 0 { "" } else { "**" };
            let is_number = index % 2 == 1 && piece.contains(|c: char| c.is_ascii_digit());
            let computed = open.iter_mut().find(|(title, _)| is_number && *title == heading);
            match computed.and_then(|(_, left)| left.next()) {
                Some(computed) => {
                    if computed != piece {
                        wrong.push(format!("{heading}: the page says `{piece}`, computed is `{computed}`"));
                    }
                    text += computed;
                }
                None => {
                    if is_number {
                        wrong.push(format!("{heading}: nothing computes `{piece}`"));
                    }
                    text += piece;
                }
            }
        }
        text.push('\n');
    }
    let left = open.into_iter().flat_map(|(title, left)| left.map(move |number| format!("{title}: `{number}`")));
    let left: Vec<_> = left.collect();
    assert!(left.is_empty(), "book/{path} does not show what is computed:\n{}", left.join("\n"));
    if is_updating() {
        std::fs::write(in_book(path), &text).unwrap();
        wrong.retain(|problem| problem.contains("nothing computes"));
    }
    assert!(wrong.is_empty(), "book/{path}:\n{}", wrong.join("\n"));
}
