//! The simulation: every rank runs the same program, and meets the others in collectives.

use crate::simulate::program::{Instruction, Program};
use crate::simulate::ranks::{RankClasses, Scope};
use crate::simulate::tiers::{Queues, TierTraffic, UnitState};
use crate::simulate::workload::{Move, Workload};
use crate::{Action, SpanKind, StepTraffic, TraceStream, UnitIndex};

/// How the ranks differ, and how long to run them.
#[derive(Clone, Debug, PartialEq)]
pub struct SimOptions {
    /// Optimizer steps, one after the other.
    pub num_steps: usize,
    /// Ranks that compute slower than the others, with the factor of their times.
    pub stragglers: Vec<(usize, f64)>,
    /// The spread of computation times: each is multiplied with exp(jitter · z), z being normal. 0 for none.
    pub jitter: f64,
    /// Seed of the jitter.
    pub seed: u64,
    /// Ranks whose spans are kept.
    pub traced: Vec<usize>,
}

impl Default for SimOptions {
    /// One step of ranks that do not differ.
    fn default() -> Self {
        Self { num_steps: 1, stragglers: Vec::new(), jitter: 0.0, seed: 0, traced: Vec::new() }
    }
}

/// A span of a traced rank, in seconds from the start. A communication is of the step that waits for it, as in an engine's
/// trace, so what a step uses first has begun before its start.
#[derive(Clone, Debug, PartialEq)]
pub struct SimSpan {
    /// The rank.
    pub rank: usize,
    /// The row.
    pub stream: TraceStream,
    /// What it was spent on.
    pub kind: SpanKind,
    /// The unit; `None` for the norm.
    pub unit: Option<UnitIndex>,
    /// The step, from 0.
    pub step: u64,
    /// When it began.
    pub start_s: f64,
    /// When it ended.
    pub end_s: f64,
}

/// What a simulation found. Times are of one step, means over steps and ranks, after a first step that is not counted: a
/// step gathers ahead for the one after it.
#[derive(Clone, Debug, PartialEq)]
pub struct SimReport {
    /// Seconds from one step to the next.
    pub step_s: f64,
    /// Seconds of computation.
    pub compute_s: f64,
    /// Seconds in which a rank stands still for communication, or its processors are taken by it.
    pub exposed_s: f64,
    /// Seconds in which a rank stands still for what lies below its memory.
    pub tier_wait_s: f64,
    /// Seconds in which a rank's communication is under way, waiting for peers included; several may be at once.
    pub communication_s: f64,
    /// What each rank sends.
    pub traffic: StepTraffic,
    /// The same in bytes.
    pub sent_bytes: u64,
    /// What the first rank moves to and from host memory and disks.
    pub moved: TierTraffic,
    /// The most that is gathered at once, in bytes.
    pub peak_gathered_bytes: u64,
    /// Kinds of ranks that had to be simulated. See [Note: Ranks that cannot be told apart].
    pub num_classes: usize,
    /// Clocks that were moved, over all steps: the work done.
    pub num_updates: u64,
    /// Spans of the traced ranks.
    pub spans: Vec<SimSpan>,
}

impl SimReport {
    /// Share of the communication that is hidden behind computation, 0 to 1; `None` if there is none.
    pub fn overlap(&self) -> Option<f64> {
        (self.communication_s > 0.0).then(|| 1.0 - (self.exposed_s / self.communication_s).min(1.0))
    }
}

