//! The schedule: that no sequence of calls breaks it.

use std::collections::BTreeSet;

use fsdp_core::Action::{
    self, Free, Gather, Publish, Reduce, Regather, Reshard, Step, WaitGather, WaitPublish, WaitReduce,
};
use fsdp_core::{PrefetchDepth, Schedule, Stage, UnitIndex, UnitState, UnitTraits};
use proptest::prelude::*;

/// A call of the model, as the engine hands it on.
#[derive(Clone, Copy, Debug)]
enum Call {
    Forward(UnitIndex),
    Evaluate(UnitIndex),
    BeginBackward(bool),
    Backward(UnitIndex),
    Gradient(UnitIndex),
    EndBackward,
    Finish,
    Step,
}

const NUM_UNITS: usize = 4;

fn any_call() -> impl Strategy<Value = Call> {
    prop_oneof![
        4 => (0..NUM_UNITS).prop_map(Call::Forward),
        1 => (0..NUM_UNITS).prop_map(Call::Evaluate),
        1 => any::<bool>().prop_map(Call::BeginBackward),
        4 => (0..NUM_UNITS).prop_map(Call::Backward),
        4 => (0..NUM_UNITS).prop_map(Call::Gradient),
        2 => Just(Call::EndBackward),
        1 => Just(Call::Finish),
        1 => Just(Call::Step),
    ]
}

/// Executes actions as an engine would, and fails where one does not fit what is there.
#[derive(Default)]
struct Checker {
    gathered: [bool; NUM_UNITS],
    under_way: [bool; NUM_UNITS],
    resharded: [bool; NUM_UNITS],
    reducing: [bool; NUM_UNITS],
    publishing: [bool; NUM_UNITS],
    in_backward: bool,
    units: Vec<UnitTraits>,
    /// Unit 0 and those after it are parts of one whole, as many as this.
    num_following: usize,
}

impl Checker {
    /// The first part of the whole that a unit is a part of.
    fn whole(&self, unit: UnitIndex) -> UnitIndex {
        if unit <= self.num_following { 0 } else { unit }
    }

    fn run(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Gather(unit) => {
                    let is_here = self.gathered[unit] || self.under_way[unit] || self.resharded[unit];
                    assert!(!is_here, "{unit} is gathered twice");
                    self.under_way[unit] = true;
                }
                Reshard(unit) => {
                    assert!(std::mem::take(&mut self.gathered[unit]), "{unit} is resharded before it is gathered");
                    self.resharded[unit] = true;
                }
                Regather(unit) => {
                    assert!(std::mem::take(&mut self.resharded[unit]), "{unit} is gathered again from nothing");
                    self.under_way[unit] = true;
                }
                WaitGather(unit) => {
                    assert!(std::mem::take(&mut self.under_way[unit]), "no gather of {unit} is under way");
                    self.gathered[unit] = true;
                }
                Free(unit) => {
                    let is_here = self.gathered[unit] || self.under_way[unit] || self.resharded[unit];
                    assert!(is_here, "{unit} is freed twice");
                    (self.gathered[unit], self.under_way[unit], self.resharded[unit]) = (false, false, false);
                }
                Reduce(unit) => {
                    assert!(!self.reducing[unit], "{unit} is reduced twice at once");
                    self.reducing[unit] = true;
                    self.assert_room(unit);
                }
                WaitReduce(unit) => assert!(std::mem::take(&mut self.reducing[unit]), "{unit} is not being reduced"),
                Step(unit) => assert!(!self.reducing[unit], "{unit} is stepped before its reduction"),
                Publish(unit) => {
                    self.publishing[unit] = true;
                    assert!(self.publishing.iter().filter(|&&under_way| under_way).count() <= 2);
                }
                WaitPublish(unit) => assert!(std::mem::take(&mut self.publishing[unit])),
                other => panic!("nothing lies in a tier, but: {other:?}"),
            }
        }
    }

    /// In backward, gradients that are being reduced and those that are computed next are no more than those of two neighbours
    /// in the order of reductions.
    fn assert_room(&self, unit: UnitIndex) {
        let is_alone = self.reducing.iter().filter(|&&reducing| reducing).count() == 1;
        if !self.in_backward || is_alone {
            return;
        }
        let trained = |of: &dyn Fn(UnitIndex) -> bool, size: fn(&UnitTraits) -> usize| -> usize {
            (0..NUM_UNITS)
                .filter(|&other| self.units[other].trainable && of(other))
                .map(|other| size(&self.units[other]))
                .sum()
        };
        let computed = |of: &dyn Fn(UnitIndex) -> bool| trained(of, |unit| unit.gradient_bytes);
        let wholes: Vec<_> = (0..NUM_UNITS)
            .filter(|&unit| self.whole(unit) == unit && self.units[unit].trainable)
            .map(|whole| {
                [
                    trained(&|unit| self.whole(unit) == whole, |unit| unit.sent_bytes),
                    computed(&|unit| self.whole(unit) == whole),
                ]
            })
            .collect();
        let of_two = wholes.windows(2).map(|pair| pair[1][0] + pair[0][1]);
        let most = of_two.chain(wholes.last().map(|last| last[1])).max().unwrap_or(0);
        let next = (0..unit).rev().find(|&next| self.units[next].trainable).map(|next| self.whole(next));
        // Of what is computed at the time, parts may be on their way already.
        let computed = computed(&|other| (other < unit || self.reducing[other]) && Some(self.whole(other)) == next);
        let sent = trained(&|other| self.reducing[other] && Some(self.whole(other)) != next, |unit| unit.sent_bytes);
        assert!(sent + computed <= most, "{sent} bytes sent beside {computed} in the room of {most}");
    }

    /// What the next forward starts with: kept units, those that take a place in the window, and the first one.
    fn assert_at_most_gathered(&self, units: &[UnitTraits], depth: usize) {
        let here = |&unit: &UnitIndex| self.gathered[unit] || self.under_way[unit];
        let passing: BTreeSet<_> =
            (0..NUM_UNITS).filter(here).filter(|&unit| !units[unit].keep).map(|unit| self.whole(unit)).collect();
        let num_passing = passing.len();
        let most = units.iter().map(|unit| unit.prefetch.unwrap_or(depth)).max().unwrap_or(0);
        assert!(num_passing <= 1 + most && (most > 0 || num_passing == 0), "{num_passing} at depth {most}");
    }

    fn assert_sharded(&self) {
        assert_eq!([self.gathered, self.under_way, self.resharded], [[false; NUM_UNITS]; 3]);
    }
}

