//! The schedule: which actions it answers with, in which order, and that no sequence of calls breaks it.

use fsdp_core::Action::{
    self, Free, Gather, Publish, Reduce, Regather, Reshard, Step, WaitGather, WaitPublish, WaitReduce,
};
use fsdp_core::{PrefetchDepth, Schedule, Stage, UnitIndex, UnitState, UnitTraits};

const UNIT: UnitTraits = UnitTraits {
    gathered_on_use: true,
    keep: false,
    trainable: true,
    prefetch: None,
    gathered_bytes: 100,
    gradient_bytes: 100,
    sent_bytes: 100,
    follows: false,
};
const KEPT: UnitTraits = UnitTraits { keep: true, ..UNIT };
/// At stages 0 to 2 every unit is there all the time.
const RESIDENT: UnitTraits = UnitTraits { gathered_on_use: false, ..UNIT };

fn schedule(units: &[UnitTraits], depth: usize) -> Schedule {
    Schedule::new(Stage::Parameters, units, PrefetchDepth { forward: depth, backward: depth, max_bytes: None })
}

/// A forward over `order`, each use with one gradient to come.
fn forward(schedule: &mut Schedule, order: &[UnitIndex]) -> Vec<Action> {
    let mut actions = Vec::new();
    for &unit in order {
        actions.extend(schedule.forward(unit));
        schedule.gradient_expected(unit);
    }
    actions
}

/// The backward of [`forward`]: each unit asked for, then its gradient.
fn backward(schedule: &mut Schedule, order: &[UnitIndex]) -> Vec<Action> {
    if schedule.needs_reduce_order() {
        let order = schedule.expected_reduce_order();
        schedule.set_reduce_order(order);
    }
    schedule.begin_backward(true);
    let mut actions = Vec::new();
    for &unit in order.iter().rev() {
        actions.extend(schedule.backward(unit));
        actions.extend(schedule.gradient(unit));
    }
    actions.extend(schedule.end_backward());
    actions
}

/// Two steps over `order`, after which all orders are known, and the actions of a third: forward, backward, step.
fn third_step(schedule: &mut Schedule, order: &[UnitIndex]) -> [Vec<Action>; 3] {
    for _ in 0..2 {
        forward(schedule, order);
        backward(schedule, order);
        schedule.step();
    }
    [forward(schedule, order), backward(schedule, order), schedule.step()]
}

#[test]
fn each_state_takes_the_calls_of_the_diagram_and_refuses_the_others() {
    use UnitState::{Gathered, Gathering, Resharded, Sharded};
    type Call = fn(&mut UnitState) -> Result<(), fsdp_core::WrongOrder>;
    let calls: [(&str, Call); 4] = [
        ("start a gather", UnitState::gather),
        ("finish a gather", UnitState::arrived),
        ("be resharded", UnitState::reshard),
        ("be freed", UnitState::free),
    ];
    for (from, expected) in [
        (Sharded, [Some(Gathering), None, None, None]),
        (Gathering, [None, Some(Gathered), None, Some(Sharded)]),
        (Gathered, [None, None, Some(Resharded), Some(Sharded)]),
        (Resharded, [Some(Gathering), None, None, Some(Sharded)]),
    ] {
        for ((name, call), expected) in calls.iter().zip(expected) {
            let mut state = from;
            match (call(&mut state), expected) {
                (Ok(()), Some(to)) => assert_eq!(state, to, "{from:?}, {name}"),
                (Err(error), None) => {
                    assert_eq!(state, from, "a refusal changes nothing");
                    assert_eq!((error.from, error.call), (from, *name));
                    assert_eq!(error.to_string(), format!("a unit that is {from:?} cannot {name}"));
                }
                (result, expected) => panic!("{from:?}, {name}: {result:?}, expected {expected:?}"),
            }
        }
    }
}

#[test]
fn without_prefetch_each_unit_is_gathered_when_it_is_needed() {
    let [forward, backward, step] = third_step(&mut schedule(&[UNIT; 3], 0), &[0, 1, 2]);
    assert_eq!(
        forward,
        [Gather(0), WaitGather(0), Free(0), Gather(1), WaitGather(1), Free(1), Gather(2), WaitGather(2)]
    );
    // The last unit of forward is still here. A reduction waits for the one before it where another follows.
    assert_eq!(
        backward,
        [
            Free(2),
            Reduce(2),
            Gather(1),
            WaitGather(1),
            Free(1),
            WaitReduce(2),
            Reduce(1),
            Gather(0),
            WaitGather(0),
            Free(0),
            Reduce(0)
        ]
    );
    assert_eq!(step, [Step(2), WaitReduce(1), Step(1), WaitReduce(0), Step(0)]);
}

