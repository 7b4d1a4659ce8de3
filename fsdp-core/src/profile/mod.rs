//! What was measured of a machine, in a file that a planner reads.

mod disk;
mod step;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::{
    Collectives, CommError, Communicator, Dtype, GatherPart, Link, LocalWorld, MeasuredLinks, OpTag, Phase, Reduce,
    ReducePart, ShardLayout, TierError, TierRate,
};
pub use step::{MeasuredStep, WorkTime};

/// What a profile calls itself.
const FORMAT: &str = "fsdp-profile-1";

/// The speeds of a machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    format: String,
    /// Ranks that communicated, each a thread.
    pub num_ranks: usize,
    /// Processors of the machine.
    pub num_cores: usize,
    /// What collectives between the ranks cost.
    pub collectives: MeasuredLinks,
    /// Bytes per second that a rank copies from memory to memory, while the others do too.
    pub memory_bytes_per_s: f64,
    /// What each rank reaches of a disk, while the others do too; `None` where none was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nvme: Option<TierRate>,
    /// A step of a single rank; `None` where none was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<MeasuredStep>,
}

/// How to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProfileOptions {
    /// Ranks, each a thread.
    pub num_ranks: usize,
    /// Bytes of the largest tensor; sizes are that, a quarter, and so on, down to 4 KiB.
    pub max_bytes: usize,
    /// Measurements of each size, of which the median counts.
    pub repetitions: usize,
}

impl Profile {
    /// Measures collectives of rank threads, and copies, on this machine. Tensors take turns, so that they come from memory
    /// and not from a cache. Cost: at most 512 MiB of memory, or four times the largest tensor for each rank if that is
    /// more.
    ///
    /// # Errors
    /// If a collective fails, or the options leave fewer than two sizes.
    pub fn measure(options: &ProfileOptions) -> Result<Self, ProfileError> {
        let sizes: Vec<usize> =
            std::iter::successors(Some(options.max_bytes / 64 * 64), |bytes| Some(bytes / 4 / 64 * 64))
                .take_while(|&bytes| bytes >= SMALLEST_BYTES)
                .collect();
        if sizes.len() < 2 || options.num_ranks == 0 || options.repetitions == 0 {
            return Err(ProfileError::Options { options: *options });
        }
        let mut points = [const { Vec::new() }; Work::ALL.len()];
        for &bytes in &sizes {
            for (points, (moved, seconds)) in points.iter_mut().zip(measure_size(options, bytes)?) {
                points.push((moved as f64, seconds));
            }
        }
        let fit = |work: Work| Link::fit(&points[work as usize]).ok_or(ProfileError::Options { options: *options });
        let (largest_bytes, largest_s) = points[Work::Copy as usize][0];
        Ok(Self {
            format: FORMAT.to_owned(),
            num_ranks: options.num_ranks,
            num_cores: thread::available_parallelism().map_or(1, usize::from),
            collectives: MeasuredLinks {
                all_gather: fit(Work::AllGather)?,
                reduce_scatter: fit(Work::ReduceScatter)?,
                all_reduce: fit(Work::AllReduce)?,
            },
            memory_bytes_per_s: largest_bytes / largest_s,
            nvme: None,
            step: None,
        })
    }

    /// Measures the disk that `dir` is on, which is made if it is not there, and adds it to the profile. Cost: eight times
    /// `slot_bytes` of the disk for each rank, and three times that in memory.
    ///
    /// # Errors
    /// If the disk cannot be used: see [`Tier`](crate::Tier).
    pub fn measure_disk(&mut self, dir: &Path, slot_bytes: usize) -> Result<(), ProfileError> {
        self.nvme = Some(disk::measure(dir, self.num_ranks, slot_bytes)?);
        Ok(())
    }

    /// What collectives between `num_ranks` ranks of this machine cost, each with `num_threads` compute threads. Ranks beyond
    /// the processors take turns, so that all of them are slower.
    pub fn network(&self, num_ranks: usize, num_threads: usize) -> Collectives {
        let turns = |num_ranks: usize| (num_ranks as f64 / self.num_cores as f64).max(1.0);
        let slower = turns(num_ranks) / turns(self.num_ranks);
        Collectives::Measured {
            links: self.collectives.scaled(slower, slower),
            taken_share: MeasuredLinks::taken_share(num_ranks, self.num_cores, num_threads),
        }
    }

    /// Reads a file.
    ///
    /// # Errors
    /// If it cannot be read, is no profile, or its numbers make no sense.
    pub fn read(file: &Path) -> Result<Self, ProfileError> {
        let text = fs::read_to_string(file).map_err(|source| ProfileError::Io { file: file.to_owned(), source })?;
        Self::from_json(&text, &file.display().to_string())
    }