proptest! {
    #[test]
    fn no_sequence_of_calls_gathers_or_frees_twice_and_nothing_outlives_what_it_is_for(
        calls in proptest::collection::vec(any_call(), 0..80),
        traits in proptest::collection::vec((any::<bool>(), any::<bool>(), proptest::option::of(0..3usize)), NUM_UNITS),
        (forward, backward) in (0..4usize, 0..4usize),
        max_bytes in proptest::option::of(1..500usize),
        first_uses in Just((0..NUM_UNITS).collect::<Vec<_>>()).prop_shuffle(),
        (stage, reshards) in (0..4usize, any::<bool>()),
        num_following in 0..NUM_UNITS,
        sizes in proptest::collection::vec((1..5usize, 1..5usize), NUM_UNITS),
    ) {
        let stage = Stage::ALL[stage];
        let unit = |&(keep, trainable, prefetch): &(bool, bool, Option<usize>)| UnitTraits {
            gathered_on_use: stage.shards_parameters(), keep, trainable, prefetch, gathered_bytes: 100,
            ..UnitTraits::default()
        };
        let mut units: Vec<UnitTraits> = traits.iter().map(unit).collect();
        // The parts of one whole are alike.
        let first = units[0];
        units[1..=num_following].fill(UnitTraits { follows: true, ..first });
        for (unit, &(gradient_bytes, sent_bytes)) in units.iter_mut().zip(&sizes) {
            *unit = UnitTraits { gradient_bytes, sent_bytes, ..*unit };
        }
        let mut schedule = Schedule::new(stage, &units, PrefetchDepth { forward, backward, max_bytes });
        schedule.set_reshards(reshards);
        schedule.set_reduce_order((0..NUM_UNITS).rev().filter(|&unit| units[unit].trainable).collect());
        schedule.set_first_uses(first_uses);
        let mut checker = Checker { num_following, units: units.clone(), ..Checker::default() };
        let mut in_backward = false;
        for call in calls {
            let mut needed = None;
            let actions = match call {
                // The engine refuses a forward inside backward, and begins no backward in another.
                Call::Forward(unit) if !in_backward => {
                    needed = Some(unit);
                    let actions = schedule.forward(unit);
                    if units[unit].trainable {
                        schedule.gradient_expected(unit);
                    }
                    actions
                }
                Call::Evaluate(unit) if !in_backward => {
                    needed = Some(unit);
                    schedule.evaluate(unit)
                }
                Call::BeginBackward(reduce) if !in_backward => {
                    in_backward = true;
                    schedule.begin_backward(reduce)
                }
                Call::Backward(unit) if in_backward => {
                    needed = Some(unit);
                    schedule.backward(unit)
                }
                Call::Gradient(unit) if in_backward && units[unit].trainable => schedule.gradient(unit),
                Call::EndBackward if in_backward => {
                    in_backward = false;
                    schedule.end_backward()
                }
                Call::Finish if !in_backward => schedule.finish_reduces(),
                Call::Step if !in_backward => schedule.step(),
                _ => continue,
            };
            checker.in_backward = in_backward;
            checker.run(actions);
            if let Some(unit) = needed.filter(|_| stage.shards_parameters()) {
                prop_assert!(checker.gathered[unit], "unit {} is not there after {:?}", unit, call);
            }
            for unit in 0..NUM_UNITS {
                let expected = match (checker.gathered[unit], checker.under_way[unit], checker.resharded[unit]) {
                    (true, ..) => UnitState::Gathered,
                    (_, true, _) => UnitState::Gathering,
                    (.., true) => UnitState::Resharded,
                    _ => UnitState::Sharded,
                };
                prop_assert!(reshards || expected != UnitState::Resharded);
                prop_assert_eq!(schedule.state(unit), expected);
            }
            match call {
                Call::EndBackward => checker.assert_sharded(),
                Call::Step => checker.assert_at_most_gathered(&units, forward),
                _ => {}
            }
        }
        if in_backward {
            checker.in_backward = false;
            checker.run(schedule.end_backward());
        }
        checker.run(schedule.step());
        checker.run(schedule.finish_gathers());
        checker.run(schedule.forget_gathered());
        checker.assert_sharded();
        prop_assert_eq!(checker.reducing, [false; NUM_UNITS]);
        prop_assert_eq!(checker.publishing, [false; NUM_UNITS]);
    }
}
