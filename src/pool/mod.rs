//! Physical pages: who is free, how many are available, who holds a page and in which life.
//!
//! | module | holds | invariant |
//! |---|---|---|
//! | `bitmap` | one bit per free page, as a tree | I3: a page is taken by one thread |
//! | `credits` | how many pages are available, per shard | I4: a failing request is linearisable |
//! | `words` | generation and count of each page | I2, I5: counts and stale handles |
//! | [`PagePool`] | the three together | I1, I12 |
//!
//! A page goes out in the order credit, bit, word, and comes back in the order word, bit, credit:
//! so whoever holds a credit finds a page, and whoever finds a page owns its word.
//!
//! No operation takes a lock or waits for another thread: each loop repeats only because another
//! thread changed the word.

mod bitmap;
mod check;
mod credits;
mod handles;
mod lines;
mod words;

pub use bitmap::{BLOCK_ITEMS, Bitmap, Bits, Run, WORD_BITS};
pub use credits::Shortage;
pub use words::MAX_COUNT;

use std::mem;
use std::ops::Range;

use crate::error::{Error, Result};
use crate::ids::{PageHandle, PageId};
use crate::sync::{serial_number, thread_number};
use credits::Credits;
use words::{PageWord, PageWords};

/// Attempts to take a run of adjacent pages before taking any pages: losing so often means that
/// the region is contended.
const RUN_ATTEMPTS: u32 = 3;

/// A pool of physical pages, numbered `first_page..first_page + num_pages`.
///
/// Each thread has a home: a shard of the credits and a region of the pages, apart from other
/// threads' by whole cache lines. It takes the lowest free pages of its region first, adjacent ones
/// where there are any, and those of other regions when its own has none.
///
/// Methods that take a [`PageId`] are for callers that hold a reference (page tables); those that
/// take a [`PageHandle`] check everything and suit handles that come from outside.
#[derive(Debug)]
pub struct PagePool<const SHARDS: usize = 16> {
    free: Bitmap,
    credits: Credits<SHARDS>,
    words: PageWords,
    first_page: u32,
    num_pages: u32,
    /// In which every page began.
    first_generation: u32,
    /// The region of each shard.
    regions: [Range<u32>; SHARDS],
}

impl<const SHARDS: usize> PagePool<SHARDS> {
    /// A pool of `num_pages` free pages. Pages below `first_page` (the null page) are never handed
    /// out and not counted.
    ///
    /// # Errors
    /// [`Error::Value`] if `num_pages` is 0 or the pages don't fit into 28 bits.
    pub fn new(num_pages: u32, first_page: u32) -> Result<Self> {
        let len = u64::from(first_page) + u64::from(num_pages);
        if num_pages == 0 || len > credits::MAX_CREDITS {
            let most = credits::MAX_CREDITS - u64::from(first_page);
            return Err(Error::Value(format!("num_pages is {num_pages}; a pool has 1 to {most} pages")));
        }
        let len = len as u32;
        let first_generation = first_generation();
        Ok(Self {
            free: Bitmap::new_from(first_page, len),
            credits: Credits::new(u64::from(num_pages)),
            words: PageWords::new(len as usize, first_generation),
            first_page,
            num_pages,
            first_generation,
            regions: regions(len),
        })
    }

    /// Pages in the pool, free or not.
    pub fn num_pages(&self) -> u32 {
        self.num_pages
    }

    /// The lowest page number that is ever handed out.
    pub fn first_page(&self) -> u32 {
        self.first_page
    }

    /// Pages that an allocation could take. Exact when nothing runs.
    pub fn num_free(&self) -> u64 {
        self.credits.total().min(u64::from(self.num_pages))
    }

    /// The page numbers where thread number `home` looks first.
    pub fn region(&self, home: usize) -> Range<u32> {
        self.regions[home % SHARDS].clone()
    }

