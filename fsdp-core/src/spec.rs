//! Which mesh axis cuts which dimension of a parameter: JAX's `PartitionSpec`, checked before anything is allocated.

use std::fmt;

use crate::{Axis, Mesh, ShardLayout};

/// One entry per tensor dimension: the mesh axis that cuts it, or `None`. Dimensions past the last entry are not cut.
///
/// The default cuts dimension 0 over `shard`. Sizes need not divide: row `i` of `rows` over `n` ranks lives on the rank
/// with coordinate `i / ceil(rows / n)` along the axis, so late ranks may hold fewer rows or none.
///
/// ```
/// use fsdp_core::{Axis, Mesh, PartitionSpec};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mesh = Mesh::new([(Axis::Replicate, 2), (Axis::Shard, 4)])?;
/// let spec = PartitionSpec::parse([None, Some("shard")]);
/// let layout = spec.resolve("head.weight", &[3, 10], &mesh)?;
/// // Blocks of ceil(10 / 4) = 3 columns; the last has the one that is left.
/// assert_eq!(layout.shard_shape(0), [3, 3]);
/// assert_eq!(layout.shard_shape(3), [3, 1]);
///
/// let error = spec.resolve("head.bias", &[10], &mesh).unwrap_err();
/// assert_eq!(
///     error.to_string(),
///     "`head.bias`: the spec (None, shard) has 2 entries, but the parameter's shape [10] has 1 dimension; \
///      write at most one entry for each dimension"
/// );
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PartitionSpec {
    axes: Vec<Option<String>>,
}

impl PartitionSpec {
    /// A spec of the given axis names. Nothing is checked until [`PartitionSpec::resolve`] knows the tensor.
    pub fn parse<'a>(axes: impl IntoIterator<Item = Option<&'a str>>) -> Self {
        Self { axes: axes.into_iter().map(|axis| axis.map(str::to_owned)).collect() }
    }

    /// The entries, one per tensor dimension.
    pub fn axes(&self) -> &[Option<String>] {
        &self.axes
    }

    /// The layout of the parameter at `parameter_path`. Blocks are numbered by the coordinate along the shard axis
    /// (see [`Mesh::coordinate`]), which is the rank itself only in a mesh of one axis.
    ///
    /// A tensor without dimensions counts as one row.
    ///
    /// # Errors
    /// Where the spec has more entries than the tensor has dimensions, names an unknown axis, the replicate axis, an
    /// axis twice, or cuts nothing. No tensor is touched before.
    pub fn resolve(&self, parameter_path: &str, shape: &[usize], mesh: &Mesh) -> Result<ShardLayout, SpecError> {
        let parameter = || parameter_path.to_owned();
        if self.axes.len() > shape.len().max(1) {
            return Err(SpecError::TooLong { parameter: parameter(), spec: self.clone(), shape: shape.to_vec() });
        }
        let mut cut = None;
        for (dim, name) in self.axes.iter().enumerate() {
            let Some(name) = name else { continue };
            // The size of the dimension, as the errors show it; a tensor without dimensions is one row.
            let size = shape.get(dim).copied().unwrap_or(1);
            match name.parse() {
                Ok(Axis::Shard) => {
                    if let Some(first_dim) = cut.replace(dim) {
                        let (parameter, shape) = (parameter(), shape.to_vec());
                        return Err(SpecError::RepeatedAxis { parameter, axis: Axis::Shard, first_dim, dim, shape });
                    }
                }
                Ok(Axis::Replicate) => {
                    let mesh = mesh.clone();
                    return Err(SpecError::ReplicateAxis { parameter: parameter(), dim, size, mesh });
                }
                Err(_) => {
                    let (axis, mesh) = (name.clone(), mesh.clone());
                    return Err(SpecError::UnknownAxis { parameter: parameter(), dim, size, axis, mesh });
                }
            }
        }
        let Some(dim) = cut else {
            return Err(SpecError::NothingCut { parameter: parameter(), shape: shape.to_vec() });
        };
        Ok(ShardLayout::new(shape, dim, mesh.size(Axis::Shard)))
    }
}

/// Dimension 0 over `shard`.
impl Default for PartitionSpec {
    fn default() -> Self {
        Self::parse([Some(Axis::Shard.name())])
    }
}

/// As in JAX: `(None, shard)`.
impl fmt::Display for PartitionSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let axes: Vec<_> = self.axes.iter().map(|axis| axis.as_deref().unwrap_or("None")).collect();
        write!(f, "({})", axes.join(", "))
    }
}

