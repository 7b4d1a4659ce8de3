//! The words of the project: the page that lists them, and the tables that set them beside those of others.

use fsdp_core::config_keys;

use crate::output::assert_shown;

#[test]
fn the_page_of_words_is_the_crates_glossary() {
    let source = include_str!("../../fsdp-core/src/lib.rs");
    let (_, rest) = source.split_once("//! # Words\n").unwrap();
    let (table, _) = rest.split_once("//! # Map\n").unwrap();
    let mut page = String::from(
        "# Words\n\n<!-- Written from `fsdp-core/src/lib.rs` by `UPDATE_BOOK=1 cargo book-test`; do not edit. -->\n\n\
         One word for one idea, in the book, the configuration, the messages and the code.\n",
    );
    for line in table.lines() {
        page += line.strip_prefix("//!").unwrap().trim_start();
        page.push('\n');
    }
    // Names of items link nowhere here.
    let page = format!("{}\n", page.replace("[`", "`").replace("`]", "`").trim_end());
    assert!(page.contains("| *unit* |"), "{page}");
    assert_shown("src/reference/words.md", &page);
}

/// What stands between backquotes in the cell `column` of every table row.
fn codes(page: &str, column: usize) -> Vec<String> {
    let rows = page.lines().filter(|line| line.starts_with('|'));
    let cells = rows.filter_map(|row| row.split('|').nth(column + 1));
    cells.flat_map(|cell| cell.split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>()).collect()
}

#[test]
fn keys_in_the_tables_of_words_exist() {
    let tables: Vec<&str> = config_keys().iter().map(|key| key.table).filter(|table| !table.is_empty()).collect();
    let paths: Vec<String> = config_keys().iter().map(fsdp_core::ConfigKey::path).collect();
    let mut num_keys = 0;
    let mut check = |code: &str| {
        let path = code.split([' ', ',']).next().unwrap_or_default();
        // `prefetch.forward`, and not `model.save`.
        if path.split_once('.').is_some_and(|(table, _)| tables.contains(&table)) {
            num_keys += 1;
            assert!(paths.iter().any(|known| known == path), "there is no key `{path}`");
        }
    };
    codes(include_str!("../src/coming-from.md"), 1).iter().for_each(|code| check(code));
    codes(include_str!("output/fsdp-words.md"), 0).iter().for_each(|code| check(code));
    assert!(num_keys > 10, "the keys are not found any more");
}
