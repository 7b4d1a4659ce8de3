//! The page of attributes: what the derive's documentation says of each, an example that compiles, what it changes, and what
//! the derive refuses.

#![allow(dead_code, reason = "the models are shown and not built")]

use burn::module::{Module, Param};
use burn::nn::{Embedding, LayerNorm, Linear};
use burn::tensor::Tensor;
use fsdp_burn::{FieldRule, Sharded, WrapPolicy};
use fsdp_core::{
    Config, Device, Job, Machine, ModelShape, NamedLink, Network, ParamShape, SimOptions, Speed, UnitShape,
    human_bytes, simulate,
};

use crate::output::assert_shown;

// ANCHOR: unit
#[derive(Module, Debug, Sharded)]
struct Tokens {
    #[shard(unit)]
    table: Embedding,
}
// ANCHOR_END: unit

// ANCHOR: units
#[derive(Module, Debug, Sharded)]
struct Tower {
    #[shard(units)]
    layers: Vec<Linear>,
}
// ANCHOR_END: units

// ANCHOR: nested
#[derive(Module, Debug, Sharded)]
struct Towers {
    #[shard(nested)] // a unit for each layer of each tower
    towers: Vec<Tower>,
    #[shard(unit, nested)] // one unit, and one more for each of its layers
    shared: Tower,
}
// ANCHOR_END: nested

// ANCHOR: ignore
#[derive(Module, Debug, Sharded)]
struct Student {
    #[shard(unit)]
    body: Linear,
    #[shard(ignore)]
    teacher: Linear,
}
// ANCHOR_END: ignore

// ANCHOR: replicate
#[derive(Module, Debug, Sharded)]
struct Router {
    #[shard(replicate)]
    gate: Linear,
    #[shard(units)]
    experts: Vec<Linear>,
}
// ANCHOR_END: replicate

// ANCHOR: spec
#[derive(Module, Debug, Sharded)]
struct Wide {
    #[shard(unit, spec(_, "shard"))] // by columns: a table of few rows and many columns
    table: Param<Tensor<2>>,
}
// ANCHOR_END: spec

// ANCHOR: keep
#[derive(Module, Debug, Sharded)]
struct Model {
    #[shard(units)]
    blocks: Vec<Linear>,
    norm: LayerNorm,
    #[shard(unit, keep)] // backward begins here
    head: Linear,
}
// ANCHOR_END: keep

// ANCHOR: prefetch
#[derive(Module, Debug, Sharded)]
struct Uneven {
    #[shard(unit, prefetch = 2)] // computes fast, so two units must be on their way
    stem: Linear,
    #[shard(units)]
    blocks: Vec<Linear>,
}
// ANCHOR_END: prefetch

// ANCHOR: precision
#[derive(Module, Debug, Sharded)]
struct Mixed {
    #[shard(units, precision = "bf16")]
    blocks: Vec<Linear>,
    #[shard(unit)] // as the configuration says
    head: Linear,
}
// ANCHOR_END: precision

// ANCHOR: offload
#[derive(Module, Debug, Sharded)]
struct Experts {
    #[shard(units, offload = "nvme")] // much state, seldom used
    experts: Vec<Linear>,
    #[shard(unit)] // as the configuration says
    head: Linear,
}
// ANCHOR_END: offload

// ANCHOR: reduce
#[derive(Module, Debug, Sharded)]
struct Sent {
    #[shard(units, reduce = "bf16")] // half the bytes of the blocks' gradients
    blocks: Vec<Linear>,
    #[shard(unit)]
    head: Linear,
}
// ANCHOR_END: reduce

// ANCHOR: output
#[derive(Module, Debug, Sharded)]
struct Exact {
    #[shard(unit, precision = "f32", output = "bf16")] // `cast_output(&self.stem.weight, x)` makes it
    stem: Linear,
    #[shard(units, precision = "bf16")]
    blocks: Vec<Linear>,
}
// ANCHOR_END: output

#[test]
fn the_examples_are_the_rules_that_they_show() {
    let policy = WrapPolicy::new;
    let (unit, units) = (FieldRule::unit, FieldRule::units);
    assert_eq!(Tokens::wrap_policy(), policy().field("table", unit()));
    assert_eq!(Tower::wrap_policy(), policy().field("layers", units()));
    let paths = |policy: WrapPolicy| policy.rules().iter().map(|(path, _)| path.join(".")).collect::<Vec<_>>();
    assert_eq!(paths(Towers::wrap_policy()), ["towers.*.layers", "shared", "shared.layers"]);
    assert_eq!(Student::wrap_policy(), policy().field("body", unit()).field("teacher", FieldRule::ignore()));
    let gate = FieldRule::root().replicate();
    assert_eq!(Router::wrap_policy(), policy().field("gate", gate).field("experts", units()));
    assert_eq!(Wide::wrap_policy(), policy().field("table", unit().spec([None, Some("shard")])));
    assert_eq!(Model::wrap_policy(), policy().field("blocks", units()).field("head", unit().keep()));
    assert_eq!(Uneven::wrap_policy(), policy().field("stem", unit().prefetch(2)).field("blocks", units()));
    let experts = units().offload("nvme");
    assert_eq!(Experts::wrap_policy(), policy().field("experts", experts).field("head", unit()));
    assert_eq!(Mixed::wrap_policy(), policy().field("blocks", units().precision("bf16")).field("head", unit()));
    assert_eq!(Sent::wrap_policy(), policy().field("blocks", units().reduce("bf16")).field("head", unit()));
    let stem = unit().precision("f32").output("bf16");
    assert_eq!(Exact::wrap_policy(), policy().field("stem", stem).field("blocks", units().precision("bf16")));
}