#[test]
fn what_forward_leaves_is_resharded_and_gathered_again_in_backward_at_the_places_of_the_usual_actions() {
    for depth in 0..4 {
        let [forward, backward, step] = third_step(&mut schedule(&[UNIT; 4], depth), &[0, 1, 2, 3]);
        let reshard = |action| if let Free(unit) = action { Reshard(unit) } else { action };
        let regather = |action| if let Gather(unit) = action { Regather(unit) } else { action };
        let expected = [
            forward.into_iter().map(reshard).collect::<Vec<_>>(),
            backward.into_iter().map(regather).collect::<Vec<_>>(),
            step,
        ];
        let mut resharding = schedule(&[UNIT; 4], depth);
        resharding.set_reshards(true);
        assert_eq!(third_step(&mut resharding, &[0, 1, 2, 3]), expected, "depth {depth}");
    }
}

#[test]
fn an_evaluation_before_backward_leaves_what_is_resharded_and_an_abandoned_forward_drops_it() {
    let mut schedule = schedule(&[UNIT; 3], 0);
    schedule.set_reshards(true);
    forward(&mut schedule, &[0, 1, 2]);
    assert_eq!(
        [0, 1, 2].map(|unit| schedule.state(unit)),
        [UnitState::Resharded, UnitState::Resharded, UnitState::Gathered]
    );
    // It gathers from the smaller group as well; what it has used is freed.
    assert_eq!(schedule.evaluate(0), [Free(2), Regather(0), WaitGather(0)]);
    assert_eq!(schedule.evaluate(2), [Free(0), Gather(2), WaitGather(2)]);
    assert_eq!(schedule.state(1), UnitState::Resharded);
    assert_eq!(schedule.forget_gathered(), [Free(1), Free(2)]);
    assert_eq!([0, 1, 2].map(|unit| schedule.state(unit)), [UnitState::Sharded; 3]);
}

#[test]
fn prefetching_one_unit_gathers_it_while_the_one_before_computes() {
    let [forward, backward, _] = third_step(&mut schedule(&[UNIT; 4], 1), &[0, 1, 2, 3]);
    assert_eq!(
        forward,
        [
            Gather(0),
            Gather(1),
            WaitGather(0),
            Free(0),
            Gather(2),
            WaitGather(1),
            Free(1),
            Gather(3),
            WaitGather(2),
            Free(2),
            WaitGather(3)
        ]
    );
    assert_eq!(
        backward,
        [
            Gather(2),
            Free(3),
            Reduce(3),
            Gather(1),
            WaitGather(2),
            Free(2),
            WaitReduce(3),
            Reduce(2),
            Gather(0),
            WaitGather(1),
            Free(1),
            WaitReduce(2),
            Reduce(1),
            WaitGather(0),
            Free(0),
            Reduce(0)
        ]
    );
}

#[test]
fn prefetching_two_units_has_three_under_way() {
    let [forward, _, _] = third_step(&mut schedule(&[UNIT; 4], 2), &[0, 1, 2, 3]);
    assert_eq!(
        forward,
        [
            Gather(0),
            Gather(1),
            Gather(2),
            WaitGather(0),
            Free(0),
            Gather(3),
            WaitGather(1),
            Free(1),
            WaitGather(2),
            Free(2),
            WaitGather(3)
        ]
    );
}

#[test]
fn a_unit_that_sets_its_own_depth_prefetches_as_many() {
    let eager = UnitTraits { prefetch: Some(2), ..UNIT };
    let [forward, _, _] = third_step(&mut schedule(&[eager, UNIT, UNIT, UNIT], 0), &[0, 1, 2, 3]);
    assert_eq!(forward[..4], [Gather(0), Gather(1), Gather(2), WaitGather(0)]);
}

