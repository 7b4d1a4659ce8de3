//! The command `fsdp`, from outside: what it prints, what it refuses, and what the book shows of it.

#![allow(clippy::unwrap_used, reason = "all of this is a test, its helpers too")]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use fsdp_core::{Config, FieldRule, Mesh, ModelShape, ParamSpec, Plan, Stage, WrapPolicy};
use serde_json::Value;

pub(crate) fn fsdp(arguments: &[&str]) -> (i32, String, String) {
    let Output { status, stdout, stderr } = Command::new(env!("CARGO_BIN_EXE_fsdp")).args(arguments).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (status.code().unwrap(), text(&stdout), text(&stderr))
}

/// What a good command prints.
fn printed(arguments: &[&str]) -> String {
    let (code, stdout, stderr) = fsdp(arguments);
    assert_eq!((code, stderr.as_str()), (0, ""), "{arguments:?}");
    stdout
}

#[test]
fn a_reader_that_is_gone_is_no_error() {
    for arguments in
        [&["completions", "bash"][..], &["man"], &["config", "--words"], &["plan", "--params", "1e9", "--gpus", "8"]]
    {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let Output { status, stderr, .. } =
            Command::new(env!("CARGO_BIN_EXE_fsdp")).args(arguments).stdout(writer).output().unwrap();
        let stderr = String::from_utf8_lossy(&stderr);
        assert_eq!((status.code(), &*stderr), (Some(0), ""), "{arguments:?}");
    }
}

#[test]
fn an_output_that_cannot_be_written_is_one() {
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let Output { status, stderr, .. } =
        Command::new(env!("CARGO_BIN_EXE_fsdp")).args(["config", "--words"]).stdout(full).output().unwrap();
    let stderr = String::from_utf8_lossy(&stderr);
    assert!(status.code() == Some(1) && stderr.starts_with("error: standard output cannot be written: "), "{stderr}");
}

/// What a bad command says.
fn refused(arguments: &[&str]) -> String {
    let (code, stdout, stderr) = fsdp(arguments);
    assert!(code == 1 && stdout.is_empty(), "{arguments:?}: {code}\n{stdout}\n{stderr}");
    stderr.strip_prefix("error: ").unwrap().trim_end().to_owned()
}

fn json(arguments: &[&str]) -> Value {
    serde_json::from_str(&printed(arguments)).unwrap()
}

/// Compares with what the book shows; with `UPDATE_BOOK` set it is written in place.
fn assert_shown(file: &str, arguments: &[&str]) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../book/listings/output").join(file);
    let text = match file.ends_with(".md") {
        true => printed(arguments),
        false => format!("$ fsdp {}\n{}", arguments.join(" "), printed(arguments)),
    };
    if std::env::var_os("UPDATE_BOOK").is_some() {
        fs::write(&path, &text).unwrap();
    }
    let shown = fs::read_to_string(&path).unwrap_or_default();
    assert!(shown == text, "{file} is out of date; write it anew with UPDATE_BOOK=1 and look at it. It is:\n{text}");
}

/// A column of the table that begins with this header, by the column's name.
fn column(text: &str, table: &str, name: &str) -> Vec<String> {
    let header = text.lines().position(|line| line.starts_with(table) && line.contains(name)).unwrap();
    let lines: Vec<&str> = text.lines().skip(header).collect();
    let at = lines[0].split_whitespace().position(|cell| cell == name).unwrap();
    let rows = lines[1..].iter().take_while(|line| !line.is_empty());
    rows.map(|row| row.split_whitespace().nth(at).unwrap().to_owned()).collect()
}

#[test]
fn seven_billion_parameters_on_eight_ranks_hold_what_the_formulas_say() {
    // 16P, 8P + 8P/N, 4P + 12P/N and 16P/N bytes: ZeRO, arXiv:1910.02054, with float32 for mixed precision.
    let text = printed(&["plan", "--params", "7e9", "--gpus", "8"]);
    assert_eq!(column(&text, "stage", "state"), ["104.3", "58.7", "35.9", "13.0"]);
    assert!(text.contains("\nMemory of a rank, GiB; a device has 74.5\n"), "{text}");
    assert_eq!(column(&text, "stage", "fits"), ["no", "yes", "yes", "yes"]);
}

