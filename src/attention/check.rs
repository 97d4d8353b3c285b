//! Every argument is judged here before anything is written.

use super::{AttentionOptions, BatchTables};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::Mask;
use crate::layout::PagesLayout;
use crate::storage::{PagesView, RowsView, RowsViewMut};

/// One sequence of a batch, checked.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sequence<'a> {
    /// Its row of the block table, as far as its length reaches.
    pub(super) pages: &'a [i32],
    /// Its first query row.
    pub(super) first_row: usize,
    /// Its query rows.
    pub(super) num_queries: usize,
    /// Its keys.
    pub(super) len: usize,
}

/// Shapes and dtypes of what is read agree.
pub(super) fn shapes(query: &RowsView, key_pages: &PagesView, value_pages: &PagesView) -> Result<()> {
    let (key, value) = (key_pages.layout(), value_pages.layout());
    let [_, num_heads, head_dim] = query.shape();
    if key.num_heads == 0 || head_dim == 0 || value.head_dim == 0 || key.page_size == 0 {
        return Err(Error::Layout(format!(
            "sizes must be at least 1: {} KV heads, head_dim {head_dim}, v_head_dim {}, page_size {}",
            key.num_heads, value.head_dim, key.page_size
        )));
    }
    let of_pages = |l: &PagesLayout| (l.num_pages, l.num_heads, l.page_size, l.dtype);
    if of_pages(key) != of_pages(value) {
        return Err(Error::Layout(format!(
            "key and value pages must agree in (pages, heads, page_size, dtype): {:?} and {:?}",
            of_pages(key),
            of_pages(value)
        )));
    }
    scales("key", key_pages)?;
    scales("value", value_pages)?;
    if query.dtype().is_quantised() {
        return Err(Error::Layout(format!("query is {}: only pages hold such elements", query.dtype())));
    }
    if head_dim != key.head_dim {
        return Err(Error::Layout(format!("query head_dim {head_dim}, key head_dim {}", key.head_dim)));
    }
    if num_heads == 0 || num_heads % key.num_heads != 0 {
        return Err(Error::Layout(format!(
            "{num_heads} query heads are not a multiple of {} KV heads",
            key.num_heads
        )));
    }
    Ok(())
}

/// So do those of what is written.
pub(super) fn outputs(
    query: &RowsView,
    value_pages: &PagesView,
    out: &RowsViewMut,
    lse: Option<&[f32]>,
) -> Result<()> {
    let [tokens, num_heads, _] = query.shape();
    let shape = [tokens, num_heads, value_pages.layout().head_dim];
    if out.shape() != shape {
        return Err(Error::Layout(format!("out has shape {:?}, not {shape:?}", out.shape())));
    }
    if out.dtype() != query.dtype() {
        return Err(Error::Layout(format!("out is {}, query is {}", out.dtype(), query.dtype())));
    }
    if let Some(lse) = lse
        && lse.len() != tokens * num_heads
    {
        return Err(Error::Layout(format!(
            "lse has {} elements, not {tokens} tokens of {num_heads} heads",
            lse.len()
        )));
    }
    Ok(())
}

/// Quantised pages have scales, one per token and head or one per head; others have none.
pub(super) fn scales(name: &str, pages: &PagesView) -> Result<()> {
    let layout = pages.layout();
    match (layout.dtype.is_quantised(), pages.scales()) {
        (false, None) => Ok(()),
        (true, None) => Err(Error::Layout(format!("{name} pages of {} need scales", layout.dtype))),
        (false, Some(_)) => Err(Error::Layout(format!("{name} pages of {} have no scales", layout.dtype))),
        (true, Some(scales)) => {
            let of = |l: &PagesLayout| (l.num_pages, l.num_heads, l.page_size);
            if of(&scales.layout) == of(layout) && scales.layout.dtype == DType::F32 {
                return Ok(());
            }
            Err(Error::Layout(format!(
                "scales of {name} pages are {} for (pages, heads, page_size) {:?}, not float32 for {:?}",
                scales.layout.dtype,
                of(&scales.layout),
                of(layout)
            )))
        }
    }
}

