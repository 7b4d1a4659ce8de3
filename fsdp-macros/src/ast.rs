//! The user's type as the derive sees it: named fields (of an enum: variants), each with its rule.
//!
//! Names are spelled as Burn's `Module` derive spells them in parameter paths: `ident.to_string()`, so that the raw
//! identifier `r#type` is the component "r#type".

use syn::{Attribute, Data, DeriveInput, Fields, Ident, Type, Variant};

use crate::attr::{self, Word};
use crate::bounds;
use crate::errors::Errors;
use crate::validate::{self, Rule};

/// A field of a struct, or a variant of an enum of modules.
#[derive(Debug)]
pub(crate) struct Field<'a> {
    /// The component in the paths of the field's parameters.
    pub(crate) name: String,
    pub(crate) ty: &'a Type,
    /// What the field itself says, if anything.
    pub(crate) rule: Option<Rule>,
    /// Whether the rules of the field's type follow, prefixed with the field's name.
    pub(crate) nested: bool,
}

/// Reads the fields of `input` that carry attributes; reports each mistake on the way.
pub(crate) fn fields<'a>(input: &'a DeriveInput, errors: &mut Errors) -> Vec<Field<'a>> {
    match &input.data {
        Data::Struct(data) => match &data.fields {
            Fields::Named(fields) => {
                let named = fields.named.iter().filter_map(|field| Some((field.ident.as_ref()?, field)));
                named.filter_map(|(name, field)| read(input, name, &field.ty, &field.attrs, errors)).collect()
            }
            Fields::Unnamed(_) => {
                let reason = "rules name fields by the paths of their parameters, as Burn's `Module` does";
                errors.at(&input.ident, format!("`Sharded` needs named fields: {reason}"));
                Vec::new()
            }
            Fields::Unit => Vec::new(),
        },
        Data::Enum(data) => data.variants.iter().filter_map(|variant| read_variant(input, variant, errors)).collect(),
        Data::Union(data) => {
            errors.at(data.union_token, "`Sharded` is for structs and for enums of modules, not for unions");
            Vec::new()
        }
    }
}

/// A variant with its one module; attributes may stand on the variant or on the module, but not on both.
fn read_variant<'a>(input: &'a DeriveInput, variant: &'a Variant, errors: &mut Errors) -> Option<Field<'a>> {
    let inner = variant.fields.iter().flat_map(|field| &field.attrs).find(|attribute| attr::is_shard(attribute));
    let outer = variant.attrs.iter().find(|attribute| attr::is_shard(attribute));
    let first = outer.or(inner)?;
    match &variant.fields {
        Fields::Unnamed(fields) if fields.unnamed.len() == 1 => {
            let field = fields.unnamed.first()?;
            if let (Some(_), Some(inner)) = (outer, inner) {
                errors.at(inner, "the variant carries a `shard` attribute already: write all words in one place");
                return None;
            }
            let attributes = if outer.is_some() { &variant.attrs } else { &field.attrs };
            read(input, &variant.ident, &field.ty, attributes, errors)
        }
        Fields::Unnamed(_) | Fields::Named(_) | Fields::Unit => {
            let expected = format!("`{}(Module)`", variant.ident);
            errors.at(first, format!("`shard` needs a variant with exactly one unnamed field: {expected}"));
            None
        }
    }
}

fn read<'a>(
    input: &DeriveInput,
    name: &Ident,
    ty: &'a Type,
    attributes: &[Attribute],
    errors: &mut Errors,
) -> Option<Field<'a>> {
    if !attributes.iter().any(attr::is_shard) {
        return None;
    }
    let words = attr::of_field(attributes, errors);
    let rule = validate::rule(&words, errors);
    let nested = words.given.iter().find(|given| given.word == Word::Nested);
    if let Some(nested) = nested
        && bounds::names(ty).iter().any(|path| path == "Self" || *path == input.ident)
    {
        let reason = "the rules of a type inside itself would never end";
        errors.at(&nested.at, format!("`nested` cannot reach into `{}` from within: {reason}", input.ident));
    }
    Some(Field { name: name.to_string(), ty, rule, nested: nested.is_some() })
}

