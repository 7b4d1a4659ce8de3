//! Where each rank stands: what it waits in, and who lets the others wait.

use std::fmt;
use std::time::Duration;

use crate::Issued;

/// Where a rank stands, as far as it is known.
#[derive(Clone, Debug, PartialEq)]
pub struct Standing {
    /// The rank.
    pub rank: usize,
    /// Since it was last heard from.
    pub silent: Duration,
    /// The operation that it has waited in longest, and for how long.
    pub waiting: Option<(Issued, Duration)>,
    /// The operation it came to last.
    pub last: Option<Issued>,
    /// Whether its program has returned.
    pub left: bool,
}

/// Ranks that wait, and those they wait for.
#[derive(Clone, Debug, PartialEq)]
pub struct Stragglers {
    /// The operation that has been waited in longest.
    pub operation: Issued,
    /// For how long.
    pub waited: Duration,
    /// Who waits in it.
    pub waiting: Vec<usize>,
    /// Who does not, each with the operation it came to last.
    pub behind: Vec<(usize, Option<Issued>)>,
}

impl Stragglers {
    /// Who lets others wait for longer than `patience`; `None` if nobody does.
    pub fn among(standings: &[Standing], patience: Duration) -> Option<Self> {
        let waits = standings.iter().filter_map(|standing| standing.waiting.as_ref());
        let (operation, waited) = waits.filter(|(_, waited)| *waited >= patience).max_by_key(|(_, waited)| *waited)?;
        let waits_in_it = |standing: &Standing| {
            let is_it =
                |(issued, _): &(Issued, Duration)| (issued.kind, &issued.tag) == (operation.kind, &operation.tag);
            standing.waiting.as_ref().is_some_and(is_it)
        };
        let (waiting, others): (Vec<_>, Vec<_>) = standings.iter().partition(|standing| waits_in_it(standing));
        // A rank that waits elsewhere is held up itself, unless all of the others do.
        let others: Vec<_> = others.into_iter().filter(|standing| !standing.left).collect();
        let free: Vec<_> = others.iter().copied().filter(|standing| standing.waiting.is_none()).collect();
        let behind = if free.is_empty() { others } else { free };
        Some(Self {
            operation: operation.clone(),
            waited: *waited,
            waiting: waiting.iter().map(|standing| standing.rank).collect(),
            behind: behind.iter().map(|standing| (standing.rank, standing.last.clone())).collect(),
        })
    }
}

impl fmt::Display for Stragglers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { operation, waited, waiting, behind } = self;
        let waiting: Vec<_> = waiting.iter().map(usize::to_string).collect();
        let ranks = if waiting.len() == 1 { "rank" } else { "ranks" };
        write!(f, "{ranks} {} wait in {} ({})", waiting.join(", "), operation.kind, operation.tag)?;
        write!(f, " since {:.1} s", waited.as_secs_f64())?;
        for (index, (rank, last)) in behind.iter().enumerate() {
            write!(f, "{} rank {rank}", if index == 0 { " for" } else { "," })?;
            if let Some(last) = last {
                write!(f, ", which came to {} ({}) last", last.kind, last.tag)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{OpKind, OpTag, Phase};

    fn issued(rank: usize, unit: &str) -> Issued {
        let tag = OpTag::new(7, Phase::Forward, unit);
        Issued { rank, kind: OpKind::AllGather, tag, detail: String::new() }
    }

    fn standing(rank: usize, waits: Option<(&str, u64)>, last: Option<&str>) -> Standing {
        Standing {
            rank,
            silent: Duration::ZERO,
            waiting: waits.map(|(unit, seconds)| (issued(rank, unit), Duration::from_secs(seconds))),
            last: last.map(|unit| issued(rank, unit)),
            left: false,
        }
    }

    #[test]
    fn those_that_wait_in_nothing_let_the_others_wait() {
        let all = [
            standing(0, Some(("b", 3)), Some("b")),
            standing(1, None, Some("a")),
            standing(2, Some(("b", 4)), Some("b")),
            standing(3, Some(("c", 2)), Some("c")),
        ];
        assert_eq!(Stragglers::among(&all, Duration::from_secs(5)), None);
        let found = Stragglers::among(&all, Duration::from_secs(4)).unwrap();
        assert_eq!((&found.waiting[..], found.waited), (&[0, 2][..], Duration::from_secs(4)));
        assert_eq!(
            found.to_string(),
            "ranks 0, 2 wait in all-gather (step 7, forward, unit `b`) since 4.0 s for rank 1, which came to all-gather \
             (step 7, forward, unit `a`) last"
        );
    }

    #[test]
    fn where_all_wait_those_in_another_operation_are_named_and_those_that_left_are_not() {
        let left = Standing { left: true, ..standing(2, None, None) };
        let all = [standing(0, Some(("b", 3)), None), standing(1, Some(("a", 1)), Some("a")), left];
        let found = Stragglers::among(&all, Duration::from_secs(1)).unwrap();
        assert_eq!((found.waiting, found.behind), (vec![0], vec![(1, Some(issued(1, "a")))]));
        assert_eq!(Stragglers::among(&all[2..], Duration::ZERO), None);
    }
}
