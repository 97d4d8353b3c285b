//! Where the keys and values of a sequence lie.

use std::marker::PhantomData;
use std::ops::Range;

use super::flash::{Block, Call, SPLIT};
use super::scales::PairOfScales;
use super::tokens::{TILE, Tokens, ascend};
use crate::storage::PagesView;

/// The places of the keys at hand, at most [`SPLIT`].
pub(super) struct Places<'a> {
    call: &'a Call<'a>,
    /// The keys at hand, by position.
    pub(super) keys: Range<usize>,
    /// Byte offsets of their tokens from the first page's.
    key_offsets: [usize; SPLIT],
    value_offsets: [usize; SPLIT],
}

impl<'a> Places<'a> {
    /// Of no keys yet.
    pub(super) fn new(call: &'a Call<'a>) -> Self {
        Self { call, keys: 0..0, key_offsets: [0; SPLIT], value_offsets: [0; SPLIT] }
    }

    /// Tiles of so many tokens in which the keys at hand lie, by number from the sequence's begin.
    pub(super) fn tiles(&self, tokens: usize) -> Range<usize> {
        self.keys.start / tokens..self.keys.end.div_ceil(tokens)
    }

    /// Looks up where the tokens lie. Those that nobody needs get the address of one that somebody
    /// does, so that whole vectors of keys may be read.
    ///
    /// # Panics
    /// If a page number lies outside the pool.
    pub(super) fn locate(&mut self, block: &Block, keys: Range<usize>, scales: &mut PairOfScales) {
        let (k, v) = (self.call.key_pages.layout(), self.call.value_pages.layout());
        let mut token = keys.start;
        while token < keys.end {
            let slot = token % k.page_size;
            let page = block.pages[token / k.page_size];
            let page = usize::try_from(page).ok().filter(|&page| page < k.num_pages.min(v.num_pages));
            let page = page.expect("a page of the pool");
            let run = (k.page_size - slot).min(keys.end - token);
            let place = token % SPLIT;
            for (offsets, l) in [(&mut self.key_offsets, k), (&mut self.value_offsets, v)] {
                let size = l.dtype.size();
                ascend(
                    &mut offsets[place..place + run],
                    l.offset(page, 0, slot) * size,
                    l.token_stride * size,
                );
            }
            for scales in scales.each() {
                scales.locate(place, page, slot, run);
            }
            token += run;
        }
        let (first, end) = (keys.start % SPLIT, (keys.end - 1) % SPLIT + 1);
        for offsets in [&mut self.key_offsets, &mut self.value_offsets] {
            let valid = offsets[first];
            offsets[first / TILE * TILE..first].fill(valid);
            offsets[end..end.next_multiple_of(TILE)].fill(valid);
        }
        for scales in scales.each() {
            scales.fill(first..end);
        }
        self.keys = keys;
    }

    /// Keys in one head, of tokens in one tile; those not at hand have places too.
    pub(super) fn keys<T>(&self, kv_head: usize, tokens: Range<usize>) -> Tokens<'_, T> {
        tokens_of(&self.call.key_pages, kv_head, &self.key_offsets, tokens)
    }

    /// Values in one head, likewise.
    pub(super) fn values<T>(&self, kv_head: usize, tokens: Range<usize>) -> Tokens<'_, T> {
        tokens_of(&self.call.value_pages, kv_head, &self.value_offsets, tokens)
    }
}

fn tokens_of<'a, T>(
    pages: &PagesView,
    kv_head: usize,
    offsets: &'a [usize; SPLIT],
    tokens: Range<usize>,
) -> Tokens<'a, T> {
    let offsets = &offsets[tokens.start % SPLIT..][..tokens.len()];
    Tokens { base: pages.slot(0, kv_head, 0), offsets, stored: PhantomData }
}
