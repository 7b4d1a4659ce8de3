//! Traffic and time of a step, predicted from sizes alone.
//!
//! Collectives are priced as rings, in which each of N ranks passes N−1 messages of a part of the buffer to its
//! neighbour: no algorithm sends less, see Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
//! Operations in MPICH", International Journal of High Performance Computing Applications 19(1), 2005. A message of S
//! bytes takes α + βS.

use std::ops::AddAssign;

use serde::{Deserialize, Serialize};

use crate::{Accumulate, ShardLayout, Stage};

/// The sizes of one unit, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnitTraffic {
    /// Elements of all its parameters.
    pub full_len: u64,
    /// Elements of its largest shard: what each rank sends in one message of a gather.
    pub shard_len: u64,
    /// Stays gathered between forward and backward.
    pub keep: bool,
}

impl UnitTraffic {
    /// A unit of `full_len` elements that are cut evenly, rounded up.
    ///
    /// # Panics
    /// If `num_shards` is 0.
    pub fn even(full_len: u64, num_shards: u64) -> Self {
        Self { full_len, shard_len: full_len.div_ceil(num_shards), keep: false }
    }

    /// A unit of parameters with these layouts, each padded on the wire.
    pub fn from_layouts<'a>(layouts: impl IntoIterator<Item = &'a ShardLayout>) -> Self {
        let empty = Self { full_len: 0, shard_len: 0, keep: false };
        layouts.into_iter().fold(empty, |unit, layout| Self {
            full_len: unit.full_len + layout.full_len() as u64,
            shard_len: unit.shard_len + layout.padded_len() as u64,
            keep: false,
        })
    }

    /// Sets [`UnitTraffic::keep`].
    pub fn keep(mut self) -> Self {
        self.keep = true;
        self
    }
}

/// What decides the traffic of an optimizer step, apart from the units.
///
/// With P parameters on N ranks, each rank sends 2P(N−1)/N elements at stages 0 to 2, and 3P(N−1)/N at stage 3, less
/// P(N−1)/N for units that skip the second gather: those marked `keep`, and the last of the others, which
/// is still there when backward begins. Where units stay cut over k ranks after forward, the second gather sends P(k−1)/k.
///
/// ```
/// use fsdp_core::{Stage, TrafficModel, UnitTraffic};
///
/// let units = [UnitTraffic::even(400, 4); 3]; // P = 1200
/// let ddp = TrafficModel::new(Stage::Ddp, 4).step(&units);
/// assert_eq!((ddp.sent_len, ddp.num_all_reduce), (2 * 1200 * 3 / 4, 3));
///
/// let fsdp = TrafficModel::new(Stage::Parameters, 4).step(&units);
/// assert_eq!(fsdp.sent_len, 3 * 1200 * 3 / 4 - 400 * 3 / 4);
/// assert_eq!((fsdp.num_all_gather, fsdp.num_reduce_scatter), (5, 3));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrafficModel {
    /// How much is sharded.
    pub stage: Stage,
    /// Ranks along the shard axis.
    pub num_shards: u64,
    /// Ranks that a unit stays cut over from forward to backward, where it is not all of the shard axis.
    pub reshard: Option<u64>,
    /// Ranks along the replicate axis. Where there is more than one, stages 1 to 3 all-reduce each reduced shard over it.
    pub num_replicas: u64,
    /// Micro-batches per step.
    pub num_micro_batches: u64,
    /// Whether every micro-batch is reduced, or only their sum.
    pub accumulate: Accumulate,
}

impl TrafficModel {
    /// One micro-batch per step on a mesh without replicas.
    pub fn new(stage: Stage, num_shards: u64) -> Self {
        let (num_replicas, num_micro_batches, accumulate) = (1, 1, Accumulate::default());
        Self { stage, num_shards, reshard: None, num_replicas, num_micro_batches, accumulate }
    }

