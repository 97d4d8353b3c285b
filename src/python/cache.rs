//! `paged_kv.KvCache`.

#![expect(clippy::doc_markdown, reason = "docstrings are numpydoc, where names of arguments stand bare")]

use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::array::integers;
use super::batch::Batch;
use super::build::{self, Rest, Sizes};
use super::convert::{Number, given};
use super::device::{Device, Place};
use super::leases::LeaseTracker;
use super::pool::PagePool;
use super::sequence::Sequence;
use super::step::{self, StepOptions};
use crate::cache;
use crate::ids::TokenId;
use crate::storage::RegionOptions;

/// A paged KV cache: pages of keys and values in all layers, and the sequences that hold them.
///
/// Every method may be called from any thread; long work runs without the GIL.
///
/// Parameters
/// ----------
/// num_layers : int
///     Layers of the model; 0 keeps tables only, and the caller carries out :attr:`Batch.copies`.
/// num_kv_heads, head_dim : int
///     Shape of a token's keys in one layer. Needed unless `num_layers` is 0 or `storage` is given.
/// v_head_dim : int, optional
///     Elements of a value of one head; `head_dim` if None.
/// value_in_key : bool
///     Whether values are the first `v_head_dim` elements of each key, as in the latent cache of MLA
///     (one KV head of 512 + 64 elements, of which 512 are the value): they are not stored twice.
///     :meth:`write` takes None as value then, and :meth:`attend` needs a `scale`.
/// page_size : int, optional
///     Tokens of a page; 16 if None.
/// page_bytes : int, optional
///     Instead of `page_size`: as many tokens as fit into so many bytes of keys and values of one
///     layer.
/// num_pages : int
///     Pages that can be handed out. Give either this or `memory`.
/// memory : int or str
///     Bytes for all pages, such as ``"4GiB"``.
/// dtype : str or dtype, optional
///     As keys and values are stored: ``"bfloat16"`` (if None), ``"float16"``, ``"float32"``, or
///     quantised when they are written: ``"int8"`` or ``"float8_e4m3fn"``, with a float32 scale per
///     token and head beside them.
/// k_scale, v_scale : float or array of float, optional
///     Instead of scales per token, one per head: a number, ``[num_kv_heads]`` or
///     ``[num_layers, num_kv_heads]``, positive; of ``dtype="float8_e4m3fn"`` mostly. What is
///     larger than the dtype's largest number times its scale becomes that.
/// layout : {"HND", "NHD"}
///     Order of the axes of a page: ``[num_kv_heads, page_size, head_dim]`` or
///     ``[page_size, num_kv_heads, head_dim]``.
/// window_left : int
///     What :meth:`attend` uses where it is given none: keys to the left of its own position that a
///     query sees; -1 for all.
/// device : str
///     ``"cpu"``, or ``"ascend:N"`` (also ``"npu:N"``): the NPU of that number holds the pages and
///     attends, in float16 or bfloat16. See :mod:`paged_kv.ascend`.
/// storage : iterable of pairs of arrays, optional
///     ``(key_pages, value_pages)`` of each layer, writable, each ``[num_pages, *page]`` in the order
///     of `layout`: the cache works on these arrays and keeps them alive. Sizes that are not given
///     are theirs. Nobody else may write pages that the cache has handed out. Quantised ones (int8,
///     or uint8 as the bits of float8_e4m3fn) without `k_scale` and `v_scale` bring their scales:
///     ``(key_pages, value_pages, key_scales, value_scales)``, float32, axes as of pages without
///     the last. What belongs to values in keys is None. On a device:
///     pairs of arrays there.
/// null_page : bool
///     Keeps page 0 back, outside `num_pages`: zeros, which padding may refer to.
/// num_threads : int, optional
///     Threads for attention, the caller's among them; as many as the process may use if None.
/// huge_pages : {"auto", "on", "off"}
///     Whether the system is asked to back the memory by huge pages.
/// overcommit : bool
///     Allows more bytes than the machine has: only pages that are written take memory.
///
/// Raises
/// ------
/// LayoutError, ValueError
///     For sizes that make no sense.
/// CacheMemoryError
///     Where the memory can't be had.
/// DeviceError
///     Where the device can't be used; :class:`paged_kv.ascend.UnavailableError` says what is missing.
///
/// Examples
/// --------
/// >>> cache = paged_kv.KvCache(num_layers=2, num_kv_heads=2, head_dim=64, num_pages=128)
/// >>> prompt = cache.sequence()
/// >>> with cache.batch([prompt], 5) as batch:
/// ...     for layer in range(2):
/// ...         cache.write(layer, key[layer], value[layer], batch)
/// ...         out = cache.attend(layer, query[layer], batch)
/// >>> answers = [prompt.fork() for _ in range(4)]
///
/// Notes
/// -----
/// Memory is managed as in Kwon et al., "Efficient Memory Management for Large Language Model
/// Serving with PagedAttention" (SOSP 2023), without locks.
#[pyclass(frozen, weakref, module = "paged_kv", name = "KvCache")]
pub(crate) struct KvCache {
    pub(super) cache: Arc<cache::KvCache>,
    /// Open batches, once :meth:`track_leases` was called.
    pub(super) leases: LeaseTracker,
    /// Layers of the model.
    #[pyo3(get)]
    num_layers: usize,
    /// KV heads.
    #[pyo3(get)]
    num_kv_heads: usize,
    /// Elements of a key of one head.
    #[pyo3(get)]
    head_dim: usize,
    /// Elements of a value of one head.
    #[pyo3(get)]
    v_head_dim: usize,
    /// Whether values are the first elements of keys.
    #[pyo3(get)]
    value_in_key: bool,
    /// Tokens of a page.
    #[pyo3(get)]
    page_size: usize,
    /// Pages that can be handed out; a null page is not counted.
    #[pyo3(get)]
    num_pages: u32,
    /// Name of the dtype in which keys and values are stored.
    #[pyo3(get)]
    dtype: &'static str,
    /// Order of the axes of a page: ``"HND"`` or ``"NHD"``.
    #[pyo3(get)]
    layout: &'static str,
    /// The window that :meth:`attend` uses where it is given none; -1 is off.
    #[pyo3(get)]
    window_left: i64,
    /// Whether page 0 is kept back.
    #[pyo3(get)]
    null_page: bool,
    /// Threads for attention.
    #[pyo3(get)]
    num_threads: usize,
    /// Where the pages lie: ``"cpu"``, ``"ascend:0"``.
    #[pyo3(get)]
    device: String,
    /// What works on the pages, where that isn't this processor.
    pub(super) backend: Option<Device>,
}

