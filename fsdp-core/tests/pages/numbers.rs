//! The numbers of the interactive pages are the command's, to the last digit, and the blocks are the library's.

use std::fs;
use std::path::Path;
use std::process::Command;

use fsdp_core::{
    Axis, ComputePrecision, MemoryEstimate, MemoryModel, Mesh, ModelShape, OptimizerKind, PartitionSpec, ShardLayout,
    Stage, TierModel,
};
use serde_json::Value;

use crate::book::opened;
use crate::browser::Browser;

/// Sets a widget to what an address says.
fn set(browser: &mut Browser, widget: &str, setting: &str) {
    browser.evaluate(&format!("fsdp.widgets.{widget}.take({setting:?})"));
}

/// The number that a widget shows under a name.
fn shown(browser: &mut Browser, name: &str) -> Value {
    let text = browser.evaluate(&format!("document.querySelector('data[data-name={name:?}]')?.value"));
    let text = text.as_str().unwrap_or_else(|| panic!("nothing is called {name}"));
    serde_json::from_str(text).unwrap_or_else(|_| Value::from(text))
}

fn assert_shown(browser: &mut Browser, setting: &str, name: &str, expected: &Value) {
    let shown = shown(browser, name);
    let is_equal = match (shown.as_f64(), expected.as_f64()) {
        (Some(shown), Some(expected)) => shown == expected,
        _ => shown == *expected,
    };
    assert!(is_equal, "{setting}: {name} is {shown}, and should be {expected}");
}

/// What the command prints that a widget shows, with the file that it shows, in a folder; `more` is added to the line.
fn printed(browser: &mut Browser, folder: &Path, more: &[&str]) -> Value {
    run(browser, folder, None, more)
}

/// The same with another `subcommand`.
fn run(browser: &mut Browser, folder: &Path, subcommand: Option<&str>, more: &[&str]) -> Value {
    let text = |browser: &mut Browser, of: &str| {
        browser.evaluate(&format!("document.querySelector('{of}').textContent")).as_str().unwrap().to_owned()
    };
    fs::write(folder.join("run.toml"), text(browser, "[data-file]")).unwrap();
    let line = text(browser, "[data-command]");
    let mut words: Vec<_> = line.split_whitespace().collect();
    assert_eq!(words[0], "fsdp", "{line}");
    words[1] = subcommand.unwrap_or(words[1]);
    let mut command = Command::new(env!("CARGO_BIN_EXE_fsdp"));
    let output = command.current_dir(folder).args(&words[1..]).args(more).arg("--json").output().unwrap();
    assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// A sequence of numbers that is the same in every run (Steele, Lea and Flood's SplitMix64, 2014).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % end
    }

    fn one_of<'a>(&mut self, items: &[&'a str]) -> &'a str {
        items[self.below(items.len() as u64) as usize]
    }
}

/// Settings that a reader tries, and some that nobody would.
fn memory_settings() -> Vec<String> {
    let mut settings = vec![
        "parameters=7e9&ranks=8".to_owned(),
        "parameters=1e13&ranks=65536&units=1000&prefetch=16&activations=1000".to_owned(),
        "parameters=1000&ranks=1&units=1&prefetch=0".to_owned(),
        "parameters=1001&ranks=4096&units=1000".to_owned(),
    ];
    let mut numbers = Numbers(10);
    for _ in 0..40 {
        settings.push(format!(
            "parameters={}&ranks={}&stage={}&precision={}&optimizer={}&units={}&prefetch={}&activations={}&device={}",
            1000 + numbers.below(10u64.pow(4 + numbers.0 as u32 % 9)),
            1 + numbers.below(300),
            numbers.below(4),
            numbers.one_of(&["f32", "bf16"]),
            numbers.one_of(&["adam", "sgd-momentum", "sgd"]),
            1 + numbers.below(100),
            numbers.below(6),
            numbers.below(40),
            numbers.one_of(&["H100", "H200", "A100", "4090"]),
        ));
    }
    settings
}

/// What the calculator shows of the stage that is chosen.
const PARTS: [&str; 6] =
    ["parameter_bytes", "gradient_bytes", "optimizer_bytes", "gathered_bytes", "reducing_bytes", "activation_bytes"];

