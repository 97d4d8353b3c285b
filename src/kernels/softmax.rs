//! From dot products to weights, one row of one tile at a time.

use std::ops::Range;

use super::math::{exp, tanh};
use super::method::Method;
use super::scales::TileScales;
use super::simd::Simd;

/// How a dot product becomes a logit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Logit {
    /// Its factor.
    pub(super) scale: f32,
    /// `cap * tanh(logit / cap)`; 0 switches it off.
    pub(super) soft_cap: f32,
    /// Added per position that the key lies behind the query; 0 switches it off.
    pub(super) slope: f32,
    /// Position of the tile's first key, less the query's.
    pub(super) distance: f32,
}

/// One row's dot products with a tile, and what it has seen before.
pub(super) struct Row<'a, const N: usize> {
    pub(super) scores: &'a mut [f32; N],
    /// The products that count: not empty, inside the tile. Weights outside become 0 or stay.
    pub(super) seen: Range<usize>,
    pub(super) logit: Logit,
    /// What products, and then weights, are multiplied by besides, key by key.
    pub(super) scales: Option<TileScales<'a>>,
    /// Largest logit, sum of weights and (in whole vectors) of weighted values so far.
    pub(super) max: &'a mut f32,
    pub(super) sum: &'a mut f32,
    pub(super) acc: &'a mut [f32],
}

impl<const N: usize> Row<'_, N> {
    /// Turns dot products into weights relative to the new maximum (times the scales of values), and
    /// carries the running sums over to it.
    #[inline(always)]
    pub(super) fn weigh<S: Simd, M: Method<S>>(self, simd: S) {
        let Self { seen, logit, scales, .. } = self;
        let scores = self.scores.as_mut_ptr();
        let vectors = (seen.start / S::LANES * S::LANES..seen.end.min(N)).step_by(S::LANES);
        let (start, end) = (simd.splat(seen.start as f32), simd.splat(seen.end as f32));
        let whole = seen.start == 0 && seen.end == N;
        let masked = simd.splat(f32::NEG_INFINITY);
        let scale = simd.splat(logit.scale);
        let mut max = masked;
        for i in vectors.clone() {
            // SAFETY: `i` is a multiple of LANES inside the tile, whose size is one too.
            let mut x = simd.mul(unsafe { simd.load(scores.add(i)) }, scale);
            if let Some(TileScales { key, .. }) = scales {
                // SAFETY: as above.
                x = simd.mul(x, unsafe { simd.load(key.as_ptr().add(i)) });
            }
            if logit.soft_cap > 0.0 {
                let cap = simd.splat(logit.soft_cap);
                x = simd.mul(cap, tanh(simd, simd.div(x, cap)));
            }
            let lanes = simd.add(simd.lane_numbers(), simd.splat(i as f32));
            if logit.slope != 0.0 {
                let distance = simd.add(lanes, simd.splat(logit.distance));
                x = simd.mul_add(simd.splat(logit.slope), distance, x);
            }
            if !whole {
                // A select, not a sum: what lies outside may be NaN.
                x = simd.select_less(lanes, start, masked, simd.select_less(lanes, end, x, masked));
            }
            max = simd.max(x, max);
            // SAFETY: as above.
            unsafe { simd.store(scores.add(i), x) }
        }
        let old_max = *self.max;
        // Mostly not: the largest of many keys is seldom among the next few.
        if simd.any_less(simd.splat(old_max), max) {
            *self.max = old_max.max(simd.max_lane(max));
        }
        let new_max = *self.max;
        // Nothing but -inf so far: any finite reference leaves all weights 0 (and NaN, NaN).
        let reference = simd.splat(if new_max == f32::NEG_INFINITY { 0.0 } else { new_max });
        let mut sum = simd.splat(0.0);
        for i in vectors {
            // SAFETY: as above.
            unsafe {
                let weight = exp(simd, simd.sub(simd.load(scores.add(i)), reference));
                sum = simd.add(sum, weight);
                let weight = match scales {
                    Some(TileScales { value, .. }) => simd.mul(weight, simd.load(value.as_ptr().add(i))),
                    None => weight,
                };
                // Half as long where a word holds two: over dot products that were read before.
                M::store_weights(simd, scores, i, weight);
            }
        }
        if old_max < new_max {
            let kept = rescale(old_max, new_max);
            // Nothing is 0 already.
            if *self.sum != 0.0 {
                let kept = simd.splat(kept);
                for x in self.acc.chunks_exact_mut(S::LANES) {
                    // SAFETY: a chunk is one vector.
                    unsafe { simd.store(x.as_mut_ptr(), simd.mul(simd.load(x.as_ptr()), kept)) }
                }
            }
            *self.sum *= kept;
        }
        *self.sum += simd.sum(sum);
    }
}

/// The factor that takes a sum relative to `from` to one relative to `to`, the larger.
#[inline]
pub(super) fn rescale(from: f32, to: f32) -> f32 {
    if from < to { (from - to).exp() } else { 1.0 }
}
