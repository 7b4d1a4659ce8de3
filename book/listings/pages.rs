//! Pages that are written by the code they describe.

use fsdp_core::{Config, config_keys};

use crate::output::assert_shown;

#[test]
fn the_page_of_configuration_keys_is_current() {
    let mut page = String::from(
        "# Configuration keys\n\n\
         <!-- Written from `fsdp_core::config_keys()` by `UPDATE_BOOK=1 cargo book-test`; do not edit. -->\n\n\
         A file is TOML (`.toml`) or JSON (`.json`) with these keys. All of them are optional, and nothing else is\n\
         accepted. `config.to_toml()` prints the keys of a run with their values and these explanations.\n",
    );
    let mut table = "";
    for key in config_keys() {
        if key.table != table {
            table = key.table;
            page += &format!("\n## `[{table}]`\n");
        } else if page.ends_with("explanations.\n") {
            page += "\n## At the top\n";
        }
        let default = key.default_value().map_or("not set".to_owned(), |value| format!("`{value}`"));
        let allowed = key.allowed().replace("{ replicate = 2, shard = 4 }", "`{ replicate = 2, shard = 4 }`");
        page += &format!(
            "\n### `{}`\n\n{}\n\n- Takes: {allowed}\n- Default: {default}\n- Cost: {}\n",
            key.name, key.meaning, key.cost
        );
    }
    assert_shown("src/reference/configuration.md", &page);
}

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
