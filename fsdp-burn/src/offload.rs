//! Where a model's state lies between its uses: where its rank computes, in host memory, or on the rank's disk.
//!
//! On the disk parameters go by blocks, each in a slot of its own; gradients likewise. Optimizer state goes by units: what
//! Burn records of the unit's parameters, in one slot. See `engine/tiers.rs` for the first two, and [`AwayStates`] for the
//! third.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use burn::optim::{ModuleOptimizer, OptimizerRecord};
use burn_pack::{Reader, Scalar};
use bytes::Bytes;
use fsdp_core::{
    OffloadConfig, Plan, PlannedParam, Slot, Tier, TierModel, TierShares, Transfer, Unit, UnitIndex, UnitTiers,
};

use crate::block::{Home, Place};
use crate::{Error, host};

/// Room for a record that grows a little, as its counters do.
const SLACK_BYTES: usize = 4096;

/// What is offloaded, by parameter, and to where.
#[derive(Debug)]
pub(crate) struct Offload {
    home: Home,
    tier: Option<Arc<Tier>>,
    moves_parameters: bool,
    parameters: Vec<Place>,
    gradients: Vec<Place>,
    optimizer: Vec<Place>,
}

impl Offload {
    /// What the configuration and the units say for the blocks of one rank. Without a disk, nothing lies on one.
    pub(crate) fn new(
        config: &OffloadConfig,
        home: Home,
        tier: Option<Arc<Tier>>,
        plan: &Plan,
        shard_index: usize,
    ) -> Self {
        let place = |shares: &TierShares, counts: &dyn Fn(&PlannedParam) -> bool| -> Vec<Place> {
            let len = |param: &PlannedParam| if counts(param) { stepped_len(param, shard_index) } else { 0 };
            let own: Vec<_> = plan.params().iter().map(|param| of_unit(&plan.units()[param.unit])).collect();
            // Shares are those of units that do not say it themselves.
            let lens = plan.params().iter().zip(&own).map(|(param, own)| if own.is_none() { len(param) } else { 0 });
            let lens: Vec<_> = lens.collect();
            let (on_nvme, on_cpu) = (shares.on_nvme(&lens), shares.on_cpu(&lens));
            let place = |(((param, own), on_nvme), on_cpu): (((&PlannedParam, &Option<TierShares>), bool), bool)| {
                let is_own = |tier| *own == Some(tier) && len(param) > 0;
                match () {
                    () if tier.is_some() && (on_nvme || is_own(TierShares::NVME)) => Place::Disk,
                    // Ranks on processors compute in host memory, so there the two are one place.
                    () if home.is_device() && (on_cpu || is_own(TierShares::CPU)) => Place::Host,
                    () => Place::Device,
                }
            };
            plan.params().iter().zip(&own).zip(on_nvme).zip(on_cpu).map(place).collect()
        };
        let parameters = place(&config.parameters, &|param| !plan.is_resident(param));
        // What is frozen may be trained later. Its places are chosen apart, so that shares are shares of what is trained now.
        let of_trained = |shares: &TierShares| -> Vec<Place> {
            let [trained, frozen] = [true, false].map(|trained| place(shares, &|param| param.trainable == trained));
            let placed = plan.params().iter().zip(trained.into_iter().zip(frozen));
            placed.map(|(param, (trained, frozen))| if param.trainable { trained } else { frozen }).collect()
        };
        let (gradients, optimizer) = (of_trained(&config.gradients), of_trained(&config.optimizer));
        let moves_parameters = tier.is_some() && (config.parameters.nvme > 0.0 || unit_on_disk(plan).is_some());
        Self { home, tier, moves_parameters, parameters, gradients, optimizer }
    }

    /// The memories of the rank.
    pub(crate) fn home(&self) -> &Home {
        &self.home
    }

    /// The rank's disk, for something that is offloaded.
    pub(crate) fn tier(&self) -> Option<&Arc<Tier>> {
        self.tier.as_ref()
    }

    /// Whether blocks of some rank may lie on a disk. Which ones differs between ranks.
    pub(crate) fn moves_parameters(&self) -> bool {
        self.moves_parameters
    }

    /// Where blocks lie.
    pub(crate) fn parameter_place(&self, param: usize) -> Place {
        self.parameters[param]
    }

    /// Where the reduced gradient lies, when there is one.
    pub(crate) fn gradient_place(&self, param: usize) -> Place {
        self.gradients[param]
    }

