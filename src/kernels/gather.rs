//! Weights against values.

#![expect(clippy::needless_range_loop, reason = "zip stays a call where a profile has no LTO at all")]

use std::ops::Range;

use super::columns::{Columns, at_once, load_rows, store_rows};
use super::simd::{Job, Simd, Stored, load};
use super::tokens::{CACHE_LINE, Next, Tokens, prefetch};

/// `acc[r][c] += Σ weights[r][k] · value[k][c]` for `R` rows, all columns and the tokens `seen`, of
/// some in a tile, in ascending order whatever `R`; columns are parted as `T` is.
///
/// # Safety (of running it)
/// - `weights` is valid for reads of the weights of `seen` in each of `R` rows, a tile apart; `acc` for
///   reads and writes of `R` rows of `dim`, a multiple of `LANES`.
/// - The values of `seen` are valid for reads of `dim` elements.
pub(super) struct Gather<'a, T, const R: usize, const N: usize> {
    /// `R` rows of a tile of `N`.
    pub(super) weights: *const f32,
    /// What the sums of each row are multiplied by, where its weights were counted.
    pub(super) steps: &'a [f32],
    /// Whether something is left of such weights of any row, which is 0 in others.
    pub(super) finer: bool,
    pub(super) values: Tokens<'a, T>,
    /// What will be asked for after this.
    pub(super) next: Option<Next<'a, T>>,
    pub(super) seen: Range<usize>,
    pub(super) dim: usize,
    /// `[R, dim]`.
    pub(super) acc: *mut f32,
}

impl<S: Simd, T: Stored, const R: usize, const N: usize> Job<S> for Gather<'_, T, R, N> {
    type Output = ();

    #[inline(always)]
    unsafe fn run(self, simd: S) {
        // SAFETY: the caller's promise; these are the vectors of `dim`.
        unsafe { self.each(simd, 0..self.dim / S::LANES) }
    }
}

impl<S: Simd, T: Stored, const R: usize, const N: usize> Columns<S> for Gather<'_, T, R, N> {
    const MOST: usize = at_once::<S>(R);

    #[inline(always)]
    unsafe fn columns<const C: usize>(&self, simd: S, first: usize) {
        let column = first * S::LANES;
        let acc = self.acc.wrapping_add(column);
        // SAFETY: the caller's promise for `acc`.
        let mut sums = unsafe { load_rows::<S, R, C>(simd, acc, self.dim) };
        // Groups of rows that pass by take turns with the lines.
        let next = self.next.as_ref().and_then(|next| next.at(column * size_of::<T>(), CACHE_LINE));
        for token in self.seen.clone() {
            if let Some(next) = next {
                prefetch(simd, next.at(token), column * size_of::<T>(), C * S::LANES * size_of::<T>());
            }
            let value = self.values.at(token).wrapping_add(column);
            // What there is less of is held in registers while the other streams by.
            if R <= C {
                let mut weights = [simd.splat(0.0); R];
                for r in 0..R {
                    // SAFETY: the caller's promise for `weights`.
                    weights[r] = unsafe { self.weight(simd, r, token) };
                }
                for c in 0..C {
                    // SAFETY: the caller's promise for this token's value.
                    let v = unsafe { load::<S, T, C>(simd, value, c) };
                    for r in 0..R {
                        sums[r][c] = simd.mul_add(weights[r], v, sums[r][c]);
                    }
                }
            } else {
                let mut v = [simd.splat(0.0); C];
                for c in 0..C {
                    // SAFETY: the caller's promise for this token's value.
                    v[c] = unsafe { load::<S, T, C>(simd, value, c) };
                }
                for r in 0..R {
                    // SAFETY: the caller's promise for `weights`.
                    let weight = unsafe { self.weight(simd, r, token) };
                    for c in 0..C {
                        sums[r][c] = simd.mul_add(weight, v[c], sums[r][c]);
                    }
                }
            }
        }
        // SAFETY: the caller's promise for `acc`.
        unsafe { store_rows(simd, sums, acc, self.dim) }
    }
}

impl<T, const R: usize, const N: usize> Gather<'_, T, R, N> {
    /// A row's weight for a token, in all lanes.
    ///
    /// # Safety
    /// - As for the job; `row < R`, `token` is in `seen`.
    #[inline(always)]
    unsafe fn weight<S: Simd>(&self, simd: S, row: usize, token: usize) -> S::F32 {
        // SAFETY: the caller's promise.
        simd.splat(unsafe { *self.weights.add(row * N + token) })
    }
}
