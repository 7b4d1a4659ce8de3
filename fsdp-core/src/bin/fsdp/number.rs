//! Numbers as people write them: `7e9`, `7.5B`, `350M`; and how large they may be, so that nothing that is computed with
//! them overflows or never ends.

use fsdp_core::{MOST_ELEMENTS, grouped};

/// A whole positive number, with an exponent or one of the letters K, M, B and T.
pub(crate) fn parse_count(text: &str) -> Result<u64, String> {
    let refusal = || format!("`{text}` is no number of parameters; write one like 7e9, 7.5B or 350M");
    let number = text.trim();
    let (number, factor) = match number.chars().last().map(|letter| letter.to_ascii_uppercase()) {
        Some('K') => (&number[..number.len() - 1], 1e3),
        Some('M') => (&number[..number.len() - 1], 1e6),
        Some('B') => (&number[..number.len() - 1], 1e9),
        Some('T') => (&number[..number.len() - 1], 1e12),
        _ => (number, 1.0),
    };
    let value: f64 = number.replace('_', "").parse().map_err(|_| refusal())?;
    let value = value * factor;
    // A decimal fraction times a power of ten is whole but for the last bit.
    let whole = value.round();
    let is_whole = (value - whole).abs() <= 2.0 * f64::EPSILON * whole;
    let is_count = is_whole && (1.0..=MOST_ELEMENTS as f64).contains(&whole);
    if is_count { Ok(whole as u64) } else { Err(refusal()) }
}

/// Ranks that a simulation holds in memory.
pub(crate) const MOST_RANKS: usize = 1 << 20;
/// Blocks, or units, of a model.
pub(crate) const MOST_UNITS: usize = 4096;
/// Any other size. Products of two are whole numbers still.
pub(crate) const MOST: usize = 1 << 30;

/// Reads a whole number from 1 to `most`.
pub(crate) fn up_to(most: usize) -> impl Fn(&str) -> Result<usize, String> + Clone + Send + Sync + 'static {
    move |text| {
        let number = text.parse().ok().filter(|number| (1..=most).contains(number));
        number.ok_or_else(|| format!("`{text}` must be a whole number from 1 to {}", grouped(most as u64)))
    }
}

/// Reads a number from `least` to `most`.
pub(crate) fn between(least: f64, most: f64) -> impl Fn(&str) -> Result<f64, String> + Clone + Send + Sync + 'static {
    move |text| {
        let number = text.parse().ok().filter(|number| (least..=most).contains(number));
        number.ok_or_else(|| format!("`{text}` must be a number from {least} to {most}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_read_as_people_write_them() {
        let counts = ["7e9", "7.5B", "8.2B", "350M", "1_000", "2k", "1"].map(|text| parse_count(text).unwrap());
        assert_eq!(counts, [7_000_000_000, 7_500_000_000, 8_200_000_000, 350_000_000, 1000, 2000, 1]);
        for text in ["", "B", "0", "-7e9", "1.5", "1e300", "nan", "seven"] {
            assert_eq!(
                parse_count(text).unwrap_err(),
                format!("`{text}` is no number of parameters; write one like 7e9, 7.5B or 350M")
            );
        }
    }

    #[test]
    fn ranges_are_checked() {
        let count = up_to(1000);
        assert_eq!([count("1"), count("1000")], [Ok(1), Ok(1000)]);
        for text in ["0", "1001", "-1", "1e3", "", "99999999999999999999999"] {
            assert_eq!(count(text).unwrap_err(), format!("`{text}` must be a whole number from 1 to 1,000"));
        }
        let share = between(0.001, 1.0);
        assert_eq!([share("0.4"), share("1")], [Ok(0.4), Ok(1.0)]);
        for text in ["0", "1.1", "inf", "nan", "x"] {
            assert_eq!(share(text).unwrap_err(), format!("`{text}` must be a number from 0.001 to 1"));
        }
    }
}