#[test]
fn the_table_of_the_zero_paper_is_reproduced() {
    // Rajbhandari, Rasley, Ruwase and He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020,
    // arXiv:1910.02054, figure 1: 7.5e9 parameters on 64 devices, mixed-precision Adam: 120, 31.4, 16.6 and 1.9 GB.
    let text = printed(&["plan", "--params", "7.5B", "--gpus", "64", "--precision", "bf16", "--decimal"]);
    assert_eq!(column(&text, "stage", "state"), ["120.0", "31.4", "16.6", "1.9"]);
    assert!(text.contains("bf16 with float32 master weights"), "{text}");
}

#[test]
fn json_has_the_same_numbers_in_bytes() {
    let plan = json(&["plan", "--params", "7e9", "--gpus", "8", "--json"]);
    let stages = plan["stages"].as_array().unwrap();
    let state: Vec<u64> = stages.iter().map(|of| of["memory"]["state_bytes"].as_u64().unwrap()).collect();
    let p = 7_000_000_000u64;
    assert_eq!(state, [16 * p, 8 * p + p, 4 * p + 12 * p / 8, 2 * p]);
    for of in stages {
        let (memory, step) = (&of["memory"], &of["step"]);
        assert!(memory["peak_bytes"].as_u64() >= memory["state_bytes"].as_u64().map(|bytes| bytes / 2), "{memory}");
        let number = |name: &str| step[name].as_f64().unwrap();
        assert!(number("step_s") >= number("compute_s") && number("exposed_s") <= number("communication_s") + 1e-9);
    }
    // Stage 3 sends 1.5 times what the others send, less the last unit's second gather.
    let sent: Vec<f64> = stages.iter().map(|of| of["step"]["sent_bytes"].as_f64().unwrap()).collect();
    assert_eq!((sent[0], sent[1]), (sent[1], sent[2]));
    assert!((1.48..1.5).contains(&(sent[3] / sent[2])), "{sent:?}");
    assert_eq!(plan["advice"]["sharding_is_worth_it"], true);
}

#[test]
fn a_small_model_is_told_not_to_shard() {
    let text = printed(&["plan", "--params", "100M", "--gpus", "8", "--device", "H200"]);
    assert!(text.contains("\nTake stage 0 (DDP: nothing sharded): sharding is not worth it, "), "{text}");
    let none = printed(&["plan", "--params", "1T", "--gpus", "8", "--device", "4090"]);
    assert!(none.contains("\nNo stage fits: the smallest needs "), "{none}");
}

#[test]
fn a_transformer_has_activations_that_recomputation_takes_away() {
    let base =
        ["plan", "--layers", "12", "--width", "768", "--sequence", "1024", "--batch", "8", "--gpus", "4", "--json"];
    let plain = json(&base);
    let again = json(&[&base[..], &["--recompute"]].concat());
    let of = |plan: &Value, what: &str| plan["stages"][3]["memory"][what].as_u64().unwrap();
    assert_eq!(plain["parameters"], 163_037_184);
    assert!(of(&again, "activation_bytes") * 2 < of(&plain, "activation_bytes"));
    assert!(of(&again, "peak_bytes") < of(&plain, "peak_bytes"));
    let compute = |plan: &Value| plan["stages"][3]["step"]["compute_s"].as_f64().unwrap();
    assert!(compute(&again) > 1.2 * compute(&plain), "a third more in the blocks");
}

