//! Where the tokens of a tile lie.

use std::marker::PhantomData;

use super::simd::Simd;

/// Keys whose dot products are turned into weights together where many rows use them: the more, the seldomer
/// sums are fetched and put back, and the less of a row's softmax is what has to be done once.
pub(super) const TILE: usize = 128;

/// The same where few rows do: the more, the seldomer sums are fetched and put back; the fewer, the less
/// memory lies between a head's keys and its values.
pub(super) const SHORT_TILE: usize = 64;

/// Bytes that memory moves together.
pub(super) const CACHE_LINE: usize = 64;

/// Some tokens of a tile: number `i` lies at `base + offsets[i]` bytes.
#[derive(Clone, Copy)]
pub(super) struct Tokens<'a, T> {
    /// Where offsets start.
    pub(super) base: *const u8,
    /// Bytes, one per token.
    pub(super) offsets: &'a [usize],
    /// What lies there.
    pub(super) stored: PhantomData<T>,
}

/// Tokens that will be needed next: some of them are asked for while others are worked on, so that
/// memory never rests.
#[derive(Clone, Copy)]
pub(super) struct Next<'a, T> {
    pub(super) tokens: Tokens<'a, T>,
    /// Of `parts` groups of rows that pass by the same tile, each asks for its part of the tokens.
    pub(super) part: usize,
    pub(super) parts: usize,
}

/// Fills in offsets of which each lies a `stride` behind the one before it.
pub(super) fn ascend(offsets: &mut [usize], first: usize, stride: usize) {
    let mut next = first;
    for offset in offsets {
        *offset = next;
        next += stride;
    }
}

impl<'a, T> Next<'a, T> {
    /// What one group of rows asks for while it passes by tokens in blocks of a size.
    #[inline(always)]
    pub(super) fn at(&self, token: usize, block: usize) -> Option<&Tokens<'a, T>> {
        // One part, as in most calls, needs no division.
        (self.parts == 1 || token / block % self.parts == self.part).then_some(&self.tokens)
    }
}

/// A whole tile that will be needed next, asked for in as many parts as groups of rows pass by.
#[derive(Clone, Copy)]
pub(super) struct Later<'a, T> {
    pub(super) keys: Tokens<'a, T>,
    pub(super) values: Tokens<'a, T>,
    pub(super) key_dim: usize,
    pub(super) value_dim: usize,
}

impl<T> Later<'_, T> {
    /// Asks for one of `parts`.
    pub(super) fn prefetch<S: Simd>(&self, simd: S, part: usize, parts: usize) {
        let (line, count) = (CACHE_LINE / size_of::<T>(), self.keys.offsets.len());
        for token in part * count / parts..(part + 1) * count / parts {
            for (tokens, dim) in [(&self.keys, self.key_dim), (&self.values, self.value_dim)] {
                for element in (0..dim).step_by(line) {
                    simd.prefetch(tokens.at(token).wrapping_add(element).cast());
                }
            }
        }
    }
}

impl<T> Tokens<'_, T> {
    /// Address of a token's first element.
    #[inline(always)]
    pub(super) fn at(&self, token: usize) -> *const T {
        self.base.wrapping_add(self.offsets[token]).cast()
    }

    /// Addresses of `K` tokens' first elements.
    #[inline(always)]
    pub(super) fn at_each<const K: usize>(&self, first: usize) -> [*const T; K] {
        let mut each = [std::ptr::null(); K];
        for (i, at) in each.iter_mut().enumerate() {
            *at = self.at(first + i);
        }
        each
    }
}

/// Asks for the cache lines that begin in so many `bytes`, `start` bytes from a token's begin, of which that
/// is a multiple.
#[inline(always)]
pub(super) fn prefetch<S: Simd, T>(simd: S, token: *const T, start: usize, bytes: usize) {
    // In whole lines, one begins for sure.
    if bytes.is_multiple_of(CACHE_LINE) || start.is_multiple_of(CACHE_LINE) {
        for line in (0..bytes).step_by(CACHE_LINE) {
            simd.prefetch(token.cast::<u8>().wrapping_add(start + line));
        }
    }
}
