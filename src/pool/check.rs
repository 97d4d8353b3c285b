//! Checking a pool at rest.

use std::hash::{DefaultHasher, Hasher};

use super::PagePool;
use crate::error::{Error, Result};
use crate::ids::PageId;

impl<const SHARDS: usize> PagePool<SHARDS> {
    /// A digest of everything the pool holds. Two that differ: something ran meanwhile.
    pub fn fingerprint(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.credits.words().for_each(|word| hasher.write_u64(word));
        (0..self.free.words()).for_each(|index| hasher.write_u64(self.free.word(index)));
        (0..self.free.len()).for_each(|page| hasher.write_u64(self.words.get(PageId(page)).0));
        hasher.finish()
    }

    /// Checks the pool: each page is free (bit set, count 0) or held (bit clear, count above 0),
    /// there are as many credits as free pages, and no free page is hidden (invariant I1).
    ///
    /// # Errors
    /// [`Error::NotQuiescent`] if anything ran meanwhile, [`Error::Corruption`] if a check fails.
    pub fn validate(&self) -> Result<()> {
        let before = self.fingerprint();
        let result = self.inconsistency();
        if self.fingerprint() != before {
            return Err(Error::NotQuiescent("pages were taken or released during the check".into()));
        }
        result.map_err(Error::Corruption)
    }

    fn inconsistency(&self) -> Result<(), String> {
        self.free.validate()?;
        for page in 0..self.free.len() {
            let (word, free) = (self.words.get(PageId(page)), self.free.contains(page));
            let (reserved, held) = (page < self.first_page, word.count() > 0);
            if reserved && (free || held) {
                return Err(format!("reserved page {page} is in use"));
            }
            if !reserved && free == held {
                let state = if free { "marked free" } else { "neither free nor held" };
                return Err(format!("page {page} is {state} with reference count {}", word.count()));
            }
        }
        let (free, credits) = (self.free.count(), self.credits.total());
        if free == credits { Ok(()) } else { Err(format!("{free} pages are free, {credits} are available")) }
    }
}
