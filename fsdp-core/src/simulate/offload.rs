//! Where the state of a job lies between its uses, parameter by parameter, and what moving it takes.

use crate::simulate::{Job, Placed, TierWork};
use crate::{OffloadConfig, Stage, TierModel, TierRate, TierShares, UnitTiers};

/// Bytes of a rank that lie below its device's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierBytes {
    /// In host memory, with the buffers for what is on its way to a disk. 0 where the device computes in host memory.
    pub host: u64,
    /// On disks.
    pub nvme: u64,
}

/// The places below the device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Host,
    Nvme,
}

impl Place {
    pub(super) const ALL: [Place; 2] = [Place::Host, Place::Nvme];
}

/// One kind of state of one parameter.
#[derive(Clone, Copy, Debug)]
struct Item {
    bytes: u64,
    /// `None`: on the device.
    place: Option<Place>,
}

/// What a rank holds of one parameter.
#[derive(Clone, Copy, Debug)]
struct Param {
    unit: usize,
    is_trained: bool,
    blocks: Item,
    gradients: Item,
    state: Item,
}

/// All parameters of a job at a stage, for its first rank, whose blocks are the largest.
#[derive(Clone, Debug)]
pub(super) struct Placements {
    params: Vec<Param>,
    num_units: usize,
    has_host: bool,
}

impl Job {
    /// What lies below the device's memory at `stage`, for the first rank.
    pub fn tier_bytes(&self, stage: Stage) -> TierBytes {
        let placements = self.placements(stage);
        let sum = |place: Place| {
            let items = placements.params.iter().flat_map(|param| [param.blocks, param.gradients, param.state]);
            let placed = items.filter(|item| item.place == Some(place));
            placed.map(|item| item.bytes).fold(0, u64::saturating_add)
        };
        let buffers = if placements.has_host { placements.buffer_bytes(&self.offload) } else { 0 };
        TierBytes { host: sum(Place::Host).saturating_add(buffers), nvme: sum(Place::Nvme) }
    }

    /// As the engine places them: whole parameters, spread over the model until the share is reached.
    pub(super) fn placements(&self, stage: Stage) -> Placements {
        let element_bytes = self.precision.element_bytes();
        // Masters beside whole parameters stay where those are.
        let master_bytes = if stage.shards_parameters() { self.precision.master_bytes() } else { 0 };
        let state_bytes = 4 * self.optimizer.state_elements_per_parameter() + master_bytes;
        let units = self.shape.units.iter().enumerate();
        let params: Vec<_> =
            units.flat_map(|(unit, of)| of.parameters.iter().map(move |param| (unit, param))).collect();
        let layouts = self.shape.units.iter().flat_map(|unit| unit.layouts(self.num_shards()));
        // By parameter: elements that the rank steps, and whether they are a block.
        let stepped: Vec<(u64, bool)> = layouts
            .map(|layout| {
                let is_split = stage.shards_optimizer() && layout.num_shards() > 1;
                let len = if is_split { layout.shard_len(0) } else { layout.full_len() };
                (len as u64, is_split)
            })
            .collect();
        let has_host = self.tiers.host.is_some();
        let place = |shares: TierShares, bytes: Vec<u64>| -> Vec<Item> {
            let places = places(shares, &bytes, has_host);
            bytes.into_iter().zip(places).map(|(bytes, place)| Item { bytes, place }).collect()
        };
        let of_trained = |bytes: u64| {
            let lens = stepped.iter().zip(&params);
            lens.map(|((len, _), (_, param))| if param.frozen { 0 } else { bytes * len }).collect()
        };
        let is_cut = stage.shards_parameters();
        let blocks = stepped.iter().map(|(len, is_split)| if is_cut && *is_split { element_bytes * len } else { 0 });
        let blocks = place(self.offload.parameters, blocks.collect());
        let gradients = place(self.offload.gradients, of_trained(element_bytes));
        let state = place(self.offload.optimizer, of_trained(state_bytes));
        let of_param = |index: usize| Param {
            unit: params[index].0,
            is_trained: !params[index].1.frozen,
            blocks: blocks[index],
            gradients: gradients[index],
            state: state[index],
        };
        let params = (0..params.len()).map(of_param).collect();
        Placements { params, num_units: self.shape.units.len(), has_host }
    }