#[test]
fn the_page_is_one_file_with_a_bar_for_each_stage_and_nothing_from_elsewhere() {
    let dir = tempfile::tempdir().unwrap();
    let page = dir.path().join("plan.html");
    let arguments =
        ["plan", "--layers", "6", "--width", "512", "--gpus", "8", "--html", page.to_str().unwrap()].map(str::to_owned);
    printed(&arguments.each_ref().map(String::as_str));
    let page = fs::read_to_string(page).unwrap();
    check_page(&page, 4 * 4 + 1 + 3);
    assert!(!page.contains("passing through") && !page.contains(">tier<"));

    // With offload, a row of what moves, and what passes through memory.
    let file = dir.path().join("offload.html");
    let offload = ["--offload", "optimizer=nvme", "--html", file.to_str().unwrap()].map(str::to_owned);
    let arguments = [&arguments[..7], &offload].concat();
    printed(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    let page = fs::read_to_string(file).unwrap();
    // The optimizer's state is gone from all stages, and passes through all of them.
    check_page(&page, 4 * 4 + 1 + 3);
    assert_eq!(page.matches(">tier</text>").count(), 4);
    assert!(page.contains("passing through") && page.contains("<title>read blocks.3: ") && page.contains("on disk"));
}

/// What holds for every page; `num_parts` are the pieces of all bars.
fn check_page(page: &str, num_parts: usize) {
    for needs_network in ["http:", "https:", "src=", "href=", "@import", "url(", "<script"] {
        assert!(!page.contains(needs_network), "the page has `{needs_network}`");
    }
    // Every element that opens closes, so that any browser shows it.
    for tag in ["svg", "rect", "text", "title", "table", "tr", "td", "p", "div", "body", "html", "style"] {
        let opened = page.matches(&format!("<{tag} ")).count() + page.matches(&format!("<{tag}>")).count();
        assert_eq!(opened, page.matches(&format!("</{tag}>")).count(), "<{tag}>");
        assert!(opened > 0, "<{tag}>");
    }
    assert_eq!(page.matches("<svg ").count(), 5, "the bars, and a timeline for each stage");
    assert_eq!(page.matches("class=\"device\"").count(), 1);
    // Parameters, optimizer state, gradients and activations at all stages; gathered units at one, reduced ones at three.
    assert_eq!(page.matches("class=\"part\"").count(), num_parts);
    // Nothing begins left of its row, or ends right of the picture.
    let numbers = |name: &str, line: &str| -> f64 {
        line.split(&format!(" {name}=\"")).nth(1).unwrap().split('"').next().unwrap().parse().unwrap()
    };
    let rects: Vec<_> = page.lines().filter(|line| line.starts_with("<rect ")).collect();
    assert!(rects.len() > 100, "{}", rects.len());
    for rect in rects {
        let (x, width) = (numbers("x", rect), numbers("width", rect));
        assert!(x >= 90.0 && width >= 0.0 && x + width <= 960.5, "{rect}");
    }
}

#[test]
fn the_shape_file_of_a_plan_is_a_model() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("model.json");
    let param = |path: &str, shape: &[usize]| ParamSpec {
        path: path.split('.').map(str::to_owned).collect(),
        shape: shape.to_vec(),
        trainable: true,
        ..ParamSpec::default()
    };
    let params = [param("blocks.0.weight", &[500, 64]), param("blocks.1.weight", &[500, 64]), param("norm", &[64])];
    let policy = WrapPolicy::new().field("blocks", FieldRule::units());
    let plan = Plan::new(&policy, &params, &Mesh::one_dim(3), Stage::Parameters).unwrap();
    ModelShape::of(&plan).write(&file).unwrap();
    let plan = json(&["plan", "--shape", file.to_str().unwrap(), "--gpus", "3", "--json"]);
    assert_eq!(plan["parameters"], 64_064);
    // The first rank has the largest blocks: 167 rows of 500, and 22 of 64 elements.
    assert_eq!(plan["stages"][3]["memory"]["state_bytes"], 16 * (2 * 167 * 64 + 22));
}

#[test]
fn a_configuration_gives_ranks_mesh_and_prefetch() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("run.toml");
    fs::write(&file, "world_size = 8\nmesh = { replicate = 2, shard = 4 }\nprefetch = { forward = 2, backward = 0 }\n")
        .unwrap();
    let file = file.to_str().unwrap();
    let text = printed(&["plan", "--params", "7e9", "--config", file]);
    assert!(text.contains("ranks      8: { replicate = 2, shard = 4 }\n"), "{text}");
    assert!(text.contains("settings   prefetch 2 and 0, 1 micro-batches\n"), "{text}");
    let more = printed(&["plan", "--params", "7e9", "--config", file, "--gpus", "16", "--replicate", "4"]);
    assert!(more.contains("ranks      16: { replicate = 4, shard = 4 }\n"), "{more}");
}

/// A model of 26e9 parameters on 16 ranks, whose gradients are kept in whole until the last micro-batch, or reduced at each.
#[test]
fn the_plan_tells_what_gradients_that_are_not_reduced_at_each_micro_batch_hold() {
    let dir = tempfile::tempdir().unwrap();
    let gradients = |accumulate: &str| -> Vec<u64> {
        let file = dir.path().join(format!("{accumulate}.toml"));
        let training = format!("gradient_accumulation = 4\naccumulate = \"{accumulate}\"");
        fs::write(&file, format!("world_size = 16\n[training]\n{training}\n")).unwrap();
        let plan = json(&["plan", "--params", "26e9", "--config", file.to_str().unwrap(), "--json"]);
        let stages = plan["stages"].as_array().unwrap();
        stages.iter().map(|of| of["memory"]["gradient_bytes"].as_u64().unwrap()).collect()
    };
    let (whole, block) = (4 * 26_000_000_000_u64, 4 * 26_000_000_000_u64 / 16);
    assert_eq!(gradients("reduced"), [whole, whole, block, block]);
    assert_eq!(gradients("local"), [whole; 4]);
}

