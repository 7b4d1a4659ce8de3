//! How a letter travels: a header of fixed length, the call as bytes, the payload as it is.

use std::io::{self, Read, Write};

use bytes::Bytes;

use super::mailbox::{Letter, Place};
use crate::comm::call::Call;
use crate::comm::wire;

/// The longest call. A plan with a million parameters in one unit has none that long.
const MAX_CALL_BYTES: u64 = 256 << 20;

/// Numbers in front: where the letter belongs, and the bytes of call and payload.
const NUM_NUMBERS: usize = 5;

/// In place of a round: nothing follows any more.
const LEAVE: u64 = u64::MAX;

/// What came.
#[derive(Debug)]
pub(super) enum Received {
    Letter(Place, Letter),
    Leave,
}

/// What stands in front of a payload.
pub(super) fn letter_header(place: Place, call: &Call, payload_len: usize) -> Vec<u8> {
    let Place { domain, number, round } = place;
    let call = wire::encode(call);
    header([domain, number, round.into(), call.len() as u64, payload_len as u64], &call)
}

/// The last that a rank sends.
pub(super) fn leave_header() -> Vec<u8> {
    header([0, 0, LEAVE, 0, 0], &[])
}

fn header(numbers: [u64; NUM_NUMBERS], call: &[u8]) -> Vec<u8> {
    numbers.into_iter().flat_map(u64::to_le_bytes).chain(call.iter().copied()).collect()
}

/// Writes all of it, as few calls as the system allows.
pub(super) fn write(stream: &mut impl Write, header: &[u8], payload: &[Bytes]) -> io::Result<()> {
    stream.write_all(header)?;
    payload.iter().try_for_each(|bytes| stream.write_all(bytes))
}

/// Reads one message.
pub(super) fn read(stream: &mut impl Read) -> io::Result<Received> {
    let garbage = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
    let mut numbers = [[0; 8]; NUM_NUMBERS];
    stream.read_exact(numbers.as_flattened_mut())?;
    let [domain, number, round, call_len, payload_len] = numbers.map(u64::from_le_bytes);
    if round == LEAVE {
        return Ok(Received::Leave);
    }
    let round = u8::try_from(round).map_err(|_| garbage("a round that is none"))?;
    if call_len > MAX_CALL_BYTES {
        return Err(garbage("a call of impossible length"));
    }
    let call = wire::decode(&read_bytes(stream, call_len)?).ok_or_else(|| garbage("a call that is none"))?;
    let payload = read_bytes(stream, payload_len)?.into();
    Ok(Received::Letter(Place { domain, number, round }, Letter { call, payload }))
}

/// Memory is taken as bytes come, so that a wrong length takes none.
fn read_bytes(stream: &mut impl Read, len: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(len.min(1 << 26) as usize);
    stream.take(len).read_to_end(&mut bytes)?;
    if bytes.len() as u64 == len { Ok(bytes) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::call::CallPart;
    use crate::{Dtype, OpKind, OpTag, Phase, ShardLayout};

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
        // Where each number stands: the round, the lengths of call and payload, and the call's kind.
        for (place, number) in [(2, 256), (3, u64::MAX), (4, u64::MAX), (NUM_NUMBERS, 99)] {
            let mut damaged = [&bytes[..], &[0; 5]].concat();
            assert!(read(&mut &damaged[..]).is_ok());
            damaged[8 * place..8 * (place + 1)].copy_from_slice(&number.to_le_bytes());
            assert!(read(&mut &damaged[..]).is_err(), "{number} at {place}");
        }
    }
}