    /// Reads a file's text; `origin` is its name in errors.
    ///
    /// # Errors
    /// If it is no profile, or its numbers make no sense.
    pub fn from_json(text: &str, origin: &str) -> Result<Self, ProfileError> {
        let wrong = |message: String| ProfileError::Syntax { origin: origin.to_owned(), message };
        let profile: Self = serde_json::from_str(text).map_err(|error| wrong(error.to_string()))?;
        if profile.format != FORMAT {
            return Err(wrong(format!("its format is \"{}\", and \"{FORMAT}\" is read here", profile.format)));
        }
        let MeasuredLinks { all_gather, reduce_scatter, all_reduce } = profile.collectives;
        for (name, link) in [("all_gather", all_gather), ("reduce_scatter", reduce_scatter), ("all_reduce", all_reduce)]
        {
            if !(link.alpha_s >= 0.0 && link.beta_s_per_byte >= 0.0) {
                return Err(wrong(format!("`collectives.{name}` has a negative time")));
            }
            // So that whatever is computed with them stays finite.
            if link.alpha_s > 1e9 || link.beta_s_per_byte > 1.0 {
                return Err(wrong(format!("`collectives.{name}` takes years")));
            }
        }
        let is_rate = |rate: f64| (1.0..=1e24).contains(&rate);
        if profile.num_ranks == 0 || profile.num_cores == 0 || !is_rate(profile.memory_bytes_per_s) {
            let positive = "`num_ranks`, `num_cores` and `memory_bytes_per_s` must be positive";
            return Err(wrong(positive.to_owned()));
        }
        if profile.nvme.is_some_and(|disk| !is_rate(disk.read_bytes_per_s) || !is_rate(disk.write_bytes_per_s)) {
            return Err(wrong("the rates of `nvme` must be positive".to_owned()));
        }
        if profile.step.as_ref().is_some_and(|step| !step.is_sound()) {
            return Err(wrong("the counts and seconds of `step` must be positive".to_owned()));
        }
        Ok(profile)
    }

    /// The file's text.
    pub fn to_json(&self) -> String {
        // Numbers and names always have a JSON form.
        serde_json::to_string_pretty(self).unwrap_or_default() + "\n"
    }

    /// Writes the file, over one that is there.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn write(&self, file: &Path) -> Result<(), ProfileError> {
        fs::write(file, self.to_json()).map_err(|source| ProfileError::Io { file: file.to_owned(), source })
    }
}

/// Why there is no profile.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// The file cannot be read or written.
    #[error("{}: {source}; `fsdp bench --out FILE` writes a profile", file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Not a profile.
    #[error("{origin}: not a profile: {message}; `fsdp bench --out FILE` writes one")]
    Syntax {
        /// The file.
        origin: String,
        /// What is wrong.
        message: String,
    },
    /// Nothing can be measured so.
    #[error(
        "{options:?}: a profile needs at least one rank and one repetition, and tensors of at least two sizes, so \
         max_bytes of at least 16 KiB"
    )]
    Options {
        /// What was asked for.
        options: ProfileOptions,
    },
    /// Not a report of a single rank.
    #[error("{origin}: no step to measure: {message}; write one with `train --ranks 1 --report FILE`")]
    Report {
        /// The file.
        origin: String,
        /// What is wrong.
        message: String,
    },
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// A disk failed.
    #[error(transparent)]
    Disk(#[from] TierError),
    /// A rank panicked.
    #[error("rank {rank} panicked while it was measured; run again, and report this if it stays")]
    Panicked {
        /// The rank.
        rank: usize,
    },
}

const SMALLEST_BYTES: usize = 4 << 10;

/// Tensors that together are so large are not in a cache when their turn comes again.
const COLD_BYTES: usize = 128 << 20;

/// Operations are repeated back to back until they have moved about this much, so that the clock sees enough.
const BATCH_BYTES: usize = 16 << 20;

/// Every wait of a measurement ends.
const TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Clone, Copy)]
enum Work {
    AllGather,
    ReduceScatter,
    AllReduce,
    Copy,
}

impl Work {
    const ALL: [Work; 4] = [Work::AllGather, Work::ReduceScatter, Work::AllReduce, Work::Copy];

    /// Bytes that each rank reads.
    fn moved_bytes(self, tensor_bytes: usize, num_ranks: usize) -> usize {
        if matches!(self, Work::AllGather) { tensor_bytes / num_ranks } else { tensor_bytes }
    }
}

