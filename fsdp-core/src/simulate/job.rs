//! A training job as a planner sees it: a model, ranks, a machine; and from these, memory, traffic and the work of a step.

use serde::{Deserialize, Serialize};

use crate::simulate::{Move, Scope, StepRules, UnitWork, Uses, Wire, Workload};
use crate::{
    Accumulate, Activations, Axis, ComputePrecision, Config, Link, LossScale, MemoryEstimate, MemoryModel, Mesh,
    ModelShape, Network, OffloadConfig, OptimizerKind, Placement, PrefetchDepth, ShardLayout, Stage, StepTraffic,
    TierRate, UnitShape, UnitTraits,
};

/// What the ranks compute and communicate with.
#[derive(Clone, Debug, PartialEq)]
pub struct Machine {
    /// What collectives cost.
    pub network: Collectives,
    /// How fast a rank computes.
    pub speed: Speed,
}

/// How fast a rank computes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Speed {
    /// From rates that are reached, not peaks.
    Rate {
        /// Floating-point operations per second in forward and backward.
        flops_per_s: f64,
        /// Bytes per second of memory in the optimizer's step; infinity leaves it out.
        memory_bytes_per_s: f64,
    },
    /// From a step of a single rank that was measured.
    Measured {
        /// Seconds of one micro-batch, forward and backward.
        pass_s: f64,
        /// Seconds of the optimizer's step over all parameters.
        optimizer_s: f64,
    },
}

/// What lies below a rank's memory, and how fast the rank reaches it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TierRates {
    /// Host memory. `None` where the device computes in it: then what is placed there is where it always is.
    pub host: Option<TierRate>,
    /// This rank's part of the disks. `None`: their time is left out.
    pub nvme: Option<TierRate>,
}

/// What collectives cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Collectives {
    /// Rings over links.
    Ring(Network),
    /// As measured between ranks of one process, which read each other's memory.
    Measured {
        /// What was measured.
        links: MeasuredLinks,
        /// Share of a collective's time in which the rank cannot compute: see [`MeasuredLinks::taken_share`].
        taken_share: f64,
    },
}

impl From<Network> for Collectives {
    fn from(network: Network) -> Self {
        Collectives::Ring(network)
    }
}

/// Measured times of collectives, `T = α + β·S` for the S bytes that a rank reads: its own block for a gather, the whole
/// tensor for a reduction.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredLinks {
    /// All-gathers.
    pub all_gather: Link,
    /// Reduce-scatters.
    pub reduce_scatter: Link,
    /// All-reduces.
    pub all_reduce: Link,
}

impl MeasuredLinks {
    /// The same with all latencies and all times per byte multiplied.
    #[must_use]
    pub fn scaled(self, alpha: f64, beta: f64) -> Self {
        let [all_gather, reduce_scatter, all_reduce] =
            [self.all_gather, self.reduce_scatter, self.all_reduce].map(|link| link.scaled(alpha, beta));
        Self { all_gather, reduce_scatter, all_reduce }
    }

    /// Share of a collective's time in which a rank cannot compute. Its bytes are moved by one of the processors that the ranks
    /// of a machine share, so where `num_ranks` compute on all `num_cores` with `num_threads` each, a collective beside the
    /// computation is no quicker than one after it.
    ///
    /// ```
    /// use fsdp_core::MeasuredLinks;
    ///
    /// assert_eq!(MeasuredLinks::taken_share(2, 2, 1), 1.0); // a processor each, for both
    /// assert_eq!(MeasuredLinks::taken_share(2, 8, 4), 0.25); // one of four
    /// assert_eq!(MeasuredLinks::taken_share(2, 8, 2), 0.0); // there are idle ones
    /// ```
    pub fn taken_share(num_ranks: usize, num_cores: usize, num_threads: usize) -> f64 {
        let own = num_cores as f64 / num_ranks.max(1) as f64;
        let computing = own.min(num_threads.max(1) as f64);
        (1.0 - (own - 1.0) / computing).clamp(0.0, 1.0)
    }
}

