//! The speed of a disk, as the ranks of a machine reach it side by side.

use std::path::Path;
use std::thread;
use std::time::Instant;

use bytes::Bytes;

use super::{ProfileError, TIMEOUT};
use crate::{LocalWorld, OpTag, Phase, Tier, TierOptions, TierRate};

/// What a rank has in its file: large enough that a disk's start does not count.
const SLOTS: usize = 8;

/// Bytes per second of one rank, while `num_ranks` ranks read, or write, `slot_bytes` at a time in `dir`.
pub(super) fn measure(dir: &Path, num_ranks: usize, slot_bytes: usize) -> Result<TierRate, ProfileError> {
    let threads: Vec<_> = LocalWorld::connect(num_ranks, TIMEOUT)
        .into_iter()
        .map(|comm| {
            let options = TierOptions { timeout: TIMEOUT, ..TierOptions::new(dir, comm.rank(), num_ranks) };
            thread::spawn(move || -> Result<[(Instant, Instant); 2], ProfileError> {
                let tier = Tier::open(&options)?;
                let slots = (0..SLOTS).map(|_| tier.reserve(slot_bytes)).collect::<Result<Vec<_>, _>>()?;
                // Not zeros, which some disks do not store.
                let data: Vec<u8> = (0..slot_bytes).map(|at| (at * 31 % 251) as u8).collect();
                let data = Bytes::from(data);
                let tag = OpTag::new(0, Phase::Control, "fsdp bench");
                comm.barrier(&tag)?;
                let start = Instant::now();
                let writes: Vec<_> = slots.iter().map(|&slot| tier.write(slot, data.clone())).collect();
                writes.into_iter().try_for_each(|write| write.wait())?;
                let written = (start, Instant::now());
                comm.barrier(&tag)?;
                let start = Instant::now();
                // Two at a time, as in a step, so that memory holds no more.
                let mut reading = None;
                for &slot in &slots {
                    if let Some(earlier) = reading.replace(tier.read(slot)) {
                        drop(earlier.wait()?);
                    }
                }
                if let Some(last) = reading {
                    drop(last.wait()?);
                }
                let read = (start, Instant::now());
                // Nobody takes its file away while others are at work.
                comm.barrier(&tag)?;
                Ok([read, written])
            })
        })
        .collect();
    let mut spans = Vec::new();
    for (rank, thread) in threads.into_iter().enumerate() {
        spans.push(thread.join().map_err(|_| ProfileError::Panicked { rank })??);
    }
    let rate = |what: usize| {
        let (start, end) =
            (spans.iter().map(|spans| spans[what].0).min(), spans.iter().map(|spans| spans[what].1).max());
        let seconds = start.zip(end).map_or(f64::NAN, |(start, end)| (end - start).as_secs_f64());
        (SLOTS * slot_bytes) as f64 / seconds
    };
    Ok(TierRate { read_bytes_per_s: rate(0), write_bytes_per_s: rate(1) })
}
