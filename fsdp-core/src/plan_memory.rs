//! Bytes that one rank of a run holds, from the plan of its model: with its uneven blocks, its frozen parameters, and the
//! element types of single units. `memory` is the same for a model of which only sizes are known.

use crate::memory::TierModel;
use crate::{
    Accumulate, Activations, Axis, Dtype, MemoryEstimate, OptimizerKind, Plan, PlannedParam, PrefetchDepth,
    ShardLayout, Stage, Unit, UnitIndex,
};

/// What decides the memory of a rank beside its [`Plan`].
///
/// ```
/// use fsdp_core::{Dtype, FieldRule, Mesh, ParamSpec, Plan, PlanMemory, Stage, WrapPolicy};
///
/// let param = |path: &str, trainable| ParamSpec {
///     path: path.split('.').map(str::to_owned).collect(),
///     shape: vec![64, 64],
///     trainable,
///     ..ParamSpec::default()
/// };
/// let policy = WrapPolicy::new().field("blocks", FieldRule::units());
/// let params = [param("blocks.0.weight", true), param("blocks.1.weight", false)];
/// let plan = Plan::new(&policy, &params, &Mesh::one_dim(4), Stage::Parameters)?;
///
/// // Gathered in bf16; the blocks are float32, and the frozen one has neither gradient nor state.
/// let (master, compute) = (vec![Dtype::F32; 2], vec![Dtype::Bf16; 2]);
/// let estimate = PlanMemory::new(&master, &compute, &master).estimate(&plan);
/// assert_eq!((estimate.parameter_bytes, estimate.gradient_bytes, estimate.optimizer_bytes), (8192, 4096, 8192));
/// # Ok::<(), fsdp_core::PlanError>(())
/// ```
#[derive(Clone, Debug)]
pub struct PlanMemory<'a> {
    /// By parameter: what the optimizer steps.
    pub master: &'a [Dtype],
    /// By parameter: what is gathered and computed with.
    pub compute: &'a [Dtype],
    /// By parameter: what gradients are sent in.
    pub reduce: &'a [Dtype],
    /// The rank's index along the shard axis.
    pub shard_index: usize,
    /// What the optimizer keeps.
    pub optimizer: OptimizerKind,
    /// When micro-batches are reduced.
    pub accumulate: Accumulate,
    /// Micro-batches of a step.
    pub num_micro_batches: usize,
    /// Gathers ahead of use.
    pub depth: PrefetchDepth,
    /// Ranks that a unit stays cut over from forward to backward, where it is not all of the shard axis.
    pub reshard: Option<usize>,
    /// Ranks that share what they hold alike: threads of one process, and processes of one host over MPI. The estimate is one
    /// rank's part.
    pub ranks_per_process: usize,
    /// Whether blocks lie where the ranks that share memory gather them, so that what is gathered takes no memory of its own.
    pub in_place: bool,
    /// Activations and temporaries of a rank, where they are known.
    pub activations: Option<Activations>,
    /// What lies on a disk.
    pub tiers: TierModel,
}

impl<'a> PlanMemory<'a> {
    /// With these element types, by parameter in plan order; the first rank, Adam, one micro-batch, nothing ahead, activations
    /// unknown.
    pub fn new(master: &'a [Dtype], compute: &'a [Dtype], reduce: &'a [Dtype]) -> Self {
        Self {
            master,
            compute,
            reduce,
            shard_index: 0,
            optimizer: OptimizerKind::default(),
            accumulate: Accumulate::default(),
            num_micro_batches: 1,
            depth: PrefetchDepth::default(),
            reshard: None,
            ranks_per_process: 1,
            in_place: false,
            activations: None,
            tiers: TierModel::default(),
        }
    }

