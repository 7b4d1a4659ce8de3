//! From one model on rank 0 to blocks on all ranks, one parameter at a time, so that no rank ever holds all of it.
//!
//! Each rank has built the model, but Burn initialises a parameter when it is first read. Rank 0 reads one, sends every
//! rank its block, and drops it before the next; the other ranks never read theirs. So all ranks start from one
//! model, whatever their random state, and at stage 3 the largest single parameter is all that is ever whole.

use std::any::Any;
use std::collections::HashMap;
use std::sync::Arc;

use burn::module::{LoraAdapter, Module, ModuleMapper, Param, Reparameterizer};
use burn::tensor::{Device, Shape, Tensor, TensorData};
use bytes::Bytes;
use fsdp_core::{Communicator, Dtype, OpTag, Phase, Plan, ShardLayout, Slot};

use crate::Error;
use crate::device::{self, is_host};
use crate::engine::Engine;
use crate::gather_op::{GatherOnUse, GatherSite, Use};
use crate::host;
use crate::lora::{Adapter, take_adapters};
use crate::offload::Offload;
use crate::survey::{Entry, emptied, replaced};

/// What one rank holds of every parameter, by plan index.
pub(crate) struct Distributed {
    pub(crate) stored: Vec<Stored>,
    pub(crate) dtypes: Vec<Dtype>,
}

/// Where a parameter lies from the start, so that no rank ever holds all that it offloads.
pub(crate) enum Stored {
    Here(Bytes),
    Away(Slot),
}

/// What is distributed, and to whom.
#[derive(Clone, Copy)]
pub(crate) struct Source<'a> {
    pub(crate) entries: &'a [Entry],
    pub(crate) managed: &'a [Option<usize>],
    pub(crate) plan: &'a Plan,
    pub(crate) offload: &'a Offload,
    /// This rank's position on the shard axis.
    pub(crate) shard_index: usize,
}

/// Sends every managed parameter of rank 0's `model`, and returns the model without their values.
///
/// # Errors
/// If a collective fails, or a parameter has an element type that cannot be reduced.
pub(crate) fn distribute<M: Module>(
    model: M,
    source: Source,
    control: &dyn Communicator,
) -> Result<(M, Distributed), Error> {
    let is_further = |(entry, managed): (&Entry, &Option<usize>)| managed.filter(|_| entry.tied_to.is_some());
    let further: Vec<_> = source.entries.iter().zip(source.managed).map(is_further).collect();
    // A clone of a parameter would hold its value until the model's traversal gets there.
    let model = let_go(model, &further);
    let done = Distributed { stored: Vec::new(), dtypes: Vec::new() };
    let mut sender = Sender { source, control, next: 0, done, failure: None };
    let model = model.map(&mut sender);
    match sender.failure {
        Some(error) => Err(error),
        None => Ok((model, sender.done)),
    }
}

/// This rank's block of what rank 0 has whole: each block goes to its owner in each replica, and a tensor that is one block
/// to all ranks, in one buffer. *Collective.*
///
/// # Errors
/// If a collective fails.
pub(crate) fn deal_out(
    control: &dyn Communicator,
    tag: &OpTag,
    full: Option<Bytes>,
    layout: &ShardLayout,
    shard_index: usize,
    elem_bytes: usize,
) -> Result<Bytes, Error> {
    if layout.num_shards() == 1 {
        return Ok(control.broadcast(tag, 0, full)?);
    }
    if layout.num_shards() == control.world_size() {
        return Ok(control.scatter(tag, 0, full, layout, elem_bytes)?);
    }
    let full = control.broadcast(tag, 0, full)?;
    Ok(Bytes::from(host::cut(&full, layout, shard_index, elem_bytes).to_vec()))
}

/// Puts what the engine stores into the model, and the gather before each use.
///
/// Returns the scale of each adapter, too, by the entry of its base.
pub(crate) fn attach<M: Module>(
    model: M,
    entries: &[Entry],
    managed: &[Option<usize>],
    engine: &Arc<Engine>,
) -> (M, Vec<Option<f64>>) {
    let (model, scales) = take_adapters(model, entries);
    let mut values = Values { managed, engine, next: 0, tied: HashMap::new() };
    (model.apply_reparameterization(Attacher { values: &mut values, entries, scales: &scales }), scales)
}

