//! The words of `#[shard(...)]`, and the message for a word that is none of them.

pub(crate) const UNIT: &str = "unit";
pub(crate) const UNITS: &str = "units";
pub(crate) const NESTED: &str = "nested";
pub(crate) const KEEP: &str = "keep";
pub(crate) const REPLICATE: &str = "replicate";
pub(crate) const SPEC: &str = "spec";
pub(crate) const IGNORE: &str = "ignore";
pub(crate) const PREFETCH: &str = "prefetch";
pub(crate) const PRECISION: &str = "precision";
pub(crate) const REDUCE: &str = "reduce";
pub(crate) const OUTPUT: &str = "output";
pub(crate) const OFFLOAD: &str = "offload";

/// The word of a type, as opposed to those of its fields.
pub(crate) const CRATE: &str = "crate";

/// The words of a field, in the order in which messages list them.
pub(crate) const OF_FIELDS: &[&str] =
    &[UNIT, UNITS, NESTED, KEEP, REPLICATE, SPEC, IGNORE, PREFETCH, PRECISION, REDUCE, OUTPUT, OFFLOAD];

/// The element types that a unit may compute in, reduce in and put out, by their names in the configuration file.
pub(crate) const PRECISIONS: &[&str] = &["f32", "bf16", "f16"];

/// The tiers that may hold a unit's shards, by their names in the configuration file.
pub(crate) const TIERS: &[&str] = &["none", "cpu", "nvme"];

/// Says that `word` is no `kind`, and names the nearest of `known`, or all of them where none is near.
pub(crate) fn unknown(kind: &str, word: &str, known: &[&str]) -> String {
    match nearest(word, known) {
        Some(near) => format!("unknown {kind} `{word}`; did you mean `{near}`?"),
        None => format!("unknown {kind} `{word}`; expected {}", one_of(known)),
    }
}

/// `a`, `b` or `c`, each in backquotes.
pub(crate) fn one_of(words: &[&str]) -> String {
    let quoted: Vec<_> = words.iter().map(|word| format!("`{word}`")).collect();
    match quoted.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        _ => quoted.concat(),
    }
}

/// The known word with the fewest typing slips from `word`: at most one slip in three letters.
fn nearest<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    let word = word.to_lowercase();
    let allowed = (word.chars().count() / 3).max(1);
    let slips = known.iter().map(|candidate| (distance(&word, candidate), *candidate));
    slips.filter(|(slips, _)| *slips <= allowed).min_by_key(|(slips, _)| *slips).map(|(_, candidate)| candidate)
}

/// Edit distance where exchanging two neighbours counts once, because that is the commonest slip.
fn distance(left: &str, right: &str) -> usize {
    let (left, right): (Vec<char>, Vec<char>) = (left.chars().collect(), right.chars().collect());
    // Row `i` holds the distances of the first `i` letters of `left` to each beginning of `right`.
    let mut rows = vec![(0..=right.len()).collect::<Vec<_>>()];
    for i in 1..=left.len() {
        let mut row = vec![i];
        for j in 1..=right.len() {
            let replaced = rows[i - 1][j - 1] + usize::from(left[i - 1] != right[j - 1]);
            let mut best = replaced.min(rows[i - 1][j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && left[i - 1] == right[j - 2] && left[i - 2] == right[j - 1] {
                best = best.min(rows[i - 2][j - 2] + 1);
            }
            row.push(best);
        }
        rows.push(row);
    }
    rows[left.len()][right.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distance_counts_slips() {
        for (left, right, slips) in [
            ("", "", 0),
            ("", "unit", 4),
            ("unit", "", 4),
            ("unit", "unit", 0),
            ("unti", "unit", 1),
            ("unit", "units", 1),
            ("kep", "keep", 1),
            ("keap", "keep", 1),
            ("kitten", "sitting", 3),
        ] {
            assert_eq!(distance(left, right), slips, "{left} to {right}");
        }
    }

    #[test]
    fn a_near_word_is_named() {
        assert_eq!(
            unknown("shard attribute", "unti", OF_FIELDS),
            "unknown shard attribute `unti`; did you mean `unit`?"
        );
        assert_eq!(unknown("precision", "BF16", PRECISIONS), "unknown precision `BF16`; did you mean `bf16`?");
        for (typo, word) in
            [("uints", UNITS), ("nestd", NESTED), ("replicated", REPLICATE), ("prefech", PREFETCH), ("fp16", "f16")]
        {
            let known = [OF_FIELDS, PRECISIONS].concat();
            assert_eq!(nearest(typo, &known), Some(word), "{typo}");
        }
    }

    #[test]
    fn without_a_near_word_all_are_listed() {
        assert_eq!(
            unknown("offload tier", "gpu0", TIERS),
            "unknown offload tier `gpu0`; expected `none`, `cpu` or `nvme`"
        );
        assert_eq!(
            unknown("shard attribute", "rename", &[CRATE]),
            "unknown shard attribute `rename`; expected `crate`"
        );
    }
}
