//! What `paged-kv bench` measures with: the pool beside its peers, attention beside the machine's
//! limits, and cases written in Python.

#![expect(clippy::doc_markdown, reason = "docstrings are numpydoc, where names of arguments stand bare")]

use std::hint::black_box;
use std::sync::{Mutex, PoisonError};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::bench::measure::{Case, Summary, interleaved};
use crate::bench::{Record, attention, pool};
use crate::dtype::DType;
use crate::error::Error;
use crate::kernels::Isa;
use crate::sync::{AtomicU64, CachePadded};

/// Bytes that memory moves together.
const CACHE_LINE: usize = 64;

/// Measures taking pages and giving them back: this pool, its peers, and the machine.
///
/// Parameters
/// ----------
/// repetitions : int
///     Repetitions of each case, at least 1; all cases take turns.
///
/// Returns
/// -------
/// list of dict
///     One per case and implementation, with ``bench``, ``case``, ``impl``, ``threads``, ``value``
///     (median), ``low`` and ``high`` (quartiles), ``unit``, ``yardstick``, ``limit`` (the
///     yardstick's median), ``ratio`` (``value / limit``), ``kept`` and ``discarded`` (repetitions
///     in which a thread waited for a core).
#[pyfunction]
pub(super) fn bench_pool(py: Python<'_>, repetitions: usize) -> PyResult<Vec<Bound<'_, PyDict>>> {
    check(repetitions)?;
    let records = py.detach(|| pool::pool(repetitions))?;
    dicts(py, records)
}

/// Measures attention beside the machine's limits.
///
/// Parameters
/// ----------
/// repetitions : int
///     Repetitions of each case, at least 1; all that share a limit take turns.
/// cases : sequence of str, optional
///     Of ``d1`` to ``d6`` (decode), ``c1`` (decode with a shared prefix) and ``p1``, ``p2`` (prefill);
///     all if None.
/// dtypes : sequence of str, optional
///     Element types of keys, values and queries; all if None.
/// page_sizes : sequence of int, optional
///     16 and 128 if None.
/// threads : sequence of int, optional
///     1 and as many as the process may use if None.
/// isas : sequence of str, optional
///     Instruction sets that each case is measured with, named as :func:`set_isa` takes them; the
///     process's if None.
/// rotated_bytes : int
///     Bytes of keys and values that decode rotates through, so that no cache holds them.
///
/// Returns
/// -------
/// list of dict
///     As of :func:`bench_pool`; GB/s of keys and values read beside reading the same pages, or
///     GFLOP/s beside multiply-adds in registers, or products of bfloat16 in pairs where those are what
///     the kernel does; the yardstick says which. Here the larger is the better. A batch with a shared
///     prefix stands beside the same one without, each sequence's bytes counted in both. Of several
///     instruction sets, ``case`` ends with the name, and a row of the second and later ones stands
///     beside that of the first: a ratio of 0.5 says that it takes twice as long.
#[pyfunction]
#[pyo3(signature = (repetitions, *, cases=None, dtypes=None, page_sizes=None, threads=None,
    isas=None, rotated_bytes=1 << 30), text_signature = "(repetitions, *, cases=None, dtypes=None, page_sizes=None, \
    threads=None, isas=None, rotated_bytes=1073741824)")]
pub(super) fn bench_attention(
    py: Python<'_>,
    repetitions: usize,
    cases: Option<Vec<String>>,
    dtypes: Option<Vec<String>>,
    page_sizes: Option<Vec<usize>>,
    threads: Option<Vec<usize>>,
    isas: Option<Vec<String>>,
    rotated_bytes: usize,
) -> PyResult<Vec<Bound<'_, PyDict>>> {
    check(repetitions)?;
    let all = attention::Plan::default();
    let dtypes =
        dtypes.map(|names| names.iter().map(|name| name.parse()).collect::<Result<Vec<DType>, Error>>());
    let isas = isas.unwrap_or_default();
    let isas = isas.iter().map(|name| name.parse()).collect::<Result<Vec<Isa>, Error>>()?;
    let plan = attention::Plan {
        cases: cases.unwrap_or(all.cases),
        dtypes: dtypes.transpose()?.unwrap_or(all.dtypes),
        page_sizes: page_sizes.unwrap_or(all.page_sizes),
        threads: threads.unwrap_or(all.threads),
        isas,
        rotated: rotated_bytes,
        repetitions,
    };
    dicts(py, py.detach(|| attention::attention(&plan, |_| {}))?)
}

