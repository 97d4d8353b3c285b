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

/// References to one page, by what they come from.
#[derive(Clone, Copy, Default)]
struct PageUse {
    /// Leaves that include it: its reference count without handles.
    leaves: u32,
    /// Head versions that include it.
    heads: u32,
    /// Draft versions that include it.
    drafts: u32,
    /// Computed slots in it, as the longest of its heads sees them.
    stored: u32,
}

/// References to one leaf.
#[derive(Clone, Copy, Default)]
struct LeafUse {
    versions: u32,
    heads: u32,
    drafts: u32,
    stored: u32,
}

impl<const LEAF: usize, const SHARDS: usize> Tables<LEAF, SHARDS> {
    /// Counts what is held. Costs a walk over all versions and leaves.
    pub fn stats(&self) -> TableStats {
        let mut stats = TableStats::default();
        for sequence in self.sequences() {
            stats.sequences += 1;
            stats.tokens += u64::from(sequence.num_computed_tokens);
            stats.reserved += u64::from(sequence.len.saturating_sub(sequence.num_computed_tokens));
        }
        for (page, usage) in self.page_uses() {
            let count = self.pool.ref_count(page);
            stats.held += u64::from(usage.heads > 0);
            stats.shared += u64::from(usage.heads > 1 || (usage.heads > 0 && count > usage.leaves));
            stats.deferred += u64::from(is_deferred(&usage, count));
            stats.stored += u64::from(usage.stored);
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
        let deferred = |&(page, ref usage): &(PageId, PageUse)| is_deferred(usage, self.pool.ref_count(page));
        self.page_uses().filter(deferred).count() as u64
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
    fn map_heads<R>(&self, f: impl Fn(u64, &Slot, &Version) -> R) -> Vec<R> {
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
        for (page, usage) in self.page_uses() {
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
    fn leaf_uses(&self) -> Vec<LeafUse> {
        let mut uses = vec![LeafUse::default(); self.leaves.capacity()];
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
                        usage.heads += 1;
                        usage.stored = usage.stored.max(stored as u32);
                    }
                    Role::Draft => usage.drafts += 1,
                    Role::Retired => {}
                }
            }
            self.unpin(index);
        }
        uses
    }

    /// Uses of every page that a leaf lists.
    fn page_uses(&self) -> impl Iterator<Item = (PageId, PageUse)> + use<LEAF, SHARDS> {
        let first = self.pool.first_page();
        let mut uses = vec![PageUse::default(); self.pool.num_pages() as usize];
        let leaves = self.leaf_uses();
        for ((_, leaf), from) in self.leaves.iter().zip(&leaves).filter(|(_, from)| from.versions > 0) {
            for (i, page) in leaf.pages().enumerate() {
                let before = i as u32 * self.page_size();
                let stored = from.stored.saturating_sub(before).min(self.page_size());
                let usage = &mut uses[(page.0 - first) as usize];
                usage.leaves += 1;
                usage.heads += from.heads;
                usage.drafts += from.drafts;
                usage.stored = usage.stored.max(stored);
            }
        }
        let listed = uses.into_iter().zip(first..).filter(|(usage, _)| usage.leaves > 0);
        listed.map(|(usage, page)| (PageId(page), usage))
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

/// Held by leases alone: by leaves, none of them in a head or a draft, and by no handle.
fn is_deferred(usage: &PageUse, count: u32) -> bool {
    usage.heads == 0 && usage.drafts == 0 && count == usage.leaves
}
