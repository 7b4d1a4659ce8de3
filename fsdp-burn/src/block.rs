//! A parameter or a gradient, whole or a block of it, in the memory where its rank wants it.
//!
//! [Note: Blocks beside a device]
//! A rank that computes on a device has two memories: its host's and the device's. A [`Block`] lies in one of them. Where it
//! lies between its uses the tiers say (`[offload]`, see [`Offload`](crate::offload::Offload)); whoever uses it takes it to
//! where the use is, and [`Home`] is the one place that copies. So there are no two engines: a gather in host memory takes
//! its block to the host, an exchange between devices takes it to the device, and the optimizer steps where its state is.
//! What is in the right memory already is not copied.
//!
//! On the device a block is a tensor of its own shape; one without elements is host memory everywhere.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::backend::Flex;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::{Device, Tensor};
use bytes::Bytes;
use fsdp_core::{Dtype, ShardLayout};

use crate::Error;
use crate::device::is_host;
use crate::host::{self, Identity};

#[cfg(any(feature = "cuda", feature = "cpu"))]
use crate::cube;
#[cfg(any(feature = "cuda", feature = "cpu"))]
use crate::peers::{self, CubeDevice, CubeFloat};

/// See the module's documentation.
#[derive(Clone)]
pub(crate) enum Block {
    Host(Bytes),
    #[cfg(any(feature = "cuda", feature = "cpu"))]
    Device(Box<CubeFloat>),
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Block({} bytes)", self.size_bytes())
    }
}

impl Block {
    /// What takes the place of a block that lies elsewhere.
    pub(crate) fn nothing() -> Self {
        Block::Host(Bytes::new())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.size_bytes() == 0
    }

    pub(crate) fn size_bytes(&self) -> usize {
        match self {
            Block::Host(bytes) => bytes.len(),
            #[cfg(any(feature = "cuda", feature = "cpu"))]
            Block::Device(tensor) => cube::size_bytes(tensor),
        }
    }

    /// What the model knows the block by, where it shares its memory.
    pub(crate) fn identity(&self) -> Option<Identity> {
        match self {
            Block::Host(bytes) => (!bytes.is_empty()).then(|| Identity::of_memory(bytes)),
            #[cfg(any(feature = "cuda", feature = "cpu"))]
            Block::Device(tensor) => cube::identity(tensor),
        }
    }

    /// The elements in another type, rounded to the nearest. The same block where the type stays.
    pub(crate) fn cast(self, from: Dtype, to: Dtype) -> Self {
        match self {
            Block::Host(bytes) => Block::Host(host::cast(&bytes, from, to)),
            #[cfg(any(feature = "cuda", feature = "cpu"))]
            Block::Device(tensor) if from == to => Block::Device(tensor),
            #[cfg(any(feature = "cuda", feature = "cpu"))]
            Block::Device(tensor) => Block::Device(Box::new(cube::cast(*tensor, host::float_dtype(to)))),
        }
    }

    /// The block of `rank` of a whole tensor: shared where it is one range, copied otherwise.
    pub(crate) fn cut(&self, layout: &ShardLayout, rank: usize, dtype: Dtype) -> Self {
        match self {
            Block::Host(full) => Block::Host(host::cut(full, layout, rank, dtype.size_bytes())),
            #[cfg(any(feature = "cuda", feature = "cpu"))]
            Block::Device(_) if layout.shard_len(rank) == 0 => Block::nothing(),
            #[cfg(any(feature = "cuda", feature = "cpu"))]
            Block::Device(full) => Block::Device(Box::new(peers::cut((**full).clone(), layout, rank))),
        }
    }

    /// The sum of two that lie in one memory.
    pub(crate) fn plus(self, other: Self, dtype: Dtype) -> Self {
        let flat = |bytes: Bytes| {
            let len = bytes.len() / dtype.size_bytes();
            host::flex_tensor(bytes, &[len], dtype)
        };
        match (self, other) {
            (Block::Host(a), Block::Host(b)) => Block::Host(host::bytes_of(&Flex::float_add(flat(a), flat(b)))),
            #[cfg(any(feature = "cuda", feature = "cpu"))]
            (Block::Device(a), Block::Device(b)) => Block::Device(Box::new(cube::plus(*a, *b))),
            #[cfg(any(feature = "cuda", feature = "cpu"))]
            _ => unreachable!("blocks of one parameter are put into one memory before they are added"),
        }
    }

    /// A tensor of Burn's over the block, on its device; on Flex that of host memory. `like` says whether with autodiff.
    pub(crate) fn tensor<const D: usize>(self, shape: &[usize], dtype: Dtype, like: &Device) -> Tensor<D> {
        match self {
            Block::Host(bytes) => host::tensor(bytes, shape, dtype, like),
            #[cfg(any(feature = "cuda", feature = "cpu"))]
            Block::Device(tensor) => {
                let tensor = Tensor::from_primitive::<burn::backend::Cube>(*tensor);
                if like.is_autodiff() { Tensor::from_inner(tensor) } else { tensor }
            }
        }
    }