/// Runs the steps of `workload`.
///
/// Events need no queue: a rank executes its program in order, a stream its collectives in order, and a collective begins
/// when the last of its ranks and their streams have come to it. So each instruction of the program is one event of all
/// ranks, whose times are sums and maxima of earlier ones. Cost: a few operations for each instruction and class of ranks,
/// and a few numbers for each class and unit.
///
/// ```
/// use fsdp_core::{Job, Machine, ModelShape, NamedLink, Network, SimOptions, Speed, Stage, simulate};
///
/// let link = NamedLink::find("nvlink4").expect("a known link").link;
/// let speed = Speed::Rate { flops_per_s: 4e14, memory_bytes_per_s: 3e12 };
/// let machine = Machine { network: Network::one_node(link).into(), speed };
/// let job = Job::new(ModelShape::even(7_000_000_000, 32), 8, machine);
/// let report = simulate(&job.workload(Stage::Parameters), &SimOptions::default());
/// assert_eq!(report.num_classes, 1); // eight equal ranks
/// assert!(report.step_s > report.compute_s);
/// ```
pub fn simulate(workload: &Workload, options: &SimOptions) -> SimReport {
    let program = Program::with_tiers(&workload.rules, &workload.traits, &workload.tiers, &workload.uses);
    let slowdown = |rank: usize| {
        let found = options.stragglers.iter().find(|(straggler, _)| *straggler == rank);
        found.map_or(1.0, |&(_, factor)| factor)
    };
    let classes = RankClasses::new(&workload.mesh, |rank| match options.jitter {
        0.0 => slowdown(rank).to_bits(),
        _ => rank as u64,
    });
    let world_size = workload.mesh.world_size();
    let traced =
        options.traced.iter().filter(|&&rank| rank < world_size).map(|&rank| (classes.of[rank], rank)).collect();
    let (num_units, num_classes) = (workload.units.len(), classes.len());
    let has_tiers = workload.tiers.iter().any(|tiers| tiers.any());
    // Ranks without tiers do without their arrivals.
    let arrivals = |waited: &Waited| match waited.is_of_tier() && !has_tiers {
        true => Vec::new(),
        false => vec![0.0; num_units * num_classes],
    };
    let of_unit = |(&tiers, &work)| UnitState::new(tiers, work);
    let mut run = Run {
        workload,
        options,
        slowdown: classes.members.iter().map(|&(rank, _)| slowdown(rank)).collect(),
        clocks: vec![Clock::default(); num_classes],
        arrived: Waited::ALL.each_ref().map(arrivals),
        units: workload.tiers.iter().zip(&workload.tier_work).map(of_unit).collect(),
        writing_gradients: None,
        moved: TierTraffic::default(),
        traced,
        classes,
        step: 0,
        origin: 0.0,
        in_backward: false,
        event: 0,
        traffic: StepTraffic::default(),
        sent_bytes: 0,
        num_updates: 0,
        under_way: Vec::new(),
        given: Default::default(),
        spans: Vec::new(),
    };
    let num_steps = options.num_steps.max(1);
    run.step(&program);
    let origin = run.begin_measuring();
    for _ in 0..num_steps {
        run.step(&program);
    }
    let mean = |of: fn(&Clock) -> f64| {
        let weighted = run.clocks.iter().zip(&run.classes.members).map(|(clock, &(_, count))| of(clock) * count as f64);
        weighted.sum::<f64>() / (world_size * num_steps) as f64
    };
    SimReport {
        step_s: (run.end() - origin) / num_steps as f64,
        compute_s: mean(|clock| clock.computed),
        exposed_s: mean(|clock| clock.waited),
        tier_wait_s: mean(|clock| clock.tier_waited),
        communication_s: mean(|clock| clock.communicated),
        traffic: divided(run.traffic, num_steps as u64),
        sent_bytes: run.sent_bytes / num_steps as u64,
        moved: run.moved.divided(num_steps as u64),
        peak_gathered_bytes: program.peak_gathered_bytes(&workload.traits),
        num_classes,
        num_updates: run.num_updates,
        spans: run.spans,
    }
}

fn divided(traffic: StepTraffic, by: u64) -> StepTraffic {
    StepTraffic {
        num_all_reduce: traffic.num_all_reduce / by,
        num_all_gather: traffic.num_all_gather / by,
        num_reduce_scatter: traffic.num_reduce_scatter / by,
        num_messages: traffic.num_messages / by,
        sent_len: traffic.sent_len / by,
    }
}

