//! Functions that no instruction computes.

#![expect(clippy::needless_range_loop, reason = "zip stays a call where a profile has no LTO at all")]

use super::simd::Simd;

/// `e^x` for `x` up to 80, to 2 units in the last place; exactly 1 at 0, 0 below -87.3 (where it would
/// be no normal float any more), NaN for NaN.
///
/// `x = n·ln 2 + r`, then `e^r` by the polynomial of degree 5 that is 1 at 0 and off by at most 0.92e-7 of it.
#[inline(always)]
pub(super) fn exp<S: Simd>(simd: S, x: S::F32) -> S::F32 {
    exp_each(simd, [x])[0]
}

/// [`exp`] of several vectors, step by step for all of them: one alone waits for each of its steps.
#[inline(always)]
pub(super) fn exp_each<S: Simd, const N: usize>(simd: S, x: [S::F32; N]) -> [S::F32; N] {
    // ln 2 in two parts: products of the first with integers up to 2^14 are exact.
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let mut n = x;
    let mut r = x;
    for i in 0..N {
        n[i] = simd.round(simd.mul(x[i], simd.splat(std::f32::consts::LOG2_E)));
    }
    for i in 0..N {
        r[i] = simd.mul_add(n[i], simd.splat(-LN_2_HIGH), x[i]);
    }
    for i in 0..N {
        r[i] = simd.mul_add(n[i], simd.splat(-LN_2_LOW), r[i]);
    }
    let exp_r =
        polynomial(simd, r, [8.290_272e-3, 4.189_816e-2, 1.666_763_8e-1, 4.999_914_8e-1, 9.999_997e-1, 1.0]);
    let mut result = x;
    for i in 0..N {
        result[i] = simd.zero_below(x[i], simd.splat(-87.3), simd.scale_by_power(exp_r[i], n[i]));
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
    let e = exp(simd, simd.mul(magnitude, simd.splat(-2.0)));
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
    use super::{exp, tanh};

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
        let ends = [0.0, f32::NEG_INFINITY, f32::NAN];
        assert!(matches!(each(simd, exp, &ends)[..], [1.0, 0.0, nan] if nan.is_nan()));
        let numbers: Vec<f32> = (-800_000..873_000).map(|i| -1e-4 * i as f32).collect();
        for (&x, got) in numbers.iter().zip(each(simd, exp, &numbers)) {
            let want = f64::from(x).exp();
            assert!((f64::from(got) / want - 1.0).abs() < 2.4e-7, "exp({x}) = {got}, not {want}");
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
    fn exp_and_tanh_are_right_to_a_few_units_in_the_last_place() {
        for level in tested() {
            dispatch!(level, simd => check(simd));
        }
    }
}
