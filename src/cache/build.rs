//! Making a cache: sizes worked out and checked, memory mapped or adopted.

use std::sync::Arc;

use super::KvCache;
use super::buffers::Buffers;
use crate::attention::{ThreadPool, copy_tokens, write_rows};
use crate::error::{Error, Result};
use crate::ids::PageId;
use crate::layout::CacheLayout;
use crate::pool::PagePool;
use crate::storage::{KvStorage, RegionOptions, RowsView};
use crate::table::{CopyPages, PageCopy, Tables};

/// What a cache is made of. `layout.num_pages` counts the pages that can be handed out; a null page
/// comes on top.
#[derive(Clone, Copy, Debug)]
pub struct CacheOptions {
    /// Shapes; `num_layers` 0 keeps tables only.
    pub layout: CacheLayout,
    /// Page 0 is kept back: zeros, never handed out, outside `num_pages`.
    pub null_page: bool,
    /// The window `attend` uses where it is given none; -1 is off.
    pub window_left: i64,
    /// Threads for attention; `None`: as many as the process may use at once.
    pub num_threads: Option<usize>,
    /// How the memory is mapped.
    pub region: RegionOptions,
}

impl CacheOptions {
    /// Pages of `layout` that fit into a budget of bytes, over all layers.
    ///
    /// # Errors
    /// `Layout` without layers, or where not one page fits.
    pub fn pages_within(layout: &CacheLayout, memory: u64) -> Result<usize> {
        let one = CacheLayout { num_pages: 1, ..*layout }.total_bytes()? as u64;
        if one == 0 {
            return Err(Error::Layout(
                "memory= needs layers; a tables-only cache takes num_pages=".to_owned(),
            ));
        }
        match memory / one {
            0 => Err(Error::Layout(format!(
                "{memory} bytes hold no page: one takes {one} bytes in all layers"
            ))),
            pages => Ok(usize::try_from(pages).unwrap_or(usize::MAX)),
        }
    }

    /// The layout with the null page counted in, checked: what storage is made for.
    pub fn checked(&self) -> Result<CacheLayout> {
        let l = &self.layout;
        let positive = |name: &str, value: usize| match value {
            0 => Err(Error::Layout(format!("{name} must be at least 1, not 0"))),
            _ => Ok(()),
        };
        positive("num_pages", l.num_pages)?;
        positive("page_size", l.page_size)?;
        if l.num_layers > 0 {
            positive("num_kv_heads", l.num_kv_heads)?;
            positive("head_dim", l.head_dim)?;
            positive("v_head_dim", l.v_head_dim)?;
        }
        if l.value_in_key && l.v_head_dim > l.head_dim {
            let (key, value) = (l.head_dim, l.v_head_dim);
            return Err(Error::Layout(format!("keys of {key} elements hold no values of {value}")));
        }
        if l.head_scales && !l.dtype.is_quantised() {
            return Err(Error::Layout(format!("{} has no scales: leave k_scale and v_scale out", l.dtype)));
        }
        if self.window_left < -1 {
            let window = self.window_left;
            return Err(Error::Value(format!("window_left must be -1 (off) or at least 0, not {window}")));
        }
        if u32::try_from(l.page_size).is_err() {
            return Err(Error::Layout(format!("page_size {} is more than 2^32 - 1 tokens", l.page_size)));
        }
        let num_pages = l.num_pages.checked_add(usize::from(self.null_page));
        let num_pages = num_pages.ok_or_else(|| Error::Layout(format!("{} pages overflow", l.num_pages)))?;
        let layout = CacheLayout { num_pages, ..*l };
        layout.total_bytes()?;
        Ok(layout)
    }
}

impl KvCache {
    /// A cache with memory of its own, of which a page takes its share when it is first written.
    /// Scales per head come with storage alone: [`KvStorage::with_head_scales`] and
    /// [`with_storage`](Self::with_storage).
    ///
    /// # Errors
    /// `Layout` or `Value` for sizes that make no sense, `Memory` for more bytes than the machine
    /// has.
    pub fn new(options: &CacheOptions) -> Result<Self> {
        let layout = options.checked()?;
        let storage = match layout.num_layers {
            0 => None,
            _ => Some(KvStorage::map(layout, options.region)?),
        };
        Self::assemble(options, layout, storage, false)
    }

