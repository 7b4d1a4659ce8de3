//! Times and rates in the unit that fits.

/// Seconds in the unit that fits.
pub(crate) fn seconds(seconds: f64) -> String {
    match seconds {
        s if s >= 100.0 => format!("{s:.0} s"),
        s if s >= 1.0 => format!("{s:.2} s"),
        s if s >= 1e-3 => format!("{:.2} ms", s * 1e3),
        s if s > 0.0 => format!("{:.2} µs", s * 1e6),
        _ => "0".to_owned(),
    }
}

/// A rate, with the prefix that fits.
pub(crate) fn rate(per_second: f64, unit: &str) -> String {
    let prefixes = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")];
    let found = prefixes.into_iter().find(|(size, _)| per_second >= *size);
    let (size, prefix) = found.unwrap_or((1.0, ""));
    format!("{:.1} {prefix}{unit}/s", per_second / size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_the_unit_that_fits() {
        assert_eq!([1.5, 0.0025, 3e-6, 0.0, 250.0].map(seconds), ["1.50 s", "2.50 ms", "3.00 µs", "0", "250 s"]);
        assert_eq!([4.5e11, 3.0].map(|number| rate(number, "B")), ["450.0 GB/s", "3.0 B/s"]);
    }
}
