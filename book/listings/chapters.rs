//! The programs of the tutorial: each is run as a reader runs it, and its output compared with what the book shows.
//!
//! A number behind `≈` was measured, and differs from run to run: of it only the place is compared, and what must hold of
//! it is asserted. All others were counted, and are compared as they are.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

const TIME_LIMIT: Duration = Duration::from_secs(240);

/// A chapter that has run, in a folder of its own.
struct Ran {
    text: String,
    folder: PathBuf,
    /// Programs take turns, since they measure.
    _turn: MutexGuard<'static, ()>,
}

impl Drop for Ran {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn run(chapter: &str) -> Ran {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = std::env::temp_dir().join(format!("fsdp-book-{}-{chapter}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    // Another build of the same program, to measure with.
    let program = std::env::var("FSDP_TUTORIAL").unwrap_or_else(|_| env!("CARGO_BIN_EXE_tutorial").to_owned());
    let mut child =
        Command::new(program).arg(chapter).current_dir(&folder).stdout(Stdio::piped()).spawn().expect("it starts");
    let mut stdout = child.stdout.take().unwrap();
    let reader = thread::spawn(move || {
        let mut text = String::new();
        stdout.read_to_string(&mut text).map(|_| text)
    });
    let started = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if started.elapsed() > TIME_LIMIT {
            child.kill().unwrap();
            panic!("`tutorial {chapter}` has run for {TIME_LIMIT:?}");
        }
        thread::sleep(Duration::from_millis(20));
    };
    let text = reader.join().unwrap().unwrap();
    assert!(status.success(), "`tutorial {chapter}` failed:\n{text}");
    let text = format!("$ cargo tutorial {chapter}\n{}\n", text.trim_end());
    Ran { text, folder, _turn: turn }
}

/// The text with `#` for every number that was measured, and one blank for any number of them.
fn form(text: &str) -> String {
    let mut form = String::new();
    for line in text.lines() {
        for word in line.split_whitespace() {
            match word.split_once('≈') {
                Some((before, number)) => {
                    let unit = number.trim_start_matches(|c: char| c.is_ascii_digit() || ".,-".contains(c));
                    form += &format!("{before}≈#{unit} ");
                }
                None => form += &format!("{word} "),
            }
        }
        form.push('\n');
    }
    form
}

fn stored(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("listings/output/tutorial").join(name)
}

/// Fails unless the stored file has the form of `text`. With `UPDATE_BOOK` set it is then written in place; delete it to
/// have it measured anew.
fn assert_form(name: &str, text: &str) {
    let shown = fs::read_to_string(stored(name)).unwrap_or_default();
    if form(&shown) == form(text) {
        return;
    }
    assert!(
        std::env::var_os("UPDATE_BOOK").is_some(),
        "listings/output/tutorial/{name} is out of date; look at the difference after `UPDATE_BOOK=1 cargo book-test`. \
         It should look like:\n{text}"
    );
    fs::write(stored(name), text).unwrap();
}

/// All measured numbers of a line.
fn measured(line: &str) -> Vec<f64> {
    let number = |text: &str| {
        let digits: String = text.chars().take_while(|&c| c.is_ascii_digit() || c == '.').collect();
        digits.trim_end_matches('.').parse::<f64>().unwrap()
    };
    line.split('≈').skip(1).map(number).collect()
}

/// Counted numbers of a line.
fn counted(line: &str) -> Vec<f64> {
    line.split_whitespace().filter_map(|word| word.replace(',', "").parse().ok()).collect()
}

#[test]
fn the_chapter_of_memory_measures_sixteen_bytes_for_a_parameter() {
    let ran = run("memory");
    let rows: Vec<Vec<f64>> = ran.text.lines().map(measured).filter(|row| row.len() == 5).collect();
    assert_eq!(rows.len(), 3);
    for row in rows {
        for (number, expected) in row.iter().zip([4.0, 8.0, 12.0, 16.0, 16.0]) {
            assert!(*number > expected - 0.1 && *number < expected + 1.0, "{number} for {expected}");
        }
    }
    assert_form("memory.txt", &ran.text);
}

#[test]
fn the_chapter_of_data_parallel_shows_copies() {
    let ran = run("ddp");
    assert!(ran.text.contains("the same on 4 of them") && !ran.text.contains("NOT"), "{}", ran.text);
    assert_form("ddp.txt", &ran.text);
}

#[test]
fn the_chapter_of_zero_measures_a_quarter_of_what_is_sharded() {
    let ran = run("zero");
    assert!(ran.text.contains("equal, to the last bit"), "{}", ran.text);
    let rows: Vec<_> = ran.text.lines().filter(|line| line.contains('≈')).collect();
    assert_eq!(rows.len(), 4);
    let parameters = counted(rows[0])[1];
    for (stage, row) in rows.iter().enumerate() {
        let expected = if stage == 0 { 2.0 } else { 0.5 } * parameters / 1e6;
        let optimizer = measured(row)[0];
        assert!((optimizer / expected - 1.0).abs() < 0.1, "stage {stage}: {optimizer} for {expected}");
    }
    assert_form("zero.txt", &ran.text);
}

#[test]
fn the_chapter_of_units_shows_what_gathers_when() {
    let ran = run("units");
    assert_form("units.txt", &ran.text);
}

#[test]
fn the_chapter_of_collectives_measures_more_time_for_more_bytes() {
    let ran = run("collectives");
    let rows: Vec<Vec<f64>> = ran.text.lines().map(measured).filter(|row| row.len() == 4).collect();
    for kind in [0, 2] {
        assert!(rows[rows.len() - 1][kind] > 4.0 * rows[0][kind], "{}", ran.text);
    }
    assert_form("collectives.txt", &ran.text);
}

#[test]
fn the_chapter_of_overlap_keeps_a_trace_of_every_depth() {
    let ran = run("overlap");
    for depth in [0, 1, 2] {
        let trace = ran.folder.join(format!("target/tutorial/overlap/prefetch-{depth}"));
        assert!(trace.with_extension("json").metadata().unwrap().len() > 1000);
        assert_form(&format!("overlap-{depth}.txt"), &fs::read_to_string(trace.with_extension("txt")).unwrap());
    }
    assert_form("overlap.txt", &ran.text);
}

#[test]
fn the_chapter_of_meshes_shows_blocks_and_bytes() {
    assert_form("mesh.txt", &run("mesh").text);
}

#[test]
fn the_chapter_of_precision_halves_what_is_gathered() {
    assert_form("precision.txt", &run("precision").text);
}

#[test]
fn the_chapter_of_offload_has_the_bits_of_none() {
    let ran = run("offload");
    assert!(ran.text.contains("equal, to the last bit"), "{}", ran.text);
    assert_form("offload.txt", &ran.text);
}

#[test]
fn the_chapter_of_checkpoints_goes_on_from_any_world() {
    let ran = run("resume");
    assert!(!ran.text.contains("NOT"), "{}", ran.text);
    assert_form("resume.txt", &ran.text);
}

#[test]
fn the_chapter_of_scaling_is_current() {
    assert_form("scaling.txt", &run("scaling").text);
}

#[test]
fn the_chapter_of_planning_writes_what_the_command_reads() {
    let ran = run("plan");
    let text = fs::read_to_string(ran.folder.join("target/tutorial/plan/model.json")).unwrap();
    let shape = fsdp_core::ModelShape::from_json(&text, "model.json").unwrap();
    assert_eq!(shape.parameter_len(), 2_105_345);
    assert_form("plan.txt", &ran.text);
}

#[test]
fn every_chapter_is_listed() {
    assert_form("chapters.txt", &run("").text.replace("tutorial \n", "tutorial\n"));
}
