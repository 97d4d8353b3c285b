//! A cache on a device: which one, and the Python object that works on its memory.
//!
//! The cache keeps tables, counts and leases; `paged_kv.ascend.backend` holds the pages and launches
//! what is to be done with them. Every batch has a work object there, which holds the batch's lease
//! until the device has done what it was given.

use std::sync::{Arc, Mutex, PoisonError};

use numpy::PyUntypedArray;
use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple, PyType};

use super::arguments::BatchArgument;
use super::array::{Array, Memory, OutputKind};
use super::batch::Batch;
use super::build::{Rest, Sizes};
use super::convert::given;
use super::step::StepOptions;
use super::tensor::Tensor;
use crate::cache::KvCache;
use crate::dtype::DType;
use crate::error::Error;
use crate::layout::{CacheLayout, Which};
use crate::table::{Sequence, TableLease};

const NOT_QUANTISED: &str = "its kernels have no quantised keys and values; float16 and bfloat16 are taken";

/// DLPack's number for devices that have none.
const ASCEND: i32 = 12;

/// Where a cache's pages lie.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Host,
    /// The Ascend NPU of this number.
    Ascend(u32),
}

impl Place {
    /// `cpu`, `ascend` or `npu`, with the device's number behind a colon.
    pub(super) fn parse(device: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let Some(device) = device else { return Ok(Self::Host) };
        let text = device.str()?.to_string();
        let (kind, number) = text.split_once(':').unwrap_or((&text, "0"));
        match (kind, number.parse()) {
            ("cpu", _) if text == "cpu" => Ok(Self::Host),
            ("ascend" | "npu", Ok(index)) => Ok(Self::Ascend(index)),
            _ => Err(PyValueError::new_err(format!(
                "device {text} is not supported: cpu and ascend:N (or npu:N) are"
            ))),
        }
    }

    pub(super) fn name(self) -> String {
        match self {
            Self::Host => "cpu".to_owned(),
            Self::Ascend(index) => format!("ascend:{index}"),
        }
    }
}

/// What works on a cache's pages; a `paged_kv.ascend.backend.Backend`.
#[derive(Clone)]
pub(super) struct Device(Arc<Py<PyAny>>);

/// Sizes of device arrays to adopt, as `paged_kv.ascend.backend.measure` reads them.
#[derive(FromPyObject)]
struct Measured {
    num_pages: usize,
    page_size: usize,
    num_kv_heads: usize,
    head_dim: usize,
    dtype: String,
}

