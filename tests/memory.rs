//! What the process takes from the machine: pages that were written, and a bounded bookkeeping.
#![cfg(all(target_os = "linux", not(loom)))]

use std::sync::{Mutex, MutexGuard};

use half::bf16;
use paged_kv::cache::{CacheOptions, KvCache, Step};
use paged_kv::dtype::DType;
use paged_kv::layout::{CacheLayout, PageOrder};
use paged_kv::storage::{HugePages, RegionOptions, RowsView};
use paged_kv::table::NewTokens;

/// Resident memory belongs to the process: one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Bytes of memory that stand behind this process.
fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: usize = statm.split_whitespace().nth(1).unwrap().parse().unwrap();
    // The kernel counts in its base pages; 4 KiB on x86-64, maybe more elsewhere.
    pages * page_size()
}

/// From the auxiliary vector: the value behind key 6 (`AT_PAGESZ`).
fn page_size() -> usize {
    let auxv = std::fs::read("/proc/self/auxv").unwrap();
    let words: Vec<usize> = auxv.as_chunks::<8>().0.iter().map(|w| usize::from_ne_bytes(*w)).collect();
    words.chunks_exact(2).find(|pair| pair[0] == 6).unwrap()[1]
}

fn options(num_layers: usize, num_pages: usize) -> CacheOptions {
    CacheOptions {
        layout: CacheLayout {
            num_layers,
            num_pages,
            page_size: 16,
            num_kv_heads: 8,
            head_dim: 128,
            v_head_dim: 128,
            dtype: DType::BF16,
            head_scales: false,
            value_in_key: false,
            order: PageOrder::Hnd,
        },
        null_page: false,
        window_left: -1,
        num_threads: Some(1),
        region: RegionOptions { huge_pages: HugePages::Off, overcommit: true },
    }
}

#[test]
fn a_cache_of_64_gib_takes_what_is_written_and_64_bytes_per_page() {
    const TOKENS: usize = 1024;
    let _alone = alone();
    let options = options(4, 1 << 18);
    let page_bytes = options.layout.page_bytes().unwrap() * options.layout.num_layers;
    assert_eq!(options.layout.total_bytes().unwrap(), 64 << 30);
    let metadata = 64 * options.layout.num_pages;
    let rows = vec![bf16::ONE; TOKENS * 8 * 128];
    let rows = RowsView::from_slice(&rows, [TOKENS, 8, 128]).unwrap();

    let before = resident();
    let cache = KvCache::new(&options).unwrap();
    let created = resident().saturating_sub(before);
    assert!(created <= metadata, "{created} bytes for an empty cache, {metadata} allowed");

    let sequence = cache.sequence(&[]);
    for _ in 0..options.layout.num_pages / 100 * 16 / TOKENS {
        let batch = cache.batch(&[&sequence], NewTokens::Each(TOKENS as u32), None, None).unwrap();
        for layer in 0..options.layout.num_layers {
            cache.write(layer, rows, rows, Step::Batch(&batch)).unwrap();
        }
        batch.commit(None).unwrap();
    }
    let used = sequence.len().unwrap() as usize / 16 * page_bytes;
    assert!(used > 600 << 20);
    let taken = resident().saturating_sub(before);
    assert!(taken >= used, "{taken} bytes taken, {used} written");
    assert!(taken <= used / 5 * 6 + metadata, "{taken} bytes taken, {used} written, metadata {metadata}");
    drop(sequence);
    drop(cache);
    let left = resident().saturating_sub(before);
    assert!(left <= 8 << 20, "{left} bytes left behind by a cache that is gone");
}

#[test]
fn i11_a_million_sequences_leave_nothing_behind() {
    let _alone = alone();
    let cache = KvCache::new(&options(0, 4096)).unwrap();
    let serve = |requests: usize| {
        for _ in 0..requests {
            let prompt = cache.sequence(&[]);
            let batch = cache.batch(&[&prompt], NewTokens::Each(40), None, None).unwrap();
            batch.commit(None).unwrap();
            let answer = prompt.fork().unwrap();
            prompt.free();
            let batch = cache.batch(&[&answer], NewTokens::Each(1), None, None).unwrap();
            batch.commit(None).unwrap();
        }
    };
    serve(10_000);
    let before = resident();
    serve(500_000); // two sequences each
    let grown = resident().saturating_sub(before);
    assert!(grown <= 256 << 10, "{grown} bytes more after 10^6 sequences");
    cache.validate().unwrap();
    assert_eq!(cache.pool().num_free(), 4096);
}