    /// The elements of a tensor that is not needed any more, in the memory where they are.
    pub(crate) fn of<const D: usize>(tensor: Tensor<D>) -> Self {
        #[cfg(any(feature = "cuda", feature = "cpu"))]
        if !is_host(&tensor.device()) {
            return match tensor.inner().try_into_primitive::<burn::backend::Cube>() {
                Ok(tensor) => Block::Device(Box::new(tensor)),
                Err(error) => unreachable!("ranks compute on Flex or on Cube: {error:?}"),
            };
        }
        Block::Host(host::into_bytes(tensor))
    }
}

/// Where a block lies between its uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// Where the rank computes; for ranks on processors that is host memory.
    Device,
    Host,
    /// In a slot of its own; on its way, in host memory.
    Disk,
}

/// The two memories of a rank, and what was copied from one to the other.
#[derive(Clone, Debug)]
pub(crate) struct Home {
    /// Without autodiff.
    device: Device,
    #[cfg(any(feature = "cuda", feature = "cpu"))]
    cube: Option<CubeDevice>,
    copied: Arc<[AtomicU64; 2]>,
}

impl Home {
    /// Of a rank that computes on `device`.
    pub(crate) fn of(device: &Device) -> Self {
        let device = device.clone().without_autodiff();
        Self {
            #[cfg(any(feature = "cuda", feature = "cpu"))]
            cube: (!is_host(&device)).then(|| cube::device_of(&device)),
            device,
            copied: Arc::default(),
        }
    }

    /// Whether the two are not the same.
    pub(crate) fn is_device(&self) -> bool {
        !is_host(&self.device)
    }

    /// The block, in the memory of this place.
    pub(crate) fn put(&self, block: Block, place: Place, shape: &[usize], dtype: Dtype) -> Result<Block, Error> {
        match place {
            Place::Device => Ok(self.to_device(block, shape, dtype)),
            Place::Host | Place::Disk => Ok(Block::Host(self.to_host(block)?)),
        }
    }

    /// Host memory, in the memory of this place.
    pub(crate) fn take_in(&self, bytes: Bytes, place: Place, shape: &[usize], dtype: Dtype) -> Block {
        match place {
            Place::Device => self.to_device(Block::Host(bytes), shape, dtype),
            Place::Host | Place::Disk => Block::Host(bytes),
        }
    }

    /// Waits for the device where the block is there.
    pub(crate) fn to_host(&self, block: Block) -> Result<Bytes, Error> {
        match block {
            Block::Host(bytes) => Ok(bytes),
            #[cfg(any(feature = "cuda", feature = "cpu"))]
            Block::Device(tensor) => {
                self.note_to_host(cube::size_bytes(&tensor));
                Ok(host::bytes_of(&cube::to_host(*tensor)?))
            }
        }
    }

    /// Host memory stays where it is where there is no other, and where there is nothing to copy.
    pub(crate) fn to_device(&self, block: Block, shape: &[usize], dtype: Dtype) -> Block {
        #[cfg(any(feature = "cuda", feature = "cpu"))]
        if let (Block::Host(bytes), Some(device)) = (&block, &self.cube) {
            if bytes.is_empty() {
                return block;
            }
            self.note_to_device(bytes.len());
            let data = host::tensor_data(bytes.clone(), shape, dtype);
            return Block::Device(Box::new(cube::to_device(data, device)));
        }
        #[cfg(not(any(feature = "cuda", feature = "cpu")))]
        let _ = (shape, dtype);
        block
    }

    /// Bytes of parameters and gradients that were copied to host memory and to the device, since the start or since
    /// [`Home::forget_copied`].
    pub(crate) fn copied(&self) -> [u64; 2] {
        [&self.copied[0], &self.copied[1]].map(|bytes| bytes.load(Ordering::Relaxed))
    }

    pub(crate) fn forget_copied(&self) {
        self.copied.iter().for_each(|bytes| bytes.store(0, Ordering::Relaxed));
    }

    /// Something else is copied.
    #[cfg(any(feature = "cuda", feature = "cpu"))]
    pub(crate) fn note_to_host(&self, bytes: usize) {
        self.copied[0].fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// As [`Home::note_to_host`].
    #[cfg(any(feature = "cuda", feature = "cpu"))]
    pub(crate) fn note_to_device(&self, bytes: usize) {
        self.copied[1].fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Waits for all that the device has to do for this thread, so that another thread may read what it has made.
    pub(crate) fn wait(&self) -> Result<(), Error> {
        if self.is_device() {
            self.device.sync().map_err(crate::device::failed)?;
        }
        Ok(())
    }

    /// Whether the device adds in double precision.
    #[cfg(any(feature = "cuda", feature = "cpu"))]
    pub(crate) fn has_f64(&self) -> bool {
        self.device.supports_dtype(burn::tensor::DType::F64)
    }
}