impl Collectives {
    /// The same where nothing but bytes takes time.
    fn without_latency(self) -> Self {
        match self {
            Collectives::Ring(Network { in_node, between, ranks_per_node }) => {
                let [in_node, between] = [in_node, between].map(|link| link.scaled(0.0, 1.0));
                Collectives::Ring(Network { in_node, between, ranks_per_node })
            }
            Collectives::Measured { links, taken_share } => {
                Collectives::Measured { links: links.scaled(0.0, 1.0), taken_share }
            }
        }
    }

    fn all_gather_s(&self, placed: Placement, shard_bytes: u64) -> f64 {
        match self {
            _ if placed.num_ranks <= 1 => 0.0,
            Collectives::Ring(network) => network.all_gather_s(placed, shard_bytes),
            Collectives::Measured { links, .. } => links.all_gather.message_s(shard_bytes),
        }
    }

    fn reduce_scatter_s(&self, placed: Placement, shard_bytes: u64) -> f64 {
        match self {
            _ if placed.num_ranks <= 1 => 0.0,
            Collectives::Ring(network) => network.all_gather_s(placed, shard_bytes),
            Collectives::Measured { links, .. } => {
                links.reduce_scatter.message_s(shard_bytes.saturating_mul(placed.num_ranks))
            }
        }
    }

    fn all_reduce_s(&self, placed: Placement, full_bytes: u64) -> f64 {
        match self {
            _ if placed.num_ranks <= 1 => 0.0,
            Collectives::Ring(network) => network.all_reduce_s(placed, full_bytes),
            Collectives::Measured { links, .. } => links.all_reduce.message_s(full_bytes),
        }
    }
}

/// A training job.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// The model.
    pub shape: ModelShape,
    /// The ranks. Neighbours are on one node.
    pub mesh: Mesh,
    /// Gathers ahead of use.
    pub depth: PrefetchDepth,
    /// Micro-batches of an optimizer step.
    pub num_micro_batches: usize,
    /// When they are reduced.
    pub accumulate: Accumulate,
    /// Whether the step waits for the norm of all gradients.
    pub needs_norm: bool,
    /// Element type of parameters and gradients, and of gathers.
    pub precision: ComputePrecision,
    /// Bytes of an element in reductions.
    pub reduce_bytes: u64,
    /// The optimizer.
    pub optimizer: OptimizerKind,
    /// Tokens of one rank in one micro-batch.
    pub num_tokens: u64,
    /// Units that are freed after use run their forward once more in backward.
    pub recompute: bool,
    /// Activations and temporaries when backward begins, in bytes per rank, where they are known.
    pub activation_bytes: Option<u64>,
    /// Those of the unit whose backward is the last; see [`Activations::last_bytes`]. 0 where they are not known.
    pub last_unit_bytes: u64,
    /// Ranks that are threads of one process, and share what they hold alike.
    pub ranks_per_process: u64,
    /// Ranks that a unit stays cut over from forward to backward, where it is not all of the shard axis.
    pub reshard: Option<usize>,
    /// What lies below the device's memory. Parameters do so at stage 3 only.
    pub offload: OffloadConfig,
    /// How fast a rank reaches what lies there.
    pub tiers: TierRates,
    /// The machine.
    pub machine: Machine,
}

impl Job {
    /// `num_ranks` ranks along the shard axis, float32 with Adam, one micro-batch of 2048 tokens, and a configuration's
    /// defaults.
    ///
    /// # Panics
    /// If `num_ranks` is 0.
    pub fn new(shape: ModelShape, num_ranks: usize, machine: Machine) -> Self {
        let config = Config { world_size: num_ranks, ..Config::default() };
        Self::configured(shape, &config, machine)
    }

