//! Weights against values.

#![expect(clippy::needless_range_loop, reason = "zip stays a call where a profile has no LTO at all")]

use std::ops::Range;

use super::simd::{Job, Simd, Stored, load};
use super::tokens::{CACHE_LINE, Next, Tokens, prefetch};

/// `acc[r][c] += Σ weights[r][k] · value[k][c]` for `R` rows, all columns and the tokens `seen`, of
/// some in a tile, in ascending order whatever `R`; columns are parted as `T` is.
///
/// # Safety (of running it)
/// - `weights` is valid for reads of the weights of `seen` in each of `R` rows, a tile apart, `acc` for reads and writes of `R` rows of `dim`, a
///   multiple of `LANES`.
/// - The values of `seen` are valid for reads of `dim` elements.
pub(super) struct Gather<'a, T, const R: usize, const N: usize> {
    /// `R` rows of a tile of `N`.
    pub(super) weights: *const f32,
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
        let vectors = self.dim / S::LANES;
        // As many sums as registers hold beside weights and values, and none waits for its last addition.
        let most = match R {
            1 => 8,
            2 | 3 => S::REGISTERS / 4,
            _ => S::REGISTERS / 8,
        };
        let mut vector = 0;
        while vector < vectors {
            let mut columns = most;
            while columns > vectors - vector {
                columns /= 2;
            }
            // SAFETY: the caller's promise; columns stay below `dim`.
            unsafe {
                match columns {
                    1 => self.columns::<S, 1>(simd, vector * S::LANES),
                    2 => self.columns::<S, 2>(simd, vector * S::LANES),
                    4 => self.columns::<S, 4>(simd, vector * S::LANES),
                    _ => self.columns::<S, 8>(simd, vector * S::LANES),
                }
            }
            vector += columns;
        }
    }
}

impl<T: Stored, const R: usize, const N: usize> Gather<'_, T, R, N> {
    /// `C` vectors of columns: an even number from an even one on, or the last of an odd number.
    ///
    /// # Safety
    /// - As for the job; `column + C * LANES <= dim`.
    #[inline(always)]
    unsafe fn columns<S: Simd, const C: usize>(&self, simd: S, column: usize) {
        let mut sums = [[simd.splat(0.0); C]; R];
        for (r, sums) in sums.iter_mut().enumerate() {
            for (c, sum) in sums.iter_mut().enumerate() {
                // SAFETY: the caller's promise for `acc`.
                *sum = unsafe { simd.load(self.acc.add(r * self.dim + column + c * S::LANES)) };
            }
        }
        // Groups of rows that pass by take turns with the lines.
        let next = self.next.as_ref().and_then(|next| next.at(column * size_of::<T>(), CACHE_LINE));
        for token in self.seen.start..self.seen.end {
            if let Some(next) = next {
                prefetch::<S, T, C>(simd, next.at(token), column * size_of::<T>());
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
        for (r, sums) in sums.iter().enumerate() {
            for (c, &sum) in sums.iter().enumerate() {
                // SAFETY: the caller's promise for `acc`.
                unsafe { simd.store(self.acc.add(r * self.dim + column + c * S::LANES), sum) }
            }
        }
    }

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
