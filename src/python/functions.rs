//! The functions that need no cache: attention over anyone's pages, and what goes with it.

#![expect(clippy::doc_markdown, reason = "docstrings are numpydoc, where names of arguments stand bare")]

use numpy::PyArray1;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::array::{Array, Output, Scale, check_written, reserve};
use super::convert::{self, Number, given};
use super::threads;
use crate::attention::{self, AttentionOptions, BatchTables};
use crate::dtype::DType;
use crate::error::Error;
use crate::kernels::{self, Isa};
use crate::layout::{self, PageOrder};
use crate::storage::PagesView;

/// Attention of a batch's queries over keys and values in pages of any arrays.
///
/// Causal over absolute positions: query ``i`` of a sequence with ``q`` query rows and length ``L``
/// sits at position ``L - q + i`` and sees the keys up to there. Sums are taken in float32. A row
/// that sees no key gets output 0 and lse -inf. Slots that no query sees are never read.
///
/// Parameters
/// ----------
/// query : array
///     ``[tokens, num_heads, head_dim]``, the rows of all sequences one after another; numpy or
///     DLPack in host memory, float32, float16 or bfloat16 (or its bits as uint16), last axis
///     contiguous.
/// key_pages, value_pages : array
///     ``[num_pages, num_kv_heads, page_size, head_dim]`` for ``layout="HND"``,
///     ``[num_pages, page_size, num_kv_heads, head_dim]`` for ``"NHD"``, one dtype for both: that of
///     a query, int8, or float8_e4m3fn (also as uint8; codes of NaN are not looked for and count as
///     480). ``num_kv_heads`` divides ``num_heads``; values may have another head_dim. With
///     `v_head_dim` given, `value_pages` is None.
/// block_table : array of int
///     ``[B, max_pages]``: the page of each ``page_size`` tokens of each sequence; entries that no
///     query needs are not looked at.
/// seq_lens : array of int
///     ``[B]``: keys of each sequence, the new tokens included.
/// cu_seqlens_q : array of int
///     ``[B + 1]``: sequence ``b`` has the query rows ``cu_seqlens_q[b]:cu_seqlens_q[b + 1]``.
/// v_head_dim : int, optional
///     Values are the first so many elements of each key, as in the latent cache of MLA; their scales
///     are the keys'. `scale` must be given then.
/// k_scale, v_scale : float or array of float, optional
///     What elements of int8 and float8_e4m3fn are multiplied by, needed for these: float32
///     ``[num_pages, num_kv_heads, page_size]`` (``"NHD"``: the last two swapped) as
///     :func:`write_pages` leaves them, or positive numbers per head, ``[num_kv_heads]``, or one.
/// layout : {"HND", "NHD"}
///     Order of the axes of a page.
/// scale : float, optional
///     Factor of the dot products; ``1 / sqrt(head_dim)`` if None.
/// causal : bool
///     Whether a query sees no key behind its own position.
/// window_left : int
///     Keys to the left of its own position that a query sees; -1 for all.
/// logits_soft_cap : float
///     ``cap * tanh(x / cap)`` on the scaled logits; 0 for none.
/// alibi_slopes : array of float, optional
///     ``[num_heads]``: bias ``-slope * (query position - key position)``.
/// sinks : array of float, optional
///     ``[num_heads]``: one more logit in each head's denominator.
/// return_lse : bool
///     Whether to return the logarithm of each row's sum of exponentials too.
/// return_error_bound : bool
///     Whether to return, for quantised pages, how far any element of each row can be from attention
///     over keys and values as :func:`write_pages` got them, with a scale per token: a rigorous bound,
///     which takes some tens of times as long as attention itself.
/// out : array, optional
///     ``[tokens, num_heads, v_head_dim]`` in the query's dtype: written and returned. It may not
///     share memory with the other arrays.
/// num_threads : int, optional
///     Threads to share the work, the caller's among them; as many as the process may use if None. The
///     result's bits don't depend on it.
///
/// Returns
/// -------
/// out : array
///     ``[tokens, num_heads, v_head_dim]`` in the query's dtype: ``out`` if given, a numpy array
///     for a numpy query, else a :class:`Tensor`.
/// lse : array
///     float32 ``[tokens, num_heads]``, natural logarithm; only with `return_lse`.
/// error_bound : array
///     float32 ``[tokens, num_heads]``, largest over the row's elements; what float32 and the output's
///     dtype round comes on top. 0 for a row that sees no key. Only with `return_error_bound`.
///
/// Raises
/// ------
/// LayoutError
///     For shapes, strides, dtypes or devices that don't fit; for an error bound of pages that are not
///     quantised, or have a scale per head, with which nobody knows what was cut off.
/// InvalidPageError
///     For a page that the table needs and the arrays don't have.
/// ValueError
///     For lengths or options out of range. Nothing is written then.
///
/// Notes
/// -----
/// The layout is that of Kwon et al., "Efficient Memory Management for Large Language Model Serving
/// with PagedAttention" (SOSP 2023); the softmax is computed in one pass as in Milakov and
/// Gimelshein, "Online normalizer calculation for softmax" (2018). The call runs without the GIL:
/// don't change the arrays meanwhile.
#[pyfunction]
#[pyo3(signature = (query, key_pages, value_pages, block_table, seq_lens, cu_seqlens_q, *,
    v_head_dim=None, k_scale=None, v_scale=None, layout="HND", scale=None, causal=true, window_left=Number(-1), logits_soft_cap=0.0, alibi_slopes=None, sinks=None,
    return_lse=false, return_error_bound=false, out=None, num_threads=None), text_signature = "(query, key_pages, value_pages, \
    block_table, seq_lens, cu_seqlens_q, *, v_head_dim=None, k_scale=None, v_scale=None, layout='HND', \
    scale=None, causal=True, window_left=-1, logits_soft_cap=0.0, alibi_slopes=None, sinks=None, return_lse=False, \
    return_error_bound=False, out=None, num_threads=None)")]
