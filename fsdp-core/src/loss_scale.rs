//! Scaling of the loss, so that small gradients do not vanish in half precision.
//!
//! The loss is multiplied by the scale before backward, and gradients are divided by it in float32 before they are used. A
//! *dynamic* scale finds itself: an overflow shows as a gradient norm that is not finite, the step is skipped and the scale
//! halved; after many steps without one it is doubled. The norm is one for all ranks, so that all of them skip together
//! and go on with the same scale, whichever rank overflowed (Micikevicius et al., "Mixed Precision Training", 2018).

/// How the loss is scaled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LossScale {
    /// Found while training, beginning with [`LossScaler::INITIAL`].
    Dynamic,
    /// Always this number.
    Fixed(f64),
}

/// The scale of a run.
///
/// ```
/// use fsdp_core::{LossScale, LossScaler};
///
/// let mut scaler = LossScaler::new(LossScale::Dynamic);
/// assert_eq!(scaler.scale(), 65536.0);
/// assert!(scaler.overflowed()); // skip this step; the next one has half the scale
/// assert_eq!(scaler.scale(), 32768.0);
/// (0..LossScaler::GROWTH_INTERVAL).for_each(|_| scaler.stepped());
/// assert_eq!(scaler.scale(), 65536.0);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScaler {
    scale: f64,
    dynamic: bool,
    good_steps: u32,
}

impl LossScaler {
    /// Where a dynamic scale begins.
    pub const INITIAL: f64 = 65536.0;
    /// A dynamic scale doubles after so many steps without overflow.
    pub const GROWTH_INTERVAL: u32 = 2000;
    /// The least dynamic scale, below 1 for losses that are sums. What is not finite at this scale is no overflow.
    pub const MIN: f64 = 1.0 / 65536.0;
    /// The largest dynamic scale.
    pub const MAX: f64 = 16_777_216.0;

    /// A scaler at its beginning.
    pub fn new(loss_scale: LossScale) -> Self {
        let (scale, dynamic) = match loss_scale {
            LossScale::Dynamic => (Self::INITIAL, true),
            LossScale::Fixed(scale) => (scale, false),
        };
        Self { scale, dynamic, good_steps: 0 }
    }

    /// What the loss is multiplied with.
    pub fn scale(&self) -> f64 {
        self.scale
    }

    /// Whether the scale changes.
    pub fn is_dynamic(&self) -> bool {
        self.dynamic
    }

    /// Steps since the scale last changed.
    pub fn good_steps(&self) -> u32 {
        self.good_steps
    }

    /// Goes on from a noted scale. A fixed one stays as it is.
    pub fn restore(&mut self, scale: f64, good_steps: u32) {
        if self.dynamic {
            (self.scale, self.good_steps) = (scale.clamp(Self::MIN, Self::MAX), good_steps);
        }
    }

    /// The gradient norm was finite, and a step was taken.
    pub fn stepped(&mut self) {
        if !self.dynamic {
            return;
        }
        self.good_steps += 1;
        if self.good_steps >= Self::GROWTH_INTERVAL {
            self.scale = (self.scale * 2.0).min(Self::MAX);
            self.good_steps = 0;
        }
    }

    /// The gradient norm was not finite: whether a smaller scale is worth a try, which the next step has. Otherwise the
    /// loss or the gradients themselves are not finite.
    pub fn overflowed(&mut self) -> bool {
        let smaller = self.dynamic && self.scale > Self::MIN;
        if smaller {
            self.scale = (self.scale / 2.0).max(Self::MIN);
            self.good_steps = 0;
        }
        smaller
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fixed_scale_never_changes_and_blames_no_overflow() {
        let mut scaler = LossScaler::new(LossScale::Fixed(128.0));
        (0..2 * LossScaler::GROWTH_INTERVAL).for_each(|_| scaler.stepped());
        assert!(!scaler.overflowed());
        scaler.restore(4.0, 7);
        assert_eq!((scaler.scale(), scaler.good_steps()), (128.0, 0));
    }

    #[test]
    fn a_dynamic_scale_stays_within_its_bounds() {
        let mut scaler = LossScaler::new(LossScale::Dynamic);
        let halvings = (0..100).take_while(|_| scaler.overflowed()).count();
        assert_eq!((halvings, scaler.scale()), (32, LossScaler::MIN));
        for _ in 0..41 * LossScaler::GROWTH_INTERVAL {
            scaler.stepped();
        }
        assert_eq!(scaler.scale(), LossScaler::MAX);
    }

    #[test]
    fn an_overflow_starts_the_count_anew() {
        let mut scaler = LossScaler::new(LossScale::Dynamic);
        (1..LossScaler::GROWTH_INTERVAL).for_each(|_| scaler.stepped());
        scaler.overflowed();
        scaler.stepped();
        assert_eq!((scaler.scale(), scaler.good_steps()), (32768.0, 1));
        let mut resumed = LossScaler::new(LossScale::Dynamic);
        resumed.restore(scaler.scale(), scaler.good_steps());
        assert_eq!(resumed, scaler);
    }
}
