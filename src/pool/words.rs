//! One word per page: which life it is in and who holds it.

use super::lines::Lines;
use crate::ids::PageId;
use crate::sync::{AtomicU64, Ordering, Preload, prefetch};

/// The largest reference count.
pub const MAX_COUNT: u32 = (1 << COUNT_BITS) - 1;

const FLAG_BITS: u32 = 2;
const RELEASING_BITS: u32 = 6;
const COUNT_BITS: u32 = 24;
const RELEASING_SHIFT: u32 = FLAG_BITS;
const COUNT_SHIFT: u32 = RELEASING_SHIFT + RELEASING_BITS;
const GENERATION_SHIFT: u32 = COUNT_SHIFT + COUNT_BITS;
const ONE: u64 = 1 << COUNT_SHIFT;
const ONE_RELEASING: u64 = 1 << RELEASING_SHIFT;
const MAX_RELEASING: u32 = (1 << RELEASING_BITS) - 1;

const _: () = assert!(GENERATION_SHIFT == 32, "the generation is the upper half of the word");

/// `generation 32 | count 24 | releasing 6 | flags 2`.
///
/// - A page is free exactly when its count is 0; its generation grows when the count reaches 0.
/// - `releasing` of the counted references are promised to lists that are being released; nobody
///   else can drop those, so such a list can still be kept whole or given up whole.
/// - The flags say what holds the page besides counted references; none is in use yet, and a page
///   that carries one counts as shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PageWord(pub(super) u64);

impl PageWord {
    /// A free page.
    #[inline]
    pub(super) const fn free(generation: u32) -> Self {
        Self((generation as u64) << GENERATION_SHIFT)
    }

    #[inline]
    pub(super) const fn generation(self) -> u32 {
        (self.0 >> GENERATION_SHIFT) as u32
    }

    #[inline]
    pub(super) const fn count(self) -> u32 {
        (self.0 >> COUNT_SHIFT) as u32 & MAX_COUNT
    }

    /// References that can still be dropped.
    #[inline]
    pub(super) const fn droppable(self) -> u32 {
        self.count() - self.releasing()
    }

    #[inline]
    pub(super) const fn is_shared(self) -> bool {
        self.count() > 1 || self.flags() != 0
    }

    #[inline]
    const fn releasing(self) -> u32 {
        (self.0 >> RELEASING_SHIFT) as u32 & MAX_RELEASING
    }

    #[inline]
    const fn flags(self) -> u32 {
        self.0 as u32 & ((1 << FLAG_BITS) - 1)
    }

    #[inline]
    const fn plus_one(self) -> Self {
        Self(self.0 + ONE)
    }

    /// One reference fewer; the last one ends this life of the page.
    #[inline]
    const fn minus_one(self) -> Self {
        if self.count() == 1 { Self::free(self.generation().wrapping_add(1)) } else { Self(self.0 - ONE) }
    }

    /// Whether one reference and nothing else holds the page, and it is promised to no list.
    #[inline]
    const fn is_plain(self) -> bool {
        self.0 as u32 == ONE as u32
    }

    /// [`minus_one`](Self::minus_one) where [`is_plain`](Self::is_plain): the generation is the upper
    /// half of the word and begins again after its last.
    #[inline]
    const fn ended(self) -> Self {
        Self(self.0.wrapping_add(PageWord::free(1).0 - ONE))
    }

    /// One reference more that is promised to a list.
    #[inline]
    const fn promised(self) -> Self {
        Self(self.0 + ONE_RELEASING)
    }

    /// One promise fewer; the reference stays.
    #[inline]
    const fn unpromised(self) -> Self {
        Self(self.0 - ONE_RELEASING)
    }
}

/// The words of all pages.
#[derive(Debug)]
pub(super) struct PageWords(Lines);

impl PageWords {
    /// `len` free pages in `generation`.
    pub(super) fn new(len: usize, generation: u32) -> Self {
        Self(Lines::new(len, |_| PageWord::free(generation).0))
    }

    /// The page's word.
    #[inline]
    pub(super) fn get(&self, page: PageId) -> PageWord {
        // Acquire: pairs with the Release in `release`: who finds itself the only holder may write,
        // after all that former holders did.
        PageWord(self.0.get(page.index()).load(Ordering::Acquire))
    }

    /// Fetches the page's word ahead, if there is such a page.
    #[inline]
    pub(super) fn prefetch(&self, page: PageId) {
        if page.index() < self.0.len() {
            prefetch(self.0.get(page.index()));
        }
    }

    /// Starts a life: count 0 becomes 1. Only for the thread that took the page's bit.
    #[inline]
    pub(super) fn start(&self, page: PageId) {
        Self::start_word(self.0.get(page.index()));
    }

    /// [`start`](Self::start) for `n` adjacent pages.
    #[inline]
    pub(super) fn start_run(&self, first: PageId, n: usize) {
        self.0.range(first.index()..first.index() + n).iter().for_each(Self::start_word);
    }

