//! A batch's arrays, in the shapes that kernels take.

use super::buffers::Buffers;
use crate::error::{Error, Result};
use crate::table::{BatchItem, PageCopy, TableBatch};

/// Every array of a batch, without its lease. This is what a scheduler sends to the ranks that run
/// the model; a cache with the same page size and number of pages accepts it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BatchView {
    /// Tokens of a page.
    pub page_size: usize,
    /// Pages of the cache it was made by, the null page included.
    pub num_pages: usize,
    /// Entries of one row of `block_table`.
    pub max_pages: usize,
    /// `[B, max_pages]`; behind a sequence's last page -1, or 0 where the cache has a null page.
    pub block_table: Vec<i32>,
    /// `[B]`: tokens of each sequence, the new ones included.
    pub seq_lens: Vec<i32>,
    /// `[B + 1]`: query rows.
    pub cu_seqlens_q: Vec<i32>,
    /// `[tokens]`: slot of each new token, `page * page_size + offset`.
    pub slot_mapping: Vec<i64>,
    /// `[tokens]`: position of each new token in its sequence.
    pub positions: Vec<i64>,
    /// `[B + 1]`: where each sequence's pages begin in `kv_indices`.
    pub kv_indptr: Vec<i32>,
    /// Physical pages, sequence behind sequence.
    pub kv_indices: Vec<i32>,
    /// `[B]`: tokens in each sequence's last page, 1 to `page_size`; 0 if it has none.
    pub kv_last_page_len: Vec<i32>,
    /// `[n, 2]`: source and destination of each copy on write.
    pub copies: Vec<[i64; 2]>,
}

/// `[B, max_pages]` and what belongs to it.
pub(super) struct TableArrays {
    pub(super) max_pages: usize,
    pub(super) block_table: Vec<i32>,
}

/// One entry per new token.
pub(super) struct TokenArrays {
    pub(super) slot_mapping: Vec<i64>,
    pub(super) positions: Vec<i64>,
}

/// The table in compressed rows.
pub(super) struct CsrArrays {
    pub(super) indptr: Vec<i32>,
    pub(super) indices: Vec<i32>,
    pub(super) last_page_len: Vec<i32>,
}

/// Query rows per sequence and in all.
pub(super) fn cu_seqlens(counts: impl ExactSizeIterator<Item = u32>) -> Result<Vec<i32>> {
    let mut sum = 0_i32;
    let mut cumulative = Vec::with_capacity(counts.len() + 1);
    cumulative.push(0);
    for count in counts {
        sum =
            i32::try_from(count).ok().and_then(|count| sum.checked_add(count)).ok_or_else(too_many_tokens)?;
        cumulative.push(sum);
    }
    Ok(cumulative)
}

pub(super) fn too_many_tokens() -> Error {
    Error::Value("a batch holds at most 2^31 - 1 tokens in all".to_owned())
}

impl TableArrays {
    pub(super) fn new(batch: &TableBatch, page_size: u32, pad: i32, buffers: &Buffers) -> Self {
        let max_pages = max_pages(batch, page_size);
        batch.warm_tables();
        let mut block_table = buffers.take(batch.items().len() * max_pages);
        for (i, (item, row)) in batch.items().zip(block_table.chunks_exact_mut(max_pages.max(1))).enumerate()
        {
            let (pages, rest) = row.split_at_mut(pages(item, page_size));
            batch.copy_row(i, pages);
            rest.fill(pad);
        }
        Self { max_pages, block_table }
    }
}

/// Pages that a sequence's tokens need.
fn pages(item: BatchItem, page_size: u32) -> usize {
    item.seq_len().div_ceil(page_size) as usize
}

/// Pages of all sequences, a shared one as often as it is shared.
pub(super) fn total_pages(batch: &TableBatch, page_size: u32) -> usize {
    batch.items().map(|item| pages(item, page_size)).sum()
}

/// Pages of the longest sequence.
pub(super) fn max_pages(batch: &TableBatch, page_size: u32) -> usize {
    batch.items().map(|item| pages(item, page_size)).max().unwrap_or(0)
}

impl TokenArrays {
    pub(super) fn new(batch: &TableBatch, page_size: u32) -> Self {
        let total = batch.items().map(|item| item.new_tokens as usize).sum();
        let mut slot_mapping = Vec::with_capacity(total);
        let mut positions = Vec::with_capacity(total);
        for (i, item) in batch.items().enumerate() {
            let mut position = item.computed;
            while position < item.seq_len() {
                // All new tokens of one page lie together.
                let offset = position % page_size;
                let count = (page_size - offset).min(item.seq_len() - position);
                let first = i64::from(batch.page(i, position).0) * i64::from(page_size) + i64::from(offset);
                slot_mapping.extend(first..first + i64::from(count));
                positions.extend(i64::from(position)..i64::from(position + count));
                position += count;
            }
        }
        Self { slot_mapping, positions }
    }
}

impl CsrArrays {
    pub(super) fn new(batch: &TableBatch, page_size: u32, buffers: &Buffers) -> Self {
        batch.warm_tables();
        let mut indices = buffers.take(total_pages(batch, page_size));
        let mut indptr = vec![0];
        let mut rest = indices.as_mut_slice();
        for (i, item) in batch.items().enumerate() {
            let pages = pages(item, page_size);
            let row = rest.split_off_mut(..pages).expect("the sum of all");
            batch.copy_row(i, row);
            indptr.push(indptr[i] + pages as i32);
        }
        let last_page_len = batch.items().map(|item| last_page_len(item.seq_len(), page_size) as i32);
        Self { indptr, last_page_len: last_page_len.collect(), indices }
    }
}

pub(super) fn copies(copies: &[PageCopy]) -> Vec<[i64; 2]> {
    copies.iter().map(|copy| [i64::from(copy.source.0), i64::from(copy.destination.0)]).collect()
}

/// Tokens in the last page: 1 to `page_size`, 0 if there is no page.
fn last_page_len(len: u32, page_size: u32) -> u32 {
    if len == 0 { 0 } else { (len - 1) % page_size + 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn field_c16_last_page_len_is_between_one_and_page_size() {
        let lens: Vec<u32> = [0, 1, 15, 16, 17, 32].map(|len| last_page_len(len, 16)).into();
        assert_eq!(lens, [0, 1, 15, 16, 1, 16]);
        assert!((1..1000).all(|len| (1..=7).contains(&last_page_len(len, 7))));
    }

    #[test]
    fn cumulative_lengths_that_overflow_are_refused() {
        assert_eq!(cu_seqlens([1, 0, 3].into_iter()).unwrap(), [0, 1, 1, 4]);
        assert!(cu_seqlens([i32::MAX as u32, 1].into_iter()).is_err());
        assert!(cu_seqlens([u32::MAX].into_iter()).is_err());
    }
}
