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

use std::marker::PhantomData;
use std::ops::Range;

use half::{bf16, f16};

use super::mask::Mask;
use super::pack::{Pack, Widen};
use super::query;
use super::scales::{Scales, TileScales};
use super::scratch::Scratch;
use super::simd::{Simd, Stored};
use super::state::State;
use super::tile::{Keys, Tile};
use super::tokens::{Later, Next, TILE, Tokens};
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
    fn value_in_key(&self) -> bool {
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
    fn split(&self) -> usize {
        if self.prefill { LONG_SPLIT } else { SPLIT }
    }
}

/// Attention of a block over the keys of some splits, first to last.
///
/// # Panics
/// If shapes don't fit, or a page number that is needed lies outside the pool.
pub(super) fn attend<S: Simd>(simd: S, call: &Call, block: &Block, splits: Range<usize>) -> State {
    match call.key_pages.layout().dtype {
        DType::F32 => Pass::<S, f32>::new(simd, call, block).run(splits),
        DType::F16 => Pass::<S, f16>::new(simd, call, block).run(splits),
        DType::BF16 => Pass::<S, bf16>::new(simd, call, block).run(splits),
        DType::I8 => Pass::<S, i8>::new(simd, call, block).run(splits),
        DType::F8E4M3 => Pass::<S, F8E4M3>::new(simd, call, block).run(splits),
    }
}

/// A block on its way through splits.
struct Pass<'a, S, T> {
    simd: S,
    call: &'a Call<'a>,
    block: &'a Block<'a>,
    /// Keys at hand that some query sees, at most `SPLIT`.
    keys: Range<usize>,
    /// Rows of each KV head.
    rows: usize,
    /// `[kv_heads, rows, key_dim]` in the order of [`State`], widened, padded with zeros, inside each
    /// group of rows in the order in which its keys are taken.
    query: Scratch,
    /// `[rows, TILE]` of one KV head: dot products, then weights.
    scores: Scratch,
    /// Elements of a key and a value, rounded up to whole vectors.
    key_dim: usize,
    value_dim: usize,
    /// Where tiles are made ready first.
    ready: Option<Ready>,
    /// Byte offsets of their tokens from the first page's.
    key_offsets: [usize; SPLIT],
    value_offsets: [usize; SPLIT],
    /// Of quantised keys and values.
    scales: Option<Box<[Scales; 2]>>,
    state: State,
    stored: PhantomData<T>,
}

/// One tile in f32, padded with zeros to whole vectors.
struct Ready {
    /// `[TILE, key_dim]`; not there if keys are packed straight from where they lie.
    keys: Option<Scratch>,
    /// `[key_dim, TILE]`; not there if few rows use the tile.
    packed: Option<Scratch>,
    /// `[TILE, value_dim]`: in one place also where nothing is widened, since rows that lie pages
    /// apart cost more each time than the copy costs once.
    values: Scratch,
    key_offsets: [usize; TILE],
    value_offsets: [usize; TILE],
}

impl Ready {
    /// What the tiles of a pass need, if anything.
    fn new(prefill: bool, padded: bool, key_dim: usize, value_dim: usize) -> Option<Self> {
        let offsets = |dim: usize| std::array::from_fn(|token| token * dim * size_of::<f32>());
        (prefill || padded).then(|| Self {
            keys: padded.then(|| Scratch::zeros(TILE * key_dim)),
            packed: prefill.then(|| Scratch::zeros(TILE * key_dim)),
            values: Scratch::zeros(TILE * value_dim),
            key_offsets: offsets(key_dim),
            value_offsets: offsets(value_dim),
        })
    }
}

/// The tokens of a buffer of f32.
fn in_buffer<'a>(buffer: &Scratch, offsets: &'a [usize; TILE]) -> Tokens<'a, f32> {
    Tokens { base: buffer.as_ptr().cast(), offsets, stored: PhantomData }
}

impl<'a, S: Simd, T: Stored> Pass<'a, S, T> {
    fn new(simd: S, call: &'a Call<'a>, block: &'a Block<'a>) -> Self {
        let (k, v) = (call.key_pages.layout(), call.value_pages.layout());
        let [_, num_heads, head_dim] = call.query.shape();
        assert!((k.dtype, v.dtype) == (T::DTYPE, T::DTYPE), "dtype");
        assert!((k.num_heads, k.page_size) == (v.num_heads, v.page_size), "pages");
        assert!(head_dim == k.head_dim && num_heads % k.num_heads == 0, "query");
        let group = call.group();
        let rows = group * block.num_queries;
        let (key_dim, value_dim) =
            (k.head_dim.next_multiple_of(S::LANES), v.head_dim.next_multiple_of(S::LANES));
        let padded = key_dim != k.head_dim || value_dim != v.head_dim;
        let parted = (T::PARTED && !padded && !block.prefill).then_some(S::LANES);

        let query = query::load(simd, call, block, key_dim, parted);

        Self {
            simd,
            call,
            block,
            keys: 0..0,
            rows,
            query,
            scores: Scratch::zeros(rows * TILE),
            key_dim,
            value_dim,
            ready: Ready::new(block.prefill, padded, key_dim, value_dim),
            key_offsets: [0; SPLIT],
            value_offsets: [0; SPLIT],
            scales: Scales::pair::<T>(&call.key_pages, &call.value_pages),
            state: State::new(block.rows(call), value_dim, parted),
            stored: PhantomData,
        }
    }

