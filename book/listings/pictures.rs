//! The pictures of the second chapter that are computed: the actions of a step, and what the stages hold and send.

use fsdp_core::{
    Action, MemoryModel, PrefetchDepth, Schedule, Stage, TrafficModel, UnitTraffic, UnitTraits, human_bytes,
};

use crate::output::assert_shown;

const UNITS: [&str; 3] = ["block 0", "block 1", "head"];

fn describe(action: &Action) -> String {
    let (verb, unit) = match *action {
        Action::Gather(unit) => ("gather", unit),
        Action::WaitGather(unit) => ("wait for", unit),
        Action::Free(unit) => ("free", unit),
        Action::Reduce(unit) => ("reduce", unit),
        Action::WaitReduce(unit) => ("wait for reduced", unit),
        Action::Step(unit) => ("step", unit),
        Action::Publish(unit) => ("publish", unit),
        Action::WaitPublish(unit) => ("wait for published", unit),
        other => unreachable!("nothing is offloaded: {other:?}"),
    };
    format!("{verb} {}", UNITS[unit])
}

/// One step of three units, as events of the model and the actions that follow from each.
fn events(schedule: &mut Schedule) -> Vec<(String, Vec<Action>)> {
    let mut events = Vec::new();
    for (unit, name) in UNITS.iter().enumerate() {
        events.push((format!("forward uses {name}"), schedule.forward(unit)));
        schedule.gradient_expected(unit);
    }
    if schedule.needs_reduce_order() {
        schedule.set_reduce_order(schedule.expected_reduce_order());
        schedule.set_first_uses(schedule.first_uses().to_vec());
    }
    schedule.begin_backward(true);
    for (unit, name) in UNITS.iter().enumerate().rev() {
        events.push((format!("backward uses {name}"), schedule.backward(unit)));
        events.push((format!("gradients of {name}"), schedule.gradient(unit)));
    }
    events.push(("backward ends".into(), schedule.end_backward()));
    events.push(("optimizer steps".into(), schedule.step()));
    events
}

#[test]
fn the_picture_of_a_step_is_what_the_schedule_does() {
    let unit = UnitTraits { gathered_on_use: true, trainable: true, ..UnitTraits::default() };
    let head = UnitTraits { keep: true, ..unit };
    let depth = PrefetchDepth { forward: 1, backward: 1, max_bytes: None };
    let mut schedule = Schedule::new(Stage::Parameters, &[unit, unit, head], depth);
    // The first step learns the order; the second knows it, as all that follow.
    events(&mut schedule);
    let lines = events(&mut schedule).into_iter().map(|(event, actions)| {
        let actions: Vec<_> = actions.iter().map(describe).collect();
        // What is too long for a line of the page goes on in the next, under the first action.
        let mut lines = vec![format!("{event:<24}")];
        for (index, action) in actions.iter().enumerate() {
            let comma = if index + 1 < actions.len() { ", " } else { "" };
            let last = lines.len() - 1;
            if lines[last].len() + action.len() > 88 {
                lines.push(" ".repeat(24));
            }
            *lines.last_mut().unwrap() += &format!("{action}{comma}");
        }
        lines.iter().map(|line| format!("{}\n", line.trim_end())).collect::<String>()
    });
    assert_shown("listings/output/step.txt", &lines.collect::<String>());
}

#[test]
fn the_table_of_the_stages_is_what_the_models_say() {
    const NUM_RANKS: u64 = 8;
    const NUM_PARAMETERS: u64 = 7_000_000_000;
    const NUM_UNITS: u64 = 100;
    let units = vec![UnitTraffic::even(NUM_PARAMETERS / NUM_UNITS, NUM_RANKS); NUM_UNITS as usize];
    let mut text = format!(
        "{:<8}{:>12}{:>12}{:>12}{:>12}{:>16}\n",
        "stage", "parameters", "gradients", "optimizer", "gathered", "sent per step"
    );
    for stage in Stage::ALL {
        let memory = MemoryModel {
            stage,
            num_shards: NUM_RANKS,
            largest_unit_len: NUM_PARAMETERS / NUM_UNITS,
            prefetch: 1,
            ..MemoryModel::new(NUM_PARAMETERS)
        }
        .average();
        let sent_bytes = TrafficModel::new(stage, NUM_RANKS).step(&units).sent_bytes(4);
        let cells = [memory.parameter_bytes, memory.gradient_bytes, memory.optimizer_bytes, memory.gathered_bytes];
        let cells: String = cells.map(|bytes| format!("{:>12}", human_bytes(bytes))).concat();
        text += &format!("{:<8}{cells}{:>16}\n", stage.number(), human_bytes(sent_bytes));
    }
    assert_shown("listings/output/stages.txt", &text);
}
