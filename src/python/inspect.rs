//! Methods of `paged_kv.KvCache` that look at the whole cache and change nothing.

#![expect(clippy::doc_markdown, reason = "docstrings are numpydoc, where names of arguments stand bare")]

use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::cache::KvCache;
use super::stats;

#[pymethods]
impl KvCache {
    /// What the cache holds, in pages, tokens and bytes. Walks all tables.
    ///
    /// Parameters
    /// ----------
    /// detail : bool
    ///     Whether to add a list with one entry per sequence.
    ///
    /// Returns
    /// -------
    /// dict
    ///     ``total_pages``, the sum of ``free_pages``, ``live_pages``, ``cached_pages`` and
    ///     ``deferred_pages`` (those that only open batches still hold); ``shared_pages`` (live,
    ///     with more than one holder), ``copied_pages`` (on write, since the start), ``sequences``,
    ///     ``tokens`` (computed, summed over sequences), ``stored_tokens`` (shared ones counted
    ///     once), ``reserved_tokens``, ``total_bytes``, ``used_bytes``, and ``waste`` (0 to 1: the
    ///     part of the sequences' slots without a computed token). Exact when nothing runs.
    #[pyo3(signature = (detail=false))]
    fn stats<'py>(&self, py: Python<'py>, detail: bool) -> PyResult<Bound<'py, PyDict>> {
        let stats = py.detach(|| self.cache.stats(detail))?;
        stats::dict(py, &stats, detail)
    }

    /// Checks every count against a walk of the tables. Needs rest.
    ///
    /// Raises
    /// ------
    /// CorruptionError
    ///     Where something is wrong.
    /// NotQuiescentError
    ///     Where something ran meanwhile.
    fn validate(&self, py: Python<'_>) -> PyResult<()> {
        Ok(py.detach(|| self.cache.validate())?)
    }
}
