//! numpy arrays: read straight from the array object, a few nanoseconds each.

use std::ffi::{c_int, c_void};
use std::ptr;

use numpy::npyffi::{NPY_ARRAY_WRITEABLE, NPY_TYPES, PY_ARRAY_API, npy_intp};
use numpy::{PyArrayDescr, PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::prelude::*;
use pyo3::pyclass::boolean_struct::True;
use pyo3::sync::PyOnceLock;
use pyo3::{PyClass, PyTypeInfo};

use super::{Array, Element, Memory, OutputKind, Owner};
use crate::dtype::DType;
use crate::error::{Error, Result};

/// The array behind `object`, or `None` if numpy doesn't know it.
pub(super) fn import<'py>(name: &'static str, object: &Bound<'py, PyAny>) -> PyResult<Option<Array<'py>>> {
    let Ok(array) = object.cast::<PyUntypedArray>() else { return Ok(None) };
    let dtype = array.dtype();
    let element = element(&dtype)?;
    let size = element.size() as isize;
    if let Some(stride) = array.strides().iter().find(|&stride| size == 0 || stride % size != 0) {
        return Err(Error::Layout(format!(
            "{name} has a stride of {stride} bytes, which is no multiple of its {size}-byte elements"
        ))
        .into());
    }
    // SAFETY: `array` is a live numpy array, and we are attached.
    let (base, flags) = unsafe {
        let object = array.as_array_ptr();
        ((*object).fields.data, (*object).fields.flags)
    };
    let strides = array.strides().iter().map(|stride| stride / size);
    let axes = array.shape().iter().copied().zip(strides);
    let writable = flags & NPY_ARRAY_WRITEABLE != 0;
    let owner = Owner::Object(object.clone());
    Ok(Some(Array::build(name, base.cast(), element, axes, writable, OutputKind::Numpy(dtype), owner)?))
}

/// What the elements are, by numpy's number of the type.
fn element(dtype: &Bound<'_, PyArrayDescr>) -> PyResult<Element> {
    let bytes = dtype.itemsize();
    let number = dtype.num();
    let is = |known: NPY_TYPES| number == known as c_int;
    let element = if is(NPY_TYPES::NPY_FLOAT) {
        Element::Float(DType::F32)
    } else if is(NPY_TYPES::NPY_HALF) {
        Element::Float(DType::F16)
    } else if is_bfloat16(dtype)? {
        Element::Float(DType::BF16)
    } else if is(NPY_TYPES::NPY_DOUBLE) {
        Element::Float64
    } else {
        match dtype.kind() {
            kind @ (b'i' | b'u') => Element::Int { signed: kind == b'i', bytes },
            _ => match dtype.to_string() {
                // That of `ml_dtypes`.
                name if name == DType::F8E4M3.name() => Element::Float(DType::F8E4M3),
                name => Element::Other { name, bytes },
            },
        }
    };
    // False for the other byte order; None where order has no meaning (bytes, and void such as bfloat16).
    if bytes > 1 && dtype.is_native_byteorder() == Some(false) {
        return Ok(Element::Other { name: format!("{dtype} of the other byte order"), bytes });
    }
    Ok(element)
}

/// Whether this is the bfloat16 of `ml_dtypes`, whose number is known once it has been seen.
fn is_bfloat16(dtype: &Bound<'_, PyArrayDescr>) -> PyResult<bool> {
    static NUMBER: PyOnceLock<c_int> = PyOnceLock::new();
    let number = dtype.num();
    if number < NPY_TYPES::NPY_USERDEF as c_int {
        return Ok(false);
    }
    if let Some(&known) = NUMBER.get(dtype.py()) {
        return Ok(number == known);
    }
    let found = dtype.itemsize() == 2 && dtype.typeobj().name()? == "bfloat16";
    if found {
        let _ = NUMBER.set(dtype.py(), number);
    }
    Ok(found)
}

/// A new C-contiguous array whose contents are not defined yet.
pub(super) fn empty<'py>(dtype: &Bound<'py, PyArrayDescr>, shape: &[usize]) -> PyResult<Bound<'py, PyAny>> {
    let py = dtype.py();
    let mut dims: Vec<npy_intp> = shape.iter().map(|&n| n as npy_intp).collect();
    // SAFETY: the call steals one reference to the dtype, which `into_dtype_ptr` gives away, and
    // returns a new reference to an array or null with an exception set.
    unsafe {
        let array = PY_ARRAY_API.PyArray_Empty(
            py,
            dims.len() as c_int,
            dims.as_mut_ptr(),
            dtype.clone().into_dtype_ptr(),
            0,
        );
        Bound::from_owned_ptr_or_err(py, array)
    }
}

