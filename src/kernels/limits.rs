//! The machine's limits as loops stripped of everything else: what attention is measured beside.

use std::marker::PhantomData;
use std::ops::Range;

use super::isa::{Isa, dispatch};
use super::method::{Method, Widened};
use super::simd::{Job, Simd};
use crate::error::Result;
use crate::storage::PagesView;

/// Reads whole pages, first byte to last, and does as little with them as can be.
///
/// Returns the largest of their bytes taken as floats: something that can't be left out.
///
/// # Errors
/// [`Error::Value`](crate::error::Error::Value) where the process's instruction set can't be had.
///
/// # Panics
/// If a page is out of range.
pub fn read_pages(pages: &PagesView, range: Range<usize>) -> Result<f32> {
    let level = Isa::current()?.level()?;
    let count = pages.layout().page_bytes() / size_of::<f32>();
    let mut max = f32::NEG_INFINITY;
    for page in range {
        let read = Read { from: pages.slot(page, 0, 0).cast(), count };
        // SAFETY: the view vouches for every element between a page's first and last; they are
        // plain numbers, and the caller's lease keeps writers away.
        max = max.max(dispatch!(level, simd => unsafe { simd.call(read) }));
    }
    Ok(max)
}

/// Multiplies and adds in registers, `times` over; returns the floating point operations done.
///
/// # Errors
/// [`Error::Value`](crate::error::Error::Value) where the CPU lacks the instruction set.
pub fn multiply_add(isa: Isa, times: usize) -> Result<u64> {
    let level = isa.level()?;
    // SAFETY: it asks for nothing.
    Ok(dispatch!(level, simd => unsafe { simd.call(floats(times)) }))
}

/// Multiplies bfloat16 and adds the products in pairs, in registers, `times` over; returns the floating
/// point operations done, or none where the instruction set has no such products.
///
/// # Errors
/// As [`multiply_add`].
pub fn multiply_add_pairs(isa: Isa, times: usize) -> Result<Option<u64>> {
    match isa.level()? {
        #[cfg(target_arch = "x86_64")]
        super::isa::Level::Avx512Bf16(simd) => {
            // Twice 0.5.
            let word = f32::from_bits(0x3F00_3F00);
            let job = MultiplyAdd::<super::method::Paired<f32>> { times, word, method: PhantomData };
            // SAFETY: it asks for nothing.
            Ok(Some(unsafe { simd.call(job) }))
        }
        _ => Ok(None),
    }
}

/// Bytes from what is read to what is asked for.
const AHEAD: usize = 2048;

/// The largest of `count` floats.
///
/// # Safety (of running it)
/// - `from` is valid for reads of `count` floats, aligned or not.
#[derive(Clone, Copy)]
struct Read {
    from: *const f32,
    count: usize,
}

impl<S: Simd> Job<S> for Read {
    type Output = f32;

    #[inline(always)]
    unsafe fn run(self, simd: S) -> f32 {
        const AT_ONCE: usize = 8;
        let mut max = [simd.splat(f32::NEG_INFINITY); AT_ONCE];
        let whole = self.count / (AT_ONCE * S::LANES) * AT_ONCE * S::LANES;
        for start in (0..whole).step_by(AT_ONCE * S::LANES) {
            // One line asked for per line read: more bandwidth than the CPU's own guesses bring.
            for ahead in (0..AT_ONCE * S::LANES).step_by(16) {
                simd.prefetch(self.from.wrapping_add(start + ahead).cast::<u8>().wrapping_add(AHEAD));
            }
            for (i, max) in max.iter_mut().enumerate() {
                // SAFETY: so many vectors end at or before `whole`.
                *max = simd.max(unsafe { simd.load(self.from.add(start + i * S::LANES)) }, *max);
            }
        }
        let mut largest = max.into_iter().map(|max| simd.max_lane(max)).fold(f32::NEG_INFINITY, f32::max);
        for i in whole..self.count {
            // SAFETY: `i` is below `count`.
            largest = largest.max(unsafe { self.from.add(i).read_unaligned() });
        }
        largest
    }
}

/// Multiplies and adds as a method does, `times` over; returns the floating point operations done.
struct MultiplyAdd<M> {
    times: usize,
    /// A word of the method, and what it is multiplied by.
    word: f32,
    method: PhantomData<M>,
}

impl<S: Simd, M: Method<S>> Job<S> for MultiplyAdd<M> {
    type Output = u64;

    #[inline(always)]
    unsafe fn run(self, simd: S) -> u64 {
        // As many sums as hide an addition's latency, in registers.
        const SUMS: usize = 12;
        let factor = simd.splat(std::hint::black_box(self.word));
        let mut sums = [simd.splat(1.0); SUMS];
        for _ in 0..self.times {
            for sum in &mut sums {
                *sum = M::multiply_add(simd, factor, factor, *sum);
            }
        }
        std::hint::black_box(sums.into_iter().map(|sum| simd.max_lane(sum)).fold(0.0, f32::max));
        (self.times * SUMS * S::LANES * M::PER_WORD * 2) as u64
    }
}

/// Of float32.
fn floats(times: usize) -> MultiplyAdd<Widened<f32>> {
    MultiplyAdd { times, word: 0.5, method: PhantomData }
}

#[cfg(test)]
mod tests {
    use super::super::isa::{Isa, dispatch, tested};
    use super::super::simd::Simd;
    use super::{Read, floats, multiply_add, multiply_add_pairs};

    #[test]
    fn a_read_sees_every_element() {
        for level in tested() {
            for count in [1, 7, 128, 300] {
                for largest in 0..count {
                    let mut floats = vec![1.0_f32; count];
                    floats[largest] = 2.0;
                    let read = Read { from: floats.as_ptr(), count };
                    // SAFETY: so many floats are there.
                    let max = dispatch!(level, simd => unsafe { simd.call(read) });
                    assert!((max - 2.0).abs() < f32::EPSILON, "{level:?}: {largest} of {count}");
                }
            }
            // SAFETY: it asks for nothing.
            let done = dispatch!(level, simd => unsafe { simd.call(floats(3)) });
            assert_eq!(done % 72, 0, "{level:?}");
        }
    }

    #[test]
    fn pairs_are_twice_the_operations_where_they_are_had() {
        for isa in Isa::ALL {
            if isa.is_available() {
                let pairs = multiply_add_pairs(isa, 3).unwrap();
                let twice = (isa == Isa::Avx512Bf16).then(|| 2 * multiply_add(isa, 3).unwrap());
                assert_eq!(pairs, twice, "{isa}");
            } else {
                assert!(multiply_add(isa, 3).is_err() && multiply_add_pairs(isa, 3).is_err(), "{isa}");
            }
        }
    }
}
