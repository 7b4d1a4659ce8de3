//! Types that the derive accepts, and the policy that it writes for each.
//!
//! `fsdp` stands in for `fsdp_burn`. Warnings are errors here, so that the expansion stays silent too.

#![deny(warnings, unused_qualifications)]
#![allow(dead_code, missing_docs, unreachable_pub)]

mod fsdp;

use std::marker::PhantomData;

use fsdp::Sharded;
use fsdp_macros::Sharded;

struct Linear;

fn rules<M: Sharded>() -> Vec<String> {
    M::wrap_policy().0
}

mod whole {
    //! A model that uses every word.

    use super::*;

    #[derive(Sharded)]
    #[shard(crate = "crate::fsdp")]
    struct Expert {
        #[shard(unit)]
        inner: Linear,
    }

    #[derive(Sharded)]
    #[shard(crate = crate::fsdp)]
    pub struct Gpt {
        #[shard(unit)]
        tokens: Linear,
        #[shard(units)]
        blocks: Vec<Linear>,
        norm: Linear,
        #[shard(unit)]
        #[shard(keep)]
        head: Linear,
        #[shard(nested)]
        encoder: Option<Expert>,
        #[shard(units, nested)]
        stages: Vec<Expert>,
        #[shard(nested)]
        pair: [Expert; 2],
        #[shard(spec("shard", _))]
        table: Linear,
        #[shard(replicate)]
        gate: Linear,
        #[shard(ignore)]
        teacher: Linear,
        #[shard(unit, prefetch = 2, precision = "bf16", reduce = "f16", output = "f32", offload = "cpu")]
        big: Linear,
    }

    #[test]
    fn every_word_reaches_the_policy() {
        assert_eq!(
            rules::<Gpt>(),
            [
                "tokens: unit",
                "blocks: units",
                "head: unit keep",
                "encoder.inner: unit",
                "stages: units",
                "stages.*.inner: unit",
                "pair.*.inner: unit",
                "table: root spec(shard, _)",
                "gate: root replicate",
                "teacher: ignore",
                "big: unit prefetch=2 precision=bf16 reduce=f16 output=f32 offload=cpu",
            ]
        );
    }
}

mod generics {
    //! Parameters of every kind, and bounds that the derive must add or must not add.

    use super::*;

    #[derive(Sharded)]
    #[shard(crate = "crate::fsdp")]
    pub struct Leaf {
        #[shard(unit)]
        weight: Linear,
    }

    #[derive(Sharded)]
    #[shard(crate = "crate::fsdp")]
    pub struct Wrapper<T> {
        #[shard(nested)]
        inner: T,
    }

    pub trait Family {
        type Layer;
    }

    pub struct Dense;

    impl Family for Dense {
        type Layer = Leaf;
    }

    #[derive(Sharded)]
    #[shard(crate = "crate::fsdp")]
    pub struct Everything<'a, F: Family, T: ?Sized, const N: usize = 2>
    where
        F: 'a,
    {
        #[shard(units, nested)]
        layers: Vec<Wrapper<F::Layer>>,
        #[shard(nested)]
        qualified: Wrapper<<F as Family>::Layer>,
        #[shard(nested)]
        array: [Leaf; N],
        #[shard(unit)]
        borrowed: &'a Linear,
        // `T` is bounded by nothing: a slice will do.
        marker: PhantomData<(F, Box<T>)>,
    }

    #[test]
    fn bounds_are_those_of_the_nested_fields() {
        assert_eq!(
            rules::<Everything<'static, Dense, [u8]>>(),
            [
                "layers: units",
                "layers.*.inner.weight: unit",
                "qualified.inner.weight: unit",
                "array.*.weight: unit",
                "borrowed: unit",
            ]
        );
    }

    /// Not `Sharded`, and not nested either.
    pub struct Foreign<T>(T);

    #[derive(Sharded)]
    #[shard(crate = "crate::fsdp")]
    pub struct Around<T> {
        #[shard(unit)]
        foreign: Foreign<T>,
    }

    #[test]
    fn a_field_that_is_not_nested_needs_no_bound() {
        assert_eq!(rules::<Around<Foreign<u8>>>(), ["foreign: unit"]);
    }

    /// More private than the type whose impl is bounded by it.
    #[derive(Sharded)]
    #[shard(crate = "crate::fsdp")]
    struct Hidden<T> {
        #[shard(nested)]
        inner: Option<T>,
    }

    #[derive(Sharded)]
    #[shard(crate = "crate::fsdp")]
    pub struct Shown<T> {
        #[shard(nested)]
        hidden: Hidden<T>,
    }

    #[test]
    fn a_private_type_may_be_nested_in_a_public_one() {
        assert_eq!(rules::<Shown<Leaf>>(), ["hidden.inner.weight: unit"]);
    }
}

mod shapes {
    //! Unit structs, enums of modules, and names that need care.

    use super::*;

    #[derive(Sharded)]
    #[shard(crate = "crate::fsdp")]
    struct Activation;

