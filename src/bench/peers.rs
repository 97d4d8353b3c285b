//! Sources of pages to compare: this library's pool and the usual ways to keep a free list.

use std::sync::{Mutex, PoisonError};

use crossbeam_queue::{ArrayQueue, SegQueue};

use crate::ids::PageId;
use crate::pool::PagePool;
use crate::sync::{AtomicU32, AtomicU64, CachePadded, Ordering};

/// Takes pages and takes them back.
pub trait Source: Sync {
    /// Appends `n` pages to `out`.
    fn take(&self, n: usize, out: &mut Vec<PageId>);
    /// Takes the pages back and clears the list.
    fn give(&self, pages: &mut Vec<PageId>);
}

impl Source for PagePool {
    #[inline]
    fn take(&self, n: usize, out: &mut Vec<PageId>) {
        // A shortage shows as a list that is too short.
        let _ = PagePool::take(self, n, out);
    }

    #[inline]
    fn give(&self, pages: &mut Vec<PageId>) {
        self.release_pages(pages.drain(..));
    }
}

/// A vector behind a lock, taken once per call.
#[derive(Debug)]
pub struct Locked(Mutex<Vec<PageId>>);

impl Locked {
    /// All pages below `num_pages`.
    pub fn new(num_pages: u32) -> Self {
        Self(Mutex::new((0..num_pages).map(PageId).collect()))
    }
}

impl Source for Locked {
    #[inline]
    fn take(&self, n: usize, out: &mut Vec<PageId>) {
        let mut free = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let rest = free.len().saturating_sub(n);
        out.extend(free.drain(rest..));
    }

    #[inline]
    fn give(&self, pages: &mut Vec<PageId>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).append(pages);
    }
}

/// Treiber's stack (R. K. Treiber, IBM RJ 5118, 1986) of indices; a tag in the head's upper half
/// counts pushes, so that a head which comes back is told from one that stayed.
#[derive(Debug)]
pub struct Treiber {
    head: CachePadded<AtomicU64>,
    below: Box<[AtomicU32]>,
}

impl Treiber {
    /// All pages below `num_pages`.
    pub fn new(num_pages: u32) -> Self {
        let below = (0..num_pages).map(|page| AtomicU32::new(page + 1)).collect::<Box<[_]>>();
        // The stack ends at an index that has no entry.
        Self { head: CachePadded::new(AtomicU64::new(0)), below }
    }

    #[inline]
    fn pop(&self) -> Option<PageId> {
        // Acquire: pairs with the Release in `push`, for the entry below.
        let mut head = self.head.load(Ordering::Acquire);
        loop {
            let page = head as u32;
            let below = self.below.get(page as usize)?.load(Ordering::Relaxed);
            let next = (head & !u64::from(u32::MAX)) | u64::from(below);
            match self.head.compare_exchange_weak(head, next, Ordering::Acquire, Ordering::Acquire) {
                Ok(_) => return Some(PageId(page)),
                Err(now) => head = now,
            }
        }
    }

    #[inline]
    fn push(&self, page: PageId) {
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            self.below[page.index()].store(head as u32, Ordering::Relaxed);
            let next = ((head >> 32).wrapping_add(1) << 32) | u64::from(page.0);
            // Release: pairs with the Acquire in `pop`.
            match self.head.compare_exchange_weak(head, next, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }
}

impl Source for Treiber {
    #[inline]
    fn take(&self, n: usize, out: &mut Vec<PageId>) {
        out.extend(std::iter::from_fn(|| self.pop()).take(n));
    }

    #[inline]
    fn give(&self, pages: &mut Vec<PageId>) {
        pages.drain(..).for_each(|page| self.push(page));
    }
}

impl Source for SegQueue<PageId> {
    #[inline]
    fn take(&self, n: usize, out: &mut Vec<PageId>) {
        out.extend(std::iter::from_fn(|| self.pop()).take(n));
    }

    #[inline]
    fn give(&self, pages: &mut Vec<PageId>) {
        pages.drain(..).for_each(|page| self.push(page));
    }
}

impl Source for ArrayQueue<PageId> {
    #[inline]
    fn take(&self, n: usize, out: &mut Vec<PageId>) {
        out.extend(std::iter::from_fn(|| self.pop()).take(n));
    }

    #[inline]
    fn give(&self, pages: &mut Vec<PageId>) {
        for page in pages.drain(..) {
            // As many places as pages: there is always room.
            let _ = self.push(page);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn hands_out_every_page_and_takes_it_back(source: &impl Source) {
        for _ in 0..2 {
            let mut pages = Vec::new();
            for n in [1, 32, 67, 1] {
                source.take(n, &mut pages);
            }
            assert_eq!(pages.len(), 100, "no more than there are");
            assert_eq!(pages.iter().collect::<BTreeSet<_>>().len(), 100, "each once");
            source.give(&mut pages);
            assert!(pages.is_empty());
        }
    }

    #[test]
    fn every_peer_keeps_its_pages() {
        hands_out_every_page_and_takes_it_back(&Locked::new(100));
        hands_out_every_page_and_takes_it_back(&Treiber::new(100));
        let (seg, array) = (SegQueue::new(), ArrayQueue::new(100));
        for page in (0..100).map(PageId) {
            seg.push(page);
            array.push(page).expect("there is room");
        }
        hands_out_every_page_and_takes_it_back(&seg);
        hands_out_every_page_and_takes_it_back(&array);
    }
}
