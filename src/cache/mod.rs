//! The facade: one cache is a pool, its tables, the memory behind its pages, and the threads that
//! attention runs on.

mod batch;
mod buffers;
mod build;
mod explain;
mod page_map;
mod rows;
mod stats;
mod view;

pub use batch::Batch;
pub use build::CacheOptions;
pub use explain::{Explanation, LeaseHolder};
pub use page_map::{PageCells, PageMap};
pub use rows::BlockRows;
pub use stats::CacheStats;
pub use view::BatchView;

use std::sync::Arc;

use buffers::Buffers;

use crate::attention::{self, AttentionOptions, BatchTables, ThreadPool};
use crate::error::{Error, Result};
use crate::ids::{PageHandle, PageId, TokenId};
use crate::layout::{CacheLayout, Which};
use crate::pool::PagePool;
use crate::storage::{KvStorage, PagesView, RowsView, RowsViewMut};
use crate::sync::prefetch_address;
use crate::table::{NewTokens, Pick, Sequence, Tables};

/// A paged KV cache. Every method may be called from any thread.
pub struct KvCache {
    tables: Arc<Tables>,
    buffers: Arc<Buffers>,
    /// None: tables only.
    storage: Option<Arc<KvStorage>>,
    threads: ThreadPool,
    layout: CacheLayout,
    null_page: bool,
    window_left: i64,
}

