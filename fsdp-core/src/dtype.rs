//! Element types that a communicator can add up.

use std::fmt;

/// The element type of a buffer. Its size is in bytes.
///
/// ```
/// use fsdp_core::Dtype;
///
/// assert_eq!(Dtype::named("bf16"), Some(Dtype::Bf16));
/// assert_eq!((Dtype::Bf16.to_string(), Dtype::Bf16.size_bytes()), ("bf16".into(), 2));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// IEEE 754 single precision, 4 bytes.
    F32,
    /// The upper half of a single: its range with 8 bits of precision, 2 bytes.
    Bf16,
    /// IEEE 754 half precision: 11 bits of precision up to 65504, 2 bytes.
    F16,
    /// IEEE 754 double precision, 8 bytes.
    F64,
}

impl Dtype {
    /// All types; those that a precision can be set to come first.
    pub const ALL: [Dtype; 4] = [Dtype::F32, Dtype::Bf16, Dtype::F16, Dtype::F64];

    /// Names of the types that a precision can be set to, in the order of [`Dtype::ALL`].
    pub const PRECISIONS: &'static [&'static str] = &["f32", "bf16", "f16"];

    /// Size of one element, in bytes.
    pub fn size_bytes(self) -> usize {
        match self {
            Dtype::Bf16 | Dtype::F16 => 2,
            Dtype::F32 => 4,
            Dtype::F64 => 8,
        }
    }

    /// The name, as it is printed.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "f32",
            Dtype::Bf16 => "bf16",
            Dtype::F16 => "f16",
            Dtype::F64 => "f64",
        }
    }

    /// The type of this name.
    pub fn named(name: &str) -> Option<Dtype> {
        Dtype::ALL.into_iter().find(|dtype| dtype.name() == name)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn precisions_are_the_first_types() {
        let names = Dtype::ALL.map(Dtype::name);
        assert_eq!(&names[..Dtype::PRECISIONS.len()], Dtype::PRECISIONS);
        for (index, dtype) in Dtype::ALL.into_iter().enumerate() {
            assert_eq!((dtype as usize, Dtype::named(dtype.name())), (index, Some(dtype)));
        }
    }
}