#[cfg(test)]
mod tests {
    use syn::parse_quote;

    use super::*;

    fn names(input: DeriveInput) -> Vec<String> {
        let mut errors = Errors::default();
        let names = fields(&input, &mut errors).into_iter().map(|field| field.name).collect();
        assert_eq!(errors.messages(), [""; 0]);
        names
    }

    fn messages(input: DeriveInput) -> Vec<String> {
        let mut errors = Errors::default();
        fields(&input, &mut errors);
        errors.messages()
    }

    #[test]
    fn fields_without_attributes_are_left_out() {
        let input = parse_quote!(
            struct Model {
                norm: LayerNorm,
                #[shard(unit)]
                r#type: Linear,
                #[module(skip)]
                width: usize,
                #[shard(nested)]
                encoder: Encoder,
            }
        );
        assert_eq!(names(input), ["r#type", "encoder"]);
    }

    #[test]
    fn attributes_stand_on_a_variant_or_on_its_module() {
        let input = parse_quote!(
            enum Mixer {
                #[shard(unit)]
                Attention(Attention),
                Conv(#[shard(nested)] Conv),
                Plain(Linear),
                Nothing,
                Unrelated {
                    a: u8,
                    b: u8,
                },
            }
        );
        assert_eq!(names(input), ["Attention", "Conv"]);
    }

    #[test]
    fn attributes_in_both_places_are_refused() {
        let input = parse_quote!(
            enum Mixer {
                #[shard(unit)]
                Conv(#[shard(keep)] Conv),
            }
        );
        assert_eq!(messages(input), ["the variant carries a `shard` attribute already: write all words in one place"]);
    }

    #[test]
    fn attributes_need_a_variant_with_one_unnamed_field() {
        let input = parse_quote!(
            enum Mixer {
                #[shard(unit)]
                Nothing,
                #[shard(unit)]
                Two(A, B),
                Three(A, #[shard(unit)] B, C),
                Named {
                    #[shard(unit)]
                    field: A,
                },
            }
        );
        let expected = |name| format!("`shard` needs a variant with exactly one unnamed field: `{name}(Module)`");
        assert_eq!(messages(input), ["Nothing", "Two", "Three", "Named"].map(expected));
    }

    #[test]
    fn a_unit_struct_and_an_empty_enum_have_no_rules() {
        assert!(
            names(parse_quote!(
                struct Nothing;
            ))
            .is_empty()
        );
        assert!(
            names(parse_quote!(
                struct Nothing {}
            ))
            .is_empty()
        );
        assert!(
            names(parse_quote!(
                enum Nothing {}
            ))
            .is_empty()
        );
    }

    #[test]
    fn tuple_structs_and_unions_are_refused_once() {
        let needs = "`Sharded` needs named fields: rules name fields by the paths of their parameters, as Burn's \
                     `Module` does";
        assert_eq!(
            messages(parse_quote!(
                struct Pair(#[shard(unti)] A, B);
            )),
            [needs]
        );
        assert_eq!(
            messages(parse_quote!(union Either { a: u8, b: u8 })),
            ["`Sharded` is for structs and for enums of modules, not for unions"]
        );
    }

    #[test]
    fn a_type_cannot_nest_itself() {
        let input = parse_quote!(
            struct Tree {
                #[shard(units, nested)]
                by_name: Vec<Tree>,
                #[shard(nested)]
                by_self: Option<Box<Self>>,
                #[shard(nested)]
                elsewhere: other::Tree,
                #[shard(units)]
                without_rules: Vec<Tree>,
            }
        );
        let refused =
            "`nested` cannot reach into `Tree` from within: the rules of a type inside itself would never end";
        assert_eq!(messages(input), [refused; 2]);
    }
}
