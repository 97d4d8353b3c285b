//! Weights against values, two tokens at once.

#![expect(clippy::needless_range_loop, reason = "zip stays a call where a profile has no LTO at all")]

use super::gather::Gather;
use super::pairs::Pairs;
use super::simd::Job;
use super::tokens::{CACHE_LINE, TILE, prefetch};

/// A [`Gather`] of values that are words of two bfloat16, with weights that are words of two tokens: the
/// tokens go two by two, from even numbers on. `dim` counts columns, and `acc` is zipped.
///
/// # Safety (of running it)
/// - What [`Gather`] asks for; `dim` is a multiple of `2 * LANES`.
/// - The weight of a token that is not of `seen`, but in a word with one that is, is finite.
pub(super) struct TwoByTwo<'a, const R: usize>(pub(super) Gather<'a, f32, R>);

impl<S: Pairs, const R: usize> Job<S> for TwoByTwo<'_, R> {
    type Output = ();

    #[inline(always)]
    unsafe fn run(self, simd: S) {
        let blocks = self.0.dim / (2 * S::LANES);
        // As many sums as registers hold beside weights and values.
        let most = if R <= 3 { 4 } else { 2 };
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

impl<const R: usize> TwoByTwo<'_, R> {
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
            let mut zipped = [[zero; 2]; B];
            for b in 0..B {
                // What is not seen is not read: it may be no number.
                let value = |token| {
                    let value = values.at(token).wrapping_add(word + b * S::LANES);
                    // SAFETY: the caller's promise for this token's value.
                    if seen.contains(&token) { unsafe { simd.load(value) } } else { zero }
                };
                zipped[b] = simd.zip(value(tokens[0]), value(tokens[1]));
            }
            for r in 0..R {
                // SAFETY: the caller's promise for `weights`.
                let weight = simd.splat(unsafe { *weights.add(r * TILE + pair) });
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
