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
    /// # Errors
    /// [`Error::InvalidPage`] or [`Error::RefCount`] (a second release, a stale handle); then no
    /// reference is dropped, whatever other threads retained or released meanwhile.
    pub fn release(&self, handles: &[PageHandle]) -> Result<()> {
        // A list that is simply wrong is refused before any word changes, even for a moment.
        for &handle in handles {
            self.live_word(handle)?;
        }
        for (begun, &handle) in handles.iter().enumerate() {
            let allow = |word| is_live(word, handle) && word.droppable() > 0;
            if let Err(word) = self.words.begin_release(handle.page(), allow) {
                for done in &handles[..begun] {
                    self.words.undo_release(done.page(), done.generation());
                }
                return Err(refused(handle.page(), word, "released more often than it was retained"));
            }
        }
        let mut freed = Freed::new(self);
        for handle in handles {
            if self.words.finish_release(handle.page(), handle.generation()) {
                freed.push(handle.page());
            }
        }
        freed.finish();
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
        self.words.retain(page, allow).map_err(|word| {
            let reason = if is_live(word, handle) { "too many references" } else { STALE };
            refused(page, word, reason)
        })
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