    /// Where the optimizer's state lies, when there is some: also of what is frozen at the moment. On a disk it is stepped in
    /// host memory, elsewhere where it lies.
    pub(crate) fn state_place(&self, param: usize) -> Place {
        self.optimizer[param]
    }

    /// Whether the block lies on the disk.
    pub(crate) fn has_parameter(&self, param: usize) -> bool {
        self.parameters[param] == Place::Disk
    }

    /// Whether the reduced gradient does.
    pub(crate) fn has_gradient(&self, param: usize) -> bool {
        self.gradients[param] == Place::Disk
    }

    /// Whether the optimizer's state does.
    pub(crate) fn has_state(&self, param: usize) -> bool {
        self.optimizer[param] == Place::Disk
    }

    /// What the memory model must know: shares of this rank's blocks.
    pub(crate) fn memory(&self, plan: &Plan, shard_index: usize) -> TierModel {
        let share = |placed: &[Place], counts: fn(&PlannedParam) -> bool| {
            let lens = plan.params().iter().zip(placed).filter(|(param, _)| counts(param));
            let (all, on_disk) = lens.fold((0, 0), |(all, on_disk), (param, placed)| {
                let len = stepped_len(param, shard_index);
                (all + len, on_disk + if *placed == Place::Disk { len } else { 0 })
            });
            on_disk as f64 / all.max(1) as f64
        };
        TierModel {
            parameters: share(&self.parameters, |_| true),
            gradients: share(&self.gradients, |param| param.trainable),
            optimizer: share(&self.optimizer, |param| param.trainable),
            buffer_bytes: self.tier.as_ref().map_or(0, |tier| tier.buffer_bytes() as u64),
        }
    }

    /// What the schedule must know, with what `plan` trains.
    pub(crate) fn unit_tiers(&self, plan: &Plan) -> Vec<UnitTiers> {
        let tiers = |unit: &Unit| {
            let blocks = unit.params.iter().any(|&param| self.has_parameter(param));
            let of_trained = |of: &[Place]| {
                unit.params.iter().any(|&param| of[param] == Place::Disk && plan.params()[param].trainable)
            };
            UnitTiers { blocks, gradients: of_trained(&self.gradients), state: of_trained(&self.optimizer) }
        };
        plan.units().iter().map(tiers).collect()
    }
}

/// Where a unit's own attribute puts all that is its.
fn of_unit(unit: &Unit) -> Option<TierShares> {
    unit.overrides.offload.as_deref().and_then(TierShares::of_attribute)
}

/// The first unit that asks for a disk.
pub(crate) fn unit_on_disk(plan: &Plan) -> Option<&Unit> {
    plan.units().iter().find(|unit| of_unit(unit) == Some(TierShares::NVME))
}

/// Elements of a parameter that a rank steps.
fn stepped_len(param: &PlannedParam, shard_index: usize) -> usize {
    if param.is_split() { param.layout.shard_len(shard_index) } else { param.layout.full_len() }
}

/// Optimizer state that lies on the disk, by the engine that it belongs to and the unit.
#[derive(Default)]
pub(crate) struct AwayStates {
    states: BTreeMap<(usize, UnitIndex), Away>,
}

impl AwayStates {
    pub(crate) fn unit(&mut self, engine: usize, unit: UnitIndex) -> &mut Away {
        self.states.entry((engine, unit)).or_default()
    }

    /// All that an engine has, by unit.
    pub(crate) fn of_engine(&self, engine: usize) -> impl Iterator<Item = &Away> {
        self.states.range((engine, 0)..=(engine, UnitIndex::MAX)).map(|(_, away)| away)
    }

    /// Forgets what an engine has, and keeps its slots.
    pub(crate) fn forget(&mut self, engine: usize) {
        for (_, away) in self.states.range_mut((engine, 0)..=(engine, UnitIndex::MAX)) {
            *away = Away { slot: away.slot.take(), ..Away::default() };
        }
    }
}

/// The optimizer state of one unit's offloaded parameters: on the disk, or on its way.
#[derive(Default)]
pub(crate) struct Away {
    slot: Option<Slot>,
    /// The slot holds state.
    is_stored: bool,
    reading: Option<Transfer<Bytes>>,
    /// Ready to be written.
    ready: Option<Bytes>,
    writing: Option<Transfer<()>>,
    /// What the state consists of.
    pub(crate) contents: Contents,
}

