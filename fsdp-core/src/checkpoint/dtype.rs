//! Element types that a checkpoint stores. Bytes are moved and never computed with, so there are more than a
//! communicator can add.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::Dtype;

/// The element type of a stored tensor; little-endian in the file, as `safetensors` has it.
///
/// ```
/// use fsdp_core::checkpoint::StoredDtype;
///
/// assert_eq!(StoredDtype::Bf16.size_bytes(), 2);
/// assert_eq!(StoredDtype::Bf16.to_string(), "BF16");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum StoredDtype {
    /// IEEE 754 double precision, 8 bytes.
    F64,
    /// IEEE 754 single precision, 4 bytes.
    F32,
    /// IEEE 754 half precision, 2 bytes.
    F16,
    /// The upper half of a single, 2 bytes.
    Bf16,
    /// Signed, 8 bytes.
    I64,
    /// Signed, 4 bytes.
    I32,
    /// Signed, 2 bytes.
    I16,
    /// Signed, 1 byte.
    I8,
    /// Unsigned, 8 bytes.
    U64,
    /// Unsigned, 4 bytes.
    U32,
    /// Unsigned, 2 bytes.
    U16,
    /// Unsigned, 1 byte.
    U8,
    /// A truth value, 1 byte.
    Bool,
}

impl StoredDtype {
    /// All types.
    pub const ALL: [StoredDtype; 13] = [
        StoredDtype::F64,
        StoredDtype::F32,
        StoredDtype::F16,
        StoredDtype::Bf16,
        StoredDtype::I64,
        StoredDtype::I32,
        StoredDtype::I16,
        StoredDtype::I8,
        StoredDtype::U64,
        StoredDtype::U32,
        StoredDtype::U16,
        StoredDtype::U8,
        StoredDtype::Bool,
    ];

    /// Size of one element, in bytes.
    pub fn size_bytes(self) -> usize {
        self.to_safetensors().bitsize() / 8
    }

    /// The same type, if it is one of these.
    pub(super) fn of_safetensors(dtype: safetensors::Dtype) -> Option<Self> {
        Self::ALL.into_iter().find(|own| own.to_safetensors() == dtype)
    }

    pub(super) fn to_safetensors(self) -> safetensors::Dtype {
        use safetensors::Dtype as Other;
        match self {
            StoredDtype::F64 => Other::F64,
            StoredDtype::F32 => Other::F32,
            StoredDtype::F16 => Other::F16,
            StoredDtype::Bf16 => Other::BF16,
            StoredDtype::I64 => Other::I64,
            StoredDtype::I32 => Other::I32,
            StoredDtype::I16 => Other::I16,
            StoredDtype::I8 => Other::I8,
            StoredDtype::U64 => Other::U64,
            StoredDtype::U32 => Other::U32,
            StoredDtype::U16 => Other::U16,
            StoredDtype::U8 => Other::U8,
            StoredDtype::Bool => Other::BOOL,
        }
    }
}

/// As in the file: `BF16`.
impl fmt::Display for StoredDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.to_safetensors().fmt(f)
    }
}

impl From<Dtype> for StoredDtype {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => StoredDtype::F32,
            Dtype::Bf16 => StoredDtype::Bf16,
            Dtype::F16 => StoredDtype::F16,
            Dtype::F64 => StoredDtype::F64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_manifest_and_the_file_use_one_name_for_each_type() {
        for dtype in StoredDtype::ALL {
            let name = serde_json::to_value(dtype).unwrap();
            assert_eq!(name, serde_json::to_value(dtype.to_safetensors()).unwrap());
            assert_eq!(name, dtype.to_string());
            assert_eq!(StoredDtype::of_safetensors(dtype.to_safetensors()), Some(dtype));
            assert_eq!(serde_json::from_value::<StoredDtype>(name).unwrap(), dtype);
            assert!([1, 2, 4, 8].contains(&dtype.size_bytes()));
        }
    }
}