/// Puts what the engine stores into a model that is attached already: after an optimizer step.
pub(crate) fn refresh<M: Module>(model: M, managed: &[Option<usize>], engine: &Arc<Engine>) -> M {
    model.map(&mut Refresher(Values { managed, engine, next: 0, tied: HashMap::new() }))
}

/// Lets go of what the engine stores, so that an optimizer step does not keep old parameters beside the new ones.
pub(crate) fn let_go<M: Module>(model: M, managed: &[Option<usize>]) -> M {
    model.map(&mut Emptier { managed, next: 0 })
}

/// What a module without anything attached lacks to be the one that was sharded.
pub(crate) struct Restored<'a> {
    pub(crate) entries: &'a [Entry],
    pub(crate) managed: &'a [Option<usize>],
    /// By parameter of the plan, where it is not in the module already. Those of adapted parameters and their factors are here.
    pub(crate) values: &'a [Option<TensorData>],
    /// Of each adapter, by the entry of its base.
    pub(crate) scales: &'a [Option<f64>],
}

/// Puts values and adapters into `module`.
pub(crate) fn restore<M: Module>(module: M, restored: &Restored) -> M {
    module.apply_reparameterization(Restorer { restored, next: 0 })
}

/// The entries of the plan's parameters, in plan order.
pub(crate) fn planned(entries: &[Entry], managed: &[Option<usize>]) -> Arc<[Entry]> {
    let is_planned = |(entry, managed): &(&Entry, &Option<usize>)| managed.is_some() && entry.tied_to.is_none();
    entries.iter().zip(managed).filter(is_planned).map(|(entry, _)| entry.clone()).collect()
}

/// For each entry, its index among the plan's parameters; tied ones have one together.
pub(crate) fn managed(entries: &[Entry], plan: &Plan) -> Arc<[Option<usize>]> {
    let mut next = 0;
    let mut managed: Vec<Option<usize>> = Vec::new();
    for entry in entries {
        let is_next = plan.params().get(next).is_some_and(|param| entry.is_param && param.path == entry.path());
        let index = match entry.tied_to {
            Some(first) => managed[first],
            None => is_next.then_some(next),
        };
        next += usize::from(is_next);
        managed.push(index);
    }
    managed.into()
}

struct Sender<'a> {
    source: Source<'a>,
    control: &'a dyn Communicator,
    next: usize,
    done: Distributed,
    failure: Option<Error>,
}

impl ModuleMapper for Sender<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let index = self.next;
        self.next += 1;
        if self.failure.is_some() {
            return param;
        }
        let entry = &self.source.entries[index];
        if entry.tied_to.is_some() {
            return param;
        }
        let sent = match self.source.managed[index] {
            Some(managed) => self.send(param, entry, managed),
            None if entry.is_param => return param,
            None => self.send_buffer(param, entry),
        };
        let (param, result) = sent;
        self.failure = result.err();
        param
    }
}

/// A module's map must return a parameter, also after a failure.
type Sent<const D: usize> = (Param<Tensor<D>>, Result<(), Error>);