/// The most bytes that are gathered or being gathered at once, in the actions of a step.
fn peak_bytes(actions: &[Action], units: &[UnitTraits]) -> usize {
    let (mut bytes, mut peak) = (0, 0);
    for action in actions {
        match *action {
            Gather(unit) => bytes += units[unit].gathered_bytes,
            Free(unit) => bytes -= units[unit].gathered_bytes,
            _ => {}
        }
        peak = peak.max(bytes);
    }
    peak
}

#[test]
fn a_limit_in_bytes_ends_what_is_gathered_ahead_and_not_the_unit_in_use() {
    let with_limit = |units: &[UnitTraits], max_bytes| {
        let depth = PrefetchDepth { forward: 3, backward: 3, max_bytes };
        let mut schedule = Schedule::new(Stage::Parameters, units, depth);
        let [forward, backward, _] = third_step(&mut schedule, &[0, 1, 2, 3]);
        (forward[..3].to_vec(), peak_bytes(&[forward, backward].concat(), units))
    };
    let (start, peak) = with_limit(&[UNIT; 4], None);
    assert_eq!((&start[..], peak), (&[Gather(0), Gather(1), Gather(2)][..], 400));
    for limit in [200, 299] {
        let (start, peak) = with_limit(&[UNIT; 4], Some(limit));
        assert_eq!((&start[..], peak), (&[Gather(0), Gather(1), WaitGather(0)][..], 200), "{limit}");
    }
    let (start, peak) = with_limit(&[UNIT; 4], Some(1));
    assert_eq!((&start[..], peak), (&[Gather(0), WaitGather(0), Free(0)][..], 100), "as without prefetch");
    // A large unit stops those behind it, so that the order of gathers stays the order of use.
    let large = UnitTraits { gathered_bytes: 250, ..UNIT };
    let (start, peak) = with_limit(&[UNIT, large, UNIT, UNIT], Some(300));
    assert_eq!((&start[..], peak), (&[Gather(0), WaitGather(0), Free(0)][..], 250));
}

#[test]
fn kept_units_count_against_the_limit_from_the_start() {
    let depth = PrefetchDepth { forward: 3, backward: 3, max_bytes: Some(300) };
    let units = [UNIT, UNIT, UNIT, KEPT];
    let [forward, backward, _] = third_step(&mut Schedule::new(Stage::Parameters, &units, depth), &[0, 1, 2, 3]);
    assert_eq!(forward[..3], [Gather(0), Gather(1), WaitGather(0)], "room is left for the kept unit");
    assert_eq!(peak_bytes(&[forward, backward].concat(), &units), 300);
}

#[test]
fn a_limit_that_nothing_reaches_changes_nothing() {
    let with_limit = |max_bytes| {
        let depth = PrefetchDepth { forward: 2, backward: 1, max_bytes };
        third_step(&mut Schedule::new(Stage::Parameters, &[UNIT, UNIT, KEPT, UNIT], depth), &[0, 1, 2, 3])
    };
    assert_eq!(with_limit(Some(400)), with_limit(None));
}

#[test]
fn the_first_forward_learns_the_order_and_prefetches_nothing() {
    let mut schedule = schedule(&[UNIT; 3], 2);
    assert_eq!(
        forward(&mut schedule, &[2, 0, 1]),
        [Gather(2), WaitGather(2), Free(2), Gather(0), WaitGather(0), Free(0), Gather(1), WaitGather(1)]
    );
    backward(&mut schedule, &[2, 0, 1]);
    schedule.step();
    assert_eq!(schedule.forward(2), [Gather(2), Gather(0), Gather(1), WaitGather(2)]);
}

/// A transformer's order: a kept table and root, then blocks.
#[test]
fn a_step_gathers_what_the_next_forward_starts_with_as_soon_as_it_is_updated() {
    let mut schedule = schedule(&[KEPT, KEPT, UNIT, UNIT, UNIT], 1);
    schedule.set_first_uses(vec![0, 1, 2, 3, 4]);
    let [forward, _, step] = third_step(&mut schedule, &[0, 1, 2, 3, 4]);
    // One block in use and one ahead, and what is kept on the way there: in the order of forward, so that what it starts with
    // does not come behind the rest.
    assert_eq!(
        step,
        [
            [Step(4), Step(3), Step(2), WaitReduce(1), Step(1), WaitReduce(0), Step(0)].as_slice(),
            &[Gather(0), Gather(1), Gather(2), Gather(3)]
        ]
        .concat()
    );
    assert_eq!(forward[..4], [WaitGather(0), WaitGather(1), WaitGather(2), Free(2)]);
    assert_eq!(forward[4..], [Gather(4), WaitGather(3), Free(3), WaitGather(4)]);
}

