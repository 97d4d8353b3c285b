//! A block table written straight to where the caller wants it.

use super::batch::{Batch, InUse};
use crate::error::Result;
use crate::sync::AtomicU32;

/// The rows of an open batch's block table. The batch stays open as long as this lives.
pub struct BlockRows<'a> {
    batch: &'a Batch,
    max_pages: usize,
    _open: InUse<'a>,
}

impl<'a> BlockRows<'a> {
    pub(super) fn new(batch: &'a Batch) -> Result<Self> {
        let open = batch.enter()?;
        batch.table().warm_tables();
        Ok(Self { batch, max_pages: batch.max_pages(), _open: open })
    }

    /// Sequences.
    pub fn num_rows(&self) -> usize {
        self.batch.items().len()
    }

    /// Pages of the longest sequence.
    pub fn max_pages(&self) -> usize {
        self.max_pages
    }

    /// The pages of a row from left to right, some at a time: `f(column, pages)`. They may be fewer
    /// than `max_pages`; they don't change while this lives.
    pub fn row(&self, row: usize, f: impl FnMut(usize, &[AtomicU32])) {
        self.batch.table().for_pages(row, f);
    }
}
