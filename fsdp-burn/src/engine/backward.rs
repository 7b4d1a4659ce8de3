//! Backward: its two ends, and the gradients that arrive in between.
//!
//! [Note: Backward begins by itself]
//! Burn's learner calls a model's `TrainStep::step`, and the user's code in there calls `loss.backward()`. So nobody tells
//! the engine where forward ends: the first gather or gradient that only backward asks for does.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use bytes::Bytes;
use fsdp_core::{Accumulate, Dtype, OpTag, Phase, Reduce, ReducePart, ShardLayout, SpanKind, UnitIndex};

use super::{Engine, EngineFailed, State, Whole};
use crate::scaled_loss::with_scale_due;
use crate::{Error, host};

/// Optimizer steps after which the orders of units are agreed upon anew: two small messages for a model whose forward has
/// come to use its units in another order.
const STEPS_PER_ORDER: u64 = 64;

impl Engine {
    /// Runs `backward` between the two ends that the schedule needs. `items` is how many items the losses of all ranks are
    /// means over together, and whether this rank has any; `None` counts all losses alike.
    pub(crate) fn backward<T>(&self, items: Option<(f64, bool)>, backward: impl FnOnce() -> T) -> Result<T, Error> {
        self.begin_backward(&mut self.lock(), items)?;
        self.end_backward(catch_unwind(AssertUnwindSafe(backward)))
    }

    fn end_backward<T>(&self, result: std::thread::Result<T>) -> Result<T, Error> {
        let mut state = self.lock();
        self.rests(&mut state);
        state.in_backward = false;
        match result {
            Ok(value) => {
                state.backwards += 1;
                let actions = state.schedule.end_backward();
                self.run(&mut state, actions)?;
                Ok(value)
            }
            Err(payload) => {
                state.discard_gradients();
                drop(state);
                match payload.downcast::<EngineFailed>() {
                    Ok(failed) => Err(failed.0),
                    Err(payload) => {
                        self.abandon_forward()?;
                        resume_unwind(payload)
                    }
                }
            }
        }
    }

    /// Runs `step`, a forward with its backward, which belong to a caller that knows nothing of this engine; see
    /// [Note: Backward begins by itself]. The gradients are multiplied with `weight`; with a weight of 0 they count for nothing,
    /// whatever they are.
    #[cfg_attr(not(feature = "learner"), expect(dead_code))]
    pub(crate) fn forward_and_backward<T>(&self, weight: f64, step: impl FnOnce() -> T) -> Result<T, Error> {
        {
            let mut state = self.lock();
            (state.void, state.weight, state.backward_begins_itself) = (weight == 0.0, weight, true);
        }
        let scale = self.scaler().map(|scaler| scaler.scale());
        let (result, is_scaled) = with_scale_due(scale, || catch_unwind(AssertUnwindSafe(step)));
        let begun = match result {
            Ok(_) if !is_scaled => Err(self.misuse(
                "the configuration scales the loss, and `TrainStep::step` has not",
                "call `fsdp_burn::scale_loss(loss).backward()` in it",
            )),
            // Where this rank has had no backward, the others still wait for its part in their reductions.
            Ok(_) => self.backward_has_begun(&mut self.lock()),
            Err(_) => Ok(()),
        };
        self.lock().backward_begins_itself = false;
        begun?;
        let ended = self.end_backward(result);
        let mut state = self.lock();
        (state.void, state.weight) = (false, 1.0);
        ended
    }

    /// Something that only backward does is about to happen.
    pub(super) fn backward_has_begun(&self, state: &mut State) -> Result<(), Error> {
        if state.in_backward { Ok(()) } else { self.start_backward(state) }
    }

    pub(super) fn try_capture(&self, param: usize, gradient: Whole) -> Result<(), Error> {
        let mut state = self.lock();
        if state.backward_begins_itself {
            self.backward_has_begun(&mut state)?;
        }
        if !state.in_backward {
            return Err(self.misuse(
                "backward reached this model without its `backward`, so its gradients would not be reduced",
                "call `model.backward(loss)` in place of `loss.backward()`; a model inside another model's loss must be \
                 frozen (`no_grad`) or be a field of it",
            ));
        }
        if !state.void {
            state.has_gradient[param] = true;
            // Multiplying by 1 changes nothing but the time it takes.
            let gradient = match state.weight {
                1.0 => gradient,
                weight => gradient.times(weight)?,
            };
            let sum = match state.local[param].take() {
                Some(sum) => {
                    state.held.local -= sum.size_bytes();
                    sum.plus(gradient, host::float_dtype(self.dtypes.master[param]))?
                }
                None => gradient,
            };
            state.held.local += sum.size_bytes();
            state.local[param] = Some(sum);
            state.note();
        }
        let unit = self.plan.params()[param].unit;
        self.computes(&mut state, SpanKind::Backward, unit);
        let actions = state.schedule.gradient(unit);
        if !actions.is_empty() {
            self.rests(&mut state);
        }
        self.run(&mut state, actions)
    }

