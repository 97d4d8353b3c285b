//! What quantised keys and values are multiplied by: one factor per key for its product with a query,
//! and one for its weight, so that inner loops over elements only widen them.

use std::ops::Range;

use super::flash::{Call, SPLIT};
use super::simd::{Job, Simd};
use super::stored::Stored;
use super::tokens::{TILE, ascend};
use crate::layout::PagesLayout;
use crate::storage::PagesView;

/// Tokens whose scales are brought at once where they lie one behind the other, and most likely in one
/// cache line.
const TOGETHER: usize = 8;

/// Factors of the keys and values of one tile in one head.
#[derive(Clone, Copy)]
pub(super) struct TileScales<'a> {
    pub(super) key: &'a [f32; TILE],
    pub(super) value: &'a [f32; TILE],
}

impl TileScales<'_> {
    /// Whether scales of the values of some tokens differ by more than four powers of two, but for those that
    /// are 0.
    #[inline(always)]
    pub(super) fn uneven(&self, tokens: Range<usize>) -> bool {
        let (mut most, mut least) = (0, u32::MAX);
        for scale in &self.value[tokens] {
            // Bits of magnitudes are in their order, and 0 becomes the largest.
            let bits = scale.abs().to_bits();
            most = most.max(bits);
            least = least.min(bits.wrapping_sub(1));
        }
        most.saturating_sub(least) > 4 << (f32::MANTISSA_DIGITS - 1)
    }
}

/// The scales of keys, or of values, on a pass through splits.
pub(super) struct Scales {
    base: *const f32,
    layout: PagesLayout,
    /// What every scale is multiplied by: the unit in which elements are loaded.
    unit: f32,
    /// Where those of the keys at hand lie in the first head, in elements from `base`.
    offsets: [usize; SPLIT],
    /// Whether those of so many tokens lie one behind the other.
    together: [bool; SPLIT / TOGETHER],
    /// Those of one tile and head.
    tile: [f32; TILE],
}

/// The scales of quantised keys and values.
pub(super) struct PairOfScales(Option<Box<[Scales; 2]>>);

impl PairOfScales {
    /// None if the type needs none.
    ///
    /// # Panics
    /// If scales are not of the pages' shape.
    pub(super) fn new<T: Stored>(call: &Call) -> Self {
        let of = |pages| Scales::of::<T>(pages);
        Self(of(&call.key_pages).zip(of(&call.value_pages)).map(|(key, value)| Box::new([key, value])))
    }

    /// Brings those of a tile's tokens in one head, and asks for those of the next.
    pub(super) fn of<S: Simd>(
        &mut self,
        simd: S,
        (tokens, kv_head): (Range<usize>, usize),
        next: Option<&(Range<usize>, usize)>,
    ) -> Option<TileScales<'_>> {
        let [key, value] = &mut **self.0.as_mut()?;
        for scales in [&mut *key, &mut *value] {
            if let Some((tokens, kv_head)) = next {
                scales.prefetch(simd, *kv_head, tokens.clone());
            }
            scales.take(simd, kv_head, tokens.clone());
        }
        Some(TileScales { key: &key.tile, value: &value.tile })
    }

    /// Those of keys and those of values.
    pub(super) fn each(&mut self) -> impl Iterator<Item = &mut Scales> {
        self.0.iter_mut().flat_map(|scales| scales.iter_mut())
    }
}

impl Scales {
    fn of<T: Stored>(pages: &PagesView) -> Option<Self> {
        let (scales, pages) = (pages.scales()?, pages.layout());
        let shape = |l: &PagesLayout| (l.num_pages, l.num_heads, l.page_size);
        assert!(shape(&scales.layout) == shape(pages), "one scale per token and head");
        let (base, layout) = (scales.base.cast_const().cast(), scales.layout);
        let (offsets, together) = ([0; SPLIT], [false; SPLIT / TOGETHER]);
        Some(Self { base, layout, unit: T::UNIT, offsets, together, tile: [0.0; TILE] })
    }

    /// Notes where the scales of `run` tokens from `slot` of a page on lie, for the places from
    /// `place` on.
    ///
    /// # Panics
    /// If there is no such page or slot.
    pub(super) fn locate(&mut self, place: usize, page: usize, slot: usize, run: usize) {
        let l = &self.layout;
        assert!(page < l.num_pages && slot + run <= l.page_size, "slots of the pool");
        let end = place + run;
        for group in place / TOGETHER..end.div_ceil(TOGETHER) {
            let tokens = place.max(group * TOGETHER)..end.min((group + 1) * TOGETHER);
            let first = l.offset(page, 0, slot + tokens.start - place);
            let together = tokens.len() == TOGETHER && l.token_stride == 1;
            self.together[group] = together;
            // Of those that are together, the first names all.
            let named = if together { 1 } else { tokens.len() };
            ascend(&mut self.offsets[tokens][..named], first, l.token_stride);
        }
    }

    /// Makes places around `located`, up to whole tiles, name the first of them.
    pub(super) fn fill(&mut self, located: Range<usize>) {
        let Range { start, end } = located;
        let valid = self.offsets[start];
        for around in [start / TILE * TILE..start, end..end.next_multiple_of(TILE)] {
            self.together[around.start.div_ceil(TOGETHER)..around.end.div_ceil(TOGETHER)].fill(false);
            self.offsets[around].fill(valid);
        }
    }

    /// Brings those of one head and at most a tile of tokens, whole groups.
    pub(super) fn take<S: Simd>(&mut self, simd: S, head: usize, tokens: Range<usize>) {
        let (base, first) = (self.of_head(head), tokens.start % SPLIT);
        let offsets = &self.offsets[first..][..tokens.len()];
        let together = &self.together[first / TOGETHER..];
        // SAFETY: `locate` checked pages and slots, `of_head` the head; the view vouches for them.
        unsafe { simd.call(Take { base, offsets, together, unit: self.unit, into: &mut self.tile }) }
    }

    /// Asks for those of one head and some tokens.
    pub(super) fn prefetch<S: Simd>(&self, simd: S, head: usize, tokens: Range<usize>) {
        let base = self.of_head(head);
        let offsets = &self.offsets[tokens.start % SPLIT..][..tokens.len()];
        for &offset in offsets.iter().step_by(TOGETHER) {
            simd.prefetch(base.wrapping_add(offset).cast());
        }
    }

    fn of_head(&self, head: usize) -> *const f32 {
        assert!(head < self.layout.num_heads, "a KV head");
        self.base.wrapping_add(head * self.layout.head_stride)
    }
}

/// Brings the scales of some tokens, whole groups, times `unit`.
///
/// # Safety (of running it)
/// - All offsets from `base` are valid for reads, those of a group that is together as they follow the first.
struct Take<'a> {
    base: *const f32,
    offsets: &'a [usize],
    together: &'a [bool],
    unit: f32,
    into: &'a mut [f32; TILE],
}

impl<S: Simd> Job<S> for Take<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run(self, _: S) {
        let groups = self.offsets.as_chunks::<TOGETHER>().0.iter().zip(self.together);
        for (scales, (offsets, &together)) in self.into.as_chunks_mut::<TOGETHER>().0.iter_mut().zip(groups) {
            // SAFETY: the caller's promise.
            unsafe {
                if together {
                    *scales = self.base.wrapping_add(offsets[0]).cast::<[f32; TOGETHER]>().read_unaligned();
                } else {
                    *scales = offsets.map(|offset| self.base.wrapping_add(offset).read());
                }
            }
            for scale in scales {
                *scale *= self.unit;
            }
        }
    }
}