impl Device {
    /// A cache on the device of this number, and what works on it.
    pub(super) fn open(
        py: Python<'_>,
        index: u32,
        sizes: &Sizes<'_, '_>,
        rest: &Rest,
        storage: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<(KvCache, Self)> {
        if sizes.num_layers == 0 {
            return Err(PyValueError::new_err("num_layers=0 keeps tables only, which take no device"));
        }
        let name = Place::Ascend(index).name();
        if sizes.value_in_key {
            let message = format!("value_in_key on {name}: the kernels of the device don't have it");
            return Err(Error::Layout(message).into());
        }
        if sizes.head_scales.iter().any(Option::is_some) {
            let message = format!("k_scale and v_scale on {name}: {NOT_QUANTISED}");
            return Err(Error::Layout(message).into());
        }
        if rest.region.overcommit {
            return Err(PyValueError::new_err("overcommit: device memory can't be promised twice"));
        }
        let module = py.import("paged_kv.ascend.backend")?;
        // A list, since it is looked at twice.
        let storage = storage.map(|layers| layers.try_iter()?.collect::<PyResult<Vec<_>>>()).transpose()?;
        let layout = match &storage {
            None => super::build::layout(sizes)?,
            Some(storage) => {
                let measured = module.getattr("measure")?.call1((storage, sizes.order.name()))?;
                adopted(sizes, &measured.extract()?)?
            }
        };
        let cache = KvCache::on_device(&rest.options(sizes, layout))?;
        let layout = *cache.layout();
        let numbers = PyDict::new(py);
        numbers.set_item("index", index)?;
        numbers.set_item("num_layers", layout.num_layers)?;
        numbers.set_item("num_pages", layout.num_pages)?;
        numbers.set_item("page_size", layout.page_size)?;
        numbers.set_item("num_kv_heads", layout.num_kv_heads)?;
        numbers.set_item("head_dim", layout.head_dim)?;
        numbers.set_item("v_head_dim", layout.v_head_dim)?;
        numbers.set_item("dtype", layout.dtype.name())?;
        numbers.set_item("layout", layout.order.name())?;
        numbers.set_item("null_page", sizes.null_page)?;
        numbers.set_item("storage", storage)?;
        let backend = module.getattr("Backend")?.call((), Some(&numbers))?;
        Ok((cache, Self(Arc::new(backend.unbind()))))
    }

    pub(super) fn object<'py>(&self, py: Python<'py>) -> &Bound<'py, PyAny> {
        self.0.bind(py)
    }

    /// Ends the leases of work that the device has done; true if there was any. Never waits.
    pub(super) fn poll(&self, py: Python<'_>) -> PyResult<bool> {
        self.object(py).call_method0(intern!(py, "poll"))?.extract()
    }

    /// The work object of a batch that was just opened.
    pub(super) fn begin(
        &self,
        batch: &crate::cache::Batch,
        copies: Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        let py = copies.py();
        let lease = Bound::new(py, PageLease(Mutex::new(Some(batch.lease()?))))?;
        self.object(py).call_method1(intern!(py, "begin"), (lease, copies, stream)).map(Bound::unbind)
    }

    /// The work object of what `write` and `attend` were given.
    fn work<'py>(&self, cache: &KvCache, batch: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = batch.py();
        let argument = BatchArgument::try_from(batch)?;
        cache.check_step(argument.step())?;
        match &argument {
            BatchArgument::Batch(batch) => {
                let work = batch.get().work().expect("every batch of this cache has one");
                Ok(work.bind(py).clone())
            }
            BatchArgument::View(_) => self.object(py).call_method0(intern!(py, "follow")),
        }
    }

    pub(super) fn write(
        &self,
        cache: &KvCache,
        layer: usize,
        key: &Bound<'_, PyAny>,
        value: Option<&Bound<'_, PyAny>>,
        batch: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let work = self.work(cache, batch)?;
        work.call_method1(intern!(batch.py(), "write"), (layer, key, value, batch)).map(drop)
    }

    pub(super) fn attend<'py>(
        &self,
        cache: &KvCache,
        layer: usize,
        query: &Bound<'py, PyAny>,
        batch: &Bound<'py, PyAny>,
        options: &StepOptions<'_, 'py>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if options.return_error_bound {
            return Err(PyValueError::new_err("return_error_bound: the kernels of the device know no bound"));
        }
        let py = query.py();
        let work = self.work(cache, batch)?;
        let named = PyDict::new(py);
        named.set_item(intern!(py, "scale"), options.scale)?;
        named.set_item(intern!(py, "causal"), options.causal)?;
        let window_left = given(options.window_left).unwrap_or_else(|| cache.window_left());
        named.set_item(intern!(py, "window_left"), window_left)?;
        named.set_item(intern!(py, "logits_soft_cap"), options.logits_soft_cap)?;
        named.set_item(intern!(py, "alibi_slopes"), options.alibi_slopes)?;
        named.set_item(intern!(py, "sinks"), options.sinks)?;
        named.set_item(intern!(py, "return_lse"), options.return_lse)?;
        let tensor = if options.out.is_some() { None } else { tensor_like(query)? };
        match &tensor {
            Some(tensor) => named.set_item(intern!(py, "out"), tensor)?,
            None => named.set_item(intern!(py, "out"), options.out)?,
        }
        let result = work.call_method(intern!(py, "attend"), (layer, query, batch), Some(&named))?;
        if tensor.is_none() || !options.return_lse {
            return Ok(result);
        }
        let (out, lse): (Bound<'py, PyAny>, Bound<'py, PyAny>) = result.extract()?;
        let lse = Array::new("lse", &lse)?;
        let shape = lse.shape().try_into().expect("tokens and heads");
        let lse = OutputKind::Tensor.floats(py, lse.floats()?, shape)?;
        Ok(PyTuple::new(py, [out, lse])?.into_any())
    }

    /// The keys or values of one layer as an array on the device.
    pub(super) fn pages<'py>(
        &self,
        py: Python<'py>,
        layer: usize,
        which: Which,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.object(py).call_method1(intern!(py, "pages"), (layer, which as usize))
    }

    pub(super) fn physical_address(
        &self,
        py: Python<'_>,
        sequence: &Sequence,
        layer: usize,
        position: u64,
        which: Which,
        head: usize,
    ) -> PyResult<usize> {
        let (page, offset) = sequence.locate(position)?;
        let place = (layer, which as usize, page.0, offset, head);
        self.object(py).call_method1(intern!(py, "address"), place)?.extract()
    }

    /// Bytes of a sequence's computed pages that the device is asked to fetch into its cache.
    pub(super) fn prefetch(
        &self,
        py: Python<'_>,
        cache: &KvCache,
        sequence: &Sequence,
        max_bytes: usize,
    ) -> PyResult<usize> {
        let mut pages = sequence.block_table()?;
        pages.truncate(cache.tables().pages_for(sequence.num_computed_tokens()?) as usize);
        self.object(py).call_method1(intern!(py, "prefetch"), (pages, max_bytes))?.extract()
    }
}

