//! A configuration text as a tree of keys and values that remember their place, the same for TOML and JSON.

use std::fmt;
use std::ops::Range;

use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use toml::de::{DeTable, DeValue};

use super::error::{ConfigError, Location, Place};

/// A key of a table with its value. Places are known for TOML only.
pub(super) struct Entry {
    pub(super) key: String,
    pub(super) key_place: Option<Place>,
    pub(super) value: Value,
    pub(super) value_place: Option<Place>,
}

pub(super) enum Value {
    /// Wide enough for the integers of both formats.
    Integer(i128),
    Number(f64),
    Text(String),
    Bool(bool),
    /// The entries, in the order of the text.
    Table(Vec<Entry>),
    /// A type that no key takes, by its name.
    Other(&'static str),
}

/// The value as an error shows it, with its type where that is not obvious.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Integer(value) => write!(f, "{value}"),
            Value::Number(value) => write!(f, "{value:?}"),
            Value::Text(value) => write!(f, "the string {value:?}"),
            Value::Bool(value) => write!(f, "the boolean {value}"),
            Value::Table(_) => f.write_str("a table"),
            Value::Other(name) => f.write_str(name),
        }
    }
}

/// The entries of a TOML text, in its order.
pub(super) fn parse_toml(text: &str, origin: &str) -> Result<Vec<Entry>, ConfigError> {
    let toml = TomlText { text, origin };
    let table = DeTable::parse(text).map_err(|error| toml.syntax(error.span(), error.message().to_owned()))?;
    toml.entries(table.into_inner())
}

struct TomlText<'a> {
    text: &'a str,
    origin: &'a str,
}

impl TomlText<'_> {
    fn entries(&self, table: DeTable<'_>) -> Result<Vec<Entry>, ConfigError> {
        let mut entries: Vec<_> = table.into_iter().collect();
        // The parser sorts by name; the order of a mesh's axes is that of the text.
        entries.sort_by_key(|(key, _)| key.span().start);
        let entry = |(key, value): (toml::Spanned<_>, toml::Spanned<_>)| {
            let (key_place, value_span) = (self.place(key.span()), value.span());
            Ok(Entry {
                key: std::borrow::Cow::into_owned(key.into_inner()),
                key_place,
                value_place: self.place(value_span.clone()),
                value: self.value(value.into_inner(), value_span)?,
            })
        };
        entries.into_iter().map(entry).collect()
    }

    fn value(&self, value: DeValue<'_>, span: Range<usize>) -> Result<Value, ConfigError> {
        Ok(match value {
            DeValue::Integer(integer) => match i128::from_str_radix(integer.as_str(), integer.radix()) {
                Ok(integer) => Value::Integer(integer),
                Err(_) => return Err(self.syntax(Some(span), format!("the integer {integer} is too large"))),
            },
            DeValue::Float(float) => match float.as_str().parse() {
                Ok(float) => Value::Number(float),
                Err(_) => return Err(self.syntax(Some(span), format!("{float} is not a number"))),
            },
            DeValue::String(text) => Value::Text(text.into_owned()),
            DeValue::Boolean(value) => Value::Bool(value),
            DeValue::Table(table) => Value::Table(self.entries(table)?),
            DeValue::Array(_) => Value::Other("an array"),
            DeValue::Datetime(_) => Value::Other("a date or time"),
        })
    }

    fn place(&self, span: Range<usize>) -> Option<Place> {
        Some(Place::at(self.text, span.start))
    }

    fn syntax(&self, span: Option<Range<usize>>, message: String) -> ConfigError {
        let at = Location { origin: self.origin.to_owned(), place: span.and_then(|span| self.place(span)) };
        ConfigError::Syntax { at, format: "TOML", message }
    }
}

/// The entries of a JSON object, in its order.
pub(super) fn parse_json(text: &str, origin: &str) -> Result<Vec<Entry>, ConfigError> {
    let syntax = |place, message| {
        let at = Location { origin: origin.to_owned(), place };
        ConfigError::Syntax { at, format: "JSON", message }
    };
    match serde_json::from_str(text) {
        Ok(Value::Table(entries)) => Ok(entries),
        Ok(other) => Err(syntax(None, format!("the whole is {other}; it must be an object, and `{{}}` is enough"))),
        Err(error) => {
            // serde_json appends the place to its message; the location already shows it.
            let message = error.to_string();
            let suffix = format!(" at line {} column {}", error.line(), error.column());
            // Its column is that of the last byte read, 0 before the first of a line.
            let place = Place::from_zero(error.line().saturating_sub(1), error.column().saturating_sub(1));
            Err(syntax(Some(place), message.strip_suffix(&suffix).unwrap_or(&message).to_owned()))
        }
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(JsonVisitor)
    }
}

/// Our own walk over JSON: `serde_json::Value` would sort the keys, and of two equal keys silently keep the last.
struct JsonVisitor;

impl<'de> Visitor<'de> for JsonVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_bool<E: de::Error>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Integer(value.into()))
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<Value, E> {
        Ok(Value::Integer(value.into()))
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Value, E> {
        Ok(Value::Number(value))
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<Value, E> {
        Ok(Value::Text(value.to_owned()))
    }

    fn visit_unit<E: de::Error>(self) -> Result<Value, E> {
        Ok(Value::Other("null"))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Value, A::Error> {
        while sequence.next_element::<de::IgnoredAny>()?.is_some() {}
        Ok(Value::Other("an array"))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut entries: Vec<Entry> = Vec::new();
        while let Some(key) = map.next_key::<String>()? {
            if entries.iter().any(|entry| entry.key == key) {
                return Err(de::Error::custom(format_args!("duplicate key `{key}`")));
            }
            entries.push(Entry { key, key_place: None, value: map.next_value()?, value_place: None });
        }
        Ok(Value::Table(entries))
    }
}
