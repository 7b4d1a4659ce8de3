//! The memory that transfers go through: aligned for a disk, allocated once.

/// What addresses, offsets and sizes of direct transfers must be a multiple of: the pages of any disk in use.
pub(super) const ALIGNMENT: usize = 4096;

/// A buffer for one block. Its memory stays where it is when the value moves.
#[derive(Debug)]
pub(super) struct Chunk {
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl Chunk {
    /// `len` bytes of zeros at an aligned address.
    pub(super) fn new(len: usize) -> Self {
        let memory = vec![0; len + ALIGNMENT];
        let start = memory.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
        Self { memory, start, len }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.len]
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.len]
    }
}

/// The next size that a direct transfer accepts.
pub(super) fn padded(len: usize) -> usize {
    len.next_multiple_of(ALIGNMENT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_aligned_also_after_they_have_moved() {
        let chunks: Vec<Chunk> = (0..9).map(|_| Chunk::new(3 * ALIGNMENT)).collect();
        for mut chunk in chunks {
            assert_eq!(chunk.bytes().as_ptr().addr() % ALIGNMENT, 0);
            assert_eq!(chunk.bytes_mut().len(), 3 * ALIGNMENT);
        }
        assert_eq!([0, 1, ALIGNMENT, ALIGNMENT + 1].map(padded), [0, ALIGNMENT, ALIGNMENT, 2 * ALIGNMENT]);
    }
}
