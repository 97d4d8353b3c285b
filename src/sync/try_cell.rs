//! A cell for state that only the holder of a claim touches.

use super::{AtomicBool, Ordering};

#[cfg(loom)]
use loom::cell::UnsafeCell;
#[cfg(not(loom))]
use std::cell::UnsafeCell;

/// Mutable state behind a flag that is tried, never waited for.
///
/// Where a claim already keeps other threads out, the try always succeeds; the flag turns a
/// broken claim into `None` instead of a data race.
pub struct TryCell<T> {
    taken: AtomicBool,
    value: UnsafeCell<T>,
}

impl<T> TryCell<T> {
    /// Wraps a value.
    pub fn new(value: T) -> Self {
        Self { taken: AtomicBool::new(false), value: UnsafeCell::new(value) }
    }

    /// Runs `f` on the value, or returns `None` at once if another thread is in here.
    pub fn try_with<R>(&self, f: impl FnOnce(&mut T) -> R) -> Option<R> {
        struct Leave<'a>(&'a AtomicBool);
        impl Drop for Leave<'_> {
            fn drop(&mut self) {
                // Release: pairs with the Acquire of the next `try_with`.
                self.0.store(false, Ordering::Release);
            }
        }
        // Acquire: pairs with the Release of the previous holder's `Leave`.
        if self.taken.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_err() {
            return None;
        }
        let _leave = Leave(&self.taken);
        // SAFETY: the flag was ours to set, so no other reference exists until `_leave` drops.
        #[cfg(not(loom))]
        let result = f(unsafe { &mut *self.value.get() });
        #[cfg(loom)]
        // SAFETY: as above.
        let result = self.value.with_mut(|value| f(unsafe { &mut *value }));
        Some(result)
    }
}

// SAFETY: the value is reached by one thread at a time, moving between threads like a `Mutex`'s.
unsafe impl<T: Send> Sync for TryCell<T> {}