    /// A job as `config` says, with Adam and 2048 tokens.
    ///
    /// # Panics
    /// If the world size is 0, which [`Config::validate`] refuses.
    pub fn configured(shape: ModelShape, config: &Config, machine: Machine) -> Self {
        let is_half = config.precision.parameters.size_bytes() == 2;
        let scales = config.precision.resolved_loss_scale() == Some(LossScale::Dynamic);
        Self {
            shape,
            mesh: config.resolved_mesh(),
            depth: (&config.prefetch).into(),
            num_micro_batches: config.training.gradient_accumulation,
            accumulate: config.training.accumulate,
            needs_norm: config.training.needs_norm() || scales,
            precision: if is_half { ComputePrecision::Mixed16 } else { ComputePrecision::F32 },
            reduce_bytes: config.precision.reduce.size_bytes() as u64,
            optimizer: OptimizerKind::default(),
            num_tokens: 2048,
            recompute: false,
            activation_bytes: None,
            last_unit_bytes: 0,
            ranks_per_process: 1,
            reshard: config.resharding(),
            offload: config.offload.clone(),
            tiers: TierRates::default(),
            machine,
        }
    }

    /// Ranks along the shard axis.
    pub fn num_shards(&self) -> usize {
        self.mesh.size(Axis::Shard)
    }

    /// What the first rank holds, which has the largest blocks.
    pub fn memory(&self, stage: Stage) -> MemoryEstimate {
        let model = self.memory_model(stage);
        let all = model.exact(&self.layouts(|_| true), 0);
        // A frozen parameter has neither gradient nor state.
        let trained = model.exact(&self.layouts(|frozen| !frozen), 0);
        MemoryEstimate { gradient_bytes: trained.gradient_bytes, optimizer_bytes: trained.optimizer_bytes, ..all }
    }

    fn memory_model(&self, stage: Stage) -> MemoryModel {
        let cut_len = |unit: &UnitShape| {
            let cut = unit.parameters.iter().filter(|param| !param.replicate);
            cut.map(|param| param.shape.iter().product::<usize>() as u64).sum::<u64>()
        };
        let whole_len = |parts: &[UnitShape]| parts.iter().map(cut_len).sum::<u64>();
        let wholes = self.shape.units.chunk_by(|_, unit| unit.follows);
        let lens = |keep| wholes.clone().filter(move |parts| parts[0].keep == keep).map(whole_len);
        MemoryModel {
            stage,
            num_shards: self.num_shards() as u64,
            optimizer: self.optimizer,
            precision: self.precision,
            accumulate: self.accumulate,
            largest_unit_len: lens(false).max().unwrap_or(0),
            kept_len: lens(true).sum(),
            ranks_per_process: self.ranks_per_process,
            prefetch: self.depth.max() as u64,
            prefetch_max_bytes: self.depth.max_bytes.map(|bytes| bytes as u64),
            reshard: self.reshard.map(|num_ranks| num_ranks as u64),
            activations: self.activation_bytes.map(|begin_bytes| Activations {
                begin_bytes,
                last_bytes: self.last_unit_bytes,
                ..Activations::default()
            }),
            tiers: self.placements(stage).memory(&self.offload),
            ..MemoryModel::new(0)
        }
    }

    fn layouts(&self, of: impl Fn(bool) -> bool) -> Vec<ShardLayout> {
        let layouts = |unit: &UnitShape| {
            let parameters = unit.layouts(self.num_shards()).into_iter().zip(&unit.parameters);
            parameters.filter(|(_, param)| of(param.frozen)).map(|(layout, _)| layout).collect::<Vec<_>>()
        };
        self.shape.units.iter().flat_map(layouts).collect()
    }

    /// What a step sends, per rank.
    pub fn traffic(&self, stage: Stage) -> StepTraffic {
        let workload = self.workload(stage);
        let once = crate::SimOptions::default();
        crate::simulate(&workload, &once).traffic
    }

    /// The work of a step at `stage`. Where units are gathered, the first large one is in parts, as in a plan.
    pub fn workload(&self, stage: Stage) -> Workload {
        if stage.shards_parameters() && self.num_shards() > 1 {
            return Self { shape: self.shape.clone().in_parts(), ..self.clone() }.work(stage);
        }
        self.work(stage)
    }

