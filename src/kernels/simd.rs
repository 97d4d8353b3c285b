//! What the algorithms need of an instruction set.

use half::{bf16, f16};

use crate::dtype::Element;

/// Arithmetic on [`LANES`](Self::LANES) floats at once.
///
/// A value of an implementing type proves that the CPU has the instructions, so arithmetic is safe
/// to call; only loads and stores are not. All methods but [`call`](Self::call) and what is built
/// on them must be `#[inline(always)]`: they become vector code inside the function, marked with
/// the target features, that `call` makes of each job.
pub(super) trait Simd: Copy + Send + Sync {
    /// `LANES` floats.
    type F32: Copy;
    /// Floats in a vector; a power of two, at most [`TILE`](super::tile::TILE).
    const LANES: usize;
    /// Vectors that the CPU holds in registers: 16 or 32, what inner loops are blocked for.
    const REGISTERS: usize;

    /// Runs a job in a function of its own, compiled for this instruction set.
    ///
    /// # Safety
    /// - What the job asks for.
    unsafe fn call<J: Job<Self>>(self, job: J) -> J::Output;

    /// All lanes `x`.
    fn splat(self, x: f32) -> Self::F32;
    /// Lane `i` is `i`.
    fn lane_numbers(self) -> Self::F32;
    /// `a + b`.
    fn add(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a - b`.
    fn sub(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a * b`.
    fn mul(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a / b`.
    fn div(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a * b + c`, rounded once where the instruction set can.
    fn mul_add(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32;
    /// The larger; `b` where either is NaN.
    fn max(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `|a|`.
    fn abs(self, a: Self::F32) -> Self::F32;
    /// `magnitude` with the sign of `sign`; `magnitude` is not negative.
    fn with_sign(self, magnitude: Self::F32, sign: Self::F32) -> Self::F32;
    /// The nearest integer.
    fn round(self, a: Self::F32) -> Self::F32;
    /// `a * 2^n` for integers `n` in -126..=127; anything for other `n`.
    fn scale_by_power(self, a: Self::F32, n: Self::F32) -> Self::F32;
    /// `yes` where `a < b`, `no` elsewhere (NaN included).
    fn select_less(self, a: Self::F32, b: Self::F32, yes: Self::F32, no: Self::F32) -> Self::F32;
    /// The sum of all lanes, in an order that is the same for [`sum_four`](Self::sum_four).
    fn sum(self, a: Self::F32) -> f32;
    /// The largest lane; NaN lanes may be passed over.
    fn max_lane(self, a: Self::F32) -> f32;

    /// Loads `LANES` floats.
    ///
    /// # Safety
    /// - `from` is valid for reads of `LANES` elements; any alignment.
    unsafe fn load(self, from: *const f32) -> Self::F32;
    /// Loads and widens `LANES` halves.
    ///
    /// # Safety
    /// - `from` is valid for reads of `LANES` elements; any alignment.
    unsafe fn load_f16(self, from: *const f16) -> Self::F32;
    /// Loads and widens `LANES` bfloat16.
    ///
    /// # Safety
    /// - `from` is valid for reads of `LANES` elements; any alignment.
    unsafe fn load_bf16(self, from: *const bf16) -> Self::F32;
    /// Stores `LANES` floats.
    ///
    /// # Safety
    /// - `to` is valid for writes of `LANES` elements; any alignment.
    unsafe fn store(self, to: *mut f32, a: Self::F32);
    /// Stores the sums of all lanes of four vectors.
    ///
    /// # Safety
    /// - `to` is valid for writes of 4 elements; any alignment.
    unsafe fn sum_four(self, to: *mut f32, a: [Self::F32; 4]);
    /// Asks for the cache line at an address, which need not be valid.
    fn prefetch(self, address: *const u8);
}

/// A piece of work large enough for a function of its own.
pub(super) trait Job<S> {
    /// What it returns.
    type Output;
    /// Does it; `#[inline(always)]`.
    ///
    /// # Safety
    /// - What the implementing type asks for.
    unsafe fn run(self, simd: S) -> Self::Output;
}

/// An element type of pages, as vectors load it.
pub(super) trait Stored: Element {
    /// Loads and widens `LANES` elements.
    ///
    /// # Safety
    /// - `from` is valid for reads of `LANES` elements; any alignment.
    unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::F32;
}

impl Stored for f32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::F32 {
        // SAFETY: the caller's promise.
        unsafe { simd.load(from) }
    }
}

impl Stored for f16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::F32 {
        // SAFETY: the caller's promise.
        unsafe { simd.load_f16(from) }
    }
}

impl Stored for bf16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::F32 {
        // SAFETY: the caller's promise.
        unsafe { simd.load_bf16(from) }
    }
}
