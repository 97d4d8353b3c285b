//! `paged_kv.Tensor`: memory of this library, for others to use without copying.

#![expect(clippy::doc_markdown, reason = "docstrings are numpydoc, where names of arguments stand bare")]

use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyTuple};

use super::array::{Memory, export_capsule, export_numpy};

/// An array in host memory that belongs to this library.
///
/// Hand it to ``torch.from_dlpack``, ``jax.dlpack.from_dlpack`` or ``numpy.asarray``: none of them
/// copies. The memory stays alive as long as the tensor or any array made from it does, even after
/// the cache that it came from is gone.
///
/// In numpy, ``bfloat16`` is ``ml_dtypes.bfloat16`` where the package ``ml_dtypes`` is installed,
/// and ``uint16`` (the same bits) where it is not.
#[pyclass(frozen, module = "paged_kv", name = "Tensor")]
pub(crate) struct Tensor(Memory);

impl Tensor {
    pub(super) fn new(memory: Memory) -> Self {
        Self(memory)
    }

    pub(super) fn memory(&self) -> &Memory {
        &self.0
    }
}

#[pymethods]
impl Tensor {
    /// Length of each axis.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.shape())
    }

    /// Elements (not bytes) from one entry to the next along each axis, as in DLPack and torch.
    #[getter]
    fn strides<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.strides())
    }

    /// Name of the element type: ``"float32"``, ``"float16"`` or ``"bfloat16"``.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.0.dtype().name()
    }

    /// Address of the first element.
    #[getter]
    fn data_ptr(&self) -> usize {
        self.0.base().addr()
    }

    /// Bytes of all elements, gaps between them not counted.
    #[getter]
    fn nbytes(&self) -> usize {
        self.0.num_bytes()
    }

    /// Whether arrays made from this tensor refuse to be written.
    #[getter]
    fn readonly(&self) -> bool {
        !self.0.writable()
    }

    fn __len__(&self) -> PyResult<usize> {
        self.0
            .shape()
            .first()
            .copied()
            .ok_or_else(|| PyTypeError::new_err("a tensor without axes has no length"))
    }

    fn __repr__(&self) -> String {
        let readonly = if self.0.writable() { "" } else { ", readonly" };
        format!("paged_kv.Tensor(shape={:?}, dtype={}{readonly})", self.0.shape(), self.0.dtype())
    }

    /// ``(1, 0)``: host memory.
    #[expect(clippy::unused_self, reason = "the protocol asks the object")]
    fn __dlpack_device__(&self) -> (i32, i32) {
        (1, 0)
    }

    /// Hands the memory over as a DLPack capsule.
    ///
    /// Parameters
    /// ----------
    /// stream : int, optional
    ///     Must be ``None`` or -1: there is nothing to wait for in host memory.
    /// max_version : tuple of int, optional
    ///     Highest DLPack version that the consumer reads; without it the capsule is unversioned.
    /// dl_device : tuple of int, optional
    ///     Must be ``(1, 0)``.
    /// copy : bool, optional
    ///     ``True`` copies; else the memory is shared.
    ///
    /// Raises
    /// ------
    /// BufferError
    ///     For another device, or if a read-only tensor is asked for in the unversioned format,
    ///     which can't say so.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<i64>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if let Some(stream) = stream.filter(|&stream| stream != -1) {
            return Err(PyBufferError::new_err(format!("host memory has no stream {stream}")));
        }
        if let Some((kind, id)) = dl_device.filter(|&device| device != (1, 0)) {
            return Err(PyBufferError::new_err(format!("can't move to DLPack device ({kind}, {id})")));
        }
        let versioned = max_version.is_some_and(|(major, _)| major >= 1);
        let copied = copy == Some(true);
        if !versioned && !copied && !self.0.writable() {
            return Err(PyBufferError::new_err(
                "a read-only tensor needs DLPack 1.0 (max_version=(1, 0)) or copy=True",
            ));
        }
        let memory = if copied { py.detach(|| self.0.copy())? } else { self.0.share() };
        export_capsule(py, memory, versioned, copied)
    }

    /// A numpy array over the same memory; a copy only if asked for, or to change the dtype.
    #[pyo3(signature = (dtype=None, copy=None))]
    fn __array__<'py>(
        slf: &Bound<'py, Self>,
        dtype: Option<&Bound<'py, PyAny>>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        let array = export_numpy(slf.as_any(), &slf.get().0)?;
        let own = array.getattr(intern!(py, "dtype"))?;
        let convert = match dtype {
            Some(dtype) => !own.eq(dtype)?,
            None => false,
        };
        if convert && copy == Some(false) {
            return Err(PyValueError::new_err(format!(
                "a {own} tensor becomes another dtype only by copying"
            )));
        }
        if !convert && copy != Some(true) {
            return Ok(array);
        }
        let options = [(intern!(py, "copy"), true)].into_py_dict(py)?;
        array.call_method(intern!(py, "astype"), (dtype.unwrap_or(&own),), Some(&options))
    }
}
