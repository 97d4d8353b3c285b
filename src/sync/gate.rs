//! Ends something after the last operation that uses it, without anyone waiting.

use super::{AtomicU64, Ordering, Preload};

/// Set once the gate is closed.
const CLOSED: u64 = 1 << 63;

/// Counts the operations in flight on something that any thread may end.
///
/// Exactly one call of [`leave`](Self::leave), [`close`](Self::close) or
/// [`close_if_idle`](Self::close_if_idle) returns true: the one after
/// which no operation is in flight and none can begin. Its caller does what ending asks for.
pub struct Gate {
    /// CLOSED | operations in flight.
    state: AtomicU64,
}

impl Gate {
    /// An open gate with nothing in flight.
    pub fn new() -> Self {
        Self { state: AtomicU64::new(0) }
    }

    /// Whether `close` was called.
    pub fn is_closed(&self) -> bool {
        // Acquire: pairs with the Release in `close`.
        self.state.load(Ordering::Acquire) & CLOSED != 0
    }

    /// Begins an operation; false once the gate is closed.
    #[must_use = "an operation that was let in must leave"]
    pub fn enter(&self) -> bool {
        let mut state = self.state.preload();
        while state & CLOSED == 0 {
            // Acquire: pairs with the Release of earlier operations' `leave`.
            match self.state.compare_exchange_weak(state, state + 1, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(now) => state = now,
            }
        }
        false
    }

    /// Ends an operation; true for the last one after `close`.
    #[must_use = "whoever is told to must finish"]
    pub fn leave(&self) -> bool {
        // Release: pairs with the Acquire here and in `close`: whoever finishes does so after all
        // operations, and after whatever `close` was preceded by.
        self.state.fetch_sub(1, Ordering::AcqRel) == CLOSED | 1
    }

    /// Closes the gate if nothing is in flight, and says so; otherwise does nothing.
    #[must_use = "whoever is told to must finish"]
    pub fn close_if_idle(&self) -> bool {
        // AcqRel: as in `leave`.
        self.state.compare_exchange(0, CLOSED, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Closes the gate; true if nothing is in flight. To be called once.
    #[must_use = "whoever is told to must finish"]
    pub fn close(&self) -> bool {
        // AcqRel: as in `leave`.
        self.state.fetch_or(CLOSED, Ordering::AcqRel) == 0
    }
}

impl Default for Gate {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_last_to_leave_finishes() {
        let gate = Gate::new();
        assert!(gate.enter() && gate.enter());
        assert!(!gate.leave());
        assert!(!gate.close(), "one is still inside");
        assert!(!gate.enter());
        assert!(gate.leave());
    }

    #[test]
    fn whoever_closes_an_idle_gate_finishes() {
        let gate = Gate::new();
        assert!(!gate.is_closed());
        assert!(gate.close());
        assert!(gate.is_closed());
    }
}
