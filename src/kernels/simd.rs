//! What the algorithms need of an instruction set.

use half::{bf16, f16};

use crate::dtype::F8E4M3;

/// Lanes of the widest instruction set.
pub(super) const MOST_LANES: usize = 16;

/// Arithmetic on [`LANES`](Self::LANES) floats at once.
///
/// A value of an implementing type proves that the CPU has the instructions, so arithmetic is safe
/// to call; only loads and stores are not. All methods but [`call`](Self::call) and what is built
/// on them must be `#[inline(always)]`: they become vector code inside the function, marked with
/// the target features, that `call` makes of each job.
pub(super) trait Simd: Copy + Send + Sync {
    /// `LANES` floats.
    type F32: Copy;
    /// Floats in a vector; a power of two, at most [`MOST_LANES`].
    const LANES: usize;
    /// Vectors that the CPU holds in registers: 16 or 32, what inner loops are blocked for.
    const REGISTERS: usize;
    /// Whether [`load_of_four_f8`](Self::load_of_four_f8) is faster than [`load_f8`](Self::load_f8).
    const DEALS_F8: bool = false;
    /// Products that one lane adds one after the other before it starts a new sum: fewer where each is
    /// rounded before it is added, so that as many bits are lost as elsewhere.
    const TERMS: usize = usize::MAX;

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
    /// `a` less the largest integer that is not above it: 0 to 1, which is what a tiny negative `a` comes near;
    /// anything beyond 2^22.
    fn fraction(self, a: Self::F32) -> Self::F32;
    /// `a * 2^⌊n⌋` for `n` from -126 to less than 128; anything for others.
    fn scale_by_power(self, a: Self::F32, n: Self::F32) -> Self::F32;
    /// `yes` where `a < b`, `no` elsewhere (NaN included).
    fn select_less(self, a: Self::F32, b: Self::F32, yes: Self::F32, no: Self::F32) -> Self::F32;
    /// 0 where `x < bound`, `a` elsewhere (NaN included). This body is the definition: sets with vectors override
    /// it.
    #[inline(always)]
    fn zero_below(self, x: Self::F32, bound: Self::F32, a: Self::F32) -> Self::F32 {
        self.select_less(x, bound, self.splat(0.0), a)
    }
    /// Whether `a < b` in any lane.
    fn any_less(self, a: Self::F32, b: Self::F32) -> bool;
    /// The sum of all lanes, always in the same order.
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
    /// Loads `2 * LANES` bfloat16 and widens those with even numbers.
    ///
    /// # Safety
    /// - `from` is valid for reads of `2 * LANES` elements; any alignment.
    unsafe fn load_even_bf16(self, from: *const bf16) -> Self::F32;
    /// Loads `2 * LANES` bfloat16 and widens those with odd numbers.
    ///
    /// # Safety
    /// - `from` is valid for reads of `2 * LANES` elements; any alignment.
    unsafe fn load_odd_bf16(self, from: *const bf16) -> Self::F32;
    /// Loads `LANES` signed bytes as floats. This body is the definition: sets with vectors override it.
    ///
    /// # Safety
    /// - `from` is valid for reads of `LANES` elements; any alignment.
    #[inline(always)]
    unsafe fn load_i8(self, from: *const i8) -> Self::F32 {
        let mut lanes = [0.0; MOST_LANES];
        for (i, lane) in lanes.iter_mut().enumerate().take(Self::LANES) {
            // SAFETY: the caller's promise.
            *lane = unsafe { from.add(i).read() }.into();
        }
        // SAFETY: there are at least `LANES`.
        unsafe { self.load(lanes.as_ptr()) }
    }
    /// Loads `LANES` numbers of eight bits, each 2^-8 of what it stands for: as a half whose sign is
    /// theirs and whose lower exponent and upper mantissa are the rest, exactly, subnormals too. Codes
    /// of NaN are not looked for: they are 480 times 2^-8. This body is the definition: sets with
    /// vectors override it.
    ///
    /// # Safety
    /// - `from` is valid for reads of `LANES` elements; any alignment.
    #[inline(always)]
    unsafe fn load_f8(self, from: *const F8E4M3) -> Self::F32 {
        let mut lanes = [0.0; MOST_LANES];
        for (i, lane) in lanes.iter_mut().enumerate().take(Self::LANES) {
            // SAFETY: the caller's promise.
            let bits = u16::from(unsafe { from.add(i).read() }.0);
            *lane = f16::from_bits((bits & 0x80) << 8 | (bits & 0x7F) << 7).to_f32();
        }
        // SAFETY: there are at least `LANES`.
        unsafe { self.load(lanes.as_ptr()) }
    }
    /// Loads `4 * LANES` numbers of eight bits and widens one of every four, number 0, 2, 1 or 3 for `which` of 0 to
    /// 3, as [`load_f8`](Self::load_f8) has them; where not `ANY`, all are [normal](Self::all_normal_f8). This body is the
    /// definition: sets for which it pays override it.
    ///
    /// # Safety
    /// - `from` is valid for reads of `4 * LANES` elements; any alignment.
    #[inline(always)]
    unsafe fn load_of_four_f8<const ANY: bool>(self, from: *const F8E4M3, which: usize) -> Self::F32 {
        let mut some = [F8E4M3(0); MOST_LANES];
        for (i, x) in some.iter_mut().enumerate().take(Self::LANES) {
            // SAFETY: the caller's promise.
            *x = unsafe { from.add(4 * i + which % 2 * 2 + which / 2).read() };
        }
        // SAFETY: there are at least `LANES`.
        unsafe { self.load_f8(some.as_ptr()) }
    }
    /// Whether the first `count` numbers of eight bits of `K` tokens, a multiple of `4 * LANES`, are neither zero nor
    /// subnormal. This body is the definition: sets with [`load_of_four_f8`](Self::load_of_four_f8) override it.
    ///
    /// # Safety
    /// - Each token is valid for reads of `count` elements; any alignment.
    #[inline(always)]
    unsafe fn all_normal_f8<const K: usize>(self, tokens: [*const F8E4M3; K], count: usize) -> bool {
        // SAFETY: the caller's promise.
        tokens.iter().all(|token| (0..count).all(|i| unsafe { token.add(i).read() }.0 & 0x78 != 0))
    }
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
    /// Stores the sums of all lanes of sixteen vectors, each as [`sum_four`](Self::sum_four) has it. This
    /// body is the definition: sets with vectors as long override it.
    ///
    /// # Safety
    /// - `to` is valid for writes of 16 elements; any alignment.
    #[inline(always)]
    unsafe fn sum_sixteen(self, to: *mut f32, a: [Self::F32; 16]) {
        for i in (0..16).step_by(4) {
            // SAFETY: the caller's promise.
            unsafe { self.sum_four(to.add(i), [a[i], a[i + 1], a[i + 2], a[i + 3]]) }
        }
    }
    /// Lane `j` of vector `i` becomes lane `i` of vector `j`, for the first `LANES` vectors.
    fn transpose(self, rows: &mut [Self::F32; MOST_LANES]);
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

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "small integers are exact")]
pub(super) mod tests {
    use super::super::isa::{dispatch, tested};
    use super::{MOST_LANES, Simd};

