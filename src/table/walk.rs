//! Walking the tables: statistics, owners, validation. Exact when nothing runs, safe always.

use std::collections::HashSet;

use super::Tables;
use super::slot::Slot;
use super::version::{Role, Version};
use crate::error::{Error, Result};
use crate::ids::{PageHandle, PageId};
use crate::sync::Ordering;

/// What the tables hold, found by walking them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableStats {
    /// Sequences not freed.
    pub sequences: u64,
    /// Computed tokens, summed over sequences: what they would take without sharing.
    pub tokens: u64,
    /// Slots reserved beyond computed tokens, summed over sequences.
    pub reserved: u64,
    /// Pages that hold a table entry of at least one sequence.
    pub held: u64,
    /// Pages that more than one sequence holds, or a sequence and a handle.
    pub shared: u64,
    /// Pages that only leases still hold.
    pub deferred: u64,
    /// Computed tokens that lie in held pages, each physical slot counted once.
    pub stored: u64,
}

/// One sequence's share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceStats {
    /// The sequence's number.
    pub id: u64,
    /// Slots reserved, in tokens.
    pub len: u32,
    /// Tokens computed.
    pub num_computed_tokens: u32,
    /// Pages held, shared ones too.
    pub num_pages: u32,
}

impl TableStats {
    /// What sequences add up to; their pages are still to be added.
    pub(super) fn of(sequences: &[SequenceStats]) -> Self {
        let mut stats = Self { sequences: sequences.len() as u64, ..Self::default() };
        for sequence in sequences {
            stats.tokens += u64::from(sequence.num_computed_tokens);
            stats.reserved += u64::from(sequence.len.saturating_sub(sequence.num_computed_tokens));
        }
        stats
    }

    /// Adds one page, which counts `count` references.
    pub(super) fn add(&mut self, usage: &PageUse, count: u32) {
        self.held += u64::from(usage.heads > 0);
        self.shared += u64::from(usage.is_shared(count));
        self.deferred += u64::from(usage.is_deferred(count));
        self.stored += u64::from(usage.stored);
    }
}

/// References to one page, by what they come from. A walk makes one for every page.
#[derive(Clone, Copy)]
pub(super) struct PageUse {
    /// Leaves that include it: its reference count without handles.
    leaves: u32,
    /// Computed slots in it, as the longest of its heads sees them.
    stored: u32,
    /// Slot of the sequence that holds it, of several the lowest; `NOBODY` unless asked for.
    pub(super) owner: u32,
    /// Head versions that include it; 2 stands for any more.
    pub(super) heads: u8,
    /// Draft versions that include it; 2 stands for any more.
    pub(super) drafts: u8,
}

/// Where no sequence's slot stands.
pub(super) const NOBODY: u32 = u32::MAX;

impl PageUse {
    /// Held by more than one sequence, or by a sequence and a handle.
    pub(super) fn is_shared(&self, count: u32) -> bool {
        self.heads > 1 || (self.heads > 0 && count > self.leaves)
    }

    /// Held by leases alone: by leaves, none of them in a head or a draft, and by no handle.
    pub(super) fn is_deferred(&self, count: u32) -> bool {
        self.leaves > 0 && self.heads == 0 && self.drafts == 0 && count == self.leaves
    }
}

/// References to one leaf; what a page's use has as well means the same.
#[derive(Clone, Copy)]
pub(super) struct LeafUse {
    versions: u32,
    stored: u32,
    owner: u32,
    heads: u8,
    drafts: u8,
}

impl<const LEAF: usize, const SHARDS: usize> Tables<LEAF, SHARDS> {
    /// Counts what is held. Costs a walk over all versions and leaves.
    pub fn stats(&self) -> TableStats {
        let mut stats = TableStats::of(&self.sequences());
        for (page, usage) in self.listed_pages() {
            stats.add(&usage, self.pool.ref_count(page));
        }
        stats
    }

