//! From floats to eight bits and a scale.

use super::rows::{PIECE, round, widen};
use crate::dtype::{DType, F8E4M3};
use crate::storage::RowsView;

/// The scale with which one row's largest number becomes the largest that a quantised type has; 0
/// for a row of zeros. `None` where a number is infinite or none at all.
///
/// # Panics
/// If the index is out of range.
pub(crate) fn row_scale(rows: &RowsView, token: usize, head: usize, dtype: DType) -> Option<f32> {
    let (dim, from) = (rows.shape()[2], rows.row(token, head));
    let mut piece = [0.0; PIECE];
    // As integers, magnitudes are in the order of their numbers, infinities and NaN above them all.
    let mut largest = 0;
    for start in (0..dim).step_by(PIECE) {
        let piece = &mut piece[..(dim - start).min(PIECE)];
        // SAFETY: `row` checked the index; the piece ends with the row.
        unsafe { widen(from.add(start * rows.dtype().size()), rows.dtype(), piece) };
        largest = piece.iter().fold(largest, |largest, x| largest.max(x.abs().to_bits()));
    }
    match f32::from_bits(largest) {
        0.0 => Some(0.0),
        largest if largest.is_finite() => {
            // Not below what keeps its inverse finite: such rows are coarser than they need be.
            let scale = (largest / largest_of(dtype)).max(f32::MIN_POSITIVE);
            // Rounded down where the largest number would come back as infinity.
            Some(if (scale * largest_of(dtype)).is_finite() { scale } else { scale.next_down() })
        }
        _ => None,
    }
}

/// Divides one row by a scale and rounds it into place, to the nearest and not beyond the largest.
///
/// # Safety
/// - `from` is valid for reads of `dim` elements of `from_dtype`, `to` for writes of `dim` elements of
///   `to_dtype`, and they don't overlap.
pub(super) unsafe fn quantise(
    from: *const u8,
    from_dtype: DType,
    to: *mut u8,
    to_dtype: DType,
    dim: usize,
    scale: f32,
) {
    let inverse = if scale == 0.0 { 0.0 } else { scale.recip() };
    let mut piece = [0.0; PIECE];
    for start in (0..dim).step_by(PIECE) {
        let piece = &mut piece[..(dim - start).min(PIECE)];
        // SAFETY: the piece ends at or before `dim`; the caller's promise covers the rest.
        unsafe {
            widen(from.add(start * from_dtype.size()), from_dtype, piece);
            for x in piece.iter_mut() {
                *x *= inverse;
            }
            round(piece, to.add(start * to_dtype.size()), to_dtype);
        }
    }
}

/// The largest number of a quantised type.
fn largest_of(dtype: DType) -> f32 {
    match dtype {
        DType::F8E4M3 => F8E4M3::MAX,
        _ => i8::MAX.into(),
    }
}
