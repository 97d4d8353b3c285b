//! Products of 16-bit integers that are added in pairs.

use super::simd::Simd;

/// An instruction set that multiplies 16-bit integers and adds the products in pairs, in 32-bit integers.
///
/// A word is two neighbouring integers of 16 bits, or one of 32, and moves like a float; of two, the first
/// lies in its lower half. A vector holds [`LANES`](Simd::LANES) of them.
pub(super) trait Integers: Simd {
    /// Loads `2 * LANES` signed bytes as words of two.
    ///
    /// # Safety
    /// - `from` is valid for reads of so many bytes; any alignment.
    unsafe fn load_i16(self, from: *const i8) -> Self::F32;
    /// In each lane, `c` plus both products of a word of `a` and one of `b`; 32 bits are enough, which is up
    /// to the caller.
    fn dot_i16(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32;
    /// Words of one number of 16 bits of `a` and one of `b` each; of every eight, the first four in the first
    /// vector.
    fn zip(self, a: Self::F32, b: Self::F32) -> [Self::F32; 2];
    /// Integers of 32 bits as floats.
    fn to_floats(self, a: Self::F32) -> Self::F32;
    /// Rounds to the nearest and stores `LANES` integers of 16 bits, the largest and least in place of those
    /// that have more.
    ///
    /// # Safety
    /// - `to` is valid for writes of `LANES` elements; any alignment.
    unsafe fn store_i16(self, to: *mut i16, a: Self::F32);
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::super::isa::{Level, tested};
    use super::super::x86_64::{Avx512, VNNI};
    use super::Integers;

    fn words<S: Integers>(simd: S, a: S::F32) -> Vec<[i16; 2]> {
        let mut words = vec![[0_i16; 2]; S::LANES];
        // SAFETY: so many words.
        unsafe { simd.store(words.as_mut_ptr().cast(), a) }
        words
    }

    fn numbers<S: Integers>(simd: S, a: S::F32) -> Vec<f32> {
        let mut floats = vec![0.0; S::LANES];
        // SAFETY: so many floats.
        unsafe { simd.store(floats.as_mut_ptr(), simd.to_floats(a)) }
        floats
    }

    /// For comparing bit by bit.
    fn bits(x: &[f32]) -> Vec<u32> {
        x.iter().map(|x| (x + 0.0).to_bits()).collect()
    }

    /// Each method against the plainest reading of its description.
    fn check<S: Integers>(simd: S) {
        let n = 2 * S::LANES;
        let bytes: Vec<i8> = (i8::MIN..=i8::MAX).collect();
        for from in bytes.chunks_exact(n) {
            // SAFETY: so many are there.
            let loaded = words(simd, unsafe { simd.load_i16(from.as_ptr()) });
            assert_eq!(loaded.as_flattened(), from.iter().map(|&x| i16::from(x)).collect::<Vec<_>>());
        }
        let numbered: Vec<i8> = (0..n as i8).collect();
        let others: Vec<i8> = numbered.iter().map(|x| x + 50).collect();
        // SAFETY: so many are there.
        let [a, b] = [&numbered, &others].map(|from| unsafe { simd.load_i16(from.as_ptr()) });
        for (vector, zipped) in simd.zip(a, b).into_iter().enumerate() {
            for (i, word) in words(simd, zipped).into_iter().enumerate() {
                let at = (i / 4 * 8 + vector * 4 + i % 4) as i16;
                assert_eq!(word, [at, 50 + at], "word {i} of vector {vector}");
            }
        }
        // The largest products, of either sign, as often as 32 bits hold them.
        for (x, y) in [(i16::MAX, i8::MIN), (-i16::MAX, i8::MIN), (1, 2)] {
            let mut row = [[x; 2]; 16];
            row[1] = [x, -x];
            // SAFETY: a vector of words, and one of bytes.
            let (a, b) = unsafe { (simd.load(row.as_ptr().cast()), simd.load_i16([y; 32].as_ptr())) };
            let mut sums = simd.splat(0.0);
            for _ in 0..200 {
                sums = simd.dot_i16(a, b, sums);
            }
            let mut want = vec![400.0 * f32::from(x) * f32::from(y); S::LANES];
            want[1] = 0.0;
            assert_eq!(bits(&numbers(simd, sums)), bits(&want));
        }
        // To nearest, ties to even; what has more bits becomes the largest or least.
        let floats =
            [0.5, 1.5, -0.5, -2.5, 32767.0, -32767.0, 1e6, -1e6, 0.49, 7.0, 2.51, -3.0, 0.0, 1.0, 2.0, 3.0];
        let want = [0, 2, 0, -2, 32767, -32767, i16::MAX, i16::MIN, 0, 7, 3, -3, 0, 1, 2, 3];
        let mut stored = [77_i16; 17];
        // SAFETY: so many are there, and room for them.
        unsafe { simd.store_i16(stored.as_mut_ptr(), simd.load(floats.as_ptr())) }
        assert_eq!(stored[..S::LANES], want[..S::LANES]);
        assert_eq!(stored[S::LANES], 77, "nothing behind them");
    }

    #[test]
    fn integers_do_what_the_trait_says() {
        for level in tested() {
            match level {
                Level::Scalar(_) => {}
                Level::Avx2(simd) => check(simd),
                Level::Avx512(simd) => {
                    check(simd);
                    if let Some(simd) = Avx512::<{ VNNI }>::new() {
                        check(simd);
                    }
                }
                Level::Avx512Bf16(simd) => check(simd),
            }
        }
    }
}
