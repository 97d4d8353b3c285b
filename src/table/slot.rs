//! A sequence's own state: who may change it, which version counts, how long it is.

use std::collections::VecDeque;

use super::slab::Vacant;
use crate::error::{Error, Result};
use crate::ids::TokenId;
use crate::sync::{AtomicU32, AtomicU64, MODELLED, OnceBox, Ordering, Preload, TryCell};

/// A thread or an open batch is changing the sequence.
const BUSY: u32 = 1;
/// Freed, or to be freed by whoever is changing it.
const FREED: u32 = 2;
/// Its handle is gone: the slot may be reused once nobody is changing it.
const DROPPED: u32 = 4;
/// No sequence has the slot.
const VACANT: u32 = FREED | DROPPED;

const NO_HEAD: u64 = u64::MAX;

/// Everything about one sequence except its table.
#[repr(C, align(64))]
pub(super) struct Slot {
    state: AtomicU32,
    /// Grows with each reuse of the slot, so that a sequence's number is never used twice.
    generation: AtomicU32,
    /// generation 32 | version 32.
    head: AtomicU64,
    /// Slots reserved, in tokens. Written under the claim.
    len: AtomicU32,
    /// 1 if `known` isn't empty: spares the decode step a look.
    has_known: AtomicU32,
    /// Made for the first sequence in this slot that is given ids ahead.
    known: OnceBox<TryCell<Known>>,
}

const _: () = assert!(MODELLED || size_of::<Slot>() == 64, "a decode step touches one line of it");

/// Ids of tokens that are not computed yet, from the first of those on.
#[derive(Default)]
pub(super) struct Known {
    /// `None` where a slot was reserved without its id.
    ids: VecDeque<Option<TokenId>>,
    /// How many of them were given when the sequence was made: these stay until computed, even
    /// where a batch keeps fewer tokens than it ran.
    prompt: usize,
}

impl Vacant for Slot {
    fn vacant() -> Self {
        Self {
            state: AtomicU32::new(VACANT),
            generation: AtomicU32::new(0),
            head: AtomicU64::new(NO_HEAD),
            len: AtomicU32::new(0),
            has_known: AtomicU32::new(0),
            known: OnceBox::new(),
        }
    }
}

/// What ending a change asks of the caller.
pub(super) struct Ended {
    /// The head's count, to be given back: the sequence was freed meanwhile.
    pub(super) head: Option<u32>,
    /// The slot itself is free for reuse.
    pub(super) reusable: bool,
}

impl Slot {
    /// Starts the life of a vacant slot.
    pub(super) fn start(&self, prompt: &[TokenId]) {
        self.len.store(0, Ordering::Relaxed);
        self.has_known.store(u32::from(!prompt.is_empty()), Ordering::Relaxed);
        if !prompt.is_empty() {
            self.with_known(|known| {
                known.ids.extend(prompt.iter().copied().map(Some));
                known.prompt = prompt.len();
            });
        }
        // Release: pairs with the Acquire of the first claim.
        self.state.store(0, Ordering::Release);
    }

    /// Ends it; called by whoever `Ended::reusable` was told.
    pub(super) fn end(&self) {
        self.generation.fetch_add(1, Ordering::Relaxed);
    }

    fn generation(&self) -> u32 {
        self.generation.load(Ordering::Relaxed)
    }

    /// Version and generation of the head; `None` once freed.
    #[inline]
    pub(super) fn head(&self) -> Option<(u32, u32)> {
        // Acquire: pairs with the Release in `set_head`: the version is whole.
        let head = self.head.load(Ordering::Acquire);
        (head != NO_HEAD).then_some((head as u32, (head >> 32) as u32))
    }

    /// Publishes another version. Only under the claim, or before the slot is known.
    pub(super) fn set_head(&self, version: u32, generation: u32) {
        // Release: pairs with the Acquire in `head`.
        self.head.store(u64::from(generation) << 32 | u64::from(version), Ordering::Release);
    }

    /// Slots reserved.
    #[inline]
    pub(super) fn len(&self) -> u32 {
        // Acquire: pairs with the Release in `set_len`.
        self.len.load(Ordering::Acquire)
    }

    #[inline]
    pub(super) fn set_len(&self, len: u32) {
        // Release: pairs with the Acquire in `len`.
        self.len.store(len, Ordering::Release);
    }

    #[inline]
    pub(super) fn is_freed(&self) -> bool {
        self.state.load(Ordering::Acquire) & FREED != 0
    }

    pub(super) fn is_vacant(&self) -> bool {
        self.state.load(Ordering::Acquire) == VACANT
    }

    pub(super) fn is_busy(&self) -> bool {
        self.state.load(Ordering::Acquire) & BUSY != 0
    }

    /// State, head and length in one look, for `validate` to notice that something ran.
    pub(super) fn fingerprint(&self) -> [u64; 3] {
        [
            u64::from(self.state.load(Ordering::Acquire)),
            self.head.load(Ordering::Acquire),
            u64::from(self.len()),
        ]
    }

    /// The number of the sequence in this slot, which is the slot at `index`.
    pub(super) fn id(&self, index: u32) -> u64 {
        u64::from(self.generation()) << 32 | u64::from(index)
    }

    /// Claims the right to change the sequence in the slot at `index`, or says at once why not.
    #[inline]
    pub(super) fn claim(&self, index: u32) -> Result<()> {
        // Acquire: pairs with the Release that ended the previous change.
        match self.state.compare_exchange(0, BUSY, Ordering::Acquire, Ordering::Acquire) {
            Ok(_) => Ok(()),
            Err(state) if state & FREED != 0 => Err(Error::SequenceFreed { indices: Vec::new() }),
            Err(_) => Err(Error::SequenceBusy { sequence: self.id(index), index: None }),
        }
    }

