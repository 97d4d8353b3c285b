//! Single stories that random operations tell too seldom, or that need threads at one place.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use paged_kv::error::Error;
use paged_kv::ids::PageId;
use paged_kv::pool::{MAX_COUNT, PagePool};
use paged_kv::table::{CopyPages, NewTokens, Outcome, PageCopy, Sequence, Tables};

use crate::common::{Stamps, World};

type Seq = Sequence<4, 2>;

/// Everything that one can see of a sequence.
fn state(sequence: &Seq) -> (u32, u32, Vec<i32>) {
    let len = sequence.len().expect("live");
    (len, sequence.num_computed_tokens().expect("live"), sequence.block_table().expect("live"))
}

#[test]
fn i9_free_from_another_thread_during_an_open_batch_waits_for_its_end() {
    for commit in [true, false] {
        let world = World::<4, 2>::new(16, 4);
        let (leaves, stays) = (world.sequence(), world.sequence());
        let before = world.decode(&leaves, 6);
        world.decode(&stays, 2);
        let batch = world.tables.open(&[&leaves, &stays], NewTokens::Each(3), None).unwrap();
        std::thread::scope(|scope| scope.spawn(|| leaves.free()).join()).unwrap();
        assert!(leaves.is_freed() && matches!(leaves.append(1), Err(Error::SequenceFreed { .. })));
        let view = (0..6).map(|p| world.stamps.read(batch.page(0, p), p as usize % 4));
        assert!(view.eq(before), "the batch goes on with what it sees");
        batch.end(&if commit { Outcome::Commit(None) } else { Outcome::Close });
        assert_eq!(stays.len(), Ok(if commit { 5 } else { 2 }), "the others are not concerned");
        assert_eq!(world.free(), if commit { 14 } else { 15 });
        drop((batch, leaves, stays));
        world.rest();
    }
}

#[test]
fn i6_a_child_forked_in_mid_batch_appends_after_its_parent_was_aborted() {
    for freed in [false, true] {
        let world = World::<4, 2>::new(16, 4);
        let parent = world.sequence();
        let prompt = world.decode(&parent, 6);
        let batch = world.tables.open(&[&parent], NewTokens::Each(4), None).unwrap();
        let child = parent.fork().unwrap();
        let write = |position: u32| world.stamps.write(batch.page(0, position), position as usize % 4, 777);
        (6..8).for_each(write);
        let early = world.decode(&child, 1);
        (8..10).for_each(write);
        assert_eq!(world.read(&child), [prompt.clone(), early.clone()].concat());
        if freed {
            parent.free();
        }
        batch.end(&Outcome::Close);
        let late = world.decode(&child, 5);
        assert_eq!(world.read(&child), [prompt.clone(), early, late].concat());
        if !freed {
            assert_eq!(world.read(&parent), prompt);
            assert_eq!(parent.len(), Ok(6));
        }
        drop((batch, parent, child));
        world.rest();
    }
}

#[test]
fn i7_a_lease_reads_the_same_while_its_sequence_is_rewritten_by_another_thread() {
    let world = World::<4, 2>::new(64, 4);
    let sequence = world.sequence();
    let mut content = world.decode(&sequence, 13);
    for round in 0..50 {
        let lease = world.tables.open(&[&sequence], NewTokens::Each(0), None).unwrap();
        let rewriting = AtomicBool::new(true);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for n in (0..13).rev() {
                    sequence.truncate(n).unwrap();
                    content.truncate(n as usize);
                    content.extend(world.decode(&sequence, 13 - n));
                    drop(sequence.fork().unwrap());
                }
                rewriting.store(false, Ordering::Release);
            });
            let read = || -> Vec<u64> {
                (0..13).map(|p| world.stamps.read(lease.page(0, p), p as usize % 4)).collect()
            };
            let seen = read();
            while rewriting.load(Ordering::Acquire) {
                assert_eq!(read(), seen, "round {round}");
            }
            assert_eq!(read(), seen, "round {round}");
        });
        assert_eq!(world.read(&sequence), content);
    }
    drop(sequence);
    world.rest();
}

