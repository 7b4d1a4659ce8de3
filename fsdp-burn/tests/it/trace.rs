//! What a run does and when: the order of gathers and reductions, how much of them prefetch hides, and what it holds.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};
use fsdp_burn::{Config, LaunchOptions, Link, Mesh, PrefetchConfig, Sharded, Stage, Trace, launch, launch_with};
use fsdp_core::{Action, Axis, Dtype, Plan, PrefetchDepth, Schedule, Span, SpanKind, TraceStream};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use crate::common::models::{ConvNet, Gpt, Mlp, Trial, rows};
use crate::common::process::{child, run_to_end, told};
use crate::common::run::{
    Optimizer, Outcome, Tolerance, apart, assert_parity, config, scalar, sharded, share, start, weights,
};

fn at_depth(depth: usize, max_bytes: Option<usize>) -> PrefetchConfig {
    PrefetchConfig { forward: depth, backward: depth, max_bytes }
}

/// What the schedule says of one step of [`Mlp`], once its orders are known: the units of gathers and of reductions.
fn scheduled(plan: &Plan, depth: usize) -> [Vec<String>; 2] {
    let depth = PrefetchDepth { forward: depth, backward: depth, max_bytes: None };
    let dtypes = vec![Dtype::F32; plan.params().len()];
    let traits = plan.unit_traits(&dtypes, &dtypes);
    let mut schedule = Schedule::new(Stage::Parameters, &traits, depth);
    let units = 0..plan.units().len();
    let mut ahead = Vec::new();
    let mut step = || {
        // What the step before gathered ahead belongs to the forward that waits for it.
        let mut actions = std::mem::take(&mut ahead);
        for unit in units.clone() {
            // A weight and a bias.
            for _ in 0..2 {
                actions.extend(schedule.forward(unit));
                schedule.gradient_expected(unit);
            }
        }
        if schedule.needs_reduce_order() {
            schedule.set_reduce_order(schedule.expected_reduce_order());
            schedule.set_first_uses(schedule.first_uses().to_vec());
        }
        schedule.begin_backward(true);
        for unit in units.clone().rev() {
            // Nothing in front of the first layer needs a gradient, so backward does not ask for its weight.
            if unit > 0 {
                actions.extend(schedule.backward(unit));
            }
            actions.extend(schedule.gradient(unit));
            actions.extend(schedule.gradient(unit));
        }
        actions.extend(schedule.end_backward());
        // For the norm, as the default of `non_finite` asks.
        schedule.finish_reduces();
        ahead = schedule.step();
        actions
    };
    step();
    step();
    let name = |unit: usize| plan.units()[unit].name.clone();
    let mut orders = [Vec::new(), Vec::new()];
    for action in step() {
        match action {
            Action::Gather(unit) => orders[0].push(name(unit)),
            Action::Reduce(unit) => orders[1].push(name(unit)),
            _ => {}
        }
    }
    orders
}

/// Units of the spans of one rank and row, as they began.
fn units_of(spans: &[Span], rank: usize, stream: TraceStream) -> Vec<String> {
    let mut spans: Vec<_> = spans.iter().filter(|span| span.rank == rank && span.stream == stream).collect();
    spans.sort_by_key(|span| span.start);
    spans.iter().map(|span| span.unit.clone()).collect()
}

#[test]
fn gathers_and_reductions_run_in_the_order_of_the_schedule() {
    for depth in [0, 1] {
        let config = Config { prefetch: at_depth(depth, None), ..config(Stage::Parameters, 2) };
        // The third step is the first that knows the orders of both passes.
        let trace = Arc::new(Trace::of_steps(2..3));
        let options = LaunchOptions { trace: Some(trace.clone()), ..LaunchOptions::default() };
        let plans = launch_with(&config, options, |rank| {
            let mut model = start::<Mlp>(&rank)?;
            let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
            for batch in 0..4 {
                let gradients = model.backward(model.loss(batch, share(&rank), &rank.device()))?;
                optim.step(0.01, &mut model, gradients)?;
            }
            Ok(model.plan().clone())
        })
        .unwrap();
        let (spans, [gathers, reductions]) = (trace.spans(), scheduled(&plans[0], depth));
        assert!(gathers.len() > reductions.len() && reductions.len() == plans[0].units().len());
        for rank in 0..2 {
            let what = format!("rank {rank}, prefetch {depth}");
            assert_eq!(units_of(&spans, rank, TraceStream::Gather), gathers, "gathers of {what}");
            assert_eq!(units_of(&spans, rank, TraceStream::Reduce), reductions, "reductions of {what}");
            for kind in [SpanKind::Forward, SpanKind::Backward, SpanKind::Step] {
                let count = spans.iter().filter(|span| span.rank == rank && span.kind == kind).count();
                assert!(count >= plans[0].units().len(), "{count} {kind:?} spans of {what}");
            }
        }
        assert!(spans.iter().all(|span| span.step == 2 && span.start <= span.end));
    }
}

