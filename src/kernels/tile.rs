//! One tile of keys and values, all rows of the KV head they belong to.

use super::blocks::{Gather, Score, Tokens};
use super::flash::{Block, Call};
use super::simd::{Simd, Stored};
use super::softmax::{Logit, Weigh};

/// Keys whose dot products are turned into weights together.
pub(super) const TILE: usize = 64;
/// Rows of queries that go through a tile together.
pub(super) const ROWS: usize = 4;

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
    /// - Every token of `keys` and `values` is valid for reads of `key_dim` and `value_dim`.
    pub(super) unsafe fn attend<T: Stored>(&mut self, keys: Tokens<T>, values: Tokens<T>) {
        let rows = self.max.len();
        for row in (0..rows).step_by(ROWS) {
            // SAFETY: the caller's promise; so many rows are left.
            unsafe {
                match rows - row {
                    1 => self.some_rows::<T, 1>(row, keys, values),
                    2 => self.some_rows::<T, 2>(row, keys, values),
                    3 => self.some_rows::<T, 3>(row, keys, values),
                    _ => self.some_rows::<T, ROWS>(row, keys, values),
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
        keys: Tokens<T>,
        values: Tokens<T>,
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
                self.gather(row + r, &scores[r..=r], values, first, end.min(together.start));
            }
            self.gather(row, &scores, values, together.start, together.end);
            for (r, &(first, end)) in seen.iter().enumerate() {
                self.gather(row + r, &scores[r..=r], values, first.max(together.end), end);
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

    /// Adds the weighted values of tokens `first..end` to as many rows as there are weights.
    ///
    /// # Safety
    /// - The values of `first..end` are valid for reads of `value_dim`.
    unsafe fn gather<T: Stored>(
        &mut self,
        row: usize,
        weights: &[[f32; TILE]],
        values: Tokens<T>,
        first: usize,
        end: usize,
    ) {
        if first >= end {
            return;
        }
        let dim = self.value_dim;
        let acc = self.acc[row * dim..][..weights.len() * dim].as_mut_ptr();
        let (seen, weights, rows) = (first..end, weights.as_ptr().cast(), weights.len());
        // SAFETY: `weights` and `acc` have so many rows; the caller's promise for the values.
        unsafe {
            match rows {
                1 => self.simd.call(Gather::<T, 1> { weights, values, seen, dim, acc }),
                2 => self.simd.call(Gather::<T, 2> { weights, values, seen, dim, acc }),
                3 => self.simd.call(Gather::<T, 3> { weights, values, seen, dim, acc }),
                _ => self.simd.call(Gather::<T, ROWS> { weights, values, seen, dim, acc }),
            }
        }
    }
}
