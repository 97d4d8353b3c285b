//! The page pool through its public face. Names carry the invariant that a test holds.

#![cfg(not(loom))]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use paged_kv::error::Error;
use paged_kv::ids::{PageHandle, PageId};
use paged_kv::pool::{BLOCK_ITEMS, MAX_COUNT, PagePool, Shortage};

fn pool(num_pages: u32) -> PagePool {
    PagePool::new(num_pages, 0).expect("a small pool")
}

fn take(pool: &PagePool, n: usize) -> Vec<u32> {
    let mut out = Vec::new();
    pool.take(n, &mut out).expect("enough pages");
    out.into_iter().map(|page| page.0).collect()
}

#[test]
fn i1_a_new_pool_is_all_free_and_valid() {
    for num_pages in [1, 2, 63, 64, 65, 4095, 4096, 4097, 300_000] {
        for first_page in [0, 1, 64, 70] {
            let pool = PagePool::<16>::new(num_pages, first_page).expect("a small pool");
            assert_eq!(pool.num_free(), u64::from(num_pages));
            pool.validate().expect("a new pool is valid");
        }
    }
}

#[test]
fn i3_everything_can_be_taken_and_nothing_more() {
    for num_pages in [1, 2, 5, 64, 1000, 5000, 70_000] {
        for step in [1, 3, 64, 100] {
            let pool = pool(num_pages);
            let mut seen = BTreeSet::new();
            let mut left = num_pages as usize;
            while left > 0 {
                let n = step.min(left);
                for page in take(&pool, n) {
                    assert!(seen.insert(page), "page {page} was handed out twice");
                }
                left -= n;
            }
            assert_eq!(pool.take(1, &mut Vec::new()), Err(Shortage { available: 0 }));
            assert_eq!(seen.len(), num_pages as usize);
            pool.validate().expect("valid when empty");
            pool.release_pages(seen.into_iter().map(PageId));
            assert_eq!(pool.num_free(), u64::from(num_pages));
            pool.validate().expect("valid when full again");
        }
    }
}

#[test]
fn i3_one_page_is_the_lowest_and_many_are_the_lowest_run() {
    let pool = pool(1000);
    assert_eq!(take(&pool, 10), (0..10).collect::<Vec<_>>());
    pool.release_pages([2, 5, 6, 8].map(PageId));
    assert_eq!(take(&pool, 2), [5, 6]);
    assert_eq!(take(&pool, 1), [2]);
    assert_eq!(take(&pool, 2), [10, 11]);
    assert_eq!(take(&pool, 150), (12..162).collect::<Vec<_>>());
    assert_eq!(take(&pool, 1), [8]);
    assert_eq!(take(&pool, 838), (162..1000).collect::<Vec<_>>());
    pool.release_pages([7, 100, 300].map(PageId));
    assert_eq!(take(&pool, 3), [7, 100, 300], "no run: the lowest pages");
    pool.validate().expect("valid");
}

#[test]
fn a_null_page_is_never_handed_out_nor_counted() {
    let pool = PagePool::<16>::new(100, 1).expect("a small pool");
    let handles = pool.alloc(100).expect("all pages");
    assert_eq!(handles[0].page(), PageId(1));
    assert_eq!(handles[99].page(), PageId(100));
    let null = PageHandle::new(PageId(0), handles[0].generation());
    assert_eq!(
        pool.release(&[null]),
        Err(Error::InvalidPage { page: 0, num_pages: 100, reason: "reserved" })
    );
    pool.validate().expect("valid");
}