    /// Lets all ranks know which parameters have a gradient on any of them, where gradients are on devices: looking at one there
    /// would mean to wait for it. *Collective.*
    pub(crate) fn agree_on_gradients(&self) -> Result<(), Error> {
        let control = self.links.control.as_ref();
        if !self.home().is_device() || control.world_size() == 1 {
            return Ok(());
        }
        let mut state = self.lock();
        let flag = |&has_gradient: &bool| f32::from(u8::from(has_gradient)).to_ne_bytes();
        let part = ReducePart {
            full: state.has_gradient.iter().flat_map(flag).collect(),
            layout: ShardLayout::new(&[state.has_gradient.len()], 0, control.world_size()),
            dtype: Dtype::F32,
        };
        let tag = OpTag::new(state.step, Phase::Optimizer, "which parameters have a gradient");
        let sums = control.all_reduce(&tag, &[part], Reduce::SUM)?;
        let sums = sums.iter().flat_map(|bytes| bytes.as_chunks::<4>().0).map(|bytes| f32::from_ne_bytes(*bytes));
        for (has_gradient, sum) in state.has_gradient.iter_mut().zip(sums) {
            *has_gradient = sum > 0.0;
        }
        Ok(())
    }

    /// What the weight of the next loss, of so many items on all ranks, is divided by. A loss whose items are not told counts
    /// as one.
    pub(crate) fn item_unit(&self, num_items: f64) -> f64 {
        let state = self.lock();
        if state.backwards == 0 { num_items } else { state.item_unit }
    }

    fn begin_backward(&self, state: &mut State, items: Option<(f64, bool)>) -> Result<(), Error> {
        if state.backwards == 0 {
            state.item_unit = items.map_or(1.0, |(items, _)| items);
        }
        state.void = items.is_some_and(|(_, any_here)| !any_here);
        // A loss whose items were not told counts as one.
        state.items = match (items, state.items) {
            (Some((items, _)), before) => Some(before.unwrap_or(state.backwards as f64) + items),
            (None, Some(before)) => Some(before + 1.0),
            (None, None) => None,
        };
        self.start_backward(state)
    }

    fn start_backward(&self, state: &mut State) -> Result<(), Error> {
        self.rests(state);
        let is_due = state.backwards == 0 && state.step.is_multiple_of(STEPS_PER_ORDER);
        if is_due || state.schedule.needs_reduce_order() {
            let (reduces, uses) = (state.schedule.expected_reduce_order(), state.schedule.first_uses().to_vec());
            let reduces = self.agree_on_order("order of reductions", reduces, state.step)?;
            let uses = self.agree_on_order("order of first uses", uses, state.step)?;
            // A forward of rank 0 that has used nothing, as one without items, says nothing of the next.
            if !uses.is_empty() || state.schedule.needs_reduce_order() {
                state.schedule.set_reduce_order(reduces);
                state.schedule.set_first_uses(uses);
            }
        }
        let last = state.backwards + 1 >= self.settings.accumulation;
        let actions = state.schedule.begin_backward(self.settings.accumulate == Accumulate::Reduced || last);
        self.run(state, actions)?;
        state.in_backward = true;
        state.entered = 0;
        state.last_entered = None;
        Ok(())
    }

    /// Rank 0's order, for all.
    fn agree_on_order(&self, what: &str, order: Vec<UnitIndex>, step: u64) -> Result<Vec<UnitIndex>, Error> {
        let tag = OpTag::new(step, Phase::Control, what);
        let bytes: Vec<u8> = order.iter().flat_map(|&unit| (unit as u64).to_le_bytes()).collect();
        let mine = (self.links.control.rank() == 0).then(|| Bytes::from(bytes));
        let agreed = self.links.control.broadcast(&tag, 0, mine)?;
        let unit = |chunk: &[u8; 8]| u64::from_le_bytes(*chunk) as UnitIndex;
        Ok(agreed.as_chunks::<8>().0.iter().map(unit).collect())
    }
}
