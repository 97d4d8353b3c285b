//! Methods of `paged_kv.KvCache` that look at the whole cache and change nothing.

#![expect(clippy::doc_markdown, reason = "docstrings are numpydoc, where names of arguments stand bare")]

use numpy::{PyArray1, PyArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::cache::KvCache;
use super::convert::Number;
use super::leases::OpenLease;
use super::stats;
use crate::cache::{Explanation, LeaseHolder, PageCells, PageMap};

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
    ///     ``deferred_pages`` (those that only open batches, or work on a device, still hold); ``shared_pages`` (live,
    ///     with more than one holder), ``copied_pages`` (on write, since the start), ``sequences``,
    ///     ``tokens`` (computed, summed over sequences), ``stored_tokens`` (shared ones counted
    ///     once), ``reserved_tokens``, ``total_bytes``, ``used_bytes``, and ``waste`` (0 to 1: the
    ///     part of the sequences' slots without a computed token). Exact when nothing runs.
    #[pyo3(signature = (detail=false))]
    fn stats<'py>(&self, py: Python<'py>, detail: bool) -> PyResult<Bound<'py, PyDict>> {
        self.poll(py)?;
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

    /// What every page is. Walks all tables, and stops nobody.
    ///
    /// Returns
    /// -------
    /// dict
    ///     Arrays of one entry per page number, a null page included: ``state`` (uint8, a
    ///     :class:`PageState`), ``ref_count`` (uint32, by page tables and handles), ``owner`` (int64,
    ///     the :attr:`Sequence.id` of the sequence that holds the page, of several always the same
    ///     one, or -1), ``generation`` (uint32, grows by one each time the page is freed: as in
    ///     handles) and ``copied`` (bool, whether the page was made by copy-on-write). Exact when
    ///     nothing runs.
    fn page_map<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        page_map(py, py.detach(|| self.cache.page_map()))
    }

    /// Who holds the pages: sequences, open batches, handles. Walks all tables, and stops nobody.
    ///
    /// Parameters
    /// ----------
    /// max_cells : int
    ///     Above 0: also counts the pages in runs of adjacent ones, at most so many, as pictures of
    ///     large caches need it.
    ///
    /// Returns
    /// -------
    /// Explanation
    ///     Its sums add up to :meth:`stats` when nothing runs, and to ``total_pages`` always. Print it
    ///     to read it. It lists batches one by one if :meth:`track_leases` was called.
    #[pyo3(signature = (*, max_cells=Number(0)), text_signature = "(self, *, max_cells=0)")]
    fn explain<'py>(&self, py: Python<'py>, max_cells: Number<usize>) -> PyResult<Bound<'py, PyAny>> {
        let open = self.leases.open(py)?;
        let batches: Vec<_> = open.iter().flatten().map(|lease| lease.batch.get().inner()).collect();
        let explanation = py.detach(|| self.cache.explain(&batches, max_cells.0))?;
        explanation_object(py, explanation, open)
    }

    /// From now on remembers of every batch that is opened when and where that was, for
    /// :meth:`explain`. Until then batches are not tracked and cost nothing more; from then on each
    /// costs about a microsecond, for as long as the cache lives.
    ///
    /// Parameters
    /// ----------
    /// warn_after : float, optional
    ///     Seconds. A batch that is open for longer is named once, with its age and call site, by the
    ///     logger ``paged_kv.leases`` at level WARNING. It is noticed when another batch is opened or
    ///     :meth:`explain` is called. None warns of nothing. Calling again sets another limit.
    ///
    /// Raises
    /// ------
    /// ValueError
    ///     For a limit that is not positive and finite.
    #[pyo3(signature = (warn_after=None))]
    fn track_leases(&self, py: Python<'_>, warn_after: Option<f64>) -> PyResult<()> {
        if let Some(seconds) = warn_after.filter(|seconds| !(seconds.is_finite() && *seconds > 0.0)) {
            return Err(PyValueError::new_err(format!(
                "warn_after is {seconds}; a limit is a positive number of seconds"
            )));
        }
        self.leases.switch_on(py, warn_after)
    }
}

fn page_map(py: Python<'_>, map: PageMap) -> PyResult<Bound<'_, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("state", PyArray1::from_vec(py, map.states))?;
    dict.set_item("ref_count", PyArray1::from_vec(py, map.ref_counts))?;
    dict.set_item("owner", PyArray1::from_vec(py, map.owners))?;
    dict.set_item("generation", PyArray1::from_vec(py, map.generations))?;
    dict.set_item("copied", PyArray1::from_vec(py, map.copied))?;
    Ok(dict)
}

fn cells_dict(py: Python<'_>, cells: PageCells) -> PyResult<Bound<'_, PyDict>> {
    let shape = [cells.counts.len(), PageCells::STATES];
    let dict = PyDict::new(py);
    dict.set_item("pages_per_cell", cells.pages_per_cell)?;
    dict.set_item("counts", PyArray1::from_vec(py, cells.counts.into_flattened()).reshape(shape)?)?;
    dict.set_item("copied", PyArray1::from_vec(py, cells.copied))?;
    dict.set_item("owner", PyArray1::from_vec(py, cells.owners))?;
    Ok(dict)
}

/// A `paged_kv.Explanation`; its parts as tuples in the order of their fields.
fn explanation_object<'py>(
    py: Python<'py>,
    explanation: Explanation,
    open: Option<Vec<OpenLease<'py>>>,
) -> PyResult<Bound<'py, PyAny>> {
    let sequences = explanation.sequences.iter().map(|holder| {
        let stats = holder.stats;
        (stats.id, stats.num_pages, holder.exclusive_pages, stats.len, stats.num_computed_tokens)
    });
    let held = |holder: &LeaseHolder| (holder.num_sequences, holder.num_pages, holder.deferred_pages);
    let leases = open.map(|open| {
        let holders = open.into_iter().zip(&explanation.leases);
        let lines =
            holders.filter_map(|(lease, holder)| Some((held(holder.as_ref()?), lease.age, lease.site)));
        lines.collect::<Vec<_>>()
    });
    let numbers = PyDict::new(py);
    numbers.set_item("stats", stats::dict(py, &explanation.stats, false)?)?;
    numbers.set_item("sequence_pages", explanation.sequence_pages)?;
    numbers.set_item("batch_pages", explanation.batch_pages)?;
    numbers.set_item("handle_pages", explanation.handle_pages)?;
    numbers.set_item("sequences", sequences.collect::<Vec<_>>())?;
    numbers.set_item("leases", leases)?;
    numbers.set_item("freed_pages", explanation.freed_pages)?;
    numbers.set_item("cells", explanation.cells.map(|cells| cells_dict(py, cells)).transpose()?)?;
    py.import("paged_kv.explanation")?.getattr("_build")?.call((), Some(&numbers))
}
