//! Elements of pages as words of two bfloat16.

use half::bf16;

use super::pairs::Pairs;
use super::stored::Stored;
use crate::dtype::F8E4M3;

/// An element type whose neighbours share a word of two bfloat16, without loss.
///
/// A word stands for as much as [`Stored::load`] makes of its elements.
pub(super) trait Words: Stored {
    /// Elements in which pages hold a word.
    const PER_WORD: usize;
    /// Whether [`two`](Self::two) vectors are not one behind the other: of every eight words, the first four
    /// are in the first vector.
    const ZIPPED: bool;

    /// A vector of `LANES` words, in order.
    ///
    /// # Safety
    /// - `from` is valid for reads of so many words; any alignment.
    unsafe fn one<S: Pairs>(simd: S, from: *const Self) -> S::F32;

    /// Two vectors of `LANES` words each.
    ///
    /// # Safety
    /// - `from` is valid for reads of so many words; any alignment.
    unsafe fn two<S: Pairs>(simd: S, from: *const Self) -> [S::F32; 2];
}

/// Words that were made ready.
impl Words for f32 {
    const PER_WORD: usize = 1;
    const ZIPPED: bool = false;

    #[inline(always)]
    unsafe fn one<S: Pairs>(simd: S, from: *const Self) -> S::F32 {
        // SAFETY: the caller's promise.
        unsafe { simd.load(from) }
    }

    #[inline(always)]
    unsafe fn two<S: Pairs>(simd: S, from: *const Self) -> [S::F32; 2] {
        // SAFETY: the caller's promise.
        unsafe { [simd.load(from), simd.load(from.add(S::LANES))] }
    }
}

impl Words for bf16 {
    const PER_WORD: usize = 2;
    const ZIPPED: bool = false;

    #[inline(always)]
    unsafe fn one<S: Pairs>(simd: S, from: *const Self) -> S::F32 {
        // SAFETY: the caller's promise; two share the bits of a float, and any bits are one.
        unsafe { f32::one(simd, from.cast()) }
    }

    #[inline(always)]
    unsafe fn two<S: Pairs>(simd: S, from: *const Self) -> [S::F32; 2] {
        // SAFETY: the caller's promise; two share the bits of a float, and any bits are one.
        unsafe { f32::two(simd, from.cast()) }
    }
}

impl Words for i8 {
    const PER_WORD: usize = 2;
    const ZIPPED: bool = true;

    #[inline(always)]
    unsafe fn one<S: Pairs>(simd: S, from: *const Self) -> S::F32 {
        // SAFETY: the caller's promise.
        simd.words_of_i8(unsafe { simd.load_eights(from.cast()) })[0]
    }

    #[inline(always)]
    unsafe fn two<S: Pairs>(simd: S, from: *const Self) -> [S::F32; 2] {
        // SAFETY: the caller's promise; four share the bits of a float, and any bits are one.
        simd.words_of_i8(unsafe { simd.load(from.cast()) })
    }
}

impl Words for F8E4M3 {
    const PER_WORD: usize = 2;
    const ZIPPED: bool = true;

    #[inline(always)]
    unsafe fn one<S: Pairs>(simd: S, from: *const Self) -> S::F32 {
        // SAFETY: the caller's promise.
        simd.words_of_f8(unsafe { simd.load_eights(from.cast()) })[0]
    }

    #[inline(always)]
    unsafe fn two<S: Pairs>(simd: S, from: *const Self) -> [S::F32; 2] {
        // SAFETY: the caller's promise; four share the bits of a float, and any bits are one.
        simd.words_of_f8(unsafe { simd.load(from.cast()) })
    }
}
