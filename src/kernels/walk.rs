//! Few queries: keys and values as they lie, tile by tile: all heads' keys, then all heads' values, so that
//! memory is read in runs as long as a page's tokens of one head, and page after page in all of them.

use super::method::Method;
use super::pass::Rows;
use super::places::Places;
use super::scales::PairOfScales;
use super::simd::Simd;
use super::tile::{Keys, Values};
use super::tokens::{SHORT_TILE, Tokens};

/// Keys or values of one tile in one head.
#[derive(Clone, Copy)]
struct Step {
    tile: usize,
    values: bool,
    kv_head: usize,
}

impl Step {
    /// The next, of so many heads.
    fn next(self, kv_heads: usize) -> Self {
        let Self { tile, values, kv_head } = self;
        if kv_head + 1 < kv_heads {
            Self { tile, values, kv_head: kv_head + 1 }
        } else {
            Self { tile: tile + usize::from(values), values: !values, kv_head: 0 }
        }
    }

    /// The next keys after these.
    fn next_keys(self, kv_heads: usize) -> Self {
        let next = self.next(kv_heads);
        if next.values { Self { tile: next.tile + 1, values: false, ..next } } else { next }
    }
}

/// All keys at hand.
pub(super) fn attend<S: Simd, M: Method<S>>(places: &Places, scales: &mut PairOfScales, rows: &mut Rows<S>) {
    let Rows { simd, call, block, .. } = *rows;
    let kv_heads = block.num_kv_heads;
    let head_of = |kv_head| block.first_kv_head + kv_head;
    let tokens = |tile: usize| tile * SHORT_TILE..(tile + 1) * SHORT_TILE;
    let place = |step: Step| -> Tokens<M::Element> {
        let (kv_head, tokens) = (head_of(step.kv_head), tokens(step.tile));
        if step.values { places.values(kv_head, tokens) } else { places.keys(kv_head, tokens) }
    };
    let tiles = places.tiles(SHORT_TILE);
    let mut step = Step { tile: tiles.start, values: false, kv_head: 0 };
    // What is asked for while a step is worked on: the next, or the one after it, since with several rows
    // to a key the processor doesn't ask for what follows itself.
    let mut ahead = step.next(kv_heads);
    if call.group() > 1 && kv_heads > 1 {
        ahead = ahead.next(kv_heads);
    }
    let mut whole = false;
    while step.tile < tiles.end {
        let Step { tile: number, values, kv_head } = step;
        let asked = ahead.tile < tiles.end && !(ahead.values && call.value_in_key());
        let next = asked.then(|| place(ahead));
        let mut scales_of_head = None;
        if !values {
            if kv_head == 0 {
                whole = rows.see_all(number, SHORT_TILE);
            }
            let following = step.next_keys(kv_heads);
            let asked =
                (following.tile < tiles.end).then(|| (tokens(following.tile), head_of(following.kv_head)));
            scales_of_head = scales.of(simd, (tokens(number), head_of(kv_head)), asked.as_ref());
        }
        let mut tile = rows.tile::<SHORT_TILE>(kv_head, number, whole, scales_of_head);
        // SAFETY: offsets name slots of the pools, checked where they were located, of dims that are
        // whole vectors here.
        unsafe {
            if values {
                tile.weighted_sums::<M>(Values::Stored(place(step)), next);
            } else {
                tile.scores::<M, M::Element>(Keys::Stored(place(step)), next, None);
                // Head by head: while weights are made, nothing is asked for, and what was is soon there.
                tile.weigh::<M>();
            }
        }
        (step, ahead) = (step.next(kv_heads), ahead.next(kv_heads));
    }
}

#[cfg(test)]
mod tests {
    use super::Step;

    #[test]
    fn steps_take_every_tile_of_every_head_once_keys_before_values() {
        for tiles in [0..1, 0..8, 3..4, 5..7] {
            for kv_heads in 1..5 {
                let mut step = Step { tile: tiles.start, values: false, kv_head: 0 };
                let mut visits = Vec::new();
                let mut keys = step;
                while step.tile < tiles.end {
                    if !step.values {
                        assert_eq!((keys.tile, keys.kv_head), (step.tile, step.kv_head), "the next keys");
                        keys = keys.next_keys(kv_heads);
                    }
                    visits.push((step.tile, step.values, step.kv_head));
                    step = step.next(kv_heads);
                }
                let each = |tile| {
                    [false, true].into_iter().flat_map(move |v| (0..kv_heads).map(move |h| (tile, v, h)))
                };
                assert_eq!(
                    visits,
                    tiles.clone().flat_map(each).collect::<Vec<_>>(),
                    "{tiles:?}, {kv_heads} heads"
                );
            }
        }
    }
}
