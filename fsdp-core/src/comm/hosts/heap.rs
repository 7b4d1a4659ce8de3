//! Blocks of a rank's arena, which ranks of its host hold together.
//!
//! The rank that owns the arena hands out a block for a number of holders. Each holder lets go once, by a counter in front
//! of the block, from whichever process; the owner finds it free when it next needs one. Free blocks wait for the next
//! request of their size; the large ones, with the live ones, never exceed what was live at once before, as in [`Pool`](super::super::pool::Pool).

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::arena::{Arena, PAGE_BYTES};

/// In front of each block, so that data begins at a cache line.
const HEAD_BYTES: usize = 64;

/// From this size on, free blocks are counted, and given back to the system when they are too many.
const LARGE_BYTES: usize = 1 << 20;

/// The blocks of this rank's own arena.
#[derive(Debug)]
pub(super) struct Heap {
    arena: Arc<Arena>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Address ranges without memory, by their start.
    unused: BTreeMap<usize, usize>,
    /// Blocks with memory that nobody holds, oldest first.
    free: VecDeque<Range<usize>>,
    free_bytes: usize,
    live: Vec<Range<usize>>,
    live_bytes: usize,
    peak_bytes: usize,
}

/// One rank's hold on a block: where it is, and that it is still needed.
#[derive(Debug)]
pub(super) struct Held {
    arena: Arc<Arena>,
    /// Of the first byte of data.
    offset: usize,
    len: usize,
}

impl Heap {
    /// Hands out what lies behind the first `reserved` bytes of an arena.
    pub(super) fn new(arena: Arc<Arena>, reserved: usize) -> Self {
        let start = reserved.next_multiple_of(PAGE_BYTES);
        let state = State {
            unused: BTreeMap::from([(start, arena.len() - start)]),
            free: VecDeque::new(),
            free_bytes: 0,
            live: Vec::new(),
            live_bytes: 0,
            peak_bytes: 0,
        };
        Self { arena, state: Mutex::new(state) }
    }

    /// Where the data of a new block of `len` bytes begins. It lives until `num_holders` have let go of it.
    ///
    /// # Errors
    /// If the arena is full, which is larger than the memory of the host.
    pub(super) fn take(&self, len: usize, num_holders: usize) -> io::Result<usize> {
        let size = (HEAD_BYTES + len).next_multiple_of(PAGE_BYTES);
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.find_free(|block| holders(&self.arena, block.start).load(Ordering::Acquire) == 0);
        let mut block = state.reuse(size).or_else(|| state.cut(size));
        while block.is_none() && self.evict(&mut state) {
            block = state.cut(size);
        }
        let Some(block) = block else {
            return Err(io::Error::new(
                io::ErrorKind::OutOfMemory,
                format!("no room for {size} bytes in shared memory"),
            ));
        };
        let num_holders = u32::try_from(num_holders).map_err(io::Error::other)?;
        holders(&self.arena, block.start).store(num_holders, Ordering::Release);
        let offset = block.start + HEAD_BYTES;
        state.live_bytes += counted(size);
        state.live.push(block);
        state.peak_bytes = state.peak_bytes.max(state.live_bytes);
        while state.free_bytes + state.live_bytes > state.peak_bytes {
            if !self.evict(&mut state) {
                break;
            }
        }
        Ok(offset)
    }

    /// Gives the oldest large free block back to the system; tells whether there was one.
    fn evict(&self, state: &mut State) -> bool {
        let place = state.free.iter().position(|block| counted(block.len()) > 0);
        let Some(oldest) = place.and_then(|place| state.free.remove(place)) else { return false };
        state.free_bytes -= oldest.len();
        self.arena.give_back(oldest.start, oldest.len());
        state.put_back(oldest);
        true
    }

    /// Ends a block that nobody reads any more, for all of its holders.
    pub(super) fn free(&self, offset: usize) {
        holders(&self.arena, offset - HEAD_BYTES).store(0, Ordering::Release);
    }

    /// The hold of one of a block's holders.
    pub(super) fn hold(&self, offset: usize, len: usize) -> Held {
        Held::new(self.arena.clone(), offset, len)
    }
}

impl State {
    fn find_free(&mut self, is_free: impl Fn(&Range<usize>) -> bool) {
        for block in self.live.extract_if(.., |block| is_free(block)) {
            self.live_bytes -= counted(block.len());
            self.free_bytes += counted(block.len());
            self.free.push_back(block);
        }
    }

