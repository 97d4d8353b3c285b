//! `paged_kv.Sequence`.

#![expect(clippy::doc_markdown, reason = "docstrings are numpydoc, where names of arguments stand bare")]

use std::sync::Arc;

use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::types::PyString;

use super::array::integers;
use super::convert::{Number, given};
use super::device::{Device, patiently};
use crate::cache::KvCache;
use crate::ids::TokenId;
use crate::table;

/// The tokens of one request: their page table, and how many of them are computed.
///
/// Made by :meth:`KvCache.sequence`, :meth:`fork` and :meth:`KvCache.reorder`. Every method may be
/// called from any thread; of two threads that change the same sequence one wins and the other gets
/// :class:`SequenceBusyError` at once. A sequence that is garbage collected is freed.
///
/// ``len(sequence)`` counts the slots that are reserved, in tokens.
#[pyclass(frozen, weakref, module = "paged_kv", name = "Sequence")]
pub(crate) struct Sequence {
    inner: table::Sequence,
    cache: Arc<KvCache>,
    device: Option<Device>,
}

impl Sequence {
    pub(super) fn new(sequence: table::Sequence, cache: Arc<KvCache>, device: Option<Device>) -> Self {
        Self { inner: sequence, cache, device }
    }

    pub(super) fn inner(&self) -> &table::Sequence {
        &self.inner
    }
}

#[pymethods]
impl Sequence {
    /// A number that no other sequence of this cache ever has.
    #[getter]
    fn id(&self) -> u64 {
        self.inner.id()
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(self.inner.len()? as usize)
    }

    /// Tokens written in all layers and committed: what forks and other leases see.
    #[getter]
    fn num_computed_tokens(&self) -> PyResult<u32> {
        Ok(self.inner.num_computed_tokens()?)
    }

    /// Whether :meth:`free` was called.
    #[getter]
    fn is_freed(&self) -> bool {
        self.inner.is_freed()
    }

    /// The physical pages in logical order, reserved ones too: int32 ``[pages]``, a copy.
    #[getter]
    fn block_table<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<i32>>> {
        Ok(PyArray1::from_vec(py, self.inner.block_table()?))
    }

    /// Token ids that were given ahead and that no batch has computed yet: uint32, a copy.
    #[getter]
    fn pending_token_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<u32>>> {
        Ok(PyArray1::from_vec(py, self.inner.pending_ids()?))
    }

    /// Reserves slots for `n` more tokens, ahead of a batch.
    ///
    /// Parameters
    /// ----------
    /// n : int
    ///     Tokens to reserve slots for.
    ///
    /// Raises
    /// ------
    /// OutOfPagesError
    ///     Where too few pages are available.
    /// NeverFitsError
    ///     Where the sequence would be larger than the pool.
    /// SequenceBusyError, SequenceFreedError
    ///     Where it is being changed, or freed. Nothing is changed then.
    ///
    /// Notes
    /// -----
    /// A tail page that others can see is copied first (copy-on-write), its computed tokens only.
    fn append(&self, py: Python<'_>, n: Number<u32>) -> PyResult<()> {
        patiently(py, self.device.as_ref(), || Ok(self.inner.append(n.0)?))
    }

    /// :meth:`append` for tokens whose ids are known.
    ///
    /// Parameters
    /// ----------
    /// token_ids : array of int or sequence of int
    ///     ``[n]``; batches take them in order unless they are given `token_ids` of their own, which
    ///     must be the same.
    fn extend(&self, token_ids: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = token_ids.py();
        let token_ids: Vec<TokenId> = integers("token_ids", token_ids)?;
        patiently(py, self.device.as_ref(), || Ok(self.inner.extend(&token_ids)?))
    }

    /// A new sequence with this one's computed tokens.
    ///
    /// All pages are shared; whichever of the two first writes into a shared page copies it.
    /// Works while this sequence is being changed, and takes no page.
    ///
    /// Returns
    /// -------
    /// Sequence
    ///     The child, independent of this one from now on.
    ///
    /// Raises
    /// ------
    /// SequenceFreedError
    ///     Where this sequence was freed.
    fn fork(&self) -> PyResult<Self> {
        Ok(Self::new(self.inner.fork()?, Arc::clone(&self.cache), self.device.clone()))
    }

