//! `paged_kv.Batch`: one step of many sequences, as a transaction.

#![expect(clippy::doc_markdown, reason = "docstrings are numpydoc, where names of arguments stand bare")]

use std::sync::Arc;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::array::{integers, lend};
use super::batch_view::BatchView;
use super::device::park;
use super::fill::{Field, fill};
use crate::cache::{self, KvCache};

/// An open batch: slots reserved, shared pages copied, and a lease on what attention reads.
///
/// Made by :meth:`KvCache.batch`; use it in a ``with`` block, whose end commits it and in which an
/// exception closes it, or end it by :meth:`commit` or :meth:`close`. A batch that is garbage
/// collected is closed. While it is open, others who change its sequences get
/// :class:`SequenceBusyError`, unless it has no new tokens.
///
/// The arrays are built on first access and read-only; they are valid while the batch is open.
/// Pickling gives a :class:`BatchView`, the arrays without the lease.
#[pyclass(frozen, weakref, module = "paged_kv", name = "Batch")]
pub(crate) struct Batch {
    inner: cache::Batch,
    cache: Arc<KvCache>,
    /// On a device: what was launched for it. Dropped after the batch, which closes it.
    work: Option<Py<PyAny>>,
}

impl Batch {
    pub(super) fn inner(&self) -> &cache::Batch {
        &self.inner
    }

    pub(super) fn new(batch: cache::Batch, cache: Arc<KvCache>, work: Option<Py<PyAny>>) -> Self {
        Self { inner: batch, cache, work }
    }

    pub(super) fn work(&self) -> Option<&Py<PyAny>> {
        self.work.as_ref()
    }

    /// On a device the work so far is marked first: what fails does so while nothing is changed.
    fn end(&self, py: Python<'_>, keep: Option<Vec<u32>>) -> PyResult<()> {
        if let Some(work) = &self.work {
            self.inner.check_open()?;
            work.call_method0(py, intern!(py, "finish"))?;
        }
        self.inner.commit(keep)?;
        park(self, py);
        Ok(())
    }

    /// What stands in a table where there is no page.
    fn no_page(&self) -> i64 {
        if self.cache.has_null_page() { 0 } else { -1 }
    }
}

#[pymethods]
impl Batch {
    /// Whether it was committed or closed.
    #[getter]
    fn is_ended(&self) -> bool {
        self.inner.is_ended()
    }

    /// Sequences in the batch.
    fn __len__(&self) -> usize {
        self.inner.items().len()
    }

