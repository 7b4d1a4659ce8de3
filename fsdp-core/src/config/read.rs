//! From a tree of keys to a checked [`Config`]. Nothing in the tree is ignored: what has no key is an error.

use super::Config;
use super::choice::Exchange;
use super::device::DeviceChoice;
use super::error::{ConfigError, Location, Place};
use super::keys::{ConfigKey, Kind, config_keys};
use super::nearest::nearest;
use super::offload::TierShares;
use super::tree::{Entry, Value};
use crate::{Axis, LossScale, Mesh};

/// Reads the entries of the whole text, in its order, then checks what only all keys together can show.
pub(super) fn read(entries: Vec<Entry>, origin: &str) -> Result<Config, ConfigError> {
    let mut reader = Reader { origin, config: Config::default(), mesh_place: None };
    reader.table("", entries)?;
    check_mesh(&reader.config, reader.at(reader.mesh_place))?;
    check_clipping(&reader.config, reader.at(None))?;
    check_offload(&reader.config, reader.at(None))?;
    check_resharding(&reader.config, reader.at(None))?;
    check_collectives(&reader.config, reader.at(None))?;
    Ok(reader.config)
}

/// Checks every value and the mesh of a configuration that was built in code.
pub(super) fn validate(config: &Config) -> Result<(), ConfigError> {
    let at = || Location { origin: "Config".to_owned(), place: None };
    config_keys().iter().try_for_each(|key| check_range(key, config, at))?;
    check_mesh(config, at())?;
    check_clipping(config, at())?;
    check_offload(config, at())?;
    check_resharding(config, at())?;
    check_collectives(config, at())
}

fn check_collectives(config: &Config, at: Location) -> Result<(), ConfigError> {
    if config.collectives == Exchange::Host || config.device != DeviceChoice::Flex {
        return Ok(());
    }
    let needs = format!("is \"{}\", and ranks compute on processors", config.collectives);
    let remedy = "set `device = \"cuda\"`, or leave the key out";
    Err(ConfigError::Needs { at, key: "collectives".to_owned(), needs, remedy })
}

fn check_resharding(config: &Config, at: Location) -> Result<(), ConfigError> {
    let Some(num_ranks) = config.reshard_after_forward else { return Ok(()) };
    let needs = |needs, remedy| ConfigError::Needs { at, key: "reshard_after_forward".to_owned(), needs, remedy };
    if !config.stage.shards_parameters() {
        let stage = config.stage.number();
        let why = format!("cuts gathered parameters, which stage {stage} does not have: every rank uses them whole");
        return Err(needs(why, "set `stage = 3`, or leave the key out"));
    }
    if config.world_size == 1 && config.mesh.is_none() {
        // A launcher may decide how many there are.
        return Ok(());
    }
    let num_shards = config.resolved_mesh().size(Axis::Shard);
    if !num_shards.is_multiple_of(num_ranks) {
        let why = format!("is {num_ranks}, which does not divide the {num_shards} ranks along `shard` into groups");
        return Err(needs(why, "set it to a divisor of them, such as the ranks of one host, or leave it out"));
    }
    Ok(())
}

fn check_offload(config: &Config, at: Location) -> Result<(), ConfigError> {
    let offload = &config.offload;
    let needs =
        |key: &str, needs: String, remedy| ConfigError::Needs { at, key: format!("offload.{key}"), needs, remedy };
    if let (Some(key), None) = (offload.nvme_key(), &offload.nvme_path) {
        let why = "places state on NVMe, which needs a directory on a disk".to_owned();
        return Err(needs(key, why, "set `nvme_path` under [offload]"));
    }
    if offload.parameters != TierShares::DEVICE && !config.stage.shards_parameters() {
        let stage = config.stage.number();
        let why =
            format!("offloads blocks of parameters, which stage {stage} does not have: every rank uses them whole");
        return Err(needs("parameters", why, "set `stage = 3`, or leave the key out"));
    }
    let (block_bytes, buffer_bytes) = (offload.nvme_block_bytes, offload.nvme_buffer_bytes);
    if !block_bytes.is_multiple_of(4096) {
        let why = format!("is {block_bytes}, and a disk moves pages of 4096 bytes");
        return Err(needs("nvme_block_bytes", why, "set it to a multiple of 4096"));
    }
    if buffer_bytes < 2 * block_bytes {
        let least = 2 * block_bytes;
        let why = format!(
            "is {buffer_bytes}, but reading one block of {block_bytes} bytes while another is written takes {least}"
        );
        return Err(needs("nvme_buffer_bytes", why, "set it to at least that, or make `nvme_block_bytes` smaller"));
    }
    Ok(())
}

