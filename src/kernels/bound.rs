//! How far attention over quantised keys and values may lie from attention over what they were.
//!
//! `docs/design.md` derives what is summed here. All of it is f64, so that no rounding of float32 has
//! to be reckoned with.

use std::marker::PhantomData;
use std::ops::Range;

use super::flash::{Block, Call};
use super::rows::load_row;
use super::simd::{Job, Simd};
use super::stored::Stored;
use crate::dtype::{DType, F8E4M3};
use crate::storage::PagesView;

/// What f64 may have rounded away from a bound: of itself, and of the largest value.
const SLACK: f64 = 1e-9;
/// Partial sums of a dot product.
const SUMS: usize = 8;

/// For each query head of a block of one query and one KV head: a bound on the error of any element of
/// its row.
///
/// # Panics
/// If shapes don't fit, a page number that is needed lies outside the pool, or scales are missing.
pub(super) fn error_bound<S: Simd>(simd: S, call: &Call, block: &Block) -> Vec<f64> {
    assert!((block.num_queries, block.num_kv_heads) == (1, 1), "one query and one KV head");
    // SAFETY: the jobs ask for nothing.
    unsafe {
        match call.key_pages.layout().dtype {
            DType::I8 => simd.call(Certify { call, block, stored: PhantomData::<i8> }),
            DType::F8E4M3 => simd.call(Certify { call, block, stored: PhantomData::<F8E4M3> }),
            dtype => panic!("{dtype} is not quantised"),
        }
    }
}

/// The largest distance, in units of the scale, of a number from the element that it was rounded to:
/// half a step of integers; half of the step above an element of floating point, whose steps are even
/// below 2^-6. The division before it rounds too, by less than a step's ten thousandth.
#[inline(always)]
fn rounding_error<T: Stored>(element: f64) -> f64 {
    match T::DTYPE {
        DType::I8 => 0.5001,
        _ => (element.abs() / 16.0).max(1.0 / 1024.0) * 1.0001,
    }
}

/// All rows of the block.
struct Certify<'a, T> {
    call: &'a Call<'a>,
    block: &'a Block<'a>,
    stored: PhantomData<T>,
}

/// What a row knows of one key.
#[derive(Clone, Copy, Default)]
struct Seen {
    /// Its logit, then its weight relative to the largest.
    weight: f64,
    /// How far the logit may be off, then how much larger the weight may be.
    more: f64,
}

impl<S: Simd, T: Stored> Job<S> for Certify<'_, T> {
    type Output = Vec<f64>;

    #[inline(always)]
    unsafe fn run(self, simd: S) -> Vec<f64> {
        let seen = self.block.seen(self.call.mask);
        let group = self.call.group();
        if seen.is_empty() {
            return vec![0.0; group];
        }
        let mut rows = self.logits(simd, seen.clone());
        let sinks = (0..group).map(|g| {
            self.call
                .sinks
                .map_or(f64::NEG_INFINITY, |sinks| f64::from(sinks[self.block.first_kv_head * group + g]))
        });
        let weights: Vec<Weights> = rows.iter_mut().zip(sinks).map(|(row, sink)| weigh(row, sink)).collect();
        self.spread(simd, seen, &rows, &weights)
    }
}