    /// Takes `n` pages, each with a count of 1, and appends them to `out`, ascending.
    ///
    /// n = 1: the lowest free page of the caller's region, or of the next region that has one.
    /// n > 1: the lowest run of n in the caller's region, else the lowest pages.
    ///
    /// # Errors
    /// [`Shortage`] if at one instant during the call fewer than `n` pages were available. Then
    /// nothing is taken, and nothing was taken away from other requests meanwhile.
    #[inline]
    pub fn take(&self, n: usize, out: &mut Vec<PageId>) -> Result<(), Shortage> {
        self.take_from(thread_number(), n, out)
    }

    /// [`take`](Self::take) with the home of thread number `home`.
    #[inline]
    pub fn take_from(&self, home: usize, n: usize, out: &mut Vec<PageId>) -> Result<(), Shortage> {
        if n > self.num_pages as usize {
            return Err(Shortage { available: self.num_free() });
        }
        // Whatever can fail does so before the credits are taken.
        out.reserve(n);
        let n = n as u32;
        self.credits.take(home, u64::from(n))?;
        let region = &self.regions[home % SHARDS];
        if n == 1 {
            out.push(self.claim_one(region.start));
        } else {
            self.claim_many(region, n, out);
        }
        Ok(())
    }

    /// References to the page: leaves of page tables and handles. 0: free.
    #[inline]
    pub fn ref_count(&self, page: PageId) -> u32 {
        self.words.get(page).count()
    }

    /// The page's life and its references, in one look; a free page's life is its next one.
    #[inline]
    pub fn life(&self, page: PageId) -> (u32, u32) {
        let word = self.words.get(page);
        (word.generation(), word.count())
    }

    /// How often a page whose life is `generation` was freed, modulo 2^32.
    #[inline]
    pub fn times_freed(&self, generation: u32) -> u32 {
        generation.wrapping_sub(self.first_generation)
    }

    /// Whether somebody besides one holder may read the page: then it must not be written.
    #[inline]
    pub fn is_shared(&self, page: PageId) -> bool {
        self.words.get(page).is_shared()
    }

    /// Asks the processor to fetch the page's word. Any number will do: nothing is read.
    #[inline]
    pub fn prefetch(&self, page: PageId) {
        self.words.prefetch(page);
    }

    /// The handle of the page's current life.
    #[inline]
    pub fn handle(&self, page: PageId) -> PageHandle {
        PageHandle::new(page, self.words.get(page).generation())
    }

    /// Adds a reference to a page that the caller holds.
    ///
    /// # Errors
    /// [`Error::RefCount`] if the count is at its maximum, or 0.
    #[inline]
    pub fn retain_page(&self, page: PageId) -> Result<()> {
        let allow = |word: PageWord| (1..MAX_COUNT).contains(&word.count());
        self.words.retain(page, allow).map_err(|word| refused(page, word, "cannot be retained"))
    }

    /// Drops a reference that the caller holds; the last one frees the page.
    #[inline]
    pub fn release_page(&self, page: PageId) {
        self.release_pages([page]);
    }

    /// Drops one reference to each of the pages, which the caller holds. Neighbours in the list
    /// that become free and share a bitmap word go back together.
    #[inline]
    pub fn release_pages(&self, pages: impl IntoIterator<Item = PageId>) {
        let mut freed = Freed::new(self);
        for page in pages {
            let released = self.words.release(page);
            debug_assert!(released.is_ok(), "{page:?} was released but not held");
            if released == Ok(true) {
                freed.push(page);
            }
        }
        freed.finish();
    }

    /// Takes a page for a credit that the caller holds.
    #[inline]
    fn claim_one(&self, from: u32) -> PageId {
        loop {
            // None: other threads took and gave while we looked; a page of ours is there.
            if let Some(item) = self.free.take_lowest(from) {
                let page = PageId(item);
                self.words.start(page);
                return page;
            }
        }
    }

