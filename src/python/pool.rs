//! `paged_kv.PagePool`: the pages of a cache, by handles.

#![expect(clippy::doc_markdown, reason = "docstrings are numpydoc, where names of arguments stand bare")]

use std::sync::Arc;

use numpy::PyArray1;
use pyo3::prelude::*;

use super::array::integers;
use super::convert::Number;
use super::device::{Device, patiently};
use crate::cache::KvCache;
use crate::ids::PageHandle;

/// The pages of a cache, for those who keep tables of their own.
///
/// A page is named by a handle, ``generation << 32 | page``: once its last reference went, old
/// handles are refused, so none can touch the page's next owner. Sequences take their pages from
/// the same pool. Got by :attr:`KvCache.pool`.
#[pyclass(frozen, module = "paged_kv", name = "PagePool")]
pub(crate) struct PagePool(Arc<KvCache>, Option<Device>);

impl PagePool {
    pub(super) fn new(cache: Arc<KvCache>, device: Option<Device>) -> Self {
        Self(cache, device)
    }
}

#[pymethods]
impl PagePool {
    /// Pages in the pool, free or not; a null page is not counted.
    #[getter]
    fn num_pages(&self) -> u32 {
        self.0.pool().num_pages()
    }

    /// Pages that an allocation could take now.
    #[getter]
    fn num_free(&self, py: Python<'_>) -> PyResult<u64> {
        if let Some(device) = &self.1 {
            device.poll(py)?;
        }
        Ok(self.0.pool().num_free())
    }

    /// Takes `n` pages, each with a reference count of 1: all of them or none.
    ///
    /// Parameters
    /// ----------
    /// n : int
    ///     Pages to take; adjacent ones where there are any.
    ///
    /// Returns
    /// -------
    /// numpy.ndarray
    ///     uint64 ``[n]``: handles, by ascending page.
    ///
    /// Raises
    /// ------
    /// OutOfPagesError
    ///     Where fewer are available.
    /// NeverFitsError
    ///     Where the pool is smaller.
    fn alloc<'py>(&self, py: Python<'py>, n: Number<usize>) -> PyResult<Bound<'py, PyArray1<u64>>> {
        let handles = patiently(py, self.1.as_ref(), || Ok(self.0.alloc(n.0)?))?;
        let handles = handles.into_iter().map(|handle| handle.0).collect();
        Ok(PyArray1::from_vec(py, handles))
    }

    /// The pages behind handles, for block tables.
    ///
    /// Parameters
    /// ----------
    /// handles : array of int or sequence of int
    ///     ``[n]``.
    ///
    /// Returns
    /// -------
    /// numpy.ndarray
    ///     int32 ``[n]``.
    ///
    /// Raises
    /// ------
    /// RefCountError
    ///     For a handle whose page was freed since.
    /// InvalidPageError
    ///     For a page outside the pool.
    fn page_ids<'py>(
        &self,
        py: Python<'py>,
        handles: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let page_of = |&handle: &PageHandle| Ok(self.0.pool().page_of(handle)?.0 as i32);
        let pages = parse(handles)?.iter().map(page_of).collect::<PyResult<Vec<_>>>()?;
        Ok(PyArray1::from_vec(py, pages))
    }

    /// Adds a reference to the page of each handle.
    ///
    /// Parameters
    /// ----------
    /// handles : array of int or sequence of int
    ///     ``[n]``.
    ///
    /// Raises
    /// ------
    /// RefCountError
    ///     For a handle whose page was freed since, or a count at its limit.
    /// InvalidPageError
    ///     For a page outside the pool. No count has changed then.
    fn retain(&self, handles: &Bound<'_, PyAny>) -> PyResult<()> {
        Ok(self.0.pool().retain(&parse(handles)?)?)
    }

    /// Drops a reference to the page of each handle; the last one frees the page.
    ///
    /// Parameters
    /// ----------
    /// handles : array of int or sequence of int
    ///     ``[n]``.
    ///
    /// Raises
    /// ------
    /// RefCountError
    ///     For a handle that was released before.
    /// InvalidPageError
    ///     For a page outside the pool. No count has changed then.
    fn release(&self, handles: &Bound<'_, PyAny>) -> PyResult<()> {
        Ok(self.0.pool().release(&parse(handles)?)?)
    }

    /// References to the page of each handle: by page tables and by handles.
    ///
    /// Parameters
    /// ----------
    /// handles : array of int or sequence of int
    ///     ``[n]``.
    ///
    /// Returns
    /// -------
    /// numpy.ndarray
    ///     uint32 ``[n]``.
    ///
    /// Raises
    /// ------
    /// RefCountError
    ///     For a handle whose page was freed since.
    /// InvalidPageError
    ///     For a page outside the pool.
    fn ref_count<'py>(
        &self,
        py: Python<'py>,
        handles: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyArray1<u32>>> {
        let count_of = |&handle: &PageHandle| Ok(self.0.pool().ref_count_of(handle)?);
        let counts = parse(handles)?.iter().map(count_of).collect::<PyResult<Vec<_>>>()?;
        Ok(PyArray1::from_vec(py, counts))
    }

    /// The sequences whose tables include the page of each handle. Walks all tables.
    ///
    /// Parameters
    /// ----------
    /// handles : array of int or sequence of int
    ///     ``[n]``.
    ///
    /// Returns
    /// -------
    /// list of list of int
    ///     The :attr:`Sequence.id` of each.
    ///
    /// Raises
    /// ------
    /// RefCountError
    ///     For a handle whose page was freed since.
    /// InvalidPageError
    ///     For a page outside the pool.
    fn owners(&self, py: Python<'_>, handles: &Bound<'_, PyAny>) -> PyResult<Vec<Vec<u64>>> {
        let handles = parse(handles)?;
        let owners = || handles.iter().map(|&handle| self.0.owners(handle)).collect::<Result<_, _>>();
        Ok(py.detach(owners)?)
    }

    fn __repr__(&self) -> String {
        let pool = self.0.pool();
        format!("paged_kv.PagePool(num_pages={}, num_free={})", pool.num_pages(), pool.num_free())
    }
}

fn parse(handles: &Bound<'_, PyAny>) -> PyResult<Vec<PageHandle>> {
    Ok(integers::<u64>("handles", handles)?.into_iter().map(PageHandle).collect())
}
