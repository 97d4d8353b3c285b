//! Page tables: which physical pages hold which tokens of which sequence.
//!
//! A sequence has a *head*, the version of its table that counts now. Readers pin the head's
//! version and see its computed tokens until they unpin; the one writer that has claimed the
//! sequence grows that version in place where no reader looks, or builds another and moves the
//! head. Nobody waits: every decision is one compare-exchange on one word, or a Release store
//! with its Acquire load. `docs/design.md` draws the protocol.
//!
//! | file | holds |
//! |---|---|
//! | `slab` | slots whose type never changes |
//! | `leaf`, `version` | runs of page ids, and the versions that list them |
//! | `slot` | a sequence's state: claim, head, length, known ids |
//! | `change` | reserving, copy-on-write, shrinking: what a writer does under its claim |
//! | `sequence` | operations on one sequence |
//! | `batch`, `reorder` | the transaction over many; picking among many |
//! | `flight` | leases of work on a device, which outlives its batch |
//! | `walk` | statistics, owners, validation |
//! | `map` | what every page is, and who holds it |

mod batch;
mod change;
mod flight;
mod leaf;
mod map;
mod page_size;
mod reorder;
mod sequence;
mod slab;
mod slot;
mod version;
mod walk;

pub use batch::{BatchItem, NewTokens, Outcome, TableBatch};
pub use flight::TableLease;
pub use map::{PageState, PageView, SequenceHolder, Survey};
pub use reorder::Pick;
pub use sequence::Sequence;
pub use walk::{SequenceStats, TableStats};

use crate::error::Result;
use crate::ids::PageId;
use crate::pool::PagePool;
use crate::sync::{AtomicU32, AtomicU64, Ordering, copy_entries, prefetch};

use flight::Flight;
use leaf::Leaf;
use page_size::PageSize;
use slab::Slab;
use slot::Slot;
use version::{Role, Version};

/// Page ids in one cache line.
const ENTRIES_PER_LINE: usize = 16;

/// Leaves of the next row to ask for while a row is copied.
const LEAVES_AHEAD: usize = 2;

/// One page's worth of copy-on-write: the first `tokens` slots of `source`, and only those, are
/// copied to `destination`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageCopy {
    /// The shared page.
    pub source: PageId,
    /// The page that takes its place in the writer's table.
    pub destination: PageId,
    /// Computed tokens of the source.
    pub tokens: u32,
}

/// Carries out copies on the memory behind the pages, before anyone can see the destinations.
pub trait CopyPages: Send + Sync {
    /// Copies, in order.
    fn copy(&self, copies: &[PageCopy]);
}

/// All page tables over one pool. `LEAF` pages share one count; both constants are small under
/// loom.
pub struct Tables<const LEAF: usize = 64, const SHARDS: usize = 16> {
    pool: PagePool<SHARDS>,
    page_size: PageSize,
    /// None: tables only; a batch reports the copies for its caller to carry out.
    copier: Option<Box<dyn CopyPages>>,
    /// Pages copied on write so far. Written only where a page is copied, so never hot.
    copied: AtomicU64,
    /// For each page number, one more than the generation of the life for which the page was copied
    /// on write; 0 if it never was. Written only where a page is copied.
    copied_lives: Box<[AtomicU32]>,
    /// None: batches end when their work has ended.
    flight: Option<Flight>,
    leaves: Slab<Leaf<LEAF>>,
    versions: Slab<Version>,
    slots: Slab<Slot>,
}

impl<const LEAF: usize, const SHARDS: usize> Tables<LEAF, SHARDS> {
    /// Tables over `pool`, with `page_size` tokens to a page.
    pub fn new(pool: PagePool<SHARDS>, page_size: u32, copier: Option<Box<dyn CopyPages>>) -> Self {
        let num_words = pool.first_page() + pool.num_pages();
        Self {
            pool,
            page_size: PageSize::new(page_size),
            copier,
            copied: AtomicU64::new(0),
            copied_lives: (0..num_words).map(|_| AtomicU32::new(0)).collect(),
            flight: None,
            leaves: Slab::new(),
            versions: Slab::new(),
            slots: Slab::new(),
        }
    }

    /// Tables of pages on a device, whose work goes on after its batch has ended and holds a
    /// [`TableLease`] until then. Batches report their copies for their caller to carry out.
    pub fn with_leases(pool: PagePool<SHARDS>, page_size: u32) -> Self {
        let flight = Flight::new(pool.first_page() + pool.num_pages());
        Self { flight: Some(flight), ..Self::new(pool, page_size, None) }
    }

    /// The pool the pages come from.
    pub fn pool(&self) -> &PagePool<SHARDS> {
        &self.pool
    }

    /// Tokens of a page.
    pub fn page_size(&self) -> u32 {
        self.page_size.get()
    }

