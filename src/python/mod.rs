//! The Python face: one file per class, each method converts, detaches, calls and converts.

use pyo3::prelude::*;

/// The extension module behind the package `paged_kv`.
#[pymodule(gil_used = false)]
mod _core {
    use super::{Bound, PyModule, PyModuleMethods, PyResult};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
