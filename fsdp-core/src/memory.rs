//! Bytes per rank, predicted from sizes alone: what a stage holds, before anything is allocated.
//!
//! The formulas are those of Rajbhandari, Rasley, Ruwase and He, "ZeRO: Memory Optimizations Toward Training Trillion
//! Parameter Models", 2020, arXiv:1910.02054.

use std::fmt;

use crate::{Accumulate, ShardLayout, Stage};

/// The optimizer, as far as memory knows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum OptimizerKind {
    /// Adam or AdamW: two moments.
    #[default]
    Adam,
    /// SGD with momentum: one velocity.
    SgdMomentum,
    /// Plain SGD: nothing.
    Sgd,
}

impl OptimizerKind {
    /// Elements of state for each parameter element, 4 bytes each.
    pub fn state_elements_per_parameter(self) -> u64 {
        match self {
            OptimizerKind::Adam => 2,
            OptimizerKind::SgdMomentum => 1,
            OptimizerKind::Sgd => 0,
        }
    }
}

/// The element type of parameters and gradients in forward and backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ComputePrecision {
    /// 4 bytes; the optimizer updates the parameters themselves.
    #[default]
    F32,
    /// 2 bytes (bf16 or f16); the optimizer updates a float32 master copy, which counts as its state.
    Mixed16,
}

impl ComputePrecision {
    /// Bytes of one element of a parameter or a gradient.
    pub fn element_bytes(self) -> u64 {
        match self {
            ComputePrecision::F32 => 4,
            ComputePrecision::Mixed16 => 2,
        }
    }

    /// Bytes of the float32 master copy of one element.
    pub fn master_bytes(self) -> u64 {
        match self {
            ComputePrecision::F32 => 0,
            ComputePrecision::Mixed16 => 4,
        }
    }
}

/// What a rank holds beside parameters, optimizer state and gradients, in bytes, where a step holds most.
///
/// [Note: Where a step holds most]
/// As backward goes through a model, activations are let go of and gradients appear, and at each unit there are temporaries.
/// So most is held at one of two ends: where the last unit's backward runs, with the activations of all, or where the first
/// unit's does, with the gradients of all others. In the graph's products a weight's gradient is made for each sample and then
/// summed, and the Flex backend makes an output in two copies, of which one is dropped before it computes: of ranks that share
/// a processor, only those that it runs hold both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Activations {
    /// Up to the backward of the last unit.
    pub begin_bytes: u64,
    /// In the backward of the first unit, when all other gradients are there.
    pub last_bytes: u64,
    /// The part of `begin_bytes` that a rank holds only while a processor runs it.
    pub transient_bytes: u64,
}

/// Where activations are one number, they are held when backward begins.
impl From<u64> for Activations {
    fn from(begin_bytes: u64) -> Self {
        Self { begin_bytes, ..Self::default() }
    }
}

/// What of the state lies on a disk, and what that takes in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TierModel {
    /// Share of the parameters' blocks, 0 to 1.
    pub parameters: f64,
    /// Share of the gradients.
    pub gradients: f64,
    /// Share of the optimizer state.
    pub optimizer: f64,
    /// Buffers of the rank for blocks under way, in bytes.
    pub buffer_bytes: u64,
}

impl TierModel {
    /// The part of `bytes` that stays in memory, of which `share` lies on the disk.
    pub(crate) fn rest(bytes: u64, share: f64) -> u64 {
        (bytes as f64 * (1.0 - share.clamp(0.0, 1.0))).round() as u64
    }

    /// What a step holds of the largest unit's state, whose bytes on this rank are given by kind, where it holds most.
    ///
    /// With optimizer state on the disk that is when a unit has been stepped, and its state is packed to be written. Of the
    /// next unit all has been read, and of the last one all but gradients is still being written. The unit's own old
    /// parameters and gradients are gone; but its state is there twice, packed, and as it was read, which the tensors that
    /// were stepped hold until they are packed. Without, most is held where a unit begins to step, with its gradients.
    ///
    /// `pooled` is one gathered unit where ranks share a process: they are not at the same unit at the same time, so the buffers
    /// of gathers, which are kept to be used again, are those of one unit more than a rank gathers.
    pub(crate) fn step_bytes(&self, parameters: u64, gradients: u64, optimizer: u64, pooled: u64) -> u64 {
        let of = |share: f64, bytes: u64, copies: u64| if share > 0.0 { copies * bytes } else { 0 };
        let num_gradients = if self.optimizer > 0.0 && optimizer > 0 { 1 } else { 2 };
        let moving = of(self.parameters, parameters, 3)
            + of(self.gradients, gradients, num_gradients)
            + of(self.optimizer, optimizer, 4);
        if moving > 0 { moving + self.buffer_bytes + pooled } else { 0 }
    }
}

