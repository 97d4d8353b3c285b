//! Attention straight from scattered pages, and what goes with it.
//!
//! Arguments are checked completely before anything is written; the arithmetic lives in
//! [`kernels`], the definition it is tested against in [`mod@reference`].

mod check;
mod merge;
mod options;
pub mod reference;
mod slopes;
mod threads;
mod write;

pub use merge::merge_states;
pub use options::{AttentionOptions, BatchTables};
pub use slopes::alibi_slopes;
pub use threads::ThreadPool;
pub use write::{copy_tokens, write_pages, write_rows};

use crate::error::Result;
use crate::kernels;
use crate::storage::{PagesView, RowsView, RowsViewMut};

/// Attention of a batch's queries over keys and values in pages.
///
/// `query`: `[tokens, num_heads, head_dim]`; `key_pages` and `value_pages`: one layer's pages with
/// `num_kv_heads` dividing `num_heads`; `out`: `[tokens, num_heads, v_head_dim]` in the query's
/// dtype; `lse`: `[tokens * num_heads]`, the natural logarithm of each row's sum of exponentials.
///
/// A row that sees no key gets output 0 and `lse` -inf (with a sink: the sink's logit). A sequence
/// of length 0 may have queries: they see no key. Slots that no query sees are never read, whatever
/// they hold. For one instruction set, a sequence's result depends on nothing but its own tokens:
/// not on the batch, the number of threads, where its pages lie, or the page size.
///
/// # Errors
/// [`Error::Layout`](crate::error::Error::Layout), [`Value`](crate::error::Error::Value) or
/// [`InvalidPage`](crate::error::Error::InvalidPage); nothing is written then.
pub fn paged_attention(
    query: RowsView,
    key_pages: PagesView,
    value_pages: PagesView,
    tables: &BatchTables,
    options: &AttentionOptions,
    out: &mut RowsViewMut,
    mut lse: Option<&mut [f32]>,
    _threads: &ThreadPool,
) -> Result<()> {
    check::shapes(&query, &key_pages, &value_pages, out, lse.as_deref())?;
    let [tokens, num_heads, head_dim] = query.shape();
    check::options(options, num_heads)?;
    let (k, v) = (*key_pages.layout(), *value_pages.layout());
    let sequences = check::sequences(tables, options, tokens, k.page_size, k.num_pages)?;
    let shape = reference::Shape { num_heads, num_kv_heads: k.num_heads, head_dim, v_head_dim: v.head_dim };
    let covered = sequences.last().map_or(0, |s| s.first_row + s.num_queries);
    for s in &sequences {
        let gather = |pages: &PagesView, dim: usize| {
            let mut dense = vec![0.0; s.len * k.num_heads * dim];
            for (i, into) in dense.chunks_exact_mut(dim).enumerate() {
                let (token, head) = (i / k.num_heads, i % k.num_heads);
                if (0..s.num_queries).any(|q| check::seen(options, s.len, s.num_queries, q).contains(&token))
                {
                    let page = s.pages[token / k.page_size] as usize;
                    kernels::load_slot(pages, page, head, token % k.page_size, into);
                }
            }
            dense
        };
        let mut q = vec![0.0; s.num_queries * num_heads * head_dim];
        for (i, into) in q.chunks_exact_mut(head_dim).enumerate() {
            kernels::load_row(&query, s.first_row + i / num_heads, i % num_heads, into);
        }
        let (keys, values) = (gather(&key_pages, head_dim), gather(&value_pages, v.head_dim));
        let (result, sums) = reference::attention(shape, &q, &keys, &values, options);
        for (i, row) in result.chunks_exact(v.head_dim).enumerate() {
            let row: Vec<f32> = row.iter().map(|&x| x as f32).collect();
            kernels::store_row(out, s.first_row + i / num_heads, i % num_heads, &row);
        }
        if let Some(lse) = lse.as_deref_mut() {
            for (lse, &sum) in lse[s.first_row * num_heads..].iter_mut().zip(&sums) {
                *lse = sum as f32;
            }
        }
    }
    for token in covered..tokens {
        for head in 0..num_heads {
            kernels::store_row(out, token, head, &vec![0.0; v.head_dim]);
        }
    }
    if let Some(lse) = lse {
        lse[covered * num_heads..].fill(f32::NEG_INFINITY);
    }
    Ok(())
}
