//! Memory that tasks work in, kept by each thread for its next task.

use std::cell::RefCell;
use std::ops::{Deref, DerefMut};

/// Buffers that a thread keeps: those of one task, and some that came from others.
const KEPT: usize = 16;
/// Floats of a buffer that is worth keeping, so that one huge call doesn't hold its memory for ever.
const LARGEST: usize = 1 << 20;

thread_local! {
    static STOCK: RefCell<Vec<Vec<f32>>> = const { RefCell::new(Vec::new()) };
}

/// Floats of a cache line: vectors that lie across two cost twice.
const LINE: usize = 16;

/// Floats, at the start of a cache line. Memory fresh from the system costs more than
/// the work that is done in it.
#[derive(Debug)]
pub(super) struct Scratch {
    buffer: Vec<f32>,
    start: usize,
    len: usize,
}

impl Scratch {
    pub(super) fn zeros(len: usize) -> Self {
        let mut scratch = Self::any(len);
        // Not by `resize`, which writes one by one.
        scratch.fill(0.0);
        scratch
    }

    /// Zeros where it is `padded`: where what fills up the last vectors is read without being written.
    pub(super) fn padded(len: usize, padded: bool) -> Self {
        if padded { Self::zeros(len) } else { Self::any(len) }
    }

    /// Whatever tasks before left behind: for what is written before it is read. Where assertions are checked, NaN,
    /// which would be seen.
    pub(super) fn any(len: usize) -> Self {
        // Where the thread is ending already, a new one.
        let kept = STOCK.try_with(|stock| stock.borrow_mut().pop()).ok().flatten();
        let mut buffer = kept.unwrap_or_default();
        if buffer.len() < len + LINE - 1 {
            buffer = vec![0.0; len + LINE - 1];
        }
        let start = buffer.as_ptr().align_offset(LINE * size_of::<f32>());
        // An address that can't be aligned is no error: whole vectors may lie anywhere.
        let start = if start < LINE { start } else { 0 };
        if cfg!(debug_assertions) {
            buffer[start..start + len].fill(f32::NAN);
        }
        Self { buffer, start, len }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let buffer = std::mem::take(&mut self.buffer);
        if buffer.capacity() <= LARGEST {
            // Where the thread is ending, the buffer ends too.
            let _ = STOCK.try_with(|stock| {
                let mut stock = stock.borrow_mut();
                if stock.len() < KEPT {
                    stock.push(buffer);
                }
            });
        }
    }
}

impl Deref for Scratch {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        &self.buffer[self.start..self.start + self.len]
    }
}

impl DerefMut for Scratch {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.buffer[self.start..self.start + self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::{KEPT, LARGEST, STOCK, Scratch};

    #[test]
    fn buffers_come_back_and_few_are_kept() {
        let mut first = Scratch::zeros(1000);
        first.fill(7.0);
        let address = first.as_ptr();
        drop(first);
        let second = Scratch::zeros(900);
        assert_eq!(second.as_ptr(), address, "the same memory");
        assert_eq!(address.align_offset(64), 0);
        assert!(second.len() == 900 && second.iter().all(|&x| x == 0.0));
        drop(second);
        let third = Scratch::any(800);
        assert_eq!(third.as_ptr(), address);
        assert_eq!(third.iter().all(|x| x.is_nan()), cfg!(debug_assertions));
        drop((third, (0..100).map(|_| Scratch::zeros(8)).collect::<Vec<_>>()));
        assert_eq!(STOCK.with_borrow(Vec::len), KEPT);
        drop(Scratch::zeros(LARGEST + 1));
        assert_eq!(STOCK.with_borrow(Vec::len), KEPT - 1);
    }
}
