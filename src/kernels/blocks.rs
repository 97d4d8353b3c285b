//! The two register-blocked inner loops: rows of queries against keys, weights against values.

#![expect(clippy::needless_range_loop, reason = "zip stays a call where a profile has no LTO at all")]

use std::marker::PhantomData;
use std::ops::Range;

use super::simd::{Job, Simd, Stored};
use super::tile::TILE;

/// Bytes that memory moves together.
const CACHE_LINE: usize = 64;

/// Where the tokens of a tile lie: token `i` of the tile at `base + offsets[i]` bytes.
#[derive(Clone, Copy)]
pub(super) struct Tokens<'a, T> {
    /// Where offsets start.
    pub(super) base: *const u8,
    /// Bytes, one per token of the tile.
    pub(super) offsets: &'a [usize; TILE],
    /// What lies there.
    pub(super) stored: PhantomData<T>,
}

impl<T> Tokens<'_, T> {
    #[inline(always)]
    pub(super) fn at(&self, token: usize) -> *const T {
        self.base.wrapping_add(self.offsets[token]).cast()
    }

    /// Asks for the cache lines of a token's elements `from..to`.
    #[inline(always)]
    fn prefetch<S: Simd>(&self, simd: S, token: usize, from: usize, to: usize) {
        for element in (from..to).step_by(CACHE_LINE / size_of::<T>()) {
            simd.prefetch(self.at(token).wrapping_add(element).cast());
        }
    }
}

/// `scores[r][k] = Σ query[r][d] · key[k][d]` for `R` rows and (at least) the keys `seen`.
///
/// Whatever `R`, the lanes of one score are summed in the same order, so a score's bits don't
/// depend on the rows it is computed with.
///
/// # Safety (of running it)
/// - `query` is valid for reads of `R` rows of `dim`, a multiple of `LANES`; `scores` for writes of
///   `R` tiles.
/// - All keys of the tile are valid for reads of `dim` elements.
pub(super) struct Score<'a, T, const R: usize> {
    /// `[R, dim]`.
    pub(super) query: *const f32,
    pub(super) keys: Tokens<'a, T>,
    /// What will be asked for after this.
    pub(super) next: Option<Tokens<'a, T>>,
    pub(super) seen: Range<usize>,
    pub(super) dim: usize,
    /// `[R, TILE]`.
    pub(super) scores: *mut f32,
}

impl<S: Simd, T: Stored, const R: usize> Job<S> for Score<'_, T, R> {
    type Output = ();

    #[inline(always)]
    unsafe fn run(self, simd: S) {
        for key in (self.seen.start / 4 * 4..self.seen.end).step_by(4) {
            if let Some(next) = &self.next {
                for token in key..key + 4 {
                    next.prefetch(simd, token, 0, self.dim);
                }
            }
            // As many rows as registers hold sums for beside four keys and a query, as equal as can be.
            let most = if S::REGISTERS < 32 { 3 } else { 6 };
            let rows = R.div_ceil(R.div_ceil(most));
            let mut row = 0;
            while row < R {
                let count = rows.min(R - row);
                // SAFETY: the caller's promise; so many rows are left, and four keys from a
                // multiple of 4 lie inside the tile.
                unsafe {
                    match count {
                        1 => self.dots::<S, 1>(simd, row, key),
                        2 => self.dots::<S, 2>(simd, row, key),
                        3 => self.dots::<S, 3>(simd, row, key),
                        4 => self.dots::<S, 4>(simd, row, key),
                        5 => self.dots::<S, 5>(simd, row, key),
                        _ => self.dots::<S, 6>(simd, row, key),
                    }
                }
                row += count;
            }
        }
    }
}

