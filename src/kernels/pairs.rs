//! Products of bfloat16 that are added in pairs.

use half::bf16;

use super::integers::Integers;
use super::simd::MOST_LANES;

/// An instruction set that multiplies bfloat16 and adds the products in pairs, in float32.
///
/// A word is two neighbouring bfloat16 and moves like a float, the first in its lower half; a vector
/// holds [`LANES`](super::simd::Simd::LANES) of them. To these products, subnormal numbers are 0.
pub(super) trait Pairs: Integers {
    /// In each lane, `c` plus both products of a word of `a` and one of `b`.
    fn dot(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32;
    /// Loads `2 * LANES` bytes, eight to the first half of every sixteen of a vector; the second halves are 0.
    ///
    /// # Safety
    /// - `from` is valid for reads of `2 * LANES` bytes; any alignment.
    unsafe fn load_eights(self, from: *const u8) -> Self::F32;
    /// The signed bytes of a vector as bfloat16, two to a word: of every eight words, the first four in the
    /// first vector.
    fn words_of_i8(self, bytes: Self::F32) -> [Self::F32; 2];
    /// The same of bytes that are [`F8E4M3`](crate::dtype::F8E4M3), each 2^-8 of what it stands for, as
    /// [`load_f8`](super::simd::Simd::load_f8) has them.
    fn words_of_f8(self, bytes: Self::F32) -> [Self::F32; 2];
    /// Each word's number `which`, 0 or 1, and 0 in place of the other.
    fn only(self, words: Self::F32, which: usize) -> Self::F32;
    /// Rounds and stores `LANES` bfloat16.
    ///
    /// # Safety
    /// - `to` is valid for writes of `LANES` elements; any alignment.
    unsafe fn store_bf16(self, to: *mut bf16, a: Self::F32);
}

/// Brings words into the order in which two vectors of them hold bytes that were widened.
pub(super) fn zip_words(row: &mut [f32], lanes: usize) {
    let mut zipped = [0.0; 2 * MOST_LANES];
    for block in row.chunks_exact_mut(2 * lanes) {
        for (i, eight) in block.as_chunks::<8>().0.iter().enumerate() {
            for (vector, four) in eight.as_chunks::<4>().0.iter().enumerate() {
                zipped[vector * lanes + 4 * i..][..4].copy_from_slice(four);
            }
        }
        block.copy_from_slice(&zipped[..2 * lanes]);
    }
}

/// Brings sums over zipped values into the order of their elements: the way back of [`zip`](Integers::zip),
/// which makes 2 vectors, or of zipping what bytes became, 4.
pub(super) fn unzip(row: &mut [f32], lanes: usize, vectors: usize) {
    let mut joined = [0.0; 4 * MOST_LANES];
    for block in row.chunks_exact_mut(vectors * lanes) {
        for (vector, fours) in block.chunks_exact(lanes).enumerate() {
            for (i, four) in fours.as_chunks::<4>().0.iter().enumerate() {
                joined[4 * (i * vectors + vector)..][..4].copy_from_slice(four);
            }
        }
        block.copy_from_slice(&joined[..vectors * lanes]);
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use half::bf16;

    use super::super::isa::{Isa, Level, tested};
    use super::super::simd::MOST_LANES;
    use super::super::simd::tests::lanes;
    use super::super::words::Words;
    use super::{Pairs, unzip, zip_words};
    use crate::dtype::F8E4M3;

    fn loaded<S: Pairs>(simd: S, elements: &[bf16]) -> S::F32 {
        assert_eq!(elements.len(), 2 * S::LANES);
        // SAFETY: `LANES` words are there; any bits are floats.
        unsafe { simd.load(elements.as_ptr().cast()) }
    }

    /// The two elements of each word.
    fn elements<S: Pairs>(simd: S, words: S::F32) -> Vec<[u16; 2]> {
        let bits = lanes(simd, words).into_iter().map(f32::to_bits);
        bits.map(|word| [word as u16, (word >> 16) as u16]).collect()
    }

    fn rounded<S: Pairs>(simd: S, x: &[f32]) -> Vec<u16> {
        let mut stored = vec![bf16::NAN; S::LANES];
        // SAFETY: so many numbers are there, and room for them.
        unsafe { simd.store_bf16(stored.as_mut_ptr(), simd.load(x.as_ptr())) };
        stored.into_iter().map(bf16::to_bits).collect()
    }

    /// For comparing bit by bit.
    fn bits(x: &[f32]) -> Vec<u32> {
        x.iter().map(|x| x.to_bits()).collect()
    }

    /// Each method against the plainest reading of its description.
    fn check<S: Pairs>(simd: S) {
        let n = 2 * S::LANES;
        // Where an element stood, and in which vector.
        let numbered =
            |from: usize| -> Vec<bf16> { (0..n).map(|i| bf16::from_bits((from + i) as u16)).collect() };
        let (a, b) = (loaded(simd, &numbered(0)), loaded(simd, &numbered(100)));
        let zipped = simd.zip(a, b).map(|words| elements(simd, words));
        // Of every eight, the first four in the first vector.
        for (vector, words) in zipped.iter().enumerate() {
            for (i, &[first, second]) in words.iter().enumerate() {
                let at = (i / 4 * 8 + vector * 4 + i % 4) as u16;
                assert_eq!([first, second], [at, 100 + at], "word {i} of vector {vector}");
            }
        }
        let mut row: Vec<f32> = zipped.iter().flatten().map(|word| f32::from(word[0])).collect();
        row.extend_from_within(..);
        unzip(&mut row, S::LANES, 2);
        let in_order: Vec<f32> = (0..n as u16).chain(0..n as u16).map(f32::from).collect();
        assert_eq!(bits(&row), bits(&in_order));

        for (word, [first, second]) in elements(simd, a).into_iter().enumerate() {
            assert_eq!(elements(simd, simd.only(a, 0))[word], [first, 0]);
            assert_eq!(elements(simd, simd.only(a, 1))[word], [0, second]);
        }

        // Integers whose products and sums are exact.
        let factor = |i: usize, by: usize| bf16::from_f32((i * by % 37) as f32 - 18.0);
        let of = |by: usize| (0..n).map(|i| factor(i, by)).collect::<Vec<_>>();
        let (a, b) = (of(5), of(11));
        let plain = a
            .as_chunks::<2>()
            .0
            .iter()
            .zip(b.as_chunks::<2>().0)
            .enumerate()
            .map(|(i, (a, b))| i as f32 + a[0].to_f32() * b[0].to_f32() + a[1].to_f32() * b[1].to_f32());
        let got = lanes(simd, simd.dot(loaded(simd, &a), loaded(simd, &b), simd.lane_numbers()));
        assert_eq!(bits(&got), bits(&plain.collect::<Vec<_>>()));
        // Products have more bits than bfloat16, and none is lost: 255² = 65025.
        let all = |x: f32| loaded(simd, &vec![bf16::from_f32(x); n]);
        let got = lanes(simd, simd.dot(all(255.0), all(255.0), simd.splat(0.5)));
        assert_eq!(bits(&got), bits(&vec![130_050.5; S::LANES]));
        // Subnormal numbers are 0, to either factor and to the sum.
        let tiny = f32::from_bits(0x0001_0000);
        for (a, b, c) in [(tiny, 1e38, 0.0), (1e38, tiny, 0.0), (1e-20, 1e-20, 0.0), (0.0, 0.0, tiny)] {
            let got = lanes(simd, simd.dot(all(a), all(b), simd.splat(c)));
            assert!(got.iter().all(|x| x.to_bits() << 1 == 0), "{a:e} · {b:e} + {c:e}: {got:?}");
        }

        // To nearest, ties to even, as elsewhere.
        let mut state = 1_u32;
        for _ in 0..2000 {
            let x: Vec<f32> = (0..MOST_LANES)
                .map(|_| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    // Every other one lies in the middle between two.
                    f32::from_bits(if state & 1 << 20 == 0 { state } else { state & !0xFFFF | 0x8000 })
                })
                .map(|x| if x.is_normal() { x } else { 1.0 })
                .collect();
            let want: Vec<u16> = x[..S::LANES].iter().map(|&x| bf16::from_f32(x).to_bits()).collect();
            assert_eq!(rounded(simd, &x), want, "{x:?}");
        }
        let weights: Vec<f32> = [0.0, 1.0, f32::MIN_POSITIVE, -0.0].repeat(MOST_LANES / 4);
        let want: Vec<u16> = weights[..S::LANES].iter().map(|&x| bf16::from_f32(x).to_bits()).collect();
        assert_eq!(rounded(simd, &weights), want);
        let subnormal = rounded(simd, &[f32::MIN_POSITIVE / 2.0; MOST_LANES]);
        assert_eq!(subnormal, vec![0; S::LANES]);
    }

    /// All codes of eight bits, in order and as two vectors have them.
    fn check_bytes<S: Pairs, T: Words>(simd: S, all: &[T]) {
        for codes in all.chunks_exact(4 * S::LANES) {
            let want: Vec<[u16; 2]> = codes
                .as_chunks::<2>()
                .0
                .iter()
                .map(|pair| pair.map(|x| bf16::from_f32(x.to_f32() / T::UNIT).to_bits()))
                .collect();
            // SAFETY: so many are there.
            let (first, two) = unsafe { (T::one(simd, codes.as_ptr()), T::two(simd, codes.as_ptr())) };
            assert_eq!(elements(simd, first), want[..S::LANES], "in order");
            let mut numbers: Vec<f32> = (0..want.len() as u16).map(f32::from).collect();
            zip_words(&mut numbers, S::LANES);
            let zipped: Vec<_> = numbers.iter().map(|&i| want[i as usize]).collect();
            assert_eq!(two.map(|words| elements(simd, words)).concat(), zipped);
            // Tokens of bytes, zipped, and back.
            let columns = two.map(|words| simd.zip(words, words).map(|words| elements(simd, words)));
            let mut row: Vec<f32> =
                columns.iter().flatten().flatten().map(|&[x, _]| bf16::from_bits(x).to_f32()).collect();
            unzip(&mut row, S::LANES, 4);
            let in_order: Vec<f32> = codes.iter().map(|x| x.to_f32() / T::UNIT).collect();
            assert_eq!(bits(&row), bits(&in_order));
        }
    }

    #[test]
    fn pairs_do_what_the_trait_says() {
        if !Isa::Avx512Bf16.is_available() {
            println!("SKIPPED: this CPU lacks {}", Isa::Avx512Bf16);
        }
        for level in tested() {
            if let Level::Avx512Bf16(simd) = level {
                check(simd);
                check_bytes(simd, &(i8::MIN..=i8::MAX).collect::<Vec<_>>());
                // The last code of each sign is NaN's.
                let codes = (0..=255).map(|bits| F8E4M3(if bits & 0x7F == 0x7F { 0 } else { bits }));
                check_bytes(simd, &codes.collect::<Vec<_>>());
            }
        }
    }
}
