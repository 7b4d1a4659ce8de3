//! What can go wrong in a collective. Ranks are named by their number in the world, in subgroups as well.

use std::any::Any;
use std::fmt;
use std::time::Duration;

use thiserror::Error;

use super::{OpKind, OpTag};

/// Why a collective did not return a result.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum CommError {
    /// Some ranks did not join in time. The rank that noticed has aborted the world.
    #[error(
        "rank {rank} waited {waited:?} in {kind} ({tag}) for {}. Look for a panic or an error on {}, for a branch \
         that only some ranks take, or raise the communicator's timeout if a step may take that long",
        Ranks(missing), if missing.len() == 1 { "that rank" } else { "those ranks" }
    )]
    Timeout {
        /// The rank that waited.
        rank: usize,
        /// The operation it waited in.
        kind: OpKind,
        /// Where that operation was issued.
        tag: OpTag,
        /// How long it waited.
        waited: Duration,
        /// The ranks that had not arrived.
        missing: Vec<usize>,
    },

    /// A rank has ended while others still wait for it. The rank that noticed has aborted the world.
    #[error(
        "rank {rank} waits in {kind} ({tag}) for {}, whose program has returned. Every rank must make the same steps: deal \
         out the data evenly, or stop all ranks where the shortest share ends",
        Ranks(left)
    )]
    Left {
        /// The rank that waited.
        rank: usize,
        /// The operation it waited in.
        kind: OpKind,
        /// Where that operation was issued.
        tag: OpTag,
        /// The ranks that have ended.
        left: Vec<usize>,
    },

    /// Two ranks issued different operations where the same one was due. Every rank gets this error.
    #[error(
        "ranks issued different operations: {first}, but {second}; the {what} differs. Run the same units in the same \
         order on every rank, and contribute zeros where a rank has no data"
    )]
    Mismatch {
        /// What differs first, in the order in which operations are compared.
        what: &'static str,
        /// What one rank issued.
        first: Box<Issued>,
        /// What the other rank issued.
        second: Box<Issued>,
    },

    /// The world was aborted, by this rank or by another.
    #[error("rank {rank}: communication has ended, because {cause}")]
    Aborted {
        /// The rank that received this error.
        rank: usize,
        /// The first cause.
        cause: AbortCause,
    },

    /// A part is cut into another number of blocks than the communicator has ranks. Nothing was sent.
    #[error(
        "rank {rank}, {tag}: part {part} is cut into {num_shards} blocks, but the communicator has {world_size} ranks. \
         Build the layout with the size of the group it is gathered over"
    )]
    Layout {
        /// The rank that called.
        rank: usize,
        /// The operation.
        tag: OpTag,
        /// Position in the list of parts.
        part: usize,
        /// Blocks of the layout.
        num_shards: usize,
        /// Ranks of the communicator.
        world_size: usize,
    },

    /// A buffer has another size than its layout says. Nothing was sent.
    #[error(
        "rank {rank}, {tag}: the buffer of part {part} has {got_bytes} bytes, but its layout needs {expected_bytes}. \
         Pass the flat, unpadded elements in the element type of the part"
    )]
    BufferSize {
        /// The rank that called.
        rank: usize,
        /// The operation.
        tag: OpTag,
        /// Position in the list of parts.
        part: usize,
        /// Bytes that the layout needs.
        expected_bytes: usize,
        /// Bytes that the buffer has.
        got_bytes: usize,
    },

    /// A root does not exist, or data was passed by another rank than the root. Nothing was sent.
    #[error("rank {rank}, {tag}: {problem}. Pass `Some` on rank {root} of the communicator, and `None` on every other")]
    Root {
        /// The rank that called.
        rank: usize,
        /// The operation.
        tag: OpTag,
        /// The root, as a rank of the communicator.
        root: usize,
        /// What is wrong.
        problem: &'static str,
    },

    /// A list of ranks is not a group.
    #[error(
        "rank {rank}: {ranks:?} is not a group: {problem}. List each member's rank once; only members make the call"
    )]
    Group {
        /// The rank that called.
        rank: usize,
        /// The list, in ranks of the communicator that was asked.
        ranks: Vec<usize>,
        /// What is wrong.
        problem: &'static str,
    },

    /// A job on a [`CommStream`](crate::CommStream) panicked. The stream itself goes on.
    #[error("rank {rank}: a job on stream `{stream}` panicked: {message}")]
    JobPanicked {
        /// The rank whose stream it is, in the stream's communicator.
        rank: usize,
        /// The name of the stream.
        stream: String,
        /// The panic's message.
        message: String,
    },

    /// A [`CommStream`](crate::CommStream) could not start its thread.
    #[error("rank {rank}: stream `{stream}` could not start its thread: {message}. Check the limit on threads")]
    Stream {
        /// The rank whose stream it is, in the stream's communicator.
        rank: usize,
        /// The name of the stream.
        stream: String,
        /// What the operating system said.
        message: String,
    },

    /// An engine outside this process failed.
    #[error("rank {rank}, {tag}: the engine failed: {message}")]
    Engine {
        /// The rank that called.
        rank: usize,
        /// The operation.
        tag: OpTag,
        /// What the engine said.
        message: String,
    },
}