/// Where `write` and `attend` take a batch's arrays from.
#[derive(Clone, Copy, Debug)]
pub enum Step<'a> {
    /// An open batch of this cache: its lease keeps the pages in place. A batch of another cache
    /// is refused; its view says that this cache is to follow that one.
    Batch(&'a Batch),
    /// Arrays sent by another cache with the same page size and number of pages, which holds the
    /// lease.
    View(&'a BatchView),
}

impl KvCache {
    /// The page tables.
    pub fn tables(&self) -> &Arc<Tables> {
        &self.tables
    }

    /// The pool the pages come from.
    pub fn pool(&self) -> &PagePool {
        self.tables.pool()
    }

    /// Shapes and sizes.
    pub fn layout(&self) -> &CacheLayout {
        &self.layout
    }

    /// The memory behind the pages; `None` for a tables-only cache.
    pub fn storage(&self) -> Option<&Arc<KvStorage>> {
        self.storage.as_ref()
    }

    /// Threads that attention runs on.
    pub fn threads(&self) -> &ThreadPool {
        &self.threads
    }

    /// Whether page 0 is the null page: zeros, never handed out.
    pub fn has_null_page(&self) -> bool {
        self.null_page
    }

    /// The window that `attend` uses where it is given none; -1 is off.
    pub fn window_left(&self) -> i64 {
        self.window_left
    }

    /// A new sequence. `token_ids` stay pending: batches compute them in order.
    pub fn sequence(&self, token_ids: &[TokenId]) -> Sequence {
        self.tables.sequence(token_ids)
    }

    /// One sequence per index; see [`Tables::reorder`].
    pub fn reorder(&self, sequences: &[&Sequence], indices: &[usize]) -> Result<Vec<Pick>> {
        self.tables.reorder(sequences, indices)
    }

    /// Opens a batch: reserves missing slots, copies shared tail pages, and leases the view; all or
    /// nothing. `num_queries` counts query rows where they are not the new tokens.
    pub fn batch(
        &self,
        sequences: &[&Sequence],
        new_tokens: NewTokens<'_>,
        token_ids: Option<&[TokenId]>,
        num_queries: Option<NewTokens<'_>>,
    ) -> Result<Batch> {
        Batch::open(
            &self.tables,
            &self.buffers,
            self.null_page,
            sequences,
            new_tokens,
            token_ids,
            num_queries,
        )
    }

    /// Writes the new tokens' keys and values of one layer into their slots, converted to the
    /// cache's dtype. `key`: `[tokens, num_kv_heads, head_dim]`, `value` likewise with `v_head_dim`, or
    /// `None` where values are part of the keys.
    pub fn write<'a>(
        &self,
        layer: usize,
        key: RowsView<'a>,
        value: impl Into<Option<RowsView<'a>>>,
        step: Step<'_>,
    ) -> Result<()> {
        let (keys, values) = self.layer(layer, true)?;
        let value = value.into();
        if value.is_some() == self.layout.value_in_key {
            let message = if value.is_some() { "part of the keys: value must be None" } else { "needed" };
            return Err(Error::Layout(format!("values are {message}")));
        }
        let write = |slots: &[i64]| match value {
            Some(value) => attention::write_pages(key, value, keys, values, slots, &self.threads),
            None => attention::write_rows(key, keys, slots, &self.threads),
        };
        match step {
            Step::Batch(batch) => {
                self.check_own(batch.tables(), "batch")?;
                let _open = batch.enter()?;
                write(batch.slot_mapping()?)
            }
            Step::View(view) => {
                self.check_view(view)?;
                self.check_slots(view)?;
                write(&view.slot_mapping)
            }
        }
    }

    /// Attention of a batch's queries in one layer. `query`: `[queries, num_heads, head_dim]`,
    /// `out`: `[queries, num_heads, v_head_dim]`, `lse`: `[queries * num_heads]`. Where values are
    /// part of the keys, `options.scale` must be given: the model's is not `1 / sqrt(head_dim)`.
    pub fn attend(
        &self,
        layer: usize,
        query: RowsView,
        step: Step<'_>,
        options: &AttentionOptions,
        out: &mut RowsViewMut,
        lse: Option<&mut [f32]>,
    ) -> Result<()> {
        let (keys, values) = self.layer(layer, false)?;
        self.check_scale(options)?;
        self.with_tables(step, |tables| {
            attention::paged_attention(query, keys, values, tables, options, out, lse, &self.threads)
        })
    }

    /// What quantisation can have put into each row of [`attend`](Self::attend), given the same
    /// arguments; see [`attention::error_bound`]. `bound`: `[queries * num_heads]`.
    pub fn error_bound(
        &self,
        layer: usize,
        query: RowsView,
        step: Step<'_>,
        options: &AttentionOptions,
        bound: &mut [f32],
    ) -> Result<()> {
        let (keys, values) = self.layer(layer, false)?;
        self.check_scale(options)?;
        self.with_tables(step, |tables| {
            attention::error_bound(query, keys, values, tables, options, bound, &self.threads)
        })
    }

    /// Runs `run` on the tables of a step, whose lease holds meanwhile.
    fn with_tables(&self, step: Step<'_>, run: impl FnOnce(&BatchTables) -> Result<()>) -> Result<()> {
        match step {
            Step::Batch(batch) => {
                self.check_own(batch.tables(), "batch")?;
                let _open = batch.enter()?;
                let (block_table, max_pages) = batch.block_table()?;
                let (seq_lens, cu_seqlens_q) = (batch.seq_lens()?, batch.cu_seqlens_q());
                run(&BatchTables { block_table, max_pages, seq_lens, cu_seqlens_q })
            }
            Step::View(view) => {
                self.check_view(view)?;
                run(&BatchTables {
                    block_table: &view.block_table,
                    max_pages: view.max_pages,
                    seq_lens: &view.seq_lens,
                    cu_seqlens_q: &view.cu_seqlens_q,
                })
            }
        }
    }

    /// Copies whole pages in every layer, in order: what `copies` of a batch of another cache asks
    /// for. Pages of this cache's own sequences are in the caller's hands.
    ///
    /// # Errors
    /// `InvalidPage` for a page outside the pool, the null page as destination, or a page copied
    /// to itself; nothing is copied then.
    pub fn copy_pages(&self, copies: &[[i64; 2]]) -> Result<()> {
        let storage = self.require_storage()?;
        self.check_copies(copies)?;
        let pages = copies.iter().map(|&[s, d]| (PageId(s as u32), PageId(d as u32)));
        build::copy_slots(storage, &pages.map(|(s, d)| (s, d, self.layout.page_size)))
    }

    /// What [`copy_pages`](Self::copy_pages) refuses.
    ///
    /// # Errors
    /// `InvalidPage`.
    pub fn check_copies(&self, copies: &[[i64; 2]]) -> Result<()> {
        let num_pages = self.layout.num_pages as u64;
        for &[source, destination] in copies {
            let invalid = |page, reason| Err(Error::InvalidPage { page, num_pages, reason });
            for page in [source, destination] {
                if page < 0 || page as u64 >= num_pages {
                    return invalid(page, "cannot be copied");
                }
            }
            if self.null_page && destination == 0 {
                return Err(self.null_page_error());
            }
            if source == destination {
                return invalid(source, "cannot be copied to itself");
            }
        }
        Ok(())
    }

    /// Whether a step's arrays may be used on this cache's pages: for those who do that themselves.
    ///
    /// # Errors
    /// `Value` for a batch of another cache or one that has ended, `Layout` for a view of a cache with
    /// other sizes, `InvalidPage` for one that would write the null page.
    pub fn check_step(&self, step: Step<'_>) -> Result<()> {
        match step {
            Step::Batch(batch) => {
                self.check_own(batch.tables(), "batch")?;
                batch.check_open()
            }
            Step::View(view) => {
                self.check_view(view)?;
                self.check_slots(view)
            }
        }
    }

    /// Pages for tables of one's own; see [`PagePool::alloc`]. Only the tables know how many pages
    /// come back when leases end, so this error tells and the pool's doesn't.
    ///
    /// # Errors
    /// `OutOfPages` or `NeverFits`; nothing is taken then.
    pub fn alloc(&self, n: usize) -> Result<Vec<PageHandle>> {
        self.pool().alloc(n).map_err(|error| match error {
            Error::OutOfPages { requested, free, evictable, index, .. } => Error::OutOfPages {
                requested,
                free,
                evictable,
                deferred: self.tables.deferred_pages(),
                index,
            },
            other => other,
        })
    }

    /// Ids of the sequences whose tables include a page.
    pub fn owners(&self, handle: PageHandle) -> Result<Vec<u64>> {
        self.tables.owners(handle)
    }

    /// Checks every count against a walk of the tables. Needs rest.
    pub fn validate(&self) -> Result<()> {
        self.tables.validate()
    }

    /// The keys or values of one layer, whole.
    pub fn pages(&self, layer: usize, which: Which, writable: bool) -> Result<PagesView<'_>> {
        self.require_storage()?.pages(layer, which, writable)
    }

    /// The scales of the keys or values of one layer, as pages of one element per token.
    ///
    /// # Errors
    /// As of [`pages`](Self::pages); `Layout` where the dtype has none.
    pub fn scales(&self, layer: usize, which: Which, writable: bool) -> Result<PagesView<'_>> {
        let none = || Error::Layout(format!("a cache of {} has no scales", self.layout.dtype));
        self.pages(layer, which, writable)?.scale_pages().ok_or_else(none)
    }

    /// Address of one head of one reserved token.
    ///
    /// # Errors
    /// `Value` where the layer, position or head is out of range; `Layout` without storage.
    pub fn physical_address(
        &self,
        sequence: &Sequence,
        layer: usize,
        position: u64,
        which: Which,
        head: usize,
    ) -> Result<usize> {
        let pages = self.pages(layer, which, false)?;
        if head >= self.layout.num_kv_heads {
            let heads = self.layout.num_kv_heads;
            return Err(Error::Value(format!("head {head} is not below {heads} KV heads")));
        }
        self.check_own(sequence.tables(), "sequence")?;
        let (page, offset) = sequence.locate(position)?;
        Ok(pages.slot(page.index(), head, offset as usize).addr())
    }

    /// Translates a byte offset in a sequence's logical memory (page behind page, K and V of one
    /// layer in each) to the byte offset in a layer's physical memory.
    ///
    /// # Errors
    /// `Value` beyond the pages the sequence holds.
    pub fn physical_offset(&self, sequence: &Sequence, byte_offset: u64) -> Result<u64> {
        let page_bytes = self.layout.page_bytes()? as u64;
        if page_bytes == 0 {
            return Err(no_storage());
        }
        self.check_own(sequence.tables(), "sequence")?;
        let table = sequence.block_table()?;
        match table.get(usize::try_from(byte_offset / page_bytes).unwrap_or(usize::MAX)) {
            Some(&page) => Ok(page as u64 * page_bytes + byte_offset % page_bytes),
            None => Err(Error::Value(format!(
                "byte offset {byte_offset} is beyond the sequence's {} pages of {page_bytes} bytes",
                table.len()
            ))),
        }
    }

    /// Asks the processor to fetch a sequence's computed pages, first page and first layer first,
    /// until `max_bytes` are on their way. Returns the bytes asked for; reads and changes nothing.
    pub fn prefetch(&self, sequence: &Sequence, max_bytes: usize) -> Result<usize> {
        const LINE: usize = 64;
        self.require_storage()?;
        self.check_own(sequence.tables(), "sequence")?;
        let pages = self.tables.pages_for(sequence.num_computed_tokens()?) as usize;
        let table = sequence.block_table()?;
        let mut left = max_bytes;
        for layer in 0..self.layout.num_layers {
            let (keys, values) = self.layer(layer, false)?;
            let halves = &[keys, values][..self.layout.stored().len()];
            for &page in table.iter().take(pages) {
                for half in halves {
                    let start = half.slot(page as usize, 0, 0);
                    let bytes = half.layout().page_bytes().min(left / LINE * LINE);
                    (0..bytes).step_by(LINE).for_each(|at| prefetch_address(start.wrapping_add(at)));
                    left -= bytes;
                    if left < LINE {
                        return Ok(max_bytes - left);
                    }
                }
            }
        }
        Ok(max_bytes - left)
    }

    fn check_scale(&self, options: &AttentionOptions) -> Result<()> {
        if self.layout.value_in_key && options.scale.is_none() {
            return Err(Error::Value("scale must be given where values are part of the keys".to_owned()));
        }
        Ok(())
    }

    /// Page numbers mean something in their own cache only.
    fn check_own(&self, tables: &Arc<Tables>, what: &str) -> Result<()> {
        if Arc::ptr_eq(tables, &self.tables) {
            Ok(())
        } else {
            Err(Error::Value(format!("the {what} belongs to another cache")))
        }
    }

    fn layer(&self, layer: usize, writable: bool) -> Result<(PagesView<'_>, PagesView<'_>)> {
        let storage = self.require_storage()?;
        Ok((storage.pages(layer, Which::Key, writable)?, storage.pages(layer, Which::Value, writable)?))
    }

    fn require_storage(&self) -> Result<&Arc<KvStorage>> {
        self.storage.as_ref().ok_or_else(no_storage)
    }

    fn null_page_error(&self) -> Error {
        let num_pages = self.layout.num_pages as u64;
        Error::InvalidPage { page: 0, num_pages, reason: "is the null page and stays zero" }
    }

    /// The null page stays zero.
    fn check_slots(&self, view: &BatchView) -> Result<()> {
        let null_slots = if self.null_page { 0..self.layout.page_size as i64 } else { 0..0 };
        if view.slot_mapping.iter().any(|slot| null_slots.contains(slot)) {
            return Err(self.null_page_error());
        }
        Ok(())
    }

    fn check_view(&self, view: &BatchView) -> Result<()> {
        let (page_size, num_pages) = (self.layout.page_size, self.layout.num_pages);
        if (view.page_size, view.num_pages) == (page_size, num_pages) {
            return Ok(());
        }
        Err(Error::Layout(format!(
            "the view is of a cache with {} pages of {} tokens, this one has {num_pages} of {page_size}",
            view.num_pages, view.page_size
        )))
    }
}

fn no_storage() -> Error {
    Error::Layout("the cache has no storage (num_layers=0): it keeps tables only".to_owned())
}

impl std::fmt::Debug for KvCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KvCache").field("layout", &self.layout).finish_non_exhaustive()
    }
}
