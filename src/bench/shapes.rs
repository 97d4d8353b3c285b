//! What attention is measured on: the shapes, and memory and tables for each.

use std::sync::{Mutex, PoisonError};

use crate::attention::{AttentionOptions, BatchTables, ThreadPool, paged_attention, write_pages};
use crate::dtype::{DType, Element};
use crate::error::Result;
use crate::kernels::{self, Isa};
use crate::layout::{CacheLayout, PageOrder, PagesLayout, Which};
use crate::storage::{KvStorage, RegionOptions, RowsView, RowsViewMut};
use crate::sync::{AtomicUsize, Ordering};

/// What is attended to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Its name.
    pub name: &'static str,
    /// Sequences.
    pub batch: usize,
    /// Tokens of each, the new ones included.
    pub len: usize,
    /// New tokens of each.
    pub queries: usize,
    /// Tokens that all begin with; they are shared in one of the places, and otherwise each has its own.
    pub shared: usize,
    /// Query heads.
    pub num_heads: usize,
    /// KV heads.
    pub num_kv_heads: usize,
    /// Elements of a key and a value.
    pub head_dim: usize,
}

const fn shape(name: &'static str, [batch, len, queries]: [usize; 3], heads: [usize; 3]) -> Shape {
    let [num_heads, num_kv_heads, head_dim] = heads;
    Shape { name, batch, len, queries, shared: 0, num_heads, num_kv_heads, head_dim }
}

/// The cases: six of decode, one of decode with a shared prefix, two of prefill.
pub const SHAPES: [Shape; 9] = [
    shape("d1", [1, 32_768, 1], [32, 8, 128]),
    shape("d2", [16, 2048, 1], [32, 8, 128]),
    shape("d3", [64, 512, 1], [32, 8, 128]),
    shape("d4", [8, 8192, 1], [9, 3, 64]),
    shape("d5", [4, 131_072, 1], [8, 1, 128]),
    shape("d6", [8, 2048, 1], [32, 32, 128]),
    Shape { shared: 3840, ..shape("c1", [32, 4096, 1], [32, 8, 128]) },
    shape("p1", [1, 2048, 2048], [32, 8, 128]),
    shape("p2", [1, 8704, 512], [32, 8, 128]),
];

/// Memory and tables of one shape; several batches lie behind each other.
pub(super) struct Prepared<T> {
    shape: Shape,
    layout: CacheLayout,
    storage: KvStorage,
    /// Per batch: pages in order, shuffled, and in order with a shared prefix.
    tables: Vec<[Vec<i32>; 3]>,
    query: Vec<T>,
    out: Mutex<Vec<T>>,
    lens: Vec<i32>,
    cu: Vec<i32>,
    turn: AtomicUsize,
}

/// Where the pages of a sequence lie.
pub(super) const PLACES: [&str; 3] = ["adjacent", "scattered", "shared"];
/// The place that a shared prefix is compared with.
pub(super) const ADJACENT: usize = 0;
/// The place with a shared prefix.
pub(super) const SHARED: usize = 2;

impl<T: Element> Prepared<T> {
    pub(super) fn new(shape: Shape, dtype: DType, page_size: usize, rotated: usize) -> Result<Self> {
        let Shape { batch, len, queries, num_heads, num_kv_heads, head_dim, .. } = shape;
        let pages_each = len.div_ceil(page_size);
        let pages = pages_each * batch;
        let mut layout = CacheLayout {
            num_layers: 1,
            num_pages: pages,
            page_size,
            num_kv_heads,
            head_dim,
            v_head_dim: head_dim,
            dtype,
            head_scales: false,
            value_in_key: false,
            order: PageOrder::Hnd,
        };
        let copies = if queries == 1 { (rotated / layout.layer_bytes()?).max(1) } else { 1 };
        layout.num_pages *= copies;
        let storage = KvStorage::map(layout, RegionOptions::default())?;
        let mut random = Random(1);
        fill::<T>(&storage, &mut random)?;
        let tables = (0..copies).map(|copy| {
            let adjacent: Vec<i32> = (copy * pages..(copy + 1) * pages).map(|page| page as i32).collect();
            let mut scattered = adjacent.clone();
            random.shuffle(&mut scattered);
            let mut shared = adjacent.clone();
            for table in shared.chunks_exact_mut(pages_each) {
                let prefix = shape.shared / page_size;
                table[..prefix].copy_from_slice(&adjacent[..prefix]);
            }
            [adjacent, scattered, shared]
        });
        let tables = tables.collect();
        let rows = batch * queries * num_heads * head_dim;
        Ok(Self {
            shape,
            layout,
            storage,
            tables,
            query: random.elements(rows),
            out: Mutex::new(vec![T::from_f32(0.0); rows]),
            lens: vec![len as i32; batch],
            cu: (0..=batch).map(|i| (i * queries) as i32).collect(),
            turn: AtomicUsize::new(0),
        })
    }

