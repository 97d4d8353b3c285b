//! The transaction over many sequences: reserve, copy on write, lease; then commit or close.
//!
//! A writing item keeps its sequence claimed until the batch ends, which is its lease: nobody else
//! moves the head, and a `free` meanwhile is carried out at the end. A draft made by copy-on-write
//! becomes the head only at commit, so everyone else goes on seeing the old pages and closing is
//! dropping the draft. A reading item pins the version it found.

use std::sync::Arc;

use super::change::{Change, Hold, NONE};
use super::sequence::id_mismatch;
use super::version::Version;
use super::{PageCopy, Sequence, Tables};
use crate::error::{Error, Result};
use crate::ids::{PageId, TokenId};
use crate::sync::{AtomicBool, AtomicU32, Ordering, prefetch};

/// How many tokens each sequence of a batch computes.
#[derive(Clone, Copy, Debug)]
pub enum NewTokens<'a> {
    /// The same number for all.
    Each(u32),
    /// One number per sequence.
    Counts(&'a [u32]),
    /// Whatever is reserved beyond the computed tokens.
    Reserved,
}

/// How a batch ends.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// Keep the first so many new tokens of each sequence (`None`: all), drop the rest.
    Commit(Option<Vec<u32>>),
    /// As if it had never been opened.
    Close,
}

/// One sequence in an open batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchItem {
    /// Tokens computed before.
    pub computed: u32,
    /// Tokens this batch computes.
    pub new_tokens: u32,
}

impl BatchItem {
    /// Tokens that attention sees, the new ones included.
    pub fn seq_len(&self) -> u32 {
        self.computed + self.new_tokens
    }
}

/// An open batch: a lease on the view of its sequences (invariants I7, I8). Dropping it closes it.
pub struct TableBatch<const LEAF: usize = 64, const SHARDS: usize = 16> {
    tables: Arc<Tables<LEAF, SHARDS>>,
    changes: Vec<Change>,
    copies: Vec<PageCopy>,
    /// New tokens of all, and the longest sequence with them.
    num_tokens: u64,
    max_seq_len: u32,
    ended: AtomicBool,
}

impl<const LEAF: usize, const SHARDS: usize> Tables<LEAF, SHARDS> {
    /// Opens a batch, all or nothing.
    ///
    /// # Errors
    /// With the position of the sequence concerned: `OutOfPages`, `NeverFits`, `SequenceBusy`,
    /// `SequenceFreed` (all of them), `Value` (duplicates, sequences of another cache, ids that
    /// contradict ids given before). Nothing is changed then.
    pub fn open(
        self: &Arc<Self>,
        sequences: &[&Sequence<LEAF, SHARDS>],
        new_tokens: NewTokens<'_>,
        token_ids: Option<&[TokenId]>,
    ) -> Result<TableBatch<LEAF, SHARDS>> {
        if let NewTokens::Counts(counts) = new_tokens
            && counts.len() != sequences.len()
        {
            let (n, m) = (counts.len(), sequences.len());
            return Err(Error::Value(format!("{n} counts of new tokens for {m} sequences")));
        }
        // From here on dropping `batch` gives back whatever was taken.
        let mut batch = TableBatch {
            tables: Arc::clone(self),
            changes: Vec::with_capacity(sequences.len()),
            copies: Vec::new(),
            num_tokens: 0,
            max_seq_len: 0,
            ended: AtomicBool::new(false),
        };
        let ascending = batch.list(sequences)?;
        batch.warm();
        let order = if ascending { None } else { Some(batch.ascending_order()) };
        let needed = batch.hold_all(&new_tokens, order.as_deref());
        let needed = needed.map_err(|(error, i)| at(error, i, sequences))?;
        if let Some(ids) = token_ids {
            batch.check_ids(ids)?;
        }
        batch.copies = self.provide(&mut batch.changes, true, needed)?;
        for change in batch.changes.iter().filter(|change| change.target > change.len) {
            self.slots.get(change.slot).set_len(change.target);
        }
        Ok(batch)
    }
}

impl<const LEAF: usize, const SHARDS: usize> TableBatch<LEAF, SHARDS> {
    /// Touches what the batch will need, one level of indirection at a time, so that the misses of
    /// all sequences overlap instead of adding up. Where the caches are warm it costs little.
    fn warm(&mut self) {
        let tables = &*self.tables;
        for change in &mut self.changes {
            if let Some((version, _)) = tables.slots.get(change.slot).head() {
                change.version = version;
                prefetch(tables.versions.get(version));
            }
        }
        for change in self.changes.iter().filter(|change| change.version != NONE) {
            let version = tables.versions.get(change.version);
            let (_, offset) = tables.page_size.locate(version.computed());
            // Nothing is pinned yet, but where there are pages there is a last leaf.
            match (offset, version.num_pages() as usize % LEAF) {
                // A page will be added, in a new leaf.
                (0, 0) => {}
                (0, at) => prefetch(tables.leaves.get(version.tail()).entry(at)),
                _ => tables.pool.prefetch(version.tail_page()),
            }
        }
    }