    fn work(&self, stage: Stage) -> Workload {
        let rules = StepRules {
            stage,
            depth: self.depth,
            num_micro_batches: self.num_micro_batches,
            accumulate: self.accumulate,
            needs_norm: self.needs_norm,
            reshards: self.reshard.is_some(),
        };
        let num_params: usize = self.shape.units.iter().map(|unit| unit.parameters.len()).sum();
        let placements = self.placements(stage);
        let norm_bytes = 8 * num_params as u64;
        let norm_traffic = StepTraffic::default(); // a few bytes that are not the model's
        let norm_s = |network: Collectives| network.all_gather_s(self.placed(Scope::World), norm_bytes);
        let in_place = self.memory_model(stage).gathers_in_place();
        Workload {
            mesh: self.mesh.clone(),
            rules,
            uses: self.uses(),
            traits: self.shape.units.iter().map(|unit| self.traits(stage, unit)).collect(),
            tiers: placements.unit_tiers(),
            units: self.shape.units.iter().map(|unit| self.unit_work(stage, in_place, unit)).collect(),
            tier_work: (0..self.shape.units.len()).map(|unit| self.tier_work(&placements, unit)).collect(),
            norm: self.moved(Scope::World, self.placed(Scope::World), norm_s, norm_traffic, 0),
        }
    }

    /// Each unit once; what multiplies nothing with its parameters does not read them in backward.
    fn uses(&self) -> Uses {
        let mut uses = Uses::in_order(self.shape.units.len());
        for used in &mut uses.backward {
            used.reads = self.shape.units[used.unit].forward_flops_per_token() > 0;
        }
        uses
    }

    fn traits(&self, stage: Stage, unit: &UnitShape) -> UnitTraits {
        let is_cut = self.num_shards() > 1 && unit.parameters.iter().any(|param| !param.replicate);
        let gathered_on_use = stage.shards_parameters() && is_cut;
        let gathered_bytes = match gathered_on_use {
            true => self.precision.element_bytes() as usize * unit.traffic(self.num_shards()).full_len as usize,
            false => 0,
        };
        UnitTraits {
            gathered_on_use,
            keep: unit.keep,
            trainable: unit.trainable_len() > 0,
            prefetch: unit.prefetch,
            gathered_bytes,
            gradient_bytes: (self.precision.element_bytes() * unit.trainable_len()) as usize,
            sent_bytes: (self.reduce_bytes * unit.trainable_len()) as usize,
            follows: unit.follows,
        }
    }

