//! Few queries: keys and values as they lie, page by page with all heads of a page together, so that
//! memory is read in the order in which it lies.

use std::ops::Range;

use super::method::Method;
use super::pass::Rows;
use super::places::{PairOfScales, Places};
use super::simd::Simd;
use super::tile::{Keys, Values};
use super::tokens::{TILE, Tokens};

/// Tokens that are read of one head before those of the next, at least.
const LEAST: usize = 16;

/// Bytes from what is read to what is asked for.
const AHEAD: usize = 8 << 10;

/// Some tokens of one head: all heads of some tokens, all keys of a tile before its values, tile by tile.
#[derive(Clone)]
struct Step {
    /// Positions of all keys.
    keys: Range<usize>,
    kv_heads: usize,
    /// Tokens of a step.
    tokens: usize,
    tile: usize,
    values: bool,
    /// Its first token in the tile.
    first: usize,
    kv_head: usize,
}

impl Step {
    fn first(keys: Range<usize>, kv_heads: usize, tokens: usize) -> Self {
        let tile = keys.start / TILE;
        let mut step = Self { keys, kv_heads, tokens, tile, values: false, first: 0, kv_head: 0 };
        step.first = step.begin();
        step
    }

    /// The first step's first token in the tile.
    fn begin(&self) -> usize {
        self.keys.start.saturating_sub(self.tile * TILE) / self.tokens * self.tokens
    }

    /// Whether steps are left.
    fn is_left(&self) -> bool {
        self.tile * TILE < self.keys.end
    }

    /// Whether it is the first with values of its tile.
    fn begins_values(&self) -> bool {
        self.values && self.kv_head == 0 && self.first == self.begin()
    }

    fn advance(&mut self) {
        self.kv_head += 1;
        if self.kv_head < self.kv_heads {
            return;
        }
        self.kv_head = 0;
        self.first += self.tokens;
        if self.first < TILE.min(self.keys.end - self.tile * TILE) {
            return;
        }
        self.tile += usize::from(self.values);
        self.values = !self.values;
        self.first = self.begin();
    }

    /// Its tokens in the tile.
    fn span(&self) -> Range<usize> {
        self.first..self.first + self.tokens
    }
}

/// All keys at hand.
pub(super) fn attend<S: Simd, M: Method<S>>(places: &Places, scales: &mut PairOfScales, rows: &mut Rows<S>) {
    let Rows { simd, call, block, .. } = *rows;
    let layout = call.key_pages.layout();
    // What lies together of one head, in whole steps of a tile.
    let tokens = 1 << layout.page_size.clamp(LEAST, TILE).ilog2();
    let head_of = |kv_head| block.first_kv_head + kv_head;
    let place = |step: &Step| -> Tokens<M::Word> {
        if step.values {
            places.values(head_of(step.kv_head), step.tile, step.span())
        } else {
            places.keys(head_of(step.kv_head), step.tile, step.span())
        }
    };
    let mut step = Step::first(places.keys.clone(), block.num_kv_heads, tokens);
    let mut ahead = step.clone();
    let distance = AHEAD.div_ceil(tokens * layout.head_dim * layout.dtype.size());
    for _ in 0..distance {
        if ahead.is_left() {
            ahead.advance();
        }
    }
    while step.is_left() {
        let asked = ahead.is_left() && !(ahead.values && call.value_in_key());
        let next = asked.then(|| place(&ahead));
        if step.begins_values() {
            for kv_head in 0..block.num_kv_heads {
                let next = (kv_head + 1 < block.num_kv_heads).then(|| (step.tile, head_of(kv_head + 1)));
                let scales = scales.of(simd, (step.tile, head_of(kv_head)), next);
                rows.tile(kv_head, step.tile, scales).weigh::<M>();
            }
        }
        let mut tile = rows.tile(step.kv_head, step.tile, None);
        // SAFETY: offsets name slots of the pools, checked where they were located, of dims that are
        // whole vectors here.
        unsafe {
            if step.values {
                tile.weighted_sums::<M>(Values::Stored(place(&step)), step.span(), next);
            } else {
                tile.scores::<M, M::Word>(Keys::Stored(place(&step)), step.span(), next, None);
            }
        }
        step.advance();
        if ahead.is_left() {
            ahead.advance();
        }
    }
}
