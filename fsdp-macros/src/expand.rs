//! Tokens in, tokens out: the impl of `Sharded`, or the mistakes beside an impl without rules.
//!
//! ```text
//! #[derive(Sharded)]                       const _: () = {
//! struct Gpt {                                 #[automatically_derived]
//!     #[shard(unit, keep)]                     impl ::fsdp_burn::Sharded for Gpt {
//!     head: Linear,                                fn wrap_policy() -> ::fsdp_burn::WrapPolicy {
//!     #[shard(nested)]                                 ::fsdp_burn::WrapPolicy::new()
//!     encoder: Encoder,                                    .field("head", ::fsdp_burn::FieldRule::unit().keep())
//!     norm: LayerNorm,                                     .nested(
//! }                                                            "encoder",
//!                                                              <Encoder as ::fsdp_burn::Sharded>::wrap_policy(),
//!                                                          )
//!                                                  }
//!                                              }
//!                                          };
//! ```
//!
//! Every path is absolute, so that the user may have own types named `Option`, `Vec` or `WrapPolicy`. The impl also
//! allows the lints that would otherwise blame the user for tokens that the derive wrote (left out above).

use proc_macro2::TokenStream;
use quote::{quote, quote_spanned};
use syn::spanned::Spanned;
use syn::{DeriveInput, Path};

use crate::ast::{self, Field};
use crate::attr::{self, CratePath};
use crate::errors::Errors;
use crate::validate::{Role, Rule};
use crate::{bounds, crate_path};

/// The whole derive, on tokens that need no compiler around them.
pub(crate) fn derive(input: TokenStream) -> TokenStream {
    let input = match syn::parse2::<DeriveInput>(input) {
        Ok(input) => input,
        Err(error) => return error.into_compile_error(),
    };
    let mut errors = Errors::default();
    let krate = match attr::of_type(&input.attrs, &mut errors) {
        CratePath::Given(path) => Some(path),
        CratePath::Absent => Some(crate_path::lookup().unwrap_or_else(crate_path::default)),
        // Without a path to the trait, an impl would be a second error.
        CratePath::Unreadable => crate_path::lookup(),
    };
    let fields = ast::fields(&input, &mut errors);
    let mistakes = errors.finish().err();
    // Beside a mistake there is still an impl, without rules: otherwise each use of the type as a `Sharded` would be
    // reported as well.
    let fields = if mistakes.is_some() { Vec::new() } else { fields };
    let mistakes = mistakes.map(syn::Error::into_compile_error);
    let implementation = krate.map(|krate| implementation(&input, &fields, &krate));
    quote!(#mistakes #implementation)
}

fn implementation(input: &DeriveInput, fields: &[Field<'_>], krate: &Path) -> TokenStream {
    let ident = &input.ident;
    let (impl_generics, ty_generics, _) = input.generics.split_for_impl();
    let nested = fields.iter().filter(|field| field.nested).map(|field| field.ty);
    let where_clause = bounds::where_clause(&input.generics, nested, krate);
    let calls = fields.iter().map(|field| calls(field, krate));
    quote! {
        const _: () = {
            #[automatically_derived]
            #[allow(deprecated, unused_qualifications)]
            impl #impl_generics #krate::Sharded for #ident #ty_generics #where_clause {
                fn wrap_policy() -> #krate::WrapPolicy {
                    #krate::WrapPolicy::new() #(#calls)*
                }
            }
        };
    }
}

