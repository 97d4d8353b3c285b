//! AVX2 with FMA and F16C: eight lanes.

use std::arch::x86_64::{
    __m256, _CMP_LT_OQ, _MM_FROUND_NO_EXC, _MM_FROUND_TO_NEAREST_INT, _MM_HINT_T1, _mm_add_ps, _mm_and_si128,
    _mm_cvtepi8_epi16, _mm_cvtss_f32, _mm_loadl_epi64, _mm_loadu_si128, _mm_max_ps, _mm_max_ss,
    _mm_movehdup_ps, _mm_movehl_ps, _mm_packs_epi32, _mm_prefetch, _mm_set1_epi16, _mm_slli_epi16,
    _mm_storeu_ps, _mm_storeu_si128, _mm256_add_epi32, _mm256_add_ps, _mm256_and_ps, _mm256_and_si256,
    _mm256_andnot_ps, _mm256_blendv_ps, _mm256_castpd_ps, _mm256_castps_pd, _mm256_castps_si256,
    _mm256_castps256_ps128, _mm256_castsi256_ps, _mm256_castsi256_si128, _mm256_cmp_ps, _mm256_cvtepi8_epi16,
    _mm256_cvtepi8_epi32, _mm256_cvtepi32_ps, _mm256_cvtepu16_epi32, _mm256_cvtph_ps, _mm256_cvtps_epi32,
    _mm256_div_ps, _mm256_extractf128_ps, _mm256_extracti128_si256, _mm256_floor_ps, _mm256_fmadd_ps,
    _mm256_hadd_ps, _mm256_loadu_ps, _mm256_loadu_si256, _mm256_madd_epi16, _mm256_max_ps,
    _mm256_movemask_ps, _mm256_mul_ps, _mm256_or_ps, _mm256_permute2f128_ps, _mm256_round_ps,
    _mm256_set1_epi32, _mm256_set1_ps, _mm256_setr_ps, _mm256_slli_epi32, _mm256_storeu_ps, _mm256_sub_ps,
    _mm256_unpackhi_epi16, _mm256_unpackhi_pd, _mm256_unpackhi_ps, _mm256_unpacklo_epi16, _mm256_unpacklo_pd,
    _mm256_unpacklo_ps,
};

use half::{bf16, f16};

use super::super::integers::Integers;
use super::super::simd::{Job, MOST_LANES, Simd};
use crate::dtype::F8E4M3;

/// Proof that the CPU has AVX2, FMA and F16C.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx2(());

impl Avx2 {
    /// Asks the CPU.
    pub(crate) fn new() -> Option<Self> {
        (is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c"))
        .then_some(Self(()))
    }
}

/// Writes a method's body once: value intrinsics need only the CPU feature.
macro_rules! values {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident),*) = $body:expr;)*) => {$(
        $(#[$doc])*
        #[inline(always)]
        fn $name(self, $($arg: __m256),*) -> __m256 {
            // SAFETY: `self` proves that the CPU has the features.
            unsafe { $body }
        }
    )*};
}

impl Simd for Avx2 {
    type F32 = __m256;
    const LANES: usize = 8;
    const REGISTERS: usize = 16;

    unsafe fn call<J: Job<Self>>(self, job: J) -> J::Output {
        #[inline(never)]
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn compiled<J: Job<Avx2>>(simd: Avx2, job: J) -> J::Output {
            // SAFETY: the caller's promise.
            unsafe { job.run(simd) }
        }
        // SAFETY: `self` proves that the CPU has these features; the caller's promise for the job.
        unsafe { compiled(self, job) }
    }

