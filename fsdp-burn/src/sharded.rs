//! The trait that `#[derive(Sharded)]` implements.

use fsdp_core::WrapPolicy;

/// A model that says which of its parts are units. Derive it: `#[derive(Module, Debug, Sharded)]`.
pub trait Sharded {
    /// The rules of this type's fields.
    fn wrap_policy() -> WrapPolicy;
}

impl<T: Sharded> Sharded for Vec<T> {
    fn wrap_policy() -> WrapPolicy {
        WrapPolicy::each(T::wrap_policy())
    }
}

impl<T: Sharded, const N: usize> Sharded for [T; N] {
    fn wrap_policy() -> WrapPolicy {
        WrapPolicy::each(T::wrap_policy())
    }
}

/// Burn gives an `Option` no path component of its own.
impl<T: Sharded> Sharded for Option<T> {
    fn wrap_policy() -> WrapPolicy {
        T::wrap_policy()
    }
}
