//! Operations on one sequence.

use std::sync::Arc;

use super::Tables;
use super::slot::{Ended, Slot};
use super::version::Role;
use crate::error::{Error, Result};
use crate::ids::{PageId, TokenId};

/// The handle of one sequence; dropping it frees the sequence.
///
/// Every method may be called from any thread. Of two threads changing the same sequence one wins
/// and the other gets [`Error::SequenceBusy`] at once (invariant I10).
pub struct Sequence<const LEAF: usize = 64, const SHARDS: usize = 16> {
    tables: Arc<Tables<LEAF, SHARDS>>,
    slot: u32,
    id: u64,
}

/// The right to change a sequence; dropping it, in a panic too, gives it back.
pub(super) struct Claim<'a, const LEAF: usize, const SHARDS: usize> {
    tables: &'a Tables<LEAF, SHARDS>,
    pub(super) slot: u32,
}

impl<const LEAF: usize, const SHARDS: usize> Drop for Claim<'_, LEAF, SHARDS> {
    fn drop(&mut self) {
        self.tables.unclaim(self.slot, self.tables.slots.get(self.slot));
    }
}

impl<const LEAF: usize, const SHARDS: usize> Tables<LEAF, SHARDS> {
    /// A sequence without tokens. `prompt` ids stay pending until batches compute them.
    pub fn sequence(self: &Arc<Self>, prompt: &[TokenId]) -> Sequence<LEAF, SHARDS> {
        let index = self.versions.take();
        self.versions.get(index).start(0);
        self.adopt(index, 0, prompt)
    }

    /// A new sequence with `version` as its head.
    fn adopt(self: &Arc<Self>, index: u32, len: u32, prompt: &[TokenId]) -> Sequence<LEAF, SHARDS> {
        let slot_index = self.slots.take();
        let slot = self.slots.get(slot_index);
        let version = self.versions.get(index);
        version.set_role(Role::Head);
        slot.start(prompt);
        slot.set_len(len);
        slot.set_head(index, version.generation());
        Sequence { tables: Arc::clone(self), slot: slot_index, id: slot.id(slot_index) }
    }

    /// Ends a claim; if the sequence was freed meanwhile, frees it now.
    #[inline]
    pub(super) fn unclaim(&self, index: u32, slot: &Slot) {
        if let Some(ended) = slot.unclaim() {
            self.settle(index, &ended);
        }
    }

    #[cold]
    fn settle(&self, slot: u32, ended: &Ended) {
        if let Some(head) = ended.head {
            self.retire(head);
        }
        if ended.reusable {
            self.recycle(slot);
        }
    }

    fn recycle(&self, slot: u32) {
        self.slots.get(slot).end();
        self.slots.give(slot);
    }
}

impl<const LEAF: usize, const SHARDS: usize> Sequence<LEAF, SHARDS> {
    /// A number no other sequence of this cache ever has.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The tables this sequence belongs to.
    pub fn tables(&self) -> &Arc<Tables<LEAF, SHARDS>> {
        &self.tables
    }

    pub(super) fn slot_index(&self) -> u32 {
        self.slot
    }

    pub(super) fn slot(&self) -> &Slot {
        self.tables.slots.get(self.slot)
    }

    /// Slots reserved, in tokens.
    pub fn len(&self) -> Result<u32> {
        self.check_alive()?;
        Ok(self.slot().len())
    }

    /// Whether no slot is reserved.
    pub fn is_empty(&self) -> Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Tokens written in all layers and committed: what forks and leases see.
    pub fn num_computed_tokens(&self) -> Result<u32> {
        self.with_head(|tables, index| tables.versions.get(index).computed())
    }

    /// Whether `free` was called. Pages may be held a little longer by batches in flight.
    pub fn is_freed(&self) -> bool {
        self.slot().is_freed()
    }

    /// The physical pages, reserved ones too, in logical order.
    pub fn block_table(&self) -> Result<Vec<i32>> {
        self.with_head(|tables, index| {
            let version = tables.versions.get(index);
            let mut row = vec![0; version.num_pages() as usize];
            tables.copy_row(version, &mut row);
            // A writer may be giving reserved pages back: the table ends before those.
            row.truncate(row.iter().position(|&page| page < 0).unwrap_or(row.len()));
            row
        })
    }

