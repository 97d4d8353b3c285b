//! Integers of eight bits, met by queries and weights that are counted in steps.

use std::marker::PhantomData;

use super::gather::Gather;
use super::gather_pairs::{InTwos, TwoByTwo};
use super::integers::Integers;
use super::method::{Method, Widened};
use super::query::QueryRow;
use super::simd::Job;
use super::state::Order;
use super::tokens::Tokens;

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
    unsafe fn load<const C: usize>(simd: S, token: *const i8, word: usize, c: usize) -> S::F32 {
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

    unsafe fn pack_values(_: S, _: Tokens<i8>, _: usize, _: &mut [f32]) {
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

    #[inline(always)]
    fn count_weights<const N: usize>(simd: S, row: &mut [f32; N]) -> f32 {
        // SAFETY: a row of whole vectors, with room for half as many bytes; numbers are stored behind those
        // that are read next.
        unsafe { Count { from: row.as_ptr(), len: N, to: row.as_mut_ptr().cast() }.run(simd) }
    }
}

impl<S: Integers> InTwos<S> for Stepped {
    const ZIPPED: bool = false;

    #[inline(always)]
    fn zip(simd: S, a: S::F32, b: S::F32) -> [S::F32; 2] {
        simd.zip(a, b)
    }
}

/// Counts numbers in steps, of which the largest has [`STEPS`]; returns the step. That is NaN if a number is
/// none, or infinite.
///
/// # Safety (of running it)
/// - `from` is valid for reads of `len` floats, a multiple of `LANES`, and `to` for writes of as many integers;
///   they may begin at the same address.
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
        let zero = simd.splat(0.0);
        // Comparisons pass over NaN, and products with 0 show it, and infinity.
        let (mut largest, mut zeros) = (zero, zero);
        for i in (0..len).step_by(S::LANES) {
            // SAFETY: the caller's promise.
            let x = unsafe { simd.load(from.add(i)) };
            largest = simd.max(simd.abs(x), largest);
            zeros = simd.mul_add(x, zero, zeros);
        }
        let step = (simd.max_lane(largest) / STEPS).max(LEAST);
        let inverse = simd.splat(1.0 / step);
        for i in (0..len).step_by(S::LANES) {
            // SAFETY: the caller's promise; integers are half as long.
            unsafe { simd.store_i16(to.add(i), simd.mul(simd.load(from.add(i)), inverse)) }
        }
        step + simd.sum(zeros)
    }
}