#[test]
fn i12_of_two_caches_opened_together_a_failure_of_the_second_restores_both() {
    let (first, second) = (World::<4, 2>::new(8, 4), World::<4, 2>::new(2, 4));
    let (a, b) = (first.sequence(), second.sequence());
    first.decode(&a, 3);
    second.decode(&b, 3);
    let fork = a.fork().unwrap();
    let before = (state(&a), state(&b), first.free(), second.free());
    let both = |n| {
        let one = first.tables.open(&[&a], NewTokens::Each(n), None)?;
        Ok::<_, Error>((one, second.tables.open(&[&b], NewTokens::Each(n), None)?))
    };
    assert!(matches!(both(9).map(drop), Err(Error::NeverFits { .. })));
    assert_eq!((state(&a), state(&b), first.free(), second.free()), before);
    // A body that fails restores both as well.
    let body = catch_unwind(AssertUnwindSafe(|| {
        let _open = both(4).unwrap();
        panic!("the model failed");
    }));
    assert!(body.is_err());
    assert_eq!((state(&a), state(&b), first.free(), second.free()), before);
    drop((a, b, fork));
    first.rest();
    second.rest();
}

/// A copier that fails when it is told to.
struct Moody(Arc<Stamps>, Arc<AtomicBool>);

impl CopyPages for Moody {
    fn copy(&self, copies: &[PageCopy]) {
        assert!(!self.1.load(Ordering::Relaxed), "the device is gone");
        self.0.copy(copies);
    }
}

#[test]
fn i12_a_copier_that_panics_leaves_nothing_behind() {
    let (stamps, broken) = (Stamps::new(16, 4), Arc::new(AtomicBool::new(true)));
    let copier = Box::new(Moody(stamps, Arc::clone(&broken)));
    let tables: Arc<Tables<4, 2>> = Arc::new(Tables::new(PagePool::new(16, 0).unwrap(), 4, Some(copier)));
    let (parent, other) = (tables.sequence(&[]), tables.sequence(&[]));
    parent.append(6).unwrap();
    parent.commit(None).unwrap();
    let child = parent.fork().unwrap();
    let before = (state(&parent), state(&child), tables.pool().num_free());
    let open = || tables.open(&[&other, &child], NewTokens::Each(7), None);
    assert!(catch_unwind(AssertUnwindSafe(|| child.append(9))).is_err());
    assert!(catch_unwind(AssertUnwindSafe(|| open().map(drop))).is_err());
    assert_eq!((state(&parent), state(&child), tables.pool().num_free()), before);
    assert_eq!((other.len(), tables.copied_pages()), (Ok(0), 0));
    tables.validate().unwrap();
    broken.store(false, Ordering::Relaxed);
    open().unwrap().end(&Outcome::Commit(None));
    child.append(9).unwrap();
    assert_eq!((child.len(), tables.copied_pages()), (Ok(22), 1));
    drop((parent, other, child));
    assert_eq!(tables.pool().num_free(), 16);
}

#[test]
fn i6_without_a_copier_tokens_in_a_shared_page_are_committed_by_a_batch_or_not_at_all() {
    let tables: Arc<Tables<4, 2>> = Arc::new(Tables::new(PagePool::new(16, 0).unwrap(), 4, None));
    let parent = tables.sequence(&[]);
    parent.append(6).unwrap();
    parent.commit(None).unwrap();
    let child = parent.fork().unwrap();
    for sequence in [&parent, &child] {
        sequence.append(1).unwrap();
        assert!(matches!(sequence.commit(None), Err(Error::Value(_))));
        assert_eq!(state(sequence).1, 6);
    }
    let batch = tables.open(&[&child], NewTokens::Reserved, None).unwrap();
    assert_eq!(batch.copies().len(), 1);
    batch.end(&Outcome::Commit(None));
    parent.commit(None).unwrap();
    assert_ne!(state(&parent).2[1], state(&child).2[1], "each has a tail of its own");
    drop((batch, parent, child));
    tables.validate().unwrap();
}

