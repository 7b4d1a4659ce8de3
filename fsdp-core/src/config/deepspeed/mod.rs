//! A DeepSpeed configuration as one of ours: what maps, and what does not, each key with its reason.
//!
//! DeepSpeed's keys are those of its page "DeepSpeed Configuration JSON". Nothing is dropped in silence: a key either sets
//! something, or is listed with the reason why it does not, or is an error.

mod apply;
mod keys;
mod offload;

use std::fmt;
use std::path::Path;

pub use keys::Fate;

use super::tree::{Entry, Value, parse_json};
use super::{Config, ConfigError, Location};
use crate::config::nearest::nearest;
use apply::Batch;
use keys::{How, RULES, Rule};
use offload::Offload;

/// A DeepSpeed configuration, translated.
///
/// ```
/// use fsdp_core::{Config, Fate, Stage};
///
/// let text = r#"{
///     "train_micro_batch_size_per_gpu": 4,
///     "gradient_clipping": 1.0,
///     "bf16": {"enabled": true},
///     "zero_optimization": {"stage": 2, "overlap_comm": true},
///     "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}}
/// }"#;
/// let read = Config::from_deepspeed(text, "ds_config.json", Some(8))?;
/// assert_eq!((read.config.stage, read.config.world_size), (Stage::Gradients, 8));
/// assert_eq!((read.micro_batch_size, read.learning_rate), (Some(4), Some(3e-4)));
/// // Everything that is no setting of a run is listed with its reason.
/// let overlap = read.items.iter().find(|item| item.key == "zero_optimization.overlap_comm").expect("it is listed");
/// assert_eq!(overlap.fate, Fate::NotNeeded);
///
/// let error = Config::from_deepspeed(r#"{"gradient_cliping": 1.0}"#, "ds_config.json", None).unwrap_err();
/// assert_eq!(error.to_string(), "ds_config.json: unknown key `gradient_cliping`; did you mean `gradient_clipping`?");
/// # Ok::<(), fsdp_core::ConfigError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Translated {
    /// The configuration.
    pub config: Config,
    /// Every key of the file, in its order, with what became of it.
    pub items: Vec<TranslatedItem>,
    /// Sequences of a rank in one micro-batch, where the file says so: the program makes batches.
    pub micro_batch_size: Option<usize>,
    /// The learning rate, where the file says so: the program gives it to each step.
    pub learning_rate: Option<f64>,
}

/// One key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TranslatedItem {
    /// Its path, joined with dots.
    pub key: String,
    /// Its value, as an error would show it.
    pub value: String,
    /// What became of it.
    pub fate: Fate,
    /// The keys that it sets here, or the reason why it sets none.
    pub told: String,
}

/// As a line of a list. Keys are the file's, so what would break the line is escaped.
impl fmt::Display for TranslatedItem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} = {}: {}", self.key.escape_debug(), self.value, self.told)
    }
}

impl Translated {
    /// Keys whose effect is not available: the run differs from DeepSpeed's in them.
    pub fn missing(&self) -> impl Iterator<Item = &TranslatedItem> {
        self.items.iter().filter(|item| item.fate == Fate::Missing)
    }
}

impl Config {
    /// Reads a DeepSpeed configuration, JSON. `num_ranks` is the number of ranks if the caller knows it; else it follows
    /// from the batch sizes where all three are given, and is 1 where they are not. `origin` is the file's name in errors.
    ///
    /// # Errors
    /// If the text is no JSON object, names a key that DeepSpeed does not have, has a value of another type or out of
    /// range, or batch sizes that do not multiply.
    pub fn from_deepspeed(text: &str, origin: &str, num_ranks: Option<usize>) -> Result<Translated, ConfigError> {
        let mut translator = Translator {
            origin,
            out: Translated {
                config: Config { stage: crate::Stage::Ddp, ..Config::default() },
                items: Vec::new(),
                micro_batch_size: None,
                learning_rate: None,
            },
            batch: Batch::default(),
            mics: None,
            hpz: None,
            offload: Offload::default(),
        };
        translator.table("", parse_json(text, origin)?)?;
        translator.finish(num_ranks)?;
        translator.out.config.validate()?;
        Ok(translator.out)
    }

    /// Reads a DeepSpeed configuration from a file; see [`Config::from_deepspeed`].
    ///
    /// # Errors
    /// If the file cannot be read, or as [`Config::from_deepspeed`].
    pub fn load_deepspeed(path: impl AsRef<Path>, num_ranks: Option<usize>) -> Result<Translated, ConfigError> {
        let file = path.as_ref();
        let text =
            std::fs::read_to_string(file).map_err(|source| ConfigError::Read { file: file.to_owned(), source })?;
        Self::from_deepspeed(&text, &file.display().to_string(), num_ranks)
    }
}

struct Translator<'a> {
    origin: &'a str,
    out: Translated,
    batch: Batch,
    /// Ranks of one copy in MiCS, which is hybrid sharding.
    mics: Option<usize>,
    hpz: Option<usize>,
    offload: Offload,
}