    /// Split by split, each from nothing, joined in order: as if each had been another task's.
    fn run(mut self, splits: Range<usize>) -> State {
        let (seen, long) = (self.block.seen(self.call.mask), self.block.split());
        let (mut whole, last) = (None::<State>, splits.end);
        for split in splits {
            for start in (split * long..(split + 1) * long).step_by(SPLIT) {
                self.keys = seen.start.max(start)..seen.end.min(start + SPLIT);
                if !self.keys.is_empty() {
                    self.locate();
                    self.tiles();
                }
            }
            if let Some(whole) = &mut whole {
                whole.merge(&self.state);
                self.state.clear();
            } else if split + 1 < last {
                let fresh = self.state.like();
                whole = Some(std::mem::replace(&mut self.state, fresh));
            }
        }
        whole.unwrap_or(self.state)
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
            for scales in self.scales.iter_mut().flat_map(|scales| scales.iter_mut()) {
                scales.locate(token % SPLIT, page, slot, run);
            }
            token += run;
        }
        let (first, end) = (self.keys.start % SPLIT, (self.keys.end - 1) % SPLIT + 1);
        for offsets in [&mut self.key_offsets, &mut self.value_offsets] {
            let valid = offsets[first];
            offsets[first / TILE * TILE..first].fill(valid);
            offsets[end..end.next_multiple_of(TILE)].fill(valid);
        }
        for scales in self.scales.iter_mut().flat_map(|scales| scales.iter_mut()) {
            scales.fill(first..end);
        }
    }

    /// Tile by tile, all heads of the block together, so that memory is read in order.
    fn tiles(&mut self) {
        let kv_heads = self.block.num_kv_heads;
        let tiles = self.keys.start / TILE..self.keys.end.div_ceil(TILE);
        let step = |i: usize| (tiles.start + i / kv_heads, i % kv_heads);
        let steps = tiles.len() * kv_heads;
        for i in 0..steps {
            self.tile(step(i), (i + 1 < steps).then(|| step(i + 1)));
        }
    }

    /// All rows of one KV head of the block over one tile.
    fn tile(&mut self, (tile, kv_head): (usize, usize), next: Option<(usize, usize)>) {
        let (call, rows) = (self.call, self.rows);
        let place = |(tile, kv_head)| {
            let kv_head = self.block.first_kv_head + kv_head;
            (
                tokens::<T>(&call.key_pages, kv_head, &self.key_offsets, tile),
                tokens::<T>(&call.value_pages, kv_head, &self.value_offsets, tile),
            )
        };
        let scales = self.scales.as_mut().map(|scales| {
            let [key, value] = &mut **scales;
            let take = |scales: &mut Scales| {
                if let Some((tile, kv_head)) = next {
                    scales.prefetch(self.simd, self.block.first_kv_head + kv_head, tile);
                }
                scales.take(self.block.first_kv_head + kv_head, tile);
            };
            take(key);
            take(value);
            TileScales { key: &key.tile, value: &value.tile }
        });
        let ((keys, values), next) = (place((tile, kv_head)), next.map(place));
        let mut rows_of_head = Tile {
            simd: self.simd,
            call,
            block: self.block,
            first_head: (self.block.first_kv_head + kv_head) * call.group(),
            start: tile * TILE,
            query: &self.query[kv_head * rows * self.key_dim..][..rows * self.key_dim],
            key_dim: self.key_dim,
            value_dim: self.value_dim,
            scales,
            scores: &mut self.scores,
            acc: &mut self.state.acc[kv_head * rows * self.value_dim..][..rows * self.value_dim],
            max: &mut self.state.max[kv_head * rows..][..rows],
            sum: &mut self.state.sum[kv_head * rows..][..rows],
        };
        let Some(ready) = &mut self.ready else {
            let (next_keys, next_values) = next.unzip();
            let next_values = next_values.filter(|_| !call.value_in_key());
            let next_keys = next_keys.map(|tokens| Next { tokens, part: 0, parts: 1 });
            let keys = Keys::Stored(keys, next_keys);
            // SAFETY: offsets name slots of the pools, checked in `locate`, of dims that are whole
            // vectors here.
            return unsafe { rows_of_head.attend(keys, values, next_values, None::<&Later<T>>) };
        };
        let (key_dim, value_dim) = (call.key_pages.layout().head_dim, call.value_pages.layout().head_dim);
        let asked = if call.value_in_key() { 0 } else { value_dim };
        let later = next.map(|(keys, values)| Later { keys, values, key_dim, value_dim: asked });
        // SAFETY: offsets name slots of the pools, checked in `locate`, of these dims; buffers hold a
        // tile of whole vectors, and what is packed without one has whole vectors itself.
        unsafe {
            let wide_keys = ready.keys.as_mut().map(|into| {
                self.simd.call(Widen { tokens: keys, dim: key_dim, into });
                in_buffer(into, &ready.key_offsets)
            });
            if let Some(into) = &mut ready.packed {
                match wide_keys {
                    Some(tokens) => self.simd.call(Pack { tokens, dim: self.key_dim, into }),
                    None => self.simd.call(Pack { tokens: keys, dim: key_dim, into }),
                }
            }
            self.simd.call(Widen { tokens: values, dim: value_dim, into: &mut ready.values });
            let values = in_buffer(&ready.values, &ready.value_offsets);
            let keys = match (&ready.packed, wide_keys) {
                (Some(packed), _) => Keys::Packed(packed, key_dim),
                (None, Some(keys)) => Keys::Stored(keys, None),
                (None, None) => unreachable!("tiles are packed, or padded"),
            };
            rows_of_head.attend(keys, values, None, later.as_ref());
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
