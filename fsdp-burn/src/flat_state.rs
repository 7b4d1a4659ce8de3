//! The state of an optimizer as tensors and scalars by name.
//!
//! [Note: State without a copy]
//! A [`ModuleOptimizer`] shows its state as a record, and a record shows its tensors only in one buffer that all of them were
//! copied into. Where an optimizer of ours has its state in shared memory, that copy is the larger part of what a save costs a
//! processor. So while [`FlatState::of`] asks for the record, on this thread, such a state may lend its tensors past it with
//! [`lend`]. They stay as they are: whoever steps a state that is shared goes on with a copy.

use std::cell::RefCell;

use burn::optim::{ModuleOptimizer, join_path};
use burn::store::RecordError;
use burn::tensor::{DType, TensorData};
use burn_pack::{Reader, Scalar};
use bytes::Bytes;

use crate::host;

/// One tensor of the state.
pub(crate) struct FlatTensor {
    /// `id.field` of its parameter.
    pub(crate) name: String,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    /// Flat and row-major.
    pub(crate) bytes: Bytes,
}

/// What an optimizer holds.
pub(crate) struct FlatState {
    pub(crate) tensors: Vec<FlatTensor>,
    /// By `id.field`.
    pub(crate) scalars: Vec<(String, Scalar)>,
}

thread_local! {
    /// What was lent while a record is made; `None` at all other times.
    static LENT: RefCell<Option<Vec<FlatTensor>>> = const { RefCell::new(None) };
}

/// Gives `data` to the [`FlatState`] that is being made on this thread, as the tensor `prefix.leaf`. Returns it where there
/// is none: then it belongs into the record.
pub(crate) fn lend(prefix: &str, leaf: &str, data: TensorData) -> Option<TensorData> {
    LENT.with_borrow_mut(|lent| match lent {
        Some(lent) => {
            let (bytes, shape, dtype) = data.into_parts();
            let (name, bytes) = (join_path(prefix, leaf), host::shared(bytes));
            lent.push(FlatTensor { name, dtype, shape: shape.to_vec(), bytes });
            None
        }
        None => Some(data),
    })
}

impl FlatState {
    /// The state of `optimizer`. A copy, but for what is lent.
    ///
    /// # Errors
    /// If Burn cannot write or read the record.
    pub(crate) fn of(optimizer: &ModuleOptimizer) -> Result<Self, RecordError> {
        LENT.set(Some(Vec::new()));
        let record = optimizer.to_record();
        let mut tensors = LENT.take().unwrap_or_default();
        let reader = Reader::from_bytes(record.into_bytes()?)?;
        let scalars = reader.scalars().iter().map(|(name, scalar)| (name.clone(), *scalar)).collect();
        for tensor in reader.into_tensors()? {
            let (name, dtype, shape, _, bytes) = tensor.into_parts()?;
            tensors.push(FlatTensor { name, dtype, shape: shape.to_vec(), bytes: host::shared(bytes) });
        }
        Ok(Self { tensors, scalars })
    }
}