    /// The physical page of one reserved token, and the token's offset in it.
    pub fn locate(&self, position: u64) -> Result<(PageId, u32)> {
        let out_of_range =
            |len: u32| Error::Value(format!("position {position} is outside the sequence's {len} tokens"));
        self.with_head(|tables, index| {
            let version = tables.versions.get(index);
            let held = u64::from(version.num_pages()) * u64::from(tables.page_size());
            let len = u64::from(self.slot().len()).min(held);
            if position >= len {
                return Err(out_of_range(len as u32));
            }
            let position = position as u32;
            let (index, offset) = tables.page_size.locate(position);
            match tables.page(version, index) {
                // A writer is giving it back: it was reserved, not computed.
                PageId::NONE => Err(out_of_range(position)),
                page => Ok((page, offset)),
            }
        })?
    }

    /// Reserves `n` more slots. A shared tail page is copied where the cache owns the memory;
    /// in a tables-only cache the copy waits for the batch, whose `copies` lists it.
    ///
    /// # Errors
    /// `OutOfPages`, `NeverFits`, `SequenceBusy`, `SequenceFreed`, `Value`; nothing is changed.
    pub fn append(&self, n: u32) -> Result<()> {
        self.reserve(n, &[])
    }

    /// Like [`append`](Self::append), for tokens whose ids are known.
    pub fn extend(&self, token_ids: &[TokenId]) -> Result<()> {
        let n = u32::try_from(token_ids.len())
            .map_err(|_| Error::Value(format!("{} tokens are more than 2^32 - 1", token_ids.len())))?;
        self.reserve(n, token_ids)
    }

    fn reserve(&self, n: u32, token_ids: &[TokenId]) -> Result<()> {
        let claim = self.claim()?;
        if n == 0 {
            return Ok(());
        }
        let mut change = self.tables.look(claim.slot, self.slot());
        change.target = checked_sum(change.len, n)?;
        let ahead = (change.len - change.computed) as usize;
        if let Some((i, known)) = self.slot().check_ids(ahead, token_ids) {
            return Err(id_mismatch(change.len as usize + i, known, token_ids[i]));
        }
        let mut changes = [change];
        let cow = self.tables.copier.is_some();
        self.tables.prepare(&mut changes, cow).map_err(without_index)?;
        let target = changes[0].target;
        self.tables.publish(self.slot(), &changes[0], change.computed, target);
        if !token_ids.is_empty() {
            self.slot().note_ids(ahead, token_ids);
        }
        Ok(())
    }

    /// A new sequence with this one's computed tokens. Shares all its pages; the first to write
    /// into a shared page copies it. Works while the parent is being changed.
    pub fn fork(&self) -> Result<Self> {
        let tables = &self.tables;
        self.with_head(|_, index| {
            let version = tables.versions.get(index);
            let computed = version.computed();
            let draft = tables.derive(version, tables.pages_for(computed), computed, None)?;
            Ok(tables.adopt(draft, computed, &[]))
        })?
    }

    /// Leaves the first `n` tokens.
    ///
    /// # Errors
    /// `Value` if there are fewer; `SequenceBusy`, `SequenceFreed`, `RefCount`.
    pub fn truncate(&self, n: u32) -> Result<()> {
        let claim = self.claim()?;
        let change = self.tables.look(claim.slot, self.slot());
        if n > change.len {
            return Err(Error::Value(format!("cannot truncate {} tokens to {n}", change.len)));
        }
        if n == change.len {
            return Ok(());
        }
        if n >= change.computed {
            self.slot().advance_ids(0, (n - change.computed) as usize, false);
            let computed = change.computed;
            self.tables.publish(self.slot(), &change, computed, n);
            return Ok(());
        }
        // Readers may hold the present version, so it stays as it is: another one takes its place.
        let version = self.tables.versions.get(change.version);
        let draft = self.tables.derive(version, self.tables.pages_for(n), n, None)?;
        self.slot().advance_ids(0, 0, false);
        self.slot().set_len(n);
        self.tables.move_head(self.slot(), draft);
        Ok(())
    }

