//! Pages that are written by the code they describe.

use fsdp_core::config_keys;

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
