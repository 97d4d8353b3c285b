//! The protocols of the page pool under every interleaving that loom finds within the preemption
//! bound stated with each model. `RUSTFLAGS="--cfg loom" cargo test --profile loom --test loom_pool`
//!
//! No loop of the pool yields, so an execution in which a thread waited for a stopped one would
//! exceed loom's limit of branches and fail: passing also shows that nobody waits.

#![cfg(loom)]

use loom::sync::Arc;
use loom::thread;

use paged_kv::error::Error;
use paged_kv::ids::PageId;
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

fn pool() -> Arc<Pool> {
    Arc::new(Pool::new(4, 0).expect("four pages"))
}

fn take(pool: &Pool, home: usize, n: usize) -> Result<Vec<PageId>, Shortage> {
    let mut out = Vec::new();
    pool.take_from(home, n, &mut out).map(|()| out)
}

/// Runs `f` on another thread whose releases go to shard `home`.
fn spawn<R: 'static>(
    pool: &Arc<Pool>,
    home: usize,
    f: impl FnOnce(&Pool) -> R + 'static,
) -> thread::JoinHandle<R> {
    let pool = Arc::clone(pool);
    thread::spawn(move || {
        set_thread_number(home);
        f(&pool)
    })
}

fn at_rest(pool: &Pool, free: u64) {
    assert_eq!(pool.num_free(), free);
    pool.validate().expect("valid at rest");
}

#[test]
fn i3_two_takers_never_receive_the_same_page() {
    model(5, || {
        let pool = pool();
        let other = spawn(&pool, 1, |pool| take(pool, 1, 1).expect("four pages for two"));
        let mine = take(&pool, 0, 1).expect("four pages for two");
        assert_ne!(mine, other.join().expect("no panic"), "two threads received the same page");
        at_rest(&pool, 2);
    });
}

#[test]
fn i3_two_takers_of_runs_share_no_page() {
    model(5, || {
        let pool = pool();
        let other = spawn(&pool, 1, |pool| take(pool, 1, 2).expect("two runs of two"));
        let mut pages = take(&pool, 0, 2).expect("two runs of two");
        pages.extend(other.join().expect("no panic"));
        pages.sort_unstable();
        assert_eq!(pages, [0, 1, 2, 3].map(PageId), "a page was received twice");
        at_rest(&pool, 0);
    });
}

#[test]
fn i4_of_two_requests_that_do_not_fit_together_one_succeeds() {
    model(5, || {
        let pool = pool();
        // Leaves one credit in each shard and none in the middle: a request for two must merge both.
        take(&pool, 0, 2).expect("two from the middle");
        let other = spawn(&pool, 1, |pool| take(pool, 1, 1).is_ok());
        let both = take(&pool, 0, 2).is_ok();
        let one = other.join().expect("no panic");
        assert!(both != one, "each failure needs an instant at which too few were available");
        at_rest(&pool, if both { 0 } else { 1 });
    });
}

#[test]
fn i4_a_doomed_request_makes_no_valid_one_fail() {
    model(5, || {
        let pool = pool();
        take(&pool, 0, 1).expect("one of four");
        let doomed = spawn(&pool, 1, |pool| take(pool, 1, 4));
        take(&pool, 0, 3).expect("three were left and nobody else could have them");
        let shortage = doomed.join().expect("no panic").expect_err("there were never four");
        assert!(shortage.available < 4);
        at_rest(&pool, 0);
    });
}

#[test]
fn i4_merges_of_the_same_shards_are_helped_to_the_end() {
    model(5, || {
        let pool = pool();
        take(&pool, 0, 1).expect("one of four");
        take(&pool, 0, 1).expect("from the middle");
        // One credit in shard 1, one in the middle; both threads must merge shard 1.
        let other = spawn(&pool, 0, |pool| take(pool, 0, 2).is_ok());
        let mine = take(&pool, 0, 2).is_ok();
        assert!(mine != other.join().expect("no panic"), "exactly one gets both pages");
        at_rest(&pool, 0);
    });
}

/// One credit lies in shard `from`; the other thread gives one to shard `to` before it takes that
/// one, so at every instant at least one is there.
fn a_page_moves(from: usize, to: usize) {
    model(5, move || {
        let pool = pool();
        let one = take(&pool, to, 1).expect("the credit of that shard");
        take(&pool, to, 2).expect("two from the middle");
        let mover = spawn(&pool, to, move |pool| {
            pool.release_pages(one);
            take(pool, from, 1).expect("one was just given")
        });
        take(&pool, 0, 1).expect("at least one was available all the time");
        mover.join().expect("no panic");
        at_rest(&pool, 0);
    });
}

#[test]
fn i4_a_page_that_moves_to_a_shard_yet_to_be_looked_at_is_seen() {
    a_page_moves(0, 1);
}