#[test]
fn what_cannot_be_planned_says_what_to_write() {
    assert_eq!(
        refused(&["plan", "--params", "7e9"]),
        "the number of ranks is not given; add --gpus N, or --config FILE with a world_size"
    );
    assert_eq!(
        refused(&["plan", "--gpus", "8"]),
        "there is no model; give --params COUNT, --shape FILE, or --layers N with --width N"
    );
    assert_eq!(
        refused(&["plan", "--params", "7e9", "--gpus", "8", "--device", "H900"]),
        "--device: `H900` is not known; take one of H100, H200, A100, 4090, or --device-memory and --flops"
    );
    assert!(
        refused(&["plan", "--params", "7e9", "--gpus", "8", "--link", "string"])
            .starts_with("--link: `string` is not known; take one of nvlink4, nvlink3, pcie5, pcie4, "),
    );
    assert_eq!(
        refused(&["plan", "--params", "7e9", "--gpus", "8", "--replicate", "3"]),
        "--replicate: 3 copies do not divide 8 ranks; take a divisor"
    );
    assert_eq!(
        refused(&["plan", "--layers", "2", "--width", "100", "--heads", "3", "--gpus", "2"]),
        "--heads: 3 heads do not divide a width of 100; take a divisor of it"
    );
    assert!(refused(&["plan", "--shape", "absent.json", "--gpus", "2"]).starts_with("absent.json: No such file"));
    assert!(
        refused(&["plan", "--params", "1e9", "--gpus", "2", "--html", "/absent/a.html"])
            .starts_with("--html: /absent/")
    );
    let (code, _, stderr) = fsdp(&["plan", "--params", "seven", "--gpus", "8"]);
    assert_eq!(code, 2);
    assert!(stderr.contains("`seven` is no number of parameters; write one like 7e9, 7.5B or 350M"), "{stderr}");
    assert_eq!(fsdp(&["plan", "--params", "1e9", "--layers", "2", "--width", "8", "--gpus", "8"]).0, 2, "one model");
    assert_eq!(
        refused(&["simulate", "--params", "1e9", "--gpus", "4", "--straggler", "4:2"]),
        "there is no rank 4 among 4; ranks count from 0"
    );
}