/// Layers that forward uses from the first to the last, and the other way round from batch [`TURN`] on.
#[derive(Module, Debug, Sharded)]
struct Turning {
    #[shard(units)]
    layers: Vec<Linear>,
    output: Linear,
}

const TURN: usize = 10;

impl Trial for Turning {
    fn build(device: &Device) -> Self {
        let linear = |to| LinearConfig::new(7, to).init(device);
        Self { layers: (0..3).map(|_| linear(7)).collect(), output: linear(3) }
    }

    fn loss(&self, batch: usize, samples: Range<usize>, device: &Device) -> Tensor<1> {
        let mut order: Vec<_> = self.layers.iter().collect();
        if batch >= TURN {
            order.reverse();
        }
        let x = rows(batch + 1, samples, 7, device);
        self.output.forward(order.into_iter().fold(x, |x, layer| relu(layer.forward(x)))).powi_scalar(2).mean()
    }
}

#[test]
fn an_order_of_units_that_changes_on_all_ranks_is_learned_anew_and_changes_no_bit() {
    let run = |stage, trace: &Arc<Trace>| {
        let options = LaunchOptions { trace: Some(trace.clone()), ..LaunchOptions::default() };
        let ranks = launch_with(&config(stage, 2), options, |rank| {
            let mut model = start::<Turning>(&rank)?;
            let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
            let mut outcome = Outcome::default();
            for batch in 0..67 {
                let loss = model.loss(batch, share(&rank), &rank.device());
                outcome.losses.push(rank.mean(scalar(&loss))?);
                let gradients = model.backward(loss)?;
                optim.step(0.01, &mut model, gradients)?;
            }
            outcome.weights = weights(&model)?;
            Ok(outcome)
        });
        ranks.unwrap().swap_remove(0)
    };
    let expected = run(Stage::Ddp, &Arc::default());
    let trace = Arc::new(Trace::of_steps(62..66));
    assert_parity("forward turns round", &expected, &run(Stage::Parameters, &trace), Tolerance::EXACT);
    let reductions = |rank, step| {
        let spans: Vec<_> = trace.spans().into_iter().filter(|span| span.step == step).collect();
        units_of(&spans, rank, TraceStream::Reduce)
    };
    for rank in 0..2 {
        assert_eq!(reductions(rank, 62), ["root", "layers.2", "layers.1", "layers.0"], "held back until their turn");
        assert_eq!(reductions(rank, 65), ["root", "layers.0", "layers.1", "layers.2"], "as gradients appear");
    }
}

#[test]
fn a_forward_of_rank_0_that_uses_nothing_leaves_the_order_that_was_learned() {
    let trace = Arc::new(Trace::of_steps(65..66));
    let options = LaunchOptions { trace: Some(trace.clone()), ..LaunchOptions::default() };
    let ranks = launch_with(&config(Stage::Gradients, 2), options, |rank| {
        let mut model = start::<Turning>(&rank)?;
        let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
        for step in 0..66 {
            // Orders are agreed upon anew at step 64.
            let (loss, weight) = match step == 64 && rank.is_main() {
                true => (Tensor::zeros([1], &rank.device()).require_grad(), 0.0),
                false => (model.loss(TURN + step, share(&rank), &rank.device()), 1.0),
            };
            let gradients = model.backward_weighted(loss, weight)?;
            optim.step(0.01, &mut model, gradients)?;
        }
        Ok(())
    });
    ranks.unwrap();
    for rank in 0..2 {
        let reductions = units_of(&trace.spans(), rank, TraceStream::Reduce);
        assert_eq!(reductions, ["root", "layers.0", "layers.1", "layers.2"], "rank {rank}: as gradients appear");
    }
}