    /// Declares the first `n` tokens (`None`: all reserved ones) computed.
    ///
    /// # Errors
    /// `Value` if `n` exceeds the length or is below what is computed already, or if, in a
    /// tables-only cache, the tokens would lie in a page that others hold: then a batch must list
    /// the copy first.
    pub fn commit(&self, n: Option<u32>) -> Result<()> {
        let claim = self.claim()?;
        let change = self.tables.look(claim.slot, self.slot());
        let n = n.unwrap_or(change.len);
        if n < change.computed || n > change.len {
            return Err(Error::Value(format!(
                "cannot commit {n} tokens: {} are computed, {} are reserved (truncate gives tokens up)",
                change.computed, change.len
            )));
        }
        if n > change.computed && self.tables.copier.is_none() && self.tables.must_copy(&change) {
            return Err(Error::Value(format!(
                "token {} would lie in a page that others hold: open a batch, whose copies part them",
                change.computed
            )));
        }
        self.slot().advance_ids((n - change.computed) as usize, (change.len - n) as usize, true);
        let len = change.len;
        if n > change.computed {
            self.tables.publish(self.slot(), &change, n, len);
        }
        Ok(())
    }

    /// Gives all pages back; those that leases or other sequences hold stay until they go.
    /// Never fails and never waits; a second call does nothing.
    pub fn free(&self) {
        let ended = self.slot().free();
        if ended.head.is_none()
            && let Some(index) = self.tables.pin(self.slot())
        {
            // An open batch goes on with it: its pages count as deferred from now on.
            self.tables.versions.get(index).set_role(Role::Retired);
            self.tables.unpin(index);
        }
        self.tables.settle(self.slot, &ended);
    }

    /// Token ids given ahead that no batch has computed yet.
    pub fn pending_ids(&self) -> Result<Vec<TokenId>> {
        let _claim = self.claim()?;
        Ok(self.slot().pending_ids())
    }

    /// Claims the right to change the sequence, or says at once why not.
    pub(super) fn claim(&self) -> Result<Claim<'_, LEAF, SHARDS>> {
        self.slot().claim(self.slot)?;
        Ok(Claim { tables: &self.tables, slot: self.slot })
    }

    fn check_alive(&self) -> Result<()> {
        if self.is_freed() { Err(Error::SequenceFreed { indices: Vec::new() }) } else { Ok(()) }
    }

    /// Runs `f` with the head's version pinned.
    fn with_head<R>(&self, f: impl FnOnce(&Tables<LEAF, SHARDS>, u32) -> R) -> Result<R> {
        struct Unpin<'a, const LEAF: usize, const SHARDS: usize>(&'a Tables<LEAF, SHARDS>, u32);
        impl<const LEAF: usize, const SHARDS: usize> Drop for Unpin<'_, LEAF, SHARDS> {
            fn drop(&mut self) {
                self.0.unpin(self.1);
            }
        }
        self.check_alive()?;
        let freed = Error::SequenceFreed { indices: Vec::new() };
        let pin = Unpin(&self.tables, self.tables.pin(self.slot()).ok_or(freed)?);
        Ok(f(&self.tables, pin.1))
    }
}

impl<const LEAF: usize, const SHARDS: usize> Drop for Sequence<LEAF, SHARDS> {
    fn drop(&mut self) {
        self.free();
        if self.slot().abandon() {
            self.tables.recycle(self.slot);
        }
    }
}

impl<const LEAF: usize, const SHARDS: usize> std::fmt::Debug for Sequence<LEAF, SHARDS> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sequence")
            .field("id", &self.id)
            .field("len", &self.slot().len())
            .finish_non_exhaustive()
    }
}

/// Lengths are 32-bit.
pub(super) fn checked_sum(len: u32, n: u32) -> Result<u32> {
    len.checked_add(n)
        .ok_or_else(|| Error::Value(format!("{len} + {n} tokens are more than 2^32 - 1 in one sequence")))
}

pub(super) fn id_mismatch(position: usize, known: TokenId, given: TokenId) -> Error {
    Error::Value(format!("token {position} was given before as {known}, now as {given}"))
}

/// An error of a single sequence carries no position in a batch.
fn without_index(error: Error) -> Error {
    match error {
        Error::OutOfPages { requested, free, evictable, deferred, .. } => {
            Error::OutOfPages { requested, free, evictable, deferred, index: None }
        }
        Error::NeverFits { requested, total, .. } => Error::NeverFits { requested, total, index: None },
        other => other,
    }
}