fn check_clipping(config: &Config, at: Location) -> Result<(), ConfigError> {
    match (config.training.gradient_clip_norm, config.training.gradient_clip_value) {
        (Some(_), Some(_)) => {
            let keys = ["training.gradient_clip_norm", "training.gradient_clip_value"];
            Err(ConfigError::Conflict { at, keys, why: "gradients are clipped in one way" })
        }
        _ => Ok(()),
    }
}

/// Checks the value of one key against its range.
fn check_range(key: &ConfigKey, config: &Config, at: impl Fn() -> Location) -> Result<(), ConfigError> {
    let (valid, got) = match key.kind {
        Kind::Integer { min, max, get, .. } => (is_between(get(config), min, max), get(config).to_string()),
        Kind::OptionalInteger { min, max, get, .. } => match get(config) {
            Some(integer) => (is_between(integer, min, max), integer.to_string()),
            None => return Ok(()),
        },
        Kind::Number { min, max, get, .. } => ((min..=max).contains(&get(config)), format!("{:?}", get(config))),
        Kind::OptionalPositive { get, .. } => match get(config) {
            Some(number) => (number.is_finite() && number > 0.0, format!("{number:?}")),
            None => return Ok(()),
        },
        Kind::NormOrder { get, .. } => (get(config) >= 1.0, format!("{:?}", get(config))),
        Kind::OptionalScale { get, .. } => match get(config) {
            Some(LossScale::Fixed(scale)) => (scale.is_finite() && scale > 0.0, format!("{scale:?}")),
            Some(LossScale::Dynamic) | None => return Ok(()),
        },
        Kind::OptionalPath { get, .. } => match get(config) {
            Some(path) => (!path.is_empty(), format!("{path:?}")),
            None => return Ok(()),
        },
        Kind::Tiers { get, .. } => {
            let TierShares { cpu, nvme } = get(config);
            (get(config).is_valid(), format!("{{ cpu = {cpu:?}, nvme = {nvme:?} }}"))
        }
        // An element type that no precision can be set to is beyond the names.
        Kind::Choice { names, get, .. } => (get(config) < names.len(), "another type".to_owned()),
        // These are valid since they were made.
        Kind::Device { .. } | Kind::Flag { .. } | Kind::OptionalMesh { .. } => return Ok(()),
    };
    if valid { Ok(()) } else { Err(out_of_range(at(), key.path(), key.allowed(), got)) }
}

fn check_mesh(config: &Config, at: Location) -> Result<(), ConfigError> {
    let world_size = config.world_size;
    match config.mesh.clone().filter(|mesh| mesh.world_size() != world_size) {
        Some(mesh) => Err(ConfigError::MeshProduct { at, mesh, world_size }),
        None => Ok(()),
    }
}

fn is_between(number: usize, min: usize, max: Option<usize>) -> bool {
    (min..=max.unwrap_or(MAX_INTEGER)).contains(&number)
}

fn out_of_range(at: Location, key: String, allowed: String, got: String) -> ConfigError {
    ConfigError::OutOfRange { at, key, allowed, got }
}

/// The largest integer that TOML can hold.
const MAX_INTEGER: usize = i64::MAX as usize;

struct Reader<'a> {
    origin: &'a str,
    config: Config,
    /// Where the mesh stands, for the check that needs the world size too.
    mesh_place: Option<Place>,
}