#[test]
fn the_memory_calculator_shows_what_plan_prints() {
    let mut browser = opened("memory");
    let folder = tempfile::tempdir().unwrap();
    for setting in memory_settings() {
        set(&mut browser, "memory", &setting);
        let plan = printed(&mut browser, folder.path(), &[]);
        for (stage, of) in plan["stages"].as_array().unwrap().iter().enumerate() {
            for field in ["state_bytes", "peak_bytes"] {
                assert_shown(&mut browser, &setting, &format!("{stage}.{field}"), &of["memory"][field]);
            }
            for field in ["fits", "min_ranks"] {
                assert_shown(&mut browser, &setting, &format!("{stage}.{field}"), &of[field]);
            }
            // The parts are those of the chosen stage.
            set(&mut browser, "memory", &format!("stage={stage}"));
            for field in PARTS {
                assert_shown(&mut browser, &setting, &format!("{stage}.{field}"), &of["memory"][field]);
            }
        }
    }
}

/// What the library says of equal units of which some kinds of state lie on a disk.
fn offloaded(parameters: usize, ranks: usize, units: usize, half: bool, stage: Stage, kinds: &str) -> MemoryEstimate {
    let shape = ModelShape::even(parameters, units);
    let layouts: Vec<ShardLayout> = shape.units.iter().flat_map(|unit| unit.layouts(ranks)).collect();
    let share = |kind: &str| if kinds.split(',').any(|of| of == kind) { 1.0 } else { 0.0 };
    let model = MemoryModel {
        stage,
        optimizer: OptimizerKind::Adam,
        precision: if half { ComputePrecision::Mixed16 } else { ComputePrecision::F32 },
        largest_unit_len: shape.units.iter().map(fsdp_core::UnitShape::parameter_len).max().unwrap(),
        prefetch: 1,
        tiers: TierModel {
            parameters: if stage == Stage::Parameters { share("parameters") } else { 0.0 },
            gradients: share("gradients"),
            optimizer: share("optimizer"),
            // They lie in the host's memory.
            buffer_bytes: 0,
        },
        ..MemoryModel::new(0)
    };
    model.exact(&layouts, 0)
}

#[test]
fn the_memory_calculator_knows_what_lies_on_a_disk() {
    let mut browser = opened("memory");
    let folder = tempfile::tempdir().unwrap();
    for kinds in ["", "optimizer", "gradients", "parameters", "optimizer,gradients", "optimizer,gradients,parameters"] {
        for (parameters, ranks, units) in [(7_000_000_000, 8, 32), (1_000_003, 7, 5), (70_000_000_000, 64, 80)] {
            for stage in Stage::ALL {
                let half = parameters == 1_000_003;
                let precision = if half { "bf16" } else { "f32" };
                let setting = format!(
                    "parameters={parameters}&ranks={ranks}&units={units}&precision={precision}&offload={kinds}&stage={}",
                    stage.number()
                );
                set(&mut browser, "memory", &setting);
                let estimate = offloaded(parameters, ranks, units, half, stage, kinds);
                for (field, bytes) in [
                    ("parameter_bytes", estimate.parameter_bytes),
                    ("gradient_bytes", estimate.gradient_bytes),
                    ("optimizer_bytes", estimate.optimizer_bytes),
                    ("gathered_bytes", estimate.gathered_bytes),
                    ("reducing_bytes", estimate.in_flight_bytes),
                    ("tier_bytes", estimate.tier_bytes),
                    ("peak_bytes", estimate.peak_or_known_bytes()),
                ] {
                    assert_shown(&mut browser, &setting, &format!("{}.{field}", stage.number()), &bytes.into());
                }
                // The file is one that the project accepts.
                printed(&mut browser, folder.path(), &[]);
            }
        }
    }
}

fn step_settings() -> Vec<String> {
    let mut settings = vec![
        "ranks=4&units=8&prefetch=1&alpha=10&bandwidth=25&tokens=2048&slower=1".to_owned(),
        "ranks=1&units=1&prefetch=0&slower=1".to_owned(),
        "ranks=1&units=3&slower=2".to_owned(),
        "ranks=16384&units=24&prefetch=24&alpha=0&bandwidth=10000&tokens=1".to_owned(),
    ];
    let mut numbers = Numbers(1);
    for _ in 0..40 {
        settings.push(format!(
            "ranks={}&units={}&prefetch={}&alpha={}&bandwidth={}&tokens={}&slower={}",
            1 + numbers.below(64),
            1 + numbers.below(24),
            numbers.below(7),
            numbers.one_of(&["0", "3.4", "10", "250", "5000"]),
            numbers.one_of(&["0.5", "3.125", "25", "31.5", "450"]),
            1 + numbers.below(9000),
            numbers.one_of(&["1", "1", "1.05", "1.5", "3"]),
        ));
    }
    settings
}