impl Translator<'_> {
    fn table(&mut self, path: &str, entries: Vec<Entry>) -> Result<(), ConfigError> {
        for entry in entries {
            let key = if path.is_empty() { entry.key.clone() } else { format!("{path}.{}", entry.key) };
            let (value, told_value) = (entry.value, TranslatedItem::value_of);
            if entry.key.starts_with('_') || entry.key.starts_with("//") {
                self.list(&key, told_value(&value), Fate::NotNeeded, "a comment");
                continue;
            }
            let rule = RULES.iter().find(|rule| rule.key == key);
            match (rule, value) {
                // What HF's and other trainers fill in; here the default stays.
                (Some(_), Value::Text(text)) if text == "auto" => {
                    let told = "filled in by the trainer there; here the default, or what the program gives";
                    self.list(&key, "\"auto\"".to_owned(), Fate::Program, told);
                }
                (Some(Rule { how: How::Section(inner), .. }), Value::Table(entries)) => {
                    if *inner {
                        self.table(&key, entries)?;
                    } else {
                        self.section(&key, entries)?;
                    }
                }
                (Some(rule), value) => self.value(rule, &key, value)?,
                (None, value) => match free_section_of(&key) {
                    Some(rule) => self.list(&key, told_value(&value), rule.0, rule.1),
                    None => return Err(self.unknown(path, &entry.key, key)),
                },
            }
        }
        Ok(())
    }

    /// A section that is wholly foreign: listed as one, and harmless where it is switched off.
    fn section(&mut self, key: &str, entries: Vec<Entry>) -> Result<(), ConfigError> {
        let is_off = entries.iter().any(|entry| entry.key == "enabled" && matches!(entry.value, Value::Bool(false)));
        let Some((fate, told)) = free_section_of(&format!("{key}.x")) else { return Ok(()) };
        let value = format!("a table of {} keys", entries.len());
        match is_off {
            true => self.list(key, value, Fate::NotNeeded, "it is switched off"),
            false => self.list(key, value, fate, told),
        }
        Ok(())
    }

    fn value(&mut self, rule: &Rule, key: &str, value: Value) -> Result<(), ConfigError> {
        let told_value = TranslatedItem::value_of(&value);
        match rule.how {
            How::Set(set) => {
                let (fate, told) = set(self, key, &value)?;
                self.list(key, told_value, fate, &told);
            }
            How::Listed(fate, told) => self.list(key, told_value, fate, told),
            How::Unless(is_neutral, told) => {
                let neutral = is_neutral(&value);
                let (fate, told) =
                    if neutral { (Fate::NotNeeded, "it is switched off, or as here") } else { (Fate::Missing, told) };
                self.list(key, told_value, fate, told);
            }
            // A section that is a plain value, as old files have it: `"zero_optimization": true`.
            How::Section(_) => match (key, &value) {
                ("zero_optimization", Value::Bool(is_on)) => {
                    self.out.config.stage = if *is_on { crate::Stage::OptimizerState } else { crate::Stage::Ddp };
                    self.list(key, told_value, Fate::Set, if *is_on { "stage = 1" } else { "stage = 0" });
                }
                (_, Value::Bool(false)) | (_, Value::Other("null")) => {
                    self.list(key, told_value, Fate::NotNeeded, "it is switched off");
                }
                _ => return Err(self.wrong_type(key, "a table", &value)),
            },
        }
        Ok(())
    }

    fn list(&mut self, key: &str, value: String, fate: Fate, told: &str) {
        self.out.items.push(TranslatedItem { key: key.to_owned(), value, fate, told: told.to_owned() });
    }

    fn unknown(&self, table: &str, name: &str, key: String) -> ConfigError {
        let known = names_in(table);
        let near = nearest(name, known.iter().copied());
        let elsewhere = RULES.iter().find(|rule| rule.key.rsplit('.').next() == Some(name) && rule.key != key);
        let at = self.at();
        match (near, elsewhere) {
            (None, Some(rule)) => {
                let table = rule.key.rsplit_once('.').map_or("", |(table, _)| table);
                ConfigError::MisplacedKey { at, key: name.to_owned(), table }
            }
            (nearest, _) => ConfigError::UnknownKey { at, key, nearest, nearest_table: None, known },
        }
    }

    fn wrong_type(&self, key: &str, expected: &str, got: &Value) -> ConfigError {
        let (key, expected, got) = (key.to_owned(), expected.to_owned(), got.to_string());
        ConfigError::WrongType { at: self.at(), key, expected, got }
    }

    fn at(&self) -> Location {
        Location { origin: self.origin.to_owned(), place: None }
    }
}

impl TranslatedItem {
    fn value_of(value: &Value) -> String {
        match value {
            Value::Text(text) => format!("{text:?}"),
            Value::Bool(value) => value.to_string(),
            other => other.to_string(),
        }
    }
}

/// What is said of keys that DeepSpeed hands on to others, by the section they are in.
fn free_section_of(key: &str) -> Option<(Fate, &'static str)> {
    let mut rules = RULES.iter().filter_map(|rule| Some((rule.key.strip_suffix(".*")?, rule)));
    let (_, rule) = rules.find(|(section, _)| key.strip_prefix(section).is_some_and(|rest| rest.starts_with('.')))?;
    match rule.how {
        How::Listed(fate, told) => Some((fate, told)),
        _ => None,
    }
}

/// The names of a table's keys.
fn names_in(table: &str) -> Vec<&'static str> {
    let names = RULES.iter().filter_map(|rule| match table {
        "" => Some(rule.key),
        _ => rule.key.strip_prefix(table)?.strip_prefix('.'),
    });
    names.filter(|name| !name.contains('.') && *name != "*").collect()
}

#[cfg(test)]
mod tests;