/// Every layer is followed by a computation that takes a while and needs no core.
#[derive(Module, Debug, Sharded)]
struct Slow {
    #[shard(units)]
    layers: Vec<Linear>,
    output: Linear,
}

const COMPUTING: Duration = Duration::from_millis(25);

impl Trial for Slow {
    fn build(device: &Device) -> Self {
        let linear = |to| LinearConfig::new(7, to).init(device);
        Self { layers: (0..6).map(|_| linear(7)).collect(), output: linear(3) }
    }

    fn loss(&self, batch: usize, samples: Range<usize>, device: &Device) -> Tensor<1> {
        let mut x = rows(batch + 1, samples, 7, device);
        for layer in &self.layers {
            x = relu(layer.forward(x));
            thread::sleep(COMPUTING);
        }
        self.output.forward(x).mean()
    }
}

/// Time that the forwards of all ranks stood still on a slow link, once their order is known, and what was computed.
fn forwards_on_a_slow_link(depth: usize) -> (Duration, Outcome) {
    let config = Config { prefetch: at_depth(depth, None), ..config(Stage::Parameters, 2) };
    let link = Some(Link { alpha_s: 0.015, beta_s_per_byte: 0.0 });
    let options = LaunchOptions { link, ..LaunchOptions::default() };
    let ranks = launch_with(&config, options, |rank| {
        let mut model = start::<Slow>(&rank)?;
        let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
        let (mut exposed, mut outcome) = (Duration::ZERO, Outcome::default());
        for batch in 0..4 {
            rank.barrier()?;
            let before = model.stats().exposed();
            let loss = model.loss(batch, share(&rank), &rank.device());
            if batch >= 2 {
                exposed += model.stats().exposed() - before;
            }
            outcome.losses.push(rank.mean(scalar(&loss))?);
            let gradients = model.backward(loss)?;
            optim.step(0.05, &mut model, gradients)?;
        }
        let overlap = model.stats().overlap().unwrap();
        assert!((0.0..=1.0).contains(&overlap), "{overlap}");
        outcome.weights = weights(&model)?;
        Ok((exposed, outcome))
    })
    .unwrap();
    (ranks.iter().map(|(exposed, _)| *exposed).sum(), ranks[0].1.clone())
}

#[test]
fn prefetch_hides_most_of_the_gathers_behind_as_much_computation() {
    let (on_demand, expected) = forwards_on_a_slow_link(0);
    let (ahead, got) = forwards_on_a_slow_link(1);
    assert!(ahead < on_demand / 2, "{ahead:?} exposed with prefetch, {on_demand:?} without");
    assert_parity("prefetch on a slow link", &expected, &got, Tolerance::EXACT);
}

/// Processor time of this process so far, in hundredths of a second.
fn processor_time() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    // Behind the program's name in brackets: user and system time are the 12th and 13th.
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    fields[11..13].iter().map(|field| field.parse::<u64>().unwrap()).sum()
}

/// The part of the test in a process of its own, whose processor time is that of its ranks.
#[test]
fn child_waits_for_a_late_rank() {
    if told("FSDP_TEST_LATE").is_none() {
        return;
    }
    let spent = launch(&config(Stage::Parameters, 3), |rank| {
        let model = start::<Mlp>(&rank)?;
        let loss = |batch| model.loss(batch, share(&rank), &rank.device());
        drop(loss(0));
        rank.barrier()?;
        let before = processor_time();
        // Two ranks wait in a gather for the third, then all are idle.
        if rank.rank() == 2 {
            thread::sleep(Duration::from_secs(1));
        }
        drop(loss(1));
        thread::sleep(Duration::from_secs(1));
        Ok(processor_time() - before)
    });
    let spent = spent.unwrap();
    println!("{spent:?} hundredths of a second");
    // A thread that spins takes a hundred of them, or more.
    assert!(spent.iter().all(|&spent| spent < 50), "{spent:?}");
}