/// As with clipping by the norm of all gradients.
#[test]
fn a_step_whose_gradients_are_all_there_begins_with_what_forward_uses_first() {
    let mut schedule = schedule(&[KEPT, UNIT, UNIT, UNIT], 1);
    schedule.set_first_uses(vec![0, 1, 2, 3]);
    forward(&mut schedule, &[0, 1, 2, 3]);
    backward(&mut schedule, &[0, 1, 2, 3]);
    schedule.finish_reduces();
    assert_eq!(schedule.step(), [Step(0), Gather(0), Step(1), Gather(1), Step(2), Gather(2), Step(3)]);
}

#[test]
fn a_step_gathers_nothing_ahead_without_prefetch_or_above_the_limit() {
    let mut on_demand = schedule(&[UNIT; 3], 0);
    on_demand.set_first_uses(vec![0, 1, 2]);
    let [.., step] = third_step(&mut on_demand, &[0, 1, 2]);
    assert!(!step.iter().any(|action| matches!(action, Gather(_))), "{step:?}");

    let depth = PrefetchDepth { forward: 2, backward: 2, max_bytes: Some(200) };
    let mut limited = Schedule::new(Stage::Parameters, &[UNIT; 3], depth);
    limited.set_first_uses(vec![0, 1, 2]);
    let [.., step] = third_step(&mut limited, &[0, 1, 2]);
    let gathers: Vec<_> = step.into_iter().filter(|action| matches!(action, Gather(_))).collect();
    assert_eq!(gathers, [Gather(0), Gather(1)]);
}

#[test]
fn a_frozen_unit_is_gathered_ahead_when_the_step_begins() {
    let frozen = UnitTraits { trainable: false, ..UNIT };
    let mut schedule = schedule(&[frozen, UNIT, UNIT], 1);
    schedule.set_first_uses(vec![0, 1, 2]);
    for unit in 0..3 {
        schedule.forward(unit);
    }
    schedule.set_reduce_order(vec![2, 1]);
    schedule.begin_backward(true);
    schedule.end_backward();
    let step = schedule.step();
    assert_eq!(step, [Gather(0), WaitReduce(2), Step(2), WaitReduce(1), Step(1), Gather(1)]);
    assert_eq!(schedule.finish_gathers(), [WaitGather(0), WaitGather(1)]);
    assert_eq!(schedule.forward(0), [], "all of it is here");
}

#[test]
fn a_forward_that_starts_with_other_units_than_expected_frees_those_and_goes_on() {
    let mut schedule = schedule(&[UNIT; 4], 1);
    schedule.set_first_uses(vec![0, 1, 2, 3]);
    third_step(&mut schedule, &[0, 1, 2, 3]);
    assert_eq!(schedule.forward(3), [Free(0), Free(1), Gather(3), WaitGather(3)]);
}

#[test]
fn a_wrong_prefetch_costs_a_gather_and_nothing_else() {
    let mut schedule = schedule(&[UNIT; 3], 1);
    third_step(&mut schedule, &[0, 1, 2]);
    // The model now skips unit 1, which had been gathered ahead.
    assert_eq!(
        forward(&mut schedule, &[0, 2]),
        [Gather(0), Gather(1), WaitGather(0), Free(0), Free(1), Gather(2), WaitGather(2)]
    );
    let actions = backward(&mut schedule, &[0, 2]);
    assert!(actions.contains(&Reduce(1)), "peers may have used the unit: {actions:?}");
    schedule.step();
    // The new order is learned.
    assert_eq!(forward(&mut schedule, &[0, 2]), [Gather(0), Gather(2), WaitGather(0), Free(0), WaitGather(2)]);
}

#[test]
fn a_unit_used_twice_is_reduced_once_after_its_last_gradient() {
    let mut schedule = schedule(&[UNIT; 2], 0);
    let order = [0, 1, 0, 1];
    let [_, backward, _] = third_step(&mut schedule, &order);
    // Unit 1 stays between its two backwards, because a gradient is still to come.
    assert_eq!(backward, [Gather(0), WaitGather(0), Free(1), Reduce(1), Free(0), Reduce(0)]);
}