    fn reuse(&mut self, size: usize) -> Option<Range<usize>> {
        let place = self.free.iter().position(|block| block.len() == size)?;
        self.free_bytes -= counted(size);
        self.free.remove(place)
    }

    fn cut(&mut self, size: usize) -> Option<Range<usize>> {
        let (&start, &len) = self.unused.iter().find(|&(_, &len)| len >= size)?;
        self.unused.remove(&start);
        if len > size {
            self.unused.insert(start + size, len - size);
        }
        Some(start..start + size)
    }

    /// Joins a range with those that it touches.
    fn put_back(&mut self, range: Range<usize>) {
        let mut start = range.start;
        let mut len = range.len();
        if let Some((&before, &before_len)) = self.unused.range(..start).next_back()
            && before + before_len == start
        {
            self.unused.remove(&before);
            start = before;
            len += before_len;
        }
        len += self.unused.remove(&(start + len)).unwrap_or(0);
        self.unused.insert(start, len);
    }
}

/// Small blocks come and go with every operation, and must not drive out the large ones.
fn counted(size: usize) -> usize {
    if size < LARGE_BYTES { 0 } else { size }
}

fn holders(arena: &Arena, block: usize) -> &AtomicU32 {
    // SAFETY: The head of a block is used for this counter alone.
    unsafe { arena.atomics(block) }
}

impl Held {
    /// A hold on a block of any rank's arena, for which that rank has counted this holder.
    pub(super) fn new(arena: Arc<Arena>, offset: usize, len: usize) -> Self {
        Self { arena, offset, len }
    }

    pub(super) fn arena(&self) -> &Arena {
        &self.arena
    }

    pub(super) fn offset(&self) -> usize {
        self.offset
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        holders(&self.arena, self.offset - HEAD_BYTES).fetch_sub(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    fn heap() -> Heap {
        Heap::new(Arc::new(Arena::create(64 * MIB).unwrap()), 10_000)
    }

    fn sizes(heap: &Heap) -> (usize, usize) {
        let state = heap.state.lock().unwrap();
        assert_eq!(state.free_bytes, state.free.iter().map(Range::len).sum::<usize>());
        assert_eq!(state.live_bytes, state.live.iter().map(Range::len).sum::<usize>());
        (state.free_bytes / MIB, state.live_bytes / MIB)
    }

    #[test]
    fn a_block_is_free_when_its_last_holder_has_let_go() {
        let heap = heap();
        let offset = heap.take(2 * MIB, 2).unwrap();
        assert!(offset >= 10_000 && offset.is_multiple_of(64));
        let first = heap.hold(offset, 2 * MIB);
        let second = Held::new(heap.arena.clone(), offset, 2 * MIB);
        drop(first);
        let other = heap.take(2 * MIB, 1).unwrap();
        assert_ne!(other, offset, "one holder is left");
        drop(second);
        assert_eq!(heap.take(2 * MIB, 1).unwrap(), offset);
    }

    #[test]
    fn a_small_block_does_not_drive_out_a_large_one() {
        let heap = heap();
        let offset = heap.take(2 * MIB, 1).unwrap();
        drop(heap.hold(offset, 2 * MIB));
        let small = heap.take(100, 1).unwrap();
        drop(heap.hold(small, 100));
        assert_eq!(heap.take(2 * MIB, 1).unwrap(), offset);
        assert_eq!(heap.take(100, 1).unwrap(), small);
    }

    #[test]
    fn free_and_live_blocks_never_exceed_the_live_peak_and_addresses_are_joined() {
        let heap = heap();
        let take = |mib: usize| {
            let offset = heap.take(mib * MIB - HEAD_BYTES, 1).unwrap();
            heap.hold(offset, mib * MIB - HEAD_BYTES)
        };
        drop([take(20), take(20)]);
        let block = take(30);
        assert_eq!(sizes(&heap), (0, 30), "30 + 20 would be more than 40");
        drop(block);
        let blocks = [take(30), take(10)];
        assert_eq!(sizes(&heap), (0, 40));
        drop(blocks);
        drop(take(60));
        assert_eq!(heap.take(64 * MIB, 1).map_err(|error| error.kind()), Err(io::ErrorKind::OutOfMemory));
    }
}
