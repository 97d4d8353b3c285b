//! AVX-512: products of integers in pairs, with VNNI or without.

use std::arch::asm;
use std::arch::x86_64::{
    __m512, __m512i, _mm256_loadu_si256, _mm256_storeu_si256, _mm512_add_epi32, _mm512_castps_si512,
    _mm512_castsi512_ps, _mm512_cvtepi8_epi16, _mm512_cvtepi32_ps, _mm512_cvtps_epi32,
    _mm512_cvtsepi32_epi16, _mm512_madd_epi16, _mm512_unpackhi_epi16, _mm512_unpacklo_epi16,
};

use super::super::integers::Integers;
use super::avx512::{Avx512, VNNI};

impl<const MORE: u8> Integers for Avx512<MORE> {
    #[inline(always)]
    unsafe fn load_i16(self, from: *const i8) -> __m512 {
        // SAFETY: the caller's promise; `self` proves the CPU features.
        unsafe { _mm512_castsi512_ps(_mm512_cvtepi8_epi16(_mm256_loadu_si256(from.cast()))) }
    }

    #[inline(always)]
    fn dot_i16(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: `self` proves that the CPU has the features.
        unsafe {
            let [a, b, c] = [a, b, c].map(|x| _mm512_castps_si512(x));
            _mm512_castsi512_ps(if MORE >= VNNI {
                dpwssd(c, a, b)
            } else {
                _mm512_add_epi32(c, _mm512_madd_epi16(a, b))
            })
        }
    }

    #[inline(always)]
    fn zip(self, a: __m512, b: __m512) -> [__m512; 2] {
        // SAFETY: `self` proves that the CPU has the features.
        unsafe {
            let (a, b) = (_mm512_castps_si512(a), _mm512_castps_si512(b));
            [
                _mm512_castsi512_ps(_mm512_unpacklo_epi16(a, b)),
                _mm512_castsi512_ps(_mm512_unpackhi_epi16(a, b)),
            ]
        }
    }

    #[inline(always)]
    fn to_floats(self, a: __m512) -> __m512 {
        // SAFETY: `self` proves that the CPU has the features.
        unsafe { _mm512_cvtepi32_ps(_mm512_castps_si512(a)) }
    }

    #[inline(always)]
    unsafe fn store_i16(self, to: *mut i16, a: __m512) {
        // SAFETY: the caller's promise; `self` proves the CPU features.
        unsafe { _mm256_storeu_si256(to.cast(), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(a))) }
    }
}

/// `c` plus both products of 16-bit integers in each lane. Of the intrinsic, the compiler makes a product and a
/// sum apart wherever it takes the sum to be waited for: two instructions.
///
/// # Safety
/// - The CPU has AVX-512 VNNI.
#[inline]
#[target_feature(enable = "avx512vnni,avx512f")]
unsafe fn dpwssd(mut c: __m512i, a: __m512i, b: __m512i) -> __m512i {
    // SAFETY: it changes nothing but `c`; the caller's promise for the instruction.
    unsafe {
        asm!(
            "vpdpwssd {c}, {a}, {b}",
            c = inout(zmm_reg) c,
            a = in(zmm_reg) a,
            b = in(zmm_reg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    c
}