    /// The estimate.
    ///
    /// # Panics
    /// If there are fewer element types than parameters in `plan`.
    pub fn estimate(&self, plan: &Plan) -> MemoryEstimate {
        let all = || plan.params().iter().enumerate();
        let sum = |of: &dyn Fn(usize, &PlannedParam) -> u64| all().map(|(param, spec)| of(param, spec)).sum::<u64>();
        let parameter_bytes = sum(&|param, spec| self.stored_bytes(plan, param, spec));
        let gradient_bytes = sum(&|param, spec| self.gradient_bytes(plan, param, spec));
        let state_bytes = sum(&|param, spec| self.state_bytes(param, spec));
        // Masters beside whole parameters stay in memory.
        let master_bytes = sum(&|param, spec| self.master_bytes(plan, param, spec));
        let rest = TierModel::rest;
        // Whole gradients wait in memory for their reduction; only reduced ones lie elsewhere.
        let waits_whole = plan.stage() == Stage::OptimizerState || self.accumulate == Accumulate::Local;
        let gradients_away = if waits_whole { 0.0 } else { self.tiers.gradients };
        MemoryEstimate {
            parameter_bytes: rest(parameter_bytes, self.tiers.parameters),
            gradient_bytes: rest(gradient_bytes, gradients_away),
            optimizer_bytes: rest(state_bytes, self.tiers.optimizer) + master_bytes,
            gathered_bytes: self.gathered_bytes(plan),
            resharded_bytes: self.resharded_bytes(plan),
            in_flight_bytes: self.in_flight_bytes(plan),
            tier_bytes: self.tier_bytes(plan),
            before_last_bytes: rest(self.before_last_bytes(plan, gradient_bytes), gradients_away),
            activation_bytes: self.activations.map(|activations| activations.begin_bytes),
            last_unit_bytes: self.activations.map_or(0, |activations| activations.last_bytes),
        }
    }

    /// Gradients when the backward of the last unit begins: of that unit none, of the one before it perhaps still on its way.
    fn before_last_bytes(&self, plan: &Plan, gradient_bytes: u64) -> u64 {
        let largest_share = plan.largest_unit_len(false) as f64 / plan.num_params().max(1) as f64;
        let is_alone = plan.mesh().world_size() == 1;
        let on_its_way_bytes = self.in_flight_bytes(plan) / if is_alone { 4 } else { 2 };
        gradient_bytes - (gradient_bytes as f64 * largest_share.min(1.0)) as u64 + on_its_way_bytes
    }

    /// Elements that the optimizer of this rank sees.
    fn stepped_len(&self, spec: &PlannedParam) -> u64 {
        let layout = &spec.layout;
        (if spec.is_split() { layout.shard_len(self.shard_index) } else { layout.full_len() }) as u64
    }

    /// Whether a float32 value is kept beside the whole parameter, which is rounded.
    fn has_master(&self, plan: &Plan, param: usize, spec: &PlannedParam) -> bool {
        plan.is_resident(spec) && self.compute[param] != self.master[param]
    }

    /// This rank's part of what ranks of the process hold in one buffer.
    fn shared(&self, bytes: u64, num_ranks: usize) -> u64 {
        bytes.div_ceil(num_ranks.min(self.ranks_per_process).max(1) as u64)
    }

    /// Between uses.
    fn stored_bytes(&self, plan: &Plan, param: usize, spec: &PlannedParam) -> u64 {
        if !plan.is_resident(spec) {
            return self.stepped_len(spec) * self.master[param].size_bytes() as u64;
        }
        let bytes = (spec.layout.full_len() * self.compute[param].size_bytes()) as u64;
        match (spec.trainable, spec.is_split()) {
            // As a step has published it.
            (true, true) => self.shared(bytes, spec.layout.num_shards()),
            // As rank 0 has sent it, unless each rank has rounded it.
            (false, _) if !self.has_master(plan, param, spec) => self.shared(bytes, plan.mesh().world_size()),
            _ => bytes,
        }
    }

