//! A block's queries, in the order in which tiles take them.

use std::marker::PhantomData;
use std::ops::Range;

use half::{bf16, f16};

use super::flash::{Block, Call};
use super::method::Method;
use super::pack::Widen;
use super::pairs::zip_words;
use super::scratch::Scratch;
use super::simd::Simd;
use super::state::Order;
use super::stored::{Stored, deal_neighbours};
use super::tokens::{CACHE_LINE, TILE, Tokens};
use crate::dtype::DType;
use crate::storage::RowsView;

/// Tokens from a query that is loaded to one that is asked for: a head's rows lie far apart.
const AHEAD: usize = 4;

/// A row of queries, where it lies.
#[derive(Clone, Copy)]
pub(super) struct QueryRow {
    /// Valid for reads of `dim` elements of `dtype`.
    from: *const u8,
    dtype: DType,
    pub(super) dim: usize,
}

impl QueryRow {
    /// Copies it as it is.
    ///
    /// # Safety
    /// - It is as long as `into` at most.
    pub(super) unsafe fn copy(self, into: &mut [f32]) {
        let bytes = self.dim * self.dtype.size();
        // SAFETY: the caller's promise; any bits are floats.
        unsafe { into.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(self.from, bytes) }
    }

    /// Widens it; what is left of `into`, less than a vector, stays.
    ///
    /// # Safety
    /// - It is valid for reads.
    pub(super) unsafe fn widen<S: Simd>(self, simd: S, into: &mut [f32]) {
        /// # Safety
        /// - As for the method; elements are `T`.
        unsafe fn each<S: Simd, T: Stored>(simd: S, row: QueryRow, into: &mut [f32]) {
            let tokens = Tokens::<T> { base: row.from, offsets: &[0; TILE], stored: PhantomData };
            // SAFETY: `into` is one row, so of the tile's tokens the first is read; the caller's promise.
            unsafe { simd.call(Widen { tokens, dim: row.dim, count: 1, panel: usize::MAX, into }) }
        }
        // SAFETY: the caller's promise.
        unsafe {
            match self.dtype {
                DType::F32 => each::<S, f32>(simd, self, into),
                DType::F16 => each::<S, f16>(simd, self, into),
                DType::BF16 => each::<S, bf16>(simd, self, into),
                dtype => unreachable!("queries of {dtype}"),
            }
        }
    }
}

/// A block's queries, as a method takes them.
pub(super) struct Query {
    /// `[kv_heads, rows, key_words]` in the order of [`State`](super::state::State), padded with zeros. Of the
    /// rows that go through a tile together, vectors take turns, except where keys are packed.
    pub(super) words: Scratch,
    /// `[kv_heads, rows]`: what products are multiplied by.
    pub(super) steps: Scratch,
}

/// Loads a block's queries.
pub(super) fn load<S: Simd, M: Method<S>>(
    simd: S,
    call: &Call,
    block: &Block,
    key_words: usize,
    at_once: usize,
    order: Order,
) -> Query {
    let (group, dim, dtype) = (call.group(), call.query.shape()[2], call.query.dtype());
    let rows = group * block.num_queries;
    let padded = key_words * M::PER_WORD != dim;
    let mut words = Scratch::padded(rows * block.num_kv_heads * key_words, padded);
    let mut steps = Scratch::any(rows * block.num_kv_heads);
    let mut one = Scratch::zeros(key_words);
    let mut room = Scratch::zeros(if M::COUNTS { dim } else { 0 });
    for row in 0..rows * block.num_kv_heads {
        let (kv_head, rest) = (block.first_kv_head + row / rows, row % rows);
        let (token, head) = (block.first_row + rest / group, kv_head * group + rest % group);
        if rest % group == 0 && rest + AHEAD * group < rows {
            prefetch(simd, &call.query, token + AHEAD, head..head + group);
        }
        let from = call.query.row(token, head);
        let to = if block.prefill { &mut words[row * key_words..][..key_words] } else { &mut one[..] };
        // SAFETY: `row` checked the index; the view vouches for the row's elements, of this type.
        steps[row] = unsafe { M::load_query(simd, QueryRow { from, dtype, dim }, &mut room, to) };
        match order {
            Order::Dealt { lanes, vectors } => deal_neighbours(to, lanes, vectors),
            Order::Zipped { lanes, vectors: 4 } => zip_words(to, lanes),
            _ => {}
        }
        if block.prefill {
            continue;
        }
        let (first, in_group) = (row - rest % at_once, rest % at_once);
        let count = at_once.min(rows - (rest - in_group));
        let into = &mut words[first * key_words..][..count * key_words];
        take_turns(&one, into, S::LANES, in_group, count);
    }
    Query { words, steps }
}

/// Copies a row in pieces of `lanes` to where it takes turns as number `turn` of `count`.
#[inline(always)]
fn take_turns(row: &[f32], into: &mut [f32], lanes: usize, turn: usize, count: usize) {
    for (i, piece) in row.chunks_exact(lanes).enumerate() {
        into[(i * count + turn) * lanes..][..lanes].copy_from_slice(piece);
    }
}

fn prefetch<S: Simd>(simd: S, rows: &RowsView, token: usize, heads: Range<usize>) {
    let bytes = rows.shape()[2] * rows.dtype().size();
    for head in heads {
        for byte in (0..bytes).step_by(CACHE_LINE) {
            simd.prefetch(rows.row(token, head).wrapping_add(byte));
        }
    }
}