/// Numbers are finite and in range.
pub(super) fn options(options: &AttentionOptions, num_heads: usize) -> Result<()> {
    if let Some(scale) = options.scale
        && !scale.is_finite()
    {
        return Err(Error::Value(format!("scale must be finite, not {scale}")));
    }
    let cap = options.logits_soft_cap;
    if !cap.is_finite() || cap < 0.0 {
        return Err(Error::Value(format!("logits_soft_cap must be 0 (off) or positive, not {cap}")));
    }
    if options.window_left < -1 {
        return Err(Error::Value(format!(
            "window_left must be -1 (off) or at least 0, not {}",
            options.window_left
        )));
    }
    if let Some(slopes) = options.alibi_slopes {
        per_head("alibi_slopes", slopes, num_heads, f32::is_finite)?;
    }
    if let Some(sinks) = options.sinks {
        // A sink of -inf is one that takes no share.
        per_head("sinks", sinks, num_heads, |sink| sink < f32::INFINITY)?;
    }
    Ok(())
}

fn per_head(name: &str, values: &[f32], num_heads: usize, good: impl Fn(f32) -> bool) -> Result<()> {
    if values.len() != num_heads {
        return Err(Error::Layout(format!("{name} has {} entries for {num_heads} heads", values.len())));
    }
    match values.iter().position(|&value| !good(value)) {
        Some(head) => Err(Error::Value(format!("{name}[{head}] is {}", values[head]))),
        None => Ok(()),
    }
}

/// The batch's sequences, each with every page it needs inside the pool.
pub(super) fn sequences<'a>(
    tables: &BatchTables<'a>,
    options: &AttentionOptions,
    mask: Mask,
    tokens: usize,
    page_size: usize,
    num_pages: usize,
) -> Result<Vec<Sequence<'a>>> {
    let BatchTables { block_table, max_pages, seq_lens, cu_seqlens_q } = *tables;
    let batch = seq_lens.len();
    if cu_seqlens_q.len() != batch + 1 {
        return Err(Error::Layout(format!(
            "cu_seqlens_q has {} entries for {batch} sequences, not {}",
            cu_seqlens_q.len(),
            batch + 1
        )));
    }
    if max_pages.checked_mul(batch) != Some(block_table.len()) {
        return Err(Error::Layout(format!(
            "block_table has {} entries, not {batch} sequences times {max_pages} pages",
            block_table.len()
        )));
    }
    if cu_seqlens_q[0] != 0 {
        return Err(Error::Value(format!("cu_seqlens_q[0] is {}, not 0", cu_seqlens_q[0])));
    }
    if cu_seqlens_q[batch] < 0 || cu_seqlens_q[batch] as usize > tokens {
        return Err(Error::Value(format!(
            "cu_seqlens_q[{batch}] is {}, but query has {tokens} rows",
            cu_seqlens_q[batch]
        )));
    }
    (0..batch)
        .map(|index| {
            let (first, next) = (cu_seqlens_q[index], cu_seqlens_q[index + 1]);
            if next < first {
                return Err(Error::Value(format!(
                    "cu_seqlens_q must not fall: [{index}] is {first}, [{}] is {next}",
                    index + 1
                )));
            }
            let len = usize::try_from(seq_lens[index])
                .map_err(|_| Error::Value(format!("seq_lens[{index}] is {}", seq_lens[index])))?;
            let num_queries = (next - first) as usize;
            // Without a mask positions mean nothing, and any number of queries may look at the keys.
            let positioned = options.causal || options.window_left >= 0 || options.alibi_slopes.is_some();
            if positioned && len > 0 && num_queries > len {
                return Err(Error::Value(format!(
                    "sequence {index} has {num_queries} queries but only {len} tokens"
                )));
            }
            let row = &block_table[index * max_pages..][..max_pages];
            let needed = len.div_ceil(page_size);
            if num_queries > 0 && needed > max_pages {
                return Err(Error::Layout(format!(
                    "sequence {index} has {len} tokens and needs {needed} pages of {page_size}, \
                     its table row has {max_pages}"
                )));
            }
            let pages = &row[..needed.min(max_pages)];
            if num_queries > 0 {
                let position = len as i64 - num_queries as i64;
                let first_seen = mask.seen(position, len).start / page_size;
                for &page in pages.get(first_seen..).unwrap_or_default() {
                    page_in_pool(i64::from(page), num_pages)?;
                }
            }
            Ok(Sequence { pages, first_row: first as usize, num_queries, len })
        })
        .collect()
}

/// Whether a page number names a page.
pub(super) fn page_in_pool(page: i64, num_pages: usize) -> Result<usize> {
    usize::try_from(page).ok().filter(|&page| page < num_pages).ok_or(Error::InvalidPage {
        page,
        num_pages: num_pages as u64,
        reason: "the table needs it but the pool has no such page",
    })
}
