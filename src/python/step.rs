//! A step of many sequences: picking them, opening a batch, writing and attending.

use std::sync::Arc;

use pyo3::prelude::*;

use super::arguments::{BatchArgument, Counts, Sequences};
use super::array::{Array, Output, integers};
use super::batch::Batch;
use super::batch_view::pairs;
use super::convert::{Number, given};
use super::device::{self, Device};
use super::functions::row_buffer;
use super::sequence::Sequence;
use crate::attention::AttentionOptions;
use crate::cache::KvCache;
use crate::ids::TokenId;
use crate::layout::Which;
use crate::table::{NewTokens, Pick};

/// New tokens up to which a batch's bookkeeping is short.
const SHORT: u64 = 1 << 14;

/// See `KvCache.batch`.
pub(super) fn open(
    py: Python<'_>,
    cache: &Arc<KvCache>,
    seqs: &Bound<'_, PyAny>,
    num_new_tokens: Option<&Bound<'_, PyAny>>,
    token_ids: Option<&Bound<'_, PyAny>>,
    num_queries: Option<&Bound<'_, PyAny>>,
    device: Option<&Device>,
    stream: Option<&Bound<'_, PyAny>>,
) -> PyResult<Batch> {
    let seqs = Sequences::new(seqs)?;
    let new_tokens = num_new_tokens.map(|n| Counts::parse("num_new_tokens", n)).transpose()?;
    let queries = num_queries.map(|n| Counts::parse("num_queries", n)).transpose()?;
    let token_ids = token_ids.map(|ids| integers::<TokenId>("token_ids", ids)).transpose()?;
    let inner = seqs.inner()?;
    let open = || {
        cache.batch(
            &inner,
            new_tokens.as_ref().map_or(NewTokens::Reserved, Counts::borrow),
            token_ids.as_deref(),
            queries.as_ref().map(Counts::borrow),
        )
    };
    // Giving up the GIL costs more than a decode step's bookkeeping, and getting it back may take
    // milliseconds; copying shared pages, or filling a long prompt's table, is worth it.
    let tokens = new_tokens.as_ref().map_or(0, |n| n.total(inner.len()));
    let is_short = cache.storage().is_none() && tokens <= SHORT;
    let open = || Ok(if is_short { open()? } else { py.detach(open)? });
    let batch = device::patiently(py, device, open)?;
    let Some(device) = device else { return Ok(Batch::new(batch, Arc::clone(cache), None)) };
    let copies = batch.copies();
    let work = pairs(py, &copies).and_then(|pairs| device.begin(&batch, pairs, stream));
    let work = work.inspect_err(|_| cache.tables().forget_copies(copies.len()))?;
    Ok(Batch::new(batch, Arc::clone(cache), Some(work)))
}

/// See `KvCache.reorder`.
pub(super) fn reorder<'py>(
    py: Python<'py>,
    cache: &Arc<KvCache>,
    device: Option<&Device>,
    seqs: &Bound<'py, PyAny>,
    indices: &Bound<'py, PyAny>,
) -> PyResult<Vec<Bound<'py, Sequence>>> {
    let seqs = Sequences::new(seqs)?;
    let indices: Vec<usize> =
        integers::<u64>("indices", indices)?.into_iter().map(|index| index as usize).collect();
    let object = |pick| match pick {
        Pick::Moved(index) => seqs.object(index),
        Pick::Forked(fork) => Bound::new(py, Sequence::new(fork, Arc::clone(cache), device.cloned())),
    };
    cache.reorder(&seqs.inner()?, &indices)?.into_iter().map(object).collect()
}

/// The options of `KvCache.attend`, as they came.
pub(super) struct StepOptions<'a, 'py> {
    pub(super) scale: Option<f32>,
    pub(super) causal: bool,
    pub(super) window_left: Option<Number<i64>>,
    pub(super) logits_soft_cap: f32,
    pub(super) alibi_slopes: Option<&'a Bound<'py, PyAny>>,
    pub(super) sinks: Option<&'a Bound<'py, PyAny>>,
    pub(super) return_lse: bool,
    pub(super) return_error_bound: bool,
    pub(super) out: Option<&'a Bound<'py, PyAny>>,
}

pub(super) fn write(
    py: Python<'_>,
    cache: &KvCache,
    layer: usize,
    key: &Bound<'_, PyAny>,
    value: Option<&Bound<'_, PyAny>>,
    batch: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let batch = BatchArgument::try_from(batch)?;
    let (key, value) = (Array::new("key", key)?, Array::optional("value", value)?);
    for which in [Which::Key, Which::Value] {
        let pages = cache.pages(layer, which, false)?;
        key.check_outside(&pages)?;
        value.as_ref().map_or(Ok(()), |value| value.check_outside(&pages))?;
    }
    let value = value.as_ref().map(Array::rows).transpose()?;
    let (key, step) = (key.rows()?, batch.step());
    Ok(py.detach(|| cache.write(layer, key, value, step))?)
}

pub(super) fn attend<'py>(
    py: Python<'py>,
    cache: &KvCache,
    layer: usize,
    query: &Bound<'py, PyAny>,
    batch: &Bound<'py, PyAny>,
    options: &StepOptions<'_, 'py>,
) -> PyResult<Bound<'py, PyAny>> {
    let batch = BatchArgument::try_from(batch)?;
    let query = Array::new("query", query)?;
    let slopes =
        Array::optional("alibi_slopes", options.alibi_slopes)?.map(|array| array.floats()).transpose()?;
    let sinks = Array::optional("sinks", options.sinks)?.map(|array| array.floats()).transpose()?;
    let attention = AttentionOptions {
        scale: options.scale,
        causal: options.causal,
        window_left: given(options.window_left).unwrap_or_else(|| cache.window_left()),
        logits_soft_cap: options.logits_soft_cap,
        alibi_slopes: slopes.as_deref(),
        sinks: sinks.as_deref(),
        isa: None,
    };
    let rows = query.rows()?;
    let [tokens, num_heads, _] = rows.shape();
    let shape = [tokens, num_heads, cache.layout().v_head_dim];
    let mut output = Output::rows(&query, shape, options.out, &[&query])?;
    if options.out.is_some() {
        for which in [Which::Key, Which::Value] {
            output.check_outside(&cache.pages(layer, which, false)?)?;
        }
    }
    let mut lse = row_buffer(options.return_lse, tokens, num_heads)?;
    let mut bound = row_buffer(options.return_error_bound, tokens, num_heads)?;
    let mut out_rows = output.rows_mut()?;
    let step = batch.step();
    py.detach(|| {
        // First: where it is refused, nothing has been written.
        if let Some(bound) = &mut bound {
            cache.error_bound(layer, rows, step, &attention, bound)?;
        }
        cache.attend(layer, rows, step, &attention, &mut out_rows, lse.as_deref_mut())
    })?;
    output.into_objects(py, &query.kind(), [lse, bound], [tokens, num_heads])
}
