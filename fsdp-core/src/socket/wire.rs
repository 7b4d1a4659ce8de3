//! How a letter travels: lengths of header and payload, the header as JSON, the payload as it is.

use std::io::{self, Read, Write};

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::mailbox::{Letter, Place};
use crate::comm::call::{Call, CallPart};
use crate::{Dtype, OpKind, OpTag, Phase, ShardLayout};

/// The longest header. A plan with a million parameters in one unit has none that long.
const MAX_HEADER_BYTES: u32 = 256 << 20;

/// What a rank sends another.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
enum Header {
    /// A letter follows, of so many bytes.
    Letter { domain: u64, number: u64, round: u8, call: WireCall },
    /// Nothing follows any more.
    Leave,
}

/// [`Call`].
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct WireCall {
    kind: u8,
    step: u64,
    phase: u8,
    unit: String,
    parts: Vec<WirePart>,
    root: Option<usize>,
    /// Bits, since JSON has no infinity.
    scale: Option<u64>,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct WirePart {
    shape: Vec<usize>,
    dim: usize,
    num_shards: usize,
    elem_bytes: usize,
    dtype: Option<u8>,
}

/// What came.
#[derive(Debug)]
pub(super) enum Received {
    Letter(Place, Letter),
    Leave,
}

/// Lengths and header.
pub(super) fn letter_header(place: Place, call: &Call, payload_len: usize) -> Vec<u8> {
    let Place { domain, number, round } = place;
    header(&Header::Letter { domain, number, round, call: call.into() }, payload_len)
}

/// The last that a rank sends.
pub(super) fn leave_header() -> Vec<u8> {
    header(&Header::Leave, 0)
}

fn header(header: &Header, payload_len: usize) -> Vec<u8> {
    let body = serde_json::to_vec(header).expect("a header has nothing that JSON lacks");
    [&(body.len() as u32).to_le_bytes()[..], &(payload_len as u64).to_le_bytes(), &body].concat()
}

/// Writes all of it, as few calls as the system allows.
pub(super) fn write(stream: &mut impl Write, header: &[u8], payload: &[Bytes]) -> io::Result<()> {
    stream.write_all(header)?;
    payload.iter().try_for_each(|bytes| stream.write_all(bytes))
}

/// Reads one message.
pub(super) fn read(stream: &mut impl Read) -> io::Result<Received> {
    let garbage = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
    let (mut header_len, mut payload_len) = ([0; 4], [0; 8]);
    stream.read_exact(&mut header_len)?;
    stream.read_exact(&mut payload_len)?;
    let header_len = u32::from_le_bytes(header_len);
    if header_len > MAX_HEADER_BYTES {
        return Err(garbage("a header of impossible length"));
    }
    let header = read_bytes(stream, header_len.into())?;
    let header = serde_json::from_slice(&header).map_err(|_| garbage("a header that is none"))?;
    let payload = read_bytes(stream, u64::from_le_bytes(payload_len))?;
    match header {
        Header::Leave => Ok(Received::Leave),
        Header::Letter { domain, number, round, call } => {
            let call = call.decode().ok_or_else(|| garbage("an operation that is none"))?;
            Ok(Received::Letter(Place { domain, number, round }, Letter { call, payload: payload.into() }))
        }
    }
}

/// Memory is taken as bytes come, so that a wrong length takes none.
fn read_bytes(stream: &mut impl Read, len: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(len.min(1 << 26) as usize);
    stream.take(len).read_to_end(&mut bytes)?;
    if bytes.len() as u64 == len { Ok(bytes) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

impl From<&Call> for WireCall {
    fn from(call: &Call) -> Self {
        let place = |found: Option<usize>| found.expect("all values are listed") as u8;
        let dtype = |dtype: Dtype| place(Dtype::ALL.iter().position(|&other| other == dtype));
        let part = |part: &CallPart| WirePart {
            shape: part.layout.shape().to_vec(),
            dim: part.layout.dim(),
            num_shards: part.layout.num_shards(),
            elem_bytes: part.elem_bytes,
            dtype: part.dtype.map(dtype),
        };
        Self {
            kind: place(OpKind::ALL.iter().position(|&kind| kind == call.kind)),
            step: call.tag.step,
            phase: place(Phase::ALL.iter().position(|&phase| phase == call.tag.phase)),
            unit: call.tag.unit.to_string(),
            parts: call.parts.iter().map(part).collect(),
            root: call.root,
            scale: call.scale.map(f64::to_bits),
        }
    }
}

impl WireCall {
    /// `None` if a number is none of ours.
    fn decode(self) -> Option<Call> {
        let kind = *OpKind::ALL.get(usize::from(self.kind))?;
        let phase = *Phase::ALL.get(usize::from(self.phase))?;
        let part = |part: WirePart| {
            let is_layout = part.num_shards > 0 && part.dim < part.shape.len().max(1);
            let dtype = match part.dtype {
                Some(number) => Some(*Dtype::ALL.get(usize::from(number))?),
                None => None,
            };
            let layout = is_layout.then(|| ShardLayout::new(&part.shape, part.dim, part.num_shards))?;
            Some(CallPart { layout, elem_bytes: part.elem_bytes, dtype })
        };
        Some(Call {
            kind,
            tag: OpTag::new(self.step, phase, self.unit),
            parts: self.parts.into_iter().map(part).collect::<Option<_>>()?,
            root: self.root,
            scale: self.scale.map(f64::from_bits),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACE: Place = Place { domain: 3, number: 4, round: 1 };

    fn call() -> Call {
        let part = |dtype| CallPart { layout: ShardLayout::new(&[3, 4], 1, 2), elem_bytes: 4, dtype };
        let call = Call::new(OpKind::AllReduce, &OpTag::new(9, Phase::Backward, "a \"b\""));
        Call { parts: vec![part(Some(Dtype::F32)), part(None)], root: Some(1), scale: Some(f64::INFINITY), ..call }
    }

    #[test]
    fn a_letter_arrives_as_it_was_sent() {
        let mut bytes = Vec::new();
        let payload = [Bytes::from_static(b"ab"), Bytes::from_static(b"cde")];
        write(&mut bytes, &letter_header(PLACE, &call(), 5), &payload).unwrap();
        write(&mut bytes, &leave_header(), &[]).unwrap();
        let mut stream = &bytes[..];
        let Received::Letter(place, letter) = read(&mut stream).unwrap() else { panic!() };
        assert_eq!((place, &letter.payload[..]), (PLACE, &b"abcde"[..]));
        assert_eq!(letter.call.mismatch(0, &call(), 1), None);
        assert!(matches!(read(&mut stream), Ok(Received::Leave)));
        assert!(read(&mut stream).is_err());
    }

    #[test]
    fn what_is_cut_short_or_damaged_is_an_error_and_takes_no_memory() {
        let bytes = letter_header(PLACE, &call(), 5);
        for len in 0..bytes.len() {
            assert!(read(&mut &bytes[..len]).is_err());
        }
        let mut huge = bytes.clone();
        huge[4..12].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(read(&mut &huge[..]).is_err());
        huge[..4].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(read(&mut &huge[..]).is_err());
        for (right, wrong) in
            [("\"kind\":2", "\"kind\":9"), ("\"dim\":1", "\"dim\":7"), ("\"num_shards\":2", "\"num_shards\":0")]
        {
            let text = String::from_utf8(bytes[12..].to_vec()).unwrap();
            assert!(text.contains(right), "{text}");
            let damaged = text.replace(right, wrong);
            let damaged = [&(damaged.len() as u32).to_le_bytes()[..], &[0; 8], damaged.as_bytes()].concat();
            assert!(read(&mut &damaged[..]).is_err(), "{wrong}");
        }
    }
}