type Spans = Vec<[(Instant, Instant); Work::ALL.len()]>;

/// Bytes that each rank reads, and the median of the seconds, by kind of work. Kinds take turns, so that whatever else the
/// machine does slows all of them alike.
fn measure_size(options: &ProfileOptions, tensor_bytes: usize) -> Result<Vec<(usize, f64)>, ProfileError> {
    let ProfileOptions { num_ranks, repetitions, .. } = *options;
    let threads: Vec<_> = LocalWorld::connect(num_ranks, TIMEOUT)
        .into_iter()
        .map(|comm| thread::spawn(move || measure_rank(&*comm, tensor_bytes, repetitions)))
        .collect();
    let mut ranks: Vec<Spans> = Vec::new();
    for (rank, thread) in threads.into_iter().enumerate() {
        ranks.push(thread.join().map_err(|_| ProfileError::Panicked { rank })??);
    }
    let seconds = |work: Work| {
        // From the first rank's start to the last rank's end.
        let of = |repetition: usize| {
            let spans = ranks.iter().map(|spans| spans[repetition][work as usize]);
            let (start, end) = (spans.clone().map(|span| span.0).min(), spans.map(|span| span.1).max());
            start.zip(end).map_or(f64::NAN, |(start, end)| (end - start).as_secs_f64())
        };
        let mut all: Vec<f64> = (0..repetitions).map(of).collect();
        all.sort_by(f64::total_cmp);
        all[all.len() / 2] / num_batched(tensor_bytes) as f64
    };
    Ok(Work::ALL.iter().map(|&work| (work.moved_bytes(tensor_bytes, num_ranks), seconds(work))).collect())
}

fn num_batched(tensor_bytes: usize) -> usize {
    (BATCH_BYTES / tensor_bytes).clamp(1, 256)
}

