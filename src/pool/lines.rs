//! Arrays of atomic words that start on a cache-line pair.

use crate::sync::{AtomicU64, CachePadded};

/// Words in one padded block. A multiple of the words in a cache line (and in the pair that some
/// processors prefetch together), so that threads which keep to different blocks share no line.
pub(super) const WORDS_PER_LINE: usize = 16;

/// A fixed array of atomic words.
#[derive(Debug)]
pub(super) struct Lines {
    blocks: Box<[CachePadded<[AtomicU64; WORDS_PER_LINE]>]>,
    len: usize,
}

impl Lines {
    /// `len` words; word `i` starts as `value(i)`.
    pub(super) fn new(len: usize, value: impl Fn(usize) -> u64) -> Self {
        let block = |b: usize| {
            CachePadded::new(std::array::from_fn(|i| {
                let index = b * WORDS_PER_LINE + i;
                AtomicU64::new(if index < len { value(index) } else { 0 })
            }))
        };
        Self { blocks: (0..len.div_ceil(WORDS_PER_LINE)).map(block).collect(), len }
    }

    /// Number of words.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Word `index`.
    #[inline]
    pub(super) fn get(&self, index: usize) -> &AtomicU64 {
        &self.blocks[index / WORDS_PER_LINE][index % WORDS_PER_LINE]
    }
}
