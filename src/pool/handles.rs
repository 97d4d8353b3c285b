//! The pool as the outside sees it: handles with generations, everything checked.

use super::words::{MAX_COUNT, PageWord};
use super::{Freed, PagePool, refused};
use crate::error::{Error, Result};
use crate::ids::{PageHandle, PageId};

/// The largest count that handles alone can raise a page to. The rest is left to page tables, which
/// must not fail because somebody outside holds a page too often.
const MAX_HANDLES: u32 = MAX_COUNT - (1 << 20);

const STALE: &str = "the handle is stale (its page was freed) or belongs to another pool";

impl<const SHARDS: usize> PagePool<SHARDS> {
    /// Allocates `n` pages, ascending, each with a count of 1.
    ///
    /// # Errors
    /// [`Error::OutOfPages`] if fewer are available, [`Error::NeverFits`] if the pool is smaller.
    /// Nothing is taken then.
    pub fn alloc(&self, n: usize) -> Result<Vec<PageHandle>> {
        let (requested, total) = (n as u64, u64::from(self.num_pages()));
        if requested > total {
            return Err(Error::NeverFits { requested, total, index: None });
        }
        let mut pages = Vec::new();
        self.take(n, &mut pages).map_err(|shortage| Error::OutOfPages {
            requested,
            free: shortage.available,
            evictable: 0,
            deferred: 0,
            index: None,
        })?;
        Ok(pages.into_iter().map(|page| self.handle(page)).collect())
    }

    /// Adds one reference for each handle in the list (two if it is there twice).
    ///
    /// # Errors
    /// [`Error::InvalidPage`] or [`Error::RefCount`]; then no count has changed.
    pub fn retain(&self, handles: &[PageHandle]) -> Result<()> {
        for (done, &handle) in handles.iter().enumerate() {
            if let Err(error) = self.retain_one(handle) {
                // Exact: each of these references is ours, whatever others did meanwhile.
                self.release_pages(handles[..done].iter().map(|handle| handle.page()));
                return Err(error);
            }
        }
        Ok(())
    }

    /// Drops one reference for each handle in the list (two if it is there twice). Pages whose last
    /// reference went are free afterwards.
    ///
    /// The caller must hold these references. If it doesn't, the list is refused as a whole. What
    /// can't be told apart is *whose* reference another thread drops: if threads drop one reference
    /// twice at the same time, one of them gets the error, and its list is put back except for
    /// shared pages that their other holders let go in that very moment.
    ///
    /// # Errors
    /// [`Error::InvalidPage`] or [`Error::RefCount`] (a second release, a stale handle).
    pub fn release(&self, handles: &[PageHandle]) -> Result<()> {
        self.check_held(handles)?;
        let mut ended = Vec::new();
        for (done, &handle) in handles.iter().enumerate() {
            match self.words.release(handle.page(), |word| is_live(word, handle)) {
                Ok(before) if before.count() == 1 => ended.push((handle.page(), before)),
                Ok(_) => {}
                Err(word) => {
                    self.undo_release(&handles[..done], &ended);
                    return Err(refused(handle.page(), word, "released twice at the same time"));
                }
            }
        }
        let mut freed = Freed::new(self);
        for (page, _) in ended {
            freed.push(page);
        }
        Ok(())
    }

    /// References to the page of this handle.
    ///
    /// # Errors
    /// [`Error::InvalidPage`] or [`Error::RefCount`] if the page isn't in this life any more.
    pub fn ref_count_of(&self, handle: PageHandle) -> Result<u32> {
        self.live_word(handle).map(PageWord::count)
    }

    /// The page of a handle that is still alive.
    ///
    /// # Errors
    /// As [`ref_count_of`](Self::ref_count_of).
    pub fn page_of(&self, handle: PageHandle) -> Result<PageId> {
        self.live_word(handle).map(|_| handle.page())
    }

    fn retain_one(&self, handle: PageHandle) -> Result<()> {
        let page = self.in_range(handle)?;
        let allow = |word| is_live(word, handle) && word.count() < MAX_HANDLES;
        self.words.retain(page, allow).map(drop).map_err(|word| {
            let reason = if is_live(word, handle) { "too many references" } else { STALE };
            refused(page, word, reason)
        })
    }

    /// Refuses a list that asks for more references than its pages have.
    fn check_held(&self, handles: &[PageHandle]) -> Result<()> {
        for &handle in handles {
            self.live_word(handle)?;
        }
        if handles.is_sorted_by(|a, b| a.page() < b.page()) {
            return Ok(());
        }
        let mut sorted = handles.to_vec();
        sorted.sort_unstable_by_key(|handle| handle.page());
        for same in sorted.chunk_by(|a, b| a.page() == b.page()) {
            let word = self.live_word(same[0])?;
            if same.len() > word.count() as usize {
                return Err(refused(same[0].page(), word, "listed more often than it is referenced"));
            }
        }
        Ok(())
    }

    /// Puts back what a list release did before it met a reference that was gone.
    fn undo_release(&self, done: &[PageHandle], ended: &[(PageId, PageWord)]) {
        for &(page, before) in ended {
            self.words.undo_last_release(page, before);
        }
        let mut restored = ended.iter().map(|&(page, _)| page).collect::<Vec<_>>();
        for &handle in done {
            // The last reference of an ended page is back already.
            if let Some(at) = restored.iter().position(|&page| page == handle.page()) {
                restored.swap_remove(at);
            } else {
                let _ = self.words.retain(handle.page(), |word| is_live(word, handle));
            }
        }
    }

    fn live_word(&self, handle: PageHandle) -> Result<PageWord> {
        let page = self.in_range(handle)?;
        let word = self.words.get(page);
        if is_live(word, handle) { Ok(word) } else { Err(refused(page, word, STALE)) }
    }

    fn in_range(&self, handle: PageHandle) -> Result<PageId> {
        let page = handle.page();
        let range = self.first_page()..self.first_page() + self.num_pages();
        if range.contains(&page.0) {
            return Ok(page);
        }
        let reason = if page.0 < self.first_page() { "reserved" } else { "outside the pool" };
        let num_pages = u64::from(self.num_pages());
        Err(Error::InvalidPage { page: i64::from(page.0), num_pages, reason })
    }
}

fn is_live(word: PageWord, handle: PageHandle) -> bool {
    word.generation() == handle.generation() && word.count() > 0
}
