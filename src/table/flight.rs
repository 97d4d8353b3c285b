//! Leases of work on a device, which goes on after its batch has ended.
//!
//! Such work reads tables that were sent to it, so nothing has to stay as it was except the pages:
//! they must not be handed out again. A lease therefore holds pages by counts of its own, as a fork
//! would, and doesn't see what the tables do meanwhile.
//!
//! A page that only one sequence and leases hold may still be written in place: its stream orders the
//! writing after the reading. `in_flight` counts the references that are leases', so that they can
//! be told from a sharer's. Of whole leaves a lease counts the leaf only; the last leaf with
//! computed tokens, and what lies behind it, it counts page by page, so truncating by up to a leaf
//! leaves pages that are nobody else's.

use std::sync::Arc;

use super::version::Role;
use super::{TableBatch, Tables};
use crate::error::Result;
use crate::ids::PageId;
use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// One lease that is being given back, in the lower half.
const ENDING: u64 = 1;
/// One that was, in the upper half.
const ENDED: u64 = 1 << 32;

/// References of leases, beside the pool's counts.
pub(super) struct Flight {
    /// For each page number: how many of its references are leases'.
    in_flight: Box<[AtomicU32]>,
    /// Leases given back 32 | being given back 32.
    ends: AtomicU64,
}

impl Flight {
    pub(super) fn new(num_words: u32) -> Self {
        Self { in_flight: (0..num_words).map(|_| AtomicU32::new(0)).collect(), ends: AtomicU64::new(0) }
    }
}

/// What work on a device holds of a batch's pages; dropping it gives them back.
pub struct TableLease<const LEAF: usize = 64, const SHARDS: usize = 16> {
    tables: Arc<Tables<LEAF, SHARDS>>,
    /// Versions that nobody else names, and the first leaf of each whose pages it counts one by one.
    versions: Vec<(u32, usize)>,
}

impl<const LEAF: usize, const SHARDS: usize> Tables<LEAF, SHARDS> {
    /// Whether somebody besides one holder, and leases, may read the page.
    #[inline]
    pub(super) fn is_shared(&self, page: PageId) -> bool {
        self.pool.is_shared(page) && self.flight.as_ref().is_none_or(|flight| self.has_sharer(flight, page))
    }

    /// Where a lease is being given back meanwhile the two counts may not belong together: then the
    /// page counts as shared, and is copied in vain.
    #[cold]
    fn has_sharer(&self, flight: &Flight, page: PageId) -> bool {
        // Acquire, here and below: what is loaded next is loaded after it. Who sees a count that a
        // lease gave back also sees that one was ending, by the AcqRel of both.
        let before = flight.ends.load(Ordering::Acquire);
        let leased = flight.in_flight[page.index()].load(Ordering::Acquire);
        let count = self.pool.ref_count(page);
        let after = flight.ends.load(Ordering::Acquire);
        before != after || before as u32 != 0 || count - leased.min(count) > 1
    }

    /// The lease of one version's first `num_pages` pages, of which `computed` tokens are computed.
    fn lease_version(&self, index: u32, num_pages: u32, computed: u32) -> Result<(u32, usize)> {
        let whole = computed as usize / (LEAF * self.page_size.get() as usize);
        let shared = whole.saturating_sub(1);
        let lease = self.derive_sharing(self.versions.get(index), num_pages, computed, None, shared)?;
        self.versions.get(lease).set_role(Role::Retired);
        Ok((lease, shared))
    }
}

impl<const LEAF: usize, const SHARDS: usize> TableBatch<LEAF, SHARDS> {
    /// Holds every page that the batch's tables name, and the sources of its copies, until the lease
    /// is dropped, whatever becomes of batch and sequences.
    ///
    /// # Errors
    /// `RefCount` if a page can't be counted once more; nothing is held then.
    ///
    /// # Panics
    /// Without [`Tables::with_leases`].
    pub fn lease(&self) -> Result<TableLease<LEAF, SHARDS>> {
        let tables = self.tables();
        let flight = tables.flight.as_ref().expect("tables that count leases");
        let mut lease = TableLease { tables: Arc::clone(tables), versions: Vec::new() };
        // What was derived is counted as a lease's at once, so that dropping it is always the same.
        let mut hold = |made: (u32, usize)| {
            lease.versions.push(made);
            tables.for_own_pages(made, |page| {
                // Release: who sees it also sees the page's count, which was raised before.
                flight.in_flight[page.index()].fetch_add(1, Ordering::Release);
            });
        };
        for (version, num_pages, computed) in self.leased_tables() {
            hold(tables.lease_version(version, num_pages, computed)?);
        }
        let sources: Vec<PageId> = self.copies().iter().map(|copy| copy.source).collect();
        if !sources.is_empty() {
            hold((tables.list(&sources)?, 0));
        }
        Ok(lease)
    }
}

impl<const LEAF: usize, const SHARDS: usize> Tables<LEAF, SHARDS> {
    /// A version that lists pages, each counted once more.
    fn list(&self, pages: &[PageId]) -> Result<u32> {
        for (i, &page) in pages.iter().enumerate() {
            if let Err(error) = self.pool.retain_page(page) {
                self.pool.release_pages(pages[..i].iter().copied());
                return Err(error);
            }
        }
        let index = self.versions.take();
        let version = self.versions.get(index);
        version.start(0);
        version.set_role(Role::Retired);
        for &page in pages {
            self.push(version, page);
        }
        Ok(index)
    }

    /// The pages in the leaves from `first` on of a version that nobody else names.
    fn for_own_pages(&self, (index, first): (u32, usize), mut f: impl FnMut(PageId)) {
        let version = self.versions.get(index);
        for i in (first * LEAF) as u32..version.num_pages() {
            f(self.page(version, i));
        }
    }
}

impl<const LEAF: usize, const SHARDS: usize> Drop for TableLease<LEAF, SHARDS> {
    fn drop(&mut self) {
        let flight = self.tables.flight.as_ref().expect("tables that count leases");
        // AcqRel, on both: as in `has_sharer`.
        flight.ends.fetch_add(ENDING, Ordering::AcqRel);
        for &made in &self.versions {
            self.tables.for_own_pages(made, |page| {
                flight.in_flight[page.index()].fetch_sub(1, Ordering::AcqRel);
            });
            self.tables.unpin(made.0);
        }
        flight.ends.fetch_add(ENDED - ENDING, Ordering::AcqRel);
    }
}

impl<const LEAF: usize, const SHARDS: usize> std::fmt::Debug for TableLease<LEAF, SHARDS> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TableLease").field("versions", &self.versions.len()).finish_non_exhaustive()
    }
}
