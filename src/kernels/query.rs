//! A block's queries, in the order in which tiles take them.

use std::marker::PhantomData;
use std::ops::Range;

use half::{bf16, f16};

use super::flash::{Block, Call};
use super::method::Method;
use super::pack::Widen;
use super::pairs::zip_words;
use super::rows::load_row;
use super::scratch::Scratch;
use super::simd::{Simd, Stored, part_neighbours};
use super::state::Order;
use super::tokens::{CACHE_LINE, TILE, Tokens};
use crate::dtype::DType;
use crate::storage::RowsView;

/// Tokens from a query that is loaded to one that is asked for: a head's rows lie far apart.
const AHEAD: usize = 4;

/// `[kv_heads, rows, key_words]` in the order of [`State`](super::state::State), widened, padded with
/// zeros and parted for so many lanes. Of the rows that go through a tile together, vectors take turns,
/// except where keys are packed.
pub(super) fn load<S: Simd, M: Method<S>>(
    simd: S,
    call: &Call,
    block: &Block,
    key_words: usize,
    at_once: usize,
    order: Order,
) -> Scratch {
    let (group, head_dim) = (call.group(), call.query.shape()[2]);
    let rows = group * block.num_queries;
    let mut query = Scratch::zeros(rows * block.num_kv_heads * key_words);
    let mut one = Scratch::zeros(key_words);
    for row in 0..rows * block.num_kv_heads {
        let (kv_head, rest) = (block.first_kv_head + row / rows, row % rows);
        let (token, head) = (block.first_row + rest / group, kv_head * group + rest % group);
        if rest % group == 0 && rest + AHEAD * group < rows {
            prefetch(simd, &call.query, token + AHEAD, head..head + group);
        }
        let from = call.query.row(token, head);
        // SAFETY: `row` checked the index; the view vouches for the row's elements, of this type.
        unsafe {
            match call.query.dtype() {
                _ if M::PER_WORD > 1 => copy(from, head_dim * call.query.dtype().size(), &mut one),
                DType::F16 => widen::<S, f16>(simd, from, head_dim, &mut one),
                DType::BF16 => widen::<S, bf16>(simd, from, head_dim, &mut one),
                _ => load_row(&call.query, token, head, &mut one[..head_dim]),
            }
        }
        match order {
            Order::Parted(lanes) => part_neighbours(&mut one, lanes),
            Order::Zipped { lanes, vectors: 4 } => zip_words(&mut one, lanes),
            _ => {}
        }
        let (first, in_group) = (row - rest % at_once, rest % at_once);
        let count = at_once.min(rows - (rest - in_group));
        let into = &mut query[first * key_words..][..count * key_words];
        if block.prefill {
            into[in_group * key_words..][..key_words].copy_from_slice(&one);
        } else {
            take_turns(&one, into, S::LANES, in_group, count);
        }
    }
    query
}

/// Copies one row, whose elements share words.
///
/// # Safety
/// - `from` is valid for reads of `bytes`, and is as long as `into` at most.
unsafe fn copy(from: *const u8, bytes: usize, into: &mut [f32]) {
    // SAFETY: the caller's promise; any bits are floats.
    unsafe { into.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(from, bytes) }
}

/// Widens one row.
///
/// # Safety
/// - `from` is valid for reads of `dim` elements of `T`.
unsafe fn widen<S: Simd, T: Stored>(simd: S, from: *const u8, dim: usize, into: &mut [f32]) {
    let tokens = Tokens::<T> { base: from, offsets: &[0; TILE], stored: PhantomData };
    // SAFETY: `into` is one row, so of the tile's tokens the first is read; the caller's promise.
    unsafe { simd.call(Widen { tokens, dim, into }) }
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
