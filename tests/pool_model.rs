//! Random operations on the pool and its bitmap against plain models; `validate()` after each step.
//!
//! - I1: free + held = total.
//! - I2, I5: counts and generations are those of a model that knows every reference.
//! - I3: an allocation takes exactly the pages that the rule names.
//! - I12: a refused operation changes nothing.

#![cfg(not(loom))]

use std::collections::{BTreeMap, BTreeSet};

use paged_kv::ids::{PageHandle, PageId};
use paged_kv::pool::{Bitmap, PagePool, Run, Shortage};
use proptest::prelude::*;
use proptest::sample::Index;

/// Which pages the rule names: for one page the lowest, for more the lowest run in the region, else
/// the lowest; "lowest" counts from the start of the region and goes on at the start of the pool.
fn expected(free: &BTreeSet<u32>, region: std::ops::Range<u32>, n: usize) -> Vec<u32> {
    if n > 1 {
        let inside: Vec<u32> = free.range(region.clone()).copied().collect();
        if let Some(run) = inside.windows(n).find(|run| run[n - 1] - run[0] == n as u32 - 1) {
            return run.to_vec();
        }
    }
    let mut pages: Vec<u32> =
        free.range(region.start..).chain(free.range(..region.start)).copied().take(n).collect();
    pages.sort_unstable();
    pages
}

#[derive(Clone, Debug)]
enum Op {
    Take {
        home: usize,
        n: usize,
    },
    Alloc {
        n: usize,
    },
    Retain(Vec<Index>),
    Release(Vec<Index>),
    /// Drops all references to every page whose number leaves this remainder.
    FreeEvery {
        divisor: u32,
        remainder: u32,
    },
}

fn op() -> impl Strategy<Value = Op> {
    let size = prop_oneof![4 => 0..5_usize, 2 => 5..200_usize, 1 => 200..2500_usize];
    let list = || prop::collection::vec(any::<Index>(), 0..6);
    prop_oneof![
        4 => (0..4_usize, size.clone()).prop_map(|(home, n)| Op::Take { home, n }),
        2 => size.prop_map(|n| Op::Alloc { n }),
        2 => list().prop_map(Op::Retain),
        3 => list().prop_map(Op::Release),
        2 => (1..5_u32).prop_flat_map(|divisor| (Just(divisor), 0..divisor))
            .prop_map(|(divisor, remainder)| Op::FreeEvery { divisor, remainder }),
    ]
}

/// The pool beside all that it should know.
struct Model {
    pool: PagePool<2>,
    free: BTreeSet<u32>,
    /// References to each held page.
    held: BTreeMap<PageHandle, u32>,
    /// Every handle there ever was, newest last.
    ever: Vec<PageHandle>,
    lives: BTreeSet<PageHandle>,
}

impl Model {
    fn new(num_pages: u32, first_page: u32) -> Self {
        let pool = PagePool::new(num_pages, first_page).expect("a small pool");
        let free = (first_page..first_page + num_pages).collect();
        Self { pool, free, held: BTreeMap::new(), ever: Vec::new(), lives: BTreeSet::new() }
    }

    fn received(&mut self, pages: Vec<PageId>) {
        for page in pages {
            assert!(self.free.remove(&page.0), "{page:?} was not free");
            let handle = self.pool.handle(page);
            assert!(self.lives.insert(handle), "{handle:?} had a life before");
            assert_eq!(self.held.insert(handle, 1), None);
            self.ever.push(handle);
        }
    }

    fn pick(&self, list: &[Index]) -> Vec<PageHandle> {
        if self.ever.is_empty() {
            return Vec::new();
        }
        // Mostly recent ones, which are likely to be alive.
        let recent = &self.ever[self.ever.len().saturating_sub(12)..];
        let pick =
            |(i, index): (usize, &Index)| if i == 3 { *index.get(&self.ever) } else { *index.get(recent) };
        list.iter().enumerate().map(pick).collect()
    }

    fn wanted(handles: &[PageHandle]) -> BTreeMap<PageHandle, u32> {
        let mut wanted = BTreeMap::new();
        for &handle in handles {
            *wanted.entry(handle).or_insert(0) += 1;
        }
        wanted
    }

