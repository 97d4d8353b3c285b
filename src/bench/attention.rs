//! Attention beside the machine's limits.
//!
//! - Decode: one new token per sequence reads all of its keys and values once. The yardstick is the
//!   bandwidth of reading the same pages, first to last, with as many threads.
//! - Decode of sequences that share a prefix. The yardstick is the same batch without sharing, which is
//!   measured as above.
//! - Prefill: a chunk of new tokens. The yardstick is fused multiply-adds in registers; for bfloat16 and
//!   eight bits, where the instruction set multiplies them in pairs, such products.
//!
//! Calls rotate through more memory than caches hold, which was written before; all that is compared
//! takes turns.

use std::sync::{Mutex, PoisonError};

use super::Record;
use super::measure::{Case, Summary, interleaved};
use crate::attention::{AttentionOptions, BatchTables, ThreadPool, paged_attention, write_pages};
use crate::dtype::{DType, Element};
use crate::error::{Error, Result};
use crate::kernels;
use crate::layout::{CacheLayout, PageOrder, PagesLayout, Which};
use crate::storage::{KvStorage, RegionOptions, RowsView, RowsViewMut};
use crate::sync::{AtomicUsize, Ordering};

/// Name of decode's yardstick.
pub const READ: &str = "reading the pages";
/// Name of prefill's yardstick.
pub const FMA: &str = "multiply-adds";
/// Name of prefill's yardstick where bfloat16 are multiplied in pairs.
pub const PAIRS: &str = "bfloat16 products in pairs";

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

/// What to measure.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Names of [`SHAPES`].
    pub cases: Vec<String>,
    /// Types of keys and values, and of queries; beside quantised ones, queries are bfloat16.
    pub dtypes: Vec<DType>,
    /// Tokens per page.
    pub page_sizes: Vec<usize>,
    /// Numbers of threads.
    pub threads: Vec<usize>,
    /// Bytes of keys and values that decode rotates through.
    pub rotated: usize,
    /// Repetitions of each case; all that have a yardstick in common take turns.
    pub repetitions: usize,
}

impl Default for Plan {
    /// Everything, with one thread and with all.
    fn default() -> Self {
        let all = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let mut threads = vec![1, all];
        threads.dedup();
        Self {
            cases: SHAPES.map(|shape| shape.name.to_owned()).to_vec(),
            dtypes: DType::ALL.to_vec(),
            page_sizes: vec![16, 128],
            threads,
            rotated: 1 << 30,
            repetitions: 5,
        }
    }
}

/// Measures what the plan says; `report` sees each group of records as it is done.
///
/// # Errors
/// If the plan names no case or page size that there is, or if memory or threads can't be had.
pub fn attention(plan: &Plan, mut report: impl FnMut(&[Record])) -> Result<Vec<Record>> {
    let known = |name: &String| SHAPES.iter().any(|shape| shape.name == name);
    if let Some(name) = plan.cases.iter().find(|name| !known(name)) {
        let names = SHAPES.map(|shape| shape.name).join(", ");
        return Err(Error::Value(format!("case {name:?} is not one of {names}")));
    }
    if plan.page_sizes.contains(&0) {
        return Err(Error::Value("a page size is 0".to_owned()));
    }
    let mut all = Vec::new();
    for shape in SHAPES.iter().filter(|shape| plan.cases.iter().any(|name| name == shape.name)) {
        for &dtype in &plan.dtypes {
            for &page_size in &plan.page_sizes {
                let records = match dtype {
                    DType::F32 => group::<f32>(plan, shape, dtype, page_size)?,
                    DType::F16 => group::<half::f16>(plan, shape, dtype, page_size)?,
                    DType::BF16 | DType::I8 | DType::F8E4M3 => {
                        group::<half::bf16>(plan, shape, dtype, page_size)?
                    }
                };
                report(&records);
                all.extend(records);
            }
        }
    }
    Ok(all)
}

/// Memory and tables of one shape; several batches lie behind each other.
struct Prepared<T> {
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
const PLACES: [&str; 3] = ["adjacent", "scattered", "shared"];
/// The place that a shared prefix is compared with.
const ADJACENT: usize = 0;
/// The place with a shared prefix.
const SHARED: usize = 2;

impl<T: Element> Prepared<T> {
    fn new(shape: Shape, dtype: DType, page_size: usize, rotated: usize) -> Result<Self> {
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
    fn attend(&self, place: usize, threads: &ThreadPool) -> Result<()> {
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
            &AttentionOptions::default(),
            &mut RowsViewMut::from_slice(&mut out, rows)?,
            None,
            threads,
        )
    }