/// What decides the memory of a rank. All lengths are in elements.
///
/// With P parameters on N ranks, in float32 with Adam: stage 0 holds 16P bytes, 1 holds 8P + 8P/N, 2 holds 4P + 12P/N,
/// and 3 holds 16P/N and the gathered units. Mixed precision holds 2P + 2P + 12P in place of 4P + 4P + 8P.
///
/// ```
/// use fsdp_core::{MemoryModel, Stage, human_bytes};
///
/// let states = Stage::ALL.map(|stage| {
///     let model = MemoryModel { stage, num_shards: 8, ..MemoryModel::new(7_000_000_000) };
///     human_bytes(model.average().state_bytes())
/// });
/// assert_eq!(states, ["104.3 GiB", "58.7 GiB", "35.9 GiB", "13.0 GiB"]);
/// ```
///
/// Left out, because it depends on the run: buffers of a communicator between hosts, temporaries of the optimizer (a few
/// times one block), and what the allocator rounds up. Activations come in as a number.
#[derive(Clone, Debug, PartialEq)]
pub struct MemoryModel {
    /// Parameters of the whole model.
    pub parameter_len: u64,
    /// Ranks along the shard axis: the world size, unless the mesh replicates.
    pub num_shards: u64,
    /// How much is sharded.
    pub stage: Stage,
    /// What the optimizer keeps.
    pub optimizer: OptimizerKind,
    /// Element type of parameters and gradients.
    pub precision: ComputePrecision,
    /// Whether full gradients are held until the step, whatever the stage says.
    pub accumulate: Accumulate,
    /// Parameters of the largest unit that does not stay gathered.
    pub largest_unit_len: u64,
    /// Ranks that are threads of one process. They share what all of them hold alike: gathered units, whole parameters
    /// after a step of stages 1 and 2, reduced gradients of stage 0. The estimate is one rank's part of the process.
    pub ranks_per_process: u64,
    /// Parameters of the units that stay gathered from forward to backward. Matters at stage 3 only.
    pub kept_len: u64,
    /// Units gathered ahead of the one that computes: the larger of forward and backward. Matters at stage 3 only.
    pub prefetch: u64,
    /// Limit of the gathered units, in bytes, beyond which none is gathered ahead. `None`: no limit.
    pub prefetch_max_bytes: Option<u64>,
    /// Ranks that a unit stays cut over from forward to backward, where it is not all of the shard axis. Matters at stage 3
    /// only.
    pub reshard: Option<u64>,
    /// Activations and temporaries of a rank, where they are known.
    pub activations: Option<Activations>,
    /// What lies on a disk. Default: nothing.
    pub tiers: TierModel,
}

impl MemoryModel {
    /// `parameter_len` parameters on one rank at stage 3 in float32 with Adam, nothing gathered, activations unknown.
    pub fn new(parameter_len: u64) -> Self {
        Self {
            parameter_len,
            num_shards: 1,
            stage: Stage::default(),
            optimizer: OptimizerKind::default(),
            precision: ComputePrecision::default(),
            accumulate: Accumulate::default(),
            largest_unit_len: 0,
            ranks_per_process: 1,
            kept_len: 0,
            prefetch: 0,
            prefetch_max_bytes: None,
            reshard: None,
            activations: None,
            tiers: TierModel::default(),
        }
    }

    /// The estimate for shards of equal size, P/N elements (rounded up).
    ///
    /// # Panics
    /// If `num_shards` is 0.
    pub fn average(&self) -> MemoryEstimate {
        self.estimate(self.parameter_len, self.parameter_len.div_ceil(self.num_shards))
    }

