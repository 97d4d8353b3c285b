//! Weights against values.

#![expect(clippy::needless_range_loop, reason = "zip stays a call where a profile has no LTO at all")]

use std::ops::Range;

use super::columns::{Columns, at_once, load_rows, store_rows};
use super::simd::{Job, Simd};
use super::stored::{Stored, load_dealt};
use super::tokens::{CACHE_LINE, Next, Tokens, prefetch};

/// `acc[r][c] += Σ weights[r][k] · value[k][c]` for `R` rows, all columns and the tokens `seen`, of
/// some in a tile, in ascending order whatever `R`; columns are dealt as [`T`'s neighbours](Stored::vectors).
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
        let vectors = T::vectors::<S>();
        // SAFETY: the caller's promise.
        unsafe {
            if C >= vectors {
                self.sums::<S, C, 0>(simd, first);
            // The first two are known to the compiler, which leaves the rest out.
            } else if C == 1 || at_once::<S>(R) >= vectors || first >= self.dim / S::LANES / vectors * vectors
            {
                self.sums::<S, C, STRAIGHT>(simd, first);
            } else if first.is_multiple_of(vectors) {
                self.sums::<S, C, 0>(simd, first);
            } else {
                self.sums::<S, C, 2>(simd, first);
            }
        }
    }
}

/// Vectors that neighbours are not dealt among.
const STRAIGHT: usize = usize::MAX;
/// Tokens that are looked at together for elements that take longer to widen.
const TOGETHER: usize = 8;

impl<T: Stored, const R: usize, const N: usize> Gather<'_, T, R, N> {
    /// Adds to the sums of `C` vectors of columns from number `first` on, which is number `which` among those that
    /// neighbours are dealt among, or [`STRAIGHT`].
    ///
    /// # Safety
    /// - As for the job; it has these vectors, and those that neighbours are dealt among.
    #[inline(always)]
    unsafe fn sums<S: Simd, const C: usize, const WHICH: usize>(&self, simd: S, first: usize) {
        let column = first * S::LANES;
        let acc = self.acc.wrapping_add(column);
        // SAFETY: the caller's promise for `acc`.
        let mut sums = unsafe { load_rows::<S, R, C>(simd, acc, self.dim) };
        // SAFETY: the caller's promise.
        unsafe {
            if WHICH == STRAIGHT || !T::can_be_slow::<S>() {
                self.add::<S, C, WHICH, true>(simd, first, self.seen.clone(), &mut sums);
            } else {
                // The vectors of these columns, and others among which neighbours are dealt together with theirs.
                let from = column - WHICH * S::LANES;
                let count = C.next_multiple_of(T::vectors::<S>()) * S::LANES;
                let mut token = self.seen.start;
                while token < self.seen.end {
                    let end = self.seen.end.min(token + TOGETHER);
                    let plain = end - token == TOGETHER && {
                        let values = self.values.at_each::<TOGETHER>(token);
                        T::all_plain(simd, values.map(|value| value.wrapping_add(from)), count)
                    };
                    if plain {
                        self.add::<S, C, WHICH, false>(simd, first, token..token + TOGETHER, &mut sums);
                    } else {
                        self.add::<S, C, WHICH, true>(simd, first, token..end, &mut sums);
                    }
                    token = end;
                }
            }
        }
        // SAFETY: the caller's promise for `acc`.
        unsafe { store_rows(simd, sums, acc, self.dim) }
    }

    /// Adds the weighted values of some tokens to the sums of `C` vectors of columns, as `sums` has them; where not
    /// `ANY`, all elements are plain.
    ///
    /// # Safety
    /// - As for `sums`; these tokens are seen.
    #[inline(always)]
    unsafe fn add<S: Simd, const C: usize, const WHICH: usize, const ANY: bool>(
        &self,
        simd: S,
        first: usize,
        tokens: Range<usize>,
        sums: &mut [[S::F32; C]; R],
    ) {
        let column = first * S::LANES;
        // Groups of rows that pass by take turns with the lines.
        let next = self.next.as_ref().and_then(|next| next.at(column * size_of::<T>(), CACHE_LINE));
        for token in tokens {
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
                    let v = unsafe { load::<S, T, WHICH, ANY>(simd, value, c) };
                    for r in 0..R {
                        sums[r][c] = simd.mul_add(weights[r], v, sums[r][c]);
                    }
                }
            } else {
                let mut v = [simd.splat(0.0); C];
                for c in 0..C {
                    // SAFETY: the caller's promise for this token's value.
                    v[c] = unsafe { load::<S, T, WHICH, ANY>(simd, value, c) };
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
    }
}

/// Vector `c` from one on that is number `which` among those that neighbours are dealt among, or [`STRAIGHT`].
///
/// # Safety
/// - As for [`Stored::load_dealt`], of those among which the vector is.
#[inline(always)]
unsafe fn load<S: Simd, T: Stored, const WHICH: usize, const ANY: bool>(
    simd: S,
    from: *const T,
    c: usize,
) -> S::F32 {
    // SAFETY: the caller's promise.
    unsafe {
        if WHICH == STRAIGHT {
            T::load(simd, from.add(c * S::LANES))
        } else {
            load_dealt::<S, T, ANY>(simd, from.sub(WHICH * S::LANES), WHICH + c)
        }
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
