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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_stays_awake_only_where_each_has_a_core() {
        assert_eq!([stay_awake(1, 1), stay_awake(2, 2), stay_awake(2, 8)], [AWAKE; 3]);
        assert_eq!([stay_awake(2, 1), stay_awake(9, 8)], [Duration::ZERO; 2]);
    }
}
