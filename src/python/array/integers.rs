//! Integers and small vectors of floats: copied in, so that they can't change after the check.

#![expect(clippy::cast_ptr_alignment, reason = "every array's alignment was checked when it came in")]

use std::ptr;

use super::super::convert::in_range;
use super::{Array, Element, reserve};
use crate::dtype::DType;
use crate::error::{Error, Result};
use half::{bf16, f16};
use pyo3::conversion::FromPyObjectOwned;
use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

/// An integer type that addresses something.
pub(in crate::python) trait Integer: Copy + TryFrom<i128> {
    const SIGNED: bool;
    const LEAST: i128;
    const MOST: i128;
}

macro_rules! integer {
    ($($type:ty: $signed:literal),*) => {$(
        impl Integer for $type {
            const SIGNED: bool = $signed;
            const LEAST: i128 = <$type>::MIN as i128;
            const MOST: i128 = <$type>::MAX as i128;
        }
    )*};
}
integer!(i32: true, i64: true, u16: false, u32: false, u64: false, usize: false);

impl Array<'_> {
    /// All elements in row-major order, from any integer dtype, refusing values that don't fit.
    pub(in crate::python) fn integers<T: Integer>(&self) -> Result<Vec<T>> {
        let Element::Int { signed, bytes } = self.element else {
            return Err(self.refuse("must hold integers"));
        };
        if signed == T::SIGNED && bytes == size_of::<T>() && self.is_c_contiguous() {
            let count = self.shape().iter().product();
            let mut values = reserve::<T>(count)?;
            // SAFETY: the array holds `count` such integers in a row (extent and alignment were
            // checked), the vector has room for them, and they don't overlap.
            unsafe {
                ptr::copy_nonoverlapping(self.base.cast::<T>(), values.as_mut_ptr(), count);
                values.set_len(count);
            }
            return Ok(values);
        }
        self.map(|index, at| {
            // SAFETY: `map` passes addresses of elements, aligned and alive, of the type that
            // `signed` and `bytes` name.
            let value = unsafe {
                match (signed, bytes) {
                    (true, 1) => i128::from(at.cast::<i8>().read()),
                    (true, 2) => i128::from(at.cast::<i16>().read()),
                    (true, 4) => i128::from(at.cast::<i32>().read()),
                    (true, 8) => i128::from(at.cast::<i64>().read()),
                    (false, 1) => i128::from(at.read()),
                    (false, 2) => i128::from(at.cast::<u16>().read()),
                    (false, 4) => i128::from(at.cast::<u32>().read()),
                    (false, 8) => i128::from(at.cast::<u64>().read()),
                    _ => return Err(self.refuse("must hold integers of 1 to 8 bytes")),
                }
            };
            T::try_from(value).map_err(|_| {
                Error::Value(format!(
                    "{}: element {index} is {value}, not an integer from {} to {}",
                    self.name,
                    T::LEAST,
                    T::MOST
                ))
            })
        })
    }

    /// [`integers`](Self::integers) of an array of one axis.
    pub(in crate::python) fn integer_vector<T: Integer>(&self) -> Result<Vec<T>> {
        if self.axes == 1 { self.integers() } else { Err(self.refuse("must have 1 axis")) }
    }

    /// All elements in row-major order as float32, from any float dtype.
    pub(in crate::python) fn floats(&self) -> Result<Vec<f32>> {
        let (Element::Float(_) | Element::Float64) = self.element else {
            return Err(self.refuse("must hold floats"));
        };
        self.map(|_, at| {
            // SAFETY: `map` passes addresses of elements, aligned and alive, of the type matched.
            Ok(unsafe {
                match self.element {
                    Element::Float(DType::F16) => at.cast::<f16>().read().to_f32(),
                    Element::Float(DType::BF16) => at.cast::<bf16>().read().to_f32(),
                    Element::Float64 => at.cast::<f64>().read() as f32,
                    _ => at.cast::<f32>().read(),
                }
            })
        })
    }

    fn is_c_contiguous(&self) -> bool {
        let mut expected = 1;
        self.shape().iter().zip(self.strides()).rev().all(|(&length, &stride)| {
            let fits = length == 1 || stride == expected;
            expected *= length as isize;
            fits
        }) || self.is_empty()
    }

    /// Applies `read` to the address of each element, in row-major order.
    fn map<T>(&self, read: impl Fn(usize, *const u8) -> Result<T>) -> Result<Vec<T>> {
        let count = self.shape().iter().product();
        let size = self.element.size() as isize;
        let mut values = reserve(count)?;
        let mut position = [0; super::MAX_AXES];
        for index in 0..count {
            let offset: isize =
                position.iter().zip(self.strides()).map(|(&at, &stride)| at as isize * stride).sum();
            values.push(read(index, self.base.wrapping_offset(offset * size))?);
            for axis in (0..self.axes).rev() {
                position[axis] += 1;
                if position[axis] < self.shape[axis] {
                    break;
                }
                position[axis] = 0;
            }
        }
        Ok(values)
    }
}

/// Integers given as an array of one axis or as a Python sequence.
pub(in crate::python) fn integers<'py, T>(name: &'static str, object: &Bound<'py, PyAny>) -> PyResult<Vec<T>>
where
    T: Integer + FromPyObjectOwned<'py>,
{
    let plain = object.is_instance_of::<PyList>() || object.is_instance_of::<PyTuple>();
    if !plain && let Some(array) = Array::import(name, object)? {
        return Ok(array.integer_vector()?);
    }
    object.extract().map_err(|error: PyErr| {
        let py = object.py();
        if error.is_instance_of::<PyOverflowError>(py) {
            out_of_range::<T>(name, object).unwrap_or(error)
        } else {
            named(py, name, "an array or a sequence of integers", error)
        }
    })
}

/// The error that names the first of a sequence's integers that doesn't fit.
fn out_of_range<'py, T>(name: &str, object: &Bound<'py, PyAny>) -> Option<PyErr>
where
    T: Integer + FromPyObjectOwned<'py>,
{
    object.try_iter().ok()?.enumerate().find_map(|(index, item)| {
        let item = item.ok()?;
        let error = in_range::<T>(&item, item.extract::<T>().err()?.into());
        Some(PyValueError::new_err(format!("{name}: element {index}: {}", error.value(item.py()))))
    })
}

/// Says in a `TypeError` which argument is meant; other errors stay what they are.
pub(in crate::python) fn named(py: Python<'_>, name: &str, want: &str, error: PyErr) -> PyErr {
    if error.is_instance_of::<PyTypeError>(py) {
        PyTypeError::new_err(format!("{name} must be {want}: {}", error.value(py)))
    } else {
        error
    }
}