    /// Reduced, until the step; whole where they wait for that.
    fn gradient_bytes(&self, plan: &Plan, param: usize, spec: &PlannedParam) -> u64 {
        if !spec.trainable {
            return 0;
        }
        let [master, compute, reduce] =
            [self.master, self.compute, self.reduce].map(|dtypes| dtypes[param].size_bytes() as u64);
        let full_len = spec.layout.full_len() as u64;
        match self.accumulate {
            // Sums of several are float32.
            Accumulate::Local if self.num_micro_batches > 1 => full_len * master,
            Accumulate::Local => full_len * compute,
            Accumulate::Reduced if plan.stage() == Stage::OptimizerState => full_len * compute.max(reduce),
            Accumulate::Reduced if spec.is_split() => self.stepped_len(spec) * master,
            Accumulate::Reduced if reduce == master => self.shared(full_len * master, plan.mesh().world_size()),
            Accumulate::Reduced => full_len * master,
        }
    }

    /// What the optimizer keeps.
    fn state_bytes(&self, param: usize, spec: &PlannedParam) -> u64 {
        let state = if spec.trainable { self.optimizer.state_elements_per_parameter() } else { 0 };
        self.stepped_len(spec) * self.master[param].size_bytes() as u64 * state
    }

    /// What the optimizer steps, beside a whole parameter.
    fn master_bytes(&self, plan: &Plan, param: usize, spec: &PlannedParam) -> u64 {
        let bytes = self.stepped_len(spec) * self.master[param].size_bytes() as u64;
        match (self.has_master(plan, param, spec), spec.trainable || spec.is_split()) {
            (false, _) => 0,
            (true, true) => bytes,
            // As rank 0 has sent it.
            (true, false) => self.shared(bytes, plan.mesh().world_size()),
        }
    }

    /// Units that are gathered at once, at most, or the spare buffer of one.
    fn gathered_bytes(&self, plan: &Plan) -> u64 {
        let (kept, passing): (Vec<_>, Vec<_>) = self.gathered(plan).partition(|(parts, _)| parts[0].keep);
        let sum = |units: &[(&[Unit], u64)]| units.iter().map(|(_, bytes)| bytes).sum::<u64>();
        let largest = passing.iter().map(|(_, bytes)| *bytes).max().unwrap_or(0);
        let kept_bytes = sum(&kept);
        // No more than all can be gathered. A limit stops what is gathered ahead, but not the unit in use.
        let window = largest.saturating_mul(self.depth.max() as u64 + 1).min(sum(&passing));
        let limit = self.depth.max_bytes.map_or(u64::MAX, |bytes| (bytes as u64).saturating_sub(kept_bytes));
        let num_shards = plan.mesh().size(Axis::Shard);
        if self.in_place {
            // Blocks that were stepped are in another buffer than before, and the one that has become free is kept for the next.
            return self.shared(largest.max(kept.iter().map(|(_, bytes)| *bytes).max().unwrap_or(0)), num_shards);
        }
        let among = self.reshard.unwrap_or(num_shards);
        self.shared(kept_bytes, num_shards) + self.shared(window.min(limit.max(largest)), among)
    }

    /// Blocks of the smaller group at the end of forward: of all units that are not gathered then.
    fn resharded_bytes(&self, plan: &Plan) -> u64 {
        let Some(num_ranks) = self.reshard else { return 0 };
        let passing: Vec<_> = self.gathered(plan).filter(|(parts, _)| !parts[0].keep).collect();
        let block = |&param: &usize| {
            let spec = &plan.params()[param];
            let layout = ShardLayout::new(spec.layout.shape(), spec.layout.dim(), num_ranks);
            let len = if plan.is_resident(spec) { 0 } else { layout.shard_len(self.shard_index % num_ranks) };
            (len * self.compute[param].size_bytes()) as u64
        };
        // The last one is still whole.
        let before_last = passing.split_last().map_or(&[][..], |(_, before)| before);
        before_last.iter().flat_map(|(parts, _)| *parts).flat_map(|unit| &unit.params).map(block).sum()
    }

    /// Whole gradients: of the unit that backward works on, and of the one that is being reduced.
    fn in_flight_bytes(&self, plan: &Plan) -> u64 {
        if plan.stage() == Stage::OptimizerState {
            return 0;
        }
        let whole = |dtypes: &[Dtype]| {
            let of_unit = |parts: &[Unit]| {
                let params = parts.iter().flat_map(|unit| &unit.params);
                let trained = params.filter(|&&param| plan.params()[param].trainable);
                trained.map(|&param| plan.params()[param].layout.full_len() * dtypes[param].size_bytes()).sum::<usize>()
            };
            let sizes: Vec<_> = wholes(plan).map(of_unit).collect();
            (sizes.iter().copied().max().unwrap_or(0) as u64, sizes.iter().sum::<usize>() as u64)
        };
        let (computed, all) = whole(self.compute);
        (computed + whole(self.reduce).0).min(all.max(computed))
    }

