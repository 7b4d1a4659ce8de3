//! What a rank asks for in one operation, so that ranks can tell whether they ask for the same.

use super::{CommError, GatherPart, Issued, OpKind, OpTag, PlacedPart, Reduce, ReducePart};
use crate::{Dtype, ShardLayout};

/// One operation without its data.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) kind: OpKind,
    pub(crate) tag: OpTag,
    pub(crate) parts: Vec<CallPart>,
    /// The root's number in the world.
    pub(crate) root: Option<usize>,
    pub(crate) scale: Option<f64>,
}

/// One tensor of an operation.
#[derive(Clone, Debug)]
pub(crate) struct CallPart {
    pub(crate) layout: ShardLayout,
    pub(crate) elem_bytes: usize,
    /// `None` where bytes are only moved.
    pub(crate) dtype: Option<Dtype>,
}

/// What may differ, in the order in which calls are compared.
pub(crate) const DIFFERENCES: [&str; 8] = [
    "kind",
    "tag",
    "number of parts",
    "layout of a part",
    "element type of a part",
    "element size of a part",
    "root",
    "scale",
];

impl Call {
    /// A call without parts, root or scale.
    pub(crate) fn new(kind: OpKind, tag: &OpTag) -> Self {
        Self { kind, tag: tag.clone(), parts: Vec::new(), root: None, scale: None }
    }

    /// Adds the parts of a gather.
    pub(crate) fn gather(self, parts: &[GatherPart]) -> Self {
        self.moving(parts.iter().map(|part| (&part.layout, part.elem_bytes)))
    }

    /// Adds the parts of a gather in place.
    pub(crate) fn gather_placed(self, parts: &[PlacedPart]) -> Self {
        self.moving(parts.iter().map(PlacedPart::tensor))
    }

    /// Adds tensors whose bytes are only moved, by layout and element size.
    fn moving<'a>(mut self, tensors: impl Iterator<Item = (&'a ShardLayout, usize)>) -> Self {
        let part =
            |(layout, elem_bytes): (&ShardLayout, usize)| CallPart { layout: layout.clone(), elem_bytes, dtype: None };
        self.parts = tensors.map(part).collect();
        self
    }

    /// Adds the parts and the scale of a reduction.
    pub(crate) fn reduce(mut self, parts: &[ReducePart], reduce: Reduce) -> Self {
        let part = |part: &ReducePart| CallPart {
            layout: part.layout.clone(),
            elem_bytes: part.dtype.size_bytes(),
            dtype: Some(part.dtype),
        };
        self.parts = parts.iter().map(part).collect();
        self.scale = Some(reduce.scale);
        self
    }

    /// Layout and element size of each part, as [`SharedTensors`](super::shared::SharedTensors) takes them.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = (ShardLayout, usize)> {
        self.parts.iter().map(|part| (part.layout.clone(), part.elem_bytes))
    }

    /// The error of two ranks that issued different calls; `None` if the calls agree.
    pub(crate) fn mismatch(&self, rank: usize, other: &Call, other_rank: usize) -> Option<CommError> {
        let (what, detail, other_detail) = self.difference(other)?;
        let issued =
            |rank, call: &Call, detail| Box::new(Issued { rank, kind: call.kind, tag: call.tag.clone(), detail });
        Some(CommError::Mismatch {
            what,
            first: issued(rank, self, detail),
            second: issued(other_rank, other, other_detail),
        })
    }

    /// What differs first, and each side of it.
    fn difference(&self, other: &Call) -> Option<(&'static str, String, String)> {
        let both = |what, of: &dyn Fn(&Call) -> String| Some((what, of(self), of(other)));
        if self.kind != other.kind {
            return both("kind", &|_| String::new());
        }
        if self.tag != other.tag {
            return both("tag", &|_| String::new());
        }
        if self.parts.len() != other.parts.len() {
            return both("number of parts", &|call| format!("{} parts", call.parts.len()));
        }
        for (index, (part, other_part)) in self.parts.iter().zip(&other.parts).enumerate() {
            if part.layout != other_part.layout {
                return both("layout of a part", &|call| {
                    let layout = &call.parts[index].layout;
                    format!("part {index} of shape {:?}, cut along dimension {}", layout.shape(), layout.dim())
                });
            }
            if part.dtype != other_part.dtype {
                return both("element type of a part", &|call| match call.parts[index].dtype {
                    Some(dtype) => format!("part {index} of {dtype}"),
                    None => format!("part {index} of bytes"),
                });
            }
            if part.elem_bytes != other_part.elem_bytes {
                return both("element size of a part", &|call| {
                    format!("part {index} of {} bytes per element", call.parts[index].elem_bytes)
                });
            }
        }
        if self.root != other.root {
            return both("root", &|call| call.root.map_or("no root".into(), |root| format!("root {root}")));
        }
        if self.scale.map(f64::to_bits) != other.scale.map(f64::to_bits) {
            return both("scale", &|call| call.scale.map_or("no scale".into(), |scale| format!("scale {scale}")));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Phase;

    fn part(shape: &[usize], elem_bytes: usize, dtype: Option<Dtype>) -> CallPart {
        CallPart { layout: ShardLayout::new(shape, 0, 2), elem_bytes, dtype }
    }

    #[test]
    fn every_field_of_a_call_is_compared() {
        let base = Call {
            parts: vec![part(&[4], 4, Some(Dtype::F32))],
            root: Some(0),
            scale: Some(0.5),
            ..Call::new(OpKind::ReduceScatter, &OpTag::new(1, Phase::Backward, "a"))
        };
        assert_eq!(base.mismatch(0, &base.clone(), 1), None);
        let others = [
            ("kind", Call { kind: OpKind::AllReduce, ..base.clone() }, ""),
            ("tag", Call { tag: OpTag::new(1, Phase::Backward, "b"), ..base.clone() }, ""),
            ("number of parts", Call { parts: vec![], ..base.clone() }, "0 parts"),
            (
                "layout of a part",
                Call { parts: vec![part(&[5], 4, Some(Dtype::F32))], ..base.clone() },
                "part 0 of shape [5], cut along dimension 0",
            ),
            (
                "element type of a part",
                Call { parts: vec![part(&[4], 8, Some(Dtype::F64))], ..base.clone() },
                "part 0 of f64",
            ),
            (
                "element size of a part",
                Call { parts: vec![part(&[4], 2, Some(Dtype::F32))], ..base.clone() },
                "part 0 of 2 bytes per element",
            ),
            ("root", Call { root: Some(1), ..base.clone() }, "root 1"),
            ("scale", Call { scale: Some(1.0), ..base.clone() }, "scale 1"),
        ];
        for (expected, other, detail) in others {
            let Some(CommError::Mismatch { what, first, second }) = base.mismatch(0, &other, 1) else {
                panic!("{expected} is not compared");
            };
            assert_eq!((what, first.rank, second.rank, second.detail.as_str()), (expected, 0, 1, detail));
            assert!(DIFFERENCES.contains(&what));
        }
    }
}