    /// The estimate for one rank from the layouts of all parameters, exact where rows do not divide. `coordinate` is the
    /// rank's index along the shard axis. [`MemoryModel::parameter_len`] and [`MemoryModel::num_shards`] are not used:
    /// the layouts know both.
    ///
    /// ```
    /// use fsdp_core::{MemoryModel, ShardLayout};
    ///
    /// // 5 rows over 4 ranks are 2, 2, 1 and 0 rows of 3 elements, 16 bytes each.
    /// let layouts = [ShardLayout::new(&[5, 3], 0, 4)];
    /// let bytes = [0, 1, 2, 3].map(|rank| MemoryModel::new(0).exact(&layouts, rank).state_bytes());
    /// assert_eq!(bytes, [96, 96, 48, 0]);
    /// ```
    pub fn exact<'a>(&self, layouts: impl IntoIterator<Item = &'a ShardLayout>, coordinate: usize) -> MemoryEstimate {
        let (full_len, shard_len) = layouts.into_iter().fold((0, 0), |(full_len, shard_len), layout| {
            // What is not cut is held by every rank.
            let block = if layout.num_shards() == 1 { 0 } else { coordinate };
            (full_len + layout.full_len() as u64, shard_len + layout.shard_len(block) as u64)
        });
        self.estimate(full_len, shard_len)
    }

    /// Bytes of the optimizer for each element: of what a disk takes where it takes all, and of what stays in memory. Masters
    /// beside whole parameters do.
    fn optimizer_bytes(&self) -> (u64, u64) {
        let state_bytes = 4 * self.optimizer.state_elements_per_parameter();
        match (self.stage.shards_parameters(), self.precision.master_bytes()) {
            (true, master_bytes) => (state_bytes + master_bytes, 0),
            (false, master_bytes) => (state_bytes, master_bytes),
        }
    }

    /// Whether the ranks that share memory are all of the shard axis, and what they store is what they gather.
    pub(crate) fn gathers_in_place(&self) -> bool {
        self.ranks_per_process > 1
            && self.ranks_per_process >= self.num_shards
            && self.reshard.is_none()
            && self.tiers.parameters == 0.0
            && self.precision.master_bytes() == 0
    }

    fn estimate(&self, full_len: u64, shard_len: u64) -> MemoryEstimate {
        let element_bytes = self.precision.element_bytes();
        let (moved_bytes, staying_bytes) = self.optimizer_bytes();
        let shared = |len: u64| len.div_ceil(self.ranks_per_process.max(1));
        let parameter_len = match self.stage {
            Stage::Ddp => full_len,
            Stage::OptimizerState | Stage::Gradients => shared(full_len),
            Stage::Parameters => shard_len,
        };
        let gradient_len = match self.stage {
            _ if self.accumulate == Accumulate::Local => full_len,
            Stage::Ddp => shared(full_len),
            Stage::OptimizerState => full_len,
            Stage::Gradients | Stage::Parameters => shard_len,
        };
        // A single rank has nothing to gather.
        let gathers = self.stage.shards_parameters() && shard_len < full_len;
        // All but what stays gathered: the kept units, and the last of the others.
        let passing_len = full_len.saturating_sub(self.kept_len).saturating_sub(self.largest_unit_len);
        let resharded_len = match self.reshard {
            Some(num_ranks) if gathers => passing_len.div_ceil(num_ranks.max(1)),
            _ => 0,
        };
        // Of what is gathered again, only a smaller group has the same copy.
        let shared_among = self.reshard.filter(|_| gathers).unwrap_or(u64::MAX).min(self.ranks_per_process).max(1);
        // Blocks of ranks that share memory lie where these gather them, and one buffer is spare.
        let gathered_len = if gathers && self.gathers_in_place() {
            self.largest_unit_len.max(self.kept_len).min(full_len).div_ceil(shared_among)
        } else if gathers {
            // No more than the whole model can be gathered, however deep the prefetch.
            let window_len = self.prefetch.saturating_add(1).saturating_mul(self.largest_unit_len);
            let at_most = window_len.saturating_add(self.kept_len).min(full_len);
            // A limit stops what is gathered ahead, but neither the unit in use nor the kept ones.
            let in_use = self.largest_unit_len.saturating_add(self.kept_len);
            let limit = self.prefetch_max_bytes.map_or(u64::MAX, |bytes| bytes / element_bytes);
            at_most.min(limit.max(in_use)).div_ceil(shared_among)
        } else {
            0
        };
        let in_flight_len = match self.stage {
            Stage::OptimizerState => 0,
            _ => self.largest_unit_len.saturating_mul(2).min(full_len),
        };
        // Of the unit that is reduced last, nothing is there when its backward begins; the one before it may be on its way.
        let unit_gradient_len =
            (gradient_len as f64 * self.largest_unit_len.min(full_len) as f64 / full_len.max(1) as f64) as u64;
        let is_alone = shard_len == full_len && self.ranks_per_process <= 1;
        // A rank alone has nobody to wait for: half of the time it is gone already.
        let on_its_way_len = if is_alone { in_flight_len / 4 } else { in_flight_len / 2 };
        let before_last_len = gradient_len - unit_gradient_len + on_its_way_len;
        let stepped_len = if self.stage.shards_optimizer() { shard_len } else { full_len };
        // Of the largest unit, this rank's part.
        let unit_len = (self.largest_unit_len.max(self.kept_len) as f64 * stepped_len as f64 / full_len.max(1) as f64)
            .ceil() as u64;
        let pooled_len = match gathers && self.ranks_per_process > 1 {
            true => self.largest_unit_len.min(full_len).div_ceil(shared_among),
            false => 0,
        };
        let tier_bytes = self.tiers.step_bytes(
            element_bytes * unit_len,
            element_bytes * unit_len,
            moved_bytes * unit_len,
            element_bytes * pooled_len,
        );
        // Whole gradients wait in memory for their reduction; only reduced ones lie elsewhere.
        let waits_whole = self.stage == Stage::OptimizerState || self.accumulate == Accumulate::Local;
        let gradients_away = if waits_whole { 0.0 } else { self.tiers.gradients };
        MemoryEstimate {
            parameter_bytes: TierModel::rest(element_bytes * parameter_len, self.tiers.parameters),
            gradient_bytes: TierModel::rest(element_bytes * gradient_len, gradients_away),
            optimizer_bytes: TierModel::rest(moved_bytes * stepped_len, self.tiers.optimizer)
                + staying_bytes * stepped_len,
            tier_bytes,
            gathered_bytes: element_bytes * gathered_len,
            resharded_bytes: element_bytes * resharded_len,
            in_flight_bytes: element_bytes * in_flight_len,
            before_last_bytes: TierModel::rest(element_bytes * before_last_len, gradients_away),
            activation_bytes: self.activations.map(|activations| activations.begin_bytes),
            last_unit_bytes: self.activations.map_or(0, |activations| activations.last_bytes),
        }
    }
}

