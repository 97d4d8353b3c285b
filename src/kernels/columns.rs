//! Sums of several rows in as many columns at once as registers hold: what products and weighted sums have in
//! common.

#![expect(clippy::needless_range_loop, reason = "zip stays a call where a profile has no LTO at all")]

use std::ops::Range;

use super::simd::Simd;

/// Vectors of columns for so many rows, of whose sums registers hold as many beside weights and values, and
/// none waits for its last addition.
pub(super) const fn at_once<S: Simd>(rows: usize) -> usize {
    match rows {
        1 => 8,
        2 | 3 => S::REGISTERS / 4,
        4..=6 => S::REGISTERS / 8,
        _ => S::REGISTERS / 16,
    }
}

/// Work on some vectors of columns at once.
pub(super) trait Columns<S: Simd> {
    /// Vectors at once, at most: a power of two up to 8.
    const MOST: usize;

    /// Does it for `C` vectors from number `first` on; `#[inline(always)]`.
    ///
    /// # Safety
    /// - What the implementing type asks for; it has these vectors.
    unsafe fn columns<const C: usize>(&self, simd: S, first: usize);

    /// Does it for all of these vectors, of an even number two at least at once.
    ///
    /// # Safety
    /// - As for `columns`.
    #[inline(always)]
    unsafe fn each(&self, simd: S, vectors: Range<usize>) {
        let Range { start: mut first, end } = vectors;
        while first < end {
            let mut count = Self::MOST;
            while count > end - first {
                count /= 2;
            }
            // SAFETY: the caller's promise; so many vectors are left.
            unsafe {
                match count {
                    1 => self.columns::<1>(simd, first),
                    2 => self.columns::<2>(simd, first),
                    // Not compiled where fewer are the most.
                    4 if Self::MOST > 2 => self.columns::<4>(simd, first),
                    _ if Self::MOST > 4 => self.columns::<8>(simd, first),
                    _ => unreachable!("{count} of at most {} vectors", Self::MOST),
                }
            }
            first += count;
        }
    }
}

/// `C` vectors of each of `R` rows that lie `stride` apart.
///
/// # Safety
/// - They are valid for reads.
#[inline(always)]
pub(super) unsafe fn load_rows<S: Simd, const R: usize, const C: usize>(
    simd: S,
    from: *const f32,
    stride: usize,
) -> [[S::F32; C]; R] {
    let mut rows = [[simd.splat(0.0); C]; R];
    for r in 0..R {
        for c in 0..C {
            // SAFETY: the caller's promise.
            rows[r][c] = unsafe { simd.load(from.add(r * stride + c * S::LANES)) };
        }
    }
    rows
}

/// The way back.
///
/// # Safety
/// - They are valid for writes.
#[inline(always)]
pub(super) unsafe fn store_rows<S: Simd, const R: usize, const C: usize>(
    simd: S,
    rows: [[S::F32; C]; R],
    to: *mut f32,
    stride: usize,
) {
    for r in 0..R {
        for c in 0..C {
            // SAFETY: the caller's promise.
            unsafe { simd.store(to.add(r * stride + c * S::LANES), rows[r][c]) }
        }
    }
}