    /// Attends with the next batch.
    pub(super) fn attend(&self, place: usize, isa: Isa, threads: &ThreadPool) -> Result<()> {
        let Shape { batch, len, queries, num_heads, head_dim, .. } = self.shape;
        let rows = [batch * queries, num_heads, head_dim];
        // Relaxed: which batch is next matters to nobody else.
        let turn = self.turn.fetch_add(1, Ordering::Relaxed) % self.tables.len();
        let tables = BatchTables {
            block_table: &self.tables[turn][place],
            max_pages: len.div_ceil(self.layout.page_size),
            seq_lens: &self.lens,
            cu_seqlens_q: &self.cu,
        };
        let mut out = self.out.lock().unwrap_or_else(PoisonError::into_inner);
        paged_attention(
            RowsView::from_slice(&self.query, rows)?,
            self.storage.pages(0, Which::Key, false)?,
            self.storage.pages(0, Which::Value, false)?,
            &tables,
            &AttentionOptions { isa: Some(isa), ..AttentionOptions::default() },
            &mut RowsViewMut::from_slice(&mut out, rows)?,
            None,
            threads,
        )
    }

    /// How many batches there are.
    pub(super) fn batches(&self) -> usize {
        self.tables.len()
    }

    /// Reads one thread's share of all pages, keys and values.
    pub(super) fn read(&self, thread: usize, threads: usize) -> Result<()> {
        let pages = self.layout.num_pages;
        let (keys, values) =
            (self.storage.pages(0, Which::Key, false)?, self.storage.pages(0, Which::Value, false)?);
        for page in pages * thread / threads..pages * (thread + 1) / threads {
            std::hint::black_box(kernels::read_pages(&keys, page..page + 1)?);
            std::hint::black_box(kernels::read_pages(&values, page..page + 1)?);
        }
        Ok(())
    }

    /// Bytes of keys and values that one call reads at least once, where nothing is shared; scales of
    /// quantised ones, a thirtieth or so, come on top.
    pub(super) fn bytes(&self) -> Result<f64> {
        let pages = [self.layout.pages(Which::Key)?, self.layout.pages(Which::Value)?];
        let page: usize = pages.iter().map(PagesLayout::page_bytes).sum();
        Ok((page * self.layout.num_pages) as f64 / self.tables.len() as f64)
    }

    /// Floating point operations of one call: a multiplication and an addition each for scores and
    /// sums, of the keys that causality leaves.
    pub(super) fn operations(&self) -> f64 {
        let Shape { batch, len, queries, num_heads, head_dim, .. } = self.shape;
        let keys = queries as f64 * (len as f64 - (queries as f64 - 1.0) / 2.0);
        4.0 * (batch * num_heads * head_dim) as f64 * keys
    }
}

/// Writes every slot, so that memory is there and holds no zeros.
fn fill<T: Element>(storage: &KvStorage, random: &mut Random) -> Result<()> {
    const TOKENS: usize = 4096;
    let layout = storage.layout();
    let shape = [TOKENS, layout.num_kv_heads, layout.head_dim];
    let rows: Vec<T> = random.elements(shape.iter().product());
    let pool = ThreadPool::new(None)?;
    let (keys, values) = (storage.pages(0, Which::Key, true)?, storage.pages(0, Which::Value, true)?);
    let slots = layout.num_pages * layout.page_size;
    for start in (0..slots).step_by(TOKENS) {
        // Beyond the last slot: none.
        let mapping: Vec<i64> =
            (start..start + TOKENS).map(|slot| if slot < slots { slot as i64 } else { -1 }).collect();
        let rows = RowsView::from_slice(&rows, shape)?;
        write_pages(rows, rows, keys, values, &mapping, &pool)?;
    }
    Ok(())
}

/// `SplitMix64`.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// In -1..1.
    fn elements<T: Element>(&mut self, count: usize) -> Vec<T> {
        (0..count).map(|_| T::from_f32((self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0)).collect()
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, (self.next() % (i as u64 + 1)) as usize);
        }
    }
}
