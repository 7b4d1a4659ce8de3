//! Numbers as people write them: `7e9`, `7.5B`, `350M`.

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
    // Beyond 2^53 not every whole number is a float, and no model is so large.
    let is_count = value.fract() == 0.0 && (1.0..=9e15).contains(&value);
    if is_count { Ok(value as u64) } else { Err(refusal()) }
}

/// A whole number of at least 1.
pub(crate) fn parse_positive(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|number| (1..=1usize << 40).contains(number));
    number.ok_or_else(|| format!("`{text}` must be a whole number of at least 1"))
}

/// A finite number above 0.
pub(crate) fn parse_above_zero(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite() && *number > 0.0);
    number.ok_or_else(|| format!("`{text}` must be a number above 0"))
}

/// A finite number of at least 0.
pub(crate) fn parse_not_negative(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite() && *number >= 0.0);
    number.ok_or_else(|| format!("`{text}` must be a number of at least 0"))
}

/// A share above 0, up to 1.
pub(crate) fn parse_share(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| *number > 0.0 && *number <= 1.0);
    number.ok_or_else(|| format!("`{text}` must be a share above 0, and at most 1"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_read_as_people_write_them() {
        let counts = ["7e9", "7.5B", "350M", "1_000", "2k", "1"].map(|text| parse_count(text).unwrap());
        assert_eq!(counts, [7_000_000_000, 7_500_000_000, 350_000_000, 1000, 2000, 1]);
        for text in ["", "B", "0", "-7e9", "1.5", "1e300", "nan", "seven"] {
            assert_eq!(
                parse_count(text).unwrap_err(),
                format!("`{text}` is no number of parameters; write one like 7e9, 7.5B or 350M")
            );
        }
    }

    #[test]
    fn ranges_are_checked() {
        assert!(parse_positive("0").is_err() && parse_positive("8") == Ok(8));
        assert!(parse_above_zero("0").is_err() && parse_above_zero("inf").is_err() && parse_above_zero("1e-3").is_ok());
        assert!(parse_not_negative("-1").is_err() && parse_not_negative("0").is_ok());
        assert!(parse_share("1.1").is_err() && parse_share("0").is_err() && parse_share("0.4").is_ok());
    }
}