pub(super) fn paged_attention<'py>(
    py: Python<'py>,
    query: &Bound<'py, PyAny>,
    key_pages: &Bound<'py, PyAny>,
    value_pages: Option<&Bound<'py, PyAny>>,
    block_table: &Bound<'py, PyAny>,
    seq_lens: &Bound<'py, PyAny>,
    cu_seqlens_q: &Bound<'py, PyAny>,
    v_head_dim: Option<Number<usize>>,
    k_scale: Option<&Bound<'py, PyAny>>,
    v_scale: Option<&Bound<'py, PyAny>>,
    layout: &str,
    scale: Option<f32>,
    causal: bool,
    window_left: Number<i64>,
    logits_soft_cap: f32,
    alibi_slopes: Option<&Bound<'py, PyAny>>,
    sinks: Option<&Bound<'py, PyAny>>,
    return_lse: bool,
    return_error_bound: bool,
    out: Option<&Bound<'py, PyAny>>,
    num_threads: Option<Number<usize>>,
) -> PyResult<Bound<'py, PyAny>> {
    let order: PageOrder = layout.parse()?;
    let query = Array::new("query", query)?;
    let key_pages = Array::new("key_pages", key_pages)?;
    let value_pages = Array::optional("value_pages", value_pages)?;
    let table = Array::new("block_table", block_table)?;
    let &[_, max_pages] = table.shape() else {
        return Err(table.refuse("must have the 2 axes [B, max_pages]").into());
    };
    let table = table.integers()?;
    let seq_lens = Array::new("seq_lens", seq_lens)?.integer_vector()?;
    let cu_seqlens_q = Array::new("cu_seqlens_q", cu_seqlens_q)?.integer_vector()?;
    let tables =
        BatchTables { block_table: &table, max_pages, seq_lens: &seq_lens, cu_seqlens_q: &cu_seqlens_q };
    let slopes = Array::optional("alibi_slopes", alibi_slopes)?.map(|array| array.floats()).transpose()?;
    let sinks = Array::optional("sinks", sinks)?.map(|array| array.floats()).transpose()?;
    let options = AttentionOptions {
        scale,
        causal,
        window_left: window_left.0,
        logits_soft_cap,
        alibi_slopes: slopes.as_deref(),
        sinks: sinks.as_deref(),
        isa: None,
    };

    let rows = query.rows()?;
    let scales = Scaling::new(k_scale, v_scale, key_pages.kv_heads(order))?;
    let (k, v) = scales.pages(&key_pages, value_pages.as_ref(), order, false)?;
    let v = match (v, given(v_head_dim)) {
        (Some(v), None) => v,
        (None, Some(v_head_dim)) if scale.is_some() => k.first_elements(v_head_dim)?,
        (None, Some(_)) => {
            return Err(PyValueError::new_err("scale must be given where values are part of the keys"));
        }
        _ => return Err(PyValueError::new_err("give either value_pages or v_head_dim=")),
    };
    let [tokens, num_heads, _] = rows.shape();
    let shape = [tokens, num_heads, v.layout().head_dim];
    let pages = [&query, &key_pages].into_iter().chain(&value_pages);
    let inputs: Vec<_> = pages.chain(scales.arrays()).collect();
    let mut out = Output::rows(&query, shape, out, &inputs)?;
    let mut lse = row_buffer(return_lse, tokens, num_heads)?;
    let mut bound = row_buffer(return_error_bound, tokens, num_heads)?;
    let pool = threads::shared(given(num_threads))?;
    let mut out_rows = out.rows_mut()?;
    py.detach(|| {
        // First: where it is refused, nothing has been written.
        if let Some(bound) = &mut bound {
            attention::error_bound(rows, k, v, &tables, &options, bound, &pool)?;
        }
        attention::paged_attention(rows, k, v, &tables, &options, &mut out_rows, lse.as_deref_mut(), &pool)
    })?;
    out.into_objects(py, &query.kind(), [lse, bound], [tokens, num_heads])
}