    /// What of a unit moves, and how long that takes.
    pub(super) fn tier_work(&self, placements: &Placements, unit: usize) -> TierWork {
        let rate = |place: Place| match place {
            Place::Host => self.tiers.host,
            Place::Nvme => self.tiers.nvme,
        };
        let params = || placements.params.iter().filter(move |param| param.unit == unit);
        let placed = |items: &dyn Fn(&Param) -> Option<Item>| {
            Place::ALL.map(|place| {
                let bytes = params().filter_map(items).filter(|item| item.place == Some(place)).map(|item| item.bytes);
                let bytes: u64 = bytes.sum();
                let TierRate { read_bytes_per_s, write_bytes_per_s } = rate(place).unwrap_or(TierRate::FREE);
                Placed { bytes, read_s: bytes as f64 / read_bytes_per_s, write_s: bytes as f64 / write_bytes_per_s }
            })
        };
        TierWork {
            blocks: placed(&|param| Some(param.blocks)),
            stepped_blocks: placed(&|param| param.is_trained.then_some(param.blocks)),
            gradients: placed(&|param| Some(param.gradients)),
            state: placed(&|param| Some(param.state)),
        }
    }
}

impl Placements {
    /// What the schedule must know, by unit.
    pub(super) fn unit_tiers(&self) -> Vec<UnitTiers> {
        let mut units = vec![UnitTiers::default(); self.num_units];
        for param in &self.params {
            let unit = &mut units[param.unit];
            unit.blocks |= param.blocks.place.is_some();
            unit.gradients |= param.gradients.place.is_some();
            unit.state |= param.state.place.is_some();
        }
        units
    }

    /// What the memory model must know: shares of this rank's blocks.
    pub(super) fn memory(&self, config: &OffloadConfig) -> TierModel {
        let share = |item: fn(&Param) -> Item| {
            let (all, away) = self.params.iter().map(item).fold((0, 0), |(all, away), item| {
                (all + item.bytes, away + if item.place.is_some() { item.bytes } else { 0 })
            });
            away as f64 / all.max(1) as f64
        };
        let shares = [share(|param| param.blocks), share(|param| param.gradients), share(|param| param.state)];
        let [parameters, gradients, optimizer] = shares;
        // Where the device has a memory of its own, buffers for the disk are in the host's.
        let buffer_bytes = if self.has_host { 0 } else { self.buffer_bytes(config) };
        TierModel { parameters, gradients, optimizer, buffer_bytes }
    }

    /// Buffers for what is on its way to a disk, and back: no more than a read and a write of the largest slot can fill.
    fn buffer_bytes(&self, config: &OffloadConfig) -> u64 {
        let mut of_unit = vec![0u64; self.num_units];
        let mut largest = 0;
        for param in &self.params {
            let on_disk = |item: Item| if item.place == Some(Place::Nvme) { item.bytes } else { 0 };
            of_unit[param.unit] += on_disk(param.state);
            largest = largest.max(on_disk(param.blocks)).max(on_disk(param.gradients));
        }
        let largest = largest.max(of_unit.into_iter().max().unwrap_or(0));
        let block_bytes = config.nvme_block_bytes as u64;
        let useful = largest.div_ceil(block_bytes.max(1)).saturating_mul(2).saturating_mul(block_bytes);
        useful.min(config.nvme_buffer_bytes as u64)
    }
}

