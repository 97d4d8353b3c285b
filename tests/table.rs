//! Page tables through their public interface, one thread: what each operation does to tables,
//! lengths, counts and pages. Content is modelled by stamps that a test copier moves.
#![cfg(not(loom))]

use std::sync::{Arc, Mutex};

use paged_kv::error::Error;
use paged_kv::pool::PagePool;
use paged_kv::table::{CopyPages, NewTokens, Outcome, PageCopy, Sequence, Tables};

/// The memory behind the pages: one stamp per slot.
#[derive(Clone)]
struct Memory {
    stamps: Arc<Mutex<Vec<u64>>>,
    page_size: usize,
}

impl CopyPages for Memory {
    fn copy(&self, copies: &[PageCopy]) {
        let mut stamps = self.stamps.lock().unwrap();
        for copy in copies {
            let (from, to) =
                (copy.source.index() * self.page_size, copy.destination.index() * self.page_size);
            stamps.copy_within(from..from + copy.tokens as usize, to);
        }
    }
}

type Seq = Sequence<4, 2>;

struct World {
    tables: Arc<Tables<4, 2>>,
    memory: Memory,
    next: u64,
}

impl World {
    fn new(num_pages: u32, page_size: u32) -> Self {
        let stamps = Arc::new(Mutex::new(vec![0; (num_pages * page_size) as usize]));
        let memory = Memory { stamps, page_size: page_size as usize };
        let pool = PagePool::new(num_pages, 0).unwrap();
        let tables = Arc::new(Tables::new(pool, page_size, Some(Box::new(memory.clone()))));
        Self { tables, memory, next: 1 }
    }

    /// Computes `n` more tokens; returns their stamps.
    fn decode(&mut self, sequence: &Seq, n: u32) -> Vec<u64> {
        let batch = self.tables.open(&[sequence], NewTokens::Each(n), None).unwrap();
        let item = batch.items().next().unwrap();
        let written: Vec<u64> = (item.computed..item.seq_len())
            .map(|position| {
                let slot = batch.page(0, position).index() * self.memory.page_size
                    + position as usize % self.memory.page_size;
                self.memory.stamps.lock().unwrap()[slot] = self.next;
                self.next += 1;
                self.next - 1
            })
            .collect();
        batch.end(&Outcome::Commit(None));
        written
    }

    fn read(&self, sequence: &Seq) -> Vec<u64> {
        let stamps = self.memory.stamps.lock().unwrap();
        (0..sequence.num_computed_tokens().unwrap())
            .map(|position| {
                let (page, offset) = sequence.locate(u64::from(position)).unwrap();
                stamps[page.index() * self.memory.page_size + offset as usize]
            })
            .collect()
    }

    fn free(&self) -> u64 {
        self.tables.pool().num_free()
    }

    fn rest(self) {
        self.tables.validate().unwrap();
        assert_eq!(self.free(), u64::from(self.tables.pool().num_pages()), "a page leaked");
    }
}

#[test]
fn tokens_stay_where_they_are_put_as_a_sequence_grows() {
    let mut world = World::new(64, 4);
    let sequence = world.tables.sequence(&[]);
    assert!(sequence.is_empty().unwrap());
    let mut expected = Vec::new();
    for n in [1, 3, 4, 9, 40] {
        expected.extend(world.decode(&sequence, n));
        assert!(!sequence.is_empty().unwrap());
        assert_eq!(world.read(&sequence), expected);
        world.tables.validate().unwrap();
    }
    assert_eq!(sequence.block_table().unwrap().len(), 57_usize.div_ceil(4));
    drop(sequence);
    world.rest();
}

