//! Ranks of one host read each other's values, window by window.
//!
//! A rank's values lie in memory of its own. In each *round* it copies the next few of every other rank's block into a
//! window that the others can read, and adds its own block's window of all ranks. Windows are small, so they are still in
//! a cache when they are read, and no rank ever holds more than four of them.
//!
//! A rank lays out window `k + 1` before it waits for all windows `k`, so it rarely waits. Each has four places: before
//! window `k` is laid over `k - 4`, this rank has seen all windows `k - 2`; who has laid out `k - 2` has added `k - 4`.
//! Rounds are counted over all operations of a channel, and all ranks count the same.

use std::iter::Peekable;
use std::sync::atomic::Ordering;

use super::super::ReducePart;
use super::super::shared::{PIECE_BYTES, Piece, pieces};
use super::domain::{Domain, Op};
use crate::{CommError, ShardLayout};

/// Aimed at for all windows that a rank lays out in a round.
const ROUND_BYTES: usize = 256 * 1024;

/// Windows that exist at once.
const NUM_PLACES: u64 = 4;

type Tensors = Vec<(ShardLayout, usize)>;

/// One operation's rounds.
pub(super) struct Rounds<'a> {
    domain: &'a Domain,
    parts: &'a [ReducePart],
    /// What is still to be laid out for each other member of this host, in their order.
    outgoing: Vec<Peekable<Box<dyn Iterator<Item = Piece> + Send>>>,
    num_rounds: u64,
    /// Rounds before this operation.
    base: u64,
    num_laid: u64,
    num_seen: u64,
    /// Bytes of the current window of this rank's own block that are added.
    used: usize,
}

/// The windows of a member: its size, and of all.
pub(super) fn window_bytes(num_local: usize) -> (usize, usize) {
    let window = (ROUND_BYTES / num_local.saturating_sub(1).max(1) / PIECE_BYTES).max(1) * PIECE_BYTES;
    (window, window * (num_local - 1) * NUM_PLACES as usize)
}

impl<'a> Rounds<'a> {
    /// Lays out the first window.
    pub(super) fn begin(domain: &'a Domain, parts: &'a [ReducePart], base: u64) -> Self {
        let tensors: Tensors = parts.iter().map(|part| (part.layout.clone(), part.dtype.size_bytes())).collect();
        let window = window_bytes(domain.locals.len()).0;
        let of_rank = |rank: usize| pieces(tensors.clone(), rank, PIECE_BYTES);
        let num_rounds = if domain.locals.len() == 1 {
            0
        } else {
            domain.locals.iter().map(|&rank| count_windows(of_rank(rank), window)).max().unwrap_or(0)
        };
        let others = domain.locals.iter().filter(|&&rank| rank != domain.rank);
        let boxed = |rank: &usize| (Box::new(of_rank(*rank)) as Box<dyn Iterator<Item = Piece> + Send>).peekable();
        let outgoing = others.map(boxed).collect();
        let mut rounds = Self { domain, parts, outgoing, num_rounds, base, num_laid: 0, num_seen: 0, used: 0 };
        rounds.lay_out();
        rounds
    }

    /// Rounds before the next operation.
    pub(super) fn end(&self) -> u64 {
        self.base + self.num_rounds
    }

    /// Where in the current windows the next `len` bytes of this rank's own block are; goes to the next round if need be.
    pub(super) fn next(&mut self, op: &Op, len: usize) -> Result<usize, CommError> {
        let window = window_bytes(self.domain.locals.len()).0;
        if self.num_rounds > 0 && (self.num_seen == 0 || self.used + len > window) {
            self.advance(op)?;
        }
        let at = self.used;
        self.used += len;
        Ok(at)
    }

    /// `len` bytes at `at` of the current window of another member of this host.
    pub(super) fn window(&self, local: usize, at: usize, len: usize) -> &[u8] {
        let domain = self.domain;
        let (window, _) = window_bytes(domain.locals.len());
        let place = (self.base + self.num_seen - 1) % NUM_PLACES;
        // Members lay out windows for all others, in their order.
        let of_me = if domain.local < local { domain.local } else { domain.local - 1 };
        let start = (place as usize * (domain.locals.len() - 1) + of_me) * window + at;
        let windows = domain.seat.cell(local).windows.load(Ordering::Acquire) as usize;
        // SAFETY: The round was waited for, and its owner lays out nothing there before this rank has gone on.
        unsafe { domain.arena(local).bytes(windows + start, len) }
    }

    /// Goes through the rounds in which this rank adds nothing.
    pub(super) fn finish(&mut self, op: &Op) -> Result<(), CommError> {
        while self.num_seen < self.num_rounds {
            self.advance(op)?;
        }
        Ok(())
    }

    fn advance(&mut self, op: &Op) -> Result<(), CommError> {
        self.lay_out();
        self.num_seen += 1;
        self.used = 0;
        let round = self.base + self.num_seen;
        self.domain.wait_for_cells(op, |cell| cell.round.load(Ordering::Acquire) >= round)
    }

    /// Copies the next window for each other member.
    fn lay_out(&mut self) {
        if self.num_laid == self.num_rounds {
            return;
        }
        let domain = self.domain;
        let (window, _) = window_bytes(domain.locals.len());
        let place = ((self.base + self.num_laid) % NUM_PLACES) as usize;
        let windows = domain.my_cell().windows.load(Ordering::Relaxed) as usize;
        let num_others = self.outgoing.len();
        for (other, outgoing) in self.outgoing.iter_mut().enumerate() {
            let start = windows + (place * num_others + other) * window;
            // SAFETY: This rank's own window, which nobody reads any more; see the top of the file.
            let target = unsafe { domain.arena(domain.local).uninit_mut(start, window) };
            let mut used = 0;
            while let Some(Piece { tensor, first_byte, mut num_bytes, .. }) =
                outgoing.next_if(|piece| used + piece.num_bytes <= window)
            {
                // What lies side by side is one copy.
                while let Some(next) = outgoing.next_if(|next| {
                    (next.tensor, next.first_byte) == (tensor, first_byte + num_bytes)
                        && used + num_bytes + next.num_bytes <= window
                }) {
                    num_bytes += next.num_bytes;
                }
                let source = &self.parts[tensor].full[first_byte..first_byte + num_bytes];
                target[used..used + num_bytes].write_copy_of_slice(source);
                used += num_bytes;
            }
        }
        self.num_laid += 1;
        domain.my_cell().round.store(self.base + self.num_laid, Ordering::Release);
        domain.seat.entry().bell.ring();
    }
}

fn count_windows(pieces: impl Iterator<Item = Piece>, window: usize) -> u64 {
    let (mut count, mut used) = (0, window);
    for piece in pieces {
        if used + piece.num_bytes > window {
            (count, used) = (count + 1, 0);
        }
        used += piece.num_bytes;
    }
    count
}
