//! AVX-512 BF16: products of bfloat16 in pairs; and VBMI: bytes that become bfloat16 by a table.

use std::arch::x86_64::{
    __m256bh, __m256i, __m512, __m512bh, __m512i, _mm256_storeu_si256, _mm512_abs_epi8, _mm512_and_si512,
    _mm512_castps_si512, _mm512_castsi512_ps, _mm512_cmpeq_epi8_mask, _mm512_cvtneps_pbh, _mm512_dpbf16_ps,
    _mm512_load_si512, _mm512_mask_mov_epi8, _mm512_maskz_expandloadu_epi64, _mm512_permutex2var_epi8,
    _mm512_set1_epi8, _mm512_set1_epi32, _mm512_ternarylogic_epi32, _mm512_unpackhi_epi8,
    _mm512_unpacklo_epi8,
};
use std::mem::transmute;

use half::bf16;

use super::super::pairs::Pairs;
use super::avx512::{Avx512, BF16};

impl Pairs for Avx512<BF16> {
    #[inline(always)]
    fn dot(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: `self` proves that the CPU has the features; the types only name what bits are for.
        unsafe { _mm512_dpbf16_ps(c, transmute::<__m512, __m512bh>(a), transmute::<__m512, __m512bh>(b)) }
    }

    #[inline(always)]
    fn only(self, words: __m512, which: usize) -> __m512 {
        // SAFETY: `self` proves that the CPU has the features.
        unsafe {
            let mask = _mm512_set1_epi32(0xFFFF << (16 * which));
            _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(words), mask))
        }
    }

    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut bf16, a: __m512) {
        // SAFETY: the caller's promise; `self` proves the CPU features; the types only name what bits
        // are for.
        unsafe { _mm256_storeu_si256(to.cast(), transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(a))) }
    }

    #[inline(always)]
    unsafe fn load_eights(self, from: *const u8) -> __m512 {
        // SAFETY: the caller's promise; `self` proves the CPU features.
        unsafe { _mm512_castsi512_ps(_mm512_maskz_expandloadu_epi64(0x55, from.cast())) }
    }

    #[inline(always)]
    fn words_of_i8(self, bytes: __m512) -> [__m512; 2] {
        // SAFETY: `self` proves that the CPU has the features.
        unsafe {
            let bytes = _mm512_castps_si512(bytes);
            let [low, high] = I8.look_up(_mm512_abs_epi8(bytes));
            // The magnitude of -128 has eight bits, of which the table knows seven: they are 0.
            let least = _mm512_cmpeq_epi8_mask(bytes, _mm512_set1_epi8(i8::MIN));
            let high = _mm512_mask_mov_epi8(high, least, _mm512_set1_epi8(0x43));
            words(bytes, low, high)
        }
    }

    #[inline(always)]
    fn words_of_f8(self, bytes: __m512) -> [__m512; 2] {
        // SAFETY: `self` proves that the CPU has the features.
        unsafe {
            let bytes = _mm512_castps_si512(bytes);
            let [low, high] = F8.look_up(bytes);
            words(bytes, low, high)
        }
    }
}

/// The lower and upper bytes of the bfloat16 that 128 magnitudes become.
#[repr(align(64))]
struct Table([[u8; 128]; 2]);

/// Integers; 128 has no place.
static I8: Table = table(0, 0);
/// `float8_e4m3fn`, times 2^-8.
static F8: Table = table(3, 7 + 8);

/// Of numbers of seven bits, the last of which are `mantissa` and the others exponents with a `bias`, if there
/// are any others than 0.
const fn table(mantissa: u32, bias: u32) -> Table {
    let mut table = [[0; 128]; 2];
    let mut code = 1_u32;
    while code < 128 {
        let (exponent, mut number) = match mantissa {
            0 => (0, code),
            _ => (code >> mantissa, code & ((1 << mantissa) - 1)),
        };
        // How often the number, an integer, is to be doubled; below exponent 1, all lie evenly.
        let mut doubled = 127 - mantissa - bias;
        if exponent > 0 {
            number |= 1 << mantissa;
            doubled += exponent;
        } else if mantissa > 0 {
            doubled += 1;
        }
        // Of a bfloat16, seven bits follow the highest, which goes without saying.
        let top = number.ilog2();
        let bits = (top + doubled) << 7 | (number << (7 - top)) & 0x7F;
        table[0][code as usize] = bits as u8;
        table[1][code as usize] = (bits >> 8) as u8;
        code += 1;
    }
    Table(table)
}

impl Table {
    /// Looks up the lower seven bits of each byte.
    ///
    /// # Safety
    /// - The CPU has AVX-512 VBMI.
    #[inline(always)]
    unsafe fn look_up(&self, bytes: __m512i) -> [__m512i; 2] {
        // SAFETY: the caller's promise; there are two vectors of each.
        unsafe {
            self.0.each_ref().map(|bytes_of| {
                let half = |i: usize| _mm512_load_si512(bytes_of.as_ptr().add(64 * i).cast());
                _mm512_permutex2var_epi8(half(0), bytes, half(1))
            })
        }
    }
}

/// Words of lower and upper bytes, with the signs of `signs`.
///
/// # Safety
/// - The CPU has AVX-512 BW.
#[inline(always)]
unsafe fn words(signs: __m512i, low: __m512i, high: __m512i) -> [__m512; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        const HIGH_OR_SIGN_AND_TOP_BIT: i32 = 0xF8;
        let top_bit = _mm512_set1_epi8(i8::MIN);
        let high = _mm512_ternarylogic_epi32::<HIGH_OR_SIGN_AND_TOP_BIT>(high, signs, top_bit);
        [
            _mm512_castsi512_ps(_mm512_unpacklo_epi8(low, high)),
            _mm512_castsi512_ps(_mm512_unpackhi_epi8(low, high)),
        ]
    }
}