    values! {
        fn add(a, b) = _mm256_add_ps(a, b);
        fn sub(a, b) = _mm256_sub_ps(a, b);
        fn mul(a, b) = _mm256_mul_ps(a, b);
        fn div(a, b) = _mm256_div_ps(a, b);
        fn mul_add(a, b, c) = _mm256_fmadd_ps(a, b, c);
        fn max(a, b) = _mm256_max_ps(a, b);
        fn abs(a) = _mm256_andnot_ps(_mm256_set1_ps(-0.0), a);
        fn with_sign(magnitude, sign) = _mm256_or_ps(magnitude, _mm256_and_ps(_mm256_set1_ps(-0.0), sign));
        fn round(a) = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a);
        fn fraction(a) = _mm256_sub_ps(a, _mm256_floor_ps(a));
        fn scale_by_power(a, n) = {
            let biased = _mm256_add_epi32(_mm256_cvtps_epi32(_mm256_floor_ps(n)), _mm256_set1_epi32(127));
            _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased)))
        };
        fn select_less(a, b, yes, no) = _mm256_blendv_ps(no, yes, _mm256_cmp_ps::<_CMP_LT_OQ>(a, b));
        fn zero_below(x, bound, a) = _mm256_andnot_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(x, bound), a);
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        // SAFETY: `self` proves that the CPU has AVX.
        unsafe { _mm256_set1_ps(x) }
    }

    #[inline(always)]
    fn lane_numbers(self) -> __m256 {
        // SAFETY: `self` proves that the CPU has AVX.
        unsafe { _mm256_setr_ps(0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0) }
    }

    #[inline(always)]
    fn any_less(self, a: __m256, b: __m256) -> bool {
        // SAFETY: `self` proves that the CPU has AVX.
        unsafe { _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(a, b)) != 0 }
    }

    #[inline(always)]
    fn sum(self, a: __m256) -> f32 {
        // SAFETY: `self` proves that the CPU has AVX.
        unsafe {
            let pairs = _mm256_hadd_ps(a, a);
            let fours = _mm256_hadd_ps(pairs, pairs);
            _mm_cvtss_f32(_mm_add_ps(_mm256_castps256_ps128(fours), _mm256_extractf128_ps::<1>(fours)))
        }
    }

    #[inline(always)]
    fn max_lane(self, a: __m256) -> f32 {
        // SAFETY: `self` proves that the CPU has AVX.
        unsafe {
            let four = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        }
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> __m256 {
        // SAFETY: the caller's promise; `self` proves the CPU feature.
        unsafe { _mm256_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn load_f16(self, from: *const f16) -> __m256 {
        // SAFETY: the caller's promise; `self` proves the CPU feature.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, from: *const bf16) -> __m256 {
        // SAFETY: the caller's promise; `self` proves the CPU feature.
        unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }
    }

    #[inline(always)]
    unsafe fn load_even_bf16(self, from: *const bf16) -> __m256 {
        // SAFETY: the caller's promise; `self` proves the CPU feature.
        unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_loadu_si256(from.cast()))) }
    }

    #[inline(always)]
    unsafe fn load_odd_bf16(self, from: *const bf16) -> __m256 {
        // SAFETY: the caller's promise; `self` proves the CPU feature.
        unsafe {
            let upper = _mm256_set1_epi32(0xFFFF_0000_u32.cast_signed());
            _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(from.cast()), upper))
        }
    }

    #[inline(always)]
    unsafe fn load_i8(self, from: *const i8) -> __m256 {
        // SAFETY: the caller's promise; `self` proves the CPU feature.
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast()))) }
    }

    #[inline(always)]
    unsafe fn load_f8(self, from: *const F8E4M3) -> __m256 {
        // SAFETY: the caller's promise; `self` proves the CPU feature.
        unsafe {
            // Spread with its sign, a byte has it in bit 15 and once too often in bit 14 after the shift.
            let wide = _mm_slli_epi16::<7>(_mm_cvtepi8_epi16(_mm_loadl_epi64(from.cast())));
            _mm256_cvtph_ps(_mm_and_si128(wide, _mm_set1_epi16(0xBFFF_u16.cast_signed())))
        }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, a: __m256) {
        // SAFETY: the caller's promise; `self` proves the CPU feature.
        unsafe { _mm256_storeu_ps(to, a) }
    }

    #[inline(always)]
    unsafe fn sum_four(self, to: *mut f32, [a, b, c, d]: [__m256; 4]) {
        // SAFETY: the caller's promise; `self` proves the CPU feature.
        unsafe {
            let fours = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
            let sums = _mm_add_ps(_mm256_castps256_ps128(fours), _mm256_extractf128_ps::<1>(fours));
            _mm_storeu_ps(to, sums);
        }
    }

    #[inline(always)]
    fn transpose(self, rows: &mut [__m256; MOST_LANES]) {
        // SAFETY: `self` proves that the CPU has AVX.
        unsafe {
            // Blocks of 2, 4 and 8 lanes, one after the other.
            for i in [0, 2, 4, 6] {
                let (a, b) = (rows[i], rows[i + 1]);
                (rows[i], rows[i + 1]) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
            }
            for i in [0, 4] {
                let [a, b, c, d] =
                    [rows[i], rows[i + 1], rows[i + 2], rows[i + 3]].map(|x| _mm256_castps_pd(x));
                rows[i] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, c));
                rows[i + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, c));
                rows[i + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(b, d));
                rows[i + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(b, d));
            }
            for i in 0..4 {
                let (a, b) = (rows[i], rows[i + 4]);
                rows[i] = _mm256_permute2f128_ps::<0x20>(a, b);
                rows[i + 4] = _mm256_permute2f128_ps::<0x31>(a, b);
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

impl Integers for Avx2 {
    #[inline(always)]
    unsafe fn load_i16(self, from: *const i8) -> __m256 {
        // SAFETY: the caller's promise; `self` proves the CPU features.
        unsafe { _mm256_castsi256_ps(_mm256_cvtepi8_epi16(_mm_loadu_si128(from.cast()))) }
    }

    #[inline(always)]
    fn dot_i16(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: `self` proves that the CPU has the features.
        unsafe {
            let [a, b, c] = [a, b, c].map(|x| _mm256_castps_si256(x));
            _mm256_castsi256_ps(_mm256_add_epi32(c, _mm256_madd_epi16(a, b)))
        }
    }

    #[inline(always)]
    fn zip(self, a: __m256, b: __m256) -> [__m256; 2] {
        // SAFETY: `self` proves that the CPU has the features.
        unsafe {
            let (a, b) = (_mm256_castps_si256(a), _mm256_castps_si256(b));
            [
                _mm256_castsi256_ps(_mm256_unpacklo_epi16(a, b)),
                _mm256_castsi256_ps(_mm256_unpackhi_epi16(a, b)),
            ]
        }
    }

    #[inline(always)]
    fn to_floats(self, a: __m256) -> __m256 {
        // SAFETY: `self` proves that the CPU has the features.
        unsafe { _mm256_cvtepi32_ps(_mm256_castps_si256(a)) }
    }

    #[inline(always)]
    unsafe fn store_i16(self, to: *mut i16, a: __m256) {
        // SAFETY: the caller's promise; `self` proves the CPU features.
        unsafe {
            let wide = _mm256_cvtps_epi32(a);
            let (low, high) = (_mm256_castsi256_si128(wide), _mm256_extracti128_si256::<1>(wide));
            _mm_storeu_si128(to.cast(), _mm_packs_epi32(low, high));
        }
    }
}