/// The threads that communicate, beside the one that computes.
#[derive(Clone, Copy)]
enum Stream {
    Gather,
    Reduce,
}

impl Stream {
    fn other(self) -> Self {
        match self {
            Stream::Gather => Stream::Reduce,
            Stream::Reduce => Stream::Gather,
        }
    }

    fn row(self) -> TraceStream {
        match self {
            Stream::Gather => TraceStream::Gather,
            Stream::Reduce => TraceStream::Reduce,
        }
    }
}

/// How long a stream uses a wire, and which share of it: latency leaves it empty.
#[derive(Clone, Copy, Default)]
struct Use {
    until: f64,
    filled: f64,
}

/// What is waited for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Waited {
    Gather,
    Reduce,
    Publish,
    Blocks,
    Gradients,
    State,
    WriteBack,
    WriteGradients,
}

impl Waited {
    const ALL: [Waited; 8] = [
        Waited::Gather,
        Waited::Reduce,
        Waited::Publish,
        Waited::Blocks,
        Waited::Gradients,
        Waited::State,
        Waited::WriteBack,
        Waited::WriteGradients,
    ];

    fn is_of_tier(self) -> bool {
        !matches!(self, Waited::Gather | Waited::Reduce | Waited::Publish)
    }
}

/// The times of one class of ranks, in seconds.
#[derive(Clone, Copy, Default)]
pub(super) struct Clock {
    pub(super) now: f64,
    pub(super) queues: Queues,
    /// When each stream is done with what was given to it.
    free: [f64; 2],
    /// By stream and wire.
    uses: [[Use; 2]; 2],
    computed: f64,
    waited: f64,
    tier_waited: f64,
    communicated: f64,
}

/// A communication of a traced class that nobody has waited for yet.
pub(super) struct UnderWay {
    pub(super) class: usize,
    pub(super) waited: Waited,
    pub(super) unit: UnitIndex,
    pub(super) row: TraceStream,
    pub(super) kind: SpanKind,
    pub(super) start_s: f64,
    pub(super) end_s: f64,
}

pub(super) struct Run<'a> {
    workload: &'a Workload,
    options: &'a SimOptions,
    classes: RankClasses,
    slowdown: Vec<f64>,
    pub(super) clocks: Vec<Clock>,
    /// By what is waited for, unit and class: when it is there.
    arrived: [Vec<f64>; Waited::ALL.len()],
    /// What of each unit is below memory, and what of that is under way.
    pub(super) units: Vec<UnitState>,
    /// The unit whose gradients were written last.
    pub(super) writing_gradients: Option<UnitIndex>,
    pub(super) moved: TierTraffic,
    /// Classes of the traced ranks, and the ranks.
    traced: Vec<(usize, usize)>,
    step: u64,
    /// When measuring began.
    origin: f64,
    in_backward: bool,
    /// Computations so far: each has a jitter of its own.
    event: u64,
    traffic: StepTraffic,
    sent_bytes: u64,
    pub(super) num_updates: u64,
    pub(super) under_way: Vec<UnderWay>,
    /// By stream, what was given to it and nobody has waited for.
    given: [Vec<(Waited, UnitIndex)>; 2],
    spans: Vec<SimSpan>,
}

