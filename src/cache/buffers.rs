//! Memory of large arrays, kept from one batch to the next.
//!
//! A block table of a few hundred long sequences is as large as what an allocator gives back to
//! the system, which then hands out, clears and maps each page of it again in the next step: that
//! takes longer than writing the table.

use crate::sync::TryCell;

/// As many batches as have large arrays at once where a step is prepared while another runs.
const KEPT: usize = 4;

/// Buffers of integers that batches are done with. Nobody waits: where another thread is in a
/// place, the next one serves.
pub(super) struct Buffers([TryCell<Vec<i32>>; KEPT]);

impl Buffers {
    pub(super) fn new() -> Self {
        Self(std::array::from_fn(|_| TryCell::new(Vec::new())))
    }

    /// A buffer of `len` integers, whatever they are.
    pub(super) fn take(&self, len: usize) -> Vec<i32> {
        let kept =
            |cell: &TryCell<Vec<i32>>| cell.try_with(std::mem::take).filter(|buffer| buffer.capacity() > 0);
        let mut buffer = self.0.iter().find_map(kept).unwrap_or_default();
        if buffer.capacity() < len {
            // Tables grow from step to step.
            buffer = Vec::with_capacity(len + len / 4);
        }
        buffer.resize(len, 0);
        buffer
    }

    /// Keeps a buffer for another batch, or gives it back to the system if enough are kept.
    pub(super) fn give(&self, buffer: Vec<i32>) {
        let mut buffer = Some(buffer);
        for cell in &self.0 {
            cell.try_with(|kept| {
                if kept.capacity() == 0 {
                    *kept = buffer.take().unwrap_or_default();
                }
            });
            if buffer.is_none() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_comes_back_and_no_more_are_kept_than_there_are_places() {
        let buffers = Buffers::new();
        let first = buffers.take(100);
        let address = first.as_ptr();
        buffers.give(first);
        let again = buffers.take(110);
        assert_eq!(again.as_ptr(), address, "room to grow");
        for _ in 0..2 * KEPT {
            buffers.give(vec![0; 10]);
        }
        let capacities: Vec<usize> = (0..=KEPT).map(|_| buffers.take(0).capacity()).collect();
        assert_eq!(capacities[KEPT], 0);
        assert!(capacities[..KEPT].iter().all(|&capacity| capacity == 10));
    }

    #[test]
    fn a_buffer_that_is_too_small_makes_place_for_one_that_is_not() {
        let buffers = Buffers::new();
        buffers.give(vec![1; 10]);
        let buffer = buffers.take(1000);
        assert_eq!(buffer.len(), 1000);
        buffers.give(buffer);
        assert!(buffers.take(1000).capacity() >= 1000);
        assert_eq!(buffers.take(0).capacity(), 0);
    }
}
