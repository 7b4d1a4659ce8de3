//! The figures of the tutorial about time: what the schedule decides, what a trace has recorded, what a line fits.

use fsdp_core::{Action, PrefetchDepth, Schedule, Stage, UnitTiers, UnitTraits};

use crate::figures::{assert_figure, numbers, printed};
use crate::output::assert_shown;
use crate::svg::{Anchor, Svg};

const NUM_UNITS: usize = 4;
const UNIT: UnitTraits = UnitTraits {
    gathered_on_use: true,
    keep: false,
    trainable: true,
    prefetch: None,
    gathered_bytes: 0,
    gradient_bytes: 0,
    sent_bytes: 0,
    follows: false,
};

/// What the model does, and the actions that follow.
struct Event {
    name: String,
    unit: Option<usize>,
    actions: Vec<Action>,
}

/// One step of four units, in the order in which things happen.
fn step(schedule: &mut Schedule) -> Vec<Event> {
    let event = |name: String, unit, actions| Event { name, unit, actions };
    let mut events = Vec::new();
    for unit in 0..NUM_UNITS {
        events.push(event(format!("F{unit}"), Some(unit), schedule.forward(unit)));
        schedule.gradient_expected(unit);
    }
    if schedule.needs_reduce_order() {
        schedule.set_reduce_order(schedule.expected_reduce_order());
        schedule.set_first_uses(schedule.first_uses().to_vec());
    }
    schedule.begin_backward(true);
    for unit in (0..NUM_UNITS).rev() {
        let mut actions = schedule.backward(unit);
        events.push(event(format!("B{unit}"), Some(unit), std::mem::take(&mut actions)));
        // The gradients are there when the unit has computed: what follows belongs to the next event.
        let after = schedule.gradient(unit);
        events.push(event(String::new(), None, after));
    }
    let mut last = schedule.end_backward();
    last.extend(schedule.step());
    events.push(event("step".to_owned(), None, last));
    events
}

#[derive(Clone, Copy, PartialEq)]
enum Held {
    No,
    OnItsWay,
    Whole,
}

#[test]
fn the_figure_of_what_gathers_when_is_what_the_schedule_says() {
    let depth = PrefetchDepth { forward: 1, backward: 1, max_bytes: None };
    let mut schedule = Schedule::new(Stage::Parameters, &[UNIT; NUM_UNITS], depth);
    step(&mut schedule);
    step(&mut schedule);
    let mut svg = Svg::new(640.0, 240.0, "Which of four units are gathered while each computes");
    // The step before has begun to gather what forward starts with.
    let mut held = [Held::OnItsWay, Held::OnItsWay, Held::No, Held::No];
    let mut reducing = [false; NUM_UNITS];
    let mut column = 0.0;
    for Event { name, unit, actions } in step(&mut schedule) {
        for action in actions {
            match action {
                Action::Gather(unit) => held[unit] = Held::OnItsWay,
                Action::WaitGather(unit) => held[unit] = Held::Whole,
                Action::Free(unit) => held[unit] = Held::No,
                Action::Reduce(unit) => reducing[unit] = true,
                Action::WaitReduce(unit) => reducing[unit] = false,
                _ => {}
            }
        }
        if name.is_empty() {
            continue;
        }
        let x = 70.0 + 62.0 * column;
        column += 1.0;
        svg.text([x + 28.0, 22.0], Anchor::Middle, "fig-label", &name);
        for row in 0..NUM_UNITS {
            let at = [x, 34.0 + 40.0 * row as f64];
            let (class, hint) = match held[row] {
                _ if unit == Some(row) => ("fig-computes", "computes"),
                Held::Whole => ("fig-gathered", "whole"),
                Held::OnItsWay => ("fig-coming", "being gathered"),
                Held::No => ("fig-empty", "in blocks"),
            };
            svg.rect(at, [56.0, 34.0], class, hint);
            if reducing[row] {
                svg.rect([at[0], at[1] + 26.0], [56.0, 8.0], "fig-gradients", "gradients being reduced");
            }
        }
    }
    for row in 0..NUM_UNITS {
        svg.text([60.0, 56.0 + 40.0 * row as f64], Anchor::End, "fig-label", &format!("unit {row}"));
    }
    let meaning = [
        ("fig-empty", "in blocks"),
        ("fig-coming", "being gathered"),
        ("fig-computes", "computes"),
        ("fig-gradients", "being reduced"),
    ];
    svg.legend([70.0, 222.0], &meaning);
    assert_figure("units", svg);
}

