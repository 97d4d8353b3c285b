//! Single rows and slots: widening to f32, rounding back, copying.

use half::{bf16, f16};

use crate::dtype::{DType, Element};
use crate::storage::{PagesView, RowsView, RowsViewMut};

/// Widens one row.
///
/// # Panics
/// If the index is out of range or `into` is not one row long.
pub(crate) fn load_row(rows: &RowsView, token: usize, head: usize, into: &mut [f32]) {
    assert_eq!(into.len(), rows.shape()[2], "row length");
    let from = rows.row(token, head);
    // SAFETY: `row` checked the index; the view vouches for the row's elements.
    unsafe { widen(from, rows.dtype(), into) }
}

/// Rounds one row into place, to nearest, ties to even.
///
/// # Panics
/// If the index is out of range or `from` is not one row long.
pub(crate) fn store_row(rows: &mut RowsViewMut, token: usize, head: usize, from: &[f32]) {
    assert_eq!(from.len(), rows.shape()[2], "row length");
    let to = rows.row(token, head);
    // SAFETY: `row` checked the index; the view vouches for the row's elements, and `&mut` makes
    // this thread their only user.
    unsafe { round(from, to, rows.dtype()) }
}

/// Writes one token's heads into one slot of its page, converted to the pages' dtype.
///
/// # Panics
/// If an index is out of range, the shapes differ or the pages are read-only.
pub(crate) fn write_slot(rows: &RowsView, token: usize, pages: &PagesView, page: usize, slot: usize) {
    let layout = pages.layout();
    let dim = layout.head_dim;
    assert_eq!(rows.shape()[1..], [layout.num_heads, dim], "slot shape");
    assert!(pages.writable(), "pages are read-only");
    for head in 0..layout.num_heads {
        let (from, to) = (rows.row(token, head), pages.slot(page, head, slot));
        // SAFETY: both indices were checked and both views vouch for `dim` elements there; the
        // pages are writable, and their leases keep other threads away from this slot.
        unsafe { convert(from, rows.dtype(), to, layout.dtype, dim) }
    }
}

/// Copies the first `tokens` slots of a page, every head, to another page.
///
/// # Panics
/// If an index is out of range, the pages are one or they are read-only.
pub(crate) fn copy_slots(pages: &PagesView, source: usize, destination: usize, tokens: usize) {
    let layout = pages.layout();
    assert!(pages.writable(), "pages are read-only");
    assert!(source != destination, "one page");
    let bytes = layout.head_dim * layout.dtype.size();
    for head in 0..layout.num_heads {
        for token in 0..tokens {
            let (from, to) = (pages.slot(source, head, token), pages.slot(destination, head, token));
            // SAFETY: both slots are inside the view and the pages are writable. `copy` allows for
            // strides that make the slots overlap.
            unsafe { to.copy_from(from, bytes) }
        }
    }
}

/// # Safety
/// `from` is valid for reads of `into.len()` elements of `dtype`.
unsafe fn widen(from: *const u8, dtype: DType, into: &mut [f32]) {
    /// # Safety
    /// `from` is valid for reads of `into.len()` elements.
    unsafe fn each<T: Element>(from: *const T, into: &mut [f32]) {
        for (i, x) in into.iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            *x = unsafe { from.add(i).read_unaligned() }.to_f32();
        }
    }
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            DType::F32 => each::<f32>(from.cast(), into),
            DType::F16 => each::<f16>(from.cast(), into),
            DType::BF16 => each::<bf16>(from.cast(), into),
        }
    }
}

/// # Safety
/// `to` is valid for writes of `from.len()` elements of `dtype`.
unsafe fn round(from: &[f32], to: *mut u8, dtype: DType) {
    /// # Safety
    /// `to` is valid for writes of `from.len()` elements.
    unsafe fn each<T: Element>(from: &[f32], to: *mut T) {
        for (i, &x) in from.iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { to.add(i).write_unaligned(T::from_f32(x)) }
        }
    }
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            DType::F32 => each::<f32>(from, to.cast()),
            DType::F16 => each::<f16>(from, to.cast()),
            DType::BF16 => each::<bf16>(from, to.cast()),
        }
    }
}

/// # Safety
/// `from` is valid for reads of `len` elements of `from_dtype`, `to` for writes of `len` elements of
/// `to_dtype`, and they don't overlap.
unsafe fn convert(from: *const u8, from_dtype: DType, to: *mut u8, to_dtype: DType, len: usize) {
    if from_dtype == to_dtype {
        // SAFETY: the caller's promise.
        return unsafe { to.copy_from_nonoverlapping(from, len * to_dtype.size()) };
    }
    // Through f32, a piece at a time: no allocation whatever the head_dim.
    let mut buffer = [0.0; 64];
    for start in (0..len).step_by(buffer.len()) {
        let piece = &mut buffer[..(len - start).min(64)];
        // SAFETY: `piece` ends at or before `len`; the caller's promise covers the rest.
        unsafe {
            widen(from.add(start * from_dtype.size()), from_dtype, piece);
            round(piece, to.add(start * to_dtype.size()), to_dtype);
        }
    }
}
