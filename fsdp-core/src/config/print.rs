//! A configuration as TOML, complete and explained.

use super::Config;
use super::keys::{Kind, config_keys};
use crate::LossScale;

/// Every key with its explanation and its value; see [`Config::to_toml`].
pub(super) fn to_toml(config: &Config) -> String {
    let mut text = String::new();
    let mut table = "";
    for key in config_keys() {
        if key.table != table {
            table = key.table;
            text += &format!("[{table}]\n\n");
        }
        let name = key.name;
        let value =
            value(&key.kind, config).map_or(format!("# {name} is not set"), |value| format!("{name} = {value}"));
        text += &format!("{}{}{value}\n\n", comment(key.meaning), comment(&format!("Cost: {}", key.cost)));
    }
    text.truncate(text.trim_end().len());
    text.push('\n');
    text
}

/// The words as comment lines of at most 100 columns.
fn comment(words: &str) -> String {
    let mut lines = String::new();
    let mut line = String::from("#");
    for word in words.split_whitespace() {
        if line.len() + 1 + word.len() > 100 {
            lines += &line;
            lines.push('\n');
            line = String::from("#");
        }
        line.push(' ');
        line += word;
    }
    lines + &line + "\n"
}

/// The value of one key as TOML, or `None` where an optional key is not set.
pub(super) fn value(kind: &Kind, config: &Config) -> Option<String> {
    match kind {
        Kind::Integer { get, .. } => Some(get(config).to_string()),
        Kind::OptionalInteger { get, .. } => get(config).map(|integer| integer.to_string()),
        // Debug keeps the point or the exponent, which make it a TOML float, and all digits.
        Kind::Number { get, .. } => Some(format!("{:?}", get(config))),
        Kind::OptionalPositive { get, .. } => get(config).map(|number| format!("{number:?}")),
        Kind::OptionalScale { get, .. } => get(config).map(|scale| match scale {
            LossScale::Dynamic => "\"dynamic\"".to_owned(),
            LossScale::Fixed(scale) => format!("{scale:?}"),
        }),
        Kind::NormOrder { get, .. } => match get(config) {
            order if order.is_infinite() => Some("\"inf\"".to_owned()),
            order => Some(format!("{order:?}")),
        },
        Kind::Choice { names, get, .. } => names.get(get(config)).map(|name| format!("\"{name}\"")),
        Kind::Device { get, .. } => Some(format!("\"{}\"", get(config))),
        Kind::Flag { get, .. } => Some(get(config).to_string()),
        Kind::OptionalPath { get, .. } => get(config).map(|path| toml::Value::from(path).to_string()),
        Kind::Tiers { get, .. } => {
            let placement = get(config);
            let shares =
                [("cpu", placement.cpu), ("nvme", placement.nvme)].into_iter().filter(|(_, share)| *share != 0.0);
            let shares: Vec<_> = shares.map(|(tier, share)| format!("{tier} = {share:?}")).collect();
            Some(placement.name().map_or_else(|| format!("{{ {} }}", shares.join(", ")), |name| format!("\"{name}\"")))
        }
        Kind::OptionalMesh { get, .. } => get(config).map(ToString::to_string),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_printed_default_is_complete() {
        let printed = Config::default().to_toml();
        assert!(printed.lines().all(|line| line.len() <= 100), "{printed}");
        let keys: String = printed
            .lines()
            .filter(|l| !l.is_empty() && (!l.starts_with('#') || l.ends_with("not set")))
            .map(|l| format!("{l}\n"))
            .collect();
        assert_eq!(
            keys,
            r#"stage = 3
world_size = 1
launcher = "auto"
# rendezvous_port is not set
device = "flex"
collectives = "host"
# mesh is not set
# reshard_after_forward is not set
timeout_s = 300.0
threads_per_rank = 0
# seed is not set
[prefetch]
forward = 1
backward = 1
# max_bytes is not set
[precision]
parameters = "f32"
reduce = "f32"
output = "f32"
# loss_scale is not set
[training]
gradient_accumulation = 1
accumulate = "reduced"
gradient_reduction = "mean"
# gradient_clip_norm is not set
gradient_norm_order = 2.0
# gradient_clip_value is not set
non_finite = "error"
buffers = "sync"
[offload]
optimizer = "device"
gradients = "device"
parameters = "device"
# nvme_path is not set
nvme_buffer_bytes = 16777216
nvme_block_bytes = 1048576
nvme_checksums = true
"#
        );
        assert!(printed.starts_with("# How much is sharded: 0 nothing (DDP)"), "{printed}");
        assert!(printed.contains("# Cost: Stage 3 sends 1.5 times what stages 0 to 2 send.\nstage = 3\n\n"));
    }
}