/// What one rank of four holds while each unit computes, in units' parameters: parameters, optimizer state, gathered units,
/// gradients.
fn held_over_a_step(stage: Stage) -> Vec<(String, [f64; 4])> {
    const NUM_RANKS: f64 = 4.0;
    let depth = PrefetchDepth { forward: 1, backward: 1, max_bytes: None };
    let gathered_on_use = stage == Stage::Parameters;
    let mut schedule = Schedule::new(stage, &[UnitTraits { gathered_on_use, ..UNIT }; NUM_UNITS], depth);
    step(&mut schedule);
    step(&mut schedule);
    let part = if gathered_on_use { NUM_RANKS } else { 1.0 };
    let [parameters, state] = [1.0, 2.0].map(|each| each * NUM_UNITS as f64 / part);
    let mut gathered = [gathered_on_use, gathered_on_use, false, false];
    let mut gradients = [0.0_f64; NUM_UNITS];
    let mut columns = Vec::new();
    for Event { name, unit, actions } in step(&mut schedule) {
        for action in actions {
            match action {
                Action::Gather(unit) => gathered[unit] = true,
                Action::Free(unit) => gathered[unit] = false,
                // Where nothing is cut, the sum is as large as what was added up.
                Action::WaitReduce(unit) => gradients[unit] = 1.0 / part,
                _ => {}
            }
        }
        if let (true, Some(unit)) = (name.starts_with('B'), unit) {
            gradients[unit] = 1.0;
        }
        if name.starts_with(['F', 'B']) {
            let num_gathered = gathered.iter().filter(|&&is_gathered| is_gathered).count() as f64;
            columns.push((name, [parameters, state, num_gathered, gradients.iter().sum()]));
        }
    }
    columns
}

#[test]
fn the_figure_of_what_is_held_over_a_step_is_what_the_schedule_says() {
    let panels = [("stage 0", Stage::Ddp), ("stage 3", Stage::Parameters)];
    let kinds = [
        ("fig-parameters", "parameters"),
        ("fig-optimizer", "optimizer state"),
        ("fig-gathered", "gathered units"),
        ("fig-gradients", "gradients"),
    ];
    let mut svg = Svg::new(640.0, 290.0, "What a rank of four holds over a step, at stages 0 and 3");
    let bottom = 230.0;
    for (panel, (title, stage)) in panels.into_iter().enumerate() {
        let left = 20.0 + 310.0 * panel as f64;
        svg.text([left + 144.0, 20.0], Anchor::Middle, "fig-label", title);
        let columns = held_over_a_step(stage);
        assert_eq!(columns.len(), 2 * NUM_UNITS);
        for (index, (name, held)) in columns.iter().enumerate() {
            let x = left + 36.0 * index as f64;
            let mut y = bottom;
            for ((class, kind), amount) in kinds.iter().zip(held) {
                let height = 12.0 * amount;
                if height > 0.0 {
                    y -= height;
                    svg.rect([x, y], [32.0, height], class, &format!("{kind}: {amount:.2} units' parameters"));
                }
            }
            svg.text([x + 16.0, bottom + 16.0], Anchor::Middle, "fig-small", name);
        }
    }
    svg.legend([20.0, 280.0], &kinds);
    assert_shown("listings/output/guides/held.svg", &svg.finish());
}

