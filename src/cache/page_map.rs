//! The pages one by one, or summed up in cells for pictures of many.

use super::KvCache;
use crate::table::{PageState, PageView};

/// One entry per page number, a null page included.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PageMap {
    /// Each a [`PageState`].
    pub states: Vec<u8>,
    /// References by page tables and by handles.
    pub ref_counts: Vec<u32>,
    /// The page's life, as in handles.
    pub generations: Vec<u32>,
    /// Number of the sequence that holds the page, of several always the same one; -1 where none
    /// does.
    pub owners: Vec<i64>,
    /// Whether the page was made by copy-on-write.
    pub copied: Vec<bool>,
}

/// Runs of adjacent pages, each as one cell.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PageCells {
    /// Pages in each cell but the last, which may have fewer.
    pub pages_per_cell: u32,
    /// For each cell, its pages by [`PageState`], without null pages.
    pub counts: Vec<[u32; PageCells::STATES]>,
    /// For each cell, its pages made by copy-on-write.
    pub copied: Vec<u32>,
    /// For each cell, the sequence that holds most of its pages if one holds more than half of
    /// those held, else one of those that hold some; -1 where none does.
    pub owners: Vec<i64>,
    /// By how many pages that sequence is ahead.
    lead: Vec<u32>,
}

impl PageCells {
    /// States that cells count.
    pub const STATES: usize = PageState::Null as usize;

    /// For pages `first..end` in at most `max_cells` cells.
    pub(super) fn new(first: u32, end: u32, max_cells: usize) -> Self {
        let pages = (end - first) as usize;
        let pages_per_cell = pages.div_ceil(max_cells.clamp(1, pages));
        let cells = pages.div_ceil(pages_per_cell);
        Self {
            pages_per_cell: pages_per_cell as u32,
            counts: vec![[0; Self::STATES]; cells],
            copied: vec![0; cells],
            owners: vec![-1; cells],
            lead: vec![0; cells],
        }
    }

    /// `place` counts from the first page.
    pub(super) fn add(&mut self, place: u32, view: &PageView) {
        let cell = (place / self.pages_per_cell) as usize;
        if let Some(count) = self.counts[cell].get_mut(view.state as usize) {
            *count += 1;
        }
        self.copied[cell] += u32::from(view.copied);
        // Majority vote (Boyer and Moore, 1981): one candidate a cell, whatever its pages.
        let owner = number(view.owner);
        let (candidate, lead) = (&mut self.owners[cell], &mut self.lead[cell]);
        match owner {
            -1 => {}
            _ if *lead == 0 => (*candidate, *lead) = (owner, 1),
            _ if *candidate == owner => *lead += 1,
            _ => *lead -= 1,
        }
    }
}

impl KvCache {
    /// What every page is; a walk over all tables that stops nobody.
    pub fn page_map(&self) -> PageMap {
        let (first, num_pages) = (self.pool().first_page() as usize, self.pool().num_pages() as usize);
        let mut map = PageMap::default();
        map.states.reserve_exact(first + num_pages);
        map.ref_counts.reserve_exact(first + num_pages);
        map.generations.reserve_exact(first + num_pages);
        map.owners.reserve_exact(first + num_pages);
        map.copied.reserve_exact(first + num_pages);
        map.states.resize(first, PageState::Null as u8);
        map.ref_counts.resize(first, 0);
        map.generations.resize(first, 0);
        map.owners.resize(first, -1);
        map.copied.resize(first, false);
        self.tables.survey(|view| {
            map.states.push(view.state as u8);
            map.ref_counts.push(view.ref_count);
            map.generations.push(view.generation);
            map.owners.push(number(view.owner));
            map.copied.push(view.copied);
        });
        map
    }
}

/// Numbers of sequences stay below 2^63 until a slot was reused 2^31 times.
fn number(owner: Option<u64>) -> i64 {
    owner.map_or(-1, |id| id as i64)
}
