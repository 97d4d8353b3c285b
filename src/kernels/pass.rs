//! A block of queries on its way through the keys.

use std::ops::Range;

use super::flash::{Block, Call, SPLIT};
use super::method::{Method, PACKED_ROWS};
use super::places::Places;
use super::prepared::Prepared;
use super::query::{self, Query};
use super::scales::{PairOfScales, TileScales};
use super::scratch::Scratch;
use super::simd::Simd;
use super::state::State;
use super::tile::{Tile, rows_of_group};
use super::tokens::{SHORT_TILE, TILE};
use super::walk;
use crate::dtype::Element;

/// A block on its way through splits.
pub(super) struct Pass<'a, S: Simd, M: Method<S>> {
    places: Places<'a>,
    scales: PairOfScales,
    rows: Rows<'a, S>,
    /// Where tiles are made ready first.
    prepared: Option<Prepared<S, M>>,
}

/// The rows of a block: its queries, and what they have seen.
pub(super) struct Rows<'a, S> {
    pub(super) simd: S,
    pub(super) call: &'a Call<'a>,
    pub(super) block: &'a Block<'a>,
    /// Rows of each KV head, and those of them that go through a tile together.
    per_head: usize,
    at_once: usize,
    query: Query,
    /// `[kv_heads, rows, tokens of a tile]`: dot products, then weights.
    scores: Scratch,
    /// `[kv_heads, rows]`: what sums over a tile's values are multiplied by.
    steps: Scratch,
    /// `[kv_heads]`: whether something is left of weights, in finer steps.
    finer: Vec<bool>,
    /// Words of a key and elements of a value, rounded up to whole vectors.
    pub(super) key_words: usize,
    pub(super) value_dim: usize,
    state: State,
}

impl<S: Simd> Rows<'_, S> {
    /// Whether every row sees all of a tile of so many keys.
    pub(super) fn see_all(&self, tile: usize, tokens: usize) -> bool {
        let Block { position, num_queries, len, .. } = *self.block;
        let (mask, last) = (self.call.mask, position + num_queries as i64 - 1);
        mask.seen(last, len).start <= tile * tokens && (tile + 1) * tokens <= mask.seen(position, len).end
    }

    /// Those of one KV head of the block before one tile.
    pub(super) fn tile<'t, const N: usize>(
        &'t mut self,
        kv_head: usize,
        tile: usize,
        whole: bool,
        scales: Option<TileScales<'t>>,
    ) -> Tile<'t, S, N> {
        let Self { per_head: rows, key_words, value_dim, .. } = *self;
        Tile {
            simd: self.simd,
            call: self.call,
            block: self.block,
            first_head: (self.block.first_kv_head + kv_head) * self.call.group(),
            start: tile * N,
            query: &self.query.words[kv_head * rows * key_words..][..rows * key_words],
            query_steps: &self.query.steps[kv_head * rows..][..rows],
            steps: &mut self.steps[kv_head * rows..][..rows],
            finer: &mut self.finer[kv_head],
            key_words,
            value_dim,
            at_once: self.at_once,
            whole,
            scales,
            scores: &mut self.scores[kv_head * rows * N..][..rows * N],
            acc: &mut self.state.acc[kv_head * rows * value_dim..][..rows * value_dim],
            reference: &mut self.state.reference[kv_head * rows..][..rows],
            sum: &mut self.state.sum[kv_head * rows..][..rows],
        }
    }
}

impl<'a, S: Simd, M: Method<S>> Pass<'a, S, M> {
    /// # Panics
    /// If shapes don't fit.
    pub(super) fn new(simd: S, call: &'a Call<'a>, block: &'a Block<'a>) -> Self {
        let (k, v) = (call.key_pages.layout(), call.value_pages.layout());
        let [_, num_heads, head_dim] = call.query.shape();
        assert!((k.dtype, v.dtype) == (M::Element::DTYPE, M::Element::DTYPE), "dtype");
        assert!((k.num_heads, k.page_size) == (v.num_heads, v.page_size), "pages");
        assert!(head_dim == k.head_dim && num_heads % k.num_heads == 0, "query");
        let key_words = k.head_dim.div_ceil(M::PER_WORD).next_multiple_of(S::LANES);
        let value_dim = v.head_dim.next_multiple_of(S::LANES);
        let padded = key_words * M::PER_WORD != k.head_dim || value_dim != v.head_dim;
        let order = M::order(!padded && !block.prefill);
        let rows = call.group() * block.num_queries;
        let at_once = rows_of_group(rows, if block.prefill { PACKED_ROWS } else { M::ROWS });
        Self {
            places: Places::new(call),
            scales: PairOfScales::new::<M::Element>(call),
            rows: Rows {
                simd,
                call,
                block,
                per_head: rows,
                at_once,
                query: query::load::<S, M>(simd, call, block, key_words, at_once, order),
                // Products of what no row sees may stay what they were: weights are selected, not multiplied.
                scores: Scratch::any(
                    block.num_kv_heads * rows * if block.prefill { TILE } else { SHORT_TILE },
                ),
                steps: Scratch::zeros(block.num_kv_heads * rows),
                finer: vec![false; block.num_kv_heads],
                key_words,
                value_dim,
                state: State::new(block.rows(call), value_dim, order),
            },
            prepared: Prepared::new(block.prefill, padded, key_words, value_dim),
        }
    }

    /// Split by split, each from nothing, as if each had been another task's; of no split, that nothing was seen.
    ///
    /// # Panics
    /// If a page number that is needed lies outside the pool.
    pub(super) fn run(mut self, splits: Range<usize>, each: &mut dyn FnMut(State)) {
        let Rows { call, block, .. } = self.rows;
        let (seen, long, last) = (block.seen(call.mask), block.split(), splits.end);
        if splits.is_empty() {
            return each(self.rows.state);
        }
        for split in splits {
            for start in (split * long..(split + 1) * long).step_by(SPLIT) {
                let keys = seen.start.max(start)..seen.end.min(start + SPLIT);
                if !keys.is_empty() {
                    self.places.locate(block, keys, &mut self.scales);
                    let Self { places, scales, rows, prepared } = &mut self;
                    match prepared {
                        Some(prepared) if block.prefill => prepared.attend::<TILE>(places, scales, rows),
                        Some(prepared) => prepared.attend::<SHORT_TILE>(places, scales, rows),
                        None => walk::attend::<S, M>(places, scales, rows),
                    }
                }
            }
            if split + 1 == last {
                return each(self.rows.state);
            }
            let fresh = self.rows.state.like();
            each(std::mem::replace(&mut self.rows.state, fresh));
        }
    }
}