    fn unit_work(&self, stage: Stage, in_place: bool, unit: &UnitShape) -> UnitWork {
        let shards = self.num_shards();
        let layouts = unit.layouts(shards);
        let lens = |of: &dyn Fn(&crate::ParamShape) -> bool, len: &dyn Fn(&ShardLayout) -> usize| {
            let chosen = layouts.iter().zip(&unit.parameters).filter(|(_, param)| of(param));
            chosen.map(|(layout, _)| len(layout) as u64).sum::<u64>()
        };
        let shard_len = lens(&|param| !param.replicate, &ShardLayout::padded_len);
        let trained_shard_len = lens(&|param| !param.replicate && !param.frozen, &ShardLayout::padded_len);
        let trained_whole_len = lens(&|param| param.replicate && !param.frozen, &ShardLayout::full_len);
        let trained_len = lens(&|param| !param.frozen, &ShardLayout::full_len);
        let local_len = lens(&|param| !param.frozen, &|layout| layout.shard_len(0));

        let copied = (stage.shards_parameters() && shard_len > 0).then(|| self.gather(shards, shard_len));
        // In place, what gathers would copy is copied once, when it has been stepped. See [Note: Gathers without a copy].
        let at_once = |gather| Move { seconds: 0.0, filled_s: 0.0, taken_s: 0.0, ..gather };
        let gather = if in_place { copied.map(at_once) } else { copied };
        let placing_s = copied.filter(|_| in_place).map_or(0.0, |gather| gather.seconds);
        let again = match self.reshard {
            Some(num_ranks) => gather.map(|_| self.gather(num_ranks, unit.traffic(num_ranks).shard_len)),
            None => gather,
        };
        let publish = matches!(stage, Stage::OptimizerState | Stage::Gradients) && trained_shard_len > 0;
        let mut reduce = Vec::new();
        if stage == Stage::Ddp {
            reduce.extend((trained_len > 0).then(|| self.all_reduce(Scope::World, trained_len)));
        } else {
            if trained_shard_len > 0 {
                reduce.push(self.reduce_scatter(trained_shard_len));
                let has_replicas = self.mesh.size(Axis::Replicate) > 1;
                reduce.extend(has_replicas.then(|| self.all_reduce(Scope::Replicate, trained_shard_len)));
            }
            reduce.extend((trained_whole_len > 0).then(|| self.all_reduce(Scope::World, trained_whole_len)));
        }
        let stepped_len = if stage.shards_optimizer() { local_len } else { trained_len };
        let (forward_s, backward_s) = self.pass_s(unit);
        UnitWork {
            name: unit.name.clone(),
            bytes: self.precision.element_bytes() * unit.parameter_len(),
            forward_s,
            backward_s,
            step_s: self.optimizer_s(stepped_len) + placing_s,
            gathers: [gather, if unit.keep { gather } else { again }],
            reduce,
            publish: publish.then(|| self.gather(shards, trained_shard_len)),
        }
    }

    /// Seconds of a unit in forward and in backward, which computes two gradients for each product of forward.
    fn pass_s(&self, unit: &UnitShape) -> (f64, f64) {
        let again = |unit: &UnitShape| if self.recompute && !unit.keep { 1.0 } else { 0.0 };
        let flops = |unit: &UnitShape| unit.forward_flops_per_token() as f64 * self.num_tokens as f64;
        let seconds_per_flop = match self.machine.speed {
            Speed::Rate { flops_per_s, .. } => 1.0 / flops_per_s,
            Speed::Measured { pass_s, .. } => {
                let total: f64 = self.shape.units.iter().map(|unit| flops(unit) * (3.0 + again(unit))).sum();
                pass_s / total
            }
        };
        let forward_s = flops(unit) * seconds_per_flop;
        (forward_s, forward_s * (2.0 + again(unit)))
    }

    /// Seconds of the optimizer on so many elements: it reads and writes each of its numbers once.
    fn optimizer_s(&self, len: u64) -> f64 {
        match self.machine.speed {
            Speed::Rate { memory_bytes_per_s, .. } => {
                let state = 8 * self.optimizer.state_elements_per_parameter();
                let parameter_and_gradient = match self.precision {
                    ComputePrecision::F32 => 12,
                    // The gradient and the parameter in 16 bits, the master copy read and written.
                    ComputePrecision::Mixed16 => 12,
                };
                (state + parameter_and_gradient) as f64 * len as f64 / memory_bytes_per_s
            }
            Speed::Measured { optimizer_s, .. } => {
                let all: u64 = self.shape.units.iter().map(UnitShape::trainable_len).sum();
                optimizer_s * len as f64 / all.max(1) as f64
            }
        }
    }

    /// Over `num_ranks` neighbours along the shard axis. In a simulation all of the axis meet, also where they are fewer.
    fn gather(&self, num_ranks: usize, shard_len: u64) -> Move {
        let element_bytes = self.precision.element_bytes();
        let placed = self.placed_along(Axis::Shard, num_ranks);
        let seconds = |network: Collectives| network.all_gather_s(placed, element_bytes * shard_len);
        let traffic = StepTraffic::all_gather(num_ranks as u64, shard_len);
        self.moved(Scope::Shard, placed, seconds, traffic, element_bytes)
    }

