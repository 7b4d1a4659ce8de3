//! Sizes as people write them: `5GB`, `512MiB`, `1000`.

/// Bytes. `KB`, `MB`, `GB` and `TB` are powers of 1000, as on model hubs; with an `i`, powers of 1024.
pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    let digits = text.find(|character: char| !character.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let factor = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => Some(1),
        "kb" => Some(1000),
        "mb" => Some(1000u64.pow(2)),
        "gb" => Some(1000u64.pow(3)),
        "tb" => Some(1000u64.pow(4)),
        "kib" => Some(1 << 10),
        "mib" => Some(1 << 20),
        "gib" => Some(1 << 30),
        "tib" => Some(1u64 << 40),
        _ => None,
    };
    let bytes = number.parse().ok().zip(factor).and_then(|(number, factor): (u64, u64)| number.checked_mul(factor));
    bytes.filter(|&bytes| bytes > 0).ok_or_else(|| format!("`{text}` is no size; write one like 5GB, 512MiB or 1000"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units_of_1000_or_1024() {
        let parsed = ["5GB", "512MiB", "1000", "7 kb", "3tib"].map(|text| parse_size(text).unwrap());
        assert_eq!(parsed, [5_000_000_000, 512 << 20, 1000, 7000, 3 << 40]);
        for text in ["", "GB", "5XB", "-1", "0", "1.5GB", "99999999999TB"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }
}
