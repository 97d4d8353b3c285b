//! `paged_kv.BatchView`: a batch's arrays without its lease.

use numpy::{PyArray1, PyArrayMethods};
use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple};

use super::array::{Array, integers, lend, named};
use super::convert::Number;
use super::fill::{Field, fill};
use crate::cache;
use crate::error::{Error, Result};

/// The arrays of a :class:`Batch` of another cache, as pickling it gives them.
///
/// One scheduler opens batches and sends them to the ranks that run the model. Each has a cache
/// with the same ``page_size`` and ``num_pages``, calls ``cache.copy_pages(view.copies)`` and then
/// ``write`` and ``attend`` with the view. The lease stays with the batch: it may end only after
/// the ranks are done.
#[pyclass(frozen, weakref, module = "paged_kv", name = "BatchView")]
pub(crate) struct BatchView {
    view: cache::BatchView,
    /// What stands in a table where there is no page.
    no_page: i64,
}

impl BatchView {
    pub(super) fn new(view: cache::BatchView, no_page: i64) -> Self {
        Self { view, no_page }
    }

    pub(super) fn inner(&self) -> &cache::BatchView {
        &self.view
    }

    /// How to make an equal one: the class, and its arguments as numpy arrays.
    pub(super) fn reduce<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let v = &self.view;
        let rows = v.seq_lens.len();
        let arguments = (
            v.page_size,
            v.num_pages,
            self.no_page,
            PyArray1::from_slice(py, &v.block_table).reshape([rows, v.max_pages])?,
            PyArray1::from_slice(py, &v.seq_lens),
            PyArray1::from_slice(py, &v.cu_seqlens_q),
            PyArray1::from_slice(py, &v.slot_mapping),
            PyArray1::from_slice(py, &v.positions),
            PyArray1::from_slice(py, &v.kv_indptr),
            PyArray1::from_slice(py, &v.kv_indices),
            PyArray1::from_slice(py, &v.kv_last_page_len),
            pairs(py, &v.copies)?,
        );
        (py.get_type::<Self>(), arguments).into_pyobject(py)
    }
}

#[pymethods]
impl BatchView {
    #[new]
    fn from_arrays(
        page_size: Number<usize>,
        num_pages: Number<usize>,
        no_page: Number<i64>,
        block_table: &Bound<'_, PyAny>,
        seq_lens: &Bound<'_, PyAny>,
        cu_seqlens_q: &Bound<'_, PyAny>,
        slot_mapping: &Bound<'_, PyAny>,
        positions: &Bound<'_, PyAny>,
        kv_indptr: &Bound<'_, PyAny>,
        kv_indices: &Bound<'_, PyAny>,
        kv_last_page_len: &Bound<'_, PyAny>,
        copies: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let table = Array::new("block_table", block_table)?;
        let &[rows, max_pages] = table.shape() else {
            return Err(table.refuse("must have the 2 axes [B, max_pages]").into());
        };
        let view = cache::BatchView {
            page_size: page_size.0,
            num_pages: num_pages.0,
            max_pages,
            block_table: table.integers()?,
            seq_lens: integers("seq_lens", seq_lens)?,
            cu_seqlens_q: integers("cu_seqlens_q", cu_seqlens_q)?,
            slot_mapping: integers("slot_mapping", slot_mapping)?,
            positions: integers("positions", positions)?,
            kv_indptr: integers("kv_indptr", kv_indptr)?,
            kv_indices: integers("kv_indices", kv_indices)?,
            kv_last_page_len: integers("kv_last_page_len", kv_last_page_len)?,
            copies: parse_pairs("copies", copies)?,
        };
        let lens = [view.seq_lens.len(), view.kv_last_page_len.len()];
        let offsets = [view.cu_seqlens_q.len(), view.kv_indptr.len()];
        if lens != [rows; 2] || offsets != [rows + 1; 2] || view.slot_mapping.len() != view.positions.len() {
            let message = format!("a view of {rows} sequences whose arrays have other lengths");
            return Err(Error::Layout(message).into());
        }
        Ok(Self { view, no_page: no_page.0 })
    }

    /// Sequences in the batch.
    fn __len__(&self) -> usize {
        self.view.seq_lens.len()
    }

    /// Tokens of a page.
    #[getter]
    fn page_size(&self) -> usize {
        self.view.page_size
    }

    /// Pages of the cache it was made by, its null page included.
    #[getter]
    fn num_pages(&self) -> usize {
        self.view.num_pages
    }

    /// int32 ``[B, max_pages]``: as :attr:`Batch.block_table`.
    #[getter]
    fn block_table<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let shape = vec![slf.get().__len__(), slf.get().view.max_pages];
        lend(slf, |_| shape, |this| Ok(&this.view.block_table))
    }

    /// int32 ``[B]``: as :attr:`Batch.seq_lens`.
    #[getter]
    fn seq_lens<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        lend(slf, |n| vec![n], |this| Ok(&this.view.seq_lens))
    }

    /// int32 ``[B + 1]``: as :attr:`Batch.cu_seqlens_q`.
    #[getter]
    fn cu_seqlens_q<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        lend(slf, |n| vec![n], |this| Ok(&this.view.cu_seqlens_q))
    }

    /// int64 ``[tokens]``: as :attr:`Batch.slot_mapping`.
    #[getter]
    fn slot_mapping<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        lend(slf, |n| vec![n], |this| Ok(&this.view.slot_mapping))
    }

    /// int64 ``[tokens]``: as :attr:`Batch.positions`.
    #[getter]
    fn positions<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        lend(slf, |n| vec![n], |this| Ok(&this.view.positions))
    }

    /// int32 ``[B + 1]``: as :attr:`Batch.kv_indptr`.
    #[getter]
    fn kv_indptr<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        lend(slf, |n| vec![n], |this| Ok(&this.view.kv_indptr))
    }

    /// int32: as :attr:`Batch.kv_indices`.
    #[getter]
    fn kv_indices<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        lend(slf, |n| vec![n], |this| Ok(&this.view.kv_indices))
    }

    /// int32 ``[B]``: as :attr:`Batch.kv_last_page_len`.
    #[getter]
    fn kv_last_page_len<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        lend(slf, |n| vec![n], |this| Ok(&this.view.kv_last_page_len))
    }

    /// int64 ``[n, 2]``: as :attr:`Batch.copies`, for :meth:`KvCache.copy_pages`.
    #[getter]
    fn copies<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        pairs(py, &self.view.copies)
    }

    /// As :meth:`Batch.fill`.
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
        fill(&self.view, self.no_page, buffers)
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        self.reduce(py)
    }

    fn __repr__<'py>(&self, py: Python<'py>) -> Bound<'py, PyString> {
        PyString::new(py, &format!("paged_kv.BatchView({} sequences)", self.__len__()))
    }
}

/// int64 `[n, 2]`.
pub(super) fn pairs<'py>(py: Python<'py>, pairs: &[[i64; 2]]) -> PyResult<Bound<'py, PyAny>> {
    Ok(PyArray1::from_slice(py, pairs.as_flattened()).reshape([pairs.len(), 2])?.into_any())
}

/// `[n, 2]`, an array or a sequence of pairs.
pub(super) fn parse_pairs(name: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Vec<[i64; 2]>> {
    let Some(array) = Array::import(name, object)? else {
        return object.extract().map_err(|error| named(object.py(), name, "pairs of integers", error));
    };
    let [_, 2] = array.shape() else {
        return Err(array.refuse("must have the 2 axes [n, 2]").into());
    };
    let flat: Result<Vec<i64>> = array.integers();
    Ok(flat?.as_chunks().0.to_vec())
}