    /// The traffic of one optimizer step over `units`, in the order of forward. The collectives of a shard axis of size 1
    /// count too, though they send nothing.
    pub fn step(&self, units: &[UnitTraffic]) -> StepTraffic {
        let mut step = StepTraffic::default();
        let num_reductions = match self.accumulate {
            Accumulate::Reduced => self.num_micro_batches,
            Accumulate::Local => 1,
        };
        let last = units.iter().rposition(|unit| !unit.keep);
        for (i, unit) in units.iter().enumerate() {
            if self.stage == Stage::Ddp {
                step += StepTraffic::all_reduce(self.num_shards * self.num_replicas, unit.full_len) * num_reductions;
                continue;
            }
            let gather = StepTraffic::all_gather(self.num_shards, unit.shard_len);
            step += match self.stage.shards_parameters() {
                true => gather * self.num_micro_batches,
                false => gather,
            };
            if self.stage.shards_parameters() && !unit.keep && last != Some(i) {
                let again = self.reshard.map(|ranks| StepTraffic::all_gather(ranks, unit.full_len.div_ceil(ranks)));
                step += again.unwrap_or(gather) * self.num_micro_batches;
            }
            step += StepTraffic::reduce_scatter(self.num_shards, unit.shard_len) * num_reductions;
            if self.num_replicas > 1 {
                step += StepTraffic::all_reduce(self.num_replicas, unit.shard_len) * num_reductions;
            }
        }
        step
    }
}

/// What one rank sends, as a number of collectives, of messages and of elements. Sums stay at the largest number rather
/// than overflow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTraffic {
    /// All-reduces.
    pub num_all_reduce: u64,
    /// All-gathers.
    pub num_all_gather: u64,
    /// Reduce-scatters.
    pub num_reduce_scatter: u64,
    /// Messages that one rank sends in all of them.
    pub num_messages: u64,
    /// Elements in these messages.
    pub sent_len: u64,
}

impl StepTraffic {
    /// Gathers shards of `shard_len` elements from `num_ranks` ranks.
    pub fn all_gather(num_ranks: u64, shard_len: u64) -> Self {
        let num_messages = num_ranks.saturating_sub(1);
        Self { num_all_gather: 1, num_messages, sent_len: num_messages.saturating_mul(shard_len), ..Self::default() }
    }

    /// Reduces to shards of `shard_len` elements on `num_ranks` ranks: a gather that runs backwards.
    pub fn reduce_scatter(num_ranks: u64, shard_len: u64) -> Self {
        Self { num_all_gather: 0, num_reduce_scatter: 1, ..Self::all_gather(num_ranks, shard_len) }
    }

    /// Reduces `full_len` elements on `num_ranks` ranks: a reduce-scatter, then a gather.
    pub fn all_reduce(num_ranks: u64, full_len: u64) -> Self {
        let mut both = Self::all_gather(num_ranks, full_len.div_ceil(num_ranks.max(1))) * 2;
        (both.num_all_gather, both.num_all_reduce) = (0, 1);
        both
    }

    /// Collectives of all kinds.
    pub fn num_collectives(&self) -> u64 {
        self.num_all_reduce + self.num_all_gather + self.num_reduce_scatter
    }

    /// Bytes that one rank sends, with elements of `element_bytes`.
    pub fn sent_bytes(&self, element_bytes: u64) -> u64 {
        self.sent_len.saturating_mul(element_bytes)
    }
}

impl AddAssign for StepTraffic {
    fn add_assign(&mut self, other: Self) {
        self.num_all_reduce = self.num_all_reduce.saturating_add(other.num_all_reduce);
        self.num_all_gather = self.num_all_gather.saturating_add(other.num_all_gather);
        self.num_reduce_scatter = self.num_reduce_scatter.saturating_add(other.num_reduce_scatter);
        self.num_messages = self.num_messages.saturating_add(other.num_messages);
        self.sent_len = self.sent_len.saturating_add(other.sent_len);
    }
}

