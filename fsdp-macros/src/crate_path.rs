//! Where the expansion finds the `fsdp_burn` crate, which the user's `Cargo.toml` may have renamed.

use proc_macro_crate::{FoundCrate, crate_name};
use syn::{Path, parse_quote};

/// The path under which the crate being compiled knows `fsdp_burn`, from its `Cargo.toml`; `None` if it does not.
pub(crate) fn lookup() -> Option<Path> {
    crate_name("fsdp-burn").ok().and_then(path)
}

/// The path without any hint: the name that the crate has by itself.
pub(crate) fn default() -> Path {
    parse_quote!(::fsdp_burn)
}

/// `Itself` is the package `fsdp-burn`, whose examples, documentation and integration tests are crates of their own
/// that know it by its name. Its library says `extern crate self as fsdp_burn;` where it uses the derive.
fn path(found: FoundCrate) -> Option<Path> {
    match found {
        FoundCrate::Itself => Some(default()),
        FoundCrate::Name(name) => syn::parse_str(&format!("::{name}")).ok(),
    }
}

#[cfg(test)]
mod tests {
    use quote::ToTokens;

    use super::*;

    fn printed(found: FoundCrate) -> Option<String> {
        path(found).map(|path| path.to_token_stream().to_string().replace(' ', ""))
    }

    #[test]
    fn a_renamed_crate_is_found_by_its_new_name() {
        assert_eq!(printed(FoundCrate::Name("sharding".into())).as_deref(), Some("::sharding"));
    }

    #[test]
    fn the_crate_itself_is_named_from_outside() {
        assert_eq!(printed(FoundCrate::Itself).as_deref(), Some("::fsdp_burn"));
    }

    #[test]
    fn a_name_that_is_no_path_is_not_found() {
        assert_eq!(printed(FoundCrate::Name("not a name".into())), None);
    }

    #[test]
    fn this_package_does_not_know_fsdp_burn() {
        assert!(lookup().is_none());
    }
}
