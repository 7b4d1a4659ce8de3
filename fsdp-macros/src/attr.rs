//! Reads `#[shard(...)]` word by word. After a bad word it goes on behind the next comma, so that every bad word is
//! reported. Whether the words fit together is for `validate`.

use proc_macro2::{TokenStream, TokenTree};
use syn::ext::IdentExt;
use syn::parse::{Parse, ParseStream};
use syn::{Attribute, Ident, LitInt, LitStr, MacroDelimiter, Meta, MetaList, Path, Token, parenthesized, token};

use crate::errors::Errors;
use crate::words;

/// The words that one field carries, over all its attributes.
pub(crate) struct FieldWords {
    /// In the order of the source; no word twice.
    pub(crate) given: Vec<Given>,
    /// False when some word could not be read: what seems to be missing may be that word.
    pub(crate) complete: bool,
}

/// A word of a field and where it stands.
pub(crate) struct Given {
    pub(crate) at: Ident,
    pub(crate) word: Word,
}

/// A word of a field, with its value.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Word {
    Unit,
    Units,
    Nested,
    Keep,
    Replicate,
    Ignore,
    /// One entry per tensor dimension; `None` for `_`.
    Spec(Vec<Option<String>>),
    Prefetch(u32),
    Precision(String),
    Reduce(String),
    Output(String),
    Offload(String),
}

/// What a type says about the path of the `fsdp_burn` crate.
pub(crate) enum CratePath {
    /// Nothing.
    Absent,
    /// `crate = "path"` or `crate = path`.
    Given(Path),
    /// Something that is no path, and was reported.
    Unreadable,
}

/// Whether `attribute` is a `#[shard...]`.
pub(crate) fn is_shard(attribute: &Attribute) -> bool {
    attribute.path().is_ident("shard")
}

/// Reads the attributes of a field or a variant.
pub(crate) fn of_field(attributes: &[Attribute], errors: &mut Errors) -> FieldWords {
    let num_before = errors.num_found();
    let mut given: Vec<Given> = Vec::new();
    for tokens in pieces(attributes, "unit", errors) {
        let Some(item) = Item::read(tokens, errors) else { continue };
        if given.iter().any(|earlier| earlier.at == item.name) {
            errors.at(&item.name, format!("`{}` is given twice", item.name));
        } else if let Some(word) = field_word(&item, errors) {
            given.push(Given { at: item.name, word });
        }
    }
    FieldWords { given, complete: errors.num_found() == num_before }
}

/// Reads the attributes of the type itself.
pub(crate) fn of_type(attributes: &[Attribute], errors: &mut Errors) -> CratePath {
    let mut path = CratePath::Absent;
    for tokens in pieces(attributes, "crate = \"path\"", errors) {
        let Some(item) = Item::read(tokens, errors) else { continue };
        let name = item.name.to_string();
        if words::OF_FIELDS.contains(&name.as_str()) {
            errors.at(&item.name, format!("`{name}` belongs on a field (in an enum, on a variant), not on the type"));
        } else if name != words::CRATE {
            errors.at(&item.name, words::unknown("shard attribute", &name, &[words::CRATE]));
        } else if !matches!(path, CratePath::Absent) {
            errors.at(&item.name, "`crate` is given twice");
        } else {
            path = item.crate_path(errors).map_or(CratePath::Unreadable, CratePath::Given);
        }
    }
    path
}

/// One word as it is written: `name`, `name = value` or `name(list)`.
struct Item {
    name: Ident,
    argument: Argument,
}

enum Argument {
    None,
    Value(TokenStream),
    List(TokenStream),
}

impl Parse for Item {
    fn parse(input: ParseStream) -> syn::Result<Self> {
        if !input.peek(Ident::peek_any) {
            return Err(input.error("expected a word, such as `unit`"));
        }
        let name = Ident::parse_any(input)?;
        let argument = if input.peek(Token![=]) {
            input.parse::<Token![=]>()?;
            Argument::Value(input.parse()?)
        } else if input.peek(token::Paren) {
            let list;
            parenthesized!(list in input);
            Argument::List(list.parse()?)
        } else {
            Argument::None
        };
        if !input.is_empty() {
            return Err(input.error(format!("expected a comma after `{name}`")));
        }
        Ok(Self { name, argument })
    }
}

