//! Slots whose type never changes, handed out by number.
//!
//! A slot, once made, is never given back to the system while the slab lives, so a thread that
//! follows a stale number finds a slot of the same type and learns from its generation that it
//! came too late. That is all the reclamation the tables need.

use crate::error::{Error, Result};
use crate::pool::{Bitmap, WORD_BITS};
use crate::sync::{OnceBox, Segments, thread_number};

/// A slot that nobody uses.
pub(super) trait Vacant {
    /// Makes one.
    fn vacant() -> Self;
}

/// A growing array of slots. Its size is a function of the peak number in use (invariant I11).
pub(super) struct Slab<T> {
    slots: Segments<T>,
    /// Vacant slots of each segment; made after the segment.
    vacant: Box<[OnceBox<Bitmap>]>,
}

impl<T: Vacant> Slab<T> {
    pub(super) fn new() -> Self {
        let vacant = (0..Segments::<T>::COUNT).map(|_| OnceBox::new()).collect();
        Self { slots: Segments::new(), vacant }
    }

    /// Takes a vacant slot; makes a new segment if there is none.
    pub(super) fn take(&self) -> u32 {
        self.take_seen().unwrap_or_else(|| self.take_or_make())
    }

    /// Takes a slot that the made segments show to be vacant.
    fn take_seen(&self) -> Option<u32> {
        let mut made = self.vacant.iter().map_while(OnceBox::get).enumerate();
        made.find_map(|(k, vacant)| Some(Segments::<T>::first_of(k) + vacant.take_seen(Self::home(vacant))?))
    }

    /// Looks into every corner before it makes a segment.
    #[cold]
    fn take_or_make(&self) -> u32 {
        for (k, vacant) in self.vacant.iter().enumerate() {
            let vacant = vacant.get_or_make(|| {
                self.slots.make(k, T::vacant);
                Bitmap::new_full(Segments::<T>::len_of(k))
            });
            if let Some(place) = vacant.take_lowest(Self::home(vacant)) {
                return Segments::<T>::first_of(k) + place;
            }
        }
        unreachable!("2^32 slots are more than memory holds");
    }

    /// Where the calling thread looks first. Threads start at different words, so that they don't
    /// meet in one cache line.
    fn home(vacant: &Bitmap) -> u32 {
        (thread_number() as u32).wrapping_mul(WORD_BITS) % vacant.len()
    }

    /// Gives a slot back; the caller has made it vacant.
    pub(super) fn give(&self, index: u32) {
        let (k, place) = Segments::<T>::locate(index);
        self.vacant[k].get().expect("a slot's segment exists").give_item(place);
    }

    /// The slot. Numbers come from `take`, never from outside.
    #[inline]
    pub(super) fn get(&self, index: u32) -> &T {
        self.slots.get(index)
    }

    /// Every slot ever made, vacant ones too.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        let made = (0..Segments::<T>::COUNT).filter_map(|k| Some((k, self.slots.segment(k)?)));
        made.flat_map(|(k, slots)| (Segments::<T>::first_of(k)..).zip(slots))
    }

    /// Checks that just the slots that are not `in_use` can be taken. Needs rest.
    pub(super) fn check(&self, what: &str, in_use: impl Fn(&T) -> bool) -> Result<()> {
        for (index, slot) in self.iter() {
            let (k, place) = Segments::<T>::locate(index);
            let vacant = self.vacant[k].get().is_some_and(|vacant| vacant.contains(place));
            if vacant == in_use(slot) {
                let state = if vacant { "in use and vacant" } else { "neither in use nor vacant" };
                return Err(Error::Corruption(format!("{what} {index} is {state}")));
            }
        }
        Ok(())
    }

    /// Slots ever made, or one more than the highest number.
    pub(super) fn capacity(&self) -> usize {
        let last = (0..Segments::<T>::COUNT).rev().find(|&k| self.slots.segment(k).is_some());
        last.map_or(0, |k| Segments::<T>::first_of(k + 1) as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i11_a_slot_that_was_lost_or_given_too_early_is_noticed() {
        let slab = Slab::<u8>::new();
        let (first, second) = (slab.take(), slab.take());
        let address = std::ptr::from_ref(slab.get(second));
        let used = |slot: &u8| std::ptr::eq(slot, address);
        assert!(matches!(slab.check("slot", used), Err(Error::Corruption(_))), "the first is lost");
        slab.give(first);
        slab.check("slot", used).unwrap();
        slab.give(second);
        assert!(matches!(slab.check("slot", used), Err(Error::Corruption(_))), "given while in use");
    }

    impl Vacant for u8 {
        fn vacant() -> Self {
            0
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