#[test]
fn a_profile_prices_collectives_and_needs_the_speed_of_a_rank() {
    let dir = tempfile::tempdir().unwrap();
    let profile = dir.path().join("profile.json");
    let profile = profile.to_str().unwrap();
    let text = printed(&["bench", "--ranks", "2", "--max-size", "256KiB", "--repetitions", "2", "--out", profile]);
    assert!(text.contains("all-gather ") && text.contains("memory, copied by all ranks at once: "), "{text}");
    let plan_for =
        |gpus| ["plan", "--layers", "2", "--width", "64", "--sequence", "64", "--profile", profile, "--gpus", gpus];
    let plan = plan_for("2");
    assert!(refused(&plan).starts_with("with --profile, the speed of a rank is not known; measure it with "));
    let measured = printed(&[&plan[..], &["--pass-s", "0.05", "--optimizer-s", "0.002"]].concat());
    assert!(measured.contains("measured 2 ranks") && measured.contains("50.00 ms a micro-batch"), "{measured}");
    assert!(measured.contains("the size of a device is not given"), "{measured}");
    let offload = ["--offload", "optimizer=nvme", "--pass-s", "0.05", "--optimizer-s", "0.002"];
    assert!(
        refused(&[&plan[..], &offload].concat()).starts_with("the profile has no disk, and something is offloaded")
    );

    // With the disk and the step of one rank in it, nothing else is needed.
    let report = dir.path().join("run.json");
    let parameters = 2 * (12 * 64 * 64 + 13 * 64) + (2 * 50257 + 64 + 2) * 64;
    let text = format!(
        r#"{{"config": {{"world_size": 1, "threads_per_rank": 1, "training": {{"gradient_accumulation": 1}}}},
        "num_cores": 2, "num_parameters": {parameters}, "tokens_per_step": 128, "typical":
        {{"step": {{"wall_s": 0.5, "cpu_s": 0.4}}, "optimizer": {{"wall_s": 0.1, "cpu_s": 0.1}}}}}}"#
    );
    fs::write(&report, text).unwrap();
    let (report, disk) = (report.to_str().unwrap(), dir.path().to_str().unwrap());
    let more = ["--nvme-path", disk, "--report", report];
    let bench = ["bench", "--ranks", "2", "--max-size", "256KiB", "--repetitions", "2", "--out", profile];
    let text = printed(&[&bench[..], &more].concat());
    assert!(
        text.contains("disk, used by all ranks at once: ") && text.contains("step of one rank: 400.00 ms"),
        "{text}"
    );
    let text = printed(&[&plan[..], &["--offload", "optimizer=nvme"]].concat());
    assert!(
        text.contains(
            "\none rank   200.00 ms a micro-batch of 64 tokens and 100.00 ms a step of all parameters, among "
        ),
        "{text}"
    );
    let crowded = printed(&[&plan_for("8")[..], &["--offload", "optimizer=nvme"]].concat());
    assert!(
        crowded.contains("\none rank   600.00 ms a micro-batch of 64 tokens and 400.00 ms a step of "),
        "{crowded}"
    );
    assert!(text.contains("\noffload    optimizer on disk\n") && text.contains("for each rank, as measured"), "{text}");
    let other = refused(&["plan", "--params", "1e6", "--gpus", "2", "--profile", profile]);
    assert!(
        other.starts_with(
            "the step in the profile is of a model with 6,537,088 parameters, and this one has 1,000,000; "
        ),
        "{other}"
    );
}

#[test]
fn offload_is_part_of_the_plan_memory_traffic_and_time() {
    let base = ["plan", "--params", "70e9", "--gpus", "8", "--precision", "bf16"];
    let offload = [&base[..], &["--offload", "optimizer=nvme,gradients=cpu"]].concat();
    let text = printed(&offload);
    assert!(text.contains("\noffload    optimizer on disk, gradients in host memory\n"), "{text}");
    assert!(
        text.contains("host       63.0 GB/s each way: pcie5 (") && text.contains(", shared by 8 ranks: pm9a3 ("),
        "{text}"
    );
    // 12 bytes of each of 70e9 / 8 parameters on disk, 2 in host memory with the buffers for what moves.
    assert_eq!(column(&text, "stage", "disk")[3], "97.8");
    assert_eq!(column(&text, "stage", "host")[3], "16.3");
    let step = text.split("\nA step\n\n").nth(1).unwrap();
    assert!(step.starts_with("stage") && step.contains("moved") && step.contains("waits"), "{step}");

    let json = |arguments: &[&str]| json(&[arguments, &["--json"]].concat());
    let (with, without) = (json(&offload), json(&base));
    let of = |plan: &Value, path: &str| plan["stages"][3].pointer(path).unwrap().as_f64().unwrap();
    let rank = 70e9 / 8.0;
    assert_eq!(of(&with, "/memory/optimizer_bytes"), 0.0);
    assert_eq!(of(&with, "/memory/nvme_bytes"), 12.0 * rank);
    assert!(of(&with, "/memory/peak_bytes") < 0.5 * of(&without, "/memory/peak_bytes"));
    assert_eq!(of(&with, "/step/moved/nvme/read_bytes"), 12.0 * rank);
    assert_eq!(of(&with, "/step/moved/nvme/written_bytes"), 12.0 * rank);
    // A gradient is written, looked at for the norm, and read for the step.
    assert_eq!(of(&with, "/step/moved/host/written_bytes"), 2.0 * rank);
    assert_eq!(of(&with, "/step/moved/host/read_bytes"), 4.0 * rank);
    let seconds = 12.0 * rank * 8.0 * (1.0 / 6.5e9 + 1.0 / 3.5e9);
    assert!(of(&with, "/step/step_s") > seconds, "eight ranks share a disk");
    assert!((of(&with, "/step/tier_wait_s") / of(&with, "/step/step_s") - 1.0).abs() < 0.2);
    let faster = json(&[&offload[..], &["--nvme", "9100pro", "--nvme-disks", "8"]].concat());
    assert!(of(&faster, "/step/step_s") < 0.2 * of(&with, "/step/step_s"));
    // Fewer devices are enough.
    assert!(of(&with, "/min_ranks") < of(&without, "/min_ranks"));
    // What is said on the command line and in a configuration is the same.
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("run.toml");
    let offload = "[offload]\noptimizer = \"nvme\"\ngradients = \"cpu\"\nnvme_path = \"/nvme/run\"\n";
    fs::write(&file, format!("world_size = 8\n[precision]\nparameters = \"bf16\"\n{offload}")).unwrap();
    assert_eq!(json(&["plan", "--params", "70e9", "--config", file.to_str().unwrap()]), with);
    assert!(
        refused(&["plan", "--params", "1e9", "--gpus", "2", "--offload", "optimizer=nvme", "--nvme", "floppy"])
            .starts_with("--nvme: `floppy` is not known; take one of pm9a3, 990pro, 9100pro, or --nvme-read "),
    );
}