    /// Ends a change. If the sequence was freed meanwhile, the caller does the freeing.
    #[inline]
    pub(super) fn unclaim(&self) -> Option<Ended> {
        // Release: pairs with the Acquire of the next claim.
        let idle = self.state.compare_exchange(BUSY, 0, Ordering::Release, Ordering::Relaxed);
        idle.is_err().then(|| self.finish_free())
    }

    /// Frees; the current writer, if there is one, does it at its end. Never fails, never waits.
    pub(super) fn free(&self) -> Ended {
        let mut state = self.state.preload();
        loop {
            if state & FREED != 0 {
                return Ended { head: None, reusable: false };
            }
            // An idle sequence is claimed and freed here; a busy one is marked.
            let next = state | FREED | BUSY;
            // AcqRel: as for a claim, and its end.
            match self.state.compare_exchange_weak(state, next, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) if state & BUSY != 0 => return Ended { head: None, reusable: false },
                Ok(_) => return self.finish_free(),
                Err(now) => state = now,
            }
        }
    }

    /// The holder of the claim takes the head away and ends its claim.
    #[cold]
    fn finish_free(&self) -> Ended {
        let head = self.head().map(|(version, _)| version);
        // Release: pairs with the Acquire in `head`.
        self.head.store(NO_HEAD, Ordering::Release);
        self.forget_all();
        // AcqRel: exactly one of this and `abandon` sees the other's bit.
        let before = self.state.fetch_and(!BUSY, Ordering::AcqRel);
        Ended { head, reusable: before & DROPPED != 0 }
    }

    /// The handle is gone, after `free`. True if the slot may be reused now; otherwise the writer
    /// will be told.
    pub(super) fn abandon(&self) -> bool {
        // AcqRel: as in `finish_free`.
        self.state.fetch_or(DROPPED, Ordering::AcqRel) & BUSY == 0
    }

    /// Whether ids wait to be computed. Under the claim.
    #[inline]
    pub(super) fn has_known(&self) -> bool {
        self.has_known.load(Ordering::Relaxed) == 1
    }

    /// Checks ids for the tokens from `from` (counted from the first uncomputed one) on against
    /// those already known. Returns the position of the first that differs.
    pub(super) fn check_ids(&self, from: usize, given: &[TokenId]) -> Option<(usize, TokenId)> {
        if !self.has_known() {
            return None;
        }
        self.with_known(|known| {
            let ahead = known.ids.iter().skip(from).zip(given).enumerate();
            ahead.filter_map(|(i, (id, given))| Some((i, (*id)?, *given))).find(|(_, id, given)| id != given)
        })
        .map(|(i, id, _)| (i, id))
    }

    /// Notes ids for the tokens from `from` on.
    pub(super) fn note_ids(&self, from: usize, ids: &[TokenId]) {
        self.with_known(|known| {
            if known.ids.len() < from + ids.len() {
                known.ids.resize(from + ids.len(), None);
            }
            for (cell, &id) in known.ids.iter_mut().skip(from).zip(ids) {
                *cell = Some(id);
            }
        });
        self.has_known
            .store(u32::from(!ids.is_empty()) | self.has_known.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// The ids from the first uncomputed token on, as far as they are known without a gap.
    pub(super) fn pending_ids(&self) -> Vec<TokenId> {
        if !self.has_known() {
            return Vec::new();
        }
        self.with_known(|known| known.ids.iter().map_while(|id| *id).collect())
    }

    /// `computed` more tokens are computed; ids behind `keep` more are forgotten unless they are
    /// the prompt's and `keep_prompt`.
    #[inline]
    pub(super) fn advance_ids(&self, computed: usize, keep: usize, keep_prompt: bool) {
        if self.has_known() {
            self.advance_known(computed, keep, keep_prompt);
        }
    }

    fn advance_known(&self, computed: usize, keep: usize, keep_prompt: bool) {
        let left = self.with_known(|known| {
            known.ids.drain(..computed.min(known.ids.len()));
            known.prompt = known.prompt.saturating_sub(computed);
            if !keep_prompt {
                known.prompt = known.prompt.min(keep);
            }
            known.ids.truncate(keep.max(known.prompt));
            !known.ids.is_empty()
        });
        self.has_known.store(u32::from(left), Ordering::Relaxed);
    }

    /// Also where no id is left: the room that a long prompt took is given back (invariant I11).
    fn forget_all(&self) {
        self.with_known(|known| *known = Known::default());
        self.has_known.store(0, Ordering::Relaxed);
    }

    fn with_known<R>(&self, f: impl FnOnce(&mut Known) -> R) -> R {
        let known = self.known.get_or_make(|| TryCell::new(Known::default()));
        known.try_with(f).expect("only the holder of the claim, or who knows the slot alone, comes here")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i11_a_long_prompt_leaves_no_room_behind_when_its_sequence_is_freed() {
        let slot = Slot::vacant();
        slot.start(&vec![7; 10_000]);
        slot.claim(0).expect("idle");
        slot.advance_ids(10_000, 0, true);
        assert!(!slot.has_known());
        assert!(!slot.unclaim().is_some_and(|ended| ended.reusable));
        slot.free();
        assert_eq!(slot.with_known(|known| known.ids.capacity()), 0);
    }
}
