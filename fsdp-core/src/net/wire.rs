//! What the ranks of a control channel tell each other, and how it travels: a length of four bytes, then JSON.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::comm::call::DIFFERENCES;
use crate::{AbortCause, CommError, Issued, OpKind, OpTag, Phase};

/// The longest message. A longer one is none of ours.
pub(super) const MAX_MESSAGE_BYTES: usize = 256 << 10;
/// The longest text of a cause.
const MAX_TEXT_BYTES: usize = 8 << 10;
/// The longest name of a unit.
const MAX_UNIT_BYTES: usize = 1 << 10;

/// A message of a control channel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum Message {
    /// All ranks are there.
    Start,
    /// The sender is alive.
    Heartbeat { waits: Vec<WireWait>, last: Option<WireIssued> },
    /// The run ends.
    Abort(WireCause),
    /// A rank's program has returned.
    Leave { rank: usize },
    /// A value by name.
    Put { key: String, value: Vec<u8> },
}

/// An operation, and for how many milliseconds it has been waited in.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct WireWait {
    pub(super) issued: WireIssued,
    pub(super) millis: u64,
}

/// [`Issued`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct WireIssued {
    rank: usize,
    kind: u8,
    step: u64,
    phase: u8,
    unit: String,
    detail: String,
}

/// [`AbortCause`]. What only the rank itself can act on becomes text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum WireCause {
    Panicked { rank: usize, message: String },
    Failed { rank: usize, message: String },
    Lost { rank: usize, how: String, missed: Option<WireIssued> },
    Timeout { at: WireIssued, waited: Duration, missing: Vec<usize> },
    Left { at: WireIssued, left: Vec<usize> },
    Mismatch { what: String, first: WireIssued, second: WireIssued },
}

impl Message {
    /// With its length in front.
    pub(super) fn frame(&self) -> Vec<u8> {
        let body = serde_json::to_vec(self).expect("a message has nothing that JSON lacks");
        debug_assert!(body.len() <= MAX_MESSAGE_BYTES);
        [&(body.len() as u32).to_le_bytes()[..], &body].concat()
    }
}

/// Bytes of a connection that are not a whole message yet.
#[derive(Debug, Default)]
pub(super) struct Inbox(Vec<u8>);

/// Bytes that are no message.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Garbage;

impl Inbox {
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    /// The next message, if all of it is there.
    pub(super) fn pop(&mut self) -> Result<Option<Message>, Garbage> {
        let Some((len, rest)) = self.0.split_first_chunk::<4>() else { return Ok(None) };
        let len = u32::from_le_bytes(*len) as usize;
        if len > MAX_MESSAGE_BYTES {
            return Err(Garbage);
        }
        let Some(body) = rest.get(..len) else { return Ok(None) };
        let message = serde_json::from_slice(body).map_err(|_| Garbage)?;
        self.0.drain(..4 + len);
        Ok(Some(message))
    }
}

impl From<&Issued> for WireIssued {
    fn from(issued: &Issued) -> Self {
        let place = |found: Option<usize>| found.expect("all values are listed") as u8;
        Self {
            rank: issued.rank,
            kind: place(OpKind::ALL.iter().position(|&kind| kind == issued.kind)),
            step: issued.tag.step,
            phase: place(Phase::ALL.iter().position(|&phase| phase == issued.tag.phase)),
            unit: shorten(&issued.tag.unit, MAX_UNIT_BYTES),
            detail: shorten(&issued.detail, MAX_UNIT_BYTES),
        }
    }
}

impl From<WireIssued> for Issued {
    /// Numbers of another build's kinds and phases become the last ones.
    fn from(wire: WireIssued) -> Self {
        let kind = OpKind::ALL.get(usize::from(wire.kind)).copied().unwrap_or(OpKind::Barrier);
        let phase = Phase::ALL.get(usize::from(wire.phase)).copied().unwrap_or(Phase::Control);
        Issued { rank: wire.rank, kind, tag: OpTag::new(wire.step, phase, wire.unit), detail: wire.detail }
    }
}

impl WireCause {
    /// `rank` tells it.
    pub(super) fn new(cause: &AbortCause, rank: usize) -> Self {
        let issued = |rank: usize, kind: OpKind, tag: &OpTag| {
            WireIssued::from(&Issued { rank, kind, tag: tag.clone(), detail: String::new() })
        };
        let shorten = |text: &str| shorten(text, MAX_TEXT_BYTES);
        match cause {
            AbortCause::RankPanicked { rank, message } => Self::Panicked { rank: *rank, message: shorten(message) },
            AbortCause::RankFailed { rank, message } => Self::Failed { rank: *rank, message: shorten(message) },
            AbortCause::RankLost { rank, how, missed } => {
                Self::Lost { rank: *rank, how: shorten(how), missed: missed.as_deref().map(WireIssued::from) }
            }
            AbortCause::Collective(error) => match &**error {
                CommError::Timeout { rank, kind, tag, waited, missing } => {
                    Self::Timeout { at: issued(*rank, *kind, tag), waited: *waited, missing: missing.clone() }
                }
                CommError::Left { rank, kind, tag, left } => {
                    Self::Left { at: issued(*rank, *kind, tag), left: left.clone() }
                }
                CommError::Mismatch { what, first, second } => {
                    Self::Mismatch { what: (*what).to_owned(), first: (&**first).into(), second: (&**second).into() }
                }
                other => Self::Failed { rank, message: shorten(&other.to_string()) },
            },
        }
    }
}

