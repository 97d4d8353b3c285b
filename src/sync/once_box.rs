//! A box that is made at most once and then stays where it is.

use super::{AtomicPtr, Ordering};

/// A lazily made `Box<T>`. Making it never waits: two threads may both make one, the first to
/// publish wins and the other's is dropped.
pub struct OnceBox<T> {
    pointer: AtomicPtr<T>,
}

impl<T> OnceBox<T> {
    /// An empty one.
    pub fn new() -> Self {
        Self { pointer: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// The value, if it was made.
    #[inline]
    pub fn get(&self) -> Option<&T> {
        // Acquire: pairs with the Release in `get_or_make`, so that the value is seen whole.
        let pointer = self.pointer.load(Ordering::Acquire);
        // SAFETY: a non-null pointer came from `Box::into_raw` below and is taken out only by
        // `take`, which has `&mut self`; nobody gets a `&mut T`.
        unsafe { pointer.as_ref() }
    }

    /// The value, made by `make` if there was none.
    pub fn get_or_make(&self, make: impl FnOnce() -> T) -> &T {
        if let Some(value) = self.get() {
            return value;
        }
        let ours = Box::into_raw(Box::new(make()));
        // Release: pairs with the Acquire in `get`. Acquire on failure: the same pairing for the
        // winner's value.
        let shared = match self.pointer.compare_exchange(
            std::ptr::null_mut(),
            ours,
            Ordering::Release,
            Ordering::Acquire,
        ) {
            Ok(_) => ours,
            Err(theirs) => {
                // SAFETY: `ours` was never published.
                drop(unsafe { Box::from_raw(ours) });
                theirs
            }
        };
        // SAFETY: as in `get`.
        unsafe { &*shared }
    }

    /// Takes the value out, if it was made; the box is empty then.
    pub fn take(&mut self) -> Option<T> {
        // Relaxed: `&mut self` orders this after every other use.
        let pointer = self.pointer.load(Ordering::Relaxed);
        self.pointer.store(std::ptr::null_mut(), Ordering::Relaxed);
        // SAFETY: a non-null pointer came from `Box::into_raw`, and the box no longer knows it.
        (!pointer.is_null()).then(|| *unsafe { Box::from_raw(pointer) })
    }
}

impl<T> Default for OnceBox<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> Drop for OnceBox<T> {
    fn drop(&mut self) {
        self.take();
    }
}

// SAFETY: a `OnceBox` owns a `T` made by any thread and hands out `&T` to every thread.
unsafe impl<T: Send> Send for OnceBox<T> {}
// SAFETY: as above; making it from another thread moves a `T` there, hence `Send` as well.
unsafe impl<T: Send + Sync> Sync for OnceBox<T> {}