/// What an answer to an array of the host that isn't numpy's goes into, as in host memory.
fn tensor_like<'py>(query: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
    let py = query.py();
    let device = intern!(py, "__dlpack_device__");
    if query.cast::<PyUntypedArray>().is_ok() || !query.hasattr(device)? {
        return Ok(None);
    }
    let (kind, _): (i32, i32) = query.call_method0(device)?.extract()?;
    if kind == ASCEND {
        return Ok(None);
    }
    let array = Array::new("query", query)?;
    let memory = Memory::zeros(array.dtype()?, array.shape())?;
    Ok(Some(Bound::new(py, Tensor::new(memory))?.into_any()))
}

/// Does `f`; where pages are short but some come back from work that has passed meanwhile, once more.
pub(super) fn patiently<R>(
    py: Python<'_>,
    device: Option<&Device>,
    f: impl Fn() -> PyResult<R>,
) -> PyResult<R> {
    match (f(), device) {
        (Err(error), Some(device)) if is_short(py, &error)? && device.poll(py)? => f(),
        (result, _) => result,
    }
}

fn is_short(py: Python<'_>, error: &PyErr) -> PyResult<bool> {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let class = CLASS.import(py, "paged_kv.errors", "OutOfPagesError")?;
    Ok(error.matches(py, class)?)
}

/// The layout of arrays that the cache adopts: sizes that were given must be theirs.
fn adopted(sizes: &Sizes<'_, '_>, measured: &Measured) -> PyResult<CacheLayout> {
    if sizes.memory.is_some() || sizes.page_bytes.is_some() {
        return Err(PyValueError::new_err(
            "storage= brings its own sizes: leave memory= and page_bytes= out",
        ));
    }
    let head_dim = sizes.head_dim.unwrap_or(measured.head_dim);
    let kept_back = usize::from(sizes.null_page);
    Ok(CacheLayout {
        num_layers: sizes.num_layers,
        num_pages: sizes.num_pages.unwrap_or_else(|| measured.num_pages.saturating_sub(kept_back)),
        page_size: sizes.page_size.unwrap_or(measured.page_size),
        num_kv_heads: sizes.num_kv_heads.unwrap_or(measured.num_kv_heads),
        head_dim,
        v_head_dim: sizes.v_head_dim.unwrap_or(head_dim),
        dtype: match sizes.dtype {
            Some(dtype) => super::convert::named(dtype)?,
            None => measured.dtype.parse::<DType>()?,
        },
        order: sizes.order,
        head_scales: false,
        value_in_key: false,
    })
}

/// What work on a device holds of the pages: none of them is handed out before :meth:`release`.
#[pyclass(frozen, module = "paged_kv._core", name = "PageLease")]
pub(crate) struct PageLease(Mutex<Option<TableLease>>);

#[pymethods]
impl PageLease {
    /// Gives the pages back; a second call does nothing.
    fn release(&self, py: Python<'_>) {
        let lease = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(lease));
    }
}

/// Tells a work object that its batch has ended. What fails here fails again, with an error, when
/// the device is used next.
pub(super) fn park(batch: &Batch, py: Python<'_>) {
    if let Some(work) = batch.work()
        && let Err(error) = work.call_method0(py, intern!(py, "park"))
    {
        error.write_unraisable(py, None);
    }
}