#[test]
fn i5_stale_foreign_and_impossible_handles_are_refused_and_change_nothing() {
    let (pool, other) = (pool(10), pool(20));
    let held = pool.alloc(4).expect("four pages");
    let foreign = other.alloc(12).expect("twelve pages");
    let stale = pool.alloc(1).expect("one page");
    pool.release(&stale).expect("it was held");
    let reused = pool.alloc(1).expect("one page");
    assert_eq!(reused[0].page(), stale[0].page());
    let before = pool.fingerprint();
    let refused = |bad: PageHandle| {
        for list in [&[bad][..], &[held[0], bad], &[held[3], held[1], bad, held[2]]] {
            pool.retain(list).expect_err("retain must refuse it");
            pool.release(list).expect_err("release must refuse it");
            assert_eq!(pool.fingerprint(), before, "nothing may change");
        }
        pool.ref_count_of(bad).expect_err("it has no count here")
    };
    assert!(matches!(refused(stale[0]), Error::RefCount { ref_count: 1, .. }));
    assert!(matches!(refused(foreign[0]), Error::RefCount { page: 0, .. }));
    assert!(matches!(refused(foreign[11]), Error::InvalidPage { page: 11, num_pages: 10, .. }));
    assert!(matches!(refused(PageHandle(u64::MAX)), Error::InvalidPage { .. }));
    pool.release(&[held[1], held[1]]).expect_err("listed twice, held once");
    assert_eq!(pool.fingerprint(), before);
    pool.retain(&[held[2]]).expect("held");
    let before = pool.fingerprint();
    pool.release(&[held[2]; 3]).expect_err("listed three times, held twice");
    assert_eq!(pool.fingerprint(), before);
    pool.retain(&[held[1], held[1]]).expect("listed twice");
    assert_eq!(pool.ref_count_of(held[1]), Ok(3));
    pool.release(&[held[1], held[0], held[1], held[1]]).expect("held three times");
    pool.release(&held[..2]).expect_err("released already");
    pool.validate().expect("valid");
}

#[test]
fn i2_counts_stop_at_their_maximum_and_leave_headroom_to_tables() {
    let pool = pool(1);
    let handle = pool.alloc(1).expect("one page");
    let limit = MAX_COUNT - (1 << 20);
    let many = vec![handle[0]; 1 << 16];
    for _ in 0..limit >> 16 {
        pool.retain(&many).expect("below the limit");
    }
    let before = pool.fingerprint();
    pool.retain(&many).expect_err("beyond the limit of handles");
    assert_eq!(pool.ref_count_of(handle[0]), Ok((limit >> 16 << 16) + 1));
    assert_eq!(pool.fingerprint(), before);
    while pool.retain_page(handle[0].page()).is_ok() {}
    assert_eq!(pool.ref_count(handle[0].page()), MAX_COUNT);
    pool.validate().expect("valid");
}

#[test]
fn errors_say_how_many() {
    let pool = pool(5);
    assert_eq!(pool.alloc(6), Err(Error::NeverFits { requested: 6, total: 5, index: None }));
    let held = pool.alloc(3).expect("three pages");
    let error = pool.alloc(3).expect_err("two are left");
    assert_eq!(error, Error::OutOfPages { requested: 3, free: 2, evictable: 0, deferred: 0, index: None });
    assert_eq!(pool.alloc(0), Ok(vec![]));
    assert!(PagePool::<16>::new(0, 0).is_err());
    assert!(PagePool::<16>::new(u32::MAX, 1).is_err());
    pool.release(&held).expect("held");
    pool.release(&[]).expect("nothing");
}

#[test]
fn i3_two_threads_never_receive_the_same_page() {
    const PAGES: u32 = 300;
    let pool = pool(PAGES);
    let owners: Vec<AtomicBool> = (0..PAGES).map(|_| AtomicBool::new(false)).collect();
    std::thread::scope(|scope| {
        for thread in 0..4_usize {
            let (pool, owners) = (&pool, &owners);
            scope.spawn(move || {
                let mut held: Vec<PageId> = Vec::new();
                let mut random = thread as u64 + 1;
                for _ in 0..20_000 {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let n = (random >> 33) as usize % 40;
                    let start = held.len();
                    if start < 75 && pool.take(n, &mut held).is_ok() {
                        for page in &held[start..] {
                            assert!(
                                !owners[page.index()].swap(true, Ordering::AcqRel),
                                "{page:?} has two owners"
                            );
                        }
                    } else {
                        let n = n.min(held.len());
                        held.rotate_left(n);
                        let back = held.split_off(held.len() - n);
                        for page in &back {
                            owners[page.index()].store(false, Ordering::Release);
                        }
                        pool.release_pages(back);
                    }
                }
                for page in &held {
                    owners[page.index()].store(false, Ordering::Release);
                }
                pool.release_pages(held);
            });
        }
    });
    assert_eq!(pool.num_free(), u64::from(PAGES));
    pool.validate().expect("valid at rest");
}