#[test]
fn the_step_shows_what_simulate_prints() {
    let mut browser = opened("step");
    let folder = tempfile::tempdir().unwrap();
    for setting in step_settings() {
        for stage in 0..4 {
            set(&mut browser, "step", &format!("{setting}&stage={stage}"));
            let report = printed(&mut browser, folder.path(), &[]);
            assert_eq!(report["stage"], stage);
            for field in
                ["step_s", "compute_s", "exposed_s", "communication_s", "overlap", "sent_bytes", "peak_gathered_bytes"]
            {
                assert_shown(&mut browser, &setting, &format!("{stage}.{field}"), &report[field]);
            }
        }
        // What `plan` has of it, for ranks that are alike.
        set(&mut browser, "step", "slower=1");
        let plan = run(&mut browser, folder.path(), Some("plan"), &[]);
        for stage in 0..4 {
            let step = &plan["stages"][stage]["step"];
            assert_shown(&mut browser, &setting, &format!("{stage}.messages"), &step["num_messages"]);
            assert_shown(&mut browser, &setting, &format!("{stage}.step_s"), &step["step_s"]);
        }
    }
}

/// A span of a step: row, what it was spent on, begin and end in seconds.
type Span = (u64, String, f64, f64);

#[test]
fn the_picture_of_a_step_is_the_simulated_trace() {
    let mut browser = opened("step");
    let folder = tempfile::tempdir().unwrap();
    for stage in 0..4 {
        for setting in ["ranks=4&units=8&prefetch=2&slower=1", "ranks=3&units=5&prefetch=1&bandwidth=2&slower=1"] {
            set(&mut browser, "step", &format!("{setting}&stage={stage}"));
            printed(&mut browser, folder.path(), &["--trace", "trace.json"]);
            let trace: Value = serde_json::from_slice(&fs::read(folder.path().join("trace.json")).unwrap()).unwrap();
            let events = trace["traceEvents"].as_array().unwrap().iter().filter(|event| event["ph"] == "X");
            let recorded = events.map(|event| {
                let (start, len) = (event["ts"].as_f64().unwrap() / 1e6, event["dur"].as_f64().unwrap() / 1e6);
                (event["tid"].as_u64().unwrap(), event["name"].as_str().unwrap().to_owned(), start, start + len)
            });
            let recorded: Vec<Span> = recorded.collect();
            let drawn = browser.evaluate(
                "Array.from(document.querySelectorAll('#fsdp-step .timeline [data-span]')).map((span) => span.dataset.span)",
            );
            let drawn: Vec<Span> = drawn
                .as_array()
                .unwrap()
                .iter()
                .map(|text| serde_json::from_str(text.as_str().unwrap()).unwrap())
                .collect();
            // Of what begins for the next step, the trace knows nothing yet; of what has begun before, only the end.
            for (row, name, start, end) in &recorded {
                let near = |one: f64, other: f64| (one.max(0.0) - other.max(0.0)).abs() < 2e-9;
                let is_it = |of: &&Span| of.0 == *row && of.1 == *name && near(of.2, *start) && near(of.3, *end);
                assert!(
                    *end <= 0.0 || drawn.iter().any(|of| is_it(&of)),
                    "stage {stage}, {setting}: {name} from {start} to {end} is not drawn: {drawn:?}"
                );
            }
            let computed =
                |spans: &[Span]| spans.iter().filter(|span| span.0 == 0).map(|span| span.1.clone()).collect();
            let (was, is): (Vec<String>, Vec<String>) = (computed(&recorded), computed(&drawn));
            assert_eq!(was, is, "stage {stage}, {setting}");
        }
    }
}

