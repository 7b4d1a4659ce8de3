//! How ranks agree: byte strings of any length gathered from all, and outcomes that fail on all ranks or on none.

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::CheckpointError;
use crate::{CommError, Communicator, GatherPart, OpTag, ShardLayout};

/// Every rank's bytes, on every rank, in their order. Two operations; each rank receives the longest string once for
/// every rank.
fn gather_bytes(comm: &dyn Communicator, tag: &OpTag, bytes: &[u8]) -> Result<Vec<Bytes>, CommError> {
    let world_size = comm.world_size();
    let gather = |shard: Bytes| {
        let layout = ShardLayout::new(&[world_size, shard.len()], 0, world_size);
        comm.all_gather(tag, &[GatherPart { shard, layout, elem_bytes: 1 }]).map(|mut whole| whole.remove(0))
    };
    let lens = gather(Bytes::copy_from_slice(&(bytes.len() as u64).to_le_bytes()))?;
    let len = |len: &[u8]| len.iter().rev().fold(0, |len, &byte| len << 8 | usize::from(byte));
    let lens: Vec<usize> = lens.chunks_exact(8).map(len).collect();
    let longest = lens.iter().copied().max().unwrap_or(0);
    let mut padded = bytes.to_vec();
    padded.resize(longest, 0);
    let whole = gather(padded.into())?;
    Ok(lens.iter().enumerate().map(|(rank, len)| whole.slice(rank * longest..rank * longest + len)).collect())
}

/// Tells all ranks how each fared: returns every rank's value, or on all ranks the error that names who failed.
///
/// Collective. A rank whose own step failed still has to call it, which is why it takes a result.
pub(super) fn agree<T: Serialize + DeserializeOwned>(
    comm: &dyn Communicator,
    tag: &OpTag,
    doing: &'static str,
    outcome: Result<T, CheckpointError>,
) -> Result<Vec<T>, CheckpointError> {
    let told = outcome.as_ref().map_err(ToString::to_string);
    let told = serde_json::to_vec(&told).unwrap_or_else(|error| unreadable(&error));
    let all = gather_bytes(comm, tag, &told)?;
    let mut values = Vec::with_capacity(all.len());
    let mut failed = Vec::new();
    for (rank, told) in all.iter().enumerate() {
        let told: Result<T, String> = serde_json::from_slice(told).unwrap_or_else(|error| Err(error.to_string()));
        match told {
            Ok(value) => values.push(value),
            Err(message) => failed.push((rank, message)),
        }
    }
    if failed.is_empty() {
        return Ok(values);
    }
    let (rank, message) = failed.remove(0);
    let also = failed.into_iter().map(|(rank, _)| rank).collect();
    Err(CheckpointError::RankFailed { doing, rank, message, also, source: outcome.err().map(Box::new) })
}

/// The outcome of a rank whose value cannot be written as JSON: a failure with this message.
fn unreadable(error: &serde_json::Error) -> Vec<u8> {
    serde_json::json!({ "Err": error.to_string() }).to_string().into_bytes()
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::time::Duration;

    use super::*;
    use crate::{LocalWorld, Phase};

    fn on_all<T: Send>(world_size: usize, run: impl Fn(&dyn Communicator) -> T + Sync) -> Vec<T> {
        std::thread::scope(|scope| {
            let ranks = LocalWorld::connect(world_size, Duration::from_secs(30));
            let threads: Vec<_> = ranks.into_iter().map(|comm| scope.spawn(|| run(&*{ comm }))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn strings_of_any_length_reach_every_rank_in_order() {
        let tag = OpTag::new(1, Phase::Checkpoint, "test");
        let text = |rank: usize| "x".repeat(rank * 700);
        for world_size in [1, 2, 5] {
            for found in on_all(world_size, |comm| gather_bytes(comm, &tag, text(comm.rank()).as_bytes()).unwrap()) {
                assert_eq!(found, (0..world_size).map(text).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn one_failure_is_every_ranks_error_and_names_the_rank() {
        let tag = OpTag::new(1, Phase::Checkpoint, "test");
        let results = on_all(4, |comm| {
            let dir = PathBuf::from("step-7");
            let outcome = if comm.rank() % 2 == 1 { Err(CheckpointError::NoManifest { dir }) } else { Ok(comm.rank()) };
            agree(comm, &tag, "saving step 7", outcome).map_err(|error| error.to_string())
        });
        for error in results {
            let error = error.unwrap_err();
            assert!(error.starts_with("saving step 7: rank 1 failed (and rank 3): step-7 has no manifest"), "{error}");
        }
    }
}