    /// The floats of a vector.
    pub(in crate::kernels) fn lanes<S: Simd>(simd: S, a: S::F32) -> Vec<f32> {
        let mut lanes = vec![0.0; S::LANES];
        // SAFETY: so many lanes.
        unsafe { simd.store(lanes.as_mut_ptr(), a) }
        lanes
    }

    /// Each method against the plainest reading of its description; only what the CPU has.
    fn check<S: Simd>(simd: S) {
        let numbers: Vec<f32> = (0..2 * MOST_LANES as u16).map(f32::from).collect();
        let mut rows = [simd.splat(-1.0); MOST_LANES];
        for (i, row) in rows.iter_mut().enumerate().take(S::LANES) {
            *row = simd.add(simd.lane_numbers(), simd.splat((100 * i) as f32));
        }
        simd.transpose(&mut rows);
        for (j, &row) in rows.iter().enumerate().take(S::LANES) {
            let want: Vec<f32> = (0..S::LANES).map(|i| (100 * i + j) as f32).collect();
            assert_eq!(lanes(simd, row), want);
        }

        // SAFETY: so many numbers are there.
        let vector = unsafe { simd.load(numbers.as_ptr()) };
        let mut sums = [0.0; 4];
        let four = [simd.splat(1.0), vector, simd.splat(2.0), vector];
        // SAFETY: room for four.
        unsafe { simd.sum_four(sums.as_mut_ptr(), four) };
        let sum = (S::LANES * (S::LANES - 1) / 2) as f32;
        assert_eq!(sums, [S::LANES as f32, sum, 2.0 * S::LANES as f32, sum]);
        // Of numbers whose sums are rounded, differently in another order.
        let rough = |i: usize| (0..MOST_LANES).map(move |lane| ((i * 16 + lane) as f32 * 0.7).sin().exp2());
        // SAFETY: so many numbers are there.
        let sixteen =
            std::array::from_fn::<_, 16, _>(|i| unsafe { simd.load(rough(i).collect::<Vec<_>>().as_ptr()) });
        let (mut want, mut got) = ([0.0; 16], [0.0; 16]);
        for (four, to) in sixteen.as_chunks::<4>().0.iter().zip(want.as_chunks_mut::<4>().0) {
            // SAFETY: room for four.
            unsafe { simd.sum_four(to.as_mut_ptr(), *four) };
        }
        // SAFETY: room for sixteen.
        unsafe { simd.sum_sixteen(got.as_mut_ptr(), sixteen) };
        assert_eq!(got.map(f32::to_bits), want.map(f32::to_bits));

        assert_eq!([simd.sum(vector), simd.max_lane(vector)], [sum, (S::LANES - 1) as f32]);
        let last = simd.splat((S::LANES - 1) as f32);
        assert!(!simd.any_less(last, vector) && simd.any_less(simd.sub(last, simd.splat(0.5)), vector));
        assert!(!simd.any_less(vector, simd.splat(f32::NAN)));
        for (x, floor) in
            [(-2.0, -2.0), (-1.25, -2.0), (5.75, 5.0), (-126.0, -126.0), (0.0, 0.0), (127.5, 127.0)]
        {
            assert_eq!(lanes(simd, simd.fraction(simd.splat(x))), vec![x - floor; S::LANES]);
            let scaled = lanes(simd, simd.scale_by_power(simd.splat(1.5), simd.splat(x)));
            assert_eq!(scaled, vec![1.5 * floor.exp2(); S::LANES], "2^⌊{x}⌋");
        }
        assert!(lanes(simd, simd.fraction(simd.splat(-1e-10))).iter().all(|x| (1.0 - x).abs() < 1e-7));
    }

    #[test]
    fn every_instruction_set_does_what_the_trait_says() {
        for level in tested() {
            dispatch!(level, simd => check(simd));
        }
    }
}
