//! The simulator: that it runs what the engine runs, and how much work that is.

#![allow(clippy::unwrap_used, reason = "all of this is a test, its helpers too")]

use fsdp_core::Action::{self, Free, Gather, Reduce, Step, WaitGather, WaitReduce};
use fsdp_core::{
    Accumulate, Axis, Instruction, Job, Link, Machine, Mesh, ModelShape, NamedLink, Network, OffloadConfig,
    PrefetchDepth, Program, Recorded, Schedule, SimOptions, Speed, Stage, StepRules, TierRate, TierRates, TierShares,
    TraceStream, Transformer, UnitTiers, UnitTraits, Uses, simulate, timeline,
};
use proptest::prelude::*;

fn machine() -> Machine {
    let link = |name| NamedLink::find(name).unwrap().link;
    let network = Network { in_node: link("nvlink4"), between: link("ib-ndr"), ranks_per_node: 8 };
    Machine { network: network.into(), speed: Speed::Rate { flops_per_s: 4e14, memory_bytes_per_s: 3e12 } }
}

/// Tells a schedule what an engine tells it in one step, and collects the answers.
fn engine_step(schedule: &mut Schedule, units: &[UnitTraits], rules: &StepRules, uses: &[usize]) -> Vec<Action> {
    let mut actions = Vec::new();
    for micro_batch in 0..rules.num_micro_batches {
        for &unit in uses {
            actions.extend(schedule.forward(unit));
            if units[unit].trainable {
                schedule.gradient_expected(unit);
            }
        }
        if schedule.needs_reduce_order() {
            let (reduces, first) = (schedule.expected_reduce_order(), schedule.first_uses().to_vec());
            schedule.set_reduce_order(reduces);
            schedule.set_first_uses(first);
        }
        let is_last = micro_batch + 1 == rules.num_micro_batches;
        actions.extend(schedule.begin_backward(rules.accumulate == Accumulate::Reduced || is_last));
        for &unit in uses.iter().rev() {
            actions.extend(schedule.backward(unit));
            actions.extend(schedule.gradient(unit));
        }
        actions.extend(schedule.end_backward());
    }
    actions.extend(schedule.reduce_rest());
    if rules.needs_norm {
        actions.extend(schedule.finish_reduces());
    }
    actions.extend(schedule.step());
    actions
}

fn any_unit() -> impl Strategy<Value = UnitTraits> {
    (any::<[bool; 4]>(), proptest::option::of(0..3usize), 1..5usize).prop_map(
        |([gathered_on_use, keep, trainable, follows], prefetch, size)| UnitTraits {
            gathered_on_use,
            keep,
            trainable,
            prefetch,
            gathered_bytes: if gathered_on_use { 100 * size } else { 0 },
            gradient_bytes: 100 * size,
            sent_bytes: 200 * size,
            follows,
        },
    )
}

