//! From dot products to weights, one row of one tile at a time.

use std::iter::StepBy;
use std::ops::Range;

use super::math::{exp2_each, tanh};
use super::method::{Counted, Method};
use super::scales::TileScales;
use super::simd::Simd;

/// How much the largest logit may lie above what a row's weights are relative to: so little that weights and
/// their sums have the same digits, and so much that a row seldom meets a larger one. The largest itself
/// changes in every other tile or so, which no processor foresees.
const SLACK: f32 = 6.0;

/// How a dot product becomes a logit, which here is a power of 2: scale, cap and slope are those of a power of e
/// times log2 e.
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
    /// Whether the scales of the values seen are, where weights are counted.
    pub(super) uneven: bool,
    /// What weights are relative to, sum of weights and (in whole vectors) of weighted values so far.
    pub(super) reference: &'a mut f32,
    pub(super) sum: &'a mut f32,
    pub(super) acc: &'a mut [f32],
}

impl<const N: usize> Row<'_, N> {
    /// Turns dot products into weights (times the scales of values), and carries the running sums over where
    /// what these are relative to changes. Returns how they were counted.
    #[inline(always)]
    pub(super) fn weigh<S: Simd, M: Method<S>>(mut self, simd: S) -> Counted {
        let Logit { scale, soft_cap, slope, .. } = self.logit;
        let whole = self.seen.start == 0 && self.seen.end == N;
        let mut sum = simd.splat(0.0);
        // The most frequent case by far without a branch per vector, and without storing logits: there are
        // few multiply-adds to hide them behind.
        if whole && scale > 0.0 && soft_cap == 0.0 && slope == 0.0 {
            let scale = simd.splat(scale);
            let mut max = simd.splat(f32::NEG_INFINITY);
            for i in (0..N).step_by(S::LANES) {
                // SAFETY: `i` is a multiple of LANES inside the tile, whose size is one too.
                let x = unsafe {
                    match self.scales {
                        Some(_) => self.scaled(simd, i, scale),
                        None => simd.load(self.scores.as_ptr().add(i)),
                    }
                };
                max = simd.max(x, max);
            }
            if self.scales.is_none() {
                // The same as the largest of what is multiplied first, as rounding keeps the order.
                max = simd.mul(max, scale);
            }
            let reference = self.refer(simd, max);
            sum = self.whole_tile::<S, M>(simd, Some(scale), reference);
        } else {
            let (start, end) =
                (self.seen.start / S::LANES * S::LANES, self.seen.end.next_multiple_of(S::LANES));
            let vectors = (start..end).step_by(S::LANES);
            let max = self.logits(simd, vectors.clone(), whole);
            let reference = self.refer(simd, max);
            if whole {
                sum = self.whole_tile::<S, M>(simd, None, reference);
            } else {
                for i in vectors {
                    // SAFETY: `i` is a multiple of LANES inside the tile, whose size is one too.
                    sum = unsafe { self.weights::<S, M, 1>(simd, i, None, reference, sum) };
                }
                if M::COUNTS {
                    self.scores[..start].fill(0.0);
                    self.scores[end..].fill(0.0);
                }
            }
        }
        *self.sum += simd.sum(sum);
        M::count_weights(simd, self.scores, self.uneven)
    }

    /// Turns all vectors of logits, or of what `scale` makes logits, into weights; returns their sums.
    #[inline(always)]
    fn whole_tile<S: Simd, M: Method<S>>(
        &mut self,
        simd: S,
        scale: Option<S::F32>,
        reference: S::F32,
    ) -> S::F32 {
        let mut sum = simd.splat(0.0);
        // As many at once as registers hold beside constants.
        // SAFETY: a whole tile of vectors, whose number both divide.
        unsafe {
            if S::REGISTERS >= 32 {
                for i in (0..N).step_by(4 * S::LANES) {
                    sum = self.weights::<S, M, 4>(simd, i, scale, reference, sum);
                }
            } else {
                for i in (0..N).step_by(2 * S::LANES) {
                    sum = self.weights::<S, M, 2>(simd, i, scale, reference, sum);
                }
            }
        }
        sum
    }

    /// A vector of dot products times `scale` and those of keys.
    ///
    /// # Safety
    /// - It lies in the tile.
    #[inline(always)]
    unsafe fn scaled<S: Simd>(&self, simd: S, from: usize, scale: S::F32) -> S::F32 {
        // SAFETY: the caller's promise; scales are a tile too.
        unsafe {
            let x = simd.mul(simd.load(self.scores.as_ptr().add(from)), scale);
            match self.scales {
                Some(TileScales { key, .. }) => simd.mul(x, simd.load(key.as_ptr().add(from))),
                None => x,
            }
        }
    }

    /// `inside` for the tokens of a vector from number `from` on that are seen, else `outside`: a select, not a
    /// product, as what lies outside may be NaN.
    #[inline(always)]
    fn select_seen<S: Simd>(&self, simd: S, from: usize, inside: S::F32, outside: S::F32) -> S::F32 {
        let Range { start, end } = self.seen;
        let lanes = simd.add(simd.lane_numbers(), simd.splat(from as f32));
        let inside = simd.select_less(lanes, simd.splat(end as f32), inside, outside);
        simd.select_less(lanes, simd.splat(start as f32), outside, inside)
    }

    /// Turns some vectors of dot products into logits; returns the largest of each lane.
    #[inline(always)]
    fn logits<S: Simd>(&mut self, simd: S, vectors: StepBy<Range<usize>>, whole: bool) -> S::F32 {
        let logit = self.logit;
        let masked = simd.splat(f32::NEG_INFINITY);
        let scale = simd.splat(logit.scale);
        let mut max = masked;
        for i in vectors {
            // SAFETY: `i` is a multiple of LANES inside the tile, whose size is one too.
            let mut x = unsafe { self.scaled(simd, i, scale) };
            if logit.soft_cap > 0.0 {
                let cap = simd.splat(logit.soft_cap);
                x = simd.mul(cap, tanh(simd, simd.div(x, cap)));
            }
            if logit.slope != 0.0 {
                let lanes = simd.add(simd.lane_numbers(), simd.splat(i as f32));
                let distance = simd.add(lanes, simd.splat(logit.distance));
                x = simd.mul_add(simd.splat(logit.slope), distance, x);
            }
            if !whole {
                x = self.select_seen(simd, i, x, masked);
            }
            max = simd.max(x, max);
            // SAFETY: as above.
            unsafe { simd.store(self.scores.as_mut_ptr().add(i), x) }
        }
        max
    }

    /// What weights are relative to, given the largest logit of each lane: a reference that none exceeds by
    /// more than [`SLACK`]. Running sums are carried over where it has to change, to the largest so far.
    #[inline(always)]
    fn refer<S: Simd>(&mut self, simd: S, max: S::F32) -> S::F32 {
        let old = *self.reference;
        // Hardly ever: the next few keys seldom exceed many by so much.
        if simd.any_less(simd.splat(old + SLACK), max) {
            let new = old.max(simd.max_lane(max));
            // Nothing is 0 already.
            if *self.sum != 0.0 {
                let kept = rescale(old, new);
                *self.sum *= kept;
                let kept = simd.splat(kept);
                for x in self.acc.chunks_exact_mut(S::LANES) {
                    // SAFETY: a chunk is one vector.
                    unsafe { simd.store(x.as_mut_ptr(), simd.mul(simd.load(x.as_ptr()), kept)) }
                }
            }
            *self.reference = new;
        }
        // Nothing but -inf so far: any finite reference leaves all weights 0 (and NaN, NaN).
        simd.splat(if *self.reference == f32::NEG_INFINITY { 0.0 } else { *self.reference })
    }

    /// Turns `V` vectors from `from` on, of logits or of what `scale` makes logits, into weights, times the
    /// scales of values, and adds them to `sum`, without these scales.
    ///
    /// # Safety
    /// - These vectors lie in the tile.
    #[inline(always)]
    unsafe fn weights<S: Simd, M: Method<S>, const V: usize>(
        &mut self,
        simd: S,
        from: usize,
        scale: Option<S::F32>,
        reference: S::F32,
        mut sum: S::F32,
    ) -> S::F32 {
        let scores = self.scores.as_mut_ptr();
        let mut x = [reference; V];
        for (n, x) in x.iter_mut().enumerate() {
            let i = from + n * S::LANES;
            // SAFETY: the caller's promise.
            let logit = unsafe {
                match scale {
                    Some(scale) => self.scaled(simd, i, scale),
                    None => simd.load(scores.add(i)),
                }
            };
            *x = simd.sub(logit, reference);
        }
        for (n, mut weight) in exp2_each(simd, x).into_iter().enumerate() {
            let i = from + n * S::LANES;
            sum = simd.add(sum, weight);
            // SAFETY: the caller's promise; scales are a tile too.
            unsafe {
                if let Some(TileScales { value, .. }) = self.scales {
                    weight = simd.mul(weight, simd.load(value.as_ptr().add(i)));
                    // Elsewhere, no weight outside is used.
                    if M::PER_WORD > 1 && self.seen.len() < N {
                        weight = self.select_seen(simd, i, weight, simd.splat(0.0));
                    }
                }
                // Half as long where a word holds two: over what was read before.
                M::store_weights(simd, scores, i, weight);
            }
        }
        sum
    }
}

/// The factor that takes a sum relative to `from` to one relative to `to`, the larger.
#[inline]
pub(super) fn rescale(from: f32, to: f32) -> f32 {
    if from < to { (from - to).exp2() } else { 1.0 }
}