    fn reduce_scatter(&self, shard_len: u64) -> Move {
        let (placed, element_bytes) = (self.placed(Scope::Shard), self.reduce_bytes);
        let seconds = |network: Collectives| network.reduce_scatter_s(placed, element_bytes * shard_len);
        let traffic = StepTraffic::reduce_scatter(self.num_shards() as u64, shard_len);
        self.moved(Scope::Shard, placed, seconds, traffic, element_bytes)
    }

    fn all_reduce(&self, scope: Scope, full_len: u64) -> Move {
        let (placed, element_bytes) = (self.placed(scope), self.reduce_bytes);
        let seconds = |network: Collectives| network.all_reduce_s(placed, element_bytes * full_len);
        self.moved(scope, placed, seconds, StepTraffic::all_reduce(placed.num_ranks, full_len), element_bytes)
    }

    fn moved(
        &self,
        scope: Scope,
        placed: Placement,
        seconds: impl Fn(Collectives) -> f64,
        traffic: StepTraffic,
        element_bytes: u64,
    ) -> Move {
        let network = self.machine.network;
        let taken_share = match network {
            Collectives::Ring(_) => 0.0,
            Collectives::Measured { taken_share, .. } => taken_share,
        };
        let wire = if placed.num_nodes > 1 { Wire::Between } else { Wire::InNode };
        let (filled_s, seconds) = (seconds(network.without_latency()), seconds(network));
        Move { scope, seconds, wire, filled_s, taken_s: taken_share * seconds, traffic, element_bytes }
    }

    fn placed(&self, scope: Scope) -> Placement {
        match scope {
            Scope::World => Placement::strided(self.mesh.world_size() as u64, 1, self.ranks_per_node()),
            Scope::Shard => self.placed_along(Axis::Shard, self.num_shards()),
            Scope::Replicate => self.placed_along(Axis::Replicate, self.mesh.size(Axis::Replicate)),
        }
    }

    fn ranks_per_node(&self) -> u64 {
        match self.machine.network {
            Collectives::Ring(network) => network.ranks_per_node,
            Collectives::Measured { .. } => u64::MAX,
        }
    }

