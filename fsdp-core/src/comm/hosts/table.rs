//! What the ranks of one host tell each other: counters in the arena of the host's first rank.
//!
//! Each channel or group has an *entry*, found by its key, and in it a *cell* for each of its members on this host. A cell is
//! written by its member alone, and its counters only rise:
//!
//! - `arrived`: operations that the member has begun. Before that, it has posted a *note*: the call, and blocks it offers.
//! - `filled`: operations in which it has written its blocks of a shared tensor.
//! - `round`: windows of values that it has laid out for the others; see [`rounds`](super::rounds).
//!
//! The entry's `led` is written by the leader alone: `2·op + 1` once all hosts agree about an operation, `2·op + 2` once data of
//! other hosts is there.
//!
//! Notes have two places, by turns. A member that begins operation `n + 1` writes over its note of `n - 1`: it has finished
//! `n`, so all have begun `n`, and nobody reads `n - 1` any more.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::arena::{Arena, Bell, PAGE_BYTES};

/// Channels and groups that may exist on a host at once.
const NUM_ENTRIES: usize = 1024;

#[derive(Debug)]
#[repr(C, align(64))]
struct Head {
    /// 0, or that a rank is changing the entries.
    lock: AtomicU32,
}

#[derive(Debug)]
#[repr(C, align(64))]
pub(super) struct Entry {
    /// 0 where there is none.
    key: AtomicU64,
    pub(super) led: AtomicU64,
    /// A block that the leader offers to the ranks of its host, and its length.
    pub(super) led_block: [AtomicU64; 2],
    pub(super) bell: Bell,
    num_dropped: AtomicU32,
}

#[derive(Debug)]
#[repr(C, align(64))]
pub(super) struct Cell {
    pub(super) arrived: AtomicU64,
    pub(super) filled: AtomicU64,
    pub(super) round: AtomicU64,
    /// Where the member's windows are, in its own arena.
    pub(super) windows: AtomicU64,
    /// Where its notes are, in its own arena, and how long.
    pub(super) notes: [[AtomicU64; 2]; 2],
}

/// The counters of one host.
#[derive(Debug)]
pub(super) struct Table {
    arena: Arc<Arena>,
    /// Ranks of the world on this host.
    num_local: usize,
}

/// A member's access to an entry. The last one to be dropped on this host frees it.
#[derive(Debug)]
pub(super) struct Seat {
    arena: Arc<Arena>,
    num_local: usize,
    entry: usize,
    num_members: usize,
}

impl Table {
    pub(super) fn new(arena: Arc<Arena>, num_local: usize) -> Self {
        Self { arena, num_local }
    }

    /// What the table takes at the start of the arena.
    pub(super) fn size_bytes(num_local: usize) -> usize {
        cell_offset(num_local, NUM_ENTRIES, 0).next_multiple_of(PAGE_BYTES)
    }

    /// A flag of a rank of this host: that it makes no further call.
    pub(super) fn left(&self, local: usize) -> &AtomicU32 {
        // SAFETY: The place of this flag alone.
        unsafe { self.arena.atomics(size_of::<Head>() + local * size_of::<u32>()) }
    }

    /// The entry of `key`, made if there is none, for `num_members` ranks of this host. `None` if there is no room, or
    /// another rank holds the lock for longer than `limit`.
    pub(super) fn sit(&self, key: u64, num_members: usize, limit: Duration) -> Option<Seat> {
        let _lock = Lock::take(&self.arena, limit)?;
        let find = |key: u64| {
            (0..NUM_ENTRIES).find(|&i| entry(&self.arena, self.num_local, i).key.load(Ordering::Acquire) == key)
        };
        let place = find(key).or_else(|| find(0))?;
        entry(&self.arena, self.num_local, place).key.store(key, Ordering::Release);
        Some(Seat { arena: self.arena.clone(), num_local: self.num_local, entry: place, num_members })
    }

    #[cfg(test)]
    pub(super) fn num_entries(&self) -> usize {
        let is_used = |&i: &usize| entry(&self.arena, self.num_local, i).key.load(Ordering::Acquire) != 0;
        (0..NUM_ENTRIES).filter(is_used).count()
    }
}

