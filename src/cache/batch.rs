//! A batch seen from outside: the table's transaction, its arrays, and when it may end.

use std::sync::Arc;

use super::buffers::Buffers;
use super::rows::BlockRows;
use super::view::{self, BatchView, CsrArrays, TableArrays, TokenArrays};
use crate::error::{Error, Result};
use crate::sync::{AtomicBool, Gate, OnceBox, Ordering};
use crate::table::{BatchItem, NewTokens, Outcome, Sequence, TableBatch, TableLease, Tables};

/// An open batch. Arrays are built on first access and may be read while the batch is open;
/// dropping it closes it.
///
/// An operation in flight on the batch in another thread keeps it open a little longer: the last
/// such operation carries out what `commit` or `close` decided. Nobody waits.
pub struct Batch {
    table: TableBatch,
    gate: Gate,
    decided: AtomicBool,
    /// For whoever finishes, if that isn't whoever decided.
    outcome: OnceBox<Outcome>,
    page_size: u32,
    num_pages: usize,
    /// Fills rows of the block table behind a sequence's last page.
    pad: i32,
    cu_seqlens_q: OnceBox<Vec<i32>>,
    seq_lens: OnceBox<Vec<i32>>,
    tables: OnceBox<TableArrays>,
    tokens: OnceBox<TokenArrays>,
    csr: OnceBox<CsrArrays>,
    /// Where the memory of large arrays comes from and goes.
    buffers: Arc<Buffers>,
}

impl std::fmt::Debug for Batch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let open = !self.is_ended();
        f.debug_struct("Batch")
            .field("sequences", &self.items().len())
            .field("open", &open)
            .finish_non_exhaustive()
    }
}

/// An operation in flight on an open batch.
pub(super) struct InUse<'a>(&'a Batch);

impl Drop for Batch {
    fn drop(&mut self) {
        self.close();
        let table = self.tables.take().map(|arrays| arrays.block_table);
        let indices = self.csr.take().map(|arrays| arrays.indices);
        table.into_iter().chain(indices).for_each(|buffer| self.buffers.give(buffer));
    }
}

impl Drop for InUse<'_> {
    fn drop(&mut self) {
        if self.0.gate.leave() {
            self.0.finish();
        }
    }
}

impl Batch {
    pub(super) fn open(
        tables: &Arc<Tables>,
        buffers: &Arc<Buffers>,
        null_page: bool,
        sequences: &[&Sequence],
        new_tokens: NewTokens<'_>,
        token_ids: Option<&[u32]>,
        num_queries: Option<NewTokens<'_>>,
    ) -> Result<Self> {
        let table = tables.open(sequences, new_tokens, token_ids)?;
        if table.max_seq_len() > i32::MAX as u32 {
            let long = table.items().position(|item| item.seq_len() > i32::MAX as u32).unwrap_or_default();
            return Err(Error::Value(format!(
                "a batch's sequences have at most 2^31 - 1 tokens (sequence at index {long})"
            )));
        }
        let cu_seqlens_q = OnceBox::new();
        if let Some(counts @ (NewTokens::Each(_) | NewTokens::Counts(_))) = num_queries {
            let rows = queries(counts, table.items())?;
            cu_seqlens_q.get_or_make(|| rows);
        } else if table.num_tokens() > i32::MAX as u64 {
            return Err(view::too_many_tokens());
        }
        Ok(Self {
            table,
            gate: Gate::new(),
            decided: AtomicBool::new(false),
            outcome: OnceBox::new(),
            page_size: tables.page_size(),
            num_pages: (tables.pool().first_page() + tables.pool().num_pages()) as usize,
            pad: if null_page { 0 } else { -1 },
            cu_seqlens_q,
            seq_lens: OnceBox::new(),
            tables: OnceBox::new(),
            tokens: OnceBox::new(),
            csr: OnceBox::new(),
            buffers: Arc::clone(buffers),
        })
    }