impl<T: Stored> Certify<'_, T> {
    /// Logits of the keys `seen`, and how far each may be off, per row.
    #[inline(always)]
    fn logits<S: Simd>(&self, simd: S, seen: Range<usize>) -> Vec<Vec<Seen>> {
        let (call, block) = (self.call, self.block);
        let (group, dim) = (call.group(), call.query.shape()[2]);
        let scale = f64::from(call.scale);
        let mut row = vec![0.0; dim];
        let mut query = |g| -> Vec<f64> {
            load_row(&call.query, block.first_row, block.first_kv_head * group + g, &mut row);
            row.iter().map(|&x| f64::from(x)).collect()
        };
        let queries: Vec<_> = (0..group).map(&mut query).collect();
        let mut rows = vec![vec![Seen::default(); seen.len()]; group];
        let mut key = Token::new(&call.key_pages);
        for (place, position) in seen.enumerate() {
            key.read::<S, T>(simd, block, position);
            for (g, query) in queries.iter().enumerate() {
                let [dot, off, size] = key.products::<T>(query);
                let mut logit = dot * scale;
                if call.soft_cap > 0.0 {
                    let cap = f64::from(call.soft_cap);
                    logit = cap * (logit / cap).tanh();
                }
                if let Some(slopes) = call.slopes {
                    let slope = f64::from(slopes[block.first_kv_head * group + g]);
                    logit += slope * (position as i64 - block.position) as f64;
                }
                // Twice what f64 rounds: once for the logit, once for that of the keys as stored.
                let rounded = 2.0 * f64::EPSILON * ((dim + 8) as f64 * size * scale.abs() + logit.abs());
                rows[g][place] = Seen { weight: logit, more: off * scale.abs() + rounded };
            }
        }
        rows
    }

    /// From weights to the bounds: two walks over the values, for the mean and for distances from it.
    #[inline(always)]
    fn spread<S: Simd>(
        &self,
        simd: S,
        seen: Range<usize>,
        rows: &[Vec<Seen>],
        weights: &[Weights],
    ) -> Vec<f64> {
        let dim = self.call.value_pages.layout().head_dim;
        let mut value = Token::new(&self.call.value_pages);
        let mut means = vec![vec![0.0; dim]; rows.len()];
        for (place, position) in seen.clone().enumerate() {
            value.read::<S, T>(simd, self.block, position);
            for (mean, (row, weights)) in means.iter_mut().zip(rows.iter().zip(weights)) {
                let share = row[place].weight / weights.sum;
                mean.iter_mut().zip(&value.numbers).for_each(|(mean, x)| *mean += share * x);
            }
        }
        let mut off: Vec<Off> = means.into_iter().map(Off::new).collect();
        for (place, position) in seen.enumerate() {
            value.read::<S, T>(simd, self.block, position);
            for (off, row) in off.iter_mut().zip(rows) {
                off.add::<T>(&value, row[place]);
            }
        }
        off.iter().zip(weights).map(|(off, weights)| off.bound(weights)).collect()
    }
}

/// One token of one head.
struct Token<'a> {
    pages: &'a PagesView<'a>,
    scales: PagesView<'a>,
    /// Its elements as stored.
    elements: Vec<f32>,
    /// What they stand for.
    numbers: Vec<f64>,
    scale: f64,
}

impl<'a> Token<'a> {
    fn new(pages: &'a PagesView<'a>) -> Self {
        let dim = pages.layout().head_dim;
        let scales = pages.scale_pages().expect("quantised pages have scales");
        Self { pages, scales, elements: vec![0.0; dim], numbers: vec![0.0; dim], scale: 0.0 }
    }

    /// Reads the token at a position of the block's sequence.
    #[inline(always)]
    fn read<S: Simd, T: Stored>(&mut self, simd: S, block: &Block, position: usize) {
        let page_size = self.pages.layout().page_size;
        let page = usize::try_from(block.pages[position / page_size]).expect("a page of the pool");
        let slot = position % page_size;
        let from: *const T = self.pages.slot(page, block.first_kv_head, slot).cast_const().cast();
        let scale: *const f32 = self.scales.slot(page, block.first_kv_head, slot).cast_const().cast();
        let dim = self.elements.len();
        let whole = dim / S::LANES * S::LANES;
        let into = self.elements.as_mut_ptr();
        // SAFETY: both slots were checked and the views vouch for `head_dim` elements there and for
        // one; vectors end at or before `whole`.
        unsafe {
            for d in (0..whole).step_by(S::LANES) {
                simd.store(into.add(d), T::load(simd, from.add(d)));
            }
            for d in whole..dim {
                *into.add(d) = from.add(d).read_unaligned().to_f32() / T::UNIT;
            }
            self.scale = f64::from(scale.read());
        }
        for (x, element) in self.numbers.iter_mut().zip(&mut self.elements) {
            *element *= T::UNIT;
            *x = f64::from(*element) * self.scale;
        }
    }

    /// The dot product with a query, how far it may be from that of the key as it was, and the sum of
    /// the magnitudes of what was added.
    #[inline(always)]
    fn products<T: Stored>(&self, query: &[f64]) -> [f64; 3] {
        let mut sums = [[0.0; SUMS]; 3];
        for (query, (numbers, elements)) in
            query.chunks(SUMS).zip(self.numbers.chunks(SUMS).zip(self.elements.chunks(SUMS)))
        {
            for (i, (&q, (&x, &element))) in query.iter().zip(numbers.iter().zip(elements)).enumerate() {
                sums[0][i] += q * x;
                sums[1][i] += q.abs() * rounding_error::<T>(element.into());
                sums[2][i] += (q * x).abs();
            }
        }
        let [dot, off, size] = sums.map(|sums| sums.iter().sum::<f64>());
        [dot, off * self.scale, size]
    }
}

