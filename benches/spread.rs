//! Middle and ends of repeated measurements, and how busy the machine was.

use std::fmt;

use serde::Serialize;

/// The middle one of `values`; NaN if there are none.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Median, smallest and largest of some seconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Spread {
    /// The middle one.
    pub median: f64,
    /// The smallest.
    pub min: f64,
    /// The largest.
    pub max: f64,
}

impl Spread {
    /// The spread of `values`.
    pub fn of(values: &[f64]) -> Self {
        let end = |pick: fn(f64, f64) -> f64| values.iter().copied().reduce(pick).unwrap_or(f64::NAN);
        Self { median: median(values), min: end(f64::min), max: end(f64::max) }
    }
}

impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>7.3} {:>7.3} {:>7.3}", self.median, self.min, self.max)
    }
}

/// The load average of the last minute, for the reader of a table; "unknown" where the system does not tell.
pub fn load_average() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().next().unwrap_or("unknown").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_is_middle_and_ends() {
        let Spread { median, min, max } = Spread::of(&[3.0, 9.0, 1.0]);
        assert_eq!((median, min, max), (3.0, 1.0, 9.0));
        assert!(Spread::of(&[]).median.is_nan());
    }
}
