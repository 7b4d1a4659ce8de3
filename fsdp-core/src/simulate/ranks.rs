//! Ranks that cannot be told apart, so that one of each kind is enough.

use std::collections::HashMap;
use std::hash::Hash;

use crate::{Axis, Mesh};

/// Which ranks take part in a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Those along the shard axis.
    Shard,
    /// Those along the replicate axis.
    Replicate,
    /// All.
    World,
}

/// The ranks of a mesh in classes.
///
/// [Note: Ranks that cannot be told apart]
/// Ranks with equal clocks that meet equal ranks in every collective behave alike at all times. So ranks are first
/// divided by their clock, then again and again by the classes that they meet along each axis, until nothing is divided
/// any more (colour refinement of a graph). One rank of each class, with the classes it meets, behaves as the whole world.
/// Without stragglers there is one class, however many ranks; if every rank has a clock of its own, all are classes.
#[derive(Clone, Debug)]
pub(super) struct RankClasses {
    /// By class: the first of its ranks, and how many they are.
    pub(super) members: Vec<(usize, usize)>,
    /// By rank: its class.
    pub(super) of: Vec<usize>,
    /// The classes of each group along each axis.
    groups: [Vec<Vec<usize>>; 2],
    all: Vec<Vec<usize>>,
}

impl RankClasses {
    /// Divides the ranks of `mesh`; ranks of equal `clock` have equal clocks.
    pub(super) fn new(mesh: &Mesh, clock: impl Fn(usize) -> u64) -> Self {
        let world_size = mesh.world_size();
        let axes = [Axis::Shard, Axis::Replicate];
        // A group along one axis is where the coordinate along the other is the same.
        let coordinates: Vec<[usize; 2]> = (0..world_size)
            .map(|rank| [mesh.coordinate(Axis::Replicate, rank), mesh.coordinate(Axis::Shard, rank)])
            .collect();
        let num_groups = [mesh.size(Axis::Replicate), mesh.size(Axis::Shard)];
        let mut class: Vec<usize> = numbered((0..world_size).map(clock)).0;
        let mut num_classes = 1 + class.iter().max().copied().unwrap_or(0);
        loop {
            let met: Vec<Vec<usize>> = (0..axes.len())
                .map(|axis| numbered(sets(&class, num_groups[axis], |rank| coordinates[rank][axis])).0)
                .collect();
            let signature = |rank: usize| (class[rank], met[0][coordinates[rank][0]], met[1][coordinates[rank][1]]);
            let (divided, found) = numbered((0..world_size).map(signature));
            class = divided;
            if found == num_classes {
                break;
            }
            num_classes = found;
        }
        let mut members = vec![(usize::MAX, 0); num_classes];
        for (rank, &class) in class.iter().enumerate() {
            members[class].0 = members[class].0.min(rank);
            members[class].1 += 1;
        }
        let mut groups = [Vec::new(), Vec::new()];
        for axis in 0..axes.len() {
            groups[axis] = sets(&class, num_groups[axis], |rank| coordinates[rank][axis]).collect();
            groups[axis].sort_unstable();
            groups[axis].dedup();
        }
        Self { all: vec![(0..num_classes).collect()], members, of: class, groups }
    }

    pub(super) fn len(&self) -> usize {
        self.members.len()
    }

    /// The classes that meet in the collectives of a scope. Each class is in one of them: its ranks meet equal ranks.
    pub(super) fn groups(&self, scope: Scope) -> &[Vec<usize>] {
        match scope {
            Scope::Shard => &self.groups[0],
            Scope::Replicate => &self.groups[1],
            Scope::World => &self.all,
        }
    }
}

/// For each group, the set of classes of its ranks, sorted.
fn sets(class: &[usize], num_groups: usize, group: impl Fn(usize) -> usize) -> impl Iterator<Item = Vec<usize>> {
    let mut sets = vec![Vec::new(); num_groups];
    for (rank, &class) in class.iter().enumerate() {
        sets[group(rank)].push(class);
    }
    sets.into_iter().map(|mut set| {
        set.sort_unstable();
        set.dedup();
        set
    })
}

/// Numbers equal items alike, from 0 in the order of their first; and how many different ones there are.
fn numbered<T: Eq + Hash>(items: impl Iterator<Item = T>) -> (Vec<usize>, usize) {
    let mut seen: HashMap<T, usize> = HashMap::new();
    let numbers = items.map(|item| {
        let next = seen.len();
        *seen.entry(item).or_insert(next)
    });
    (numbers.collect(), seen.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mesh(replicate: usize, shard: usize) -> Mesh {
        Mesh::new([(Axis::Replicate, replicate), (Axis::Shard, shard)]).unwrap()
    }

    #[test]
    fn equal_ranks_are_one_class_however_many() {
        let classes = RankClasses::new(&mesh(16, 1024), |_| 0);
        assert_eq!(classes.members, [(0, 16_384)]);
        assert_eq!(classes.groups(Scope::Shard), [[0]]);
        assert_eq!(classes.groups(Scope::Replicate), [[0]]);
    }

    #[test]
    fn a_straggler_divides_the_ranks_by_how_they_meet_it() {
        // Rank 5 is slow: it, those of its shard group, those of its replicate group, and the rest.
        let classes = RankClasses::new(&mesh(4, 4), |rank| u64::from(rank == 5));
        let mut members = classes.members.clone();
        members.sort_unstable();
        assert_eq!(members, [(0, 9), (1, 3), (4, 3), (5, 1)]);
        assert_eq!(classes.groups(Scope::Shard).len(), 2, "with the straggler, and without");
    }

    #[test]
    fn ranks_of_a_class_meet_the_same_classes() {
        for (replicate, shard) in [(1, 7), (7, 1), (3, 5), (5, 3)] {
            let mesh = mesh(replicate, shard);
            let clock = |rank: usize| [0, 0, 1, 0, 2][rank % 5];
            let classes = RankClasses::new(&mesh, clock);
            assert_eq!(classes.members.iter().map(|&(_, count)| count).sum::<usize>(), replicate * shard);
            for (axis, scope) in [(Axis::Shard, Scope::Shard), (Axis::Replicate, Scope::Replicate)] {
                for class in 0..classes.len() {
                    let own = classes.groups(scope).iter().filter(|group| group.contains(&class));
                    assert_eq!(own.clone().count(), 1);
                    assert!(own.flatten().count() <= mesh.size(axis));
                }
            }
        }
    }

    #[test]
    fn with_a_clock_of_its_own_each_rank_is_a_class() {
        let classes = RankClasses::new(&mesh(2, 3), |rank| rank as u64);
        assert_eq!(classes.members, [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1), (5, 1)]);
        assert_eq!(classes.groups(Scope::Shard), [[0, 1, 2], [3, 4, 5]]);
        assert_eq!(classes.groups(Scope::Replicate), [[0, 3], [1, 4], [2, 5]]);
    }
}