impl Seat {
    pub(super) fn entry(&self) -> &Entry {
        entry(&self.arena, self.num_local, self.entry)
    }

    /// The cell of a member, by its number among the members of this host.
    pub(super) fn cell(&self, member: usize) -> &Cell {
        debug_assert!(member < self.num_members);
        // SAFETY: The place of this cell alone.
        unsafe { self.arena.atomics(cell_offset(self.num_local, self.entry, member)) }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let entry = self.entry();
        if entry.num_dropped.fetch_add(1, Ordering::AcqRel) + 1 < self.num_members as u32 {
            return;
        }
        // Nobody uses it any more. Its key goes last, since an entry without one is anybody's.
        for member in 0..self.num_members {
            let Cell { arrived, filled, round, windows, notes } = self.cell(member);
            let counters = [arrived, filled, round, windows].into_iter().chain(notes.as_flattened());
            counters.for_each(|counter| counter.store(0, Ordering::Relaxed));
        }
        entry.led_block.iter().for_each(|counter| counter.store(0, Ordering::Relaxed));
        entry.led.store(0, Ordering::Relaxed);
        entry.num_dropped.store(0, Ordering::Relaxed);
        entry.key.store(0, Ordering::Release);
    }
}

fn entry(arena: &Arena, num_local: usize, entry: usize) -> &Entry {
    // SAFETY: The place of this entry alone.
    unsafe { arena.atomics(entry_offset(num_local, entry)) }
}

fn entry_offset(num_local: usize, entry: usize) -> usize {
    (size_of::<Head>() + num_local * size_of::<u32>()).next_multiple_of(64) + entry * size_of::<Entry>()
}

fn cell_offset(num_local: usize, entry: usize, member: usize) -> usize {
    entry_offset(num_local, NUM_ENTRIES) + (entry * num_local + member) * size_of::<Cell>()
}

/// Held while entries are searched and made.
struct Lock<'a>(&'a AtomicU32);

impl<'a> Lock<'a> {
    fn take(arena: &'a Arena, limit: Duration) -> Option<Self> {
        // SAFETY: The place of the head alone.
        let lock = unsafe { &arena.atomics::<Head>(0).lock };
        let start = Instant::now();
        while lock.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            if start.elapsed() > limit {
                return None;
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        Some(Self(lock))
    }
}

impl Drop for Lock<'_> {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_found_by_its_key_and_free_after_its_last_member() {
        let limit = Duration::from_secs(10);
        let arena = Arc::new(Arena::create(Table::size_bytes(3)).unwrap());
        let table = Table::new(arena, 3);
        let [first, second] = [0, 1].map(|_| table.sit(7, 2, limit).unwrap());
        let other = table.sit(8, 1, limit).unwrap();
        first.cell(1).arrived.store(5, Ordering::Release);
        assert_eq!(second.cell(1).arrived.load(Ordering::Acquire), 5);
        assert_eq!(other.cell(0).arrived.load(Ordering::Acquire), 0);
        assert_eq!(table.num_entries(), 2);
        drop(first);
        assert_eq!(table.num_entries(), 2);
        drop((second, other));
        assert_eq!(table.num_entries(), 0);
        assert_eq!(table.sit(9, 2, limit).unwrap().cell(1).arrived.load(Ordering::Acquire), 0);
    }

    #[test]
    fn a_full_table_and_a_lock_that_is_never_freed_are_told() {
        let arena = Arc::new(Arena::create(Table::size_bytes(1)).unwrap());
        let table = Table::new(arena, 1);
        let limit = Duration::from_millis(5);
        let seats: Vec<_> = (1..=NUM_ENTRIES as u64).map(|key| table.sit(key, 1, limit).unwrap()).collect();
        assert!(table.sit(u64::MAX, 1, limit).is_none());
        drop(seats);
        let _lock = Lock::take(&table.arena, limit).unwrap();
        assert!(table.sit(1, 1, limit).is_none());
    }
}