    /// The tables it was opened on.
    pub(super) fn tables(&self) -> &Arc<Tables> {
        self.table.tables()
    }

    /// The sequences, in the order given.
    pub fn items(&self) -> impl ExactSizeIterator<Item = BatchItem> {
        self.table.items()
    }

    /// Whether it was committed or closed.
    pub fn is_ended(&self) -> bool {
        self.gate.is_closed()
    }

    /// # Errors
    /// `Value` if it was committed or closed.
    pub fn check_open(&self) -> Result<()> {
        if self.is_ended() { Err(ended()) } else { Ok(()) }
    }

    /// Keeps the first `keep[i]` new tokens of each sequence (`None`: all), drops the rest, counts
    /// what is kept as computed, and ends the batch. Sequences freed meanwhile are skipped.
    ///
    /// # Errors
    /// `Value` if it has ended, or keeps more tokens than there are; nothing is changed then.
    pub fn commit(&self, keep: Option<Vec<u32>>) -> Result<()> {
        if let Some(keep) = &keep {
            self.table.check_keep(keep)?;
        }
        if self.end(Outcome::Commit(keep)) { Ok(()) } else { Err(ended()) }
    }

    /// Ends the batch as if it had never been opened. Does nothing where it has ended.
    pub fn close(&self) {
        self.end(Outcome::Close);
    }

    /// False if it had ended before.
    fn end(&self, outcome: Outcome) -> bool {
        // AcqRel: of two threads one decides.
        if self.decided.swap(true, Ordering::AcqRel) {
            return false;
        }
        if self.gate.close_if_idle() {
            self.table.end(&outcome);
        } else {
            self.outcome.get_or_make(|| outcome);
            if self.gate.close() {
                self.finish();
            }
        }
        true
    }

    fn finish(&self) {
        let outcome = self.outcome.get().expect("decided before the gate closed");
        self.table.end(outcome);
    }

    /// `[B]`: tokens of each sequence, the new ones included.
    ///
    /// # Errors
    /// This and the other arrays: `Value` once the batch has ended, unless built before.
    pub fn seq_lens(&self) -> Result<&[i32]> {
        let lens = || self.table.items().map(|item| item.seq_len() as i32).collect();
        self.array(&self.seq_lens, lens).map(Vec::as_slice)
    }

    /// `[B + 1]`: query rows.
    pub fn cu_seqlens_q(&self) -> &[i32] {
        self.cu_seqlens_q.get_or_make(|| {
            let counts = self.table.items().map(|item| item.new_tokens);
            view::cu_seqlens(counts).expect("the sum was checked when the batch was opened")
        })
    }

    /// `[B, max_pages]` and `max_pages`; behind a sequence's last page -1, or 0 with a null page.
    pub fn block_table(&self) -> Result<(&[i32], usize)> {
        let make = || TableArrays::new(&self.table, self.page_size, self.pad, &self.buffers);
        self.array(&self.tables, make).map(|arrays| (arrays.block_table.as_slice(), arrays.max_pages))
    }

    /// Whether `block_table` was built.
    pub fn has_block_table(&self) -> bool {
        self.tables.get().is_some()
    }

