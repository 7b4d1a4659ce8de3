//! The schedule of what lies in tiers: read ahead of its use, written behind it, and never more than that.

use fsdp_core::Action::{
    self, FetchBlocks, FetchState, Gather, Step, WaitGather, WaitReduce, WaitWriteBack, WriteBack, WriteGradients,
};
use fsdp_core::{PrefetchDepth, Schedule, Stage, UnitIndex, UnitTiers, UnitTraits};

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
const ALL: UnitTiers = UnitTiers { blocks: true, gradients: true, state: true };
const NUM_UNITS: usize = 4;

fn schedule(depth: usize, tiers: UnitTiers) -> Schedule {
    let depth = PrefetchDepth { forward: depth, backward: depth, max_bytes: None };
    let mut schedule = Schedule::new(Stage::Parameters, &[UNIT; NUM_UNITS], depth);
    schedule.set_tiers(&[tiers; NUM_UNITS]);
    schedule
}

/// Forward, backward and step of one round over all units.
fn round(schedule: &mut Schedule) -> [Vec<Action>; 3] {
    let mut forward = Vec::new();
    for unit in 0..NUM_UNITS {
        forward.extend(schedule.forward(unit));
        schedule.gradient_expected(unit);
    }
    if schedule.needs_reduce_order() {
        let (reduces, uses) = (schedule.expected_reduce_order(), schedule.first_uses().to_vec());
        schedule.set_reduce_order(reduces);
        schedule.set_first_uses(uses);
    }
    schedule.begin_backward(true);
    let mut backward = Vec::new();
    for unit in (0..NUM_UNITS).rev() {
        backward.extend(schedule.backward(unit));
        backward.extend(schedule.gradient(unit));
    }
    backward.extend(schedule.end_backward());
    [forward, backward, schedule.step()]
}

/// Where the action is, which is there once.
fn place(actions: &[Action], action: Action) -> usize {
    let places: Vec<_> = actions.iter().enumerate().filter(|(_, other)| **other == action).collect();
    assert_eq!(places.len(), 1, "{action:?} in {actions:?}");
    places[0].0
}

#[test]
fn blocks_are_fetched_once_for_each_gather_and_one_unit_ahead_of_it() {
    for depth in [0, 1, 2] {
        let mut schedule = schedule(depth, ALL);
        round(&mut schedule);
        round(&mut schedule);
        for actions in &round(&mut schedule)[..2] {
            let units = |of: fn(&Action) -> Option<UnitIndex>| actions.iter().filter_map(of).collect::<Vec<_>>();
            let fetched = units(|action| if let FetchBlocks(unit) = action { Some(*unit) } else { None });
            let gathered = units(|action| if let Gather(unit) = action { Some(*unit) } else { None });
            // Forward finds the first ones gathered by the step before it; what backward fetches it gathers.
            assert_eq!(fetched, gathered, "in the order of the gathers, at depth {depth}");
            for pair in gathered.windows(2) {
                let (gather, fetch) = (place(actions, Gather(pair[0])), place(actions, FetchBlocks(pair[1])));
                assert_eq!(
                    fetch,
                    gather + 1,
                    "the next unit is read while one is gathered, at depth {depth}: {actions:?}"
                );
            }
        }
    }
}

#[test]
fn a_step_reads_the_next_unit_and_writes_the_last_one_while_one_steps() {
    let mut schedule = schedule(0, ALL);
    round(&mut schedule);
    let [_, _, step] = round(&mut schedule);
    let expected = [
        [FetchState(3), FetchState(2), Step(3)].as_slice(),
        // What the step before has left.
        &[WaitWriteBack(0), WriteBack(3), FetchState(1), Step(2), WaitWriteBack(3), WriteBack(2)],
        &[FetchState(0), Step(1), WaitWriteBack(2), WriteBack(1), Step(0), WaitWriteBack(1), WriteBack(0)],
    ]
    .concat();
    let step: Vec<_> = step.into_iter().filter(|action| !matches!(action, Action::Free(_) | WaitReduce(_))).collect();
    assert_eq!(step, expected);
    assert_eq!(schedule.finish_write_back(), [WaitWriteBack(0)]);
    assert_eq!(schedule.finish_write_back(), []);
}

#[test]
fn what_a_step_gathers_ahead_comes_from_memory_before_it_is_written_back() {
    let mut schedule = schedule(1, ALL);
    round(&mut schedule);
    let [_, _, step] = round(&mut schedule);
    assert!(!step.iter().any(|action| matches!(action, FetchBlocks(_))), "{step:?}");
    for unit in [0, 1] {
        assert!(place(&step, Step(unit)) < place(&step, Gather(unit)));
        assert!(place(&step, Gather(unit)) < place(&step, WriteBack(unit)));
    }
    let [forward, ..] = round(&mut schedule);
    assert_eq!(forward[..2], [FetchBlocks(2), WaitGather(0)], "forward begins with what the step has gathered");
}

#[test]
fn gradients_go_to_their_tier_unless_they_are_stepped_at_once() {
    let mut schedule = schedule(1, ALL);
    round(&mut schedule);
    let [_, backward, step] = round(&mut schedule);
    let count = |actions: &[Action]| actions.iter().filter(|action| matches!(action, WriteGradients(_))).count();
    let waits = |actions: &[Action]| actions.iter().filter(|action| matches!(action, WaitReduce(_))).count();
    assert!(waits(&backward) > 0 && waits(&step) > 0);
    assert_eq!((count(&backward), count(&step)), (waits(&backward), 0));
    // A norm over all gradients needs them all before any is stepped.
    let mut schedule = self::schedule(1, ALL);
    for unit in 0..NUM_UNITS {
        schedule.forward(unit);
        schedule.gradient_expected(unit);
    }
    schedule.set_reduce_order(vec![3, 2, 1, 0]);
    schedule.begin_backward(true);
    (0..NUM_UNITS).rev().for_each(|unit| drop((schedule.backward(unit), schedule.gradient(unit))));
    let left = [schedule.end_backward(), schedule.finish_reduces()].concat();
    assert_eq!(left[left.len() - 2..], [WaitReduce(0), WriteGradients(0)]);
}

#[test]
fn each_tier_by_itself_asks_for_its_own_transfers_and_no_others() {
    for (tiers, blocks, gradients) in [
        (UnitTiers { blocks: true, ..UnitTiers::default() }, true, false),
        (UnitTiers { gradients: true, ..UnitTiers::default() }, false, true),
        (UnitTiers { state: true, ..UnitTiers::default() }, false, false),
    ] {
        let mut schedule = schedule(1, tiers);
        round(&mut schedule);
        let actions = round(&mut schedule).concat();
        let any = |of: fn(&Action) -> bool| actions.iter().any(of);
        assert_eq!(any(|action| matches!(action, FetchBlocks(_))), blocks);
        assert_eq!(any(|action| matches!(action, WriteGradients(_))), gradients);
        assert!(any(|action| matches!(action, FetchState(_))) && any(|action| matches!(action, WriteBack(_))));
    }
    let mut schedule = schedule(1, UnitTiers::default());
    round(&mut schedule);
    let all = round(&mut schedule).concat();
    assert!(all.iter().all(|action| {
        !matches!(action, FetchBlocks(_) | FetchState(_) | WriteBack(_) | WaitWriteBack(_) | WriteGradients(_))
    }));
}
