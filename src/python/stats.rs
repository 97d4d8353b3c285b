//! Statistics as a dictionary.

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::cache::CacheStats;
use crate::table::SequenceStats;

/// Every field under its name; `detail` only where it was asked for.
pub(super) fn dict<'py>(py: Python<'py>, stats: &CacheStats, detail: bool) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for (name, value) in [
        ("total_pages", stats.total_pages),
        ("free_pages", stats.free_pages),
        ("live_pages", stats.live_pages),
        ("shared_pages", stats.shared_pages),
        ("cached_pages", stats.cached_pages),
        ("deferred_pages", stats.deferred_pages),
        ("copied_pages", stats.copied_pages),
        ("sequences", stats.sequences),
        ("tokens", stats.tokens),
        ("stored_tokens", stats.stored_tokens),
        ("reserved_tokens", stats.reserved_tokens),
        ("total_bytes", stats.total_bytes),
        ("used_bytes", stats.used_bytes),
    ] {
        dict.set_item(name, value)?;
    }
    dict.set_item("waste", stats.waste)?;
    if detail {
        let sequences = stats.detail.iter().map(|sequence| of_sequence(py, *sequence));
        dict.set_item("detail", sequences.collect::<PyResult<Vec<_>>>()?)?;
    }
    Ok(dict)
}

fn of_sequence(py: Python<'_>, stats: SequenceStats) -> PyResult<Bound<'_, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("id", stats.id)?;
    dict.set_item("len", stats.len)?;
    dict.set_item("num_computed_tokens", stats.num_computed_tokens)?;
    dict.set_item("num_pages", stats.num_pages)?;
    Ok(dict)
}
