//! Who holds the memory: every page and its holder, in sums that add up.

use super::page_map::PageCells;
use super::{Batch, CacheStats, KvCache};
use crate::error::Result;
use crate::ids::PageId;
use crate::sync::Ordering;
use crate::table::{PageState, SequenceHolder};

/// Who holds what. `stats.total_pages` is the sum of the free, cached and deferred pages and those
/// held by sequences, batches and handles.
#[derive(Clone, Debug)]
pub struct Explanation {
    /// The same figures as `KvCache::stats`, of this walk.
    pub stats: CacheStats,
    /// Every sequence not freed.
    pub sequences: Vec<SequenceHolder>,
    /// Pages in the table of a sequence, shared ones counted once.
    pub sequence_pages: u64,
    /// Pages that so far only open batches hold: copies on write that no commit has published.
    pub batch_pages: u64,
    /// Pages that only handles hold.
    pub handle_pages: u64,
    /// For each batch given, what its lease holds; `None` where it has ended.
    pub leases: Vec<Option<LeaseHolder>>,
    /// How often pages were freed since the cache was made, of each page modulo 2^32.
    pub freed_pages: u64,
    /// The pages in cells, where asked for.
    pub cells: Option<PageCells>,
}

/// An open batch as a holder of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseHolder {
    /// Sequences in the batch.
    pub num_sequences: usize,
    /// Pages that it sees, each counted once.
    pub num_pages: u64,
    /// Of these, the ones that only leases hold: ending it gives them back, unless another lease
    /// sees them too.
    pub deferred_pages: u64,
}

impl KvCache {
    /// Who holds what: a walk over all tables that stops nobody. Leases are told apart as far as
    /// their batches are given; `max_cells` above 0 asks for the pages in so many cells at most.
    pub fn explain(&self, batches: &[&Batch], max_cells: usize) -> Result<Explanation> {
        let (first, num_pages) = (self.pool().first_page(), self.pool().num_pages());
        let mut cells = (max_cells > 0).then(|| PageCells::new(first, first + num_pages, max_cells));
        let mut deferred = Vec::new();
        let survey = self.tables.survey(|view| {
            if view.state == PageState::Deferred {
                deferred.push(view.page);
            }
            if let Some(cells) = &mut cells {
                cells.add(view.page.0 - first, view);
            }
        });
        Ok(Explanation {
            stats: self.stats_of(&survey.stats, survey.free, survey.by_leases)?,
            sequences: survey.sequences,
            sequence_pages: survey.by_sequences,
            batch_pages: survey.by_batches,
            handle_pages: survey.by_handles,
            leases: batches.iter().map(|batch| self.lease(batch, &deferred)).collect(),
            freed_pages: survey.freed,
            cells,
        })
    }

    /// What a batch's lease holds, where `deferred` lists the pages that only leases hold, ascending.
    fn lease(&self, batch: &Batch, deferred: &[PageId]) -> Option<LeaseHolder> {
        // While it is in use its pages stay where they are.
        let _open = batch.enter().ok()?;
        let mut seen = vec![false; self.layout.num_pages];
        let num_sequences = batch.items().len();
        let (mut num_pages, mut deferred_pages) = (0, 0);
        for i in 0..num_sequences {
            batch.table().for_pages(i, |_, pages| {
                for page in pages {
                    // Relaxed: the lease, which came after they were written, holds them in place.
                    let page = PageId(page.load(Ordering::Relaxed));
                    if seen.get_mut(page.index()).is_some_and(|seen| !std::mem::replace(seen, true)) {
                        num_pages += 1;
                        deferred_pages += u64::from(deferred.binary_search(&page).is_ok());
                    }
                }
            });
        }
        Some(LeaseHolder { num_sequences, num_pages, deferred_pages })
    }
}