    /// Lists the sequences, and asks for their state. Whether their slots ascend.
    fn list(&mut self, sequences: &[&Sequence<LEAF, SHARDS>]) -> Result<bool> {
        let (mut ascending, mut least) = (true, 0);
        for (i, sequence) in sequences.iter().enumerate() {
            if !Arc::ptr_eq(sequence.tables(), &self.tables) {
                return Err(Error::Value(format!("the sequence at index {i} belongs to another cache")));
            }
            let slot = sequence.slot_index();
            prefetch(self.tables.slots.get(slot));
            ascending &= slot >= least;
            least = slot + 1;
            self.changes.push(Change::of(slot));
        }
        Ok(ascending)
    }

    /// The positions in ascending slot, so that of two overlapping batches one gets through.
    #[cold]
    fn ascending_order(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.changes.len()).collect();
        order.sort_unstable_by_key(|&i| (self.changes[i].slot, i));
        order
    }

    /// Claims the writers and pins the readers, in ascending slot; returns the pages they need. An
    /// error names its position.
    fn hold_all(
        &mut self,
        new_tokens: &NewTokens<'_>,
        order: Option<&[usize]>,
    ) -> Result<u64, (Error, usize)> {
        let mut needed = 0;
        for k in 0..self.changes.len() {
            let i = order.map_or(k, |order| order[k]);
            if let Some(first) = order.and_then(|order| order[..k].last().copied())
                && self.changes[first].slot == self.changes[i].slot
            {
                return Err((Error::Value(format!("the same sequence as at index {first}")), i));
            }
            let count = match *new_tokens {
                NewTokens::Each(n) => Some(n),
                NewTokens::Counts(counts) => Some(counts[i]),
                NewTokens::Reserved => None,
            };
            let change = &mut self.changes[i];
            needed += u64::from(self.tables.hold(change, count).map_err(|error| (error, i))?);
            self.num_tokens += u64::from(change.target - change.computed);
            self.max_seq_len = self.max_seq_len.max(change.target);
        }
        Ok(needed)
    }

    /// Ids given now must be those given before.
    fn check_ids(&self, token_ids: &[TokenId]) -> Result<()> {
        if token_ids.len() as u64 != self.num_tokens {
            let (n, total) = (token_ids.len(), self.num_tokens);
            return Err(Error::Value(format!("{n} token ids for {total} new tokens")));
        }
        let mut rest = token_ids;
        for change in self.changes.iter().filter(|change| change.hold == Hold::Claim) {
            let (own, behind) = rest.split_at((change.target - change.computed) as usize);
            rest = behind;
            if let Some((i, known)) = self.tables.slots.get(change.slot).check_ids(0, own) {
                return Err(id_mismatch(change.computed as usize + i, known, own[i]));
            }
        }
        Ok(())
    }

    /// New tokens of all sequences.
    pub fn num_tokens(&self) -> u64 {
        self.num_tokens
    }

    /// Tokens of the longest sequence, the new ones included.
    pub fn max_seq_len(&self) -> u32 {
        self.max_seq_len
    }

    /// The tables it was opened on.
    pub fn tables(&self) -> &Arc<Tables<LEAF, SHARDS>> {
        &self.tables
    }

    /// The sequences, in the order given.
    pub fn items(&self) -> impl ExactSizeIterator<Item = BatchItem> {
        self.changes.iter().map(|change| BatchItem {
            computed: change.computed,
            new_tokens: change.target - change.computed,
        })
    }

    /// Pages copied on write when the batch was opened. A tables-only cache leaves the copying to
    /// its caller; sources and destinations stay put while the batch is open.
    pub fn copies(&self) -> &[PageCopy] {
        &self.copies
    }

    /// Whether it was committed or closed.
    pub fn is_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Writes the first pages of item `i` to `row`, as many as its tokens need at most.
    pub fn copy_row(&self, i: usize, row: &mut [i32]) {
        let (version, num_pages) = self.table_and_next(i);
        let held = row.len().min(num_pages);
        self.tables.copy_row(version, &mut row[..held]);
    }

    /// The pages of item `i`, as many as its tokens need, some at a time: `f(index, pages)`. They
    /// don't change while the batch is open.
    pub fn for_pages(&self, i: usize, f: impl FnMut(usize, &[AtomicU32])) {
        let (version, num_pages) = self.table_and_next(i);
        self.tables.for_entries(version, num_pages, f);
    }

    /// To be called before the tables of all items are read: touches what lists their leaves, one
    /// level of indirection at a time, as opening a batch does.
    pub fn warm_tables(&self) {
        let versions = || self.changes.iter().map(|change| self.tables.versions.get(change.next_version()));
        versions().for_each(prefetch);
        versions().for_each(Version::prefetch_leaves);
    }

    /// The table of item `i`, before which the next one's is asked for: rows are read in order.
    fn table_and_next(&self, i: usize) -> (&Version, usize) {
        if i + 1 < self.changes.len() {
            let (version, num_pages) = self.table_of(i + 1);
            self.tables.prefetch_entries(version, num_pages);
        }
        self.table_of(i)
    }

    /// The version that item `i` will have, and the pages that its tokens need.
    fn table_of(&self, i: usize) -> (&Version, usize) {
        let change = &self.changes[i];
        let num_pages = self.tables.pages_for(change.target) as usize;
        (self.tables.versions.get(change.next_version()), num_pages)
    }

    /// Version, pages and computed tokens of each item, as its work will see them.
    pub(super) fn leased_tables(&self) -> impl Iterator<Item = (u32, u32, u32)> {
        let pages = |change: &Change| self.tables.pages_for(change.target);
        self.changes.iter().map(move |change| (change.next_version(), pages(change), change.computed))
    }

    /// The page that holds the token at `position` of item `i`.
    #[inline]
    pub fn page(&self, i: usize, position: u32) -> PageId {
        let change = &self.changes[i];
        let version = self.tables.versions.get(change.next_version());
        self.tables.page(version, self.tables.page_size.locate(position).0)
    }

    /// Checks what a commit is asked to keep.
    pub fn check_keep(&self, keep: &[u32]) -> Result<()> {
        if keep.len() != self.changes.len() {
            let (n, m) = (keep.len(), self.changes.len());
            return Err(Error::Value(format!("{n} numbers of tokens to keep for {m} sequences")));
        }
        match self.items().zip(keep).position(|(item, &kept)| kept > item.new_tokens) {
            None => Ok(()),
            Some(i) => Err(Error::Value(format!(
                "cannot keep {} of {} new tokens (sequence at index {i})",
                keep[i],
                self.changes[i].target - self.changes[i].computed
            ))),
        }
    }

    /// Ends the batch; false if it had ended before. Numbers to keep were checked by `check_keep`.
    pub fn end(&self, outcome: &Outcome) -> bool {
        // AcqRel: of two threads that end a batch one does it, after all the other did to it.
        if self.ended.swap(true, Ordering::AcqRel) {
            return false;
        }
        for (i, change) in self.changes.iter().enumerate() {
            match change.hold {
                Hold::Nothing => {}
                Hold::Pin => self.tables.unpin(change.version),
                Hold::Claim => {
                    let keep = match outcome {
                        Outcome::Commit(None) => Some(change.target - change.computed),
                        Outcome::Commit(Some(keep)) => Some(keep[i]),
                        Outcome::Close => None,
                    };
                    self.end_writer(change, keep);
                }
            }
        }
        true
    }

    #[inline]
    fn end_writer(&self, change: &Change, keep: Option<u32>) {
        let slot = self.tables.slots.get(change.slot);
        match keep.filter(|_| !slot.is_freed()) {
            Some(keep) => {
                let computed = change.computed + keep;
                slot.advance_ids(keep as usize, 0, true);
                self.tables.publish(slot, change, computed, computed);
            }
            // Closed, or freed meanwhile: what `unclaim` frees is the state before.
            None => self.tables.undo(&mut { *change }),
        }
        self.tables.unclaim(change.slot, slot);
    }
}

impl<const LEAF: usize, const SHARDS: usize> Drop for TableBatch<LEAF, SHARDS> {
    fn drop(&mut self) {
        self.end(&Outcome::Close);
    }
}

/// Adds the position to an error; of freed sequences, all of them.
pub(super) fn at<const LEAF: usize, const SHARDS: usize>(
    error: Error,
    index: usize,
    sequences: &[&Sequence<LEAF, SHARDS>],
) -> Error {
    match error {
        Error::SequenceBusy { sequence, .. } => Error::SequenceBusy { sequence, index: Some(index) },
        Error::SequenceFreed { .. } => {
            let freed = |i: &usize| *i == index || sequences[*i].is_freed();
            Error::SequenceFreed { indices: (0..sequences.len()).filter(freed).collect() }
        }
        Error::Value(text) => Error::Value(format!("{text} (sequence at index {index})")),
        other => other,
    }
}