#[test]
fn i4_a_doomed_request_never_makes_a_valid_one_fail() {
    // Two threads hold at most 4 pages each and a third always asks for more than can ever be free:
    // 12 pages suffice for the first two at every instant.
    let pool = pool(12);
    let hold = pool.alloc(1).expect("one page");
    let refused = AtomicU64::new(0);
    let (done, start) = (AtomicBool::new(false), Barrier::new(3));
    std::thread::scope(|scope| {
        let workers = [1_usize, 2].map(|seed| {
            let (pool, start) = (&pool, &start);
            scope.spawn(move || {
                start.wait();
                for round in 0..50_000 {
                    let mut pages = Vec::new();
                    pool.take(1 + (round * seed) % 4, &mut pages).expect("never more than 8 are held");
                    pool.release_pages(pages);
                }
            })
        });
        scope.spawn(|| {
            start.wait();
            while !done.load(Ordering::Acquire) {
                pool.take(12, &mut Vec::new()).expect_err("one page is always held");
                refused.fetch_add(1, Ordering::Relaxed);
            }
        });
        for worker in workers {
            worker.join().expect("no valid request failed");
        }
        done.store(true, Ordering::Release);
    });
    assert!(refused.load(Ordering::Relaxed) > 0, "the doomed thread ran");
    pool.release(&hold).expect("held");
    assert_eq!(pool.num_free(), 12);
    pool.validate().expect("valid at rest");
}

#[test]
fn threads_take_from_regions_of_their_own() {
    let pool = pool(16 * BLOCK_ITEMS);
    let mut blocks = BTreeMap::new();
    // All alive at once, so that their numbers differ.
    let barrier = Barrier::new(4);
    std::thread::scope(|scope| {
        let (pool, barrier) = (&pool, &barrier);
        let threads: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(move || {
                    let pages = take(pool, 8);
                    barrier.wait();
                    pages
                })
            })
            .collect();
        for thread in threads {
            let pages = thread.join().expect("eight pages");
            assert!(pages.windows(2).all(|pair| pair[1] == pair[0] + 1), "adjacent pages");
            *blocks.entry(pages[0] / BLOCK_ITEMS).or_insert(0) += 1;
        }
    });
    assert!(blocks.values().all(|&threads| threads == 1), "{blocks:?}");
}

#[test]
fn i12_of_lists_that_share_references_whole_ones_win_and_nothing_is_lost() {
    const THREADS: usize = 4;
    let pool = pool(64);
    for round in 0..2_000 {
        // One page that each thread holds once, and 32 whose only reference all threads try to drop.
        let common = pool.alloc(1).expect("one page")[0];
        pool.retain(&[common; THREADS - 1]).expect("one for each thread");
        let mut list = pool.alloc(32).expect("32 pages");
        list.insert(round % 33, common);
        let winners = AtomicU64::new(0);
        let barrier = Barrier::new(THREADS);
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    barrier.wait();
                    winners.fetch_add(u64::from(pool.release(&list).is_ok()), Ordering::Relaxed);
                });
            }
        });
        let winners = winners.into_inner();
        assert!(winners <= 1, "the same references were dropped by {winners} lists");
        if winners == 0 {
            // Each refused another's list; all is as it was.
            assert_eq!(pool.num_free(), 31);
            pool.release(&list).expect("nobody dropped it");
        }
        assert_eq!(pool.ref_count_of(common), Ok(THREADS as u32 - 1), "refused lists kept theirs");
        pool.release(&[common; THREADS - 1]).expect("the refused threads' references");
        assert_eq!(pool.num_free(), 64);
    }
    pool.validate().expect("valid at rest");
}