/// A record without its data.
#[derive(Clone, Debug, Default)]
pub(crate) struct Contents {
    pub(crate) tensors: Vec<(String, burn::tensor::DType, Vec<usize>)>,
    pub(crate) scalars: BTreeMap<String, Scalar>,
    num_bytes: usize,
}

impl Away {
    /// Starts to read the state, if there is any.
    pub(crate) fn fetch(&mut self, tier: &Tier) {
        if let (None, true, Some(slot)) = (&self.reading, self.is_stored, self.slot) {
            self.reading = Some(tier.read(slot));
        }
    }

    /// An optimizer like `blank` with the state, and how the read went; `wait` sleeps for it.
    pub(crate) fn take(
        &mut self,
        blank: &ModuleOptimizer,
        tier: &Tier,
        wait: impl FnOnce(Transfer<Bytes>, u64) -> Result<Bytes, Error>,
    ) -> Result<ModuleOptimizer, Error> {
        self.fetch(tier);
        let Some(reading) = self.reading.take() else { return Ok(blank.clone()) };
        let bytes = wait(reading, self.contents.num_bytes as u64)?;
        Ok(blank.clone().load_record(record(bytes)?))
    }

    /// Takes the state out of an optimizer, ready to be written.
    pub(crate) fn put(&mut self, optimizer: ModuleOptimizer) -> Result<(), Error> {
        let record = optimizer.to_record();
        // Here the record is a copy; it and the packed bytes are more than enough.
        drop(optimizer);
        let bytes = host::shared(record.into_bytes().map_err(record_error)?);
        self.contents = contents(bytes.clone())?;
        self.ready = Some(bytes);
        Ok(())
    }

    /// Starts to write what is ready.
    pub(crate) fn write(&mut self, tier: &Tier) -> Result<(), Error> {
        let Some(bytes) = self.ready.take() else { return Ok(()) };
        let slot = match self.slot.filter(|slot| slot.len_bytes() >= bytes.len()) {
            Some(slot) => slot,
            None => tier.reserve(bytes.len() + SLACK_BYTES)?,
        };
        (self.slot, self.is_stored) = (Some(slot), true);
        self.writing = Some(tier.write(slot, bytes));
        Ok(())
    }

    /// A write that nobody has waited for, with its bytes.
    pub(crate) fn take_writing(&mut self) -> Option<(Transfer<()>, u64)> {
        self.writing.take().map(|writing| (writing, self.contents.num_bytes as u64))
    }

    /// How to read the state again later, for as long as nothing is written over it.
    pub(crate) fn stored(&self) -> Option<Slot> {
        self.slot.filter(|_| self.is_stored)
    }
}

/// Reads records of units from the disk, tensor by tensor; keeps the last one, since its tensors are asked for in a row.
#[derive(Clone)]
pub(crate) struct RecordReader {
    tier: Arc<Tier>,
    last: Arc<Mutex<Option<(Slot, Bytes)>>>,
}

impl RecordReader {
    pub(crate) fn new(tier: Arc<Tier>) -> Self {
        Self { tier, last: Arc::default() }
    }

    /// The elements of one tensor of the record in a slot.
    pub(crate) fn tensor(&self, slot: Slot, name: &str) -> Result<Bytes, Error> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = match last.take() {
            Some((of, bytes)) if of == slot => bytes,
            _ => self.tier.read(slot).wait()?,
        };
        *last = Some((slot, bytes.clone()));
        let reader = Reader::from_bytes(host::burn_bytes(bytes)).map_err(record_error)?;
        reader.tensor_data(name).map(Bytes::from).map_err(record_error)
    }
}

fn record(bytes: Bytes) -> Result<OptimizerRecord, Error> {
    OptimizerRecord::from_bytes(host::burn_bytes(bytes)).map_err(record_error)
}

fn contents(bytes: Bytes) -> Result<Contents, Error> {
    let num_bytes = bytes.len();
    let reader = Reader::from_bytes(host::burn_bytes(bytes)).map_err(record_error)?;
    let scalars = reader.scalars().clone();
    let tensors = reader.into_tensors().map_err(record_error)?;
    let tensors = tensors.into_iter().map(|tensor| (tensor.name, tensor.dtype, tensor.shape.to_vec())).collect();
    Ok(Contents { tensors, scalars, num_bytes })
}

fn record_error(error: impl fmt::Display) -> Error {
    Error::program(format!("the optimizer's state cannot be converted: {error}"))
}
