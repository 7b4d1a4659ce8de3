//! Which settings are best, and how much each matters.

use crate::simulate::{Collectives, Job, SimOptions, SimReport, simulate};
use crate::{Network, PrefetchDepth, Stage};

/// What a search may try.
#[derive(Clone, Debug, PartialEq)]
pub struct SearchLimits {
    /// Bytes that a rank may hold at its peak. `None`: any number.
    pub device_bytes: Option<u64>,
    /// The deepest prefetch.
    pub max_depth: usize,
    /// The most neighbouring units of equal shape in one.
    pub max_group: usize,
}

impl Default for SearchLimits {
    /// Depths to 4, and groups to 8.
    fn default() -> Self {
        Self { device_bytes: None, max_depth: 4, max_group: 8 }
    }
}

/// One setting.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tried {
    /// Neighbouring units of equal shape in one.
    pub group: usize,
    /// Prefetch depth, in forward and in backward.
    pub depth: usize,
    /// Seconds of a step.
    pub step_s: f64,
    /// Seconds of it in which a rank stands still for communication.
    pub exposed_s: f64,
    /// Bytes that a rank holds at its peak; without activations where they are not known.
    pub peak_bytes: u64,
    /// Whether they fit.
    pub fits: bool,
}

/// All settings that were tried.
#[derive(Clone, Debug, PartialEq)]
pub struct Search {
    /// By group, then by depth.
    pub tried: Vec<Tried>,
    /// The fastest that fits; of those that are within half a percent of it, the smallest. `None` if none fits.
    pub best: Option<Tried>,
}

/// Times within this share of each other count as equal.
const EQUAL: f64 = 0.005;

impl Search {
    /// Tries all groups that are powers of two, with all depths, by simulating one step of ranks that do not differ.
    /// Depths matter at stage 3 only, so only there more than one is tried.
    pub fn run(job: &Job, stage: Stage, limits: &SearchLimits) -> Self {
        let max_depth = if stage.shards_parameters() { limits.max_depth } else { 0 };
        let groups =
            std::iter::successors(Some(1), |group| Some(2 * group)).take_while(|&group| group <= limits.max_group);
        let mut tried = Vec::new();
        let mut num_units = usize::MAX;
        for group in groups {
            let shape = job.shape.grouped(group);
            // A larger group that changes nothing is no other setting.
            if shape.units.len() == num_units {
                break;
            }
            num_units = shape.units.len();
            for depth in 0..=max_depth {
                let depths = PrefetchDepth { forward: depth, backward: depth, max_bytes: job.depth.max_bytes };
                let job = Job { shape: shape.clone(), depth: depths, ..job.clone() };
                let report = once(&job, stage);
                let memory = job.memory(stage);
                let peak_bytes = memory.peak_or_known_bytes();
                let fits = limits.device_bytes.is_none_or(|bytes| peak_bytes <= bytes);
                let (step_s, exposed_s) = (report.step_s, report.exposed_s);
                tried.push(Tried { group, depth, step_s, exposed_s, peak_bytes, fits });
            }
        }
        let fitting = tried.iter().filter(|tried| tried.fits);
        let fastest = fitting.clone().map(|tried| tried.step_s).fold(f64::INFINITY, f64::min);
        let equal = fitting.filter(|tried| tried.step_s <= fastest * (1.0 + EQUAL));
        let best = equal.min_by_key(|tried| (tried.peak_bytes, tried.group, tried.depth)).copied();
        Self { tried, best }
    }
}

/// A step with one thing changed.
#[derive(Clone, Debug, PartialEq)]
pub struct Variation {
    /// What was changed.
    pub what: String,
    /// The step.
    pub report: SimReport,
    /// Tokens of all ranks for each second.
    pub tokens_per_s: f64,
}

/// The step as it is, and with one thing changed at a time: prefetch depth, unit size, batch, links.
pub fn sensitivity(job: &Job, stage: Stage) -> Vec<Variation> {
    let with_depth = |depth| {
        let depth = PrefetchDepth { forward: depth, backward: depth, max_bytes: job.depth.max_bytes };
        Job { depth, ..job.clone() }
    };
    let with_link = |alpha, beta| {
        let mut changed = job.clone();
        changed.machine.network = job.machine.network.scaled(alpha, beta);
        changed
    };
    let mut jobs = vec![("as given".to_owned(), job.clone())];
    if stage.shards_parameters() {
        jobs.extend([0, 1, 2, 4].map(|depth| (format!("prefetch depth {depth}"), with_depth(depth))));
    }
    jobs.extend(
        [2, 4].map(|group| (format!("{group} units in one"), Job { shape: job.shape.grouped(group), ..job.clone() })),
    );
    jobs.push(("half the batch".into(), Job { num_tokens: job.num_tokens.div_ceil(2), ..job.clone() }));
    jobs.push(("twice the batch".into(), Job { num_tokens: 2 * job.num_tokens, ..job.clone() }));
    jobs.push(("half the bandwidth".into(), with_link(1.0, 2.0)));
    jobs.push(("twice the bandwidth".into(), with_link(1.0, 0.5)));
    jobs.push(("twice the latency".into(), with_link(2.0, 1.0)));
    let variation = |(what, job): (String, Job)| {
        let report = once(&job, stage);
        let ranks = job.num_micro_batches as f64 * job.mesh.world_size() as f64;
        Variation { what, tokens_per_s: job.num_tokens as f64 * ranks / report.step_s, report }
    };
    jobs.into_iter().map(variation).collect()
}

