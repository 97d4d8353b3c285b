//! Weights against values, two tokens at once.

#![expect(clippy::needless_range_loop, reason = "zip stays a call where a profile has no LTO at all")]

use std::marker::PhantomData;
use std::ops::Range;

use super::columns::{Columns, at_once, load_rows, store_rows};
use super::gather::Gather;
use super::integers::Integers;
use super::method::{FINER, Method};
use super::simd::Job;
use super::tokens::{CACHE_LINE, prefetch};

/// A method whose words hold two elements.
pub(super) trait InTwos<S: Integers>: Method<S> {
    /// Whether words that are loaded together, in two vectors, are not one behind the other.
    const ZIPPED: bool;
}

/// A [`Gather`] of values whose words hold two elements, with weights that are words of two tokens: the tokens
/// go two by two, from even numbers on. `acc` is zipped.
///
/// # Safety (of running it)
/// - What [`Gather`] asks for; `dim` is a multiple of `2 * LANES`, or of twice that where words are zipped.
/// - The weight of a token that is not of `seen`, but in a word with one that is, is finite.
pub(super) struct TwoByTwo<'a, M, T, const R: usize, const N: usize> {
    pub(super) gather: Gather<'a, T, R, N>,
    pub(super) method: PhantomData<M>,
}

impl<S: Integers, M: InTwos<S, Element = T>, T, const R: usize, const N: usize> Job<S>
    for TwoByTwo<'_, M, T, R, N>
{
    type Output = ();

    #[inline(always)]
    unsafe fn run(self, simd: S) {
        // SAFETY: the caller's promise; these are the vectors of `dim`.
        unsafe { self.each(simd, 0..self.gather.dim / S::LANES) }
    }
}

impl<S: Integers, M: InTwos<S, Element = T>, T, const R: usize, const N: usize> Columns<S>
    for TwoByTwo<'_, M, T, R, N>
{
    const MOST: usize = at_once::<S>(R);

    /// Two vectors at least, as there is an even number: a vector of words becomes two of columns.
    #[inline(always)]
    unsafe fn columns<const C: usize>(&self, simd: S, first: usize) {
        assert!(C.is_multiple_of(2), "two vectors at once");
        let Gather { steps, finer: with_finer, dim, acc, .. } = &self.gather;
        let acc = acc.wrapping_add(first * S::LANES);
        if !M::COUNTS {
            // SAFETY: the caller's promise for `acc`.
            return unsafe {
                let rows = load_rows::<S, R, C>(simd, acc, *dim);
                store_rows(simd, self.sums_of(simd, first, 0, rows), acc, *dim);
            };
        }
        // What is left of weights that were rounded to whole steps lies behind these, in finer ones.
        let parts = [(0, 1.0), (N / 2, FINER)];
        for &(part, finer) in &parts[..if *with_finer { 2 } else { 1 }] {
            // SAFETY: the caller's promise.
            unsafe {
                let sums = self.sums_of(simd, first, part, [[simd.splat(0.0); C]; R]);
                let mut rows = load_rows::<S, R, C>(simd, acc, *dim);
                for r in 0..R {
                    let step = simd.splat(steps[r] * finer);
                    for c in 0..C {
                        rows[r][c] = simd.mul_add(M::to_floats(simd, sums[r][c]), step, rows[r][c]);
                    }
                }
                store_rows(simd, rows, acc, *dim);
            }
        }
    }
}

impl<M, T, const R: usize, const N: usize> TwoByTwo<'_, M, T, R, N> {
    /// `sums` and the weighted values of `C` columns; weights are words from number `part` of each row on.
    ///
    /// # Safety
    /// - As for the job.
    #[inline(always)]
    unsafe fn sums_of<S: Integers, const C: usize>(
        &self,
        simd: S,
        first: usize,
        part: usize,
        sums: [[S::F32; C]; R],
    ) -> [[S::F32; C]; R]
    where
        M: InTwos<S, Element = T>,
    {
        let Range { start, end } = self.gather.seen;
        // SAFETY: the caller's promise.
        unsafe {
            // Mostly, where asking for each token would take a third of the instructions.
            if start == 0 && end == N {
                self.sums::<S, C, true>(simd, first, part, sums)
            } else {
                self.sums::<S, C, false>(simd, first, part, sums)
            }
        }
    }

    /// The same of a `WHOLE` tile or not.
    ///
    /// # Safety
    /// - As for the job.
    #[inline(always)]
    unsafe fn sums<S: Integers, const C: usize, const WHOLE: bool>(
        &self,
        simd: S,
        first: usize,
        part: usize,
        mut sums: [[S::F32; C]; R],
    ) -> [[S::F32; C]; R]
    where
        M: InTwos<S, Element = T>,
    {
        let Gather { weights, values, next, seen, .. } = &self.gather;
        let seen = if WHOLE { &(0..N) } else { seen };
        assert!(seen.end <= values.offsets.len(), "a place for each token");
        let zero = simd.splat(0.0);
        // Vectors of words, and the first word.
        let (words, word) = (C / 2, first / 2 * S::LANES);
        // Groups of rows that pass by take turns with the lines.
        let next = next.as_ref().filter(|_| part == 0);
        let next = next.and_then(|next| next.at(word * M::STORED, CACHE_LINE));
        for pair in seen.start / 2..seen.end.div_ceil(2) {
            let tokens = [2 * pair, 2 * pair + 1];
            if let Some(next) = next {
                for token in tokens {
                    prefetch(simd, next.at(token), word * M::STORED, words * S::LANES * M::STORED);
                }
            }
            // One token after the other, as they lie. What is not seen is not read: it may be no number.
            let mut loaded = [[zero; C]; 2];
            for (token, loaded) in tokens.into_iter().zip(&mut loaded) {
                if WHOLE || seen.contains(&token) {
                    let value = values.at(token);
                    for i in 0..words {
                        // SAFETY: the caller's promise for this token's value. Half of what is zipped
                        // together begins where the whole does.
                        loaded[i] = unsafe {
                            match words {
                                1 if M::ZIPPED && first / 2 % 2 == 1 => {
                                    M::load::<2, true>(simd, value, word - S::LANES, 1)
                                }
                                1 if M::ZIPPED => M::load::<2, true>(simd, value, word, 0),
                                1 => M::load::<1, true>(simd, value, word, 0),
                                _ => M::load::<C, true>(simd, value, word, i),
                            }
                        };
                    }
                }
            }
            let mut v = [zero; C];
            for i in 0..words {
                [v[2 * i], v[2 * i + 1]] = simd.zip(loaded[0][i], loaded[1][i]);
            }
            for r in 0..R {
                // SAFETY: the caller's promise for `weights`.
                let weight = simd.splat(unsafe { *weights.add(r * N + part + pair) });
                for c in 0..C {
                    sums[r][c] = M::multiply_add(simd, weight, v[c], sums[r][c]);
                }
            }
        }
        sums
    }
}
