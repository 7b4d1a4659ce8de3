//! What an engine is told while it runs: which parameters are trained, and how the loss is scaled.

use std::sync::atomic::Ordering;

use fsdp_core::{LossScaler, Plan, Schedule};

use super::Engine;
use crate::Error;

impl Engine {
    /// Changes whenever other parameters are trained.
    pub(crate) fn generation(&self) -> usize {
        self.generation.load(Ordering::Relaxed)
    }

    /// Whether the parameter gets gradients at the moment.
    pub(crate) fn is_trained(&self, param: usize) -> bool {
        self.trained[param].load(Ordering::Relaxed)
    }

    /// Trains the parameters that `plan` says, from the next forward on. It is a plan of the same units and cuts.
    pub(crate) fn train(&self, plan: &Plan) -> Result<(), Error> {
        self.finish_reduces()?;
        self.abandon_forward()?;
        for (trained, param) in self.trained.iter().zip(plan.params()) {
            trained.store(param.trainable, Ordering::Relaxed);
        }
        self.generation.fetch_add(1, Ordering::Relaxed);
        // Reductions are in another order from now on, which all ranks agree on in the next backward.
        let units = plan.unit_traits(&self.dtypes.compute, &self.dtypes.reduce);
        let mut schedule = Schedule::new(plan.stage(), &units, self.settings.depth);
        schedule.set_tiers(&self.offload.unit_tiers(plan));
        schedule.set_reshards(self.links.regather.is_some());
        self.finish_write_back()?;
        self.lock().schedule = schedule;
        Ok(())
    }

    /// What a sum of gradients is multiplied with: one over the items or micro-batches since the last step.
    pub(crate) fn gradient_factor(&self) -> f64 {
        let state = self.lock();
        let scale = state.scaler.map_or(1.0, |scaler| scaler.scale());
        match state.items {
            Some(items) => state.item_unit / (items * scale),
            None if self.reduces_to_mean() => 1.0 / (state.backwards as f64 * scale),
            None => 1.0 / scale,
        }
    }

    /// The scale of the loss, if there is one.
    pub(crate) fn scaler(&self) -> Option<LossScaler> {
        self.lock().scaler
    }

    /// Goes on from a noted scale of the loss.
    pub(crate) fn restore_scale(&self, scale: f64, good_steps: u32) {
        if let Some(scaler) = &mut self.lock().scaler {
            scaler.restore(scale, good_steps);
        }
    }

    /// Tells the loss scale whether the gradients of this step are finite; returns whether they are not because the scale
    /// was too large. All ranks see the same norm, so they answer the same.
    pub(crate) fn overflowed(&self, finite: bool) -> bool {
        match &mut self.lock().scaler {
            Some(scaler) if finite => {
                scaler.stepped();
                false
            }
            Some(scaler) => scaler.overflowed(),
            None => false,
        }
    }
}
