//! The page of configuration keys: what the code says of each, an example, and what the example changes.

use fsdp_core::{
    Config, ConfigKey, Device, Job, Machine, ModelShape, NamedLink, Network, SimOptions, Speed, config_keys,
    human_bytes, simulate,
};

use crate::output::assert_shown;

/// Of the model that shows effects.
const NUM_PARAMETERS: usize = 7_000_000_000;
const NUM_UNITS: usize = 32;

/// Examples that need more than their own line, or say more than the README's.
const EXAMPLES: [(&str, &str); 30] = [
    ("stage", "stage = 2"),
    ("world_size", "world_size = 8"),
    ("device", "device = \"cuda\""),
    ("collectives", "device = \"cuda\"\ncollectives = \"device\""),
    ("mesh", "world_size = 8\nmesh = { replicate = 2, shard = 4 }"),
    ("reshard_after_forward", "world_size = 16\nreshard_after_forward = 8"),
    ("timeout_s", "timeout_s = 60.0"),
    ("threads_per_rank", "threads_per_rank = 2"),
    ("prefetch.forward", "[prefetch]\nforward = 3"),
    ("prefetch.backward", "[prefetch]\nbackward = 3"),
    ("prefetch.max_bytes", "[prefetch]\nmax_bytes = 1_000_000_000"),
    ("precision.parameters", "[precision]\nparameters = \"bf16\""),
    ("precision.reduce", "[precision]\nreduce = \"bf16\""),
    ("precision.output", "[precision]\noutput = \"bf16\""),
    ("precision.loss_scale", "[precision]\nparameters = \"f16\"\nloss_scale = 1024.0"),
    ("training.gradient_accumulation", "[training]\ngradient_accumulation = 4"),
    ("training.accumulate", "[training]\ngradient_accumulation = 4\naccumulate = \"local\""),
    ("training.gradient_reduction", "[training]\ngradient_reduction = \"sum\""),
    ("training.gradient_clip_norm", "[training]\ngradient_clip_norm = 1.0"),
    ("training.gradient_norm_order", "[training]\ngradient_clip_norm = 1.0\ngradient_norm_order = \"inf\""),
    ("training.gradient_clip_value", "[training]\ngradient_clip_value = 0.5"),
    ("training.non_finite", "[training]\nnon_finite = \"propagate\""),
    ("training.buffers", "[training]\nbuffers = \"local\""),
    ("offload.optimizer", "[offload]\noptimizer = { nvme = 0.8 }\nnvme_path = \"/nvme/run1\""),
    ("offload.gradients", "[offload]\ngradients = \"nvme\"\nnvme_path = \"/nvme/run1\""),
    ("offload.parameters", "[offload]\nparameters = \"nvme\"\nnvme_path = \"/nvme/run1\""),
    ("offload.nvme_path", "[offload]\noptimizer = \"nvme\"\nnvme_path = \"/nvme/run1\""),
    ("offload.nvme_buffer_bytes", "[offload]\nnvme_buffer_bytes = 67_108_864"),
    ("offload.nvme_block_bytes", "[offload]\nnvme_block_bytes = 4_194_304"),
    ("offload.nvme_checksums", "[offload]\nnvme_checksums = false"),
];

/// The example of a key: from the list above, else the README's line, else the default.
fn example(key: &ConfigKey) -> Option<String> {
    let path = key.path();
    if let Some((_, text)) = EXAMPLES.iter().find(|(known, _)| *known == path) {
        return Some((*text).to_owned());
    }
    let table = if key.table.is_empty() { String::new() } else { format!("[{}]\n", key.table) };
    let begins = format!("{} = ", key.name);
    let readme = include_str!("../../README.md").lines().map(|line| line.trim_start_matches("# "));
    let shown = readme.filter_map(|line| line.split("  #").next()).map(str::trim_end);
    let values = shown.filter(|line| line.starts_with(&begins)).map(str::to_owned);
    let default = key.default_value().map(|value| format!("{begins}{value}"));
    let mut lines = values.chain(default).map(|line| format!("{table}{line}"));
    lines.find(|text| parsed(text).is_some())
}

fn parsed(text: &str) -> Option<Config> {
    let text = if text.contains("world_size") { text.to_owned() } else { format!("world_size = 8\n{text}") };
    Config::from_toml(&text, "an example").ok()
}

