//! DLPack, both ways: the structures of its ABI, capsules, and the C exchange API of a type.
//!
//! Source: `dlpack.h` of DLPack 1.3 and the Python specification that belongs to it
//! (<https://dmlc.github.io/dlpack/latest/python_spec.html>). Only host memory is taken and given.

use std::ffi::{CStr, c_int, c_void};
use std::ptr;
use std::slice;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyCapsule};

use super::{Array, Element, Memory, OutputKind, Owner};
use crate::dtype::DType;
use crate::error::{Error, Result};

const CPU: i32 = 1;
/// Host memory that a device can read too.
const PINNED: [i32; 2] = [3, 11];
/// Type code of `float8_e4m3fn`.
const F8_E4M3FN: u8 = 10;
const VERSION: Version = Version { major: 1, minor: 1 };
const READ_ONLY: u64 = 1;
const IS_COPIED: u64 = 2;
const LEGACY: &CStr = c"dltensor";
const LEGACY_USED: &CStr = c"used_dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";
const VERSIONED_USED: &CStr = c"used_dltensor_versioned";

#[derive(Clone, Copy)]
#[repr(C)]
struct Version {
    major: u32,
    minor: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Device {
    kind: i32,
    id: i32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device: Device,
    ndim: i32,
    dtype: DataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// Before DLPack 1.0.
#[repr(C)]
pub(super) struct Legacy {
    tensor: DlTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

/// Since DLPack 1.0.
#[repr(C)]
pub(super) struct Versioned {
    version: Version,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
    flags: u64,
    tensor: DlTensor,
}

/// The head of `DLPackExchangeAPI`; what follows is not used here.
#[repr(C)]
struct ExchangeApi {
    version: Version,
    previous: *const Self,
    allocate: *const c_void,
    from_object: Option<unsafe extern "C" fn(*mut c_void, *mut *mut Versioned) -> c_int>,
}

/// A tensor taken over from its producer: given back when dropped.
pub(super) enum Managed {
    Legacy(*mut Legacy),
    Versioned(*mut Versioned),
}

impl Managed {
    fn tensor(&self) -> &DlTensor {
        // SAFETY: the producer keeps the structure valid until its deleter is called, in `drop`.
        unsafe {
            match *self {
                Self::Legacy(managed) => &(*managed).tensor,
                Self::Versioned(managed) => &(*managed).tensor,
            }
        }
    }

    /// The flags; the old structure can't say, so it counts as writable, as everywhere.
    fn flags(&self) -> u64 {
        match self {
            Self::Legacy(_) => 0,
            // SAFETY: as in `tensor`.
            Self::Versioned(managed) => unsafe { (**managed).flags },
        }
    }
}

impl Drop for Managed {
    fn drop(&mut self) {
        // SAFETY: whoever takes a managed tensor over calls its deleter once, if it has one, and
        // doesn't touch it afterwards. Arrays live on threads that are attached.
        unsafe {
            match *self {
                Self::Legacy(managed) => (*managed).deleter.map(|delete| delete(managed)),
                Self::Versioned(managed) => (*managed).deleter.map(|delete| delete(managed)),
            };
        }
    }
}

/// The tensor behind `object`, or `None` if it doesn't speak DLPack.
pub(super) fn import<'py>(name: &'static str, object: &Bound<'py, PyAny>) -> PyResult<Option<Array<'py>>> {
    let Some(managed) = exchange(object)?.map_or_else(|| negotiate(name, object), |found| Ok(Some(found)))?
    else {
        return Ok(None);
    };
    let tensor = managed.tensor();
    check_device(name, tensor.device.kind, tensor.device.id)?;
    let element = element(tensor.dtype);
    let axes = usize::try_from(tensor.ndim).unwrap_or(0);
    let shape = lengths(tensor.shape, axes);
    let dense: Vec<i64>;
    let strides = if tensor.strides.is_null() && axes > 0 {
        dense = row_major(shape);
        &dense
    } else {
        lengths(tensor.strides, axes)
    };
    let pairs = shape
        .iter()
        .zip(strides)
        .map(|(&length, &stride)| Some((usize::try_from(length).ok()?, isize::try_from(stride).ok()?)))
        .collect::<Option<Vec<_>>>()
        .ok_or_else(|| Error::Layout(format!("{name} has the impossible shape {shape:?}")))?;
    let base = tensor.data.cast::<u8>().wrapping_add(tensor.byte_offset as usize);
    let writable = managed.flags() & (READ_ONLY | IS_COPIED) == 0;
    let owner = Owner::Capsule(managed);
    Ok(Some(Array::build(name, base, element, pairs.into_iter(), writable, OutputKind::Tensor, owner)?))
}

/// Through the C functions that the type publishes: no Python code runs.
fn exchange(object: &Bound<'_, PyAny>) -> PyResult<Option<Managed>> {
    let py = object.py();
    let Some(capsule) = object.get_type().getattr_opt(intern!(py, "__dlpack_c_exchange_api__"))? else {
        return Ok(None);
    };
    let Ok(capsule) = capsule.cast_into::<PyCapsule>() else { return Ok(None) };
    let Ok(api) = capsule.pointer_checked(Some(c"dlpack_exchange_api")) else { return Ok(None) };
    // SAFETY: a capsule of this name holds an exchange API, alive as long as its type. Newer major
    // versions link back to older ones; the functions used here are those of version 1.
    let from_object = unsafe {
        let mut api = api.as_ptr().cast::<ExchangeApi>().cast_const();
        while !api.is_null() && (*api).version.major > VERSION.major {
            api = (*api).previous;
        }
        if api.is_null() { None } else { (*api).from_object }
    };
    let Some(from_object) = from_object else { return Ok(None) };
    let mut managed = ptr::null_mut();
    // SAFETY: we are attached, `object` is of the type that published the function, and `managed`
    // receives a tensor that is ours, or an exception is set.
    let failed = unsafe { from_object(object.as_ptr().cast(), &raw mut managed) } != 0;
    if failed {
        Err(PyErr::fetch(py))
    } else {
        Ok((!managed.is_null()).then_some(Managed::Versioned(managed)))
    }
}

/// Through `__dlpack_device__` and `__dlpack__`.
fn negotiate(name: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Option<Managed>> {
    let py = object.py();
    let Some(method) = object.getattr_opt(intern!(py, "__dlpack__"))? else { return Ok(None) };
    // Asked first: some producers synchronise or copy when they are asked for a capsule.
    if let Some(device) = object.getattr_opt(intern!(py, "__dlpack_device__"))? {
        let (kind, id): (i32, i32) = device.call0()?.extract()?;
        check_device(name, kind, id)?;
    }
    let version = [(intern!(py, "max_version"), (VERSION.major, VERSION.minor))].into_py_dict(py)?;
    let capsule = match method.call((), Some(&version)) {
        // Producers from before DLPack 1.0 don't know the argument.
        Err(error) if error.is_instance_of::<pyo3::exceptions::PyTypeError>(py) => method.call0()?,
        result => result?,
    };
    let capsule = capsule.cast_into::<PyCapsule>()?;
    for (fresh, used) in [(VERSIONED, VERSIONED_USED), (LEGACY, LEGACY_USED)] {
        let Ok(pointer) = capsule.pointer_checked(Some(fresh)) else { continue };
        // SAFETY: the capsule is valid, and renaming it to a static name is how the taker tells
        // its destructor that the content is no longer its own.
        if unsafe { ffi::PyCapsule_SetName(capsule.as_ptr(), used.as_ptr()) } != 0 {
            return Err(PyErr::fetch(py));
        }
        if fresh == LEGACY {
            return Ok(Some(Managed::Legacy(pointer.as_ptr().cast())));
        }
        let managed = Managed::Versioned(pointer.as_ptr().cast());
        // SAFETY: everything up to the flags is stable over all versions.
        let version = unsafe { (*pointer.as_ptr().cast::<Versioned>()).version };
        if version.major > VERSION.major {
            let (major, minor) = (version.major, version.minor);
            return Err(PyBufferError::new_err(format!(
                "{name} comes as DLPack {major}.{minor}; this library reads up to major version 1"
            )));
        }
        return Ok(Some(managed));
    }
    Err(PyBufferError::new_err(format!("{name}: __dlpack__ returned a capsule that is no unused tensor")))
}

/// A capsule for `__dlpack__`: what it holds keeps `memory` alive.
pub(in crate::python) fn export(
    py: Python<'_>,
    memory: Memory,
    versioned: bool,
    copied: bool,
) -> PyResult<Bound<'_, PyAny>> {
    let flags = if memory.writable() { 0 } else { READ_ONLY } | if copied { IS_COPIED } else { 0 };
    let context = Box::into_raw(Box::new(Exported::new(memory)));
    // SAFETY: the box stays where it is until the deleter takes it back, and with it the shape and
    // strides that the tensor points to.
    let tensor = unsafe { (*context).tensor() };
    let context = context.cast();
    // SAFETY: the capsule gets a managed tensor and the destructor that frees it if nobody took
    // it; a failure to make the capsule frees it at once.
    unsafe {
        if versioned {
            let deleter = Some(delete_versioned as unsafe extern "C" fn(_));
            let managed =
                Box::into_raw(Box::new(Versioned { version: VERSION, context, deleter, flags, tensor }));
            let capsule = ffi::PyCapsule_New(managed.cast(), VERSIONED.as_ptr(), Some(drop_versioned));
            if capsule.is_null() {
                delete_versioned(managed);
            }
            Bound::from_owned_ptr_or_err(py, capsule)
        } else {
            let deleter = Some(delete_legacy as unsafe extern "C" fn(_));
            let managed = Box::into_raw(Box::new(Legacy { tensor, context, deleter }));
            let capsule = ffi::PyCapsule_New(managed.cast(), LEGACY.as_ptr(), Some(drop_legacy));
            if capsule.is_null() {
                delete_legacy(managed);
            }
            Bound::from_owned_ptr_or_err(py, capsule)
        }
    }
}

/// What an exported tensor points to.
struct Exported {
    shape: Vec<i64>,
    strides: Vec<i64>,
    memory: Memory,
}

impl Exported {
    fn new(memory: Memory) -> Self {
        Self {
            shape: memory.shape().iter().map(|&n| n as i64).collect(),
            strides: memory.strides().iter().map(|&n| n as i64).collect(),
            memory,
        }
    }

    fn tensor(&mut self) -> DlTensor {
        let (code, bits) = match self.memory.dtype() {
            DType::F32 => (2, 32),
            DType::F16 => (2, 16),
            DType::BF16 => (4, 16),
            DType::I8 => (0, 8),
            DType::F8E4M3 => (F8_E4M3FN, 8),
        };
        DlTensor {
            data: self.memory.base().cast(),
            device: Device { kind: CPU, id: 0 },
            ndim: self.shape.len() as i32,
            dtype: DataType { code, bits, lanes: 1 },
            shape: self.shape.as_mut_ptr(),
            strides: self.strides.as_mut_ptr(),
            byte_offset: 0,
        }
    }
}

/// # Safety
/// - `managed` was made by [`export`] and is not used afterwards.
unsafe extern "C" fn delete_versioned(managed: *mut Versioned) {
    // SAFETY: both boxes were given away by `export`, and this is called once.
    unsafe {
        let managed = Box::from_raw(managed);
        drop(Box::from_raw(managed.context.cast::<Exported>()));
    }
}

/// # Safety
/// - As for [`delete_versioned`].
unsafe extern "C" fn delete_legacy(managed: *mut Legacy) {
    // SAFETY: as in `delete_versioned`.
    unsafe {
        let managed = Box::from_raw(managed);
        drop(Box::from_raw(managed.context.cast::<Exported>()));
    }
}

/// # Safety
/// - `capsule` is a live capsule made by [`export`] with `versioned`.
unsafe extern "C" fn drop_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: a capsule that still has its first name was taken by nobody, so its content is ours.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, VERSIONED.as_ptr()) == 1 {
            delete_versioned(ffi::PyCapsule_GetPointer(capsule, VERSIONED.as_ptr()).cast());
        }
    }
}

