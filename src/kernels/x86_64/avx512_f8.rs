//! Numbers of eight bits of floating point, widened where they lie: even and odd ones each become words of 16 bits,
//! whose even and odd ones become floats.

use std::arch::x86_64::{
    __m512i, _mm_loadu_si128, _mm512_broadcast_i32x4, _mm512_mask_permutexvar_epi16, _mm512_set1_epi16,
    _mm512_slli_epi16, _mm512_srai_epi16, _mm512_srli_epi16, _mm512_ternarylogic_epi32,
    _mm512_testn_epi16_mask,
};

/// The bits of a byte's exponent: none in zero and subnormal numbers.
pub(super) const EXPONENT: i8 = 0x78;
/// A byte's sign, exponent and mantissa in a bfloat16.
const PLACES: i16 = 0x87F0_u16.cast_signed();
/// What a bfloat16's exponent has more: 112, three bits above those of a byte's.
const BIAS: i16 = 0x3800;

/// Words of bfloat16, each 2^-8 of what the lower or the upper byte of the same word stands for, if that is neither
/// zero nor subnormal.
///
/// # Safety
/// - The CPU has AVX-512 F and BW.
#[inline(always)]
pub(super) unsafe fn normal_words(bytes: __m512i, upper: bool) -> __m512i {
    // SAFETY: the caller's promise.
    unsafe {
        let (places, bias) = (_mm512_set1_epi16(PLACES), _mm512_set1_epi16(BIAS));
        _mm512_ternarylogic_epi32::<AND_OR>(shifted(bytes, upper), places, bias)
    }
}

/// The same of any byte.
///
/// # Safety
/// - As for `normal_words`.
#[inline(always)]
pub(super) unsafe fn any_words(bytes: __m512i, upper: bool) -> __m512i {
    // SAFETY: the caller's promise.
    unsafe {
        let shifted = shifted(bytes, upper);
        let places = _mm512_set1_epi16(PLACES & i16::MAX);
        let magnitude = _mm512_ternarylogic_epi32::<AND_OR>(shifted, places, _mm512_set1_epi16(BIAS));
        // Without an exponent, no highest bit goes without saying. Of the five bits that look such numbers up, the
        // first two are 0.
        let exponent = i16::from(EXPONENT) << if upper { 8 } else { 0 };
        let subnormal = _mm512_testn_epi16_mask(bytes, _mm512_set1_epi16(exponent));
        let mantissa = if upper { _mm512_srli_epi16::<8>(bytes) } else { bytes };
        let table = _mm512_broadcast_i32x4(_mm_loadu_si128(SUBNORMAL.as_ptr().cast()));
        let magnitude = _mm512_mask_permutexvar_epi16(magnitude, subnormal, mantissa, table);
        _mm512_ternarylogic_epi32::<AND_OR>(shifted, _mm512_set1_epi16(i16::MIN), magnitude)
    }
}

/// `a & b | c`.
const AND_OR: i32 = 0xEA;

/// The lower or the upper byte of each word, shifted to its place in a bfloat16.
///
/// # Safety
/// - As for `normal_words`.
#[inline(always)]
unsafe fn shifted(bytes: __m512i, upper: bool) -> __m512i {
    // SAFETY: the caller's promise.
    unsafe { _mm512_srai_epi16::<4>(if upper { bytes } else { _mm512_slli_epi16::<8>(bytes) }) }
}

/// What mantissas stand for without an exponent, times 2^-8, as bfloat16.
static SUBNORMAL: [u16; 8] = {
    let mut table = [0; 8];
    let mut mantissa = 1_u16;
    while mantissa < 8 {
        // In units of 2^-17.
        let top = mantissa.ilog2() as u16;
        table[mantissa as usize] = (127 - 17 + top) << 7 | (mantissa << (7 - top)) & 0x7F;
        mantissa += 1;
    }
    table
};
