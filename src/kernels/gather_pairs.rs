//! Weights against values, two tokens at once.

#![expect(clippy::needless_range_loop, reason = "zip stays a call where a profile has no LTO at all")]

use super::columns::{Columns, at_once, load_rows, store_rows};
use super::gather::Gather;
use super::pairs::Pairs;
use super::simd::Job;
use super::tokens::{CACHE_LINE, prefetch};
use super::words::Words;

/// A [`Gather`] of values that become words of two bfloat16, with weights that are words of two tokens: the
/// tokens go two by two, from even numbers on. `acc` is zipped.
///
/// # Safety (of running it)
/// - What [`Gather`] asks for; `dim` is a multiple of `2 * LANES`, or of twice that where words are zipped.
/// - The weight of a token that is not of `seen`, but in a word with one that is, is finite.
pub(super) struct TwoByTwo<'a, T, const R: usize, const N: usize>(pub(super) Gather<'a, T, R, N>);

impl<S: Pairs, T: Words, const R: usize, const N: usize> Job<S> for TwoByTwo<'_, T, R, N> {
    type Output = ();

    #[inline(always)]
    unsafe fn run(self, simd: S) {
        // SAFETY: the caller's promise; these are the vectors of `dim`.
        unsafe { self.each(simd, 0..self.0.dim / S::LANES) }
    }
}

impl<S: Pairs, T: Words, const R: usize, const N: usize> Columns<S> for TwoByTwo<'_, T, R, N> {
    const MOST: usize = at_once::<S>(R);

    /// Two vectors at least, as there is an even number: a vector of words becomes two of columns.
    #[inline(always)]
    unsafe fn columns<const C: usize>(&self, simd: S, first: usize) {
        let Gather { weights, values, next, seen, dim, acc } = &self.0;
        let zero = simd.splat(0.0);
        let acc = acc.wrapping_add(first * S::LANES);
        // SAFETY: the caller's promise for `acc`.
        let mut sums = unsafe { load_rows::<S, R, C>(simd, acc, *dim) };
        // Vectors of words, and the elements of one.
        let (words, elements) = (C / 2, S::LANES * T::PER_WORD);
        let column = first / 2 * elements;
        // Half of what is loaded at once.
        let half = words == 1 && T::ZIPPED;
        // Groups of rows that pass by take turns with the lines.
        let next = next.as_ref().and_then(|next| next.at(column * size_of::<T>(), CACHE_LINE));
        for pair in seen.start / 2..seen.end.div_ceil(2) {
            let tokens = [2 * pair, 2 * pair + 1];
            if let Some(next) = next {
                for token in tokens {
                    prefetch(
                        simd,
                        next.at(token),
                        column * size_of::<T>(),
                        words * elements * size_of::<T>(),
                    );
                }
            }
            // One token after the other, as they lie. What is not seen is not read: it may be no number.
            let mut loaded = [[zero; C]; 2];
            for (token, loaded) in tokens.into_iter().zip(&mut loaded) {
                if seen.contains(&token) {
                    let value = values.at(token).wrapping_add(column);
                    // SAFETY: the caller's promise for this token's value.
                    unsafe {
                        if half {
                            let second = first / 2 % 2;
                            loaded[0] = T::two(simd, value.wrapping_sub(second * elements))[second];
                        } else if words == 1 {
                            loaded[0] = T::one(simd, value);
                        }
                        for i in (0..words / 2 * 2).step_by(2) {
                            [loaded[i], loaded[i + 1]] = T::two(simd, value.wrapping_add(i * elements));
                        }
                    }
                }
            }
            let mut v = [zero; C];
            for i in 0..words {
                [v[2 * i], v[2 * i + 1]] = simd.zip(loaded[0][i], loaded[1][i]);
            }
            for r in 0..R {
                // SAFETY: the caller's promise for `weights`.
                let weight = simd.splat(unsafe { *weights.add(r * N + pair) });
                for c in 0..C {
                    sums[r][c] = simd.dot(weight, v[c], sums[r][c]);
                }
            }
        }
        // SAFETY: the caller's promise for `acc`.
        unsafe { store_rows(simd, sums, acc, *dim) }
    }
}
