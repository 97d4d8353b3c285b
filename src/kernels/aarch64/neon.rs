//! NEON, which is part of 64-bit Arm: four lanes, thirty-two registers.
//!
//! Halves are widened by the conversion that belongs to it, bfloat16 by shifts, so that no extension
//! is asked for.

use std::arch::aarch64::{
    float32x4_t, int16x4_t, vabsq_f32, vaddq_f32, vaddq_s32, vaddvq_f32, vand_u16, vandq_u32, vbslq_f32,
    vcgtq_f32, vcltq_f32, vcvt_f32_f16, vcvtmq_s32_f32, vcvtq_f32_s32, vdivq_f32, vdup_n_u16, vdup_n_u32,
    vdupq_n_f32, vdupq_n_s32, vdupq_n_u32, vfmaq_f32, vget_low_s16, vld1_u16, vld1q_f32, vld1q_u16,
    vmaxnmvq_f32, vmaxvq_u32, vmovl_s8, vmovl_s16, vmovl_u16, vmulq_f32, vpaddq_f32, vreinterpret_f16_u16,
    vreinterpret_s8_u32, vreinterpret_u16_s16, vreinterpretq_f32_f64, vreinterpretq_f32_s32,
    vreinterpretq_f32_u32, vreinterpretq_f64_f32, vreinterpretq_u32_u16, vrndmq_f32, vrndnq_f32, vshl_n_s16,
    vshlq_n_s32, vshlq_n_u32, vst1q_f32, vsubq_f32, vtrn1q_f32, vtrn1q_f64, vtrn2q_f32, vtrn2q_f64,
};

use half::{bf16, f16};

use super::super::simd::{Job, MOST_LANES, Simd};
use crate::dtype::F8E4M3;

/// Proof that the CPU has NEON.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Neon(());

impl Neon {
    /// Asks the system.
    pub(crate) fn new() -> Option<Self> {
        std::arch::is_aarch64_feature_detected!("neon").then_some(Self(()))
    }

    /// Loads four bytes and spreads each, with its sign, over sixteen bits.
    ///
    /// # Safety
    /// - `from` is valid for reads of 4 bytes; any alignment.
    #[inline(always)]
    unsafe fn load_bytes(self, from: *const u8) -> int16x4_t {
        // SAFETY: the caller's promise; `self` proves the CPU feature.
        unsafe {
            let four = vdup_n_u32(from.cast::<u32>().read_unaligned());
            vget_low_s16(vmovl_s8(vreinterpret_s8_u32(four)))
        }
    }
}

/// Writes a method's body once: value intrinsics need only the CPU feature.
macro_rules! values {
    ($(fn $name:ident($($arg:ident),*) = $body:expr;)*) => {$(
        #[inline(always)]
        fn $name(self, $($arg: float32x4_t),*) -> float32x4_t {
            // SAFETY: `self` proves that the CPU has NEON.
            unsafe { $body }
        }
    )*};
}

impl Simd for Neon {
    type F32 = float32x4_t;
    const LANES: usize = 4;
    const REGISTERS: usize = 32;

    unsafe fn call<J: Job<Self>>(self, job: J) -> J::Output {
        #[inline(never)]
        #[target_feature(enable = "neon")]
        unsafe fn compiled<J: Job<Neon>>(simd: Neon, job: J) -> J::Output {
            // SAFETY: the caller's promise.
            unsafe { job.run(simd) }
        }
        // SAFETY: `self` proves that the CPU has NEON; the caller's promise for the job.
        unsafe { compiled(self, job) }
    }

    values! {
        fn add(a, b) = vaddq_f32(a, b);
        fn sub(a, b) = vsubq_f32(a, b);
        fn mul(a, b) = vmulq_f32(a, b);
        fn div(a, b) = vdivq_f32(a, b);
        fn mul_add(a, b, c) = vfmaq_f32(c, a, b);
        // Not the instruction for it: that one gives NaN where either is.
        fn max(a, b) = vbslq_f32(vcgtq_f32(a, b), a, b);
        fn abs(a) = vabsq_f32(a);
        fn with_sign(magnitude, sign) = vbslq_f32(vdupq_n_u32(0x8000_0000), sign, magnitude);
        fn round(a) = vrndnq_f32(a);
        fn fraction(a) = vsubq_f32(a, vrndmq_f32(a));
        fn scale_by_power(a, n) = {
            let biased = vaddq_s32(vcvtmq_s32_f32(n), vdupq_n_s32(127));
            vmulq_f32(a, vreinterpretq_f32_s32(vshlq_n_s32::<23>(biased)))
        };
        fn select_less(a, b, yes, no) = vbslq_f32(vcltq_f32(a, b), yes, no);
    }

    #[inline(always)]
    fn splat(self, x: f32) -> float32x4_t {
        // SAFETY: `self` proves that the CPU has NEON.
        unsafe { vdupq_n_f32(x) }
    }

    #[inline(always)]
    fn lane_numbers(self) -> float32x4_t {
        // SAFETY: four elements; `self` proves that the CPU has NEON.
        unsafe { vld1q_f32([0.0, 1.0, 2.0, 3.0].as_ptr()) }
    }

