//! Attention by tiles with a running maximum (Dao et al., "`FlashAttention`"; Rabe and Staats,
//! "Self-attention does not need O(n²) memory"), keys split at fixed positions (Dao et al.,
//! "Flash-Decoding").
//!
//! Tiles and splits lie at absolute positions of the sequence, and each row's sums run in an order
//! of their own: so a row's bits depend neither on the page size nor on what it is computed with.
//!
//! There are two such orders. A few queries take keys as they lie: what counts then is reading
//! memory. Many take tiles that were widened and transposed for all of them: what counts then is
//! arithmetic. Which one it is goes by the number of a sequence's queries alone.

use std::ops::Range;

use half::{bf16, f16};

use super::integers::Integers;
use super::mask::Mask;
use super::method::{Paired, Widened};
use super::pairs::Pairs;
use super::pass::Pass;
use super::simd::Simd;
use super::state::State;
use super::stepped::{MOST_ELEMENTS, Stepped};
use crate::dtype::{DType, F8E4M3};
use crate::storage::{PagesView, RowsView};

/// Keys of one split of a few queries: what one task reads at least, and what partial results are
/// joined by. Also the keys whose places are looked up together.
pub(crate) const SPLIT: usize = 512;
/// Keys of one split of many queries, of which there are tasks enough: a multiple of `SPLIT`.
const LONG_SPLIT: usize = 8 * SPLIT;
/// From so many queries of a sequence on, it pays to pack tiles. More than anyone drafts, so that
/// verifying drafts gives the bits of decoding.
pub(crate) const PREFILL: usize = 16;

/// One call's arrays and options.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call<'a> {
    /// `[tokens, num_heads, head_dim]`.
    pub(crate) query: RowsView<'a>,
    /// Keys of one layer.
    pub(crate) key_pages: PagesView<'a>,
    /// Values of one layer.
    pub(crate) value_pages: PagesView<'a>,
    /// Which keys a query sees.
    pub(crate) mask: Mask,
    /// Factor of a dot product.
    pub(crate) scale: f32,
    /// 0 switches it off.
    pub(crate) soft_cap: f32,
    /// Per query head.
    pub(crate) slopes: Option<&'a [f32]>,
    /// Per query head.
    pub(crate) sinks: Option<&'a [f32]>,
}

impl Call<'_> {
    /// Query heads per KV head.
    #[inline]
    pub(crate) fn group(&self) -> usize {
        self.query.shape()[1] / self.key_pages.layout().num_heads
    }

    /// Whether values lie in the keys, and come with them.
    pub(super) fn value_in_key(&self) -> bool {
        self.value_pages.base() == self.key_pages.base()
    }
}

/// Neighbouring queries of one sequence, in some of its heads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Block<'a> {
    /// The sequence's pages.
    pub(crate) pages: &'a [i32],
    /// The sequence's keys.
    pub(crate) len: usize,
    /// Row of its first query in `Call::query`.
    pub(crate) first_row: usize,
    /// Its queries.
    pub(crate) num_queries: usize,
    /// Position of its first query.
    pub(crate) position: i64,
    /// Its first KV head.
    pub(crate) first_kv_head: usize,
    /// Its KV heads.
    pub(crate) num_kv_heads: usize,
    /// Whether the sequence has [`PREFILL`] queries.
    pub(crate) prefill: bool,
}

impl Block<'_> {
    /// Its rows: queries times query heads.
    pub(crate) fn rows(&self, call: &Call) -> usize {
        self.num_queries * self.num_kv_heads * call.group()
    }

    /// The keys that any of its queries sees.
    pub(crate) fn seen(&self, mask: Mask) -> Range<usize> {
        let last = self.position + self.num_queries as i64 - 1;
        mask.seen(self.position, self.len).start..mask.seen(last, self.len).end
    }

    /// The splits in which those keys lie.
    pub(crate) fn splits(&self, mask: Mask) -> Range<usize> {
        let seen = self.seen(mask);
        if seen.is_empty() { 0..0 } else { seen.start / self.split()..seen.end.div_ceil(self.split()) }
    }

    /// Keys of one split.
    pub(super) fn split(&self) -> usize {
        if self.prefill { LONG_SPLIT } else { SPLIT }
    }
}

/// Attention of a block over the keys of some splits: gives `each` what its rows saw in one of them, first to
/// last, or that they saw nothing if there are none.
///
/// # Panics
/// If shapes don't fit, or a page number that is needed lies outside the pool.
pub(super) fn attend<S: Simd>(
    simd: S,
    call: &Call,
    block: &Block,
    splits: Range<usize>,
    each: &mut dyn FnMut(State),
) {
    match call.key_pages.layout().dtype {
        DType::F32 => Pass::<S, Widened<f32>>::new(simd, call, block).run(splits, each),
        DType::F16 => Pass::<S, Widened<f16>>::new(simd, call, block).run(splits, each),
        DType::BF16 => Pass::<S, Widened<bf16>>::new(simd, call, block).run(splits, each),
        DType::I8 => Pass::<S, Widened<i8>>::new(simd, call, block).run(splits, each),
        DType::F8E4M3 => Pass::<S, Widened<F8E4M3>>::new(simd, call, block).run(splits, each),
    }
}

/// The same of few queries and keys and values that are integers and whole vectors, in steps; of others
/// nothing, and `false`.
///
/// # Panics
/// As [`attend`].
#[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "no set of other CPUs has pairs yet"))]
pub(super) fn attend_in_steps<S: Integers>(
    simd: S,
    call: &Call,
    block: &Block,
    splits: Range<usize>,
    each: &mut dyn FnMut(State),
) -> bool {
    let (k, v) = (call.key_pages.layout(), call.value_pages.layout());
    let whole = [k.head_dim, v.head_dim].iter().all(|dim| dim.is_multiple_of(2 * S::LANES));
    let fits = k.dtype == DType::I8 && !block.prefill && whole && k.head_dim <= MOST_ELEMENTS;
    if fits {
        Pass::<S, Stepped>::new(simd, call, block).run(splits, each);
    }
    fits
}

/// The same where bfloat16 are multiplied in pairs, if all that is multiplied becomes bfloat16 without loss,
/// and whole vectors.
///
/// # Panics
/// As [`attend`].
#[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "no set of other CPUs has pairs yet"))]
pub(super) fn attend_in_pairs<S: Pairs>(
    simd: S,
    call: &Call,
    block: &Block,
    splits: Range<usize>,
    each: &mut dyn FnMut(State),
) {
    let (k, v) = (call.key_pages.layout(), call.value_pages.layout());
    // Of bytes, twice as many go together.
    let together = 2 * S::LANES * if k.dtype.is_quantised() { 2 } else { 1 };
    let whole = [k.head_dim, v.head_dim].iter().all(|dim| dim.is_multiple_of(together));
    // With one row per key, bringing values of two tokens together costs more than widening, except where
    // widening itself costs most.
    let pays = block.prefill || call.group() > 1 || k.dtype == DType::F8E4M3;
    match k.dtype {
        DType::BF16 | DType::I8 | DType::F8E4M3 if call.query.dtype() != DType::BF16 || !whole || !pays => {
            attend(simd, call, block, splits, each);
        }
        DType::BF16 => Pass::<S, Paired<bf16>>::new(simd, call, block).run(splits, each),
        DType::I8 => Pass::<S, Paired<i8>>::new(simd, call, block).run(splits, each),
        DType::F8E4M3 => Pass::<S, Paired<F8E4M3>>::new(simd, call, block).run(splits, each),
        DType::F32 | DType::F16 => attend(simd, call, block, splits, each),
    }
}