impl Sender<'_> {
    fn send<const D: usize>(&mut self, param: Param<Tensor<D>>, entry: &Entry, managed: usize) -> Sent<D> {
        let value = self.is_root().then(|| param.val());
        // From here on nothing but `value` holds the parameter, and it is dropped when this function returns.
        let param = emptied(param);
        let spec = &self.source.plan.params()[managed];
        let result = self.agree_on_dtype(entry, value.as_ref()).and_then(|dtype| {
            let tag = self.tag(entry);
            let full = value.map(host::into_bytes);
            let whole = ShardLayout::new(spec.layout.shape(), 0, 1);
            let layout = if self.source.plan.is_resident(spec) { &whole } else { &spec.layout };
            let stored = deal_out(self.control, &tag, full, layout, self.source.shard_index, dtype.size_bytes())?;
            let stored = match self.source.offload.tier().filter(|_| self.source.offload.has_parameter(managed)) {
                Some(tier) => {
                    let slot = tier.reserve(stored.len())?;
                    tier.write(slot, stored).wait()?;
                    Stored::Away(slot)
                }
                None => Stored::Here(stored),
            };
            Ok((stored, dtype))
        });
        let result = result.map(|(stored, dtype)| {
            self.done.stored.push(stored);
            self.done.dtypes.push(dtype);
        });
        (param, result)
    }

    /// Running statistics start equal on all ranks.
    fn send_buffer<const D: usize>(&mut self, param: Param<Tensor<D>>, entry: &Entry) -> Sent<D> {
        let value = param.val();
        let sent = self.agree_on_dtype(entry, Some(&value)).and_then(|dtype| {
            let full = self.is_root().then(|| host::into_bytes(value));
            Ok((self.control.broadcast(&self.tag(entry), 0, full)?, dtype))
        });
        match sent {
            Ok((bytes, dtype)) => {
                (replaced(param, |device| host::tensor(bytes, &entry.spec.shape, dtype, device)), Ok(()))
            }
            Err(error) => (param, Err(error)),
        }
    }

    /// Only rank 0 knows the element type before a parameter is initialised. All ranks get the same answer or error.
    fn agree_on_dtype<const D: usize>(&self, entry: &Entry, value: Option<&Tensor<D>>) -> Result<Dtype, Error> {
        let name = value.filter(|_| self.is_root()).map(|value| match host::dtype_of(value.dtype()) {
            Some(dtype) => dtype.to_string(),
            None => format!("{:?}", value.dtype()),
        });
        let name = self.control.broadcast(&self.tag(entry), 0, name.map(Bytes::from))?;
        match &name[..] {
            b"f32" => Ok(Dtype::F32),
            b"f64" => Ok(Dtype::F64),
            other => Err(Error::Parameter {
                parameter: entry.path(),
                problem: format!("its element type {} cannot be reduced", String::from_utf8_lossy(other)),
                remedy: "initialise the model in f32 or f64",
            }),
        }
    }

    fn is_root(&self) -> bool {
        self.control.rank() == 0
    }

    fn tag(&self, entry: &Entry) -> OpTag {
        OpTag::new(0, Phase::Init, entry.path())
    }
}

struct Values<'a> {
    managed: &'a [Option<usize>],
    engine: &'a Arc<Engine>,
    next: usize,
    /// What is on a device of a parameter that is tied, by its index: all of its fields hold the one tensor.
    tied: HashMap<usize, Box<dyn Any>>,
}

impl Values<'_> {
    fn value<const D: usize>(&mut self, param: Param<Tensor<D>>) -> (Param<Tensor<D>>, Option<usize>) {
        let managed = self.managed[self.next];
        self.next += 1;
        let Some(index) = managed else { return (param, None) };
        let plan = self.engine.plan();
        let spec = &plan.params()[index];
        let shape = self.engine.stored_shape(index);
        let dtype = self.engine.stored_dtype(index);
        // What lies elsewhere has its shape in the model, and no memory: on the disk, or in host memory beside a device.
        let is_away = self.engine.offload().has_parameter(index);
        let is_block = !plan.is_resident(spec);
        let stored = self.engine.stored(index);
        let value = |device: &Device| {
            if is_away || is_block && !is_host(device) {
                let nothing = Tensor::<D>::zeros([1; D], (device, host::burn_dtype(dtype)));
                return nothing.expand(Shape::from(shape));
            }
            stored.tensor(&shape, dtype, device)
        };
        let is_tied = !spec.also.is_empty();
        (replaced(param, |device| self.placed(index, is_tied, device, value)), managed)
    }

    /// The value that the model holds from now on. The engine knows its own memory again; what is on a device it is told of.
    fn placed<const D: usize>(
        &mut self,
        index: usize,
        is_tied: bool,
        device: &Device,
        value: impl FnOnce(&Device) -> Tensor<D>,
    ) -> Tensor<D> {
        if is_host(device) {
            return value(device);
        }
        let tied = self.tied.get(&index).and_then(|tensor| tensor.downcast_ref::<Tensor<D>>());
        let tensor = tied.cloned().unwrap_or_else(|| value(device));
        self.engine.lend(index, device::identity(&tensor));
        if is_tied {
            self.tied.insert(index, Box::new(tensor.clone()));
        }
        tensor
    }
}

