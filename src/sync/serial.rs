//! Numbers that differ from call to call within the process.

use std::sync::atomic::{AtomicU32, Ordering};

/// A number that no call before returned (until 2^32 calls were made), beginning with 1.
///
/// Not part of what loom explores: it orders nothing.
pub fn serial_number() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}