    fn apply(&mut self, op: Op) {
        let before = self.pool.fingerprint();
        match op {
            Op::Take { home, n } => {
                let mut pages = Vec::new();
                let available = self.free.len() as u64;
                match self.pool.take_from(home, n, &mut pages) {
                    Ok(()) => {
                        let numbers: Vec<u32> = pages.iter().map(|page| page.0).collect();
                        assert_eq!(numbers, expected(&self.free, self.pool.region(home), n));
                        self.received(pages);
                    }
                    Err(shortage) => {
                        assert!(n as u64 > available);
                        assert_eq!(shortage, Shortage { available });
                        assert!(pages.is_empty());
                    }
                }
            }
            Op::Alloc { n } => match self.pool.alloc(n) {
                Ok(handles) => self.received(handles.iter().map(|handle| handle.page()).collect()),
                Err(_) => assert!(n > self.free.len()),
            },
            Op::Retain(list) => {
                let handles = self.pick(&list);
                let right = handles.iter().all(|handle| self.held.contains_key(handle));
                assert_eq!(self.pool.retain(&handles).is_ok(), right);
                if right {
                    for handle in &handles {
                        *self.held.get_mut(handle).expect("held") += 1;
                    }
                } else {
                    assert_eq!(self.pool.fingerprint(), before, "refused, and yet something changed");
                }
            }
            Op::Release(list) => {
                let handles = self.pick(&list);
                let wanted = Self::wanted(&handles);
                let right =
                    wanted.iter().all(|(handle, n)| self.held.get(handle).is_some_and(|held| held >= n));
                assert_eq!(self.pool.release(&handles).is_ok(), right);
                if right {
                    for (handle, n) in wanted {
                        self.drop_references(handle, n);
                    }
                } else {
                    assert_eq!(self.pool.fingerprint(), before, "refused, and yet something changed");
                }
            }
            Op::FreeEvery { divisor, remainder } => {
                let gone = self.held.iter().filter(|(handle, _)| handle.page().0 % divisor == remainder);
                let gone: Vec<_> = gone.map(|(&handle, &n)| (handle, n)).collect();
                self.pool
                    .release_pages(gone.iter().flat_map(|&(handle, n)| (0..n).map(move |_| handle.page())));
                for (handle, n) in gone {
                    self.drop_references(handle, n);
                }
            }
        }
    }

    fn drop_references(&mut self, handle: PageHandle, n: u32) {
        let count = self.held.get_mut(&handle).expect("held");
        *count -= n;
        if *count == 0 {
            self.held.remove(&handle);
            self.free.insert(handle.page().0);
        }
    }

    fn check(&self) {
        self.pool.validate().expect("valid at rest");
        assert_eq!(self.pool.num_free(), self.free.len() as u64);
        for (&handle, &count) in &self.held {
            assert_eq!(self.pool.ref_count_of(handle), Ok(count));
            assert_eq!(self.pool.is_shared(handle.page()), count > 1);
        }
        for handle in self.ever.iter().rev().take(50).filter(|handle| !self.held.contains_key(handle)) {
            self.pool.ref_count_of(*handle).expect_err("its life is over");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn i1_i2_i3_i5_i12_the_pool_does_what_its_model_does(
        num_pages in prop_oneof![Just(1_u32), Just(70), Just(2100), Just(4000)],
        first_page in 0..2_u32,
        ops in prop::collection::vec(op(), 1..40),
    ) {
        let mut model = Model::new(num_pages, first_page);
        for op in ops {
            model.apply(op);
            model.check();
        }
        model.apply(Op::FreeEvery { divisor: 1, remainder: 0 });
        model.check();
        prop_assert_eq!(model.pool.num_free(), u64::from(num_pages));
    }

    #[test]
    fn the_bitmap_is_a_set_of_numbers(
        len in prop_oneof![1..200_u32, 4000..5000_u32, 262_100..262_300_u32, Just(300_000)],
        first in 0..300_u32,
        ops in prop::collection::vec((0..5_u8, any::<Index>(), 1..300_u32), 1..200),
    ) {
        let bits = Bitmap::new_from(first, len);
        let mut set: BTreeSet<u32> = (first..len).collect();
        let mut taken = Vec::new();
        for (kind, index, n) in ops {
            let from = index.index(len as usize) as u32;
            match kind {
                // With nobody else at work, the tree alone shows what a search through all words finds.
                0 | 1 => {
                    let lowest = set.range(from..).next().or_else(|| set.first()).copied();
                    let found = if kind == 0 { bits.take_lowest(from) } else { bits.take_seen(from) };
                    prop_assert_eq!(found, lowest);
                    if let Some(item) = lowest {
                        set.remove(&item);
                        taken.push(item);
                    }
                }
                2 => {
                    let items: Vec<u32> = set.range(from..).copied().collect();
                    let n = n as usize;
                    let run = items.windows(n).find(|run| run[n - 1] - run[0] == n as u32 - 1);
                    let expected = run.map_or(Run::Absent, |run| Run::Taken(run[0]));
                    prop_assert_eq!(bits.take_run(from..len, n as u32), expected);
                    for item in run.into_iter().flatten() {
                        taken.push(*item);
                        set.remove(item);
                    }
                }
                3 => {
                    // A whole stretch, so that words and whole levels become empty.
                    for _ in 0..n * 20 {
                        let Some(word) = bits.take_word(from, 64) else { break };
                        for item in word.items() {
                            prop_assert!(set.remove(&item), "{} was not there", item);
                            taken.push(item);
                        }
                    }
                }
                _ => {
                    for _ in 0..n.min(taken.len() as u32) {
                        let item = taken.swap_remove(index.index(taken.len()));
                        bits.give_item(item);
                        set.insert(item);
                    }
                }
            }
            prop_assert_eq!(bits.count(), set.len() as u64);
            prop_assert_eq!(bits.validate(), Ok(()));
        }
        prop_assert!(set.iter().all(|&item| bits.contains(item)));
    }
}