    /// Pages copied on write since the tables were made.
    pub fn copied_pages(&self) -> u64 {
        // Relaxed: a statistic.
        self.copied.load(Ordering::Relaxed)
    }

    /// Takes back that a batch's pages were copied, where whoever had to copy them could not.
    pub fn forget_copies(&self, count: usize) {
        // Relaxed: a statistic.
        self.copied.fetch_sub(count as u64, Ordering::Relaxed);
    }

    /// Remembers that a page, which the caller holds, was copied on write.
    fn note_copied(&self, page: PageId) {
        let life = self.pool.handle(page).generation().wrapping_add(1);
        // Relaxed: a statistic.
        self.copied_lives[page.index()].store(life, Ordering::Relaxed);
    }

    /// Whether a page was copied on write for its life `generation`. Of 2^32 lives one can't be told.
    fn was_copied(&self, page: PageId, generation: u32) -> bool {
        // Relaxed: as above.
        let life = self.copied_lives[page.index()].load(Ordering::Relaxed);
        life != 0 && life == generation.wrapping_add(1)
    }

    /// Pages that `tokens` tokens need.
    #[inline]
    pub fn pages_for(&self, tokens: u32) -> u32 {
        self.page_size.pages_for(tokens)
    }

    /// Pins the head's version; `None` if the sequence was freed.
    fn pin(&self, slot: &Slot) -> Option<u32> {
        loop {
            let (index, generation) = slot.head()?;
            if self.versions.get(index).try_pin(generation) {
                return Some(index);
            }
            // The version's life ended, so the head has moved: another thread made progress.
        }
    }

    /// Gives a pin back; the last one drops the version and what only it held.
    fn unpin(&self, index: u32) {
        if self.versions.get(index).unpin() {
            self.drop_version(index);
        }
    }

    /// Gives a sequence's count on its former head back. Slots that were only reserved go at once:
    /// no lease sees them, so none may defer their pages (invariant I9).
    fn retire(&self, index: u32) {
        let version = self.versions.get(index);
        version.set_role(Role::Retired);
        if version.count() > 1 {
            self.pop_to(version, version.computed());
        }
        self.unpin(index);
    }

    /// Drops a version nobody holds: leaves first, then the pages of leaves that were the last to
    /// hold them, then the slot.
    fn drop_version(&self, index: u32) {
        let version = self.versions.get(index);
        for number in version.leaves((version.num_pages() as usize).div_ceil(LEAF)).flatten() {
            // Acquire: as in `leaf`.
            self.drop_leaf(number.load(Ordering::Acquire));
        }
        version.end();
        self.versions.give(index);
    }

