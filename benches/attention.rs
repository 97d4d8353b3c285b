//! How near attention comes to the machine's limits.
//!
//! - `decode`: one new token per sequence reads all of its keys and values once; the limit is the
//!   bandwidth of reading memory, measured here in the same way as the cases (same threads, more
//!   memory than caches hold). Each line is followed by the ratio to it.
//! - `prefill`: a chunk of new tokens; the limit is arithmetic, measured as fused multiply-adds.
//! - `step`: the shapes of a small model (9 query heads, 3 KV heads of 64), where what a call costs
//!   besides the arithmetic counts.
//!
//! `cargo bench --bench attention -- decode` runs one group; `PAGED_KV_BENCH_THREADS=1` sets threads.

#![expect(unsafe_code, reason = "views of the memory to be read")]
#![expect(clippy::cast_ptr_alignment, reason = "a region starts at a multiple of 4096")]

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{
    BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main, measurement::WallTime,
};
use paged_kv::attention::{AttentionOptions, BatchTables, ThreadPool, paged_attention};
use paged_kv::dtype::DType;
use paged_kv::layout::{CacheLayout, PageOrder, Which};
use paged_kv::storage::{PagesView, Region, RegionOptions, RowsView, RowsViewMut};
use rayon::prelude::*;

/// Bytes of keys and values that a case rotates through, so that no cache holds them.
const ROTATED: usize = 1 << 30;

fn threads() -> usize {
    let set = std::env::var("PAGED_KV_BENCH_THREADS").ok().and_then(|n| n.parse().ok());
    set.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, std::num::NonZero::get))
}

/// `batch` sequences of `len` tokens, `queries` of them new.
#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    batch: usize,
    len: usize,
    queries: usize,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    dtype: DType,
    query_dtype: DType,
    page_size: usize,
}

/// Memory such as a cache has, every word of it written.
fn filled(bytes: usize, word: u32) -> Region {
    let region = Region::map(bytes, RegionOptions::default()).unwrap();
    // SAFETY: the region is valid for writes of `bytes`, aligned, and nobody else has it yet.
    unsafe { std::slice::from_raw_parts_mut(region.base().cast::<u32>(), bytes / 4) }.fill(word);
    region
}

/// Memory, tables and arrays of a case; `copies` batches lie behind each other.
struct Prepared {
    case: Case,
    layout: CacheLayout,
    memory: Region,
    tables: Vec<Vec<i32>>,
    query: Vec<u32>,
    out: Vec<u32>,
    lens: Vec<i32>,
    cu: Vec<i32>,
    turn: usize,
}

impl Prepared {
    fn new(case: Case, rotated: usize) -> Self {
        let pages = case.len.div_ceil(case.page_size);
        let mut layout = CacheLayout {
            num_layers: 1,
            num_pages: pages * case.batch,
            page_size: case.page_size,
            num_kv_heads: case.num_kv_heads,
            head_dim: case.head_dim,
            v_head_dim: case.head_dim,
            dtype: case.dtype,
            order: PageOrder::Hnd,
        };
        let copies = (rotated / layout.layer_bytes().unwrap()).max(1);
        layout.num_pages *= copies;
        // 0.5 in every dtype, whatever the bits are cut into.
        let half = match case.dtype {
            DType::F32 => 0x3F00_0000,
            DType::F16 => 0x3800_3800,
            _ => 0x3F00_3F00,
        };
        let tokens = case.batch * case.queries;
        let rows = tokens * case.num_heads * case.head_dim;
        let table = |copy: usize| {
            (0..pages * case.batch).map(|page| (copy * pages * case.batch + page) as i32).collect()
        };
        Self {
            case,
            layout,
            memory: filled(layout.layer_bytes().unwrap(), half),
            tables: (0..copies).map(table).collect(),
            query: vec![0; rows],
            out: vec![0; rows],
            lens: vec![case.len as i32; case.batch],
            cu: (0..=case.batch).map(|i| (i * case.queries) as i32).collect(),
            turn: 0,
        }
    }

