//! One tile of keys and values, all rows of the KV head they belong to.

use std::marker::PhantomData;
use std::ops::Range;

use super::flash::{Block, Call};
use super::gather::Gather;
use super::method::Method;
use super::panels;
use super::product::Product;
use super::scales::TileScales;
use super::score::Score;
use super::simd::Simd;
use super::tokens::{Later, Next, TILE, Tokens};
use super::weigh::Weigh;
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
    /// Transposed: `[TILE / panel, words, panel]`, and how many of the words count.
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
        let panels = if let Keys::Packed(..) = keys { N / panels::width::<S>() } else { 1 };
        let (rows, count) = (self.reference.len(), self.at_once);
        let (parts, mut part) = (panels * rows.div_ceil(count), 0);
        for panel in 0..panels {
            for row in (0..rows).step_by(count) {
                let next = next.map(|tokens| Next { tokens, part, parts });
                if let Some(later) = later {
                    later.prefetch(self.simd, part, parts);
                }
                part += 1;
                // SAFETY: the caller's promise; so many rows are left.
                unsafe {
                    match count.min(rows - row) {
                        1 => self.score::<M, 1>(row, keys, panel, next),
                        2 => self.score::<M, 2>(row, keys, panel, next),
                        3 => self.score::<M, 3>(row, keys, panel, next),
                        4 => self.score::<M, 4>(row, keys, panel, next),
                        5 => self.score::<M, 5>(row, keys, panel, next),
                        6 => self.score::<M, 6>(row, keys, panel, next),
                        // Not compiled for methods that never need them.
                        rows if M::ROWS > 6 => match rows {
                            7 => self.score::<M, 7>(row, keys, panel, next),
                            _ => self.score::<M, 8>(row, keys, panel, next),
                        },
                        rows => unreachable!("{rows} rows"),
                    }
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
        let panels =
            if let Values::Packed(_) = values { self.value_dim.div_ceil(panels::width::<S>()) } else { 1 };
        let (rows, count) = (self.reference.len(), self.at_once);
        let (parts, mut part) = (panels * rows.div_ceil(count), 0);
        for panel in 0..panels {
            for row in (0..rows).step_by(count) {
                let next = next.map(|tokens| Next { tokens, part, parts });
                part += 1;
                // SAFETY: the caller's promise; so many rows are left.
                unsafe { self.weighted_sums_of::<M>(row..(row + count).min(rows), values, panel, next) };
            }
        }
    }

    /// Dot products of `R` rows from `row` on, with one panel of packed keys.
    ///
    /// # Safety
    /// - As for `scores`.
    unsafe fn score<M: Method<S>, const R: usize>(
        &mut self,
        row: usize,
        keys: Keys<M::Element>,
        panel: usize,
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
                    let (width, stride) = (panels::width::<S>(), self.key_words);
                    let first = panel * width;
                    let seen = seen.start.max(first)..seen.end.min(first + width);
                    if seen.is_empty() {
                        return;
                    }
                    let seen = seen.start - first..seen.end - first;
                    let keys = keys[first * stride..][..words * width].as_ptr();
                    let scores = scores.add(first);
                    let method = PhantomData;
                    self.simd.call(Product::<M, R> { query, stride, keys, seen, words, scores, method });
                }
            }
        }
    }

    /// Tokens of the tile that a row sees.
    #[inline]
    pub(super) fn seen(&self, row: usize) -> Range<usize> {
        if self.whole {
            return 0..N;
        }
        let position = self.block.position + (row / self.call.group()) as i64;
        self.call.mask.seen_in(position, self.block.len, self.start, N)
    }

    /// Adds the weighted values to some rows: tokens that all of them see go through together, the
    /// others query by query, in ascending order.
    ///
    /// # Safety
    /// - As for `weighted_sums`.
    unsafe fn weighted_sums_of<M: Method<S>>(
        &mut self,
        rows: Range<usize>,
        values: Values<M::Element>,
        panel: usize,
        next: Option<Next<M::Element>>,
    ) {
        let (first, last) = (self.seen(rows.start), self.seen(rows.end - 1));
        // SAFETY: the caller's promise.
        unsafe {
            // One sum of integers per row and tile, whichever rows it goes with: what a row doesn't see
            // weighs nothing there, and is a number.
            if first == last || M::COUNTS {
                return self.gather::<M>(rows, values, panel, next, first.start..last.end);
            }
            // Whole words, of which no row sees a part.
            let (start, end) =
                (last.start.next_multiple_of(M::PER_WORD), first.end / M::PER_WORD * M::PER_WORD);
            let together = if start < end { start..end } else { N..N };
            let group = self.call.group();
            let queries = rows.start / group..rows.end.div_ceil(group);
            let of = |query: usize| rows.start.max(query * group)..rows.end.min((query + 1) * group);
            for rows in queries.clone().map(of) {
                let Range { start, end } = self.seen(rows.start);
                self.gather::<M>(rows, values, panel, None, start..end.min(together.start));
            }
            self.gather::<M>(rows.clone(), values, panel, next, together.clone());
            for rows in queries.map(of) {
                let Range { start, end } = self.seen(rows.start);
                self.gather::<M>(rows, values, panel, None, start.max(together.end)..end);
            }
        }
    }

    /// Adds the weighted values of the tokens `seen` to some rows, of packed ones one panel.
    ///
    /// # Safety
    /// - As for `weighted_sums`.
    unsafe fn gather<M: Method<S>>(
        &mut self,
        rows: Range<usize>,
        values: Values<M::Element>,
        panel: usize,
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
                    let (simd, dim, width) = (self.simd, self.value_dim, panels::width::<S>());
                    let (first, tokens) = (panel * width, TILE / M::PER_WORD);
                    let columns = width.min(dim - first);
                    let acc = self.acc[rows.start * dim + first..rows.end * dim].as_mut_ptr();
                    let weights = self.scores[rows.start * N..rows.end * N].as_ptr();
                    let values = values[first * tokens..][..columns * tokens].as_ptr();
                    let method = PhantomData::<M>;
                    match rows.len() {
                        1 => simd.call(Weighted::<_, 1> { weights, values, columns, seen, acc, dim, method }),
                        2 => simd.call(Weighted::<_, 2> { weights, values, columns, seen, acc, dim, method }),
                        3 => simd.call(Weighted::<_, 3> { weights, values, columns, seen, acc, dim, method }),
                        4 => simd.call(Weighted::<_, 4> { weights, values, columns, seen, acc, dim, method }),
                        5 => simd.call(Weighted::<_, 5> { weights, values, columns, seen, acc, dim, method }),
                        _ => simd.call(Weighted::<_, 6> { weights, values, columns, seen, acc, dim, method }),
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
