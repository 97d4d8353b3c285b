//! Methods of `paged_kv.KvCache` that show its memory.

#![expect(clippy::doc_markdown, reason = "docstrings are numpydoc, where names of arguments stand bare")]

use std::sync::Arc;

use pyo3::intern;
use pyo3::prelude::*;

use super::array::Memory;
use super::batch_view::{pairs, parse_pairs};
use super::cache::KvCache;
use super::convert::Number;
use super::tensor::Tensor;
use crate::layout::Which;

impl KvCache {
    fn pages<'py>(
        &self,
        py: Python<'py>,
        layer: usize,
        which: Which,
        writable: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        if let Some(device) = &self.backend {
            return device.pages(py, layer, which);
        }
        let (cache, order) = (Arc::clone(&self.cache), self.cache.layout().order);
        let memory = Memory::of_pages(cache, order, writable, |cache| cache.pages(layer, which, writable))?;
        Ok(Bound::new(py, Tensor::new(memory))?.into_any())
    }

    fn scales(&self, layer: usize, which: Which, writable: bool) -> PyResult<Tensor> {
        let (cache, order) = (Arc::clone(&self.cache), self.cache.layout().order);
        let memory = Memory::of_pages(cache, order, writable, |cache| cache.scales(layer, which, writable))?;
        Ok(Tensor::new(memory.without_last_axis()))
    }
}

#[pymethods]
impl KvCache {
    /// Copies whole pages in every layer, in order: what :attr:`BatchView.copies` asks for.
    ///
    /// Parameters
    /// ----------
    /// copies : array of int or sequence of (int, int)
    ///     ``[n, 2]``: source and destination of each copy.
    ///
    /// Raises
    /// ------
    /// InvalidPageError
    ///     For a page outside the cache, the null page as destination, or a page copied to itself.
    ///     Nothing is copied then.
    fn copy_pages(&self, py: Python<'_>, copies: &Bound<'_, PyAny>) -> PyResult<()> {
        let copies = parse_pairs("copies", copies)?;
        if let Some(device) = &self.backend {
            self.cache.check_copies(&copies)?;
            return device
                .object(py)
                .call_method1(intern!(py, "copy_pages"), (pairs(py, &copies)?,))
                .map(drop);
        }
        Ok(py.detach(|| self.cache.copy_pages(&copies))?)
    }

    /// The keys of one layer where they lie, without a copy.
    ///
    /// Parameters
    /// ----------
    /// layer : int
    ///     Which layer.
    /// writable : bool
    ///     Whether arrays made from it may be written. Then it is up to you that no page is written
    ///     that others read. Others may write in any case: hold a batch on what you read.
    ///
    /// Returns
    /// -------
    /// Tensor
    ///     ``[num_pages, num_kv_heads, page_size, head_dim]``, a null page included; in the layout
    ///     ``"NHD"`` with both middle axes swapped. Keeps the memory alive, also without the cache.
    ///     Elements of float8_e4m3fn are uint8 for numpy, and what they are for DLPack. On a device a
    ///     :class:`paged_kv.ascend.DeviceTensor`, which anybody may write.
    ///
    /// Raises
    /// ------
    /// ValueError, LayoutError
    ///     For a layer that is not there, a cache without storage.
    #[pyo3(signature = (layer, writable=false))]
    fn key_pages<'py>(
        &self,
        py: Python<'py>,
        layer: Number<usize>,
        writable: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.pages(py, layer.0, Which::Key, writable)
    }

    /// The values of one layer where they lie; see :meth:`key_pages`.
    #[pyo3(signature = (layer, writable=false))]
    fn value_pages<'py>(
        &self,
        py: Python<'py>,
        layer: Number<usize>,
        writable: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.pages(py, layer.0, Which::Value, writable)
    }

    /// What the keys of one layer are multiplied by, where they lie: of a quantised cache.
    ///
    /// Parameters
    /// ----------
    /// layer, writable :
    ///     As of :meth:`key_pages`; scales per head are never writable.
    ///
    /// Returns
    /// -------
    /// Tensor
    ///     float32, with the axes of :meth:`key_pages` but the last: one per token and head, 0 where
    ///     nothing was written. A head that has one scale shows it for all of its tokens.
    ///
    /// Raises
    /// ------
    /// ValueError, LayoutError
    ///     For a layer that is not there, a cache without storage or without scales.
    #[pyo3(signature = (layer, writable=false))]
    fn key_scales(&self, layer: Number<usize>, writable: bool) -> PyResult<Tensor> {
        self.scales(layer.0, Which::Key, writable)
    }

    /// What the values of one layer are multiplied by; see :meth:`key_scales`.
    #[pyo3(signature = (layer, writable=false))]
    fn value_scales(&self, layer: Number<usize>, writable: bool) -> PyResult<Tensor> {
        self.scales(layer.0, Which::Value, writable)
    }
}