#[test]
fn i5_a_count_that_would_overflow_is_refused_and_nothing_changes() {
    let world = World::<4, 2>::new(16, 4);
    let parent = world.sequence();
    world.decode(&parent, 11);
    let (child, third) = (parent.fork().unwrap(), parent.fork().unwrap());
    let page = PageId(state(&parent).2[1] as u32);
    let pool = world.tables.pool();
    let lifted = MAX_COUNT - pool.ref_count(page);
    (0..lifted).for_each(|_| pool.retain_page(page).unwrap());
    let counts = || state(&parent).2.into_iter().map(|page| pool.ref_count(PageId(page as u32))).collect();
    let before: Vec<u32> = counts();
    assert_eq!(before, [3, MAX_COUNT, 3]);
    let is_refused = |error: Option<Error>| {
        assert!(matches!(error, Some(Error::RefCount { ref_count: MAX_COUNT, .. })), "{error:?}");
        assert_eq!((counts(), world.free()), (before.clone(), 13));
        for sequence in [&parent, &child, &third] {
            assert_eq!((sequence.len(), sequence.num_computed_tokens()), (Ok(11), Ok(11)));
        }
        world.tables.validate().unwrap();
    };
    is_refused(parent.fork().err());
    is_refused(parent.truncate(10).err());
    is_refused(child.append(1).err());
    is_refused(world.tables.open(&[&child, &third], NewTokens::Each(2), None).err());
    is_refused(world.tables.reorder(&[&child, &third], &[0, 1, 1]).err());
    pool.release_pages((0..lifted).map(|_| page));
    world.decode(&child, 2);
    drop((parent, child, third));
    world.rest();
}

#[test]
fn i12_the_later_of_two_copies_failing_takes_the_earlier_back() {
    let world = World::<4, 2>::new(32, 4);
    let (easy, hard) = (world.sequence(), world.sequence());
    world.decode(&easy, 2);
    world.decode(&hard, 6);
    let forks = [easy.fork().unwrap(), hard.fork().unwrap()];
    let page = PageId(state(&hard).2[0] as u32);
    let pool = world.tables.pool();
    let lifted = MAX_COUNT - pool.ref_count(page);
    (0..lifted).for_each(|_| pool.retain_page(page).unwrap());
    let before = (state(&easy), state(&hard), world.free());
    let opened = world.tables.open(&[&easy, &hard], NewTokens::Each(9), None).map(drop);
    assert!(matches!(opened, Err(Error::RefCount { .. })), "{opened:?}");
    assert_eq!((state(&easy), state(&hard), world.free()), before);
    pool.release_pages((0..lifted).map(|_| page));
    drop((easy, hard, forks));
    world.rest();
}

#[test]
fn i8_a_lease_touches_no_page_and_costs_the_same_for_any_length() {
    let world = World::<64, 16>::new(1 << 16, 1);
    let (short, long) = (world.sequence(), world.sequence());
    for (sequence, n) in [(&short, 8), (&long, 60_000)] {
        sequence.append(n).unwrap();
        sequence.commit(None).unwrap();
    }
    let counts =
        || long.block_table().unwrap().into_iter().map(|p| world.tables.pool().ref_count(PageId(p as u32)));
    let lease = world.tables.open(&[&long], NewTokens::Each(0), None).unwrap();
    assert!(counts().all(|count| count == 1));
    drop(lease);
    let cost = |sequence| {
        let once = |_| {
            let start = Instant::now();
            (0..32).for_each(|_| drop(world.tables.open(&[sequence], NewTokens::Each(0), None).unwrap()));
            start.elapsed()
        };
        (0..200).map(once).min().unwrap_or(Duration::MAX)
    };
    let (few, many) = (cost(&short), cost(&long));
    assert!(many <= few * 3, "{few:?} for 8 pages, {many:?} for 60 000");
    drop((short, long));
    world.rest();
}

#[test]
fn i9_a_lease_defers_its_own_tokens_and_nothing_else() {
    let world = World::<4, 2>::new(64, 4);
    let (leased, other) = (world.sequence(), world.sequence());
    world.decode(&leased, 10);
    world.decode(&other, 10);
    leased.append(40).unwrap();
    let lease = world.tables.open(&[&leased], NewTokens::Each(0), None).unwrap();
    assert_eq!(world.free(), 64 - 13 - 3);
    other.free();
    assert_eq!((world.free(), world.tables.deferred_pages()), (64 - 13, 0), "not named by the lease");
    leased.truncate(0).unwrap();
    assert_eq!((world.free(), world.tables.deferred_pages()), (64 - 3, 3), "reserved slots nobody saw");
    drop(lease);
    assert_eq!(world.free(), 64);
    drop((leased, other));
    world.rest();
}

