//! Tensors as host memory: Flex primitives to reference-counted bytes and back, without a copy.

use std::sync::Arc;

use burn::backend::Flex;
use burn::backend::flex::FlexTensor;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::{AllocationProperty, DType, Device, FloatDType, Shape, Tensor, TensorData};
use bytes::Bytes;
use fsdp_core::{Dtype, ShardLayout};

/// The elements of `tensor`, flat and row-major. Shares memory with it where it is contiguous.
pub(crate) fn bytes_of(tensor: &FlexTensor) -> Bytes {
    Bytes::from_owner(Storage(tensor.to_contiguous().data_arc()))
}

/// What tells one tensor from another that was not made from it: where its memory is, or what a device calls it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity(pub(crate) usize);

impl Identity {
    pub(crate) fn of_memory(bytes: &[u8]) -> Self {
        Self(bytes.as_ptr().addr())
    }
}

/// The elements of `data`, in memory that nothing on a device is held for.
pub(crate) fn elements(data: TensorData) -> Bytes {
    shared(off_device(data).into_parts().0)
}

/// `data`, copied to host memory where it is still on a device: it would hold the device's memory for as long as it lives,
/// also after it was read.
pub(crate) fn off_device(data: TensorData) -> TensorData {
    if data.bytes().property() != AllocationProperty::Device {
        return data;
    }
    let (bytes, shape, dtype) = data.into_parts();
    TensorData::from_bytes(burn::tensor::Bytes::from_bytes_vec(bytes.to_vec()), shape, dtype)
}

/// The elements of a tensor of Burn's, or of what it reads.
pub(crate) fn shared(bytes: burn::tensor::Bytes) -> Bytes {
    Bytes::from_owner(Storage(Arc::new(bytes)))
}

/// Bytes for Burn, without a copy.
pub(crate) fn burn_bytes(bytes: Bytes) -> burn::tensor::Bytes {
    burn::tensor::Bytes::from_shared(bytes, AllocationProperty::Native)
}

/// A tensor over `bytes`. It shares them: Flex copies on the first write.
pub(crate) fn flex_tensor(bytes: Bytes, shape: &[usize], dtype: Dtype) -> FlexTensor {
    FlexTensor::from_data(tensor_data(bytes, shape, dtype))
}

/// A tensor over `bytes` on `device`, sharing them as [`flex_tensor`] does.
pub(crate) fn tensor<const D: usize>(bytes: Bytes, shape: &[usize], dtype: Dtype, device: &Device) -> Tensor<D> {
    Tensor::from_data(tensor_data(bytes, shape, dtype), (device, burn_dtype(dtype)))
}

/// The elements of a tensor that is not needed any more, without a copy if nothing else shares them.
pub(crate) fn into_bytes<const D: usize>(tensor: Tensor<D>) -> Bytes {
    elements(tensor.inner().into_data())
}

/// The element type, where a communicator can add it up.
pub(crate) fn dtype_of(dtype: DType) -> Option<Dtype> {
    match dtype {
        DType::F32 => Some(Dtype::F32),
        DType::F64 => Some(Dtype::F64),
        DType::BF16 => Some(Dtype::Bf16),
        DType::F16 => Some(Dtype::F16),
        _ => None,
    }
}

/// The element type, as Burn knows it.
pub(crate) fn burn_dtype(dtype: Dtype) -> DType {
    match dtype {
        Dtype::F32 => DType::F32,
        Dtype::F64 => DType::F64,
        Dtype::Bf16 => DType::BF16,
        Dtype::F16 => DType::F16,
    }
}

/// The same, where it can be nothing else than a float.
pub(crate) fn float_dtype(dtype: Dtype) -> FloatDType {
    burn_dtype(dtype).into()
}

pub(crate) fn tensor_data(bytes: Bytes, shape: &[usize], dtype: Dtype) -> TensorData {
    data_of(bytes, shape, burn_dtype(dtype))
}

/// As [`tensor_data`], of any element type.
pub(crate) fn data_of(bytes: Bytes, shape: &[usize], dtype: DType) -> TensorData {
    let shape = Shape::from(shape.to_vec());
    if bytes.is_empty() {
        // An empty slice has no alignment, and typed access asks for one.
        return TensorData::new(Vec::<f32>::new(), shape).convert_dtype(dtype);
    }
    TensorData::from_bytes(burn_bytes(bytes), shape, dtype)
}

/// The elements in another type, rounded to the nearest. The same bytes where the type stays.
pub(crate) fn cast(bytes: &Bytes, from: Dtype, to: Dtype) -> Bytes {
    if from == to {
        return bytes.clone();
    }
    let len = bytes.len() / from.size_bytes();
    let tensor = flex_tensor(bytes.clone(), &[len], from);
    bytes_of(&Flex::float_cast(tensor, burn_dtype(to).into()))
}

/// The block of `rank` of a whole tensor: shared where it is one range, copied otherwise.
pub(crate) fn cut(full: &Bytes, layout: &ShardLayout, rank: usize, elem_bytes: usize) -> Bytes {
    let mut runs = layout.runs(rank).map(|run| run.start * elem_bytes..run.end * elem_bytes);
    match (runs.next(), runs.next()) {
        (None, _) => Bytes::new(),
        (Some(run), None) => full.slice(run),
        (Some(first), Some(second)) => {
            let mut block = Vec::with_capacity(layout.shard_len(rank) * elem_bytes);
            for run in [first, second].into_iter().chain(runs) {
                block.extend_from_slice(&full[run]);
            }
            Bytes::from(block)
        }
    }
}

struct Storage(Arc<burn::tensor::Bytes>);

impl AsRef<[u8]> for Storage {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}
