//! The figures of the chapter on what is inside: states and their transitions, found by trying them; a step over time, from the
//! simulator; and what ranks agree on, from schedules that are told different things.

use std::collections::BTreeSet;
use std::f64::consts::TAU;

use fsdp_core::{
    Action, Job, Machine, ModelShape, Network, PrefetchDepth, Program, Schedule, SimOptions, SpanKind, Speed, Stage,
    TraceStream, UnitIndex, UnitState, UnitTraits, Uses, simulate,
};

use crate::output::assert_shown;
use crate::svg::{Anchor, Svg};

fn unit() -> UnitTraits {
    UnitTraits { gathered_on_use: true, trainable: true, gathered_bytes: 4096, ..UnitTraits::default() }
}

/// Every transition of a unit's state: from, call, to. The calls are tried in every state that is reached.
fn transitions() -> Vec<(UnitState, &'static str, UnitState)> {
    type Call = fn(&mut UnitState) -> Result<(), fsdp_core::WrongOrder>;
    let calls: [(&str, Call); 4] = [
        ("gather", UnitState::gather),
        ("arrived", UnitState::arrived),
        ("reshard", UnitState::reshard),
        ("free", UnitState::free),
    ];
    let source = include_str!("../../fsdp-core/src/unit_state.rs");
    assert_eq!(source.matches("    pub fn ").count(), calls.len(), "a call of `UnitState` is not tried");
    let mut reached = vec![UnitState::Sharded];
    let mut found = Vec::new();
    let mut next = 0;
    while let Some(&from) = reached.get(next) {
        for (name, call) in calls {
            let mut to = from;
            if call(&mut to).is_ok() {
                found.push((from, name, to));
                if !reached.contains(&to) {
                    reached.push(to);
                }
            }
        }
        next += 1;
    }
    found
}

#[test]
fn the_diagram_of_a_units_states_is_what_the_code_allows() {
    let transitions = transitions();
    let mut states: Vec<UnitState> = Vec::new();
    for (from, _, to) in &transitions {
        for state in [from, to] {
            if !states.contains(state) {
                states.push(*state);
            }
        }
    }
    let mut svg = Svg::new(760.0, 250.0, "The states of a unit and the calls that lead from one to another");
    let x = |state: &UnitState| 75.0 + 203.0 * states.iter().position(|known| known == state).unwrap() as f64;
    let y = 76.0;
    for state in &states {
        svg.node([x(state), y], 110.0, &format!("{state:?}"));
    }
    for (from, call, to) in &transitions {
        let (start, end) = (x(from), x(to));
        if start < end {
            svg.arrow([start + 57.0, y], [end - 57.0, y]);
            svg.text([(start + end) / 2.0, y - 8.0], Anchor::Middle, "fig-label", call);
        } else if *to == UnitState::Sharded {
            // Back to the beginning, below; the longer way the lower.
            let steps = (start - end) / 203.0;
            svg.bent_arrow([start - 8.0, y + 18.0], [end + 24.0 * (2.0 - steps), y + 18.0], 40.0 * steps, call);
        } else {
            svg.bent_arrow([start, y - 18.0], [end, y - 18.0], -30.0, call);
        }
    }
    assert_shown("listings/output/guides/unit-states.svg", &svg.finish());
}

/// The unit of an action and its name.
fn name(action: Action) -> Option<(UnitIndex, &'static str)> {
    match action {
        Action::Gather(unit) => Some((unit, "Gather")),
        Action::WaitGather(unit) => Some((unit, "WaitGather")),
        Action::Free(unit) => Some((unit, "Free")),
        Action::Reduce(unit) => Some((unit, "Reduce")),
        Action::WaitReduce(unit) => Some((unit, "WaitReduce")),
        Action::Step(unit) => Some((unit, "Step")),
        Action::Publish(unit) => Some((unit, "Publish")),
        Action::WaitPublish(unit) => Some((unit, "WaitPublish")),
        _ => None,
    }
}

/// Which action of a unit follows which, in every schedule that is tried: depths, kept units, accumulation.
fn successions(stage: Stage) -> BTreeSet<(&'static str, &'static str)> {
    let mut found = BTreeSet::new();
    for depth in 0..4 {
        for num_units in 1..6 {
            for num_micro_batches in 1..3 {
                let rules = fsdp_core::StepRules {
                    stage,
                    depth: PrefetchDepth { forward: depth, backward: depth, max_bytes: None },
                    num_micro_batches,
                    accumulate: fsdp_core::Accumulate::Reduced,
                    needs_norm: false,
                    reshards: false,
                };
                let traits = UnitTraits { gathered_on_use: stage == Stage::Parameters, ..unit() };
                let program = Program::steady(&rules, &vec![traits; num_units], &Uses::in_order(num_units));
                let mut last = vec![None; num_units];
                // Twice, since a step gathers for the one that follows it.
                for (unit, action) in program.actions().chain(program.actions()).filter_map(name) {
                    found.extend(last[unit].replace(action).map(|before| (before, action)));
                }
            }
        }
    }
    found
}

