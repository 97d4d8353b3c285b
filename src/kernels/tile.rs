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

/// Rows that go through a tile together: at most `most`, in groups as equal as can be. The last group may
/// be smaller.
pub(super) fn rows_of_group(rows: usize, most: usize) -> usize {
    rows.div_ceil(rows.div_ceil(most))
}

/// Keys of a tile.
#[derive(Clone, Copy)]
pub(super) enum Keys<'a, T> {
    /// Where they lie.
    Stored(Tokens<'a, T>),
    /// Transposed: `[words, TILE]`, and so many words.
    Packed(&'a [f32], usize),
}

/// Values of a tile.
#[derive(Clone, Copy)]
pub(super) enum Values<'a, T> {
    /// Where they lie.
    Stored(Tokens<'a, T>),
    /// As the method packs them.
    Packed(&'a [f32]),
}

/// The rows of one KV head on their way through one tile of `N` keys.
pub(super) struct Tile<'a, S, const N: usize> {
    pub(super) simd: S,
    pub(super) call: &'a Call<'a>,
    pub(super) block: &'a Block<'a>,
    /// The first of the query heads that share the KV head.
    pub(super) first_head: usize,
    /// Position of the tile's first key.
    pub(super) start: usize,
    /// Rows that go through the tile together.
    pub(super) at_once: usize,
    /// Whether every row sees all of the tile.
    pub(super) whole: bool,
    /// `[rows, key_words]`, inside each group in the order in which its keys are taken.
    pub(super) query: &'a [f32],
    /// What products with each row are multiplied by.
    pub(super) query_steps: &'a [f32],
    /// Words of a key and elements of a value, rounded up to whole vectors.
    pub(super) key_words: usize,
    pub(super) value_dim: usize,
    /// Of quantised keys and values.
    pub(super) scales: Option<TileScales<'a>>,
    /// `[rows, N]`: dot products, then weights.
    pub(super) scores: &'a mut [f32],
    /// What each row's sums over this tile's values are multiplied by.
    pub(super) steps: &'a mut [f32],
    /// Whether something is left of any row's weights, in finer steps.
    pub(super) finer: &'a mut bool,
    /// The rows' part of [`State`](super::state::State).
    pub(super) acc: &'a mut [f32],
    pub(super) reference: &'a mut [f32],
    pub(super) sum: &'a mut [f32],
}

impl<S: Simd, const N: usize> Tile<'_, S, N> {
    /// Dot products of all rows with the tile's keys.
    ///
    /// # Safety
    /// - Every token of stored keys is valid for reads of `key_words`; so is `next`, or it is not there.
    pub(super) unsafe fn scores<M: Method<S>, L>(
        &mut self,
        keys: Keys<M::Element>,
        next: Option<Tokens<M::Element>>,
        later: Option<&Later<L>>,
    ) {
        let (rows, count) = (self.reference.len(), self.at_once);
        let parts = rows.div_ceil(count);
        for (part, row) in (0..rows).step_by(count).enumerate() {
            let next = next.map(|tokens| Next { tokens, part, parts });
            if let Some(later) = later {
                later.prefetch(self.simd, part, parts);
            }
            // SAFETY: the caller's promise; so many rows are left.
            unsafe {
                match count.min(rows - row) {
                    1 => self.score::<M, 1>(row, keys, next),
                    2 => self.score::<M, 2>(row, keys, next),
                    3 => self.score::<M, 3>(row, keys, next),
                    4 => self.score::<M, 4>(row, keys, next),
                    5 => self.score::<M, 5>(row, keys, next),
                    6 => self.score::<M, 6>(row, keys, next),
                    // Not compiled for methods that never need them.
                    rows if M::ROWS > 6 => match rows {
                        7 => self.score::<M, 7>(row, keys, next),
                        _ => self.score::<M, 8>(row, keys, next),
                    },
                    rows => unreachable!("{rows} rows"),
                }
            }
        }
    }

    /// Turns all rows' dot products with the tile into weights.
    pub(super) fn weigh<M: Method<S>>(&mut self) {
        // SAFETY: it asks for nothing.
        unsafe { self.simd.call(Weigh(self, PhantomData::<M>)) };
    }

    /// Adds the tile's values to all rows, weighted.
    ///
    /// # Safety
    /// - Stored values are valid for reads of `value_dim` elements; so is `next`, or it is not there.
    pub(super) unsafe fn weighted_sums<M: Method<S>>(
        &mut self,
        values: Values<M::Element>,
        next: Option<Tokens<M::Element>>,
    ) {
        let (rows, count) = (self.reference.len(), self.at_once);
        let parts = rows.div_ceil(count);
        for (part, row) in (0..rows).step_by(count).enumerate() {
            let next = next.map(|tokens| Next { tokens, part, parts });
            // SAFETY: the caller's promise; so many rows are left.
            unsafe { self.weighted_sums_of::<M>(row..(row + count).min(rows), values, next) };
        }
    }

    /// Dot products of `R` rows from `row` on.
    ///
    /// # Safety
    /// - As for `scores`.
    unsafe fn score<M: Method<S>, const R: usize>(
        &mut self,
        row: usize,
        keys: Keys<M::Element>,
        next: Option<Next<M::Element>>,
    ) {
        // Both ends grow with the row, so these are the first and last tokens that any row sees.
        let seen = self.seen(row).start..self.seen(row + R - 1).end;
        if seen.is_empty() {
            return;
        }
        let words = self.key_words;
        let query = self.query[row * words..][..R * words].as_ptr();
        let scores = self.scores[row * N..][..R * N].as_mut_ptr();
        // SAFETY: R rows of queries and scores; the caller's promise for stored keys. Packed ones
        // are `words` tiles.
        unsafe {
            match keys {
                Keys::Stored(keys) => {
                    self.simd.call(Score::<M, _, R, N> {
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
                    assert!(N == TILE, "packed tiles have one size");
                    let keys = keys[..words * TILE].as_ptr();
                    let stride = self.key_words;
                    let method = PhantomData;
                    self.simd.call(Product::<M, R> { query, stride, keys, seen, words, scores, method });
                }
            }
        }
    }

    /// Tokens of the tile that a row sees.
    #[inline]
    fn seen(&self, row: usize) -> Range<usize> {
        if self.whole {
            return 0..N;
        }
        let position = self.block.position + (row / self.call.group()) as i64;
        self.call.mask.seen_in(position, self.block.len, self.start, N)
    }

    /// Adds the weighted values to some rows: tokens that all of them see go through together, the
    /// others row by row, in ascending order.
    ///
    /// # Safety
    /// - As for `weighted_sums`.
    unsafe fn weighted_sums_of<M: Method<S>>(
        &mut self,
        rows: Range<usize>,
        values: Values<M::Element>,
        next: Option<Next<M::Element>>,
    ) {
        let (first, last) = (self.seen(rows.start), self.seen(rows.end - 1));
        // SAFETY: the caller's promise.
        unsafe {
            // One sum of integers per row and tile, whichever rows it goes with: what a row doesn't see
            // weighs nothing there, and is a number.
            if first == last || M::COUNTS {
                return self.gather::<M>(rows, values, next, first.start..last.end);
            }
            // Whole words, of which no row sees a part.
            let (start, end) =
                (last.start.next_multiple_of(M::PER_WORD), first.end / M::PER_WORD * M::PER_WORD);
            let together = if start < end { start..end } else { N..N };
            for row in rows.clone() {
                let Range { start, end } = self.seen(row);
                self.gather::<M>(row..row + 1, values, None, start..end.min(together.start));
            }
            self.gather::<M>(rows.clone(), values, next, together.clone());
            for row in rows {
                let Range { start, end } = self.seen(row);
                self.gather::<M>(row..row + 1, values, None, start.max(together.end)..end);
            }
        }
    }

    /// Adds the weighted values of the tokens `seen` to some rows.
    ///
    /// # Safety
    /// - As for `weighted_sums`.
    unsafe fn gather<M: Method<S>>(
        &mut self,
        rows: Range<usize>,
        values: Values<M::Element>,
        next: Option<Next<M::Element>>,
        seen: Range<usize>,
    ) {
        if seen.is_empty() {
            return;
        }
        // SAFETY: the caller's promise for stored values. Packed ones are a tile, and `weights` and `acc` have
        // so many rows.
        unsafe {
            match values {
                Values::Stored(values) => match rows.len() {
                    1 => self.gather_stored::<M, 1>(rows.start, values, next, seen),
                    2 => self.gather_stored::<M, 2>(rows.start, values, next, seen),
                    3 => self.gather_stored::<M, 3>(rows.start, values, next, seen),
                    4 => self.gather_stored::<M, 4>(rows.start, values, next, seen),
                    5 => self.gather_stored::<M, 5>(rows.start, values, next, seen),
                    6 => self.gather_stored::<M, 6>(rows.start, values, next, seen),
                    // Not compiled for methods that never need them.
                    count if M::ROWS > 6 => match count {
                        7 => self.gather_stored::<M, 7>(rows.start, values, next, seen),
                        _ => self.gather_stored::<M, 8>(rows.start, values, next, seen),
                    },
                    rows => unreachable!("{rows} rows"),
                },
                Values::Packed(values) => {
                    assert!(N == TILE, "packed tiles have one size");
                    let (simd, dim) = (self.simd, self.value_dim);
                    let acc = self.acc[rows.start * dim..rows.end * dim].as_mut_ptr();
                    let weights = self.scores[rows.start * N..rows.end * N].as_ptr();
                    let values = values[..TILE / M::PER_WORD * dim].as_ptr();
                    let method = PhantomData::<M>;
                    match rows.len() {
                        1 => simd.call(Weighted::<_, 1> { weights, values, seen, dim, acc, method }),
                        2 => simd.call(Weighted::<_, 2> { weights, values, seen, dim, acc, method }),
                        3 => simd.call(Weighted::<_, 3> { weights, values, seen, dim, acc, method }),
                        4 => simd.call(Weighted::<_, 4> { weights, values, seen, dim, acc, method }),
                        5 => simd.call(Weighted::<_, 5> { weights, values, seen, dim, acc, method }),
                        _ => simd.call(Weighted::<_, 6> { weights, values, seen, dim, acc, method }),
                    }
                }
            }
        }
    }

    /// The same of `R` rows from `row` on and values where they lie.
    ///
    /// # Safety
    /// - As for `weighted_sums`.
    #[inline]
    unsafe fn gather_stored<M: Method<S>, const R: usize>(
        &mut self,
        row: usize,
        values: Tokens<M::Element>,
        next: Option<Next<M::Element>>,
        seen: Range<usize>,
    ) {
        let dim = self.value_dim;
        let weights = self.scores[row * N..][..R * N].as_ptr();
        let acc = self.acc[row * dim..][..R * dim].as_mut_ptr();
        let (steps, finer) = (&self.steps[row..][..R], *self.finer);
        let job = Gather::<_, R, N> { weights, steps, finer, values, next, seen, dim, acc };
        // SAFETY: `weights` and `acc` have so many rows; the caller's promise for values.
        unsafe { M::gather(self.simd, job) }
    }
}

/// Turns all rows' dot products into weights.
struct Weigh<'a, 'b, S, M, const N: usize>(&'a mut Tile<'b, S, N>, PhantomData<M>);

impl<S: Simd, M: Method<S>, const N: usize> Job<S> for Weigh<'_, '_, S, M, N> {
    type Output = ();

    #[inline(always)]
    unsafe fn run(self, simd: S) {
        let Self(tile, _) = self;
        let (dim, group) = (tile.value_dim, tile.call.group());
        *tile.finer = false;
        for query in 0..tile.reference.len() / group {
            let seen = tile.seen(query * group);
            if seen.is_empty() {
                if M::COUNTS {
                    // They weigh nothing where others see something.
                    let rows = query * group..(query + 1) * group;
                    tile.scores[rows.start * N..rows.end * N].fill(0.0);
                    tile.steps[rows].fill(0.0);
                }
                continue;
            }
            let uneven = M::COUNTS && tile.scales.is_some_and(|scales| scales.uneven(seen.clone()));
            let distance = (tile.start as i64 - tile.block.position - query as i64) as f32;
            let (tiles, _) = tile.scores.as_chunks_mut::<N>();
            for head in 0..group {
                let row = query * group + head;
                let step = &mut tile.steps[row];
                let row = Row {
                    scores: &mut tiles[row],
                    seen: seen.clone(),
                    logit: Logit {
                        scale: tile.call.scale * tile.query_steps[row],
                        soft_cap: tile.call.soft_cap,
                        slope: tile.call.slopes.map_or(0.0, |slopes| slopes[tile.first_head + head]),
                        distance,
                    },
                    scales: tile.scales,
                    uneven,
                    reference: &mut tile.reference[row],
                    sum: &mut tile.sum[row],
                    acc: &mut tile.acc[row * dim..][..dim],
                };
                let counted = row.weigh::<S, M>(simd);
                *step = counted.step;
                *tile.finer |= counted.finer;
            }
        }
    }
}