#[test]
fn ranks_that_wait_and_communication_threads_that_are_idle_sleep() {
    run_to_end(child("trace::child_waits_for_a_late_rank").env("FSDP_TEST_LATE", "1"));
}

#[test]
fn without_communication_there_is_no_overlap() {
    assert_eq!(fsdp_burn::EngineStats::default().overlap(), None);
}

#[test]
fn the_engine_holds_no_more_after_a_hundred_steps() {
    for stage in Stage::ALL {
        let peaks = launch(&config(stage, 2), |rank| {
            let mut model = start::<Mlp>(&rank)?;
            let mut optim = rank.optimizer(Optimizer::AdamW.build())?;
            let mut peaks = Vec::new();
            for batch in 0..110 {
                let gradients = model.backward(model.loss(batch, share(&rank), &rank.device()))?;
                optim.step(0.01, &mut model, gradients)?;
                if batch == 9 || batch == 109 {
                    let stats = model.stats();
                    peaks.push([stats.peak_parameter_bytes, stats.peak_gathered_bytes, stats.peak_gradient_bytes]);
                }
            }
            Ok(peaks)
        })
        .unwrap();
        for (rank, peaks) in peaks.iter().enumerate() {
            assert_eq!(peaks[0], peaks[1], "rank {rank} at {stage}");
            assert!(peaks[0][0] > 0 && peaks[0][2] > 0, "rank {rank} at {stage}: {peaks:?}");
        }
    }
}

/// The largest size of what is gathered at once in three steps, and what the estimate says for all ranks of the process, where
/// blocks do not lie in place.
fn gathered_bytes<M: Trial>(prefetch: PrefetchConfig) -> (usize, u64, Plan) {
    let config = Config { prefetch, ..config(Stage::Parameters, 2) };
    let mut ranks = launch_with(&config, apart(), |rank| {
        let mut model = start::<M>(&rank)?;
        let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
        for batch in 0..3 {
            let gradients = model.backward(model.loss(batch, share(&rank), &rank.device()))?;
            optim.step(0.01, &mut model, gradients)?;
        }
        let estimate = model.memory_estimate(fsdp_burn::OptimizerKind::Sgd, None);
        Ok((model.stats().peak_gathered_bytes, 2 * estimate.gathered_bytes, model.plan().clone()))
    })
    .unwrap();
    ranks.remove(0)
}

#[test]
fn a_limit_in_bytes_bounds_what_is_gathered_at_once() {
    let (unlimited, _, plan) = gathered_bytes::<Mlp>(at_depth(3, None));
    let bytes = |name: &str| {
        let unit = plan.units().iter().position(|unit| unit.name == name).unwrap();
        4 * plan.unit_len(unit)
    };
    let (kept, hidden) = (bytes("root"), bytes("hidden.0"));
    let limit = kept + 2 * hidden;
    let (limited, estimated, _) = gathered_bytes::<Mlp>(at_depth(3, Some(limit)));
    assert_eq!(limited, limit, "the kept root, the unit in use, and one ahead; {unlimited} without a limit");
    assert!(limited < unlimited, "{limited} with the limit, {unlimited} without");
    // Shares of the ranks are rounded up to whole elements.
    assert!(estimated >= limited as u64 && estimated <= limited as u64 + 8, "{estimated} estimated, {limited} held");
    let (least, ..) = gathered_bytes::<Mlp>(at_depth(3, Some(1)));
    assert_eq!(least, gathered_bytes::<Mlp>(at_depth(0, None)).0, "the unit in use is gathered whatever the limit");
}

fn assert_same_bits_under_any_limit<M: Trial>() {
    let with = |max_bytes| {
        let config = Config { prefetch: at_depth(2, max_bytes), ..config(Stage::Parameters, 3) };
        sharded::<M>(&config, Optimizer::AdamW)
    };
    let expected = with(None);
    for limit in [1, 1500, 4000] {
        assert_parity(&format!("a limit of {limit} bytes"), &expected, &with(Some(limit)), Tolerance::EXACT);
    }
}

