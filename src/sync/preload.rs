//! The load that begins a loop of compare-exchanges.

use super::{AtomicU32, AtomicU64, Ordering};

/// A word that threads change by compare-exchange.
pub trait Preload {
    /// What the word holds.
    type Value;

    /// A value to begin with. It may be old, and nothing is ordered after it: the compare-exchange
    /// decides.
    fn preload(&self) -> Self::Value;
}

macro_rules! preload {
    ($word:ty, $value:ty) => {
        impl Preload for $word {
            type Value = $value;

            #[inline]
            fn preload(&self) -> $value {
                // Relaxed: as the trait says.
                #[cfg(not(loom))]
                return self.load(Ordering::Relaxed);
                // To loom an access races with the last one to the same word only. A load would
                // hide one that another thread made before: no execution would show that thread
                // what the compare-exchange writes. One that changes nothing races with all.
                #[cfg(loom)]
                return match self.compare_exchange(
                    <$value>::MAX,
                    <$value>::MAX,
                    Ordering::Relaxed,
                    Ordering::Relaxed,
                ) {
                    Ok(value) | Err(value) => value,
                };
            }
        }
    };
}

preload!(AtomicU32, u32);
preload!(AtomicU64, u64);
