//! What a rank does in one step, as a list: the schedule's own actions, and the computation between them.

use crate::{Accumulate, Action, PrefetchDepth, Schedule, Stage, UnitIndex, UnitTiers, UnitTraits};

/// One thing that a rank does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Instruction {
    /// A micro-batch begins.
    BeginForward,
    /// Its loss is there.
    BeginBackward,
    /// An action of the schedule.
    Act(Action),
    /// The unit computes in forward.
    Forward(UnitIndex),
    /// The unit computes in backward.
    Backward(UnitIndex),
    /// Backward is over, and its micro-batch the last one.
    BeginStep,
    /// The ranks agree on the norm of all gradients.
    Norm,
}

/// How a model uses its units in one micro-batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uses {
    /// Units in the order of forward. A unit may come several times.
    pub forward: Vec<UnitIndex>,
    /// Units in the order of backward. The gradients of a unit are complete after its last use.
    pub backward: Vec<BackwardUse>,
}

/// A use in backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackwardUse {
    /// The unit.
    pub unit: UnitIndex,
    /// Whether backward reads its parameters. A table of tokens, from which forward takes rows, only gets its gradient.
    pub reads: bool,
}

impl Uses {
    /// Each of `num_units` units once, in plan order, and backwards.
    pub fn in_order(num_units: usize) -> Self {
        let backward = (0..num_units).rev().map(|unit| BackwardUse { unit, reads: true }).collect();
        Self { forward: (0..num_units).collect(), backward }
    }
}

/// What decides a step's list, apart from how the model uses its units.
#[derive(Clone, Debug, PartialEq)]
pub struct StepRules {
    /// The stage.
    pub stage: Stage,
    /// Gathers ahead of use.
    pub depth: PrefetchDepth,
    /// Micro-batches of an optimizer step.
    pub num_micro_batches: usize,
    /// When they are reduced.
    pub accumulate: Accumulate,
    /// Whether the step waits for the norm of all gradients: clipping by norm, or a check that it is finite.
    pub needs_norm: bool,
    /// Whether backward gathers from a smaller group of ranks; see [`Schedule::set_reshards`].
    pub reshards: bool,
}

/// The list of one step in the steady state, when the schedule has learned the order of use.
///
/// It is made by telling a [`Schedule`] what the engine would tell it, so it is what the engine runs.
///
/// ```
/// use fsdp_core::{Accumulate, Action, Instruction, PrefetchDepth, Program, Stage, StepRules, UnitTraits, Uses};
///
/// let unit = UnitTraits { gathered_on_use: true, trainable: true, gathered_bytes: 4096, ..UnitTraits::default() };
/// let rules = StepRules {
///     stage: Stage::Parameters,
///     depth: PrefetchDepth { forward: 1, backward: 1, max_bytes: None },
///     num_micro_batches: 1,
///     accumulate: Accumulate::Reduced,
///     needs_norm: false,
///     reshards: false,
/// };
/// let program = Program::steady(&rules, &[unit; 2], &Uses::in_order(2));
/// // The step before has begun to gather what this one uses first.
/// assert_eq!(program.instructions[..4], [
///     Instruction::BeginForward,
///     Instruction::Act(Action::WaitGather(0)),
///     Instruction::Forward(0),
///     Instruction::Act(Action::Free(0)),
/// ]);
/// assert!(program.actions().skip_while(|action| *action != Action::Step(0)).any(|next| next == Action::Gather(0)));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// The list.
    pub instructions: Vec<Instruction>,
}

impl Program {
    /// The list of a step after two others, by which time all orders are known.
    pub fn steady(rules: &StepRules, units: &[UnitTraits], uses: &Uses) -> Self {
        Self::with_tiers(rules, units, &vec![UnitTiers::default(); units.len()], uses)
    }

    /// The same, where parts of the units lie in tiers.
    pub fn with_tiers(rules: &StepRules, units: &[UnitTraits], tiers: &[UnitTiers], uses: &Uses) -> Self {
        let mut schedule = Schedule::new(rules.stage, units, rules.depth);
        schedule.set_reshards(rules.reshards);
        schedule.set_tiers(tiers);
        let mut instructions = Vec::new();
        for _ in 0..3 {
            instructions.clear();
            step(&mut schedule, rules, units, uses, &mut instructions);
        }
        Self { instructions }
    }

    /// The schedule's actions alone.
    pub fn actions(&self) -> impl Iterator<Item = Action> {
        self.instructions.iter().filter_map(|instruction| match instruction {
            Instruction::Act(action) => Some(*action),
            _ => None,
        })
    }

    /// The most that is gathered at once, in bytes.
    pub fn peak_gathered_bytes(&self, units: &[UnitTraits]) -> u64 {
        let (mut gathered, mut most) = (vec![false; units.len()], 0);
        // A step begins with what the one before has gathered for it.
        for action in self.actions().chain(self.actions()) {
            match action {
                Action::Gather(unit) | Action::Regather(unit) => gathered[unit] = true,
                Action::Free(unit) | Action::Reshard(unit) => gathered[unit] = false,
                _ => {}
            }
            let held = units.iter().zip(&gathered).filter(|(_, gathered)| **gathered);
            most = most.max(held.map(|(traits, _)| traits.gathered_bytes as u64).sum());
        }
        most
    }
}

fn step(
    schedule: &mut Schedule,
    rules: &StepRules,
    units: &[UnitTraits],
    uses: &Uses,
    instructions: &mut Vec<Instruction>,
) {
    let is_last_use = |at: usize| uses.backward[at + 1..].iter().all(|later| later.unit != uses.backward[at].unit);
    let completes: Vec<bool> = (0..uses.backward.len()).map(is_last_use).collect();
    for micro_batch in 0..rules.num_micro_batches {
        instructions.push(Instruction::BeginForward);
        for &unit in &uses.forward {
            let actions = schedule.forward(unit);
            act(instructions, actions);
            instructions.push(Instruction::Forward(unit));
        }
        for (used, _) in uses.backward.iter().zip(&completes).filter(|(_, completes)| **completes) {
            if units[used.unit].trainable {
                schedule.gradient_expected(used.unit);
            }
        }
        if schedule.needs_reduce_order() {
            let (reduces, uses) = (schedule.expected_reduce_order(), schedule.first_uses().to_vec());
            schedule.set_reduce_order(reduces);
            schedule.set_first_uses(uses);
        }
        let last = micro_batch + 1 == rules.num_micro_batches;
        let begun = schedule.begin_backward(rules.accumulate == Accumulate::Reduced || last);
        instructions.push(Instruction::BeginBackward);
        instructions.extend(begun.into_iter().map(Instruction::Act));
        for (&BackwardUse { unit, reads }, &completes) in uses.backward.iter().zip(&completes) {
            if reads {
                let actions = schedule.backward(unit);
                act(instructions, actions);
            }
            instructions.push(Instruction::Backward(unit));
            if completes {
                let actions = schedule.gradient(unit);
                act(instructions, actions);
            }
        }
        let actions = schedule.end_backward();
        act(instructions, actions);
    }
    instructions.push(Instruction::BeginStep);
    let actions = schedule.reduce_rest();
    act(instructions, actions);
    if rules.needs_norm {
        let actions = schedule.finish_reduces();
        act(instructions, actions);
        instructions.push(Instruction::Norm);
    }
    let actions = schedule.step();
    act(instructions, actions);
}

fn act(instructions: &mut Vec<Instruction>, actions: Vec<Action>) {
    instructions.extend(actions.into_iter().map(Instruction::Act));
}
