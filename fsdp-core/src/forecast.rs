//! All four stages of a job side by side, and which to take.

use std::fmt;

use crate::{Job, MemoryEstimate, Mesh, SimOptions, SimReport, Stage, TierBytes, human_bytes, simulate};

/// Step times within this share of each other count as equal.
const EQUAL: f64 = 0.02;

/// The most ranks that are looked at for [`StageForecast::min_ranks`].
const MOST_RANKS: usize = 1 << 20;

/// A stage, before it is run.
#[derive(Clone, Debug, PartialEq)]
pub struct StageForecast {
    /// The stage.
    pub stage: Stage,
    /// What the first rank holds, which has the largest blocks.
    pub memory: MemoryEstimate,
    /// What of it lies below the device's memory.
    pub tiers: TierBytes,
    /// The step in the simulator: times and traffic, with the spans of rank 0.
    pub report: SimReport,
    /// Whether the peak fits into the device; `None` if its size is not given.
    pub fits: Option<bool>,
    /// The least number of ranks, all along the shard axis, on which the peak fits; `None` where no number does, or no
    /// size is given.
    pub min_ranks: Option<u64>,
}

/// All stages, and the advice.
///
/// ```
/// use fsdp_core::{Forecast, Job, Machine, ModelShape, NamedLink, Network, Speed, Stage};
///
/// let link = NamedLink::find("nvlink4").expect("a known link").link;
/// let speed = Speed::Rate { flops_per_s: 4e14, memory_bytes_per_s: 3e12 };
/// let machine = Machine { network: Network::one_node(link).into(), speed };
/// let job = Job::new(ModelShape::even(7_000_000_000, 32), 8, machine);
/// let forecast = Forecast::new(&job, Some(80_000_000_000));
/// assert_eq!(forecast.stages.iter().map(|of| of.fits == Some(true)).collect::<Vec<_>>(), [false, true, true, true]);
/// // Stages 1 and 2 wait for what a step publishes; stage 3 gathers it beside the next forward.
/// assert_eq!(forecast.advice.stage, Some(Stage::Parameters));
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Forecast {
    /// By stage, from 0.
    pub stages: Vec<StageForecast>,
    /// Bytes of a device, if given.
    pub device_bytes: Option<u64>,
    /// Which to take.
    pub advice: Advice,
}

/// Which stage to take, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advice {
    /// The stage; `None` where none fits.
    pub stage: Option<Stage>,
    /// Whether sharding gains anything.
    pub is_worth_it: bool,
    /// The reason, as a sentence.
    pub reason: String,
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.stage {
            Some(stage) => write!(f, "take {stage}: {}", self.reason),
            None => write!(f, "no stage fits: {}", self.reason),
        }
    }
}

impl Forecast {
    /// The forecast of `job` at every stage, on devices of `device_bytes`.
    pub fn new(job: &Job, device_bytes: Option<u64>) -> Self {
        let options = SimOptions { traced: vec![0], ..SimOptions::default() };
        let forecast = |stage: Stage| {
            let memory = job.memory(stage);
            let report = simulate(&job.workload(stage), &options);
            StageForecast {
                stage,
                report,
                fits: device_bytes.map(|bytes| memory.peak_or_known_bytes() <= bytes),
                min_ranks: device_bytes.and_then(|bytes| min_ranks_of(job, stage, bytes)),
                memory,
                tiers: job.tier_bytes(stage),
            }
        };
        let stages: Vec<_> = Stage::ALL.into_iter().map(forecast).collect();
        let advice = advise(&stages, job, device_bytes);
        Self { stages, device_bytes, advice }
    }
}