/// `k_scale` and `v_scale`, as far as they were given.
struct Scaling<'py>([Option<Scale<'py>>; 2]);

impl<'py> Scaling<'py> {
    fn new(
        k_scale: Option<&Bound<'py, PyAny>>,
        v_scale: Option<&Bound<'py, PyAny>>,
        num_kv_heads: usize,
    ) -> PyResult<Self> {
        let mut scales = [Scale::optional("k_scale", k_scale)?, Scale::optional("v_scale", v_scale)?];
        scales.iter_mut().flatten().for_each(|scale| scale.spread(num_kv_heads));
        Ok(Self(scales))
    }

    /// Those that lie in arrays.
    fn arrays(&self) -> impl Iterator<Item = &Array<'py>> {
        self.0.iter().flatten().filter_map(Scale::array)
    }

    fn pages<'a>(
        &'a self,
        key_pages: &'a Array<'_>,
        value_pages: Option<&'a Array<'_>>,
        order: PageOrder,
        write: bool,
    ) -> Result<(PagesView<'a>, Option<PagesView<'a>>), Error> {
        let [key, value] = &self.0;
        if value_pages.is_none() && value.is_some() {
            return Err(Error::Layout("values in keys have their scales: leave v_scale out".to_owned()));
        }
        let values = value_pages.map(|pages| pages.scaled_pages(value.as_ref(), order, write));
        Ok((key_pages.scaled_pages(key.as_ref(), order, write)?, values.transpose()?))
    }
}

/// Room for one number per row, if they are asked for.
pub(super) fn row_buffer(wanted: bool, tokens: usize, num_heads: usize) -> PyResult<Option<Vec<f32>>> {
    if !wanted {
        return Ok(None);
    }
    let count = tokens
        .checked_mul(num_heads)
        .ok_or_else(|| Error::Layout("a number per row overflows memory".into()))?;
    let mut lse = reserve(count)?;
    lse.resize(count, 0.0);
    Ok(Some(lse))
}