#[test]
fn an_unused_unit_is_not_gathered_and_its_reduction_comes_last() {
    let mut schedule = schedule(&[UNIT; 3], 1);
    let [forward, backward, step] = third_step(&mut schedule, &[0, 2]);
    assert!(!forward.contains(&Gather(1)) && !backward.contains(&Gather(1)));
    assert_eq!(backward.last(), Some(&Reduce(1)));
    assert!(step.contains(&Step(1)), "the engine knows whether a peer had a gradient");
}

#[test]
fn a_kept_unit_is_gathered_once_and_freed_when_its_gradients_are_there() {
    let [forward, backward, _] = third_step(&mut schedule(&[UNIT, KEPT, UNIT], 0), &[0, 1, 2]);
    assert!(!forward.contains(&Free(1)));
    assert!(!backward.contains(&Gather(1)));
    assert_eq!(backward[..5], [Free(2), Reduce(2), Free(1), WaitReduce(2), Reduce(1)]);
}

/// A transformer's order: the embedding, positions in the root, blocks, the norm in the root again, the head.
#[test]
fn kept_units_after_the_last_block_leave_it_gathered_for_backward() {
    for depth in [0, 1, 2] {
        let mut schedule = schedule(&[KEPT, KEPT, UNIT, UNIT, UNIT, KEPT], depth);
        let [forward, backward, _] = third_step(&mut schedule, &[0, 1, 2, 3, 4, 1, 5]);
        assert!(!forward.contains(&Free(4)), "{forward:?}");
        assert!(!backward.contains(&Gather(4)), "{backward:?}");
        let gathers = [forward, backward].concat().into_iter().filter(|action| matches!(action, Gather(_))).count();
        assert_eq!(gathers, 6 + 2, "every unit once, and the first two blocks again");
    }
}

#[test]
fn a_kept_unit_that_is_here_already_takes_no_place_in_the_window() {
    let mut schedule = schedule(&[KEPT, UNIT, UNIT, UNIT], 1);
    let [forward, backward, _] = third_step(&mut schedule, &[0, 1, 0, 2, 0, 3]);
    let ahead = |unit| [Gather(unit), WaitGather(unit - 1)];
    assert!(forward.windows(2).any(|pair| pair == ahead(2)), "{forward:?}");
    assert!(forward.windows(2).any(|pair| pair == ahead(3)), "{forward:?}");
    assert!(backward.starts_with(&[Gather(2), Free(3), Reduce(3)]), "{backward:?}");
    assert_eq!(peak_bytes(&[forward, backward].concat(), &[UNIT; 4]), 300, "the kept one, one in use, one ahead");
}

#[test]
fn what_stays_while_a_kept_unit_is_in_use_counts_against_the_limit() {
    let depth = PrefetchDepth { forward: 2, backward: 2, max_bytes: Some(300) };
    let units = [UNIT, KEPT, UNIT, UNIT];
    let mut schedule = Schedule::new(Stage::Parameters, &units, depth);
    let [forward, backward, _] = third_step(&mut schedule, &[0, 1, 2, 3]);
    assert_eq!(peak_bytes(&[forward, backward].concat(), &units), 300);
}

#[test]
fn a_frozen_unit_is_gathered_and_never_reduced_or_stepped() {
    let frozen = UnitTraits { trainable: false, ..UNIT };
    let mut schedule = schedule(&[UNIT, frozen], 0);
    schedule.forward(0);
    schedule.gradient_expected(0);
    assert!(schedule.forward(1).contains(&Gather(1)));
    assert_eq!(schedule.expected_reduce_order(), [0]);
    schedule.set_reduce_order(vec![0]);
    schedule.begin_backward(true);
    schedule.backward(1);
    assert_eq!(schedule.backward(0), [Free(1), Gather(0), WaitGather(0)], "no gradient of unit 1 is to come");
    assert_eq!(schedule.gradient(0), [Free(0), Reduce(0)]);
    assert_eq!(schedule.end_backward(), []);
    assert_eq!(schedule.step(), [WaitReduce(0), Step(0)]);
}

