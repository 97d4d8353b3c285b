//! What a writer does under its claim: weigh, take, copy on write, grow, shrink.
//!
//! A change has two phases. The first may fail and then leaves everything as it was: weigh what
//! each sequence needs, take all pages at once, build the versions that copy-on-write asks for. The
//! second can't fail: copy, then grow.

use super::sequence::checked_sum;
use super::slot::Slot;
use super::version::{Role, Version};
use super::{PageCopy, Tables};
use crate::error::{Error, Result};
use crate::ids::PageId;
use crate::pool::Shortage;
use crate::sync::Ordering;

/// No version.
pub(super) const NONE: u32 = u32::MAX;

/// What keeps a sequence's view in place meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hold {
    /// Nothing yet.
    Nothing,
    /// The sequence's claim: the change is its holder's to publish or undo.
    Claim,
    /// A pin on the version: its holder only reads.
    Pin,
}

/// One sequence's part in a change.
#[derive(Clone, Copy, Debug)]
pub(super) struct Change {
    pub(super) hold: Hold,
    pub(super) slot: u32,
    /// The head's version.
    pub(super) version: u32,
    /// A draft that is to replace it, made by `prepare` where the tail page is shared.
    pub(super) draft: u32,
    /// Tokens computed, slots reserved and pages held before.
    pub(super) computed: u32,
    pub(super) len: u32,
    pub(super) num_pages: u32,
    /// Slots that must be reserved afterwards.
    pub(super) target: u32,
    /// Pages to take, the copy's included.
    need: u32,
    /// Whether the page of the first uncomputed slot must be copied.
    copies: bool,
}

impl Change {
    /// Nothing yet, of the sequence in a slot.
    #[inline]
    pub(super) fn of(slot: u32) -> Self {
        Self {
            hold: Hold::Nothing,
            slot,
            version: NONE,
            draft: NONE,
            computed: 0,
            len: 0,
            num_pages: 0,
            target: 0,
            need: 0,
            copies: false,
        }
    }

    /// The version that will count once the change is published.
    pub(super) fn next_version(&self) -> u32 {
        if self.draft == NONE { self.version } else { self.draft }
    }
}

impl<const LEAF: usize, const SHARDS: usize> Tables<LEAF, SHARDS> {
    /// Looks at a claimed sequence: so far nothing is to be reserved or written.
    #[inline]
    pub(super) fn look(&self, slot_index: u32, slot: &Slot) -> Change {
        let (index, _) = slot.head().expect("a claimed sequence has a head");
        let version = self.versions.get(index);
        let (computed, num_pages) = (version.computed(), version.num_pages());
        Change {
            hold: Hold::Claim,
            version: index,
            computed,
            len: slot.len(),
            num_pages,
            target: computed,
            ..Change::of(slot_index)
        }
    }

    /// Holds a listed sequence for a batch that computes `count` tokens of it, or all that are
    /// reserved; returns the pages it needs.
    #[inline]
    pub(super) fn hold(&self, change: &mut Change, count: Option<u32>) -> Result<u32> {
        let slot = self.slots.get(change.slot);
        if count == Some(0) {
            let pinned = if slot.is_freed() { None } else { self.read(change.slot, slot) };
            *change = pinned.ok_or(Error::SequenceFreed { indices: Vec::new() })?;
            return Ok(0);
        }
        slot.claim(change.slot)?;
        *change = self.look(change.slot, slot);
        change.target = match count {
            Some(n) => checked_sum(change.computed, n)?,
            None => change.len,
        };
        if change.target == change.computed {
            // Nothing is reserved, so there is nothing to write: a reader after all.
            let claimed = change.slot;
            *change = self.read(claimed, slot).expect("a claimed sequence has a head");
            self.unclaim(claimed, slot);
            return Ok(0);
        }
        Ok(self.weigh(change, true))
    }

    /// Pins a sequence's version to read it; `None` if the sequence was freed.
    #[inline]
    pub(super) fn read(&self, slot_index: u32, slot: &Slot) -> Option<Change> {
        let version = self.pin(slot)?;
        let computed = self.versions.get(version).computed();
        let (hold, target) = (Hold::Pin, computed);
        // `len` says that nothing beyond is ours, and `num_pages` that nothing is needed.
        let num_pages = self.pages_for(computed);
        Some(Change { hold, version, computed, len: target, num_pages, target, ..Change::of(slot_index) })
    }