#[test]
fn i6_the_first_writer_of_a_shared_tail_copies_it_and_the_last_writes_in_place() {
    let mut world = World::new(16, 4);
    let parent = world.tables.sequence(&[]);
    let shared = world.decode(&parent, 6);
    let child = parent.fork().unwrap();
    assert_eq!(parent.block_table().unwrap(), child.block_table().unwrap());
    let (table, free) = (parent.block_table().unwrap(), world.free());
    let own = world.decode(&child, 1);
    assert_eq!(world.free(), free - 1);
    assert_eq!(child.block_table().unwrap()[0], table[0]);
    assert_ne!(child.block_table().unwrap()[1], table[1], "the shared tail was copied");
    let more = world.decode(&parent, 1);
    assert_eq!(parent.block_table().unwrap(), table, "the parent's tail is private again");
    assert_eq!(world.read(&child), [shared.clone(), own].concat());
    assert_eq!(world.read(&parent), [shared, more].concat());
    drop((parent, child));
    world.rest();
}

#[test]
fn i7_truncate_then_append_under_a_lease_does_not_overwrite_what_the_lease_sees() {
    let mut world = World::new(16, 4);
    let sequence = world.tables.sequence(&[]);
    let before = world.decode(&sequence, 6);
    let lease = world.tables.open(&[&sequence], NewTokens::Each(0), None).unwrap();
    sequence.truncate(5).unwrap();
    let new = world.decode(&sequence, 2);
    assert_eq!(world.read(&sequence), [&before[..5], &new].concat());
    let seen: Vec<u64> = (0..6)
        .map(|p| {
            let page = lease.page(0, p).index();
            world.memory.stamps.lock().unwrap()[page * 4 + p as usize % 4]
        })
        .collect();
    assert_eq!(seen, before);
    drop(lease);
    drop(sequence);
    world.rest();
}

#[test]
fn truncate_then_append_without_a_lease_writes_in_place() {
    let mut world = World::new(16, 4);
    let sequence = world.tables.sequence(&[]);
    world.decode(&sequence, 6);
    let table = sequence.block_table().unwrap();
    sequence.truncate(5).unwrap();
    world.decode(&sequence, 2);
    assert_eq!(sequence.block_table().unwrap(), table);
    drop(sequence);
    world.rest();
}

#[test]
fn i12_closing_a_batch_restores_lengths_tables_and_pages() {
    let mut world = World::new(16, 4);
    let parent = world.tables.sequence(&[]);
    world.decode(&parent, 6);
    let child = parent.fork().unwrap();
    child.append(1).unwrap();
    let state = |s: &Seq| (s.len().unwrap(), s.num_computed_tokens().unwrap(), s.block_table().unwrap());
    let before = (state(&parent), state(&child), world.free());
    let batch = world.tables.open(&[&parent, &child], NewTokens::Each(9), None).unwrap();
    assert_eq!(parent.len().unwrap(), 15);
    assert!(batch.copies().is_empty(), "append copied the tail");
    batch.end(&Outcome::Close);
    assert_eq!((state(&parent), state(&child), world.free()), before);
    world.tables.validate().unwrap();
    drop(batch);
    drop((parent, child));
    world.rest();
}

#[test]
fn i12_a_batch_that_does_not_fit_names_the_first_sequence_and_changes_nothing() {
    let mut world = World::new(8, 4);
    let sequences: Vec<Seq> = (0..3).map(|_| world.tables.sequence(&[])).collect();
    for sequence in &sequences {
        world.decode(sequence, 8);
    }
    let refs: Vec<&Seq> = sequences.iter().collect();
    match world.tables.open(&refs, NewTokens::Counts(&[4, 4, 4]), None).map(drop) {
        Err(Error::OutOfPages { requested: 3, free: 2, evictable: 0, deferred: 0, index: Some(2) }) => {}
        other => panic!("{other:?}"),
    }
    match world.tables.open(&refs, NewTokens::Counts(&[4, 30, 4]), None).map(drop) {
        Err(Error::NeverFits { requested: 10, total: 8, index: Some(1) }) => {}
        other => panic!("{other:?}"),
    }
    assert_eq!(world.free(), 2);
    assert!(sequences.iter().all(|s| s.len().unwrap() == 8));
    drop(refs);
    drop(sequences);
    world.rest();
}