/// Bytes on one rank, by what they hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryEstimate {
    /// Parameters between their uses.
    pub parameter_bytes: u64,
    /// Gradients until the step.
    pub gradient_bytes: u64,
    /// Optimizer state, with the float32 master copy in mixed precision.
    pub optimizer_bytes: u64,
    /// Units that are gathered at once, at most; where gathers take no memory of their own, since blocks lie in place, the spare
    /// buffer of one.
    pub gathered_bytes: u64,
    /// This rank's blocks of a smaller group, which it holds from forward to backward; 0 where units are freed after forward.
    pub resharded_bytes: u64,
    /// Whole gradients of the unit that backward works on, and of the one that is being reduced.
    pub in_flight_bytes: u64,
    /// What lies on a disk and is in memory for a step, with the buffers for that; 0 where nothing is offloaded.
    pub tier_bytes: u64,
    /// Gradients of all units but the one that is reduced last, when its backward begins.
    pub before_last_bytes: u64,
    /// Activations and temporaries when backward begins, where they are known.
    pub activation_bytes: Option<u64>,
    /// Those of the unit that is reduced last, in its backward; 0 where they are not known.
    pub last_unit_bytes: u64,
}

impl MemoryEstimate {
    /// Parameters, gradients and optimizer state: what lives through the whole run.
    pub fn state_bytes(&self) -> u64 {
        [self.gradient_bytes, self.optimizer_bytes].into_iter().fold(self.parameter_bytes, u64::saturating_add)
    }

