//! Integers of eight bits, met by queries and weights that are counted in steps.

use std::marker::PhantomData;

use super::gather::Gather;
use super::gather_pairs::{InTwos, TwoByTwo};
use super::integers::Integers;
use super::method::{Counted, FINER, Method, Widened};
use super::query::QueryRow;
use super::simd::Job;
use super::state::Order;
use super::tokens::{TILE, Tokens};

/// Steps from 0 to the largest number of a row.
const STEPS: f32 = i16::MAX as f32;
/// The least step, whose inverse is a number, and which is one that a few products leave normal.
const LEAST: f32 = f32::from_bits((127 - 110) << 23);
/// Elements of a key, at most, whose products 32 bits hold: each is below 2^7 * 2^15, and a lane of eight
/// adds an eighth of them.
pub(super) const MOST_ELEMENTS: usize = 2048;

/// Each row of queries, and its weights for each tile, become integers of 16 bits, in steps of their own; so
/// do keys and values, in steps of 1. Products and sums are exact.
pub(super) struct Stepped;

impl<S: Integers> Method<S> for Stepped {
    type Element = i8;
    // Not used: where tiles are made ready, elements are widened.
    type Prepared = Widened<f32>;
    const PER_WORD: usize = 2;
    const STORED: usize = 2;
    const ROWS: usize = if S::REGISTERS >= 32 { 8 } else { 6 };
    const COUNTS: bool = true;

    fn order(_: bool) -> Order {
        Order::Zipped { lanes: S::LANES, vectors: 2 }
    }

    unsafe fn load_query(simd: S, row: QueryRow, floats: &mut [f32], into: &mut [f32]) -> f32 {
        // SAFETY: the caller's promise; there is room for half as many words.
        unsafe {
            row.widen(simd, floats);
            simd.call(Count { from: floats.as_ptr(), len: row.dim, to: into.as_mut_ptr().cast() })
        }
    }

    #[inline(always)]
    unsafe fn load<const C: usize, const ANY: bool>(
        simd: S,
        token: *const i8,
        word: usize,
        c: usize,
    ) -> S::F32 {
        // SAFETY: the caller's promise.
        unsafe { simd.load_i16(token.add(2 * (word + c * S::LANES))) }
    }

    #[inline(always)]
    fn multiply_add(simd: S, a: S::F32, b: S::F32, c: S::F32) -> S::F32 {
        simd.dot_i16(a, b, c)
    }

    #[inline(always)]
    fn to_floats(simd: S, sums: S::F32) -> S::F32 {
        simd.to_floats(sums)
    }

    fn only(_: S, _: S::F32, _: usize) -> S::F32 {
        unreachable!("no tile is packed")
    }

    unsafe fn pack_values(_: S, _: Tokens<i8>, _: usize, _: usize, _: usize, _: &mut [f32]) {
        unreachable!("no tile is packed")
    }

    unsafe fn gather<const R: usize, const N: usize>(simd: S, job: Gather<i8, R, N>) {
        // SAFETY: the caller's promise.
        unsafe { simd.call(TwoByTwo { gather: job, method: PhantomData::<Self> }) }
    }

    #[inline(always)]
    unsafe fn store_weights(simd: S, row: *mut f32, i: usize, weights: S::F32) {
        // SAFETY: the caller's promise.
        unsafe { simd.store(row.add(i), weights) }
    }

    /// Whole steps in the first half of the row, what is left of each weight in the second, if that counts:
    /// half a step for each of the weights may be more than 2^-12 of their sum only where this is less than
    /// four times the largest.
    #[inline(always)]
    fn count_weights<const N: usize>(simd: S, row: &mut [f32; N], uneven: bool) -> Counted {
        let zero = simd.splat(0.0);
        let mut weights = [zero; TILE / 8];
        let weights = &mut weights[..N / S::LANES];
        let (mut largest, mut mean) = (zero, zero);
        for (i, weight) in weights.iter_mut().enumerate() {
            // SAFETY: as many vectors as the row has.
            *weight = unsafe { simd.load(row.as_ptr().add(i * S::LANES)) };
            let magnitude = simd.abs(*weight);
            largest = simd.max(magnitude, largest);
            mean = simd.mul_add(magnitude, simd.splat(1.0 / N as f32), mean);
        }
        let mean = simd.sum(mean);
        let (step, inverse) = step_of(simd.max_lane(largest));
        // Comparisons pass over NaN, and the mean shows it, and infinity.
        let step = step + mean * 0.0;
        let finer = uneven || mean < STEPS / 16.0 * step;
        let inverse = simd.splat(inverse);
        let whole: *mut i16 = row.as_mut_ptr().cast();
        for (i, weight) in weights.iter_mut().enumerate() {
            *weight = simd.mul(*weight, inverse);
            // SAFETY: half as long as the row.
            unsafe { simd.store_i16(whole.add(i * S::LANES), *weight) }
        }
        let left = &mut row[N / 2..];
        if finer {
            let left: *mut i16 = left.as_mut_ptr().cast();
            for (i, &steps) in weights.iter().enumerate() {
                let part = simd.mul(simd.sub(steps, simd.round(steps)), simd.splat(1.0 / FINER));
                // SAFETY: as long as the other half.
                unsafe { simd.store_i16(left.add(i * S::LANES), part) }
            }
        } else {
            left.fill(0.0);
        }
        Counted { step, finer }
    }
}

impl<S: Integers> InTwos<S> for Stepped {
    const ZIPPED: bool = false;
}

/// The step of which a magnitude has [`STEPS`], and its inverse.
#[inline(always)]
fn step_of(largest: f32) -> (f32, f32) {
    let largest = largest.max(LEAST * STEPS);
    (largest * (1.0 / STEPS), STEPS / largest)
}

/// Counts a row of queries in steps, and returns the step.
///
/// # Safety (of running it)
/// - `from` is valid for reads of `len` floats, a multiple of `LANES`, and `to` for writes of as many integers.
struct Count {
    from: *const f32,
    len: usize,
    to: *mut i16,
}

impl<S: Integers> Job<S> for Count {
    type Output = f32;

    #[inline(always)]
    unsafe fn run(self, simd: S) -> f32 {
        let Self { from, len, to } = self;
        let (mut largest, mut zeros) = (simd.splat(0.0), simd.splat(0.0));
        for i in (0..len).step_by(S::LANES) {
            // SAFETY: the caller's promise.
            let x = unsafe { simd.load(from.add(i)) };
            largest = simd.max(simd.abs(x), largest);
            // Comparisons pass over NaN, and these show it, and infinity.
            zeros = simd.mul_add(x, simd.splat(0.0), zeros);
        }
        let (step, inverse) = step_of(simd.max_lane(largest));
        for i in (0..len).step_by(S::LANES) {
            // SAFETY: the caller's promise.
            unsafe { simd.store_i16(to.add(i), simd.mul(simd.load(from.add(i)), simd.splat(inverse))) }
        }
        step + simd.sum(zeros)
    }
}