#[test]
fn i9_reserved_slots_of_a_freed_sequence_are_not_deferred() {
    let world = World::<4, 2>::new(64, 4);
    let sequence = world.sequence();
    world.decode(&sequence, 10);
    sequence.append(40).unwrap();
    let lease = world.tables.open(&[&sequence], NewTokens::Each(0), None).unwrap();
    sequence.free();
    assert_eq!((world.free(), world.tables.deferred_pages()), (61, 3));
    drop((lease, sequence));
    world.rest();
}

#[test]
fn i10_of_batches_that_overlap_exactly_one_gets_through() {
    const ROUNDS: u32 = 300;
    let world = World::<4, 2>::new(64, 4);
    let sequences: Vec<Seq> = (0..3).map(|_| world.sequence()).collect();
    let (barrier, opened) = (Barrier::new(3), AtomicU32::new(0));
    let orders = [[0, 1, 2], [2, 1, 0], [1, 2, 0]];
    std::thread::scope(|scope| {
        for order in orders {
            let (world, barrier, opened, sequences) = (&world, &barrier, &opened, &sequences);
            scope.spawn(move || {
                let all: Vec<&Seq> = order.iter().map(|&i| &sequences[i]).collect();
                for _ in 0..ROUNDS {
                    barrier.wait();
                    let batch = world.tables.open(&all, NewTokens::Each(1), None);
                    match &batch {
                        Ok(_) => drop(opened.fetch_add(1, Ordering::Relaxed)),
                        Err(Error::SequenceBusy { index: Some(_), .. }) => {}
                        Err(error) => panic!("{error}"),
                    }
                    barrier.wait();
                    drop(batch);
                }
            });
        }
    });
    assert_eq!(opened.into_inner(), ROUNDS);
    assert!(sequences.iter().all(|sequence| sequence.len() == Ok(0)));
    drop(sequences);
    world.rest();
}

#[test]
fn i10_every_append_of_many_threads_counts_once_or_says_busy() {
    let world = World::<4, 2>::new(2048, 4);
    let sequence = world.sequence();
    let append = || (0..1000).filter(|_| sequence.append(1).is_ok()).count();
    let done: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..3).map(|_| scope.spawn(append)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert_eq!(sequence.len(), Ok(done as u32));
    drop(sequence);
    world.rest();
}

#[test]
fn i4_doomed_batches_never_make_one_fail_that_fits() {
    let world = World::<4, 2>::new(64, 1);
    let (big, small, doomed) = (world.sequence(), world.sequence(), world.sequence());
    world.decode(&big, 32);
    std::thread::scope(|scope| {
        let work = scope.spawn(|| {
            for _ in 0..3000 {
                small.append(30).expect("32 pages are free but for what a doomed request takes");
                small.truncate(0).unwrap();
            }
        });
        while !work.is_finished() {
            let refused = world.tables.open(&[&doomed], NewTokens::Each(33), None).map(drop);
            assert!(matches!(refused, Err(Error::OutOfPages { .. })), "{refused:?}");
        }
        work.join().unwrap();
    });
    drop((big, small, doomed));
    world.rest();
}

#[test]
fn i12_a_second_free_and_a_second_end_do_nothing() {
    let world = World::<4, 2>::new(16, 4);
    let sequence = world.sequence();
    world.decode(&sequence, 5);
    let batch = world.tables.open(&[&sequence], NewTokens::Each(5), None).unwrap();
    assert!(batch.end(&Outcome::Commit(None)) && batch.is_ended());
    assert!(!batch.end(&Outcome::Close) && !batch.end(&Outcome::Commit(None)));
    assert_eq!(state(&sequence).0, 10);
    sequence.free();
    let next = world.sequence();
    let content = world.decode(&next, 14);
    (0..3).for_each(|_| sequence.free());
    drop(sequence);
    drop(batch);
    assert_eq!(world.read(&next), content);
    assert_eq!(world.free(), 12);
    drop(next);
    world.rest();
}