/// The least number of ranks along the shard axis on which a rank's peak is at most `device_bytes`.
fn min_ranks_of(job: &Job, stage: Stage, device_bytes: u64) -> Option<u64> {
    let fits = |num_ranks: usize| {
        let ranks_per_process = job.ranks_per_process.min(num_ranks as u64);
        // A group that is all of the axis, or does not divide it, is none.
        let reshard = job.reshard.filter(|&k| k < num_ranks && num_ranks.is_multiple_of(k));
        let job = Job { mesh: Mesh::one_dim(num_ranks), ranks_per_process, reshard, ..job.clone() };
        job.memory(stage).peak_or_known_bytes() <= device_bytes
    };
    // A rank alone has nothing to gather, so it may fit where two do not.
    if fits(1) {
        return Some(1);
    }
    let (mut too_few, mut enough) = (1, 2);
    while !fits(enough) {
        (too_few, enough) = (enough, enough * 2);
        if enough > MOST_RANKS {
            return None;
        }
    }
    while enough - too_few > 1 {
        let middle = usize::midpoint(too_few, enough);
        if fits(middle) { enough = middle } else { too_few = middle }
    }
    Some(enough as u64)
}

fn advise(stages: &[StageForecast], job: &Job, device_bytes: Option<u64>) -> Advice {
    let fitting: Vec<_> = stages.iter().filter(|of| of.fits != Some(false)).collect();
    let fastest_s = fitting.iter().map(|of| of.report.step_s).fold(f64::INFINITY, f64::min);
    let is_fast = |of: &StageForecast| of.report.step_s <= fastest_s * (1.0 + EQUAL);
    let peak = |of: &StageForecast| of.memory.peak_or_known_bytes();
    // Of stages that are as fast, the lowest: it sends the least. But 2 rather than 1, since it sends no more and holds less.
    // Where nobody knows what is too much, the smallest.
    let rank = |of: &StageForecast| match (device_bytes, of.stage) {
        (None, _) => peak(of),
        (Some(_), Stage::Ddp) => 0,
        (Some(_), Stage::Gradients) => 1,
        (Some(_), Stage::OptimizerState) => 2,
        (Some(_), Stage::Parameters) => 3,
    };
    let Some(chosen) = fitting.iter().filter(|of| is_fast(of)).min_by_key(|of| rank(of)) else {
        return Advice { stage: None, is_worth_it: false, reason: nothing_fits(stages, device_bytes) };
    };
    let holds = match device_bytes {
        Some(bytes) => format!("{} of {}", human_bytes(peak(chosen)), human_bytes(bytes)),
        None => human_bytes(peak(chosen)),
    };
    let takes = format!("a rank holds {holds}, and a step takes {:.3} s", chosen.report.step_s);
    let stage = Some(chosen.stage);
    if job.num_shards() == 1 {
        let reason = "the shard axis has one rank, so there is nothing to share; sharding is not worth it".to_owned();
        return Advice { stage, is_worth_it: false, reason };
    }
    if chosen.stage == Stage::Ddp && device_bytes.is_some() {
        let reason = format!("sharding is not worth it, since all of the state fits on every rank: {takes}, none less");
        return Advice { stage, is_worth_it: false, reason };
    }
    let why = match (device_bytes, fitting.len()) {
        (None, _) => "the smallest of the fastest; the size of a device is not given",
        (Some(_), 1) => "the only one that fits",
        (Some(_), _) if fitting.iter().all(|of| rank(of) >= rank(chosen)) => "the lowest that fits, and none is faster",
        (Some(_), _) => "lower ones fit, and are slower",
    };
    Advice { stage, is_worth_it: true, reason: format!("{why}; {takes}") }
}

