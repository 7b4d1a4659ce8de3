//! Memory that the processes of one host share: a file without a name for each rank, mapped by all of them.
//!
//! Such a file (`memfd`) is found through the process that made it, so nothing is left of it after the last process has
//! ended, however that was. It is as long as anything could need, and takes memory only where it has been written.
//!
//! The `unsafe` here hands out atomics and ranges of bytes. Who may write which bytes at what time is the protocol of
//! [`table`](super::table): bytes are written by one rank, or by several in disjoint ranges, and read only after a
//! counter, stored with release and loaded with acquire, has said that they are complete.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// What memory is handed out in, and given back to the system in.
pub(super) const PAGE_BYTES: usize = 4096;

/// A mapping of one rank's file.
#[derive(Debug)]
pub(super) struct Arena {
    start: NonNull<u8>,
    len: usize,
    file: OwnedFd,
}

// SAFETY: The mapping is owned by this value, and bytes may move between threads.
unsafe impl Send for Arena {}
// SAFETY: Shared access is to atomics, and to bytes under the protocol told above.
unsafe impl Sync for Arena {}

impl Arena {
    /// A new file of `len` bytes, all zero.
    pub(super) fn create(len: usize) -> io::Result<Self> {
        // SAFETY: The name is a string that ends with zero.
        let fd = unsafe { libc::memfd_create(c"fsdp".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: The descriptor was made above, and nothing else owns it.
        let file = unsafe { OwnedFd::from_raw_fd(fd) };
        let size = libc::off_t::try_from(len).map_err(io::Error::other)?;
        // SAFETY: The descriptor is open.
        if unsafe { libc::ftruncate(fd, size) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Self::map(file, len)
    }

    /// The file that process `pid` has open as `fd`.
    pub(super) fn open(pid: u32, fd: i32, len: usize) -> io::Result<Self> {
        let file = std::fs::OpenOptions::new().read(true).write(true).open(format!("/proc/{pid}/fd/{fd}"))?;
        Self::map(file.into(), len)
    }

    fn map(file: OwnedFd, len: usize) -> io::Result<Self> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
        // SAFETY: A new mapping at an address that the system chooses, of an open file.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, file.as_raw_fd(), 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or_else(|| io::Error::other("a mapping at address zero"))?;
        Ok(Self { start, len, file })
    }

    /// The number under which this process has the file open.
    pub(super) fn fd(&self) -> i32 {
        self.file.as_raw_fd()
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The address of `len` bytes at `offset`.
    pub(super) fn at(&self, offset: usize, len: usize) -> NonNull<u8> {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "a range lies in its arena");
        // SAFETY: The range lies in the mapping.
        unsafe { self.start.add(offset) }
    }

    /// A value of atomics at `offset`.
    ///
    /// # Safety
    /// `T` consists of atomics only, for which every pattern of bits is a value, and nothing else uses these bytes.
    pub(super) unsafe fn atomics<T>(&self, offset: usize) -> &T {
        let at = self.at(offset, size_of::<T>()).cast::<T>();
        assert!(at.is_aligned(), "atomics are aligned");
        // SAFETY: In the mapping and aligned; the caller vouches for the type.
        unsafe { at.as_ref() }
    }

    /// Bytes that nobody writes while the slice lives.
    ///
    /// # Safety
    /// The protocol says that they are complete, and that no rank writes them for as long as the slice lives.
    pub(super) unsafe fn bytes(&self, offset: usize, len: usize) -> &[u8] {
        // SAFETY: In the mapping, where every byte is initialised; the caller vouches for the time.
        unsafe { std::slice::from_raw_parts(self.at(offset, len).as_ptr(), len) }
    }

    /// Bytes that only the caller uses while the slice lives.
    ///
    /// # Safety
    /// The protocol says that they are the caller's.
    #[expect(clippy::mut_from_ref, reason = "an arena is many pieces of memory, each with an owner of its own")]
    pub(super) unsafe fn bytes_mut(&self, offset: usize, len: usize) -> &mut [u8] {
        // SAFETY: In the mapping, where every byte is initialised; the caller vouches for the owner.
        unsafe { std::slice::from_raw_parts_mut(self.at(offset, len).as_ptr(), len) }
    }

    /// As [`Arena::bytes_mut`], to be written as if it were new.
    ///
    /// # Safety
    /// As [`Arena::bytes_mut`], and whoever gets it writes initialised bytes only.
    #[expect(clippy::mut_from_ref, reason = "an arena is many pieces of memory, each with an owner of its own")]
    pub(super) unsafe fn uninit_mut(&self, offset: usize, len: usize) -> &mut [MaybeUninit<u8>] {
        // SAFETY: In the mapping; the caller vouches for the owner, and that the bytes stay initialised.
        unsafe { std::slice::from_raw_parts_mut(self.at(offset, len).as_ptr().cast(), len) }
    }

    /// Gives the memory of whole pages back to the system. They read as zero afterwards.
    pub(super) fn give_back(&self, offset: usize, len: usize) {
        debug_assert!(offset.is_multiple_of(PAGE_BYTES) && len.is_multiple_of(PAGE_BYTES));
        let start = self.at(offset, len);
        // SAFETY: Pages of this mapping that hold nothing any more. Where the system refuses, they stay.
        unsafe { libc::madvise(start.as_ptr().cast(), len, libc::MADV_REMOVE) };
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: Mapped in `map` with this length. Views hold the arena, so none is left.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// Wakes processes that wait for a change of some counters.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Bell {
    rung: AtomicU32,
    num_waiting: AtomicU32,
}

impl Bell {
    /// To be read before the counters are looked at, and handed to [`Bell::wait`] if they are not yet right.
    pub(super) fn heard(&self) -> u32 {
        self.rung.load(Ordering::SeqCst)
    }

    /// After a counter has changed.
    pub(super) fn ring(&self) {
        self.rung.fetch_add(1, Ordering::SeqCst);
        if self.num_waiting.load(Ordering::SeqCst) > 0 {
            // SAFETY: The word is aligned and mapped. Waking needs no more.
            unsafe { libc::syscall(libc::SYS_futex, self.rung.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
        }
    }

    /// Sleeps until the bell has rung since `heard`, or `limit` has passed, or for no reason.
    pub(super) fn wait(&self, heard: u32, limit: Duration) {
        let limit = libc::timespec {
            tv_sec: limit.as_secs().try_into().unwrap_or(libc::time_t::MAX),
            tv_nsec: limit.subsec_nanos().into(),
        };
        self.num_waiting.fetch_add(1, Ordering::SeqCst);
        // SAFETY: The word is aligned and mapped, and the time lives during the call. The kernel compares the word with
        // `heard` before it lets us sleep, so a ring in between is not missed.
        unsafe { libc::syscall(libc::SYS_futex, self.rung.as_ptr(), libc::FUTEX_WAIT, heard, &raw const limit) };
        self.num_waiting.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_mappings_show_the_same_bytes_and_pages_can_be_given_back() {
        let arena = Arena::create(1 << 40).unwrap();
        let other = Arena::open(std::process::id(), arena.fd(), arena.len()).unwrap();
        // SAFETY: This test is alone with the arena.
        unsafe {
            arena.bytes_mut(8192, 3).copy_from_slice(&[1, 2, 3]);
            assert_eq!(other.bytes(8192, 3), [1, 2, 3]);
            other.give_back(8192, PAGE_BYTES);
            assert_eq!(arena.bytes(8192, 3), [0, 0, 0]);
        }
    }

    #[test]
    fn a_bell_wakes_who_waits_and_one_that_rang_before_is_not_missed() {
        let arena = Arena::create(PAGE_BYTES).unwrap();
        // SAFETY: A bell is made of atomics.
        let bell: &Bell = unsafe { arena.atomics(0) };
        let heard = bell.heard();
        bell.ring();
        bell.wait(heard, Duration::from_secs(60));
        let heard = bell.heard();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(5));
                bell.ring();
            });
            while bell.heard() == heard {
                bell.wait(heard, Duration::from_secs(60));
            }
        });
    }
}
