//! What a step takes, step by step: seconds, and seconds of processors.

use std::time::Instant;

use cpu_time::ProcessTime;
use fsdp_core::WorkTime;
use serde::{Deserialize, Serialize};

/// The first steps make the optimizer's state and warm up, and do not count where there are others.
const WARM_UP: usize = 2;

/// A rank's times, of each the middle one of all steps. Seconds of processors are those of the process: of all its ranks.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TypicalStep {
    /// From one step to the next.
    pub step: WorkTime,
    /// Of that, the optimizer, without standing still for communication.
    pub optimizer: WorkTime,
}

/// Tells of one rank's steps, one after the other.
pub struct StepClock {
    began: Reading,
    /// Of the step that is under way.
    optimizer: WorkTime,
    steps: Vec<TypicalStep>,
}

/// A moment.
#[derive(Clone, Copy)]
pub struct Reading {
    wall: Instant,
    cpu: ProcessTime,
}

impl Reading {
    /// This one.
    pub fn now() -> Self {
        Self { wall: Instant::now(), cpu: ProcessTime::now() }
    }

    fn elapsed(self) -> WorkTime {
        WorkTime { wall_s: self.wall.elapsed().as_secs_f64(), cpu_s: self.cpu.elapsed().as_secs_f64() }
    }
}

impl StepClock {
    /// The first step begins.
    pub fn start() -> Self {
        Self { began: Reading::now(), optimizer: NOTHING, steps: Vec::new() }
    }

    /// The optimizer has worked since `began`, but for so many seconds in which it stood still.
    pub fn optimized(&mut self, began: Reading, stood_still_s: f64) {
        let WorkTime { wall_s, cpu_s } = began.elapsed();
        self.optimizer.wall_s += (wall_s - stood_still_s).max(0.0);
        self.optimizer.cpu_s += cpu_s;
    }

    /// A step ends, and the next one begins.
    pub fn next(&mut self) {
        let optimizer = std::mem::replace(&mut self.optimizer, NOTHING);
        self.steps.push(TypicalStep { step: self.began.elapsed(), optimizer });
        self.began = Reading::now();
    }

    /// Seconds from one step to the next, of all steps.
    pub fn steps_s(&self) -> Vec<f64> {
        self.steps.iter().map(|times| times.step.wall_s).collect()
    }

    /// Seconds in which the optimizer worked, in all steps together.
    pub fn optimizer_s(&self) -> f64 {
        self.steps.iter().map(|times| times.optimizer.wall_s).sum()
    }

    /// The middle of all steps but the first two.
    pub fn typical(&self) -> TypicalStep {
        let counted = &self.steps[if self.steps.len() > WARM_UP { WARM_UP } else { 0 }..];
        let middle = |of: fn(&TypicalStep) -> f64| {
            let mut all: Vec<f64> = counted.iter().map(of).collect();
            all.sort_by(f64::total_cmp);
            all.get(all.len() / 2).copied().unwrap_or(0.0)
        };
        TypicalStep {
            step: WorkTime { wall_s: middle(|one| one.step.wall_s), cpu_s: middle(|one| one.step.cpu_s) },
            optimizer: WorkTime {
                wall_s: middle(|one| one.optimizer.wall_s),
                cpu_s: middle(|one| one.optimizer.cpu_s),
            },
        }
    }
}

const NOTHING: WorkTime = WorkTime { wall_s: 0.0, cpu_s: 0.0 };

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_typical_step_leaves_out_the_first_two() {
        let step = |seconds: f64| TypicalStep {
            step: WorkTime { wall_s: seconds, cpu_s: 2.0 * seconds },
            optimizer: WorkTime { wall_s: seconds / 4.0, cpu_s: seconds / 8.0 },
        };
        let clock = |seconds: &[f64]| StepClock {
            steps: seconds.iter().map(|&seconds| step(seconds)).collect(),
            ..StepClock::start()
        };
        assert_eq!(clock(&[90.0, 80.0, 1.0, 3.0, 2.0]).typical(), step(2.0));
        assert_eq!(clock(&[90.0, 80.0]).typical(), step(90.0), "where there are no others, they count");
    }

    #[test]
    fn a_step_is_all_that_happens_until_the_next() {
        let mut clock = StepClock::start();
        let began = Reading::now();
        std::thread::sleep(std::time::Duration::from_millis(20));
        clock.optimized(began, 0.005);
        clock.next();
        let TypicalStep { step, optimizer } = clock.typical();
        assert!(step.wall_s >= 0.02 && optimizer.wall_s >= 0.015 && optimizer.wall_s < step.wall_s, "{step:?}");
        assert_eq!((clock.optimizer_s(), clock.steps_s()), (optimizer.wall_s, vec![step.wall_s]));
    }
}
