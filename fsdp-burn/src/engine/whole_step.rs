//! A forward and its backward in one call, which belongs to a caller that knows nothing of the engine.
//!
//! Burn's learner calls a model's `TrainStep::step`, and the user's code in there calls `loss.backward()`. So nobody tells
//! the engine where forward ends: the first gather or gradient that backward asks for does.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::{Engine, State};
use crate::Error;

impl Engine {
    /// Runs `step`. The gradients of its backward are multiplied with `weight`; with a weight of 0 they count for nothing,
    /// whatever they are.
    #[cfg_attr(not(feature = "learner"), expect(dead_code))]
    pub(crate) fn forward_and_backward<T>(&self, weight: f64, step: impl FnOnce() -> T) -> Result<T, Error> {
        {
            let mut state = self.lock();
            (state.void, state.weight, state.backward_begins_itself) = (weight == 0.0, weight, true);
        }
        let result = catch_unwind(AssertUnwindSafe(step));
        let begun = match result {
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
}