    /// The most that is held at once, or `None` where activations are not known.
    ///
    /// Not the sum of all parts: activations and resharded blocks are complete when backward begins, gradients when it ends.
    /// One grows as the other shrinks, so the peak is at one of the two ends, see [Note: Where a step holds most]; or in the
    /// step, where what is offloaded passes through memory.
    pub fn peak_bytes(&self) -> Option<u64> {
        let sum = |parts: &[u64]| parts.iter().fold(0, |sum: u64, &part| sum.saturating_add(part));
        let always = sum(&[self.parameter_bytes, self.optimizer_bytes, self.gathered_bytes]);
        let end = sum(&[self.gradient_bytes, self.in_flight_bytes]);
        let last = sum(&[self.before_last_bytes, self.last_unit_bytes]);
        // Of whole gradients nothing is left by then.
        let step = sum(&[self.gradient_bytes, self.tier_bytes]);
        let begin = |activations: u64| sum(&[activations, self.resharded_bytes]);
        self.activation_bytes.map(|activations| sum(&[always, begin(activations).max(last).max(end).max(step)]))
    }

    /// The most that is held at once of what is known: activations that are not known count as none.
    pub fn peak_or_known_bytes(&self) -> u64 {
        let activation_bytes = Some(self.activation_bytes.unwrap_or(0));
        Self { activation_bytes, ..*self }.peak_bytes().unwrap_or_default()
    }
}

/// One line for each part, and the peak; activations that are not known are said to be left out.
impl fmt::Display for MemoryEstimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [
            ("parameters", self.parameter_bytes),
            ("gradients", self.gradient_bytes),
            ("optimizer state", self.optimizer_bytes),
            ("gathered units", self.gathered_bytes),
            ("being reduced", self.in_flight_bytes),
        ];
        for (name, bytes) in parts {
            writeln!(f, "{name:<15} {:>10}", human_bytes(bytes))?;
        }
        if self.resharded_bytes > 0 {
            writeln!(f, "{:<15} {:>10}", "kept for backward", human_bytes(self.resharded_bytes))?;
        }
        if self.tier_bytes > 0 {
            writeln!(f, "{:<15} {:>10}", "from the disk", human_bytes(self.tier_bytes))?;
        }
        match self.activation_bytes.zip(self.peak_bytes()) {
            Some((activations, peak)) => {
                writeln!(f, "{:<15} {:>10}", "activations", human_bytes(activations))?;
                write!(f, "{:<15} {:>10}", "peak", human_bytes(peak))
            }
            None => {
                let without = human_bytes(self.peak_or_known_bytes());
                write!(f, "{:<15} {without:>10}  (activations not included)", "peak")
            }
        }
    }
}

/// The least number of ranks among which `state_bytes` fit, or `None` where a device has no room at all. For states that
/// are sharded whole, as at stage 3; gathered units and activations reduce `usable_bytes_per_device`.
///
/// ```
/// // 7e9 parameters at 16 bytes, on devices with 20 GiB left for states.
/// assert_eq!(fsdp_core::min_ranks(7_000_000_000 * 16, 20 << 30), Some(6));
/// ```
pub fn min_ranks(state_bytes: u64, usable_bytes_per_device: u64) -> Option<u64> {
    (usable_bytes_per_device > 0).then(|| state_bytes.div_ceil(usable_bytes_per_device).max(1))
}

