//! What a cache holds, in pages, tokens and bytes.

use super::KvCache;
use crate::error::Result;
use crate::table::{SequenceStats, TableStats};

/// A snapshot. Sums always hold; each figure is exact when nothing runs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CacheStats {
    /// Pages of the pool; the sum of free, live, cached and deferred.
    pub total_pages: u64,
    /// Pages nobody holds.
    pub free_pages: u64,
    /// Pages that a sequence, an open batch or a handle holds.
    pub live_pages: u64,
    /// Of the live pages, those with more than one holder.
    pub shared_pages: u64,
    /// Pages kept for later hits, evictable.
    pub cached_pages: u64,
    /// Pages that only leases still hold: not yet reusable.
    pub deferred_pages: u64,
    /// Pages copied on write since the cache was made.
    pub copied_pages: u64,
    /// Sequences not freed.
    pub sequences: u64,
    /// Computed tokens, summed over sequences: what they would take without sharing.
    pub tokens: u64,
    /// Computed tokens as stored: shared ones counted once.
    pub stored_tokens: u64,
    /// Slots reserved beyond computed tokens, summed over sequences.
    pub reserved_tokens: u64,
    /// Bytes of all pages in all layers.
    pub total_bytes: u64,
    /// Bytes of the pages that are not free.
    pub used_bytes: u64,
    /// Part of the sequences' slots that holds no computed token: 0 to 1.
    pub waste: f64,
    /// One entry per sequence, where asked for.
    pub detail: Vec<SequenceStats>,
}

impl KvCache {
    /// Counts what the cache holds; walks all tables. `detail` adds a line per sequence.
    pub fn stats(&self, detail: bool) -> Result<CacheStats> {
        let tables = self.tables.stats();
        let total_pages = u64::from(self.pool().num_pages());
        let free_pages = self.pool().num_free().min(total_pages);
        let deferred_pages = tables.deferred.min(total_pages - free_pages);
        let stats = self.stats_of(&tables, free_pages, deferred_pages)?;
        Ok(CacheStats { detail: if detail { self.tables.sequences() } else { Vec::new() }, ..stats })
    }

    /// `free_pages + deferred_pages` is at most the pool's size.
    pub(super) fn stats_of(
        &self,
        tables: &TableStats,
        free_pages: u64,
        deferred_pages: u64,
    ) -> Result<CacheStats> {
        let total_pages = u64::from(self.pool().num_pages());
        let page_bytes = (self.layout.page_bytes()? * self.layout.num_layers) as u64;
        let slots = tables.held * self.layout.page_size as u64;
        Ok(CacheStats {
            total_pages,
            free_pages,
            live_pages: total_pages - free_pages - deferred_pages,
            shared_pages: tables.shared,
            cached_pages: 0,
            deferred_pages,
            copied_pages: self.tables.copied_pages(),
            sequences: tables.sequences,
            tokens: tables.tokens,
            stored_tokens: tables.stored,
            reserved_tokens: tables.reserved,
            total_bytes: total_pages * page_bytes,
            used_bytes: (total_pages - free_pages) * page_bytes,
            waste: if slots == 0 { 0.0 } else { 1.0 - tables.stored as f64 / slots as f64 },
            detail: Vec::new(),
        })
    }
}
