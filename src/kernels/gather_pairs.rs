//! Weights against values, two tokens at once.

#![expect(clippy::needless_range_loop, reason = "zip stays a call where a profile has no LTO at all")]

use half::bf16;

use super::columns::{Columns, at_once, load_rows, store_rows};
use super::gather::Gather;
use super::pairs::Pairs;
use super::simd::Job;
use super::tokens::{CACHE_LINE, prefetch};

/// A [`Gather`] of values that are words of two bfloat16, with weights that are words of two tokens: the
/// tokens go two by two, from even numbers on. `dim` counts columns, and `acc` is zipped.
///
/// # Safety (of running it)
/// - What [`Gather`] asks for; `dim` is a multiple of `2 * LANES`.
/// - The weight of a token that is not of `seen`, but in a word with one that is, is finite.
pub(super) struct TwoByTwo<'a, const R: usize, const N: usize>(pub(super) Gather<'a, f32, R, N>);

impl<S: Pairs, const R: usize, const N: usize> Job<S> for TwoByTwo<'_, R, N> {
    type Output = ();

    #[inline(always)]
    unsafe fn run(self, simd: S) {
        // SAFETY: the caller's promise; these are the vectors of `dim`.
        unsafe { self.each(simd, 0..self.0.dim / S::LANES) }
    }
}

impl<S: Pairs, const R: usize, const N: usize> Columns<S> for TwoByTwo<'_, R, N> {
    const MOST: usize = at_once::<S>(R);

    /// Two vectors at least, as there is an even number: a vector of words becomes two of columns.
    #[inline(always)]
    unsafe fn columns<const C: usize>(&self, simd: S, first: usize) {
        let Gather { weights, values, next, seen, dim, acc } = &self.0;
        let zero = simd.splat(0.0);
        let acc = acc.wrapping_add(first * S::LANES);
        // SAFETY: the caller's promise for `acc`.
        let mut sums = unsafe { load_rows::<S, R, C>(simd, acc, *dim) };
        let (words, word) = (C / 2, first / 2 * S::LANES);
        // Groups of rows that pass by take turns with the lines.
        let next = next.as_ref().and_then(|next| next.at(word * size_of::<f32>(), CACHE_LINE));
        for pair in seen.start / 2..seen.end.div_ceil(2) {
            let tokens = [2 * pair, 2 * pair + 1];
            if let Some(next) = next {
                for token in tokens {
                    prefetch::<S, bf16, C>(simd, next.at(token).cast(), word * size_of::<f32>());
                }
            }
            // One token after the other, as they lie. What is not seen is not read: it may be no number.
            let mut loaded = [[zero; C]; 2];
            for (token, loaded) in tokens.into_iter().zip(&mut loaded) {
                if seen.contains(&token) {
                    let value = values.at(token).wrapping_add(word);
                    for i in 0..words {
                        // SAFETY: the caller's promise for this token's value.
                        loaded[i] = unsafe { simd.load(value.wrapping_add(i * S::LANES)) };
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
