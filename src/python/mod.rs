//! The Python face: one file per class (of `KvCache` three: `inspect` and `pages` besides); each method
//! converts, detaches, calls and converts.

mod arguments;
mod array;
mod batch;
mod batch_view;
#[cfg(feature = "bench")]
mod bench;
mod build;
mod cache;
mod convert;
mod device;
mod error;
mod fill;
mod functions;
mod inspect;
mod leases;
mod pages;
mod pool;
mod sequence;
mod stats;
mod step;
mod tensor;
mod threads;

use pyo3::prelude::*;

/// The extension module behind the package `paged_kv`.
#[pymodule(gil_used = false)]
mod _core {
    #[pymodule_export]
    use super::batch::Batch;
    #[pymodule_export]
    use super::batch_view::BatchView;
    #[cfg(feature = "bench")]
    #[pymodule_export]
    use super::bench::{
        attention_shapes, bench_attention, bench_cases, bench_pool, compare_exchange_pairs, read_lines,
    };
    #[pymodule_export]
    use super::cache::KvCache;
    #[pymodule_export]
    use super::device::PageLease;
    #[pymodule_export]
    use super::functions::{
        alibi_slopes, isa, kv_bytes_per_token, merge_states, paged_attention, set_isa, write_pages,
    };
    #[pymodule_export]
    use super::pool::PagePool;
    #[pymodule_export]
    use super::sequence::Sequence;
    #[pymodule_export]
    use super::tensor::Tensor;
    use super::{Bound, PyModule, PyModuleMethods, PyResult};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