#[test]
fn a_limit_in_bytes_changes_no_bit() {
    assert_same_bits_under_any_limit::<Mlp>();
    assert_same_bits_under_any_limit::<ConvNet>();
    assert_same_bits_under_any_limit::<Gpt>();
}

/// Keeps the text of all events.
#[derive(Clone, Default)]
struct Log {
    lines: Arc<Mutex<Vec<String>>>,
    next_id: Arc<AtomicU64>,
}

impl Subscriber for Log {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, attributes: &Attributes<'_>) -> Id {
        let mut line = Line(format!("span {}", attributes.metadata().name()));
        attributes.record(&mut line);
        self.lines.lock().unwrap().push(line.0);
        Id::from_u64(self.next_id.fetch_add(1, Ordering::Relaxed) + 1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(format!("{} ", event.metadata().level()));
        event.record(&mut line);
        self.lines.lock().unwrap().push(line.0);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0 += &match field.name() {
            "message" => format!("{value:?}"),
            name => format!(" {name}={value:?}"),
        };
    }
}

#[test]
fn a_collector_of_tracing_sees_every_wait_and_step_of_a_unit_as_a_span() {
    let log = Log::default();
    let lines = log.lines.clone();
    launch(&config(Stage::Parameters, 2), move |rank| {
        let train = || {
            let mut model = start::<Mlp>(&rank)?;
            let mut optim = rank.optimizer(Optimizer::Sgd.build())?;
            for batch in 0..2 {
                let gradients = model.backward(model.loss(batch, share(&rank), &rank.device()))?;
                optim.step(0.01, &mut model, gradients)?;
            }
            let names = model.plan().units().iter().map(|unit| unit.name.clone());
            Ok::<Vec<_>, fsdp_burn::Error>(names.collect())
        };
        // One collector alone would be asked on whichever thread comes to a span first, and there may be none.
        let own = if rank.is_main() { log.clone() } else { Log::default() };
        tracing::subscriber::with_default(own, train)
    })
    .unwrap()
    .swap_remove(0)
    .into_iter()
    .for_each(|unit| {
        let lines = lines.lock().unwrap();
        let count = |line: String| lines.iter().filter(|other| **other == line).count();
        assert_eq!(count(format!("span step unit={unit:?}")), 2, "{unit}: {lines:?}");
        for kind in ["gather", "reduce"] {
            assert!(count(format!("span wait kind={kind:?} unit={unit:?}")) >= 2, "{kind} of {unit}: {lines:?}");
        }
    });
}

/// What rank 0 logs, with this in it, while a model is sharded.
fn logged(config: &Config, what: &str) -> Vec<String> {
    let log = Log::default();
    let lines = log.lines.clone();
    launch(config, move |rank| {
        let shard = || start::<Mlp>(&rank).map(|_| ());
        if rank.is_main() { tracing::subscriber::with_default(log.clone(), shard) } else { shard() }
    })
    .unwrap();
    let lines = lines.lock().unwrap();
    lines.iter().filter(|line| line.contains(what)).cloned().collect()
}

#[test]
fn the_element_types_of_everything_are_told_at_the_start() {
    let mut half = config(Stage::Parameters, 2);
    (half.precision.parameters, half.precision.output) = (Dtype::F16, Dtype::Bf16);
    let expected = "INFO parameters and optimizer state in f32, computed in f16, gradients sent in f32, outputs cast to bf16, \
                    a dynamic loss scale";
    assert_eq!(logged(&half, "optimizer state"), [expected]);
}

#[test]
fn a_stage_that_has_no_rank_to_shard_over_says_so() {
    let replicas = Some(Mesh::new([(Axis::Replicate, 2), (Axis::Shard, 1)]).unwrap());
    let logged = |config: &Config| logged(config, "nothing is sharded");
    let expected = "INFO the mesh has one rank along `shard`, so nothing is sharded: stage 2 behaves like stage 0";
    assert_eq!(logged(&Config { mesh: replicas.clone(), ..config(Stage::Gradients, 2) }), [expected]);
    assert_eq!(logged(&config(Stage::Gradients, 1)), [expected]);
    assert!(logged(&config(Stage::Gradients, 2)).is_empty());
    assert!(logged(&Config { mesh: replicas, ..config(Stage::Ddp, 2) }).is_empty());
}
