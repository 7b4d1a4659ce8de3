//! Running statistics, and whatever else Burn visits like a parameter and is none: read, replaced, and made equal on all
//! ranks.
//!
//! Burn's `RunningState` is shared by the clones of a module and keyed by thread, for ranks that train one module together.
//! Here each rank has a model of its own, so each has statistics of its own ([`unshare`]), in threads as in processes; and
//! what they become together is a setting.

use std::any::Any;
use std::collections::VecDeque;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Device, Tensor};
use bytes::Bytes;
use fsdp_core::{Buffers, CommError, Communicator, Dtype, OpTag, Reduce, ReducePart, ShardLayout};

use crate::survey::{Entry, replaced};
use crate::{Error, host};

/// The value of one buffer.
#[derive(Clone)]
pub(crate) struct Buffer {
    /// Flat and row-major.
    pub(crate) bytes: Bytes,
    pub(crate) dtype: Dtype,
}

/// The entries that are buffers.
pub(crate) fn entries(entries: &[Entry]) -> impl Iterator<Item = &Entry> {
    entries.iter().filter(|entry| !entry.is_param)
}

/// All buffers, in the order of their entries.
pub(crate) fn read<M: Module>(module: &M, entries: &[Entry]) -> Vec<Buffer> {
    let mut reader = Reader { entries, next: 0, buffers: Vec::new() };
    // Running statistics are collected by thread until somebody looks at them, as `valid` does.
    module.valid().visit(&mut reader);
    reader.buffers
}

/// The module with other buffers, in the order of their entries. Clones that share them see the new ones as well.
pub(crate) fn write<M: Module>(module: M, entries: &[Entry], buffers: Vec<Buffer>) -> M {
    let mut buffers = VecDeque::from(buffers);
    let values = entries.iter().map(|entry| if entry.is_param { None } else { buffers.pop_front() }).collect();
    put(module, entries, values)
}

/// The module with other values of what it holds itself: buffers, and parameters that are not managed. By entry.
pub(crate) fn put<M: Module>(module: M, entries: &[Entry], values: Vec<Option<Buffer>>) -> M {
    module.map(&mut Writer { entries, next: 0, values })
}

/// The module with buffers that it shares with no clone of it. Parameters that are not initialised stay so.
pub(crate) fn unshare<M: Module>(module: M, entries: &[Entry]) -> M {
    // Entering validation and training again is what Burn makes new statistics for. It would also initialise parameters,
    // so they are elsewhere meanwhile.
    let mut taker = Taker { entries, next: 0, params: VecDeque::new() };
    let module = module.map(&mut taker);
    let mut devices = Devices { entries, next: 0, devices: Vec::new() };
    module.visit(&mut devices);
    let buffers = read(&module, entries).into_iter().zip(devices.devices).collect();
    let module = module.valid().train();
    module.map(&mut Giver { entries, next: 0, params: taker.params, buffers })
}

/// What the ranks go on with, as `policy` says. *Collective.*
pub(crate) fn agree(
    policy: Buffers,
    control: &dyn Communicator,
    tag: &OpTag,
    own: Vec<Buffer>,
) -> Result<Vec<Buffer>, CommError> {
    match policy {
        Buffers::Local => Ok(own),
        Buffers::Rank0 => {
            let whole = own.iter().flat_map(|buffer| buffer.bytes.iter().copied()).collect::<Vec<_>>();
            let root = control.broadcast(tag, 0, (control.rank() == 0).then(|| Bytes::from(whole)))?;
            let mut start = 0;
            let slice = |buffer: Buffer| {
                let end = start + buffer.bytes.len();
                let bytes = root.slice(start..end);
                start = end;
                Buffer { bytes, ..buffer }
            };
            Ok(own.into_iter().map(slice).collect())
        }
        Buffers::Sync => {
            let part = |buffer: &Buffer| {
                let len = buffer.bytes.len() / buffer.dtype.size_bytes();
                let layout = ShardLayout::new(&[len], 0, control.world_size());
                ReducePart { full: buffer.bytes.clone(), layout, dtype: buffer.dtype }
            };
            let parts: Vec<_> = own.iter().map(part).collect();
            let means = control.all_reduce(tag, &parts, Reduce::mean(control.world_size()))?;
            Ok(own.into_iter().zip(means).map(|(buffer, bytes)| Buffer { bytes, ..buffer }).collect())
        }
    }
}

