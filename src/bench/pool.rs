//! Taking pages and giving them back: this pool against the usual free lists.
//!
//! The yardstick is an uncontended pair of compare-exchanges on a word of the thread's own: one to
//! take and one to give, about the least that any lock-free free list does. The pool keeps a
//! generation and a reference count for each page besides; the peers don't.

use std::hint::black_box;

use crossbeam_queue::{ArrayQueue, SegQueue};

use super::Record;
use super::measure::{Case, interleaved};
use super::peers::{Locked, Source, Treiber};
use crate::error::Result;
use crate::ids::PageId;
use crate::pool::PagePool;
use crate::sync::{AtomicU64, CachePadded, Ordering};

const PAGES: u32 = 1 << 16;

/// Pages that one thread takes and gives back in a repetition.
const PAGES_PER_LAP: u64 = 1 << 15;

/// Pages taken and given back at once.
const SIZES: [usize; 2] = [1, 32];

const THREADS: [usize; 2] = [1, 2];

/// One implementation under its name.
pub struct Contender {
    /// Its name in the records.
    pub name: &'static str,
    /// Takes and gives back `n` pages, `rounds` times, on `thread`.
    pub work: Box<dyn Fn(usize, usize, u64) + Sync>,
}

/// This pool, shared and one for each thread, and its peers; the machine's own limit first.
pub fn contenders() -> Result<Vec<Contender>> {
    fn shared(name: &'static str, source: impl Source + 'static) -> Contender {
        Contender { name, work: Box::new(move |_, n, rounds| cycle(&source, n, rounds)) }
    }
    let own: Vec<PagePool> = THREADS.iter().map(|_| PagePool::new(PAGES, 0)).collect::<Result<_>>()?;
    let words: Vec<CachePadded<AtomicU64>> = THREADS.iter().map(|_| CachePadded::default()).collect();
    let (seg, array) = (SegQueue::new(), ArrayQueue::new(PAGES as usize));
    for page in (0..PAGES).map(PageId) {
        seg.push(page);
        // As many places as pages: there is always room.
        let _ = array.push(page);
    }
    Ok(vec![
        Contender {
            name: MACHINE,
            work: Box::new(move |thread, n, rounds| pairs(&words[thread], n as u64 * rounds)),
        },
        shared("paged_kv", PagePool::<16>::new(PAGES, 0)?),
        Contender {
            name: "paged_kv, a pool per thread",
            work: Box::new(move |thread, n, rounds| cycle(&own[thread], n, rounds)),
        },
        shared("Mutex<Vec>", Locked::new(PAGES)),
        shared("Treiber stack", Treiber::new(PAGES)),
        shared("crossbeam SegQueue", seg),
        shared("crossbeam ArrayQueue", array),
    ])
}

/// Name of the yardstick.
pub const MACHINE: &str = "compare-exchange pair";

/// Takes and gives back single pages and batches, with one thread and with two. `value` and `limit`
/// are nanoseconds per page.
pub fn pool(repetitions: usize) -> Result<Vec<Record>> {
    let contenders = contenders()?;
    let mut labels = Vec::new();
    let mut cases = Vec::new();
    for n in SIZES {
        for threads in THREADS {
            for Contender { name, work } in &contenders {
                labels.push((n, threads, *name));
                cases.push(Case {
                    threads,
                    operations: PAGES_PER_LAP,
                    prepare: None,
                    work: Box::new(move |thread, pages| work(thread, n, pages / n as u64)),
                });
            }
        }
    }
    let mut limit = f64::NAN;
    let record = |((n, threads, name), summary): ((usize, usize, &str), super::measure::Summary)| {
        if name == MACHINE {
            // The first of its group.
            limit = summary.nanos;
        }
        Record {
            bench: "pool",
            case: if n == 1 { "take and give one page".into() } else { format!("take and give {n} pages") },
            implementation: name.into(),
            threads,
            value: summary.nanos,
            quartiles: summary.quartiles,
            unit: "ns/page",
            yardstick: MACHINE.to_owned(),
            limit,
            ratio: summary.nanos / limit,
            kept: summary.kept,
            discarded: summary.discarded,
        }
    };
    Ok(labels.into_iter().zip(interleaved(&cases, repetitions)).map(record).collect())
}

/// Takes `n` pages and gives them back, `rounds` times.
fn cycle(source: &impl Source, n: usize, rounds: u64) {
    let mut pages = Vec::with_capacity(n);
    for _ in 0..rounds {
        source.take(n, &mut pages);
        source.give(black_box(&mut pages));
    }
}

/// `count` pairs of compare-exchanges that succeed.
pub fn pairs(word: &AtomicU64, count: u64) {
    let flip = |from, to| word.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed);
    for _ in 0..count {
        let _ = black_box(flip(0, 1));
        let _ = black_box(flip(1, 0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_contender_is_measured_beside_the_limit() {
        let records = pool(1).expect("pools of 65536 pages");
        assert_eq!(records.len(), SIZES.len() * THREADS.len() * 7);
        for record in records {
            assert!(record.value > 0.0 && record.limit > 0.0, "{record:?}");
            assert!((record.ratio - record.value / record.limit).abs() < 1e-9, "{record:?}");
            if record.implementation == MACHINE {
                assert!((record.ratio - 1.0).abs() < 1e-9, "{record:?}");
            }
        }
    }
}
