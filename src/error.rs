//! Every way in which an operation can fail, with the numbers that explain it.
//!
//! An error is returned before anything is changed (invariant I12): whoever gets one may retry
//! with other arguments, or wait, without repairing anything first.

/// What went wrong; each variant becomes one Python exception type.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Too few pages were available at one instant during the call.
    #[error(
        "out of pages: {requested} requested, {free} free, {evictable} evictable, {deferred} deferred{}",
        at(*index)
    )]
    OutOfPages {
        /// Pages the whole call needed.
        requested: u64,
        /// Pages that were free.
        free: u64,
        /// Pages that hold a cached prefix nobody uses and could be evicted.
        evictable: u64,
        /// Pages that only leases still hold: they come back when the leases end.
        deferred: u64,
        /// Position in the batch of the first sequence that did not fit.
        index: Option<usize>,
    },
    /// One request or sequence is larger than the whole pool: neither waiting nor preempting helps.
    #[error("never fits: {requested} pages requested, the pool has {total}{}", at(*index))]
    NeverFits {
        /// Pages requested.
        requested: u64,
        /// Pages in the pool.
        total: u64,
        /// Position in the batch of the sequence that is too long.
        index: Option<usize>,
    },
    /// Another thread is changing this sequence, or an open batch holds it.
    #[error("sequence {sequence} is being changed by another thread or an open batch{}", at(*index))]
    SequenceBusy {
        /// The sequence's number.
        sequence: u64,
        /// Its position in the batch.
        index: Option<usize>,
    },
    /// The sequence was freed.
    #[error("sequence was freed{}", at_all(indices))]
    SequenceFreed {
        /// Positions in the batch of all sequences that were freed; empty outside a batch.
        indices: Vec<usize>,
    },
    /// A reference count would go below zero, above its maximum, or belongs to an earlier life of
    /// the page.
    #[error("page {page}: {reason} (reference count {ref_count})")]
    RefCount {
        /// The page.
        page: u32,
        /// Its count when the operation was refused.
        ref_count: u32,
        /// What was wrong.
        reason: &'static str,
    },
    /// A page number outside the pool, or a handle of another pool.
    #[error("invalid page {page}: {reason} (the pool has {num_pages} pages)")]
    InvalidPage {
        /// The number given.
        page: i64,
        /// Pages in the pool.
        num_pages: u64,
        /// What was wrong.
        reason: &'static str,
    },
    /// A shape, stride, dtype or size that doesn't fit.
    #[error("{0}")]
    Layout(String),
    /// A value out of range.
    #[error("{0}")]
    Value(String),
    /// `validate()` found the structure inconsistent.
    #[error("corruption: {0}")]
    Corruption(String),
    /// `validate()` can't judge: something ran meanwhile.
    #[error("not quiescent: {0}")]
    NotQuiescent(String),
    /// The memory of a cache could not be had.
    #[error("cannot map {bytes} bytes: {reason}")]
    Memory {
        /// Bytes asked for.
        bytes: u64,
        /// What the system said.
        reason: String,
    },
}

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

fn at(index: Option<usize>) -> String {
    index.map_or_else(String::new, |i| format!(" (sequence at index {i})"))
}

fn at_all(indices: &[usize]) -> String {
    if indices.is_empty() { String::new() } else { format!(" (at indices {indices:?})") }
}