    /// Every sequence not freed.
    pub fn sequences(&self) -> Vec<SequenceStats> {
        self.map_heads(|id, slot, version| SequenceStats {
            id,
            len: slot.len(),
            num_computed_tokens: version.computed(),
            num_pages: version.num_pages(),
        })
    }

    /// Pages that only leases still hold.
    pub fn deferred_pages(&self) -> u64 {
        // Where no version is retired, none is deferred: the common case costs no page walk.
        let retired = |version: &Version| version.count() > 0 && version.role() == Role::Retired;
        if !self.versions.iter().any(|(_, version)| retired(version)) {
            return 0;
        }
        let deferred = |&(page, usage): &(PageId, PageUse)| usage.is_deferred(self.pool.ref_count(page));
        self.listed_pages().filter(deferred).count() as u64
    }

    /// Ids of the sequences whose tables include a page.
    ///
    /// # Errors
    /// `InvalidPage` or `RefCount` if the handle names no live page.
    pub fn owners(&self, handle: PageHandle) -> Result<Vec<u64>> {
        self.pool.ref_count_of(handle)?;
        let held = |id, _: &Slot, version: &Version| {
            (0..version.num_pages()).any(|i| self.page(version, i) == handle.page()).then_some(id)
        };
        Ok(self.map_heads(held).into_iter().flatten().collect())
    }

    /// `f` of every sequence not freed, with its head pinned.
    pub(super) fn map_heads<R>(&self, mut f: impl FnMut(u64, &Slot, &Version) -> R) -> Vec<R> {
        let mut found = Vec::new();
        for (number, slot) in self.slots.iter().filter(|(_, slot)| !slot.is_freed()) {
            let Some(index) = self.pin(slot) else { continue };
            found.push(f(slot.id(number), slot, self.versions.get(index)));
            self.unpin(index);
        }
        found
    }

    /// Checks every count against a walk, and every slot of the slabs against its use (invariants
    /// I1, I2, I11). Needs rest.
    ///
    /// # Errors
    /// `Corruption` names the first page, leaf or slot that is wrong; `NotQuiescent` if anything ran
    /// meanwhile, in which case nothing is said about the state.
    pub fn validate(&self) -> Result<()> {
        let before = self.fingerprint();
        let found = self
            .check_leaves()
            .and_then(|()| self.check_pages())
            .and_then(|()| self.check_sequences())
            .and_then(|()| self.check_slots());
        let pool = self.pool.validate();
        if self.fingerprint() != before {
            return Err(Error::NotQuiescent("tables or pages changed during validate()".to_owned()));
        }
        found.and(pool)
    }

    fn check_leaves(&self) -> Result<()> {
        let uses = self.leaf_uses();
        for (index, leaf) in self.leaves.iter() {
            let (count, walked) = (leaf.count.load(Ordering::Acquire), uses[index as usize].versions);
            if count != walked {
                return Err(Error::Corruption(format!(
                    "leaf {index} counts {count}, {walked} versions list it"
                )));
            }
        }
        Ok(())
    }

    fn check_pages(&self) -> Result<()> {
        for (page, usage) in self.listed_pages() {
            let count = self.pool.ref_count(page);
            if count < usage.leaves {
                let walked = usage.leaves;
                return Err(Error::Corruption(format!(
                    "page {page:?} counts {count}, {walked} leaves list it"
                )));
            }
        }
        Ok(())
    }

    fn check_sequences(&self) -> Result<()> {
        for (number, slot) in self.slots.iter().filter(|(_, slot)| !slot.is_busy()) {
            let Some(index) = self.pin(slot) else { continue };
            let version = self.versions.get(index);
            let (computed, len, pages) = (version.computed(), slot.len(), version.num_pages());
            let distinct: HashSet<u32> = (0..pages).map(|i| self.page(version, i).0).collect();
            self.unpin(index);
            if computed > len || pages != self.pages_for(len) || distinct.len() != pages as usize {
                return Err(Error::Corruption(format!(
                    "sequence {number} holds {pages} pages ({} distinct) for {computed} of {len} tokens",
                    distinct.len()
                )));
            }
        }
        Ok(())
    }

