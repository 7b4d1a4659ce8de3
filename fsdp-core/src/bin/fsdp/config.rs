//! `fsdp config`: a configuration, checked and resolved; a DeepSpeed file, translated; words of other systems.

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use fsdp_core::{Config, ConfigKey, Fate, Translated, config_keys};

use crate::number::{MOST_RANKS, up_to};
use crate::output::put;
use crate::words;

/// Check a configuration and print it with every default; or translate a DeepSpeed file
#[derive(Args)]
#[command(arg_required_else_help = true)]
pub(crate) struct ConfigCommand {
    /// TOML or JSON, by its name
    #[arg(group = "what")]
    file: Option<PathBuf>,
    /// A DeepSpeed configuration: print it as one of ours, and list what it says that ours does not
    #[arg(long, value_name = "DS_CONFIG.JSON", group = "what")]
    from_deepspeed: Option<PathBuf>,
    /// Number of ranks, which a DeepSpeed file does not hold
    #[arg(long, value_name = "N", value_parser = up_to(MOST_RANKS), requires = "from_deepspeed")]
    gpus: Option<usize>,
    /// Fail where a DeepSpeed file asks for what is not there
    #[arg(long, requires = "from_deepspeed")]
    strict: bool,
    /// Print what every key means and costs
    #[arg(long, conflicts_with = "words")]
    explain: bool,
    /// Print the words of FSDP1, FSDP2, DeepSpeed and Megatron-FSDP beside ours
    #[arg(long, group = "what")]
    words: bool,
}

impl ConfigCommand {
    pub(crate) fn run(self) -> Result<ExitCode, Box<dyn Error>> {
        if self.words {
            put!("{}", words::table());
            return Ok(ExitCode::SUCCESS);
        }
        if let Some(file) = &self.from_deepspeed {
            let translated = Config::load_deepspeed(file, self.gpus)?;
            put!("# From {}.\n{}", file.display(), self.printed(&translated.config));
            put!("\n{}", listed(&translated));
            let num_missing = translated.missing().count();
            if self.strict && num_missing > 0 {
                return Err(format!(
                    "{}: {num_missing} of its keys ask for what is not there; remove them",
                    file.display()
                )
                .into());
            }
        } else if let Some(file) = &self.file {
            put!("{}", self.printed(&Config::load(file)?));
        }
        Ok(ExitCode::SUCCESS)
    }

    fn printed(&self, config: &Config) -> String {
        if self.explain { config.to_toml() } else { resolved(config) }
    }
}

/// Every key with its value, and which are defaults.
fn resolved(config: &Config) -> String {
    lines(config, |_| true)
}

/// The keys that are no defaults.
pub(crate) fn brief(config: &Config) -> String {
    lines(config, |key| key.value(config) != key.default_value())
}

fn lines(config: &Config, wanted: impl Fn(&ConfigKey) -> bool) -> String {
    let (mut text, mut table) = (String::new(), "");
    for key in config_keys().iter().filter(|key| wanted(key)) {
        if key.table != table {
            table = key.table;
            text += &format!("\n[{table}]\n");
        }
        let line = match key.value(config) {
            Some(value) => format!("{} = {value}", key.name),
            None => format!("# {} is not set", key.name),
        };
        let is_default = key.value(config) == key.default_value();
        text += &if is_default { format!("{line:<40} # default\n") } else { format!("{line}\n") };
    }
    text
}

/// What became of the keys of a DeepSpeed file, as comments: the whole stays a configuration.
fn listed(translated: &Translated) -> String {
    let mut text = String::new();
    for fate in [Fate::Missing, Fate::Program, Fate::NotNeeded, Fate::Set] {
        let items: Vec<_> = translated.items.iter().filter(|item| item.fate == fate).collect();
        if items.is_empty() {
            continue;
        }
        text += match fate {
            Fate::Missing => "# Not there, so the run differs:\n",
            Fate::Program => "# Said by the program, not here:\n",
            Fate::NotNeeded => "# Not needed:\n",
            Fate::Set => "# Translated:\n",
        };
        for item in items {
            text += &format!("#   {item}\n");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_printed_reads_back_and_marks_defaults() {
        let text = "stage = 2\nworld_size = 4\n[training]\ngradient_clip_norm = 1.0\n";
        let config = Config::from_toml(text, "t").unwrap();
        let printed = resolved(&config);
        assert_eq!(Config::from_toml(&printed, "printed").unwrap(), config);
        let marked = printed.lines().filter(|line| line.ends_with("# default")).count();
        assert_eq!(marked, config_keys().len() - 3, "{printed}");
        assert_eq!(brief(&config), text.replace("\n[", "\n\n["));
    }

    #[test]
    fn a_translation_with_its_list_is_a_configuration() {
        let text = r#"{"zero_optimization": {"stage": 3, "zero_quantized_weights": true}, "steps_per_print": 10}"#;
        let translated = Config::from_deepspeed(text, "t", Some(2)).unwrap();
        let printed = resolved(&translated.config) + &listed(&translated);
        assert_eq!(Config::from_toml(&printed, "printed").unwrap(), translated.config);
        let heads: Vec<_> = printed.lines().filter(|line| line.starts_with("# ") && line.ends_with(':')).collect();
        assert_eq!(heads, ["# Not there, so the run differs:", "# Not needed:", "# Translated:"]);
    }
}
