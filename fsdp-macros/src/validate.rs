//! Whether the words of a field fit together: one function per rule, with its reason.
//!
//! Out comes a [`Rule`], in which contradictions cannot be written down.

use syn::Ident;

use crate::attr::{FieldWords, Given, Word};
use crate::errors::Errors;
use crate::words;

/// What a field says about its parameters, free of contradictions.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Rule {
    pub(crate) role: Role,
    pub(crate) keep: bool,
    pub(crate) replicate: bool,
    pub(crate) spec: Option<Vec<Option<String>>>,
    pub(crate) prefetch: Option<u32>,
    pub(crate) precision: Option<String>,
    pub(crate) reduce: Option<String>,
    pub(crate) output: Option<String>,
    pub(crate) offload: Option<String>,
}

/// Which unit the parameters of a field belong to.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) enum Role {
    Unit,
    Units,
    /// The unit around the field.
    #[default]
    Root,
    Ignore,
}

/// Checks the words of a field; its rule, if the words are one.
///
/// `nested` alone is no rule of the field: its type brings them. After a mistake the result is of no use.
pub(crate) fn rule(field: &FieldWords, errors: &mut Errors) -> Option<Rule> {
    if !ignore_stands_alone(field, errors) {
        return None;
    }
    one_role(field, errors);
    replicate_or_spec(field, errors);
    settings_need_a_unit(field, errors);
    build(&field.given)
}

/// An ignored field is not managed at all, so there is nothing that another word could apply to.
fn ignore_stands_alone(field: &FieldWords, errors: &mut Errors) -> bool {
    let others: Vec<_> = field.given.iter().filter(|given| given.word != Word::Ignore).collect();
    if others.len() == field.given.len() {
        return true;
    }
    if let Some(other) = others.first() {
        let message = format!("`ignore` leaves the field alone, so `{}` has no meaning beside it", other.at);
        errors.at(&other.at, message);
    }
    others.is_empty()
}

/// A field is one unit or a row of units. For units within a unit there is `nested`.
fn one_role(field: &FieldWords, errors: &mut Errors) {
    if let Some((_, later)) = both(field, words::UNIT, words::UNITS) {
        let choice = "`unit` makes one unit of the field, `units` one of each element";
        errors.at(later, format!("a field is either `unit` or `units`: {choice}"));
    }
}

/// A replicated parameter is not cut, a spec says how it is cut.
fn replicate_or_spec(field: &FieldWords, errors: &mut Errors) {
    if let Some((earlier, later)) = both(field, words::REPLICATE, words::SPEC) {
        let reason = "`replicate` leaves every parameter whole, `spec` cuts it";
        errors.at(later, format!("`{later}` contradicts `{earlier}`: {reason}"));
    }
}

/// Keeping, prefetching, element types and offloading happen to whole units; a field within another unit cannot differ.
fn settings_need_a_unit(field: &FieldWords, errors: &mut Errors) {
    let is_unit = field.given.iter().any(|given| matches!(given.word, Word::Unit | Word::Units));
    // Where a word could not be read, it may have been the missing one.
    if is_unit || !field.complete {
        return;
    }
    for given in &field.given {
        let is_setting = match given.word {
            Word::Keep
            | Word::Prefetch(_)
            | Word::Precision(_)
            | Word::Reduce(_)
            | Word::Output(_)
            | Word::Offload(_) => true,
            Word::Unit | Word::Units | Word::Nested | Word::Replicate | Word::Ignore | Word::Spec(_) => false,
        };
        if is_setting {
            let word = &given.at;
            errors.at(word, format!("`{word}` is a setting of a unit: it needs `unit` or `units` beside it"));
        }
    }
}

/// The places of two words, the earlier first, if the field carries both.
fn both<'a>(field: &'a FieldWords, one: &str, other: &str) -> Option<(&'a Ident, &'a Ident)> {
    let mut found = field.given.iter().map(|given| &given.at).filter(|at| *at == one || *at == other);
    Some((found.next()?, found.next()?))
}

