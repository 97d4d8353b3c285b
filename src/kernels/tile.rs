//! One tile of keys and values, all rows of the KV head they belong to.

use std::marker::PhantomData;
use std::ops::Range;

use super::flash::{Block, Call};
use super::gather::Gather;
use super::method::Method;
use super::product::Product;
use super::scales::TileScales;
use super::score::Score;
use super::simd::{Job, Simd};
use super::softmax::{Logit, Row};
use super::tokens::{Later, Next, TILE, Tokens};
use super::weighted::Weighted;

/// Rows of queries that go through a tile together.
const ROWS: usize = 6;

/// Rows of each group that goes through a tile together: at most `ROWS`, as equally as can be. The
/// last group may be smaller.
pub(super) fn rows_of_group(rows: usize) -> usize {
    rows.div_ceil(rows.div_ceil(ROWS))
}

/// Keys of a tile.
#[derive(Clone, Copy)]
pub(super) enum Keys<'a, T> {
    /// Some of them, where they lie.
    Stored(Tokens<'a, T>),
    /// All of them, as words of this many elements of dims, transposed: `[words, TILE]`.
    Packed(&'a [f32], usize),
}

/// Values of a tile.
#[derive(Clone, Copy)]
pub(super) enum Values<'a, T> {
    /// Some of them, where they lie.
    Stored(Tokens<'a, T>),
    /// All of them, as the method packs them.
    Packed(&'a [f32]),
}

/// The rows of one KV head on their way through one tile.
pub(super) struct Tile<'a, S> {
    pub(super) simd: S,
    pub(super) call: &'a Call<'a>,
    pub(super) block: &'a Block<'a>,
    /// The first of the query heads that share the KV head.
    pub(super) first_head: usize,
    /// Position of the tile's first key.
    pub(super) start: usize,
    /// `[rows, key_words]`, inside each group in the order in which its keys are taken.
    pub(super) query: &'a [f32],
    /// Words of a key and elements of a value, rounded up to whole vectors.
    pub(super) key_words: usize,
    pub(super) value_dim: usize,
    /// Of quantised keys and values.
    pub(super) scales: Option<TileScales<'a>>,
    /// `[rows, TILE]`: dot products, then weights.
    pub(super) scores: &'a mut [f32],
    /// The rows' part of [`State`](super::state::State).
    pub(super) acc: &'a mut [f32],
    pub(super) max: &'a mut [f32],
    pub(super) sum: &'a mut [f32],
}

impl<S: Simd> Tile<'_, S> {
    /// Dot products of all rows with some of the tile's keys, those of `span`.
    ///
    /// # Safety
    /// - Every token of stored keys is valid for reads of `key_words`; so is `next`, or it is not there.
    pub(super) unsafe fn scores<M: Method<S>, L>(
        &mut self,
        keys: Keys<M::Word>,
        span: Range<usize>,
        next: Option<Tokens<M::Word>>,
        later: Option<&Later<L>>,
    ) {
        let rows = self.max.len();
        let count = rows_of_group(rows);
        let parts = rows.div_ceil(count);
        for (part, row) in (0..rows).step_by(count).enumerate() {
            let next = next.map(|tokens| Next { tokens, part, parts });
            if let Some(later) = later {
                later.prefetch(self.simd, part, parts);
            }
            let span = span.clone();
            // SAFETY: the caller's promise; so many rows are left.
            unsafe {
                match count.min(rows - row) {
                    1 => self.score::<M, 1>(row, keys, span, next),
                    2 => self.score::<M, 2>(row, keys, span, next),
                    3 => self.score::<M, 3>(row, keys, span, next),
                    4 => self.score::<M, 4>(row, keys, span, next),
                    5 => self.score::<M, 5>(row, keys, span, next),
                    _ => self.score::<M, ROWS>(row, keys, span, next),
                }
            }
        }
    }

    /// Turns all rows' dot products with the tile into weights.
    pub(super) fn weigh<M: Method<S>>(&mut self) {
        // SAFETY: it asks for nothing.
        unsafe { self.simd.call(Weigh(self, PhantomData::<M>)) };
    }

    /// Adds some of the tile's values, those of `span`, to all rows, weighted.
    ///
    /// # Safety
    /// - Stored values are valid for reads of `value_dim` elements; so is `next`, or it is not there.
    pub(super) unsafe fn weighted_sums<M: Method<S>>(
        &mut self,
        values: Values<M::Word>,
        span: Range<usize>,
        next: Option<Tokens<M::Word>>,
    ) {
        let rows = self.max.len();
        let count = rows_of_group(rows);
        let parts = rows.div_ceil(count);
        for (part, row) in (0..rows).step_by(count).enumerate() {
            let next = next.map(|tokens| Next { tokens, part, parts });
            // SAFETY: the caller's promise; so many rows are left.
            unsafe { self.weighted_sums_of::<M>(row..(row + count).min(rows), values, &span, next) };
        }
    }

    /// Dot products of `R` rows from `row` on.
    ///
    /// # Safety
    /// - As for `scores`.
    unsafe fn score<M: Method<S>, const R: usize>(
        &mut self,
        row: usize,
        keys: Keys<M::Word>,
        span: Range<usize>,
        next: Option<Next<M::Word>>,
    ) {
        // Both ends grow with the row, so these are the first and last tokens that any row sees.
        let seen = inside(self.seen(row).start..self.seen(row + R - 1).end, &span);
        if seen.is_empty() {
            return;
        }
        let words = self.key_words;
        let query = self.query[row * words..][..R * words].as_ptr();
        let scores = self.scores[row * TILE..][..R * TILE][span.start..].as_mut_ptr();
        // SAFETY: R rows of queries and scores; the caller's promise for stored keys. Packed ones
        // are `words` tiles.
        unsafe {
            match keys {
                Keys::Stored(keys) => {
                    self.simd.call(Score::<M, _, R> {
                        query,
                        keys,
                        next,
                        seen,
                        words,
                        scores,
                        method: PhantomData,
                    });
                }
                Keys::Packed(keys, words) => {
                    let keys = keys[..words * TILE].as_ptr();
                    let stride = self.key_words;
                    let method = PhantomData;
                    self.simd.call(Product::<M, R> { query, stride, keys, seen, words, scores, method });
                }
            }
        }
    }

    /// Tokens of the tile that a row sees.
    fn seen(&self, row: usize) -> Range<usize> {
        let position = self.block.position + (row / self.call.group()) as i64;
        self.call.mask.seen_in(position, self.block.len, self.start, TILE)
    }

    /// Adds the weighted values to some rows: tokens that all of them see go through together, the
    /// others row by row, in ascending order.
    ///
    /// # Safety
    /// - As for `weighted_sums`.
    unsafe fn weighted_sums_of<M: Method<S>>(
        &mut self,
        rows: Range<usize>,
        values: Values<M::Word>,
        span: &Range<usize>,
        next: Option<Next<M::Word>>,
    ) {
        let (first, last) = (self.seen(rows.start), self.seen(rows.end - 1));
        // SAFETY: the caller's promise.
        unsafe {
            if first == last {
                return self.gather::<M>(rows, values, next, first, span);
            }
            // Whole words, of which no row sees a part.
            let (start, end) =
                (last.start.next_multiple_of(M::PER_WORD), first.end / M::PER_WORD * M::PER_WORD);
            let together = if start < end { start..end } else { TILE..TILE };
            for row in rows.clone() {
                let Range { start, end } = self.seen(row);
                self.gather::<M>(row..row + 1, values, None, start..end.min(together.start), span);
            }
            self.gather::<M>(rows.clone(), values, next, together.clone(), span);
            for row in rows {
                let Range { start, end } = self.seen(row);
                self.gather::<M>(row..row + 1, values, None, start.max(together.end)..end, span);
            }
        }
    }

    /// Adds the weighted values of the tokens `seen` and in `span` to at most `ROWS` rows.
    ///
    /// # Safety
    /// - As for `weighted_sums`.
    unsafe fn gather<M: Method<S>>(
        &mut self,
        rows: Range<usize>,
        values: Values<M::Word>,
        next: Option<Next<M::Word>>,
        seen: Range<usize>,
        span: &Range<usize>,
    ) {
        let seen = inside(seen, span);
        if seen.is_empty() {
            return;
        }
        let (simd, dim) = (self.simd, self.value_dim);
        let acc = self.acc[rows.start * dim..rows.end * dim].as_mut_ptr();
        let weights = self.scores[rows.start * TILE..rows.end * TILE][span.start / M::PER_WORD..].as_ptr();
        // SAFETY: `weights` and `acc` have so many rows; the caller's promise for stored values. Packed
        // ones are a tile.
        unsafe {
            match values {
                Values::Stored(values) => match rows.len() {
                    1 => M::gather(simd, Gather::<_, 1> { weights, values, next, seen, dim, acc }),
                    2 => M::gather(simd, Gather::<_, 2> { weights, values, next, seen, dim, acc }),
                    3 => M::gather(simd, Gather::<_, 3> { weights, values, next, seen, dim, acc }),
                    4 => M::gather(simd, Gather::<_, 4> { weights, values, next, seen, dim, acc }),
                    5 => M::gather(simd, Gather::<_, 5> { weights, values, next, seen, dim, acc }),
                    _ => M::gather(simd, Gather::<_, ROWS> { weights, values, next, seen, dim, acc }),
                },
                Values::Packed(values) => {
                    let values = values[..TILE / M::PER_WORD * dim].as_ptr();
                    let method = PhantomData::<M>;
                    match rows.len() {
                        1 => simd.call(Weighted::<_, 1> { weights, values, seen, dim, acc, method }),
                        2 => simd.call(Weighted::<_, 2> { weights, values, seen, dim, acc, method }),
                        3 => simd.call(Weighted::<_, 3> { weights, values, seen, dim, acc, method }),
                        4 => simd.call(Weighted::<_, 4> { weights, values, seen, dim, acc, method }),
                        5 => simd.call(Weighted::<_, 5> { weights, values, seen, dim, acc, method }),
                        _ => simd.call(Weighted::<_, ROWS> { weights, values, seen, dim, acc, method }),
                    }
                }
            }
        }
    }
}