    fn run(&mut self, threads: &ThreadPool) {
        let Case { batch, queries, num_heads, head_dim, query_dtype, len, page_size, .. } = self.case;
        let shape = [batch * queries, num_heads, head_dim];
        let strides = [(num_heads * head_dim) as isize, head_dim as isize];
        let base = self.memory.base();
        let value_base = base.wrapping_add(self.layout.value_offset() * self.layout.dtype.size());
        // SAFETY: the layout sized `memory`, `shape` sized the rows (at four bytes an element).
        let (key_pages, value_pages, query, mut out) = unsafe {
            (
                PagesView::new(base, self.layout.pages(Which::Key).unwrap(), false),
                PagesView::new(value_base, self.layout.pages(Which::Value).unwrap(), false),
                RowsView::new(self.query.as_ptr().cast(), query_dtype, shape, strides),
                RowsViewMut::new(self.out.as_mut_ptr().cast(), query_dtype, shape, strides),
            )
        };
        self.turn = (self.turn + 1) % self.tables.len();
        let tables = BatchTables {
            block_table: &self.tables[self.turn],
            max_pages: len.div_ceil(page_size),
            seq_lens: &self.lens,
            cu_seqlens_q: &self.cu,
        };
        let options = AttentionOptions::default();
        paged_attention(query, key_pages, value_pages, &tables, &options, &mut out, None, threads).unwrap();
    }

    /// Bytes of keys and values that one call reads at least once.
    fn bytes(&self) -> usize {
        self.layout.layer_bytes().unwrap() / self.tables.len()
    }

    /// Floating point operations of one call: a multiplication and an addition each for scores and
    /// sums, of the keys that causality leaves.
    fn flops(&self) -> f64 {
        let Case { batch, len, queries, num_heads, head_dim, .. } = self.case;
        let keys = queries as f64 * (len as f64 - (queries as f64 - 1.0) / 2.0);
        4.0 * batch as f64 * num_heads as f64 * head_dim as f64 * keys
    }
}

/// Seconds of the fastest of the calls that criterion asks for; what disturbs only makes slower.
fn bench(group: &mut BenchmarkGroup<WallTime>, name: &str, mut run: impl FnMut()) -> f64 {
    let mut best = f64::INFINITY;
    group.bench_function(name, |bencher| {
        bencher.iter_custom(|times| {
            let mut total = Duration::ZERO;
            for _ in 0..times {
                let start = Instant::now();
                run();
                let took = start.elapsed();
                best = best.min(took.as_secs_f64());
                total += took;
            }
            total
        });
    });
    best
}

/// Sums `memory` with as many threads as attention has.
fn read_all(memory: &[u32], pool: &rayon::ThreadPool) -> u32 {
    let part = |chunk: &[u32]| {
        let mut sums = [0_u32; 64];
        for part in chunk.as_chunks::<64>().0 {
            for (sum, &x) in sums.iter_mut().zip(part) {
                *sum = sum.wrapping_add(x);
            }
        }
        sums.into_iter().fold(0, u32::wrapping_add)
    };
    pool.install(|| memory.par_chunks(1 << 18).map(part).reduce(|| 0, u32::wrapping_add))
}

/// Fused multiply-adds in registers, the same on every thread; floating point operations done.
fn multiply_add(pool: &rayon::ThreadPool) -> f64 {
    const TIMES: usize = 1 << 20;
    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma"))]
    fn work(x: f32) -> f32 {
        let mut sums = [[x; 8]; 12];
        for _ in 0..TIMES {
            for sum in sums.as_flattened_mut() {
                *sum = sum.mul_add(x, 1e-3);
            }
        }
        sums.as_flattened().iter().sum()
    }
    #[cfg(target_arch = "x86_64")]
    if !(is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")) {
        return f64::NAN;
    }
    // SAFETY: the CPU has the features.
    pool.broadcast(|_| black_box(unsafe { work(black_box(0.5)) }));
    (TIMES * 96 * 2 * pool.current_num_threads()) as f64
}

fn settings<'a>(criterion: &'a mut Criterion, name: &str) -> BenchmarkGroup<'a, WallTime> {
    let mut group = criterion.benchmark_group(name);
    group.sample_size(20).warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(2));
    group
}

fn pools() -> (ThreadPool, rayon::ThreadPool) {
    let plain = rayon::ThreadPoolBuilder::new().num_threads(threads()).build().unwrap();
    (ThreadPool::new(Some(threads())).unwrap(), plain)
}

