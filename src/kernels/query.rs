//! A block's queries, in the order in which tiles take them.

use std::ops::Range;

use super::flash::{Block, Call};
use super::rows::load_row;
use super::scratch::Scratch;
use super::simd::{Simd, part_neighbours};
use super::tile::rows_of_group;
use super::tokens::CACHE_LINE;
use crate::storage::RowsView;

/// Tokens from a query that is loaded to one that is asked for: a head's rows lie far apart.
const AHEAD: usize = 4;

/// `[kv_heads, rows, key_dim]` in the order of [`State`](super::state::State), widened, padded with
/// zeros and parted for so many lanes. Of the rows that go through a tile together, vectors (for
/// packed keys: elements) take turns.
pub(super) fn load<S: Simd>(
    simd: S,
    call: &Call,
    block: &Block,
    key_dim: usize,
    parted: Option<usize>,
) -> Scratch {
    let (group, head_dim) = (call.group(), call.query.shape()[2]);
    let rows = group * block.num_queries;
    let (at_once, lanes) = (rows_of_group(rows), if block.prefill { 1 } else { S::LANES });
    let mut query = Scratch::zeros(rows * block.num_kv_heads * key_dim);
    let mut one = Scratch::zeros(key_dim);
    for row in 0..rows * block.num_kv_heads {
        let (kv_head, rest) = (block.first_kv_head + row / rows, row % rows);
        let (token, head) = (block.first_row + rest / group, kv_head * group + rest % group);
        if rest % group == 0 && rest + AHEAD * group < rows {
            prefetch(simd, &call.query, token + AHEAD, head..head + group);
        }
        load_row(&call.query, token, head, &mut one[..head_dim]);
        if let Some(lanes) = parted {
            part_neighbours(&mut one, lanes);
        }
        let (first, in_group) = (row - rest % at_once, rest % at_once);
        let count = at_once.min(rows - (rest - in_group));
        let into = query[first * key_dim..][..count * key_dim].chunks_exact_mut(lanes);
        for (into, from) in into.skip(in_group).step_by(count).zip(one.chunks_exact(lanes)) {
            into.copy_from_slice(from);
        }
    }
    query
}

fn prefetch<S: Simd>(simd: S, rows: &RowsView, token: usize, heads: Range<usize>) {
    let bytes = rows.shape()[2] * rows.dtype().size();
    for head in heads {
        for byte in (0..bytes).step_by(CACHE_LINE) {
            simd.prefetch(rows.row(token, head).wrapping_add(byte));
        }
    }
}