    fn check_slots(&self) -> Result<()> {
        self.leaves.check("leaf", |leaf| leaf.count.load(Ordering::Acquire) > 0)?;
        self.versions.check("version", |version| version.count() > 0)?;
        self.slots.check("sequence", |slot| !slot.is_vacant())
    }

    /// Versions by leaf. Indexed by leaf number; leaves made during the walk are left out.
    pub(super) fn leaf_uses(&self) -> Vec<LeafUse> {
        let unused = LeafUse { versions: 0, stored: 0, owner: NOBODY, heads: 0, drafts: 0 };
        let mut uses = vec![unused; self.leaves.capacity()];
        let leaf_slots = LEAF as u64 * u64::from(self.page_size());
        for (index, version) in self.versions.iter() {
            if !version.try_pin(version.generation()) {
                continue;
            }
            let computed = u64::from(version.computed());
            for k in 0..(version.num_pages() as usize).div_ceil(LEAF) {
                let Some(usage) = uses.get_mut(version.leaf(k) as usize) else { continue };
                usage.versions += 1;
                match version.role() {
                    Role::Head => {
                        let stored = computed.saturating_sub(k as u64 * leaf_slots).min(leaf_slots);
                        usage.heads = plus(usage.heads, 1);
                        usage.stored = usage.stored.max(stored as u32);
                    }
                    Role::Draft => usage.drafts = plus(usage.drafts, 1),
                    Role::Retired => {}
                }
            }
            self.unpin(index);
        }
        uses
    }

    /// Notes in each leaf the lowest slot whose sequence lists it.
    pub(super) fn find_owners(&self, uses: &mut [LeafUse]) {
        self.map_heads(|id, _, version| {
            for k in 0..(version.num_pages() as usize).div_ceil(LEAF) {
                if let Some(usage) = uses.get_mut(version.leaf(k) as usize) {
                    usage.owner = usage.owner.min(id as u32);
                }
            }
        });
    }

    /// Every page that a leaf lists, with its uses.
    fn listed_pages(&self) -> impl Iterator<Item = (PageId, PageUse)> + use<LEAF, SHARDS> {
        let pages = (self.pool.first_page()..).map(PageId);
        pages.zip(self.page_uses(&self.leaf_uses())).filter(|(_, usage)| usage.leaves > 0)
    }

    /// Uses of every page of the pool, from the first on.
    pub(super) fn page_uses(&self, leaves: &[LeafUse]) -> Vec<PageUse> {
        let first = self.pool.first_page();
        let unused = PageUse { leaves: 0, stored: 0, owner: NOBODY, heads: 0, drafts: 0 };
        let mut uses = vec![unused; self.pool.num_pages() as usize];
        for ((_, leaf), from) in self.leaves.iter().zip(leaves).filter(|(_, from)| from.versions > 0) {
            for (i, page) in leaf.pages().enumerate() {
                let before = i as u32 * self.page_size();
                let stored = from.stored.saturating_sub(before).min(self.page_size());
                let usage = &mut uses[(page.0 - first) as usize];
                usage.leaves += 1;
                usage.stored = usage.stored.max(stored);
                usage.owner = usage.owner.min(from.owner);
                usage.heads = plus(usage.heads, from.heads);
                usage.drafts = plus(usage.drafts, from.drafts);
            }
        }
        uses
    }

    /// Everything whose change `validate` must notice.
    fn fingerprint(&self) -> Vec<u64> {
        let mut print = Vec::new();
        for (_, version) in self.versions.iter() {
            print.push(version.word());
            print.push(u64::from(version.computed()) << 32 | u64::from(version.num_pages()));
        }
        print.extend(self.leaves.iter().map(|(_, leaf)| u64::from(leaf.count.load(Ordering::Acquire))));
        print.extend(self.slots.iter().flat_map(|(_, slot)| slot.fingerprint()));
        print.push(self.pool.fingerprint());
        print
    }
}

/// A sum of which nobody needs to know more than that it is 2 or more.
fn plus(a: u8, b: u8) -> u8 {
    (a + b).min(2)
}