impl<T: Stored, const R: usize> Score<'_, T, R> {
    /// `N` rows from `row` on against four keys from `first` on.
    ///
    /// # Safety
    /// - As for the job; `row + N <= R`, `first + 4 <= TILE`.
    #[inline(always)]
    unsafe fn dots<S: Simd, const N: usize>(&self, simd: S, row: usize, first: usize) {
        let keys =
            [self.keys.at(first), self.keys.at(first + 1), self.keys.at(first + 2), self.keys.at(first + 3)];
        let mut sums = [[simd.splat(0.0); 4]; N];
        let mut d = 0;
        while d < self.dim {
            // SAFETY: `d + LANES <= dim`; the caller's promise for keys and rows.
            unsafe {
                let k = [
                    T::load(simd, keys[0].add(d)),
                    T::load(simd, keys[1].add(d)),
                    T::load(simd, keys[2].add(d)),
                    T::load(simd, keys[3].add(d)),
                ];
                for (r, sums) in sums.iter_mut().enumerate() {
                    let q = simd.load(self.query.add((row + r) * self.dim + d));
                    for i in 0..4 {
                        sums[i] = simd.mul_add(q, k[i], sums[i]);
                    }
                }
            }
            d += S::LANES;
        }
        for (r, &sums) in sums.iter().enumerate() {
            // SAFETY: the caller's promise for `scores`.
            unsafe { simd.sum_four(self.scores.add((row + r) * TILE + first), sums) }
        }
    }
}

/// `acc[r][c] += Σ weights[r][k] · value[k][c]` for `R` rows, all columns and the tokens `seen`, in
/// ascending order whatever `R`.
///
/// # Safety (of running it)
/// - `weights` is valid for reads of `R` tiles, `acc` for reads and writes of `R` rows of `dim`, a
///   multiple of `LANES`.
/// - The values of `seen` are valid for reads of `dim` elements.
pub(super) struct Gather<'a, T, const R: usize> {
    /// `[R, TILE]`.
    pub(super) weights: *const f32,
    pub(super) values: Tokens<'a, T>,
    /// What will be asked for after this.
    pub(super) next: Option<Tokens<'a, T>>,
    pub(super) seen: Range<usize>,
    pub(super) dim: usize,
    /// `[R, dim]`.
    pub(super) acc: *mut f32,
}

impl<S: Simd, T: Stored, const R: usize> Job<S> for Gather<'_, T, R> {
    type Output = ();

    #[inline(always)]
    unsafe fn run(self, simd: S) {
        let vectors = self.dim / S::LANES;
        // As many sums as registers hold beside weights and values.
        let most = if R > 3 { 2 } else { 4 } * S::REGISTERS / 16;
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

impl<T: Stored, const R: usize> Gather<'_, T, R> {
    /// `C` vectors of columns.
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
        for token in self.seen.clone() {
            if let Some(next) = &self.next {
                next.prefetch(simd, token, column, column + C * S::LANES);
            }
            let value = self.values.at(token).wrapping_add(column);
            // What there is less of is held in registers while the other streams by.
            if R <= C {
                let mut weights = [simd.splat(0.0); R];
                for (r, weight) in weights.iter_mut().enumerate() {
                    // SAFETY: the caller's promise for `weights`.
                    *weight = simd.splat(unsafe { *self.weights.add(r * TILE + token) });
                }
                for c in 0..C {
                    // SAFETY: the caller's promise for this token's value.
                    let v = unsafe { T::load(simd, value.add(c * S::LANES)) };
                    for r in 0..R {
                        sums[r][c] = simd.mul_add(weights[r], v, sums[r][c]);
                    }
                }
            } else {
                let mut v = [simd.splat(0.0); C];
                for (c, v) in v.iter_mut().enumerate() {
                    // SAFETY: the caller's promise for this token's value.
                    *v = unsafe { T::load(simd, value.add(c * S::LANES)) };
                }
                for (r, sums) in sums.iter_mut().enumerate() {
                    // SAFETY: the caller's promise for `weights`.
                    let weight = simd.splat(unsafe { *self.weights.add(r * TILE + token) });
                    for c in 0..C {
                        sums[c] = simd.mul_add(weight, v[c], sums[c]);
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
}

/// Widens a tile's tokens into `into` `[TILE, dim rounded up to whole vectors]`, whose padding
/// stays as it is.
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
                    *x = from.add(d).read_unaligned().to_f32();
                }
            }
        }
    }
}
