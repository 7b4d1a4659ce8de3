//! The ops of this crate on Burn's Cube backend, which is that of GPUs.
//!
//! [Note: Host memory beside a device]
//! A device holds what it computes with: a whole parameter from its use until the graph lets go of it, and a whole gradient
//! until it is reduced. By default it is host memory through which ranks exchange them, as elsewhere: a parameter is copied to
//! the device when it is used, and a gradient back when backward has made it, which the thread of the reductions waits for.
//! The other way is [Note: Two places of a gather]. Where blocks lie between their uses is
//! [Note: Blocks beside a device].
//!
//! These functions run on the thread of the rank. Nothing may wait for other ranks on the thread of a device, or on that of
//! fused operations: they belong to all ranks that share the device.

use std::any::Any;
use std::ops::Range;
use std::task::{Context, Poll, Waker};

use burn::backend::flex::FlexTensor;
use burn::backend::ops::{ActivationOps, FloatTensorOps};
use burn::backend::{Cube, TensorMetadata};
use burn::tensor::{Bytes, Device, FloatDType, Shape, Tensor, TensorData};
use burn_cubecl::cubecl::future::block_on;
use burn_cubecl::cubecl::server::CopyDescriptor;
use burn_cubecl::kernel::into_contiguous_aligned;
use burn_cubecl::tensor::CubeTensor;

use crate::Error;
use crate::device::failed;
use crate::engine::{Coming, EngineFailed, Lent, Whole};
use crate::gather_op::{GatherSite, ShardOps};
use crate::host::{self, Identity, off_device};
use crate::lora::{AdaptOps, AdaptedSite, adapt};
use crate::nn::GeluOps;
use crate::peers::{CubeDevice, CubeFloat, part};
use crate::recompute::{Erased, Part, RecomputeOps};
use crate::sum_op::{Site, SumOps};

/// What a device calls the tensor's memory. With fusion there may be none yet.
pub(crate) fn identity(tensor: &CubeFloat) -> Option<Identity> {
    let tensor = (tensor as &dyn Any).downcast_ref::<CubeTensor>()?;
    Some(Identity(tensor.handle.clone().binding().memory.id().value))
}

/// As [`identity`], of a tensor that is on a device.
pub(crate) fn identity_of<const D: usize>(tensor: &Tensor<D>) -> Option<Identity> {
    tensor.clone().inner().try_into_primitive::<Cube>().ok().as_ref().and_then(identity)
}

/// The device of Cube that `device` is.
pub(crate) fn device_of(device: &Device) -> CubeDevice {
    match Tensor::<1>::empty([1], device).try_into_primitive::<Cube>() {
        Ok(tensor) => tensor.device(),
        Err(error) => unreachable!("ranks compute on Flex or on Cube: {error:?}"),
    }
}

pub(crate) fn size_bytes(tensor: &CubeFloat) -> usize {
    tensor.shape().num_elements() * tensor.dtype().size()
}

pub(crate) fn cast(tensor: CubeFloat, dtype: FloatDType) -> CubeFloat {
    Cube::float_cast(tensor, dtype)
}

pub(crate) fn plus(a: CubeFloat, b: CubeFloat) -> CubeFloat {
    Cube::float_add(a, b)
}

/// Elements whose squares are added up at a time, so that there are few in double precision.
const CHUNK_LEN: usize = 1 << 22;
/// Elements of a row of them.
const ROW_LEN: usize = 1024;

/// The sum of the squares of all elements, in double precision and an order that their number decides; one element.
pub(crate) fn sum_of_squares(tensor: &CubeFloat) -> CubeFloat {
    let len = tensor.shape().num_elements();
    let flat = Cube::float_reshape(tensor.clone(), Shape::from(vec![len]));
    let sum = |tensor: CubeFloat, len: usize, row_len: usize| {
        let rows = Cube::float_reshape(tensor, Shape::from(vec![len / row_len, row_len]));
        let sums = Cube::float_sum_dim(Cube::float_sum_dim(rows, 1), 0);
        Cube::float_reshape(sums, Shape::from(vec![1]))
    };
    let of_range = |range: Range<usize>, row_len: usize| {
        let len = range.len();
        let wide = Cube::float_cast(part(flat.clone(), range), FloatDType::F64);
        sum(Cube::float_mul(wide.clone(), wide), len, row_len)
    };
    let in_rows = len / ROW_LEN * ROW_LEN;
    let chunks = (0..in_rows).step_by(CHUNK_LEN).map(|begin| (begin..in_rows.min(begin + CHUNK_LEN), ROW_LEN));
    let rest = (in_rows < len).then_some((in_rows..len, len - in_rows));
    let sums: Vec<_> = chunks.chain(rest).map(|(range, row_len)| of_range(range, row_len)).collect();
    let num_sums = sums.len();
    sum(Cube::float_cat(sums, 0), num_sums, num_sums)
}

