//! Rows of queries against keys as they lie: for a few rows, which is what decoding has.

use std::ops::Range;

use super::simd::{Job, Simd, Stored};
use super::tokens::{Next, TILE, Tokens};

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
    /// `[dim / LANES, R, LANES]`, parted as `T` is.
    pub(super) query: *const f32,
    pub(super) keys: Tokens<'a, T>,
    /// What will be asked for after this.
    pub(super) next: Option<Next<'a, T>>,
    pub(super) seen: Range<usize>,
    pub(super) dim: usize,
    /// `[R, TILE]`.
    pub(super) scores: *mut f32,
}

impl<S: Simd, T: Stored, const R: usize> Job<S> for Score<'_, T, R> {
    type Output = ();

    #[inline(always)]
    unsafe fn run(self, simd: S) {
        for key in (self.seen.start / 4 * 4..self.seen.end.min(TILE)).step_by(4) {
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
        // The first rows ask, evenly between loads: what is asked for in one burst takes the places
        // in which loads wait for the nearest cache, and sums wait with them.
        let next = self.next.as_ref().filter(|_| row == 0).and_then(|next| next.at(first, 4));
        let mut d = 0;
        // SAFETY: so many elements are left; the caller's promise for keys and rows.
        unsafe {
            while d + 2 * S::LANES <= self.dim {
                if let Some(next) = next {
                    for token in first..first + 4 {
                        next.prefetch::<S, 2>(simd, token, d);
                    }
                }
                let even = [
                    T::load_even(simd, keys[0].add(d)),
                    T::load_even(simd, keys[1].add(d)),
                    T::load_even(simd, keys[2].add(d)),
                    T::load_even(simd, keys[3].add(d)),
                ];
                self.add(simd, row, d, even, &mut sums);
                let odd = [
                    T::load_odd(simd, keys[0].add(d)),
                    T::load_odd(simd, keys[1].add(d)),
                    T::load_odd(simd, keys[2].add(d)),
                    T::load_odd(simd, keys[3].add(d)),
                ];
                self.add(simd, row, d + S::LANES, odd, &mut sums);
                d += 2 * S::LANES;
            }
            if d < self.dim {
                let last = [
                    T::load(simd, keys[0].add(d)),
                    T::load(simd, keys[1].add(d)),
                    T::load(simd, keys[2].add(d)),
                    T::load(simd, keys[3].add(d)),
                ];
                self.add(simd, row, d, last, &mut sums);
            }
        }
        for (r, &sums) in sums.iter().enumerate() {
            // SAFETY: the caller's promise for `scores`.
            unsafe { simd.sum_four(self.scores.add((row + r) * TILE + first), sums) }
        }
    }

    /// One vector of each row, from `d` on, times one of each key.
    ///
    /// # Safety
    /// - As for the job; `row + N <= R`, `d + LANES <= dim`.
    #[inline(always)]
    unsafe fn add<S: Simd, const N: usize>(
        &self,
        simd: S,
        row: usize,
        d: usize,
        keys: [S::F32; 4],
        sums: &mut [[S::F32; 4]; N],
    ) {
        for (r, sums) in sums.iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            let q = unsafe { simd.load(self.query.add(d * R + (row + r) * S::LANES)) };
            for i in 0..4 {
                sums[i] = simd.mul_add(q, keys[i], sums[i]);
            }
        }
    }
}