    /// A gathered unit, where ranks of a process are not at the same one.
    fn pooled_bytes(&self, plan: &Plan) -> u64 {
        let passing = self.gathered(plan).filter(|(parts, _)| !parts[0].keep && self.ranks_per_process > 1);
        let among = self.reshard.unwrap_or(plan.mesh().size(Axis::Shard));
        self.shared(passing.map(|(_, bytes)| bytes).max().unwrap_or(0), among)
    }

    /// What of the largest unit passes through memory in a step.
    fn tier_bytes(&self, plan: &Plan) -> u64 {
        let largest = |of: &dyn Fn(usize, &PlannedParam) -> u64| {
            let of_unit =
                |unit: UnitIndex| plan.units()[unit].params.iter().map(|&param| of(param, &plan.params()[param])).sum();
            (0..plan.units().len()).map(of_unit).max().unwrap_or(0)
        };
        self.tiers.step_bytes(
            largest(&|param, spec| self.stored_bytes(plan, param, spec)),
            largest(&|param, spec| self.gradient_bytes(plan, param, spec)),
            largest(&|param, spec| self.state_bytes(param, spec)),
            self.pooled_bytes(plan),
        )
    }

    /// Units that are gathered on use, with their gathered sizes.
    fn gathered<'p>(&self, plan: &'p Plan) -> impl Iterator<Item = (&'p [Unit], u64)> {
        let size = move |parts: &'p [Unit]| {
            let params = parts.iter().flat_map(|unit| &unit.params);
            let cut = params.filter(|&&param| !plan.is_resident(&plan.params()[param]));
            let bytes = |&param: &usize| plan.params()[param].layout.full_len() * self.compute[param].size_bytes();
            (parts, cut.map(bytes).sum::<usize>() as u64)
        };
        wholes(plan).map(size).filter(|(_, bytes)| *bytes > 0)
    }
}