    #[inline(always)]
    fn any_less(self, a: float32x4_t, b: float32x4_t) -> bool {
        // SAFETY: `self` proves that the CPU has NEON.
        unsafe { vmaxvq_u32(vcltq_f32(a, b)) != 0 }
    }

    #[inline(always)]
    fn sum(self, a: float32x4_t) -> f32 {
        // SAFETY: `self` proves that the CPU has NEON.
        unsafe { vaddvq_f32(a) }
    }

    #[inline(always)]
    fn max_lane(self, a: float32x4_t) -> f32 {
        // SAFETY: `self` proves that the CPU has NEON.
        unsafe { vmaxnmvq_f32(a) }
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> float32x4_t {
        // SAFETY: the caller's promise; `self` proves the CPU feature.
        unsafe { vld1q_f32(from) }
    }

    #[inline(always)]
    unsafe fn load_f16(self, from: *const f16) -> float32x4_t {
        // SAFETY: the caller's promise; `self` proves the CPU feature.
        unsafe { vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from.cast()))) }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, from: *const bf16) -> float32x4_t {
        // SAFETY: the caller's promise; `self` proves the CPU feature.
        unsafe { vreinterpretq_f32_u32(vshlq_n_u32::<16>(vmovl_u16(vld1_u16(from.cast())))) }
    }

    #[inline(always)]
    unsafe fn load_even_bf16(self, from: *const bf16) -> float32x4_t {
        // SAFETY: the caller's promise; `self` proves the CPU feature.
        unsafe {
            let pairs = vreinterpretq_u32_u16(vld1q_u16(from.cast()));
            vreinterpretq_f32_u32(vshlq_n_u32::<16>(pairs))
        }
    }

    #[inline(always)]
    unsafe fn load_odd_bf16(self, from: *const bf16) -> float32x4_t {
        // SAFETY: the caller's promise; `self` proves the CPU feature.
        unsafe {
            let pairs = vreinterpretq_u32_u16(vld1q_u16(from.cast()));
            vreinterpretq_f32_u32(vandq_u32(pairs, vdupq_n_u32(0xFFFF_0000)))
        }
    }

    #[inline(always)]
    unsafe fn load_i8(self, from: *const i8) -> float32x4_t {
        // SAFETY: the caller's promise; `self` proves the CPU feature.
        unsafe { vcvtq_f32_s32(vmovl_s16(self.load_bytes(from.cast()))) }
    }

    #[inline(always)]
    unsafe fn load_f8(self, from: *const F8E4M3) -> float32x4_t {
        // SAFETY: the caller's promise; `self` proves the CPU feature.
        unsafe {
            // Spread with its sign, a byte has it in bit 15 and once too often in bit 14 after the shift.
            let wide = vreinterpret_u16_s16(vshl_n_s16::<7>(self.load_bytes(from.cast())));
            vcvt_f32_f16(vreinterpret_f16_u16(vand_u16(wide, vdup_n_u16(0xBFFF))))
        }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, a: float32x4_t) {
        // SAFETY: the caller's promise; `self` proves the CPU feature.
        unsafe { vst1q_f32(to, a) }
    }

    #[inline(always)]
    unsafe fn sum_four(self, to: *mut f32, [a, b, c, d]: [float32x4_t; 4]) {
        // SAFETY: the caller's promise; `self` proves the CPU feature. In the order of `sum`.
        unsafe { vst1q_f32(to, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d))) }
    }

    #[inline(always)]
    fn transpose(self, rows: &mut [float32x4_t; MOST_LANES]) {
        let [a, b, c, d] = [rows[0], rows[1], rows[2], rows[3]];
        // SAFETY: `self` proves that the CPU has NEON.
        unsafe {
            // Blocks of 2 lanes: a0 b0 a2 b2, a1 b1 a3 b3; then of 4.
            let (ab, ab_odd) = (vtrn1q_f32(a, b), vtrn2q_f32(a, b));
            let (cd, cd_odd) = (vtrn1q_f32(c, d), vtrn2q_f32(c, d));
            let [ab, ab_odd, cd, cd_odd] = [ab, ab_odd, cd, cd_odd].map(|x| vreinterpretq_f64_f32(x));
            rows[0] = vreinterpretq_f32_f64(vtrn1q_f64(ab, cd));
            rows[1] = vreinterpretq_f32_f64(vtrn1q_f64(ab_odd, cd_odd));
            rows[2] = vreinterpretq_f32_f64(vtrn2q_f64(ab, cd));
            rows[3] = vreinterpretq_f32_f64(vtrn2q_f64(ab_odd, cd_odd));
        }
    }

    #[inline(always)]
    fn prefetch(self, address: *const u8) {
        // Into the second level: the first holds the tile at work.
        // SAFETY: a hint that no program can see, whatever the address.
        unsafe {
            std::arch::asm!("prfm pldl2keep, [{}]", in(reg) address, options(nostack, preserves_flags, readonly));
        }
    }
}