impl Reader<'_> {
    fn table(&mut self, table: &str, entries: Vec<Entry>) -> Result<(), ConfigError> {
        for entry in entries {
            if let Some(key) = config_keys().iter().find(|key| key.table == table && key.name == entry.key) {
                self.value(key, entry)?;
            } else if table.is_empty() && config_keys().iter().any(|key| key.table == entry.key) {
                match entry.value {
                    Value::Table(entries) => self.table(&entry.key, entries)?,
                    other => {
                        let expected = format!("a table with the keys `{}`", names_in(&entry.key).join("`, `"));
                        return Err(self.wrong_type(entry.key, expected, &other, entry.value_place));
                    }
                }
            } else {
                return Err(self.no_such_key(table, entry));
            }
        }
        Ok(())
    }

    fn value(&mut self, key: &ConfigKey, entry: Entry) -> Result<(), ConfigError> {
        let (path, place) = (key.path(), entry.value_place);
        match (&key.kind, entry.value) {
            (&Kind::Integer { min, max, set, .. }, Value::Integer(integer)) => {
                let number = usize::try_from(integer).ok().filter(|&number| is_between(number, min, max));
                match number {
                    Some(number) => set(&mut self.config, number),
                    None => return Err(out_of_range(self.at(place), path, key.allowed(), integer.to_string())),
                }
            }
            (&Kind::OptionalInteger { min, max, set, .. }, Value::Integer(integer)) => {
                let number = usize::try_from(integer).ok().filter(|&number| is_between(number, min, max));
                match number {
                    Some(number) => set(&mut self.config, Some(number)),
                    None => return Err(out_of_range(self.at(place), path, key.allowed(), integer.to_string())),
                }
            }
            (Kind::Number { set, .. }, Value::Number(number)) => set(&mut self.config, number),
            (Kind::Number { set, .. }, Value::Integer(integer)) => set(&mut self.config, integer as f64),
            (Kind::OptionalPositive { set, .. }, Value::Number(number)) => set(&mut self.config, Some(number)),
            (Kind::OptionalPositive { set, .. }, Value::Integer(integer)) => {
                set(&mut self.config, Some(integer as f64));
            }
            (Kind::OptionalScale { set, .. }, Value::Number(scale)) => {
                set(&mut self.config, Some(LossScale::Fixed(scale)));
            }
            (Kind::OptionalScale { set, .. }, Value::Integer(scale)) => {
                set(&mut self.config, Some(LossScale::Fixed(scale as f64)));
            }
            (Kind::OptionalScale { set, .. }, Value::Text(name)) if name == "dynamic" => {
                set(&mut self.config, Some(LossScale::Dynamic));
            }
            (Kind::NormOrder { set, .. }, Value::Number(order)) => set(&mut self.config, order),
            (Kind::NormOrder { set, .. }, Value::Integer(order)) => set(&mut self.config, order as f64),
            (Kind::NormOrder { set, .. }, Value::Text(name)) if name == "inf" => set(&mut self.config, f64::INFINITY),
            (Kind::Choice { names, set, .. }, Value::Text(name)) => match names.iter().position(|&n| n == name) {
                Some(index) => set(&mut self.config, index),
                None => return Err(self.no_such_name(path, name, names, place)),
            },
            (Kind::Flag { set, .. }, Value::Bool(flag)) => set(&mut self.config, flag),
            (Kind::OptionalPath { set, .. }, Value::Text(path)) => set(&mut self.config, Some(path)),
            (Kind::Device { set, .. }, Value::Text(name)) => match DeviceChoice::named(&name) {
                Some(device) => set(&mut self.config, device),
                None => return Err(self.no_such_name(path, name, DeviceChoice::NAMES, place)),
            },
            (Kind::Tiers { set, .. }, Value::Text(name)) => match TierShares::named(&name) {
                Some(placement) => set(&mut self.config, placement),
                None => return Err(self.no_such_name(path, name, TierShares::NAMES, place)),
            },
            (Kind::Tiers { set, .. }, Value::Table(entries)) => {
                let placement = self.shares(&path, entries)?;
                set(&mut self.config, placement);
            }
            (Kind::OptionalMesh { set, .. }, Value::Table(entries)) => {
                let mesh = self.mesh(entries, place)?;
                set(&mut self.config, Some(mesh));
                self.mesh_place = place;
            }
            (_, other) => return Err(self.wrong_type(path, key.allowed(), &other, place)),
        }
        check_range(key, &self.config, || self.at(place))
    }

    fn mesh(&self, entries: Vec<Entry>, place: Option<Place>) -> Result<Mesh, ConfigError> {
        let axis = |entry: Entry| {
            let path = format!("mesh.{}", entry.key);
            let Ok(axis) = entry.key.parse::<Axis>() else {
                let names = Axis::ALL.map(Axis::name);
                return Err(ConfigError::UnknownKey {
                    at: self.at(entry.key_place),
                    key: path,
                    nearest: nearest(&entry.key, names),
                    nearest_table: None,
                    known: names.to_vec(),
                });
            };
            let at = self.at(entry.value_place);
            let allowed = "an integer of at least 1".to_owned();
            match entry.value {
                Value::Integer(size) => match usize::try_from(size) {
                    Ok(size) if size >= 1 => Ok((axis, size)),
                    _ => Err(out_of_range(at, path, allowed, size.to_string())),
                },
                other => Err(self.wrong_type(path, allowed, &other, entry.value_place)),
            }
        };
        let axes = entries.into_iter().map(axis).collect::<Result<Vec<_>, _>>()?;
        Mesh::new(axes).map_err(|source| ConfigError::InvalidMesh { at: self.at(place), source })
    }

    /// Shares by tier.
    fn shares(&self, key: &str, entries: Vec<Entry>) -> Result<TierShares, ConfigError> {
        let mut placement = TierShares::DEVICE;
        for entry in entries {
            let path = format!("{key}.{}", entry.key);
            let share = match entry.key.as_str() {
                "cpu" => &mut placement.cpu,
                "nvme" => &mut placement.nvme,
                _ => {
                    let (at, known) = (self.at(entry.key_place), vec!["cpu", "nvme"]);
                    let nearest = nearest(&entry.key, known.iter().copied());
                    return Err(ConfigError::UnknownKey { at, key: path, nearest, nearest_table: None, known });
                }
            };
            *share = match entry.value {
                Value::Number(number) => number,
                Value::Integer(integer) => integer as f64,
                other => return Err(self.wrong_type(path, "a share from 0 to 1".into(), &other, entry.value_place)),
            };
        }
        Ok(placement)
    }

    /// The error for a value that is none of the `allowed` names.
    fn no_such_name(
        &self,
        key: String,
        got: String,
        allowed: &'static [&'static str],
        place: Option<Place>,
    ) -> ConfigError {
        let nearest = nearest(&got, allowed.iter().copied());
        ConfigError::UnknownName { at: self.at(place), key, got, nearest, allowed }
    }

    /// The error for a key that is in no table, or in another.
    fn no_such_key(&self, table: &str, entry: Entry) -> ConfigError {
        let at = self.at(entry.key_place);
        // A name that is in several tables is only suggested.
        let mut named = config_keys().iter().filter(|key| key.name == entry.key);
        if let (Some(key), None) = (named.next(), named.next()) {
            return ConfigError::MisplacedKey { at, key: entry.key, table: key.table };
        }
        let known = names_in(table);
        let (nearest, nearest_table) = match nearest(&entry.key, known.iter().copied()) {
            Some(name) => (Some(name), None),
            None => {
                let name = nearest(&entry.key, config_keys().iter().map(|key| key.name));
                let key = config_keys().iter().find(|key| Some(key.name) == name);
                (name, key.map(|key| key.table))
            }
        };
        let key = if table.is_empty() { entry.key } else { format!("{table}.{}", entry.key) };
        ConfigError::UnknownKey { at, key, nearest, nearest_table, known }
    }

    fn wrong_type(&self, key: String, expected: String, got: &Value, place: Option<Place>) -> ConfigError {
        ConfigError::WrongType { at: self.at(place), key, expected, got: got.to_string() }
    }

    fn at(&self, place: Option<Place>) -> Location {
        Location { origin: self.origin.to_owned(), place }
    }
}

