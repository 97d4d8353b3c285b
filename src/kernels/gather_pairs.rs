//! Weights against values, two tokens at once.

#![expect(clippy::needless_range_loop, reason = "zip stays a call where a profile has no LTO at all")]

use std::marker::PhantomData;

use super::columns::{Columns, at_once, load_rows, store_rows};
use super::gather::Gather;
use super::method::Method;
use super::simd::{Job, Simd};
use super::tokens::{CACHE_LINE, prefetch};

/// A method whose words hold two elements.
pub(super) trait InTwos<S: Simd>: Method<S> {
    /// Whether words that are loaded together, in two vectors, are not one behind the other.
    const ZIPPED: bool;
    /// Words of one element of `a` and one of `b` each; of every eight, the first four in the first vector.
    fn zip(simd: S, a: S::F32, b: S::F32) -> [S::F32; 2];
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

impl<S: Simd, M: InTwos<S, Element = T>, T, const R: usize, const N: usize> Job<S>
    for TwoByTwo<'_, M, T, R, N>
{
    type Output = ();

    #[inline(always)]
    unsafe fn run(self, simd: S) {
        // SAFETY: the caller's promise; these are the vectors of `dim`.
        unsafe { self.each(simd, 0..self.gather.dim / S::LANES) }
    }
}

impl<S: Simd, M: InTwos<S, Element = T>, T, const R: usize, const N: usize> Columns<S>
    for TwoByTwo<'_, M, T, R, N>
{
    const MOST: usize = at_once::<S>(R);

    /// Two vectors at least, as there is an even number: a vector of words becomes two of columns.
    #[inline(always)]
    unsafe fn columns<const C: usize>(&self, simd: S, first: usize) {
        assert!(C.is_multiple_of(2), "two vectors at once");
        let Gather { weights, steps, values, next, seen, dim, acc } = &self.gather;
        let zero = simd.splat(0.0);
        let acc = acc.wrapping_add(first * S::LANES);
        let mut sums = [[zero; C]; R];
        if !M::COUNTS {
            // SAFETY: the caller's promise for `acc`.
            sums = unsafe { load_rows::<S, R, C>(simd, acc, *dim) };
        }
        // Vectors of words, and the first word.
        let (words, word) = (C / 2, first / 2 * S::LANES);
        // Groups of rows that pass by take turns with the lines.
        let next = next.as_ref().and_then(|next| next.at(word * M::STORED, CACHE_LINE));
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
                if seen.contains(&token) {
                    let value = values.at(token);
                    for i in 0..words {
                        // SAFETY: the caller's promise for this token's value. Half of what is zipped
                        // together begins where the whole does.
                        loaded[i] = unsafe {
                            match words {
                                1 if M::ZIPPED && first / 2 % 2 == 1 => {
                                    M::load::<2>(simd, value, word - S::LANES, 1)
                                }
                                1 if M::ZIPPED => M::load::<2>(simd, value, word, 0),
                                1 => M::load::<1>(simd, value, word, 0),
                                _ => M::load::<C>(simd, value, word, i),
                            }
                        };
                    }
                }
            }
            let mut v = [zero; C];
            for i in 0..words {
                [v[2 * i], v[2 * i + 1]] = M::zip(simd, loaded[0][i], loaded[1][i]);
            }
            for r in 0..R {
                // SAFETY: the caller's promise for `weights`.
                let weight = simd.splat(unsafe { *weights.add(r * N + pair) });
                for c in 0..C {
                    sums[r][c] = M::multiply_add(simd, weight, v[c], sums[r][c]);
                }
            }
        }
        if M::COUNTS {
            // SAFETY: the caller's promise for `acc`.
            let before = unsafe { load_rows::<S, R, C>(simd, acc, *dim) };
            for r in 0..R {
                let step = simd.splat(steps[r]);
                for c in 0..C {
                    sums[r][c] = simd.mul_add(M::to_floats(simd, sums[r][c]), step, before[r][c]);
                }
            }
        }
        // SAFETY: the caller's promise for `acc`.
        unsafe { store_rows(simd, sums, acc, *dim) }
    }
}
