//! Rows of queries against keys as they lie: for a few rows, which is what decoding has.

#![expect(clippy::needless_range_loop, reason = "zip stays a call where a profile has no LTO at all")]

use std::marker::PhantomData;
use std::ops::Range;

use super::method::Method;
use super::simd::{Job, Simd};
use super::tokens::{Next, Tokens, prefetch};

/// `scores[r][k] = Σ query[r][d] · key[k][d]` for `R` rows and (at least) the keys `seen`, of some in a
/// tile.
///
/// Whatever `R`, the lanes of one score are summed in the same order, so a score's bits don't
/// depend on the rows it is computed with.
///
/// # Safety (of running it)
/// - `query` is valid for reads of `R` rows of `words`, a multiple of `LANES`; `scores` for writes of
///   as many as there are keys in each of `R` rows, a tile apart.
/// - There are 8 keys at least, and all are valid for reads of `words`.
pub(super) struct Score<'a, M, T, const R: usize, const N: usize> {
    /// `[words / LANES, R, LANES]`, in the method's order.
    pub(super) query: *const f32,
    pub(super) keys: Tokens<'a, T>,
    /// What will be asked for after this.
    pub(super) next: Option<Next<'a, T>>,
    pub(super) seen: Range<usize>,
    pub(super) words: usize,
    /// `R` rows of a tile of `N`.
    pub(super) scores: *mut f32,
    pub(super) method: PhantomData<M>,
}

impl<S: Simd, M: Method<S, Element = T>, T, const R: usize, const N: usize> Job<S> for Score<'_, M, T, R, N> {
    type Output = ();

    #[inline(always)]
    unsafe fn run(self, simd: S) {
        // All rows at once, so that a key is widened once, and as many keys as registers hold sums for
        // beside a vector of each, a query's and constants. With registers enough, no more than it takes
        // for sums not to wait for their last addition, as memory is best asked for one key at a time;
        // but single bytes wait for arithmetic. Sixteen vectors of sums are best summed up together.
        let bytes = M::STORED == 1;
        let (summed, at_once) = match (R, S::REGISTERS) {
            // Key by key, in the order in which they lie: then the processor itself asks memory for what
            // follows, too.
            (1, _) => (8, if size_of::<T>() > 1 { 1 } else { 8 }),
            (2, _) => (4, 4),
            (_, 32..) if bytes && R <= 6 || M::COUNTS && R <= 4 => (4, 4),
            (3 | 4, 32..) => (4, 2),
            (3, _) => (3, 3),
            _ => (2, 2),
        };
        for key in (self.seen.start..self.seen.end).step_by(summed) {
            // SAFETY: the caller's promise.
            unsafe {
                match (summed, at_once) {
                    (2, _) => self.dots::<S, 2, 2>(simd, key),
                    (3, _) => self.dots::<S, 3, 3>(simd, key),
                    (4, 2) => self.dots::<S, 4, 2>(simd, key),
                    (4, _) => self.dots::<S, 4, 4>(simd, key),
                    (_, 1) => self.dots::<S, 8, 1>(simd, key),
                    _ => self.dots::<S, 8, 8>(simd, key),
                }
            }
        }
    }
}