    /// Reads one thread's share of all pages, keys and values.
    fn read(&self, thread: usize, threads: usize) -> Result<()> {
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
    fn bytes(&self) -> Result<f64> {
        let pages = [self.layout.pages(Which::Key)?, self.layout.pages(Which::Value)?];
        let page: usize = pages.iter().map(PagesLayout::page_bytes).sum();
        Ok((page * self.layout.num_pages) as f64 / self.tables.len() as f64)
    }

    /// Floating point operations of one call: a multiplication and an addition each for scores and
    /// sums, of the keys that causality leaves.
    fn operations(&self) -> f64 {
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

/// Measures one shape with one dtype and page size: threads, places and the limit in turn.
fn group<T: Element>(plan: &Plan, shape: &Shape, dtype: DType, page_size: usize) -> Result<Vec<Record>> {
    let prepared = &Prepared::<T>::new(*shape, dtype, page_size, plan.rotated)?;
    let decode = shape.queries == 1;
    let pools = plan.threads.iter().map(|&n| ThreadPool::new(Some(n))).collect::<Result<Vec<_>>>()?;
    let failed = Mutex::new(None);
    let failed = &failed;
    let note = move |result: Result<()>| {
        if let Err(error) = result {
            failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        }
    };
    let arithmetic = Arithmetic::of(dtype)?;
    // A limit takes a pass over all memory, or some hundredth of a second.
    let (limit_work, unit) = if decode {
        (prepared.bytes()? * prepared.tables.len() as f64, "GB/s")
    } else {
        (arithmetic.run(1)? as f64 * MULTIPLY_ADDS as f64, "GFLOP/s")
    };
    let work = if decode { prepared.bytes()? } else { prepared.operations() };
    let calls = if decode { prepared.tables.len() as u64 } else { 1 };
    let mut cases = Vec::new();
    let mut labels = Vec::new();
    for (&threads, pool) in plan.threads.iter().zip(&pools) {
        labels.push((threads, None, if decode { limit_work } else { limit_work * threads as f64 }));
        cases.push(Case {
            threads,
            operations: 1,
            prepare: None,
            work: Box::new(move |thread, _| {
                note(if decode {
                    prepared.read(thread, threads)
                } else {
                    arithmetic.run(MULTIPLY_ADDS).map(|_| ())
                });
            }),
        });
        let places = match (decode, shape.shared) {
            (true, 0) => SHARED,
            (true, _) => PLACES.len(),
            (false, _) => 1,
        };
        for place in 0..places {
            labels.push((threads, Some(place), work));
            let run = move |_, calls| (0..calls).for_each(|_| note(prepared.attend(place, pool)));
            cases.push(Case { threads: 1, operations: calls, prepare: None, work: Box::new(run) });
        }
    }
    let summaries = interleaved(&cases, plan.repetitions);
    drop(cases);
    if let Some(error) = failed.lock().unwrap_or_else(PoisonError::into_inner).take() {
        return Err(error);
    }
    let machine = if decode { READ } else { arithmetic.name() };
    let what = format!("{} {dtype} page {page_size}", shape.name);
    // The machine's, and that of adjacent pages.
    let mut limits = [f64::NAN; 2];
    let record = |((threads, place, work), summary): ((usize, Option<usize>, f64), Summary)| {
        let value = work / summary.nanos;
        let (case, implementation) = if let Some(place) = place {
            (format!("{what} {}", PLACES[place]), "paged_kv")
        } else {
            (format!("{what} limit"), machine)
        };
        if place.is_none_or(|place| place == ADJACENT) {
            limits[usize::from(place.is_some())] = value;
        }
        let (yardstick, limit) = match place {
            Some(SHARED) => (format!("{what} {}", PLACES[ADJACENT]), limits[1]),
            _ => (machine.to_owned(), limits[0]),
        };
        let [fast, slow] = summary.quartiles;
        Record {
            bench: "attention",
            case,
            implementation: implementation.into(),
            threads,
            value,
            quartiles: [work / slow, work / fast],
            unit,
            yardstick,
            limit,
            ratio: value / limit,
            kept: summary.kept,
            discarded: summary.discarded,
        }
    };
    Ok(labels.into_iter().zip(summaries).map(record).collect())
}

/// What prefill's inner loops do.
#[derive(Clone, Copy)]
enum Arithmetic {
    Floats,
    Pairs,
}

impl Arithmetic {
    /// Of keys and values of a type, with queries of this benchmark.
    fn of(dtype: DType) -> Result<Self> {
        let pairs = !matches!(dtype, DType::F32 | DType::F16) && kernels::multiply_add_pairs(1)?.is_some();
        Ok(if pairs { Self::Pairs } else { Self::Floats })
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Floats => FMA,
            Self::Pairs => PAIRS,
        }
    }

    /// Does it in registers; returns the operations.
    fn run(self, times: usize) -> Result<u64> {
        match self {
            Self::Floats => kernels::multiply_add(times),
            Self::Pairs => Ok(kernels::multiply_add_pairs(times)?.unwrap_or(0)),
        }
    }
}

/// Rounds of the multiply-add loop in one repetition.
const MULTIPLY_ADDS: usize = 1 << 22;

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_stands_beside_its_limit() {
        let plan = Plan {
            cases: vec!["d2".to_owned()],
            page_sizes: vec![16],
            threads: vec![1, 2],
            rotated: 1 << 20,
            repetitions: 1,
            ..Plan::default()
        };
        let mut reported = 0;
        let records = attention(&plan, |records| reported += records.len()).expect("some hundred MiB");
        // Of each element type the limit, adjacent pages and scattered ones, on one thread and on two.
        assert_eq!((records.len(), reported), (30, 30));
        let nothing = Plan { cases: vec!["d9".to_owned()], ..plan };
        assert!(matches!(attention(&nothing, |_| {}), Err(Error::Value(message)) if message.contains("d9")));
        let shared = Plan {
            cases: vec!["c1".to_owned()],
            dtypes: vec![DType::I8],
            page_sizes: vec![128],
            threads: vec![2],
            ..nothing
        };
        let shared = attention(&shared, |_| {}).expect("some hundred MiB");
        assert_eq!(shared.len(), 4);
        assert_eq!((&shared[3].yardstick, shared[3].limit), (&shared[1].case, shared[1].value));
        for record in records.into_iter().chain(shared) {
            assert!(record.value > 0.0 && record.quartiles[0] <= record.quartiles[1], "{record:?}");
            assert!((record.ratio - record.value / record.limit).abs() < 1e-9, "{record:?}");
            assert_eq!(record.implementation == READ, record.case.ends_with("limit"));
        }
    }
}
