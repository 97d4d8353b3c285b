//! Open batches with their age and call site, for those who look for a lease that never ends.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use super::batch::Batch;

/// Nothing, until it is switched on; then a Python object (`paged_kv/leases.py`), since age, call
/// site and warning are the interpreter's to tell.
pub(super) struct LeaseTracker(PyOnceLock<Py<PyAny>>);

/// A batch that was open a moment ago.
#[derive(FromPyObject)]
pub(super) struct OpenLease<'py> {
    pub(super) batch: Bound<'py, Batch>,
    /// Seconds since it was opened.
    pub(super) age: f64,
    /// Where: file, line and function.
    pub(super) site: String,
}

impl LeaseTracker {
    pub(super) fn new() -> Self {
        Self(PyOnceLock::new())
    }

    /// Switches on, or sets another limit.
    pub(super) fn switch_on(&self, py: Python<'_>, warn_after: Option<f64>) -> PyResult<()> {
        let tracker = self.0.get_or_try_init(py, || {
            py.import("paged_kv.leases")?.getattr("LeaseTracker")?.call0().map(Bound::unbind)
        })?;
        tracker.setattr(py, intern!(py, "warn_after"), warn_after)
    }

    /// Notes a batch that was just opened. One load where tracking is off.
    #[inline]
    pub(super) fn note(&self, batch: &Bound<'_, Batch>) -> PyResult<()> {
        match self.0.get(batch.py()) {
            None => Ok(()),
            Some(tracker) => {
                tracker.call_method1(batch.py(), intern!(batch.py(), "note"), (batch,)).map(drop)
            }
        }
    }

    /// The open batches, oldest first; `None` where tracking is off.
    pub(super) fn open<'py>(&self, py: Python<'py>) -> PyResult<Option<Vec<OpenLease<'py>>>> {
        let Some(tracker) = self.0.get(py) else { return Ok(None) };
        let open = tracker.bind(py).call_method0(intern!(py, "open"))?;
        open.extract().map(Some)
    }
}
