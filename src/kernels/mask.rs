//! Which keys a query sees: always one run of positions.

use std::ops::Range;

/// Causality and window.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mask {
    /// A query sees no key behind its own position.
    pub(crate) causal: bool,
    /// Keys to the left of its own position that a query sees; `None` is all.
    pub(crate) window_left: Option<i64>,
}

impl Mask {
    /// The keys that a query at `position` sees in a sequence of `len` tokens.
    ///
    /// Both ends grow with the position, so the union over neighbouring queries is a run too.
    #[inline]
    pub(crate) fn seen(self, position: i64, len: usize) -> Range<usize> {
        let end = if self.causal { (position + 1).clamp(0, len as i64) as usize } else { len };
        let start = self.window_left.map_or(0, |left| position.saturating_sub(left).max(0) as usize);
        start.min(end)..end
    }

    /// Of `tokens` keys from `start` on, numbered from 0, those that a query sees.
    #[inline]
    pub(super) fn seen_in(self, position: i64, len: usize, start: usize, tokens: usize) -> Range<usize> {
        let seen = self.seen(position, len);
        seen.start.saturating_sub(start).min(tokens)..seen.end.saturating_sub(start).min(tokens)
    }
}
