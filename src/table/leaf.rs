//! Leaves: fixed-size runs of page ids, the unit in which tables share.
//!
//! A leaf holds one count on each of its pages, and a version one count on each of its leaves. A
//! leaf every slot of which is computed never changes again and may be shared by versions; any
//! other leaf belongs to exactly one version.

use super::slab::Vacant;
use crate::ids::PageId;
use crate::sync::{AtomicU32, Ordering};

/// `N` page ids, `PageId::NONE` behind the last.
#[repr(C, align(64))]
pub(super) struct Leaf<const N: usize> {
    entries: [AtomicU32; N],
    /// Versions that include this leaf; 0 while vacant.
    pub(super) count: AtomicU32,
}

impl<const N: usize> Vacant for Leaf<N> {
    fn vacant() -> Self {
        Self { entries: std::array::from_fn(|_| AtomicU32::new(PageId::NONE.0)), count: AtomicU32::new(0) }
    }
}

impl<const N: usize> Leaf<N> {
    /// The page at `i`. Relaxed: the reader learned from an Acquire load (of the head, or of
    /// `computed`) how many entries it may look at, and those were written before the Release.
    #[inline]
    pub(super) fn page(&self, i: usize) -> PageId {
        PageId(self.entries[i].load(Ordering::Relaxed))
    }

    /// Written by the leaf's only version, published by its `num_pages` or its head.
    #[inline]
    pub(super) fn set(&self, i: usize, page: PageId) {
        self.entries[i].store(page.0, Ordering::Relaxed);
    }

    /// The pages up to the first `NONE`.
    pub(super) fn pages(&self) -> impl Iterator<Item = PageId> {
        self.entries.iter().map(|e| PageId(e.load(Ordering::Relaxed))).take_while(|&p| p != PageId::NONE)
    }

    /// The raw entries, for copying a row of a block table.
    #[inline]
    pub(super) fn entries(&self) -> &[AtomicU32; N] {
        &self.entries
    }

    #[inline]
    pub(super) fn entry(&self, i: usize) -> &AtomicU32 {
        &self.entries[i]
    }
}