    /// Reserves up to each target and copies shared tail pages, all or nothing. `cow` is false
    /// where nobody could carry the copies out yet. Errors name the position in `changes`: a
    /// sequence that alone exceeds the pool never fits; where only their sum does, a smaller batch
    /// would, so that is a shortage.
    pub(super) fn prepare(&self, changes: &mut [Change], cow: bool) -> Result<Vec<PageCopy>> {
        let needed = self.weigh_all(changes, cow);
        self.provide(changes, cow, needed)
    }

    /// The same for changes that were weighed, and need so many pages together.
    #[inline]
    pub(super) fn provide(&self, changes: &mut [Change], cow: bool, needed: u64) -> Result<Vec<PageCopy>> {
        if needed == 0 { Ok(Vec::new()) } else { self.take_and_grow(changes, cow, needed) }
    }

    fn take_and_grow(&self, changes: &mut [Change], cow: bool, mut needed: u64) -> Result<Vec<PageCopy>> {
        let mut pages = Vec::new();
        while let Err(Shortage { available }) = self.pool.take(needed as usize, &mut pages) {
            // A sharer may have gone meanwhile, and a copy with it.
            let again = self.weigh_all(changes, cow);
            if again >= needed {
                return Err(self.too_few_pages(changes, needed, available));
            }
            if again == 0 {
                return Ok(Vec::new());
            }
            needed = again;
        }
        let copies = self.draft_copies(changes, &pages)?;
        let mut pages = pages.into_iter();
        for change in changes.iter().filter(|change| change.need > 0) {
            let version = self.versions.get(change.next_version());
            let mut own = pages.by_ref().take(change.need as usize);
            if change.draft != NONE {
                own.next(); // the copy's destination is in the draft already
            }
            own.for_each(|page| self.push(version, page));
        }
        self.carry_out(changes, &copies);
        Ok(copies)
    }

