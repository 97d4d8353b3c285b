//! Memory behind the tables that the threads hammer: stamps, or a real cache's keys and values.
#![expect(unsafe_code, reason = "reading and writing single slots of a cache's memory")]

use std::sync::Arc;

use paged_kv::cache::{Batch, CacheOptions, KvCache, Step};
use paged_kv::dtype::DType;
use paged_kv::error::Result;
use paged_kv::ids::PageId;
use paged_kv::layout::{CacheLayout, PageOrder, Which};
use paged_kv::storage::{RegionOptions, RowsView};
use paged_kv::table::{BatchItem, NewTokens, Outcome, Sequence, TableBatch, Tables};

use crate::common::{Stamps, World};

pub(crate) trait Backend<const LEAF: usize, const SHARDS: usize>: Sync {
    type Batch: Send;

    fn tables(&self) -> &Arc<Tables<LEAF, SHARDS>>;

    fn open(&self, seqs: &[&Sequence<LEAF, SHARDS>], counts: &[u32]) -> Result<Self::Batch>;

    fn items(&self, batch: &Self::Batch) -> Vec<BatchItem>;

    /// Writes one stamp per new token.
    fn write(&self, batch: &Self::Batch, stamps: &[u64]);

    /// Pages of one sequence, new tokens included.
    fn row(&self, batch: &Self::Batch, i: usize) -> Vec<PageId>;

    fn end(&self, batch: &Self::Batch, outcome: &Outcome);

    fn read(&self, page: PageId, offset: usize) -> u64;

    fn write_slot(&self, page: PageId, offset: usize, stamp: u64);

    /// The states of all pages sum to the total, also while others run.
    fn check_sums(&self);
}

/// Tables alone.
pub(crate) struct StampMemory<const LEAF: usize, const SHARDS: usize>(World<LEAF, SHARDS>);

impl<const LEAF: usize, const SHARDS: usize> StampMemory<LEAF, SHARDS> {
    pub(crate) fn new(num_pages: u32, page_size: u32) -> Self {
        Self(World::new(num_pages, page_size))
    }

    fn stamps(&self) -> &Stamps {
        &self.0.stamps
    }
}

impl<const LEAF: usize, const SHARDS: usize> Backend<LEAF, SHARDS> for StampMemory<LEAF, SHARDS> {
    type Batch = TableBatch<LEAF, SHARDS>;

    fn tables(&self) -> &Arc<Tables<LEAF, SHARDS>> {
        &self.0.tables
    }

    fn open(&self, seqs: &[&Sequence<LEAF, SHARDS>], counts: &[u32]) -> Result<Self::Batch> {
        self.0.tables.open(seqs, NewTokens::Counts(counts), None)
    }

    fn items(&self, batch: &Self::Batch) -> Vec<BatchItem> {
        batch.items().collect()
    }

    fn write(&self, batch: &Self::Batch, stamps: &[u64]) {
        let mut stamps = stamps.iter();
        for (i, item) in batch.items().enumerate() {
            for (position, &stamp) in (item.computed..item.seq_len()).zip(stamps.by_ref()) {
                let offset = position % self.0.tables.page_size();
                self.stamps().write(batch.page(i, position), offset as usize, stamp);
            }
        }
    }

    fn row(&self, batch: &Self::Batch, i: usize) -> Vec<PageId> {
        let item = batch.items().nth(i).expect("an item");
        let mut row = vec![-1; self.0.tables.pages_for(item.seq_len()) as usize];
        batch.copy_row(i, &mut row);
        row.into_iter().map(|page| PageId(page as u32)).collect()
    }

    fn end(&self, batch: &Self::Batch, outcome: &Outcome) {
        assert!(batch.end(outcome), "ended by nobody else");
    }

    fn read(&self, page: PageId, offset: usize) -> u64 {
        self.stamps().read(page, offset)
    }

    fn write_slot(&self, page: PageId, offset: usize, stamp: u64) {
        self.stamps().write(page, offset, stamp);
    }

    fn check_sums(&self) {
        let (free, total) = (self.0.free(), u64::from(self.0.tables.pool().num_pages()));
        assert!(free <= total);
        self.0.tables.stats();
        let mut seen = 0;
        let survey = self.0.tables.survey(|_| seen += 1);
        let held = survey.by_sequences + survey.by_batches + survey.by_handles + survey.by_leases;
        assert_eq!((survey.free + held, seen), (total, total), "each page under one holder");
    }
}

const LAYERS: usize = 2;
const HEADS: usize = 2;
const KEY_DIM: usize = 3;
const VALUE_DIM: usize = 2;
/// What a slot reads as whose parts are not of one token.
const TORN: u64 = u64::MAX;

/// A cache with a null page: each token's stamp stands in every head of every layer, in the keys
/// and in the values.
pub(crate) struct KvMemory(KvCache);

