//! AVX-512 (F, BW, DQ, VL), with or without VNNI and BF16: sixteen lanes, thirty-two registers.

use half::{bf16, f16};
use std::arch::x86_64::{
    __cpuid, __m512, __m512i, _CMP_LT_OQ, _CMP_NLT_UQ, _MM_FROUND_NO_EXC, _MM_FROUND_TO_NEAREST_INT,
    _MM_FROUND_TO_NEG_INF, _MM_HINT_T1, _mm_add_ps, _mm_add_ss, _mm_cvtss_f32, _mm_loadu_si128,
    _mm_movehdup_ps, _mm_movehl_ps, _mm_prefetch, _mm_storeu_ps, _mm256_add_ps, _mm256_and_si256,
    _mm256_castps256_ps128, _mm256_cvtepi8_epi16, _mm256_extractf128_ps, _mm256_loadu_si256,
    _mm256_set1_epi16, _mm256_slli_epi16, _mm512_abs_ps, _mm512_add_ps, _mm512_and_ps, _mm512_and_si512,
    _mm512_castpd_ps, _mm512_castps_pd, _mm512_castps512_ps256, _mm512_castsi512_ps, _mm512_cmp_ps_mask,
    _mm512_cvtepi8_epi32, _mm512_cvtepi32_ps, _mm512_cvtepu16_epi32, _mm512_cvtph_ps, _mm512_div_ps,
    _mm512_extractf32x8_ps, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_mask_blend_ps,
    _mm512_mask_test_epi8_mask, _mm512_maskz_mov_ps, _mm512_max_ps, _mm512_mul_ps, _mm512_or_ps,
    _mm512_reduce_max_ps, _mm512_reduce_ps, _mm512_roundscale_ps, _mm512_scalef_ps, _mm512_set1_epi8,
    _mm512_set1_epi32, _mm512_set1_ps, _mm512_setr_ps, _mm512_shuffle_f32x4, _mm512_slli_epi32,
    _mm512_storeu_ps, _mm512_sub_ps, _mm512_unpackhi_pd, _mm512_unpackhi_ps, _mm512_unpacklo_pd,
    _mm512_unpacklo_ps, CpuidResult,
};

use super::super::simd::{Job, MOST_LANES, Simd};
use super::avx512_f8::{EXPONENT, any_words, normal_words};
use crate::dtype::F8E4M3;

/// Nothing besides AVX-512 F, BW, DQ and VL.
pub(crate) const PLAIN: u8 = 0;
/// VNNI: products of integers that are added at once.
pub(crate) const VNNI: u8 = 1;
/// BF16 and VBMI, besides VNNI.
pub(crate) const BF16: u8 = 2;

/// Proof that the CPU has AVX-512 F, BW, DQ and VL, besides what AVX2 stands for, and what `MORE` names.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512<const MORE: u8>(());

impl<const MORE: u8> Avx512<MORE> {
    /// Asks the CPU, and the system, which must save the registers.
    pub(crate) fn new() -> Option<Self> {
        (super::Avx2::new().is_some()
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && (MORE < VNNI || is_x86_feature_detected!("avx512vnni"))
            && (MORE < BF16
                || is_x86_feature_detected!("avx512bf16") && is_x86_feature_detected!("avx512vbmi")))
        .then_some(Self(()))
    }
}

impl Avx512<BF16> {
    /// Whether products in pairs are faster than float32 multiply-adds: Intel's servers begin one in the time
    /// of two or more multiply-adds.
    pub(crate) fn pays() -> bool {
        // The vendor's name lies in these three registers, in this order.
        let CpuidResult { ebx, edx, ecx, .. } = __cpuid(0);
        [ebx, edx, ecx].map(u32::to_le_bytes).as_flattened() != b"GenuineIntel"
    }
}

/// Writes a method's body once: value intrinsics need only the CPU feature.
macro_rules! values {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident),*) = $body:expr;)*) => {$(
        $(#[$doc])*
        #[inline(always)]
        fn $name(self, $($arg: __m512),*) -> __m512 {
            // SAFETY: `self` proves that the CPU has the features.
            unsafe { $body }
        }
    )*};
}

impl<const MORE: u8> Simd for Avx512<MORE> {
    type F32 = __m512;
    const LANES: usize = 16;
    const REGISTERS: usize = 32;
    const DEALS_F8: bool = true;