#[test]
fn i9_free_during_an_open_batch_defers_the_pages_to_its_end() {
    let mut world = World::new(8, 4);
    let sequence = world.tables.sequence(&[]);
    world.decode(&sequence, 8);
    let batch = world.tables.open(&[&sequence], NewTokens::Each(1), None).unwrap();
    sequence.free();
    sequence.free();
    assert!(matches!(sequence.len(), Err(Error::SequenceFreed { .. })));
    assert_eq!((world.free(), world.tables.deferred_pages()), (5, 3));
    drop(sequence);
    batch.end(&Outcome::Commit(None));
    drop(batch);
    world.rest();
}

#[test]
fn i10_of_two_writers_one_wins_and_forks_go_on() {
    let mut world = World::new(8, 4);
    let sequence = world.tables.sequence(&[]);
    world.decode(&sequence, 3);
    let batch = world.tables.open(&[&sequence], NewTokens::Each(1), None).unwrap();
    for refused in [sequence.append(1), sequence.truncate(0), sequence.commit(None)] {
        assert!(matches!(refused, Err(Error::SequenceBusy { index: None, .. })), "{refused:?}");
    }
    let second = world.tables.open(&[&sequence], NewTokens::Each(1), None).map(drop);
    assert!(matches!(second, Err(Error::SequenceBusy { index: Some(0), .. })), "{second:?}");
    let child = sequence.fork().unwrap();
    assert_eq!(child.len().unwrap(), 3);
    batch.end(&Outcome::Close);
    let duplicate = world.tables.open(&[&child, &sequence, &child], NewTokens::Each(1), None).map(drop);
    assert!(matches!(duplicate, Err(Error::Value(_))), "{duplicate:?}");
    sequence.append(1).unwrap();
    child.append(1).unwrap();
    drop(batch);
    drop((sequence, child));
    world.rest();
}

#[test]
fn rejected_tokens_go_and_only_they() {
    let mut world = World::new(32, 4);
    let (a, b) = (world.tables.sequence(&[]), world.tables.sequence(&[]));
    world.decode(&a, 3);
    let batch = world.tables.open(&[&a, &b], NewTokens::Counts(&[10, 5]), None).unwrap();
    assert!(matches!(batch.check_keep(&[11, 5]), Err(Error::Value(_))));
    batch.end(&Outcome::Commit(Some(vec![2, 0])));
    assert_eq!((a.len().unwrap(), a.num_computed_tokens().unwrap()), (5, 5));
    assert_eq!((b.len().unwrap(), b.block_table().unwrap().len()), (0, 0));
    assert_eq!(world.free(), 30);
    drop(batch);
    drop((a, b));
    world.rest();
}

#[test]
fn ids_given_ahead_are_taken_in_order_and_contradictions_refused() {
    let world = World::new(32, 4);
    let sequence = world.tables.sequence(&[1, 2, 3, 4, 5]);
    assert_eq!(sequence.len().unwrap(), 0);
    let open = |n, ids: Option<&[u32]>| world.tables.open(&[&sequence], NewTokens::Each(n), ids);
    assert!(matches!(open(2, Some(&[1, 9])).map(drop), Err(Error::Value(_))));
    assert!(matches!(open(2, Some(&[1])).map(drop), Err(Error::Value(_))));
    open(3, Some(&[1, 2, 3])).unwrap().end(&Outcome::Commit(Some(vec![2])));
    assert_eq!(sequence.pending_ids().unwrap(), [3, 4, 5], "the prompt stays");
    assert!(matches!(sequence.extend(&[7]), Err(Error::Value(_))));
    sequence.extend(&[3, 4]).unwrap();
    open(2, None).unwrap().end(&Outcome::Close);
    assert_eq!((sequence.len().unwrap(), sequence.pending_ids().unwrap()), (4, vec![3, 4, 5]));
    sequence.truncate(3).unwrap();
    assert_eq!(sequence.pending_ids().unwrap(), [3]);
    drop(sequence);
    world.rest();
}
