//! Reuse of the large buffers of gathers from step to step.
//!
//! A fresh large allocation costs a page fault for every 4 KiB, more than the copy into it. A training step needs
//! the same sizes again and again, so a freed buffer waits for the next request of its size. Kept and live buffers
//! together never exceed what was live at once before, so keeping does not raise the peak.

use std::alloc::{self, Layout};
use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Alignment of every block: a cache line, and enough for any vector instruction.
pub(crate) const ALIGN: usize = 64;

/// Below this size the allocator of the process keeps freed memory itself.
const MIN_POOLED_BYTES: usize = 1 << 20;

/// Free blocks of one world. They are freed with it.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Oldest first.
    free: VecDeque<Memory>,
    free_bytes: usize,
    live_bytes: usize,
    peak_bytes: usize,
}

/// Uninitialised memory of a size, aligned to [`ALIGN`], that returns to its pool if it has one.
#[derive(Debug)]
pub(crate) struct Block {
    /// Taken when the block is dropped; `None` for a block without bytes.
    memory: Option<Memory>,
    home: Weak<Pool>,
}

impl Pool {
    /// A block of `size_bytes`, with whatever its last user left in it.
    pub(crate) fn take(self: &Arc<Self>, size_bytes: usize) -> Block {
        if size_bytes < MIN_POOLED_BYTES {
            return Block::new(size_bytes);
        }
        let memory = self.reuse(size_bytes).unwrap_or_else(|| Memory::new(size_bytes));
        Block { memory: Some(memory), home: Arc::downgrade(self) }
    }

    fn reuse(&self, size_bytes: usize) -> Option<Memory> {
        let mut evicted = Vec::new();
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        // The newest, which may still be in a cache.
        let place = state.free.iter().rposition(|memory| memory.layout.size() == size_bytes);
        let found = place.and_then(|place| state.free.remove(place));
        state.free_bytes -= if found.is_some() { size_bytes } else { 0 };
        state.live_bytes += size_bytes;
        state.peak_bytes = state.peak_bytes.max(state.live_bytes);
        while state.free_bytes + state.live_bytes > state.peak_bytes {
            let oldest = state.free.pop_front().expect("live blocks alone do not exceed their peak");
            state.free_bytes -= oldest.layout.size();
            evicted.push(oldest);
        }
        // The evicted blocks are freed after the lock, since that may take long.
        drop(state);
        found
    }

    fn give_back(&self, memory: Memory) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.live_bytes -= memory.layout.size();
        state.free_bytes += memory.layout.size();
        state.free.push_back(memory);
    }
}

impl Block {
    /// A block without a pool.
    pub(crate) fn new(size_bytes: usize) -> Self {
        Self { memory: (size_bytes > 0).then(|| Memory::new(size_bytes)), home: Weak::new() }
    }

    /// The first byte, aligned to [`ALIGN`], also where there are none.
    pub(crate) fn start(&self) -> NonNull<u8> {
        #[repr(align(64))]
        struct CacheLine;
        self.memory.as_ref().map_or(NonNull::<CacheLine>::dangling().cast(), |memory| memory.start)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if let Some(pool) = self.home.upgrade() {
            self.memory.take().into_iter().for_each(|memory| pool.give_back(memory));
        }
    }
}

/// One allocation.
#[derive(Debug)]
struct Memory {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: The type owns its memory, and bytes may move between threads.
unsafe impl Send for Memory {}
// SAFETY: Shared access yields the address only.
unsafe impl Sync for Memory {}

impl Memory {
    fn new(size_bytes: usize) -> Self {
        assert!(size_bytes > 0, "a block without bytes needs no memory");
        let layout = Layout::from_size_align(size_bytes, ALIGN).expect("a buffer is smaller than the address space");
        // SAFETY: The size is not zero.
        let start = NonNull::new(unsafe { alloc::alloc(layout) });
        Self { start: start.unwrap_or_else(|| alloc::handle_alloc_error(layout)), layout }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: Allocated in `new` with this layout, and owned by this value alone.
        unsafe { alloc::dealloc(self.start.as_ptr(), self.layout) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    fn free_and_live(pool: &Pool) -> (usize, usize) {
        let state = pool.state.lock().unwrap();
        assert_eq!(state.free_bytes, state.free.iter().map(|memory| memory.layout.size()).sum::<usize>());
        (state.free_bytes / MIB, state.live_bytes / MIB)
    }

    #[test]
    fn a_large_block_is_used_again_and_a_small_one_is_freed() {
        let pool = Arc::new(Pool::default());
        let block = pool.take(2 * MIB);
        let start = block.start();
        drop((block, pool.take(100), pool.take(0)));
        assert_eq!(free_and_live(&pool), (2, 0));
        assert_eq!(pool.take(2 * MIB).start(), start);
        assert_eq!(start.as_ptr() as usize % ALIGN, 0);
    }

    #[test]
    fn kept_and_live_blocks_never_exceed_the_live_peak() {
        let pool = Arc::new(Pool::default());
        drop([pool.take(2 * MIB), pool.take(3 * MIB)]);
        assert_eq!(free_and_live(&pool), (5, 0));
        let block = pool.take(4 * MIB);
        assert_eq!(free_and_live(&pool), (0, 4), "both had to go: 3 + 4 would be more than 5");
        drop(block);
        let blocks = [pool.take(MIB), pool.take(4 * MIB)];
        assert_eq!(free_and_live(&pool), (0, 5));
        drop(blocks);
        assert_eq!(free_and_live(&pool), (5, 0));
    }

    #[test]
    fn a_block_may_outlive_its_pool() {
        let pool = Arc::new(Pool::default());
        let block = pool.take(2 * MIB);
        drop(pool);
        drop(block);
    }
}
