//! What several test programs share: memory whose slots carry stamps, and random numbers that a
//! seed brings back.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use paged_kv::ids::PageId;
use paged_kv::pool::PagePool;
use paged_kv::table::{CopyPages, NewTokens, Outcome, PageCopy, Sequence, Tables};

/// The memory behind the pages: one stamp per slot. Relaxed throughout: it is the tables that must
/// order what is written before who reads it.
pub(crate) struct Stamps {
    slots: Vec<AtomicU64>,
    page_size: usize,
}

impl Stamps {
    /// Memory of pages below `num_pages`.
    pub(crate) fn new(num_pages: u32, page_size: u32) -> Arc<Self> {
        let slots = (0..num_pages as usize * page_size as usize).map(|_| AtomicU64::new(0)).collect();
        Arc::new(Self { slots, page_size: page_size as usize })
    }

    fn slot(&self, page: PageId, offset: usize) -> &AtomicU64 {
        assert!(offset < self.page_size);
        &self.slots[page.index() * self.page_size + offset]
    }

    pub(crate) fn write(&self, page: PageId, offset: usize, stamp: u64) {
        self.slot(page, offset).store(stamp, Ordering::Relaxed);
    }

    pub(crate) fn read(&self, page: PageId, offset: usize) -> u64 {
        self.slot(page, offset).load(Ordering::Relaxed)
    }

    /// The stamps of the first `tokens` tokens of a table.
    pub(crate) fn read_table(&self, table: &[i32], tokens: u32) -> Vec<u64> {
        let page = |position: usize| PageId(table[position / self.page_size] as u32);
        (0..tokens as usize).map(|p| self.read(page(p), p % self.page_size)).collect()
    }
}

impl CopyPages for Stamps {
    fn copy(&self, copies: &[PageCopy]) {
        for copy in copies {
            for offset in 0..copy.tokens as usize {
                self.write(copy.destination, offset, self.read(copy.source, offset));
            }
        }
    }
}

/// Lets the tables and the test share the memory.
pub(crate) struct Copier(pub(crate) Arc<Stamps>);

impl CopyPages for Copier {
    fn copy(&self, copies: &[PageCopy]) {
        self.0.copy(copies);
    }
}

/// Tables over stamped memory, driven by one thread.
pub(crate) struct World<const LEAF: usize = 4, const SHARDS: usize = 2> {
    pub(crate) tables: Arc<Tables<LEAF, SHARDS>>,
    pub(crate) stamps: Arc<Stamps>,
    next: AtomicU64,
}

impl<const LEAF: usize, const SHARDS: usize> World<LEAF, SHARDS> {
    pub(crate) fn new(num_pages: u32, page_size: u32) -> Self {
        let stamps = Stamps::new(num_pages, page_size);
        let copier = Box::new(Copier(Arc::clone(&stamps)));
        let pool = PagePool::new(num_pages, 0).expect("a small pool");
        Self { tables: Arc::new(Tables::new(pool, page_size, Some(copier))), stamps, next: AtomicU64::new(1) }
    }

    pub(crate) fn sequence(&self) -> Sequence<LEAF, SHARDS> {
        self.tables.sequence(&[])
    }

    /// Computes `n` more tokens; returns their stamps.
    pub(crate) fn decode(&self, sequence: &Sequence<LEAF, SHARDS>, n: u32) -> Vec<u64> {
        let batch = self.tables.open(&[sequence], NewTokens::Each(n), None).expect("room for the tokens");
        let item = batch.items().next().expect("one sequence");
        let written = (item.computed..item.seq_len()).map(|position| {
            let stamp = self.next.fetch_add(1, Ordering::Relaxed);
            let offset = (position % self.tables.page_size()) as usize;
            self.stamps.write(batch.page(0, position), offset, stamp);
            stamp
        });
        let written = written.collect();
        assert!(batch.end(&Outcome::Commit(None)));
        written
    }

    /// The stamps of all computed tokens.
    pub(crate) fn read(&self, sequence: &Sequence<LEAF, SHARDS>) -> Vec<u64> {
        let table = sequence.block_table().expect("a live sequence");
        self.stamps.read_table(&table, sequence.num_computed_tokens().expect("a live sequence"))
    }

    pub(crate) fn free(&self) -> u64 {
        self.tables.pool().num_free()
    }

    /// Nothing is held any more.
    pub(crate) fn rest(&self) {
        self.tables.validate().expect("valid at rest");
        assert_eq!(self.free(), u64::from(self.tables.pool().num_pages()), "a page leaked");
    }
}

/// `SplitMix64` (Steele, Lea, Flood 2014).
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `n`.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// True once in `n` times.
    pub(crate) fn once_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}