#[test]
fn i4_a_page_that_moves_to_a_shard_already_looked_at_is_seen() {
    a_page_moves(1, 0);
}

#[test]
fn i4_with_a_thread_stopped_in_a_merge_two_others_still_share_what_is_there() {
    model(2, || {
        let pool = pool();
        take(&pool, 0, 2).expect("two from the middle");
        // One credit in each shard. Whoever wants two must merge both shards; wherever it stands in
        // that, the two others decide between themselves and it.
        let both = spawn(&pool, 0, |pool| take(pool, 0, 2).map_or(0, |pages| pages.len()));
        let one = spawn(&pool, 1, |pool| take(pool, 1, 1).map_or(0, |pages| pages.len()));
        let mine = take(&pool, 0, 1).map_or(0, |pages| pages.len());
        let taken = mine + one.join().expect("no panic") + both.join().expect("no panic");
        assert_eq!(taken, 2, "somebody failed although its pages were there");
        at_rest(&pool, 0);
    });
}

#[test]
fn i1_pages_given_back_while_others_take_are_not_lost() {
    model(5, || {
        let pool = pool();
        let pages = take(&pool, 0, 3).expect("three of four");
        let giver = spawn(&pool, 1, move |pool| pool.release_pages(pages));
        let mine = take(&pool, 0, 2).map_or(0, |pages| pages.len() as u64);
        giver.join().expect("no panic");
        at_rest(&pool, 4 - mine);
    });
}

#[test]
fn i2_of_two_releases_of_one_reference_one_is_refused() {
    model(5, || {
        let pool = pool();
        let handle = pool.alloc(1).expect("one page");
        let again = handle.clone();
        let other = spawn(&pool, 1, move |pool| pool.release(&again).is_ok());
        let mine = pool.release(&handle).is_ok();
        assert!(mine != other.join().expect("no panic"), "one reference, one release");
        at_rest(&pool, 4);
    });
}

#[test]
fn i5_a_stale_handle_never_touches_the_next_owner() {
    model(5, || {
        let pool = pool();
        let old = pool.alloc(1).expect("one page");
        let stale = old.clone();
        let other = spawn(&pool, 1, move |pool| match pool.retain(&stale) {
            Ok(()) => pool.release(&stale).expect("we retained it"),
            Err(error) => assert!(matches!(error, Error::RefCount { .. })),
        });
        pool.release(&old).expect("we hold it");
        let new = pool.alloc(1).expect("four pages");
        assert_eq!(pool.ref_count_of(new[0]), Ok(1), "the next owner's count is its own");
        other.join().expect("no panic");
        assert_eq!(pool.ref_count_of(new[0]), Ok(1), "the next owner's count is its own");
        at_rest(&pool, 3);
    });
}

#[test]
fn i12_a_refused_list_is_put_back_whatever_others_do() {
    model(5, || {
        let pool = pool();
        let pages = pool.alloc(2).expect("two pages");
        pool.retain(&pages[..1]).expect("held");
        // Both lists end with the only reference to the second page: one of them must be refused.
        let list = pages.clone();
        let other = spawn(&pool, 1, move |pool| pool.release(&list).is_ok());
        let mine = pool.release(&pages).is_ok();
        assert!(mine != other.join().expect("no panic"), "the second page had one reference");
        assert_eq!(pool.ref_count_of(pages[0]), Ok(1), "the refused list gave nothing back");
        at_rest(&pool, 3);
    });
}

#[test]
fn a_word_that_lags_in_the_tree_hides_nothing() {
    model(6, || {
        // Two words, so that there is a level above them; only item 0 is there.
        let bits = Arc::new(Bitmap::new_empty(128));
        bits.give_item(0);
        let other = {
            let bits = Arc::clone(&bits);
            thread::spawn(move || bits.take_lowest(0).expect("item 0 is there, or 1 in its stead"))
        };
        bits.give_item(1);
        let mine = bits.take_lowest(0).expect("one of the two is there");
        assert_ne!(mine, other.join().expect("no panic"));
        assert!(bits.is_empty());
        bits.give_item(70);
        bits.validate().expect("nothing hidden");
        assert_eq!(bits.take_lowest(0), Some(70));
    });
}

#[test]
fn the_tree_heals_itself_when_a_word_is_emptied_and_filled() {
    model(6, || {
        let bits = Arc::new(Bitmap::new_empty(128));
        bits.give_item(64);
        let other = {
            let bits = Arc::clone(&bits);
            thread::spawn(move || bits.take_lowest(64).expect("item 64 is there, or 65 in its stead"))
        };
        bits.give_item(65);
        other.join().expect("no panic");
        bits.validate().expect("the word that is left is visible in the tree");
        assert_eq!(bits.count(), 1);
    });
}