struct Attacher<'v, 'a> {
    values: &'v mut Values<'a>,
    entries: &'a [Entry],
    /// By entry: that of the adapter of a base.
    scales: &'v [Option<f64>],
}

impl Attacher<'_, '_> {
    /// The adapter of `base`, whose factors are the two entries after it.
    fn adapter<const D: usize>(&mut self, base: Tensor<D>, scale: f64) -> Adapter {
        let [a, b] = [0, 1].map(|factor| {
            let entry = &self.entries[self.values.next + factor];
            let mut value = Tensor::<2>::zeros([1, 1], &base.device());
            if let Some(strategy) = base.gradient_checkpointing_strategy() {
                value = value.with_gradient_checkpointing_strategy(strategy);
            }
            Param::initialized(entry.id, value.set_require_grad(entry.spec.trainable))
        });
        let nested = Attacher { values: self.values, entries: self.entries, scales: self.scales };
        Adapter { a, b, scale }.apply_reparameterization(nested)
    }
}

impl Reparameterizer for Attacher<'_, '_> {
    type Reparam = GatherOnUse;

    fn reparameterize<const D: usize>(
        &mut self,
        _: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<GatherOnUse>) {
        let scale = self.scales[self.values.next];
        let (param, managed) = self.values.value(param);
        let adapter = scale.map(|scale| self.adapter(param.base(), scale));
        let site = managed.map(|param| GatherSite { engine: self.values.engine.clone(), param, usage: Use::Evaluate });
        (param, site.map(|site| GatherOnUse { site, adapter }))
    }
}

struct Emptier<'a> {
    managed: &'a [Option<usize>],
    next: usize,
}

impl ModuleMapper for Emptier<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let managed = self.managed[self.next];
        self.next += 1;
        if managed.is_some() { emptied(param) } else { param }
    }
}

struct Restorer<'r, 'a> {
    restored: &'r Restored<'a>,
    next: usize,
}

impl Restorer<'_, '_> {
    fn value(&self, entry: usize) -> Option<TensorData> {
        self.restored.managed[entry].and_then(|param| self.restored.values[param].clone())
    }

    fn factor(&self, index: usize, device: &Device) -> Option<Param<Tensor<2>>> {
        let (entry, data) = (&self.restored.entries[index], self.value(index)?);
        let dtype = data.dtype();
        let param = Param::initialized(entry.id, Tensor::from_data(data, (device, dtype)));
        Some(param.set_require_grad(entry.spec.trainable))
    }
}

impl Reparameterizer for Restorer<'_, '_> {
    type Reparam = LoraAdapter;

    fn reparameterize<const D: usize>(
        &mut self,
        _: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<LoraAdapter>) {
        let index = self.next;
        self.next += 1;
        let device = param.lazy_device();
        let param = match self.value(index) {
            Some(data) => {
                let dtype = data.dtype();
                replaced(param, |device| Tensor::from_data(data, (device, dtype)))
            }
            None => param,
        };
        let Some(scale) = self.restored.scales[index] else { return (param, None) };
        // The two entries after a base are its factors, which are not fields of this module any more.
        self.next += 2;
        let factors = (self.factor(index + 1, &device), self.factor(index + 2, &device));
        (param, if let (Some(a), Some(b)) = factors { Some(LoraAdapter { a, b, scale }) } else { None })
    }
}

struct Refresher<'a>(Values<'a>);

impl ModuleMapper for Refresher<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.0.value(param).0
    }
}