/// Writes the keys and values of tokens into their slots, converted to the pages' dtype.
///
/// Parameters
/// ----------
/// key : array
///     ``[tokens, num_kv_heads, head_dim]``; numpy or DLPack in host memory, last axis contiguous.
/// value : array, optional
///     ``[tokens, num_kv_heads, v_head_dim]``; None, as `value_pages`, where values are part of keys.
/// key_pages, value_pages : array
///     As in :func:`paged_attention`; modified.
/// slot_mapping : array of int
///     ``[tokens]``: slot ``page * page_size + offset`` of each token; -1 skips it. Where a slot is
///     named twice the later token wins.
/// k_scale, v_scale : float or array of float, optional
///     As in :func:`paged_attention`. Those of pages are written: each token and head gets the one
///     that makes its largest number the dtype's, but none below 1.2e-38, and 0 if all are zero. With one per head, what is
///     larger than the dtype's largest number times its scale becomes that.
/// layout : {"HND", "NHD"}
///     Order of the axes of a page.
///
/// Raises
/// ------
/// LayoutError
///     For shapes, strides, dtypes or devices that don't fit, pages that are read-only or overlap.
/// InvalidPageError
///     For a slot outside the pages.
/// ValueError
///     For a slot below -1, or NaN and infinity on their way into int8 or float8_e4m3fn. Nothing is
///     written then.
#[pyfunction]
#[pyo3(signature = (key, value, key_pages, value_pages, slot_mapping, *, k_scale=None, v_scale=None,
    layout="HND"))]
pub(super) fn write_pages(
    py: Python<'_>,
    key: &Bound<'_, PyAny>,
    value: Option<&Bound<'_, PyAny>>,
    key_pages: &Bound<'_, PyAny>,
    value_pages: Option<&Bound<'_, PyAny>>,
    slot_mapping: &Bound<'_, PyAny>,
    k_scale: Option<&Bound<'_, PyAny>>,
    v_scale: Option<&Bound<'_, PyAny>>,
    layout: &str,
) -> PyResult<()> {
    let order: PageOrder = layout.parse()?;
    let (key, value) = (Array::new("key", key)?, Array::optional("value", value)?);
    let key_pages = Array::new("key_pages", key_pages)?;
    let value_pages = Array::optional("value_pages", value_pages)?;
    let slots = Array::new("slot_mapping", slot_mapping)?.integer_vector()?;
    let rows: Vec<_> = [&key].into_iter().chain(&value).collect();
    for pages in [&key_pages].into_iter().chain(&value_pages) {
        pages.check_apart(&rows)?;
    }
    let scales = Scaling::new(k_scale, v_scale, key_pages.kv_heads(order))?;
    for scale in scales.arrays() {
        scale.check_apart(&rows)?;
    }
    let (k, v) = (key.rows()?, value.as_ref().map(Array::rows).transpose()?);
    let pool = threads::shared(None)?;
    match (v, scales.pages(&key_pages, value_pages.as_ref(), order, true)?) {
        (Some(v), (key_pages, Some(value_pages))) => {
            check_written(&[(&key_pages, "key_pages"), (&value_pages, "value_pages")])?;
            py.detach(|| attention::write_pages(k, v, key_pages, value_pages, &slots, &pool))?;
        }
        (None, (key_pages, None)) => {
            check_written(&[(&key_pages, "key_pages")])?;
            py.detach(|| attention::write_rows(k, key_pages, &slots, &pool))?;
        }
        _ => return Err(PyValueError::new_err("value and value_pages must both be given, or be None")),
    }
    Ok(())
}

/// Joins attention results over two disjoint sets of keys into the result over their union.
///
/// Parameters
/// ----------
/// out_a, out_b : array
///     ``[tokens, num_heads, v_head_dim]``.
/// lse_a, lse_b : array of float
///     ``[tokens, num_heads]``, natural logarithm, as :func:`paged_attention` returns it. A side
///     with -inf saw no key and counts for nothing.
///
/// Returns
/// -------
/// out : array
///     Like `out_a`, whose dtype and kind it has.
/// lse : array
///     float32 ``[tokens, num_heads]``.
///
/// Raises
/// ------
/// LayoutError
///     For shapes, strides, dtypes or devices that don't fit.
///
/// Notes
/// -----
/// Sinks count in `lse`: give them to one side only.
#[pyfunction]
pub(super) fn merge_states<'py>(
    py: Python<'py>,
    out_a: &Bound<'py, PyAny>,
    lse_a: &Bound<'py, PyAny>,
    out_b: &Bound<'py, PyAny>,
    lse_b: &Bound<'py, PyAny>,
) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
    let (a, b) = (Array::new("out_a", out_a)?, Array::new("out_b", out_b)?);
    let (lse_a, lse_b) = (Array::new("lse_a", lse_a)?, Array::new("lse_b", lse_b)?);
    let (rows_a, rows_b) = (a.rows()?, b.rows()?);
    let shape @ [tokens, num_heads, _] = rows_a.shape();
    for lse in [&lse_a, &lse_b] {
        if lse.shape() != [tokens, num_heads] {
            return Err(lse.refuse(&format!("must have shape [{tokens}, {num_heads}]")).into());
        }
    }
    let (lse_a, lse_b) = (lse_a.floats()?, lse_b.floats()?);
    let mut out = Output::rows(&a, shape, None, &[])?;
    let mut lse = reserve(lse_a.len())?;
    lse.resize(lse_a.len(), 0.0);
    let mut rows = out.rows_mut()?;
    py.detach(|| attention::merge_states(rows_a, &lse_a, rows_b, &lse_b, &mut rows, &mut lse))?;
    Ok((out.into_object(py)?, a.kind().floats(py, lse, [tokens, num_heads])?))
}