const fn case(
    name: &'static str,
    [batch, len, queries]: [usize; 3],
    heads: [usize; 3],
    dtype: DType,
) -> Case {
    let [num_heads, num_kv_heads, head_dim] = heads;
    Case {
        name,
        batch,
        len,
        queries,
        num_heads,
        num_kv_heads,
        head_dim,
        dtype,
        query_dtype: dtype,
        page_size: 16,
    }
}

fn decode(criterion: &mut Criterion) {
    let (pool, plain) = pools();
    let mut group = settings(criterion, "decode");
    let memory = filled(ROTATED, 1);
    // SAFETY: written above, and by nobody from here on.
    let words = unsafe { std::slice::from_raw_parts(memory.base().cast::<u32>(), ROTATED / 4) };
    group.throughput(Throughput::Bytes(ROTATED as u64));
    let seconds = bench(&mut group, "limit: read 1 GiB", || {
        black_box(read_all(words, &plain));
    });
    drop(memory);
    let limit = ROTATED as f64 / seconds / 1e9;
    println!("limit: {limit:.1} GB/s read by {} threads\n", pool.num_threads());
    let (llama, small) = ([32, 8, 128], [9, 3, 64]);
    for case in [
        case("d1 bf16", [1, 32768, 1], llama, DType::BF16),
        case("d2 bf16", [16, 2048, 1], llama, DType::BF16),
        case("d3 bf16", [64, 512, 1], llama, DType::BF16),
        case("d4 bf16", [8, 8192, 1], small, DType::BF16),
        case("d4 f32", [8, 8192, 1], small, DType::F32),
        case("d5 bf16", [4, 131_072, 1], [8, 1, 128], DType::BF16),
        case("d6 bf16", [8, 2048, 1], [32, 32, 128], DType::BF16),
        case("d2 f32", [16, 2048, 1], llama, DType::F32),
        Case { page_size: 128, ..case("d2 f32 page 128", [16, 2048, 1], llama, DType::F32) },
        case("d2 f16", [16, 2048, 1], llama, DType::F16),
    ] {
        let mut prepared = Prepared::new(case, ROTATED);
        group.throughput(Throughput::Bytes(prepared.bytes() as u64));
        let seconds = bench(&mut group, case.name, || prepared.run(&pool));
        let speed = prepared.bytes() as f64 / seconds / 1e9;
        println!("{}: {speed:.1} GB/s, {:.2} of the limit\n", case.name, speed / limit);
    }
}

fn prefill(criterion: &mut Criterion) {
    let (pool, plain) = pools();
    let mut group = settings(criterion, "prefill");
    let mut operations = 0.0;
    let seconds = bench(&mut group, "limit: multiply-add", || operations = multiply_add(&plain));
    let limit = operations / seconds / 1e9;
    println!("limit: {limit:.0} GFLOP/s by {} threads\n", pool.num_threads());
    let (llama, small) = ([32, 8, 128], [9, 3, 64]);
    for case in [
        case("p1 f32", [1, 2048, 2048], llama, DType::F32),
        case("p1 bf16", [1, 2048, 2048], llama, DType::BF16),
        case("p2 f32", [1, 8704, 512], llama, DType::F32),
        case("small model, 256 new of 512, f32", [1, 512, 256], small, DType::F32),
    ] {
        let mut prepared = Prepared::new(case, 0);
        let seconds = bench(&mut group, case.name, || prepared.run(&pool));
        let speed = prepared.flops() / seconds / 1e9;
        println!("{}: {speed:.0} GFLOP/s, {:.2} of the limit\n", case.name, speed / limit);
    }
}

fn step(criterion: &mut Criterion) {
    let (pool, _) = pools();
    let mut group = settings(criterion, "step");
    for batch in [1, 8, 32] {
        for len in [16, 256, 1024] {
            let mut prepared = Prepared::new(case("", [batch, len, 1], [9, 3, 64], DType::F32), 0);
            let name = format!("batch {batch}, context {len}");
            let seconds = bench(&mut group, &name, || prepared.run(&pool));
            println!("{name}: {:.1} us\n", seconds * 1e6);
        }
    }
}

criterion_group!(benches, decode, prefill, step);
criterion_main!(benches);
