//! Arrays of atomic words that start on a cache-line pair.

use std::ops::Range;

use crate::sync::AtomicU64;

/// Words in one block. A multiple of the words in a cache line (and in the pair that some
/// processors prefetch together), so that threads which keep to different blocks share no line.
pub(super) const WORDS_PER_LINE: usize = 16;

/// A fixed array of atomic words.
///
/// The words lie in one flat slice, not in an array of aligned blocks, so that finding one takes an
/// addition and a comparison. It has a block to spare, so that word 0 can be at a block's beginning.
#[derive(Debug)]
pub(super) struct Lines {
    words: Vec<AtomicU64>,
    /// Where word 0 is.
    first: usize,
    len: usize,
}

impl Lines {
    /// `len` words; word `i` starts as `value(i)`.
    pub(super) fn new(len: usize, value: impl Fn(usize) -> u64) -> Self {
        let size = len.next_multiple_of(WORDS_PER_LINE) + WORDS_PER_LINE;
        let mut words = Vec::<AtomicU64>::with_capacity(size);
        // Loom's words have another size, and need no alignment.
        let first = match words.as_ptr().align_offset(WORDS_PER_LINE * size_of::<u64>()) {
            first @ 0..WORDS_PER_LINE => first,
            _ => 0,
        };
        let value = |at: usize| at.checked_sub(first).filter(|&index| index < len).map_or(0, &value);
        words.extend((0..size).map(|at| AtomicU64::new(value(at))));
        Self { words, first, len }
    }

    /// Number of words.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Word `index`.
    #[inline]
    pub(super) fn get(&self, index: usize) -> &AtomicU64 {
        &self.words[self.first + index]
    }

    /// Word `index`, if there is one; a little beyond the end it may be one that stays 0.
    #[inline]
    pub(super) fn find(&self, index: usize) -> Option<&AtomicU64> {
        self.words.get(self.first + index)
    }

    /// The words of this range.
    #[inline]
    pub(super) fn range(&self, range: Range<usize>) -> &[AtomicU64] {
        &self.words[self.first + range.start..self.first + range.end]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::Ordering;

    #[test]
    fn words_begin_a_block_and_share_none_with_what_lies_around() {
        for len in [1, 15, 16, 17, 1000] {
            let lines = Lines::new(len, |index| index as u64 + 1);
            assert_eq!(lines.len(), len);
            assert!(std::ptr::from_ref(lines.get(0)).addr().is_multiple_of(WORDS_PER_LINE * 8));
            assert!(lines.words.len() >= lines.first + len.next_multiple_of(WORDS_PER_LINE));
            let values = lines.range(0..len).iter().map(|word| word.load(Ordering::Relaxed));
            assert!(values.eq(1..=len as u64));
            let beyond = lines.find(len).map_or(0, |word| word.load(Ordering::Relaxed));
            assert_eq!(beyond, 0);
        }
    }
}
