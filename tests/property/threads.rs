//! Many threads on one cache. A thread owns sequences and knows their contents; forks pass to
//! others through channels, with what they contain. Besides, every thread may see any sequence on
//! the board, also one in its owner's open batch: fork it, lease it, claim it for a while, free it.
//! A sequence's log says which contents it may be found with.

use std::sync::mpsc::channel;
use std::sync::{Mutex, PoisonError};

use crate::backend::{Backend, KvMemory, StampMemory};
use crate::setting::setting;
use crate::worker::Worker;

/// Runs `ops` operations over `threads` threads, with some rests in between.
fn hammer<const LEAF: usize, const SHARDS: usize>(
    backend: &impl Backend<LEAF, SHARDS>,
    seed: u64,
    threads: usize,
    ops: u64,
) {
    const RESTS: u64 = 10;
    println!("to bring it back: PAGED_KV_SEED={seed} PAGED_KV_THREADS={threads} PAGED_KV_OPS={ops}");
    let board = Mutex::new(Vec::new());
    let (outboxes, inboxes): (Vec<_>, Vec<_>) = (0..threads).map(|_| channel()).unzip();
    let mut workers: Vec<_> = inboxes
        .into_iter()
        .zip(0_u64..)
        .map(|(inbox, me)| Worker::new(backend, &board, inbox, outboxes.clone(), seed, me))
        .collect();
    for _ in 0..RESTS {
        std::thread::scope(|scope| {
            for worker in &mut workers {
                scope.spawn(|| worker.run(ops / RESTS / threads as u64));
            }
        });
        backend.tables().validate().expect("valid at rest");
        backend.check_sums();
        workers.iter().for_each(Worker::check_all);
    }
    let sum = |kind: usize| workers.iter().map(|worker| worker.outcomes[kind]).sum::<u64>();
    let outcomes = [0, 1, 2, 3].map(sum);
    println!(
        "{outcomes:?} went well, found no pages, busy, freed; {} copies",
        backend.tables().copied_pages()
    );
    assert!(outcomes[0] > ops / 2 && outcomes.iter().all(|&n| n > 0), "too idle or too crowded");
    workers.iter_mut().for_each(Worker::clear);
    board.into_inner().unwrap_or_else(PoisonError::into_inner).clear();
    backend.tables().validate().expect("valid at the end");
    assert_eq!(backend.tables().pool().num_free(), u64::from(backend.tables().pool().num_pages()));
}

/// The settings of a run; a seed from the clock would not come back.
fn settings(default_ops: u64) -> (u64, usize, u64) {
    let threads = setting("PAGED_KV_THREADS", 4) as usize;
    (setting("PAGED_KV_SEED", 1), threads, setting("PAGED_KV_OPS", default_ops))
}

#[test]
fn i1_to_i12_threads_on_tables_agree_with_their_models() {
    let (seed, threads, ops) = settings(150_000);
    for page_size in [1, 3, 4] {
        hammer(&StampMemory::<4, 2>::new(240 / page_size, page_size), seed, threads, ops / 3);
    }
}

#[test]
fn i1_to_i12_threads_on_a_cache_read_the_keys_and_values_they_wrote() {
    let (seed, threads, ops) = settings(150_000);
    hammer(&KvMemory::new(50, 5), seed, threads, ops);
}

#[test]
#[ignore = "takes minutes: make stress"]
fn stress_a_million_operations_agree_with_the_models() {
    let (seed, threads, ops) = settings(1_000_000);
    for (round, page_size) in (0..).zip([1, 3, 4, 16]) {
        hammer(&StampMemory::<4, 2>::new(240 / page_size, page_size), seed + round, threads, ops / 5);
    }
    hammer(&KvMemory::new(50, 5), seed, threads, ops / 5);
}