#[test]
fn the_mesh_explorer_shows_the_blocks_that_ranks_hold() {
    let mut browser = opened("mesh");
    for shape in [&[7usize, 4][..], &[5, 4], &[12], &[4, 3, 5], &[1, 1], &[64, 8], &[3, 2, 8]] {
        for (replicate, shard, is_turned) in
            [(1, 3, false), (2, 3, false), (2, 3, true), (1, 1, false), (4, 8, false), (3, 5, true)]
        {
            for cut in 0..shape.len() {
                let order = if is_turned { "shard, replicate" } else { "replicate, shard" };
                let sizes: Vec<_> = shape.iter().map(usize::to_string).collect();
                let setting = format!(
                    "shape={}&cut={cut}&shard={shard}&replicate={replicate}&order={order}&rank=0",
                    sizes.join(",")
                );
                set(&mut browser, "mesh", &setting);
                let axes = [(Axis::Replicate, replicate), (Axis::Shard, shard)];
                let axes = axes.into_iter().filter(|(axis, size)| *axis == Axis::Shard || *size > 1);
                let mut axes: Vec<_> = axes.collect();
                if is_turned {
                    axes.reverse();
                }
                let mesh = Mesh::new(axes).unwrap();
                let entries = (0..=cut).map(|dim| (dim == cut).then_some("shard"));
                let layout = PartitionSpec::parse(entries).resolve("weight", shape, &mesh).unwrap();
                let joined = |numbers: &[usize]| {
                    let words: Vec<_> = numbers.iter().map(usize::to_string).collect();
                    // One number alone is read as a number.
                    serde_json::from_str(&words.join(" ")).unwrap_or_else(|_| Value::from(words.join(" ")))
                };
                for rank in 0..mesh.world_size() {
                    let block = mesh.coordinate(Axis::Shard, rank);
                    let rows = layout.rows(block);
                    for (name, expected) in [
                        ("coordinates", joined(&mesh.coordinates(rank))),
                        ("rows", joined(&[rows.start, rows.end])),
                        ("shape", joined(&layout.shard_shape(block))),
                        ("len", layout.shard_len(block).into()),
                        ("runs", layout.runs(block).count().into()),
                        ("shard", joined(&mesh.group(Axis::Shard, rank))),
                        ("replicate", joined(&mesh.group(Axis::Replicate, rank))),
                    ] {
                        assert_shown(&mut browser, &setting, &format!("{rank}.{name}"), &expected);
                    }
                }
                // The picture: each element in row-major order, with the number of its block.
                let drawn = browser.evaluate(
                    "Array.from(document.querySelectorAll('#fsdp-mesh .element')).map((of) => Number(of.dataset.block))",
                );
                let mut owner = vec![usize::MAX; layout.full_len()];
                for block in 0..shard {
                    layout.runs(block).flatten().for_each(|element| owner[element] = block);
                }
                assert_eq!(drawn, serde_json::to_value(owner).unwrap(), "{setting}");
            }
        }
    }
}

#[test]
fn the_mesh_explorer_refuses_as_the_library_does() {
    let mut browser = opened("mesh");
    for (shape, cut) in [(&[12usize][..], 1), (&[7, 4], 2)] {
        let sizes: Vec<_> = shape.iter().map(usize::to_string).collect();
        set(&mut browser, "mesh", &format!("shape={}&cut={cut}", sizes.join(",")));
        let entries = (0..=cut).map(|dim| (dim == cut).then_some("shard"));
        let refusal = PartitionSpec::parse(entries).resolve("weight", shape, &Mesh::one_dim(3)).unwrap_err();
        let shown = browser.evaluate("document.querySelector('#fsdp-mesh .refused').textContent");
        assert_eq!(shown, refusal.to_string());
    }
}

/// The number that a widget shows under a name, after a button of the lesson was pressed.
fn after(browser: &mut Browser, button: &str, name: &str) -> f64 {
    let pressed = browser.evaluate(&format!(
        "(() => {{ const button = [...document.querySelectorAll('.fsdp-lesson li button')]
            .find((button) => button.textContent.replace(/\\s+/g, ' ') === {button:?});
            button?.click(); return button !== undefined; }})()"
    ));
    assert_eq!(pressed, true, "no button says {button}");
    let value = shown(browser, name);
    value.as_f64().unwrap_or_else(|| f64::from(u8::from(value == true)))
}

