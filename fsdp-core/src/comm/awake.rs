//! How long a rank that waits stays awake before it sleeps.

use std::time::Duration;

/// About as long as the system takes to wake a rank: ranks in step meet without the system, and one that waits for longer
/// has lost no more than that.
const AWAKE: Duration = Duration::from_micros(50);

/// For each of `num_ranks` ranks that share `num_cores` cores. One without a core of its own sleeps at once: awake, it would
/// keep the rank that it waits for from running.
pub(crate) fn stay_awake(num_ranks: usize, num_cores: usize) -> Duration {
    if num_ranks <= num_cores { AWAKE } else { Duration::ZERO }
}

/// Cores that are in any of some lists, each as the kernel writes it: `0-3,8`.
pub(crate) fn count_cores<'a>(lists: impl IntoIterator<Item = &'a str>) -> usize {
    let range = |text: &str| {
        let (first, last) = text.trim().split_once('-').unwrap_or((text.trim(), text.trim()));
        Some(first.parse::<usize>().ok()?..=last.parse().ok()?)
    };
    let mut cores: Vec<usize> =
        lists.into_iter().flat_map(|list| list.split(',')).filter_map(range).flatten().collect();
    cores.sort_unstable();
    cores.dedup();
    cores.len()
}

/// The cores that this process may use, as the kernel lists them.
pub(crate) fn own_cores() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    list.unwrap_or_default().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_stays_awake_only_where_each_has_a_core() {
        assert_eq!([stay_awake(1, 1), stay_awake(2, 2), stay_awake(2, 8)], [AWAKE; 3]);
        assert_eq!([stay_awake(2, 1), stay_awake(9, 8)], [Duration::ZERO; 2]);
    }

    #[test]
    fn cores_of_several_processes_are_counted_once() {
        assert_eq!(count_cores(["0-3,8", "2-4", "8"]), 6);
        assert_eq!(count_cores(["0", "1"]), 2);
        assert_eq!(count_cores(["", "what"]), 0);
        assert!(count_cores([own_cores().as_str()]) > 0);
    }
}
