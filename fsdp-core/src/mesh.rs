//! The ranks as a grid with named axes: who shares a copy of the model, and who holds a part of which copy.
//!
//! Ranks are numbered row by row, so the last axis varies fastest. Both axes exist in every mesh: one that is not
//! written has size 1, and a group along it is the rank alone.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A direction of the mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Axis {
    /// Ranks along it hold equal parts: hybrid sharding keeps one copy of the model per index.
    Replicate,
    /// Ranks along it hold different parts of one copy.
    Shard,
}

impl Axis {
    /// Both axes.
    pub const ALL: [Axis; 2] = [Axis::Replicate, Axis::Shard];

    /// The name in the configuration file and in partition specs.
    pub fn name(self) -> &'static str {
        match self {
            Axis::Replicate => "replicate",
            Axis::Shard => "shard",
        }
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Axis {
    type Err = MeshError;

    fn from_str(name: &str) -> Result<Self, MeshError> {
        let axis = Axis::ALL.into_iter().find(|axis| axis.name() == name);
        axis.ok_or_else(|| MeshError::UnknownAxis { name: name.to_owned() })
    }
}

/// Ordered axes with their sizes.
///
/// ```
/// use fsdp_core::{Axis, Mesh};
///
/// # fn main() -> Result<(), fsdp_core::MeshError> {
/// // Two copies of the model, each cut over three ranks.
/// let mesh = Mesh::new([(Axis::Replicate, 2), (Axis::Shard, 3)])?;
/// assert_eq!(mesh.world_size(), 6);
/// assert_eq!(mesh.coordinates(4), [1, 1]);
/// assert_eq!(mesh.group(Axis::Shard, 4), [3, 4, 5]);
/// assert_eq!(mesh.group(Axis::Replicate, 4), [1, 4]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Vec<(Axis, usize)>", into = "Vec<(Axis, usize)>")]
pub struct Mesh {
    axes: Vec<(Axis, usize)>,
}

impl Mesh {
    /// A mesh of the given axes, slowest first.
    ///
    /// # Errors
    /// Where there is no axis, an axis comes twice, a size is 0, or the product overflows.
    pub fn new(axes: impl IntoIterator<Item = (Axis, usize)>) -> Result<Self, MeshError> {
        let axes: Vec<_> = axes.into_iter().collect();
        if axes.is_empty() {
            return Err(MeshError::Empty);
        }
        for (i, &(axis, size)) in axes.iter().enumerate() {
            if size == 0 {
                return Err(MeshError::ZeroSize { axis });
            }
            if axes[..i].iter().any(|&(earlier, _)| earlier == axis) {
                return Err(MeshError::RepeatedAxis { axis });
            }
        }
        let world_size = axes.iter().try_fold(1usize, |product, &(_, size)| product.checked_mul(size));
        world_size.ok_or(MeshError::TooLarge)?;
        Ok(Self { axes })
    }

    /// All ranks along the shard axis: what a configuration without a mesh means.
    ///
    /// # Panics
    /// If `world_size` is 0.
    pub fn one_dim(world_size: usize) -> Self {
        assert!(world_size > 0, "a mesh needs at least one rank");
        Self { axes: vec![(Axis::Shard, world_size)] }
    }

    /// The axes with their sizes, slowest first.
    pub fn axes(&self) -> &[(Axis, usize)] {
        &self.axes
    }

    /// Number of ranks: the product of the sizes.
    pub fn world_size(&self) -> usize {
        self.axes.iter().map(|&(_, size)| size).product()
    }

    /// Ranks along `axis`; 1 where the mesh does not have it.
    pub fn size(&self, axis: Axis) -> usize {
        self.axes.iter().find(|&&(other, _)| other == axis).map_or(1, |&(_, size)| size)
    }

    /// The index of `rank` along each axis, in the order of the axes.
    ///
    /// # Panics
    /// If `rank` is not in the mesh.
    pub fn coordinates(&self, rank: usize) -> Vec<usize> {
        let world_size = self.world_size();
        assert!(rank < world_size, "rank {rank} is outside a mesh of {world_size} ranks");
        let mut block = world_size;
        let mut rest = rank;
        let coordinate = |&(_, size): &(Axis, usize)| {
            block /= size;
            let index = rest / block;
            rest %= block;
            index
        };
        self.axes.iter().map(coordinate).collect()
    }

    /// The index of `rank` along `axis`: which block of a parameter it owns, where the axis is the shard axis.
    ///
    /// # Panics
    /// If `rank` is not in the mesh.
    pub fn coordinate(&self, axis: Axis, rank: usize) -> usize {
        let coordinates = self.coordinates(rank);
        self.axes.iter().position(|&(other, _)| other == axis).map_or(0, |i| coordinates[i])
    }

    /// The rank at `coordinates`, one index per axis: the inverse of [`Mesh::coordinates`].
    ///
    /// # Panics
    /// If the number of coordinates is not that of the axes, or one is not below its axis' size.
    pub fn rank_at(&self, coordinates: &[usize]) -> usize {
        assert_eq!(coordinates.len(), self.axes.len(), "one coordinate for each axis of {self}");
        self.axes.iter().zip(coordinates).fold(0, |rank, (&(axis, size), &index)| {
            assert!(index < size, "coordinate {index} is outside axis `{axis}` of size {size}");
            rank * size + index
        })
    }