    #[inline]
    fn start_word(word: &AtomicU64) {
        // Relaxed, and a plain store: taking the bit ordered this after the last life's end, and
        // nobody else changes a word whose count is 0.
        let free = PageWord(word.load(Ordering::Relaxed));
        debug_assert_eq!(free.count(), 0, "a page was handed out while held");
        word.store(free.plus_one().0, Ordering::Relaxed);
    }

    /// Adds a reference if `allow` agrees; otherwise returns the word that was refused.
    #[inline]
    pub(super) fn retain(&self, page: PageId, allow: impl Fn(PageWord) -> bool) -> Result<(), PageWord> {
        // Relaxed: whoever adds a reference holds one, or reached the page through something that
        // orders it (as for `Arc::clone`).
        self.update(page, allow, PageWord::plus_one, Ordering::Relaxed).map(drop)
    }

    /// Drops a reference if one can be dropped; true: it was the last, and the caller frees the page.
    /// Otherwise returns the word that was refused.
    #[inline]
    pub(super) fn release(&self, page: PageId) -> Result<bool, PageWord> {
        let word = self.0.get(page.index());
        let seen = PageWord(word.preload());
        // Mostly it is the last reference and no list has a part in it. AcqRel: as in `release_one`.
        if seen.is_plain()
            && word.compare_exchange(seen.0, seen.ended().0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        {
            return Ok(true);
        }
        self.release_one(page)
    }

    #[inline(never)]
    fn release_one(&self, page: PageId) -> Result<bool, PageWord> {
        // Release: pairs with the Acquire of the next release and in `get`. Acquire: whoever ends
        // the page's life does so after all that former holders did.
        let allow = |word: PageWord| word.droppable() > 0;
        let before = self.update(page, allow, PageWord::minus_one, Ordering::AcqRel)?;
        Ok(before.count() == 1)
    }

    /// First half of releasing a list, if `allow` agrees: ends the page's life if nothing but this
    /// reference holds it, else promises the reference to the list. To be followed by
    /// [`finish_release`](Self::finish_release) or [`undo_release`](Self::undo_release), before
    /// either of which the page's bit stays clear.
    #[inline]
    pub(super) fn begin_release(
        &self,
        page: PageId,
        allow: impl Fn(PageWord) -> bool,
    ) -> Result<(), PageWord> {
        // Beyond that many lists at once the promise can't be counted, and is refused.
        let allow = |word: PageWord| allow(word) && word.releasing() < MAX_RELEASING;
        let change = |word: PageWord| if word.is_shared() { word.promised() } else { word.minus_one() };
        // AcqRel: as in `release`.
        self.update(page, allow, change, Ordering::AcqRel).map(drop)
    }

    /// Second half; true: it was the last reference, and the caller frees the page.
    #[inline]
    pub(super) fn finish_release(&self, page: PageId, generation: u32) -> bool {
        if self.get(page).generation() != generation {
            return true;
        }
        let change = |word: PageWord| word.unpromised().minus_one();
        // AcqRel: as in `release`.
        self.update(page, |_| true, change, Ordering::AcqRel).is_ok_and(|before| before.count() == 1)
    }

    /// Takes the first half back.
    pub(super) fn undo_release(&self, page: PageId, generation: u32) {
        if self.get(page).generation() == generation {
            // Relaxed: the reference stays, nothing is handed over.
            let _ = self.update(page, |_| true, PageWord::unpromised, Ordering::Relaxed);
        } else {
            // Relaxed, and a plain store: as in `start`, nobody else changes a word whose count is 0.
            let word = PageWord::free(generation).plus_one();
            self.0.get(page.index()).store(word.0, Ordering::Relaxed);
        }
    }

    #[inline]
    fn update(
        &self,
        page: PageId,
        allow: impl Fn(PageWord) -> bool,
        change: impl Fn(PageWord) -> PageWord,
        order: Ordering,
    ) -> Result<PageWord, PageWord> {
        let word = self.0.get(page.index());
        let mut seen = PageWord(word.preload());
        loop {
            if !allow(seen) {
                return Err(seen);
            }
            match word.compare_exchange_weak(seen.0, change(seen).0, order, Ordering::Relaxed) {
                Ok(_) => return Ok(seen),
                Err(now) => seen = PageWord(now),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_short_way_of_ending_a_life_ends_in_the_same_word() {
        for generation in [0, 1, u32::MAX - 1, u32::MAX] {
            let word = PageWord::free(generation).plus_one();
            assert!(word.is_plain());
            assert_eq!(word.ended(), word.minus_one());
            for other in [PageWord::free(generation), word.plus_one(), word.promised(), PageWord(word.0 | 1)]
            {
                assert!(!other.is_plain(), "{other:?}");
            }
        }
    }
}
