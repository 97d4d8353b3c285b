//! Few queries: keys and values as they lie, tile by tile in the order in which memory holds them.
//!
//! Where a page has no more tokens than a tile, all heads' keys come before all heads' values; of longer
//! pages, all tiles of one head before those of the next, a tile's keys before its values.

use super::method::Method;
use super::pass::Rows;
use super::places::{PairOfScales, Places};
use super::simd::Simd;
use super::tile::{Keys, Values};
use super::tokens::{SHORT_TILE, Tokens};

/// Bytes from what is read to what is asked for.
const AHEAD: usize = 8 << 10;

/// Keys or values of one tile in one head.
#[derive(Clone, Copy)]
struct Step {
    tile: usize,
    kv_head: usize,
    values: bool,
}

/// All steps from `at` on.
#[derive(Clone)]
struct Steps {
    at: Step,
    /// The tile behind the last.
    end: usize,
    kv_heads: usize,
    /// Tiles of a page.
    run: usize,
    /// The first tile at hand of the page at hand.
    first: usize,
}

impl Steps {
    fn new(places: &Places, kv_heads: usize, page_size: usize) -> Self {
        let tiles = places.tiles(SHORT_TILE);
        let at = Step { tile: tiles.start, kv_head: 0, values: false };
        let run = (page_size / SHORT_TILE).max(1);
        Self { at, end: tiles.end, kv_heads, run, first: tiles.start }
    }

    fn is_left(&self) -> bool {
        self.at.tile < self.end
    }

    fn advance(&mut self) {
        let Self { at, end, kv_heads, run, first } = self;
        if *run == 1 {
            at.kv_head += 1;
            if at.kv_head == *kv_heads {
                at.kv_head = 0;
                at.tile += usize::from(at.values);
                at.values = !at.values;
            }
            return;
        }
        at.tile += usize::from(at.values);
        at.values = !at.values;
        if !at.values && (at.tile == *end || at.tile.is_multiple_of(*run)) {
            at.kv_head += 1;
            if at.kv_head == *kv_heads {
                at.kv_head = 0;
                *first = at.tile;
            } else {
                at.tile = *first;
            }
        }
    }
}