/// A row's weights in sum.
struct Weights {
    sum: f64,
    /// The least that the sum can be.
    least: f64,
    /// What the sink's weight, a part of the sum, may be more; 0 if it is known.
    sink_more: f64,
    /// Whether a sink's value of 0 is among those that are averaged.
    sink: bool,
}

/// Turns logits into weights, and what they may be off into what weights may be more.
#[inline(always)]
fn weigh(row: &mut [Seen], sink: f64) -> Weights {
    let (mut first, mut max) = (0, f64::NEG_INFINITY);
    for (place, seen) in row.iter().enumerate() {
        if seen.weight > max {
            (first, max) = (place, seen.weight);
        }
    }
    let top = max.max(sink);
    let plain: f64 = row.iter().map(|seen| (seen.weight - top).exp()).sum();
    // Only differences of logits count. Where one key has most of the weight, all are taken relative to
    // it, so that its own weight stays what it is.
    let relative = 2.0 * (max - top).exp() > plain + (sink - top).exp();
    let of_first = if relative { row[first].more } else { 0.0 };
    let mut weights = Weights { sum: 0.0, least: 0.0, sink_more: 0.0, sink: sink > f64::NEG_INFINITY };
    for (place, seen) in row.iter_mut().enumerate() {
        let off = if relative && place == first { 0.0 } else { seen.more + of_first };
        let logit = seen.weight - top;
        let weight = logit.exp();
        *seen = Seen { weight, more: (logit + off).exp() - weight };
        weights.sum += weight;
        weights.least += (logit - off).exp();
    }
    let weight = (sink - top).exp();
    weights.sum += weight;
    weights.least += (sink - top - of_first).exp();
    weights.sink_more = (sink - top + of_first).exp() - weight;
    weights
}

/// What a row's output may be off, element by element.
struct Off {
    mean: Vec<f64>,
    /// Through weights and values together.
    sum: Vec<f64>,
    /// Distance of any value from the mean: whatever the weights, the output is no farther.
    farthest: Vec<f64>,
    /// The largest error of a value, whose weighted mean is no larger.
    largest_error: Vec<f64>,
    /// Through values alone.
    errors: Vec<f64>,
    largest: f64,
}

impl Off {
    fn new(mean: Vec<f64>) -> Self {
        let zeros = || vec![0.0; mean.len()];
        let [sum, farthest, largest_error, errors] = [zeros(), zeros(), zeros(), zeros()];
        Self { mean, sum, farthest, largest_error, errors, largest: 0.0 }
    }

    #[inline(always)]
    fn add<T: Stored>(&mut self, value: &Token, seen: Seen) {
        let most = seen.weight + seen.more;
        for i in 0..self.mean.len() {
            let x = value.numbers[i];
            let error = rounding_error::<T>(value.elements[i].into()) * value.scale;
            let distance = (x - self.mean[i]).abs();
            self.sum[i] += seen.more * distance;
            self.errors[i] += most * error;
            self.farthest[i] = self.farthest[i].max(distance + error);
            self.largest_error[i] = self.largest_error[i].max(error);
            self.largest = self.largest.max(x.abs());
        }
    }

    fn bound(&self, weights: &Weights) -> f64 {
        if self.mean.iter().any(|mean| mean.is_nan()) {
            return f64::NAN;
        }
        let mut bound = 0.0_f64;
        for (i, mean) in self.mean.iter().enumerate() {
            let (mut sum, mut farthest) = (self.sum[i], self.farthest[i]);
            if weights.sink {
                sum += weights.sink_more * mean.abs();
                farthest = farthest.max(mean.abs());
            }
            let through_weights = sum / weights.least;
            let through_values = (self.errors[i] / weights.least).min(self.largest_error[i]);
            // NaN, of infinity by infinity, gives way to the farthest.
            bound = bound.max(farthest.min(through_weights + through_values));
        }
        bound * (1.0 + SLACK) + self.largest * SLACK
    }
}
