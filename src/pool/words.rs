//! One word per page: which life it is in and who holds it.

use super::lines::Lines;
use crate::ids::PageId;
use crate::sync::Ordering;

/// The largest reference count.
pub const MAX_COUNT: u32 = (1 << COUNT_BITS) - 1;

const COUNT_BITS: u32 = 24;
const COUNT_SHIFT: u32 = 8;
const GENERATION_SHIFT: u32 = COUNT_SHIFT + COUNT_BITS;
const ONE: u64 = 1 << COUNT_SHIFT;

const _: () = assert!(GENERATION_SHIFT == 32, "generation 32, count 24, flags 8 fill the word");

/// `generation << 32 | count << 8 | flags`.
///
/// A page is free exactly when its count is 0; its generation grows when the count reaches 0. The
/// flags say what holds the page besides counted references; none is in use yet, and a page that
/// carries one counts as shared.
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

    #[inline]
    const fn flags(self) -> u8 {
        self.0 as u8
    }

    #[inline]
    pub(super) const fn is_shared(self) -> bool {
        self.count() > 1 || self.flags() != 0
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

    /// Starts a life: count 0 becomes 1. Only for the thread that took the page's bit.
    #[inline]
    pub(super) fn start(&self, page: PageId) {
        let word = self.0.get(page.index());
        // Relaxed, and a plain store: taking the bit ordered this after the last life's end, and
        // nobody else changes a word whose count is 0.
        let free = PageWord(word.load(Ordering::Relaxed));
        debug_assert_eq!(free.count(), 0, "{page:?} was handed out while held");
        word.store(free.plus_one().0, Ordering::Relaxed);
    }

    /// Puts back the word of a page whose life `release` just ended and whose bit is not set yet.
    pub(super) fn undo_last_release(&self, page: PageId, before: PageWord) {
        // Relaxed, and a plain store: as in `start`, nobody else changes it.
        self.0.get(page.index()).store(before.0, Ordering::Relaxed);
    }

    /// Adds a reference if `allow` agrees; otherwise returns the word that was refused.
    #[inline]
    pub(super) fn retain(
        &self,
        page: PageId,
        allow: impl Fn(PageWord) -> bool,
    ) -> Result<PageWord, PageWord> {
        // Relaxed: whoever adds a reference holds one, or reached the page through something that
        // orders it (as for `Arc::clone`).
        self.update(page, allow, PageWord::plus_one, Ordering::Relaxed)
    }

    /// Drops a reference if `allow` agrees, and returns the word before; otherwise returns the word
    /// that was refused.
    #[inline]
    pub(super) fn release(
        &self,
        page: PageId,
        allow: impl Fn(PageWord) -> bool,
    ) -> Result<PageWord, PageWord> {
        // Release: pairs with the Acquire of the next release and in `get`. Acquire: whoever ends
        // the page's life does so after all that former holders did.
        self.update(page, allow, PageWord::minus_one, Ordering::AcqRel)
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
        // Relaxed: a preload, the compare-exchange decides.
        let mut seen = PageWord(word.load(Ordering::Relaxed));
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