/// The shapes that :func:`bench_attention` measures.
///
/// Returns
/// -------
/// list of dict
///     One per case, with ``name``, ``batch`` (sequences), ``len`` (tokens of each, new ones included),
///     ``queries`` (new tokens of each), ``shared`` (tokens that all begin with), ``num_heads``,
///     ``num_kv_heads`` and ``head_dim``.
#[pyfunction]
pub(super) fn attention_shapes(py: Python<'_>) -> PyResult<Vec<Bound<'_, PyDict>>> {
    let dict = |shape: attention::Shape| {
        let dict = PyDict::new(py);
        dict.set_item("name", shape.name)?;
        dict.set_item("batch", shape.batch)?;
        dict.set_item("len", shape.len)?;
        dict.set_item("queries", shape.queries)?;
        dict.set_item("shared", shape.shared)?;
        dict.set_item("num_heads", shape.num_heads)?;
        dict.set_item("num_kv_heads", shape.num_kv_heads)?;
        dict.set_item("head_dim", shape.head_dim)?;
        Ok(dict)
    };
    attention::SHAPES.into_iter().map(dict).collect()
}

fn dicts(py: Python<'_>, records: Vec<Record>) -> PyResult<Vec<Bound<'_, PyDict>>> {
    let dict = |record: Record| {
        let dict = PyDict::new(py);
        dict.set_item("bench", record.bench)?;
        dict.set_item("case", record.case)?;
        dict.set_item("impl", record.implementation)?;
        dict.set_item("threads", record.threads)?;
        set_figures(&dict, record.value, record.quartiles, record.kept, record.discarded)?;
        dict.set_item("unit", record.unit)?;
        dict.set_item("yardstick", record.yardstick)?;
        dict.set_item("limit", record.limit)?;
        dict.set_item("ratio", record.ratio)?;
        Ok(dict)
    };
    records.into_iter().map(dict).collect()
}

/// Measures Python callables in turn, on this thread.
///
/// Parameters
/// ----------
/// cases : sequence of (operations, prepare, work)
///     ``work(operations)`` is timed; ``prepare()``, if it isn't None, comes before each repetition.
///     Before both, ``work`` warms up with an eighth of the operations, and one more; between them,
///     with none, so that calling it is warm whatever was prepared.
/// repetitions : int
///     Repetitions of each case, at least 1.
///
/// Returns
/// -------
/// list of dict
///     One per case, in nanoseconds per operation: ``value`` (median), ``low`` and ``high``
///     (quartiles) over the ``kept`` repetitions; ``discarded`` ones, in which the thread waited for
///     a core, were repeated, up to three times over. If all were, the figures are over all and
///     ``kept`` is 0.
#[pyfunction]
pub(super) fn bench_cases(
    py: Python<'_>,
    cases: Vec<(u64, Option<Py<PyAny>>, Py<PyAny>)>,
    repetitions: usize,
) -> PyResult<Vec<Bound<'_, PyDict>>> {
    check(repetitions)?;
    // The first exception ends it: nothing is called after that.
    let raised: Mutex<Option<PyErr>> = Mutex::new(None);
    let call = |function: &dyn Fn(Python<'_>) -> PyResult<Py<PyAny>>| {
        let mut raised = raised.lock().unwrap_or_else(PoisonError::into_inner);
        if raised.is_none() {
            *raised = Python::attach(function).err();
        }
    };
    let case = |(operations, prepare, work): (u64, Option<Py<PyAny>>, Py<PyAny>)| Case {
        threads: 1,
        operations,
        prepare: prepare
            .map(|prepare| -> Box<dyn Fn() + Sync> { Box::new(move || call(&|py| prepare.call0(py))) }),
        work: Box::new(move |_, operations| call(&|py| work.call1(py, (operations,)))),
    };
    let summaries = interleaved(&cases.into_iter().map(case).collect::<Vec<_>>(), repetitions);
    if let Some(error) = raised.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(error);
    }
    let dict = |summary: Summary| {
        let dict = PyDict::new(py);
        set_figures(&dict, summary.nanos, summary.quartiles, summary.kept, summary.discarded)?;
        Ok(dict)
    };
    summaries.into_iter().map(dict).collect()
}

fn set_figures(
    dict: &Bound<'_, PyDict>,
    value: f64,
    [low, high]: [f64; 2],
    kept: usize,
    discarded: usize,
) -> PyResult<()> {
    dict.set_item("value", value)?;
    dict.set_item("low", low)?;
    dict.set_item("high", high)?;
    dict.set_item("kept", kept)?;
    dict.set_item("discarded", discarded)
}

/// Does `n` uncontended pairs of compare-exchanges, the yardstick of what is counted in operations.
#[pyfunction]
pub(super) fn compare_exchange_pairs(n: u64) {
    pool::pairs(&CachePadded::<AtomicU64>::default(), n);
}

/// Reads a byte of each cache line of `lines`, `n` times: what finding them costs at least.
#[pyfunction]
pub(super) fn read_lines(lines: &[u8], n: u64) {
    for _ in 0..n {
        black_box(lines.iter().step_by(CACHE_LINE).fold(0, |sum, byte| sum ^ byte));
    }
}

fn check(repetitions: usize) -> PyResult<()> {
    if repetitions == 0 {
        Err(PyValueError::new_err("repetitions is 0; at least 1 is needed"))
    } else {
        Ok(())
    }
}