impl CommError {
    /// What a call of `rank` returns after the world was aborted. A mismatch concerns every rank alike; other causes are
    /// reported as the reason of an abort.
    pub(crate) fn ended(rank: usize, cause: &AbortCause) -> Self {
        match cause {
            AbortCause::Collective(error) if matches!(**error, CommError::Mismatch { .. }) => (**error).clone(),
            _ => CommError::Aborted { rank, cause: cause.clone() },
        }
    }
}

/// What one rank issued, for the report of a mismatch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Issued {
    /// The rank, by its number in the world.
    pub rank: usize,
    /// The kind of operation.
    pub kind: OpKind,
    /// Where it was issued.
    pub tag: OpTag,
    /// This rank's side of what differs, such as `3 parts`; empty where the kind or the tag says it.
    pub detail: String,
}

impl fmt::Display for Issued {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} issued {} ({})", self.rank, self.kind, self.tag)?;
        if self.detail.is_empty() { Ok(()) } else { write!(f, " with {}", self.detail) }
    }
}

/// Why a world was aborted. The first cause wins, and every later call on every rank reports it.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum AbortCause {
    /// A rank panicked.
    #[error("rank {rank} panicked: {message}")]
    RankPanicked {
        /// The rank.
        rank: usize,
        /// The panic's message.
        message: String,
    },
    /// A rank returned an error.
    #[error("rank {rank} failed: {message}")]
    RankFailed {
        /// The rank.
        rank: usize,
        /// The error's message.
        message: String,
    },
    /// A rank's process has ended without a word, or is not heard from any more.
    #[error("rank {rank} was lost: {how}{}", Missed(missed))]
    RankLost {
        /// The rank.
        rank: usize,
        /// How it was noticed.
        how: String,
        /// The operation that another rank waits in for it, if one does.
        missed: Option<Box<Issued>>,
    },
    /// A collective could not complete: a timeout or a mismatch.
    #[error("{0}")]
    Collective(Box<CommError>),
}

impl AbortCause {
    /// The cause of a rank whose thread panicked with `payload`, as [`std::panic::catch_unwind`] returns it.
    pub fn panicked(rank: usize, payload: &(dyn Any + Send)) -> Self {
        AbortCause::RankPanicked { rank, message: panic_message(payload) }
    }
}

/// The text of a panic.
pub(crate) fn panic_message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a panic without a text".into())
}

/// Writes `rank 2` or `ranks 0, 3`.
struct Ranks<'a>(&'a [usize]);