impl KvMemory {
    pub(crate) fn new(num_pages: usize, page_size: usize) -> Self {
        let layout = CacheLayout {
            num_layers: LAYERS,
            num_pages,
            page_size,
            num_kv_heads: HEADS,
            head_dim: KEY_DIM,
            v_head_dim: VALUE_DIM,
            dtype: DType::F32,
            head_scales: false,
            value_in_key: false,
            order: PageOrder::Hnd,
        };
        let options = CacheOptions {
            layout,
            null_page: true,
            window_left: -1,
            num_threads: Some(1),
            region: RegionOptions::default(),
        };
        Self(KvCache::new(&options).expect("a small cache"))
    }

    /// Address of one row of a slot.
    fn row(&self, layer: usize, which: Which, page: PageId, head: usize, offset: usize) -> *mut f32 {
        let pages = self.0.pages(layer, which, true).expect("the cache has storage");
        pages.slot(page.index(), head, offset).cast()
    }
}

/// Rows of a slot, one for each head, keys and values.
fn rows() -> impl Iterator<Item = (usize, Which, usize)> {
    let heads = |(layer, which)| (0..HEADS).map(move |head| (layer, which, head));
    (0..LAYERS).flat_map(|layer| [(layer, Which::Key), (layer, Which::Value)]).flat_map(heads)
}

/// A stamp as two numbers that f32 holds exactly.
fn halves(stamp: u64) -> [f32; 2] {
    [(stamp & 0xFF_FFFF) as f32, (stamp >> 24) as f32]
}

impl Backend<64, 16> for KvMemory {
    type Batch = Batch;

    fn tables(&self) -> &Arc<Tables> {
        self.0.tables()
    }

    fn open(&self, seqs: &[&Sequence], counts: &[u32]) -> Result<Batch> {
        self.0.batch(seqs, NewTokens::Counts(counts), None, None)
    }

    fn items(&self, batch: &Batch) -> Vec<BatchItem> {
        batch.items().collect()
    }

    fn write(&self, batch: &Batch, stamps: &[u64]) {
        let each_head = || stamps.iter().flat_map(|&stamp| [halves(stamp); HEADS]);
        let key: Vec<f32> = each_head().flat_map(|[low, high]| [low, high, 0.0]).collect();
        let value: Vec<f32> = each_head().flatten().collect();
        let key = RowsView::from_slice(&key, [stamps.len(), HEADS, KEY_DIM]).expect("the shape");
        let value = RowsView::from_slice(&value, [stamps.len(), HEADS, VALUE_DIM]).expect("the shape");
        for layer in 0..LAYERS {
            self.0.write(layer, key, value, Step::Batch(batch)).expect("an open batch");
        }
    }

    fn row(&self, batch: &Batch, i: usize) -> Vec<PageId> {
        let (table, max_pages) = batch.block_table().expect("an open batch");
        let row = &table[i * max_pages..][..max_pages];
        row.iter().map(|&page| PageId(page as u32)).collect()
    }

    fn end(&self, batch: &Batch, outcome: &Outcome) {
        match outcome {
            Outcome::Commit(keep) => batch.commit(keep.clone()).expect("ended by nobody else"),
            Outcome::Close => batch.close(),
        }
    }

    fn read(&self, page: PageId, offset: usize) -> u64 {
        let read = |(layer, which, head)| {
            let row = self.row(layer, which, page, head, offset);
            // SAFETY: a row has at least two elements; a lease or a handle keeps writers away.
            let [low, high] = unsafe { [row.read(), row.add(1).read()] };
            (high as u64) << 24 | low as u64
        };
        let mut stamps = rows().map(read);
        let first = stamps.next().expect("at least one row");
        if stamps.all(|stamp| stamp == first) { first } else { TORN }
    }

    fn write_slot(&self, page: PageId, offset: usize, stamp: u64) {
        let [low, high] = halves(stamp);
        for (layer, which, head) in rows() {
            let row = self.row(layer, which, page, head, offset);
            // SAFETY: a row has at least two elements; the page is the caller's alone.
            unsafe {
                row.write(low);
                row.add(1).write(high);
            }
        }
    }

    fn check_sums(&self) {
        let stats = self.0.stats(true).expect("small numbers");
        let sum = stats.free_pages + stats.live_pages + stats.cached_pages + stats.deferred_pages;
        assert_eq!(sum, stats.total_pages);
        assert!((0.0..=1.0).contains(&stats.waste), "waste {}", stats.waste);
        let why = self.0.explain(&[], 3).expect("small numbers");
        let live = why.sequence_pages + why.batch_pages + why.handle_pages;
        assert_eq!(live, why.stats.live_pages);
        let cells = why.cells.expect("asked for").counts;
        assert_eq!(cells.iter().flatten().map(|&n| u64::from(n)).sum::<u64>(), stats.total_pages);
    }
}