/// What of `seen` lies in `span`, from its begin on.
fn inside(seen: Range<usize>, span: &Range<usize>) -> Range<usize> {
    seen.start.max(span.start) - span.start..seen.end.min(span.end).saturating_sub(span.start)
}

/// Turns all rows' dot products into weights.
struct Weigh<'a, 'b, S, M>(&'a mut Tile<'b, S>, PhantomData<M>);

impl<S: Simd, M: Method<S>> Job<S> for Weigh<'_, '_, S, M> {
    type Output = ();

    #[inline(always)]
    unsafe fn run(self, simd: S) {
        let Self(tile, _) = self;
        let (dim, group) = (tile.value_dim, tile.call.group());
        let (tiles, _) = tile.scores.as_chunks_mut();
        for query in 0..tile.max.len() / group {
            let position = tile.block.position + query as i64;
            let seen = tile.call.mask.seen_in(position, tile.block.len, tile.start, TILE);
            if seen.is_empty() {
                continue;
            }
            let distance = (tile.start as i64 - position) as f32;
            for head in 0..group {
                let row = query * group + head;
                let row = Row {
                    scores: &mut tiles[row],
                    seen: seen.clone(),
                    logit: Logit {
                        scale: tile.call.scale,
                        soft_cap: tile.call.soft_cap,
                        slope: tile.call.slopes.map_or(0.0, |slopes| slopes[tile.first_head + head]),
                        distance,
                    },
                    scales: tile.scales,
                    max: &mut tile.max[row],
                    sum: &mut tile.sum[row],
                    acc: &mut tile.acc[row * dim..][..dim],
                };
                row.weigh::<S, M>(simd);
            }
        }
    }
}