    /// int32 ``[B, max_pages]``: the page of each ``page_size`` tokens of each sequence. Behind a
    /// sequence's last page -1, or 0 if the cache has a null page.
    #[getter]
    fn block_table<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let shape = vec![slf.get().__len__(), slf.get().inner.block_table()?.1];
        lend(slf, |_| shape, |this| Ok(this.inner.block_table()?.0))
    }

    /// int32 ``[B]``: tokens of each sequence, the new ones included.
    #[getter]
    fn seq_lens<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        lend(slf, |n| vec![n], |this| this.inner.seq_lens())
    }

    /// int32 ``[B + 1]``: sequence ``b`` has the query rows ``cu_seqlens_q[b]:cu_seqlens_q[b + 1]``.
    #[getter]
    fn cu_seqlens_q<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        lend(slf, |n| vec![n], |this| Ok(this.inner.cu_seqlens_q()))
    }

    /// int64 ``[tokens]``: slot ``page * page_size + offset`` of each new token.
    #[getter]
    fn slot_mapping<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        lend(slf, |n| vec![n], |this| this.inner.slot_mapping())
    }

    /// int64 ``[tokens]``: position of each new token in its sequence.
    #[getter]
    fn positions<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        lend(slf, |n| vec![n], |this| this.inner.positions())
    }

    /// int32 ``[B + 1]``: where each sequence's pages begin in `kv_indices`.
    #[getter]
    fn kv_indptr<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        lend(slf, |n| vec![n], |this| this.inner.kv_indptr())
    }

    /// int32: the pages of all sequences, one sequence after another.
    #[getter]
    fn kv_indices<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        lend(slf, |n| vec![n], |this| this.inner.kv_indices())
    }

    /// int32 ``[B]``: tokens in each sequence's last page, 1 to ``page_size``; 0 if it is empty.
    #[getter]
    fn kv_last_page_len<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        lend(slf, |n| vec![n], |this| this.inner.kv_last_page_len())
    }

    /// int64 ``[n, 2]``: source and destination of each page that was copied on write when the
    /// batch was opened. A cache without storage leaves the copies to its caller.
    #[getter]
    fn copies<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        super::batch_view::pairs(py, &self.inner.copies())
    }

    /// Writes arrays into larger buffers of one's own, as graphs of fixed shapes want them.
    ///
    /// Parameters
    /// ----------
    /// block_table, seq_lens, cu_seqlens_q, slot_mapping, positions : array of int, optional
    ///     Buffers at least as large as the batch's arrays, of any integer dtype; modified.
    /// kv_indptr, kv_indices, kv_last_page_len : array of int, optional
    ///     Likewise.
    ///
    /// Raises
    /// ------
    /// LayoutError
    ///     For a buffer that is too small, read-only or not of integers.
    /// ValueError
    ///     For a dtype that can't hold the values. Nothing is written then.
    ///
    /// Notes
    /// -----
    /// What is left of a buffer is padded: slots by -1, pages by -1 (0 if the cache has a null
    /// page), lengths and positions by 0, cumulative arrays by their last value.
    #[pyo3(signature = (*, block_table=None, seq_lens=None, cu_seqlens_q=None, slot_mapping=None, positions=None,
        kv_indptr=None, kv_indices=None, kv_last_page_len=None))]
    fn fill(
        &self,
        block_table: Option<&Bound<'_, PyAny>>,
        seq_lens: Option<&Bound<'_, PyAny>>,
        cu_seqlens_q: Option<&Bound<'_, PyAny>>,
        slot_mapping: Option<&Bound<'_, PyAny>>,
        positions: Option<&Bound<'_, PyAny>>,
        kv_indptr: Option<&Bound<'_, PyAny>>,
        kv_indices: Option<&Bound<'_, PyAny>>,
        kv_last_page_len: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let buffers = [
            (Field::BlockTable, block_table),
            (Field::SeqLens, seq_lens),
            (Field::CuSeqlensQ, cu_seqlens_q),
            (Field::SlotMapping, slot_mapping),
            (Field::Positions, positions),
            (Field::KvIndptr, kv_indptr),
            (Field::KvIndices, kv_indices),
            (Field::KvLastPageLen, kv_last_page_len),
        ];
        fill(&self.inner, self.no_page(), buffers)
    }

    /// Counts new tokens as computed, and ends the batch.
    ///
    /// Parameters
    /// ----------
    /// num_tokens : array of int or sequence of int, optional
    ///     ``[B]``: how many of each sequence's new tokens are kept; the rest is truncated, as
    ///     rejected draft tokens are. All if None.
    ///
    /// Raises
    /// ------
    /// ValueError
    ///     Where it has ended, or keeps more than there are. Nothing is changed then.
    /// DeviceError
    ///     Where the device refuses. The batch is still open then.
    ///
    /// Notes
    /// -----
    /// Slots that were reserved beyond the batch are dropped too. A sequence that was freed
    /// meanwhile is skipped.
    #[pyo3(signature = (num_tokens=None))]
    fn commit(&self, py: Python<'_>, num_tokens: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let keep = num_tokens.map(|keep| integers("num_tokens", keep)).transpose()?;
        self.end(py, keep)
    }

    /// Ends the batch as if it had never been opened; does nothing where it has ended.
    fn close(&self, py: Python<'_>) {
        self.inner.close();
        park(self, py);
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyResult<PyRef<'_, Self>> {
        slf.inner.check_open()?;
        Ok(slf)
    }

    #[pyo3(signature = (exc_type, exc_value, traceback))]
    fn __exit__(
        &self,
        py: Python<'_>,
        exc_type: &Bound<'_, PyAny>,
        exc_value: &Bound<'_, PyAny>,
        traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let _ = (exc_value, traceback);
        let commits = exc_type.is_none() && !self.inner.is_ended();
        let ended = if commits { self.end(py, None) } else { Ok(()) };
        if !self.inner.is_ended() {
            self.close(py);
        }
        ended
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        BatchView::new(self.inner.view()?, self.no_page()).reduce(py)
    }

    fn __repr__(&self) -> String {
        let state = if self.inner.is_ended() { "ended" } else { "open" };
        format!("paged_kv.Batch({} sequences, {state})", self.inner.items().len())
    }
}