impl KvCache {
    fn new(cache: cache::KvCache, place: Place, backend: Option<Device>) -> Self {
        let layout = *cache.layout();
        Self {
            num_layers: layout.num_layers,
            num_kv_heads: layout.num_kv_heads,
            head_dim: layout.head_dim,
            v_head_dim: layout.v_head_dim,
            value_in_key: layout.value_in_key,
            page_size: layout.page_size,
            num_pages: cache.pool().num_pages(),
            dtype: layout.dtype.name(),
            layout: layout.order.name(),
            window_left: cache.window_left(),
            null_page: cache.has_null_page(),
            num_threads: cache.threads().num_threads(),
            device: place.name(),
            backend,
            cache: Arc::new(cache),
            leases: LeaseTracker::new(),
        }
    }

    /// On a device, ends the leases of work that it has done.
    pub(super) fn poll(&self, py: Python<'_>) -> PyResult<()> {
        self.backend.as_ref().map_or(Ok(()), |device| device.poll(py).map(drop))
    }
}

#[pymethods]
impl KvCache {
    #[new]
    #[pyo3(signature = (*, num_layers, num_kv_heads=None, head_dim=None, v_head_dim=None, value_in_key=false,
        page_size=None,         page_bytes=None, num_pages=None, memory=None, dtype=None, k_scale=None, v_scale=None, layout="HND", window_left=Number(-1), device=None,
        storage=None, null_page=false, num_threads=None, huge_pages="auto", overcommit=false),
        text_signature = "(*, num_layers, num_kv_heads=None, head_dim=None, v_head_dim=None, value_in_key=False, \
        page_size=None,         page_bytes=None, num_pages=None, memory=None, dtype=None, k_scale=None, v_scale=None, layout='HND', \
        window_left=-1, device=None, \
        storage=None, null_page=False, num_threads=None, huge_pages='auto', overcommit=False)")]
    fn build(
        py: Python<'_>,
        num_layers: Number<usize>,
        num_kv_heads: Option<Number<usize>>,
        head_dim: Option<Number<usize>>,
        v_head_dim: Option<Number<usize>>,
        value_in_key: bool,
        page_size: Option<Number<usize>>,
        page_bytes: Option<Number<usize>>,
        num_pages: Option<Number<usize>>,
        memory: Option<&Bound<'_, PyAny>>,
        dtype: Option<&Bound<'_, PyAny>>,
        k_scale: Option<&Bound<'_, PyAny>>,
        v_scale: Option<&Bound<'_, PyAny>>,
        layout: &str,
        window_left: Number<i64>,
        device: Option<&Bound<'_, PyAny>>,
        storage: Option<&Bound<'_, PyAny>>,
        null_page: bool,
        num_threads: Option<Number<usize>>,
        huge_pages: &str,
        overcommit: bool,
    ) -> PyResult<Self> {
        let place = Place::parse(device)?;
        let order = layout.parse()?;
        let sizes = Sizes {
            num_layers: num_layers.0,
            num_kv_heads: given(num_kv_heads),
            head_dim: given(head_dim),
            v_head_dim: given(v_head_dim),
            value_in_key,
            page_size: given(page_size),
            page_bytes: given(page_bytes),
            num_pages: given(num_pages),
            memory,
            dtype,
            order,
            null_page,
            head_scales: [k_scale, v_scale],
        };
        let region = RegionOptions { huge_pages: huge_pages.parse()?, overcommit };
        let rest = Rest { window_left: window_left.0, num_threads: given(num_threads), region };
        if let Place::Ascend(index) = place {
            let (cache, device) = Device::open(py, index, &sizes, &rest, storage)?;
            return Ok(Self::new(cache, place, Some(device)));
        }
        Ok(Self::new(build::cache(py, &sizes, &rest, storage)?, place, None))
    }

    /// The pool that pages come from, for those who keep tables of their own.
    #[getter]
    fn pool(&self) -> PagePool {
        PagePool::new(Arc::clone(&self.cache), self.backend.clone())
    }

    /// A new sequence, without a token and without a page.
    ///
    /// Parameters
    /// ----------
    /// token_ids : array of int or sequence of int, optional
    ///     The prompt. Its ids stay pending: batches take them in order, unless they are given
    ///     `token_ids` of their own, which must be the same.
    ///
    /// Returns
    /// -------
    /// Sequence
    ///     With ``len(sequence) == sequence.num_computed_tokens``, the tokens that need not be
    ///     computed.
    #[pyo3(signature = (token_ids=None))]
    fn sequence(&self, token_ids: Option<&Bound<'_, PyAny>>) -> PyResult<Sequence> {
        let token_ids: Vec<TokenId> = match token_ids {
            Some(token_ids) => integers("token_ids", token_ids)?,
            None => Vec::new(),
        };
        let sequence = self.cache.sequence(&token_ids);
        Ok(Sequence::new(sequence, Arc::clone(&self.cache), self.backend.clone()))
    }

    /// One sequence per index, as beam search and continuous batching want it.
    ///
    /// Parameters
    /// ----------
    /// seqs : sequence of Sequence
    ///     Sequences of this cache, each once.
    /// indices : array of int or sequence of int
    ///     Positions in `seqs`.
    ///
    /// Returns
    /// -------
    /// list of Sequence
    ///     The first pick of a sequence is that very object, further picks are forks of it;
    ///     sequences that nobody picks are freed. Takes no pages.
    ///
    /// Raises
    /// ------
    /// ValueError
    ///     For an index out of range, or a sequence that is there twice or of another cache.
    /// SequenceBusyError, SequenceFreedError
    ///     Where one is being changed, or freed. Nothing is changed then.
    fn reorder<'py>(
        &self,
        py: Python<'py>,
        seqs: &Bound<'py, PyAny>,
        indices: &Bound<'py, PyAny>,
    ) -> PyResult<Vec<Bound<'py, Sequence>>> {
        step::reorder(py, &self.cache, self.backend.as_ref(), seqs, indices)
    }

    /// Opens a batch: reserves missing slots, copies shared tail pages, and takes a lease.
    ///
    /// Parameters
    /// ----------
    /// seqs : sequence of Sequence
    ///     Sequences of this cache, each once.
    /// num_new_tokens : int or array of int or sequence of int, optional
    ///     Tokens that each sequence computes behind its computed ones: one number for all, or
    ///     ``[B]``. All that are reserved if None; 0 only reads.
    /// token_ids : array of int or sequence of int, optional
    ///     ``[tokens]``: the ids of the new tokens, one sequence after another.
    /// num_queries : int or array of int or sequence of int, optional
    ///     Query rows of each sequence, where they are not the new tokens (cross-attention): more
    ///     than it has tokens only where positions don't count (not causal, no window, no ALiBi).
    /// stream : optional
    ///     On a device, where the batch's work takes its turn: a :class:`paged_kv.ascend.Stream`, a
    ///     handle, or a torch_npu stream; the cache's own one if None. Host memory has none.
    ///
    /// Returns
    /// -------
    /// Batch
    ///     To use in a ``with`` block.
    ///
    /// Raises
    /// ------
    /// OutOfPagesError, NeverFitsError
    ///     With the `index` of the first sequence that did not fit.
    /// SequenceBusyError, SequenceFreedError
    ///     Where sequences are being changed (`index`), or freed (`indices`).
    /// ValueError
    ///     For ids that contradict those given before, numbers that don't match, a sequence that is
    ///     there twice or of another cache. Nothing is changed then.
    #[pyo3(signature = (seqs, num_new_tokens=None, *, token_ids=None, num_queries=None, stream=None))]
    fn batch<'py>(
        &self,
        py: Python<'py>,
        seqs: &Bound<'py, PyAny>,
        num_new_tokens: Option<&Bound<'py, PyAny>>,
        token_ids: Option<&Bound<'py, PyAny>>,
        num_queries: Option<&Bound<'py, PyAny>>,
        stream: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, Batch>> {
        let device = self.backend.as_ref();
        if stream.is_some() && device.is_none() {
            return Err(PyValueError::new_err("a cache in host memory has no stream"));
        }
        let batch =
            step::open(py, &self.cache, seqs, num_new_tokens, token_ids, num_queries, device, stream)?;
        let batch = Bound::new(py, batch)?;
        self.leases.note(&batch)?;
        Ok(batch)
    }

    /// Writes the new tokens' keys and values of one layer into their slots.
    ///
    /// Parameters
    /// ----------
    /// layer : int
    ///     Which layer.
    /// key : array
    ///     ``[tokens, num_kv_heads, head_dim]``: numpy or DLPack in host memory, float32, float16 or
    ///     bfloat16 (or its bits as uint16), last axis contiguous; converted to the cache's dtype. On
    ///     a device also contiguous arrays there, in the cache's dtype, ready on the batch's stream.
    /// value : array
    ///     ``[tokens, num_kv_heads, v_head_dim]``; None with `value_in_key`.
    /// batch : Batch or BatchView
    ///     Says where the tokens lie.
    ///
    /// Raises
    /// ------
    /// LayoutError
    ///     For shapes, strides, dtypes or devices that don't fit.
    /// ValueError
    ///     For a layer that is not there, a batch that has ended, or NaN and infinity where the
    ///     cache's dtype is quantised. Nothing is written then.
    #[pyo3(signature = (layer, key, value, batch))]
    fn write(
        &self,
        py: Python<'_>,
        layer: Number<usize>,
        key: &Bound<'_, PyAny>,
        value: Option<&Bound<'_, PyAny>>,
        batch: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        match &self.backend {
            Some(device) => device.write(&self.cache, layer.0, key, value, batch),
            None => step::write(py, &self.cache, layer.0, key, value, batch),
        }
    }

    /// Attention of a batch's queries over the keys and values of one layer.
    ///
    /// Defined as in :func:`paged_attention`. A sequence's result does not depend on the rest of the
    /// batch, to the bit; on a device it may, by how decoding is split.
    ///
    /// Parameters
    /// ----------
    /// layer : int
    ///     Which layer.
    /// query : array
    ///     ``[tokens, num_heads, head_dim]``: numpy or DLPack in host memory, float32, float16 or
    ///     bfloat16 (or its bits as uint16), last axis contiguous. `num_kv_heads` divides
    ///     `num_heads`. On a device also a contiguous array there in the cache's dtype: then nothing
    ///     is waited for. One of the host is copied there in the cache's dtype, and waited for.
    /// batch : Batch or BatchView
    ///     Says whose keys each row sees.
    /// scale, causal, logits_soft_cap, alibi_slopes, sinks, return_lse, return_error_bound : optional
    ///     As in :func:`paged_attention`. Devices have neither `alibi_slopes` nor `sinks`
    ///     nor a bound.
    /// window_left : int, optional
    ///     Keys to the left of its own position that a query sees; -1 for all, the cache's if None.
    /// out : array, optional
    ///     ``[tokens, num_heads, v_head_dim]`` in the query's dtype: written and returned. Needed for a
    ///     query on a device.
    ///
    /// Returns
    /// -------
    /// out : array
    ///     ``[tokens, num_heads, v_head_dim]`` in the query's dtype: `out` if given, a numpy array
    ///     for a numpy query, else a :class:`Tensor`.
    /// lse : array
    ///     float32 ``[tokens, num_heads]``, natural logarithm; only with `return_lse`.
    /// error_bound : array
    ///     float32 ``[tokens, num_heads]``; only with `return_error_bound`, of a quantised cache.
    ///
    /// Raises
    /// ------
    /// LayoutError
    ///     For shapes, strides, dtypes or devices that don't fit.
    /// ValueError
    ///     For options out of range, a layer that is not there, or a batch that has ended.
    #[pyo3(signature = (layer, query, batch, *, scale=None, causal=true, window_left=None,
        logits_soft_cap=0.0, alibi_slopes=None, sinks=None, return_lse=false,
        return_error_bound=false, out=None))]
    fn attend<'py>(
        &self,
        py: Python<'py>,
        layer: Number<usize>,
        query: &Bound<'py, PyAny>,
        batch: &Bound<'py, PyAny>,
        scale: Option<f32>,
        causal: bool,
        window_left: Option<Number<i64>>,
        logits_soft_cap: f32,
        alibi_slopes: Option<&Bound<'py, PyAny>>,
        sinks: Option<&Bound<'py, PyAny>>,
        return_lse: bool,
        return_error_bound: bool,
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let options = StepOptions {
            scale,
            causal,
            window_left,
            logits_soft_cap,
            alibi_slopes,
            sinks,
            return_lse,
            return_error_bound,
            out,
        };
        match &self.backend {
            Some(device) => device.attend(&self.cache, layer.0, query, batch, &options),
            None => step::attend(py, &self.cache, layer.0, query, batch, &options),
        }
    }

    fn __repr__(&self) -> String {
        format!(
            "paged_kv.KvCache(num_layers={}, num_kv_heads={}, head_dim={}, page_size={}, num_pages={}, \
             dtype={}, layout={})",
            self.num_layers,
            self.num_kv_heads,
            self.head_dim,
            self.page_size,
            self.num_pages,
            self.dtype,
            self.layout
        )
    }
}