    /// The ranks that differ from `rank` only along `axis`, `rank` among them, in the order of their coordinate.
    ///
    /// # Panics
    /// If `rank` is not in the mesh.
    pub fn group(&self, axis: Axis, rank: usize) -> Vec<usize> {
        let mut coordinates = self.coordinates(rank);
        let Some(i) = self.axes.iter().position(|&(other, _)| other == axis) else {
            return vec![rank];
        };
        let at = |index| {
            coordinates[i] = index;
            self.rank_at(&coordinates)
        };
        (0..self.axes[i].1).map(at).collect()
    }
}

impl TryFrom<Vec<(Axis, usize)>> for Mesh {
    type Error = MeshError;

    fn try_from(axes: Vec<(Axis, usize)>) -> Result<Self, MeshError> {
        Mesh::new(axes)
    }
}

impl From<Mesh> for Vec<(Axis, usize)> {
    fn from(mesh: Mesh) -> Self {
        mesh.axes
    }
}

/// As in the configuration file: `{ replicate = 2, shard = 4 }`.
impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let axes: Vec<_> = self.axes.iter().map(|(axis, size)| format!("{axis} = {size}")).collect();
        write!(f, "{{ {} }}", axes.join(", "))
    }
}

/// Why axes do not make a mesh.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MeshError {
    /// No axis at all.
    #[error("the mesh has no axis; write `{{ shard = N }}` with the number of ranks, or leave the mesh out")]
    Empty,
    /// An axis of size 0.
    #[error("mesh axis `{axis}` has size 0; every axis needs at least 1 rank")]
    ZeroSize {
        /// The axis.
        axis: Axis,
    },
    /// The same axis twice.
    #[error("mesh axis `{axis}` comes twice; name each axis once")]
    RepeatedAxis {
        /// The axis.
        axis: Axis,
    },
    /// More ranks than can be counted.
    #[error("the product of the mesh's sizes overflows; it must equal the world size")]
    TooLarge,
    /// A name that is no axis.
    #[error("unknown mesh axis `{name}`; the axes are `replicate` and `shard`")]
    UnknownAxis {
        /// The name given.
        name: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mesh(axes: &[(Axis, usize)]) -> Mesh {
        Mesh::new(axes.iter().copied()).unwrap()
    }

    #[test]
    fn ranks_are_numbered_row_by_row_in_the_order_of_the_axes() {
        let mesh = mesh(&[(Axis::Shard, 2), (Axis::Replicate, 3)]);
        let coordinates: Vec<_> = (0..6).map(|rank| mesh.coordinates(rank)).collect();
        assert_eq!(coordinates, [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]);
        for (rank, coordinates) in coordinates.iter().enumerate() {
            assert_eq!(mesh.rank_at(coordinates), rank);
        }
        assert_eq!((mesh.coordinate(Axis::Shard, 5), mesh.coordinate(Axis::Replicate, 5)), (1, 2));
        assert_eq!(mesh.to_string(), "{ shard = 2, replicate = 3 }");
    }

    #[test]
    fn groups_of_an_axis_part_the_world_and_contain_their_ranks() {
        for axes in [&[(Axis::Replicate, 2), (Axis::Shard, 3)][..], &[(Axis::Shard, 1), (Axis::Replicate, 5)]] {
            let mesh = mesh(axes);
            for axis in Axis::ALL {
                for rank in 0..mesh.world_size() {
                    let group = mesh.group(axis, rank);
                    assert_eq!(group.len(), mesh.size(axis));
                    assert_eq!(group[mesh.coordinate(axis, rank)], rank);
                    assert!(group.iter().all(|&peer| mesh.group(axis, peer) == group));
                }
            }
        }
    }

    #[test]
    fn an_axis_that_is_not_written_has_the_rank_alone() {
        let mesh = Mesh::one_dim(4);
        assert_eq!(mesh.size(Axis::Replicate), 1);
        assert_eq!(mesh.group(Axis::Replicate, 2), [2]);
        assert_eq!(mesh.coordinate(Axis::Replicate, 2), 0);
        assert_eq!(mesh.group(Axis::Shard, 2), [0, 1, 2, 3]);
    }

    #[test]
    fn each_broken_mesh_says_what_to_write_instead() {
        let text = |axes: &[(Axis, usize)]| Mesh::new(axes.iter().copied()).unwrap_err().to_string();
        assert_eq!(
            text(&[]),
            "the mesh has no axis; write `{ shard = N }` with the number of ranks, or leave the mesh out"
        );
        assert_eq!(text(&[(Axis::Shard, 0)]), "mesh axis `shard` has size 0; every axis needs at least 1 rank");
        assert_eq!(text(&[(Axis::Shard, 2), (Axis::Shard, 2)]), "mesh axis `shard` comes twice; name each axis once");
        assert_eq!(
            text(&[(Axis::Replicate, usize::MAX), (Axis::Shard, 2)]),
            "the product of the mesh's sizes overflows; it must equal the world size"
        );
        assert_eq!(
            "tensor".parse::<Axis>().unwrap_err().to_string(),
            "unknown mesh axis `tensor`; the axes are `replicate` and `shard`"
        );
    }
}
