//! Collectives over tensors that stay on devices, in place of those over host memory: `collectives = "device"`.
//!
//! [Note: Two places of a gather]
//! Over host memory a gather makes the whole tensor there, and each rank copies all of it to its device; a reduction copies
//! whole gradients back, see [Note: Host memory beside a device]. Over devices nothing is copied but blocks that lie in host
//! memory, see [Note: Blocks beside a device], and devices exchange the rest: GPUs by NCCL (`nccl`), ranks that share a device
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
use fsdp_core::{Axis, CommError, Communicator, DeviceChoice, OpKind, OpTag, ShardLayout, Traffic};

use crate::links::Links;
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

/// Ranks that exchange tensors with each other.
pub(crate) struct Group {
    /// All ranks of the run: what they are called, and whether it has ended.
    world: Arc<dyn Communicator>,
    /// These alone, in the order of `ranks`.
    own: Arc<dyn Communicator>,
    ranks: Vec<usize>,
}

/// Where a model's ranks exchange tensors of devices: the groups of [`Links`], with an order of operations each.
pub(crate) struct DeviceLinks {
    /// All-gathers over the shard axis.
    pub(crate) gather: Box<dyn Peers>,
    /// All-gathers of what stays cut over fewer ranks after forward.
    pub(crate) regather: Option<Box<dyn Peers>>,
    /// Reductions over the shard axis.
    pub(crate) reduce: Box<dyn Peers>,
    /// Reductions over the replicate axis and over all ranks, where the shard axis is not all ranks.
    pub(crate) beyond: Option<Beyond>,
    /// Of this rank.
    pub(crate) device: CubeDevice,
    /// Of this rank, too: what devices send is counted here, since no communicator does.
    pub(crate) traffic: Arc<Traffic>,
}

/// See [`DeviceLinks::beyond`].
pub(crate) struct Beyond {
    pub(crate) replicas: Box<dyn Peers>,
    pub(crate) world: Box<dyn Peers>,
}

impl DeviceLinks {
    /// Reductions over all ranks.
    pub(crate) fn over_all(&self) -> &dyn Peers {
        self.beyond.as_ref().map_or(self.reduce.as_ref(), |beyond| beyond.world.as_ref())
    }

    /// Connects the groups of `links`. All ranks make the call, with the same number of the model.
    ///
    /// # Errors
    /// If ranks cannot exchange tensors of their devices.
    pub(crate) fn connect(rank: &Rank, model: usize, links: &Links) -> Result<Self, Error> {
        let choice = rank.config().device;
        let refused = |problem: &str, remedy| Error::Device { device: choice, problem: problem.to_owned(), remedy };
        let probe = Tensor::<1>::empty([1], &rank.device().without_autodiff()).try_into_primitive::<Cube>();
        let Ok(probe) = probe else { unreachable!("`collectives = \"device\"` is refused for other backends") };
        let (device, traffic) = (probe.device(), rank.shared_traffic());
        if as_cube(probe).is_none() {
            return Err(refused(
                "Burn's fusion delays operations, each rank in its own way, and devices exchange tensors in one order",
                "build without fusion (`burn` with `default-features = false`), or set `collectives = \"host\"`",
            ));
        }
        if rank.board().is_none() && choice == DeviceChoice::Cpu {
            return Err(refused(
                "ranks that are processes have no memory of a device in common",
                "set `collectives = \"host\"`, or let ranks be threads (`launcher = \"threads\"`)",
            ));
        }
        let join = |what: &str, own: &Arc<dyn Communicator>, ranks: &[usize]| -> Result<Box<dyn Peers>, Error> {
            let name = format!("model {model}, {what}, ranks {ranks:?}");
            let group = Group { world: links.control.clone(), own: own.clone(), ranks: ranks.to_vec() };
            match rank.board() {
                Some(board) => Ok(Box::new(board.join(&name, group))),
                #[cfg(feature = "cuda")]
                None => Ok(Box::new(Nccl::connect(rank.config(), &device, &name, group)?)),
                #[cfg(not(feature = "cuda"))]
                None => unreachable!("GPUs are refused by a program without the feature `cuda`"),
            }
        };
        let mesh = rank.config().resolved_mesh();
        let (shards, replicas) = (mesh.group(Axis::Shard, rank.rank()), mesh.group(Axis::Replicate, rank.rank()));
        let gather = join("gather", &links.control_shard, &shards)?;
        let reduce = join("reduce", &links.control_shard, &shards)?;
        let beyond = match &links.reduce_replicas {
            None => None,
            Some(own) => Some(Beyond {
                replicas: join("reduce over replicas", own, &replicas)?,
                world: join("reduce over all", &links.control, &(0..rank.world_size()).collect::<Vec<_>>())?,
            }),
        };
        let regather = match &links.regather {
            None => None,
            Some(own) => {
                let first = mesh.coordinate(Axis::Shard, rank.rank()) - own.rank();
                Some(join("gather again", own, &shards[first..first + own.world_size()])?)
            }
        };
        Ok(Self { gather, regather, reduce, beyond, device, traffic })
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

/// A block, as the peers that gather it want it.
pub(crate) fn flat_block(block: CubeFloat, layout: &ShardLayout) -> CubeFloat {
    padded(rows_first(block, layout.dim()), layout.padded_len())
}

/// The block of `rank` of a whole tensor. It has elements.
pub(crate) fn cut(whole: CubeFloat, layout: &ShardLayout, rank: usize) -> CubeFloat {
    let begin = rank * layout.padded_len();
    let flat = part(rows_first(whole, layout.dim()), begin..begin + layout.shard_len(rank));
    shaped(flat, &layout.shard_shape(rank), layout.dim())
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
pub(crate) fn part(flat: CubeFloat, range: std::ops::Range<usize>) -> CubeFloat {
    if range == (0..flat.shape().num_elements()) {
        return flat;
    }
    Cube::float_slice(flat, &[Slice::from(range)])
}