/// Refuses running statistics of Burn's own layers that compute in half precision: statistics are float32, and Burn's
/// operations do not mix types. `compute` is the type of each parameter of the plan.
pub(crate) fn check_precision(entries: &[Entry], managed: &[Option<usize>], compute: &[Dtype]) -> Result<(), Error> {
    for buffer in self::entries(entries).filter(|buffer| !buffer.over_all_ranks) {
        let layer = buffer.spec.path.split_last().map_or(&[][..], |(_, layer)| layer);
        let beside = entries.iter().zip(managed).filter(|(entry, _)| entry.spec.path.starts_with(layer));
        let mut dtypes = beside.filter_map(|(_, managed)| managed.map(|param| compute[param]));
        if let Some(dtype) = dtypes.find(|dtype| dtype.size_bytes() < 4) {
            return Err(Error::Parameter {
                parameter: buffer.path(),
                problem: format!("it is a float32 statistic of a layer of Burn's that computes in {dtype}"),
                remedy: "use `fsdp_burn::nn::BatchNorm`, made from Burn's with `.into()`, or give its unit `precision = \"f32\"`",
            });
        }
    }
    Ok(())
}

struct Reader<'a> {
    entries: &'a [Entry],
    next: usize,
    buffers: Vec<Buffer>,
}

impl ModuleVisitor for Reader<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let entry = &self.entries[self.next];
        self.next += 1;
        if !entry.is_param {
            let data = param.val().into_data();
            let dtype = host::dtype_of(data.dtype()).unwrap_or(Dtype::F32);
            self.buffers.push(Buffer { bytes: host::elements(data), dtype });
        }
    }
}

struct Writer<'a> {
    entries: &'a [Entry],
    next: usize,
    values: Vec<Option<Buffer>>,
}

impl ModuleMapper for Writer<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (entry, value) = (&self.entries[self.next], self.values[self.next].take());
        self.next += 1;
        match value {
            Some(Buffer { bytes, dtype }) => {
                replaced(param, |device| host::tensor(bytes, &entry.spec.shape, dtype, device))
            }
            None => param,
        }
    }
}

/// The devices that buffers are on.
struct Devices<'a> {
    entries: &'a [Entry],
    next: usize,
    devices: Vec<Device>,
}

impl ModuleVisitor for Devices<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let entry = &self.entries[self.next];
        self.next += 1;
        if !entry.is_param {
            self.devices.push(param.val().device());
        }
    }
}

/// Takes parameters out of a module, of any number of dimensions.
struct Taker<'a> {
    entries: &'a [Entry],
    next: usize,
    params: VecDeque<Box<dyn Any>>,
}

impl ModuleMapper for Taker<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let is_param = self.entries[self.next].is_param;
        self.next += 1;
        if !is_param {
            return param;
        }
        let stand_in = Param::initialized(param.id, Tensor::zeros([1; D], &Device::flex()));
        self.params.push_back(Box::new(param));
        stand_in
    }
}

/// Puts them back, and buffers on the devices that they were on.
struct Giver<'a> {
    entries: &'a [Entry],
    next: usize,
    params: VecDeque<Box<dyn Any>>,
    buffers: VecDeque<(Buffer, Device)>,
}

impl ModuleMapper for Giver<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let entry = &self.entries[self.next];
        self.next += 1;
        if entry.is_param {
            return match self.params.pop_front().map(Box::<dyn Any>::downcast) {
                Some(Ok(taken)) => *taken,
                _ => unreachable!("a module is traversed in one order"),
            };
        }
        let (id, value, mapper) = param.consume();
        let value = match self.buffers.pop_front() {
            Some((Buffer { bytes, dtype }, device)) => host::tensor(bytes, &entry.spec.shape, dtype, &device),
            None => value,
        };
        Param::from_mapped_value(id, value, mapper)
    }
}
