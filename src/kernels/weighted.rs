//! Weights against a packed tile of values: for many rows, which is what prefill has.

#![expect(clippy::needless_range_loop, reason = "zip stays a call where a profile has no LTO at all")]

use std::marker::PhantomData;
use std::ops::Range;

use super::columns::{Columns, load_rows, store_rows};
use super::method::Method;
use super::panels;
use super::simd::{Job, Simd};
use super::tokens::TILE;

/// `acc[r][c] += Σ weights[r][k] · values[k][c]` for `R` rows, the columns of a panel and the tokens `seen`, in
/// ascending order whatever `R`.
///
/// # Safety (of running it)
/// - `weights` is valid for reads of `R` tiles, `values` of a tile of so many `columns`, a multiple of `LANES`,
///   `acc` for reads and writes of as many in `R` rows of `dim`.
/// - `seen` lies in the tile. The weight of a token that is not of it, but in a word with one that is,
///   is finite.
pub(super) struct Weighted<M, const R: usize> {
    /// `[R, TILE]`, as the method stores them.
    pub(super) weights: *const f32,
    /// `[TILE / tokens of a word, columns]`, as the method packs them.
    pub(super) values: *const f32,
    pub(super) columns: usize,
    pub(super) seen: Range<usize>,
    pub(super) acc: *mut f32,
    /// From a row of `acc` to the next.
    pub(super) dim: usize,
    pub(super) method: PhantomData<M>,
}

impl<S: Simd, M: Method<S>, const R: usize> Job<S> for Weighted<M, R> {
    type Output = ();

    #[inline(always)]
    unsafe fn run(self, simd: S) {
        // SAFETY: the caller's promise; these are all vectors.
        unsafe { self.each(simd, 0..self.columns / S::LANES) }
    }
}

impl<S: Simd, M: Method<S>, const R: usize> Columns<S> for Weighted<M, R> {
    const MOST: usize = panels::vectors::<S>();

    #[inline(always)]
    unsafe fn columns<const C: usize>(&self, simd: S, first: usize) {
        let Range { start, end } = self.seen;
        let column = first * S::LANES;
        let acc = self.acc.wrapping_add(column);
        // SAFETY: the caller's promise for `acc`.
        let mut sums = unsafe { load_rows::<S, R, C>(simd, acc, self.dim) };
        for word in start / M::PER_WORD..end.div_ceil(M::PER_WORD) {
            let mut v = [simd.splat(0.0); C];
            for c in 0..C {
                // SAFETY: the caller's promise for `values`.
                v[c] = unsafe { simd.load(self.values.add(word * self.columns + column + c * S::LANES)) };
            }
            let tokens = word * M::PER_WORD..(word + 1) * M::PER_WORD;
            if M::PER_WORD > 1 && (tokens.start < start || tokens.end > end) {
                // What is not seen may be no number.
                for v in &mut v {
                    *v = M::only(simd, *v, start.max(tokens.start) - tokens.start);
                }
            }
            for r in 0..R {
                // SAFETY: the caller's promise for `weights`.
                let weight = simd.splat(unsafe { *self.weights.add(r * TILE + word) });
                for c in 0..C {
                    sums[r][c] = M::multiply_add(simd, weight, v[c], sums[r][c]);
                }
            }
        }
        // SAFETY: the caller's promise for `acc`.
        unsafe { store_rows(simd, sums, acc, self.dim) }
    }
}