/// What one field adds to the policy: its own rule, then those of its type.
fn calls(field: &Field<'_>, krate: &Path) -> TokenStream {
    let Field { name, ty, .. } = field;
    let own = field.rule.as_ref().map(|rule| {
        let rule = field_rule(rule, krate);
        quote!(.field(#name, #rule))
    });
    let nested = field.nested.then(|| {
        // At the type's own place, so that the compiler points there when the type is not `Sharded`.
        let policy = quote_spanned!(ty.span()=> <#ty as #krate::Sharded>::wrap_policy());
        quote!(.nested(#name, #policy))
    });
    quote!(#own #nested)
}

fn field_rule(rule: &Rule, krate: &Path) -> TokenStream {
    let role = match rule.role {
        Role::Unit => quote!(unit),
        Role::Units => quote!(units),
        Role::Root => quote!(root),
        Role::Ignore => quote!(ignore),
    };
    let keep = rule.keep.then(|| quote!(.keep()));
    let replicate = rule.replicate.then(|| quote!(.replicate()));
    let spec = rule.spec.as_ref().map(|axes| {
        let axes = axes.iter().map(|axis| match axis {
            Some(axis) => quote!(::core::option::Option::Some(#axis)),
            None => quote!(::core::option::Option::None),
        });
        quote!(.spec([#(#axes),*]))
    });
    let prefetch = rule.prefetch.map(|depth| {
        let depth = proc_macro2::Literal::u32_unsuffixed(depth);
        quote!(.prefetch(#depth))
    });
    let precision = rule.precision.as_ref().map(|name| quote!(.precision(#name)));
    let reduce = rule.reduce.as_ref().map(|name| quote!(.reduce(#name)));
    let output = rule.output.as_ref().map(|name| quote!(.output(#name)));
    let offload = rule.offload.as_ref().map(|tier| quote!(.offload(#tier)));
    quote!(#krate::FieldRule::#role() #keep #replicate #spec #prefetch #precision #reduce #output #offload)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The impl for `header` (from `impl` to before the body) with `calls` on the new policy.
    fn expected(header: TokenStream, calls: TokenStream) -> TokenStream {
        quote! {
            const _: () = {
                #[automatically_derived]
                #[allow(deprecated, unused_qualifications)]
                #header {
                    fn wrap_policy() -> f::WrapPolicy {
                        f::WrapPolicy::new() #calls
                    }
                }
            };
        }
    }

    fn assert_expands(input: TokenStream, header: TokenStream, calls: TokenStream) {
        assert_eq!(derive(input).to_string(), expected(header, calls).to_string());
    }

    #[test]
    fn every_word_becomes_a_call() {
        assert_expands(
            quote! {
                #[shard(crate = "f")]
                pub struct Gpt {
                    #[shard(unit)]
                    tokens: Embedding,
                    #[shard(units)]
                    blocks: Vec<Block>,
                    norm: LayerNorm,
                    #[shard(unit, keep)]
                    head: Linear,
                    #[shard(nested)]
                    encoder: Encoder,
                    #[shard(units, nested)]
                    stages: Vec<Stage>,
                    #[shard(spec("shard", _))]
                    table: Param<Tensor<2>>,
                    #[shard(replicate)]
                    gate: Linear,
                    #[shard(ignore)]
                    teacher: Teacher,
                    #[shard(unit, prefetch = 2, precision = "bf16", reduce = "f16", output = "f32", offload = "cpu")]
                    big: Linear,
                }
            },
            quote!(impl f::Sharded for Gpt),
            quote! {
                .field("tokens", f::FieldRule::unit())
                .field("blocks", f::FieldRule::units())
                .field("head", f::FieldRule::unit().keep())
                .nested("encoder", <Encoder as f::Sharded>::wrap_policy())
                .field("stages", f::FieldRule::units())
                .nested("stages", <Vec<Stage> as f::Sharded>::wrap_policy())
                .field(
                    "table",
                    f::FieldRule::root().spec([::core::option::Option::Some("shard"), ::core::option::Option::None])
                )
                .field("gate", f::FieldRule::root().replicate())
                .field("teacher", f::FieldRule::ignore())
                .field(
                    "big",
                    f::FieldRule::unit().prefetch(2).precision("bf16").reduce("f16").output("f32").offload("cpu")
                )
            },
        );
    }

    #[test]
    fn generics_are_kept_and_defaults_dropped() {
        assert_expands(
            quote! {
                #[shard(crate = "f")]
                struct Model<'a, T: Clone = u8, const N: usize = 3>
                where
                    T: 'a,
                {
                    #[shard(nested)]
                    inner: [T; N],
                }
            },
            quote! {
                impl<'a, T: Clone, const N: usize> f::Sharded for Model<'a, T, N>
                where
                    T: 'a,
                    [T; N]: f::Sharded
            },
            quote!(.nested("inner", <[T; N] as f::Sharded>::wrap_policy())),
        );
    }

    #[test]
    fn variants_are_components_like_fields() {
        assert_expands(
            quote! {
                #[shard(crate = "f")]
                enum Mixer {
                    #[shard(unit)]
                    Attention(Attention),
                    Conv(#[shard(nested)] Conv),
                    Plain(Linear),
                }
            },
            quote!(impl f::Sharded for Mixer),
            quote!(
                .field("Attention", f::FieldRule::unit())
                .nested("Conv", <Conv as f::Sharded>::wrap_policy())
            ),
        );
    }

    #[test]
    fn a_type_without_attributes_has_an_empty_policy() {
        assert_expands(
            quote!(
                #[shard(crate = "f")]
                struct Model {
                    norm: LayerNorm,
                }
            ),
            quote!(impl f::Sharded for Model),
            quote!(),
        );
    }

    #[test]
    fn without_a_word_about_the_crate_its_own_name_is_used() {
        let printed = derive(quote!(
            struct Nothing;
        ))
        .to_string();
        assert!(printed.contains("impl :: fsdp_burn :: Sharded for Nothing"), "{printed}");
    }

    #[test]
    fn all_mistakes_stand_beside_one_impl_without_rules() {
        let output = derive(quote! {
            #[shard(crate = "f")]
            struct Model<T> {
                #[shard(nested)]
                fine: T,
                #[shard(unti)]
                first: Linear,
                #[shard(keep)]
                second: Linear,
                #[shard(unit, units, replicate, spec("shard"))]
                third: Linear,
            }
        });
        let mistakes = [
            "unknown shard attribute `unti`; did you mean `unit`?",
            "`keep` is a setting of a unit: it needs `unit` or `units` beside it",
            "a field is either `unit` or `units`: `unit` makes one unit of the field, `units` one of each element",
            "`spec` contradicts `replicate`: `replicate` leaves every parameter whole, `spec` cuts it",
        ];
        let implementation = expected(quote!(impl<T> f::Sharded for Model<T>), quote!());
        let expected = quote!(#(::core::compile_error! { #mistakes })* #implementation);
        assert_eq!(output.to_string(), expected.to_string());
    }

    #[test]
    fn an_unreadable_crate_path_leaves_no_path_for_an_impl() {
        let message = "`crate` needs a path: `crate = \"path::to::fsdp_burn\"`";
        let output = derive(quote!(
            #[shard(crate = "")]
            struct Model {}
        ));
        assert_eq!(output.to_string(), quote!(::core::compile_error! { #message }).to_string());
    }

    #[test]
    fn what_is_no_type_is_an_error() {
        assert!(
            derive(quote!(
                fn function() {}
            ))
            .to_string()
            .starts_with(":: core :: compile_error !")
        );
    }
}