fn measure_rank(comm: &dyn Communicator, tensor_bytes: usize, repetitions: usize) -> Result<Spans, CommError> {
    let num_tensors = (COLD_BYTES / tensor_bytes / comm.world_size()).max(2);
    // Ones everywhere: a page of zeros that was never written would be shared by all of its readers.
    let tensors = Bytes::from(1.0_f32.to_ne_bytes().repeat(num_tensors * tensor_bytes / 4));
    let layout = ShardLayout::new(&[tensor_bytes / 4], 0, comm.world_size());
    let block_bytes = layout.shard_len(comm.rank()) * 4;
    let mut target = vec![2_u8; tensor_bytes];
    let tag = OpTag::new(0, Phase::Control, "fsdp bench");
    let mut turn = 0;
    let mut once = |work: Work| -> Result<(), CommError> {
        let start = turn * tensor_bytes;
        turn = (turn + 1) % num_tensors;
        let whole = tensors.slice(start..start + tensor_bytes);
        let part = |full| ReducePart { full, layout: layout.clone(), dtype: Dtype::F32 };
        match work {
            Work::AllGather => {
                let shard = whole.slice(..block_bytes);
                let part = GatherPart { shard, layout: layout.clone(), elem_bytes: 4 };
                drop(std::hint::black_box(comm.all_gather(&tag, &[part])?));
            }
            Work::ReduceScatter => {
                drop(std::hint::black_box(comm.reduce_scatter(&tag, &[part(whole)], Reduce::SUM)?));
            }
            Work::AllReduce => drop(std::hint::black_box(comm.all_reduce(&tag, &[part(whole)], Reduce::SUM)?)),
            Work::Copy => std::hint::black_box(&mut target).copy_from_slice(&std::hint::black_box(whole)),
        }
        Ok(())
    };
    for work in Work::ALL {
        once(work)?;
    }
    let mut spans = Vec::new();
    for _ in 0..repetitions {
        let mut of_repetition = [(Instant::now(), Instant::now()); Work::ALL.len()];
        for (work, span) in Work::ALL.into_iter().zip(&mut of_repetition) {
            comm.barrier(&tag)?;
            let start = Instant::now();
            for _ in 0..num_batched(tensor_bytes) {
                once(work)?;
            }
            *span = (start, Instant::now());
        }
        spans.push(of_repetition);
    }
    Ok(spans)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_measured_profile_reads_back_and_prices_more_bytes_higher() {
        let options = ProfileOptions { num_ranks: 2, max_bytes: 1 << 18, repetitions: 3 };
        let profile = Profile::measure(&options).unwrap();
        assert_eq!(Profile::from_json(&profile.to_json(), "printed").unwrap(), profile);
        assert!(profile.memory_bytes_per_s > 1e7, "{profile:?}");
        let links = profile.collectives;
        for link in [links.all_gather, links.reduce_scatter, links.all_reduce] {
            assert!(link.message_s(1 << 24) > 0.0 && link.message_s(1 << 24) >= link.message_s(1 << 12), "{link:?}");
        }
    }

    #[test]
    fn a_disk_is_measured_by_all_ranks_and_reads_back() {
        let dir = tempfile::tempdir().unwrap();
        let options = ProfileOptions { num_ranks: 2, max_bytes: 1 << 16, repetitions: 1 };
        let mut profile = Profile::measure(&options).unwrap();
        profile.measure_disk(&dir.path().join("disk"), 1 << 20).unwrap();
        let disk = profile.nvme.unwrap();
        assert!(disk.read_bytes_per_s > 1e5 && disk.write_bytes_per_s > 1e5, "{disk:?}");
        assert_eq!(Profile::from_json(&profile.to_json(), "printed").unwrap(), profile);
        assert!(!dir.path().join("disk").exists(), "nothing is left behind");
    }

    #[test]
    fn the_step_of_a_report_is_a_step_of_one_rank() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("run.json");
        let report = |ranks: usize, step_s: f64| {
            format!(
                r#"{{"config": {{"world_size": {ranks}, "stage": 3, "threads_per_rank": 0,
                "training": {{"gradient_accumulation": 2}}}}, "num_cores": 4, "num_parameters": 100, "tokens_per_step": 64,
                "typical": {{"step": {{"wall_s": {step_s}, "cpu_s": 4.5}},
                "optimizer": {{"wall_s": 0.5, "cpu_s": 0.75}}}}}}"#
            )
        };
        fs::write(&file, report(1, 2.5)).unwrap();
        let step = MeasuredStep::read_report(&file).unwrap();
        let pass = WorkTime { wall_s: 1.0, cpu_s: 1.875 };
        let optimizer = WorkTime { wall_s: 0.5, cpu_s: 0.75 };
        let expected =
            MeasuredStep { parameter_len: 100, num_tokens: 32, num_threads: 4, num_cores: 4, pass, optimizer };
        assert_eq!(step, expected);
        fs::write(&file, report(2, 2.5)).unwrap();
        let error = MeasuredStep::read_report(&file).unwrap_err().to_string();
        assert!(
            error.contains("it is of 2 ranks, and one alone is needed; write one with `train --ranks 1 "),
            "{error}"
        );
        fs::write(&file, report(1, 0.25)).unwrap();
        assert!(MeasuredStep::read_report(&file).unwrap_err().to_string().contains("make no sense"));
        fs::write(&file, "{}").unwrap();
        assert!(MeasuredStep::read_report(&file).unwrap_err().to_string().contains("no step to measure"));
    }

    #[test]
    fn what_cannot_be_measured_or_read_is_refused() {
        let refusal = |options| Profile::measure(&options).unwrap_err().to_string();
        let text = refusal(ProfileOptions { num_ranks: 2, max_bytes: 4096, repetitions: 1 });
        assert!(text.ends_with("so max_bytes of at least 16 KiB"), "{text}");
        assert!(matches!(
            Profile::measure(&ProfileOptions { num_ranks: 0, max_bytes: 1 << 20, repetitions: 1 }),
            Err(ProfileError::Options { .. })
        ));
        let refusal = |text: &str| Profile::from_json(text, "p.json").unwrap_err().to_string();
        assert!(refusal("{").starts_with("p.json: not a profile: "), "{}", refusal("{"));
        let link = |alpha: f64| format!(r#"{{"alpha_s": {alpha}, "beta_s_per_byte": 1e-9}}"#);
        let profile = |format: &str, alpha: f64, ranks: usize| {
            format!(
                r#"{{"format": "{format}", "num_ranks": {ranks}, "num_cores": 2, "memory_bytes_per_s": 1e9, "collectives":
                {{"all_gather": {}, "reduce_scatter": {}, "all_reduce": {}}}}}"#,
                link(1e-6),
                link(1e-6),
                link(alpha)
            )
        };
        assert!(Profile::from_json(&profile(FORMAT, 1e-6, 2), "p.json").is_ok());
        assert!(refusal(&profile("other", 1e-6, 2)).contains("its format is \"other\""));
        assert!(refusal(&profile(FORMAT, -1e-6, 2)).contains("`collectives.all_reduce` has a negative time"));
        assert!(refusal(&profile(FORMAT, 1e-6, 0)).contains("must be positive"));
        assert!(Profile::read(Path::new("/no/p.json")).unwrap_err().to_string().contains("fsdp bench --out FILE"));
    }
}
