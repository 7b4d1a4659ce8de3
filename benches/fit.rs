//! A straight line through measured times: latency and bandwidth.

use fsdp_core::Link;

/// The `T = α + β·S` that is nearest to the points `(S in bytes, T in seconds)`, by least squares of relative errors.
///
/// Relative, since sizes span five orders of magnitude: in absolute terms only the largest would count, and α would be
/// whatever is left of their noise. `None` with fewer than two different sizes.
pub fn fit(points: &[(f64, f64)]) -> Option<Link> {
    let mut sums = [0.0; 5];
    for (bytes, seconds) in points {
        // An error of the same part of T weighs the same everywhere.
        let weight = 1.0 / (seconds * seconds);
        let terms = [1.0, *bytes, bytes * bytes, *seconds, bytes * seconds];
        sums.iter_mut().zip(terms).for_each(|(sum, term)| *sum += weight * term);
    }
    let [w, wx, wxx, wy, wxy] = sums;
    let determinant = w * wxx - wx * wx;
    // Rounding leaves a trace of the products where they should cancel.
    if determinant.is_nan() || determinant <= 1e-12 * w * wxx {
        return None;
    }
    Some(Link { alpha_s: (wxx * wy - wx * wxy) / determinant, beta_s_per_byte: (w * wxy - wx * wy) / determinant })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_on_a_line_give_the_line() {
        let points: Vec<_> =
            (10..28).step_by(2).map(|power| f64::from(1 << power)).map(|s| (s, 2e-5 + 1e-10 * s)).collect();
        let link = fit(&points).unwrap();
        assert!((link.alpha_s / 2e-5 - 1.0).abs() < 1e-6, "{link:?}");
        assert!((link.beta_s_per_byte / 1e-10 - 1.0).abs() < 1e-6, "{link:?}");
    }

    #[test]
    fn an_error_of_the_largest_size_does_not_drown_the_latency() {
        // One tenth too much at 100 MB is 1 ms, fifty times the latency.
        let link = fit(&[(1e3, 20.1e-6), (1e4, 21e-6), (1e6, 120e-6), (1e8, 11.02e-3)]).unwrap();
        assert!((15e-6..25e-6).contains(&link.alpha_s), "{link:?}");
    }

    #[test]
    fn one_size_is_not_a_line() {
        assert_eq!(fit(&[]), None);
        assert_eq!(fit(&[(1e6, 1e-3), (1e6, 2e-3)]), None);
    }
}