/// Where parameters of so many bytes lie.
fn places(shares: TierShares, bytes: &[u64], has_host: bool) -> Vec<Option<Place>> {
    let bytes: Vec<usize> = bytes.iter().map(|&bytes| bytes as usize).collect();
    let on_nvme = shares.on_nvme(&bytes);
    let on_cpu = shares.on_cpu(&bytes);
    let place = |(on_nvme, on_cpu): (bool, bool)| match (on_nvme, on_cpu && has_host) {
        (true, _) => Some(Place::Nvme),
        (false, true) => Some(Place::Host),
        (false, false) => None,
    };
    on_nvme.into_iter().zip(on_cpu).map(place).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Link, Machine, ModelShape, Network, Speed, TierRates};

    fn job(offload: OffloadConfig, has_host: bool) -> Job {
        let network = Network::one_node(Link { alpha_s: 0.0, beta_s_per_byte: 0.0 });
        let speed = Speed::Rate { flops_per_s: 1e12, memory_bytes_per_s: f64::INFINITY };
        let rate = |bytes_per_s| TierRate { read_bytes_per_s: bytes_per_s, write_bytes_per_s: bytes_per_s / 2.0 };
        let tiers = TierRates { host: has_host.then(|| rate(1e9)), nvme: Some(rate(1e8)) };
        let machine = Machine { network: network.into(), speed };
        Job { offload, tiers, ..Job::new(ModelShape::even(4000, 4), 2, machine) }
    }

    #[test]
    fn what_is_offloaded_leaves_the_device_and_lies_in_one_place() {
        let offload = OffloadConfig {
            optimizer: TierShares { cpu: 0.5, nvme: 0.5 },
            gradients: TierShares::CPU,
            parameters: TierShares::NVME,
            ..OffloadConfig::default()
        };
        let job = job(offload, true);
        // 2000 elements of a rank: 8 bytes of state, 4 of a gradient, 4 of a block.
        let memory = job.memory(Stage::Parameters);
        assert_eq!((memory.parameter_bytes, memory.gradient_bytes, memory.optimizer_bytes), (0, 0, 0));
        assert!(memory.tier_bytes > 0, "a unit at a time passes through");
        let bytes = job.tier_bytes(Stage::Parameters);
        assert_eq!(bytes.nvme, 8 * 1000 + 4 * 2000);
        let buffers = 2 << 20; // one block for reading and one for writing
        assert_eq!(bytes.host, 8 * 1000 + 4 * 2000 + buffers);
        // Below stage 3 no parameter lies anywhere else, and below stage 1 a rank steps all.
        assert_eq!(job.tier_bytes(Stage::Gradients).nvme, 8 * 1000);
        assert_eq!(job.tier_bytes(Stage::Ddp).nvme, 8 * 2000);
    }

    #[test]
    fn where_the_device_computes_in_host_memory_nothing_moves_there() {
        let offload = OffloadConfig { optimizer: TierShares::CPU, ..OffloadConfig::default() };
        let on_cpu = job(offload.clone(), false);
        assert_eq!(on_cpu.tier_bytes(Stage::Parameters), TierBytes::default());
        let plain = job(OffloadConfig::default(), false);
        assert_eq!(on_cpu.memory(Stage::Parameters), plain.memory(Stage::Parameters));
        assert_eq!(job(offload, true).memory(Stage::Parameters).optimizer_bytes, 0);
    }

    #[test]
    fn moving_takes_the_time_of_its_tier() {
        let offload = OffloadConfig { optimizer: TierShares::CPU, ..OffloadConfig::default() };
        let job = job(offload, true);
        let work = job.tier_work(&job.placements(Stage::Parameters), 1);
        // 500 elements of 8 bytes, at 1 GB/s towards the device and half of that back.
        assert_eq!(work.state[0], Placed { bytes: 4000, read_s: 4e-6, write_s: 8e-6 });
        assert_eq!([work.blocks, work.gradients], [[Placed::default(); 2]; 2]);
    }
}