impl fmt::Display for Ranks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.len() == 1 { "rank" } else { "ranks" })?;
        for (i, rank) in self.0.iter().enumerate() {
            write!(f, "{} {rank}", if i == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

/// Writes what a lost rank has missed.
struct Missed<'a>(&'a Option<Box<Issued>>);

impl fmt::Display for Missed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(issued) => write!(f, "; rank {} waits for it in {} ({})", issued.rank, issued.kind, issued.tag),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Phase;

    fn tag(unit: &str) -> OpTag {
        OpTag::new(3, Phase::Backward, unit)
    }

    fn timeout(missing: Vec<usize>) -> CommError {
        CommError::Timeout {
            rank: 0,
            kind: OpKind::AllGather,
            tag: tag("head"),
            waited: Duration::from_millis(300),
            missing,
        }
    }

    #[test]
    fn a_timeout_names_the_operation_the_waiter_the_missing_and_a_remedy() {
        assert_eq!(
            timeout(vec![2, 3]).to_string(),
            "rank 0 waited 300ms in all-gather (step 3, backward, unit `head`) for ranks 2, 3. Look for a panic or an \
             error on those ranks, for a branch that only some ranks take, or raise the communicator's timeout if a \
             step may take that long"
        );
        assert!(timeout(vec![2]).to_string().contains("for rank 2. Look for a panic or an error on that rank,"));
    }

    #[test]
    fn a_mismatch_names_both_ranks_and_both_tags() {
        let issued = |rank, unit, detail: &str| {
            Box::new(Issued { rank, kind: OpKind::AllReduce, tag: tag(unit), detail: detail.into() })
        };
        let error = CommError::Mismatch { what: "tag", first: issued(0, "a", ""), second: issued(1, "b", "") };
        assert_eq!(
            error.to_string(),
            "ranks issued different operations: rank 0 issued all-reduce (step 3, backward, unit `a`), but rank 1 \
             issued all-reduce (step 3, backward, unit `b`); the tag differs. Run the same units in the same order on \
             every rank, and contribute zeros where a rank has no data"
        );
        let error =
            CommError::Mismatch { what: "number of parts", first: issued(0, "a", "1"), second: issued(1, "a", "2") };
        assert!(error.to_string().contains("unit `a`) with 2; the number of parts differs"), "{error}");
    }

    #[test]
    fn an_abort_tells_its_cause() {
        let text = |cause| CommError::Aborted { rank: 1, cause }.to_string();
        assert_eq!(
            text(AbortCause::RankPanicked { rank: 2, message: "boom".into() }),
            "rank 1: communication has ended, because rank 2 panicked: boom"
        );
        assert_eq!(
            text(AbortCause::RankFailed { rank: 2, message: "no file".into() }),
            "rank 1: communication has ended, because rank 2 failed: no file"
        );
        let missed = Issued { rank: 0, kind: OpKind::AllGather, tag: tag("head"), detail: String::new() };
        let lost = |missed| AbortCause::RankLost { rank: 2, how: "its connection has ended".into(), missed };
        assert!(text(lost(None)).ends_with("rank 2 was lost: its connection has ended"));
        assert!(
            text(lost(Some(Box::new(missed))))
                .ends_with("; rank 0 waits for it in all-gather (step 3, backward, unit `head`)")
        );
        assert!(
            text(AbortCause::Collective(Box::new(timeout(vec![2])))).contains("because rank 0 waited 300ms"),
            "the timeout is the cause"
        );
    }

    #[test]
    fn wrong_arguments_name_the_rank_the_operation_and_the_remedy() {
        let cases: [(CommError, &str); 5] = [
            (
                CommError::Layout { rank: 1, tag: tag("a"), part: 4, num_shards: 2, world_size: 3 },
                "rank 1, step 3, backward, unit `a`: part 4 is cut into 2 blocks, but the communicator has 3 ranks. \
                 Build the layout with the size of the group it is gathered over",
            ),
            (
                CommError::BufferSize { rank: 1, tag: tag("a"), part: 0, expected_bytes: 12, got_bytes: 8 },
                "rank 1, step 3, backward, unit `a`: the buffer of part 0 has 8 bytes, but its layout needs 12. Pass \
                 the flat, unpadded elements in the element type of the part",
            ),
            (
                CommError::Root { rank: 1, tag: tag("a"), root: 0, problem: "the root passed no data" },
                "rank 1, step 3, backward, unit `a`: the root passed no data. Pass `Some` on rank 0 of the \
                 communicator, and `None` on every other",
            ),
            (
                CommError::Group { rank: 1, ranks: vec![0, 0], problem: "rank 0 is listed twice" },
                "rank 1: [0, 0] is not a group: rank 0 is listed twice. List each member's rank once; only members \
                 make the call",
            ),
            (
                CommError::JobPanicked { rank: 1, stream: "reduce".into(), message: "boom".into() },
                "rank 1: a job on stream `reduce` panicked: boom",
            ),
        ];
        for (error, text) in cases {
            assert_eq!(error.to_string(), text);
        }
    }
}