/// The same traffic, a number of times.
impl std::ops::Mul<u64> for StepTraffic {
    type Output = Self;

    fn mul(self, times: u64) -> Self {
        Self {
            num_all_reduce: self.num_all_reduce.saturating_mul(times),
            num_all_gather: self.num_all_gather.saturating_mul(times),
            num_reduce_scatter: self.num_reduce_scatter.saturating_mul(times),
            num_messages: self.num_messages.saturating_mul(times),
            sent_len: self.sent_len.saturating_mul(times),
        }
    }
}

/// How long a message takes between two ranks: `T = α + β·S`.
///
/// ```
/// use fsdp_core::{Link, StepTraffic};
///
/// // 10 µs per message and 1 GB/s; an all-gather of 4 shards of 1 MB is three messages.
/// let link = Link { alpha_s: 10e-6, beta_s_per_byte: 1e-9 };
/// let time_s = link.time_s(&StepTraffic::all_gather(4, 250_000), 4);
/// assert!((time_s - 3.0 * (10e-6 + 1e-3)).abs() < 1e-9);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Seconds of latency for each message.
    pub alpha_s: f64,
    /// Seconds for each byte: the inverse of the bandwidth.
    pub beta_s_per_byte: f64,
}

impl Link {
    /// The link that is nearest to the points `(S in bytes, T in seconds)`, by least squares of relative errors.
    ///
    /// Relative, since sizes span five orders of magnitude: in absolute terms only the largest would count, and α would be
    /// whatever is left of their noise. Neither number is negative: where the best line says so, the other alone is fitted.
    /// `None` with fewer than two different sizes.
    pub fn fit(points: &[(f64, f64)]) -> Option<Self> {
        let mut sums = [0.0; 5];
        for (bytes, seconds) in points {
            // An error of the same part of T weighs the same everywhere.
            let weight = 1.0 / (seconds * seconds);
            let terms = [1.0, *bytes, bytes * bytes, *seconds, bytes * seconds];
            sums.iter_mut().zip(terms).for_each(|(sum, term)| *sum += weight * term);
        }
        let [w, wx, wxx, wy, wxy] = sums;
        let determinant = w * wxx - wx * wx;
        // Rounding leaves a trace of the products where they should cancel.
        if determinant.is_nan() || determinant <= 1e-12 * w * wxx {
            return None;
        }
        let (alpha_s, beta_s_per_byte) = ((wxx * wy - wx * wxy) / determinant, (w * wxy - wx * wy) / determinant);
        Some(match (alpha_s < 0.0, beta_s_per_byte < 0.0) {
            (true, _) => Self { alpha_s: 0.0, beta_s_per_byte: wxy / wxx },
            (_, true) => Self { alpha_s: wy / w, beta_s_per_byte: 0.0 },
            _ => Self { alpha_s, beta_s_per_byte },
        })
    }

    /// The link with its latency and its time per byte multiplied.
    #[must_use]
    pub fn scaled(self, alpha: f64, beta: f64) -> Self {
        Self { alpha_s: alpha * self.alpha_s, beta_s_per_byte: beta * self.beta_s_per_byte }
    }

    /// Seconds for a message of `bytes`.
    pub fn message_s(&self, bytes: u64) -> f64 {
        self.alpha_s + self.beta_s_per_byte * bytes as f64
    }

    /// Seconds for all of `traffic`, one message after the other, with elements of `element_bytes`.
    pub fn time_s(&self, traffic: &StepTraffic, element_bytes: u64) -> f64 {
        let sent_bytes = traffic.sent_bytes(element_bytes) as f64;
        self.alpha_s * traffic.num_messages as f64 + self.beta_s_per_byte * sent_bytes
    }
}

