//! Certifying what quantised keys and values can have done to a result.

use super::check::Sequence;
use super::{AttentionOptions, BatchTables, ThreadPool, prepare};
use crate::error::{Error, Result};
use crate::kernels::{self, Block};
use crate::storage::{PagesView, RowsView};

/// How many multiply-adds of attention a row's bound is worth, roughly.
const COST: u64 = 20;

/// For each row of [`paged_attention`](super::paged_attention) over quantised pages: a bound on how far
/// any of its elements lies from that of attention over the keys and values as they were written.
///
/// `bound`: `[tokens * num_heads]`; the other arguments are those of the attention. The two results
/// that it is about are those of exact arithmetic: what float32 and the output's dtype round comes on
/// top. It holds for pages that [`write_pages`](super::write_pages) wrote with a scale per token. A row
/// that sees no key has bound 0, one that sees NaN has NaN. It takes some tens of times as long as
/// attention of the same rows; `docs/design.md` derives it.
///
/// # Errors
/// As of attention; [`Error::Layout`] for pages that are not quantised, or have a scale per head, with
/// which nobody knows how much was cut off. Nothing is written then.
pub fn error_bound(
    query: RowsView,
    key_pages: PagesView,
    value_pages: PagesView,
    tables: &BatchTables,
    options: &AttentionOptions,
    bound: &mut [f32],
    threads: &ThreadPool,
) -> Result<()> {
    let (level, call, sequences) = prepare(query, key_pages, value_pages, tables, options)?;
    check_pages(&key_pages)?;
    check_pages(&value_pages)?;
    let [tokens, num_heads, head_dim] = query.shape();
    if bound.len() != tokens * num_heads {
        return Err(Error::Layout(format!(
            "bound has {} elements, not {tokens} tokens of {num_heads} heads",
            bound.len()
        )));
    }
    let group = call.group();
    let covered = sequences.last().map_or(0, |s| s.first_row + s.num_queries);
    let (rows, of_no_sequence) = bound.split_at_mut(covered * num_heads);
    let of_rows = sequences.iter().flat_map(|s| (0..s.num_queries).map(move |query| (s, query)));
    let mut work = 0;
    let mut tasks = Vec::new();
    for ((sequence, query), bounds) in of_rows.zip(rows.chunks_exact_mut(num_heads)) {
        for (kv_head, bounds) in bounds.chunks_exact_mut(group).enumerate() {
            let block = block(sequence, query, kv_head);
            work += COST * (block.seen(call.mask).len() * group * head_dim) as u64;
            tasks.push((block, bounds));
        }
    }
    let workers = threads.workers(work)?;
    of_no_sequence.fill(0.0);
    workers.for_each(tasks, |(block, bounds)| {
        for (bound, of_row) in bounds.iter_mut().zip(kernels::error_bound(level, &call, &block)) {
            // Up, wherever float32 rounds to; 0 stays.
            let nearest = of_row as f32;
            *bound = if f64::from(nearest) < of_row { nearest.next_up() } else { nearest };
        }
    });
    Ok(())
}

fn check_pages(pages: &PagesView) -> Result<()> {
    if pages.token_scales().is_some() {
        return Ok(());
    }
    let dtype = pages.layout().dtype;
    Err(Error::Layout(if dtype.is_quantised() {
        "no bound is known where heads have one scale: what was too large for it was cut off".to_owned()
    } else {
        format!("pages of {dtype} are not quantised: there is no error to bound")
    }))
}

/// One query of a sequence, in one KV head.
fn block<'a>(sequence: &Sequence<'a>, query: usize, kv_head: usize) -> Block<'a> {
    Block {
        pages: sequence.pages,
        len: sequence.len,
        first_row: sequence.first_row + query,
        num_queries: 1,
        position: sequence.len as i64 - sequence.num_queries as i64 + query as i64,
        first_kv_head: kv_head,
        num_kv_heads: 1,
        prefill: false,
    }
}