#[test]
fn the_diagram_of_a_units_actions_is_what_schedules_do() {
    for (stage, file) in [(Stage::Parameters, "unit-life-3.svg"), (Stage::Gradients, "unit-life-2.svg")] {
        let found = successions(stage);
        let mut actions: Vec<&str> =
            ["Gather", "WaitGather", "Free", "Reduce", "WaitReduce", "Step", "Publish", "WaitPublish"].into();
        actions.retain(|action| found.iter().any(|(from, to)| from == action || to == action));
        let title = format!("What happens to a unit at stage {}, and what may come next", stage.number());
        let mut svg = Svg::new(640.0, 330.0, &title);
        let place = |action: &str| {
            let index = actions.iter().position(|known| *known == action).unwrap();
            let angle = TAU * index as f64 / actions.len() as f64 - TAU / 4.0;
            [320.0 + 220.0 * angle.cos(), 165.0 + 125.0 * angle.sin()]
        };
        for action in &actions {
            svg.node(place(action), 112.0, action);
        }
        for (from, to) in &found {
            let ([x1, y1], [x2, y2]) = (place(from), place(to));
            // From the border of one box to the border of the other.
            let (dx, dy) = (x2 - x1, y2 - y1);
            let reach = (58.0 / dx.abs().max(1e-9)).min(19.0 / dy.abs().max(1e-9));
            let (cut_x, cut_y) = (dx * reach, dy * reach);
            let bend = if found.contains(&(*to, *from)) { 14.0 } else { 0.0 };
            svg.bent_arrow([x1 + cut_x, y1 + cut_y], [x2 - cut_x, y2 - cut_y], bend, "");
        }
        assert_shown(&format!("listings/output/guides/{file}"), &svg.finish());
    }
}

fn job(depth: usize) -> Job {
    // A slow link, so that communication can be seen: 20 µs and 25 GB/s, against 100 TFLOP/s.
    let link = fsdp_core::Link { alpha_s: 20e-6, beta_s_per_byte: 1.0 / 25e9 };
    let speed = Speed::Rate { flops_per_s: 100e12, memory_bytes_per_s: 0.2e12 };
    let machine = Machine { network: Network::one_node(link).into(), speed };
    let job = Job::new(ModelShape::even(400_000_000, 4), 8, machine);
    let depth = PrefetchDepth { forward: depth, backward: depth, max_bytes: None };
    Job { depth, num_tokens: 16384, needs_norm: false, ..job }
}

/// The style of a span's bar, as in the figure of a recorded trace.
fn style(kind: SpanKind) -> &'static str {
    match kind {
        SpanKind::Forward => "fig-parameters",
        SpanKind::Backward => "fig-computes",
        SpanKind::Step => "fig-optimizer",
        SpanKind::Gather | SpanKind::Publish => "fig-gathered",
        SpanKind::Reduce => "fig-gradients",
        _ => "fig-waits",
    }
}

#[test]
fn the_picture_of_a_step_over_time_is_the_simulators() {
    let rows = [
        ("stage 3, prefetch 0", Stage::Parameters, 0),
        ("stage 3, prefetch 1", Stage::Parameters, 1),
        ("stage 2", Stage::Gradients, 1),
    ];
    let reports = rows.map(|(_, stage, depth)| {
        let options = SimOptions { traced: vec![0], ..SimOptions::default() };
        simulate(&job(depth).workload(stage), &options)
    });
    let longest = reports.iter().map(|report| report.step_s).fold(0.0, f64::max);
    let mut svg = Svg::new(860.0, 380.0, "One step of rank 0: what computes, what is gathered, what is reduced");
    let scale = 770.0 / longest;
    for (index, ((title, ..), report)) in rows.iter().zip(&reports).enumerate() {
        let top = 8.0 + 120.0 * index as f64;
        let stands = 100.0 * report.exposed_s / report.step_s;
        svg.text(
            [70.0, top + 13.0],
            Anchor::Start,
            "fig-label",
            &format!("{title}: {:.1} ms, of which {stands:.0}% stands still", 1e3 * report.step_s),
        );
        for (row, stream) in [TraceStream::Compute, TraceStream::Gather, TraceStream::Reduce].into_iter().enumerate() {
            let y = top + 20.0 + 28.0 * row as f64;
            svg.text([62.0, y + 15.0], Anchor::End, "fig-small", stream.name());
            svg.rect([70.0, y - 1.0], [770.0, 24.0], "fig-empty", "");
            for span in report.spans.iter().filter(|span| span.stream == stream && span.end_s > 0.0) {
                let (start, end) = (span.start_s.max(0.0), span.end_s.min(report.step_s));
                let unit = span.unit.map_or(String::new(), |unit| unit.to_string());
                let label = if span.kind == SpanKind::Wait { String::new() } else { unit.clone() };
                let full = format!("{} {unit}", span.kind.name());
                let size = [(end - start) * scale, 22.0];
                if size[0] > 0.05 {
                    svg.bar([70.0 + start * scale, y], size, style(span.kind), &label, &full);
                }
            }
        }
    }
    let kinds =
        [SpanKind::Forward, SpanKind::Backward, SpanKind::Step, SpanKind::Gather, SpanKind::Reduce, SpanKind::Wait];
    svg.legend([70.0, 372.0], &kinds.map(|kind| (style(kind), kind.name())));
    assert_shown("listings/output/guides/step-over-time.svg", &svg.finish());
}