#[test]
fn stage_1_reduces_when_backward_ends_and_stage_2_as_gradients_appear() {
    for (stage, at_the_end) in [(Stage::OptimizerState, true), (Stage::Gradients, false), (Stage::Ddp, false)] {
        let mut schedule =
            Schedule::new(stage, &[RESIDENT; 2], PrefetchDepth { forward: 1, backward: 1, max_bytes: None });
        assert_eq!(forward(&mut schedule, &[0, 1]), [], "nothing is gathered at {stage}");
        schedule.set_reduce_order(vec![1, 0]);
        schedule.begin_backward(true);
        let during = [schedule.gradient(1), schedule.gradient(0)].concat();
        let end = schedule.end_backward();
        // Of two neighbours the gradients may exist at once, so that no reduction has to wait for another.
        let (expected_during, expected_end) = match at_the_end {
            true => (vec![], vec![Reduce(1), Reduce(0)]),
            false => (vec![Reduce(1), Reduce(0)], vec![]),
        };
        assert_eq!((during, end), (expected_during, expected_end));
        let [first, second] = [WaitReduce(1), WaitReduce(0)];
        let expected = match stage {
            Stage::Ddp => vec![first, Step(1), second, Step(0)],
            _ => vec![first, Step(1), Publish(1), second, Step(0), Publish(0), WaitPublish(1), WaitPublish(0)],
        };
        assert_eq!(schedule.step(), expected);
    }
}

#[test]
fn gradients_that_come_out_of_order_wait_for_their_turn() {
    let mut schedule = schedule(&[UNIT; 3], 0);
    forward(&mut schedule, &[0, 1, 2]);
    schedule.set_reduce_order(vec![2, 1, 0]);
    schedule.begin_backward(true);
    assert_eq!(schedule.gradient(0), []);
    assert_eq!(schedule.gradient(2), [Free(2), Reduce(2)]);
    assert_eq!(schedule.gradient(1), [WaitReduce(2), Reduce(1), Reduce(0)]);
}

/// Without this a unit would be reduced before the last micro-batch has added its gradients.
#[test]
fn a_backward_without_reduction_leaves_nothing_ready_for_the_next() {
    let mut schedule = Schedule::new(Stage::Gradients, &[RESIDENT; 2], PrefetchDepth::default());
    forward(&mut schedule, &[0, 1]);
    schedule.set_reduce_order(vec![1, 0]);
    schedule.begin_backward(false);
    assert_eq!([schedule.gradient(1), schedule.gradient(0), schedule.end_backward()].concat(), []);
    forward(&mut schedule, &[0, 1]);
    schedule.begin_backward(true);
    assert_eq!(schedule.gradient(1), [Reduce(1)]);
    assert_eq!(schedule.gradient(0), [Reduce(0)]);
}

#[test]
fn an_incomplete_window_is_reduced_on_demand() {
    let mut schedule = Schedule::new(Stage::Gradients, &[RESIDENT; 2], PrefetchDepth::default());
    forward(&mut schedule, &[0, 1]);
    schedule.set_reduce_order(vec![1, 0]);
    schedule.begin_backward(false);
    schedule.gradient(1);
    schedule.end_backward();
    assert_eq!(schedule.reduce_rest(), [Reduce(1), Reduce(0)]);
    assert_eq!(schedule.finish_reduces(), [WaitReduce(1), WaitReduce(0)]);
}

#[test]
fn evaluation_uses_the_order_and_leaves_it_alone() {
    let mut schedule = schedule(&[UNIT; 3], 1);
    third_step(&mut schedule, &[0, 1, 2]);
    let evaluated: Vec<Action> = [0, 1, 2].iter().flat_map(|&unit| schedule.evaluate(unit)).collect();
    assert_eq!(
        evaluated,
        [Gather(0), Gather(1), WaitGather(0), Free(0), Gather(2), WaitGather(1), Free(1), WaitGather(2)]
    );
    schedule.evaluate(1);
    schedule.forget_gathered();
    let expected = third_step(&mut self::schedule(&[UNIT; 3], 1), &[0, 1, 2])[0].clone();
    assert_eq!(forward(&mut schedule, &[0, 1, 2]), expected);
}

/// Units 1 to 3 are one block.
const PART: UnitTraits = UnitTraits { follows: true, ..UNIT };

