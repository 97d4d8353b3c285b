//! The protocols of the page pool under every interleaving that loom finds within the preemption
//! bound stated with each model. `RUSTFLAGS="--cfg loom" cargo test --profile loom --test loom_pool`
//!
//! No loop of the pool yields, so an execution in which a thread waited for a stopped one would
//! exceed loom's limit of branches and fail: passing also shows that nobody waits.
//!
//! Loom finds a race by comparing an access with the last one to the same word. A load, followed by
//! the other thread's load and compare-exchange, is not seen as a race with the latter, so an
//! interleaving may be missed that the other order of starting shows. Hence [`race`] plays each
//! model both ways.

#![cfg(loom)]

use loom::sync::Arc;
use loom::thread;

use paged_kv::error::Error;
use paged_kv::ids::{PageHandle, PageId};
use paged_kv::pool::{Bitmap, PagePool, Shortage};
use paged_kv::sync::set_thread_number;

/// Four pages and two shards: one credit in each shard and two in the middle at first.
type Pool = PagePool<2>;

fn model(preemptions: usize, f: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    // `LOOM_MAX_PREEMPTIONS` overrides it.
    builder.preemption_bound.get_or_insert(preemptions);
    builder.check(f);
}

/// Runs `a` and `b` at the same time on what `prepare` makes, then `check` on what they return; once
/// with each of them on the thread that starts the other.
fn race<S, A, B>(
    preemptions: usize,
    prepare: impl Fn() -> S + Copy + Send + Sync + 'static,
    a: impl Fn(&S) -> A + Copy + Send + Sync + 'static,
    b: impl Fn(&S) -> B + Copy + Send + Sync + 'static,
    check: impl Fn(&S, A, B) + Copy + Send + Sync + 'static,
) where
    S: 'static,
    A: 'static,
    B: 'static,
{
    fn both<S: 'static, X, Y: 'static>(
        state: &Arc<S>,
        here: impl Fn(&S) -> X,
        there: impl Fn(&S) -> Y + 'static,
    ) -> (X, Y) {
        let other = thread::spawn({
            let state = Arc::clone(state);
            move || there(&state)
        });
        (here(state), other.join().expect("no panic"))
    }
    model(preemptions, move || {
        let state = Arc::new(prepare());
        let (from_a, from_b) = both(&state, a, b);
        check(&state, from_a, from_b);
    });
    model(preemptions, move || {
        let state = Arc::new(prepare());
        let (from_b, from_a) = both(&state, b, a);
        check(&state, from_a, from_b);
    });
}

fn pool() -> Pool {
    Pool::new(4, 0).expect("four pages")
}

fn take(pool: &Pool, home: usize, n: usize) -> Result<Vec<PageId>, Shortage> {
    let mut out = Vec::new();
    pool.take_from(home, n, &mut out).map(|()| out)
}

/// Gives the pages back from thread number `home`.
fn give(pool: &Pool, home: usize, pages: &[PageId]) {
    set_thread_number(home);
    pool.release_pages(pages.iter().copied());
}

fn at_rest(pool: &Pool, free: u64) {
    assert_eq!(pool.num_free(), free);
    pool.validate().expect("valid at rest");
}

/// Leaves one credit in each shard and none in the middle: a request for two must merge both.
fn one_in_each_shard() -> Pool {
    let pool = pool();
    take(&pool, 0, 2).expect("two from the middle");
    pool
}

#[test]
fn i3_two_takers_never_receive_the_same_page() {
    race(
        6,
        pool,
        |pool| take(pool, 0, 1).expect("four pages for two"),
        |pool| take(pool, 1, 1).expect("four pages for two"),
        |pool, a, b| {
            assert_ne!(a, b, "two threads received the same page");
            at_rest(pool, 2);
        },
    );
}