/// What a rank holds, sends and takes for a step with `config`.
fn measure(config: &Config) -> [String; 3] {
    let device = Device::find("H100").unwrap();
    let link = NamedLink::find(device.link).unwrap().link;
    let is_half = config.precision.parameters.size_bytes() == 2;
    let peak = if is_half { device.flops_16 } else { device.flops_32 };
    let speed = Speed::Rate { flops_per_s: 0.4 * peak, memory_bytes_per_s: device.memory_bytes_per_s };
    let machine = Machine { network: Network::one_node(link).into(), speed };
    let job = Job::configured(ModelShape::even(NUM_PARAMETERS, NUM_UNITS), config, machine);
    let report = simulate(&job.workload(config.stage), &SimOptions::default());
    let memory = human_bytes(job.memory(config.stage).peak_or_known_bytes());
    [memory, human_bytes(report.sent_bytes), format!("{:.2} s", report.step_s)]
}

/// What the key's own line of an example changes, if anything that the planner knows.
fn effect(key: &ConfigKey, example: &str) -> Option<String> {
    let own = format!("{} = ", key.name);
    let without: String =
        example.lines().filter(|line| !line.starts_with(&own)).map(|line| format!("{line}\n")).collect();
    // One rank is what leaving out the world size means, and leaving it out of a mesh.
    let without = if key.path() == "world_size" { "world_size = 1".to_owned() } else { without };
    let (before, after) = (measure(&parsed(&without)?), measure(&parsed(example)?));
    let names = ["a rank holds", "sends", "a step takes"];
    let changes = names.iter().zip(before.iter().zip(&after)).filter(|(_, (before, after))| before != after);
    let changes: Vec<_> =
        changes.map(|(name, (before, after))| format!("{name} {after} in place of {before}")).collect();
    (!changes.is_empty()).then(|| changes.join("; "))
}

const INTRO: &str = "\
# Configuration keys

<!-- Written from `fsdp_core::config_keys()` by `UPDATE_BOOK=1 cargo book-test`; do not edit. -->

A file is TOML (`.toml`) or JSON (`.json`) with these keys. All of them are optional, and nothing else is
accepted. `config.to_toml()` prints the keys of a run with their values and these explanations, and
`fsdp config run.toml` does so for a file.

Each example is read by a test. *Changes* says what its last line does, by the planner, to 7 billion parameters in 32 equal units
on 8 ranks, each an H100 in one node, at stage 3 with Adam: the most that a rank holds without activations, what it sends in an
optimizer step, and how long that takes. Where it says nothing, the planner's numbers stay as they are.
";

#[test]
fn the_page_of_configuration_keys_is_current() {
    let mut page = INTRO.to_owned();
    let mut table = None;
    for key in config_keys() {
        if table != Some(key.table) {
            table = Some(key.table);
            page +=
                &if key.table.is_empty() { "\n## At the top\n".into() } else { format!("\n## `[{}]`\n", key.table) };
        }
        let default = key.default_value().map_or("not set".to_owned(), |value| format!("`{value}`"));
        let allowed = key.allowed();
        // Braces of a table read better as code.
        let allowed = match (allowed.find('{'), allowed.rfind('}')) {
            (Some(open), Some(close)) => {
                format!("{}`{}`{}", &allowed[..open], &allowed[open..=close], &allowed[close + 1..])
            }
            _ => allowed,
        };
        page += &format!(
            "\n### `{}`\n\n{}\n\n- Takes: {allowed}\n- Default: {default}\n- Cost: {}\n",
            key.name, key.meaning, key.cost
        );
        if let Some(example) = example(key) {
            page += &effect(key, &example).map_or(String::new(), |effect| format!("- Changes: {effect}\n"));
            page += &format!("\n```ini\n{example}\n```\n");
        }
    }
    assert_shown("src/reference/configuration.md", &page);
}

#[test]
fn every_example_is_of_a_key_and_sets_it_to_another_value_than_the_default() {
    for (path, text) in EXAMPLES {
        let key = config_keys().iter().find(|key| key.path() == path).unwrap_or_else(|| panic!("no key {path}"));
        assert_ne!(key.value(&parsed(text).unwrap()), key.default_value(), "{path}");
    }
}