/// Units, each with its parts. See [Note: The first unit travels in parts].
fn wholes(plan: &Plan) -> impl Iterator<Item = &[Unit]> {
    plan.units().chunk_by(|_, unit| unit.follows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{FieldRule, MemoryModel, Mesh, ParamSpec, WrapPolicy};

    /// Three blocks of which one is frozen, and a root.
    fn plan(stage: Stage, num_ranks: usize, frozen: &[&str]) -> Plan {
        let param = |(path, shape): (&str, &[usize])| ParamSpec {
            path: path.split('.').map(str::to_owned).collect(),
            shape: shape.to_vec(),
            trainable: !frozen.contains(&path),
            ..ParamSpec::default()
        };
        let params: [(&str, &[usize]); 4] =
            [("blocks.0.w", &[7, 4]), ("blocks.1.w", &[7, 4]), ("blocks.2.w", &[5, 4]), ("norm.w", &[4])];
        let policy = WrapPolicy::new().field("blocks", FieldRule::units());
        Plan::new(&policy, &params.map(param), &Mesh::one_dim(num_ranks), stage).unwrap()
    }

    fn memory(compute: Dtype) -> PlanMemory<'static> {
        const F32: &[Dtype] = &[Dtype::F32; 4];
        const BF16: &[Dtype] = &[Dtype::Bf16; 4];
        PlanMemory::new(F32, if compute == Dtype::F32 { F32 } else { BF16 }, F32)
    }

    #[test]
    fn in_float32_it_is_what_sizes_alone_say() {
        for stage in Stage::ALL {
            for (accumulate, max_bytes) in [(Accumulate::Reduced, None), (Accumulate::Local, Some(200))] {
                for shard_index in 0..3 {
                    let plan = plan(stage, 3, &[]);
                    let depth = PrefetchDepth { forward: 1, backward: 0, max_bytes };
                    let exact = PlanMemory { shard_index, accumulate, depth, ..memory(Dtype::F32) }.estimate(&plan);
                    let model = MemoryModel {
                        stage,
                        accumulate,
                        largest_unit_len: 28,
                        kept_len: 4,
                        prefetch: 1,
                        prefetch_max_bytes: max_bytes.map(|bytes| bytes as u64),
                        ..MemoryModel::new(0)
                    };
                    let layouts: Vec<_> = plan.params().iter().map(PlannedParam::stored_layout).collect();
                    let sizes = model.exact(&layouts, shard_index);
                    let (one, other) = (exact.before_last_bytes, sizes.before_last_bytes);
                    // From sizes, a rank with replicas in other processes looks like one alone.
                    let is_alike = one.abs_diff(other) <= 8 || stage == Stage::Ddp;
                    assert!(is_alike, "{stage}, rank {shard_index}: {one} and {other}, rounded");
                    let exact = MemoryEstimate { before_last_bytes: other, ..exact };
                    assert_eq!(exact, sizes, "{stage}, rank {shard_index}");
                }
            }
        }
    }

    #[test]
    fn what_is_frozen_costs_no_gradient_and_no_state() {
        let frozen = ["blocks.0.w", "blocks.1.w"];
        for stage in Stage::ALL {
            let all = memory(Dtype::F32).estimate(&plan(stage, 2, &[]));
            let some = memory(Dtype::F32).estimate(&plan(stage, 2, &frozen));
            assert_eq!(some.parameter_bytes, all.parameter_bytes, "{stage}");
            // Of 7 rows rank 0 has 4, of 5 it has 3, and of 4 elements 2.
            let (trained, whole) = if stage.shards_optimizer() { (3 * 4 + 2, 24) } else { (24, 24) };
            assert_eq!(some.optimizer_bytes, 8 * trained, "{stage}");
            let gradients = if stage == Stage::OptimizerState { whole } else { trained };
            assert_eq!(some.gradient_bytes, 4 * gradients, "{stage}");
            assert!(some.in_flight_bytes <= 4 * whole && all.in_flight_bytes >= some.in_flight_bytes, "{stage}");
        }
    }

    #[test]
    fn half_precision_halves_what_is_gathered_and_whole_and_keeps_masters() {
        let [f32, bf16] =
            [Dtype::F32, Dtype::Bf16].map(|dtype| memory(dtype).estimate(&plan(Stage::Parameters, 2, &[])));
        assert_eq!(bf16.gathered_bytes, f32.gathered_bytes / 2);
        assert_eq!(
            (bf16.parameter_bytes, bf16.gradient_bytes, bf16.optimizer_bytes),
            (f32.parameter_bytes, f32.gradient_bytes, f32.optimizer_bytes),
            "blocks are the masters"
        );
        let [f32, bf16] =
            [Dtype::F32, Dtype::Bf16].map(|dtype| memory(dtype).estimate(&plan(Stage::Gradients, 2, &[])));
        assert_eq!(bf16.parameter_bytes, f32.parameter_bytes / 2);
        // Rank 0's blocks: 4 rows, 4 rows, 3 rows of 4 elements, and 2 elements.
        assert_eq!((f32.optimizer_bytes, bf16.optimizer_bytes), (8 * 46, 12 * 46));
    }

    #[test]
    fn a_smaller_group_holds_blocks_of_all_units_but_the_last_until_backward() {
        let with = |reshard| PlanMemory { reshard, ..memory(Dtype::F32) }.estimate(&plan(Stage::Parameters, 4, &[]));
        assert_eq!(with(None).resharded_bytes, 0);
        // Of the two blocks with 7 rows, in two halves, rank 0 has 4 rows each.
        assert_eq!(with(Some(2)).resharded_bytes, 4 * 2 * 16);
        assert_eq!(MemoryEstimate { resharded_bytes: 0, ..with(Some(2)) }, with(None));
        assert!(with(Some(2)).to_string().contains("kept for backward"), "{}", with(Some(2)));
    }
}
