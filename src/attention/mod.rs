//! Attention straight from scattered pages, and what goes with it.
//!
//! Arguments are checked completely before anything is written; the arithmetic lives in
//! [`crate::kernels`], the definition it is tested against in [`mod@reference`].

mod bound;
mod cascade;
mod check;
mod fold;
mod merge;
mod options;
mod plan;
pub mod reference;
mod slopes;
mod threads;
mod write;

pub use bound::error_bound;
pub use merge::merge_states;
pub use options::{AttentionOptions, BatchTables};
pub use slopes::alibi_slopes;
pub use threads::ThreadPool;
pub use write::{copy_tokens, write_pages, write_rows};

use check::Sequence;

use crate::error::Result;
use crate::kernels::{Call, Isa, Level, Mask};
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
    lse: Option<&mut [f32]>,
    threads: &ThreadPool,
) -> Result<()> {
    check::outputs(&query, &value_pages, out, lse.as_deref())?;
    let (level, call, sequences) = prepare(query, key_pages, value_pages, tables, options)?;
    plan::run(level, &call, &sequences, out, lse, threads)
}

/// Checks all that is read, and puts it together.
fn prepare<'a>(
    query: RowsView<'a>,
    key_pages: PagesView<'a>,
    value_pages: PagesView<'a>,
    tables: &BatchTables<'a>,
    options: &AttentionOptions<'a>,
) -> Result<(Level, Call<'a>, Vec<Sequence<'a>>)> {
    check::shapes(&query, &key_pages, &value_pages)?;
    let [tokens, num_heads, head_dim] = query.shape();
    check::options(options, num_heads)?;
    let mask = Mask {
        causal: options.causal,
        window_left: (options.window_left >= 0).then_some(options.window_left),
    };
    let pages = key_pages.layout();
    let sequences = check::sequences(tables, options, mask, tokens, pages.page_size, pages.num_pages)?;
    let level = options.isa.map_or_else(Isa::current, Ok)?.level()?;
    let call = Call {
        query,
        key_pages,
        value_pages,
        mask,
        scale: options.scale.unwrap_or_else(|| (1.0 / (head_dim as f64).sqrt()) as f32),
        soft_cap: options.logits_soft_cap,
        slopes: options.alibi_slopes,
        sinks: options.sinks,
    };
    Ok((level, call, sequences))
}
