//! Ends a batch after the last operation that uses it, without anyone waiting.

use crate::error::{Error, Result};
use crate::sync::{AtomicU64, Ordering};

/// Set once the batch is to end.
const ENDED: u64 = 1 << 63;

/// Counts the operations in flight on something that may be ended from any thread.
pub(super) struct Gate {
    /// ENDED | operations in flight.
    state: AtomicU64,
}

impl Gate {
    pub(super) fn new() -> Self {
        Self { state: AtomicU64::new(0) }
    }

    /// Whether `end` was called.
    pub(super) fn is_ended(&self) -> bool {
        self.state.load(Ordering::Acquire) & ENDED != 0
    }

    /// Begins an operation; refused once `end` was called.
    pub(super) fn enter(&self) -> Result<()> {
        let mut state = self.state.load(Ordering::Relaxed);
        loop {
            if state & ENDED != 0 {
                return Err(Error::Value("the batch was committed or closed".to_owned()));
            }
            // Acquire: pairs with the Release of earlier operations' `leave`.
            match self.state.compare_exchange_weak(state, state + 1, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Ok(()),
                Err(now) => state = now,
            }
        }
    }

    /// Ends an operation; true for the last one after `end`, who must finish.
    pub(super) fn leave(&self) -> bool {
        // AcqRel: whoever finishes does so after all other operations.
        self.state.fetch_sub(1, Ordering::AcqRel) == ENDED | 1
    }

    /// Closes the gate; true if nothing is in flight, so that the caller must finish. Called once.
    pub(super) fn end(&self) -> bool {
        // AcqRel: as in `leave`.
        self.state.fetch_or(ENDED, Ordering::AcqRel) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_to_leave_finishes() {
        let gate = Gate::new();
        gate.enter().unwrap();
        gate.enter().unwrap();
        assert!(!gate.leave());
        assert!(!gate.end(), "one is still inside");
        assert!(gate.enter().is_err());
        assert!(gate.leave());
    }

    #[test]
    fn whoever_ends_an_idle_gate_finishes() {
        let gate = Gate::new();
        assert!(!gate.is_ended());
        assert!(gate.end());
        assert!(gate.is_ended());
    }
}
