//! Weights against values, two tokens at once.

#![expect(clippy::needless_range_loop, reason = "zip stays a call where a profile has no LTO at all")]

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
        let blocks = self.0.dim / (2 * S::LANES);
        // As many sums as registers hold beside weights and values.
        let most = if R <= 3 {
            4
        } else if R <= 6 {
            2
        } else {
            1
        };
        let mut block = 0;
        while block < blocks {
            let mut count = most;
            while count > blocks - block {
                count /= 2;
            }
            // SAFETY: the caller's promise; columns stay below `dim`.
            unsafe {
                match count {
                    1 => self.blocks::<S, 1>(simd, block),
                    2 => self.blocks::<S, 2>(simd, block),
                    _ => self.blocks::<S, 4>(simd, block),
                }
            }
            block += count;
        }
    }
}

impl<const R: usize, const N: usize> TwoByTwo<'_, R, N> {
    /// `B` blocks of two vectors of columns.
    ///
    /// # Safety
    /// - As for the job; there are `first + B` blocks.
    #[inline(always)]
    unsafe fn blocks<S: Pairs, const B: usize>(&self, simd: S, first: usize) {
        let Gather { weights, values, next, seen, dim, acc } = &self.0;
        let zero = simd.splat(0.0);
        let at =
            |r: usize, b: usize, half: usize| acc.wrapping_add(r * dim + ((first + b) * 2 + half) * S::LANES);
        let mut sums = [[[zero; 2]; B]; R];
        for (r, sums) in sums.iter_mut().enumerate() {
            for (b, sums) in sums.iter_mut().enumerate() {
                for (half, sum) in sums.iter_mut().enumerate() {
                    // SAFETY: the caller's promise for `acc`.
                    *sum = unsafe { simd.load(at(r, b, half)) };
                }
            }
        }
        let word = first * S::LANES;
        // Groups of rows that pass by take turns with the lines.
        let next = next.as_ref().and_then(|next| next.at(word * size_of::<f32>(), CACHE_LINE));
        for pair in seen.start / 2..seen.end.div_ceil(2) {
            let tokens = [2 * pair, 2 * pair + 1];
            if let Some(next) = next {
                for token in tokens {
                    prefetch::<S, f32, B>(simd, next.at(token), word * size_of::<f32>());
                }
            }
            // One token after the other, as they lie. What is not seen is not read: it may be no number.
            let mut loaded = [[zero; B]; 2];
            for (token, loaded) in tokens.into_iter().zip(&mut loaded) {
                if seen.contains(&token) {
                    let value = values.at(token).wrapping_add(word);
                    for b in 0..B {
                        // SAFETY: the caller's promise for this token's value.
                        loaded[b] = unsafe { simd.load(value.wrapping_add(b * S::LANES)) };
                    }
                }
            }
            let mut zipped = [[zero; 2]; B];
            for b in 0..B {
                zipped[b] = simd.zip(loaded[0][b], loaded[1][b]);
            }
            for r in 0..R {
                // SAFETY: the caller's promise for `weights`.
                let weight = simd.splat(unsafe { *weights.add(r * N + pair) });
                for b in 0..B {
                    for half in 0..2 {
                        sums[r][b][half] = simd.dot(weight, zipped[b][half], sums[r][b][half]);
                    }
                }
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            for (b, sums) in sums.iter().enumerate() {
                for (half, &sum) in sums.iter().enumerate() {
                    // SAFETY: the caller's promise for `acc`.
                    unsafe { simd.store(at(r, b, half), sum) }
                }
            }
        }
    }
}
