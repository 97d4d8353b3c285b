//! Tiles made ready to be used by many rows.

use std::marker::PhantomData;

use super::method::Method;
use super::pairs::Pairs;
use super::simd::{Job, MOST_LANES, Simd, Stored};
use super::tokens::{TILE, Tokens};
use super::words::Words;

/// Widens a tile's tokens into `into` `[TILE, dim rounded up to whole vectors]`, in units of their
/// type; padding stays as it is.
///
/// # Safety (of running it)
/// - All tokens of the tile are valid for reads of `dim` elements.
pub(super) struct Widen<'a, T> {
    pub(super) tokens: Tokens<'a, T>,
    pub(super) dim: usize,
    pub(super) into: &'a mut [f32],
}

impl<S: Simd, T: Stored> Job<S> for Widen<'_, T> {
    type Output = ();

    #[inline(always)]
    unsafe fn run(self, simd: S) {
        let whole = self.dim / S::LANES * S::LANES;
        let rows = self.into.chunks_exact_mut(self.dim.next_multiple_of(S::LANES));
        for (token, row) in rows.enumerate() {
            let from = self.tokens.at(token);
            // SAFETY: all indices are below `dim`, and `row` is at least as long.
            unsafe {
                for d in (0..whole).step_by(S::LANES) {
                    simd.store(row.as_mut_ptr().add(d), T::load(simd, from.add(d)));
                }
                for (d, x) in row.iter_mut().enumerate().take(self.dim).skip(whole) {
                    *x = from.add(d).read_unaligned().to_f32() / T::UNIT;
                }
            }
        }
    }
}

/// Widens and transposes the first `count` tokens of a tile, and what follows in their vectors, into `into`
/// `[words, TILE]`.
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
        for word in (0..self.words).step_by(S::LANES) {
            for first in (0..self.count).step_by(S::LANES) {
                let mut block = [simd.splat(0.0); MOST_LANES];
                for (i, row) in block.iter_mut().enumerate().take(S::LANES) {
                    // SAFETY: `word + LANES <= words`; the caller's promise for the tokens.
                    *row = unsafe { M::load::<1>(simd, self.tokens.at(first + i), word, 0) };
                }
                simd.transpose(&mut block);
                for (i, &row) in block.iter().enumerate().take(S::LANES) {
                    // SAFETY: `first + LANES <= TILE` and `word + i < words`, inside `into`.
                    unsafe { simd.store(self.into.as_mut_ptr().add((word + i) * TILE + first), row) }
                }
            }
        }
    }
}

/// Packs as many of a tile's tokens, which become words of two bfloat16, as `into` `[tokens / 2, dim]` has room
/// for: words of two tokens, the columns [zipped](super::integers::Integers::zip).
///
/// # Safety (of running it)
/// - All tokens of the tile are valid for reads of `dim` elements, a multiple of `2 * LANES`.
pub(super) struct Zip<'a, T> {
    pub(super) tokens: Tokens<'a, T>,
    pub(super) dim: usize,
    pub(super) into: &'a mut [f32],
}

impl<S: Pairs, T: Words> Job<S> for Zip<'_, T> {
    type Output = ();

    #[inline(always)]
    unsafe fn run(self, simd: S) {
        for (pair, row) in self.into.chunks_exact_mut(self.dim).enumerate() {
            let [first, second] = self.tokens.at_each::<2>(2 * pair);
            for (i, columns) in row.chunks_exact_mut(2 * S::LANES).enumerate() {
                // SAFETY: words below `dim / 2`, the caller's promise; two vectors of columns.
                unsafe {
                    let words = i * S::LANES * T::PER_WORD;
                    let [low, high] =
                        simd.zip(T::one(simd, first.add(words)), T::one(simd, second.add(words)));
                    simd.store(columns.as_mut_ptr(), low);
                    simd.store(columns.as_mut_ptr().add(S::LANES), high);
                }
            }
        }
    }
}
