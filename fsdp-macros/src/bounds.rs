//! The where clause of the impl: the user's own, and what the rules of generic field types need.

use proc_macro2::{Ident, TokenStream, TokenTree};
use quote::ToTokens;
use syn::{Generics, Path, PredicateType, Type, WhereClause, WherePredicate, parse_quote};

/// The where clause of the impl: each nested type that depends on a type parameter must be `Sharded`.
///
/// The bound is on the field's type, not on the parameter: `PhantomData<T>` beside it must not restrict `T`, and
/// `T::Inner` needs it where `T` does not. A type without parameters needs none: the compiler looks it up.
pub(crate) fn where_clause<'a>(
    generics: &Generics,
    nested: impl Iterator<Item = &'a Type>,
    krate: &Path,
) -> Option<WhereClause> {
    let mut bounded: Vec<&Type> = Vec::new();
    for ty in nested {
        let is_generic = names(ty).iter().any(|name| generics.type_params().any(|param| param.ident == *name));
        if is_generic && !bounded.contains(&ty) {
            bounded.push(ty);
        }
    }
    let mut generics = generics.clone();
    if !bounded.is_empty() {
        let predicates = bounded.into_iter().map(|ty| {
            WherePredicate::Type(PredicateType {
                lifetimes: None,
                bounded_ty: ty.clone(),
                colon_token: Default::default(),
                bounds: parse_quote!(#krate::Sharded),
            })
        });
        generics.make_where_clause().predicates.extend(predicates);
    }
    generics.where_clause
}

/// The names at which paths within a type begin: of `Vec<a::B<T>>` these are `Vec`, `a` and `T`.
///
/// It reads tokens, so it sees into macros, arrays and function types as well. The name of an associated type, as in
/// `Of<T = u8>`, is taken for one too; at worst that writes down a bound that the expansion needs anyway.
pub(crate) fn names(ty: &Type) -> Vec<Ident> {
    let mut names = Vec::new();
    collect(ty.to_token_stream(), &mut names);
    names
}

fn collect(tokens: TokenStream, names: &mut Vec<Ident>) {
    // 0 after two colons, 1 after one: an identifier after two is a later part of a path.
    let mut num_colons = 0;
    let mut after_quote = false;
    for token in tokens {
        match token {
            TokenTree::Punct(punct) if punct.as_char() == ':' => {
                num_colons += 1;
                continue;
            }
            TokenTree::Punct(punct) if punct.as_char() == '\'' => {
                after_quote = true;
                continue;
            }
            TokenTree::Ident(ident) if num_colons < 2 && !after_quote => names.push(ident),
            TokenTree::Group(group) => collect(group.stream(), names),
            TokenTree::Ident(_) | TokenTree::Punct(_) | TokenTree::Literal(_) => {}
        }
        num_colons = 0;
        after_quote = false;
    }
}

#[cfg(test)]
mod tests {
    use quote::quote;
    use syn::ItemStruct;

    use super::*;

    /// The where clause of the impl for `item`, all of whose fields are nested.
    fn printed(item: ItemStruct) -> String {
        let nested = item.fields.iter().map(|field| &field.ty);
        where_clause(&item.generics, nested, &parse_quote!(f)).to_token_stream().to_string()
    }

    #[test]
    fn each_nested_type_with_a_type_parameter_is_bounded_once() {
        let item = parse_quote!(
            struct Model<'a, T, U, const N: usize>
            where
                U: Clone,
            {
                plain: Encoder,
                sized: [Encoder; N],
                borrowed: Encoder<'a>,
                blocks: Vec<Block<T>>,
                same: Vec<Block<T>>,
                projected: U::Inner,
            }
        );
        let expected = quote!(where U: Clone, Vec<Block<T> >: f::Sharded, U::Inner: f::Sharded).to_string();
        assert_eq!(printed(item), expected);
    }

    #[test]
    fn without_bounds_the_where_clause_is_the_users() {
        assert_eq!(
            printed(parse_quote!(
                struct Model<T> {
                    field: Linear,
                }
            )),
            ""
        );
        let item = parse_quote!(
            struct Model<T>
            where
                T: Copy,
            {
                field: Linear,
            }
        );
        assert_eq!(printed(item), quote!(where T: Copy,).to_string());
    }

    #[test]
    fn names_begin_paths() {
        let of = |ty: Type| names(&ty).iter().map(Ident::to_string).collect::<Vec<_>>();
        assert_eq!(of(parse_quote!(Vec<a::B<T>>)), ["Vec", "a", "T"]);
        assert_eq!(of(parse_quote!(T::Inner)), ["T"]);
        assert_eq!(of(parse_quote!(<T as Holds>::Inner)), ["T", "as", "Holds"]);
        assert_eq!(of(parse_quote!(&'T [(U, r#V); 3])), ["U", "r#V"]);
        assert_eq!(of(parse_quote!(layer!(T, other::U))), ["layer", "T", "other"]);
    }
}