    unsafe fn call<J: Job<Self>>(self, job: J) -> J::Output {
        /// A function of its own for each set of features.
        macro_rules! compiled {
            ($features:literal) => {{
                #[inline(never)]
                #[target_feature(enable = $features)]
                unsafe fn compiled<S, J: Job<S>>(simd: S, job: J) -> J::Output {
                    // SAFETY: the caller's promise.
                    unsafe { job.run(simd) }
                }
                // SAFETY: `self` proves that the CPU has these features; the caller's promise for the job.
                unsafe { compiled(self, job) }
            }};
        }
        match MORE {
            PLAIN => compiled!("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"),
            VNNI => compiled!("avx512vnni,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"),
            _ => {
                compiled!("avx512bf16,avx512vbmi,avx512vnni,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
            }
        }
    }

    values! {
        fn add(a, b) = _mm512_add_ps(a, b);
        fn sub(a, b) = _mm512_sub_ps(a, b);
        fn mul(a, b) = _mm512_mul_ps(a, b);
        fn div(a, b) = _mm512_div_ps(a, b);
        fn mul_add(a, b, c) = _mm512_fmadd_ps(a, b, c);
        fn max(a, b) = _mm512_max_ps(a, b);
        fn abs(a) = _mm512_abs_ps(a);
        fn with_sign(magnitude, sign) = _mm512_or_ps(magnitude, _mm512_and_ps(_mm512_set1_ps(-0.0), sign));
        fn round(a) = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a);
        fn fraction(a) = _mm512_reduce_ps::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(a);
        fn scale_by_power(a, n) = _mm512_scalef_ps(a, n);
        fn select_less(a, b, yes, no) = _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), no, yes);
        fn zero_below(x, bound, a) = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, bound), a);
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        // SAFETY: `self` proves that the CPU has the features.
        unsafe { _mm512_set1_ps(x) }
    }

    #[inline(always)]
    fn lane_numbers(self) -> __m512 {
        // SAFETY: `self` proves that the CPU has the features.
        unsafe {
            _mm512_setr_ps(
                0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0,
            )
        }
    }

    #[inline(always)]
    fn any_less(self, a: __m512, b: __m512) -> bool {
        // SAFETY: `self` proves that the CPU has the features.
        unsafe { _mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b) != 0 }
    }

    #[inline(always)]
    fn sum(self, a: __m512) -> f32 {
        // SAFETY: `self` proves that the CPU has the features.
        unsafe {
            let eight = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a));
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }
    }

    #[inline(always)]
    fn max_lane(self, a: __m512) -> f32 {
        // SAFETY: `self` proves that the CPU has the features.
        unsafe { _mm512_reduce_max_ps(a) }
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> __m512 {
        // SAFETY: the caller's promise; `self` proves the CPU features.
        unsafe { _mm512_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn load_f16(self, from: *const f16) -> __m512 {
        // SAFETY: the caller's promise; `self` proves the CPU features.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, from: *const bf16) -> __m512 {
        // SAFETY: the caller's promise; `self` proves the CPU features.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }

    #[inline(always)]
    unsafe fn load_even_bf16(self, from: *const bf16) -> __m512 {
        // SAFETY: the caller's promise; `self` proves the CPU features.
        unsafe { even(_mm512_loadu_si512(from.cast())) }
    }

    #[inline(always)]
    unsafe fn load_odd_bf16(self, from: *const bf16) -> __m512 {
        // SAFETY: the caller's promise; `self` proves the CPU features.
        unsafe { odd(_mm512_loadu_si512(from.cast())) }
    }

    #[inline(always)]
    unsafe fn load_i8(self, from: *const i8) -> __m512 {
        // SAFETY: the caller's promise; `self` proves the CPU features.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()))) }
    }

    #[inline(always)]
    unsafe fn load_f8(self, from: *const F8E4M3) -> __m512 {
        // SAFETY: the caller's promise; `self` proves the CPU features.
        unsafe {
            // Spread with its sign, a byte has it in bit 15 and once too often in bit 14 after the shift.
            let wide = _mm256_slli_epi16::<7>(_mm256_cvtepi8_epi16(_mm_loadu_si128(from.cast())));
            _mm512_cvtph_ps(_mm256_and_si256(wide, _mm256_set1_epi16(0xBFFF_u16.cast_signed())))
        }
    }

    #[inline(always)]
    unsafe fn load_of_four_f8<const ANY: bool>(self, from: *const F8E4M3, which: usize) -> __m512 {
        // SAFETY: the caller's promise; `self` proves the CPU features.
        unsafe {
            let bytes = _mm512_loadu_si512(from.cast());
            // The same for two vectors, and done once for both.
            let two =
                if ANY { any_words(bytes, which / 2 == 1) } else { normal_words(bytes, which / 2 == 1) };
            if which.is_multiple_of(2) { even(two) } else { odd(two) }
        }
    }

    #[inline(always)]
    unsafe fn all_normal_f8<const K: usize>(self, tokens: [*const F8E4M3; K], count: usize) -> bool {
        // SAFETY: the caller's promise; `self` proves the CPU features.
        unsafe {
            let exponent = _mm512_set1_epi8(EXPONENT);
            let mut normal = u64::MAX;
            for i in (0..count).step_by(64) {
                for token in tokens {
                    let bytes = _mm512_loadu_si512(token.add(i).cast());
                    normal = _mm512_mask_test_epi8_mask(normal, bytes, exponent);
                }
            }
            normal == u64::MAX
        }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, a: __m512) {
        // SAFETY: the caller's promise; `self` proves the CPU features.
        unsafe { _mm512_storeu_ps(to, a) }
    }

    #[inline(always)]
    unsafe fn sum_four(self, to: *mut f32, four: [__m512; 4]) {
        // SAFETY: the caller's promise; `self` proves the CPU features.
        unsafe {
            let quarters = sums_of_quarters(four);
            let halves =
                _mm256_add_ps(_mm512_castps512_ps256(quarters), _mm512_extractf32x8_ps::<1>(quarters));
            let sums = _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps::<1>(halves));
            _mm_storeu_ps(to, sums);
        }
    }

    #[inline(always)]
    unsafe fn sum_sixteen(self, to: *mut f32, a: [__m512; 16]) {
        // SAFETY: the caller's promise; `self` proves the CPU features.
        unsafe {
            let [q0, q1, q2, q3] = [
                sums_of_quarters([a[0], a[1], a[2], a[3]]),
                sums_of_quarters([a[4], a[5], a[6], a[7]]),
                sums_of_quarters([a[8], a[9], a[10], a[11]]),
                sums_of_quarters([a[12], a[13], a[14], a[15]]),
            ];
            // Quarters 0 + 2 and 1 + 3 of two, then both together.
            let halves =
                |a, b| _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xEE>(a, b));
            let (low, high) = (halves(q0, q1), halves(q2, q3));
            let sums = _mm512_add_ps(
                _mm512_shuffle_f32x4::<0x88>(low, high),
                _mm512_shuffle_f32x4::<0xDD>(low, high),
            );
            _mm512_storeu_ps(to, sums);
        }
    }

    #[inline(always)]
    fn transpose(self, rows: &mut [__m512; MOST_LANES]) {
        // SAFETY: `self` proves that the CPU has the features.
        unsafe {
            // Blocks of 2 and 4 lanes, then of quarters of a vector.
            for i in (0..16).step_by(2) {
                let (a, b) = (rows[i], rows[i + 1]);
                (rows[i], rows[i + 1]) = (_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
            }
            for i in (0..16).step_by(4) {
                let [a, b, c, d] =
                    [rows[i], rows[i + 1], rows[i + 2], rows[i + 3]].map(|x| _mm512_castps_pd(x));
                rows[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
                rows[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
                rows[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
                rows[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
            }
            for i in 0..4 {
                let [a, b, c, d] = [rows[i], rows[i + 4], rows[i + 8], rows[i + 12]];
                let (ab, cd) = (_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0x88>(c, d));
                rows[i] = _mm512_shuffle_f32x4::<0x88>(ab, cd);
                rows[i + 8] = _mm512_shuffle_f32x4::<0xDD>(ab, cd);
                let (ab, cd) = (_mm512_shuffle_f32x4::<0xDD>(a, b), _mm512_shuffle_f32x4::<0xDD>(c, d));
                rows[i + 4] = _mm512_shuffle_f32x4::<0x88>(ab, cd);
                rows[i + 12] = _mm512_shuffle_f32x4::<0xDD>(ab, cd);
            }
        }
    }

    #[inline(always)]
    fn prefetch(self, address: *const u8) {
        // Into the second level: the first holds the tile at work.
        // SAFETY: a prefetch of any address is allowed.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) }
    }
}

/// Of words of two bfloat16, the even ones as floats.
///
/// # Safety
/// - The CPU has AVX-512 F.
#[inline(always)]
unsafe fn even(words: __m512i) -> __m512 {
    // SAFETY: the caller's promise.
    unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words)) }
}

/// The odd ones.
///
/// # Safety
/// - As for `even`.
#[inline(always)]
unsafe fn odd(words: __m512i) -> __m512 {
    // SAFETY: the caller's promise.
    unsafe {
        let upper = _mm512_set1_epi32(0xFFFF_0000_u32.cast_signed());
        _mm512_castsi512_ps(_mm512_and_si512(words, upper))
    }
}

/// In each quarter of a vector, the sums of that quarter of four vectors.
///
/// # Safety
/// - The CPU has AVX-512 F.
#[inline(always)]
unsafe fn sums_of_quarters([a, b, c, d]: [__m512; 4]) -> __m512 {
    // SAFETY: the caller's promise.
    unsafe {
        // a0+a2 b0+b2 a1+a3 b1+b3, then a b c d.
        let ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
        let cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
        let low = _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd));
        _mm512_add_ps(low, _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)))
    }
}
