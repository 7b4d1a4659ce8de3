//! Collects mistakes, so that one compilation shows all of them, each at its own token.

use std::fmt::Display;

use quote::ToTokens;

/// The mistakes found so far.
#[derive(Default)]
#[must_use = "mistakes that nobody reports are silently accepted: call `finish`"]
pub(crate) struct Errors {
    combined: Option<syn::Error>,
    num_found: usize,
}

impl Errors {
    /// Adds a mistake that is shown at `tokens`.
    pub(crate) fn at(&mut self, tokens: impl ToTokens, message: impl Display) {
        self.push(syn::Error::new_spanned(tokens, message));
    }

    /// Adds a mistake that carries its place already.
    pub(crate) fn push(&mut self, error: syn::Error) {
        self.num_found += 1;
        match &mut self.combined {
            Some(combined) => combined.combine(error),
            None => self.combined = Some(error),
        }
    }

    /// How many mistakes were added: a caller compares two counts to learn whether what lies between went well.
    pub(crate) fn num_found(&self) -> usize {
        self.num_found
    }

    /// All mistakes in one error, or none.
    pub(crate) fn finish(self) -> Result<(), syn::Error> {
        self.combined.map_or(Ok(()), Err)
    }

    /// The texts of all mistakes.
    #[cfg(test)]
    pub(crate) fn messages(self) -> Vec<String> {
        self.combined.into_iter().flatten().map(|error| error.to_string()).collect()
    }
}

#[cfg(test)]
mod tests {
    use quote::quote;

    use super::*;

    #[test]
    fn all_mistakes_are_kept_in_order() {
        let mut errors = Errors::default();
        errors.at(quote!(a), "first");
        errors.push(syn::Error::new_spanned(quote!(b), "second"));
        assert_eq!(errors.num_found(), 2);
        assert_eq!(errors.messages(), ["first", "second"]);
    }

    #[test]
    fn no_mistake_is_no_error() {
        assert!(Errors::default().finish().is_ok());
    }
}