impl Item {
    fn read(tokens: TokenStream, errors: &mut Errors) -> Option<Self> {
        syn::parse2(tokens).map_err(|error| errors.push(error)).ok()
    }

    /// Reports a value where the word alone says everything.
    fn no_value(&self, errors: &mut Errors) {
        if !matches!(self.argument, Argument::None) {
            let name = &self.name;
            errors.at(name, format!("`{name}` takes no value: write `{name}` alone, or leave it out"));
        }
    }

    /// The value behind `=`, if it is there and reads as a `T`.
    fn value<T: Parse>(&self, needs: &str, errors: &mut Errors) -> Option<T> {
        let value = match &self.argument {
            Argument::Value(tokens) => syn::parse2(tokens.clone()).ok(),
            Argument::None | Argument::List(_) => None,
        };
        if value.is_none() {
            self.bad_argument(needs, errors);
        }
        value
    }

    /// Reports the argument, or the word if it has none: "`prefetch` needs ...".
    fn bad_argument(&self, needs: &str, errors: &mut Errors) {
        let message = format!("`{}` needs {needs}", self.name);
        match &self.argument {
            Argument::Value(tokens) | Argument::List(tokens) if !tokens.is_empty() => errors.at(tokens, message),
            _ => errors.at(&self.name, message),
        }
    }

    /// A depth that fits a `usize` on every machine.
    fn prefetch(&self, errors: &mut Errors) -> Option<u32> {
        let needs = "the number of units to gather ahead, an integer: `prefetch = 2`";
        let literal = self.value::<LitInt>(needs, errors)?;
        let depth = literal.base10_parse().ok().filter(|_| matches!(literal.suffix(), "" | "usize"));
        if depth.is_none() {
            self.bad_argument(needs, errors);
        }
        depth
    }

    /// A string that is one of `known`.
    fn one_of(&self, kind: &str, known: &[&str], errors: &mut Errors) -> Option<String> {
        let literal = self.value::<LitStr>(&format!("{}, in quotes", words::one_of(known)), errors)?;
        let name = literal.value();
        if !known.contains(&name.as_str()) {
            errors.at(literal, words::unknown(kind, &name, known));
            return None;
        }
        Some(name)
    }

    /// The axis of each tensor dimension.
    fn spec(&self, errors: &mut Errors) -> Option<Vec<Option<String>>> {
        let num_before = errors.num_found();
        let tokens = match &self.argument {
            Argument::List(tokens) if !tokens.is_empty() => tokens,
            _ => {
                self.bad_argument("one entry per tensor dimension, a mesh axis or `_`: `spec(\"shard\", _)`", errors);
                return None;
            }
        };
        let mut axes: Vec<Option<String>> = Vec::new();
        for entry in split_at_commas(tokens.clone(), errors) {
            if syn::parse2::<Token![_]>(entry.clone()).is_ok() {
                axes.push(None);
            } else if let Ok(axis) = syn::parse2::<LitStr>(entry.clone()) {
                if axis.value().trim().is_empty() {
                    errors.at(&axis, "a mesh axis needs a name; write `_` for a dimension that is not cut");
                } else if axes.contains(&Some(axis.value())) {
                    let message = format!("axis {:?} is named twice: a mesh axis cuts one dimension", axis.value());
                    errors.at(&axis, message);
                }
                axes.push(Some(axis.value()));
            } else {
                errors.at(entry, "expected the name of a mesh axis in quotes, or `_` for a dimension that is not cut");
            }
        }
        if errors.num_found() > num_before {
            return None;
        }
        if axes.iter().all(Option::is_none) {
            errors
                .at(tokens, "`spec` names no mesh axis; to keep the parameter whole on every rank, write `replicate`");
            return None;
        }
        Some(axes)
    }