#[test]
fn what_the_lesson_on_memory_says_is_so() {
    let mut browser = opened("memory");
    let mut of = |button: &str, name: &str| after(&mut browser, button, name);
    assert_eq!(of("7 billion at stage 0", "0.state_bytes"), 16.0 * 7e9);
    assert_eq!(of("7 billion at stage 0", "0.optimizer_bytes"), 8.0 * 7e9);
    assert_eq!((of("7 billion at stage 0", "0.fits"), of("512 ranks", "0.fits")), (0.0, 0.0));
    assert_eq!(of("7 billion at stage 0", "0.peak_bytes"), of("512 ranks", "0.peak_bytes"));
    let whole = [of("Stage 1", "0.peak_bytes"), of("Stage 1", "1.parameter_bytes"), of("Stage 1", "1.gradient_bytes")];
    assert_eq!((whole[1], whole[2]), (28e9, 28e9));
    assert_eq!(of("Stage 1", "1.optimizer_bytes"), 56e9 / 8.0);
    assert_eq!((of("stage 2", "2.gradient_bytes"), of("stage 3", "3.parameter_bytes")), (28e9 / 8.0, 28e9 / 8.0));
    assert!(of("stage 3", "3.gathered_bytes") < of("stage 3", "3.state_bytes") / 5.0);
    assert_eq!(of("One unit", "3.gathered_bytes"), 28e9);
    assert_eq!(of("32 of them", "3.gathered_bytes"), 2.0 * 28e9 / 32.0);
    assert_eq!(of("Prefetch 8 units", "3.gathered_bytes"), 9.0 * 28e9 / 32.0);
    assert_eq!(of("bf16", "0.state_bytes"), 16.0 * 7e9);
    assert_eq!(of("bf16", "0.reducing_bytes"), 28e9 / 32.0);
    let without = of("32 of them", "3.peak_bytes");
    let with = of("24 GB of activations", "3.peak_bytes");
    assert!(without < with && with < without + 24e9, "{without} and {with}");
    for stage in 0..4 {
        assert_eq!(of("70 billion", &format!("{stage}.fits")), 0.0);
        assert_eq!(of("optimizer on a disk", &format!("{stage}.fits")), f64::from(u8::from(stage == 3)));
    }
}

#[test]
fn what_the_lesson_on_a_step_says_is_so() {
    let mut browser = opened("step");
    let mut of = |button: &str, name: &str| after(&mut browser, button, name);
    let (none, one, four) =
        (of("No prefetch", "3.exposed_s"), of("Depth 1", "3.exposed_s"), of("depth 4", "3.exposed_s"));
    assert!(one < none / 5.0 && four == one, "{none}, {one} and {four}");
    assert!(of("depth 4", "3.peak_gathered_bytes") > of("Depth 1", "3.peak_gathered_bytes"));
    let passes = |bytes: f64| bytes / (4e9 * 3.0 / 4.0);
    assert_eq!(passes(of("Stage 0", "0.sent_bytes")), 2.0);
    assert!((2.8..3.0).contains(&passes(of("Stage 3", "3.sent_bytes"))));
    assert!(of("Stage 1", "1.overlap") < 0.05 && of("stage 2", "2.overlap") > 0.3);
    assert!(of("Stage 1", "1.exposed_s") > of("stage 2", "2.exposed_s"));
    assert!(of("stage 2", "2.exposed_s") > of("Stage 3", "3.exposed_s"));
    assert!(of("A slow link", "3.communication_s") > of("A slow link", "3.compute_s"));
    let (slow, deep) = (of("A slow link", "3.exposed_s"), of("no depth", "3.exposed_s"));
    assert!(deep > 0.9 * slow, "{slow} and {deep}");
    assert!(of("More tokens", "3.overlap") > 0.85 && of("A slow link", "3.overlap") < 0.6);
    assert_eq!(of("More tokens", "3.sent_bytes"), of("A slow link", "3.sent_bytes"));
    let (long, few) = (of("A long latency", "3.step_s"), of("Two units", "3.step_s"));
    assert!(few < long && of("A long latency", "3.exposed_s") > 0.75 * long, "{long} and {few}");
    assert!(of("Two units", "3.peak_gathered_bytes") > of("A long latency", "3.peak_gathered_bytes"));
    assert!(of("A slow rank", "3.exposed_s") > 3.0 * of("Stage 3", "3.exposed_s"));
}