/// A row of a table in the derive's documentation.
struct Row {
    word: String,
    meaning: String,
    cost: String,
    /// The heading above it.
    heading: String,
}

const DERIVE: &str = include_str!("../../fsdp-macros/src/lib.rs");
const WORDS: &str = include_str!("../../fsdp-macros/src/words.rs");

fn rows() -> Vec<Row> {
    let mut heading = String::new();
    let mut rows = Vec::new();
    for line in DERIVE.lines().filter_map(|line| line.strip_prefix("/// ")) {
        if let Some(title) = line.strip_prefix("# ") {
            heading = title.to_owned();
        }
        let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        if let [attribute, meaning, cost] = cells[..]
            && attribute.starts_with('`')
        {
            let bare = attribute.trim_matches('`').trim_start_matches("#[shard(");
            let word = bare.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default();
            let [word, meaning, cost] = [word, meaning, cost].map(str::to_owned);
            rows.push(Row { word, meaning, cost, heading: heading.clone() });
        }
    }
    rows
}

/// The strings of a list in the macro's vocabulary, as `PRECISIONS`.
fn list(name: &str) -> Vec<String> {
    let (_, rest) = WORDS.split_once(&format!(" {name}: &[&str] =")).unwrap();
    let (list, _) = rest.split_once("];").unwrap();
    let constant = |name: &str| {
        let (_, rest) = WORDS.split_once(&format!(" {name}: &str = \"")).unwrap();
        rest.split('"').next().unwrap_or_default().to_owned()
    };
    let items = list.trim().trim_start_matches("&[").split(',').map(str::trim).filter(|item| !item.is_empty());
    items.map(|item| if item.starts_with('"') { item.trim_matches('"').to_owned() } else { constant(item) }).collect()
}

/// What a word takes, and what holds without it.
fn takes(word: &str) -> [String; 2] {
    let names = |name| format!("`\"{}\"`", list(name).join("\"`, `\""));
    let (takes, without) = match word {
        "unit" | "units" | "nested" => ("nothing".into(), "the field is part of the unit around it"),
        "ignore" => ("nothing".into(), "the field is managed"),
        "replicate" => ("nothing".into(), "parameters are cut over the shard axis"),
        "spec" => ("at most one entry for each dimension, `\"shard\"` or `_`".into(), "the first dimension is cut"),
        "keep" => ("nothing".into(), "the unit is freed after forward has used it, and gathered again"),
        "prefetch" => ("an integer of at least 0".into(), "`prefetch.forward` of the configuration"),
        "reduce" => (names("PRECISIONS"), "`precision.reduce` of the configuration"),
        "output" => (names("PRECISIONS"), "`precision.output` of the configuration"),
        "precision" => (names("PRECISIONS"), "`precision.parameters` of the configuration"),
        "offload" => (names("TIERS"), "`[offload]` of the configuration"),
        _ => return Default::default(),
    };
    [takes, without.to_owned()]
}

/// Four equal units, one of which the attribute is on.
fn shape(change: impl Fn(&mut UnitShape)) -> ModelShape {
    let mut shape = ModelShape::even(1_000_000_000, 4);
    change(&mut shape.units[1]);
    shape
}

fn measure(shape: ModelShape) -> [String; 2] {
    let link = NamedLink::find("nvlink4").unwrap().link;
    let device = Device::find("H100").unwrap();
    let speed = Speed::Rate { flops_per_s: 0.4 * device.flops_32, memory_bytes_per_s: device.memory_bytes_per_s };
    let machine = Machine { network: Network::one_node(link).into(), speed };
    let config = Config { world_size: 8, ..Config::default() };
    let job = Job::configured(shape, &config, machine);
    let report = simulate(&job.workload(config.stage), &SimOptions::default());
    [human_bytes(job.memory(config.stage).peak_or_known_bytes()), human_bytes(report.sent_bytes)]
}