    fn placed_along(&self, axis: Axis, num_ranks: usize) -> Placement {
        // Ranks are numbered row by row, so the last axis of the mesh is that of neighbours.
        let later = self.mesh.axes().iter().skip_while(|(other, _)| *other != axis).skip(1);
        let stride: usize = later.map(|&(_, size)| size).product();
        Placement::strided(num_ranks as u64, stride as u64, self.ranks_per_node())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{SimOptions, TrafficModel, simulate};

    fn machine() -> Machine {
        let network = Network::one_node(Link { alpha_s: 1e-6, beta_s_per_byte: 1e-10 });
        let speed = Speed::Rate { flops_per_s: 1e12, memory_bytes_per_s: 1e11 };
        Machine { network: network.into(), speed }
    }

    fn units(lens: &[usize], keep: &[usize]) -> ModelShape {
        let unit = |(index, &len): (usize, &usize)| {
            let path = format!("{index}.weight");
            let param = crate::ParamShape { path, shape: vec![len], dim: 0, replicate: false, frozen: false };
            UnitShape { keep: keep.contains(&index), ..UnitShape::new(index.to_string(), vec![param]) }
        };
        ModelShape::new(lens.iter().enumerate().map(unit).collect())
    }

    #[test]
    fn ranks_of_one_process_copy_a_block_when_it_is_placed_and_not_when_it_is_gathered() {
        let apart = Job::new(units(&[240, 480, 480, 120], &[3]), 4, machine());
        let together = Job { ranks_per_process: 4, ..apart.clone() };
        let of = |job: &Job, stage| job.workload(stage).units[1].clone();
        let [apart_work, together_work] = [&apart, &together].map(|job| of(job, Stage::Parameters));
        let [gather, again] = apart_work.gathers.map(Option::unwrap);
        assert!(gather.seconds > 0.0 && again.seconds > 0.0);
        assert!(together_work.gathers.iter().flatten().all(|gather| gather.seconds == 0.0 && gather.taken_s == 0.0));
        assert_eq!(together_work.gathers.map(|gather| gather.unwrap().traffic), [gather.traffic, again.traffic]);
        assert_eq!(together_work.step_s, apart_work.step_s + gather.seconds);
        // Two of four do not hold it all, and whole parameters are not gathered.
        assert_eq!(of(&Job { ranks_per_process: 2, ..apart.clone() }, Stage::Parameters), apart_work);
        assert_eq!(of(&together, Stage::Gradients), of(&apart, Stage::Gradients));
    }

    #[test]
    fn what_the_simulated_step_sends_is_what_the_traffic_model_says() {
        let shape = units(&[240, 480, 480, 120], &[3]);
        for (replicas, shards) in [(1, 1), (1, 4), (2, 3), (3, 1)] {
            for stage in Stage::ALL {
                for (num_micro_batches, accumulate) in
                    [(1, Accumulate::Reduced), (3, Accumulate::Reduced), (3, Accumulate::Local)]
                {
                    let mesh = Mesh::new([(Axis::Replicate, replicas), (Axis::Shard, shards)]).unwrap();
                    let job = Job {
                        mesh,
                        num_micro_batches,
                        accumulate,
                        ..Job::new(shape.clone(), replicas * shards, machine())
                    };
                    let model = TrafficModel {
                        num_replicas: replicas as u64,
                        num_micro_batches: num_micro_batches as u64,
                        accumulate,
                        ..TrafficModel::new(stage, shards as u64)
                    };
                    let units: Vec<_> = shape.units.iter().map(|unit| unit.traffic(shards)).collect();
                    let (simulated, counted) = (job.traffic(stage), model.step(&units));
                    let what = format!("{stage}, {replicas} x {shards}, {num_micro_batches}, {accumulate}");
                    assert_eq!(simulated.sent_len, counted.sent_len, "{what}");
                    assert_eq!(simulated.num_messages, counted.num_messages, "{what}");
                }
            }
        }
    }

    #[test]
    fn a_smaller_group_sends_less_in_backward_and_stays_in_its_node() {
        let link = |alpha_s| Link { alpha_s, beta_s_per_byte: 0.0 };
        let network = Network { in_node: link(1.0), between: link(100.0), ranks_per_node: 2 };
        let config = Config { world_size: 4, reshard_after_forward: Some(2), ..Config::default() };
        let shape = units(&[240, 480, 480, 120], &[3]);
        let job = Job::configured(shape.clone(), &config, Machine { network: network.into(), ..machine() });
        let model = TrafficModel { reshard: Some(2), ..TrafficModel::new(Stage::Parameters, 4) };
        let units: Vec<_> = shape.units.iter().map(|unit| unit.traffic(4)).collect();
        let (simulated, counted) = (job.traffic(Stage::Parameters), model.step(&units));
        assert_eq!((simulated.sent_len, simulated.num_messages), (counted.sent_len, counted.num_messages));
        // Three passes of three quarters, of which two units send a half in the second one, and two none.
        assert_eq!(counted.sent_len, 2 * 3 * 330 + (240 + 480) / 2);
        let [forward, backward] = job.workload(Stage::Parameters).units[0].gathers.map(|one| one.unwrap().seconds);
        assert_eq!((forward, backward), (2.0 + 100.0, 1.0));
        let memory = job.memory(Stage::Parameters);
        assert_eq!(memory.resharded_bytes, 4 * (240 + 480) / 2);
        let usual = Job { reshard: None, ..job.clone() }.memory(Stage::Parameters);
        assert_eq!(crate::MemoryEstimate { resharded_bytes: 0, ..memory }, usual);
    }

    #[test]
    fn frozen_parameters_cost_no_gradient_no_state_and_no_reduction() {
        let mut shape = units(&[400, 400], &[]);
        shape.units[0].parameters[0].frozen = true;
        let job = Job::new(shape, 4, machine());
        let memory = job.memory(Stage::Parameters);
        assert_eq!(
            (memory.parameter_bytes, memory.gradient_bytes, memory.optimizer_bytes),
            (4 * 200, 4 * 100, 8 * 100)
        );
        let traffic = job.traffic(Stage::Parameters);
        assert_eq!((traffic.num_all_gather, traffic.num_reduce_scatter), (3, 1));
        assert_eq!(job.workload(Stage::Ddp).units[0].reduce, []);
    }

    #[test]
    fn a_replicated_parameter_is_reduced_over_all_ranks_and_never_gathered() {
        let mut shape = units(&[400, 40], &[]);
        shape.units[1].parameters[0].replicate = true;
        let mesh = Mesh::new([(Axis::Replicate, 2), (Axis::Shard, 4)]).unwrap();
        let job = Job { mesh, ..Job::new(shape, 8, machine()) };
        let work = job.workload(Stage::Parameters);
        let scopes: Vec<Vec<Scope>> =
            work.units.iter().map(|unit| unit.reduce.iter().map(|one| one.scope).collect()).collect();
        assert_eq!(scopes, [vec![Scope::Shard, Scope::Replicate], vec![Scope::World]]);
        assert_eq!(work.units[1].gathers, [None, None]);
        assert!(!work.traits[1].gathered_on_use);
        assert_eq!(job.memory(Stage::Parameters).parameter_bytes, 4 * (100 + 40));
    }

    #[test]
    fn the_gathered_bytes_of_the_program_are_within_the_memory_models() {
        for depth in 0..4 {
            let mut job = Job::new(units(&[100, 400, 400, 400, 200], &[4]), 4, machine());
            job.depth = PrefetchDepth { forward: depth, backward: depth, max_bytes: None };
            let report = simulate(&job.workload(Stage::Parameters), &SimOptions::default());
            let most = job.memory(Stage::Parameters).gathered_bytes;
            assert!(report.peak_gathered_bytes <= most, "depth {depth}: {} of {most}", report.peak_gathered_bytes);
            assert!(report.peak_gathered_bytes * 2 > most, "depth {depth}: {} of {most}", report.peak_gathered_bytes);
        }
    }

    #[test]
    fn a_measured_step_is_divided_among_units_by_their_work() {
        let speed = Speed::Measured { pass_s: 3.0, optimizer_s: 1.0 };
        let job = Job { recompute: false, ..Job::new(units(&[100, 300], &[]), 2, Machine { speed, ..machine() }) };
        let work = job.workload(Stage::Parameters);
        let times: Vec<_> = work.units.iter().map(|unit| (unit.forward_s, unit.backward_s, unit.step_s)).collect();
        assert_eq!(times, [(0.25, 0.5, 0.125), (0.75, 1.5, 0.375)]);
        let ddp = job.workload(Stage::Ddp);
        assert_eq!(ddp.units[1].step_s, 0.75, "every rank steps everything");
    }

    #[test]
    fn replicas_on_other_nodes_are_farther_than_shards_in_a_node() {
        let link = |alpha_s| Link { alpha_s, beta_s_per_byte: 0.0 };
        let network = Network { in_node: link(1.0), between: link(100.0), ranks_per_node: 4 };
        let mesh = Mesh::new([(Axis::Replicate, 2), (Axis::Shard, 4)]).unwrap();
        let job = Job { mesh, ..Job::new(units(&[8], &[]), 8, Machine { network: network.into(), ..machine() }) };
        let seconds: Vec<_> = job.workload(Stage::Parameters).units[0].reduce.iter().map(|one| one.seconds).collect();
        assert_eq!(seconds, [3.0, 200.0]);
        // All eight: seven hops, one of them between nodes, twice.
        assert_eq!(job.workload(Stage::Ddp).units[0].reduce[0].seconds, 2.0 * (6.0 + 100.0));
    }
}