    /// The path to the `fsdp_burn` crate.
    fn crate_path(&self, errors: &mut Errors) -> Option<Path> {
        let path = match &self.argument {
            Argument::Value(tokens) => match syn::parse2::<LitStr>(tokens.clone()) {
                Ok(literal) => literal.parse_with(Path::parse_mod_style).ok(),
                Err(_) => syn::parse::Parser::parse2(Path::parse_mod_style, tokens.clone()).ok(),
            },
            Argument::None | Argument::List(_) => None,
        };
        if path.is_none() {
            self.bad_argument("a path: `crate = \"path::to::fsdp_burn\"`", errors);
        }
        path
    }
}

fn field_word(item: &Item, errors: &mut Errors) -> Option<Word> {
    let name = item.name.to_string();
    let plain = match name.as_str() {
        words::UNIT => Word::Unit,
        words::UNITS => Word::Units,
        words::NESTED => Word::Nested,
        words::KEEP => Word::Keep,
        words::REPLICATE => Word::Replicate,
        words::IGNORE => Word::Ignore,
        words::SPEC => return item.spec(errors).map(Word::Spec),
        words::PREFETCH => return item.prefetch(errors).map(Word::Prefetch),
        words::PRECISION => return item.one_of("precision", words::PRECISIONS, errors).map(Word::Precision),
        words::REDUCE => return item.one_of("precision", words::PRECISIONS, errors).map(Word::Reduce),
        words::OUTPUT => return item.one_of("precision", words::PRECISIONS, errors).map(Word::Output),
        words::OFFLOAD => return item.one_of("offload tier", words::TIERS, errors).map(Word::Offload),
        words::CRATE => {
            let remedy = "write `#[shard(crate = \"path\")]` above the `struct` or `enum`";
            errors.at(&item.name, format!("`crate` belongs on the type, not on a field: {remedy}"));
            return None;
        }
        _ => {
            errors.at(&item.name, words::unknown("shard attribute", &name, words::OF_FIELDS));
            return None;
        }
    };
    // The word counts as given even so: what the writer meant is clear, and one mistake makes one message.
    item.no_value(errors);
    Some(plain)
}

/// What stands between the commas of all `#[shard(...)]` among `attributes`. `example` is what an empty one could say.
fn pieces(attributes: &[Attribute], example: &str, errors: &mut Errors) -> Vec<TokenStream> {
    let mut pieces = Vec::new();
    for attribute in attributes.iter().filter(|attribute| is_shard(attribute)) {
        match &attribute.meta {
            Meta::List(list) if matches!(list.delimiter, MacroDelimiter::Paren(_)) && !list.tokens.is_empty() => {
                pieces.extend(split_at_commas(list.tokens.clone(), errors));
            }
            Meta::List(MetaList { delimiter: MacroDelimiter::Paren(_), .. }) | Meta::Path(_) => {
                errors.at(&attribute.meta, format!("`shard` says nothing without a word: `#[shard({example})]`"));
            }
            Meta::List(_) | Meta::NameValue(_) => {
                errors.at(&attribute.meta, format!("`shard` takes its words in parentheses: `#[shard({example})]`"));
            }
        }
    }
    pieces
}

/// The pieces between the commas; a comma may end the list.
fn split_at_commas(tokens: TokenStream, errors: &mut Errors) -> Vec<TokenStream> {
    let mut pieces = Vec::new();
    let mut piece = Vec::new();
    for token in tokens {
        match &token {
            TokenTree::Punct(punct) if punct.as_char() == ',' => {
                if piece.is_empty() {
                    errors.at(token, "nothing stands before this comma");
                } else {
                    pieces.push(piece.drain(..).collect());
                }
            }
            _ => piece.push(token),
        }
    }
    if !piece.is_empty() {
        pieces.push(piece.into_iter().collect());
    }
    pieces
}

#[cfg(test)]
mod tests {
    use syn::parse_quote;

    use super::*;

    fn read(attribute: Attribute) -> (Vec<Word>, Vec<String>) {
        let mut errors = Errors::default();
        let words = of_field(&[attribute], &mut errors);
        assert_eq!(words.complete, errors.num_found() == 0);
        (words.given.into_iter().map(|given| given.word).collect(), errors.messages())
    }