/// What a word changes, by the planner, on the second of four units.
fn effect(word: &str) -> Option<String> {
    let whole = |param: &mut ParamShape| param.replicate = true;
    let (what, changed) = match word {
        "unit" | "units" => {
            let halves = |units: &UnitShape| {
                let half = |index: usize| {
                    let mut unit = units.clone();
                    unit.name = format!("{}.{index}", unit.name);
                    unit.parameters[0].shape[0] /= 2;
                    unit
                };
                [half(0), half(1)]
            };
            let units = shape(|_| ()).units;
            ("eight units in place of four:", ModelShape::new(units.iter().flat_map(halves).collect()))
        }
        "keep" => ("", shape(|unit| unit.keep = true)),
        "replicate" => ("", shape(|unit| unit.parameters.iter_mut().for_each(whole))),
        "prefetch" => ("with `prefetch = 2`:", shape(|unit| unit.prefetch = Some(2))),
        _ => return None,
    };
    let (before, after) = (measure(shape(|_| ())), measure(changed));
    let names = ["a rank holds", "sends"];
    let changes = names.iter().zip(before.iter().zip(&after)).filter(|(_, (before, after))| before != after);
    let changes: Vec<_> =
        changes.map(|(name, (before, after))| format!("{name} {after} in place of {before}")).collect();
    (!changes.is_empty()).then(|| format!("{what} {}", changes.join("; ")).trim().to_owned())
}

/// The refusals of the derive with the compiler's own words, by folder: `shape` is about types, and so on.
fn refusals() -> String {
    let folder = |name: &str| concat!(env!("CARGO_MANIFEST_DIR"), "/../fsdp-macros/tests/ui/").to_owned() + name;
    let mut text = String::new();
    for (title, name) in
        [("Words", "attribute"), ("Generics", "generics"), ("Types", "shape"), ("Other", "unsupported")]
    {
        text += &format!("\n### {title}\n\n| written | the compiler says |\n|---|---|\n");
        let mut files: Vec<_> = std::fs::read_dir(folder(name)).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.retain(|path| path.extension().is_some_and(|extension| extension == "stderr"));
        files.sort();
        for file in files {
            let shown = std::fs::read_to_string(file).unwrap();
            for error in shown.split("\n\n").filter(|error| error.starts_with("error")) {
                let message =
                    error.lines().next().unwrap_or_default().split_once(": ").map_or("", |(_, message)| message);
                // `17 |     #[shard(unti)]`
                let is_source = |line: &&str| line.trim_start().starts_with(|c: char| c.is_ascii_digit());
                let line = error.lines().find(is_source).and_then(|line| line.split_once('|'));
                let written = line.map_or("", |(_, source)| source.trim()).replace('|', "\\|");
                text += &format!("| `` {written} `` | {} |\n", message.replace('|', "\\|").replace('<', "&lt;"));
            }
        }
    }
    text
}

const INTRO: &str = "\
# Attributes of the derive

<!-- Written from the documentation of the derive by `UPDATE_BOOK=1 cargo book-test`; do not edit. -->

`#[derive(Sharded)]` stands beside `Module`. Each attribute is written on a field, or on the variant of an enum; words are
separated by commas, as in `#[shard(unit, keep)]`. A field without an attribute, and all that is in it, is part of the unit around
it; at the top, of the root unit, which stays gathered.

*Changes* is by the planner: a model of a billion parameters in four equal units, on 8 ranks at stage 3 with Adam in float32; the
word is put on the second unit. It tells the most that a rank holds without activations, and what it sends in a step.
";

const OUTRO: &str = "
## The type

`#[shard(crate = \"path\")]` on the type says where `fsdp_burn` is, if the derive cannot find it in `Cargo.toml`.

Structs with named fields and enums of modules can be derived; generics are kept. Tuple structs and unions are refused, as
Burn's own derive of `Module` refuses them.

## What is refused

Every mistake is a compiler error at its word, all in one compilation. These are the ones that the tests of the derive provoke, with
the line and the compiler's first sentence.
";

#[test]
fn the_page_of_attributes_is_current() {
    let rows = rows();
    let mut page = INTRO.to_owned();
    let mut heading = "";
    for Row { word, meaning, cost, heading: above } in &rows {
        if heading != above {
            heading = above;
            page += &format!("\n## {heading}\n");
            if heading.starts_with("Settings") {
                page += "\nThese need `unit` or `units`. All but `keep` win over the configuration.\n";
            }
        }
        page += &format!("\n### `{word}`\n\n{meaning}\n");
        let [takes, without] = takes(word);
        if !takes.is_empty() {
            page += &format!("\n- Takes: {takes}\n- Without it: {without}\n");
        } else {
            page.push('\n');
        }
        page += &format!("- Cost: {cost}\n");
        if let Some(effect) = effect(word) {
            page += &format!("- Changes: {effect}\n");
        }
        if include_str!("attributes.rs").contains(&format!("// ANCHOR: {word}\n")) {
            page += &format!("\n```rust,noplayground\n{{{{#include ../../listings/attributes.rs:{word}}}}}\n```\n");
        }
    }
    let words: Vec<_> = rows.iter().map(|row| row.word.clone()).collect();
    for word in list("OF_FIELDS") {
        assert!(words.contains(&word), "the derive's documentation has no row for `{word}`");
    }
    page += OUTRO;
    page += &refusals();
    assert_shown("src/reference/attributes.md", &page);
}
