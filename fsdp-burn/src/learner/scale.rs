//! The loss scale in a learner's checkpoint.
//!
//! Burn's checkpoint is three records, of which the scheduler's takes any number under a name. So the scale is the state of a
//! group of schedulers that no parameter belongs to, behind the program's own groups. One device that goes on from such a
//! checkpoint does not know the group, and leaves it out.

use std::sync::{Arc, Mutex, PoisonError};

use burn::module::ParamGroup;
use burn::optim::LearningRate;
use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::optim::lr_scheduler::{LrScheduler, LrSchedulerRecord};
use fsdp_core::LossScaler;

const SCALE: &str = "fsdp_loss_scale";
const GOOD_STEPS: &str = "fsdp_loss_scale_good_steps";

/// A scale and its steps without overflow, where there is one: to be saved, or as it was loaded.
#[derive(Clone, Debug, Default)]
pub(super) struct NotedScale(Arc<Mutex<Option<(f64, u32)>>>);

impl NotedScale {
    pub(super) fn of(scaler: Option<LossScaler>) -> Self {
        Self(Arc::new(Mutex::new(scaler.map(|scaler| (scaler.scale(), scaler.good_steps())))))
    }

    pub(super) fn get(&self) -> Option<(f64, u32)> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The scheduler, with the scale in its record. It is for a checkpoint alone: nothing steps it.
    pub(super) fn beside(&self, scheduler: ModuleLrScheduler) -> ModuleLrScheduler {
        scheduler.with_group(ParamGroup::from_ids(Vec::new()), self.clone())
    }
}

impl LrScheduler for NotedScale {
    fn step(&mut self) -> LearningRate {
        0.0
    }

    fn to_record(&self) -> LrSchedulerRecord {
        let record = LrSchedulerRecord::new();
        match self.get() {
            Some((scale, good_steps)) => {
                record.with_scalar(SCALE, scale).with_scalar(GOOD_STEPS, u64::from(good_steps))
            }
            None => record,
        }
    }

    fn load_record(&mut self, record: LrSchedulerRecord) {
        if let (Some(scale), Some(good_steps)) = (record.scalar::<f64>(SCALE), record.scalar::<u64>(GOOD_STEPS)) {
            let noted = (scale, u32::try_from(good_steps).unwrap_or(0));
            *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(noted);
        }
    }
}

#[cfg(test)]
mod tests {
    use fsdp_core::LossScale;

    use super::*;

    #[test]
    fn a_scale_goes_through_a_schedulers_record_and_other_schedulers_pass_it_over() {
        let mut scaler = LossScaler::new(LossScale::Dynamic);
        scaler.overflowed();
        scaler.stepped();
        let plain = || ModuleLrScheduler::new(0.1).with_group(ParamGroup::from_predicate("bias"), 0.2);
        let record = NotedScale::of(Some(scaler)).beside(plain()).to_record();
        let loaded = NotedScale::default();
        loaded.beside(plain()).load_record(record.clone());
        assert_eq!(loaded.get(), Some((32768.0, 1)));
        // One device, and a run without a scale.
        let mut one_device = plain().load_record(record);
        assert_eq!(one_device.step().base(), 0.1);
        loaded.beside(plain()).load_record(one_device.to_record());
        assert_eq!(loaded.get(), Some((32768.0, 1)), "nothing is noted there");
        assert!(NotedScale::of(None).beside(plain()).to_record().is_empty());
    }
}