/// The two things that a step's time is made of. `overlap`, from 0 to 1, is the part of the communication that may run
/// beside the computation: 0 for one after the other, 1 for all; the first gather and the last reduction never can.
///
/// ```
/// use fsdp_core::StepTime;
///
/// let step = StepTime { compute_s: 3.0, communication_s: 4.0 };
/// assert_eq!((step.total_s(0.0), step.total_s(1.0)), (7.0, 4.0)); // the sum, the maximum
/// assert_eq!(step.exposed_s(0.5), 2.0);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepTime {
    /// Seconds of computation.
    pub compute_s: f64,
    /// Seconds of communication.
    pub communication_s: f64,
}

impl StepTime {
    /// Seconds in which the rank only communicates.
    pub fn exposed_s(&self, overlap: f64) -> f64 {
        self.communication_s - (self.communication_s * overlap.clamp(0.0, 1.0)).min(self.compute_s)
    }

    /// Seconds of the step: the computation, and the communication that it does not hide.
    pub fn total_s(&self, overlap: f64) -> f64 {
        self.compute_s + self.exposed_s(overlap)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn units(num_shards: u64) -> [UnitTraffic; 4] {
        [240, 480, 480, 120].map(|full_len| UnitTraffic::even(full_len, num_shards))
    }

    #[test]
    fn stage_3_sends_three_passes_where_the_others_send_two() {
        for num_shards in [1, 2, 3, 5, 8] {
            let pass_len = 1320 * (num_shards - 1) / num_shards;
            for stage in [Stage::Ddp, Stage::OptimizerState, Stage::Gradients] {
                let step = TrafficModel::new(stage, num_shards).step(&units(num_shards));
                assert_eq!(step.sent_len, 2 * pass_len, "{stage} on {num_shards}");
            }
            let step = TrafficModel::new(Stage::Parameters, num_shards).step(&units(num_shards));
            let last_unit_pass_len = 120 * (num_shards - 1) / num_shards;
            assert_eq!(step.sent_len, 3 * pass_len - last_unit_pass_len, "stage 3 on {num_shards}");
            assert_eq!(step.sent_bytes(4), 4 * step.sent_len);
        }
    }

    #[test]
    fn collectives_are_counted_for_each_unit() {
        let counts = |stage| {
            let mut units = units(4);
            units[1] = units[1].keep();
            let step = TrafficModel::new(stage, 4).step(&units);
            assert_eq!(step.num_collectives(), step.num_all_reduce + step.num_all_gather + step.num_reduce_scatter);
            (step.num_all_reduce, step.num_all_gather, step.num_reduce_scatter)
        };
        assert_eq!(counts(Stage::Ddp), (4, 0, 0));
        assert_eq!(counts(Stage::OptimizerState), (0, 4, 4));
        assert_eq!(counts(Stage::Gradients), (0, 4, 4));
        assert_eq!(counts(Stage::Parameters), (0, 6, 4), "a kept unit and the last are gathered once");
    }

    #[test]
    fn micro_batches_gather_again_and_reduce_as_the_configuration_says() {
        let step = |stage, accumulate| {
            let model = TrafficModel { num_micro_batches: 3, accumulate, ..TrafficModel::new(stage, 4) };
            let step = model.step(&units(4));
            (step.num_all_reduce, step.num_all_gather, step.num_reduce_scatter)
        };
        assert_eq!(step(Stage::Ddp, Accumulate::Reduced), (12, 0, 0));
        assert_eq!(step(Stage::Ddp, Accumulate::Local), (4, 0, 0));
        assert_eq!(step(Stage::Gradients, Accumulate::Reduced), (0, 4, 12));
        assert_eq!(step(Stage::Gradients, Accumulate::Local), (0, 4, 4));
        assert_eq!(step(Stage::Parameters, Accumulate::Reduced), (0, 21, 12));
        assert_eq!(step(Stage::Parameters, Accumulate::Local), (0, 21, 4));
    }

    #[test]
    fn replicas_all_reduce_the_shards() {
        let model = TrafficModel { num_replicas: 2, ..TrafficModel::new(Stage::Parameters, 4) };
        let (hybrid, flat) = (model.step(&units(4)), TrafficModel::new(Stage::Parameters, 4).step(&units(4)));
        assert_eq!(hybrid.num_all_reduce, 4);
        assert_eq!(hybrid.sent_len - flat.sent_len, 2 * (1320 / 4) / 2);
    }

    #[test]
    fn padding_travels_where_rows_do_not_divide() {
        let layouts = [ShardLayout::new(&[5, 3], 0, 4), ShardLayout::new(&[2], 0, 4)];
        let unit = UnitTraffic::from_layouts(&layouts);
        assert_eq!((unit.full_len, unit.shard_len), (17, 7));
        assert_eq!(StepTraffic::all_gather(4, unit.shard_len).sent_len, 21);
    }

    #[test]
    fn time_is_latency_for_each_message_and_bandwidth_for_each_byte() {
        let link = Link { alpha_s: 0.5, beta_s_per_byte: 0.25 };
        assert_eq!(link.message_s(8), 2.5);
        assert_eq!(link.time_s(&StepTraffic::all_gather(4, 2), 4), 3.0 * link.message_s(8));
        assert_eq!(link.time_s(&StepTraffic::reduce_scatter(4, 2), 4), 3.0 * link.message_s(8));
        assert_eq!(link.time_s(&StepTraffic::all_reduce(4, 8), 4), 6.0 * link.message_s(8));
        assert_eq!(link.time_s(&StepTraffic::all_reduce(1, 8), 4), 0.0);
    }

    #[test]
    fn points_on_a_line_give_the_line() {
        let points: Vec<_> =
            (10..28).step_by(2).map(|power| f64::from(1 << power)).map(|s| (s, 2e-5 + 1e-10 * s)).collect();
        let link = Link::fit(&points).unwrap();
        assert!((link.alpha_s / 2e-5 - 1.0).abs() < 1e-6, "{link:?}");
        assert!((link.beta_s_per_byte / 1e-10 - 1.0).abs() < 1e-6, "{link:?}");
    }

    #[test]
    fn an_error_of_the_largest_size_does_not_drown_the_latency() {
        // One tenth too much at 100 MB is 1 ms, fifty times the latency.
        let link = Link::fit(&[(1e3, 20.1e-6), (1e4, 21e-6), (1e6, 120e-6), (1e8, 11.02e-3)]).unwrap();
        assert!((15e-6..25e-6).contains(&link.alpha_s), "{link:?}");
    }

    #[test]
    fn neither_latency_nor_bandwidth_is_negative() {
        let link = Link::fit(&[(1e3, 1e-6), (1e6, 3e-3)]).unwrap();
        assert!(link.alpha_s == 0.0 && link.beta_s_per_byte > 0.0, "{link:?}");
        let link = Link::fit(&[(1e3, 2e-3), (1e6, 1e-3)]).unwrap();
        assert!(link.alpha_s > 0.0 && link.beta_s_per_byte == 0.0, "{link:?}");
    }

    #[test]
    fn one_size_is_not_a_line() {
        assert_eq!(Link::fit(&[]), None);
        assert_eq!(Link::fit(&[(1e6, 1e-3), (1e6, 2e-3)]), None);
    }

    #[test]
    fn short_computation_hides_only_its_own_length() {
        let step = StepTime { compute_s: 1.0, communication_s: 4.0 };
        assert_eq!((step.exposed_s(1.0), step.total_s(1.0)), (3.0, 4.0));
        assert_eq!((step.exposed_s(0.0), step.total_s(0.0)), (4.0, 5.0));
        let long = StepTime { compute_s: 9.0, communication_s: 4.0 };
        assert_eq!((long.exposed_s(1.0), long.exposed_s(0.75)), (0.0, 1.0));
    }
}