#[test]
fn a_simulation_with_offload_shows_reads_and_writes_and_tunes() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("trace.json");
    let base = ["simulate", "--params", "30e9", "--gpus", "16", "--precision", "bf16", "--offload", "optimizer=nvme"];
    let text = printed(&[&base[..], &["--trace", trace.to_str().unwrap()]].concat());
    assert!(text.contains("\nmoves         ") && text.contains(" to disk\nwaits         "), "{text}");
    let trace = fs::read_to_string(trace).unwrap();
    assert!(trace.contains("\"read units.3\"") && trace.contains("\"write units.3\""));
    let tuned = printed(&[&base[..], &["--stage", "2", "--tune", "--offload", "parameters=cpu"]].concat());
    let (_, config) = tuned.split_once("As a configuration:\n\n").unwrap();
    let config = Config::from_toml(config, "printed").unwrap();
    assert_eq!(config.offload.optimizer, fsdp_core::TierShares::NVME);
    assert_eq!(config.offload.parameters, fsdp_core::TierShares::DEVICE, "stage 2 has no blocks of parameters");
}

#[test]
fn a_simulation_writes_a_trace_and_tells_stragglers_apart() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("trace.json");
    let base = ["simulate", "--params", "1e9", "--gpus", "16", "--json"];
    let alike = json(&[&base[..], &["--trace", trace.to_str().unwrap(), "--trace-ranks", "0,5"]].concat());
    let slow = json(&[&base[..], &["--straggler", "3:1.5"]].concat());
    let number = |report: &Value, name: &str| report[name].as_f64().unwrap();
    assert_eq!((alike["classes"].as_u64(), slow["classes"].as_u64()), (Some(1), Some(2)));
    assert!(number(&slow, "step_s") > 1.4 * number(&alike, "compute_s"), "all wait for the slow rank");
    assert!(number(&slow, "exposed_s") > number(&alike, "exposed_s"));
    let trace: Value = serde_json::from_str(&fs::read_to_string(trace).unwrap()).unwrap();
    let mut ranks: Vec<_> =
        trace["traceEvents"].as_array().unwrap().iter().map(|event| event["pid"].as_u64().unwrap()).collect();
    ranks.dedup();
    assert_eq!(ranks[..2], [0, 5]);
    // Jitter is the same for the same seed, and another for another.
    let jitter = |seed: &str| json(&[&base[..], &["--jitter", "0.1", "--seed", seed, "--steps", "3"]].concat());
    assert_eq!(jitter("1"), jitter("1"));
    assert!(number(&jitter("1"), "step_s") != number(&jitter("2"), "step_s"));
    assert!(number(&jitter("1"), "step_s") > number(&alike, "step_s"), "the slowest decides");
}

#[test]
fn tuning_prints_a_configuration_that_reads_back() {
    let text = printed(&["simulate", "--params", "30e9", "--gpus", "16", "--precision", "bf16", "--tune"]);
    let (_, config) = text.split_once("As a configuration:\n\n").unwrap();
    let config = Config::from_toml(config, "printed").unwrap();
    assert_eq!(config.world_size, 16);
    let best = json(&["simulate", "--params", "30e9", "--gpus", "16", "--precision", "bf16", "--tune", "--json"]);
    assert_eq!(best["best"]["prefetch"], config.prefetch.forward);
    let tried = best["tried"].as_array().unwrap();
    let fastest = tried.iter().filter(|tried| tried["fits"] == true).map(|tried| tried["step_s"].as_f64().unwrap());
    let fastest = fastest.fold(f64::INFINITY, f64::min);
    assert!(best["best"]["step_s"].as_f64().unwrap() <= 1.005 * fastest);
}

