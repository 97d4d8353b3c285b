//! Putting keys and values into pages, and copying tokens from page to page.

use super::ThreadPool;
use super::check::scales as check_scales;
use super::threads::Workers;
use crate::error::{Error, Result};
use crate::ids::PageId;
use crate::kernels;
use crate::layout::PagesLayout;
use crate::storage::{PagesView, RowsView};

/// Writes the keys and values of new tokens into their slots, converted to the pages' dtype
/// (rounded to nearest, ties to even).
///
/// For quantised pages each token and head gets the scale that makes its largest number the largest
/// of the type, 0 if all are zero; where a head has one scale, numbers beyond the largest become
/// the largest.
///
/// `key`: `[tokens, num_kv_heads, head_dim]`, `value`: `[tokens, num_kv_heads, v_head_dim]`,
/// `slot_mapping`: `[tokens]`, slot `page * page_size + offset` or -1 to skip the token. Where a
/// slot is named twice the later token wins, whatever the number of threads.
///
/// # Errors
/// [`Error::Layout`] where shapes differ, pages are read-only or their slots overlap;
/// [`Error::InvalidPage`] or [`Error::Value`] for a slot outside the pool, and [`Error::Value`] for a
/// number that is not finite on its way into quantised pages. Nothing is written then.
pub fn write_pages(
    key: RowsView,
    value: RowsView,
    key_pages: PagesView,
    value_pages: PagesView,
    slot_mapping: &[i64],
    threads: &ThreadPool,
) -> Result<()> {
    let (k, v) = (key_pages.layout(), value_pages.layout());
    if (k.num_pages, k.page_size) != (v.num_pages, v.page_size) {
        return Err(Error::Layout(format!(
            "key pages [{}, {} tokens] and value pages [{}, {} tokens] differ",
            k.num_pages, k.page_size, v.num_pages, v.page_size
        )));
    }
    check_write("key", &key, &key_pages, slot_mapping)?;
    check_write("value", &value, &value_pages, slot_mapping)?;
    scatter(&[("key", key, key_pages), ("value", value, value_pages)], slot_mapping, threads)
}

/// [`write_pages`] for keys alone, or for a cache whose values are part of its keys (MLA).
pub fn write_rows(
    rows: RowsView,
    pages: PagesView,
    slot_mapping: &[i64],
    threads: &ThreadPool,
) -> Result<()> {
    check_write("key", &rows, &pages, slot_mapping)?;
    scatter(&[("key", rows, pages)], slot_mapping, threads)
}

/// Copies the first `tokens` slots of page `source` to page `destination`, every head: the copy of
/// copy-on-write, which must not touch slots that were never computed. Scales that live with them
/// go along.
///
/// # Errors
/// [`Error::InvalidPage`] for a page outside the pool or a page copied to itself;
/// [`Error::Layout`] where `tokens` exceeds the page or the pages are read-only.
pub fn copy_tokens(pages: PagesView, source: PageId, destination: PageId, tokens: usize) -> Result<()> {
    let layout = pages.layout();
    for page in [source, destination] {
        if page.index() >= layout.num_pages {
            return Err(invalid(i64::from(page.0), layout, "cannot be copied"));
        }
    }
    if source == destination {
        return Err(invalid(i64::from(source.0), layout, "cannot be copied to itself"));
    }
    if tokens > layout.page_size {
        return Err(Error::Layout(format!("{tokens} tokens do not fit a page of {}", layout.page_size)));
    }
    check_writable(&pages)?;
    kernels::copy_slots(&pages, source.index(), destination.index(), tokens);
    Ok(())
}

fn check_write(name: &str, rows: &RowsView, pages: &PagesView, slot_mapping: &[i64]) -> Result<()> {
    let layout = pages.layout();
    let wanted = [slot_mapping.len(), layout.num_heads, layout.head_dim];
    if rows.shape() != wanted {
        return Err(Error::Layout(format!(
            "{name} has shape {:?}; {} slots in pages of {} heads and dim {} need {wanted:?}",
            rows.shape(),
            slot_mapping.len(),
            layout.num_heads,
            layout.head_dim
        )));
    }
    check_writable(pages)?;
    check_scales(name, pages)?;
    if rows.dtype().is_quantised() {
        return Err(Error::Layout(format!("{name} is {}: only pages hold such elements", rows.dtype())));
    }
    let page_size = layout.page_size as i64;
    let end = (layout.num_pages as i64).saturating_mul(page_size);
    for (token, &slot) in slot_mapping.iter().enumerate() {
        if slot >= end {
            return Err(invalid(slot / page_size.max(1), layout, "slot_mapping names a slot in it"));
        }
        if slot < -1 {
            return Err(Error::Value(format!("slot_mapping[{token}] is {slot}; only -1 skips a token")));
        }
    }
    Ok(())
}