#[test]
fn i3_two_takers_of_runs_share_no_page() {
    race(
        6,
        pool,
        |pool| take(pool, 0, 2).expect("two runs of two"),
        |pool| take(pool, 1, 2).expect("two runs of two"),
        |pool, mut a, b| {
            a.extend(b);
            a.sort_unstable();
            assert_eq!(a, [0, 1, 2, 3].map(PageId), "a page was received twice");
            at_rest(pool, 0);
        },
    );
}

#[test]
fn i4_of_two_requests_that_do_not_fit_together_one_succeeds() {
    race(
        4,
        one_in_each_shard,
        |pool| take(pool, 0, 2).is_ok(),
        |pool| take(pool, 1, 1).is_ok(),
        |pool, two, one| {
            assert!(two != one, "each failure needs an instant at which too few were available");
            at_rest(pool, if two { 0 } else { 1 });
        },
    );
}

#[test]
fn i4_a_doomed_request_makes_no_valid_one_fail() {
    race(
        4,
        || {
            let pool = pool();
            take(&pool, 0, 1).expect("one of four");
            pool
        },
        |pool| take(pool, 0, 3).expect("three were left and nobody else could have them"),
        |pool| take(pool, 1, 4).expect_err("there were never four"),
        |pool, _, shortage| {
            assert!(shortage.available < 4);
            at_rest(pool, 0);
        },
    );
}

#[test]
fn i4_merges_of_the_same_shard_are_helped_to_the_end() {
    race(
        5,
        || {
            let pool = pool();
            take(&pool, 0, 1).expect("the credit of shard 0");
            take(&pool, 0, 1).expect("one from the middle");
            // One credit in shard 1, one in the middle; both threads must merge shard 1.
            pool
        },
        |pool| take(pool, 0, 2).is_ok(),
        |pool| take(pool, 0, 2).is_ok(),
        |pool, a, b| {
            assert!(a != b, "exactly one gets both pages");
            at_rest(pool, 0);
        },
    );
}

/// One credit lies in shard `FROM`; a thread gives one to shard `TO` before it takes that one, so at
/// every instant at least one is there.
fn a_page_moves<const FROM: usize, const TO: usize>() {
    race(
        5,
        || {
            let pool = pool();
            let one = take(&pool, TO, 1).expect("the credit of that shard");
            take(&pool, TO, 2).expect("two from the middle");
            (pool, one)
        },
        |(pool, _)| take(pool, 0, 1).expect("at least one was available all the time"),
        |(pool, one)| {
            give(pool, TO, one);
            take(pool, FROM, 1).expect("one was just given")
        },
        |(pool, _), _, _| at_rest(pool, 0),
    );
}

#[test]
fn i4_a_page_that_moves_to_a_shard_yet_to_be_looked_at_is_seen() {
    a_page_moves::<0, 1>();
}

#[test]
fn i4_a_page_that_moves_to_a_shard_already_looked_at_is_seen() {
    a_page_moves::<1, 0>();
}

#[test]
fn i4_with_a_thread_stopped_in_a_merge_two_others_still_share_what_is_there() {
    model(2, || {
        let pool = Arc::new(one_in_each_shard());
        // Whoever wants two must merge both shards; wherever it stands in that, the two others
        // decide between themselves and it.
        let taker = |home, n| {
            let pool = Arc::clone(&pool);
            thread::spawn(move || take(&pool, home, n).map_or(0, |pages| pages.len()))
        };
        let (two, one) = (taker(0, 2), taker(1, 1));
        let mine = take(&pool, 0, 1).map_or(0, |pages| pages.len());
        let taken = mine + one.join().expect("no panic") + two.join().expect("no panic");
        assert_eq!(taken, 2, "somebody failed although its pages were there");
        at_rest(&pool, 0);
    });
}

#[test]
fn i1_pages_given_back_while_others_take_are_not_lost() {
    race(
        5,
        || {
            let pool = pool();
            let pages = take(&pool, 0, 3).expect("three of four");
            (pool, pages)
        },
        |(pool, _)| take(pool, 0, 2).map_or(0, |pages| pages.len() as u64),
        |(pool, pages)| give(pool, 1, pages),
        |(pool, _), taken, ()| at_rest(pool, 4 - taken),
    );
}