fn once(job: &Job, stage: Stage) -> SimReport {
    simulate(&job.workload(stage), &SimOptions::default())
}

impl Collectives {
    /// The same with all latencies and all times per byte multiplied.
    pub fn scaled(self, alpha: f64, beta: f64) -> Self {
        match self {
            Collectives::Ring(network) => Collectives::Ring(Network {
                in_node: network.in_node.scaled(alpha, beta),
                between: network.between.scaled(alpha, beta),
                ..network
            }),
            Collectives::Measured { links, taken_share } => {
                Collectives::Measured { links: links.scaled(alpha, beta), taken_share }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Link, Machine, ModelShape, Speed};

    /// Eight equal units on four ranks; a gather takes `gather` times as long as a unit's forward.
    fn job(gather: f64) -> Job {
        let forward_s = 1e-3;
        let len = 4000.0;
        let beta_s_per_byte = gather * forward_s / (3.0 * len);
        let network = Network::one_node(Link { alpha_s: 0.0, beta_s_per_byte });
        let flops_per_s = 2.0 * len * 2048.0 / forward_s;
        let speed = Speed::Rate { flops_per_s, memory_bytes_per_s: f64::INFINITY };
        Job::new(ModelShape::even(8 * len as usize, 8), 4, Machine { network: network.into(), speed })
    }

    #[test]
    fn where_a_gather_is_short_one_unit_ahead_hides_all_but_the_first() {
        let search = Search::run(&job(0.5), Stage::Parameters, &SearchLimits { max_group: 1, ..Default::default() });
        assert_eq!(search.tried.iter().map(|tried| tried.depth).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
        let best = search.best.unwrap();
        assert_eq!(best.depth, 1, "deeper is not faster, and larger: {:?}", search.tried);
        // The reduction of the last unit, whose own backward is over, and the gather of the first unit after the step.
        assert!((best.exposed_s / 1e-3 - 1.0).abs() < 0.1, "{best:?}");
        assert!(search.tried[0].exposed_s > 3.0 * best.exposed_s, "{:?}", search.tried[0]);
    }

    #[test]
    fn what_does_not_fit_is_not_best() {
        let job = job(0.5);
        let all = Search::run(&job, Stage::Parameters, &SearchLimits::default());
        assert!(all.tried.iter().all(|tried| tried.fits) && all.tried.len() == 4 * 5, "groups of 1, 2, 4 and 8");
        let smallest = all.tried.iter().map(|tried| tried.peak_bytes).min().unwrap();
        let limits = |device_bytes| SearchLimits { device_bytes: Some(device_bytes), ..SearchLimits::default() };
        let tight = Search::run(&job, Stage::Parameters, &limits(smallest)).best.unwrap();
        assert_eq!((tight.group, tight.depth, tight.peak_bytes), (1, 0, smallest));
        assert_eq!(Search::run(&job, Stage::Parameters, &limits(smallest - 1)).best, None);
    }

    #[test]
    fn lower_stages_have_no_depth_to_choose() {
        let search = Search::run(&job(1.0), Stage::Gradients, &SearchLimits::default());
        assert!(search.tried.iter().all(|tried| tried.depth == 0));
    }

    #[test]
    fn faster_links_and_larger_batches_help_as_they_should() {
        let variations = sensitivity(&job(3.0), Stage::Parameters);
        let of = |what: &str| variations.iter().find(|variation| variation.what == what).unwrap();
        let given = of("as given");
        assert!(of("twice the bandwidth").report.step_s < given.report.step_s);
        assert!(of("half the bandwidth").report.step_s > 1.5 * given.report.step_s);
        assert_eq!(of("twice the latency").report.step_s, given.report.step_s, "there is none");
        assert!(of("twice the batch").tokens_per_s > given.tokens_per_s);
        assert!(of("prefetch depth 0").report.step_s >= of("prefetch depth 1").report.step_s);
    }
}
