//! Collectives over tensors that stay on devices, in place of those over host memory: `collectives = "device"`.
//!
//! [Note: Two places of a gather]
//! Blocks and reduced gradients are in host memory, see [Note: Host memory beside a device]. Over host memory a gather makes
//! the whole tensor there, and each rank copies all of it to its device; a reduction copies whole gradients back. Over devices
//! each rank copies its own block, 1/N of that, and devices exchange the rest: GPUs by NCCL (`nccl`), ranks that share a device
//! by reading each other's tensors (`shared`). Reductions of the second kind add in rank order, so they have the bits of host
//! memory; NCCL adds in an order of its own, the same in every step.
//!
//! An operation is started and finished by the thread of its rank, in the same order on all ranks. Starting waits for nobody.
//! Tensors are flat and padded: a rank's block of rows, then zeros up to the length of the largest block, so that the blocks
//! of all ranks in a row are the whole tensor and a rest.

#[cfg(feature = "cuda")]
mod nccl;
mod shared;

use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;

use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{BackendTypes, Cube, TensorMetadata};
use burn::tensor::{FloatDType, Shape, Slice, Tensor};
use burn_cubecl::tensor::CubeTensor;
use fsdp_core::{CommError, Communicator, DeviceChoice, OpKind, OpTag, ShardLayout};

use crate::{Error, Rank};

#[cfg(feature = "cuda")]
use nccl::Nccl;
#[cfg(feature = "cuda")]
pub(crate) use nccl::check_nccl;
pub(crate) use shared::Board;

pub(crate) type CubeFloat = FloatTensor<Cube>;
pub(crate) type CubeDevice = <Cube as BackendTypes>::Device;

/// One rank's end of an order of operations over devices.
pub(crate) trait Peers: Send + Sync + Debug {
    /// Starts an operation over flat, padded tensors: blocks for an all-gather, wholes for a reduction.
    fn start(&self, kind: OpKind, tag: OpTag, flats: Vec<CubeFloat>) -> Result<Ticket, CommError>;

    /// Its results: padded wholes, or for a reduce-scatter padded blocks, of sums that nothing is multiplied with. Those of two
    /// bytes may come in float32.
    fn finish(&self, ticket: Ticket) -> Result<Vec<CubeFloat>, CommError>;
}

/// Where a model's ranks exchange tensors of devices.
pub(crate) struct DeviceLinks {
    pub(crate) gather: Box<dyn Peers>,
    pub(crate) reduce: Box<dyn Peers>,
    /// Of this rank.
    pub(crate) device: CubeDevice,
}

impl DeviceLinks {
    /// Two orders of operations, for gathers and for reductions. All ranks make the call, with the same number of the model.
    ///
    /// # Errors
    /// If ranks cannot exchange tensors of their devices.
    pub(crate) fn connect(rank: &Rank, model: usize, control: &Arc<dyn Communicator>) -> Result<Self, Error> {
        let choice = rank.config().device;
        let refused = |problem: &str, remedy| Error::Device { device: choice, problem: problem.to_owned(), remedy };
        let probe = Tensor::<1>::empty([1], &rank.device().without_autodiff()).try_into_primitive::<Cube>();
        let Ok(probe) = probe else { unreachable!("`collectives = \"device\"` is refused for other backends") };
        let device = probe.device();
        if as_cube(probe).is_none() {
            return Err(refused(
                "Burn's fusion delays operations, each rank in its own way, and devices exchange tensors in one order",
                "build without fusion (`burn` with `default-features = false`), or set `collectives = \"host\"`",
            ));
        }
        let names = ["gather", "reduce"].map(|name| format!("model {model}, {name}"));
        if let Some(board) = rank.board() {
            let [gather, reduce] = names.map(|name| -> Box<dyn Peers> { Box::new(board.join(&name, control.clone())) });
            return Ok(Self { gather, reduce, device });
        }
        if choice == DeviceChoice::Cpu {
            return Err(refused(
                "ranks that are processes have no memory of a device in common",
                "set `collectives = \"host\"`, or let ranks be threads (`launcher = \"threads\"`)",
            ));
        }
        #[cfg(feature = "cuda")]
        {
            let join = |name: &String| Nccl::connect(rank.config(), &device, name, control.clone());
            let [gather, reduce] = [join(&names[0])?, join(&names[1])?];
            Ok(Self { gather: Box::new(gather), reduce: Box::new(reduce), device })
        }
        #[cfg(not(feature = "cuda"))]
        unreachable!("GPUs are refused by a program without the feature `cuda`")
    }
}

/// The tensor as CubeCL has it; `None` where Burn's fusion may not have computed it yet.
fn as_cube(tensor: CubeFloat) -> Option<CubeTensor> {
    let tensor: Box<dyn Any> = Box::new(tensor);
    tensor.downcast().ok().map(|tensor| *tensor)
}

/// The opposite of [`as_cube`].
#[cfg(feature = "cuda")]
fn of_cube(tensor: CubeTensor) -> Option<CubeFloat> {
    let tensor: Box<dyn Any> = Box::new(tensor);
    tensor.downcast().ok().map(|tensor| *tensor)
}

/// An operation that was started.
#[derive(Debug)]
#[must_use = "the other ranks wait for all to finish"]
pub(crate) struct Ticket {
    /// Its number in the order.
    number: u64,
}

/// A whole tensor, as the peers that reduce it want it.
pub(crate) fn flat_whole(whole: CubeFloat, layout: &ShardLayout) -> CubeFloat {
    padded(rows_first(whole, layout.dim()), layout.padded_len() * layout.num_shards())
}

/// The opposite of [`flat_whole`].
pub(crate) fn whole(flat: CubeFloat, layout: &ShardLayout) -> CubeFloat {
    shaped(flat, layout.shape(), layout.dim())
}

/// The block of `rank`, as its peers have it.
pub(crate) fn block(flat: CubeFloat, layout: &ShardLayout, rank: usize) -> CubeFloat {
    shaped(flat, &layout.shard_shape(rank), layout.dim())
}

/// The elements, row by row of the dimension that is cut.
fn rows_first(tensor: CubeFloat, dim: usize) -> CubeFloat {
    let len = tensor.shape().num_elements();
    let turned = if dim == 0 { tensor } else { Cube::float_swap_dims(tensor, 0, dim) };
    Cube::float_reshape(turned, Shape::from(vec![len]))
}

fn padded(flat: CubeFloat, len: usize) -> CubeFloat {
    let missing = len - flat.shape().num_elements();
    if missing == 0 {
        return flat;
    }
    let (device, dtype): (_, FloatDType) = (flat.device(), flat.dtype().into());
    let zeros = Cube::float_zeros(Shape::from(vec![missing]), &device, dtype);
    if missing == len { zeros } else { Cube::float_cat(vec![flat, zeros], 0) }
}

fn shaped(flat: CubeFloat, shape: &[usize], dim: usize) -> CubeFloat {
    let len = shape.iter().product::<usize>();
    let mut turned = shape.to_vec();
    if dim > 0 {
        turned.swap(0, dim);
    }
    let tensor = Cube::float_reshape(part(flat, 0..len), Shape::from(turned));
    if dim > 0 { Cube::float_swap_dims(tensor, 0, dim) } else { tensor }
}

/// Some elements of a flat tensor, without a copy.
fn part(flat: CubeFloat, range: std::ops::Range<usize>) -> CubeFloat {
    if range == (0..flat.shape().num_elements()) {
        return flat;
    }
    Cube::float_slice(flat, &[Slice::from(range)])
}