fn check_writable(pages: &PagesView) -> Result<()> {
    if !pages.writable() {
        return Err(Error::Layout("the pages are read-only".into()));
    }
    if !slots_are_apart(pages.layout()) {
        return Err(Error::Layout(format!(
            "slots overlap, writing one would change another: {:?}",
            pages.layout()
        )));
    }
    match pages.token_scales() {
        Some(scales) => check_writable(&scales),
        None => Ok(()),
    }
}

/// Whether the strides keep all slots apart (as for a dense array, a slice or a transpose of one).
fn slots_are_apart(layout: &PagesLayout) -> bool {
    let mut axes = [
        (layout.page_stride, layout.num_pages),
        (layout.head_stride, layout.num_heads),
        (layout.token_stride, layout.page_size),
    ];
    axes.sort_unstable();
    let mut span = layout.head_dim;
    axes.into_iter().filter(|&(_, count)| count > 1).all(|(stride, count)| {
        let apart = stride >= span;
        span += stride * (count - 1);
        apart
    })
}

fn invalid(page: i64, layout: &PagesLayout, reason: &'static str) -> Error {
    Error::InvalidPage { page, num_pages: layout.num_pages as u64, reason }
}

/// Slots that go to one thread together: two tokens for one slot meet in the same thread, in order.
const SLOTS_TOGETHER: usize = 16;

/// Parts that a write is cut into at most.
const MOST_PARTS: usize = 16;

/// Needs checked arguments.
fn scatter(writes: &[(&str, RowsView, PagesView)], slot_mapping: &[i64], threads: &ThreadPool) -> Result<()> {
    let elements: usize = writes.iter().map(|(_, rows, _)| rows.shape().iter().product::<usize>()).sum();
    let workers = threads.workers(elements as u64)?;
    let scales = writes
        .iter()
        .map(|(name, rows, pages)| scales(name, rows, pages, slot_mapping, workers))
        .collect::<Result<Vec<_>>>()?;
    // Every part looks at all slots, and a few already take all the bandwidth there is.
    let parts = workers.count().min(MOST_PARTS);
    workers.for_each((0..parts).collect(), |part| {
        for (token, &slot) in slot_mapping.iter().enumerate() {
            let Ok(slot) = usize::try_from(slot) else { continue };
            if slot / SLOTS_TOGETHER % parts != part {
                continue;
            }
            for ((_, rows, pages), scales) in writes.iter().zip(&scales) {
                let layout = pages.layout();
                let (page, slot) = (slot / layout.page_size, slot % layout.page_size);
                let scales = if scales.is_empty() { &[] } else { &scales[token * layout.num_heads..] };
                kernels::write_slot(rows, token, scales, pages, page, slot);
            }
        }
    });
    Ok(())
}

/// The scales of quantised rows, `[tokens, heads]`; none for other pages.
fn scales(
    name: &str,
    rows: &RowsView,
    pages: &PagesView,
    slot_mapping: &[i64],
    workers: Workers,
) -> Result<Vec<f32>> {
    let (dtype, heads) = (pages.layout().dtype, pages.layout().num_heads);
    if !dtype.is_quantised() || heads == 0 {
        return Ok(Vec::new());
    }
    let mut scales = vec![0.0; slot_mapping.len() * heads];
    let together = slot_mapping.len().div_ceil(workers.count()).max(1);
    let parts: Vec<_> = scales.chunks_mut(together * heads).enumerate().collect();
    workers.for_each(parts, |(part, scales)| {
        for (i, scales) in scales.chunks_exact_mut(heads).enumerate() {
            let token = part * together + i;
            // Padding may hold anything.
            if slot_mapping[token] >= 0 {
                for (head, scale) in scales.iter_mut().enumerate() {
                    *scale = kernels::row_scale(rows, token, head, dtype).unwrap_or(f32::NAN);
                }
            }
        }
    });
    if let Some(place) = scales.iter().position(|scale| scale.is_nan()) {
        let (token, head) = (place / heads, place % heads);
        return Err(Error::Value(format!(
            "{name}[{token}, {head}] holds NaN or infinity, which {dtype} pages can't"
        )));
    }
    if let Some(given) = pages.head_scales() {
        scales.chunks_exact_mut(heads).for_each(|scales| scales.copy_from_slice(given));
    }
    Ok(scales)
}
