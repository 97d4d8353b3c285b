//! Products of bfloat16 that are added in pairs.

use half::bf16;

use super::simd::Simd;

/// An instruction set that multiplies bfloat16 and adds the products in pairs, in float32.
///
/// A word is two neighbouring bfloat16 and moves like a float, the first in its lower half; a vector
/// holds [`LANES`](Simd::LANES) of them. To these products, subnormal numbers are 0.
pub(super) trait Pairs: Simd {
    /// In each lane, `c` plus both products of a word of `a` and one of `b`.
    fn dot(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32;
    /// Words of one bfloat16 of `a` and one of `b` each; of every eight, the first four in the first
    /// vector.
    fn zip(self, a: Self::F32, b: Self::F32) -> [Self::F32; 2];
    /// Each word's number `which`, 0 or 1, and 0 in place of the other.
    fn only(self, words: Self::F32, which: usize) -> Self::F32;
    /// Rounds and stores `LANES` bfloat16.
    ///
    /// # Safety
    /// - `to` is valid for writes of `LANES` elements; any alignment.
    unsafe fn store_bf16(self, to: *mut bf16, a: Self::F32);
}

/// Brings sums over zipped values into the order of their elements: the way back of
/// [`zip`](Pairs::zip).
pub(super) fn unzip(row: &mut [f32], lanes: usize) {
    let mut joined = [0.0; 2 * super::simd::MOST_LANES];
    for block in row.chunks_exact_mut(2 * lanes) {
        let (first, second) = block.split_at(lanes);
        let fours = first.as_chunks::<4>().0.iter().zip(second.as_chunks::<4>().0);
        for (eight, (first, second)) in joined.as_chunks_mut::<8>().0.iter_mut().zip(fours) {
            eight[..4].copy_from_slice(first);
            eight[4..].copy_from_slice(second);
        }
        block.copy_from_slice(&joined[..2 * lanes]);
    }
}