fn nothing_fits(stages: &[StageForecast], device_bytes: Option<u64>) -> String {
    let least = stages.iter().min_by_key(|of| of.memory.peak_or_known_bytes());
    let needs = least.map_or(0, |of| of.memory.peak_or_known_bytes());
    let has = human_bytes(device_bytes.unwrap_or(0));
    let ranks = stages.iter().filter_map(|of| of.min_ranks.map(|ranks| (ranks, of.stage.number()))).min();
    let remedy = match ranks {
        Some((ranks, stage)) => format!("from {ranks} ranks on, stage {stage} does"),
        None => "more ranks do not help: what is left are activations, gathered units and what is reduced; recompute, \
                 take a smaller batch, or make units smaller"
            .to_owned(),
    };
    format!("the smallest needs {}, and a device has {has}; {remedy}", human_bytes(needs))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Link, Machine, ModelShape, Network, Speed};

    /// A job of `len` parameters, on `num_ranks` with a link of so many bytes per second.
    fn job(len: usize, num_ranks: usize, bytes_per_s: f64) -> Job {
        let network = Network::one_node(Link { alpha_s: 1e-6, beta_s_per_byte: 1.0 / bytes_per_s });
        let speed = Speed::Rate { flops_per_s: 1e12, memory_bytes_per_s: 1e13 };
        Job::new(ModelShape::even(len, 8), num_ranks, Machine { network: network.into(), speed })
    }

    fn forecast(job: &Job, device_bytes: u64) -> Forecast {
        Forecast::new(job, Some(device_bytes))
    }

    #[test]
    fn a_model_that_fits_whole_is_not_sharded() {
        let advice = forecast(&job(1_000_000, 4, 1e12), 1 << 30).advice;
        assert_eq!((advice.stage, advice.is_worth_it), (Some(Stage::Ddp), false));
        assert!(
            advice.reason.starts_with("sharding is not worth it, since all of the state fits on every rank: "),
            "{advice}"
        );
    }

    #[test]
    fn of_stages_that_are_as_fast_the_lowest_is_taken_but_2_rather_than_1() {
        // 16 MB of state whole; 10 at stage 1, 7 at stage 2.
        let advice = forecast(&job(1_000_000, 4, 1e12), 15_000_000).advice;
        assert_eq!((advice.stage, advice.is_worth_it), (Some(Stage::Gradients), true));
        assert!(advice.reason.starts_with("the lowest that fits, and none is faster; a rank holds "), "{advice}");
    }

    #[test]
    fn what_only_stage_3_fits_takes_stage_3() {
        let advice = forecast(&job(1_000_000, 4, 1e12), 6_800_000).advice;
        assert_eq!(advice.stage, Some(Stage::Parameters));
        assert!(advice.reason.starts_with("the only one that fits; "), "{advice}");
    }

    #[test]
    fn where_nothing_fits_the_remedy_is_said() {
        let small = forecast(&job(1_000_000, 4, 1e12), 4_000_000);
        assert_eq!(small.advice.stage, None);
        let ranks = small.stages[3].min_ranks.unwrap();
        let remedy = format!("from {ranks} ranks on, stage 3 does");
        assert!(small.advice.to_string().ends_with(&remedy), "{}", small.advice);
        // That number is the least.
        let of = |ranks| job(1_000_000, ranks as usize, 1e12).memory(Stage::Parameters).peak_or_known_bytes();
        assert!(of(ranks) <= 4_000_000 && of(ranks - 1) > 4_000_000);

        let hopeless = forecast(&job(1_000_000, 4, 1e12), 500_000).advice;
        assert!(hopeless.to_string().contains("more ranks do not help"), "{hopeless}");
    }

    #[test]
    fn one_rank_and_no_device_size_have_their_own_words() {
        let alone = forecast(&job(1_000_000, 1, 1e12), 1 << 30).advice;
        assert!(!alone.is_worth_it && alone.reason.contains("one rank"), "{alone}");
        let unknown = Forecast::new(&job(1_000_000, 4, 1e12), None);
        assert!(unknown.advice.reason.contains("the size of a device is not given"), "{}", unknown.advice);
        assert!(unknown.stages.iter().all(|of| of.fits.is_none() && of.min_ranks.is_none()));
    }

    #[test]
    fn stage_0_needs_no_more_than_one_rank_or_none_is_enough() {
        let all = forecast(&job(1_000_000, 4, 1e12), 17_000_000);
        assert_eq!(all.stages[0].min_ranks, Some(1));
        let tight = forecast(&job(1_000_000, 4, 1e12), 10_000_000);
        assert_eq!(tight.stages[0].min_ranks, None);
        assert!(tight.stages[1].min_ranks > tight.stages[2].min_ranks);
    }
}