/// Why a spec does not fit its parameter and the mesh.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// More entries than dimensions.
    #[error(
        "`{parameter}`: the spec {spec} has {} entries, but the parameter's shape {shape:?} has {} {}; write at most \
         one entry for each dimension",
        spec.axes.len(), shape.len(), if shape.len() == 1 { "dimension" } else { "dimensions" }
    )]
    TooLong {
        /// Path of the parameter.
        parameter: String,
        /// The spec.
        spec: PartitionSpec,
        /// The parameter's shape.
        shape: Vec<usize>,
    },
    /// A name that no mesh axis has.
    #[error(
        "`{parameter}`: dimension {dim} (of size {size}) names the mesh axis `{axis}`, which does not exist; the mesh \
         is {mesh}, and `shard` is the axis that cuts"
    )]
    UnknownAxis {
        /// Path of the parameter.
        parameter: String,
        /// The dimension.
        dim: usize,
        /// Its size, in elements.
        size: usize,
        /// The name given.
        axis: String,
        /// The mesh.
        mesh: Mesh,
    },
    /// The axis along which copies are equal cannot cut.
    #[error(
        "`{parameter}`: dimension {dim} (of size {size}) names the mesh axis `replicate`, along which ranks hold equal \
         copies; name `shard` to cut the dimension (the mesh is {mesh})"
    )]
    ReplicateAxis {
        /// Path of the parameter.
        parameter: String,
        /// The dimension.
        dim: usize,
        /// Its size, in elements.
        size: usize,
        /// The mesh.
        mesh: Mesh,
    },
    /// One axis on two dimensions.
    #[error(
        "`{parameter}`: dimensions {first_dim} and {dim} of shape {shape:?} both name the mesh axis `{axis}`; an axis \
         cuts one dimension, so write None for the other"
    )]
    RepeatedAxis {
        /// Path of the parameter.
        parameter: String,
        /// The axis.
        axis: Axis,
        /// The first dimension that names it.
        first_dim: usize,
        /// The second.
        dim: usize,
        /// The parameter's shape.
        shape: Vec<usize>,
    },
    /// No entry names an axis.
    #[error(
        "`{parameter}`: the spec cuts no dimension of shape {shape:?}; name `shard` for one, or mark the field \
         `replicate` to keep the whole parameter on every rank"
    )]
    NothingCut {
        /// Path of the parameter.
        parameter: String,
        /// The parameter's shape.
        shape: Vec<usize>,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mesh() -> Mesh {
        Mesh::new([(Axis::Replicate, 2), (Axis::Shard, 3)]).unwrap()
    }

    fn refusal(axes: &[Option<&str>], shape: &[usize]) -> String {
        PartitionSpec::parse(axes.iter().copied()).resolve("blocks.0.weight", shape, &mesh()).unwrap_err().to_string()
    }

    #[test]
    fn the_default_cuts_dimension_0_over_the_shard_axis_only() {
        let layout = PartitionSpec::default().resolve("w", &[7, 2], &mesh()).unwrap();
        assert_eq!(layout, ShardLayout::new(&[7, 2], 0, 3));
        for row in 0..7 {
            let owner = (0..3).find(|&coordinate| layout.rows(coordinate).contains(&row));
            assert_eq!(owner, Some(row / 3), "row i lives on i / ceil(rows / n)");
        }
    }

    #[test]
    fn a_tensor_without_dimensions_is_one_row() {
        let layout = PartitionSpec::default().resolve("scale", &[], &mesh()).unwrap();
        assert_eq!([0, 1, 2].map(|coordinate| layout.shard_len(coordinate)), [1, 0, 0]);
    }

    #[test]
    fn a_mesh_without_a_written_shard_axis_has_one_block() {
        let replicated = Mesh::new([(Axis::Replicate, 4)]).unwrap();
        let layout = PartitionSpec::default().resolve("w", &[7, 2], &replicated).unwrap();
        assert_eq!(layout.shard_shape(0), [7, 2]);
    }

    #[test]
    fn every_refusal_names_parameter_dimension_axis_and_sizes() {
        assert_eq!(
            refusal(&[None, Some("shard"), None], &[4, 6]),
            "`blocks.0.weight`: the spec (None, shard, None) has 3 entries, but the parameter's shape [4, 6] has 2 \
             dimensions; write at most one entry for each dimension"
        );
        assert_eq!(
            refusal(&[Some("shard"), Some("tensor")], &[4, 6]),
            "`blocks.0.weight`: dimension 1 (of size 6) names the mesh axis `tensor`, which does not exist; the mesh \
             is { replicate = 2, shard = 3 }, and `shard` is the axis that cuts"
        );
        assert_eq!(
            refusal(&[None, Some("replicate")], &[4, 6]),
            "`blocks.0.weight`: dimension 1 (of size 6) names the mesh axis `replicate`, along which ranks hold equal \
             copies; name `shard` to cut the dimension (the mesh is { replicate = 2, shard = 3 })"
        );
        assert_eq!(
            refusal(&[Some("shard"), None, Some("shard")], &[4, 6, 2]),
            "`blocks.0.weight`: dimensions 0 and 2 of shape [4, 6, 2] both name the mesh axis `shard`; an axis cuts \
             one dimension, so write None for the other"
        );
        assert_eq!(
            refusal(&[None], &[4, 6]),
            "`blocks.0.weight`: the spec cuts no dimension of shape [4, 6]; name `shard` for one, or mark the field \
             `replicate` to keep the whole parameter on every rank"
        );
    }
}