    /// The rows of `block_table`, to be written elsewhere without building it.
    pub fn block_rows(&self) -> Result<BlockRows<'_>> {
        BlockRows::new(self)
    }

    pub(super) fn max_pages(&self) -> usize {
        view::max_pages(&self.table, self.page_size)
    }

    pub(super) fn table(&self) -> &TableBatch {
        &self.table
    }

    /// `[tokens]`: slot of each new token, `page * page_size + offset`.
    pub fn slot_mapping(&self) -> Result<&[i64]> {
        self.token_arrays().map(|arrays| arrays.slot_mapping.as_slice())
    }

    /// `[tokens]`: position of each new token in its sequence.
    pub fn positions(&self) -> Result<&[i64]> {
        self.token_arrays().map(|arrays| arrays.positions.as_slice())
    }

    /// `[B + 1]`: where each sequence's pages begin in `kv_indices`.
    pub fn kv_indptr(&self) -> Result<&[i32]> {
        self.csr_arrays().map(|arrays| arrays.indptr.as_slice())
    }

    /// Physical pages, sequence behind sequence.
    pub fn kv_indices(&self) -> Result<&[i32]> {
        self.csr_arrays().map(|arrays| arrays.indices.as_slice())
    }

    /// `[B]`: tokens in each sequence's last page, 1 to `page_size`; 0 if it has none.
    pub fn kv_last_page_len(&self) -> Result<&[i32]> {
        self.csr_arrays().map(|arrays| arrays.last_page_len.as_slice())
    }

    /// Source and destination of each page copied on write when the batch was opened. A cache with
    /// storage has carried the copies out; a tables-only cache leaves them to its caller.
    pub fn copies(&self) -> Vec<[i64; 2]> {
        view::copies(self.table.copies())
    }

    /// Of a cache on a device: keeps every page that the batch's work may touch from being handed out
    /// until the lease is dropped, whatever becomes of the batch.
    ///
    /// # Errors
    /// `Value` once the batch has ended, `RefCount` if a page can't be counted once more.
    pub fn lease(&self) -> Result<TableLease> {
        let _open = self.enter()?;
        self.table.lease()
    }

    /// All arrays, to keep or to send.
    pub fn view(&self) -> Result<BatchView> {
        let (block_table, max_pages) = self.block_table()?;
        Ok(BatchView {
            page_size: self.page_size as usize,
            num_pages: self.num_pages,
            max_pages,
            block_table: block_table.to_vec(),
            seq_lens: self.seq_lens()?.to_vec(),
            cu_seqlens_q: self.cu_seqlens_q().to_vec(),
            slot_mapping: self.slot_mapping()?.to_vec(),
            positions: self.positions()?.to_vec(),
            kv_indptr: self.kv_indptr()?.to_vec(),
            kv_indices: self.kv_indices()?.to_vec(),
            kv_last_page_len: self.kv_last_page_len()?.to_vec(),
            copies: self.copies(),
        })
    }

    fn token_arrays(&self) -> Result<&TokenArrays> {
        self.array(&self.tokens, || TokenArrays::new(&self.table, self.page_size))
    }

    fn csr_arrays(&self) -> Result<&CsrArrays> {
        if view::total_pages(&self.table, self.page_size) > i32::MAX as usize {
            return Err(Error::Value("a compressed table holds at most 2^31 - 1 pages".to_owned()));
        }
        self.array(&self.csr, || CsrArrays::new(&self.table, self.page_size, &self.buffers))
    }

    /// Builds an array while the lease holds the tables in place.
    fn array<'a, T>(&self, built: &'a OnceBox<T>, make: impl FnOnce() -> T) -> Result<&'a T> {
        if let Some(array) = built.get() {
            return Ok(array);
        }
        let _open = self.enter()?;
        Ok(built.get_or_make(make))
    }

    pub(super) fn enter(&self) -> Result<InUse<'_>> {
        if self.gate.enter() { Ok(InUse(self)) } else { Err(ended()) }
    }
}

fn ended() -> Error {
    Error::Value("the batch was committed or closed".to_owned())
}

/// Cumulative query rows. Whether a sequence may have more of them than tokens depends on the mask,
/// so attention judges that.
fn queries(counts: NewTokens<'_>, items: impl ExactSizeIterator<Item = BatchItem>) -> Result<Vec<i32>> {
    if let NewTokens::Counts(counts) = counts
        && counts.len() != items.len()
    {
        return Err(Error::Value(format!(
            "{} numbers of queries for {} sequences",
            counts.len(),
            items.len()
        )));
    }
    view::cu_seqlens(items.enumerate().map(|(i, item)| match counts {
        NewTokens::Each(n) => n,
        NewTokens::Counts(counts) => counts[i],
        NewTokens::Reserved => item.new_tokens,
    }))
}
