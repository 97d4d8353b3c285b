//! Rust errors become the exceptions of `paged_kv/errors.py`, numbers included.

use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyString};

use crate::error::Error;

impl From<Error> for PyErr {
    fn from(error: Error) -> Self {
        Python::attach(|py| exception(py, &error).unwrap_or_else(|failure| failure))
    }
}

/// Builds the exception; a failure to build it (no memory, a broken installation) is an error too.
fn exception(py: Python<'_>, error: &Error) -> PyResult<PyErr> {
    let numbers = PyDict::new(py);
    let class = match error {
        Error::OutOfPages { requested, free, evictable, deferred, index } => {
            numbers.set_item(intern!(py, "requested"), requested)?;
            numbers.set_item(intern!(py, "free"), free)?;
            numbers.set_item(intern!(py, "evictable"), evictable)?;
            numbers.set_item(intern!(py, "deferred"), deferred)?;
            numbers.set_item(intern!(py, "index"), index)?;
            intern!(py, "OutOfPagesError")
        }
        Error::NeverFits { requested, total, index } => {
            numbers.set_item(intern!(py, "requested"), requested)?;
            numbers.set_item(intern!(py, "total"), total)?;
            numbers.set_item(intern!(py, "index"), index)?;
            intern!(py, "NeverFitsError")
        }
        Error::SequenceBusy { sequence, index } => {
            numbers.set_item(intern!(py, "sequence"), sequence)?;
            numbers.set_item(intern!(py, "index"), index)?;
            intern!(py, "SequenceBusyError")
        }
        Error::SequenceFreed { indices } => {
            numbers.set_item(intern!(py, "indices"), indices)?;
            intern!(py, "SequenceFreedError")
        }
        Error::RefCount { page, ref_count, reason: _ } => {
            numbers.set_item(intern!(py, "page"), page)?;
            numbers.set_item(intern!(py, "ref_count"), ref_count)?;
            intern!(py, "RefCountError")
        }
        Error::InvalidPage { page, num_pages, reason: _ } => {
            numbers.set_item(intern!(py, "page"), page)?;
            numbers.set_item(intern!(py, "num_pages"), num_pages)?;
            intern!(py, "InvalidPageError")
        }
        Error::Memory { bytes, reason: _ } => {
            numbers.set_item(intern!(py, "bytes"), bytes)?;
            intern!(py, "CacheMemoryError")
        }
        Error::Layout(_) => intern!(py, "LayoutError"),
        Error::Corruption(_) => intern!(py, "CorruptionError"),
        Error::NotQuiescent(_) => intern!(py, "NotQuiescentError"),
        Error::Value(message) => return Ok(PyValueError::new_err(message.clone())),
    };
    let instance = classes(py)?.getattr(class)?.call((error.to_string(),), Some(&numbers))?;
    Ok(PyErr::from_value(instance))
}

/// The module that defines the exceptions: Python code, since they have two bases each.
fn classes(py: Python<'_>) -> PyResult<&Bound<'_, PyModule>> {
    static MODULE: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let module = MODULE.get_or_try_init(py, || {
        PyModule::import(py, PyString::new(py, "paged_kv.errors")).map(Bound::unbind)
    })?;
    Ok(module.bind(py))
}