impl From<WireCause> for AbortCause {
    fn from(wire: WireCause) -> Self {
        let error = match wire {
            WireCause::Panicked { rank, message } => return AbortCause::RankPanicked { rank, message },
            WireCause::Failed { rank, message } => return AbortCause::RankFailed { rank, message },
            WireCause::Lost { rank, how, missed } => {
                return AbortCause::RankLost { rank, how, missed: missed.map(|issued| Box::new(issued.into())) };
            }
            WireCause::Timeout { at, waited, missing } => {
                let Issued { rank, kind, tag, .. } = at.into();
                CommError::Timeout { rank, kind, tag, waited, missing }
            }
            WireCause::Left { at, left } => {
                let Issued { rank, kind, tag, .. } = at.into();
                CommError::Left { rank, kind, tag, left }
            }
            WireCause::Mismatch { what, first, second } => CommError::Mismatch {
                what: DIFFERENCES.into_iter().find(|known| *known == what).unwrap_or("operation"),
                first: Box::new(first.into()),
                second: Box::new(second.into()),
            },
        };
        AbortCause::Collective(Box::new(error))
    }
}

fn shorten(text: &str, max_bytes: usize) -> String {
    if text.len() <= max_bytes {
        return text.to_owned();
    }
    let end = (0..=max_bytes).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
    format!("{} ...", &text[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn issued(rank: usize) -> Issued {
        let tag = OpTag::new(3, Phase::Backward, "blocks.1");
        Issued { rank, kind: OpKind::ReduceScatter, tag, detail: "2 parts".into() }
    }

    #[test]
    fn a_cause_arrives_as_it_was_sent() {
        let Issued { rank, kind, tag, .. } = issued(2);
        let (first, second) = (Box::new(issued(0)), Box::new(issued(1)));
        let waited = Duration::from_millis(1500);
        let of = |error| AbortCause::Collective(Box::new(error));
        let causes = [
            AbortCause::RankPanicked { rank: 1, message: "out of \"cheese\"\n".into() },
            AbortCause::RankFailed { rank: 1, message: "no file".into() },
            AbortCause::RankLost { rank: 1, how: "it ended".into(), missed: None },
            AbortCause::RankLost { rank: 1, how: "it ended".into(), missed: Some(Box::new(issued(0))) },
            of(CommError::Timeout { rank, kind, tag: tag.clone(), waited, missing: vec![0, 3] }),
            of(CommError::Left { rank, kind, tag: tag.clone(), left: vec![1] }),
            of(CommError::Mismatch { what: "layout of a part", first, second }),
        ];
        for cause in causes {
            let message = Message::Abort(WireCause::new(&cause, 2));
            let mut inbox = Inbox::default();
            let frame = message.frame();
            for byte in &frame[..frame.len() - 1] {
                inbox.push(&[*byte]);
                assert_eq!(inbox.pop(), Ok(None));
            }
            inbox.push(&frame[frame.len() - 1..]);
            assert_eq!(inbox.pop(), Ok(Some(message.clone())));
            assert_eq!(inbox.pop(), Ok(None));
            let Message::Abort(wire) = message else { unreachable!() };
            assert_eq!(AbortCause::from(wire), cause);
        }
        let other = of(CommError::Engine { rank: 2, tag, message: "broken".into() });
        let AbortCause::RankFailed { rank: 2, message } = WireCause::new(&other, 2).into() else { panic!() };
        assert!(message.contains("broken"));
    }

    #[test]
    fn every_phase_and_kind_arrives() {
        for phase in Phase::ALL {
            for kind in OpKind::ALL {
                let issued = Issued { rank: 0, kind, tag: OpTag::new(0, phase, ""), detail: String::new() };
                assert_eq!(Issued::from(WireIssued::from(&issued)), issued);
            }
        }
    }

    #[test]
    fn what_is_too_long_or_no_message_is_garbage() {
        for bytes in [&u32::MAX.to_le_bytes()[..], &[2, 0, 0, 0, b'{', b'}'], &[1, 0, 0, 0, 0xFF]] {
            let mut inbox = Inbox::default();
            inbox.push(bytes);
            assert_eq!(inbox.pop(), Err(Garbage));
        }
        let long = AbortCause::RankFailed { rank: 0, message: "ä".repeat(1 << 20) };
        assert!(Message::Abort(WireCause::new(&long, 0)).frame().len() <= MAX_MESSAGE_BYTES);
    }
}
