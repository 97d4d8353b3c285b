//! Rows of queries against a packed tile of keys: for many rows, which is what prefill has.

#![expect(clippy::needless_range_loop, reason = "zip stays a call where a profile has no LTO at all")]

use std::marker::PhantomData;
use std::ops::Range;

use super::columns::{Columns, store_rows};
use super::method::Method;
use super::panels;
use super::simd::{Job, Simd};
use super::tokens::TILE;

/// Words that are multiplied one after the other without a branch, and with rows' addresses computed once.
const UNROLLED: usize = 4;

/// `scores[r][k] = Σ query[r][d] · keys[d][k]` for `R` rows and (at least) the keys `seen` of a panel, in
/// ascending order of `d` whatever `R`.
///
/// # Safety (of running it)
/// - `query` is valid for reads of `R` rows of `words`; `keys` of as many of a panel; `scores` for
///   writes of as much in `R` rows of a tile.
pub(super) struct Product<M, const R: usize> {
    /// `R` rows of words, so many floats apart.
    pub(super) query: *const f32,
    pub(super) stride: usize,
    /// `[words, panel]`, packed.
    pub(super) keys: *const f32,
    pub(super) seen: Range<usize>,
    pub(super) words: usize,
    /// `R` rows of a panel, a tile apart.
    pub(super) scores: *mut f32,
    pub(super) method: PhantomData<M>,
}

impl<S: Simd, M: Method<S>, const R: usize> Job<S> for Product<M, R> {
    type Output = ();

    #[inline(always)]
    unsafe fn run(self, simd: S) {
        // SAFETY: the caller's promise; these vectors of keys lie in the panel, a multiple of LANES.
        unsafe { self.each(simd, self.seen.start / S::LANES..self.seen.end.div_ceil(S::LANES)) }
    }
}

impl<S: Simd, M: Method<S>, const R: usize> Columns<S> for Product<M, R> {
    const MOST: usize = panels::vectors::<S>();

    #[inline(always)]
    unsafe fn columns<const C: usize>(&self, simd: S, first: usize) {
        let first = first * S::LANES;
        // SAFETY: the caller's promise; no sum goes beyond `words`.
        let mut sums = unsafe { self.sums::<S, C>(simd, first, 0..self.words.min(S::TERMS)) };
        let mut d = S::TERMS;
        while d < self.words {
            // SAFETY: as above.
            let more = unsafe { self.sums::<S, C>(simd, first, d..self.words.min(d + S::TERMS)) };
            for r in 0..R {
                for c in 0..C {
                    sums[r][c] = simd.add(sums[r][c], more[r][c]);
                }
            }
            d += S::TERMS;
        }
        // SAFETY: the caller's promise for `scores`.
        unsafe { store_rows(simd, sums, self.scores.add(first), TILE) }
    }
}

impl<M, const R: usize> Product<M, R> {
    /// The sums over some `d` of each row for `C` vectors of keys.
    ///
    /// # Safety
    /// - As for the job; `first + C * LANES <= panel`, `d.end <= words`.
    #[inline(always)]
    unsafe fn sums<S: Simd, const C: usize>(&self, simd: S, first: usize, d: Range<usize>) -> [[S::F32; C]; R]
    where
        M: Method<S>,
    {
        let mut sums = [[simd.splat(0.0); C]; R];
        let mut next = d.start;
        // SAFETY: the caller's promise.
        unsafe {
            while next + UNROLLED <= d.end {
                for d in next..next + UNROLLED {
                    self.add_products(simd, first, d, &mut sums);
                }
                next += UNROLLED;
            }
            for d in next..d.end {
                self.add_products(simd, first, d, &mut sums);
            }
        }
        sums
    }

    /// Adds the products of one `d`.
    ///
    /// # Safety
    /// - As for `sums`.
    #[inline(always)]
    unsafe fn add_products<S: Simd, const C: usize>(
        &self,
        simd: S,
        first: usize,
        d: usize,
        sums: &mut [[S::F32; C]; R],
    ) where
        M: Method<S>,
    {
        let mut k = [simd.splat(0.0); C];
        for c in 0..C {
            // SAFETY: the caller's promise for `keys`.
            k[c] = unsafe { simd.load(self.keys.add(d * panels::width::<S>() + first + c * S::LANES)) };
        }
        for r in 0..R {
            // SAFETY: the caller's promise for `query`.
            let q = simd.splat(unsafe { *self.query.add(r * self.stride + d) });
            for c in 0..C {
                sums[r][c] = M::multiply_add(simd, q, k[c], sums[r][c]);
            }
        }
    }
}
