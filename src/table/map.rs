//! What every page is and who holds it, found in one walk that stops nobody.

use super::Tables;
use super::walk::{PageUse, SequenceStats, TableStats};
use crate::ids::PageId;

/// What a page is, in one word. The numbers are what page maps contain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum PageState {
    /// Nobody holds it.
    Free = 0,
    /// One sequence holds it, or only handles or an open batch do.
    Private = 1,
    /// More than one sequence holds it, or a sequence and a handle.
    Shared = 2,
    /// Kept for later hits, evictable.
    Cached = 3,
    /// Only leases still hold it.
    Deferred = 4,
    /// The null page, outside all sums.
    Null = 5,
}

/// One page at one look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageView {
    /// Which page.
    pub page: PageId,
    /// What it is.
    pub state: PageState,
    /// References by leaves of page tables and by handles.
    pub ref_count: u32,
    /// Its life; of a free page, its next one. Grows by one with each life that ends.
    pub generation: u32,
    /// Number of the sequence that holds it, of several the one in the lowest slot.
    pub owner: Option<u64>,
    /// Whether it was made by copy-on-write.
    pub copied: bool,
}

/// A sequence as a holder of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceHolder {
    /// Its number and lengths.
    pub stats: SequenceStats,
    /// Pages that no other sequence and no handle holds: what freeing it gives back, once open
    /// batches that see it have ended.
    pub exclusive_pages: u32,
}

/// All pages by their holders. Each page is counted under one kind of holder, so
/// `free + by_sequences + by_batches + by_handles + by_leases` is the pool's size even where others
/// run meanwhile; each figure is exact when nothing runs.
#[derive(Clone, Debug, Default)]
pub struct Survey {
    /// The same sums as [`Tables::stats`].
    pub stats: TableStats,
    /// Every sequence not freed.
    pub sequences: Vec<SequenceHolder>,
    /// Pages nobody holds.
    pub free: u64,
    /// Pages in the table of a sequence.
    pub by_sequences: u64,
    /// Pages that so far only the drafts of open batches hold: copies on write.
    pub by_batches: u64,
    /// Pages that only handles hold.
    pub by_handles: u64,
    /// Pages that only leases hold: deferred.
    pub by_leases: u64,
    /// How often pages were freed since the pool was made, of each page modulo 2^32.
    pub freed: u64,
}

impl<const LEAF: usize, const SHARDS: usize> Tables<LEAF, SHARDS> {
    /// Looks at every page in ascending order. Walks all tables, whose versions it pins while it
    /// looks; stops nobody.
    pub fn survey(&self, mut visit: impl FnMut(&PageView)) -> Survey {
        let sequences = self.sequences();
        let mut leaves = self.leaf_uses();
        self.find_owners(&mut leaves);
        // By slot: the sequence's number, and the pages that are its own.
        let mut slots = vec![(None, 0); self.slots.capacity()];
        for sequence in &sequences {
            if let Some((id, _)) = slots.get_mut(sequence.id as u32 as usize) {
                *id = Some(sequence.id);
            }
        }
        let mut survey = Survey { stats: TableStats::of(&sequences), ..Survey::default() };
        for (page, usage) in (self.pool.first_page()..).map(PageId).zip(self.page_uses(&leaves)) {
            let (generation, ref_count) = self.pool.life(page);
            survey.freed += u64::from(self.pool.times_freed(generation));
            let state = survey.add(&usage, ref_count);
            let holder = slots.get_mut(usage.owner as usize).filter(|_| state != PageState::Free);
            let owner = holder.and_then(|(id, exclusive)| {
                *exclusive += u32::from(state == PageState::Private);
                *id
            });
            let copied = state != PageState::Free && self.was_copied(page, generation);
            visit(&PageView { page, state, ref_count, generation, owner, copied });
        }
        let exclusive_pages = |id: u64| slots.get(id as u32 as usize).map_or(0, |&(_, pages)| pages);
        let holder =
            |stats: SequenceStats| SequenceHolder { stats, exclusive_pages: exclusive_pages(stats.id) };
        survey.sequences = sequences.into_iter().map(holder).collect();
        survey
    }
}

impl Survey {
    /// Counts a page under the kind of its holder.
    fn add(&mut self, usage: &PageUse, count: u32) -> PageState {
        if count == 0 {
            self.free += 1;
            return PageState::Free;
        }
        self.stats.add(usage, count);
        if usage.is_deferred(count) {
            self.by_leases += 1;
            return PageState::Deferred;
        }
        match usage {
            PageUse { heads: 1.., .. } => self.by_sequences += 1,
            PageUse { drafts: 1.., .. } => self.by_batches += 1,
            _ => self.by_handles += 1,
        }
        if usage.is_shared(count) { PageState::Shared } else { PageState::Private }
    }
}