impl<M, T, const R: usize, const N: usize> Score<'_, M, T, R, N> {
    /// All rows against `K` keys from `first` on, or against the last, `P` at once.
    ///
    /// # Safety
    /// - As for the job.
    #[inline(always)]
    unsafe fn dots<S: Simd, const K: usize, const P: usize>(&self, simd: S, first: usize)
    where
        M: Method<S, Element = T>,
    {
        let first = first.min(self.keys.offsets.len() - K);
        let keys = self.keys.at_each::<K>(first);
        let mut sums = [[simd.splat(0.0); K]; R];
        let next = self.next.as_ref().and_then(|next| next.at(first, K));
        let next = next.map(|next| next.at_each::<K>(first));
        for i in (0..K).step_by(P) {
            let mut some = [[simd.splat(0.0); P]; R];
            let (keys, next) = (part(&keys, i), next.map(|next| part(&next, i)));
            // SAFETY: the caller's promise.
            unsafe {
                // Looked at once, for all words of these keys: inner loops have no branch.
                if M::all_plain::<P>(simd, keys, self.words) {
                    self.products::<S, P, false>(simd, keys, next, &mut some);
                } else {
                    self.products::<S, P, true>(simd, keys, next, &mut some);
                }
            }
            for r in 0..R {
                for p in 0..P {
                    sums[r][i + p] = some[r][p];
                }
            }
        }
        for sum in sums.as_flattened_mut() {
            *sum = M::to_floats(simd, *sum);
        }
        let mut dots = [[0.0; K]; R];
        let (flat, into) = (sums.as_flattened(), dots.as_flattened_mut());
        let mut i = 0;
        while i < R * K {
            if i + 16 <= R * K {
                let sixteen = std::array::from_fn(|j| flat[i + j]);
                let mut sums = [0.0; 16];
                // SAFETY: room for sixteen.
                unsafe { simd.sum_sixteen(sums.as_mut_ptr(), sixteen) }
                into[i..i + 16].copy_from_slice(&sums);
                i += 16;
            } else {
                let last = R * K - 1;
                let four =
                    [flat[i], flat[(i + 1).min(last)], flat[(i + 2).min(last)], flat[(i + 3).min(last)]];
                let mut sums = [0.0; 4];
                // SAFETY: room for four.
                unsafe { simd.sum_four(sums.as_mut_ptr(), four) }
                let count = (R * K - i).min(4);
                into[i..i + count].copy_from_slice(&sums[..count]);
                i += 4;
            }
        }
        for (r, &dots) in dots.iter().enumerate() {
            // SAFETY: the caller's promise for `scores`; `first + K` keys are there.
            unsafe { self.scores.add(r * N + first).cast::<[f32; K]>().write_unaligned(dots) }
        }
    }

    /// Adds the products of all rows and `K` keys, in all their words; where not `ANY`, these are plain.
    ///
    /// # Safety
    /// - As for the job.
    #[inline(always)]
    unsafe fn products<S: Simd, const K: usize, const ANY: bool>(
        &self,
        simd: S,
        keys: [*const T; K],
        next: Option<[*const T; K]>,
        sums: &mut [[S::F32; K]; R],
    ) where
        M: Method<S, Element = T>,
    {
        let mut d = 0;
        // SAFETY: so many words are left; the caller's promise for keys and rows.
        unsafe {
            while d + M::at_once() * S::LANES <= self.words {
                // Evenly between loads: what is asked for in one burst takes the places in which loads
                // wait for the nearest cache, and sums wait with them.
                Self::ask(simd, next, d, M::at_once());
                if M::at_once() == 4 {
                    self.add::<S, K, 4, ANY>(simd, d, 0, keys, sums);
                    self.add::<S, K, 4, ANY>(simd, d, 1, keys, sums);
                    self.add::<S, K, 4, ANY>(simd, d, 2, keys, sums);
                    self.add::<S, K, 4, ANY>(simd, d, 3, keys, sums);
                } else {
                    self.add::<S, K, 2, ANY>(simd, d, 0, keys, sums);
                    self.add::<S, K, 2, ANY>(simd, d, 1, keys, sums);
                }
                d += M::at_once() * S::LANES;
            }
            for _ in 1..M::at_once() {
                if d < self.words {
                    Self::ask(simd, next, d, 1);
                    self.add::<S, K, 1, true>(simd, d, 0, keys, sums);
                    d += S::LANES;
                }
            }
        }
    }

    /// Asks for so many vectors of the next keys' words from `d` on.
    #[inline(always)]
    fn ask<S: Simd, const K: usize>(simd: S, next: Option<[*const T; K]>, d: usize, vectors: usize)
    where
        M: Method<S, Element = T>,
    {
        if let Some(next) = next {
            for i in 0..K {
                prefetch(simd, next[i], d * M::STORED, vectors * S::LANES * M::STORED);
            }
        }
    }

    /// Of `C` vectors from `d` on, number `c` of each row times that of each key.
    ///
    /// # Safety
    /// - As for the job; `d + C * LANES <= words`.
    #[inline(always)]
    unsafe fn add<S: Simd, const K: usize, const C: usize, const ANY: bool>(
        &self,
        simd: S,
        d: usize,
        c: usize,
        keys: [*const T; K],
        sums: &mut [[S::F32; K]; R],
    ) where
        M: Method<S, Element = T>,
    {
        let query = self.query.wrapping_add((d + c * S::LANES) * R);
        // What there is less of is held in registers while the other streams by.
        if R < K {
            let mut q = [simd.splat(0.0); R];
            for r in 0..R {
                // SAFETY: the caller's promise for rows.
                q[r] = unsafe { simd.load(query.add(r * S::LANES)) };
            }
            for i in 0..K {
                // SAFETY: the caller's promise for keys.
                let k = unsafe { M::load::<C, ANY>(simd, keys[i], d, c) };
                for r in 0..R {
                    sums[r][i] = M::multiply_add(simd, q[r], k, sums[r][i]);
                }
            }
        } else {
            let mut k = [simd.splat(0.0); K];
            for i in 0..K {
                // SAFETY: the caller's promise for keys.
                k[i] = unsafe { M::load::<C, ANY>(simd, keys[i], d, c) };
            }
            for r in 0..R {
                // SAFETY: the caller's promise for rows.
                let q = unsafe { simd.load(query.add(r * S::LANES)) };
                for i in 0..K {
                    sums[r][i] = M::multiply_add(simd, q, k[i], sums[r][i]);
                }
            }
        }
    }
}

/// `P` of `K` tokens, from number `first` on.
#[inline(always)]
fn part<T, const K: usize, const P: usize>(tokens: &[*const T; K], first: usize) -> [*const T; P] {
    *tokens[first..].first_chunk().expect("so many are left")
}
