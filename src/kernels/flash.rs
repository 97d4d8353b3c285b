//! Attention by tiles with a running maximum (Dao et al., "`FlashAttention`"; Rabe and Staats,
//! "Self-attention does not need O(n²) memory"), keys split at fixed positions (Dao et al.,
//! "Flash-Decoding").
//!
//! Tiles and splits lie at absolute positions of the sequence, and each row's sums run in an order
//! of their own: so a row's bits depend neither on the page size nor on what it is computed with.

use std::marker::PhantomData;
use std::ops::Range;

use half::{bf16, f16};

use super::blocks::{Tokens, Widen};
use super::mask::Mask;
use super::rows::load_row;
use super::simd::{Simd, Stored};
use super::state::State;
use super::tile::{ROWS, TILE, Tile};
use crate::dtype::DType;
use crate::storage::{PagesView, RowsView};

/// Keys of one split: what one task reads at least, and what partial results are joined by.
pub(super) const SPLIT: usize = 512;
/// From this many rows per KV head on, a tile's 16-bit elements are widened once into a buffer
/// instead of by every four rows.
const WIDEN_ROWS: usize = 3 * ROWS;
/// Up to this many bytes of running sums the heads of a page are walked together, so that memory is
/// read in order; beyond, head by head, so that the sums stay in the nearest cache.
const SUMS_NEAR: usize = 64 << 10;

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

/// Neighbouring queries of one sequence.
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
}

impl Block<'_> {
    /// The keys that any of its queries sees.
    pub(crate) fn seen(&self, mask: Mask) -> Range<usize> {
        let last = self.position + self.num_queries as i64 - 1;
        mask.seen(self.position, self.len).start..mask.seen(last, self.len).end
    }

    /// The splits in which those keys lie.
    pub(crate) fn splits(&self, mask: Mask) -> Range<usize> {
        let seen = self.seen(mask);
        if seen.is_empty() { 0..0 } else { seen.start / SPLIT..seen.end.div_ceil(SPLIT) }
    }
}

/// Attention of a block over the keys of one split.
///
/// # Panics
/// If shapes don't fit, or a page number that is needed lies outside the pool.
pub(super) fn attend<S: Simd>(simd: S, call: &Call, block: &Block, split: usize) -> State {
    match call.key_pages.layout().dtype {
        DType::F32 => Pass::<S, f32>::new(simd, call, block, split).run(),
        DType::F16 => Pass::<S, f16>::new(simd, call, block, split).run(),
        DType::BF16 => Pass::<S, bf16>::new(simd, call, block, split).run(),
    }
}

/// A block on its way through a split.
struct Pass<'a, S, T> {
    simd: S,
    call: &'a Call<'a>,
    block: &'a Block<'a>,
    /// Keys of this split that some query sees.
    keys: Range<usize>,
    /// Query heads per KV head.
    group: usize,
    /// `[rows, key_dim]` in the order of [`State`], widened, padded with zeros.
    query: Vec<f32>,
    /// Elements of a key and a value, rounded up to whole vectors.
    key_dim: usize,
    value_dim: usize,
    /// Where tiles are widened and padded first.
    wide: Option<Wide>,
    /// Byte offsets of the split's tokens from the first page's.
    key_offsets: [usize; SPLIT],
    value_offsets: [usize; SPLIT],
    state: State,
    stored: PhantomData<T>,
}

/// One tile in f32, padded with zeros to whole vectors.
struct Wide {
    keys: Vec<f32>,
    values: Vec<f32>,
    key_offsets: [usize; TILE],
    value_offsets: [usize; TILE],
}

impl Wide {
    fn new(key_dim: usize, value_dim: usize) -> Self {
        let offsets = |dim: usize| std::array::from_fn(|token| token * dim * size_of::<f32>());
        Self {
            keys: vec![0.0; TILE * key_dim],
            values: vec![0.0; TILE * value_dim],
            key_offsets: offsets(key_dim),
            value_offsets: offsets(value_dim),
        }
    }
}

impl<'a, S: Simd, T: Stored> Pass<'a, S, T> {
    fn new(simd: S, call: &'a Call<'a>, block: &'a Block<'a>, split: usize) -> Self {
        let (k, v) = (call.key_pages.layout(), call.value_pages.layout());
        let [_, num_heads, head_dim] = call.query.shape();
        assert!((k.dtype, v.dtype) == (T::DTYPE, T::DTYPE), "dtype");
        assert!((k.num_heads, k.page_size) == (v.num_heads, v.page_size), "pages");
        assert!(head_dim == k.head_dim && num_heads % k.num_heads == 0, "query");
        let group = num_heads / k.num_heads;
        let rows = num_heads * block.num_queries;
        let rows_per_kv_head = group * block.num_queries;
        let (key_dim, value_dim) =
            (k.head_dim.next_multiple_of(S::LANES), v.head_dim.next_multiple_of(S::LANES));
        let padded = key_dim != k.head_dim || value_dim != v.head_dim;
        let widen = padded || (T::DTYPE != DType::F32 && rows_per_kv_head >= WIDEN_ROWS);

        let mut query = vec![0.0; rows * key_dim];
        for (row, into) in query.chunks_exact_mut(key_dim).enumerate() {
            let (kv_head, rest) = (row / rows_per_kv_head, row % rows_per_kv_head);
            let (token, head) = (block.first_row + rest / group, kv_head * group + rest % group);
            load_row(&call.query, token, head, &mut into[..head_dim]);
        }

        let seen = block.seen(call.mask);
        let keys = seen.start.max(split * SPLIT)..seen.end.min((split + 1) * SPLIT);
        let mut pass = Self {
            simd,
            call,
            block,
            keys,
            group,
            query,
            key_dim,
            value_dim,
            wide: widen.then(|| Wide::new(key_dim, value_dim)),
            key_offsets: [0; SPLIT],
            value_offsets: [0; SPLIT],
            state: State::new(rows, value_dim),
            stored: PhantomData,
        };
        pass.locate();
        pass
    }

