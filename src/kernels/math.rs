//! Functions that no instruction computes.

#![expect(clippy::needless_range_loop, reason = "zip stays a call where a profile has no LTO at all")]

use std::f32::consts::LOG2_E;

use super::simd::Simd;

/// `2^x` for `x` up to 115, off by at most 2e-7 of it; exactly 1 at 0, 0 below -126 (where it would be no
/// normal float any more), NaN for NaN.
///
/// `2^⌊x⌋` by its exponent, the rest by the polynomial of degree 5 that is 1 at 0 and off by at most 0.83e-7 of
/// it from 0 to 1.
#[inline(always)]
pub(super) fn exp2_each<S: Simd, const N: usize>(simd: S, x: [S::F32; N]) -> [S::F32; N] {
    // Step by step for all vectors: one alone waits for each of its steps.
    let mut rest = x;
    for i in 0..N {
        rest[i] = simd.fraction(x[i]);
    }
    let power =
        polynomial(simd, rest, [1.867_13e-3, 9.017_03e-3, 5.579_991e-2, 2.401_644_9e-1, 6.931_513e-1, 1.0]);
    let mut result = x;
    for i in 0..N {
        result[i] = simd.zero_below(x[i], simd.splat(-126.0), simd.scale_by_power(power[i], x[i]));
    }
    result
}

/// `tanh x`, to 3 units in the last place; NaN for NaN.
///
/// Near 0, where `1 - 2 / (e^2x + 1)` would cancel, the polynomial of Cephes' `tanhf`.
#[inline(always)]
pub(super) fn tanh<S: Simd>(simd: S, x: S::F32) -> S::F32 {
    let one = simd.splat(1.0);
    let magnitude = simd.abs(x);
    let [e] = exp2_each(simd, [simd.mul(magnitude, simd.splat(-2.0 * LOG2_E))]);
    let far = simd.with_sign(simd.div(simd.sub(one, e), simd.add(one, e)), x);
    let square = simd.mul(x, x);
    let [p] = polynomial(
        simd,
        [square],
        [-5.704_988_7e-3, 2.063_909e-2, -5.373_971e-2, 1.333_144_2e-1, -3.333_328e-1],
    );
    let near = simd.mul_add(simd.mul(x, square), p, x);
    simd.select_less(magnitude, simd.splat(0.625), near, far)
}

/// Horner's rule, highest power first.
#[inline(always)]
fn polynomial<S: Simd, const N: usize, const C: usize>(
    simd: S,
    x: [S::F32; N],
    coefficients: [f32; C],
) -> [S::F32; N] {
    let mut sums = [simd.splat(coefficients[0]); N];
    for c in 1..C {
        for i in 0..N {
            sums[i] = simd.mul_add(sums[i], x[i], simd.splat(coefficients[c]));
        }
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::super::isa::{dispatch, tested};
    use super::super::simd::{MOST_LANES, Simd};
    use super::{exp2_each, tanh};

    /// `f` of each number, as many at once as there are lanes.
    fn each<S: Simd>(simd: S, f: impl Fn(S, S::F32) -> S::F32, x: &[f32]) -> Vec<f32> {
        let mut lanes = [0.0; MOST_LANES];
        let mut got = Vec::with_capacity(x.len());
        for x in x.chunks(S::LANES) {
            lanes[..x.len()].copy_from_slice(x);
            // SAFETY: there are at least `LANES`.
            unsafe { simd.store(lanes.as_mut_ptr(), f(simd, simd.load(lanes.as_ptr()))) }
            got.extend(&lanes[..x.len()]);
        }
        got
    }

    fn check<S: Simd>(simd: S) {
        let exp2 = |simd, x| exp2_each(simd, [x])[0];
        let ends = [0.0, f32::NEG_INFINITY, f32::NAN, -126.0, -126.1, -1e30];
        assert!(
            matches!(each(simd, exp2, &ends)[..], [1.0, 0.0, nan, f32::MIN_POSITIVE, 0.0, 0.0] if nan.is_nan())
        );
        let tiny = (0..40).map(|i| -(f32::from(i as u8) - 39.0).exp2());
        let numbers: Vec<f32> = (-1_150_000..1_260_000).map(|i| -1e-4 * i as f32).chain(tiny).collect();
        for (&x, got) in numbers.iter().zip(each(simd, exp2, &numbers)) {
            let want = f64::from(x).exp2();
            assert!((f64::from(got) / want - 1.0).abs() < 2e-7, "2^{x} = {got}, not {want}");
        }
        let ends = [1e30, f32::NEG_INFINITY, f32::NAN];
        assert!(matches!(each(simd, tanh, &ends)[..], [1.0, -1.0, nan] if nan.is_nan()));
        let around: Vec<f32> = (-100_000..100_000).map(|i| 1e-4 * i as f32 + 1e-6).collect();
        for (&x, got) in around.iter().zip(each(simd, tanh, &around)) {
            let want = f64::from(x).tanh();
            assert!((f64::from(got) / want - 1.0).abs() < 3.6e-7, "tanh({x}) = {got}, not {want}");
        }
    }

    #[test]
    fn exp2_and_tanh_are_right_to_a_few_units_in_the_last_place() {
        for level in tested() {
            dispatch!(level, simd => check(simd));
        }
    }
}
