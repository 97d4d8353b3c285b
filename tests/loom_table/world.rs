//! What the models of the page tables share: small tables over a pool of few pages, and the memory
//! behind the pages, which loom watches.
//!
//! Each slot of a page is a cell of loom's that holds a stamp. Loom fails a model in which a slot
//! is written while someone may still read it, or read without being ordered after its write: so
//! reading a sequence under a lease checks the stamps and the orderings at once.

#![expect(unsafe_code, reason = "loom's cells give raw pointers and check each access")]

use std::cell::Cell;
use std::sync::Arc as StdArc;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use paged_kv::error::{Error, Result};
use paged_kv::pool::PagePool;
use paged_kv::sync::set_thread_number;
use paged_kv::table::{self, CopyPages, NewTokens, Outcome, PageCopy, TableBatch};

/// Two pages to a leaf, two shards of credits.
pub(crate) type Tables = table::Tables<2, 2>;
pub(crate) type Sequence = table::Sequence<2, 2>;
pub(crate) type Batch = TableBatch<2, 2>;

thread_local! {
    /// Whether a spawned thread begins at once. All threads of a model are one thread of the system.
    static SPAWNED_FIRST: Cell<bool> = const { Cell::new(false) };
}

/// Explores `f` with at most `preemptions` involuntary switches in an execution. The environment
/// variable `LOOM_MAX_PREEMPTIONS` takes the place of the bound.
///
/// Loom compares an access with the last one to the same word only, so a load may hide another
/// thread's load before it from the store behind it (`sync::Preload` has more). What it misses
/// beginning with one thread it finds beginning with the other: each model is explored both ways.
pub(crate) fn model(preemptions: usize, f: impl Fn() + Copy + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(preemptions));
    builder.max_branches = 10_000;
    for spawned_first in [false, true] {
        SPAWNED_FIRST.set(spawned_first);
        builder.check(f);
    }
}

/// Runs `f` on a second thread, which keeps to the other shard.
pub(crate) fn spawn<R: 'static>(f: impl FnOnce() -> R + 'static) -> thread::JoinHandle<R> {
    let other = thread::spawn(|| {
        set_thread_number(1);
        f()
    });
    if SPAWNED_FIRST.get() {
        thread::yield_now();
    }
    other
}

/// One stamp per slot.
#[derive(Clone)]
struct Memory {
    slots: StdArc<[UnsafeCell<u64>]>,
    page_size: usize,
}

// SAFETY: loom checks that no two threads are in a cell at once.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    fn read(&self, page: usize, offset: usize) -> u64 {
        // SAFETY: loom fails the model if a write is not ordered with this.
        self.slots[page * self.page_size + offset].with(|stamp| unsafe { *stamp })
    }

    fn write(&self, page: usize, offset: usize, stamp: u64) {
        // SAFETY: loom fails the model if another access is not ordered with this.
        self.slots[page * self.page_size + offset].with_mut(|slot| unsafe { *slot = stamp });
    }
}

impl CopyPages for Memory {
    fn copy(&self, copies: &[PageCopy]) {
        for copy in copies {
            for offset in 0..copy.tokens as usize {
                self.write(copy.destination.index(), offset, self.read(copy.source.index(), offset));
            }
        }
    }
}

/// Tables and the memory behind their pages.
#[derive(Clone)]
pub(crate) struct World {
    pub(crate) tables: StdArc<Tables>,
    memory: Memory,
    /// The tables leave copies to whoever opens a batch.
    on_device: bool,
}

impl World {
    /// At most four pages, all free.
    pub(crate) fn new(num_pages: u32, page_size: u32) -> Self {
        assert!(num_pages <= 4, "few pages, so that loom comes to an end");
        let slots = (0..num_pages * page_size).map(|_| UnsafeCell::new(0)).collect();
        let memory = Memory { slots, page_size: page_size as usize };
        let pool = PagePool::new(num_pages, 0).expect("a pool has pages");
        let tables = StdArc::new(Tables::new(pool, page_size, Some(Box::new(memory.clone()))));
        Self { tables, memory, on_device: false }
    }

