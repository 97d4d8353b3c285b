//! One lane of plain Rust, for every CPU, and the plainest reading of [`Simd`].

use half::{bf16, f16};

use super::simd::{Job, MOST_LANES, Simd};

/// Plain Rust.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scalar;

impl Simd for Scalar {
    type F32 = f32;
    const LANES: usize = 1;
    const REGISTERS: usize = 16;

    #[inline(never)]
    unsafe fn call<J: Job<Self>>(self, job: J) -> J::Output {
        // SAFETY: the caller's promise.
        unsafe { job.run(self) }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> f32 {
        x
    }
    #[inline(always)]
    fn lane_numbers(self) -> f32 {
        0.0
    }
    #[inline(always)]
    fn add(self, a: f32, b: f32) -> f32 {
        a + b
    }
    #[inline(always)]
    fn sub(self, a: f32, b: f32) -> f32 {
        a - b
    }
    #[inline(always)]
    fn mul(self, a: f32, b: f32) -> f32 {
        a * b
    }
    #[inline(always)]
    fn div(self, a: f32, b: f32) -> f32 {
        a / b
    }
    #[inline(always)]
    fn mul_add(self, a: f32, b: f32, c: f32) -> f32 {
        // Not `f32::mul_add`: without the instruction that is a call into the C library.
        a * b + c
    }
    #[inline(always)]
    fn max(self, a: f32, b: f32) -> f32 {
        if a > b { a } else { b }
    }
    #[inline(always)]
    fn abs(self, a: f32) -> f32 {
        a.abs()
    }
    #[inline(always)]
    fn with_sign(self, magnitude: f32, sign: f32) -> f32 {
        magnitude.copysign(sign)
    }
    #[inline(always)]
    fn round(self, a: f32) -> f32 {
        // Adding 1.5 * 2^23 leaves no bits behind the point, as long as |a| < 2^22.
        const SHIFT: f32 = 12_582_912.0;
        (a + SHIFT) - SHIFT
    }
    #[inline(always)]
    fn scale_by_power(self, a: f32, n: f32) -> f32 {
        a * f32::from_bits(((n as i32).wrapping_add(127) as u32) << 23)
    }
    #[inline(always)]
    fn select_less(self, a: f32, b: f32, yes: f32, no: f32) -> f32 {
        if a < b { yes } else { no }
    }
    #[inline(always)]
    fn any_less(self, a: f32, b: f32) -> bool {
        a < b
    }
    #[inline(always)]
    fn sum(self, a: f32) -> f32 {
        a
    }
    #[inline(always)]
    fn max_lane(self, a: f32) -> f32 {
        a
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { from.read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const f16) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { from.read_unaligned() }.to_f32()
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const bf16) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { from.read_unaligned() }.to_f32()
    }
    #[inline(always)]
    unsafe fn load_even_bf16(self, from: *const bf16) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { self.load_bf16(from) }
    }
    #[inline(always)]
    unsafe fn load_odd_bf16(self, from: *const bf16) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { self.load_bf16(from.add(1)) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, a: f32) {
        // SAFETY: the caller's promise.
        unsafe { to.write_unaligned(a) }
    }
    #[inline(always)]
    unsafe fn sum_four(self, to: *mut f32, a: [f32; 4]) {
        // SAFETY: the caller's promise.
        unsafe { to.cast::<[f32; 4]>().write_unaligned(a) }
    }
    #[inline(always)]
    fn transpose(self, _rows: &mut [f32; MOST_LANES]) {}
    #[inline(always)]
    fn prefetch(self, _address: *const u8) {}
}