    /// Has the copies made. A copier that panics leaves the change undone (invariant I12).
    fn carry_out(&self, changes: &mut [Change], copies: &[PageCopy]) {
        struct Undo<'a, const LEAF: usize, const SHARDS: usize>(&'a Tables<LEAF, SHARDS>, &'a mut [Change]);
        impl<const LEAF: usize, const SHARDS: usize> Drop for Undo<'_, LEAF, SHARDS> {
            fn drop(&mut self) {
                self.1.iter_mut().filter(|change| change.hold == Hold::Claim).for_each(|c| self.0.undo(c));
            }
        }
        if copies.is_empty() {
            return;
        }
        if let Some(copier) = &self.copier {
            let undo = Undo(self, changes);
            copier.copy(copies);
            std::mem::forget(undo);
        }
        for copy in copies {
            self.note_copied(copy.destination);
        }
        // Relaxed: a statistic.
        self.copied.fetch_add(copies.len() as u64, Ordering::Relaxed);
    }

    fn weigh_all(&self, changes: &mut [Change], cow: bool) -> u64 {
        changes.iter_mut().map(|change| u64::from(self.weigh(change, cow))).sum()
    }

    /// Works out how many pages a change needs.
    #[inline]
    pub(super) fn weigh(&self, change: &mut Change, cow: bool) -> u32 {
        change.copies = cow && change.target > change.computed && self.must_copy(change);
        change.need = u32::from(change.copies);
        if u64::from(change.target) > self.page_size.slots(change.num_pages) {
            change.need += self.pages_for(change.target) - change.num_pages;
        }
        change.need
    }

    /// Whether the next token's slot lies in a page that somebody else may see.
    #[inline]
    pub(super) fn must_copy(&self, change: &Change) -> bool {
        let (index, offset) = self.page_size.locate(change.computed);
        offset != 0 && self.is_shared(self.held_page(change, index))
    }

    /// The page at `index` of a change's table: of a decode step's the last.
    #[inline]
    fn held_page(&self, change: &Change, index: u32) -> PageId {
        let version = self.versions.get(change.version);
        if index + 1 == change.num_pages { version.tail_page() } else { self.earlier_page(version, index) }
    }

    /// Where slots are reserved ahead. Apart, so that a decode step doesn't carry its code along.
    #[cold]
    fn earlier_page(&self, version: &Version, index: u32) -> PageId {
        self.page(version, index)
    }

    /// Makes the drafts; on failure drops them and gives all pages back.
    fn draft_copies(&self, changes: &mut [Change], pages: &[PageId]) -> Result<Vec<PageCopy>> {
        let mut copies = Vec::new();
        if changes.iter().all(|change| !change.copies) {
            return Ok(copies);
        }
        let mut at = 0;
        for i in 0..changes.len() {
            let change = changes[i];
            if change.copies {
                let base = self.versions.get(change.version);
                let (index, tokens) = self.page_size.locate(change.computed);
                let replace = Some((index, pages[at]));
                match self.derive(base, change.num_pages, change.computed, replace) {
                    Ok(draft) => changes[i].draft = draft,
                    Err(error) => {
                        let drafted: Vec<PageId> = copies.iter().map(|c: &PageCopy| c.destination).collect();
                        for change in &mut changes[..i] {
                            self.discard(change);
                        }
                        self.pool.release_pages(pages.iter().copied().filter(|p| !drafted.contains(p)));
                        return Err(error);
                    }
                }
                copies.push(PageCopy { source: self.page(base, index), destination: pages[at], tokens });
            }
            at += change.need as usize;
        }
        Ok(copies)
    }

    /// Drops a draft, if there is one.
    #[inline]
    fn discard(&self, change: &mut Change) {
        if change.draft != NONE {
            self.unpin(change.draft);
            change.draft = NONE;
        }
    }

    /// Takes a prepared change back: pages, drafts and length as they were.
    pub(super) fn undo(&self, change: &mut Change) {
        self.discard(change);
        self.pop_to_pages(self.versions.get(change.version), change.num_pages);
        self.slots.get(change.slot).set_len(change.len);
    }

    /// Makes a prepared change count, with `computed` tokens computed and `len` slots reserved;
    /// pages beyond those are given back.
    #[inline]
    pub(super) fn publish(&self, slot: &Slot, change: &Change, computed: u32, len: u32) {
        if change.draft != NONE {
            return self.publish_draft(slot, *change, computed, len);
        }
        self.settle_at(slot, self.versions.get(change.version), computed, len);
    }

    #[cold]
    fn publish_draft(&self, slot: &Slot, mut change: Change, computed: u32, len: u32) {
        if computed == change.computed && len == computed {
            self.discard(&mut change); // nothing was written: the shared page serves as before
        }
        self.settle_at(slot, self.versions.get(change.next_version()), computed, len);
        if change.draft != NONE {
            self.move_head(slot, change.draft);
        }
    }

    /// Shows so many computed tokens, and gives back what `len` slots don't need.
    #[inline]
    fn settle_at(&self, slot: &Slot, version: &Version, computed: u32, len: u32) {
        version.set_computed(computed);
        self.pop_to(version, len);
        slot.set_len(len);
    }

    /// Puts a draft in the head's place and gives the head's count on its old version back.
    pub(super) fn move_head(&self, slot: &Slot, draft: u32) {
        let old = slot.head().expect("a claimed sequence has a head").0;
        let version = self.versions.get(draft);
        version.set_role(Role::Head);
        slot.set_head(draft, version.generation());
        self.retire(old);
    }

    /// Only now that pages are short: a sequence larger than the pool always runs short.
    #[cold]
    fn too_few_pages(&self, changes: &[Change], requested: u64, available: u64) -> Error {
        let total = u64::from(self.pool.num_pages());
        let pages = |change: &Change| u64::from(self.pages_for(change.target));
        if let Some(i) = changes.iter().position(|change| pages(change) > total) {
            return Error::NeverFits { requested: pages(&changes[i]), total, index: Some(i) };
        }
        Error::OutOfPages {
            requested,
            free: available,
            evictable: 0,
            deferred: self.deferred_pages(),
            index: first_beyond(changes, available),
        }
    }
}

/// The first change whose cumulative need exceeds `available`.
fn first_beyond(changes: &[Change], available: u64) -> Option<usize> {
    let mut sum = 0;
    changes.iter().position(|change| {
        sum += u64::from(change.need);
        sum > available
    })
}
