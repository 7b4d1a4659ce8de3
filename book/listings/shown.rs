//! Configurations that pages and the README show.

use fsdp_core::{Config, config_keys};

#[test]
fn the_configuration_of_half_precision_is_accepted() {
    let config = Config::from_toml(include_str!("half.toml"), "half.toml").unwrap();
    assert_eq!(config.precision.parameters.name(), "bf16");
}

#[test]
fn the_configuration_in_the_readme_is_accepted() {
    let readme = include_str!("../../README.md");
    let (_, fence) = readme.split_once("```toml\n").unwrap();
    let (toml, _) = fence.split_once("```").unwrap();
    let config = Config::from_toml(toml, "README.md").unwrap();
    assert_eq!(config.resolved_mesh().world_size(), 4);
    for key in config_keys().iter().filter(|key| key.path() != "threads_per_rank") {
        assert!(toml.contains(&format!("{} = ", key.name)), "the README does not show `{}`", key.path());
    }
}