fn build(given: &[Given]) -> Option<Rule> {
    let mut rule = Rule::default();
    for given in given {
        match &given.word {
            Word::Unit => rule.role = Role::Unit,
            Word::Units => rule.role = Role::Units,
            Word::Ignore => rule.role = Role::Ignore,
            Word::Keep => rule.keep = true,
            Word::Replicate => rule.replicate = true,
            Word::Spec(axes) => rule.spec = Some(axes.clone()),
            Word::Prefetch(depth) => rule.prefetch = Some(*depth),
            Word::Precision(name) => rule.precision = Some(name.clone()),
            Word::Reduce(name) => rule.reduce = Some(name.clone()),
            Word::Output(name) => rule.output = Some(name.clone()),
            Word::Offload(tier) => rule.offload = Some(tier.clone()),
            Word::Nested => {}
        }
    }
    given.iter().any(|given| given.word != Word::Nested).then_some(rule)
}

#[cfg(test)]
mod tests {
    use syn::{Attribute, parse_quote};

    use super::*;
    use crate::attr;

    fn read(attribute: Attribute) -> (Option<Rule>, Vec<String>) {
        let mut errors = Errors::default();
        let words = attr::of_field(&[attribute], &mut errors);
        let rule = rule(&words, &mut errors);
        (rule, errors.messages())
    }

    fn accepted(attribute: Attribute) -> Option<Rule> {
        let (rule, messages) = read(attribute);
        assert!(messages.is_empty(), "{messages:?}");
        rule
    }

    #[test]
    fn a_field_without_a_role_stays_in_the_unit_around_it() {
        let replicated = Rule { role: Role::Root, replicate: true, ..Rule::default() };
        assert_eq!(accepted(parse_quote!(#[shard(replicate)])), Some(replicated));
        let spec = Some(vec![Some("shard".into()), None]);
        assert_eq!(accepted(parse_quote!(#[shard(spec("shard", _))])), Some(Rule { spec, ..Rule::default() }));
    }

    #[test]
    fn nested_alone_is_no_rule_of_the_field() {
        assert_eq!(accepted(parse_quote!(#[shard(nested)])), None);
        let units = Rule { role: Role::Units, ..Rule::default() };
        assert_eq!(accepted(parse_quote!(#[shard(nested, units)])), Some(units));
    }

    #[test]
    fn settings_of_a_unit_may_stand_before_it() {
        let rule = accepted(parse_quote!(
            #[shard(keep, prefetch = 2, precision = "bf16", reduce = "f16", output = "f32", offload = "cpu", unit)]
        ));
        let expected = Rule {
            role: Role::Unit,
            keep: true,
            prefetch: Some(2),
            precision: Some("bf16".into()),
            reduce: Some("f16".into()),
            output: Some("f32".into()),
            offload: Some("cpu".into()),
            ..Rule::default()
        };
        assert_eq!(rule, Some(expected));
    }

    #[test]
    fn settings_without_a_unit_are_refused_one_by_one() {
        let (_, messages) = read(parse_quote!(
            #[shard(nested, keep, prefetch = 1, precision = "f32", reduce = "f32", output = "f32", offload = "none")]
        ));
        let needs = |word| format!("`{word}` is a setting of a unit: it needs `unit` or `units` beside it");
        assert_eq!(messages, ["keep", "prefetch", "precision", "reduce", "output", "offload"].map(needs));
    }

    #[test]
    fn an_unreadable_word_may_be_the_missing_unit() {
        let (_, messages) = read(parse_quote!(#[shard(unti, keep)]));
        assert_eq!(messages, ["unknown shard attribute `unti`; did you mean `unit`?"]);
    }

    #[test]
    fn ignore_stands_alone_and_is_told_once() {
        let (_, messages) = read(parse_quote!(#[shard(keep, ignore, unit, units)]));
        assert_eq!(messages, ["`ignore` leaves the field alone, so `keep` has no meaning beside it"]);
        let ignored = Rule { role: Role::Ignore, ..Rule::default() };
        assert_eq!(accepted(parse_quote!(#[shard(ignore)])), Some(ignored));
    }

    #[test]
    fn contradictions_are_shown_at_the_later_word() {
        let (_, messages) = read(parse_quote!(#[shard(units, spec("shard"), unit, replicate)]));
        assert_eq!(
            messages,
            [
                "a field is either `unit` or `units`: `unit` makes one unit of the field, `units` one of each element",
                "`replicate` contradicts `spec`: `replicate` leaves every parameter whole, `spec` cuts it",
            ]
        );
    }
}