    /// Looks up where the tokens lie. Those that nobody needs get the address of one that somebody
    /// does, so that whole vectors of keys may be read.
    fn locate(&mut self) {
        let (k, v) = (self.call.key_pages.layout(), self.call.value_pages.layout());
        let mut token = self.keys.start;
        while token < self.keys.end {
            let slot = token % k.page_size;
            let page = self.block.pages[token / k.page_size];
            let page = usize::try_from(page).ok().filter(|&page| page < k.num_pages.min(v.num_pages));
            let page = page.expect("a page of the pool");
            let run = (k.page_size - slot).min(self.keys.end - token);
            for i in 0..run {
                let place = (token + i) % SPLIT;
                self.key_offsets[place] = k.offset(page, 0, slot + i) * size_of::<T>();
                self.value_offsets[place] = v.offset(page, 0, slot + i) * size_of::<T>();
            }
            token += run;
        }
        if !self.keys.is_empty() {
            let (first, end) = (self.keys.start % SPLIT, (self.keys.end - 1) % SPLIT + 1);
            for offsets in [&mut self.key_offsets, &mut self.value_offsets] {
                let valid = offsets[first];
                offsets[first / TILE * TILE..first].fill(valid);
                offsets[end..end.next_multiple_of(TILE)].fill(valid);
            }
        }
    }

    fn run(mut self) -> State {
        if self.keys.is_empty() {
            return self.state;
        }
        let kv_heads = self.call.key_pages.layout().num_heads;
        let tiles = self.keys.start / TILE..self.keys.end.div_ceil(TILE);
        let steps = tiles.len() * kv_heads;
        let by_page = size_of_val(&*self.state.acc) <= SUMS_NEAR;
        let step = |i: usize| {
            let (tile, kv_head) =
                if by_page { (i / kv_heads, i % kv_heads) } else { (i % tiles.len(), i / tiles.len()) };
            (tiles.start + tile, kv_head)
        };
        for i in 0..steps {
            self.tile(step(i), (i + 1 < steps).then(|| step(i + 1)));
        }
        self.state
    }

    /// All rows of one KV head over one tile.
    fn tile(&mut self, (tile, kv_head): (usize, usize), next: Option<(usize, usize)>) {
        let call = self.call;
        let place = |(tile, kv_head)| {
            (
                tokens::<T>(&call.key_pages, kv_head, &self.key_offsets, tile),
                tokens::<T>(&call.value_pages, kv_head, &self.value_offsets, tile),
            )
        };
        let (here, next) = (place((tile, kv_head)), next.map(place));
        let rows = self.group * self.block.num_queries;
        let mut rows_of_head = Tile {
            simd: self.simd,
            call,
            block: self.block,
            group: self.group,
            kv_head,
            start: tile * TILE,
            query: &self.query[kv_head * rows * self.key_dim..][..rows * self.key_dim],
            key_dim: self.key_dim,
            value_dim: self.value_dim,
            acc: &mut self.state.acc[kv_head * rows * self.value_dim..][..rows * self.value_dim],
            max: &mut self.state.max[kv_head * rows..][..rows],
            sum: &mut self.state.sum[kv_head * rows..][..rows],
        };
        if let Some(wide) = &mut self.wide {
            let dims = (call.key_pages.layout().head_dim, call.value_pages.layout().head_dim);
            // SAFETY: offsets name slots of the pools, checked in `locate`, of these dims.
            unsafe {
                self.simd.call(Widen { tokens: here.0, dim: dims.0, into: &mut wide.keys });
                self.simd.call(Widen { tokens: here.1, dim: dims.1, into: &mut wide.values });
            }
            let wide_tokens = |buffer: &Vec<f32>, offsets| Tokens::<f32> {
                base: buffer.as_ptr().cast(),
                offsets,
                stored: PhantomData,
            };
            let keys = wide_tokens(&wide.keys, &wide.key_offsets);
            let values = wide_tokens(&wide.values, &wide.value_offsets);
            // SAFETY: the buffers hold a tile of `key_dim` and `value_dim` each.
            unsafe { rows_of_head.attend((keys, values), None) }
        } else {
            // SAFETY: as for `Widen`; the dims are whole vectors here.
            unsafe { rows_of_head.attend(here, next) }
        }
    }
}

/// One tile's keys, or values, in one head.
fn tokens<'a, T>(
    pages: &PagesView,
    kv_head: usize,
    offsets: &'a [usize; SPLIT],
    tile: usize,
) -> Tokens<'a, T> {
    let (tiles, _) = offsets.as_chunks();
    let offsets = &tiles[tile % tiles.len()];
    Tokens { base: pages.slot(0, kv_head, 0), offsets, stored: PhantomData }
}
