//! One tile of keys and values, all rows of the KV head they belong to.

use std::ops::Range;

use super::flash::{Block, Call};
use super::gather::Gather;
use super::product::Product;
use super::scales::TileScales;
use super::score::Score;
use super::simd::{Job, Simd, Stored};
use super::softmax::{Logit, Row};
use super::tokens::{Later, Next, TILE, Tokens};

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
    /// Where they lie, and what is asked for meanwhile.
    Stored(Tokens<'a, T>, Option<Next<'a, T>>),
    /// Widened and transposed: `[dim, TILE]`.
    Packed(&'a [f32], usize),
}

impl<T: Stored> Keys<'_, T> {
    /// The same for one of several groups of rows.
    fn asking_for(self, part: usize, parts: usize) -> Self {
        match self {
            Self::Stored(keys, next) => Self::Stored(keys, next.map(|next| Next { part, parts, ..next })),
            Self::Packed(..) => self,
        }
    }
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
    /// `[rows, key_dim]`, inside each group in the order in which its keys are taken.
    pub(super) query: &'a [f32],
    /// Elements of a key and a value, rounded up to whole vectors.
    pub(super) key_dim: usize,
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
    /// Each step for all rows before the next, so that keys, then values, stay in the nearest cache.
    ///
    /// # Safety
    /// - Every token of stored keys, and of `values`, is valid for reads of `key_dim` and
    ///   `value_dim`; so is `next`, or it is not there.
    pub(super) unsafe fn attend<K: Stored, V: Stored, L>(
        &mut self,
        keys: Keys<K>,
        values: Tokens<V>,
        next: Option<Tokens<V>>,
        later: Option<&Later<L>>,
    ) {
        let rows = self.max.len();
        let count = rows_of_group(rows);
        let parts = rows.div_ceil(count);
        for (part, row) in (0..rows).step_by(count).enumerate() {
            let keys = keys.asking_for(part, parts);
            if let Some(later) = later {
                later.prefetch(self.simd, part, parts);
            }
            // SAFETY: the caller's promise; so many rows are left.
            unsafe {
                match count.min(rows - row) {
                    1 => self.score::<K, 1>(row, keys),
                    2 => self.score::<K, 2>(row, keys),
                    3 => self.score::<K, 3>(row, keys),
                    4 => self.score::<K, 4>(row, keys),
                    5 => self.score::<K, 5>(row, keys),
                    _ => self.score::<K, ROWS>(row, keys),
                }
            }
        }
        // SAFETY: it asks for nothing.
        unsafe { self.simd.call(Weigh(self)) };
        for (part, row) in (0..rows).step_by(count).enumerate() {
            let next = next.map(|tokens| Next { tokens, part, parts });
            // SAFETY: the caller's promise; so many rows are left.
            unsafe { self.weighted_sums(row..(row + count).min(rows), values, next) };
        }
    }

    /// Dot products of `R` rows from `row` on.
    ///
    /// # Safety
    /// - As for `attend`.
    unsafe fn score<T: Stored, const R: usize>(&mut self, row: usize, keys: Keys<T>) {
        // Both ends grow with the row, so these are the first and last tokens that any row sees.
        let seen = self.seen(row).start..self.seen(row + R - 1).end;
        if seen.is_empty() {
            return;
        }
        let query = self.query[row * self.key_dim..][..R * self.key_dim].as_ptr();
        let scores = self.scores[row * TILE..][..R * TILE].as_mut_ptr();
        // SAFETY: R rows of queries and scores; the caller's promise for stored keys. Packed ones
        // are `dim` tiles.
        unsafe {
            match keys {
                Keys::Stored(keys, next) => {
                    self.simd.call(Score::<T, R> { query, keys, next, seen, dim: self.key_dim, scores });
                }
                Keys::Packed(keys, dim) => {
                    let keys = keys[..dim * TILE].as_ptr();
                    self.simd.call(Product::<R> { query, keys, seen, dim, scores });
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
    /// - As for `attend`.
    unsafe fn weighted_sums<T: Stored>(
        &mut self,
        rows: Range<usize>,
        values: Tokens<T>,
        next: Option<Next<T>>,
    ) {
        let (first, last) = (self.seen(rows.start), self.seen(rows.end - 1));
        let together = last.start..first.end;
        // SAFETY: the caller's promise.
        unsafe {
            if first == last {
                return self.gather(rows, values, next, together);
            }
            let together = if together.is_empty() { TILE..TILE } else { together };
            for row in rows.clone() {
                let Range { start, end } = self.seen(row);
                self.gather(row..row + 1, values, None, start..end.min(together.start));
            }
            self.gather(rows.clone(), values, next, together.clone());
            for row in rows {
                let Range { start, end } = self.seen(row);
                self.gather(row..row + 1, values, None, start.max(together.end)..end);
            }
        }
    }

    /// Adds the weighted values of the tokens `seen` to at most `ROWS` rows.
    ///
    /// # Safety
    /// - The values of `seen` are valid for reads of `value_dim`.
    unsafe fn gather<T: Stored>(
        &mut self,
        rows: Range<usize>,
        values: Tokens<T>,
        next: Option<Next<T>>,
        seen: Range<usize>,
    ) {
        if seen.is_empty() {
            return;
        }
        let dim = self.value_dim;
        let acc = self.acc[rows.start * dim..rows.end * dim].as_mut_ptr();
        let weights = self.scores[rows.start * TILE..rows.end * TILE].as_ptr();
        // SAFETY: `weights` and `acc` have so many rows; the caller's promise for the values.
        unsafe {
            match rows.len() {
                1 => self.simd.call(Gather::<T, 1> { weights, values, next, seen, dim, acc }),
                2 => self.simd.call(Gather::<T, 2> { weights, values, next, seen, dim, acc }),
                3 => self.simd.call(Gather::<T, 3> { weights, values, next, seen, dim, acc }),
                4 => self.simd.call(Gather::<T, 4> { weights, values, next, seen, dim, acc }),
                5 => self.simd.call(Gather::<T, 5> { weights, values, next, seen, dim, acc }),
                _ => self.simd.call(Gather::<T, ROWS> { weights, values, next, seen, dim, acc }),
            }
        }
    }
}

/// Turns all rows' dot products into weights.
struct Weigh<'a, 'b, S>(&'a mut Tile<'b, S>);

impl<S: Simd> Job<S> for Weigh<'_, '_, S> {
    type Output = ();

    #[inline(always)]
    unsafe fn run(self, simd: S) {
        let Self(tile) = self;
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
                row.weigh(simd);
            }
        }
    }
}