/// Bytes in binary units with one decimal: `13.0 GiB`; below 1 KiB as they are: `512 B`.
pub fn human_bytes(bytes: u64) -> String {
    let mut value = bytes as f64;
    let mut unit = "B";
    for larger in ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"] {
        // What would round to 1024.0 is 1.0 of the next unit.
        let limit = if unit == "B" { 1024.0 } else { 1023.95 };
        if value < limit {
            break;
        }
        value /= 1024.0;
        unit = larger;
    }
    if unit == "B" { format!("{bytes} B") } else { format!("{value:.1} {unit}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(model: &MemoryModel) -> [u64; 4] {
        let estimate = model.average();
        let MemoryEstimate { parameter_bytes, gradient_bytes, optimizer_bytes, gathered_bytes, .. } = estimate;
        [parameter_bytes, gradient_bytes, optimizer_bytes, gathered_bytes]
    }

    #[test]
    fn each_stage_holds_what_its_formula_says() {
        // P = 80, N = 8.
        let of = |stage| MemoryModel { stage, num_shards: 8, ..MemoryModel::new(80) };
        assert_eq!(bytes(&of(Stage::Ddp)), [320, 320, 640, 0]);
        assert_eq!(bytes(&of(Stage::OptimizerState)), [320, 320, 80, 0]);
        assert_eq!(bytes(&of(Stage::Gradients)), [320, 40, 80, 0]);
        assert_eq!(bytes(&of(Stage::Parameters)), [40, 40, 80, 0]);
    }

    #[test]
    fn mixed_precision_adds_the_master_copy_to_the_optimizer() {
        let mixed = |stage, num_shards| MemoryModel {
            stage,
            num_shards,
            precision: ComputePrecision::Mixed16,
            ..MemoryModel::new(80)
        };
        assert_eq!(bytes(&mixed(Stage::Ddp, 8)), [160, 160, 960, 0]);
        assert_eq!(bytes(&mixed(Stage::Gradients, 8)), [160, 20, 120, 0]);
    }

    #[test]
    fn optimizers_differ_by_their_state_only() {
        let states = [OptimizerKind::Adam, OptimizerKind::SgdMomentum, OptimizerKind::Sgd]
            .map(|optimizer| bytes(&MemoryModel { optimizer, ..MemoryModel::new(80) })[2]);
        assert_eq!(states, [640, 320, 0]);
    }

    #[test]
    fn gathered_units_follow_the_prefetch_depth_at_stage_3_only() {
        let gathered = |stage, prefetch, kept_len| {
            let model =
                MemoryModel { stage, num_shards: 2, prefetch, kept_len, largest_unit_len: 10, ..MemoryModel::new(80) };
            bytes(&model)[3]
        };
        assert_eq!(gathered(Stage::Parameters, 0, 0), 40);
        assert_eq!(gathered(Stage::Parameters, 2, 0), 120);
        assert_eq!(gathered(Stage::Parameters, 2, 5), 140);
        assert_eq!(gathered(Stage::Parameters, u64::MAX, 0), 320, "never more than the whole model");
        assert_eq!(gathered(Stage::Gradients, 2, 5), 0);
    }

    #[test]
    fn a_limit_in_bytes_bounds_what_is_gathered_ahead_and_not_what_is_in_use() {
        let gathered = |prefetch_max_bytes| {
            let model = MemoryModel {
                num_shards: 2,
                prefetch: 3,
                prefetch_max_bytes,
                kept_len: 5,
                largest_unit_len: 10,
                ..MemoryModel::new(80)
            };
            bytes(&model)[3]
        };
        assert_eq!([None, Some(1000), Some(100), Some(1)].map(gathered), [180, 180, 100, 60]);
    }

    #[test]
    fn local_accumulation_holds_full_gradients_at_every_stage() {
        for stage in Stage::ALL {
            let model = MemoryModel { stage, num_shards: 8, accumulate: Accumulate::Local, ..MemoryModel::new(80) };
            assert_eq!(bytes(&model)[1], 320, "{stage}");
        }
    }

    #[test]
    fn exact_sizes_add_up_to_the_whole_and_show_the_uneven_ranks() {
        let layouts = [ShardLayout::new(&[5, 3], 0, 4), ShardLayout::new(&[2], 0, 4), ShardLayout::new(&[], 0, 4)];
        let of = |rank| MemoryModel::new(0).exact(&layouts, rank).state_bytes();
        assert_eq!([0, 1, 2, 3].map(of), [16 * (6 + 1 + 1), 16 * (6 + 1), 16 * 3, 0]);
        assert_eq!([0, 1, 2, 3].map(of).iter().sum::<u64>(), 16 * 18);

        let ddp = MemoryModel { stage: Stage::Ddp, ..MemoryModel::new(0) };
        assert_eq!(ddp.exact(&layouts, 3).state_bytes(), 16 * 18);
    }

    #[test]
    fn unknown_activations_are_said_to_be_left_out() {
        let model = MemoryModel { num_shards: 2, largest_unit_len: 1024, ..MemoryModel::new(4096) };
        assert_eq!(
            model.average().to_string(),
            "parameters         8.0 KiB\ngradients          8.0 KiB\noptimizer state   16.0 KiB\n\
             gathered units     4.0 KiB\nbeing reduced      8.0 KiB\n\
             peak              44.0 KiB  (activations not included)"
        );
        assert_eq!(model.average().peak_bytes(), None);
        let known = MemoryModel { activations: Some((17 * 1024).into()), ..model };
        assert!(known.average().to_string().ends_with("activations       17.0 KiB\npeak              45.0 KiB"));
    }

    #[test]
    fn the_peak_is_where_backward_begins_or_where_it_ends() {
        let model = MemoryModel { num_shards: 2, largest_unit_len: 100, ..MemoryModel::new(1000) };
        let peak = |activations: u64| {
            MemoryModel { activations: Some(activations.into()), ..model.clone() }.average().peak_bytes()
        };
        // Parameters 2000, optimizer 4000, gathered 400; at the end gradients 2000 and 800 in flight.
        assert_eq!(peak(0), Some(9200));
        assert_eq!(peak(2800), Some(9200));
        assert_eq!(peak(5000), Some(11400));
        // Before the last unit, nine tenths of the gradients, one unit on its way, and what that unit holds itself.
        let known = |last_bytes| Activations { begin_bytes: 0, last_bytes, transient_bytes: 0 };
        let model = MemoryModel { activations: Some(known(3000)), ..model };
        assert_eq!(model.average().peak_bytes(), Some(2000 + 4000 + 400 + 1800 + 400 + 3000));
    }

    #[test]
    fn ranks_of_one_process_share_what_they_hold_alike() {
        let of = |stage| {
            let model =
                MemoryModel { stage, num_shards: 4, ranks_per_process: 4, largest_unit_len: 8, ..MemoryModel::new(80) };
            bytes(&model)
        };
        assert_eq!(of(Stage::Ddp), [320, 80, 640, 0]);
        assert_eq!(of(Stage::OptimizerState), [80, 320, 160, 0]);
        assert_eq!(of(Stage::Gradients), [80, 80, 160, 0]);
        assert_eq!(of(Stage::Parameters), [80, 80, 160, 8]);
    }

    #[test]
    fn what_lies_on_a_disk_is_in_memory_for_one_unit_at_a_time() {
        let model = |tiers| MemoryModel { num_shards: 2, largest_unit_len: 10, tiers, ..MemoryModel::new(80) };
        let all = TierModel { parameters: 1.0, gradients: 1.0, optimizer: 1.0, buffer_bytes: 7 };
        let estimate = model(all).average();
        assert_eq!(estimate.state_bytes(), 0);
        // Of 5 elements: 3 times the parameters, the next gradients, 4 times the optimizer's state; and the buffers.
        assert_eq!(estimate.tier_bytes, 5 * 4 * 3 + 5 * 4 + 5 * 8 * 4 + 7);
        // Where the state stays in memory, the gradients of the unit that steps too.
        assert_eq!(model(TierModel { optimizer: 0.0, ..all }).average().tier_bytes, 5 * 4 * 3 + 5 * 4 * 2 + 7);
        // Of two ranks of a process one is ahead: half of a gathered unit more for each.
        let threads = MemoryModel { ranks_per_process: 2, ..model(all) }.average();
        assert_eq!(threads.tier_bytes, estimate.tier_bytes + 5 * 4);
        let part = TierModel { optimizer: 0.75, buffer_bytes: 7, ..TierModel::default() };
        let estimate = model(part).average();
        assert_eq!((estimate.parameter_bytes, estimate.optimizer_bytes, estimate.tier_bytes), (160, 80, 5 * 8 * 4 + 7));
        assert_eq!(model(TierModel { buffer_bytes: 7, ..TierModel::default() }).average().tier_bytes, 0);
        assert!(estimate.to_string().contains("from the disk"));
    }

    #[test]
    fn masters_beside_whole_parameters_stay_in_memory() {
        let of = |stage| {
            let precision = ComputePrecision::Mixed16;
            let tiers = TierModel { optimizer: 1.0, ..TierModel::default() };
            MemoryModel { stage, num_shards: 2, precision, tiers, ..MemoryModel::new(80) }.average().optimizer_bytes
        };
        assert_eq!(Stage::ALL.map(of), [4 * 80, 4 * 40, 4 * 40, 0]);
    }

    #[test]
    fn bytes_read_in_the_unit_that_fits() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (1536, "1.5 KiB"),
            (1024 * 1024 - 1, "1.0 MiB"),
            (13_038_516_045, "12.1 GiB"),
            (u64::MAX, "16.0 EiB"),
        ] {
            assert_eq!(human_bytes(bytes), text);
        }
    }

    #[test]
    fn the_least_number_of_ranks_rounds_up() {
        assert_eq!(min_ranks(100, 50), Some(2));
        assert_eq!(min_ranks(101, 50), Some(3));
        assert_eq!(min_ranks(0, 50), Some(1));
        assert_eq!(min_ranks(1, 0), None);
    }
}
