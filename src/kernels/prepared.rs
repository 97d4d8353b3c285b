//! Tiles made ready before they are used: for many rows, and for elements that are no whole vectors.

use std::marker::PhantomData;

use super::method::Method;
use super::pack::{Pack, Widen};
use super::panels;
use super::pass::Rows;
use super::places::Places;
use super::scales::PairOfScales;
use super::scratch::Scratch;
use super::simd::Simd;
use super::tile::{Keys, Values};
use super::tokens::{Later, TILE, Tokens};

/// One tile, padded with zeros to whole vectors.
pub(super) struct Prepared<S, M> {
    /// `[TILE, key_dim]`; not there if keys are packed straight from where they lie.
    keys: Option<Scratch>,
    /// `[TILE / panel, key_words, panel]`; not there if few rows use the tile.
    packed: Option<Scratch>,
    /// As the method packs them, `[value_dim / panel, tokens, panel]`, the last panel being narrower, or row by row
    /// if few use the tile: in one place also where nothing is widened, since rows that lie pages
    /// apart cost more each time than the copy costs once.
    values: Scratch,
    key_offsets: [usize; TILE],
    value_offsets: [usize; TILE],
    method: PhantomData<(S, M)>,
}

impl<S: Simd, M: Method<S>> Prepared<S, M> {
    /// What the tiles of a pass need, if anything.
    pub(super) fn new(prefill: bool, padded: bool, key_words: usize, value_dim: usize) -> Option<Self> {
        let offsets = |dim: usize| std::array::from_fn(|token| token * dim * size_of::<f32>());
        (prefill || padded).then(|| Self {
            keys: padded.then(|| Scratch::zeros(TILE * key_words)),
            packed: prefill.then(|| Scratch::padded(TILE * key_words, padded)),
            values: Scratch::padded(TILE / M::PER_WORD * value_dim, padded),
            key_offsets: offsets(key_words),
            value_offsets: offsets(value_dim),
            method: PhantomData,
        })
    }

    /// All keys at hand, tile by tile.
    pub(super) fn attend<const N: usize>(
        &mut self,
        places: &Places,
        scales: &mut PairOfScales,
        rows: &mut Rows<S>,
    ) {
        let kv_heads = rows.block.num_kv_heads;
        let tiles = places.tiles(N);
        let step = |i: usize| (tiles.start + i / kv_heads, i % kv_heads);
        let steps = tiles.len() * kv_heads;
        for i in 0..steps {
            self.tile::<N>(places, scales, rows, step(i), (i + 1 < steps).then(|| step(i + 1)));
        }
    }

    /// All rows of one KV head of the block over one tile: each step for all of them before the next,
    /// so that keys, then values, stay in the nearest cache.
    fn tile<const N: usize>(
        &mut self,
        places: &Places,
        scales: &mut PairOfScales,
        rows: &mut Rows<S>,
        (tile, kv_head): (usize, usize),
        next: Option<(usize, usize)>,
    ) {
        let Rows { simd, call, block, .. } = *rows;
        let (key_dim, value_dim) = (call.key_pages.layout().head_dim, call.value_pages.layout().head_dim);
        let head_of = |kv_head| block.first_kv_head + kv_head;
        let at = |(tile, kv_head): (usize, usize)| (tile * N..(tile + 1) * N, head_of(kv_head));
        let place = |step| {
            let (tokens, kv_head) = at(step);
            (places.keys::<M::Element>(kv_head, tokens.clone()), places.values::<M::Element>(kv_head, tokens))
        };
        let (keys, values) = place((tile, kv_head));
        let asked = if call.value_in_key() { 0 } else { value_dim };
        let later = next.map(place).map(|(keys, values)| Later { keys, values, key_dim, value_dim: asked });
        // Of the last tile, those that are there.
        let count = N.min(places.keys.end - tile * N);
        let scales = scales.of(simd, at((tile, kv_head)), next.map(at).as_ref());
        // SAFETY: offsets name slots of the pools, checked where they were located, of these dims;
        // buffers hold a tile of whole vectors, and what is packed without one has whole vectors itself.
        unsafe {
            let wide_keys = self.keys.as_mut().map(|into| {
                let into = &mut into[..N * rows.key_words];
                simd.call(Widen { tokens: keys, dim: key_dim, count: N, panel: usize::MAX, into });
                in_buffer(into, &self.key_offsets[..N])
            });
            if let Some(into) = &mut self.packed {
                if let Some(tokens) = wide_keys {
                    let (words, method) = (rows.key_words, PhantomData::<M::Prepared>);
                    simd.call(Pack { tokens, words, count, into, method });
                } else {
                    let (words, method) = (key_dim / M::PER_WORD, PhantomData::<M>);
                    simd.call(Pack { tokens: keys, words, count, into, method });
                }
            }
            let panel = if self.packed.is_some() { panels::width::<S>() } else { usize::MAX };
            M::pack_values(simd, values, value_dim, count, panel, &mut self.values);
            let (keys, values) = match (&self.packed, wide_keys) {
                (Some(packed), _) => {
                    (Keys::Packed(packed, key_dim / M::PER_WORD), Values::Packed(&self.values))
                }
                (None, Some(keys)) => {
                    (Keys::Stored(keys), Values::Stored(in_buffer(&self.values, &self.value_offsets[..N])))
                }
                (None, None) => unreachable!("tiles are packed, or padded"),
            };
            let whole = rows.see_all(tile, N);
            let mut tile = rows.tile::<N>(kv_head, tile, whole, scales);
            tile.scores::<M::Prepared, M::Element>(keys, None, later.as_ref());
            tile.weigh::<M::Prepared>();
            tile.weighted_sums::<M::Prepared>(values, None);
        }
    }
}

/// The tokens of a buffer of f32.
fn in_buffer<'a>(buffer: &[f32], offsets: &'a [usize]) -> Tokens<'a, f32> {
    Tokens { base: buffer.as_ptr().cast(), offsets, stored: PhantomData }
}