    /// A cache whose pages lie on a device: it keeps the tables, the caller works on the memory, and
    /// a batch's pages stay until that work has ended (see [`Batch::lease`](super::Batch::lease)).
    ///
    /// # Errors
    /// `Layout` or `Value` for sizes that make no sense.
    pub fn on_device(options: &CacheOptions) -> Result<Self> {
        Self::assemble(options, options.checked()?, None, true)
    }

    /// A cache over memory of someone else; see [`KvStorage::adopt`].
    ///
    /// # Errors
    /// `Layout` where the storage's shape is not the options'.
    pub fn with_storage(options: &CacheOptions, storage: KvStorage) -> Result<Self> {
        let layout = options.checked()?;
        if *storage.layout() != layout {
            return Err(Error::Layout(format!(
                "the storage's layout {:?} is not the cache's {layout:?}",
                storage.layout()
            )));
        }
        let cache = Self::assemble(options, layout, Some(storage), false)?;
        if options.null_page {
            cache.clear_null_page()?;
        }
        Ok(cache)
    }

    /// Mapped memory is zero to begin with; that of others need not be.
    fn clear_null_page(&self) -> Result<()> {
        let slots: Vec<i64> = (0..self.layout.page_size as i64).collect();
        for layer in 0..self.layout.num_layers {
            for &which in self.layout.stored() {
                let pages = self.pages(layer, which, true)?;
                let shape = [slots.len(), pages.layout().num_heads, pages.layout().head_dim];
                let zeros = vec![0.0_f32; shape.iter().product()];
                write_rows(RowsView::from_slice(&zeros, shape)?, pages, &slots, &self.threads)?;
            }
        }
        Ok(())
    }

    fn assemble(
        options: &CacheOptions,
        layout: CacheLayout,
        storage: Option<KvStorage>,
        leases: bool,
    ) -> Result<Self> {
        let first_page = u32::from(options.null_page);
        let num_pages = u32::try_from(options.layout.num_pages).map_err(|_| {
            Error::Layout(format!("{} pages are more than 2^32 - 1", options.layout.num_pages))
        })?;
        let pool = PagePool::new(num_pages, first_page)?;
        let threads = ThreadPool::new(options.num_threads)?;
        let storage = storage.map(Arc::new);
        let copier = storage.clone().map(|storage| Box::new(Copier(storage)) as Box<dyn CopyPages>);
        let page_size = layout.page_size as u32;
        let tables =
            if leases { Tables::with_leases(pool, page_size) } else { Tables::new(pool, page_size, copier) };
        let tables = Arc::new(tables);
        let (null_page, window_left) = (options.null_page, options.window_left);
        let buffers = Arc::new(Buffers::new());
        Ok(Self { tables, buffers, storage, threads, layout, null_page, window_left })
    }
}

/// Carries copy-on-write out in every layer.
struct Copier(Arc<KvStorage>);

impl CopyPages for Copier {
    fn copy(&self, copies: &[PageCopy]) {
        let slots = copies.iter().map(|copy| (copy.source, copy.destination, copy.tokens as usize));
        copy_slots(&self.0, &slots).expect("pages of the pool, none copied to itself");
    }
}

/// Copies the first tokens of pages in every layer.
pub(super) fn copy_slots(
    storage: &KvStorage,
    copies: &(impl Iterator<Item = (PageId, PageId, usize)> + Clone),
) -> Result<()> {
    for layer in 0..storage.layout().num_layers {
        for &which in storage.layout().stored() {
            let pages = storage.pages(layer, which, true)?;
            for (source, destination, tokens) in copies.clone() {
                copy_tokens(pages, source, destination, tokens)?;
            }
        }
    }
    Ok(())
}