impl Run<'_> {
    fn step(&mut self, program: &Program) {
        for &instruction in &program.instructions {
            self.execute(instruction);
        }
        self.step += 1;
    }

    fn end(&self) -> f64 {
        self.clocks.iter().map(|clock| clock.now).fold(0.0, f64::max)
    }

    /// Forgets all but what is under way, and returns the time.
    fn begin_measuring(&mut self) -> f64 {
        let origin = self.end();
        for clock in &mut self.clocks {
            (clock.computed, clock.waited, clock.tier_waited, clock.communicated) = (0.0, 0.0, 0.0, 0.0);
        }
        self.moved = TierTraffic::default();
        (self.traffic, self.sent_bytes, self.step, self.origin) = (StepTraffic::default(), 0, 0, origin);
        self.spans.clear();
        origin
    }

    fn execute(&mut self, instruction: Instruction) {
        let units = &self.workload.units;
        match instruction {
            Instruction::BeginForward | Instruction::BeginStep => self.in_backward = false,
            Instruction::BeginBackward => self.in_backward = true,
            Instruction::Forward(unit) => self.compute(SpanKind::Forward, unit, units[unit].forward_s),
            Instruction::Backward(unit) => self.compute(SpanKind::Backward, unit, units[unit].backward_s),
            Instruction::Norm => self.norm(),
            Instruction::Act(action) => self.act(action),
        }
    }

    fn act(&mut self, action: Action) {
        let units = &self.workload.units;
        match action {
            Action::Gather(unit) | Action::Regather(unit) => {
                // What a smaller group holds is in memory.
                if matches!(action, Action::Gather(_)) {
                    self.have_blocks(unit);
                }
                let gather = units[unit].gathers[usize::from(self.in_backward)];
                self.collect(SpanKind::Gather, Stream::Gather, Waited::Gather, unit, gather.as_slice());
            }
            Action::Publish(unit) => {
                let publish = units[unit].publish;
                self.collect(SpanKind::Publish, Stream::Gather, Waited::Publish, unit, publish.as_slice());
            }
            Action::Reduce(unit) => {
                self.begin_reduce(unit);
                self.collect(SpanKind::Reduce, Stream::Reduce, Waited::Reduce, unit, &units[unit].reduce);
            }
            Action::WaitGather(unit) => self.wait(Waited::Gather, unit),
            Action::WaitReduce(unit) => {
                self.wait(Waited::Reduce, unit);
                self.end_reduce(unit);
            }
            Action::WaitPublish(unit) => self.wait(Waited::Publish, unit),
            Action::Step(unit) => {
                self.begin_step(unit);
                self.compute(SpanKind::Step, unit, units[unit].step_s);
            }
            // Memory comes back at once; `Program::peak_gathered_bytes` counts it.
            Action::Free(_) | Action::Reshard(_) => {}
            Action::FetchBlocks(unit) => self.fetch_blocks(unit),
            Action::FetchState(unit) => self.fetch_state(unit),
            Action::WriteBack(unit) => self.write_back(unit),
            Action::WaitWriteBack(unit) => self.wait_write_back(unit),
            Action::WriteGradients(unit) => self.write_gradients(unit),
        }
    }

    fn compute(&mut self, kind: SpanKind, unit: UnitIndex, seconds: f64) {
        for class in 0..self.clocks.len() {
            let jitter = match self.options.jitter {
                0.0 => 1.0,
                spread => (spread * normal(self.options.seed, self.event, class as u64)).exp(),
            };
            let seconds = seconds * self.slowdown[class] * jitter;
            let clock = &mut self.clocks[class];
            let start_s = clock.now;
            clock.now += seconds;
            clock.computed += seconds;
            let end_s = clock.now;
            self.span(class, TraceStream::Compute, kind, Some(unit), start_s, end_s);
        }
        self.event += 1;
        self.num_updates += self.clocks.len() as u64;
    }

    /// Gives collectives to a stream, one after the other.
    fn collect(&mut self, kind: SpanKind, stream: Stream, waited: Waited, unit: UnitIndex, moves: &[Move]) {
        let begun: Vec<f64> = self.clocks.iter().map(|clock| clock.now.max(clock.free[stream as usize])).collect();
        for one in moves {
            self.send(stream, one);
            self.take(unit, one.taken_s);
            self.traffic += one.traffic;
            self.sent_bytes = self.sent_bytes.saturating_add(one.traffic.sent_bytes(one.element_bytes));
        }
        self.given[stream as usize].push((waited, unit));
        let row = stream.row();
        for (class, &start_s) in begun.iter().enumerate() {
            let clock = &mut self.clocks[class];
            let end_s = if moves.is_empty() { clock.now } else { clock.free[stream as usize] };
            if !moves.is_empty() {
                clock.communicated += end_s - start_s;
            }
            self.set_arrived(waited, unit, class, end_s);
            if !moves.is_empty() && self.is_traced(class) {
                self.under_way.push(UnderWay { class, waited, unit, row, kind, start_s, end_s });
            }
        }
        self.num_updates += (self.clocks.len() * (1 + moves.len())) as u64;
    }

    /// One collective on its wire.
    ///
    /// [Note: Streams that share a wire]
    /// A gather and a reduction that are under way at once get half of the wire's bandwidth each, as connections of one
    /// network and copies in one memory do, until one of them is done. A stream does one thing after the other, so what is
    /// under way on a wire is at most one collective of each. Seen from where the later one begins: it takes longer by the
    /// time that the other stream goes on to fill the wire, but by no more than it fills the wire itself; and what is given
    /// to the other stream, and not done yet, ends later by the time that it fills the wire until then, within the same limit.
    fn send(&mut self, stream: Stream, one: &Move) {
        let Self { classes, clocks, .. } = self;
        let (own, other, wire) = (stream as usize, stream.other() as usize, one.wire as usize);
        let filled = if one.seconds > 0.0 { one.filled_s / one.seconds } else { 0.0 };
        let mut begun = vec![0.0; clocks.len()];
        for group in classes.groups(one.scope) {
            let come = |&class: &usize| clocks[class].now.max(clocks[class].free[own]);
            let start = group.iter().map(come).fold(0.0, f64::max);
            let met = |&class: &usize| {
                let Use { until, filled } = clocks[class].uses[other][wire];
                ((until - start).max(0.0) * filled).min(one.filled_s)
            };
            let shared = group.iter().map(met).fold(0.0, f64::max);
            let end = start + one.seconds + shared;
            for &class in group {
                begun[class] = start;
                clocks[class].free[own] = end;
                clocks[class].uses[own][wire] = Use { until: end, filled };
            }
        }
        let late = |clock: &Clock, at: f64, start: f64| {
            ((at - start).max(0.0) * clock.uses[other][wire].filled).min(one.filled_s)
        };
        let is_met = |(clock, start): (&Clock, &f64)| clock.uses[other][wire].until > *start;
        if one.filled_s == 0.0 || !clocks.iter().zip(&begun).any(is_met) {
            return;
        }
        let num_classes = clocks.len();
        for &(waited, unit) in &self.given[other] {
            let arrived = &mut self.arrived[waited as usize][unit * num_classes..][..num_classes];
            for ((arrived, clock), &start) in arrived.iter_mut().zip(&*clocks).zip(&begun) {
                *arrived += late(clock, *arrived, start);
            }
        }
        let row = stream.other().row();
        for span in self.under_way.iter_mut().filter(|span| span.row == row) {
            let (clock, start) = (&clocks[span.class], begun[span.class]);
            span.start_s += late(clock, span.start_s, start);
            span.end_s += late(clock, span.end_s, start);
        }
        for (clock, &start) in clocks.iter_mut().zip(&begun) {
            let by = late(clock, clock.free[other], start);
            clock.free[other] += by;
            clock.communicated += by;
            let until = clock.uses[other].map(|used| used.until + late(clock, used.until, start));
            for (used, until) in clock.uses[other].iter_mut().zip(until) {
                used.until = until;
            }
        }
    }

    /// The rank's processors are at a communication. Wherever in that time its computation gets them, it is so much later by
    /// the end; here it is at once.
    fn take(&mut self, unit: UnitIndex, seconds: f64) {
        let num_taken = if seconds > 0.0 { self.clocks.len() } else { 0 };
        for class in 0..num_taken {
            self.stand_still(class, Some(unit), self.clocks[class].now + seconds);
        }
    }

    /// All classes of each group go on when the last has come, and `seconds` later.
    fn meet(&mut self, scope: Scope, come: impl Fn(&Clock) -> f64, seconds: f64, go_on: impl Fn(&mut Clock, f64)) {
        let Self { classes, clocks, .. } = self;
        for group in classes.groups(scope) {
            let last = group.iter().map(|&class| come(&clocks[class])).fold(0.0, f64::max);
            group.iter().for_each(|&class| go_on(&mut clocks[class], last + seconds));
        }
    }

    pub(super) fn set_arrived(&mut self, waited: Waited, unit: UnitIndex, class: usize, end_s: f64) {
        self.arrived[waited as usize][unit * self.clocks.len() + class] = end_s;
    }

    pub(super) fn is_traced(&self, class: usize) -> bool {
        self.traced.iter().any(|(traced, _)| *traced == class)
    }

    /// As [`Run::wait`], for what lies below memory.
    pub(super) fn wait_tier(&mut self, waited: Waited, unit: UnitIndex) {
        let before: Vec<f64> = self.clocks.iter().map(|clock| clock.waited).collect();
        self.wait(waited, unit);
        for (clock, before) in self.clocks.iter_mut().zip(before) {
            clock.tier_waited += clock.waited - before;
            clock.waited = before;
        }
    }

    fn wait(&mut self, waited: Waited, unit: UnitIndex) {
        let num_classes = self.clocks.len();
        self.given.iter_mut().for_each(|given| given.retain(|given| *given != (waited, unit)));
        for class in 0..num_classes {
            let arrived = self.arrived[waited as usize][unit * num_classes + class];
            let is_it = |one: &UnderWay| (one.class, one.waited, one.unit) == (class, waited, unit);
            if let Some(at) = self.under_way.iter().position(is_it) {
                let UnderWay { row, kind, start_s, end_s, .. } = self.under_way.remove(at);
                self.span(class, row, kind, Some(unit), start_s, end_s);
            }
            self.stand_still(class, Some(unit), arrived);
        }
        self.num_updates += num_classes as u64;
    }

    fn norm(&mut self) {
        self.look_at_gradients();
        let norm = self.workload.norm;
        let before: Vec<f64> = self.clocks.iter().map(|clock| clock.now).collect();
        self.meet(norm.scope, |clock| clock.now, norm.seconds, |clock, end| clock.now = end);
        for (class, start_s) in before.into_iter().enumerate() {
            let end_s = std::mem::replace(&mut self.clocks[class].now, start_s);
            self.stand_still(class, None, end_s);
        }
        self.num_updates += self.clocks.len() as u64;
    }

    fn stand_still(&mut self, class: usize, unit: Option<UnitIndex>, until: f64) {
        let clock = &mut self.clocks[class];
        if until > clock.now {
            let start_s = clock.now;
            clock.waited += until - clock.now;
            clock.now = until;
            self.span(class, TraceStream::Compute, SpanKind::Wait, unit, start_s, until);
        }
    }

    fn span(
        &mut self,
        class: usize,
        stream: TraceStream,
        kind: SpanKind,
        unit: Option<UnitIndex>,
        start_s: f64,
        end_s: f64,
    ) {
        let (start_s, end_s) = (start_s - self.origin, end_s - self.origin);
        for &(_, rank) in self.traced.iter().filter(|(traced, _)| *traced == class) {
            self.spans.push(SimSpan { rank, stream, kind, unit, step: self.step, start_s, end_s });
        }
    }
}

/// A normally distributed number that depends on its three keys alone (Box and Muller, 1958).
fn normal(seed: u64, event: u64, class: u64) -> f64 {
    let bits = mix(mix(mix(seed) ^ event) ^ class);
    // From (0, 1], so that the logarithm is finite, and from [0, 1).
    let unit = |bits: u64| (bits >> 11) as f64 / (1u64 << 53) as f64;
    let (radius, angle) = (1.0 - unit(bits), unit(mix(bits)));
    (-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * angle).cos()
}

/// SplitMix64 (Steele, Lea and Flood, 2014).
fn mix(state: u64) -> u64 {
    let mut z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
