//! Four lanes of plain Rust, for every CPU, and the plainest reading of [`Simd`].
//!
//! Four, since one lane alone would add all products of a logit one after the other, each rounded before,
//! and lose more bits than other sets do.

use std::array::from_fn;

use half::{bf16, f16};

use super::simd::{Job, MOST_LANES, Simd};

const LANES: usize = 4;
type F32 = [f32; LANES];

/// Plain Rust.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scalar;

/// The nearest integer, as long as |a| < 2^22: adding 1.5 * 2^23 leaves no bits behind the point.
#[inline(always)]
fn nearest(a: f32) -> f32 {
    (a + 12_582_912.0) - 12_582_912.0
}

/// The largest integer that is not above `a`, as far as there is a [`nearest`]. `f32::floor` is a call into the C
/// library.
#[inline(always)]
fn floor(a: f32) -> f32 {
    let nearest = nearest(a);
    if nearest > a { nearest - 1.0 } else { nearest }
}

/// Writes methods once, from what they do to the floats of one lane.
macro_rules! lanes {
    ($(fn $name:ident($($arg:ident),*) = $body:expr;)*) => {$(
        #[inline(always)]
        fn $name(self, $($arg: F32),*) -> F32 {
            from_fn(|i| {
                $(let $arg = $arg[i];)*
                $body
            })
        }
    )*};
}

impl Simd for Scalar {
    type F32 = F32;
    const LANES: usize = LANES;
    const REGISTERS: usize = 16;
    const TERMS: usize = 32;

    #[inline(never)]
    unsafe fn call<J: Job<Self>>(self, job: J) -> J::Output {
        // SAFETY: the caller's promise.
        unsafe { job.run(self) }
    }

    lanes! {
        fn add(a, b) = a + b;
        fn sub(a, b) = a - b;
        fn mul(a, b) = a * b;
        fn div(a, b) = a / b;
        // Not `f32::mul_add`: without the instruction that is a call into the C library.
        fn mul_add(a, b, c) = a * b + c;
        fn max(a, b) = if a > b { a } else { b };
        fn abs(a) = a.abs();
        fn with_sign(magnitude, sign) = magnitude.copysign(sign);
        fn round(a) = nearest(a);
        fn fraction(a) = a - floor(a);
        fn scale_by_power(a, n) = a * f32::from_bits(((floor(n) as i32).wrapping_add(127) as u32) << 23);
        fn select_less(a, b, yes, no) = if a < b { yes } else { no };
    }

    #[inline(always)]
    fn splat(self, x: f32) -> F32 {
        [x; LANES]
    }
    #[inline(always)]
    fn lane_numbers(self) -> F32 {
        [0.0, 1.0, 2.0, 3.0]
    }
    #[inline(always)]
    fn any_less(self, a: F32, b: F32) -> bool {
        a.iter().zip(&b).any(|(a, b)| a < b)
    }
    #[inline(always)]
    fn sum(self, a: F32) -> f32 {
        (a[0] + a[1]) + (a[2] + a[3])
    }
    #[inline(always)]
    fn max_lane(self, a: F32) -> f32 {
        a[0].max(a[1]).max(a[2].max(a[3]))
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> F32 {
        // SAFETY: the caller's promise.
        unsafe { from.cast::<F32>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const f16) -> F32 {
        // SAFETY: the caller's promise.
        unsafe { from.cast::<[f16; LANES]>().read_unaligned() }.map(f16::to_f32)
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const bf16) -> F32 {
        // SAFETY: the caller's promise.
        unsafe { from.cast::<[bf16; LANES]>().read_unaligned() }.map(bf16::to_f32)
    }
    #[inline(always)]
    unsafe fn load_even_bf16(self, from: *const bf16) -> F32 {
        // SAFETY: the caller's promise.
        let pairs = unsafe { from.cast::<[[bf16; 2]; LANES]>().read_unaligned() };
        pairs.map(|[even, _]| even.to_f32())
    }
    #[inline(always)]
    unsafe fn load_odd_bf16(self, from: *const bf16) -> F32 {
        // SAFETY: the caller's promise.
        let pairs = unsafe { from.cast::<[[bf16; 2]; LANES]>().read_unaligned() };
        pairs.map(|[_, odd]| odd.to_f32())
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, a: F32) {
        // SAFETY: the caller's promise.
        unsafe { to.cast::<F32>().write_unaligned(a) }
    }
    #[inline(always)]
    unsafe fn sum_four(self, to: *mut f32, a: [F32; 4]) {
        // SAFETY: the caller's promise.
        unsafe { to.cast::<[f32; 4]>().write_unaligned(a.map(|a| self.sum(a))) }
    }
    #[inline(always)]
    fn transpose(self, rows: &mut [F32; MOST_LANES]) {
        let [a, b, c, d] = [rows[0], rows[1], rows[2], rows[3]];
        for (i, row) in rows.iter_mut().enumerate().take(LANES) {
            *row = [a[i], b[i], c[i], d[i]];
        }
    }
    #[inline(always)]
    fn prefetch(self, _address: *const u8) {}
}