#[test]
fn the_figure_of_offloaded_state_is_what_the_schedule_says() {
    let mut schedule = Schedule::new(Stage::Parameters, &[UNIT; NUM_UNITS], PrefetchDepth::default());
    schedule.set_tiers(&[UnitTiers { state: true, ..UnitTiers::default() }; NUM_UNITS]);
    step(&mut schedule);
    let events = step(&mut schedule);
    let actions = &events[events.len() - 1].actions;
    let mut svg = Svg::new(640.0, 200.0, "What is read and written while each unit steps");
    let mut column = -1.0;
    let (mut reading, mut writing): (Vec<usize>, Vec<usize>) = (Vec::new(), Vec::new());
    for action in actions {
        match *action {
            Action::FetchState(unit) => reading.push(unit),
            Action::WriteBack(unit) => writing.push(unit),
            Action::Step(unit) => {
                column += 1.0;
                let x = 110.0 + 120.0 * column;
                reading.retain(|&other| other != unit);
                for (row, (units, class)) in
                    [(&reading, "fig-coming"), (&vec![unit], "fig-optimizer"), (&writing, "fig-gradients")]
                        .iter()
                        .enumerate()
                {
                    for unit in units.iter() {
                        let at = [x, 30.0 + 46.0 * row as f64];
                        svg.rect(at, [112.0, 38.0], class, "");
                        svg.text([at[0] + 56.0, at[1] + 24.0], Anchor::Middle, "fig-inside", &format!("unit {unit}"));
                    }
                }
                writing.clear();
            }
            _ => {}
        }
    }
    assert_eq!(column, 3.0);
    for (row, name) in ["reads", "steps", "writes"].iter().enumerate() {
        svg.text([100.0, 54.0 + 46.0 * row as f64], Anchor::End, "fig-label", name);
    }
    svg.text([350.0, 190.0], Anchor::Middle, "fig-small", "time");
    svg.arrow([370.0, 186.0], [430.0, 186.0]);
    assert_figure("offload", svg);
}

/// Panels of four ranks by four blocks; `filled` says how many contributions a block has, and whether it has just come;
/// `named` what is written into one with so many.
fn panels(
    svg: &mut Svg,
    top: f64,
    filled: impl Fn(usize, usize, usize) -> (usize, bool),
    named: fn(usize, usize) -> String,
) {
    for panel in 0..4 {
        let left = 60.0 + 150.0 * panel as f64;
        let name = if panel == 0 { "at first".to_owned() } else { format!("after message {panel}") };
        svg.text([left + 54.0, top - 8.0], Anchor::Middle, "fig-small", &name);
        for rank in 0..4 {
            for block in 0..4 {
                let (num, is_new) = filled(panel, rank, block);
                let at = [left + 28.0 * block as f64, top + 28.0 * rank as f64];
                let class = match num {
                    0 => "fig-empty",
                    _ if is_new => "fig-gradients",
                    _ => ["fig-rank0", "fig-rank1", "fig-rank2", "fig-rank3"][block],
                };
                svg.rect(at, [25.0, 25.0], class, "");
                if num > 0 {
                    svg.text([at[0] + 12.5, at[1] + 17.0], Anchor::Middle, "fig-inside", &named(block, num));
                }
            }
        }
    }
    for rank in 0..4 {
        svg.text([50.0, top + 17.0 + 28.0 * rank as f64], Anchor::End, "fig-small", &format!("rank {rank}"));
    }
}

