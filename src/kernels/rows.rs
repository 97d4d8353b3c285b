//! Single rows and slots: widening to f32, rounding back, copying.

use half::{bf16, f16};

use super::quantise::quantise;
use crate::dtype::{DType, Element, F8E4M3};
use crate::storage::{PagesView, RowsView, RowsViewMut};

/// Elements that go through float32 together: no allocation whatever the `head_dim`.
pub(super) const PIECE: usize = 64;

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

/// Writes one token's heads into one slot of its page, converted to the pages' dtype. Of quantised
/// pages, `scales` holds one scale per head, stored with the token where scales live with tokens.
///
/// # Panics
/// If an index is out of range, the shapes differ, scales are missing or the pages are read-only.
pub(crate) fn write_slot(
    rows: &RowsView,
    token: usize,
    scales: &[f32],
    pages: &PagesView,
    page: usize,
    slot: usize,
) {
    let layout = pages.layout();
    let token_scales = pages.token_scales();
    let dim = layout.head_dim;
    assert_eq!(rows.shape()[1..], [layout.num_heads, dim], "slot shape");
    assert!(pages.writable(), "pages are read-only");
    assert!(!layout.dtype.is_quantised() || scales.len() >= layout.num_heads, "a scale per head");
    for head in 0..layout.num_heads {
        let (from, to) = (rows.row(token, head), pages.slot(page, head, slot));
        // SAFETY: both indices were checked and both views vouch for `dim` elements there, that of
        // scales for one; the pages are writable, and their leases keep other threads away from
        // this slot.
        unsafe {
            match scales.get(head) {
                Some(&scale) if layout.dtype.is_quantised() => {
                    quantise(from, rows.dtype(), to, layout.dtype, dim, scale);
                    if let Some(pages) = &token_scales {
                        pages.slot(page, head, slot).cast::<f32>().write_unaligned(scale);
                    }
                }
                _ => convert(from, rows.dtype(), to, layout.dtype, dim),
            }
        }
    }
}

/// Copies the first `tokens` slots of a page, every head, to another page; scales that live with
/// them too.
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
    if let Some(scales) = pages.token_scales() {
        copy_slots(&scales, source, destination, tokens);
    }
}

/// # Safety
/// `from` is valid for reads of `into.len()` elements of `dtype`.
pub(super) unsafe fn widen(from: *const u8, dtype: DType, into: &mut [f32]) {
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
            DType::I8 => each::<i8>(from.cast(), into),
            DType::F8E4M3 => each::<F8E4M3>(from.cast(), into),
        }
    }
}

/// # Safety
/// `to` is valid for writes of `from.len()` elements of `dtype`.
pub(super) unsafe fn round(from: &[f32], to: *mut u8, dtype: DType) {
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
            DType::I8 => each::<i8>(from, to.cast()),
            DType::F8E4M3 => each::<F8E4M3>(from, to.cast()),
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
    let mut buffer = [0.0; PIECE];
    for start in (0..len).step_by(PIECE) {
        let piece = &mut buffer[..(len - start).min(PIECE)];
        // SAFETY: `piece` ends at or before `len`; the caller's promise covers the rest.
        unsafe {
            widen(from.add(start * from_dtype.size()), from_dtype, piece);
            round(piece, to.add(start * to_dtype.size()), to_dtype);
        }
    }
}
