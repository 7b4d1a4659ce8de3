//! The known name that a misspelt one most likely meant.

/// The candidate with the fewest edits from `name`, unless even that has too many to be a slip. Of equals, the first.
pub(super) fn nearest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let most_edits = (name.chars().count() / 3).max(1);
    let name = name.to_lowercase().replace('-', "_");
    let by_distance = candidates.into_iter().map(|candidate| (edit_distance(&name, candidate), candidate));
    by_distance.filter(|&(edits, _)| edits <= most_edits).min_by_key(|&(edits, _)| edits).map(|(_, name)| name)
}

/// Insertions, deletions, substitutions and swaps of neighbours that turn `a` into `b`.
fn edit_distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    // rows[i][j] is the distance between the first i characters of a and the first j of b.
    let mut rows: Vec<Vec<usize>> = vec![(0..=b.len()).collect()];
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let substituted = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut best = substituted.min(rows[i - 1][j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                best = best.min(rows[i - 2][j - 2] + 1);
            }
            row.push(best);
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_count_single_edits_and_swaps() {
        for (a, b, edits) in
            [("", "", 0), ("norm", "nrom", 1), ("stage", "stag", 1), ("", "ab", 2), ("kitten", "sitting", 3)]
        {
            assert_eq!(edit_distance(a, b), edits, "{a} {b}");
            assert_eq!(edit_distance(b, a), edits, "{b} {a}");
        }
    }

    #[test]
    fn slips_find_their_name_and_strangers_find_none() {
        let names = ["stage", "world_size", "gradient_clip_norm"];
        assert_eq!(nearest("world-size", names), Some("world_size"));
        assert_eq!(nearest("WORLD_SIZE", names), Some("world_size"));
        assert_eq!(nearest("gradient_clipp1ng", names), Some("gradient_clip_norm"));
        assert_eq!(nearest("learning_rate", names), None);
        assert_eq!(nearest("x", names), None);
    }
}