#[test]
fn the_figures_of_rings_are_what_rings_do() {
    // In message m, rank r sends block r - m + 1 to its neighbour, which keeps it.
    let mut svg = Svg::new(640.0, 150.0, "A ring all-gather of four blocks in three messages");
    let filled = |panel: usize, rank: usize, block: usize| {
        let arrival = (rank + 4 - block) % 4; // the message in which the block comes
        (usize::from(arrival <= panel), panel > 0 && arrival == panel)
    };
    panels(&mut svg, 30.0, filled, |block, _| ["a", "b", "c", "d"][block].to_owned());
    assert_figure("ring-gather", svg);

    // In message m, rank r sends what it has of block r - m to its neighbour, which adds it to its own.
    let mut svg = Svg::new(640.0, 150.0, "A ring reduce-scatter of four blocks in three messages");
    let mut sums = vec![vec![[1_usize; 4]; 4]];
    let mut news = vec![[[false; 4]; 4]];
    for message in 1..4 {
        let before = sums[message - 1].clone();
        let (mut after, mut new) = (before.clone(), [[false; 4]; 4]);
        for rank in 0..4 {
            let block = (rank + 4 - message) % 4;
            let next = (rank + 1) % 4;
            after[next][block] = before[next][block] + before[rank][block];
            new[next][block] = true;
            after[rank][block] = 0; // sent, and not needed again
        }
        for (rank, blocks) in after.iter().enumerate() {
            // What has come is not what was sent.
            let block = (rank + 4 - message - 1) % 4;
            assert!(blocks[block] == message + 1);
        }
        sums.push(after);
        news.push(new);
    }
    for (rank, blocks) in sums[3].iter().enumerate() {
        assert_eq!(blocks[rank], 4, "each rank ends with the sum of its own block");
    }
    let filled = |panel: usize, rank: usize, block: usize| (sums[panel][rank][block], news[panel][rank][block]);
    panels(&mut svg, 30.0, filled, |_, num| num.to_string());
    assert_figure("ring-reduce", svg);
}

#[test]
fn the_figure_of_the_fitted_line_shows_what_was_measured() {
    let text = printed("collectives.txt");
    let rows: Vec<_> = text.lines().filter(|line| line.matches('≈').count() == 4).map(numbers).collect();
    assert_eq!(rows.len(), 7);
    let [left, right, top, bottom] = [70.0, 600.0, 20.0, 270.0];
    let mut svg = Svg::new(640.0, 330.0, "Time of collectives over the size of the tensor, measured and fitted");
    let x = |bytes: f64| left + (bytes.log10() - 3.5) / 4.0 * (right - left);
    let y = |micros: f64| bottom - micros.max(1.0).log10() / 5.0 * (bottom - top);
    for power in 0..=5 {
        let label = ["1 µs", "10 µs", "100 µs", "1 ms", "10 ms", "100 ms"][power];
        svg.line([left, y(10_f64.powi(power as i32))], [right, y(10_f64.powi(power as i32))], "fig-grid");
        svg.text([left - 8.0, y(10_f64.powi(power as i32)) + 4.0], Anchor::End, "fig-small", label);
    }
    for (power, label) in [(4, "10 kB"), (5, "100 kB"), (6, "1 MB"), (7, "10 MB")] {
        svg.line([x(10_f64.powi(power)), top], [x(10_f64.powi(power)), bottom], "fig-grid");
        svg.text([x(10_f64.powi(power)), bottom + 18.0], Anchor::Middle, "fig-small", label);
    }
    for (kind, [measured, fitted]) in [[1, 2], [3, 4]].into_iter().enumerate() {
        let line: Vec<_> = rows.iter().map(|row| [x(row[0]), y(row[fitted])]).collect();
        svg.curve(&line, ["fig-curve0", "fig-curve1"][kind]);
        for row in &rows {
            let class = ["fig-mark", "fig-mark1"][kind];
            svg.dot([x(row[0]), y(row[measured])], class, &format!("{} bytes: {} µs", row[0], row[measured]));
        }
    }
    let meaning = [("fig-mark", "all-gather"), ("fig-mark1", "reduce-scatter")];
    svg.legend([left, bottom + 45.0], &meaning);
    svg.text([right, bottom + 45.0], Anchor::End, "fig-small", "dots: measured; lines: α + β·S");
    assert_figure("line", svg);
}