    #[derive(Sharded)]
    #[shard(crate = "crate::fsdp")]
    enum Mixer<T> {
        #[shard(unit, keep)]
        Attention(Linear),
        Conv(#[shard(nested)] T),
        #[shard(nested)]
        Nothing(Activation),
        Plain(Linear),
    }

    #[derive(Sharded)]
    #[shard(crate = "crate::fsdp")]
    struct Raw {
        #[shard(unit)]
        r#type: Linear,
        #[shard(nested)]
        r#match: Mixer<Mixer<Activation>>,
    }

    #[test]
    fn names_are_spelled_as_in_parameter_paths() {
        assert_eq!(
            rules::<Raw>(),
            ["r#type: unit", "r#match.Attention: unit keep", "r#match.Conv.Attention: unit keep"]
        );
    }

    #[test]
    fn a_unit_struct_has_no_rules() {
        assert!(rules::<Activation>().is_empty());
    }

    #[derive(Sharded)]
    #[shard(crate = "crate::fsdp")]
    struct Configured {
        #[cfg(any())]
        #[shard(unit)]
        compiled_out: Missing,
        #[cfg_attr(all(), shard(unit))]
        conditional: Linear,
    }

    #[test]
    fn fields_that_are_compiled_out_have_no_rules() {
        assert_eq!(rules::<Configured>(), ["conditional: unit"]);
    }

    #[deprecated]
    #[derive(Sharded)]
    #[shard(crate = "crate::fsdp")]
    struct Old {
        #[shard(unit)]
        weight: Linear,
    }

    #[derive(Sharded)]
    #[shard(crate = "crate::fsdp")]
    struct StillUsesOld {
        #[allow(deprecated)]
        #[shard(nested)]
        old: Old,
    }

    #[test]
    fn a_deprecated_type_may_be_nested_in_silence() {
        assert_eq!(rules::<StillUsesOld>(), ["old.weight: unit"]);
    }
}

mod hostile {
    //! A module whose own names shadow everything that the expansion could have relied on.

    pub struct Vec<T>(T);
    pub struct String;
    pub struct Option;
    pub struct Some;
    pub struct None;
    pub struct Result;
    pub struct Ok;
    pub struct Err;
    pub struct WrapPolicy;
    pub struct FieldRule;
    #[allow(non_camel_case_types)]
    pub struct str;
    #[allow(non_camel_case_types)]
    pub struct usize;
    pub trait Sharded {}
    pub mod core {}
    pub mod std {}
    pub mod fsdp_burn {}

    impl<T: crate::fsdp::Sharded> crate::fsdp::Sharded for Vec<T> {
        fn wrap_policy() -> crate::fsdp::WrapPolicy {
            T::wrap_policy()
        }
    }

    #[derive(fsdp_macros::Sharded)]
    #[shard(crate = "crate::fsdp")]
    pub struct Inner {
        #[shard(spec("shard", _))]
        some: Some,
        #[shard(unit, keep, prefetch = 1, precision = "f16", offload = "nvme")]
        ok: Ok,
    }

    #[derive(fsdp_macros::Sharded)]
    #[shard(crate = "crate::fsdp")]
    pub struct Outer {
        #[shard(units, nested)]
        row: Vec<Inner>,
    }

    #[test]
    fn own_names_do_not_reach_into_the_expansion() {
        assert_eq!(
            super::rules::<Outer>(),
            ["row: units", "row.some: root spec(shard, _)", "row.ok: unit keep prefetch=1 precision=f16 offload=nvme"]
        );
    }
}

mod places {
    //! The derive where a type is declared by a function or by a macro.

    use super::*;

    #[test]
    fn a_type_may_live_in_a_function() {
        mod local {
            pub(super) use crate::fsdp::*;
        }

        #[derive(Sharded)]
        #[shard(crate = "crate::fsdp")]
        struct Inner {
            #[shard(unit)]
            weight: Linear,
        }

        #[derive(Sharded)]
        #[shard(crate = "crate::fsdp")]
        struct Outer {
            #[shard(nested)]
            inner: Inner,
        }

        assert_eq!(rules::<Outer>(), ["inner.weight: unit"]);
        assert!(local::WrapPolicy::new().0.is_empty());
    }

    macro_rules! model {
        ($name:ident<$param:ident>, $field:ident: $ty:ty, $word:ident, $depth:literal, $axis:expr, $attribute:meta) => {
            #[derive(Sharded)]
            #[shard(crate = "crate::fsdp")]
            struct $name<$param> {
                #[shard($word, nested, prefetch = $depth)]
                $field: $ty,
                #[shard(spec(_, $axis))]
                table: Linear,
                #[$attribute]
                tail: Linear,
            }
        };
    }

    model!(Declared<T>, inner: Vec<T>, units, 3, "tensor", shard(unit, keep));

    #[derive(Sharded)]
    #[shard(crate = "crate::fsdp")]
    struct Leaf {
        #[shard(unit)]
        weight: Linear,
    }

    #[test]
    fn a_type_may_come_from_a_macro() {
        assert_eq!(
            rules::<Declared<Leaf>>(),
            ["inner: units prefetch=3", "inner.*.weight: unit", "table: root spec(_, tensor)", "tail: unit keep"]
        );
    }
}
