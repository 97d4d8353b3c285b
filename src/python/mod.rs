//! The Python face: one file per class, each method converts, detaches, calls and converts.

mod array;
mod convert;
mod error;
mod functions;
mod tensor;
mod threads;

use pyo3::prelude::*;

/// The extension module behind the package `paged_kv`.
#[pymodule(gil_used = false)]
mod _core {
    #[pymodule_export]
    use super::functions::{
        alibi_slopes, isa, kv_bytes_per_token, merge_states, paged_attention, set_isa, write_pages,
    };
    #[pymodule_export]
    use super::tensor::Tensor;
    use super::{Bound, PyModule, PyModuleMethods, PyResult};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