/// The head slopes of `ALiBi`.
///
/// Parameters
/// ----------
/// num_heads : int
///     Query heads, also other than a power of two.
///
/// Returns
/// -------
/// numpy.ndarray
///     float32 ``[num_heads]``, for `alibi_slopes` of :func:`paged_attention`.
///
/// Notes
/// -----
/// Press, Smith and Lewis, "Train Short, Test Long" (ICLR 2022).
#[pyfunction]
pub(super) fn alibi_slopes(py: Python<'_>, num_heads: Number<u16>) -> Bound<'_, PyArray1<f32>> {
    PyArray1::from_vec(py, attention::alibi_slopes(num_heads.0.into()))
}

/// Bytes of keys and values that one token of context costs over all layers.
///
/// Parameters
/// ----------
/// num_layers, num_kv_heads, head_dim : int
///     The model's shape.
/// v_head_dim : int, optional
///     Elements of a value; `head_dim` if None, 0 where values are part of the keys.
/// dtype : str or dtype
///     ``"float32"``, ``"float16"``, ``"bfloat16"``, ``"int8"`` or ``"float8_e4m3fn"``; of the last
///     two, scales are counted as well: 4 bytes per layer and KV head for keys, and for values that are
///     stored; they begin at a multiple of 4 bytes.
///
/// Returns
/// -------
/// int
///     ``num_layers * num_kv_heads * (head_dim + v_head_dim) * bytes per element``, and scales.
///
/// Examples
/// --------
/// Llama-3-70B takes 320 KiB:
///
/// >>> paged_kv.kv_bytes_per_token(num_layers=80, num_kv_heads=8, head_dim=128) // 1024
/// 320
#[pyfunction]
#[pyo3(signature = (*, num_layers, num_kv_heads, head_dim, v_head_dim=None, dtype=None))]
pub(super) fn kv_bytes_per_token(
    num_layers: Number<usize>,
    num_kv_heads: Number<usize>,
    head_dim: Number<usize>,
    v_head_dim: Option<Number<usize>>,
    dtype: Option<&Bound<'_, PyAny>>,
) -> PyResult<usize> {
    let dtype = dtype.map_or(Ok(DType::BF16), convert::named)?;
    let v_head_dim = v_head_dim.unwrap_or(head_dim).0;
    Ok(layout::kv_bytes_per_token(num_layers.0, num_kv_heads.0, head_dim.0, v_head_dim, dtype)?)
}

/// Makes every later call of the process use the named instruction set.
///
/// Parameters
/// ----------
/// name : str
///     ``"scalar"``, ``"neon"``, ``"avx2"``, ``"avx512"`` or ``"avx512_bf16"``, which multiplies bfloat16 in
///     pairs. The environment variable ``PAGED_KV_ISA`` does the same at start.
///
/// Raises
/// ------
/// ValueError
///     For a name that is unknown or an instruction set that this CPU lacks.
#[pyfunction]
pub(super) fn set_isa(name: &str) -> PyResult<()> {
    Ok(kernels::set_isa(name)?)
}

/// The instruction set that the kernels use: chosen by :func:`set_isa`, else by ``PAGED_KV_ISA``,
/// else the fastest that this CPU has.
#[pyfunction]
pub(super) fn isa() -> PyResult<&'static str> {
    Ok(Isa::current()?.name())
}