    /// Takes `n` pages for credits that the caller holds.
    fn claim_many(&self, region: &Range<u32>, n: u32, out: &mut Vec<PageId>) {
        let taken = out.len();
        for _ in 0..RUN_ATTEMPTS {
            match self.free.take_run(region.clone(), n) {
                Run::Taken(first) => {
                    out.extend((first..first + n).map(PageId));
                    return self.words.start_run(PageId(first), n as usize);
                }
                Run::Lost => {}
                Run::Absent => break,
            }
        }
        while let missing @ 1.. = n - (out.len() - taken) as u32 {
            // None: as in `claim_one`.
            if let Some(bits) = self.free.take_word(region.start, missing) {
                out.extend(bits.items().map(PageId));
            }
        }
        let pages = &mut out[taken..];
        if !pages.is_sorted() {
            pages.sort_unstable();
        }
        for &page in &*pages {
            self.words.start(page);
        }
    }
}

/// Pages whose last reference went, on their way back: bits first, credits last.
struct Freed<'a, const SHARDS: usize> {
    pool: &'a PagePool<SHARDS>,
    /// A word of the bitmap, and which of its bits are not set yet.
    word: u32,
    mask: u64,
    /// Pages in all.
    credits: u64,
}

impl<'a, const SHARDS: usize> Freed<'a, SHARDS> {
    #[inline]
    fn new(pool: &'a PagePool<SHARDS>) -> Self {
        Self { pool, word: 0, mask: 0, credits: 0 }
    }

    #[inline]
    fn push(&mut self, page: PageId) {
        let word = page.0 / WORD_BITS;
        if word != self.word {
            self.flush();
            self.word = word;
        }
        self.mask |= 1 << (page.0 % WORD_BITS);
        self.credits += 1;
    }

    #[inline]
    fn flush(&mut self) {
        if let Some(bits) = Bits::new(self.word, mem::take(&mut self.mask)) {
            self.pool.free.give(bits);
        }
    }

    /// The ordinary end: does what `drop` does, in line.
    #[inline]
    fn finish(self) {
        let Self { pool, word, mask, credits } = self;
        mem::forget(self);
        Self::give(pool, Bits::new(word, mask), credits);
    }

    #[inline]
    fn give(pool: &PagePool<SHARDS>, bits: Option<Bits>, credits: u64) {
        if let Some(bits) = bits {
            pool.free.give(bits);
        }
        if credits > 0 {
            pool.credits.give(thread_number(), credits);
        }
    }

    /// What `drop` does. A call by value, so that until then all lies in registers.
    #[cold]
    #[inline(never)]
    fn give_after_panic(pool: &PagePool<SHARDS>, bits: Option<Bits>, credits: u64) {
        Self::give(pool, bits, credits);
    }
}

impl<const SHARDS: usize> Drop for Freed<'_, SHARDS> {
    // So that a caller's iterator that panics loses no page.
    #[inline]
    fn drop(&mut self) {
        Self::give_after_panic(self.pool, Bits::new(self.word, self.mask), self.credits);
    }
}

fn refused(page: PageId, word: PageWord, reason: &'static str) -> Error {
    Error::RefCount { page: page.0, ref_count: word.count(), reason }
}

/// A first generation that differs from pool to pool, so that a handle of another pool is refused.
fn first_generation() -> u32 {
    /// 2^32 divided by the golden ratio: multiples of it stay far apart.
    const STEP: u32 = 0x9E37_79B9;
    serial_number().wrapping_mul(STEP)
}

/// Whole blocks of pages for each shard; shards share a region if there are too few blocks.
fn regions<const SHARDS: usize>(len: u32) -> [Range<u32>; SHARDS] {
    let blocks = len.div_ceil(BLOCK_ITEMS);
    let count = blocks.min(SHARDS as u32);
    let start =
        |region: u32| ((u64::from(blocks) * u64::from(region) / u64::from(count)) as u32) * BLOCK_ITEMS;
    std::array::from_fn(|shard| {
        let region = shard as u32 % count;
        start(region)..start(region + 1).min(len)
    })
}
