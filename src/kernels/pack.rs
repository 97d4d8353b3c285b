//! Tiles made ready to be used by many rows.

use std::marker::PhantomData;

use super::method::Method;
use super::pairs::Pairs;
use super::panels;
use super::simd::{Job, MOST_LANES, Simd};
use super::stored::Stored;
use super::tokens::{TILE, Tokens};
use super::words::Words;

/// Widens the first `count` tokens of a tile into `into`, which has room for some and `dim` rounded up to whole
/// vectors, in units of their type; padding stays as it is. So many columns as a `panel` has lie together, token
/// by token.
///
/// # Safety (of running it)
/// - All tokens of the tile are valid for reads of `dim` elements.
pub(super) struct Widen<'a, T> {
    pub(super) tokens: Tokens<'a, T>,
    pub(super) dim: usize,
    pub(super) count: usize,
    /// A multiple of `LANES`, or more than there are.
    pub(super) panel: usize,
    pub(super) into: &'a mut [f32],
}

impl<S: Simd, T: Stored> Job<S> for Widen<'_, T> {
    type Output = ();

    #[inline(always)]
    unsafe fn run(self, simd: S) {
        let Self { tokens, dim, count, panel, into } = self;
        let columns = dim.next_multiple_of(S::LANES);
        let room = into.len() / columns;
        for first in (0..columns).step_by(panel) {
            let (width, left) = (panel.min(columns - first), dim - first);
            let whole = width.min(left / S::LANES * S::LANES);
            let rows = into[first * room..][..count * width].chunks_exact_mut(width);
            for (token, row) in rows.enumerate() {
                let from = tokens.at(token).wrapping_add(first);
                // SAFETY: all indices are below `dim`, and `row` is at least as long.
                unsafe {
                    for d in (0..whole).step_by(S::LANES) {
                        simd.store(row.as_mut_ptr().add(d), T::load(simd, from.add(d)));
                    }
                    for (d, x) in row.iter_mut().enumerate().take(left).skip(whole) {
                        *x = from.add(d).read_unaligned().to_f32() / T::UNIT;
                    }
                }
            }
        }
    }
}

/// Widens and transposes the first `count` tokens of a tile, and what follows in their vectors, into `into`
/// `[TILE / panel, words, panel]`.
///
/// # Safety (of running it)
/// - All tokens of the tile are valid for reads of `words`, a multiple of `LANES`.
pub(super) struct Pack<'a, M, T> {
    pub(super) tokens: Tokens<'a, T>,
    pub(super) words: usize,
    pub(super) count: usize,
    pub(super) into: &'a mut [f32],
    pub(super) method: PhantomData<M>,
}

impl<S: Simd, M: Method<S, Element = T>, T> Job<S> for Pack<'_, M, T> {
    type Output = ();

    #[inline(always)]
    unsafe fn run(self, simd: S) {
        assert!(self.into.len() >= self.words * TILE && self.count <= TILE, "room for a tile");
        let panel = panels::width::<S>();
        for word in (0..self.words).step_by(S::LANES) {
            for first in (0..self.count).step_by(S::LANES) {
                let to =
                    self.into.as_mut_ptr().wrapping_add(first / panel * panel * self.words + first % panel);
                let mut block = [simd.splat(0.0); MOST_LANES];
                for (i, row) in block.iter_mut().enumerate().take(S::LANES) {
                    // SAFETY: `word + LANES <= words`; the caller's promise for the tokens.
                    *row = unsafe { M::load::<1, true>(simd, self.tokens.at(first + i), word, 0) };
                }
                simd.transpose(&mut block);
                for (i, &row) in block.iter().enumerate().take(S::LANES) {
                    // SAFETY: `first + LANES <= TILE` and `word + i < words`, inside `into`.
                    unsafe { simd.store(to.add((word + i) * panel), row) }
                }
            }
        }
    }
}

/// Packs the first `count` of a tile's tokens, and the one that shares the last's words, which become words of two
/// bfloat16, into `into` `[dim / panel, TILE / 2, panel]`: words of two tokens, the columns
/// [zipped](super::integers::Integers::zip).
///
/// # Safety (of running it)
/// - All tokens of the tile are valid for reads of `dim` elements, a multiple of `2 * LANES`.
pub(super) struct Zip<'a, T> {
    pub(super) tokens: Tokens<'a, T>,
    pub(super) dim: usize,
    pub(super) count: usize,
    pub(super) panel: usize,
    pub(super) into: &'a mut [f32],
}

impl<S: Pairs, T: Words> Job<S> for Zip<'_, T> {
    type Output = ();

    #[inline(always)]
    unsafe fn run(self, simd: S) {
        let Self { tokens, dim, count, panel, into } = self;
        let room = into.len() / dim;
        for start in (0..dim).step_by(panel) {
            let width = panel.min(dim - start);
            let rows = into[start * room..][..count.div_ceil(2) * width].chunks_exact_mut(width);
            for (pair, row) in rows.enumerate() {
                let [first, second] = tokens.at_each::<2>(2 * pair);
                for (i, columns) in row.chunks_exact_mut(2 * S::LANES).enumerate() {
                    // SAFETY: words below `dim / 2`, the caller's promise; two vectors of columns.
                    unsafe {
                        let words = (start / 2 + i * S::LANES) * T::PER_WORD;
                        let [low, high] =
                            simd.zip(T::one(simd, first.add(words)), T::one(simd, second.add(words)));
                        simd.store(columns.as_mut_ptr(), low);
                        simd.store(columns.as_mut_ptr().add(S::LANES), high);
                    }
                }
            }
        }
    }
}