    /// Leaves the first `n` tokens.
    ///
    /// Parameters
    /// ----------
    /// n : int
    ///     Tokens that stay. Who holds a lease on the others goes on seeing them.
    ///
    /// Raises
    /// ------
    /// ValueError
    ///     Where there are fewer.
    /// SequenceBusyError, SequenceFreedError
    ///     Where it is being changed, or freed. Nothing is changed then.
    fn truncate(&self, n: Number<u32>) -> PyResult<()> {
        Ok(self.inner.truncate(n.0)?)
    }

    /// Declares tokens computed that were written without a batch.
    ///
    /// Parameters
    /// ----------
    /// n : int, optional
    ///     The new `num_computed_tokens`; ``len(sequence)`` if None.
    ///
    /// Raises
    /// ------
    /// ValueError
    ///     Where `n` exceeds the length or is below what is computed.
    /// SequenceBusyError, SequenceFreedError
    ///     Where it is being changed, or freed. Nothing is changed then.
    #[pyo3(signature = (n=None))]
    fn commit(&self, n: Option<Number<u32>>) -> PyResult<()> {
        Ok(self.inner.commit(given(n))?)
    }

    /// Gives all pages back.
    ///
    /// Never fails and never waits; a second call does nothing. Pages that an open batch or another
    /// sequence holds stay until they let go.
    fn free(&self) {
        self.inner.free();
    }

    /// Address of one reserved token's key or value.
    ///
    /// Parameters
    /// ----------
    /// layer, position : int
    ///     Which layer, and which token of this sequence.
    /// which : {"key", "value"}
    ///     Which of the two.
    /// head : int
    ///     Which KV head.
    ///
    /// Returns
    /// -------
    /// int
    ///     The address of ``head_dim`` elements. It is this token's as long as a batch holds it.
    ///
    /// Raises
    /// ------
    /// ValueError
    ///     Where `layer`, `position` or `head` is out of range.
    /// LayoutError
    ///     Where the cache has no storage.
    #[pyo3(signature = (layer, position, which, *, head=Number(0)),
        text_signature = "($self, layer, position, which, *, head=0)")]
    fn physical_address(
        &self,
        py: Python<'_>,
        layer: Number<usize>,
        position: Number<u64>,
        which: &str,
        head: Number<usize>,
    ) -> PyResult<usize> {
        let which = which.parse()?;
        if let Some(device) = &self.device {
            return device.physical_address(py, &self.inner, layer.0, position.0, which, head.0);
        }
        Ok(self.cache.physical_address(&self.inner, layer.0, position.0, which, head.0)?)
    }

    /// Translates an offset in this sequence's logical memory to one in a layer's physical memory.
    ///
    /// Parameters
    /// ----------
    /// byte_offset : int
    ///     Into the sequence's pages one after another, keys and values of one layer in each.
    ///
    /// Returns
    /// -------
    /// int
    ///     Into the layer's pages.
    ///
    /// Raises
    /// ------
    /// ValueError
    ///     Where the offset lies beyond the sequence's pages.
    fn physical_offset(&self, byte_offset: Number<u64>) -> PyResult<u64> {
        Ok(self.cache.physical_offset(&self.inner, byte_offset.0)?)
    }

    /// Asks the processor, or the device, to fetch this sequence's computed pages into its cache.
    ///
    /// Parameters
    /// ----------
    /// max_bytes : int
    ///     At most so many bytes, first layer first; more than the processor's cache holds is of no
    ///     use. A device is asked for no more than its cache holds.
    ///
    /// Returns
    /// -------
    /// int
    ///     Bytes asked for. Nothing is changed.
    #[pyo3(signature = (*, max_bytes=Number(1 << 20)), text_signature = "($self, *, max_bytes=1048576)")]
    fn prefetch(&self, py: Python<'_>, max_bytes: Number<usize>) -> PyResult<usize> {
        match &self.device {
            Some(device) => device.prefetch(py, &self.cache, &self.inner, max_bytes.0),
            None => Ok(py.detach(|| self.cache.prefetch(&self.inner, max_bytes.0))?),
        }
    }

    fn __repr__<'py>(&self, py: Python<'py>) -> Bound<'py, PyString> {
        let id = self.inner.id();
        let text = match (self.inner.len(), self.inner.num_computed_tokens()) {
            (Ok(len), Ok(computed)) => {
                format!("paged_kv.Sequence(id={id}, len={len}, num_computed_tokens={computed})")
            }
            _ => format!("paged_kv.Sequence(id={id}, freed)"),
        };
        PyString::new(py, &text)
    }
}
