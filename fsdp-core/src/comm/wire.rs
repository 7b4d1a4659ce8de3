//! A call as bytes: equal calls are equal bytes, and another rank can read what it was where they differ.

use super::call::{Call, CallPart};
use super::{OpKind, OpTag, Phase};
use crate::{Dtype, ShardLayout};

/// Stands for what a call does not have.
const NONE: u64 = u64::MAX;

pub(crate) fn encode(call: &Call) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(64 + call.tag.unit.len() + 48 * call.parts.len());
    let mut put = |number: u64| bytes.extend_from_slice(&number.to_le_bytes());
    put(place(&OpKind::ALL, &call.kind));
    put(place(&Phase::ALL, &call.tag.phase));
    put(call.tag.step);
    put(call.root.map_or(NONE, |root| root as u64));
    put(u64::from(call.scale.is_some()));
    put(call.scale.unwrap_or_default().to_bits());
    put(call.parts.len() as u64);
    for part in &call.parts {
        put(part.elem_bytes as u64);
        put(part.dtype.map_or(NONE, |dtype| place(&Dtype::ALL, &dtype)));
        put(part.layout.num_shards() as u64);
        put(part.layout.dim() as u64);
        put(part.layout.shape().len() as u64);
        part.layout.shape().iter().for_each(|&rows| put(rows as u64));
    }
    bytes.extend_from_slice(call.tag.unit.as_bytes());
    bytes
}

/// `None` if the bytes are not a call.
pub(crate) fn decode(bytes: &[u8]) -> Option<Call> {
    let mut rest = bytes;
    let mut next = || {
        let (number, after) = rest.split_first_chunk()?;
        rest = after;
        Some(u64::from_le_bytes(*number))
    };
    let kind = *OpKind::ALL.get(next()? as usize)?;
    let phase = *Phase::ALL.get(next()? as usize)?;
    let step = next()?;
    let root = Some(next()?).filter(|&root| root != NONE).map(|root| root as usize);
    let (has_scale, scale) = (next()? == 1, f64::from_bits(next()?));
    let num_parts = next()?;
    let mut parts = Vec::new();
    for _ in 0..num_parts {
        let elem_bytes = next()? as usize;
        let dtype = match next()? {
            NONE => None,
            place => Some(*Dtype::ALL.get(place as usize)?),
        };
        let (num_shards, dim, num_dims) = (next()? as usize, next()? as usize, next()?);
        let shape = (0..num_dims).map(|_| next().map(|rows| rows as usize)).collect::<Option<Vec<_>>>()?;
        if num_shards == 0 || dim >= shape.len().max(1) {
            return None;
        }
        parts.push(CallPart { layout: ShardLayout::new(&shape, dim, num_shards), elem_bytes, dtype });
    }
    let unit = std::str::from_utf8(rest).ok()?;
    Some(Call { kind, tag: OpTag::new(step, phase, unit), parts, root, scale: has_scale.then_some(scale) })
}

fn place<T: PartialEq>(all: &[T], one: &T) -> u64 {
    all.iter().position(|other| other == one).map_or(NONE, |place| place as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(kind: OpKind, phase: Phase, dtype: Option<Dtype>) -> Call {
        let layout = ShardLayout::new(&[5, 3], 1, 4);
        let part = |layout| CallPart { layout, elem_bytes: 4, dtype };
        Call {
            parts: vec![part(layout), part(ShardLayout::new(&[], 0, 4))],
            root: Some(2),
            scale: Some(-0.0),
            ..Call::new(kind, &OpTag::new(9, phase, "blocks.2"))
        }
    }

    #[test]
    fn every_call_reads_back_as_it_was() {
        for kind in OpKind::ALL {
            for phase in Phase::ALL {
                for dtype in Dtype::ALL.map(Some).into_iter().chain([None]) {
                    for call in [call(kind, phase, dtype), Call::new(kind, &OpTag::new(0, phase, ""))] {
                        let read = decode(&encode(&call)).unwrap();
                        assert_eq!(format!("{read:?}"), format!("{call:?}"));
                        assert_eq!(call.mismatch(0, &read, 1), None);
                    }
                }
            }
        }
    }

    #[test]
    fn what_was_cut_off_is_not_a_call() {
        let bytes = encode(&call(OpKind::AllReduce, Phase::Init, None));
        let head = bytes.len() - "blocks.2".len();
        assert!((0..head).all(|len| decode(&bytes[..len]).is_none()));
    }

    #[test]
    fn numbers_that_mean_nothing_are_not_a_call() {
        let bytes = encode(&call(OpKind::AllReduce, Phase::Init, Some(Dtype::F32)));
        // Kind and phase; type, shards, cut dimension and dimensions of the first part.
        for (place, number) in [(0, 99), (1, 99), (8, 99), (9, 0), (10, 7), (11, u64::MAX)] {
            let mut damaged = bytes.clone();
            damaged[8 * place..8 * (place + 1)].copy_from_slice(&number.to_le_bytes());
            assert!(decode(&damaged).is_none(), "{number} at {place}");
        }
    }
}