    fn words(attribute: Attribute) -> Vec<Word> {
        let (words, messages) = read(attribute);
        assert!(messages.is_empty(), "{messages:?}");
        words
    }

    fn messages(attribute: Attribute) -> Vec<String> {
        read(attribute).1
    }

    #[test]
    fn every_word_is_read_with_its_value() {
        assert_eq!(
            words(parse_quote!(#[shard(unit, units, nested, keep, replicate, ignore)])),
            [Word::Unit, Word::Units, Word::Nested, Word::Keep, Word::Replicate, Word::Ignore]
        );
        assert_eq!(
            words(parse_quote!(#[shard(
                spec(_, "shard", "tensor"),
                prefetch = 0,
                precision = "f16",
                reduce = "bf16",
                output = "f32",
                offload = "nvme",
            )])),
            [
                Word::Spec(vec![None, Some("shard".into()), Some("tensor".into())]),
                Word::Prefetch(0),
                Word::Precision("f16".into()),
                Word::Reduce("bf16".into()),
                Word::Output("f32".into()),
                Word::Offload("nvme".into()),
            ]
        );
    }

    #[test]
    fn other_attributes_are_left_alone() {
        assert!(words(parse_quote!(#[module(skip)])).is_empty());
        assert!(words(parse_quote!(#[other::shard(anything)])).is_empty());
    }

    #[test]
    fn several_attributes_count_as_one() {
        let mut errors = Errors::default();
        let attributes = [parse_quote!(#[shard(unit)]), parse_quote!(#[shard(keep, unit)])];
        let words = of_field(&attributes, &mut errors);
        assert_eq!(words.given.len(), 2);
        assert_eq!(errors.messages(), ["`unit` is given twice"]);
    }

    #[test]
    fn reading_goes_on_behind_a_bad_word() {
        let (words, messages) = read(parse_quote!(#[shard(unti, keep = true, 7, prefetch = "2", units)]));
        assert_eq!(words, [Word::Keep, Word::Units]);
        assert_eq!(
            messages,
            [
                "unknown shard attribute `unti`; did you mean `unit`?",
                "`keep` takes no value: write `keep` alone, or leave it out",
                "expected a word, such as `unit`",
                "`prefetch` needs the number of units to gather ahead, an integer: `prefetch = 2`",
            ]
        );
    }

    #[test]
    fn an_attribute_without_words_is_refused() {
        let empty = "`shard` says nothing without a word: `#[shard(unit)]`";
        assert_eq!(messages(parse_quote!(#[shard])), [empty]);
        assert_eq!(messages(parse_quote!(#[shard()])), [empty]);
        let parentheses = "`shard` takes its words in parentheses: `#[shard(unit)]`";
        assert_eq!(messages(parse_quote!(#[shard = "unit"])), [parentheses]);
        assert_eq!(messages(parse_quote!(#[shard[unit]])), [parentheses]);
        assert_eq!(messages(parse_quote!(#[shard { unit }])), [parentheses]);
    }

    #[test]
    fn punctuation_is_checked() {
        assert_eq!(messages(parse_quote!(#[shard(unit,, keep)])), ["nothing stands before this comma"]);
        assert_eq!(messages(parse_quote!(#[shard(,)])), ["nothing stands before this comma"]);
        assert_eq!(messages(parse_quote!(#[shard(unit keep)])), ["expected a comma after `unit`"]);
        assert_eq!(messages(parse_quote!(#[shard(unit::keep)])), ["expected a comma after `unit`"]);
    }

    #[test]
    fn a_prefetch_depth_is_a_plain_integer() {
        let needs = ["`prefetch` needs the number of units to gather ahead, an integer: `prefetch = 2`"];
        assert_eq!(messages(parse_quote!(#[shard(prefetch)])), needs);
        assert_eq!(messages(parse_quote!(#[shard(prefetch(2))])), needs);
        assert_eq!(messages(parse_quote!(#[shard(prefetch = -1)])), needs);
        assert_eq!(messages(parse_quote!(#[shard(prefetch = 1.5)])), needs);
        assert_eq!(messages(parse_quote!(#[shard(prefetch = 1 + 1)])), needs);
        assert_eq!(messages(parse_quote!(#[shard(prefetch = 2u8)])), needs);
        assert_eq!(messages(parse_quote!(#[shard(prefetch = 99999999999)])), needs);
        assert_eq!(words(parse_quote!(#[shard(prefetch = 0x10)])), [Word::Prefetch(16)]);
        assert_eq!(words(parse_quote!(#[shard(prefetch = 2usize)])), [Word::Prefetch(2)]);
    }

    #[test]
    fn names_of_settings_are_known_strings() {
        assert_eq!(
            messages(parse_quote!(#[shard(precision = bf16)])),
            ["`precision` needs `f32`, `bf16` or `f16`, in quotes"]
        );
        assert_eq!(
            messages(parse_quote!(#[shard(precision = "fp16")])),
            ["unknown precision `fp16`; did you mean `f16`?"]
        );
        assert_eq!(
            messages(parse_quote!(#[shard(offload = "disk")])),
            ["unknown offload tier `disk`; expected `none`, `cpu` or `nvme`"]
        );
        assert_eq!(messages(parse_quote!(#[shard(offload)])), ["`offload` needs `none`, `cpu` or `nvme`, in quotes"]);
    }

    #[test]
    fn a_spec_names_axes_once_each() {
        let needs = ["`spec` needs one entry per tensor dimension, a mesh axis or `_`: `spec(\"shard\", _)`"];
        assert_eq!(messages(parse_quote!(#[shard(spec)])), needs);
        assert_eq!(messages(parse_quote!(#[shard(spec())])), needs);
        assert_eq!(messages(parse_quote!(#[shard(spec = "shard")])), needs);
        assert_eq!(
            messages(parse_quote!(#[shard(spec(_, _))])),
            ["`spec` names no mesh axis; to keep the parameter whole on every rank, write `replicate`"]
        );
        assert_eq!(
            messages(parse_quote!(#[shard(spec(shard, "a", 1, "", "a"))])),
            [
                "expected the name of a mesh axis in quotes, or `_` for a dimension that is not cut",
                "expected the name of a mesh axis in quotes, or `_` for a dimension that is not cut",
                "a mesh axis needs a name; write `_` for a dimension that is not cut",
                "axis \"a\" is named twice: a mesh axis cuts one dimension",
            ]
        );
    }

    #[test]
    fn words_are_told_where_they_belong() {
        assert_eq!(
            messages(parse_quote!(#[shard(crate = "a")])),
            [
                "`crate` belongs on the type, not on a field: write `#[shard(crate = \"path\")]` above the `struct` or `enum`"
            ]
        );
        let mut errors = Errors::default();
        of_type(&[parse_quote!(#[shard(unit, crat, rename)])], &mut errors);
        assert_eq!(
            errors.messages(),
            [
                "`unit` belongs on a field (in an enum, on a variant), not on the type",
                "unknown shard attribute `crat`; did you mean `crate`?",
                "unknown shard attribute `rename`; expected `crate`",
            ]
        );
    }

    #[test]
    fn the_crate_path_is_a_string_or_a_path() {
        let read = |attribute: Attribute| {
            let mut errors = Errors::default();
            let path = of_type(&[attribute], &mut errors);
            assert_eq!(matches!(path, CratePath::Unreadable), errors.num_found() > 0);
            (path, errors.messages())
        };
        for attribute in [parse_quote!(#[shard(crate = "crate::fsdp")]), parse_quote!(#[shard(crate = crate::fsdp)])] {
            let (path, _) = read(attribute);
            assert!(matches!(path, CratePath::Given(path) if path == parse_quote!(crate::fsdp)));
        }
        let needs = ["`crate` needs a path: `crate = \"path::to::fsdp_burn\"`"];
        for attribute in [
            parse_quote!(#[shard(crate)]),
            parse_quote!(#[shard(crate = "")]),
            parse_quote!(#[shard(crate = "no path")]),
            parse_quote!(#[shard(crate = Vec<u8>)]),
            parse_quote!(#[shard(crate = 5)]),
            parse_quote!(#[shard(crate("a"))]),
        ] {
            assert_eq!(read(attribute).1, needs);
        }
    }
}
