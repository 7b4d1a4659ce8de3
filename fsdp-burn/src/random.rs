//! Random numbers of one rank: a stream of its own, which can be noted and continued.
//!
//! Burn has one random state for a device, and ranks that are threads would draw from it in an order that differs from
//! run to run. What is drawn while training, as dropout does, comes from here instead: from ChaCha8 with the run's seed
//! and the rank's number as its stream, so that ranks differ, and a run repeats.

use std::cell::RefCell;
use std::collections::hash_map::RandomState as HashSeed;
use std::hash::{BuildHasher, Hasher};

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use serde::{Deserialize, Serialize};

thread_local! {
    static STREAM: RefCell<Option<Stream>> = const { RefCell::new(None) };
}

/// Where a rank's stream of random numbers stands: all that a checkpoint needs of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RandomState {
    /// Seed of the run, equal on all ranks.
    pub seed: u64,
    /// Number of the stream, the rank's.
    pub stream: u64,
    /// Numbers of 32 bits drawn so far.
    pub position: u64,
}

impl RandomState {
    /// The start of a stream.
    pub fn new(seed: u64, stream: u64) -> Self {
        Self { seed, stream, position: 0 }
    }

    /// What this thread's stream has come to. A thread that no launcher has started begins at a random seed.
    pub fn current() -> Self {
        with_stream(|stream| RandomState { position: stream.rng.get_word_pos() as u64, ..stream.origin })
    }

    /// Runs `call` from here, and lets the stream go on afterwards where it is now, also if `call` unwinds.
    pub(crate) fn during<T>(self, call: impl FnOnce() -> T) -> T {
        struct Back(RandomState);
        impl Drop for Back {
            fn drop(&mut self) {
                self.0.install();
            }
        }
        let _back = Back(RandomState::current());
        self.install();
        call()
    }

    /// Lets this thread go on from here. [`launch`](crate::launch) does so on every rank, with the configured `seed`.
    pub fn install(self) {
        STREAM.set(Some(Stream::at(self)));
    }
}

struct Stream {
    rng: ChaCha8Rng,
    origin: RandomState,
}

impl Stream {
    fn at(state: RandomState) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(state.seed);
        rng.set_stream(state.stream);
        rng.set_word_pos(state.position.into());
        Self { rng, origin: RandomState { position: 0, ..state } }
    }
}

fn with_stream<T>(call: impl FnOnce(&mut Stream) -> T) -> T {
    STREAM.with_borrow_mut(|stream| call(stream.get_or_insert_with(|| Stream::at(RandomState::new(random_seed(), 0)))))
}

/// A seed that differs from run to run.
pub(crate) fn random_seed() -> u64 {
    HashSeed::new().build_hasher().finish()
}

/// As many numbers as asked for, each `1 / keep` with probability `keep`, else 0.
pub(crate) fn dropout_mask(keep: f64, len: usize) -> Vec<f32> {
    let kept = (1.0 / keep) as f32;
    // A number of 32 bits is below this with the probability.
    let threshold = (keep * f64::from(u32::MAX)).ceil() as u32;
    with_stream(|stream| {
        let value = |_| if stream.rng.next_u32() < threshold { kept } else { 0.0 };
        (0..len).map(value).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_goes_on_where_it_was_noted() {
        RandomState::new(7, 3).install();
        dropout_mask(0.5, 101);
        let noted = RandomState::current();
        assert_eq!(noted, RandomState { seed: 7, stream: 3, position: 101 });
        let expected = dropout_mask(0.5, 50);
        RandomState::new(1, 1).install();
        assert_ne!(dropout_mask(0.5, 50), expected);
        noted.install();
        assert_eq!(dropout_mask(0.5, 50), expected);
    }

    #[test]
    fn streams_of_one_seed_differ_and_threads_do_not_share_one() {
        let of_stream = |stream| {
            let draw = move || {
                RandomState::new(5, stream).install();
                dropout_mask(0.5, 64)
            };
            std::thread::spawn(draw).join().unwrap()
        };
        assert_eq!(of_stream(0), of_stream(0));
        assert_ne!(of_stream(0), of_stream(1));
    }

    #[test]
    fn a_mask_keeps_its_share_and_the_mean() {
        RandomState::new(11, 0).install();
        for keep in [0.1, 0.5, 0.9, 1.0] {
            let mask = dropout_mask(keep, 100_000);
            let kept = mask.iter().filter(|&&value| value != 0.0).count() as f64 / mask.len() as f64;
            assert!((kept - keep).abs() < 0.01, "{keep}: {kept}");
            assert!(mask.iter().all(|&value| value == 0.0 || value == (1.0 / keep) as f32));
        }
    }
}