fn any_tiers() -> impl Strategy<Value = UnitTiers> {
    (any::<bool>(), any::<bool>(), any::<bool>()).prop_map(|(blocks, gradients, state)| UnitTiers {
        blocks,
        gradients,
        state,
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    /// With each unit used once, and with uses that come again: the simulated actions are the schedule's own.
    #[test]
    fn the_simulated_actions_are_those_that_a_schedule_answers_an_engine_with(
        (units, tiers) in proptest::collection::vec((any_unit(), any_tiers()), 1..7).prop_map(|both| -> (Vec<_>, Vec<_>) {
            both.into_iter().unzip()
        }),
        has_tiers in any::<bool>(),
        stage in 0..4usize,
        (forward, backward) in (0..4usize, 0..4usize),
        max_bytes in proptest::option::of(1..1500usize),
        num_micro_batches in 1..4usize,
        (is_local, needs_norm, reshards) in (any::<bool>(), any::<bool>(), any::<bool>()),
    ) {
        let rules = StepRules {
            stage: Stage::ALL[stage],
            depth: PrefetchDepth { forward, backward, max_bytes },
            num_micro_batches,
            accumulate: if is_local { Accumulate::Local } else { Accumulate::Reduced },
            needs_norm,
            reshards,
        };
        let uses: Vec<usize> = (0..units.len()).collect();
        let mut schedule = Schedule::new(rules.stage, &units, rules.depth);
        schedule.set_reshards(reshards);
        let tiers = if has_tiers { tiers } else { vec![UnitTiers::default(); units.len()] };
        schedule.set_tiers(&tiers);
        let steps: Vec<_> = (0..5).map(|_| engine_step(&mut schedule, &units, &rules, &uses)).collect();
        let program = Program::with_tiers(&rules, &units, &tiers, &Uses::in_order(units.len()));
        let simulated: Vec<_> = program.actions().collect();
        prop_assert_eq!(&simulated, &steps[2]);
        prop_assert_eq!(&simulated, &steps[4], "it is steady");
    }
}

#[test]
fn the_order_of_a_step_with_two_units_is_the_one_that_is_drawn() {
    let unit = UnitTraits { gathered_on_use: true, trainable: true, gathered_bytes: 8, ..UnitTraits::default() };
    let rules = StepRules {
        stage: Stage::Parameters,
        depth: PrefetchDepth { forward: 1, backward: 1, max_bytes: None },
        num_micro_batches: 1,
        accumulate: Accumulate::Reduced,
        needs_norm: true,
        reshards: false,
    };
    let program = Program::steady(&rules, &[unit; 2], &Uses::in_order(2));
    let act = Instruction::Act;
    assert_eq!(
        program.instructions,
        [
            Instruction::BeginForward,
            act(WaitGather(0)),
            Instruction::Forward(0),
            act(Free(0)),
            act(WaitGather(1)),
            Instruction::Forward(1),
            Instruction::BeginBackward,
            act(Gather(0)),
            Instruction::Backward(1),
            act(Free(1)),
            act(Reduce(1)),
            act(WaitGather(0)),
            Instruction::Backward(0),
            act(Free(0)),
            act(Reduce(0)),
            Instruction::BeginStep,
            act(WaitReduce(1)),
            act(WaitReduce(0)),
            Instruction::Norm,
            act(Step(0)),
            act(Gather(0)),
            act(Step(1)),
            act(Gather(1)),
        ]
    );
}

/// Writes simulated steps as a trace.
fn recorded_json(job: &Job, stage: Stage) -> String {
    let workload = job.workload(stage);
    let options = SimOptions { num_steps: 3, traced: vec![0, 3], ..SimOptions::default() };
    let mut json = Vec::new();
    timeline(&workload, &simulate(&workload, &options)).write_to(&mut json).unwrap();
    String::from_utf8(json).unwrap()
}

/// The same, read as a trace that an engine has recorded.
fn recorded(job: &Job, stage: Stage) -> Recorded {
    Recorded::from_json(&recorded_json(job, stage), "trace.json").unwrap()
}

#[test]
fn a_trace_that_is_replayed_has_its_own_order_and_length_at_every_stage() {
    let transformer = Transformer { layers: 4, width: 256, heads: 4, sequence: 128, vocabulary: 512, recompute: false };
    for stage in Stage::ALL {
        // Without the norm, which is no span of a unit.
        let job = Job { needs_norm: false, ..Job::new(transformer.shape(), 4, machine()) };
        let recorded = recorded(&job, stage);
        assert_eq!((recorded.ranks(), recorded.steps()), (vec![0, 3], vec![0, 1, 2]));
        let workload = recorded.workload(&job, stage, 3, 1).unwrap();
        let report = simulate(&workload, &SimOptions { traced: vec![0], ..SimOptions::default() });
        for stream in TraceStream::ALL {
            let order = recorded.order(3, 1, stream).unwrap();
            assert_eq!(report.order(&workload, 0, stream), order, "{stage}, {}", stream.name());
            // Nothing is offloaded, and stage 0 gathers nothing.
            let is_empty = stream == TraceStream::Tier || stream == TraceStream::Gather && stage == Stage::Ddp;
            assert_eq!(order.is_empty(), is_empty, "{stage}, {}", stream.name());
        }
        let length = recorded.step_s(3, 1).unwrap();
        assert!((report.step_s / length - 1.0).abs() < 0.02, "{stage}: {} and {length}", report.step_s);
    }
}

#[test]
fn a_trace_in_another_order_is_told_apart() {
    let job = Job::new(ModelShape::even(8_000_000, 8), 4, machine());
    for (kind, stream) in [("gather", TraceStream::Gather), ("reduce", TraceStream::Reduce)] {
        let json = recorded_json(&job, Stage::Parameters);
        let [three, four] = [3, 4].map(|unit| format!("\"{kind} units.{unit}\""));
        let swapped = json.replace(&three, "\"swap\"").replace(&four, &three).replace("\"swap\"", &four);
        let recorded = Recorded::from_json(&swapped, "trace.json").unwrap();
        let workload = recorded.workload(&job, Stage::Parameters, 0, 1).unwrap();
        let report = simulate(&workload, &SimOptions { traced: vec![0], ..SimOptions::default() });
        assert_ne!(report.order(&workload, 0, stream), recorded.order(0, 1, stream).unwrap(), "{kind}");
    }
}

#[test]
fn a_trace_that_cannot_be_replayed_says_why() {
    let job = Job::new(ModelShape::even(8_000_000, 4), 4, machine());
    let recorded = recorded(&job, Stage::Parameters);
    let message = |error: fsdp_core::ReplayError| error.to_string();
    assert_eq!(
        message(recorded.workload(&job, Stage::Parameters, 1, 7).unwrap_err()),
        "trace.json: there is no step 7 of rank 1; it has steps [0, 1, 2] of ranks [0, 3]"
    );
    let other = Job::new(ModelShape::even(8_000_000, 2), 4, machine());
    let error = message(recorded.workload(&other, Stage::Parameters, 0, 1).unwrap_err());
    assert!(error.starts_with("trace.json: the trace names unit `units."), "{error}");
    assert!(error.ends_with("which the model does not have; its units are [\"units.0\", \"units.1\"]"), "{error}");
    let foreign = r#"{"traceEvents": [{"name": "idle", "ph": "X", "pid": 0, "tid": 0, "ts": 0, "dur": 1}]}"#;
    let error = message(Recorded::from_json(foreign, "other.json").unwrap_err());
    assert!(
        error.starts_with("other.json: not a trace of this project: the span `idle` is of no known kind"),
        "{error}"
    );
}

/// Clocks that are moved in one step of the job.
fn updates(job: &Job, options: &SimOptions) -> u64 {
    simulate(&job.workload(Stage::Parameters), options).num_updates
}

#[test]
fn ranks_that_are_alike_cost_no_more_than_one() {
    let job = |ranks: usize| Job::new(ModelShape::even(10_000_000_000, 100), ranks, machine());
    let [few, many] = [8, 16_384].map(|ranks| updates(&job(ranks), &SimOptions::default()));
    assert_eq!(few, many);
    assert!(many < 4000, "about twelve for each of 100 units, in two steps: {many}");
}

#[test]
fn the_work_of_ranks_that_all_differ_grows_with_their_number_and_that_of_units() {
    let job = |ranks: usize, units: usize| Job::new(ModelShape::even(10_000_000_000, units), ranks, machine());
    let jitter = SimOptions { jitter: 0.05, ..SimOptions::default() };
    let base = updates(&job(64, 25), &jitter);
    assert!(updates(&job(256, 25), &jitter) <= 4 * base);
    assert!(10 * updates(&job(64, 100), &jitter) <= 41 * base, "four times, and the ends of a step count once");
    // So 16,384 ranks of 100 units move at most so many clocks, in two steps.
    assert!(256 * 4 * base < 70_000_000, "{base}");
}

#[test]
fn gathers_and_reductions_send_no_more_than_their_link_can() {
    let run = |link: Link, flops_per_s: f64, depth: usize| {
        let speed = Speed::Rate { flops_per_s, memory_bytes_per_s: f64::INFINITY };
        let machine = Machine { network: Network::one_node(link).into(), speed };
        let depth = PrefetchDepth { forward: depth, backward: depth, max_bytes: None };
        let job = Job { depth, needs_norm: false, ..Job::new(ModelShape::even(80_000_000, 10), 8, machine) };
        simulate(&job.workload(Stage::Parameters), &SimOptions { traced: vec![0], ..SimOptions::default() })
    };
    for (depth, flops_per_s) in [(0, 1e13), (1, 1e13), (1, 1e15), (2, 1e15), (2, 1e18)] {
        let report = run(Link { alpha_s: 0.0, beta_s_per_byte: 1e-10 }, flops_per_s, depth);
        let sending_s = 1e-10 * report.sent_bytes as f64;
        let what = format!("depth {depth}, {flops_per_s} flops: {} and {sending_s}", report.step_s);
        assert!(report.step_s > 0.9999 * sending_s, "{what}");
        assert!(report.step_s < sending_s + report.compute_s + 1e-9, "{what}");
    }
    // Latency fills no link.
    let report = run(Link { alpha_s: 1e-3, beta_s_per_byte: 0.0 }, 1e13, 1);
    let moved = report.spans.iter().filter(|span| span.stream != TraceStream::Compute);
    let longest_s = moved.map(|span| span.end_s - span.start_s).fold(0.0, f64::max);
    assert!((longest_s - 7e-3).abs() < 1e-9, "{longest_s}");
}

#[test]
fn a_straggler_is_waited_for_at_the_place_where_it_meets_the_others() {
    let network = Network::one_node(Link { alpha_s: 0.0, beta_s_per_byte: 0.0 });
    let speed = Speed::Rate { flops_per_s: 1e12, memory_bytes_per_s: f64::INFINITY };
    let mesh = Mesh::new([(Axis::Replicate, 2), (Axis::Shard, 4)]).unwrap();
    let machine = Machine { network: network.into(), speed };
    let job = Job { mesh, ..Job::new(ModelShape::even(8_000_000, 8), 8, machine) };
    let workload = job.workload(Stage::Parameters);
    let alike = simulate(&workload, &SimOptions::default());
    assert!(alike.exposed_s < 1e-12 && (alike.step_s / alike.compute_s - 1.0).abs() < 1e-9, "nothing to wait for");
    let slow = simulate(&workload, &SimOptions { stragglers: vec![(5, 2.0)], ..SimOptions::default() });
    assert_eq!(slow.num_classes, 4);
    assert!(
        (slow.step_s / alike.step_s - 2.0).abs() < 0.01,
        "all end with the slowest: {} {}",
        slow.step_s,
        alike.step_s
    );
    let mean = alike.compute_s * 9.0 / 8.0;
    assert!((slow.compute_s / mean - 1.0).abs() < 1e-9);
    assert!((slow.exposed_s / (slow.step_s - mean) - 1.0).abs() < 0.01, "the others stand still");
}

#[test]
fn a_copy_in_each_node_spares_what_is_slow_between_nodes() {
    let link = |name| NamedLink::find(name).unwrap().link;
    let network = Network { in_node: link("nvlink4"), between: link("eth-10g"), ranks_per_node: 8 };
    let machine = Machine { network: network.into(), ..machine() };
    let flat = Job::new(ModelShape::even(7_000_000_000, 32), 64, machine);
    let mesh = Mesh::new([(Axis::Replicate, 8), (Axis::Shard, 8)]).unwrap();
    let hybrid = Job { mesh, ..flat.clone() };
    let communicates = |job: &Job| simulate(&job.workload(Stage::Parameters), &SimOptions::default()).communication_s;
    assert!(communicates(&hybrid) < communicates(&flat));
}

/// Eight units on four ranks, everything on disks of so many bytes per second, nothing else taking time but computation.
fn offloaded(bytes_per_s: f64) -> Job {
    let network = Network::one_node(Link { alpha_s: 0.0, beta_s_per_byte: 0.0 });
    let rate = TierRate { read_bytes_per_s: bytes_per_s, write_bytes_per_s: bytes_per_s };
    let machine =
        Machine { network: network.into(), speed: Speed::Rate { flops_per_s: 1e12, memory_bytes_per_s: 1e11 } };
    let tiers = TierRates { host: None, nvme: Some(rate) };
    let offload = OffloadConfig {
        optimizer: TierShares::NVME,
        gradients: TierShares::NVME,
        parameters: TierShares::NVME,
        ..OffloadConfig::default()
    };
    Job { offload, tiers, ..Job::new(ModelShape::even(8_000_000, 8), 4, machine) }
}

#[test]
fn a_step_moves_what_lies_in_tiers_and_no_byte_more() {
    let moved = |job: &Job, stage| {
        let moved = simulate(&job.workload(stage), &SimOptions { num_steps: 2, ..SimOptions::default() }).moved;
        assert_eq!(moved.host, Default::default());
        (moved.nvme.read_bytes, moved.nvme.written_bytes)
    };
    // A rank has a quarter, of 2,000,000 parameters: 4 bytes of each in blocks and in gradients, 8 in state.
    let (block, state) = (4 * 2_000_000, 8 * 2_000_000);
    let job = Job { needs_norm: false, ..offloaded(1e9) };
    // Blocks are read for each gather and for the step; a gather of the next forward takes the updated ones from memory. Of
    // gradients those that are waited for in backward lie on the disk: all but those of the two units that are reduced last.
    let unit = block / 8;
    let (read, written) = moved(&job, Stage::Parameters);
    assert_eq!(written, block + state + block - 2 * unit);
    let gathers = 8 + 7 - 2; // once in forward, again in backward but for the last; two are gathered by the step
    assert_eq!(read, gathers * unit + block + state + block - 2 * unit);
    // With a norm, every gradient is written, and read once more.
    let with_norm = Job { needs_norm: true, ..job.clone() };
    let (more_read, more_written) = moved(&with_norm, Stage::Parameters);
    assert_eq!((more_read - read, more_written - written), (block + 2 * unit, 2 * unit));
    // Below stage 3 there are no blocks of parameters.
    assert_eq!(moved(&job, Stage::Gradients), (state + block - 2 * unit, state + block - 2 * unit));
}

#[test]
fn a_fast_disk_is_hidden_and_a_slow_one_is_waited_for() {
    let report = |bytes_per_s: f64| {
        simulate(
            &offloaded(bytes_per_s).workload(Stage::Parameters),
            &SimOptions { num_steps: 3, ..SimOptions::default() },
        )
    };
    let (fast, slow) = (report(1e12), report(1e8));
    assert!(fast.tier_wait_s < 0.02 * fast.step_s, "{fast:?}");
    // One queue for all that is moved.
    let moves_s = slow.moved.total_bytes() as f64 / 1e8;
    assert!((slow.step_s / moves_s - 1.0).abs() < 0.05, "{} s of {moves_s} s of moving", slow.step_s);
    let sum = slow.compute_s + slow.exposed_s + slow.tier_wait_s;
    assert!((slow.step_s / sum - 1.0).abs() < 1e-9, "computing and waiting are all of a step");
    assert_eq!(fast.moved, slow.moved);
}

#[test]
fn a_trace_with_offload_is_replayed_in_its_own_order() {
    for stage in Stage::ALL {
        let job = offloaded(1e9);
        let recorded = recorded(&job, stage);
        let workload = recorded.workload(&job, stage, 3, 1).unwrap();
        let report = simulate(&workload, &SimOptions { traced: vec![0], ..SimOptions::default() });
        for stream in TraceStream::ALL {
            let order = recorded.order(3, 1, stream).unwrap();
            assert_eq!(report.order(&workload, 0, stream), order, "{stage}, {}", stream.name());
        }
        assert!(!recorded.order(3, 1, TraceStream::Tier).unwrap().is_empty());
    }
}
