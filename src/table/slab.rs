//! Slots whose type never changes, handed out by number.
//!
//! A slot, once made, is never given back to the system while the slab lives, so a thread that
//! follows a stale number finds a slot of the same type and learns from its generation that it
//! came too late. That is all the reclamation the tables need.

use crate::pool::Bitmap;
use crate::sync::{MODELLED, OnceBox, thread_number};

/// Slots of the first segment; each further segment doubles what there is.
const BASE: u32 = if MODELLED { 4 } else { 64 };
const SEGMENTS: usize = 26;

/// A slot that nobody uses.
pub(super) trait Vacant {
    /// Makes one.
    fn vacant() -> Self;
}

struct Segment<T> {
    free: Bitmap,
    slots: Box<[T]>,
}

/// A growing array of slots. Its size is a function of the peak number in use (invariant I11).
pub(super) struct Slab<T> {
    segments: [OnceBox<Segment<T>>; SEGMENTS],
}

impl<T: Vacant> Slab<T> {
    pub(super) fn new() -> Self {
        Self { segments: std::array::from_fn(|_| OnceBox::new()) }
    }

    /// Takes a vacant slot; makes a new segment if there is none.
    pub(super) fn take(&self) -> u32 {
        let number = thread_number() as u32;
        for (k, segment) in self.segments.iter().enumerate() {
            let size = BASE << k;
            let segment = segment.get_or_make(|| Segment {
                free: Bitmap::new_full(size),
                slots: (0..size).map(|_| T::vacant()).collect(),
            });
            // Threads start at different words, so that they don't meet in one cache line.
            if let Some(offset) = segment.free.take_lowest(number.wrapping_mul(64) % size) {
                return first_of(k) + offset;
            }
        }
        unreachable!("{SEGMENTS} segments hold more slots than memory does");
    }

    /// Gives a slot back; the caller has made it vacant.
    pub(super) fn give(&self, index: u32) {
        let (k, offset) = locate(index);
        self.segment(k).free.give_item(offset);
    }

    /// The slot. Numbers come from `take`, never from outside.
    #[inline]
    pub(super) fn get(&self, index: u32) -> &T {
        let (k, offset) = locate(index);
        &self.segment(k).slots[offset as usize]
    }

    /// Every slot ever made, vacant ones too.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        self.segments.iter().enumerate().filter_map(|(k, s)| Some((k, s.get()?))).flat_map(|(k, segment)| {
            segment.slots.iter().enumerate().map(move |(i, slot)| (first_of(k) + i as u32, slot))
        })
    }

    /// Slots ever made.
    pub(super) fn capacity(&self) -> usize {
        self.segments.iter().filter_map(OnceBox::get).map(|segment| segment.slots.len()).sum()
    }

    #[inline]
    fn segment(&self, k: usize) -> &Segment<T> {
        self.segments[k].get().expect("a slot's segment exists")
    }
}

/// Segment and offset of a slot.
#[inline]
fn locate(index: u32) -> (usize, u32) {
    let k = (index / BASE + 1).ilog2() as usize;
    (k, index - first_of(k))
}

/// Number of a segment's first slot.
#[inline]
fn first_of(k: usize) -> u32 {
    BASE * ((1_u32 << k) - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Vacant for u8 {
        fn vacant() -> Self {
            0
        }
    }

    #[test]
    fn numbers_round_trip_through_segments() {
        let mut expected = 0;
        for k in 0..6 {
            for offset in 0..BASE << k {
                assert_eq!(locate(expected), (k, offset));
                expected += 1;
            }
        }
    }

    #[test]
    fn i11_slots_are_reused_before_new_ones_are_made() {
        let slab = Slab::<u8>::new();
        let taken: Vec<u32> = (0..200).map(|_| slab.take()).collect();
        let mut distinct = taken.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), 200);
        let capacity = slab.capacity();
        for round in 0..100 {
            for &index in &taken {
                slab.give(index);
            }
            for _ in 0..200 {
                slab.take();
            }
            assert_eq!(slab.capacity(), capacity, "round {round}");
        }
    }
}
