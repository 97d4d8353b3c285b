//! Numbers that name things. A newtype each, so that a page can't be mistaken for a token.

use std::fmt;

/// The id of a token in the model's vocabulary.
pub type TokenId = u32;

/// A physical page of the pool.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct PageId(pub u32);

impl PageId {
    /// No page; never handed out.
    pub const NONE: Self = Self(u32::MAX);

    /// The page as an index into an array.
    #[inline]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Debug for PageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::NONE { f.write_str("P-") } else { write!(f, "P{}", self.0) }
    }
}

/// A page together with the generation of its current life: what the outside holds.
///
/// Each time a page's last reference goes, its generation grows by one, so a stale handle can't
/// touch the page's next owner (invariant I5) unless it outlives an exact multiple of 2^32 reuses.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct PageHandle(pub u64);

impl PageHandle {
    /// Packs `generation << 32 | page`.
    #[inline]
    pub const fn new(page: PageId, generation: u32) -> Self {
        Self((generation as u64) << 32 | page.0 as u64)
    }

    /// The physical page.
    #[inline]
    pub const fn page(self) -> PageId {
        PageId(self.0 as u32)
    }

    /// The generation.
    #[inline]
    pub const fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

impl fmt::Debug for PageHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}g{}", self.page(), self.generation())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn handle_round_trips(page: u32, generation: u32) {
            let handle = PageHandle::new(PageId(page), generation);
            prop_assert_eq!((handle.page().0, handle.generation()), (page, generation));
        }
    }
}