/// The values of tensors of one element in double precision, in one copy. Waits for the device.
pub(crate) fn values(scalars: Vec<CubeFloat>) -> Result<Vec<f64>, Error> {
    if scalars.is_empty() {
        return Ok(Vec::new());
    }
    let bytes = host::bytes_of(&to_host(Cube::float_cat(scalars, 0))?);
    Ok(bytes.as_chunks::<8>().0.iter().map(|bytes| f64::from_ne_bytes(*bytes)).collect())
}

pub(crate) fn to_device(data: TensorData, device: &CubeDevice) -> CubeFloat {
    Cube::float_from_data(data, device)
}

/// Waits for the device.
pub(crate) fn to_host(tensor: CubeFloat) -> Result<FlexTensor, Error> {
    match block_on(Cube::float_into_data(tensor)) {
        Ok(data) => Ok(FlexTensor::from_data(off_device(data))),
        Err(error) => Err(failed(error)),
    }
}

/// As [`to_host`], where no `Result` can be returned.
fn to_host_or_unwind(tensor: CubeFloat) -> FlexTensor {
    to_host(tensor).unwrap_or_else(|error| std::panic::resume_unwind(Box::new(EngineFailed(error))))
}

/// Begins to copy a tensor to host memory, and does not wait: the copy takes its place among what the device has to do, so it
/// is of the tensor as it is now. With fusion it is not known what there is to copy, and this waits.
fn coming(tensor: CubeFloat) -> Whole {
    let Some(cube) = (&tensor as &dyn Any).downcast_ref::<CubeTensor>().cloned() else {
        return Whole::Here(to_host_or_unwind(tensor));
    };
    drop(tensor);
    let cube = into_contiguous_aligned(cube);
    let (shape, strides, dtype) = (cube.meta.shape().clone(), cube.meta.strides().clone(), cube.dtype);
    let copy = CopyDescriptor::new(cube.handle.binding(), shape.clone(), strides, dtype.size());
    let client = cube.client;
    let mut read = Box::pin(async move { client.read_tensor_async(vec![copy]).await });
    // Looking at it for the first time is what begins it.
    let begun = read.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    let of_shape = shape.clone();
    let end = move || match begun {
        Poll::Ready(read) => read,
        Poll::Pending => block_on(read),
    };
    let wait = move || match end() {
        Ok(mut bytes) => {
            // A copy, since what the device has copied to lies in memory of which there is little.
            let bytes = Bytes::from_bytes_vec(bytes.remove(0).to_vec());
            Ok(FlexTensor::from_data(TensorData::from_bytes(bytes, of_shape, dtype)))
        }
        Err(error) => Err(failed(error)),
    };
    Whole::Coming(Coming { shape, dtype, wait: Box::new(wait) })
}

impl ShardOps for Cube {
    fn gather(stored: CubeFloat, site: GatherSite) -> CubeFloat {
        match site.engine.gather(site.param, identity(&stored), site.usage) {
            Some(Lent::Host(full)) => {
                site.engine.home().note_to_device(full.bytes().len());
                to_device(full, &stored.device())
            }
            Some(Lent::OnDevice(full)) => *full,
            None => stored,
        }
    }

    fn capture(gradient: CubeFloat, site: GatherSite) -> CubeFloat {
        let device = gradient.device();
        let gradient = match site.engine.links().devices {
            Some(_) => Whole::OnDevice(Box::new(gradient)),
            None => {
                site.engine.home().note_to_host(size_bytes(&gradient));
                coming(gradient)
            }
        };
        site.engine.capture(site.param, gradient);
        Cube::float_empty(Shape::from(vec![0]), &device, FloatDType::F32)
    }
}

impl AdaptOps for Cube {
    fn gather_adapted(stored: CubeFloat, a: CubeFloat, b: CubeFloat, site: AdaptedSite) -> CubeFloat {
        adapt::<Cube>(stored, a, b, &site)
    }
}

impl SumOps for Cube {
    fn sum_over_ranks(x: CubeFloat, site: Site) -> CubeFloat {
        let device = x.device();
        to_device(site.engine().sum_in_forward(to_host_or_unwind(x)).into_data(), &device)
    }

    fn sum_over_ranks_backward(gradient: CubeFloat, site: Site) -> CubeFloat {
        let device = gradient.device();
        to_device(site.engine().sum_in_backward(to_host_or_unwind(gradient)).into_data(), &device)
    }
}

impl RecomputeOps for Cube {
    fn run(input: CubeFloat, part: Part) -> CubeFloat {
        cube((part.forward)(Erased::Cube(Box::new(input))))
    }

    fn run_again(input: CubeFloat, gradient: CubeFloat, part: Part) -> CubeFloat {
        cube((part.backward)(Erased::Cube(Box::new(input)), Erased::Cube(Box::new(gradient))))
    }
}

fn cube(tensor: Erased) -> CubeFloat {
    match tensor {
        Erased::Cube(tensor) => *tensor,
        Erased::Flex(_) => unreachable!("{}", Erased::ELSEWHERE),
    }
}

impl GeluOps for Cube {
    fn fused_gelu(x: CubeFloat) -> CubeFloat {
        Cube::gelu(x)
    }

    fn fused_gelu_backward(x: CubeFloat, gradient: CubeFloat) -> CubeFloat {
        Cube::gelu_backward(x, gradient)
    }
}