#[test]
fn a_deepspeed_file_is_printed_as_a_configuration_with_what_it_lacks() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("ds_config.json");
    let text = r#"{"zero_optimization": {"stage": 2, "zero_quantized_gradients": true}, "gradient_clipping": 0.5}"#;
    fs::write(&file, text).unwrap();
    let file = file.to_str().unwrap();
    let translated = printed(&["config", "--from-deepspeed", file, "--gpus", "4"]);
    let config = Config::from_toml(&translated, "printed").unwrap();
    assert_eq!((config.stage, config.world_size), (Stage::Gradients, 4));
    assert_eq!(config.training.gradient_clip_norm, Some(0.5));
    assert!(
        translated
            .contains("# Not there, so the run differs:\n#   zero_optimization.zero_quantized_gradients = true: ")
    );
    let (code, _, stderr) = fsdp(&["config", "--from-deepspeed", file, "--strict"]);
    assert_eq!((code, stderr), (1, format!("error: {file}: 1 of its keys ask for what is not there; remove them\n")));
    fs::write(file, r#"{"zero_optimization": {"stag": 2}}"#).unwrap();
    assert_eq!(
        refused(&["config", "--from-deepspeed", file]),
        format!("{file}: unknown key `zero_optimization.stag`; did you mean `stage`?")
    );
}

#[test]
fn a_configuration_is_printed_with_its_defaults_and_explained_on_demand() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("run.toml");
    fs::write(&file, "stage = 2\nworld_size = 4\n").unwrap();
    let file = file.to_str().unwrap();
    let text = printed(&["config", file]);
    assert!(text.starts_with("stage = 2\nworld_size = 4\nlauncher = \"auto\" "), "{text}");
    assert!(text.contains("\n# mesh is not set "), "{text}");
    assert_eq!(Config::from_toml(&text, "printed").unwrap(), Config::load(file).unwrap());
    assert_eq!(printed(&["config", file, "--explain"]), Config::load(file).unwrap().to_toml());
    fs::write(file, "stage = 5\n").unwrap();
    assert_eq!(refused(&["config", file]), format!("{file}:1:9: `stage` is 5; it must be an integer from 0 to 3"));
}

#[test]
fn every_shell_has_completions_and_every_subcommand_a_manual_page() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = printed(&["completions", shell]);
        assert!(script.contains("from-deepspeed") && script.contains("simulate"), "{shell}");
    }
    assert!(printed(&["man"]).contains(".TH fsdp 1"));
    let dir = tempfile::tempdir().unwrap();
    let pages = printed(&["man", "--out", dir.path().to_str().unwrap()]);
    for name in ["fsdp.1", "fsdp-plan.1", "fsdp-simulate.1", "fsdp-bench.1", "fsdp-config.1", "fsdp-inspect.1"] {
        assert!(pages.lines().any(|page| page.ends_with(name)), "{name}: {pages}");
        assert!(fs::read_to_string(dir.path().join(name)).unwrap().contains(".SH NAME"), "{name}");
    }
    assert!(refused(&["man", "--out", "/absent"]).starts_with("--out: /absent: "));
}

#[test]
fn what_the_book_shows_of_the_command_is_what_it_prints() {
    assert_shown("fsdp-plan.txt", &["plan", "--params", "7e9", "--gpus", "8"]);
    assert_shown(
        "fsdp-plan-gpt.txt",
        &["plan", "--layers", "24", "--width", "1024", "--batch", "4", "--gpus", "8", "--precision", "bf16"],
    );
    assert_shown(
        "fsdp-plan-offload.txt",
        &[
            "plan",
            "--params",
            "70e9",
            "--gpus",
            "8",
            "--precision",
            "bf16",
            "--offload",
            "optimizer=nvme,gradients=cpu",
        ],
    );
    assert_shown(
        "fsdp-simulate.txt",
        &["simulate", "--params", "30e9", "--gpus", "64", "--precision", "bf16", "--sensitivity"],
    );
    assert_shown("fsdp-tune.txt", &["simulate", "--params", "30e9", "--gpus", "64", "--precision", "bf16", "--tune"]);
    assert_shown("fsdp-words.md", &["config", "--words"]);
    assert_shown("fsdp-help.txt", &["--help"]);
}