/// All keys at hand.
pub(super) fn attend<S: Simd, M: Method<S>>(places: &Places, scales: &mut PairOfScales, rows: &mut Rows<S>) {
    let Rows { simd, call, block, .. } = *rows;
    let layout = call.key_pages.layout();
    let head_of = |kv_head| block.first_kv_head + kv_head;
    let tokens = |tile: usize| tile * SHORT_TILE..(tile + 1) * SHORT_TILE;
    let place = |step: Step| -> Tokens<M::Word> {
        let (kv_head, tokens) = (head_of(step.kv_head), tokens(step.tile));
        if step.values { places.values(kv_head, tokens) } else { places.keys(kv_head, tokens) }
    };
    let mut steps = Steps::new(places, block.num_kv_heads, layout.page_size);
    let mut ahead = steps.clone();
    // With one row there is so little to compute that the processor asks for what follows itself; asked
    // twice, it would do so later.
    let alone = block.num_queries * call.group() == 1;
    let distance = AHEAD.div_ceil(SHORT_TILE * layout.head_dim * layout.dtype.size());
    for _ in 0..distance {
        if ahead.is_left() {
            ahead.advance();
        }
    }
    let (mut whole_of, mut whole) = (usize::MAX, false);
    while steps.is_left() {
        let step @ Step { tile, kv_head, values } = steps.at;
        let asked = !alone && ahead.is_left() && !(ahead.at.values && call.value_in_key());
        let next = asked.then(|| place(ahead.at));
        if tile != whole_of {
            (whole_of, whole) = (tile, rows.see_all(tile, SHORT_TILE));
        }
        // All heads before the first values where they come one after the other.
        let weighed = match (values, steps.run) {
            (true, 1) if kv_head == 0 => 0..block.num_kv_heads,
            (true, 2..) => kv_head..kv_head + 1,
            _ => 0..0,
        };
        for kv_head in weighed {
            let next = (kv_head + 1 < block.num_kv_heads).then(|| (tokens(tile), head_of(kv_head + 1)));
            let scales = scales.of(simd, (tokens(tile), head_of(kv_head)), next);
            rows.tile::<SHORT_TILE>(kv_head, tile, whole, scales).weigh::<M>();
        }
        let mut tile = rows.tile::<SHORT_TILE>(kv_head, tile, whole, None);
        // SAFETY: offsets name slots of the pools, checked where they were located, of dims that are
        // whole vectors here.
        unsafe {
            if values {
                tile.weighted_sums::<M>(Values::Stored(place(step)), next);
            } else {
                tile.scores::<M, M::Word>(Keys::Stored(place(step)), next, None);
            }
        }
        steps.advance();
        if ahead.is_left() {
            ahead.advance();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::flash::{Call, SPLIT};
    use super::super::mask::Mask;
    use super::super::places::Places;
    use super::{Step, Steps};
    use crate::dtype::DType;
    use crate::layout::PagesLayout;
    use crate::storage::{PagesView, RowsView};

    /// Tile, head, and whether it is their values.
    type Visit = (usize, usize, bool);

    /// In order of memory, put plainly.
    fn plainly(tiles: std::ops::Range<usize>, kv_heads: usize, page_size: usize) -> Vec<Visit> {
        let tiles: Vec<usize> = tiles.collect();
        let mut visits = Vec::new();
        if page_size < 32 {
            for &tile in &tiles {
                for values in [false, true] {
                    visits.extend((0..kv_heads).map(|head| (tile, head, values)));
                }
            }
            return visits;
        }
        for page in tiles.chunk_by(|a, b| a * 16 / page_size == b * 16 / page_size) {
            for head in 0..kv_heads {
                visits.extend(page.iter().flat_map(|&tile| [(tile, head, false), (tile, head, true)]));
            }
        }
        visits
    }

    #[test]
    fn steps_take_every_tile_of_every_head_once_keys_before_values() {
        // Nothing is read.
        let rows = RowsView::from_slice(&[0.0_f32], [1, 1, 1]).unwrap();
        let layout = PagesLayout {
            dtype: DType::F32,
            num_pages: 0,
            num_heads: 1,
            page_size: 1,
            head_dim: 1,
            page_stride: 1,
            head_stride: 1,
            token_stride: 1,
        };
        // SAFETY: no pages.
        let pages = unsafe { PagesView::new(std::ptr::dangling_mut(), layout, false) };
        let call = Call {
            query: rows,
            key_pages: pages,
            value_pages: pages,
            mask: Mask { causal: true, window_left: None },
            scale: 1.0,
            soft_cap: 0.0,
            slopes: None,
            sinks: None,
        };
        for page_size in [1, 16, 24, 32, 128] {
            for (start, end) in
                [(0, SPLIT), (0, 1), (5, 9), (40, 41), (17, 130), (250, 400), (SPLIT + 127, SPLIT + 129)]
            {
                for kv_heads in 1..4 {
                    let mut places = Places::new(&call);
                    places.keys = start..end;
                    let mut steps = Steps::new(&places, kv_heads, page_size);
                    let mut visits = Vec::new();
                    while steps.is_left() {
                        let Step { tile, kv_head, values } = steps.at;
                        visits.push((tile, kv_head, values));
                        steps.advance();
                    }
                    let what = format!("{start}..{end}, {kv_heads} heads, pages of {page_size}");
                    let tiles = start / 16..end.div_ceil(16);
                    assert_eq!(visits, plainly(tiles.clone(), kv_heads, page_size), "{what}");
                    // A head's sums have the same order whatever the pages.
                    for head in 0..kv_heads {
                        let of_head: Vec<Visit> = visits.iter().copied().filter(|v| v.1 == head).collect();
                        let want = tiles.clone().flat_map(|tile| [(tile, head, false), (tile, head, true)]);
                        assert_eq!(of_head, want.collect::<Vec<_>>(), "{what}");
                    }
                }
            }
        }
    }
}
