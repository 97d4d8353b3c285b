//! What the cache's bookkeeping costs without Python: `cargo bench --bench cache`
//!
//! - `step`: one decode token of every sequence, batch opened and committed; per sequence.
//! - `block_table`: the table of an open batch; in bytes, to set beside the machine's memory.
//! - `fork`: of a long prompt, and of a short one.
//! - `copy_on_write`: the copy of a shared page at the first write into it; in bytes.
//!
//! `paged-kv bench cache` measures the same as a Python program sees it, beside the machine's limits.

use std::time::{Duration, Instant};

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use paged_kv::cache::{CacheOptions, KvCache};
use paged_kv::dtype::DType;
use paged_kv::layout::{CacheLayout, PageOrder};
use paged_kv::storage::RegionOptions;
use paged_kv::table::{NewTokens, Sequence};

const PAGE_SIZE: u32 = 16;

/// Steps after which sequences are set back, so that they stay as long as their name says.
const STEPS: u64 = 16;

fn cache(num_layers: usize, num_pages: u32) -> KvCache {
    let layout = CacheLayout {
        num_layers,
        num_pages: num_pages as usize,
        page_size: PAGE_SIZE as usize,
        num_kv_heads: 8,
        head_dim: 128,
        v_head_dim: 128,
        dtype: DType::BF16,
        head_scales: false,
        value_in_key: false,
        order: PageOrder::Hnd,
    };
    let region = RegionOptions::default();
    let options = CacheOptions { layout, null_page: false, window_left: -1, num_threads: Some(1), region };
    KvCache::new(&options).expect("memory for the cache")
}

fn append(cache: &KvCache, sequences: &[&Sequence], new_tokens: NewTokens) {
    let batch = cache.batch(sequences, new_tokens, None, None).expect("a page for every token");
    batch.commit(None).expect("the batch is open");
}

/// Sequences of `num_pages` pages; every step fills the last page of every sixteenth of them.
fn decoding(count: u32, num_pages: u32) -> (KvCache, Vec<Sequence>, Vec<u32>) {
    let cache = cache(0, count * (num_pages + 2));
    let sequences: Vec<_> = (0..count).map(|_| cache.sequence(&[])).collect();
    let lens: Vec<u32> = (0..count).map(|i| num_pages * PAGE_SIZE - i % PAGE_SIZE).collect();
    append(&cache, &sequences.iter().collect::<Vec<_>>(), NewTokens::Counts(&lens));
    (cache, sequences, lens)
}

fn step(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("step");
    for (count, num_pages) in [(1, 8), (64, 8), (256, 8), (256, 8192)] {
        let (cache, sequences, lens) = decoding(count, num_pages);
        let borrowed: Vec<&Sequence> = sequences.iter().collect();
        group.throughput(Throughput::Elements(u64::from(count)));
        let id = BenchmarkId::new(format!("batch {count}"), format!("{num_pages} pages"));
        group.bench_function(id, |bencher| {
            bencher.iter_custom(|rounds| {
                let mut elapsed = Duration::ZERO;
                for done in (0..rounds).step_by(STEPS as usize) {
                    for (sequence, &len) in sequences.iter().zip(&lens) {
                        sequence.truncate(len).expect("nobody changes it");
                    }
                    let start = Instant::now();
                    for _ in done..rounds.min(done + STEPS) {
                        append(&cache, &borrowed, NewTokens::Each(1));
                    }
                    elapsed += start.elapsed();
                }
                elapsed
            });
        });
    }
    group.finish();
}

fn block_table(criterion: &mut Criterion) {
    let (count, num_pages) = (256, 512);
    let (cache, sequences, _) = decoding(count, num_pages);
    let borrowed: Vec<&Sequence> = sequences.iter().collect();
    let open = || cache.batch(&borrowed, NewTokens::Each(0), None, None).expect("a batch that only reads");
    let mut group = criterion.benchmark_group("block_table");
    group.throughput(Throughput::Bytes(u64::from(count * num_pages) * 4));
    group.bench_function(format!("{count} rows of {num_pages}"), |bencher| {
        let build = |batch: &mut paged_kv::cache::Batch| batch.block_table().expect("it is open").1;
        bencher.iter_batched_ref(open, build, BatchSize::PerIteration);
    });
    group.finish();
}

fn fork(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("fork");
    for num_pages in [8, 8192] {
        let (_cache, sequences, _) = decoding(1, num_pages);
        group.bench_function(BenchmarkId::from_parameter(format!("{num_pages} pages")), |bencher| {
            bencher.iter_with_large_drop(|| sequences[0].fork().expect("it lives"));
        });
    }
    group.finish();
}

fn copy_on_write(criterion: &mut Criterion) {
    let (num_layers, children) = (8, 16);
    let cache = cache(num_layers, 2 * children);
    let parent = cache.sequence(&[]);
    append(&cache, &[&parent], NewTokens::Each(PAGE_SIZE - 1));
    let children: Vec<_> = (0..children).map(|_| parent.fork().expect("it lives")).collect();
    let borrowed: Vec<&Sequence> = children.iter().collect();
    let bytes = cache.layout().page_bytes().expect("it fits") * num_layers / PAGE_SIZE as usize;
    let bytes = bytes as u64 * u64::from(PAGE_SIZE - 1);
    let mut group = criterion.benchmark_group("copy_on_write");
    group.throughput(Throughput::Bytes(bytes * children.len() as u64));
    group.bench_function(format!("{} pages of {bytes} bytes", children.len()), |bencher| {
        // Closing gives the copies back.
        let open = || cache.batch(&borrowed, NewTokens::Each(1), None, None).expect("pages for the copies");
        bencher.iter(|| open().close());
    });
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1));
    targets = step, block_table, fork, copy_on_write
}
criterion_main!(benches);
