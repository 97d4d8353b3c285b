//! An array that grows without moving what it holds.

use super::{AtomicPtr, MODELLED, Ordering};

/// Items of the first segment; each further one is as large as all before it together.
const BASE_BITS: u32 = if MODELLED { 2 } else { 6 };
const BASE: u32 = 1 << BASE_BITS;
const SEGMENTS: usize = if MODELLED { 3 } else { (32 - BASE_BITS) as usize };
/// One for each bit that may be an item's highest; those below `BASE_BITS` stay unused.
const STARTS: usize = if MODELLED { BASE_BITS as usize + SEGMENTS } else { 32 };

/// Items in segments that are made on demand and stay where they are. Making one never waits.
///
/// Item `i` lies in the segment of the highest bit of `i + BASE`, at the place that the lower bits
/// name, so finding it takes a bit scan and one load.
pub struct Segments<T> {
    /// By highest bit, so that finding one takes neither subtraction nor bounds check.
    starts: [AtomicPtr<T>; STARTS],
}

impl<T> Segments<T> {
    /// How many segments there can be.
    pub const COUNT: usize = SEGMENTS;

    /// An empty one.
    pub fn new() -> Self {
        Self { starts: std::array::from_fn(|_| AtomicPtr::new(std::ptr::null_mut())) }
    }

    /// Items of segment `k`.
    pub const fn len_of(k: usize) -> u32 {
        BASE << k
    }

    /// Number of the first item of segment `k`.
    pub const fn first_of(k: usize) -> u32 {
        (BASE << k) - BASE
    }

    /// Segment and place of an item.
    #[inline]
    pub const fn locate(index: u32) -> (usize, u32) {
        let (top, place) = Self::place(index);
        ((top - BASE_BITS) as usize, place)
    }

    /// The highest bit, and the place it leaves.
    #[inline]
    const fn place(index: u32) -> (u32, u32) {
        let biased = index.wrapping_add(BASE);
        // The lowest bit says that it isn't zero, so that a bit scan is all there is to it.
        let top = (biased | 1).ilog2();
        (top, biased ^ (1 << top))
    }

    /// Where segment `k` starts.
    #[inline]
    fn start_of(&self, k: usize) -> &AtomicPtr<T> {
        &self.starts[BASE_BITS as usize + k]
    }

    /// The item.
    ///
    /// # Panics
    /// If its segment was not made.
    #[inline]
    pub fn get(&self, index: u32) -> &T {
        let (top, place) = Self::place(index);
        // Acquire: pairs with the Release in `make`, so that the items are seen whole.
        let start = self.starts[top as usize].load(Ordering::Acquire);
        assert!(!start.is_null(), "an item's segment exists");
        // SAFETY: a non-null start points to `len_of(k)` items, and `place` is below that because the
        // highest bit, which it lacks, is the length; they are freed only by `drop`, and nobody
        // gets a `&mut T`.
        unsafe { &*start.add(place as usize) }
    }

    /// The items of segment `k`, if it was made.
    pub fn segment(&self, k: usize) -> Option<&[T]> {
        // Acquire: as in `get`.
        let start = self.start_of(k).load(Ordering::Acquire);
        // SAFETY: as in `get`.
        (!start.is_null()).then(|| unsafe { std::slice::from_raw_parts(start, Self::len_of(k) as usize) })
    }

    /// Makes segment `k` if there is none. Of two threads that do, one's items are dropped.
    pub fn make(&self, k: usize, item: impl Fn() -> T) {
        if self.segment(k).is_some() {
            return;
        }
        let items: Box<[T]> = (0..Self::len_of(k)).map(|_| item()).collect();
        let ours = Box::into_raw(items);
        // Release: pairs with the Acquire in `get` and `segment`.
        let published = self.start_of(k).compare_exchange(
            std::ptr::null_mut(),
            ours.cast(),
            Ordering::Release,
            Ordering::Relaxed,
        );
        if published.is_err() {
            // SAFETY: `ours` was never published.
            drop(unsafe { Box::from_raw(ours) });
        }
    }
}

impl<T> Default for Segments<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> Drop for Segments<T> {
    fn drop(&mut self) {
        for (k, start) in self.starts[BASE_BITS as usize..].iter().enumerate() {
            // `&mut self` orders this after every other use.
            let start = start.load(Ordering::Relaxed);
            if !start.is_null() {
                let items = std::ptr::slice_from_raw_parts_mut(start, Self::len_of(k) as usize);
                // SAFETY: these came from `Box::into_raw` in `make`, and nobody else frees them.
                drop(unsafe { Box::from_raw(items) });
            }
        }
    }
}

// SAFETY: it owns `T`s made by any thread and hands out `&T` to every thread.
unsafe impl<T: Send> Send for Segments<T> {}
// SAFETY: as above; making a segment from another thread moves `T`s there, hence `Send` as well.
unsafe impl<T: Send + Sync> Sync for Segments<T> {}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn items_have_one_place_each() {
        let mut expected = 0;
        for k in 0..6 {
            assert_eq!(Segments::<u8>::first_of(k), expected);
            for place in 0..Segments::<u8>::len_of(k) {
                assert_eq!(Segments::<u8>::locate(expected), (k, place));
                expected += 1;
            }
        }
        assert_eq!(Segments::<u8>::locate(u32::MAX - BASE).0, SEGMENTS - 1);
    }

    #[test]
    fn every_item_is_dropped_once() {
        let counted = Arc::new(());
        let segments = Segments::new();
        for k in [0, 3, 0] {
            segments.make(k, || Arc::clone(&counted));
        }
        assert_eq!(Arc::strong_count(&counted), 1 + (BASE + BASE * 8) as usize);
        assert!(segments.segment(1).is_none());
        drop(segments);
        assert_eq!(Arc::strong_count(&counted), 1);
    }
}
