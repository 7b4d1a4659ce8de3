//! The program of the page that begins a project: it is run as a reader runs it, and its output is what the page shows.

use std::process::Command;

use crate::output::assert_shown;

/// The losses that are printed, by step.
fn losses(text: &str) -> Vec<f64> {
    let loss = |line: &str| line.strip_prefix("step ")?.split_once("loss ")?.1.parse().ok();
    text.lines().filter_map(loss).collect()
}

/// The text without what follows from samples: they are drawn, so it differs from run to run.
fn form(text: &str) -> String {
    let line = |line: &str| match line.split_once("loss ").or_else(|| line.split_once(" is ")) {
        Some((before, _)) => format!("{before}\n"),
        None => format!("{line}\n"),
    };
    text.lines().map(line).collect()
}

#[test]
fn the_program_of_a_new_project_learns_and_prints_what_its_page_shows() {
    let output = Command::new(env!("CARGO_BIN_EXE_start")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let losses = losses(&text);
    assert!(losses.len() == 6 && losses[5] < 0.1 * losses[0], "{losses:?}");
    let answer: f64 = text.lines().find_map(|line| line.split_once(" is ")?.1.parse().ok()).unwrap();
    assert!((answer + 0.3).abs() < 0.1, "{text}");
    let stored = concat!(env!("CARGO_MANIFEST_DIR"), "/listings/output/start.txt");
    let shown = std::fs::read_to_string(stored).unwrap_or_default();
    if form(&shown) != form(&text) {
        assert_shown("listings/output/start.txt", &text);
    }
}

/// What `cargo add` is told to add.
fn added(page: &str) -> Vec<&str> {
    page.lines().filter_map(|line| line.strip_prefix("cargo add ")).collect()
}

#[test]
fn a_new_project_depends_on_the_burn_of_the_workspace() {
    let workspace = include_str!("../../Cargo.toml");
    let line = workspace.lines().find(|line| line.starts_with("burn = ")).unwrap();
    let (version, features) = (line.split('"').nth(1).unwrap(), line.split_once("features = ").unwrap().1);
    let page = include_str!("../src/start.md");
    let burn = added(page).into_iter().find(|what| what.starts_with("burn@")).unwrap();
    let words: Vec<&str> = burn.split_whitespace().collect();
    assert_eq!(words[0], format!("burn@{version}"));
    assert_eq!(words[1..3], ["--no-default-features", "--features"]);
    for feature in words[3].split(',') {
        assert!(features.contains(&format!("\"{feature}\"")), "the workspace has no feature `{feature}` of Burn");
    }
}