#[test]
fn the_figure_of_overlap_shows_two_recorded_traces() {
    let traces = [printed("overlap-0.txt"), printed("overlap-1.txt")];
    let spans: Vec<Vec<(Vec<&str>, [f64; 2])>> = traces
        .iter()
        .map(|text| {
            let span = |line| {
                let words: Vec<&str> = str::split_whitespace(line).collect();
                let times = numbers(&words[3..].join(" "));
                (words[..3].to_vec(), [times[0], times[1]])
            };
            text.lines().map(span).collect()
        })
        .collect();
    let last = spans.iter().flatten().map(|(_, [_, end])| *end).fold(0.0, f64::max);
    let mut svg = Svg::new(640.0, 290.0, "A step over a slow network, without and with prefetch");
    let x = |micros: f64| 70.0 + micros / last * 560.0;
    for (panel, (spans, title)) in spans.iter().zip(["prefetch 0", "prefetch 1"]).enumerate() {
        let top = 22.0 + 130.0 * panel as f64;
        svg.text([70.0, top - 4.0], Anchor::Start, "fig-label", title);
        for (row, name) in ["compute", "gather", "reduce"].iter().enumerate() {
            let y = top + 4.0 + 32.0 * row as f64;
            svg.text([62.0, y + 17.0], Anchor::End, "fig-small", name);
            svg.rect([70.0, y], [560.0, 26.0], "fig-empty", "");
            for (words, [start, end]) in spans.iter().filter(|(words, _)| words[0] == *name) {
                let class = match words[1] {
                    "forward" => "fig-parameters",
                    "backward" => "fig-computes",
                    "step" => "fig-optimizer",
                    "gather" => "fig-gathered",
                    _ => "fig-gradients",
                };
                let hint = format!("{} {}: {:.1} ms", words[1], words[2], (end - start) / 1e3);
                svg.rect([x(*start), y + 2.0], [x(*end) - x(*start) - 1.0, 22.0], class, &hint);
            }
        }
    }
    let meaning = [
        ("fig-parameters", "forward"),
        ("fig-computes", "backward"),
        ("fig-optimizer", "optimizer"),
        ("fig-gathered", "all-gather"),
        ("fig-gradients", "reduce-scatter"),
    ];
    svg.legend([70.0, 284.0], &meaning);
    assert_figure("overlap", svg);
}

#[test]
fn the_figure_of_scaling_shows_what_was_simulated() {
    let text = printed("scaling.txt");
    let rows: Vec<_> = text.lines().map(numbers).filter(|row| row.len() == 5).collect();
    assert_eq!(rows.len(), 10);
    let [left, right, top, bottom] = [60.0, 430.0, 20.0, 260.0];
    let mut svg = Svg::new(640.0, 310.0, "Share of a step in which GPUs compute, over the number of GPUs");
    let x = |gpus: f64| left + (gpus.log2() - 3.0) / 9.0 * (right - left);
    let y = |percent: f64| bottom - percent / 100.0 * (bottom - top);
    for percent in [0.0, 20.0, 40.0, 60.0, 80.0, 100.0] {
        svg.line([left, y(percent)], [right, y(percent)], "fig-grid");
        svg.text([left - 8.0, y(percent) + 4.0], Anchor::End, "fig-small", &format!("{percent:.0}%"));
    }
    for row in rows.iter().step_by(2) {
        svg.text([x(row[0]), bottom + 18.0], Anchor::Middle, "fig-small", &format!("{}", row[0]));
    }
    svg.text([(left + right) / 2.0, bottom + 38.0], Anchor::Middle, "fig-small", "GPUs");
    let names =
        ["InfiniBand, one copy", "InfiniBand, a copy by node", "Ethernet, one copy", "Ethernet, a copy by node"];
    let mut ends: Vec<(usize, f64)> = (0..4).map(|kind| (kind, y(rows[9][kind + 1]))).collect();
    for kind in 0..4 {
        let points: Vec<_> = rows.iter().map(|row| [x(row[0]), y(row[kind + 1])]).collect();
        svg.curve(&points, &format!("fig-curve{kind}"));
    }
    // Labels keep a line's distance.
    ends.sort_by(|a, b| a.1.total_cmp(&b.1));
    let mut free = f64::MIN;
    for (kind, at) in ends {
        let at = at.max(free);
        free = at + 18.0;
        svg.rect([right + 8.0, at - 6.0], [12.0, 12.0], ["fig-mark", "fig-mark1", "fig-mark2", "fig-mark3"][kind], "");
        svg.text([right + 26.0, at + 4.0], Anchor::Start, "fig-small", names[kind]);
    }
    assert_figure("scaling", svg);
}