#[test]
fn i1_a_credit_is_given_only_when_its_page_can_be_found() {
    race(
        5,
        || {
            let pool = pool();
            let pages = take(&pool, 0, 4).expect("all four");
            (pool, pages)
        },
        // A credit without a page would make this search for ever.
        |(pool, _)| take(pool, 1, 1).map_or(0, |pages| pages.len() as u64),
        |(pool, pages)| give(pool, 1, &pages[..1]),
        |(pool, _), taken, ()| at_rest(pool, 1 - taken),
    );
}

/// A pool and the handle of one page that is held once.
fn one_handle() -> (Pool, Vec<PageHandle>) {
    let pool = pool();
    let handle = pool.alloc(1).expect("one page");
    (pool, handle)
}

#[test]
fn i2_of_two_releases_of_one_reference_one_is_refused() {
    race(
        6,
        one_handle,
        |(pool, handle)| pool.release(handle).is_ok(),
        |(pool, handle)| pool.release(handle).is_ok(),
        |(pool, _), a, b| {
            assert!(a != b, "one reference, one release");
            at_rest(pool, 4);
        },
    );
}

#[test]
fn i5_a_stale_handle_never_touches_the_next_owner() {
    race(
        5,
        one_handle,
        |(pool, handle)| match pool.retain(handle) {
            Ok(()) => pool.release(handle).expect("we retained it"),
            Err(error) => assert!(matches!(error, Error::RefCount { .. })),
        },
        |(pool, handle)| {
            pool.release(handle).expect("we hold it");
            let next = pool.alloc(1).expect("four pages")[0];
            assert_eq!(pool.ref_count_of(next), Ok(1), "the next owner's count is its own");
            next
        },
        |(pool, _), (), next| {
            assert_eq!(pool.ref_count_of(next), Ok(1), "the next owner's count is its own");
            at_rest(pool, 3);
        },
    );
}

#[test]
fn i12_a_refused_list_is_put_back_whatever_others_do() {
    let release = |(pool, pages): &(Pool, Vec<PageHandle>)| pool.release(pages).is_ok();
    race(
        5,
        || {
            let pool = pool();
            let pages = pool.alloc(2).expect("two pages");
            // Both lists end with the only reference to the second page: one must be refused, though
            // it has a right to its reference to the first.
            pool.retain(&pages[..1]).expect("held");
            (pool, pages)
        },
        release,
        release,
        |(pool, pages), a, b| {
            assert!(a != b, "the second page had one reference");
            assert_eq!(pool.ref_count_of(pages[0]), Ok(1), "the refused list gave nothing back");
            at_rest(pool, 3);
        },
    );
}

/// Two words, so that there is a level above them; only `item` is there.
fn bitmap_with(item: u32) -> Bitmap {
    let bits = Bitmap::new_empty(128);
    bits.give_item(item);
    bits
}

#[test]
fn a_word_that_lags_in_the_tree_hides_nothing() {
    race(
        6,
        // Not in the word that a search looks at first, so that the level above decides.
        || bitmap_with(64),
        |bits| bits.take_lowest(0).expect("item 64 is there, or 65 in its stead"),
        |bits| {
            bits.give_item(65);
            bits.take_lowest(0).expect("one of the two is there")
        },
        |bits, a, b| {
            assert_ne!(a, b);
            assert!(bits.is_empty());
            bits.give_item(70);
            bits.validate().expect("nothing hidden");
            assert_eq!(bits.take_lowest(0), Some(70));
        },
    );
}

#[test]
fn the_tree_heals_itself_when_a_word_is_emptied_and_filled() {
    race(
        6,
        || bitmap_with(64),
        |bits| bits.take_lowest(64).expect("item 64 is there, or 65 in its stead"),
        |bits| bits.give_item(65),
        |bits, _, ()| {
            bits.validate().expect("the word that is left is visible in the tree");
            assert_eq!(bits.count(), 1);
        },
    );
}