/// Reductions and waits of a backward in which gradients appear in `order`.
fn backward(schedule: &mut Schedule, order: &[UnitIndex]) -> Vec<String> {
    let named = |actions: Vec<Action>| {
        let shown = actions.into_iter().filter_map(name).filter(|(_, action)| action.contains("Reduce"));
        shown.map(|(unit, action)| format!("{action}({unit})")).collect::<Vec<_>>().join(" ")
    };
    for unit in 0..3 {
        schedule.forward(unit);
        schedule.gradient_expected(unit);
    }
    if schedule.needs_reduce_order() {
        // What rank 0 expects; all others are told.
        schedule.set_reduce_order(vec![2, 1, 0]);
    }
    schedule.begin_backward(true);
    let mut lines: Vec<String> = Vec::new();
    for &unit in order {
        let actions = [schedule.backward(unit), schedule.gradient(unit)].concat();
        lines.push(format!("gradients of {unit}    {}", named(actions)));
    }
    lines.push(format!("backward ends     {}", named(schedule.end_backward())));
    schedule.step();
    lines
}

#[test]
fn ranks_whose_gradients_appear_in_other_orders_reduce_in_one() {
    let depth = PrefetchDepth { forward: 1, backward: 1, max_bytes: None };
    let run = |order: &[UnitIndex]| {
        let mut schedule = Schedule::new(Stage::Parameters, &[unit(); 3], depth);
        backward(&mut schedule, order)
    };
    let (rank_0, rank_1, rank_2) = (run(&[2, 1, 0]), run(&[1, 2, 0]), run(&[2, 0]));
    let reduced = |lines: &[String]| {
        let words = lines.iter().flat_map(|line| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>());
        words.filter(|word| word.starts_with("Reduce(")).collect::<Vec<_>>()
    };
    assert_eq!(reduced(&rank_0), ["Reduce(2)", "Reduce(1)", "Reduce(0)"]);
    assert_eq!(reduced(&rank_1), reduced(&rank_0));
    assert_eq!(reduced(&rank_2), reduced(&rank_0));
    let mut text = String::new();
    for (title, lines) in [
        ("rank 0: gradients as expected", rank_0),
        ("rank 1: those of unit 1 before those of unit 2", rank_1),
        ("rank 2: unit 1 gets none", rank_2),
    ] {
        text += &format!("{title}\n");
        for line in lines {
            text += &format!("    {}\n", line.trim_end());
        }
    }
    assert_shown("listings/output/guides/reduce-order.txt", &text);
}

#[test]
fn at_most_two_units_of_whole_gradients_exist() {
    // The most that are in flight at once, in the actions of a step of twelve units.
    let rules = fsdp_core::StepRules {
        stage: Stage::Parameters,
        depth: PrefetchDepth { forward: 1, backward: 1, max_bytes: None },
        num_micro_batches: 1,
        accumulate: fsdp_core::Accumulate::Reduced,
        needs_norm: false,
        reshards: false,
    };
    let program = Program::steady(&rules, &[unit(); 12], &Uses::in_order(12));
    let (mut in_flight, mut to_come, mut most) = (0, 12, 0);
    for action in program.actions() {
        match action {
            Action::Reduce(_) => (in_flight, to_come) = (in_flight + 1, to_come - 1),
            Action::WaitReduce(_) => in_flight -= 1,
            _ => {}
        }
        // Those that are being reduced, and the one that backward works on.
        most = most.max(in_flight + usize::from(to_come > 0));
    }
    assert_eq!(most, 2);
}