/// The keys of a table; at the top also the tables.
fn names_in(table: &str) -> Vec<&'static str> {
    let mut names: Vec<_> = config_keys().iter().filter(|key| key.table == table).map(|key| key.name).collect();
    if table.is_empty() {
        names.extend(config_keys().iter().map(|key| key.table).filter(|table| !table.is_empty()));
        names.dedup();
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(toml: &str) -> String {
        Config::from_toml(toml, "run.toml").unwrap_err().to_string()
    }

    #[test]
    fn unknown_keys_name_the_nearest_or_list_all() {
        assert_eq!(
            refusal("stage = 3\nwordl_size = 2"),
            "run.toml:2:1: unknown key `wordl_size`; did you mean `world_size`?"
        );
        assert_eq!(
            refusal("[training]\n  gradient_clipp1ng = 1.0"),
            "run.toml:2:3: unknown key `training.gradient_clipp1ng`; did you mean `gradient_clip_norm`?"
        );
        assert_eq!(
            refusal("prefetch.lookahead = 2"),
            "run.toml:1:10: unknown key `prefetch.lookahead`; keys here are `forward`, `backward`, `max_bytes`"
        );
        assert_eq!(
            refusal("[schedule]\nlr = 1"),
            "run.toml:1:2: unknown key `schedule`; keys here are `stage`, `world_size`, `launcher`, \
             `rendezvous_port`, `device`, `collectives`, `mesh`, `reshard_after_forward`, `timeout_s`, `threads_per_rank`, `seed`, `prefetch`, \
             `precision`, `training`, `offload`"
        );
        assert_eq!(refusal("[trainign]\n"), "run.toml:1:2: unknown key `trainign`; did you mean `training`?");
        assert_eq!(
            refusal("gradient_clip_nrom = 1.0"),
            "run.toml:1:1: unknown key `gradient_clip_nrom`; did you mean `gradient_clip_norm` under [training]?"
        );
        assert_eq!(
            refusal("[training]\nworldsize = 1"),
            "run.toml:2:1: unknown key `training.worldsize`; did you mean `world_size` at the top, before the first \
             [table]?"
        );
    }

    #[test]
    fn a_key_of_another_table_says_where_it_belongs() {
        assert_eq!(
            refusal("stage = 1\ngradient_clip_norm = 1.0"),
            "run.toml:2:1: `gradient_clip_norm` belongs under [training]; move it there"
        );
        assert_eq!(
            refusal("[prefetch]\nforward = 1\nstage = 1"),
            "run.toml:3:1: `stage` belongs at the top, before the first [table]; move it there"
        );
    }

    #[test]
    fn wrong_types_show_what_was_given_and_what_is_allowed() {
        for (toml, text) in [
            ("stage = \"3\"", "run.toml:1:9: `stage` is the string \"3\"; it must be an integer from 0 to 3"),
            ("world_size = 4.0", "run.toml:1:14: `world_size` is 4.0; it must be an integer of at least 1"),
            (
                "timeout_s = true",
                "run.toml:1:13: `timeout_s` is the boolean true; it must be a number from 0.001 to 1e9 seconds",
            ),
            (
                "prefetch = 2",
                "run.toml:1:12: `prefetch` is 2; it must be a table with the keys `forward`, `backward`, `max_bytes`",
            ),
            (
                "prefetch.max_bytes = \"1 GiB\"",
                "run.toml:1:22: `prefetch.max_bytes` is the string \"1 GiB\"; it must be an integer of at least 1; leave \
                 the key out for none",
            ),
            ("[stage]\n", "run.toml:1:1: `stage` is a table; it must be an integer from 0 to 3"),
            (
                "mesh = [2, 2]",
                "run.toml:1:8: `mesh` is an array; it must be a table of axes, such as { replicate = 2, shard = 4 }",
            ),
            (
                "mesh = { shard = \"2\" }",
                "run.toml:1:18: `mesh.shard` is the string \"2\"; it must be an integer of at least 1",
            ),
            (
                "training.gradient_clip_norm = 2026-01-01",
                "run.toml:1:31: `training.gradient_clip_norm` is a date or time; it must be a positive finite number; \
                 leave the key out for none",
            ),
            (
                "training.accumulate = 1",
                "run.toml:1:23: `training.accumulate` is 1; it must be \"reduced\" or \"local\"",
            ),
            (
                "training.gradient_norm_order = \"max\"",
                "run.toml:1:32: `training.gradient_norm_order` is the string \"max\"; it must be a number of at least 1, or \
                 \"inf\"",
            ),
            (
                "training.gradient_norm_order = 0.5",
                "run.toml:1:32: `training.gradient_norm_order` is 0.5; it must be a number of at least 1, or \"inf\"",
            ),
        ] {
            assert_eq!(refusal(toml), text);
        }
    }

    #[test]
    fn clipping_in_two_ways_at_once_is_refused() {
        assert_eq!(
            refusal("[training]\ngradient_clip_norm = 1\ngradient_clip_value = 1"),
            "run.toml: `training.gradient_clip_norm` and `training.gradient_clip_value` are both set, but gradients are \
             clipped in one way; leave one of them out"
        );
    }

    #[test]
    fn tiers_that_mean_nothing_are_refused() {
        for (toml, text) in [
            (
                "offload.optimizer = \"nvne\"",
                "run.toml:1:21: `offload.optimizer` is \"nvne\", which does not exist; did you mean \"nvme\"?",
            ),
            (
                "offload.optimizer = { nmve = 1 }",
                "run.toml:1:23: unknown key `offload.optimizer.nmve`; did you mean `nvme`?",
            ),
            (
                "offload.optimizer = { nvme = \"all\" }",
                "run.toml:1:30: `offload.optimizer.nvme` is the string \"all\"; it must be a share from 0 to 1",
            ),
            (
                "offload.optimizer = { nvme = 0.8, cpu = 0.3 }",
                "run.toml:1:21: `offload.optimizer` is { cpu = 0.3, nvme = 0.8 }; it must be \"device\", \"cpu\", \"nvme\", or \
                 shares from 0 to 1 that add up to at most 1, such as { nvme = 0.8 }",
            ),
            (
                "offload.gradients = { nvme = 0.5 }",
                "run.toml: `offload.gradients` places state on NVMe, which needs a directory on a disk; set `nvme_path` \
                 under [offload]",
            ),
            (
                "stage = 2\noffload.parameters = \"cpu\"",
                "run.toml: `offload.parameters` offloads blocks of parameters, which stage 2 does not have: every rank uses \
                 them whole; set `stage = 3`, or leave the key out",
            ),
            (
                "offload.nvme_block_bytes = 5000",
                "run.toml: `offload.nvme_block_bytes` is 5000, and a disk moves pages of 4096 bytes; set it to a multiple of \
                 4096",
            ),
            (
                "offload.nvme_buffer_bytes = 1_500_000",
                "run.toml: `offload.nvme_buffer_bytes` is 1500000, but reading one block of 1048576 bytes while another is \
                 written takes 2097152; set it to at least that, or make `nvme_block_bytes` smaller",
            ),
            (
                "offload.nvme_path = \"\"",
                "run.toml:1:21: `offload.nvme_path` is \"\"; it must be a path; leave the key out for none",
            ),
        ] {
            assert_eq!(refusal(toml), text);
        }
        let shares = Config::from_toml("offload = { optimizer = { nvme = 1 }, nvme_path = \"d\" }", "t").unwrap();
        assert_eq!(shares.offload.optimizer, TierShares::NVME);
    }

    #[test]
    fn an_infinite_order_is_written_as_text_or_as_a_toml_number() {
        for order in ["\"inf\"", "inf"] {
            let config = Config::from_toml(&format!("training.gradient_norm_order = {order}"), "t").unwrap();
            assert_eq!(config.training.gradient_norm_order, f64::INFINITY);
        }
    }

    #[test]
    fn values_out_of_range_show_the_range() {
        for (toml, text) in [
            ("stage = 4", "`stage` is 4; it must be an integer from 0 to 3"),
            ("stage = -1", "`stage` is -1; it must be an integer from 0 to 3"),
            ("world_size = 0", "`world_size` is 0; it must be an integer of at least 1"),
            ("world_size = -2", "`world_size` is -2; it must be an integer of at least 1"),
            ("timeout_s = 0", "`timeout_s` is 0.0; it must be a number from 0.001 to 1e9 seconds"),
            ("timeout_s = nan", "`timeout_s` is NaN; it must be a number from 0.001 to 1e9 seconds"),
            ("timeout_s = inf", "`timeout_s` is inf; it must be a number from 0.001 to 1e9 seconds"),
            ("prefetch.forward = -1", "`prefetch.forward` is -1; it must be an integer of at least 0"),
            (
                "rendezvous_port = 65536",
                "`rendezvous_port` is 65536; it must be an integer from 1 to 65535; leave the key out for none",
            ),
            (
                "prefetch.max_bytes = 0",
                "`prefetch.max_bytes` is 0; it must be an integer of at least 1; leave the key out for none",
            ),
            (
                "prefetch.max_bytes = -1",
                "`prefetch.max_bytes` is -1; it must be an integer of at least 1; leave the key out for none",
            ),
            ("mesh = { shard = 0 }", "`mesh.shard` is 0; it must be an integer of at least 1"),
            (
                "training.gradient_accumulation = 0",
                "`training.gradient_accumulation` is 0; it must be an integer of at least 1",
            ),
        ] {
            let refusal = refusal(toml);
            assert_eq!(refusal.split_once(": ").unwrap().1, text, "{toml}");
        }
        for norm in ["0", "0.0", "-1.0", "nan", "inf"] {
            let refusal = refusal(&format!("[training]\ngradient_clip_norm = {norm}"));
            assert!(refusal.starts_with("run.toml:2:22: `training.gradient_clip_norm` is "), "{refusal}");
            assert!(
                refusal.ends_with("; it must be a positive finite number; leave the key out for none"),
                "{refusal}"
            );
        }
    }

    #[test]
    fn wrong_names_give_the_nearest_or_all() {
        assert_eq!(
            refusal("[training]\naccumulate = \"locla\""),
            "run.toml:2:14: `training.accumulate` is \"locla\", which does not exist; did you mean \"local\"?"
        );
        assert_eq!(
            refusal("[training]\nnon_finite = \"crash\""),
            "run.toml:2:14: `training.non_finite` is \"crash\", which does not exist; it must be \"error\" or \"skip\" or \
             \"propagate\""
        );
    }

    #[test]
    fn a_mesh_must_name_known_axes_and_multiply_to_the_world_size() {
        assert_eq!(
            refusal("world_size = 4\nmesh = { replicate = 2, shrad = 2 }"),
            "run.toml:2:25: unknown key `mesh.shrad`; did you mean `shard`?"
        );
        assert_eq!(
            refusal("mesh.tensor = 2"),
            "run.toml:1:6: unknown key `mesh.tensor`; keys here are `replicate`, `shard`"
        );
        assert_eq!(
            refusal("mesh = { replicate = 2, shard = 3 }\nworld_size = 4"),
            "run.toml:1:8: `mesh` { replicate = 2, shard = 3 } has 6 ranks, but `world_size` is 4; make the product of \
             the mesh's sizes and the world size equal"
        );
        assert_eq!(
            refusal("mesh = {}"),
            "run.toml:1:8: the mesh has no axis; write `{ shard = N }` with the number of ranks, or leave the mesh out"
        );
    }

    #[test]
    fn resharding_needs_stage_3_and_groups_of_equal_size() {
        for (toml, text) in [
            (
                "world_size = 6\nreshard_after_forward = 4",
                "`reshard_after_forward` is 4, which does not divide the 6 ranks along `shard` into groups; set it to a \
                 divisor of them, such as the ranks of one host, or leave it out",
            ),
            (
                "world_size = 4\nmesh = { replicate = 2, shard = 2 }\nreshard_after_forward = 4",
                "`reshard_after_forward` is 4, which does not divide the 2 ranks along `shard` into groups; set it to a \
                 divisor of them, such as the ranks of one host, or leave it out",
            ),
            (
                "stage = 2\nworld_size = 4\nreshard_after_forward = 2",
                "`reshard_after_forward` cuts gathered parameters, which stage 2 does not have: every rank uses them \
                 whole; set `stage = 3`, or leave the key out",
            ),
            (
                "reshard_after_forward = 1",
                "`reshard_after_forward` is 1; it must be an integer of at least 2; leave the key out for none",
            ),
        ] {
            assert_eq!(refusal(toml).split_once(": ").unwrap().1, text, "{toml}");
        }
        let config = |toml| Config::from_toml(toml, "run.toml").unwrap();
        assert_eq!(config("world_size = 6\nreshard_after_forward = 3").resharding(), Some(3));
        assert_eq!(config("world_size = 6\nreshard_after_forward = 6").resharding(), None, "it is all of them");
    }

    #[test]
    fn every_way_of_writing_a_number_is_read() {
        let config = |toml| Config::from_toml(toml, "run.toml").unwrap();
        assert_eq!(config("world_size = 1_000").world_size, 1000);
        assert_eq!(config("world_size = 0x1F").world_size, 31);
        assert_eq!(config("timeout_s = +1_0.5e-1").timeout_s, 1.05);
        assert_eq!(config("timeout_s = 12").timeout_s, 12.0);
    }

    #[test]
    fn values_set_in_code_meet_the_same_checks() {
        let refusal = |change: fn(&mut Config)| {
            let mut config = Config::default();
            change(&mut config);
            config.validate().unwrap_err().to_string()
        };
        assert_eq!(
            refusal(|config| config.training.gradient_clip_norm = Some(f64::NAN)),
            "Config: `training.gradient_clip_norm` is NaN; it must be a positive finite number; leave the key out for none"
        );
        assert_eq!(
            refusal(|config| config.mesh = Some(Mesh::one_dim(2))),
            "Config: `mesh` { shard = 2 } has 2 ranks, but `world_size` is 1; make the product of the mesh's sizes and \
             the world size equal"
        );
        assert!(refusal(|config| config.timeout_s = -1.0).starts_with("Config: `timeout_s` is -1.0; "));
        assert!(refusal(|config| config.prefetch.backward = usize::MAX).starts_with("Config: `prefetch.backward` is "));
    }

    #[test]
    fn json_meets_the_same_checks_and_repeated_keys_are_refused() {
        let refusal = |json| Config::from_json(json, "run.json").unwrap_err().to_string();
        assert_eq!(
            refusal(r#"{"training": {"gradient_clip_nrom": 1}}"#),
            "run.json: unknown key `training.gradient_clip_nrom`; did you mean `gradient_clip_norm`?"
        );
        assert_eq!(refusal(r#"{"stage": null}"#), "run.json: `stage` is null; it must be an integer from 0 to 3");
        assert_eq!(
            refusal(r#"{"stage": 18446744073709551615}"#),
            "run.json: `stage` is 18446744073709551615; it must be an integer from 0 to 3"
        );
        assert_eq!(
            refusal(r#"{"mesh": [[1]]}"#),
            "run.json: `mesh` is an array; it must be a table of axes, such as { replicate = 2, shard = 4 }"
        );
        assert_eq!(refusal("{\"stage\": 1,\n \"stage\": 2}"), "run.json:2:8: not valid JSON: duplicate key `stage`");
        assert_eq!(refusal("{\"stage\": 1,\n}"), "run.json:2:1: not valid JSON: trailing comma");
        assert_eq!(
            refusal("[]"),
            "run.json: not valid JSON: the whole is an array; it must be an object, and `{}` is enough"
        );
        assert_eq!(refusal(""), "run.json:1:1: not valid JSON: EOF while parsing a value");
    }

    #[test]
    fn broken_toml_keeps_the_place_and_words_of_the_parser() {
        let refusal_of = |toml| match Config::from_toml(toml, "run.toml").unwrap_err() {
            ConfigError::Syntax { at, format: "TOML", message } => (at.to_string(), message),
            other => panic!("{other}"),
        };
        assert_eq!(
            refusal_of("stage = 3\nworld_size ="),
            ("run.toml:2:13".to_owned(), "string values must be quoted, expected literal string".to_owned())
        );
        assert_eq!(refusal_of("stage = 3\nstage = 2"), ("run.toml:2:1".to_owned(), "duplicate key".to_owned()));
        let huge = "9".repeat(60);
        assert_eq!(
            refusal(&format!("stage = {huge}")),
            format!("run.toml:1:9: not valid TOML: the integer {huge} is too large")
        );
    }
}
