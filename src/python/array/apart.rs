//! Whether arrays of pages that are written share memory: they may lie inside each other, as keys and
//! values of one buffer do.

use crate::error::{Error, Result};
use crate::layout::PagesLayout;
use crate::storage::PagesView;

/// Two of some arrays (first element, shape, and what the caller knows them by) that could share an
/// element, if there are such.
pub(super) fn overlap<T: Copy>(mut arrays: Vec<(*mut u8, PagesLayout, T)>) -> Result<Option<[T; 2]>> {
    arrays.sort_unstable_by_key(|(base, ..)| base.addr());
    for (i, (base, low, name)) in arrays.iter().enumerate() {
        let (start, end) = (base.addr(), base.addr() + low.span()? * low.dtype.size());
        for (base, high, other) in arrays[i + 1..].iter().take_while(|(base, ..)| base.addr() < end) {
            if high.span()? > 0 && !interleave(low, high, base.addr() - start) {
                return Ok(Some([*name, *other]));
            }
        }
    }
    Ok(None)
}

/// Refuses to write pages, and scales that live with them, that could share an element.
///
/// # Errors
/// `Layout`, with the names of two of them.
pub(in crate::python) fn check_written(pages: &[(&PagesView<'_>, &'static str)]) -> Result<()> {
    let of_pages = |&(pages, name): &(&PagesView<'_>, &'static str)| {
        let scales =
            pages.token_scales().map(|scales| (scales.base(), *scales.layout(), (name, "scales of ")));
        [Some((pages.base(), *pages.layout(), (name, ""))), scales].into_iter().flatten()
    };
    match overlap(pages.iter().flat_map(of_pages).collect())? {
        None => Ok(()),
        Some([(name, what), (other, of_what)]) => Err(Error::Layout(format!(
            "{what}{name} and {of_what}{other} are written, but overlap in memory"
        ))),
    }
}

/// Whether two arrays, `offset` bytes apart, take turns along a stride that both have: then what lies
/// inside that stride decides, and the rest repeats it.
fn interleave(low: &PagesLayout, high: &PagesLayout, offset: usize) -> bool {
    // In bytes.
    let axes = |layout: &PagesLayout| {
        let axes = [
            (layout.page_stride, layout.num_pages),
            (layout.head_stride, layout.num_heads),
            (layout.token_stride, layout.page_size),
        ];
        let size = layout.dtype.size();
        axes.into_iter().filter(|axis| axis.1 > 1).map(|axis| (axis.0 * size, axis.1)).collect::<Vec<_>>()
    };
    let row = |layout: &PagesLayout| layout.head_dim * layout.dtype.size();
    let (a, b) = (axes(low), axes(high));
    // Bytes spanned inside one period, if all other axes step by whole periods.
    let inside = |axes: &[(usize, usize)], row: usize, period: usize| {
        let mut span = row;
        for &(stride, count) in axes {
            if stride < period {
                span += stride * (count - 1);
            } else if stride % period != 0 {
                return None;
            }
        }
        Some(span)
    };
    a.iter().map(|axis| axis.0).filter(|&period| period > 0).any(|period| {
        let (Some(first), Some(second)) = (inside(&a, row(low), period), inside(&b, row(high), period))
        else {
            return false;
        };
        let at = offset % period;
        first <= at && at + second <= period
    })
}