#[test]
fn parts_are_gathered_ahead_together_and_freed_together() {
    let mut schedule = schedule(&[UNIT, UNIT, PART, PART, UNIT, UNIT], 1);
    let [forward, backward, _] = third_step(&mut schedule, &[0, 1, 2, 1, 3, 4, 5]);
    let from = |actions: &[Action], of: Action| actions.iter().position(|&action| action == of).unwrap();
    // What a depth of 1 gathers ahead is the whole block, and then the next one while any part of it is in use.
    assert_eq!(forward[..5], [Gather(0), Gather(1), Gather(2), Gather(3), WaitGather(0)]);
    assert_eq!(forward[5..9], [Free(0), Gather(4), WaitGather(1), WaitGather(2)]);
    assert!(from(&forward, Free(1)) > from(&forward, WaitGather(3)), "used again after another part");
    assert_eq!(backward.iter().filter(|&&action| action == Gather(1)).count(), 1);
}

#[test]
fn a_part_is_reduced_and_stepped_while_the_next_one_computes() {
    let mut schedule = schedule(&[UNIT, PART, PART, UNIT], 1);
    schedule.set_first_uses(vec![0, 1, 2, 3]);
    let order = [0, 1, 2, 3];
    let [_, backward, step] = third_step(&mut schedule, &order);
    // The unit before them may be under way until the whole block is complete: two units of gradients, as without parts.
    assert_eq!(reductions(backward), [Reduce(3), Reduce(2), Reduce(1), Reduce(0)]);
    let steps = [3, 2, 1, 0].into_iter().flat_map(|unit| [WaitReduce(unit), Step(unit)]);
    assert_eq!(step, steps.chain([Gather(0), Gather(1), Gather(2), Gather(3)]).collect::<Vec<_>>());
}

#[test]
fn a_backward_begins_when_there_is_room_beside_what_the_last_one_has_left() {
    let order = [0, 1, 2];
    let again = |stage| {
        let mut schedule = Schedule::new(stage, &[RESIDENT; 3], PrefetchDepth::default());
        forward(&mut schedule, &order);
        backward(&mut schedule, &order);
        forward(&mut schedule, &order);
        schedule.begin_backward(true)
    };
    assert_eq!(again(Stage::Gradients), [WaitReduce(1)]);
    assert_eq!(again(Stage::OptimizerState), [], "it holds all whole gradients anyway");
}

fn reductions(actions: Vec<Action>) -> Vec<Action> {
    actions.into_iter().filter(|action| matches!(action, Reduce(_) | WaitReduce(_))).collect()
}

/// See [Note: Two units of whole gradients].
#[test]
fn a_reduction_waits_for_those_before_it_until_the_next_gradients_fit_beside_them() {
    let sized = |bytes| UnitTraits { gradient_bytes: bytes, sent_bytes: bytes, ..UNIT };
    let part = |bytes| UnitTraits { follows: true, ..sized(bytes) };
    let of = |units: &[UnitTraits]| {
        let order: Vec<_> = (0..units.len()).collect();
        reductions(third_step(&mut schedule(units, 0), &order)[1].clone())
    };
    // A block of two parts, in room for two blocks: none of it goes before the next block is computed.
    let of_parts = of(&[sized(100), sized(60), part(40), sized(100)]);
    assert_eq!(of_parts, [Reduce(3), Reduce(2), WaitReduce(3), Reduce(1), Reduce(0)]);
    // Small units go behind a large one; no more is computed after the last.
    assert_eq!(
        of(&[sized(30), sized(10), sized(100), sized(100)]),
        [Reduce(3), WaitReduce(3), Reduce(2), Reduce(1), Reduce(0)]
    );
    // In pairs: 20 in flight and 90 to come would be more than the 100 that 90 and 10 need.
    let of_small = of(&[sized(90), sized(10), sized(10), sized(10)]);
    assert_eq!(of_small, [Reduce(3), Reduce(2), WaitReduce(3), WaitReduce(2), Reduce(1), Reduce(0)]);
    // What is sent in a larger type than it is computed in.
    let half = UnitTraits { gradient_bytes: 50, sent_bytes: 100, ..UNIT };
    assert_eq!(of(&[half; 3]), [Reduce(2), WaitReduce(2), Reduce(1), WaitReduce(1), Reduce(0)]);
}