/// numpy's dtype for `dtype`: that of `ml_dtypes` for bfloat16 where it is installed, else uint16;
/// the bits of `float8_e4m3fn` are uint8.
pub(super) fn descr(py: Python<'_>, dtype: DType) -> PyResult<Bound<'_, PyArrayDescr>> {
    Ok(match dtype {
        DType::F32 => numpy::dtype::<f32>(py),
        DType::F16 => PyArrayDescr::new(py, "float16")?,
        DType::BF16 => match PyModule::import(py, "ml_dtypes") {
            Ok(module) => PyArrayDescr::new(py, module.getattr("bfloat16")?)?,
            Err(_) => numpy::dtype::<u16>(py),
        },
        DType::I8 => numpy::dtype::<i8>(py),
        DType::F8E4M3 => numpy::dtype::<u8>(py),
    })
}

/// An array over `memory` that keeps `owner`, which holds the memory, alive.
pub(in crate::python) fn export<'py>(
    owner: &Bound<'py, PyAny>,
    memory: &Memory,
) -> PyResult<Bound<'py, PyAny>> {
    let py = owner.py();
    let size = memory.dtype().size() as npy_intp;
    let mut strides: Vec<npy_intp> = memory.strides().iter().map(|&n| n as npy_intp * size).collect();
    let flags = if memory.writable() { NPY_ARRAY_WRITEABLE } else { 0 };
    let dtype = descr(py, memory.dtype())?;
    // SAFETY: `owner` holds `memory`, which describes memory that it keeps alive.
    unsafe { over(owner, dtype, memory.base(), memory.shape(), Some(&mut strides), flags) }
}

/// An array over memory that its base object keeps alive.
///
/// # Safety
/// - `base` is valid for the elements that `shape` and `strides` (bytes; `None`: dense) span, and
///   for writes if `flags` say so, as long as `owner` lives.
unsafe fn over<'py>(
    owner: &Bound<'py, PyAny>,
    dtype: Bound<'py, PyArrayDescr>,
    base: *mut u8,
    shape: &[usize],
    strides: Option<&mut Vec<npy_intp>>,
    flags: c_int,
) -> PyResult<Bound<'py, PyAny>> {
    let py = owner.py();
    let mut dims: Vec<npy_intp> = shape.iter().map(|&n| n as npy_intp).collect();
    // SAFETY: both calls steal the reference that is given away for them; the rest is the
    // caller's promise.
    unsafe {
        let array = PY_ARRAY_API.PyArray_NewFromDescr(
            py,
            PyUntypedArray::type_object_raw(py),
            dtype.into_dtype_ptr(),
            dims.len() as c_int,
            dims.as_mut_ptr(),
            strides.map_or(ptr::null_mut(), Vec::as_mut_ptr),
            base.cast::<c_void>(),
            flags,
            ptr::null_mut(),
        );
        let array = Bound::from_owned_ptr_or_err(py, array)?;
        if PY_ARRAY_API.PyArray_SetBaseObject(py, array.as_ptr().cast(), owner.clone().into_ptr()) < 0 {
            return Err(PyErr::fetch(py));
        }
        Ok(array)
    }
}

/// A read-only array over integers that live in a Python object of this library, without a copy.
///
/// `find` works for every lifetime, so what it returns belongs to the object (or to nobody). The
/// object is frozen: while it lives, and the array's base keeps it alive, its memory stays put.
pub(in crate::python) fn lend<'py, C, T>(
    owner: &Bound<'py, C>,
    shape: impl FnOnce(usize) -> Vec<usize>,
    find: impl for<'a> FnOnce(&'a C) -> Result<&'a [T]>,
) -> PyResult<Bound<'py, PyAny>>
where
    C: PyClass<Frozen = True> + Sync,
    T: numpy::Element,
{
    let slice = find(owner.get())?;
    let shape = shape(slice.len());
    assert_eq!(shape.iter().product::<usize>(), slice.len(), "the shape is that of the integers");
    let (dtype, base) = (numpy::dtype::<T>(owner.py()), slice.as_ptr().cast_mut().cast());
    // SAFETY: the slice lies densely, and lives as long as `owner`, as said above.
    unsafe { over(owner.as_any(), dtype, base, &shape, None, 0) }
}