    /// The same with tables whose batches have leases that outlive them.
    pub(crate) fn on_device(num_pages: u32, page_size: u32) -> Self {
        let pool = PagePool::new(num_pages, 0).expect("a pool has pages");
        let tables = StdArc::new(Tables::with_leases(pool, page_size));
        Self { tables, on_device: true, ..Self::new(num_pages, page_size) }
    }

    /// An empty sequence that threads share.
    pub(crate) fn sequence(&self) -> Arc<Sequence> {
        Arc::new(self.tables.sequence(&[]))
    }

    /// A sequence with the given tokens computed.
    pub(crate) fn computed(&self, stamps: &[u64]) -> Arc<Sequence> {
        let sequence = self.sequence();
        self.decode(&sequence, stamps).expect("enough pages at the start");
        sequence
    }

    /// Opens a batch that computes `n` tokens of each sequence; 0 only reads.
    pub(crate) fn open(&self, sequences: &[&Sequence], n: u32) -> Result<Batch> {
        self.tables.open(sequences, NewTokens::Each(n), None)
    }

    /// Computes one more token per stamp.
    pub(crate) fn decode(&self, sequence: &Sequence, stamps: &[u64]) -> Result<()> {
        let batch = self.open(&[sequence], stamps.len() as u32)?;
        if self.on_device {
            self.memory.copy(batch.copies());
        }
        self.write(&batch, 0, stamps);
        assert!(batch.end(&Outcome::Commit(None)), "nobody else ends this batch");
        Ok(())
    }

    /// Writes the new tokens of item `i`.
    pub(crate) fn write(&self, batch: &Batch, i: usize, stamps: &[u64]) {
        let item = batch.items().nth(i).expect("an item of the batch");
        assert_eq!(item.new_tokens as usize, stamps.len());
        for (position, &stamp) in (item.computed..).zip(stamps) {
            let offset = position as usize % self.memory.page_size;
            self.memory.write(batch.page(i, position).index(), offset, stamp);
        }
    }

    /// The computed tokens of item `i`.
    pub(crate) fn read(&self, batch: &Batch, i: usize) -> Vec<u64> {
        let item = batch.items().nth(i).expect("an item of the batch");
        let mut row = vec![-1; item.computed.div_ceil(self.tables.page_size()) as usize];
        batch.copy_row(i, &mut row);
        (0..item.computed as usize)
            .map(|position| (row[position / self.memory.page_size], position % self.memory.page_size))
            .map(|(page, offset)| self.memory.read(usize::try_from(page).expect("a page"), offset))
            .collect()
    }

    /// The new tokens of item `i`, read back.
    pub(crate) fn written(&self, batch: &Batch, i: usize) -> Vec<u64> {
        let item = batch.items().nth(i).expect("an item of the batch");
        let offset = |position: u32| position as usize % self.memory.page_size;
        let read = |position| self.memory.read(batch.page(i, position).index(), offset(position));
        (item.computed..item.seq_len()).map(read).collect()
    }

    /// What a lease on one sequence shows; `None` if it was freed.
    pub(crate) fn view(&self, sequence: &Sequence) -> Option<Vec<u64>> {
        match self.open(&[sequence], 0) {
            Ok(lease) => Some(self.read(&lease, 0)),
            Err(Error::SequenceFreed { .. }) => None,
            Err(other) => panic!("a reader got {other}"),
        }
    }

    /// Checks every count; `free` pages are free.
    pub(crate) fn at_rest(&self, free: u64) {
        self.tables.validate().expect("valid at rest");
        assert_eq!(self.tables.pool().num_free(), free, "free pages at rest");
    }

    /// Checks that nothing is held once all sequences and batches are gone.
    pub(crate) fn ends(self) {
        self.at_rest(u64::from(self.tables.pool().num_pages()));
        let stats = self.tables.stats();
        assert_eq!((stats.sequences, stats.held, stats.deferred), (0, 0, 0), "held after the end");
    }
}

/// Whether a change was refused because another one was under way or the sequence was freed;
/// other errors end the model.
pub(crate) fn went_through<T>(result: Result<T>) -> bool {
    match result {
        Ok(_) => true,
        Err(Error::SequenceBusy { .. } | Error::SequenceFreed { .. }) => false,
        Err(other) => panic!("{other}"),
    }
}