    /// Gives a count on a leaf back; the last one releases its pages.
    fn drop_leaf(&self, index: u32) {
        let leaf = self.leaves.get(index);
        // AcqRel: as in `Version::unpin`.
        if leaf.count.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.pool.release_pages(leaf.pages());
            for i in 0..LEAF {
                if leaf.page(i) == PageId::NONE {
                    break;
                }
                leaf.set(i, PageId::NONE);
            }
            self.leaves.give(index);
        }
    }

    /// The page at `index` of a version's table; the caller's pin or claim covers it.
    #[inline]
    fn page(&self, version: &Version, index: u32) -> PageId {
        let (k, i) = (index as usize / LEAF, index as usize % LEAF);
        self.leaves.get(version.leaf(k)).page(i)
    }

    /// The first `num_pages` entries of a version's table, leaf by leaf: `f(index, entries)`.
    #[expect(clippy::inline_always, reason = "a call per leaf would cost as much as copying the leaf")]
    #[inline(always)]
    fn for_entries(&self, version: &Version, num_pages: usize, mut f: impl FnMut(usize, &[AtomicU32])) {
        let mut index = 0;
        for numbers in version.leaves(num_pages.div_ceil(LEAF)) {
            let Some(first) = numbers.first() else { return };
            // Leaves lie anywhere; the processor can't guess the one after next.
            let mut here = self.entries_soon(first);
            let mut next = numbers.get(1).map_or(here, |number| self.entries_soon(number));
            for k in 2..numbers.len() + 2 {
                let entries = std::mem::replace(&mut here, next);
                next = numbers.get(k).map_or(next, |number| self.entries_soon(number));
                if num_pages - index >= LEAF {
                    f(index, entries);
                } else {
                    f(index, &entries[..num_pages - index]);
                }
                index += LEAF;
            }
        }
    }

    /// Asks for what `for_entries` reads first, and would ask for too late.
    fn prefetch_entries(&self, version: &Version, num_pages: usize) {
        let numbers = version.leaves(num_pages.div_ceil(LEAF)).next().unwrap_or_default();
        numbers.iter().take(LEAVES_AHEAD).for_each(|number| _ = self.entries_soon(number));
    }

    /// The entries of the leaf with this number, which are asked for.
    #[inline]
    fn entries_soon(&self, number: &AtomicU32) -> &[AtomicU32; LEAF] {
        // Acquire: pairs with the Release in `set_leaf`, as in `leaf`.
        let entries = self.leaves.get(number.load(Ordering::Acquire)).entries();
        for line in 0..LEAF.div_ceil(ENTRIES_PER_LINE) {
            prefetch(&entries[line * ENTRIES_PER_LINE]);
        }
        entries
    }

    /// Copies the first pages of a version into a row of a block table.
    fn copy_row(&self, version: &Version, row: &mut [i32]) {
        self.for_entries(version, row.len(), |first, entries| {
            copy_entries(entries, &mut row[first..][..entries.len()]);
        });
    }

    /// A new version with the first `num_pages` pages of `base`, `computed` tokens and one count;
    /// not yet visible. Leaves all of whose slots are computed are shared, the rest is copied, one
    /// more count per page. `replace` puts another page, whose count moves in, at one index.
    ///
    /// # Errors
    /// `RefCount` if a page can't be counted once more; nothing is changed.
    fn derive(
        &self,
        base: &Version,
        num_pages: u32,
        computed: u32,
        replace: Option<(u32, PageId)>,
    ) -> Result<u32> {
        let whole = computed as usize / (LEAF * self.page_size.get() as usize);
        self.derive_sharing(base, num_pages, computed, replace, whole)
    }

    /// The same with the first `shared` leaves shared; their slots are all computed.
    fn derive_sharing(
        &self,
        base: &Version,
        num_pages: u32,
        computed: u32,
        replace: Option<(u32, PageId)>,
        shared: usize,
    ) -> Result<u32> {
        let copied = (shared * LEAF) as u32..num_pages;
        let is_replaced = |i: u32| replace.is_some_and(|(at, _)| at == i);
        for i in copied.clone().filter(|&i| !is_replaced(i)) {
            if let Err(error) = self.pool.retain_page(self.page(base, i)) {
                let counted = (copied.start..i).filter(|&i| !is_replaced(i));
                self.pool.release_pages(counted.map(|i| self.page(base, i)));
                return Err(error);
            }
        }
        let index = self.versions.take();
        let version = self.versions.get(index);
        version.start(computed);
        for number in base.leaves(shared).flatten() {
            // Relaxed: the caller's pin or claim keeps the count above zero. Acquire: as in `leaf`.
            self.leaves.get(number.load(Ordering::Acquire)).count.fetch_add(1, Ordering::Relaxed);
        }
        version.set_leaves(base, shared);
        version.set_num_pages(copied.start.min(num_pages));
        if let Some(last) = num_pages.checked_sub(1).filter(|_| copied.is_empty()) {
            version.set_tail_page(self.page(base, last));
        }
        for i in copied {
            let page = match replace {
                Some((at, page)) if at == i => page,
                _ => self.page(base, i),
            };
            self.push(version, page);
        }
        Ok(index)
    }

    /// Appends a page, whose count moves in, to a version that only the caller changes.
    #[inline]
    fn push(&self, version: &Version, page: PageId) {
        let at = version.num_pages();
        let i = at as usize % LEAF;
        if i == 0 {
            let index = self.leaves.take();
            let leaf = self.leaves.get(index);
            // Relaxed: published with the page, by `num_pages` or the head.
            leaf.count.store(1, Ordering::Relaxed);
            version.set_leaf(at as usize / LEAF, index);
        }
        self.leaves.get(version.tail()).set(i, page);
        version.set_tail_page(page);
        version.set_num_pages(at + 1);
    }

    /// Takes the pages that the first `len` slots don't need away from a version that only the
    /// caller changes. No reader looks there: they hold no computed token.
    #[inline]
    fn pop_to(&self, version: &Version, len: u32) {
        let num_pages = version.num_pages();
        if num_pages > 0 && self.page_size.slots(num_pages - 1) >= u64::from(len) {
            self.pop(version, self.pages_for(len));
        }
    }

    /// Takes the pages behind the first `num_pages` away, as `pop_to` does.
    #[inline]
    fn pop_to_pages(&self, version: &Version, num_pages: u32) {
        if version.num_pages() > num_pages {
            self.pop(version, num_pages);
        }
    }

    #[cold]
    fn pop(&self, version: &Version, num_pages: u32) {
        while version.num_pages() > num_pages {
            let last = version.num_pages() - 1;
            let (k, i) = (last as usize / LEAF, last as usize % LEAF);
            let leaf_index = version.leaf(k);
            let leaf = self.leaves.get(leaf_index);
            let page = leaf.page(i);
            leaf.set(i, PageId::NONE);
            version.set_num_pages(last);
            self.pool.release_page(page);
            if i == 0 {
                self.drop_leaf(leaf_index);
                if k > 0 {
                    version.set_tail(k - 1);
                }
            }
        }
        if let Some(last) = num_pages.checked_sub(1) {
            version.set_tail_page(self.page(version, last));
        }
    }
}