/// # Safety
/// - `capsule` is a live capsule made by [`export`] without `versioned`.
unsafe extern "C" fn drop_legacy(capsule: *mut ffi::PyObject) {
    // SAFETY: as in `drop_versioned`.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, LEGACY.as_ptr()) == 1 {
            delete_legacy(ffi::PyCapsule_GetPointer(capsule, LEGACY.as_ptr()).cast());
        }
    }
}

fn check_device(name: &str, kind: i32, id: i32) -> Result<()> {
    if kind == CPU || PINNED.contains(&kind) {
        return Ok(());
    }
    let device = match kind {
        2 | 13 => "cuda",
        8 => "metal",
        10 => "rocm",
        12 => "an extension device (npu)",
        14 => "oneapi",
        _ => "a device of DLPack type",
    };
    Err(Error::Layout(format!(
        "{name} lies on {device} {id} (DLPack device type {kind}); only host memory can be used here"
    )))
}

fn element(dtype: DataType) -> Element {
    let bytes = usize::from(dtype.bits.div_ceil(8)) * usize::from(dtype.lanes);
    match (dtype.code, dtype.bits, dtype.lanes) {
        (2, 32, 1) => Element::Float(DType::F32),
        (2, 16, 1) => Element::Float(DType::F16),
        (4, 16, 1) => Element::Float(DType::BF16),
        (F8_E4M3FN, 8, 1) => Element::Float(DType::F8E4M3),
        (2, 64, 1) => Element::Float64,
        (code @ (0 | 1), 8 | 16 | 32 | 64, 1) => Element::Int { signed: code == 0, bytes },
        (code, bits, lanes) => {
            let kind = match code {
                0 => "int",
                1 => "uint",
                2 => "float",
                4 => "bfloat",
                5 => "complex",
                6 => "bool",
                7..=14 => "float8 variant ",
                _ => "DLPack type code ",
            };
            let lanes = if lanes == 1 { String::new() } else { format!("x{lanes}") };
            let code = if code > 6 { format!("{code}, ") } else { String::new() };
            Element::Other { name: format!("{kind}{code}{bits}{lanes}"), bytes }
        }
    }
}

/// A producer's array of `count` 64-bit numbers.
fn lengths<'a>(numbers: *const i64, count: usize) -> &'a [i64] {
    if count == 0 || numbers.is_null() {
        return &[];
    }
    // SAFETY: `shape` and `strides` of a tensor hold `ndim` numbers, and live until its deleter is
    // called; `import` doesn't use them beyond that.
    unsafe { slice::from_raw_parts(numbers, count) }
}

fn row_major(shape: &[i64]) -> Vec<i64> {
    let mut strides = vec![1_i64; shape.len()];
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = strides[axis].saturating_mul(shape[axis]);
    }
    strides
}
