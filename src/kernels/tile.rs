//! One tile of keys and values, all rows of the KV head they belong to.

use std::ops::Range;

use super::blocks::{Gather, Score, Tokens};
use super::flash::{Block, Call};
use super::simd::{Simd, Stored};
use super::softmax::{Logit, Weigh};

/// Keys whose dot products are turned into weights together.
pub(super) const TILE: usize = 64;
/// Rows of queries that go through a tile together.
pub(super) const ROWS: usize = 6;

/// Keys and values of one tile.
pub(super) type Pair<'a, T> = (Tokens<'a, T>, Tokens<'a, T>);

/// The rows of one KV head on their way through one tile.
pub(super) struct Tile<'a, S> {
    pub(super) simd: S,
    pub(super) call: &'a Call<'a>,
    pub(super) block: &'a Block<'a>,
    /// Query heads per KV head.
    pub(super) group: usize,
    pub(super) kv_head: usize,
    /// Position of the tile's first key.
    pub(super) start: usize,
    /// `[rows, key_dim]`.
    pub(super) query: &'a [f32],
    /// Elements of a key and a value, rounded up to whole vectors.
    pub(super) key_dim: usize,
    pub(super) value_dim: usize,
    /// The rows' part of [`State`](super::state::State).
    pub(super) acc: &'a mut [f32],
    pub(super) max: &'a mut [f32],
    pub(super) sum: &'a mut [f32],
}

impl<S: Simd> Tile<'_, S> {
    /// # Safety
    /// - Every token of `tokens` is valid for reads of `key_dim` and `value_dim`.
    pub(super) unsafe fn attend<T: Stored>(&mut self, tokens: Pair<T>, mut next: Option<Pair<T>>) {
        let rows = self.max.len();
        // At most ROWS at once, as equally as can be.
        let count = rows.div_ceil(rows.div_ceil(ROWS));
        for row in (0..rows).step_by(count) {
            // The first rows ask for what comes after this tile.
            let next = next.take();
            // SAFETY: the caller's promise; so many rows are left.
            unsafe {
                match count.min(rows - row) {
                    1 => self.some_rows::<T, 1>(row, tokens, next),
                    2 => self.some_rows::<T, 2>(row, tokens, next),
                    3 => self.some_rows::<T, 3>(row, tokens, next),
                    4 => self.some_rows::<T, 4>(row, tokens, next),
                    5 => self.some_rows::<T, 5>(row, tokens, next),
                    _ => self.some_rows::<T, ROWS>(row, tokens, next),
                }
            }
        }
    }

    /// `R` rows from `row` on.
    ///
    /// # Safety
    /// - As for `attend`.
    unsafe fn some_rows<T: Stored, const R: usize>(
        &mut self,
        row: usize,
        (keys, values): Pair<T>,
        next: Option<Pair<T>>,
    ) {
        let seen: [(usize, usize); R] = std::array::from_fn(|r| self.seen(row + r));
        // Both ends grow with the row, so these are the first and last tokens that any row sees.
        let (first, end) = (seen[0].0, seen[R - 1].1);
        if first >= end {
            return;
        }
        let mut scores = [[0.0; TILE]; R];
        let query = &self.query[row * self.key_dim..][..R * self.key_dim];
        let score = Score::<T, R> {
            query: query.as_ptr(),
            keys,
            next: next.map(|(keys, _)| keys),
            seen: first..end,
            dim: self.key_dim,
            scores: scores.as_mut_ptr().cast(),
        };
        // SAFETY: `query` has R rows, `scores` R tiles; the caller's promise for the keys.
        unsafe { self.simd.call(score) };
        for (r, &(first, end)) in seen.iter().enumerate() {
            if first < end {
                self.weigh(row + r, &mut scores[r], first, end);
            }
        }
        // Tokens that all rows see go through together, the others row by row, in ascending order.
        let (from, to) = (seen[R - 1].0, seen[0].1);
        let together = if from < to { from..to } else { TILE..TILE };
        // SAFETY: the caller's promise for the values.
        unsafe {
            for (r, &(first, end)) in seen.iter().enumerate() {
                self.gather(row + r, &scores[r..=r], values, None, first..end.min(together.start));
            }
            let next = next.map(|(_, values)| values);
            self.gather(row, &scores, values, next, together.clone());
            for (r, &(first, end)) in seen.iter().enumerate() {
                self.gather(row + r, &scores[r..=r], values, None, first.max(together.end)..end);
            }
        }
    }

    /// Tokens of the tile that a row sees.
    fn seen(&self, row: usize) -> (usize, usize) {
        let seen = self.call.mask.seen(self.position(row), self.block.len);
        let clip = |at: usize| at.saturating_sub(self.start).min(TILE);
        (clip(seen.start), clip(seen.end))
    }

    fn position(&self, row: usize) -> i64 {
        self.block.position + (row / self.group) as i64
    }

    /// Turns a row's dot products into weights.
    fn weigh(&mut self, row: usize, scores: &mut [f32; TILE], first: usize, end: usize) {
        let head = self.kv_head * self.group + row % self.group;
        let weigh = Weigh {
            row: scores,
            seen: first..end,
            logit: Logit {
                scale: self.call.scale,
                soft_cap: self.call.soft_cap,
                slope: self.call.slopes.map_or(0.0, |slopes| slopes[head]),
                distance: (self.start as i64 - self.position(row)) as f32,
            },
            max: &mut self.max[row],
            sum: &mut self.sum[row],
            acc: &mut self.acc[row * self.value_dim..][..self.value_dim],
        };
        // SAFETY: it asks for nothing.
        unsafe { self.simd.call(weigh) }
    }

    /// Adds the weighted values of the tokens `seen` to as many rows as there are weights.
    ///
    /// # Safety
    /// - The values of `seen` are valid for reads of `value_dim`.
    unsafe fn gather<T: Stored>(
        &mut self,
        row: usize,
        weights: &[[f32; TILE]],
        values: Tokens<T>,
        next: Option<Tokens<T>>,
        seen: Range<usize>,
    ) {
        if seen.is_empty() {
            return;
        }
        let dim = self.value_dim;
        let acc = self.acc[row * dim..][..weights.len() * dim].as_mut_ptr();
        let (weights, rows) = (weights.as_ptr().cast(), weights.len());
        // SAFETY: `weights` and `acc` have so many rows; the caller's promise for the values.
        unsafe {
            match rows {
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
